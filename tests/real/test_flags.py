"""Flags that the real vLLM refuses: it ends at once, and its line is explained."""

from pathlib import Path

import pytest

from harness.errors import ExitCode
from tests.real.conftest import Say
from tests.real.parts import left_behind, run, vllm, write_scenario

pytestmark = pytest.mark.nightly  # test_explained.py has the same line of the same program
LOADS = {"bursts": {"user": "batch", "requests": 1, "output_tokens": 4}}
WRONG = ["--max-num-sqs", "5", "--swap-space", "16", "--num_scheduler_steps=8", "--tokenizer-mod", "auto", "-O0"]


def test_wrong_flags_end_the_start_and_are_explained(tmp_path: Path, say: Say) -> None:
    scenario = write_scenario(tmp_path, "flags", model="m", servers={"s": vllm(extra_args=WRONG)}, loads=LOADS)
    ran = run(scenario, timeout_s=200)
    say(ran.error)
    assert ran.code == ExitCode.SERVER
    line = "vllm: error: unrecognized arguments: --max-num-sqs 5 --swap-space 16 --num-scheduler-steps=8"
    assert line in ran.error
    assert "[cli.unknown_flag]" in ran.error
    assert ran.records == []
    assert left_behind(ran.folder) == []
