"""What real servers say when they fail, explained: the row of the table and the value in its fix."""

import re
import subprocess
from pathlib import Path

import pytest

from harness.base.errors import ExitCode
from harness.failures.diagnosis import Diagnosis, explain
from tests.real.conftest import Say
from tests.real.parts import RUN_S, llamacpp, run_folder, running, write_scenario
from tests.support.engines.paths import BASE_IMAGE, QWEN3_4M, VLLM_VENV

CASES = ("flags", "hub", "fraction", "kv-cache", "context")
HERE = Path(__file__).parent
LOADS = {"bursts": {"user": "batch", "batch_size": 5, "requests": 2000, "output_tokens": 16}}


@pytest.fixture(scope="module")
def vllm_outputs() -> dict[str, str]:
    """What the real vLLM says of each case, which changes with its version only: tests/unit/failures has its words."""
    # One stream for both: Docker hands two on without their order.
    both = ["sh", "-c", 'exec "$0" "$@" 2>&1']
    command = [
        "docker", "run", "--rm", "--init", "--network=none", "--shm-size=1g", "--security-opt=seccomp=unconfined",
        "--cap-add=SYS_NICE", f"--volume={VLLM_VENV}:{VLLM_VENV}:ro", f"--volume={QWEN3_4M}:/models/tiny:ro",
        f"--volume={HERE}:/tests:ro", "--env=HF_HUB_OFFLINE=1", "--env=VLLM_NO_USAGE_STATS=1",
        "--env=VLLM_ENABLE_V1_MULTIPROCESSING=0", "--env=VLLM_LOGGING_COLOR=0", BASE_IMAGE, *both,
        str(VLLM_VENV / "bin" / "python"), "/tests/refused_starts.py", "/models/tiny", *CASES,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_S)
    parts = re.split(r"^== (\S+)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cause_of(text: str, say: Say) -> Diagnosis:
    failure = explain(text)
    assert failure is not None, text
    say(f"{failure.id}: {failure.cause}\n  line {failure.number}: {failure.line}\n  fix: {failure.fix}")
    return failure


@pytest.mark.nightly
def test_memory_fraction_too_high(vllm_outputs: dict[str, str], say: Say) -> None:
    failure = cause_of(vllm_outputs["fraction"], say)
    assert failure.id == "mem.free_lt_util"
    free, total = map(float, re.findall(r"\(([\d.]+)/([\d.]+) GiB\)", failure.line)[0])
    (safe,) = re.findall(r"\(to ([\d.]+) or less\)", failure.fix)
    assert 0 < float(safe) * total < min(free, total), "vLLM would start with it"
    assert float(safe) == 0.92 or (float(safe) + 0.01) * total > min(free, total) - max(1.0, free / 50) - 0.1


@pytest.mark.nightly
def test_kv_cache_too_small(vllm_outputs: dict[str, str], say: Say) -> None:
    failure = cause_of(vllm_outputs["kv-cache"], say)
    assert failure.id == "mem.kv_lt_one_request"
    (maximum,) = re.findall(r"estimated maximum model length is (\d+)", failure.line)
    assert 0 < int(maximum) < 4096
    assert " 4096 " in failure.cause and " 0.02 GiB " in failure.cause
    assert failure.fix.startswith(f"set max_model_len (ctx_size behind Lemonade) to {maximum} or less")


@pytest.mark.nightly
def test_removed_flags(vllm_outputs: dict[str, str], say: Say) -> None:
    assert "exit code 2" in vllm_outputs["flags"]
    failure = cause_of(vllm_outputs["flags"], say)
    assert failure.id == "cli.unknown_flag"
    assert failure.cause.endswith(": --swap-space 16 --disable-log-requests")
    assert re.search(r"^--swap-space: .* 0\.18\.0\b.*--disable-log-requests: .* 0\.17\.0\b", failure.fix, re.DOTALL)


@pytest.mark.nightly
def test_a_model_that_is_on_the_hub_only(vllm_outputs: dict[str, str], say: Say) -> None:
    failure = cause_of(vllm_outputs["hub"], say)
    assert failure.id == "hf.network"


@pytest.mark.nightly
def test_context_above_the_model(vllm_outputs: dict[str, str], say: Say) -> None:
    failure = cause_of(vllm_outputs["context"], say)
    assert failure.id == "cli.maxlen"
    assert failure.fix == "set max_model_len (ctx_size behind Lemonade) to 4096 or less"


def test_requests_that_do_not_fit_a_real_server_are_not_sent(tmp_path: Path, say: Say) -> None:
    server = llamacpp(ctx_size=2560)  # shared by ten: 256 tokens for each
    scenario = write_scenario(tmp_path, "narrow", model="tiny", servers={"s": server}, loads=LOADS,
                              prompts={"tokens": 600})  # fmt: skip
    with running(scenario) as process:
        code = process.wait(RUN_S)
    error = scenario.with_suffix(".err").read_text()
    say(error)
    assert (code, "256 tokens" in error, run_folder(scenario)) == (ExitCode.SERVER, True, None)
