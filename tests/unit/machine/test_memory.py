"""Which memory counts, the safe share of it, what is left for a model, and the command `harness memory`."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.reasons import sentence
from harness.base.units import GIB
from harness.machine.memory import (
    OTHER_BYTES,
    ModelFit,
    Pool,
    ServerSettings,
    compute_pool_share,
    compute_share,
    estimate_fit,
    format_fit,
    format_share,
    list_pools,
)
from harness.machine.model import ModelShape, read_model
from tests.support.command import harness
from tests.support.machines import gpu, radeon, strix_halo_carve_out, strix_halo_gtt, ttm, write
from tests.unit.machine.test_memory_model import QWEN3, model

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
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(gib * GIB))
    return read_model(folder, "Qwen/Qwen3-0.6B")


def gib_of(pool: Pool) -> tuple[Any, ...]:
    sizes = (pool.total_bytes, pool.free_bytes, pool.host_available_bytes)
    return pool.kind, *(None if size is None else round(size / GIB, 1) for size in sizes)


def test_the_pools_of_machines(tmp_path: Path) -> None:
    (carve_out,) = list_pools(strix_halo_carve_out(tmp_path / "carve-out"))
    assert (gib_of(carve_out), carve_out.doubts) == (("vram", 96.0, 94.5, None), [])
    (pages,) = list_pools(strix_halo_gtt(tmp_path / "gtt"))
    assert gib_of(pages) == ("gtt", 116.0, 115.9, 121.0)
    # A GTT size beyond ttm.pages_limit is not believed; more in use than there is leaves nothing.
    (limited,) = list_pools(ttm(tmp_path / "gtt", 62.5))
    assert (gib_of(limited)[1:3], limited.overstated) == ((62.5, 62.4), True)
    assert "the runtime may report more free memory than there is in total" in limited.doubts[0]
    (used,) = list_pools(ttm(tmp_path / "gtt", 0.05))
    assert used.free_bytes == 0
    cards = radeon(tmp_path / "cards", 110000, 24)
    gpu(cards, 110000, minor=129, vram_gib=24, gtt_gib=31, vram_used_gib=3, card=True)
    assert [(each.render_node, gib_of(each)[2]) for each in list_pools(cards)] == [
        ("/dev/dri/renderD128", 23.8), ("/dev/dri/renderD129", 21.0),
    ]  # fmt: skip
    write(cards, {"sys/class/drm/renderD129/device/mem_info_vram_used": "N/A\n"})
    assert list_pools(cards)[1].doubts == ["the driver does not tell its size, or how much of it is in use"]
    assert list_pools(tmp_path / "none") == []


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
    if gpus == 2:
        assert format_share(share)[0] == (
            "--gpu-memory-utilization 0.76 (145.92 GiB of each of 2 GPUs, by the one that has least: "
            "/dev/dri/renderD128)"
        )


def test_shares_at_the_ends() -> None:
    assert (SEED.utilization, SEED.budget_bytes) == (Decimal("0.78"), 80401787781)
    above = compute_pool_share(120 * GIB, int(62.47 * GIB), source="given")
    assert above.utilization == Decimal("0.92")
    assert above.doubts == ["120.00 GiB of 62.47 GiB are reported as free; the total is the limit"]
    nothing = compute_share([pool(1.5)])
    assert (nothing.utilization, nothing.budget_bytes) == (None, 0)


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
    shape = qwen3(tmp_path)
    fit = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192, max_num_seqs=10))
    assert fit.weights_bytes is not None and fit.capacity is not None
    rest = SEED.budget_bytes - fit.weights_bytes
    assert fit.kv_bytes == (rest - OTHER_BYTES[1], rest - OTHER_BYTES[0])
    assert (fit.token_bytes, fit.request_bytes) == (114688, 8192 * 114688)
    careful, hopeful = fit.capacity
    assert careful.tokens == fit.kv_bytes[0] // (16 * 114688) * 16
    assert hopeful.concurrency == pytest.approx(hopeful.tokens / 8192)
    assert (fit.fits, fit.unknown, fit.advice) == (True, [], [])
    assert format_fit(fit)[-3:-1] == [
        "  KV cache size: 662,656 to 676,704 tokens",
        "  concurrency for 8,192 tokens per request: 80.89x to 82.61x",
    ]
    two = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192, tensor_parallel=2))
    assert (two.weights_bytes, two.token_bytes) == (fit.weights_bytes // 2, 57344), "GPUs share weights and heads"
    alone = estimate_fit(shape, None, ServerSettings(max_model_len=8192))
    assert (alone.token_bytes, alone.kv_bytes, alone.fits, alone.advice) == (114688, None, None, [])


@pytest.mark.parametrize(
    ("gib", "settings", "fits", "advice"),
    [
        (80, ServerSettings(max_model_len=8192), False, "take a smaller or quantised model, more GPUs"),
        (71, ServerSettings(max_model_len=40960), False, "take a smaller or quantised model, more GPUs"),
        (71.3, ServerSettings(max_model_len=16384), None, "take a smaller or quantised model, more GPUs"),
        (67, ServerSettings(max_model_len=500000), False, "take a smaller or quantised model, more GPUs"),
        (1.5, ServerSettings(max_model_len=40960, max_num_seqs=64), True,
         "16 requests of 40,960 tokens fit at once, and the others wait: --max-num-seqs 16 makes that certain"),
    ],
    ids=["weights", "length", "undecided", "beyond-the-models-own", "sequences"],
)  # fmt: skip
def test_a_model_that_does_not_fit(
    tmp_path: Path, gib: float, settings: ServerSettings, fits: bool | None, advice: str
) -> None:
    shape = qwen3(tmp_path, gib=gib)
    fit = estimate_fit(shape, SEED, settings)
    assert fit.fits is fits
    (text,) = fit.advice
    assert text.startswith(advice)
    if match := re.search(r"--max-model-len \(at most (\d+)\)", text):
        shorter = estimate_fit(shape, SEED, ServerSettings(max_model_len=int(match[1])))
        assert shorter.fits is True and shorter.unknown == [], "never beyond the model's own length"


def test_what_is_not_known_is_said_and_nothing_is_made_up(tmp_path: Path) -> None:
    shape = read_model(model(tmp_path / "a", QWEN3 | {"attn_layer_period": 8}))
    fit = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192))
    assert (fit.weights_bytes, fit.token_bytes, fit.kv_bytes, fit.capacity, fit.fits) == (None,) * 5
    assert fit.unknown == [
        "the KV cache per token: layers of another form (attn_layer_period in config.json)",
        "the size of the weights: there are no safetensors of it on this machine",
    ]
    shape = qwen3(tmp_path / "b")
    for settings, unknown in (
        (ServerSettings(kv_cache_dtype="nvfp4"), "the size of a number as nvfp4 in the KV cache"),
        (ServerSettings(max_model_len=50000), "whether vLLM takes 50,000 tokens: the model's own limit is 40,960"),
    ):
        (text,) = estimate_fit(shape, SEED, settings).unknown
        assert text.startswith(unknown)
    with pytest.raises(HarnessError, match="does not tell the greatest length"):
        estimate_fit(qwen3(tmp_path / "c", max_position_embeddings=None), SEED)


def test_the_command(tmp_path: Path) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    qwen3(tmp_path / "m")
    qwen3(tmp_path / "large", gib=80)

    def memory(*given: str) -> tuple[int, list[str]]:
        done = harness("memory", *given, cwd=tmp_path)
        return done.code, (done.out or done.err).splitlines()

    assert memory("--free", "76.45", "--total", "96.0")[1][0] == "--gpu-memory-utilization 0.78 (74.88 GiB)"
    code, lines = memory("--root", str(root), "--model", "m", "--max-model-len", "8192", "--json")
    page = json.loads("\n".join(lines))
    assert (code, [each["target"] for each in page["pools"]]) == (0, ["gfx1151"])
    assert (page["share"]["utilization"], page["share"]["source"]) == ("0.92", "driver")
    assert (page["room"]["token_bytes"], page["room"]["fits"]) == (114688, True)
    assert ModelFit.__struct_fields__ == tuple(page["room"])
    no_gpu = "no AMD GPU is known to this machine's kernel (/sys/class/kfd)"
    assert memory("--root", str(tmp_path)) == (
        1, [f"error: {no_gpu}", "next: `harness memory --free GIB --total GIB` computes it from the two numbers that "
            "vLLM's log tells."],
    )  # fmt: skip
    assert memory("--root", str(tmp_path), "--model", "m")[1][:2] == [no_gpu, "m:"]
    # The exit code says that it does not fit.
    assert memory("--free", "76.45", "--total", "96", "--model", "large")[0] == 4
    code, lines = memory("--free", "1", "--total", "96")
    assert (code, lines[0]) == (4, "nothing is left for vLLM: stop what holds the memory (`harness doctor` names it)")


FREE, TOTAL = ["--free", "76.45"], ["--total", "96"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--free", "1", "--total", "0"], "two sizes in GiB are expected"),
        (["--free", "1", "--total", "inf"], "--total': a finite number is expected, got inf"),
        ([*FREE, *TOTAL, "--max-model-len", "4096"], "--max-model-len needs --model"),
        ([*FREE, *TOTAL, "--kv-cache-dtype", "fp9"], "--kv-cache-dtype: 'fp9' is not known here; did you mean 'fp8'?"),
        (FREE, "--free needs --total"),
    ],
)
def test_questions_that_cannot_be_meant(tmp_path: Path, given: list[str], what: str) -> None:
    done = harness("memory", *given, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert what in done.err.splitlines()[0]
