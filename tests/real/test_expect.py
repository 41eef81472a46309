"""The bound of decode on a real engine: llama.cpp on the CPU reads random weights, one user."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.advice.bandwidth import measure_cpu
from harness.advice.expect import decode_bound, decode_speed
from harness.advice.hardware import GpuSpec
from harness.records.run_data import load
from harness.serve.bandwidth import SCRIPT
from tests.real.conftest import Say
from tests.real.parts import llamacpp, run, write_scenario
from tests.support.engines.paths import LLAMACPP_VENV, REPO, VLLM_VENV

LARGE = "tests.support.engines.make_large_gguf"


@pytest.mark.alone
@pytest.mark.parametrize("millions", [500, pytest.param(1500, marks=pytest.mark.nightly)])
def test_one_user_comes_near_the_bound_of_the_measured_bandwidth(tmp_path: Path, millions: int, say: Say) -> None:
    """On two idle cores of a 2.5 GHz Xeon that read 23.6 GB/s: 500 M parameters 52 %, 1.5 B 74 %."""
    path = tmp_path / "large.gguf"
    subprocess.run([LLAMACPP_VENV / "bin" / "python", "-m", LARGE, path, str(millions)], cwd=REPO, check=True)
    server = llamacpp(
        model_path="/models/large.gguf",
        parallel=1,
        ctx_size=1024,
        extra_args=["--threads", str(len(os.sched_getaffinity(0)))],
    )
    server["variables"]["volumes"] = [server["variables"]["volumes"][0], f"{path}:/models/large.gguf:ro"]
    scenario = write_scenario(
        tmp_path,
        "bound",
        model="large",
        servers={"llamacpp": server},
        loads={"one": {"user": "batch", "batch_size": 1, "requests": 5, "output_tokens": 16}},
        warmup={"requests": 1},
    )
    before = measure_cpu()
    ran = run(scenario)
    bandwidth = max(before, measure_cpu())
    cell = next(iter(load(ran.folder).cells.values()))
    size = ran.manifest.cells[0].served_by.model_size
    speed = decode_speed(cell)
    assert size is not None and speed is not None, ran.error
    assert size.read_bytes == pytest.approx(2e6 * millions, rel=0.1)
    cpu = GpuSpec(names=["CPU"], target="", bandwidth_gb_s=bandwidth, fp16_tflops=None)
    bound = decode_bound(size, cpu, context=speed[2])
    # The best eight tokens in a row of five answers: a process that takes a core for a moment slows all others.
    chunks = [record.chunks_s for record in ran.records if record.phase == "measured"]
    best = max(8 / (last - first) for times in chunks for first, last in zip(times, times[8:], strict=False))
    say(f"{millions} M: {best:.1f} of at most {bound:.1f} tok/s at {bandwidth:.1f} GB/s: {100 * best / bound:.0f} %")
    assert 0.4 <= best / bound <= 1


def test_the_measurement_of_a_gpu_prints_its_bandwidth() -> None:
    """With the torch of vLLM on the CPU, which is what a server's image has in place of a GPU here."""
    done = subprocess.run([VLLM_VENV / "bin" / "python", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"read GB/s: \d+\.\d+\n", done.stdout)
