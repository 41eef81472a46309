"""Watching a load generator: the parts of `drive` that a whole run does not show."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import HarnessError, RunError, SeveralErrors
from harness.files import LOCUSTFILES
from harness.job import Job, WaitsForWorkers, report_error, report_status, status_file, write_job
from harness.prepare import experiment as preparing
from harness.reasons import sentences
from harness.run import drive as driving
from harness.run.drive import (
    Driven,
    LocalChild,
    Monitor,
    drive,
    exceptions_in,
    killed_processes,
    locust_arguments,
    start_errors,
)
from harness.rundir.manifest import read_run
from harness.rundir.records import ErrorKind, ProcessMark, Request
from harness.scenario import Load, Warmup
from harness.summary import because
from harness.workers import Workers
from tests.command import harness, only_run, write
from tests.faults import fault
from tests.load_runs import make_job


def job(folder: Path, **load: Any) -> Job:
    return make_job(folder, Load(user="batch", requests=4, **load), Warmup(requests=1))


def run(
    folder: Path, program: str, monitor: Monitor | None = None, *, alive: Any = lambda: None, **more: Any
) -> Driven:
    """Drive a Python program in place of Locust."""
    log = folder / "log"
    monitor = monitor or Monitor(job(folder))
    return drive(lambda: LocalChild([sys.executable, "-c", program], log), monitor, log_path=log, alive=alive, **more)


def test_the_total_is_known_for_counted_warm_ups_only(tmp_path: Path) -> None:
    for warmup, total, of_warmup in ((Warmup(requests=3), 7, 3), (Warmup(duration_s=1), None, 0)):
        monitor = Monitor(make_job(tmp_path, Load(user="batch", requests=4), warmup))
        assert (monitor.total, monitor.warmup) == (total, of_warmup)


def test_records_are_counted_while_the_load_runs(tmp_path: Path) -> None:
    program = f"""
import time
for _ in range(4):  # five or more would have to be records
    with open({str(tmp_path / "requests.jsonl")!r}, "a") as file: file.write("{{}}\\n")
    time.sleep(0.1)
"""
    driven = run(tmp_path, program, monitor := Monitor(job(tmp_path)))
    assert driven.problems == []
    assert (monitor.recorded, monitor.total) == (4, 5)  # a warm-up and four
    assert driven.started_wall_s < driven.ended_wall_s


@fault(
    "load process",
    "Locust cannot start",
    seen="Locust could not start the load (exit code ...)",
    kept="a run marked failed",
)
def test_a_generator_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run(tmp_path, "import sys; print(*range(30), sep='\\n'); sys.exit(2)")
    assert caught.value.what == "cell r1-a-b: Locust could not start the load (exit code 2)"
    assert caught.value.detail == "\n".join(map(str, range(15, 30)))  # the end of its log


def test_a_generator_that_reports_why_it_cannot_start(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from harness.errors import HarnessError, SeveralErrors
from harness.job import read_job, report_error
job = read_job(Path({str(tmp_path / "job.json")!r}))
report_error(job, SeveralErrors([HarnessError("no model"), HarnessError("no key")]))
raise SystemExit(1)
"""
    write_job(job(tmp_path), tmp_path / "job.json")
    with pytest.raises(RunError) as caught:
        run(tmp_path, program)
    assert caught.value.what == "cell r1-a-b: the load could not start: no model"
    assert caught.value.detail == "no key."


def test_missing_workers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the load waits for them, it does not count as hanging."""
    monkeypatch.setattr(driving, "MAX_WORKER_WAIT_S", 2)
    monkeypatch.setattr(driving, "PROCESS_CHECK_S", 0.1)
    monkeypatch.setattr(driving, "_max_silence_s", lambda job: 1.0)
    missing = "waiting for workers: 1 of 2 connected; missing: b"
    program = f"""
