"""Flags against the help of the real vLLM, asked in its container."""

import time
from pathlib import Path

import pytest

from harness.errors import ExitCode
from tests.real.conftest import Say
from tests.real.parts import left_behind, run, vllm, write_scenario

pytestmark = pytest.mark.paired

LOADS = {"bursts": {"user": "batch", "requests": 1, "output_tokens": 4}}
WRONG = ["--max-num-sqs", "5", "--swap-space", "16", "--num_scheduler_steps=8", "--tokenizer-mod", "auto", "-O0"]


def test_wrong_flags_are_all_named_before_the_start(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    took = []
    for name in ("first", "again"):
        scenario = write_scenario(tmp_path, name, model="m", servers={"s": vllm(extra_args=WRONG)}, loads=LOADS)
        began = time.monotonic()
        ran = run(scenario, timeout_s=200)
        took.append(time.monotonic() - began)
        problems = [line.removeprefix("  | ") for line in ran.error.splitlines() if line.startswith("  | ")]
        assert ran.code == ExitCode.SERVER
        assert problems == [
            "--max-num-sqs: this vLLM has no such option; did you mean '--max-num-seqs'?",
            "--swap-space: vLLM does not know it any more since 0.18.0: leave it out; vLLM's present engine has never "
            "swapped the KV cache to the host (vLLM PR 36216)",
            "--num-scheduler-steps: vLLM does not know it any more since 0.11.0: leave it out; the present engine "
            "schedules every step and hides its cost with --async-scheduling (vLLM PR 22138)",
        ]
        assert ran.records == []
        assert (ran.folder / "logs" / "r1-s-bursts.server.log").stat().st_size == 0  # it was not even started
        assert left_behind(ran.folder) == []
    say(f"wrong flags refused after {took[0]:.1f} s with the help of real vLLM, after {took[1]:.1f} s from the cache")
    assert took[1] < took[0]
