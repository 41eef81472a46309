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
import pytest
from msgspec.structs import replace

from harness.base.errors import ExitCode
from harness.numbers.summarize import read_summary
from harness.numbers.verdicts import ComparedSides, are_apart, decide_verdicts
from harness.numbers.warnings import number_sessions, session_notes
from harness.records.directory import LINES, drop_cells, lock_folder
from harness.records.manifest import CellRun, Machine, Resumption, Run, read_run, write_run
from harness.records.records import read_requests
from harness.run.resume import complete_cells
from harness.scenario import Server
from harness.scenario.plan import plan
from tests.support.command import Done, Going, called, going, harness, only_run, server, slow_server, until, write
from tests.support.faults import fault
from tests.support.made_runs import scenario, served_by
from tests.support.nightly import NIGHTLY, draws
from tests.support.run_files import assert_whole, records_of
from tests.support.simulated import spawned
from tests.support.wording import Wording

TWO = {"one": slow_server(), "two": slow_server()}


def kill(command: Going) -> None:
    """Kill the harness alone, as the kernel or a user does; its children notice."""
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()
    command.nothing_left()


def killed_after_a_cell(path: Path) -> Path:
    """A run that was killed when one of its cells had ended, or a few."""
    runs = path.parent / "runs"
    with going("run", path.name, "--runs", "runs", cwd=path.parent) as command:
        until(lambda: any(read_run(file.parent).ran for file in runs.glob("*/run.json")))
        kill(command)
    return only_run(runs)


def resume(run: Path, *options: str) -> Done:
    return harness("run", "--resume", run.name, *options, "--runs", "runs", cwd=run.parents[1])


@fault("harness", "kill -9, then `harness run --resume RUN`",
       seen="1 of 4 cells kept (complete and valid), 3 to run", code=0,
       kept="all records: those of cells that were cut are in `dropped/`")  # fmt: skip
def test_complete_cells_stay_and_the_others_run_again(tmp_path: Path) -> None:
    run = killed_after_a_cell(write(tmp_path, servers=TWO, repeats=2))
    before, manifest = records_of(run), read_run(run)
    first = manifest.order[0]
    # It may have come further until it was killed.
    write_run(run, replace(manifest, cells=[cell for cell in manifest.cells if cell.id == first]))
    with (run / "requests.jsonl").open("ab") as file:
        file.write(b'{"id":"torn","cell":"')
    lines = (run / "requests.jsonl").read_bytes().splitlines()
    done = resume(run)
    assert (done.code, done.err) == (0, "")
    assert_whole(run)
    assert records_of(run)[first] == before[first]
    there = [(folder / "requests.jsonl").read_bytes().splitlines() for folder in (run, run / "dropped")]
    assert set(lines) <= {line for each in there for line in each}, "no measurement is lost"
    (resumed,) = read_run(run).resumed
    assert resumed.kept == 1
    (note,) = [note for note in read_summary(run).notes if note.code == "resumed"]
    assert (note.values["times"], note.values["again"]) == (1, len(resumed.again))

    done = resume(run)
    assert (done.code, len(read_run(run).resumed)) == (0, 1)
    assert " 4 cells" in done.out