import sys, time
from pathlib import Path
from harness.job import WaitsForWorkers, read_job, report_status
report_status(read_job(Path({str(tmp_path / "job.json")!r})), WaitsForWorkers(["a"]))
time.sleep(2.5)
sys.exit(1)
"""
    write_job(job(tmp_path), tmp_path / "job.json")
    workers = Workers(names=["a", "b"], machines=2, bind="10.0.0.1")
    monitor = Monitor(msgspec.structs.replace(job(tmp_path), workers=workers))
    seen: list[str] = []
    with pytest.raises(RunError) as caught:
        run(tmp_path, program, monitor, progress=lambda: seen.append(monitor.missing_workers))
    assert caught.value.what == f"cell r1-a-b: the load could not start: 2 s of {missing}"
    advice = "On each machine: harness worker --master 10.0.0.1:5557."
    assert caught.value.next_step == f"{advice} The log is {tmp_path / 'log'}."
    assert seen[-2] == missing


def test_a_planned_stop_before_the_first_request_is_no_error(tmp_path: Path) -> None:
    """The budget of a capacity search may end while Locust is being imported, and then SIGTERM kills it."""

    class Enough:
        def add_records(self, requests: list[Request]) -> None: ...

        def is_done(self) -> bool:
            return True

        def measured_s(self, stopped_s: float) -> float:
            return 0.0

    driven = run(tmp_path, "import time; time.sleep(60)", monitor := Monitor(job(tmp_path), Enough()))
    assert driven.problems == [] and driven.stopped_s is not None and monitor.recorded == 0


def test_a_generator_that_fails_later(tmp_path: Path) -> None:
    (tmp_path / "counter").touch()
    driven = run(tmp_path, "raise ValueError('boom')")
    assert sentences(driven.problems) == ["the load generator ended with exit code 1; its log has ValueError: boom"]


def test_a_dead_server_ends_the_load(tmp_path: Path) -> None:
    driven = run(tmp_path, "import time; time.sleep(600)", alive=lambda: because("server_exit", exit_code=1))
    assert driven.problems == [because("server_exit", exit_code=1)]


@fault(
    "load process",
    "no request ends for longer than every time limit",
    seen="no request ended for ... s although each may take ... s",
)
def test_a_load_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "MAX_SILENCE_S", 0.3)
    monkeypatch.setattr(driving, "SLOWEST_TPOT_S", 0.0)
    driven = run(tmp_path, "import time; time.sleep(60)", Monitor(job(tmp_path, timeout_s=0.1)))
    assert sentences(driven.problems) == ["no request ended for 1 s although each may take 0.1 s"]


@fault("load process", "users raise and send nothing", seen="no request was recorded for ... s while users raised ...")
def test_a_load_whose_users_only_raise_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "MAX_STUCK_S", 0.5)
    program = """
import time, traceback
while True:
    try:
        None.slot
    except AttributeError:
        print()
        traceback.print_exc()
    time.sleep(0.1)
