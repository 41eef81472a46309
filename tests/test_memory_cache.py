"""The KV cache as vLLM counts it: against vLLM's own functions, and against lines of its log."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.machine.model import Geometry, compute_capacity, make_layout
from harness.units import GIB

DATA = Path(__file__).parent / "data" / "vllm_kv_capacity.jsonl"
CPU_BLOCK = 128  # tokens, of vLLM on a CPU
CASES: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text().splitlines()[1:]]
QWEN3_06B = Geometry(full_layers=28, kv_heads=8, head_size=128)
QWEN3_100M = Geometry(full_layers=14, kv_heads=4, head_size=64)
# vLLM 0.32.0 on a CPU with --gpu-memory-utilization 0.5 in a container of 8 GiB.
AUTO = (
    "Auto set (3.22/8.0) GiB for KV cache on node 0, with 4.0 GiB requested memory for the worker. 0.78 GiB memory was "
    "consumed by non-kv usages.",
    "CPU KV cache size: 240,896 tokens, Maximum concurrency for 2,048 tokens per request: 117.62x",
)
# 100 MiB for a model that needs more.
REFUSED = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (0.44 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.08 GiB). Based on the available memory, the estimated "
    "maximum model length is 768. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
    "backend) or decreasing `max_model_len` when initializing the engine."
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['full_layers']}+{c['sliding_layers']}-{c['max_model_len']}")
def test_as_vllms_own_functions(case: dict[str, Any]) -> None:
    names = ("full_layers", "sliding_layers", "window", "kv_heads", "head_size", "latent")
    geometry = Geometry(**{name: case[name] for name in names})
    layout = make_layout(geometry, 2, block=case["block"], in_flight=case["in_flight"])
    found = compute_capacity(layout, case["available"], case["max_model_len"])
    if case["tokens"] is None:
        assert (found.fits, found.longest) == (False, case["longest"])
    else:
        assert (found.fits, found.tokens, round(found.concurrency, 4)) == (True, case["tokens"], case["concurrency"])
        assert found.longest == case["max_model_len"]


def test_lines_of_a_start_by_a_share() -> None:
    gib = float(AUTO[0].partition("(")[2].partition("/")[0])
    tokens, concurrency = re.findall(r"size: ([\d,]+) .*: ([\d.]+)x", AUTO[1])[0]
    minimum, maximum = (
        compute_capacity(make_layout(QWEN3_100M, 2, block=CPU_BLOCK), int(g * GIB), 2048)
        for g in (gib - 0.005, gib + 0.005)
    )
    assert minimum.tokens <= int(tokens.replace(",", "")) <= maximum.tokens
    assert minimum.concurrency <= float(concurrency) <= maximum.concurrency


def test_a_line_of_a_refusal() -> None:
    layout = make_layout(QWEN3_06B, 2, block=CPU_BLOCK)
    found = compute_capacity(layout, 100 << 20, 4096)
    match = re.search(r"\(([\d.]+) GiB KV.*memory \(([\d.]+) GiB\).*length is (\d+)", REFUSED)
    assert match is not None
    usable = (100 << 20) - layout.block_bytes
    assert match.groups() == (f"{layout.request_bytes(4096) / GIB:.2f}", f"{usable / GIB:.2f}", str(found.longest))
    assert not found.fits


def test_what_a_token_costs() -> None:
    assert (
        make_layout(QWEN3_06B, 2).token_bytes
        == 2 * 28 * 8 * 128 * 2
        == 2 * (make_layout(QWEN3_06B, 1).token_bytes or 0)
    )
    sizes = [make_layout(QWEN3_06B, 2, tensor_parallel=gpus).token_bytes for gpus in (1, 2, 8, 16)]
    assert sizes == [114688, 57344, 14336, 14336]  # heads are divided among GPUs, but each has one
    latent = Geometry(full_layers=61, kv_heads=1, head_size=576, latent=True)
    assert {make_layout(latent, 2, tensor_parallel=gpus).token_bytes for gpus in (1, 8)} == {61 * 576 * 2}
    window = Geometry(full_layers=1, sliding_layers=1, window=128, kv_heads=1, head_size=64)
    assert make_layout(window, 2).token_bytes is None  # a window has no price of a token
