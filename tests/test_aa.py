"""A/A and A/B on the embedded engine: the same is never called faster or slower, 10 % slower is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import harness, only_run, write
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.alone
# Long sleeps and little work, so that a busy machine shows less than the 10 % that are to be found.
WORK: dict[str, Any] = {
    "loads": {"burst": {"user": "batch", "batch_size": 5, "requests": 10, "output_tokens": 15}},
    "prompts": {"tokens": 20},
    "warmup": {"requests": 1},
    "repeats": 5,
}


def engine(*extra_args: str) -> dict[str, Any]:
    variables = {"preset": "strix-halo-qwen3.5-0.8b", "extra_args": ["--jitter", "0.01", *extra_args]}
    return {"template": "simulated", "container": False, "variables": variables}


SLOWER = engine("--slowdown", "1.1")


def test_within_a_run(tmp_path: Path) -> None:
    servers = {"a": engine(), "a-again": engine("--seed", "7"), "ten-percent-slower": SLOWER}
    path = write(tmp_path, servers=servers, **WORK)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, timeout_s=120)
    assert (done.code, done.err) == (0, "")
    comparison = json.loads((only_run(tmp_path / "runs") / "summary.json").read_text())["comparison"]
    same, slower = comparison["verdicts"]
    assert (same["side"], slower["side"]) == ("a-again / burst", "ten-percent-slower / burst")
    assert same["word"] in ("same", "inconclusive"), same
    assert 0.95 < same["ratio"] < 1.05
    assert slower["word"] == "slower", slower
    assert 0.86 < slower["ratio"] < 0.95
    assert slower["low"] < 0.91 < slower["high"] or abs(slower["ratio"] - 1 / 1.1) < 0.02
    assert "x slower" in done.out


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Runs of the same scenario on equal servers, and on one that is 10 % slower: a folder and their ids."""
    folder = tmp_path_factory.mktemp("runs-to-compare")
    ids = []
    work = WORK | {"repeats": 5 if NIGHTLY else 2}  # the nightly test finds the difference
    for name, server in (("base", engine()), ("again", engine()), ("slow", SLOWER)):
        path = write(folder, name, servers={"a": server}, **work)
        done = harness("run", path.name, "--runs", name, cwd=folder, timeout_s=120)
        assert (done.code, done.err) == (0, "")
        ids.append(f"{name}/{only_run(folder / name).name}")
    return folder, ids


def compare(folder: Path, *args: str) -> tuple[int, list[dict[str, Any]]]:
    done = harness("compare", *args, "--format", "json", cwd=folder)
    assert done.err == ""
    return done.code, json.loads(done.out)["verdicts"]


@pytest.mark.nightly
def test_a_slower_run_on_a_machine_whose_variation_is_known(three_runs: tuple[Path, list[str]]) -> None:
    folder, (base, again, slow) = three_runs
    path = write(folder, "base", servers={"a": engine()}, **(WORK | {"repeats": 2}))
    done = harness("noise", path.name, "--runs", "3", "--runs-dir", "aa", cwd=folder, timeout_s=240)
    assert (done.code, done.err) == (0, "")
    stored = next(folder.glob("results/*/base/noise.json"))
    # The scenarios of these runs have names of their own.
    for name in ("again", "slow"):
        other = stored.parent.parent / name
        other.mkdir()
        (other / "noise.json").write_text(stored.read_text().replace('"scenario": "base"', f'"scenario": "{name}"'))
    about = ("--about", "arguments")
    code, (verdict,) = compare(folder, base, slow, *about)
    assert (code, verdict["word"]) == (4, "slower"), verdict
    code, (verdict,) = compare(folder, slow, base, *about)
    assert (code, verdict["word"]) == (0, "faster"), verdict
    code, (verdict,) = compare(folder, base, again)
    assert code == 0 and verdict["word"] in ("same", "inconclusive"), verdict
