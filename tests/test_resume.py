"""Runs that are resumed: after a kill at any moment, with what is kept, what is measured again, and what is refused."""

import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.analysis.summarize import read_summary
from harness.analysis.validity import number_sessions, session_notes
from harness.judge.verdicts import ComparedSides, are_apart, decide_verdicts
from harness.run.resume import complete_cells
from harness.rundir.directory import LINES, lock_folder, set_aside
from harness.rundir.manifest import CellRun, Machine, Resumption, Run, read_run, write_run
from harness.rundir.records import read_requests
from harness.scenario import Server
from harness.scenario.plan import plan
from harness.simulated import spawned
from tests.command import Going, called, going, harness, only_run, server, until, write
from tests.faults import fault
from tests.made_runs import scenario, served_by
from tests.nightly import NIGHTLY, draws

TWO = {"one": server(), "two": server()}


def plan_of(run: Path) -> list[str]:
    return read_run(run).order


def records_of(folder: Path) -> dict[str, set[tuple[str, float]]]:
    """The records of each cell: id and time of each."""
    found: dict[str, set[tuple[str, float]]] = {}
    for one in read_requests(folder / "requests.jsonl"):
        found.setdefault(one.cell, set()).add((one.id, one.sent_s))
    return found


def whole(run: Path) -> None:
    """Each cell of the plan is there once, and each line of each file is of one of them and can be read."""
    manifest = read_run(run)
    assert (manifest.status, manifest.reasons) == ("valid", [])
    assert sorted(cell.id for cell in manifest.cells) == sorted(manifest.order)
    for name, kind in LINES.items():
        text = (run / name).read_bytes()
        assert text.endswith(b"\n") or not text
        assert {msgspec.json.decode(line, type=kind).cell for line in text.splitlines()} <= set(manifest.order)
    assert records_of(run).keys() == set(manifest.order)


def killed(command: Going) -> None:
    """Kill the harness alone, as the kernel or a user does; its children notice."""
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()


def stopped_after(path: Path, cells: int) -> Path:
    """A run that was killed when so many of its cells had ended."""
    runs = path.parent / "runs"
    with going("run", path.name, "--runs", "runs", cwd=path.parent) as command:
        until(lambda: any(len(read_run(one.parent).ran) >= cells for one in runs.glob("*/run.json")), 60)
        killed(command)
        command.nothing_left(10)
    return only_run(runs)


@fault("harness", "kill -9, then `harness run --resume RUN`",
       seen="1 of 4 cells are complete and valid and stay; 3 cells to run", code=0,
       kept="all records: those of cells that were cut are in `attempts/`")  # fmt: skip
