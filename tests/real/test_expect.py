"""The bound of decode on a real engine: llama.cpp on the CPU reads random weights, one user."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.hardware.bandwidth import BYTES_PER_CORE
from harness.hardware.bounds import decode_bound, decode_speed
from harness.hardware.gpu_table import GpuSpec
from harness.hardware.model import read_model
from harness.records.run_data import load
from harness.serve.container_bandwidth import SCRIPT
from tests.real.conftest import Say
from tests.real.parts import llamacpp, run, write_scenario
from tests.support.engines.paths import LLAMACPP_VENV, REPO, VLLM_VENV

LARGE = "tests.support.engines.make_large_gguf"


@contextmanager
def reading(read_bytes: float) -> Iterator[list[float]]:
    """Yield the GB/s at which one thread reads so many bytes, again and again with pauses, until the block ends."""
    block, speeds, ended = np.ones(BYTES_PER_CORE // 4, dtype=np.float32), list[float](), threading.Event()
    rounds = max(1, round(read_bytes / block.nbytes))

    def read() -> None:
        pause_s = 0.0
        while not ended.wait(pause_s):
            start_s = time.perf_counter()
            for number in range(rounds):
                np.max(block) if number % 2 else np.dot(block, block)
            pause_s = time.perf_counter() - start_s
            speeds.append(rounds * block.nbytes / pause_s / 1e9)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield speeds
    finally:
        ended.set()
        thread.join()


@pytest.mark.alone
@pytest.mark.parametrize("millions", [500, pytest.param(1500, marks=pytest.mark.nightly)])
def test_one_user_comes_near_the_bound_of_the_measured_bandwidth(tmp_path: Path, millions: int, say: Say) -> None:
    """One thread decodes, and one reads as many bytes in the same seconds: what else runs slows both."""
    path = tmp_path / "large.gguf"
    subprocess.run([LLAMACPP_VENV / "bin" / "python", "-m", LARGE, path, str(millions)], cwd=REPO, check=True)
    server = llamacpp(model_path="/models/large.gguf", parallel=1, ctx_size=1024)  # with one thread
    server["variables"]["volumes"] = [server["variables"]["volumes"][0], f"{path}:/models/large.gguf:ro"]
    scenario = write_scenario(
        tmp_path,
        "bound",
        model="large",
        servers={"llamacpp": server},
        loads={"one": {"user": "batch", "batch_size": 1, "requests": 3, "output_tokens": 8}},
        prompts={"tokens": 4},  # a prompt takes one thread longer than its answer
        warmup={"requests": 1},
    )
    with reading(2e6 * millions) as speeds:
        ran = run(scenario)
    cell = next(iter(load(ran.folder).cells.values()))
    size = ran.manifest.cells[0].served_by.model_size
    speed = decode_speed(cell)
    assert size is not None and speed is not None, ran.error
    assert size.read_bytes == pytest.approx(2e6 * millions, rel=0.1)
    cpu = GpuSpec(names=["CPU"], target="", bandwidth_gb_s=max(speeds), fp16_tflops=None)
    bound = decode_bound(size, cpu, context=speed[2])
    # The best token and the best reading, which take about as long: those that other programs disturbed least.
    chunks = [record.chunks_s for record in ran.records if record.phase == "measured"]
    best = 1 / min(last - first for times in chunks for first, last in pairwise(times))
    say(f"{millions} M: {best:.2f} of at most {bound:.2f} tok/s at {max(speeds):.1f} GB/s: {100 * best / bound:.0f} %")
    assert 0.4 <= best / bound <= 1


def test_the_measurement_of_a_gpu_prints_its_bandwidth() -> None:
    """With the torch of vLLM on the CPU, which is what a server's image has in place of a GPU here."""
    done = subprocess.run([VLLM_VENV / "bin" / "python", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"read GB/s: \d+\.\d+\n", done.stdout)


HYBRID = "tests.support.engines.make_hybrid_gguf"
# With its log, which names the sizes of the caches, and without a request.
LOAD = """
import os, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = sys.argv[1], 8192, 1, False, 6
params.hostnames, params.port = ["127.0.0.1"], 0
server = xllamacpp.Server(params)
os._exit(0)  # its threads still run
"""


@pytest.mark.parametrize("kind", ["lfm2", "gemma3", "jamba", "qwen35"])
def test_the_cache_is_the_one_that_llamacpp_takes(tmp_path: Path, kind: str) -> None:
    """Bytes of layers that keep all tokens, those of a window, and the recurrent state; in MiB with two decimals."""
    path = tmp_path / "m.gguf"
    python = LLAMACPP_VENV / "bin" / "python"
    subprocess.run([python, "-m", HYBRID, path, kind], cwd=REPO, check=True)
    log = subprocess.run([python, "-c", LOAD, path], capture_output=True, text=True, check=True)
    text = log.stdout + log.stderr
    caches = {
        int(cells): (float(size), int(layers))
        for size, cells, layers in re.findall(
            r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers", text
        )
    }
    states = {float(size) for size in re.findall(r"llama_memory_recurrent: size = +([\d.]+) MiB", text)}
    shape = read_model(path).geometry
    assert shape is not None
    kept, mib = 8192, 1 << 20
    assert caches.pop(kept) == (round(2 * kept * shape.full_numbers() / mib, 2), sum(one.layers for one in shape.full))
    for cells, (size, layers) in caches.items():  # the window, and one batch
        assert shape.window is not None and shape.window < cells <= shape.window + 512
        assert size == pytest.approx(2 * cells * shape.sliding_numbers() / mib, abs=0.01)
        assert layers == sum(one.layers for one in shape.sliding)
    assert bool(caches) == (shape.window is not None)
    assert states == (set() if shape.state_bytes is None else {round(shape.state_bytes / mib, 2)})
