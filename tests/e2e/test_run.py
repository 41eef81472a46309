"""A run from its scenario to its exit code, and every way in which it can be cut short, on a real Locust."""

import re
import resource
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from harness.base.errors import INTERRUPTED
from harness.base.reason import Reason
from harness.numbers.summarize import read_summary
from harness.records.manifest import Run, read_run
from harness.records.records import read_marks
from tests.support.command import (
    ENDED,
    Going,
    called,
    going,
    harness,
    only_run,
    reasons_but_slowness,
    server,
    until,
    write,
)
from tests.support.faults import fault
from tests.support.load_runs import records_of
from tests.support.simulated import spawned
from tests.support.wording import Wording

VALID = r"\b(VALID: |PASSED: .*)all conditions of a trustworthy measurement held"
INVALID = r"\bINVALID: do not trust the rows concerned; the run is not compared with other runs\n"

# Longer than any test: whoever cuts it short does so in the middle.
LONG = {"burst": {"user": "batch", "batch_size": 20, "requests": 100_000, "output_tokens": 150}}
PARTS = {
    "compose", "inputs.json", "jobs", "logs", "metrics.jsonl", "processes.jsonl", "report.html", "requests.jsonl",
    "run.json", "scenario.yaml", "summary.json", "telemetry.jsonl",
}  # fmt: skip


def assert_complete(run: Path) -> None:
    """The run directory holds all that docs/run-directory.md says, and no line of its records is damaged."""
    assert {path.name for path in run.iterdir()} == PARTS
    records_of(run)


def in_mid_run(command: Going, runs: Path, minimum: int = 20) -> Path:
    """Wait until records come."""
    until(lambda: bool(list(runs.glob("*/requests.jsonl"))))
    (path,) = runs.glob("*/requests.jsonl")
    until(lambda: path.read_bytes().count(b"\n") >= minimum)
    assert command.process.poll() is None
    return path.parent


def ran(path: Path, code: int, *options: str) -> Path:
    """Run a scenario to its end, which has that exit code and no error; return its run directory."""
    done = harness("run", path.name, *options, "--runs", "runs", cwd=path.parent)
    assert (done.code, done.err) == (code, ""), done
    return only_run(path.parent / "runs")


def test_a_small_run(tmp_path: Path) -> None:
    path = write(tmp_path, repeats=2, checks=["error_rate == 0"])
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    run = only_run(tmp_path / "runs")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Run {run.name}: ") and f"runs/{run.name}" in done.out.splitlines()[0]
    assert "SIMULATED ENGINE" in done.out
    assert re.search(VALID, done.out)
    assert done.out.endswith(f"runs/{run.name}/report.html\n")
    assert_complete(run)

    manifest = read_run(run)
    assert (manifest.status, manifest.reasons) == ("valid", [])
    assert manifest.order == [cell.id for cell in manifest.cells] == ["r1-one-burst", "r2-one-burst"]
    assert [cell.problems for cell in manifest.cells] == [[], []]
    assert manifest.simulated
    assert manifest.scenario_name == "small"
    assert manifest.ended_wall_s is not None
    ended_s = manifest.cells[0].ended_wall_s or 0.0
    assert manifest.started_wall_s < manifest.cells[0].started_wall_s < ended_s
    assert ended_s < manifest.cells[1].started_wall_s < manifest.ended_wall_s

    sent = records_of(run)
    assert Counter((request.cell, request.phase) for request in sent) == {
        (f"r{repeat}-one-burst", phase): number
        for repeat in (1, 2)
        for phase, number in (("warmup", 2), ("measured", 6))
    }
    assert {request.error for request in sent} == {None}
    measured = [request for request in sent if request.phase == "measured"]
    assert {(request.output_tokens, len(request.chunks_s)) for request in measured} == {(5, 5)}
    assert sorted(request.index for request in measured) == sorted([*range(6)] * 2)
    summary = read_summary(run)
    assert (summary.valid, summary.reasons, [check.status for check in summary.checks]) == (True, [], ["passed"])
    assert path.read_text() == (run / "scenario.yaml").read_text()
    assert "tiny" in (run / "compose" / "one.yaml").read_text()


