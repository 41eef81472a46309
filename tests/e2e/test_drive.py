"""Watching a load generator: the parts of `drive` that a whole run does not show."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.errors import HarnessError, RunError
from harness.base.files import LOCUSTFILES
from harness.base.reason import because, sentences
from harness.records.records import ErrorKind, ProcessMark, Request
from harness.run import drive as driving
from harness.run import experiment as preparing
from harness.run.drive import (
    Driven,
    LocalChild,
    Monitor,
    drive,
    killed_processes,
    locust_arguments,
    read_in_flight,
    start_errors,
)
from harness.run.running import manifest_of
from harness.scenario import Load, Warmup
from harness.scenario.file import load_scenario
from harness.workload.job import Job, Status, report_error, report_status, status_file
from tests.support.command import until, write
from tests.support.faults import fault
from tests.support.load_runs import end, make_job, records_of, start_job
from tests.support.simulated import spawned
from tests.support.wording import Wording


def job(folder: Path, **load: Any) -> Job:
    return make_job(folder, Load(user="batch", requests=4, **load), Warmup(requests=1))


def run_program(folder: Path, program: str, monitor: Monitor | None = None, **more: Any) -> Driven:
    """Drive a Python program in place of Locust."""
    log, monitor = folder / "log", monitor or Monitor(job(folder))
    return drive(lambda: LocalChild([sys.executable, "-c", program], log), monitor, log_path=log, **more)


def test_records_are_counted_while_the_load_runs(tmp_path: Path) -> None:
    program = f"""
import time
for _ in range(4):  # five or more would have to be records
    with open({str(tmp_path / "requests.jsonl")!r}, "a") as file: file.write("{{}}\\n")
    time.sleep(0.1)
"""
    driven = run_program(tmp_path, program, monitor := Monitor(job(tmp_path)))
    assert driven.problems == [] and driven.started_wall_s < driven.ended_wall_s
    assert (monitor.recorded, monitor.total, monitor.warmup) == (4, 5, 1)  # a warm-up and four
    assert Monitor(make_job(tmp_path, Load(user="batch", requests=4), Warmup(duration_s=1))).total is None


@fault("load process", "Locust cannot start", seen="Locust ended with exit code ...", kept="a run marked failed")
def test_a_generator_that_cannot_start(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(RunError) as caught:
        run_program(tmp_path, "import sys; print(*range(30), sep='\\n'); sys.exit(2)")
    wording(caught.value)
    assert caught.value.detail == "\n".join(map(str, range(15, 30)))  # the end of its log


def test_a_planned_stop_before_the_first_request_is_no_error(tmp_path: Path) -> None:
    """The budget of a capacity search may end while Locust is being imported, and then SIGTERM kills it."""

    class Enough:
        report_after_s: float | None = None

        def note_in_flight(self, cell: str, requests: list[Request]) -> None: ...

        def add_records(self, requests: list[Request]) -> None: ...

        def is_done(self) -> bool:
            return True

        def measured_s(self, stopped_s: float) -> float:
            return 0.0

    driven = run_program(tmp_path, "import time; time.sleep(60)", monitor := Monitor(job(tmp_path), Enough()))
    assert driven.problems == [] and driven.stopped_s is not None and monitor.recorded == 0


RAISING = """
import time, traceback
while True:
    try:
        None.slot
    except AttributeError:
        print()
        traceback.print_exc()
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("program", "limits", "problem"),
    [
        ("raise ValueError('boom')", {}, "the load generator ended with exit code 1; its log has ValueError: boom"),
        ("import time; time.sleep(60)", {"MAX_SILENCE_S": 0.3, "SLOWEST_TPOT_S": 0.0},
         "no request ended for 1 s although each may take 0.1 s"),
        (RAISING, {"MAX_STUCK_S": 0.5}, "no request was recorded for 0.5 s while users raised AttributeError: "
         "'NoneType' object has no attribute 'slot'"),
    ],
)  # fmt: skip
@fault("load process", "no request ends for longer than every time limit",
       seen="no request ended for ... s although each may take ... s")  # fmt: skip
@fault("load process", "users raise and send nothing", seen="no request was recorded for ... s while users raised ...")
def test_a_load_that_fails_or_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limits: dict[str, float], problem: str
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(driving, name, value)
    (tmp_path / "counter").touch()
    driven = run_program(tmp_path, program, Monitor(job(tmp_path, timeout_s=0.1)))
    assert sentences(driven.problems) == [problem]


@fault("load process", "a load process ignores SIGTERM", seen="it is killed after 5 s")
def test_a_dead_server_ends_a_load_that_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "GRACE_S", 0.3)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    checks = iter([None] * 5)
    driven = run_program(tmp_path, program, alive=lambda: next(checks, because("server_exit", "it died", exit_code=1)))
    assert driven.problems == [because("server_exit", "it died", exit_code=1)]


def mark(event: str, pid: int, cell: str = "r1-a-b") -> bytes:
    made = ProcessMark(event=event, process=pid, cell=cell, wall_s=0, monotonic_s=0)  # type: ignore[arg-type]
    return msgspec.json.encode(made) + b"\n"


def test_killed_processes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    marks = tmp_path / "processes.jsonl"
    assert killed_processes(job(tmp_path)) == []
    marks.write_bytes(mark("start", os.getpid()) + mark("start", ended.pid, "r0-other") + mark("start", zombie.pid))
    assert killed_processes(job(tmp_path)) == [zombie.pid]
    zombie.wait()
    marks.write_bytes(mark("start", ended.pid) + mark("end", ended.pid))
    assert killed_processes(job(tmp_path)) == []


