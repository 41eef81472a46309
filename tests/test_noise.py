"""How far equal runs differ: measured on the embedded engine by the real command, stored, found again, used."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.analysis.summarize import summarize
from harness.comparison.compare import compare_runs
from harness.judge.noise_floors import (
    StoredNoise,
    join_noise,
    known_noise,
    measure_noise,
    noise_path,
    noise_source,
    read_noise,
    write_noise,
)
from harness.reasons import sentences
from harness.rundir.manifest import Machine, Run, read_run
from harness.scenario import Server
from harness.scenario.plan import Cell
from harness.summary import because
from tests.command import called, harness, server, write
from tests.made_runs import scenario, write_made_run


def test_measured_stored_and_used(tmp_path: Path) -> None:
    """`noise`, then `compare` on the same machine and scenario."""
    env = {"HARNESS_RESULTS": "filed", "HARNESS_RUNS": "runs"}
    path = write(tmp_path)
    done = harness("noise", path.name, "--repeats", "1", "--runs", "2", cwd=tmp_path, env=env)
    assert (done.code, done.err) == (0, "")
    first, second = (read_run(folder.parent) for folder in sorted((tmp_path / "runs").glob("*/run.json")))
    assert list(first.scenario.servers) == ["a", "a-again"]
    assert [cell.server for cell in first.cells] == ["a", "a-again"]
    stored = tmp_path / noise_path(Path("filed"), first)
    noise = read_noise(stored)
    assert noise is not None
    assert (noise.scenario, noise.server, noise.repeats, noise.simulated) == ("small", "one", 1, True)
    assert [run.id for run in noise.runs] == [first.id, second.id]
    assert [(row.load, row.metric) for row in noise.rows] == [("burst", "wall_s")]
    rows = {row.server: row for row in summarize(tmp_path / "runs" / first.id).rows}
    assert (noise.rows[0].a[0], noise.rows[0].again[0]) == (rows["a"].wall_s, rows["a-again"].wall_s)
    assert done.out.endswith(f"stored: {stored.relative_to(tmp_path)}\n")
    assert "sd of runs" in done.out

    more = harness("noise", path.name, "--repeats", "1", "--add", cwd=tmp_path, env=env)
    assert (more.code, more.err) == (0, "")
    joint = read_noise(stored)
    assert joint is not None and len(joint.runs) == 3
    for _ in range(2):
        assert harness("run", path.name, "--repeats", "1", "--runs", "work", cwd=tmp_path, env=env).code == 0
    one, other = sorted(folder.parent.name for folder in (tmp_path / "work").glob("*/run.json"))
    made = called("compare", f"work/{one}", f"work/{other}", "--format", "json", cwd=tmp_path, env=env)
    found = json.loads(made.out)
    assert found["noise_source"] == [msgspec.to_builtins(noise_source(joint))]
    assert found["verdicts"][0]["p"] is not None


def test_an_invalid_run_shows_no_noise(tmp_path: Path) -> None:
    load = {"user": "batch", "batch_size": 2, "requests": 2, "output_tokens": 5}
    path = write(tmp_path, servers={"one": server("--fault", "503@4")}, loads={"burst": load})
    done = harness("noise", path.name, "--repeats", "2", cwd=tmp_path)
    assert done.code == 3, done
    assert "an INVALID run shows no noise: " in done.err
    assert not (tmp_path / "results").exists()


# With chosen numbers.


def aa_run(folder: Path, spread: float, seed: int = 3, **manifest: Any) -> tuple[Run, StoredNoise]:
    dice = np.random.default_rng(seed)
    servers = {name: Server(template="vllm-cpu") for name in ("a", "a-again")}

    def wall(_: Cell) -> float:
        return float(10 * np.exp(dice.normal(0, spread)))

    run = write_made_run(folder, wall, made_of=scenario(servers=servers), **manifest)
    return run, measure_noise(run, summarize(folder), "b")


def two_runs(folder: Path, spread: float, **manifest: Any) -> tuple[Run, StoredNoise]:
    run, one = aa_run(folder / "aa", spread, **manifest)
    _, other = aa_run(folder / "aa-2", spread, seed=4, **manifest)
    return run, join_noise(one, other)


def test_stored_noise_decides_a_comparison_of_single_runs(tmp_path: Path) -> None:
    run, noise = two_runs(tmp_path, 0.001)
    write_made_run(tmp_path / "one", lambda cell: 10 + 0.01 * cell.repeat)
    write_made_run(tmp_path / "two", lambda cell: 20 + 0.02 * cell.repeat)
    groups, results = [[tmp_path / "one"], [tmp_path / "two"]], tmp_path / "results"
    before = compare_runs(groups, results=results)
    assert (sentences(before.noise_source), [v.word for v in before.verdicts]) == (
        ["not measured for which on strix"], ["inconclusive"] * 2,
    )  # fmt: skip
    write_noise(noise_path(results, run), noise)
    after = compare_runs(groups, results=results)
    assert sentences(after.noise_source) == ["A/A on strix, 2 runs of 'b', 2027-01-15"]
    assert [v.word for v in after.verdicts] == ["slower", "slower"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"workload_sha256": "cd" * 32}, "workload"), ({"model": "n"}, "model"), ({"simulated": True}, "kind of engine")],
)
def test_noise_of_other_conditions_is_not_used(tmp_path: Path, change: dict[str, object], why: str) -> None:
    run, noise = two_runs(tmp_path, 0.03)
    write_noise(noise_path(tmp_path, run), msgspec.structs.replace(noise, **change))
    found = known_noise([run], tmp_path)
    source = [because("noise_unknown", scenario="which", machine="strix", other=why)]
    assert (found.rows, found.source) == ({}, source)


def test_of_two_machines_the_wider_variation_counts(tmp_path: Path) -> None:
    results = tmp_path / "results"
    strix, wide = two_runs(tmp_path / "strix", 0.03)
    other, narrow = two_runs(tmp_path / "other", 0.004, machine=Machine(name="other"))
    write_noise(noise_path(results, strix), wide)
    assert known_noise([strix, other], results).source == [
        because("noise_unknown", scenario="which", machine="other", other=None)
    ]
    write_noise(noise_path(results, other), narrow)
    both = known_noise([strix, other], results)
    assert both.rows["wall_s", "x"] == wide.rows[0].variation()
    assert sentences(both.source) == [
        "A/A on strix, 2 runs of 'b', 2027-01-15",
        "A/A on other, 2 runs of 'b', 2027-01-15",
    ]