def test_on_a_running_server(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"mine": {"template": "vllm-rocm"}})
    with spawned("--preset", "instant", "--model", "other") as there:
        run = ran(path, 0, "--url", f"{there.url}/v1/", "--model", "other", "--repeats", "2")
        assert there.process.poll() is None, "a server that is not ours is left alone"
    manifest = read_run(run)
    assert manifest.status == "valid"
    assert [cell.id for cell in manifest.cells] == ["r1-running-burst", "r2-running-burst"]
    served = manifest.cells[0].served_by
    assert (served.url, served.model, served.template, served.simulated) == (there.url, "other", None, True)
    assert "SIMULATED ENGINE" in ENDED[-1].out


def test_two_load_processes_and_chat_users_on_one_server_start_per_repeat(tmp_path: Path) -> None:
    batch = {"user": "batch", "batch_size": 2, "requests": 40, "output_tokens": 60, "users": 2, "processes": 2}
    chat = {
        "user": "chat", "users": 3, "duration_s": 1, "turns": 2, "think_s": [0.01, 0.05], "output": "natural",
        "output_tokens": 10, "ramp_s": 0.5,
    }  # fmt: skip
    path = write(tmp_path, loads={"burst": batch, "people": chat}, restart=False, repeats=2)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    run = only_run(tmp_path / "runs")
    assert done.code in (0, 3) and reasons_but_slowness(run) == [], done
    measured = [request for request in records_of(run) if request.phase == "measured" and request.cell.startswith("r1")]
    sent = [request for request in measured if request.load == "burst"]
    assert sorted(request.index for request in sent) == list(range(40))
    marks = [mark for mark in read_marks(run / "processes.jsonl") if mark.cell == "r1-one-burst"]
    assert Counter(mark.event for mark in marks) == {"start": 2, "end": 2}
    assert {request.process for request in sent} == {mark.process for mark in marks}
    assert sum(mark.recorded or 0 for mark in marks) == 42
    sent = [request for request in measured if request.load == "people"]
    assert len(sent) > 20
    assert {(request.user_class, request.error) for request in sent} == {("ChatUser", None)}
    assert ({request.user for request in sent}, {request.turn for request in sent}) == ({0, 1, 2}, {1, 2})
    last, first = max(request.sent_s for request in sent), min(request.sent_s for request in sent)
    assert 0.5 < last - first <= 1.0

    cells = read_run(run).cells
    assert [cell.id for cell in cells] == ["r1-one-burst", "r1-one-people", "r2-one-people", "r2-one-burst"]
    urls = [cell.served_by.url for cell in cells]
    assert urls[0] == urls[1] and urls[2] == urls[3] and urls[0] != urls[2]
    logs = sorted(path.name for path in (run / "logs").glob("*.server.log"))
    assert logs == ["r1-one-burst.server.log", "r2-one-people.server.log"]


RAISES = """
from locust import task
from harness.load.user import LLMUser
class Mine(LLMUser):
    @task
    def work(self):
        import later
        later.ask(self)
"""
LATER = """
def ask(user):
    work = user.take()[0]
    if work.index == 3:
        raise ValueError('boom')
    user.ask(work)
"""
STOPS = """
from locust import task
from locust.exception import StopUser
from harness.load.user import LLMUser
class Mine(LLMUser):
    @task
    def work(self):
        self.ask(self.take()[0])
        if self.number == 1:
            raise StopUser
"""


@fault("load process", "the locustfile raises an exception",
       seen="the load generator ended with exit code 1; its log has ValueError: boom", code=3,
       kept="all records; what was never sent is counted")  # fmt: skip
@fault("load process", "a user of the locustfile stops before the load does",
       seen="1 user of 3 ended before the load did", code=3)  # fmt: skip
@fault("load process", "the ramp is longer than the measured time",
       seen="of 8 users had started at the end of the measured time", code=3)  # fmt: skip
