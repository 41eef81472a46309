"""What servers need of this machine is checked before anything is pulled; the graphics unit is no second GPU."""

from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError, ServerError
from harness.base.units import GIB
from harness.engines.flags import get_option
from harness.machine.gpus import has_fp8, list_gpus, select_container_gpus, select_serving_gpus
from harness.machine.memory import list_pools
from harness.run.experiment import Experiment, Target, prepare
from harness.run.machine_fit import check_all_gpus, machine_notes, memory_errors, preflight, resolve_auto
from harness.scenario import Server
from harness.serve.compose_file import parse_compose
from harness.serve.template import render_server
from tests.support.command import write
from tests.support.machines import gpu, host, mi300x_eight, power, radeon, strix_halo_carve_out, strix_halo_gtt, ttm
from tests.support.machines import write as files
from tests.support.wording import Wording


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
    gpu(root, 100306, minor=128 if unit_first else 129, vram_gib=0.5, gtt_gib=63, extra="")
    return gpu(root, version, minor=129 if unit_first else 128, vram_gib=vram_gib, gtt_gib=63, card=True, extra="")


def test_a_share_that_vllm_will_refuse_is_refused_before_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")  # memory is known without an engine
    root, wanted = seed(tmp_path / "root"), experiment(tmp_path, gpu_memory_utilization=0.9)
    fact = "server 's': gpu_memory_utilization 0.9 needs 86.40 of 96.00 GiB of /dev/dri/renderD128, and 76.45 GiB are"
    with pytest.raises(ServerError) as caught:
        preflight(wanted, pytest.fail, root)
    wording(caught.value)
    assert "gpu_memory_utilization" in caught.value.next_step and "0.77" in caught.value.next_step
    wording(caught.value)
    (note,) = machine_notes(wanted, root)
    assert note.startswith(f"note: {fact}")
    preflight(experiment(tmp_path, gpu_memory_utilization=0.78), pytest.fail, root)
    # The number for `auto` is checked too, with the memory that is free by then.
    used = root / "sys/class/drm/renderD128/device/mem_info_vram_used"

    def fill_memory(_line: str) -> None:
        used.write_text(f"{60 * GIB}\n")

    auto = experiment(tmp_path, "lemonade", vllm_args="--gpu-memory-utilization auto")
    with pytest.raises(ServerError) as caught:
        preflight(auto, fill_memory, root)
    assert "gpu_memory_utilization" in str(caught.value) and "0.77" in str(caught.value)
    wording(caught.value)
    monkeypatch.setenv("HARNESS_DOCTOR", "off")
    preflight(wanted, pytest.fail, root)


@pytest.mark.parametrize(
    ("template", "variables", "refused"),
    [
        ("vllm-rocm", {"gpu_memory_utilization": "auto"}, False),
        ("vllm-rocm", {"gpu_memory_utilization": None}, False),
        ("vllm-offline", {"gpu_memory_utilization": 0.85}, True),
        ("lemonade", {"vllm_args": "--gpu-memory-utilization 0.9"}, True),
        ("lemonade", {"vllm_args": "--gpu-memory-utilization=0.9 --gpu_memory_utilization 0.1"}, False),
        ("lemonade", {}, False),
        ("llamacpp", {"model_path": "/m.gguf"}, False),
        ("vllm-cpu", {}, False),
    ],
)
def test_servers_whose_memory_is_checked(
    tmp_path: Path, template: str, variables: dict[str, Any], refused: bool
) -> None:
    assert len(list(memory_errors(experiment(tmp_path, template, **variables), seed(tmp_path / "root")))) == refused


def test_unknown_and_overstated_memory_is_not_refused(tmp_path: Path) -> None:
    wanted = experiment(tmp_path, gpu_memory_utilization=0.9)
    assert list(memory_errors(wanted, tmp_path / "nothing")) == []
    (seed(tmp_path / "root") / "sys/class/drm/renderD128/device/mem_info_vram_used").unlink()
    assert list(memory_errors(wanted, tmp_path / "root")) == []
    root = ttm(strix_halo_gtt(tmp_path / "gtt"), 62.5)
    (root / "sys/class/drm/renderD128/device/mem_info_gtt_used").write_text(f"{20 * GIB}\n")
    assert list(memory_errors(wanted, root)) == []
    elsewhere = prepare(write(tmp_path, servers={"s": {"template": "vllm-rocm"}}), Target("http://127.0.0.1:1"))
    assert list(memory_errors(elsewhere, seed(tmp_path / "full"))) == []


@pytest.mark.parametrize(
    ("version", "vram_gib", "share", "unit_first"), [(110000, 24, 0.9, True), (120001, 32, 0.92, False)]
)
def test_a_card_wins_over_the_graphics_unit(
    tmp_path: Path, version: int, vram_gib: float, share: float, unit_first: bool
) -> None:
    root = unit_and_card(tmp_path / "root", version, vram_gib, unit_first=unit_first)
    card = f"/dev/dri/renderD{129 if unit_first else 128}"
    assert [pool.render_node for pool in list_pools(root)] == [card]
    filled = resolve_auto(experiment(tmp_path, gpu_memory_utilization="auto"), lambda _line: None, root)
    assert filled.scenario.servers["s"].variables["gpu_memory_utilization"] == share