def test_the_gate_and_the_files_of_the_first_start_still_apply(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": slow_server(), "two": server("--step-base-s", "0.1")}, repeats=3)
    gate = ("--tolerance", "5%", "--junit", "j.xml", "--markdown", "m.md")
    with going("run", path.name, *gate, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: any(read_run(file.parent).ran for file in (tmp_path / "runs").glob("*/run.json")))
        kill(command)
    run = only_run(tmp_path / "runs")
    assert "did not end" in (tmp_path / "j.xml").read_text() and (tmp_path / "m.md").read_text() == ""
    assert str(tmp_path) not in (run / "run.json").read_text()
    done = resume(run)
    assert (done.code, done.err) == (ExitCode.FAILED, "")
    assert run.name in (tmp_path / "j.xml").read_text() and run.name in (tmp_path / "m.md").read_text()
    (tmp_path / "j.xml").write_text("of another run")
    done = resume(run, "--tolerance", "400%")  # which is kept from now on
    assert (done.code, "--junit" in done.out) == (0, True)
    assert (resume(run).code, (tmp_path / "j.xml").read_text()) == (0, "of another run")


def test_an_invalid_cell_and_its_earlier_attempt_on_a_running_server(tmp_path: Path) -> None:
    path = write(tmp_path, repeats=3)
    with spawned("--preset", "instant", "--model", "tiny") as running:
        assert harness("run", path.name, "--url", running.url, "--runs", "runs", cwd=tmp_path).code == 0
    run = only_run(tmp_path / "runs")
    before = records_of(run)
    bad = "r2-running-burst"
    salt = json.loads((run / "jobs" / f"{bad}.json").read_text())["salt"]
    lines = (run / "requests.jsonl").read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if bad.encode() in line)
    lines[last] = b'{"id": "damaged"\n'  # as a power loss leaves it
    (run / "requests.jsonl").write_bytes(b"".join(lines))
    with spawned("--preset", "instant", "--model", "tiny") as running:  # the same server at another address
        done = resume(run, "--url", running.url)
    assert (done.code, done.err) == (0, "")
    assert "2 of 3 cells" in done.out
    assert_whole(run)
    after = records_of(run)
    assert {name: after[name] for name in after if name != bad} == {n: before[n] for n in before if n != bad}
    assert not after[bad] & before[bad]
    # A server that was not restarted may have the earlier prompts in its cache.
    assert json.loads((run / "jobs" / f"{bad}.json").read_text())["salt"] != salt


@fault("harness", "a resumed run whose scenario, files or versions have changed",
       seen="the run cannot be resumed: the requests are others; changed: prompts.jsonl", code=1,
       kept="the run as it was")  # fmt: skip
def test_changes_are_named(tmp_path: Path, wording: Wording) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b c"}\n')
    path = write(tmp_path, repeats=2, prompts={"kind": "file", "file": "prompts.jsonl"})
    run = killed_after_a_cell(path)
    known = read_run(run)

    def refusal(*options: str, **changes: Any) -> str:
        """The error of a run whose manifest has these changes; it stays as it was."""
        write_run(run, replace(known, **changes))
        manifest = (run / "run.json").read_bytes()
        done = called("run", "--resume", run.name, *options, "--runs", "runs", cwd=tmp_path)
        assert (done.code, done.out) == (1, "")
        assert (run / "run.json").read_bytes() == manifest
        return " ".join(done.err.split())

    prompts.write_text('{"prompt": "a b d"}\n')
    wording(refusal(), RUN=run.name)
    prompts.write_text('{"prompt": "a b c"}\n')
    assert "--resume" in refusal(path.name)
    versions = {**known.versions, "load generator": "0" * 16}
    assert "versions.load generator: 0000000000000000 " in refusal(versions=versions)
    assert "locustfiles.batch: 1111111111111111 " in refusal(locustfiles={"batch": "1" * 16})
    assert "machine.kernel: 6.1 " in refusal(machine=replace(known.machine, kernel="6.1"))
    with lock_folder(run):
        wording(refusal(), RUN=run.name)
    assert "--repeats" in refusal("--repeats", "3")
    assert "--url: " in refusal("--url", "http://127.0.0.1:1")
    wording(refusal(kind="live", status="live"), RUN=run.name)
    write_run(run, known)
    assert resume(run).code == 0
    assert_whole(run)
    (run / "inputs.json").unlink()
    wording(refusal(), RUN=run.name)


def test_other_cells_and_damaged_lines_are_put_aside(tmp_path: Path) -> None:
    for name in LINES:
        (tmp_path / name).write_bytes(b"")
    for part in ("logs", "jobs"):
        (tmp_path / part).mkdir()
    (tmp_path / "telemetry.jsonl").write_bytes(b'{"wall_s":1.0,"cell":"a"}\n{"wall_s":1.0,"cell":"b"}\n\0\0\0\n{"wall')
    for log in ("r1-s-l.server.log", "r1-s-l.x.server.log"):
        (tmp_path / "logs" / log).touch()
    for _ in range(2):
        drop_cells(tmp_path, {"a", "r1-s-l"}, ["a", "b", "r1-s-l", "r1-s-l.x"])
        assert (tmp_path / "telemetry.jsonl").read_bytes() == b'{"wall_s":1.0,"cell":"a"}\n'
        assert [path.name for path in (tmp_path / "logs").iterdir()] == ["r1-s-l.server.log"]
        assert {path.name for path in tmp_path.iterdir()} == {*LINES, "logs", "jobs", "dropped"}
        aside = tmp_path / "dropped"
        assert (aside / "telemetry.jsonl").read_bytes() == b'{"wall_s":1.0,"cell":"b"}\n\0\0\0\n{"wall\n'
        assert [path.name for path in (aside / "logs").iterdir()] == ["r1-s-l.x.server.log"]


