"""The answer: the share, its formula, what is left for a model, and what to do when that is not enough."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.machine.memory import (
    OTHER_BYTES,
    ModelFit,
    Pool,
    ServerSettings,
    compute_pool_share,
    compute_share,
    estimate_fit,
    format_fit,
    format_pool,
    format_share,
    list_pools,
    summarize_fit,
)
from harness.machine.model import ModelShape, read_model
from harness.reasons import sentence
from harness.units import GIB
from tests.command import harness
from tests.machines import strix_halo_carve_out, strix_halo_gtt
from tests.test_memory_model import QWEN3, model, safetensors

SEED = compute_pool_share(int(76.45 * GIB), 96 * GIB, source="given")


def pool(free_gib: float | None, total_gib: float = 96, *, available_gib: float | None = None) -> Pool:
    free = None if free_gib is None else int(free_gib * GIB)
    return Pool(
        render_node="/dev/dri/renderD128",
        target="gfx1151",
        kind="vram" if available_gib is None else "gtt",
        total_bytes=int(total_gib * GIB),
        used_bytes=None if free is None else int(total_gib * GIB) - free,
        free_bytes=free,
        host_available_bytes=None if available_gib is None else int(available_gib * GIB),
        doubts=["the driver does not tell"] if free is None else [],
    )


def qwen3(folder: Path, gib: float = 1.5, **changes: Any) -> ModelShape:
    """Qwen3-0.6B with weights of any size."""
    model(folder, QWEN3 | changes)
    size = int(gib * GIB)
    safetensors(folder / "model.safetensors", {"w": ("BF16", [size // 2], size)})
    return read_model(folder, "Qwen/Qwen3-0.6B")


def test_the_seeds_case_as_given() -> None:
    assert SEED.utilization == Decimal("0.78")
    assert (
        sentence(SEED.formula) == "(76.45 GiB free - 1.53 GiB reserve) / 96.00 GiB total = 0.7804, down to hundredths"
    )
    assert SEED.budget_bytes == 80401787781  # 74.88 GiB


@pytest.mark.parametrize(
    ("pools", "gpus", "utilization", "formula"),
    [
        # The driver does not know the share of the runtime.
        ([pool(76.45)], 1, "0.77", "(76.45 GiB free - 2.53 GiB reserve) / 96.00 GiB total = ..."),
        ([pool(95.6)], 1, "0.92", "... = 0.9655, down to hundredths, at most 0.92 (the engine's default)"),
        ([pool(122, 124, available_gib=90)], 1, "0.69",
         "(90.00 GiB available on the host - 4.00 GiB left to it) / 124.00 GiB total = 0.6935, down to hundredths"),
        ([pool(190, 192), pool(150, 192), pool(10, 192)], 2, "0.76", "(150.00 GiB free - ..."),
    ],
    ids=["driver", "cap", "host", "two-gpus"],
)  # fmt: skip
def test_the_share_of_pools(pools: list[Pool], gpus: int, utilization: str, formula: str) -> None:
    share = compute_share(pools, tensor_parallel=gpus)
    assert (share.utilization, share.gpus) == (Decimal(utilization), gpus)
    assert re.fullmatch(re.escape(formula).replace(re.escape("..."), ".*"), sentence(share.formula))


def test_the_line_of_several_gpus() -> None:
    share = compute_share([pool(190, 192), pool(150, 192)], tensor_parallel=2)
    assert format_share(share)[0] == (
        "--gpu-memory-utilization 0.76 (145.92 GiB of each of 2 GPUs, by the one that has least: /dev/dri/renderD128)"
    )


def test_no_length_beyond_the_models_own_is_advised(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path, gib=67), SEED, ServerSettings(max_model_len=500000))
    assert room.capacity is not None and 40960 < room.capacity[0].longest < 500000
    assert room.advice[0].endswith("set --max-model-len 40960")


def test_free_above_total_is_said() -> None:
    found = compute_pool_share(120 * GIB, int(62.47 * GIB), source="given")
    assert found.utilization == Decimal("0.92")
    assert found.doubts == ["120.00 GiB of 62.47 GiB are reported as free; the total is the limit"]


def test_nothing_left_is_an_answer() -> None:
    found = compute_share([pool(1.5)])
    assert (found.utilization, found.budget_bytes) == (None, 0)
    assert format_share(found)[0] == "nothing is left for vLLM: stop what holds the memory (`harness doctor` names it)"


@pytest.mark.parametrize(
    ("pools", "gpus", "what"),
    [
        ([], 1, "no AMD GPU is known to this machine's kernel (/sys/class/kfd)"),
        ([pool(90)], 2, "2 GPUs are asked for, and there are 1"),
        ([pool(None)], 1, "/dev/dri/renderD128: the driver does not tell"),
    ],
)
def test_what_cannot_be_known_is_an_error(pools: list[Pool], gpus: int, what: str) -> None:
    with pytest.raises(HarnessError) as caught:
        compute_share(pools, tensor_parallel=gpus)
    assert caught.value.what == what
    assert "harness memory --free" in caught.value.next_step


def test_what_is_left_for_a_model(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path), SEED, ServerSettings(max_model_len=8192, max_num_seqs=10))
    rest = SEED.budget_bytes - room.weights_bytes  # type: ignore[operator]
    assert room.kv_bytes == (rest - OTHER_BYTES[1], rest - OTHER_BYTES[0])
    assert (room.token_bytes, room.request_bytes) == (114688, 8192 * 114688)
    assert room.capacity is not None
    careful, hopeful = room.capacity
    assert careful.tokens == room.kv_bytes[0] // (16 * 114688) * 16
    assert hopeful.concurrency == pytest.approx(hopeful.tokens / 8192)
    assert (room.fits, room.unknown, room.advice) == (True, [], [])
    assert summarize_fit(room) == [
        "left for the KV cache: about 662,656 to 676,704 tokens, 80.9 to 82.6 requests of 8,192"
    ]


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path, gib=80), SEED, ServerSettings(max_model_len=8192))
    assert room.fits is False
    assert [text.split(":")[0] for text in room.advice] == [
        "the weights and what vLLM needs besides take all of the budget",
        "a little room is won by --enforce-eager (no graphs) and a smaller --max-num-batched-tokens",
    ]
    assert "  it does NOT fit" in format_fit(room)


def test_a_request_that_is_too_long(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path, gib=71), SEED, ServerSettings(max_model_len=40960))
    assert room.fits is False
    assert room.capacity is not None
    longest = room.capacity[0].longest
    assert room.advice[0] == f"a request of 40,960 tokens does not fit for sure: set --max-model-len {longest}"
    assert estimate_fit(qwen3(tmp_path, gib=71), SEED, ServerSettings(max_model_len=longest)).fits is True
    assert room.advice[1][:44] == "--kv-cache-dtype fp8 halves the KV cache (gf"


def test_between_the_ends_no_user_knows(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path, gib=71.3), SEED, ServerSettings(max_model_len=16384))
    assert room.fits is None
    assert "  whether it fits is decided by what vLLM needs besides" in format_fit(room)


def test_more_sequences_than_the_cache_holds(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path), SEED, ServerSettings(max_model_len=40960, max_num_seqs=64))
    assert room.advice == [
        "64 requests fit at once up to about 10,354 tokens each; of 40,960 tokens 16 do, and the others wait: "
        "--max-num-seqs 16 makes that certain"
    ]


def test_gpus_share_weights_and_heads(tmp_path: Path) -> None:
    one, two = (
        estimate_fit(qwen3(tmp_path), SEED, ServerSettings(max_model_len=8192, tensor_parallel=gpus)) for gpus in (1, 2)
    )
    assert (two.weights_bytes, two.token_bytes) == (one.weights_bytes // 2, 57344)  # type: ignore[operator]


def test_what_is_not_known_is_said_and_nothing_is_made_up(tmp_path: Path) -> None:
    found = read_model(model(tmp_path, QWEN3 | {"mamba_d_state": 128}))
    room = estimate_fit(found, SEED, ServerSettings(max_model_len=8192))
    assert (room.weights_bytes, room.token_bytes, room.kv_bytes, room.capacity, room.fits) == (None,) * 5
    assert room.unknown == [
        "the KV cache per token: layers of another form (mamba_d_state in config.json)",
        "the size of the weights: there are no safetensors of it on this machine",
    ]


@pytest.mark.parametrize(
    ("settings", "unknown"),
    [
        (ServerSettings(kv_cache_dtype="nvfp4"), "the size of a number as nvfp4 in the KV cache (known: auto, float16"),
        (ServerSettings(max_model_len=50000), "whether vLLM takes 50,000 tokens: the model's own limit is 40,960"),
    ],
)
def test_settings_that_are_not_known(tmp_path: Path, settings: ServerSettings, unknown: str) -> None:
    assert [text[: len(unknown)] for text in estimate_fit(qwen3(tmp_path), SEED, settings).unknown] == [unknown]


def test_a_length_is_needed(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="does not tell the greatest length"):
        estimate_fit(qwen3(tmp_path, max_position_embeddings=None), SEED)


def test_without_a_share_the_model_is_reported_alone(tmp_path: Path) -> None:
    room = estimate_fit(qwen3(tmp_path), None, ServerSettings(max_model_len=8192))
    assert (room.token_bytes, room.kv_bytes, room.fits, room.advice) == (114688, None, None, [])


def test_a_line_of_a_unified_pool(tmp_path: Path) -> None:
    assert format_pool(list_pools(strix_halo_gtt(tmp_path))[0]) == (
        "/dev/dri/renderD128 gfx1151: 115.90 GiB of 116.00 GiB pages of the host (GTT) free; "
        "121.00 GiB available on the host"
    )


def test_the_command(tmp_path: Path) -> None:
    done = harness("memory", "--free", "76.45", "--total", "96.0", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "--gpu-memory-utilization 0.78 (74.88 GiB)"


def test_the_command_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    qwen3(tmp_path / "m")
    done = harness("memory", "--root", str(root), "--model", "m", "--max-model-len", "8192", "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)
    assert [found["target"] for found in said["pools"]] == ["gfx1151"]
    assert (said["share"]["utilization"], said["share"]["source"]) == ("0.92", "driver")
    assert (said["room"]["token_bytes"], said["room"]["fits"]) == (114688, True)
    assert ModelFit.__struct_fields__ == tuple(said["room"])


def test_the_command_without_a_gpu(tmp_path: Path) -> None:
    done = harness("memory", "--root", str(tmp_path), cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        "error: no AMD GPU is known to this machine's kernel (/sys/class/kfd)\nnext: `harness memory --free"
    )
    qwen3(tmp_path / "m")
    with_model = harness("memory", "--root", str(tmp_path), "--model", "m", cwd=tmp_path)
    assert (with_model.code, with_model.err) == (0, "")
    assert with_model.out.splitlines()[:3] == [
        "no AMD GPU is known to this machine's kernel (/sys/class/kfd)",
        "m:",
        "  weights: 1.50 GiB (the headers of 1 safetensors)",
    ]


def test_the_command_says_by_its_exit_code_that_it_does_not_fit(tmp_path: Path) -> None:
    qwen3(tmp_path / "m", gib=80)
    done = harness("memory", "--free", "76.45", "--total", "96", "--model", "m", cwd=tmp_path)
    assert done.code == 4
    full = harness("memory", "--free", "1", "--total", "96", cwd=tmp_path)
    assert (full.code, full.out.splitlines()[0][:27]) == (4, "nothing is left for vLLM: s")


FREE, TOTAL = ["--free", "76.45"], ["--total", "96"]
NO_SIZES = "two sizes in GiB are expected"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        *((["--free", free, "--total", total], NO_SIZES) for free, total in (
            ("1", "0"), ("inf", "3"), ("1", "inf"), ("1e308", "3"), ("1", "1e308"))),
        ([*FREE, *TOTAL, "--max-model-len", "4096"], "--max-model-len needs --model"),
        ([*FREE, *TOTAL, "--max-num-seqs", "4"], "--max-num-seqs needs --model"),
        ([*FREE, *TOTAL, "--kv-cache-dtype", "fp9"], "--kv-cache-dtype: 'fp9' is not known here; did you mean 'fp8'?"),
        ([*FREE, *TOTAL, "--root", "none"], "--root: none is not there"),
        ([*FREE, *TOTAL, "--root", "file"], "--root: file is not a folder"),
        (FREE, "--free needs --total"),
        (TOTAL, "--total needs --free"),
    ],
)  # fmt: skip
def test_questions_that_cannot_be_meant(tmp_path: Path, given: list[str], what: str) -> None:
    (tmp_path / "file").touch()
    done = harness("memory", *given, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert what in done.err.splitlines()[0]
