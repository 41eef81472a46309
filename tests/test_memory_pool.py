"""Which memory counts, on machines that are trees of files."""

from pathlib import Path
from typing import Any

import pytest

from harness.machine.memory import list_pools
from harness.units import GIB

MIB = 2**20


def tree(
    root: Path,
    sizes: dict[str, int],
    *,
    version: int = 110501,
    own_card: bool = False,
    pages_limit: int | None = None,
    available: int | None = None,
    minor: int = 128,
) -> Path:
    """A machine with one more GPU; `sizes` are its mem_info files in bytes."""
    node = root / f"sys/class/kfd/kfd/topology/nodes/{minor - 127}"
    device = root / f"sys/class/drm/renderD{minor}/device"
    module = root / "sys/module/ttm/parameters"
    for folder in (node, device, module, root / "proc"):
        folder.mkdir(parents=True, exist_ok=True)
    (node / "properties").write_text(f"gfx_target_version {version}\ndrm_render_minor {minor}\n")
    for name, size in sizes.items():
        (device / f"mem_info_{name}").write_text(f"{size}\n")
    if own_card:
        (device / "board_info").touch()
    if pages_limit is not None:
        (module / "pages_limit").write_text(f"{pages_limit}\n")
    if available is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 130023648 kB\nMemAvailable: {available // 1024} kB\n")
    return root


CARVE_OUT = {"vram_total": 96 * GIB, "vram_used": 20 * GIB, "gtt_total": 16 * GIB, "gtt_used": 15 * MIB}
PAGES = {"vram_total": 512 * MIB, "vram_used": 100 * MIB, "gtt_total": 124 * GIB, "gtt_used": 2 * GIB}


@pytest.mark.parametrize(
    ("sizes", "limit_pages", "available", "expected", "doubt"),
    [
        (CARVE_OUT, 4 * GIB // 4096, 20 * GIB, ("vram", 96 * GIB, 20 * GIB, 76 * GIB, None), None),
        (PAGES, 32505856, 90 * GIB, ("gtt", 124 * GIB, 2 * GIB, 122 * GIB, 90 * GIB), "what is in use of GTT may lag"),
    ],
    ids=["large-carve-out", "pages-of-the-host"],
)
def test_an_apu_allocates_from_the_larger_of_carve_out_and_pages(
    tmp_path: Path,
    sizes: dict[str, int],
    limit_pages: int,
    available: int,
    expected: tuple[Any, ...],
    doubt: str | None,
) -> None:
    (pool,) = list_pools(tree(tmp_path, sizes, pages_limit=limit_pages, available=available))
    assert (pool.kind, pool.total_bytes, pool.used_bytes, pool.free_bytes, pool.host_available_bytes) == expected
    assert (pool.render_node, pool.overstated, len(pool.doubts)) == ("/dev/dri/renderD128", False, doubt is not None)
    assert doubt is None or pool.doubts[0].startswith(doubt)


def test_a_gtt_size_beyond_ttm_is_not_believed(tmp_path: Path) -> None:
    limit = 16375808  # of 4 KiB: 62.47 GiB
    tree(tmp_path, PAGES | {"gtt_total": 128 * GIB, "gtt_used": 8 * GIB}, pages_limit=limit, available=60 * GIB)
    (found,) = list_pools(tmp_path)
    assert (found.total_bytes, found.free_bytes) == (limit * 4096, limit * 4096 - 8 * GIB)
    assert found.doubts[0] == (
        "the driver states a GTT of 128.00 GiB, but ttm.pages_limit allows 62.47 GiB: "
        "the runtime may report more free memory than there is in total"
    )


def test_cards_of_their_own_have_their_vram(tmp_path: Path) -> None:
    card = {"vram_total": 24 * GIB, "vram_used": 1 * GIB, "gtt_total": 64 * GIB, "gtt_used": 0}
    tree(tmp_path, card, version=110000, own_card=True)
    tree(tmp_path, card | {"vram_used": 3 * GIB}, version=110000, own_card=True, minor=129)
    assert [
        (pool.render_node, pool.target, pool.kind, pool.free_bytes, pool.unified) for pool in list_pools(tmp_path)
    ] == [
        ("/dev/dri/renderD128", "gfx1100", "vram", 23 * GIB, False),
        ("/dev/dri/renderD129", "gfx1100", "vram", 21 * GIB, False),
    ]


@pytest.mark.parametrize("missing", ["vram_total", "vram_used"])
def test_what_the_driver_does_not_tell_is_unknown(tmp_path: Path, missing: str) -> None:
    card = {name: size for name, size in CARVE_OUT.items() if name != missing}
    (found,) = list_pools(tree(tmp_path, card, own_card=True))
    assert found.free_bytes is None
    assert found.doubts == ["the driver does not tell its size, or how much of it is in use"]


def test_more_in_use_than_there_is_leaves_nothing(tmp_path: Path) -> None:
    (found,) = list_pools(tree(tmp_path, PAGES, pages_limit=GIB // 4096))
    assert (found.total_bytes, found.used_bytes, found.free_bytes) == (GIB, 2 * GIB, 0)


def test_a_machine_without_an_amd_gpu_has_no_pool(tmp_path: Path) -> None:
    assert list_pools(tmp_path) == []
