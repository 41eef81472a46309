"""A run with a time budget: whole repeats of all rows, as many as the time allows, at least one."""

import time
from pathlib import Path

from harness.numbers.summarize import read_summary
from harness.records.manifest import read_run
from tests.support.command import harness, only_run, server, write
from tests.support.run_files import assert_whole, records_of

SHORT = {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": 5}
ROWS = ("one-short", "two-short")


def test_the_first_repeat_runs_however_short_the_time_is_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    servers = {"one": server(), "two": server()}
    path = write(tmp_path, servers=servers, loads={"short": SHORT}, repeats=3)
    done = harness("run", path.name, "--runs", "runs", "--budget", "1s", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    run = only_run(tmp_path / "runs")
    manifest = read_run(run)
    assert (manifest.budget_s, manifest.scenario.repeats) == (1.0, 3)
    assert sorted(manifest.order) == [f"r1-{row}" for row in ROWS]
    (note,) = [note for note in read_summary(run).notes if note.code == "budget"]
    assert note.values == {"seconds": 1.0, "repeats": 1}
    assert_whole(run)
    first = records_of(run)
    done = harness("run", "--resume", run.name, "--runs", "runs", "--budget", "1s", cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted(read_run(run).order) == [f"r{repeat}-{row}" for repeat in (1, 2) for row in ROWS]
    assert {cell: records_of(run)[cell] for cell in first} == first
    assert_whole(run)


def test_repeats_of_all_rows_are_added_until_the_time_is_spent(tmp_path: Path) -> None:
    servers = {"one": server(), "two": server()}
    began_s = time.monotonic()
    write(tmp_path, "alone", servers=servers, loads={"short": SHORT})
    alone = harness("run", "alone.yaml", "--runs", "alone", cwd=tmp_path)
    budget_s = round(3 * (time.monotonic() - began_s))  # this machine decides how long a repeat takes
    assert alone.code in (0, 3), alone.err
    path = write(tmp_path, servers=servers, loads={"short": SHORT})
    done = harness("run", path.name, "--runs", "runs", "--budget", f"{budget_s}s", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    run = only_run(tmp_path / "runs")
    manifest = read_run(run)
    repeats = manifest.scenario.repeats
    assert repeats > 1
    assert sorted(manifest.order) == sorted(f"r{repeat}-{row}" for repeat in range(1, repeats + 1) for row in ROWS)
    assert_whole(run)


def test_a_time_without_unit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    for given in ("soon", "0h", "-1h"):
        done = harness("run", path.name, f"--budget={given}", cwd=tmp_path)
        assert done.code == 1 and "--budget: " in done.err and f"'{given}'" in done.err
