"""What servers ask of this machine is held against it before anything is pulled; the graphics unit is no second GPU."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError, ServerError
from harness.machine.gpus import list_gpus, select_container_gpus, select_serving_gpus
from harness.machine.memory import list_pools
from harness.prepare.experiment import Experiment, Target, prepare
from harness.prepare.machine_fit import check_all_gpus, machine_notes, preflight, resolve_auto, shortages
from harness.units import GIB
from tests.command import write
from tests.machines import gpu, host, mi300x_eight, power, radeon, strix_halo_carve_out, strix_halo_gtt, ttm


def experiment(folder: Path, template: str = "vllm-rocm", **variables: Any) -> Experiment:
    load = {"user": "batch", "batch_size": 2, "requests": 4}
    return prepare(write(folder, servers={"s": {"template": template, "variables": variables}}, loads={"one": load}))


def seed(root: Path) -> Path:
    """Strix Halo with 76.45 of 96 GiB free."""
    host(root, name="halo", kernel="6.18.4", ram_gib=31, available_gib=25)
    gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=96 - 76.45)
    return power(ttm(root, 15.5))


def unit_and_card(root: Path, version: int = 110000, vram_gib: float = 24, *, unit_first: bool = True) -> Path:
    """The graphics unit of a desktop Ryzen, whose GTT is larger than the card's memory, next to a card."""
    host(root, name="tower", kernel="6.14", ram_gib=126, available_gib=110)
    gpu(root, 100306, minor=128 if unit_first else 129, units=2, vram_gib=0.5, gtt_gib=63, extra="")
    return gpu(
        root, version, minor=129 if unit_first else 128, units=96, vram_gib=vram_gib, gtt_gib=63, card=True, extra=""
    )


def test_a_share_that_vllm_will_refuse_is_refused_before_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")  # memory is known without an engine
    root, asks = seed(tmp_path / "root"), experiment(tmp_path, gpu_memory_utilization=0.9)
    (short,) = shortages(asks, root)
    assert short.certain and short.fact.startswith("gpu_memory_utilization 0.9 asks for 86.40 of 96.00 GiB of /dev/dri")
    (note,) = machine_notes(asks, root)
    assert note.startswith(f"note: server 's': {short.fact}") and "Set gpu_memory_utilization to 0.77 or less" in note
    with pytest.raises(ServerError, match=r"server 's': gpu_memory_utilization 0.9 asks for 86.40 of") as caught:
        preflight(asks, pytest.fail, root)
    assert caught.value.next_step.endswith("HARNESS_DOCTOR=off skips this check.")
    preflight(experiment(tmp_path, gpu_memory_utilization=0.78), pytest.fail, root)
    monkeypatch.setenv("HARNESS_DOCTOR", "off")
    preflight(asks, pytest.fail, root)


def test_memory_is_checked_with_the_number_for_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    root = seed(tmp_path / "root")
    used = root / "sys/class/drm/renderD128/device/mem_info_vram_used"
    asks = experiment(tmp_path, "lemonade", vllm_args="--gpu-memory-utilization auto")

    def and_memory_moves(_line: str) -> None:
        used.write_text(f"{60 * GIB}\n")

    with pytest.raises(ServerError, match="gpu_memory_utilization 0.77 asks for 73.92 of 96.00 GiB"):
        preflight(asks, and_memory_moves, root)


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        ("vllm-rocm", {"gpu_memory_utilization": 0.77}, []),
        # The driver has 76.45 GiB free, of which the runtime takes its own share before vLLM looks.
        ("vllm-rocm", {"gpu_memory_utilization": 0.78}, [("0.78 is above what is safe now", False)]),
        ("vllm-rocm", {"gpu_memory_utilization": None}, [("0.92 (vLLM's default) asks for 88.32 of", False)]),
        ("vllm-rocm", {"gpu_memory_utilization": "auto"}, []),
        ("vllm-offline", {"gpu_memory_utilization": 0.85}, [("0.85 asks for 81.60 of", True)]),
        ("lemonade", {"vllm_args": "--gpu-memory-utilization 0.9"}, [("0.9 asks for 86.40 of", True)]),
        ("lemonade", {}, []),
        ("llamacpp", {"model_path": "/m.gguf"}, []),
        ("vllm-cpu", {}, []),
    ],
)
def test_shortages_of_memory(
    tmp_path: Path, template: str, variables: dict[str, Any], expected: list[tuple[str, bool]]
) -> None:
    found = list(shortages(experiment(tmp_path, template, **variables), seed(tmp_path / "root")))
    told = [short.fact.removeprefix("gpu_memory_utilization ") for short in found]
    assert [(text[: len(want)], short.certain) for text, short, (want, _) in zip(told, found, expected, strict=True)] \
        == expected  # fmt: skip


def test_unknown_memory_is_not_refused(tmp_path: Path) -> None:
    asks = experiment(tmp_path, gpu_memory_utilization=0.9)
    assert list(shortages(asks, tmp_path / "nothing")) == []
    (seed(tmp_path / "root") / "sys/class/drm/renderD128/device/mem_info_vram_used").unlink()
    assert list(shortages(asks, tmp_path / "root")) == []
    elsewhere = prepare(write(tmp_path, servers={"s": {"template": "vllm-rocm"}}), Target("http://127.0.0.1:1"))
    assert list(shortages(elsewhere, seed(tmp_path / "full"))) == []


