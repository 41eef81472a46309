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
    known_variations,
    measure_noise,
    noise_path,
    noise_source,
    read_noise,
    usable_noise,
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
    assert msgspec.to_builtins(noise_source(joint)) in found["noise_source"]
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


def test_stored_noise_confirms_a_comparison_of_single_runs(tmp_path: Path) -> None:
    """Five A/A runs count as much as the assumption. They are of the server b, so they show nothing of a."""
    run, noise = two_runs(tmp_path, 0.001)
    for seed in (5, 6, 7):
        noise = join_noise(noise, aa_run(tmp_path / f"aa-{seed}", 0.001, seed)[1])
    write_made_run(tmp_path / "one", lambda cell: 10 + 0.01 * cell.repeat)
    write_made_run(tmp_path / "two", lambda cell: 11.5 + 0.02 * cell.repeat)
    groups, results = [[tmp_path / "one"], [tmp_path / "two"]], tmp_path / "results"
    before = compare_runs(groups, results=results)
    assert sentences(before.noise_source) == ["4% assumed (counts as much as 5 runs)"]
    assert [(v.word, v.provisional) for v in before.verdicts] == [("no_difference", True)] * 2
    write_noise(noise_path(results, run), noise)
    after = compare_runs(groups, results=results)
    assert sentences(after.noise_source)[1:] == ["A/A on strix, 5 runs of 'b', 2027-01-15"]
    assert [(v.side, v.word, v.provisional) for v in after.verdicts] == [
        ("a / x", "no_difference", True), ("b / x", "slower", False),
    ]  # fmt: skip
    other = msgspec.structs.replace(noise, image_digest="sha256:2222")
    write_noise(noise_path(results, run), other)
    assert [v.provisional for v in compare_runs(groups, results=results).verdicts] == [True, True], "of another image"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"workload_sha256": "cd" * 32}, "workload"), ({"model": "n"}, "model"), ({"simulated": True}, "kind of engine")],
)
def test_noise_of_other_conditions_is_not_used(tmp_path: Path, change: dict[str, object], why: str) -> None:
    run, noise = two_runs(tmp_path, 0.03)
    write_noise(noise_path(tmp_path, run), msgspec.structs.replace(noise, **change))
    reason = because("noise_of_other_work", scenario="which", machine="strix", other=why)
    assert usable_noise(run, tmp_path) == (None, reason)
    assert known_variations(run, tmp_path) == {}


def test_the_noise_of_two_machines_is_pooled(tmp_path: Path) -> None:
    results = tmp_path / "results"
    strix, wide = two_runs(tmp_path / "strix", 0.03)
    other, narrow = two_runs(tmp_path / "other", 0.004, machine=Machine(name="other"))
    for run, noise in ((strix, wide), (other, narrow)):
        write_noise(noise_path(results, run), noise)
    write_made_run(tmp_path / "one", lambda cell: 10.0)
    write_made_run(tmp_path / "two", lambda cell: 10.0, machine=Machine(name="other"))
    found = compare_runs([[tmp_path / "one"], [tmp_path / "two"]], about="machine", results=results)
    assert sentences(found.noise_source)[1:] == [
        "A/A on strix, 2 runs of 'b', 2027-01-15",
        "A/A on other, 2 runs of 'b', 2027-01-15",
    ]
    variations = [variation for noise in (wide, narrow) if (variation := noise.rows[0].variation()) is not None]
    squares = sum(variation.run_variance(5) for variation in variations)  # one degree of freedom each
    error = ((4 * 0.04**2 + squares) / 6 * 2) ** 0.5
    (verdict,) = [one for one in found.verdicts if one.side == "b / x"]
    assert verdict.high == pytest.approx(np.exp(2.4469 * error), rel=1e-4)