def record(cell: str = "r1-s-both.chat", error: ErrorKind | None = None) -> bytes:
    given: dict[str, Any] = {
        "id": "1", "cell": cell, "load": "l", "user_class": "U", "index": 0, "user": 0, "process": 1,
        "phase": "measured", "sent_s": 1.0, "ended_s": 1.0,
    }  # fmt: skip
    return msgspec.json.encode(Request(**given, error=error)) + b"\n"


def test_the_new_and_complete_records_of_all_loads_of_a_mix_are_counted(tmp_path: Path) -> None:
    chat, batch = (msgspec.structs.replace(job(tmp_path), cell=f"r1-s-both.{name}") for name in ("chat", "job"))
    cell = msgspec.structs.replace(chat, others=[batch])
    with Path(cell.requests_path).open("ab", buffering=0) as file:
        file.write(record())
        monitor = Monitor(cell)
        last = record(error="http")
        file.write(b"damaged\n" + record() + record("r1-s-both.job", "http") + last[:40])
        monitor.update()
        assert (monitor.recorded, monitor.failed, monitor.measured.ended) == (3, 1, 2)
        file.write(last[40:])
        monitor.update()
    assert (monitor.recorded, monitor.failed, monitor.measured.ended) == (4, 2, 3)


def test_start_errors_are_listed_once(tmp_path: Path) -> None:
    """Several load processes may report the same; an incomplete line is ignored."""
    cell = job(tmp_path)
    report_status(cell, Status(workers=["a"]))
    assert start_errors(cell) == ""
    for _ in range(2):
        report_error(cell, HarnessError("worker a: no key", next_step="Set it."))
    report_error(cell, HarnessError("no model"))
    with status_file(cell.counter_path).open("ab") as file:
        file.write(b'{"code":"of a newer harness"}\n{"code":"gave')
    assert start_errors(cell) == "worker a: no key. Set it.\nno model."


def test_an_import_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    monkeypatch.setattr(preparing, "IMPORT_S", 1.5)
    path = tmp_path / "mine.py"
    path.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(HarnessError) as caught:
        preparing.check_locustfile(path)
    assert str(path) in caught.value.what and "1.5" in caught.value.what
    wording(caught.value)


def test_the_arguments_of_stock_locust(tmp_path: Path) -> None:
    def arguments(ui: tuple[str, int] | None = None, **load: Any) -> list[str]:
        return locust_arguments(job(tmp_path, **load), tmp_path / "job.json", tmp_path / "f.py", "http://h:1", ui)

    headless = arguments(users=4, processes=2, ramp_s=2)
    given = dict(zip(headless, headless[1:], strict=False))
    assert (given["-f"], given["--host"], given["--users"]) == (str(tmp_path / "f.py"), "http://h:1", "4")
    assert (given["--spawn-rate"], given["--processes"], "--headless" in headless) == ("2", "2", True)
    for ramp_s, rate in ((0.0, "100"), (4.0, "2")):  # Locust warns above 100
        proposed = arguments(("127.0.0.1", 8089), users=8, ramp_s=ramp_s)
        assert proposed[proposed.index("--spawn-rate") + 1] == rate


def test_the_manifest_has_only_the_sources_that_run(tmp_path: Path) -> None:
    """A locustfile and its local imports. A change of another file in the folder does not make runs different."""
    (tmp_path / "words" / "more").mkdir(parents=True)
    written = {
        "mine.py": "import gevent\nfrom locustfiles.chat import ChatUser\nimport words.more\nfrom pauses import P",
        "pauses.py": "from words import lists",
        "words/__init__.py": "",
        "words/lists.py": "from . import numbers\nfrom .more import y",
        "words/numbers.py": "import mine",
        "words/more/__init__.py": "",
        "words/unused.py": "",
        "other.py": "import mine",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    used = sorted(tmp_path / name for name in written if name not in ("other.py", "words/unused.py"))
    assert preparing.locustfile_sources(tmp_path / "mine.py") == sorted([*used, LOCUSTFILES / "chat.py"])
    assert preparing.locustfile_sources(LOCUSTFILES / "agent.py") == [LOCUSTFILES / "agent.py"]
    path = write(tmp_path, loads={"own": {"user": "mine.py", "requests": 2, "output_tokens": 2}})
    experiment = preparing.Experiment(path, load_scenario(path))
    digests = []
    for name in ("other.py", "words/unused.py", "words/lists.py"):
        (tmp_path / name).write_text("changed = 1\n")
        digests.append(manifest_of(experiment, [], "id", "name", 0.0).locustfiles["mine.py"])
    assert digests[0] == digests[1] != digests[2]


def test_a_load_process_reports_its_old_requests_in_flight(tmp_path: Path) -> None:
    """Before the end of the load: some hang after their first chunks, others before. Ended ones are in no report."""
    with spawned("--preset", "instant", "--fault", "hang:0", "--fault", "hang:2@2", quiet=True) as running:
        made = make_job(
            tmp_path,
            Load(user="batch", duration_s=600, users=4, output_tokens=5),
            report_after_s=0.3,
            model="simulated",
        )
        process = start_job(tmp_path, running.url, made)
        until(lambda: len(read_in_flight(made.counter_path)) == 4)
        old = read_in_flight(made.counter_path)
        process.terminate()
        end(process)
    assert {(one.error, one.phase, one.cell) for one in old} == {("unfinished", "measured", "r1-a-b")}
    assert all(one.ended_s >= 0.3 for one in old) and {len(one.chunks_s) for one in old} == {0, 1}
    assert {one.id for one in old} == {one.id for one in records_of(tmp_path)}
