"""A run from its scenario to its exit code, and every way in which it can be cut short, on a real Locust."""

import json
import re
import resource
import signal
import time
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.analysis.summarize import read_summary
from harness.errors import INTERRUPTED
from harness.reasons import sentences
from harness.rundir.manifest import Run, read_run
from harness.rundir.records import Request, read_marks, read_requests
from harness.simulated import spawned
from tests.command import ENDED, Going, called, going, harness, only_run, server, until, write
from tests.doubles.lemonade.spawn import spawned as lemonade
from tests.faults import fault

# Where others use this machine, the load generator may be told to have been the limit as well.
VALID = r"\bVALID(: all conditions of a trustworthy measurement held|, CLIENT-LIMITED: )"
INVALID = r"\bINVALID(: do not trust the rows concerned; the run is not compared with other runs\n|, CLIENT-LIMITED: )"

# Longer than any test: whoever cuts it short does so in the middle.
LONG = {"burst": {"user": "batch", "batch_size": 20, "requests": 100_000, "output_tokens": 150}}
PARTS = {
    "compose", "inputs.json", "jobs", "logs", "metrics.jsonl", "processes.jsonl", "report.html", "requests.jsonl",
    "run.json", "scenario.yaml", "summary.json", "telemetry.jsonl",
}  # fmt: skip


def records(run: Path, damaged: list[int] | None = None) -> list[Request]:
    return list(read_requests(run / "requests.jsonl", damaged))


def complete(run: Path) -> None:
    """The run directory holds all that docs/run-directory.md says, and no line of its records is damaged."""
    assert {path.name for path in run.iterdir()} == PARTS
    damaged: list[int] = []
    records(run, damaged)
    assert damaged == []


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


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_small_run(tmp_path: Path) -> None:
    path = write(tmp_path, repeats=2, checks=["error_rate == 0"])
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    run = only_run(tmp_path / "runs")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Run {run.name}: 2 cells. Records go to runs/{run.name}\n")
    assert "SIMULATED ENGINE: these numbers come from a model, not from hardware" in done.out
    assert re.search(VALID, done.out)
    assert done.out.endswith(f"Report: runs/{run.name}/report.html\n")
    complete(run)

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

    sent = records(run)
    assert Counter((one.cell, one.phase) for one in sent) == {
        ("r1-one-burst", "warmup"): 2, ("r1-one-burst", "measured"): 6,
        ("r2-one-burst", "warmup"): 2, ("r2-one-burst", "measured"): 6,
    }  # fmt: skip
    assert {one.error for one in sent} == {None}
    measured = [one for one in sent if one.phase == "measured"]
    assert {(one.output_tokens, len(one.chunks_s)) for one in measured} == {(5, 5)}
    assert sorted(one.index for one in measured) == sorted([*range(6)] * 2)
    summary = summary_of(run)
    assert (summary["valid"], summary["reasons"]) == (True, [])
    assert [check["status"] for check in summary["checks"]] == ["passed"]
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


def test_a_lemonade_that_closes_connections_after_streams_gives_a_valid_run(tmp_path: Path) -> None:
    """No warm-up and eight users at once: no request fails, and none is sent twice."""
    load = {"user": "batch", "requests": 120, "output_tokens": 4, "users": 8}
    path = write(tmp_path, loads={"burst": load}, warmup={"requests": 0})
    models = {"Tiny": {"checkpoint": "/models/tiny", "recipe": "vllm"}}
    with lemonade(tmp_path / "lemonade", user_models=models, installed=True, close_s=0.03) as there:
        asked = {"model_name": "user.Tiny"}
        request = urllib.request.Request(f"{there.url}/v1/load", json.dumps(asked).encode(), method="POST")
        urllib.request.urlopen(request, timeout=60).close()
        run = ran(path, 0, "--url", there.url, "--model", "user.Tiny")
    assert {(one.error, one.message, one.resent) for one in records(run)} == {(None, None, False)}
    (cell,) = read_summary(run).cells
    assert (cell.numbers.succeeded, cell.numbers.resent, cell.problems) == (120, 0, [])


