"""The noise floor: measured on the embedded engine by the real command, stored, found again, used, refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.compare.compare import compare_runs
from harness.errors import HarnessError
from harness.judge import stats
from harness.judge.noise_floors import (
    Floor,
    RowFloor,
    adopt_floor,
    floor_for,
    floor_of,
    floor_path,
    read_floor,
    write_floor,
)
from harness.rundir.manifest import Machine, Run, read_run
from harness.scenario.plan import Cell
from harness.scenario.scenario import Server
from harness.summarize.summarize import summarize
from tests.command import harness, only_run, server, write
from tests.made_runs import scenario, write_made_run


def test_measured_stored_and_used(tmp_path: Path) -> None:
    """`noise`, then `run`, `report` and `compare` on the same machine and scenario."""
    env = {"HARNESS_RESULTS": "filed", "HARNESS_RUNS": "runs"}
    path = write(tmp_path, checks=["error_rate == 0"])
    done = harness("noise", path.name, "--repeats", "2", "--runs", "aa", cwd=tmp_path, env=env)
    assert (done.code, done.err) == (0, "")
    aa = read_run(only_run(tmp_path / "aa"))
    assert list(aa.scenario.servers) == ["a", "a-again"]
    assert [cell.server for cell in aa.cells] == ["a", "a-again", "a-again", "a"], "interleaved as always"
    stored = tmp_path / floor_path(Path("filed"), aa)
    floor = read_floor(stored)
    assert floor is not None
    assert (floor.run, floor.scenario, floor.server, floor.repeats, floor.simulated) == (aa.id, "small", "one", 2, True)
    rows = {row.server: row for row in summarize(only_run(tmp_path / "aa")).rows}
    speeds = [[1 / value for value in rows[name].wall_s] for name in ("a-again", "a")]
    assert [(row.load, row.metric) for row in floor.rows] == [("burst", "wall_s"), ("burst", "output_tok_s")]
    assert floor.rows[0].floor == pytest.approx(stats.noise_floor(speeds))
    assert f"Noise floor of {aa.machine.name}, run aa/{aa.id}:\nburst, wall time: ±" in done.out
    assert done.out.endswith(f"Stored: {stored.relative_to(tmp_path)}\n")

    loads = {name: {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": 5} for name in ("burst",)}
    servers = {name: {"template": "simulated", "container": False, "variables": {"preset": "instant"}} for name in "xy"}
    path = write(tmp_path, loads=loads, servers=servers)
    assert harness("run", path.name, "--repeats", "2", cwd=tmp_path, env=env).code == 0
    run = only_run(tmp_path / "runs")
    said = f"measured A/A on {aa.machine.name}, {floor.date}, 2 repeats of 'one', run {aa.id}; "
    said += "of several rows the widest, at least 1 %"
    made = json.loads((run / "summary.json").read_text())["comparison"]
    assert (made["noise_source"], made["noise_floor"]) == (said, max(0.01, floor.rows[0].floor))
    assert read_floor(run / "noise.json") == floor, "the run carries it, so that its summary depends on its files only"
    (run / "noise.json").unlink()
    told = harness("report", run.name, cwd=tmp_path, env=env).out
    assert f"(noise floor: {said})." in " ".join(told.split())
    again = harness("report", run.name, "--results", "nowhere", "--format", "json", cwd=tmp_path, env=env)
    assert json.loads(again.out)["comparison"]["noise_source"] == said, "what it carries is kept"


def test_one_repeat_has_no_spread(tmp_path: Path) -> None:
    path = write(tmp_path)
    done = harness("noise", path.name, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: a noise floor needs at least 2 repeats, and {path.name} has 1\nnext: --repeats 5\n"
    wrong = harness("noise", path.name, "--repeats", "2", "--server", "two", cwd=tmp_path)
    assert (wrong.code, wrong.err) == (1, "error: --server: small.yaml has no server 'two'; known: one\n")


def test_an_invalid_run_gives_no_floor(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--fault", "503@3")})
    done = harness("noise", path.name, "--repeats", "2", cwd=tmp_path)
    assert done.code == 3, done
    assert "an INVALID run gives no noise floor: " in done.err
    assert not (tmp_path / "results").exists()


# With chosen numbers.


def aa_run(folder: Path, spread: float, **manifest: Any) -> tuple[Run, Floor]:
    dice = np.random.default_rng(3)
    servers = {name: Server(template="vllm-cpu") for name in ("a", "a-again")}

    def wall(_: Cell) -> float:
        return float(10 * np.exp(dice.normal(0, spread)))

    run = write_made_run(folder, wall, made_of=scenario(servers=servers), **manifest)
    return run, floor_of(run, summarize(folder), "b")


def steady(factor: float) -> Callable[[Cell], float]:
    return lambda cell: factor * (1 + 0.001 * cell.repeat)


def test_a_difference_within_the_measured_floor_is_not_believed(tmp_path: Path) -> None:
    run, floor = aa_run(tmp_path / "aa", 0.03)
    assert 0.03 < floor.rows[0].floor < 0.10
    write_made_run(tmp_path / "one", steady(10))
    write_made_run(tmp_path / "two", steady(10 * (1 + floor.rows[0].floor / 2)))
    groups, results = [[tmp_path / "one"], [tmp_path / "two"]], tmp_path / "results"
    before = compare_runs(groups, results=results)
    assert (before.noise_source, [v.word for v in before.verdicts]) == ("assumed", ["slower", "slower"])
    write_floor(floor_path(results, run), floor)
    after = compare_runs(groups, results=results)
    assert after.noise_floor == floor.rows[0].floor
    assert after.noise_source.startswith("measured A/A on strix, 2027-01-15, 5 repeats of 'b', run aa; ")
    assert [v.word for v in after.verdicts] == ["same", "same"]


def test_a_quiet_machine_has_the_least_floor(tmp_path: Path) -> None:
    run, floor = aa_run(tmp_path / "aa", 0.0001)
    assert floor.rows[0].floor < 0.001
    write_floor(floor_path(tmp_path / "results", run), floor)
    found = floor_for([(tmp_path / "aa", run)], tmp_path / "results")
    assert (found.of("wall_s", ["x"]), found.of("wall_s", ["unknown"])) == (0.01, 0.02)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"workload_sha256": "cd" * 32}, "another workload"),
        ({"model": "n"}, "another model"),
        ({"simulated": True}, "another kind of engine"),
    ],
)
def test_a_floor_of_something_else_is_not_used(tmp_path: Path, change: dict[str, object], why: str) -> None:
    run, floor = aa_run(tmp_path / "aa", 0.03)
    results = tmp_path / "results"
    write_floor(floor_path(results, run), msgspec.structs.replace(floor, **change))
    found = floor_for([(tmp_path / "aa", run)], results)
    assert (found.of("wall_s", ["x"]), found.source) == (0.02, f"assumed; the one measured is of {why}")
    adopt_floor(tmp_path / "aa", run, results)
    assert not (tmp_path / "aa" / "noise.json").exists()


def test_of_two_machines_the_wider_floor_counts(tmp_path: Path) -> None:
    results = tmp_path / "results"
    strix, wide = aa_run(tmp_path / "aa", 0.03)
    other, narrow = aa_run(tmp_path / "bb", 0.004, machine=Machine(name="other"))
    write_floor(floor_path(results, strix), wide)
    runs = [(tmp_path / "aa", strix), (tmp_path / "bb", other)]
    half = floor_for(runs, results)
    assert half.of("wall_s", ["x"]) == wide.rows[0].floor
    assert half.source == (
        "the wider of: for strix measured A/A on strix, 2027-01-15, 5 repeats of 'b', run aa; of several rows the "
        "widest, at least 1 %; for other assumed to be 2 %"
    )
    strange = msgspec.structs.replace(narrow, model="n")
    write_floor(floor_path(results, other), strange)
    assert floor_for(runs, results).source.endswith(
        "; for other assumed to be 2 %; the one measured is of another model"
    )
    write_floor(floor_path(results, other), narrow)
    both = floor_for(runs, results).source
    assert (
        both.startswith("the wider of: for strix measured A/A on strix") and "; for other measured A/A on other" in both
    )
    assert floor_for(runs, results).of("wall_s", ["x"]) == wide.rows[0].floor
    assert floor_for(runs[1:], results).of("wall_s", ["x"]) == max(0.01, narrow.rows[0].floor)


def test_each_row_has_its_own_floor(tmp_path: Path) -> None:
    run, floor = aa_run(tmp_path / "aa", 0.03)
    quiet = RowFloor(load="y", metric="wall_s", floor=0.012, ratio=1.0, low=0.99, high=1.012, n=(5, 5))
    write_floor(floor_path(tmp_path, run), msgspec.structs.replace(floor, rows=[*floor.rows, quiet]))
    found = floor_for([(tmp_path / "aa", run)], tmp_path)
    assert found.of("wall_s", ["y", "y"]) == 0.012
    assert found.of("wall_s", ["y", "x"]) == floor.rows[0].floor


def test_a_damaged_floor_and_one_of_a_newer_harness(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    assert read_floor(path) is None
    path.write_text('{"format_version": 2}')
    with pytest.raises(HarnessError, match="format 2 was written by a newer harness"):
        read_floor(path)
    path.write_text('{"format_version": 1')
    with pytest.raises(HarnessError, match="cannot be read"):
        read_floor(path)