def test_sessions_and_rows_that_are_apart() -> None:
    def make_run(*starts: float, resumed: Sequence[float] = ()) -> Run:
        made = scenario(servers={"a": Server(template="simulated")}, repeats=len(starts))
        cells = [
            CellRun(**msgspec.structs.asdict(cell), started_wall_s=at, ended_wall_s=at + 60, served_by=served_by())
            for cell, at in zip(plan(made), starts, strict=True)
        ]
        return Run(
            id="r", status="valid", started_wall_s=0, scenario_name="s", scenario=made, workload_sha256="",
            machine=Machine(name="m"), cells=cells, resumed=[Resumption(wall_s=at, kept=0) for at in resumed],
        )  # fmt: skip

    for run, sessions, notes in (
        (make_run(0, 60, 3000), [0, 0, 0], []),
        (make_run(0, 60, 120 + 3600), [0, 0, 1], ["hours_apart"]),
        (make_run(100, 160, 9000, resumed=[50, 8000]), [0, 0, 1], ["resumed", "hours_apart"]),
    ):
        assert list(number_sessions(run).values()) == sessions
        assert [note.code for note in session_notes(run)] == notes

    assert not are_apart([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert are_apart([0, 0, 0, 1, 1], [0, 1, 1, 1, 1])
    assert are_apart([0, 0, 0, 0, 0], [1, 1, 1, 1, 1])


def false_alarms(trials: int, later: tuple[int, int], drift: float) -> float:
    """The share of equal rows with a verdict, with so many of 5 repeats in a later session that drifted."""
    dice = np.random.default_rng(7)
    alarms = 0
    for _ in range(trials):
        sides = [[math.exp(dice.normal(0, 0.01) + drift * (n < number)) for n in range(5)] for number in later]
        apart = are_apart(*([int(n < number) for n in range(5)] for number in later))
        pair = ComparedSides(
            side="a", baseline="b", metric="output_tok_s", side_speeds=sides[:1], baseline_speeds=sides[1:],
            within_run=True, apart=apart,
        )  # fmt: skip
        (verdict,) = decide_verdicts([pair]).verdicts
        assert (verdict.basis, verdict.provisional) == (("apart", True) if apart else ("repeats", False))
        alarms += verdict.word in ("faster", "slower")
    return alarms / trials


def test_a_drift_between_sessions_makes_no_false_alarms() -> None:
    for drift in (0.01, 0.05, 0.1) if NIGHTLY else (0.05,):
        assert max(false_alarms(draws(1000), later, drift) for later in ((2, 3), (0, 1))) <= 0.05
    assert false_alarms(20, (0, 5), 0.1) == 0  # else it would be 1


@pytest.mark.nightly
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """No valid cell is measured again, no process is left, and in the end it is the same set of cells."""
    kills, repeats = 50, 10
    loads: dict[str, Any] = {
        name: {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": tokens}
        for name, tokens in (("short", 3), ("middle", 5), ("long", 8))
    }
    path = write(tmp_path, servers=TWO, loads=loads, repeats=repeats, restart=False)
    dice = random.Random(19)
    arguments: tuple[str, ...] = ("run", path.name)
    kept: dict[str, set[tuple[str, float]]] = {}
    for _ in range(kills):
        with going(*arguments, "--runs", "runs", cwd=tmp_path) as command:
            until(lambda: bool(list(tmp_path.glob("runs/*/run.json"))))
            run = only_run(tmp_path / "runs")
            time.sleep(dice.uniform(0.0, 2.5))
            if command.process.poll() is None:
                kill(command)
        arguments = ("run", "--resume", run.name)
        now = records_of(run)
        assert {name: now[name] for name in kept} == kept
        kept = {name: now[name] for name in complete_cells(run, read_run(run))}
    done = resume(run)
    assert (done.code, done.err) == (0, "")
    assert_whole(run)
    assert {name: records_of(run)[name] for name in kept} == kept
    counts = Counter(record.cell for record in read_requests(run / "requests.jsonl") if record.phase == "measured")
    assert set(counts.values()) == {6}
    assert len(counts) == len(read_run(run).order) == 6 * repeats