def test_two_load_processes_and_chat_users_for_a_time(tmp_path: Path) -> None:
    batch = {"user": "batch", "batch_size": 2, "requests": 40, "output_tokens": 60, "users": 2, "processes": 2}
    chat = {
        "user": "chat", "users": 3, "duration_s": 1, "turns": 2, "think_s": [0.01, 0.05], "output": "natural",
        "output_tokens": 10, "ramp_s": 0.5,
    }  # fmt: skip
    run = ran(write(tmp_path, loads={"burst": batch, "people": chat}, restart=False), 0)
    measured = [one for one in records(run) if one.phase == "measured"]
    sent = [one for one in measured if one.load == "burst"]
    assert sorted(one.index for one in sent) == list(range(40))
    marks = [mark for mark in read_marks(run / "processes.jsonl") if mark.cell == "r1-one-burst"]
    assert Counter(mark.event for mark in marks) == {"start": 2, "end": 2}
    assert {one.process for one in sent} == {mark.process for mark in marks}
    assert sum(mark.recorded or 0 for mark in marks) == 42
    sent = [one for one in measured if one.load == "people"]
    assert len(sent) > 20
    assert {(one.user_class, one.error) for one in sent} == {("ChatUser", None)}
    assert ({one.user for one in sent}, {one.turn for one in sent}) == ({0, 1, 2}, {1, 2})
    last, first = max(one.sent_s for one in sent), min(one.sent_s for one in sent)
    assert 0.5 < last - first <= 1.0


def test_one_server_start_per_repeat(tmp_path: Path) -> None:
    loads = {name: {"user": "batch", "requests": 2, "output_tokens": 2} for name in ("one", "two")}
    run = ran(write(tmp_path, loads=loads, restart=False, repeats=2), 0)
    cells = read_run(run).cells
    assert [cell.id for cell in cells] == ["r1-one-one", "r1-one-two", "r2-one-two", "r2-one-one"]
    urls = [cell.served_by.url for cell in cells]
    assert urls[0] == urls[1] and urls[2] == urls[3] and urls[0] != urls[2]
    logs = sorted(path.name for path in (run / "logs").glob("*.server.log"))
    assert logs == ["r1-one-one.server.log", "r2-one-two.server.log"]