"""
    driven = run(tmp_path, program)
    assert sentences(driven.problems) == [
        "no request was recorded for 0.5 s while users raised AttributeError: 'NoneType' object has no attribute 'slot'"
    ]


@fault("load process", "a load process ignores SIGTERM", seen="it is killed after 5 s")
def test_a_generator_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "GRACE_S", 0.3)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    looks = iter([None] * 5)
    driven = run(tmp_path, program, alive=lambda: next(looks, because("server_exit", exit_code=1)))
    assert driven.problems == [because("server_exit", exit_code=1)]


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
    marks.write_bytes(mark("start", ended.pid))
    assert killed_processes(job(tmp_path)) == [ended.pid]
    marks.write_bytes(mark("start", ended.pid) + mark("end", ended.pid))
    assert killed_processes(job(tmp_path)) == []


def recorded(cell: str = "r1-s-both.chat", error: ErrorKind | None = None) -> bytes:
    given: dict[str, Any] = {
        "id": "1", "cell": cell, "load": "l", "user_class": "U", "index": 0, "user": 0, "process": 1,
        "phase": "measured", "sent_s": 1.0, "ended_s": 1.0,
    }  # fmt: skip
    return msgspec.json.encode(Request(**given, error=error)) + b"\n"


def append(path: str, content: bytes) -> None:
    with Path(path).open("ab") as file:
        file.write(content)


def test_only_new_and_complete_records_are_counted(tmp_path: Path) -> None:
    cell = job(tmp_path)
    append(cell.requests_path, b"old\n")
    monitor = Monitor(cell)
    append(cell.requests_path, b"damaged\n" + recorded() + recorded()[:20])
    monitor.update()
    assert monitor.recorded == 2
    append(cell.requests_path, recorded()[20:])
    monitor.update()
    assert monitor.recorded == 3


def test_a_part_of_a_mix_counts_its_own_records(tmp_path: Path) -> None:
    cell = msgspec.structs.replace(job(tmp_path), cell="r1-s-both.chat", concurrent_loads=["other"])
    monitor = Monitor(cell)
    last = recorded(error="http")
    append(cell.requests_path, recorded() + recorded("r1-s-both.job", "http") + last[:40])
    monitor.update()
    assert (monitor.recorded, monitor.failed) == (1, 0)
    append(cell.requests_path, last[40:] + recorded("r1-s-both.chat2"))
    monitor.update()
    assert (monitor.recorded, monitor.failed) == (2, 1)


def test_the_exceptions_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert exceptions_in(log) == []
    log.write_text("fine\nValueError: only a word\n")
    assert exceptions_in(log) == []
    log.write_text('Traceback (most recent call last):\n  File "x", line 1\n    f()\nKeyError: 1\n\nmore\n')
    assert exceptions_in(log) == ["KeyError: 1"]


def test_start_errors_are_listed_once(tmp_path: Path) -> None:
    """Several load processes may report the same; an incomplete line is ignored."""
    cell = job(tmp_path)
    assert start_errors(cell) == ""
    report_status(cell, WaitsForWorkers(["a"]))
    assert start_errors(cell) == ""
    report_error(cell, HarnessError("worker a: no key", next_step="Set it."))
    report_error(cell, SeveralErrors([HarnessError("no model"), HarnessError("no prompts")]))
    report_error(cell, HarnessError("worker a: no key", next_step="Set it."))
    report_error(cell, OSError("disk"))
    with status_file(cell.counter_path).open("ab") as file:
        file.write(b'{"code":"of a newer harness"}\n{"code":"gave')
    assert start_errors(cell) == "worker a: no key. Set it.\nno model.\nno prompts.\ndisk."


def test_an_import_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "IMPORT_S", 1.5)
    path = tmp_path / "mine.py"
    path.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(HarnessError) as caught:
        preparing.check_locustfile(path)
    assert caught.value.what == f"{path}: the locustfile was still being imported after 1.5 s"
    preparing.check_locustfile(path, try_import=False)


def test_the_arguments_of_stock_locust(tmp_path: Path) -> None:
    def arguments(ui: tuple[str, int] | None = None, **load: Any) -> list[str]:
        return locust_arguments(job(tmp_path, **load), tmp_path / "job.json", tmp_path / "f.py", "http://h:1", ui)

    headless = arguments(users=4, processes=2, ramp_s=2)
    given = dict(zip(headless, headless[1:], strict=False))
    assert (given["-f"], given["--host"], given["--users"]) == (str(tmp_path / "f.py"), "http://h:1", "4")
    assert (given["--spawn-rate"], given["--processes"]) == ("2", "2")
    assert "--headless" in headless
    for ramp_s, rate in ((0.0, "100"), (4.0, "2")):  # Locust warns above 100
        proposed = arguments(("127.0.0.1", 8089), users=8, ramp_s=ramp_s)
        assert proposed[proposed.index("--spawn-rate") + 1] == rate


def test_the_sources_of_a_locustfile_are_its_file_and_its_local_imports(tmp_path: Path) -> None:
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
    found = preparing.locustfile_sources(tmp_path / "mine.py")
    assert found == sorted([*used, LOCUSTFILES / "chat.py"])
    assert preparing.locustfile_sources(LOCUSTFILES / "agent.py") == [LOCUSTFILES / "agent.py"]


def test_the_manifest_has_only_the_sources_that_ran(tmp_path: Path) -> None:
    """A change of another file in the folder does not make runs different."""
    (tmp_path / "words.py").write_text("N = 1\n")
    (tmp_path / "mine.py").write_text(
        "from locust import task\nfrom harness.load.user import LLMUser\nfrom words import N\n"
        "class Mine(LLMUser):\n    @task\n    def work(self):\n        self.ask_all(self.take(2))\n"
    )
    load = {"user": "mine.py", "batch_size": 2, "requests": 2, "output_tokens": 2}
    scenario = write(tmp_path, loads={"burst": load})
    made = []
    for name, text in (("other.py", "N = 2\n"), ("another.py", ""), ("words.py", "N = 3\n")):
        (tmp_path / name).write_text(text)
        assert harness("run", scenario.name, "--runs", f"runs-{name}", cwd=tmp_path).code == 0
        manifest = read_run(only_run(tmp_path / f"runs-{name}"))
        assert list(manifest.locustfiles) == ["mine.py"]
        made.append((manifest.versions["load generator"], manifest.locustfiles["mine.py"]))
    assert made[0] == made[1] and made[1][0] == made[2][0] and made[1][1] != made[2][1]