def test_complete_cells_stay_and_the_others_run_again(tmp_path: Path) -> None:
    path = write(tmp_path, servers=TWO, repeats=2)
    run = stopped_after(path, 1)
    before = records_of(run)
    first = plan_of(run)[0]
    manifest = read_run(run)
    for cell in list(manifest.ran)[1:]:  # it may have come further until it was killed
        write_run(run, msgspec.structs.replace(manifest, cells=[one for one in manifest.cells if one.id != cell]))
        manifest = read_run(run)
    with (run / "requests.jsonl").open("ab") as file:
        file.write(b'{"id":"torn","cell":"')
    done = harness("run", "--resume", run.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    whole(run)
    assert records_of(run)[first] == before[first]
    aside = (run / "attempts" / "1" / "requests.jsonl").read_bytes().splitlines()
    assert aside[-1] == b'{"id":"torn","cell":"'
    lost = {name: ids for name, ids in before.items() if name != first}
    assert records_of(run / "attempts" / "1") == lost if lost else len(aside) == 1
    (resumed,) = read_run(run).resumed
    assert (resumed.kept, resumed.attempts) == (1, "attempts/1")
    (note,) = [note for note in read_summary(run).notes if note.code == "resumed"]
    assert (note.values["times"], note.values["again"]) == (1, len(resumed.again))
    assert "the run was resumed 1 time (" in done.out
    again = called("report", run.name, "--runs", "runs", cwd=tmp_path)
    assert "the run was resumed 1 time (" in again.out

    done = harness("run", "--resume", f"runs/{run.name}", cwd=tmp_path)
    assert (done.code, len(read_run(run).resumed)) == (0, 1)
    assert "all of its 4 cells are complete and valid" in done.out


def test_an_invalid_cell_and_its_earlier_attempt(tmp_path: Path) -> None:
    path = write(tmp_path, servers=TWO, repeats=2)
    assert harness("run", path.name, "--runs", "runs", cwd=tmp_path).code == 0
    run = only_run(tmp_path / "runs")
    before = records_of(run)
    bad = "r2-one-burst"
    lines = (run / "requests.jsonl").read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if bad.encode() in line)
    lines[last] = b'{"id": "damaged"\n'  # as a power loss leaves it
    (run / "requests.jsonl").write_bytes(b"".join(lines))
    done = harness("run", "--resume", run.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "3 of 4 cells are complete and valid and stay; 1 cell to run" in done.out
    whole(run)
    after = records_of(run)
    assert {name: after[name] for name in after if name != bad} == {n: before[n] for n in before if n != bad}
    assert not after[bad] & before[bad]
    aside = run / "attempts" / "1"
    assert len(records_of(aside)[bad]) == len(before[bad]) - 1
    assert {path.name for path in (aside / "logs").iterdir()} == {f"{bad}.server.log", f"{bad}.locust.log"}
    assert (aside / "jobs" / f"{bad}.counter").exists()
    salts = [json.loads((one / "jobs" / f"{bad}.json").read_text())["salt"] for one in (run, aside)]
    assert salts[0] != salts[1]  # a server that was not restarted may have the earlier prompts in its cache


@fault("harness", "a resumed run whose scenario, files or versions have changed",
       seen="the run cannot be resumed: the requests are others; changed: prompts.jsonl", code=1,
       kept="the run as it was")  # fmt: skip
def test_changes_are_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    path = write(tmp_path, repeats=2, prompts={"kind": "file", "file": "prompts.jsonl"})
    run = stopped_after(path, 1)
    manifest = (run / "run.json").read_bytes()

    def refused(*more: str) -> str:
        done = called("run", "--resume", run.name, *more, "--runs", "runs", cwd=tmp_path)
        assert (done.code, done.out) == (1, "")
        assert (run / "run.json").read_bytes() == manifest
        return " ".join(done.err.split())

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b d"}\n')
    said = refused()
    assert "the run cannot be resumed: the requests are others; changed: prompts.jsonl" in said
    assert "Undo that and resume it again, or measure anew" in said
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')

    text = path.read_text()
    path.write_text(text.replace("requests: 6", "requests: 8"))
    assert "scenario.loads.burst.requests: 6 then, 8 now" in refused(path.name)
    other = write(tmp_path, "other", loads={f"load-{n}": {"user": "chat", "users": n} for n in range(1, 9)})
    lines = called("run", "--resume", run.name, other.name, "--runs", "runs", cwd=tmp_path).err.splitlines()
    assert len(lines) == 12 and "| and " in lines[10], lines
    assert not [line for line in lines if "unknown then, nothing now" in line or "nothing then, unknown now" in line]
    path.write_text(text)

    known = read_run(run)
    for change, expected in (
        ({"versions": {**known.versions, "load generator": "0" * 16}}, f"versions.load generator: {'0' * 16} then, "),
        ({"locustfiles": {"batch": "1" * 16}}, "locustfiles.batch: 1111111111111111 then, "),
        ({"machine": msgspec.structs.replace(known.machine, kernel="6.1")}, "machine.kernel: 6.1 then, "),
    ):
        write_run(run, msgspec.structs.replace(known, **change))
        manifest = (run / "run.json").read_bytes()
        assert expected in refused()
    write_run(run, known)
    manifest = (run / "run.json").read_bytes()
    with lock_folder(run):
        assert "another harness process is running this run" in refused()
    assert "--resume does not go with --repeats" in refused("--repeats", "3")
    assert "--url: the run started its servers itself" in refused("--url", "http://127.0.0.1:1")
    assert harness("run", "--resume", run.name, path.name, "--runs", "runs", cwd=tmp_path).code == 0
    whole(run)
    (run / "inputs.json").unlink()
    manifest = (run / "run.json").read_bytes()
    assert "so the run cannot be resumed" in refused()
    write_run(run, msgspec.structs.replace(known, status="live"))
    manifest = (run / "run.json").read_bytes()
    assert "the run is live, so it has no plan that could be resumed" in refused()
    done = called("run", cwd=tmp_path)
    assert done.code == 1 and "missing argument 'SCENARIO'" in done.err


def test_on_a_running_server(tmp_path: Path) -> None:
    path = write(tmp_path, repeats=2)
    with spawned("--preset", "instant", "--model", "tiny") as there:
        assert harness("run", path.name, "--url", there.url, "--runs", "runs", cwd=tmp_path).code == 0
    run = only_run(tmp_path / "runs")
    manifest = read_run(run)
    write_run(run, msgspec.structs.replace(manifest, cells=manifest.cells[:1], status="interrupted"))
    with spawned("--preset", "instant", "--model", "tiny") as other:  # the same server at another address
        done = harness("run", "--resume", run.name, "--url", other.url, "--runs", "runs", cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        whole(run)


def test_lines_are_moved_and_never_lost(tmp_path: Path) -> None:
    for name in LINES:
        (tmp_path / name).write_bytes(b"")
    for part in ("logs", "jobs"):
        (tmp_path / part).mkdir()
    (tmp_path / "telemetry.jsonl").write_bytes(b'{"wall_s":1.0,"cell":"a"}\n{"wall_s":1.0,"cell":"b"}\n\0\0\0\n{"wall')
    for log in ("r1-s-l.server.log", "r1-s-l.x.server.log"):
        (tmp_path / "logs" / log).touch()
    assert set_aside(tmp_path, {"a", "r1-s-l"}, ["a", "b", "r1-s-l", "r1-s-l.x"]) == "attempts/1"
    assert (tmp_path / "telemetry.jsonl").read_bytes() == b'{"wall_s":1.0,"cell":"a"}\n'
    moved = (tmp_path / "attempts/1/telemetry.jsonl").read_bytes()
    assert moved == b'{"wall_s":1.0,"cell":"b"}\n\0\0\0\n{"wall\n'
    assert {path.name for path in (tmp_path / "attempts/1").iterdir()} == {"telemetry.jsonl", "logs"}
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["r1-s-l.server.log"]
    assert set_aside(tmp_path, {"a", "r1-s-l"}, ["a", "r1-s-l"]) is None
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["1"]


def test_sessions_and_rows_that_are_apart() -> None:
    def run(*starts: float, resumed: Sequence[float] = ()) -> Run:
        made = scenario(servers={"a": Server(template="simulated")}, repeats=len(starts))
        cells = [
            CellRun(**msgspec.structs.asdict(cell), started_wall_s=at, ended_wall_s=at + 60, served_by=served_by())
            for cell, at in zip(plan(made), starts, strict=True)
        ]
        return Run(
            id="r", status="valid", started_wall_s=0, scenario_name="s", scenario=made, workload_sha256="",
            machine=Machine(name="m"), cells=cells, resumed=[Resumption(wall_s=at, kept=0) for at in resumed],
        )  # fmt: skip

    def of(found: Run) -> tuple[list[int], list[str]]:
        return list(number_sessions(found).values()), [note.code for note in session_notes(found)]

    assert of(run(0, 60, 3000)) == ([0, 0, 0], [])
    assert of(run(0, 60, 120 + 3600)) == ([0, 0, 1], ["hours_apart"])
    assert of(run(0, 60, 200, resumed=[150, 160])) == ([0, 0, 1], ["resumed"])
    assert of(run(100, 160, 9000, resumed=[50, 8000])) == ([0, 0, 1], ["resumed", "hours_apart"])

    assert not are_apart([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert are_apart([0, 0, 0, 1, 1], [0, 1, 1, 1, 1])
    assert not are_apart([0, 1, 2, 3, 4], [0, 1, 2, 3, 3])
    assert are_apart([0, 0, 0, 0, 0], [1, 1, 1, 1, 1])


def false_alarms(trials: int, later: tuple[int, int], drift: float) -> float:
    """How often equal rows are called different, with so many of 5 repeats in a later session that drifted."""
    dice = np.random.default_rng(7)
    found = 0
    for _ in range(trials):
        sides = [[math.exp(dice.normal(0, 0.01) + drift * (n < number)) for n in range(5)] for number in later]
        apart = are_apart(*([int(n < number) for n in range(5)] for number in later))
        pair = ComparedSides(
            side="a", baseline="b", metric="output_tok_s", side_speeds=sides[:1], baseline_speeds=sides[1:],
            within_run=True, apart=apart,
        )  # fmt: skip
        (verdict,) = decide_verdicts([pair]).verdicts
        assert (verdict.reason == "apart") == apart
        found += verdict.word in ("faster", "slower")
    return found / trials


def test_a_drift_between_sessions_makes_no_false_alarms() -> None:
    worst = 0.0
    for drift in (0.01, 0.03, 0.05, 0.1):
        for later in ((2, 3), (0, 1), (5, 4)):
            worst = max(worst, false_alarms(draws(1000), later, drift))
    assert worst <= 0.05
    assert false_alarms(20, (0, 5), 0.1) == 0  # else it would be 1


def sixty(folder: Path, repeats: int) -> Path:
    loads: dict[str, Any] = {
        name: {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": tokens}
        for name, tokens in (("short", 3), ("middle", 5), ("long", 8))
    }
    return write(folder, servers={"one": server(), "two": server()}, loads=loads, repeats=repeats, restart=False)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """No valid cell is measured again, no process is left, and in the end it is the same set of cells."""
    kills = 50 if NIGHTLY else 3
    path = sixty(tmp_path, repeats=10 if NIGHTLY else 2)
    dice = random.Random(19)
    arguments: tuple[str, ...] = ("run", path.name)
    kept: dict[str, set[tuple[str, float]]] = {}
    done = 0
    while done < kills:
        with going(*arguments, "--runs", "runs", cwd=tmp_path) as command:
            until(lambda: bool(list(tmp_path.glob("runs/*/run.json"))))
            run = only_run(tmp_path / "runs")
            deadline = time.monotonic() + dice.uniform(0.0, 2.5 if NIGHTLY else 4.0)
            while time.monotonic() < deadline and command.process.poll() is None:
                time.sleep(0.01)
            over = command.process.poll() is not None
            killed(command) if not over else command.end()
            command.nothing_left(15)
        done += 1
        arguments = ("run", "--resume", run.name)
        now = records_of(run)
        assert {name: now[name] for name in kept} == kept
        manifest = read_run(run)
        if over:
            break
        kept = {name: now[name] for name in complete_cells(run, manifest)}
    assert done == kills or not NIGHTLY
    last = harness(*arguments, "--runs", "runs", cwd=tmp_path, timeout_s=600)
    assert (last.code, last.err) == (0, "")
    whole(run)
    assert {name: records_of(run)[name] for name in kept} == kept
    counts = Counter(one.cell for one in read_requests(run / "requests.jsonl") if one.phase == "measured")
    assert set(counts.values()) == {6}
    assert len(counts) == len(manifest.order) == (60 if NIGHTLY else 12)