def test_failing_loads(tmp_path: Path) -> None:
    for name, text in (("raises", RAISES), ("later", LATER), ("stops", STOPS)):
        (tmp_path / f"{name}.py").write_text(text)
    loads = {
        "raises": {"user": "raises.py", "requests": 6, "output_tokens": 3},
        "stops": {"user": "stops.py", "users": 3, "duration_s": 1.5, "output_tokens": 5},
        "late": {"user": "batch", "users": 8, "duration_s": 1.0, "ramp_s": 4.0, "output_tokens": 5},
    }
    manifest = read_run(ran(write(tmp_path, loads=loads, warmup={"requests": 0}, restart=False), 3))
    assert manifest.status == "invalid"
    reasons = {cell: [reason for reason in manifest.reasons if reason.cell == cell] for cell in manifest.order}
    raised, missing = reasons["r1-one-raises"]
    assert (raised.code, raised.values) == ("generator_exit", {"exit_code": 1, "exception": "ValueError: boom"})
    assert (missing.code, missing.values) == ("requests_missing", {"planned": 6, "sent": 5})
    (stopped,) = (reason for reason in reasons["r1-one-stops"] if reason.code == "users_gone")
    assert stopped.values == {"gone": 1, "users": 3}
    late = reasons["r1-one-late"][0]
    assert (late.code, late.values["users"]) == ("users_missing", 8) and 1 <= late.values["came"] <= 7


@fault("server", "every third request is answered 503",
       seen="2 of 6 requests failed (rejected 2): an error rate of 33.33 %", code=3)  # fmt: skip
def test_too_many_errors(tmp_path: Path) -> None:
    # Every third completion request; the first is the question whether the model answers.
    run = ran(write(tmp_path, servers={"one": server("--fault", "503@3")}), 3)
    assert re.search(INVALID, ENDED[-1].out)
    assert_complete(run)
    assert [(reason.code, reason.cell) for reason in read_run(run).reasons] == [("error_rate", "r1-one-burst")]
    assert Counter(request.error for request in records_of(run)) == {None: 5, "rejected": 3}


@pytest.mark.parametrize(
    ("how", "processes"),
    [pytest.param(signal.SIGTERM, 1, marks=pytest.mark.nightly), (signal.SIGHUP, 1), (signal.SIGINT, 2)],
    ids=["term", "hup", "int-2"],
)
@fault("harness", "Ctrl-C, SIGTERM or SIGHUP in the middle of a load",
       seen="interrupted; everything that was started has been torn down", code=130,
       kept="all records; what was in flight as unfinished")  # fmt: skip
@fault("harness", "Ctrl-C twice", seen="interrupted; everything that was started has been torn down", code=130)
def test_interrupted(tmp_path: Path, how: signal.Signals, processes: int) -> None:
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": processes, "processes": processes}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        assert len(command.others("locust")) == (processes if processes == 1 else processes + 1)
        command.process.send_signal(how)
        if how == signal.SIGINT:
            time.sleep(0.1)
            command.interrupt()
        done = command.end()
        command.nothing_left()
    assert done.code == 130
    assert done.err == f"{INTERRUPTED}\n"
    assert done.out.endswith(f"harness run --resume runs/{run.name}\n")
    assert_complete(run)
    manifest = read_run(run)
    assert (manifest.status, [reason.code for reason in manifest.reasons]) == ("interrupted", ["interrupted"])
    assert {mark.event for mark in read_marks(run / "processes.jsonl")} == {"start", "end"}
    # What was in flight is there too, as unfinished; between two bursts that is nothing.
    by_process = Counter(request.process for request in records_of(run))
    for mark in read_marks(run / "processes.jsonl"):
        if mark.event == "end":
            assert (mark.sent, mark.recorded) == (by_process[mark.process], by_process[mark.process])
    assert {request.error for request in records_of(run)} <= {None, "unfinished"}


@fault("harness", "Ctrl-C, SIGTERM or SIGHUP while the program is still being imported",
       seen="interrupted; everything that was started has been torn down", code=130)  # fmt: skip
def test_interrupted_while_the_program_is_imported(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "typer.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(30)\n")
    with going("run", path.name, cwd=tmp_path, env={"PYTHONPATH": str(slow)}) as command:
        until((tmp_path / "importing").exists)
        command.process.send_signal(signal.SIGHUP)
        done = command.end()
    assert done == (130, "", f"{INTERRUPTED}\n")


@fault("harness", "Ctrl-C while the server starts", seen="interrupted; everything that was started has been torn down",
       code=130, kept="a run marked interrupted")  # fmt: skip