def test_a_stated_gtt_above_its_limit_makes_a_shortage_uncertain(tmp_path: Path) -> None:
    root = ttm(strix_halo_gtt(tmp_path / "root"), 62.5)
    (root / "sys/class/drm/renderD128/device/mem_info_gtt_used").write_text(f"{20 * GIB}\n")
    (short,) = shortages(experiment(tmp_path, gpu_memory_utilization=0.9), root)
    assert not short.certain


@pytest.mark.parametrize(
    ("version", "vram_gib", "share", "unit_first"), [(110000, 24, 0.9, True), (120001, 32, 0.92, False)]
)
def test_a_card_wins_over_the_graphics_unit(
    tmp_path: Path, version: int, vram_gib: float, share: float, unit_first: bool
) -> None:
    root = unit_and_card(tmp_path / "root", version, vram_gib, unit_first=unit_first)
    card = f"/dev/dri/renderD{129 if unit_first else 128}"
    assert [pool.render_node for pool in list_pools(root)] == [card]
    found = resolve_auto(experiment(tmp_path, gpu_memory_utilization="auto"), lambda _line: None, root)
    assert found.scenario.servers["s"].variables["gpu_memory_utilization"] == share


def test_only_the_gpus_of_the_container_count(tmp_path: Path) -> None:
    cards = list(list_gpus(unit_and_card(tmp_path / "root")))
    unit, card = cards
    assert select_serving_gpus(cards) == [card]
    assert select_serving_gpus([unit]) == [unit]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri"], {}) == [card]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri/renderD128"], {}) == [unit]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri"], {"HIP_VISIBLE_DEVICES": "0"}) == [unit]
    assert select_container_gpus(
        cards, ["/dev/kfd", "/dev/dri/renderD129:/dev/dri/renderD129"], {"HIP_VISIBLE_DEVICES": "0"}
    ) == [card]
    assert select_container_gpus(cards, [], {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}) == [card]
    asks = experiment(tmp_path, gpus=[0, 7])
    assert machine_notes(asks, strix_halo_carve_out(tmp_path / "halo")) == []
    with pytest.raises(HarnessError, match="server 's': HIP_VISIBLE_DEVICES names '7', and there are 1 GPUs here"):
        check_all_gpus(asks, tmp_path / "halo")
    by_id = experiment(tmp_path, environment={"HIP_VISIBLE_DEVICES": "GPU-1f2e"}, tensor_parallel_size=1)
    check_all_gpus(by_id, tmp_path / "halo")
    with pytest.raises(HarnessError, match="HIP_VISIBLE_DEVICES names '2', and there are 2 GPUs here, counted from 0"):
        select_container_gpus(cards, [], {"HIP_VISIBLE_DEVICES": "2"})


@pytest.mark.parametrize(
    ("template", "variables", "what"),
    [
        ("vllm-rocm", {"quantization": "fp8"}, "quantization is fp8, and gfx1151 has no FP8"),
        ("vllm-offline", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is fp8_e5m2, and gfx1151 has no FP8"),
        ("vllm-rocm", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and this machine has 1 AMD GPU"),
        ("lemonade", {"vllm_args": "--tensor-parallel-size=2"}, "tensor_parallel_size is 2, and this machine has 1"),
    ],
)
def test_settings_that_the_gpus_do_not_support_are_refused(
    tmp_path: Path, template: str, variables: dict[str, Any], what: str
) -> None:
    asks = experiment(tmp_path, template, **variables)
    with pytest.raises(HarnessError, match=f"server 's': {what}"):
        check_all_gpus(asks, strix_halo_carve_out(tmp_path / "halo"))
    check_all_gpus(asks, mi300x_eight(tmp_path / "eight"))
    check_all_gpus(asks, tmp_path / "nothing")


def test_the_graphics_unit_is_no_second_gpu_and_takes_no_fp8_away(tmp_path: Path) -> None:
    root = unit_and_card(tmp_path / "root", 120001, 32)
    check_all_gpus(experiment(tmp_path, kv_cache_dtype="fp8"), root)
    with pytest.raises(HarnessError, match=r"it is given 1 AMD GPU \(gfx1201\); 1 more is left out"):
        check_all_gpus(experiment(tmp_path, tensor_parallel_size=2), root)
    told = "note: server 's': its container sees gfx1036 in addition to gfx1201"
    assert machine_notes(experiment(tmp_path), root) == [
        f"{told}; `devices: [/dev/kfd, /dev/dri/renderD129]` leaves it out"
    ]
    assert machine_notes(experiment(tmp_path, devices=["/dev/kfd", "/dev/dri/renderD129"]), root) == []
    assert machine_notes(experiment(tmp_path, gpus=[1]), root) == []


def test_vllm_on_the_cpu_needs_no_gpu(tmp_path: Path) -> None:
    root = radeon(tmp_path / "root", 110000, 24)
    check_all_gpus(experiment(tmp_path, "vllm-cpu", extra_args=["--kv-cache-dtype", "fp8", "-tp", "2"]), root)
