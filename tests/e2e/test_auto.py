"""`gpu_memory_utilization: auto`: computed once, the same for all, shown, recorded, or refused with advice."""

from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.units import GIB
from harness.run.experiment import Experiment, Target, prepare
from harness.run.machine_fit import resolve_auto
from tests.support.command import experiment_of, harness, write
from tests.support.load_runs import composed
from tests.support.machines import gpu, host, strix_halo_carve_out
from tests.support.made_models import qwen3
from tests.support.wording import Wording


def rocm(**variables: Any) -> dict[str, Any]:
    return {"template": "vllm-rocm", "variables": {"gpu_memory_utilization": "auto"} | variables}


ROCM = rocm()


def utilizations(filled: Experiment) -> dict[str, Any]:
    return {name: server.variables.get("gpu_memory_utilization") for name, server in filled.scenario.servers.items()}


def four_gpus(root: Path, used_gib: tuple[int, ...] = (0, 3, 10, 18)) -> Path:
    host(root, name="four", kernel="6.8", ram_gib=256, available_gib=200)
    for number, used in enumerate(used_gib):
        gpu(root, 110000, minor=128 + number, vram_gib=24, gtt_gib=128, vram_used_gib=used, card=True)
    return root


def ignore(_line: str) -> None: ...


def test_auto_becomes_a_number_and_says_why(tmp_path: Path) -> None:
    lines: list[str] = []
    filled = resolve_auto(
        experiment_of(tmp_path, {"vllm": ROCM}), lines.append, strix_halo_carve_out(tmp_path / "root")
    )
    assert utilizations(filled) == {"vllm": 0.92}
    why = "0.92 = (94.50 GiB free - 2.89 GiB reserve) / 96.00 GiB total = 0.9543, down to hundredths, at most 0.92"
    (formula,) = filled.computed.values()
    assert list(filled.computed) == ["servers.vllm.gpu_memory_utilization"] and formula.values["max_share"] == 0.92
    assert lines == [f"server 'vllm': gpu_memory_utilization {why} (the engine's default)"]
    assert '"--gpu-memory-utilization"\n      - "0.92"' in composed(filled.scenario, "vllm")


def test_with_a_local_model_the_size_of_its_kv_cache_is_shown(tmp_path: Path, wording: Wording) -> None:
    lines: list[str] = []
    qwen3(tmp_path / "m")
    with_model = experiment_of(tmp_path, {"vllm": rocm(model_path=str(tmp_path / "m"))})
    resolve_auto(with_model, lines.append, strix_halo_carve_out(tmp_path / "root"))
    (size,) = [line for line in lines if "788,480" in line and "802,528" in line]
    wording(size)


def test_numbers_stay_and_a_running_server_is_not_checked(tmp_path: Path) -> None:
    numbers = experiment_of(tmp_path, {"vllm": rocm(gpu_memory_utilization=0.6), "other": {"template": "vllm-rocm"}})
    running = prepare(write(tmp_path, servers={"vllm": ROCM}), Target("http://127.0.0.1:1"))
    for before in (numbers, running):
        assert resolve_auto(before, pytest.fail, tmp_path) is before


def test_servers_on_the_same_memory_get_equal_numbers(tmp_path: Path) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    used = root / "sys/class/drm/renderD128/device/mem_info_vram_used"

    def fill_memory(_line: str) -> None:
        used.write_text(f"{60 * GIB}\n")

    elsewhere = rocm(devices=["/dev/kfd", "/dev/dri/renderD128"])
    servers = {"a": ROCM, "a-again": ROCM, "other-flags": rocm(max_num_seqs=8), "other": elsewhere}
    filled = resolve_auto(experiment_of(tmp_path, servers), fill_memory, root)
    assert utilizations(filled) == {"a": 0.92, "a-again": 0.92, "other-flags": 0.92, "other": 0.35}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 0.91),
        ({"tensor_parallel_size": 4}, 0.12),
        ({"gpus": [0, 1], "tensor_parallel_size": 2}, 0.75),
        ({"devices": ["/dev/kfd", "/dev/dri/renderD130"]}, 0.5),
        ({"devices": ["/dev/kfd:/dev/kfd", "/dev/dri/renderD129", "/dev/dri/renderD130"], "gpus": [1]}, 0.5),
        ({"environment": {"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"}}, 0.16),
    ],
)
def test_only_the_gpus_of_the_server_count(tmp_path: Path, variables: dict[str, Any], expected: float) -> None:
    filled = resolve_auto(experiment_of(tmp_path, {"vllm": rocm(**variables)}), ignore, four_gpus(tmp_path / "root"))
    assert utilizations(filled) == {"vllm": expected}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--max-num-seqs 8 --gpu-memory-utilization auto", "--max-num-seqs 8 --gpu-memory-utilization 0.92"),
        ("--gpu-memory-utilization=auto --max-num-seqs 8", "--gpu-memory-utilization=0.92 --max-num-seqs 8"),
        ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization 0.5"),
    ],
)
def test_lemonade_has_the_number_in_its_arguments(tmp_path: Path, given: str, expected: str) -> None:
    server = {"template": "lemonade", "variables": {"vllm_args": given}}
    root = strix_halo_carve_out(tmp_path / "root")
    filled = resolve_auto(experiment_of(tmp_path, {"lemonade": server}), ignore, root)
    assert filled.scenario.servers["lemonade"].variables == {"vllm_args": expected}
    assert list(filled.computed) == ([] if given == expected else ["servers.lemonade.vllm_args"])


def test_gpu_names_that_are_not_numbers_are_refused(tmp_path: Path, wording: Wording) -> None:
    named = rocm(environment={"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"})
    with pytest.raises(HarnessError) as caught:
        resolve_auto(experiment_of(tmp_path, {"vllm": named}), pytest.fail, strix_halo_carve_out(tmp_path / "root"))
    assert "'GPU-0123456789abcdef'" in str(caught.value)
    wording(caught.value)
    assert "gpu_memory_utilization" in caught.value.next_step and "0.75" in caught.value.next_step
    wording(caught.value)


def test_without_a_gpu_auto_is_refused(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        resolve_auto(experiment_of(tmp_path, {"vllm": ROCM}), pytest.fail, tmp_path)
    assert "'vllm'" in caught.value.what and "gpu_memory_utilization" in caught.value.what
    wording(caught.value)
    assert "gpu_memory_utilization" in caught.value.next_step and "0.75" in caught.value.next_step
    wording(caught.value)
    root = gpu(tmp_path / "root", 110501, vram_gib=96, gtt_gib=15, vram_used_gib=95)
    with pytest.raises(HarnessError) as caught:
        resolve_auto(experiment_of(tmp_path, {"vllm": ROCM}), pytest.fail, root)
    wording(caught.value)


def test_check_shows_it_and_run_refuses_before_anything_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"vllm": ROCM})
    shown = harness("check", str(path), cwd=tmp_path)
    assert shown.code == 0
    assert "note: server 'vllm': gpu_memory_utilization " in shown.out
    refused = harness("run", str(path), cwd=tmp_path, env={"HARNESS_DOCTOR": "off"})
    assert refused.code == 1
    assert refused.err.startswith("error: server 'vllm': gpu_memory_utilization ")
    assert not (tmp_path / "runs").exists()