def test_interrupted_while_the_server_starts(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--startup-s", "60")})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: bool(command.others("harness.simulated")))
        time.sleep(0.3)
        command.interrupt()
        done = command.end()
        command.nothing_left()
    assert (done.code, done.err) == (130, f"{INTERRUPTED}\n")
    run = only_run(tmp_path / "runs")
    assert read_run(run).status == "interrupted"
    assert called("report", run.name, "--runs", "runs", cwd=tmp_path).code == 3  # of its verdict


@fault("harness", "kill -9 of the harness in the middle of a load", seen="0 of 1 planned cells are complete", code=3,
       kept="all records; `harness report` shows them, INVALID",
       left="nothing: Locust and the embedded engine end by themselves")  # fmt: skip
def test_killed(tmp_path: Path) -> None:
    """kill -9 of the harness: Locust and the engine end by themselves, and what was measured can be read."""
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": 2, "processes": 2}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path, forked=False) as command:
        run = in_mid_run(command, tmp_path / "runs")
        command.process.kill()
        assert command.end().code == -signal.SIGKILL
        command.nothing_left()
    assert len(records_of(run)) > 20
    assert {mark.event for mark in read_marks(run / "processes.jsonl")} == {"start", "end"}
    assert read_run(run).status == "running"

    shown = called("report", str(run), cwd=tmp_path)
    assert (shown.code, shown.err) == (3, "")
    assert "0 of 1 " in shown.out
    assert not (run / "report.html").exists()
    listed = called("list", "runs", "--runs", "runs", cwd=tmp_path)
    # Its two load processes, the engine and other tests share the cores, which may be reported, too.
    assert re.search(r"0/1    killed\b.* \(simulated\)", listed.out)


SPINNING = """
from pathlib import Path
from locust import task
from harness.load.user import LLMUser

class Spinning(LLMUser):
    uses = ("--batch-size",)
    rounds = 0

    @task
    def work(self):
        self.ask_all(self.take(self.load.batch_size))
        self.rounds += 1
        if self.rounds == 5:
            Path(SPINS).touch()
            while True:
                pass
"""


@fault("harness", "kill -9 of the harness while a load process computes and handles no signal",
       seen="0 of 1 planned cells are complete", code=3, kept="all records", left="nothing, 15 s later")  # fmt: skip
def test_killed_while_a_load_process_computes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SPINNING.replace("SPINS", repr(str(tmp_path / "spins"))))
    load = {"user": "mine.py", "users": 1, "batch_size": 8, "requests": 4000, "output_tokens": 5}
    path = write(tmp_path, loads={"mine": load}, warmup={"requests": 0})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path, forked=False) as command:
        until(lambda: (tmp_path / "spins").exists())
        command.process.kill()
        assert command.end().code == -signal.SIGKILL
        command.nothing_left()
    run = only_run(tmp_path / "runs")
    assert len(records_of(run)) == 40
    shown = called("report", str(run), cwd=tmp_path)
    assert (shown.code, shown.err) == (3, "")


def kill_one(processes: list[psutil.Process]) -> int:
    """kill -9 of the youngest: with several load processes one that is not the master."""
    victim = max(processes, key=lambda process: (process.create_time(), process.pid))
    victim.kill()
    return int(victim.pid)


def reasons_after(command: Going, run: Path) -> list[Reason]:
    """The command ends by itself, INVALID, and with nothing left; its reasons."""
    done = command.end()
    command.nothing_left()
    assert (done.code, done.err) == (3, "")
    assert re.search(INVALID, done.out)
    manifest: Run = read_run(run)
    assert manifest.status == "invalid"
    assert_complete(run)
    return manifest.reasons


@pytest.mark.parametrize("processes", [1, 2])
@fault("load process", "kill -9 of a load process",
       seen="load process ... was killed or lost: what was sent and not yet recorded is not known", code=3,
       kept="all records but those of the last 0.2 s of that process")  # fmt: skip
def test_a_load_process_is_killed(tmp_path: Path, processes: int) -> None:
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": processes, "processes": processes}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        pid = kill_one(command.others("locust"))
        reasons = reasons_after(command, run)
    # The exit code of the only process, if a fork (tests/support/prefork.py) reports it early enough.
    assert reasons[0].code == "process_killed" or (processes == 1 and reasons[0].code == "generator_exit")
    assert (reasons[1].code, reasons[1].values["processes"]) == ("processes_killed", [str(pid)])
    assert {reason.cell for reason in reasons[:2]} == {"r1-one-burst"}


@fault("load process", "SIGTERM or SIGINT to a load process (earlyoom, an eviction)",
       seen="load process ... was stopped (SIGTERM or SIGINT) ... s before the end of the 60 s to measure; run again",
       code=3)  # fmt: skip
