"""A/A and A/B on the embedded engine: the same is never faster or slower, 10 % slower is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.numbers.comparison import MARGIN
from tests.support.command import harness, only_run, write

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.alone,
]  # on stored runs and made ones: test_compare, test_verdicts_simulated
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
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    comparison = json.loads((only_run(tmp_path / "runs") / "summary.json").read_text())["comparison"]
    same, slower = comparison["verdicts"]
    assert (same["side"], slower["side"]) == ("a-again / burst", "ten-percent-slower / burst")
    assert same["word"] in ("same", "inconclusive"), same
    assert same["low"] < 1 + MARGIN and same["high"] > 1 / (1 + MARGIN), same
    # A busy machine makes the interval wider; a width of 5 % is enough to find 10 %.
    assert slower["word"] == "slower" or slower["high"] > 1.05 * slower["low"], slower
    assert slower["word"] not in ("faster", "same"), slower
