"""Which memory counts, on machines that are trees of files."""

from pathlib import Path
from typing import Any

import pytest

from harness.machine.memory import Pool, list_pools
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


def one(root: Path) -> dict[str, Any]:
    (found,) = list_pools(root)
    return {name: getattr(found, name) for name in Pool.__struct_fields__ if name not in ("doubts", "target")}


CARVE_OUT = {"vram_total": 96 * GIB, "vram_used": 20 * GIB, "gtt_total": 16 * GIB, "gtt_used": 15 * MIB}
PAGES = {"vram_total": 512 * MIB, "vram_used": 100 * MIB, "gtt_total": 124 * GIB, "gtt_used": 2 * GIB}


def test_an_apu_with_a_large_carve_out_allocates_from_it(tmp_path: Path) -> None:
    tree(tmp_path, CARVE_OUT, pages_limit=4 * GIB // 4096, available=20 * GIB)
    assert one(tmp_path) == {
        "render_node": "/dev/dri/renderD128",
        "kind": "vram",
        "total_bytes": 96 * GIB,
        "used_bytes": 20 * GIB,
        "free_bytes": 76 * GIB,
        "host_available_bytes": None,
        "overstated": False,
    }
    assert list_pools(tmp_path)[0].doubts == []


def test_an_apu_with_a_small_carve_out_allocates_pages_of_the_host(tmp_path: Path) -> None:
    tree(tmp_path, PAGES, pages_limit=32505856, available=90 * GIB)  # the limit is 124 GiB
    assert one(tmp_path) == {
        "render_node": "/dev/dri/renderD128",
        "kind": "gtt",
        "total_bytes": 124 * GIB,
        "used_bytes": 2 * GIB,
        "free_bytes": 122 * GIB,
        "host_available_bytes": 90 * GIB,
        "overstated": False,
    }
    assert [doubt[:42] for doubt in list_pools(tmp_path)[0].doubts] == ["what is in use of GTT may lag behind what "]


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