def test_a_load_process_that_gets_a_signal_before_its_time(tmp_path: Path) -> None:
    """As by earlyoom, `docker stop` or an eviction: half of the time that was asked for is no valid run."""
    path = write(tmp_path, loads={"timed": {"user": "batch", "users": 2, "duration_s": 60, "output_tokens": 5}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        (victim,) = command.others("locust")
        victim.terminate()
        reasons = reasons_after(command, run)
    reason = reasons[0]
    assert (reason.code, reason.cell, reason.values["process"]) == ("stopped_early", "r1-one-timed", str(victim.pid))
    assert 0 < reason.values["left_s"] < 60 == reason.values["asked_s"]


@fault("server", "kill -9 of the server under load", seen="the server died during the load: it ended with exit code -9",
       code=3)  # fmt: skip
def test_server_killed(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        kill_one(command.others("harness.simulated"))
        reasons = reasons_after(command, run)
    assert (reasons[0].code, reasons[0].cell) == ("server_died", "r1-one-burst")
    death = read_run(run).cells[0].served_by.death
    assert death is not None and (death.how, death.exit_code) == ("ended", -9) and death.failure is not None


@fault("server", "a server that the harness did not start (--url) dies under load",
       seen="the server died during the load: nothing listens at ... any more", code=3)  # fmt: skip
def test_a_running_server_dies(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with spawned("--preset", "instant", "--model", "tiny", "--fault", "exit:30") as there:
        run = ran(path, 3, "--url", there.url)
    reasons = [reason for reason in read_run(run).reasons if reason.code == "server_died"]
    assert [reason.cell for reason in reasons] == ["r1-running-burst"] and there.url in reasons[0].text, reasons


@fault("harness", "the reader of the output goes away (`harness run ... | head`)",
       seen="the run goes on to its end and is VALID")  # fmt: skip
def test_a_reader_that_goes_away_does_not_end_a_run(tmp_path: Path) -> None:
    path = write(tmp_path)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        assert command.process.stdout is not None
        command.process.stdout.close()
        assert command.process.wait(30) == 0
        assert command.process.stderr is not None
        command.process.stderr.close()
        command.nothing_left()
    assert read_run(only_run(tmp_path / "runs")).status == "valid"


def files_allowed(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@fault("load process", "more requests at once than the system lets a process open files",
       seen="200 requests at once in one load process need 264 open files, and the system allows it 150", code=1,
       kept="no run is begun")  # fmt: skip
def test_more_connections_than_the_process_may_open_are_refused_before_anything_starts(
    tmp_path: Path, wording: Wording
) -> None:
    path = write(tmp_path, loads={"many": {"user": "batch", "users": 200, "requests": 400, "output_tokens": 5}})
    search = ("capacity", "--check", "e2e_p90 <= 2s", "--max-users", "200")
    for arguments in (("run",), search):
        command = (*arguments, path.name, "--runs", "runs")
        done = harness(*command, cwd=tmp_path, before=partial(files_allowed, 150, 150))
        assert (done.code, done.out) == (1, "")
        assert all(f" {number} " in done.err for number in (200, 264, 150)) and "(RLIMIT_NOFILE)" in done.err
        wording(done.err)
    assert not list(tmp_path.glob("runs/*"))


@fault("load process", "a locustfile opens more connections than files are allowed", seen="an error rate of", code=3,
       kept="all records; the error names the limit, not the server")  # fmt: skip
def test_the_limit_of_open_files_is_raised_and_named_when_it_is_hit(tmp_path: Path, wording: Wording) -> None:
    """A server is not to blame for a connection that the load process could not open."""

    (tmp_path / "mine.py").write_text(GREEDY)
    path = write(tmp_path, loads={"mine": {"user": "mine.py", "users": 1, "requests": 200, "output_tokens": 5}})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, before=partial(files_allowed, 60, 150))
    assert done.code == 3
    sent = records_of(only_run(tmp_path / "runs"))
    ((error, message),) = {(request.error, request.message) for request in sent if request.error}
    assert error == "client"
    wording(message)
    assert sum(request.error is None for request in sent) > 60


GREEDY = """
from locust import task
from harness.load.user import LLMUser

class Greedy(LLMUser):
    @task
    def work(self):
        self.ask_all(self.take(200))
"""