def test_only_the_gpus_of_the_container_count(tmp_path: Path, wording: Wording) -> None:
    cards = list(list_gpus(unit_and_card(tmp_path / "root")))
    unit, card = cards
    assert select_serving_gpus(cards) == [card]
    assert select_serving_gpus([unit]) == [unit]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri"], {}) == [card]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri/renderD128"], {}) == [unit]
    assert select_container_gpus(cards, ["/dev/kfd", "/dev/dri"], {"HIP_VISIBLE_DEVICES": "0"}) == [unit]
    single = ["/dev/kfd", "/dev/dri/renderD129:/dev/dri/renderD129"]
    assert select_container_gpus(cards, single, {"HIP_VISIBLE_DEVICES": "0"}) == [card]
    assert select_container_gpus(cards, [], {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}) == [card]
    halo = strix_halo_carve_out(tmp_path / "halo")
    with pytest.raises(HarnessError) as caught:
        check_all_gpus(experiment(tmp_path, gpus=[0, 7]), halo)
    assert "'s'" in str(caught.value) and "'7'" in str(caught.value)
    wording(caught.value)
    by_id = experiment(tmp_path, environment={"HIP_VISIBLE_DEVICES": "GPU-1f2e"}, tensor_parallel_size=1)
    check_all_gpus(by_id, halo)


@pytest.mark.parametrize(
    ("template", "variables", "what"),
    [
        ("vllm-rocm", {"quantization": "fp8"}, "quantization is fp8, and gfx1151 has no FP8"),
        ("vllm-offline", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is fp8_e5m2, and gfx1151 has no FP8"),
        ("vllm-rocm", {"tensor_parallel_size": 2}, r"tensor_parallel_size is 2, and it gets 1 AMD GPU \(gfx1151\)"),
        ("lemonade", {"vllm_args": "--tensor-parallel-size=2"}, "tensor_parallel_size is 2, and it gets 1 AMD GPU"),
    ],
)
def test_settings_that_the_gpus_do_not_support_are_refused(
    tmp_path: Path, template: str, variables: dict[str, Any], what: str
) -> None:
    wanted = experiment(tmp_path, template, **variables)
    with pytest.raises(HarnessError, match=f"server 's': {what}"):
        check_all_gpus(wanted, strix_halo_carve_out(tmp_path / "halo"))
    check_all_gpus(wanted, mi300x_eight(tmp_path / "eight"))
    check_all_gpus(wanted, tmp_path / "nothing")


def test_the_graphics_unit_is_no_second_gpu_and_takes_no_fp8_away(tmp_path: Path, wording: Wording) -> None:
    root = unit_and_card(tmp_path / "root", 120001, 32)
    check_all_gpus(experiment(tmp_path, kv_cache_dtype="fp8"), root)
    with pytest.raises(HarnessError) as caught:
        check_all_gpus(experiment(tmp_path, tensor_parallel_size=2), root)
    assert "tensor_parallel_size" in str(caught.value)
    wording(caught.value)
    wording(machine_notes(experiment(tmp_path), root))
    assert machine_notes(experiment(tmp_path, gpus=[1]), root) == []
    # vLLM on the CPU needs no GPU.
    on_cpu = experiment(tmp_path, "vllm-cpu", extra_args=["--kv-cache-dtype", "fp8", "-tp", "2"])
    check_all_gpus(on_cpu, radeon(tmp_path / "radeon", 110000, 24))


@pytest.mark.parametrize(
    ("variables", "flags", "noted"),
    [
        ({}, "avx2", False),
        ({"dtype": "float32"}, "avx2", False),
        ({"dtype": "bfloat16"}, "avx2", True),
        ({"dtype": "auto"}, "avx2 avx512f", True),
        ({"dtype": "bfloat16"}, "avx512f avx512_bf16", False),
    ],
)
def test_a_data_type_that_the_cpu_must_emulate_is_noted(
    tmp_path: Path, variables: dict[str, Any], flags: str, noted: bool, wording: Wording
) -> None:
    root = files(tmp_path / "root", {"proc/cpuinfo": f"flags\t: {flags}\n"})
    notes = machine_notes(experiment(tmp_path, "vllm-cpu", **variables), root)
    assert ["'s'" in note and f"dtype is {variables['dtype']}" in note for note in notes] == [True] * noted
    if noted:
        wording(notes)


def test_fp8_as_vllm_knows_it() -> None:
    fp8 = ("gfx90a", "gfx942", "gfx950", "gfx1200", "gfx1201", "gfx1250")
    others = ("gfx1030", "gfx1100", "gfx1150", "gfx1151")
    assert [target for target in (*fp8, *others) if has_fp8(target)] == list(fp8)


def command_of(template: str, **variables: Any) -> list[str]:
    server = Server(template=template, variables=variables)
    return parse_compose(render_server(server, "m", port=1)).server.command or []


def test_what_depends_on_the_machine_is_pinned_and_variables_reach_the_command_line() -> None:
    words = command_of("vllm-rocm")
    pinned = {"--dtype": "auto", "--seed": "0", "--tensor-parallel-size": "1", "--max-model-len": "8192",
              "--gpu-memory-utilization": "0.75", "--max-num-seqs": "64", "--max-num-batched-tokens": "8192",
              "--kv-cache-dtype": "auto"}  # fmt: skip
    assert {name: get_option(words, name) for name in pinned} == pinned
    assert {"--enable-prefix-caching", "--no-enforce-eager"} <= set(words)
    words = command_of("llamacpp", model_path="/m.gguf", cont_batching=False, kv_unified=True, flash_attn="on")
    assert {"--no-cont-batching", "--kv-unified", "--metrics"} <= set(words)
    assert get_option(words, "--flash-attn") == "on"
    plain = command_of("llamacpp", model_path="/m")
    assert not {"--cont-batching", "--no-cont-batching", "--kv-unified", "--flash-attn"} & set(plain)
