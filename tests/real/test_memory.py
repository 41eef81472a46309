"""Real vLLM: the KV cache is what was foretold, and it starts with the share that `auto` computed."""

from pathlib import Path

import pytest

from harness.memory.model import CPU_BLOCK, capacity, layout_of, read_model
from harness.rundir.manifest import Run
from harness.units import GIB
from tests.engines.paths import QWEN3_100M
from tests.real.conftest import Say, Timed
from tests.real.parts import run, vllm, write_scenario

pytestmark = pytest.mark.timeout(600)
LONGEST = 2048
LIMIT_GIB = 8


def foretold(gib: float) -> tuple[int, float]:
    """Tokens and concurrency of a KV cache of so many GiB."""
    geometry = read_model(QWEN3_100M).geometry
    assert geometry is not None
    found = capacity(layout_of(geometry, 2, block=CPU_BLOCK), int(gib * GIB), LONGEST)
    return found.tokens, found.concurrency


def test_the_kv_cache_is_the_one_that_was_foretold(batching: Timed) -> None:
    for cell in batching.ran.manifest.cells:
        startup = cell.served_by.startup
        assert startup is not None
        assert (startup.kv_cache_tokens, startup.max_concurrency) == foretold(1)


@pytest.mark.paired
def test_auto_starts_and_takes_what_it_said(tmp_path: Path, say: Say) -> None:
    variables = {"gpu_memory_utilization": "auto", "kv_cache_gib": None, "mem_limit": f"{LIMIT_GIB}g"}
    scenario = write_scenario(
        tmp_path,
        "auto",
        model="qwen3-100m",
        servers={"cpu": vllm(**variables)},
        loads={"burst": {"user": "batch", "batch_size": 4, "requests": 4, "output_tokens": 8}},
    )
    ran = run(scenario)
    assert (ran.code, ran.error) == (0, "")
    say(ran.said.splitlines()[0])
    of_auto(ran.manifest)


def of_auto(manifest: Run) -> None:
    """All cells have the number, the manifest says how it came about, and vLLM made of it what it had to."""
    value = manifest.scenario.servers["cpu"].variables["gpu_memory_utilization"]
    assert isinstance(value, float) and 0.1 <= value <= 0.5  # 4 of the 8 GiB are left to vLLM's own processes
    why = manifest.computed["servers.cpu.gpu_memory_utilization"]
    assert why.startswith(f"{value:.2f} = (")
    for cell in manifest.cells:
        arguments, startup = cell.served_by.arguments, cell.served_by.startup
        assert arguments[arguments.index("--gpu-memory-utilization") + 1] == str(value)
        assert startup is not None and startup.kv_cache_gib is not None and startup.kv_cache_tokens is not None
        assert 0.5 * value * LIMIT_GIB < startup.kv_cache_gib < value * LIMIT_GIB  # the rest is weights and program
        least, most = (foretold(startup.kv_cache_gib + off)[0] for off in (-0.005, 0.005))
        assert least <= startup.kv_cache_tokens <= most