RAISES = """
from locust import task
from harness.load.user import LLMUser
class Mine(LLMUser):
    @task
    def work(self):
        work = self.take()[0]
        if work.slot.index == 3:
            raise ValueError('boom')
        self.ask(work)
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
    (tmp_path / "raises.py").write_text(RAISES)
    (tmp_path / "stops.py").write_text(STOPS)
    loads = {
        "raises": {"user": "raises.py", "requests": 6, "output_tokens": 3},
        "stops": {"user": "stops.py", "users": 3, "duration_s": 1.5, "output_tokens": 5},
        "late": {"user": "batch", "users": 8, "duration_s": 1.0, "ramp_s": 4.0, "output_tokens": 5},
    }
    manifest = read_run(ran(write(tmp_path, loads=loads, warmup={"requests": 0}, restart=False), 3))
    assert manifest.status == "invalid"
    said = {cell: [reason for reason in sentences(manifest.reasons) if reason.startswith(f"{cell}:")]
            for cell in manifest.order}  # fmt: skip
    assert [reason.partition(": ")[2] for reason in said["r1-one-raises"]] == [
        "the load generator ended with exit code 1; its log has ValueError: boom",
        "6 measured requests were planned and 5 were sent",
    ]
    (stopped,) = (reason for reason in said["r1-one-stops"] if "ended before the load did" in reason)
    assert stopped.startswith("r1-one-stops: 1 user of 3 ended before the load did (an exception, or StopUser in ")
    assert re.search(r": [1-7] of 8 users had started at the end of the measured time", said["r1-one-late"][0])


@fault("server", "every third request is answered 503",
       seen="2 of 6 requests failed (rejected 2): an error rate of 33.33%", code=3)  # fmt: skip
def test_too_many_errors(tmp_path: Path) -> None:
    # Every third completion request; the first is the question whether the model answers.
    run = ran(write(tmp_path, servers={"one": server("--fault", "503@3")}), 3)
    assert re.search(INVALID, ENDED[-1].out)
    complete(run)
    assert [(reason.code, reason.cell) for reason in read_run(run).reasons] == [("error_rate", "r1-one-burst")]
    assert Counter(one.error for one in records(run)) == {None: 5, "rejected": 3}


def test_an_own_locustfile(tmp_path: Path) -> None:
    lines = ("from locust import task", "from harness.load.user import LLMUser", "class Mine(LLMUser):", "    @task",
             "    def work(self):", "        import later", "        later.ask(self)")  # fmt: skip
    (tmp_path / "mine.py").write_text("\n".join(lines))
    (tmp_path / "later.py").write_text("def ask(user):\n    user.ask(user.take()[0])\n")
    path = write(tmp_path, loads={"mine": {"user": "mine.py", "users": 2, "requests": 6, "output_tokens": 3}})
    (tmp_path / "elsewhere").mkdir()
    done = harness("run", str(path), "--runs", str(tmp_path / "runs"), cwd=tmp_path / "elsewhere")
    assert (done.code, done.err) == (0, "")
    sent = [one.user_class for one in records(only_run(tmp_path / "runs")) if one.phase == "measured"]
    assert sent == ["Mine"] * 6


@pytest.mark.parametrize(
    ("how", "processes"),
    [pytest.param(signal.SIGTERM, 1, marks=pytest.mark.nightly), (signal.SIGHUP, 1), (signal.SIGINT, 2)],
    ids=["term", "hup", "int-2"],
)
@fault("harness", "Ctrl-C, SIGTERM or SIGHUP in the middle of a load",
       seen="interrupted; everything that was started has been torn down", code=130,
       kept="all records; what was in flight as unfinished")  # fmt: skip
def test_interrupted(tmp_path: Path, how: signal.Signals, processes: int) -> None:
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": processes, "processes": processes}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        assert len(command.others("locust")) == (processes if processes == 1 else processes + 1)
        command.process.send_signal(how)
        done = command.end()
        command.nothing_left()
    assert done.code == 130
    assert done.err == "interrupted; everything that was started has been torn down\n"
    assert done.out.endswith(
        f"harness report runs/{run.name}\nTo measure the rest: harness run --resume runs/{run.name}\n"
    )
    complete(run)
    manifest = read_run(run)
    assert (manifest.status, sentences(manifest.reasons)) == ("interrupted", ["interrupted before all cells had run"])
    assert {mark.event for mark in read_marks(run / "processes.jsonl")} == {"start", "end"}
    # What was in flight is there too, as unfinished; between two bursts that is nothing.
    by_process = Counter(one.process for one in records(run))
    for mark in read_marks(run / "processes.jsonl"):
        if mark.event == "end":
            assert (mark.sent, mark.recorded) == (by_process[mark.process], by_process[mark.process])
    assert {one.error for one in records(run)} <= {None, "unfinished"}


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGINT], ids=["hup", "int"])
@fault("harness", "Ctrl-C, SIGTERM or SIGHUP while the program is still being imported",
       seen="interrupted; everything that was started has been torn down", code=130)  # fmt: skip
def test_interrupted_while_the_program_is_imported(tmp_path: Path, how: signal.Signals) -> None:
    path = write(tmp_path, loads=LONG)
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "typer.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(30)\n")
    with going("run", path.name, cwd=tmp_path, env={"PYTHONPATH": str(slow)}) as command:
        until((tmp_path / "importing").exists)
        command.process.send_signal(how)
        done = command.end()
    assert done == (130, "", f"{INTERRUPTED}\n")


@fault("harness", "Ctrl-C twice", seen="interrupted; everything that was started has been torn down", code=130)
def test_interrupted_twice(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        command.interrupt()
        time.sleep(0.1)
        command.interrupt()
        done = command.end()
        command.nothing_left()
    assert done.code == 130
    assert "Traceback" not in done.err
    assert read_run(run).status == "interrupted"


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
    assert (done.code, done.err) == (130, "interrupted; everything that was started has been torn down\n")
    run = only_run(tmp_path / "runs")
    assert read_run(run).status == "interrupted"
    assert called("report", run.name, "--runs", "runs", cwd=tmp_path).code == 3  # of its verdict


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 2])
@fault("harness", "kill -9 of the harness in the middle of a load", seen="only 0 of 1 planned cells ran", code=3,
       kept="all records; `harness report` shows them, INVALID",
       left="nothing: Locust and the embedded engine end by themselves")  # fmt: skip
def test_killed(tmp_path: Path, processes: int) -> None:
    """kill -9 of the harness: Locust and the engine end by themselves, and what was measured can be read."""
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": processes, "processes": processes}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path, forked=False) as command:
        run = in_mid_run(command, tmp_path / "runs")
        command.process.kill()
        assert command.end().code == -signal.SIGKILL
        command.nothing_left(within_s=60)
    damaged: list[int] = []
    sent = records(run, damaged)
    assert len(sent) > 20
    assert damaged == []
    assert {mark.event for mark in read_marks(run / "processes.jsonl")} == {"start", "end"}
    assert read_run(run).status == "running"

    shown = called("report", str(run), cwd=tmp_path)
    assert (shown.code, shown.err) == (3, "")
    assert "- only 0 of 1 planned cells ran\n" in shown.out
    assert (run / "report.html").is_file()
    listed = called("runs", "--runs", "runs", cwd=tmp_path)
    assert listed.code == 0
    assert f"{run.name}  " in listed.out
    # Its two load processes, the engine and other tests share the cores: it may say so, too.
    assert re.search(r"0/1    killed(, CLIENT-LIMITED)? \(simulated\)", listed.out)


def kill_one(processes: list[psutil.Process]) -> int:
    """kill -9 of the youngest: with several load processes one that is not the master."""
    victim = max(processes, key=lambda process: (process.create_time(), process.pid))
    victim.kill()
    return int(victim.pid)


def reasons_after(command: Going, run: Path) -> list[str]:
    """The command ends by itself, INVALID, and with nothing left; its reasons."""
    done = command.end()
    command.nothing_left()
    assert (done.code, done.err) == (3, "")
    assert re.search(INVALID, done.out)
    manifest: Run = read_run(run)
    assert manifest.status == "invalid"
    complete(run)
    return sentences(manifest.reasons)


@fault("load process", "kill -9 of the only load process",
       seen="load process ... was killed: what was sent and not yet recorded is not known", code=3,
       kept="all records but those of the last 0.2 s")  # fmt: skip
def test_locust_killed(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        pid = kill_one(command.others("locust"))
        reasons = reasons_after(command, run)
    assert reasons[0] in (
        "r1-one-burst: the load generator ended with exit code -9",
        # The exit code of a fork (tests/prefork.py) comes a moment after its end.
        "r1-one-burst: the load was stopped because a load process was killed",
    )
    assert reasons[1].startswith(f"r1-one-burst: load process {pid} was killed: what was sent and not yet recorded is ")


@fault("load process", "kill -9 of one of two load processes",
       seen="the load was stopped because a load process was killed", code=3,
       kept="all records but those of the last 0.2 s of one process")  # fmt: skip
def test_one_of_two_load_processes_killed(tmp_path: Path) -> None:
    path = write(tmp_path, loads={"burst": {**LONG["burst"], "users": 2, "processes": 2}})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        pid = kill_one(command.others("locust"))
        reasons = reasons_after(command, run)
    assert reasons[0] == "r1-one-burst: the load was stopped because a load process was killed"
    assert reasons[1].startswith(f"r1-one-burst: load process {pid} was killed: ")


@pytest.mark.parametrize(
    ("how", "processes"), [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 2, marks=pytest.mark.nightly)]
)
@fault("load process", "SIGTERM or SIGINT to a load process (earlyoom, an eviction)",
       seen="load process ... was stopped (SIGTERM or SIGINT) ... s before the end of the 60 s to measure; run again",
       code=3)  # fmt: skip
def test_a_load_process_that_gets_a_signal_before_its_time(tmp_path: Path, how: signal.Signals, processes: int) -> None:
    """As by earlyoom, `docker stop` or an eviction: half of the time that was asked for is no valid run."""
    load = {"user": "batch", "users": 2, "duration_s": 60, "output_tokens": 5, "processes": processes}
    path = write(tmp_path, loads={"timed": load})
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        in_mid_run(command, tmp_path / "runs")
        victim = max(command.others("locust"), key=lambda process: (process.create_time(), process.pid))
        victim.send_signal(how)
        reasons = reasons_after(command, only_run(tmp_path / "runs"))
    assert re.fullmatch(
        rf"r1-one-timed: load process {victim.pid} was stopped \(SIGTERM or SIGINT\) [1-6]?\d\.\d s before the end of "
        "the 60 s to measure; run again",
        reasons[0],
    )


@fault("server", "kill -9 of the server under load", seen="the server died during the load: it ended with exit code -9",
       code=3)  # fmt: skip
def test_server_killed(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with going("run", path.name, "--runs", "runs", cwd=tmp_path) as command:
        run = in_mid_run(command, tmp_path / "runs")
        kill_one(command.others("harness.simulated"))
        reasons = reasons_after(command, run)
    assert reasons[0].startswith("r1-one-burst: the server died during the load: it ended with exit code -9: it was k")
    death = read_run(run).cells[0].served_by.death
    assert death is not None and (death.how, death.exit_code) == ("ended", -9) and death.failure is not None


@fault("server", "a server that the harness did not start (--url) dies under load",
       seen="the server died during the load: nothing listens at ... any more", code=3)  # fmt: skip
def test_a_running_server_dies(tmp_path: Path) -> None:
    path = write(tmp_path, loads=LONG)
    with spawned("--preset", "instant", "--model", "tiny", "--fault", "exit:30") as there:
        run = ran(path, 3, "--url", there.url)
    reason = f"r1-running-burst: the server died during the load: nothing listens at {there.url} any more"
    assert reason in sentences(read_run(run).reasons)


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
def test_more_connections_than_the_process_may_open_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path, loads={"many": {"user": "batch", "users": 200, "requests": 400, "output_tokens": 5}})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, before=partial(files_allowed, 150, 150))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        "error: 200 requests at once in one load process need 264 open files, and the system allows it 150 "
        "(RLIMIT_NOFILE)\n"
    )
    assert not list(tmp_path.glob("runs/*"))


@fault("load process", "a locustfile opens more connections than files are allowed", seen="an error rate of", code=3,
       kept="all records; the error names the limit, not the server")  # fmt: skip
def test_the_limit_of_open_files_is_raised_and_named_when_it_is_hit(tmp_path: Path) -> None:
    """A server is not to blame for a connection that the load process could not open."""

    (tmp_path / "mine.py").write_text(GREEDY)
    path = write(tmp_path, loads={"mine": {"user": "mine.py", "users": 1, "requests": 200, "output_tokens": 5}})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, before=partial(files_allowed, 60, 150))
    assert done.code == 3
    sent = records(only_run(tmp_path / "runs"))
    errors = {(one.error, one.message) for one in sent if one.error}
    assert errors == {
        ("client", "too many open files (this load process may have 150): raise the limit, or use more 'processes' or "
         "fewer users")
    }  # fmt: skip
    assert sum(one.error is None for one in sent) > 60


GREEDY = """
from locust import task
from harness.load.user import LLMUser

class Greedy(LLMUser):
    @task
    def work(self):
        self.ask_all(self.take(200))
"""
