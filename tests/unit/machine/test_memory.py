"""Which memory counts, and the safe share of it."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.reason import sentence
from harness.base.units import GIB
from harness.machine.memory import Pool, compute_pool_share, compute_share, format_share, list_pools
from tests.support.machines import gpu, radeon, strix_halo_carve_out, strix_halo_gtt, ttm, write
from tests.support.wording import Wording

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


def gib_of(pool: Pool) -> tuple[Any, ...]:
    sizes = (pool.total_bytes, pool.free_bytes, pool.host_available_bytes)
    return pool.kind, *(None if size is None else round(size / GIB, 1) for size in sizes)


def test_the_pools_of_machines(tmp_path: Path, wording: Wording) -> None:
    (carve_out,) = list_pools(strix_halo_carve_out(tmp_path / "carve-out"))
    assert (gib_of(carve_out), carve_out.doubts) == (("vram", 96.0, 94.5, None), [])
    (pages,) = list_pools(strix_halo_gtt(tmp_path / "gtt"))
    assert gib_of(pages) == ("gtt", 116.0, 115.9, 121.0)
    # A GTT size beyond ttm.pages_limit is not believed; more in use than there is leaves nothing.
    (limited,) = list_pools(ttm(tmp_path / "gtt", 62.5))
    assert (gib_of(limited)[1:3], limited.overstated) == ((62.5, 62.4), True)
    wording(limited.doubts[0])
    (used,) = list_pools(ttm(tmp_path / "gtt", 0.05))
    assert used.free_bytes == 0
    cards = radeon(tmp_path / "cards", 110000, 24)
    gpu(cards, 110000, minor=129, vram_gib=24, gtt_gib=31, vram_used_gib=3, card=True)
    assert [(each.render_node, gib_of(each)[2]) for each in list_pools(cards)] == [
        ("/dev/dri/renderD128", 23.8), ("/dev/dri/renderD129", 21.0),
    ]  # fmt: skip
    write(cards, {"sys/class/drm/renderD129/device/mem_info_vram_used": "N/A\n"})
    wording(list_pools(cards)[1].doubts)
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
def test_the_share_of_pools(pools: list[Pool], gpus: int, utilization: str, formula: str, wording: Wording) -> None:
    share = compute_share(pools, tensor_parallel=gpus)
    assert (share.utilization, share.gpus) == (Decimal(utilization), gpus)
    assert re.fullmatch(re.escape(formula).replace(re.escape("..."), ".*"), sentence(share.formula))
    if gpus == 2:
        assert "--gpu-memory-utilization" in format_share(share)[0] and "0.76" in format_share(share)[0]
        wording(format_share(share)[0])


def test_shares_at_the_ends(wording: Wording) -> None:
    assert (SEED.utilization, SEED.budget_bytes) == (Decimal("0.78"), 80401787781)
    above = compute_pool_share(120 * GIB, int(62.47 * GIB), source="given")
    assert above.utilization == Decimal("0.92")
    wording(above.doubts)
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
    assert "harness expect --free" in caught.value.next_step
