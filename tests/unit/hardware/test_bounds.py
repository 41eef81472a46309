"""What the hardware allows: bounds, words, and the share that a run reached."""

from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.hardware.bounds import classify, decode_bound, share, ttft_floor
from harness.hardware.gpu_table import find_gpu, gpu_specs, gpu_title, identify_gpu
from harness.records.manifest import Machine, ModelSize, Startup
from harness.records.run_data import load
from harness.scenario import Load, Server
from harness.scenario.plan import Cell
from tests.support.made_runs import request, scenario, served_by, write_made_run
from tests.support.wording import Wording

STRIX_HALO = find_gpu("Strix Halo")


def size(read_gb: float, **more: Any) -> ModelSize:
    return ModelSize(name="m", weights_bytes=read_gb * 1e9, read_bytes=read_gb * 1e9, **more)


# Public measurements on Strix Halo with one user: GB that a token reads, tok/s, bound, share in percent, word.
PUBLIC = {
    "Qwen2.5-14B FP16, vLLM": (28.0, 6.4, 9.1, 70, "normal"),
    "14B Q4_K_M, llama.cpp": (8.5, 24, 30.1, 80, "at-limit"),
    "Qwen3.6-27B BF16, vLLM": (54, 4.35, 4.7, 92, "at-limit"),
    "Qwen3.6-27B AWQ4, vLLM 0.20, eager": (16, 5.6, 16.0, 35, "slow"),
    "Qwen3.6-27B AWQ4, DFlash speculation": (16, 18.5, 16.0, 116, None),
    "Qwen3.5-0.8B FP16, Lemonade with vLLM": (1.7, 95.6, 150.6, 63, "normal"),
    "gpt-oss-120b MXFP4, llama.cpp": (3.0, 51, 85.3, 60, "normal"),
    "gpt-oss-120b MXFP4, vLLM (vllm#34579)": (3.0, 7.75, 85.3, 9, "slow"),
    "Qwen3-0.6B FP16, rocm/vllm 7.14": (1.2, 143, 213.3, 67, "normal"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_word_is_right_on_public_measurements(name: str) -> None:
    read_gb, tok_s, expected, percent, word = PUBLIC[name]
    bound = decode_bound(size(read_gb), STRIX_HALO)
    assert (round(bound, 1), round(100 * tok_s / bound), classify(tok_s / bound, bound)) == (expected, percent, word)


@pytest.mark.parametrize(
    ("share_", "bound", "word"),
    [
        (0.75, 50, "at-limit"), (0.7499, 50, "normal"), (0.45, 50, "normal"), (0.4499, 50, "slow"),
        (0.4499, 101, "normal"), (0.35, 101, "normal"), (0.3499, 101, "slow"), (0.4499, 100, "slow"),
        (1.02, 50, "at-limit"), (1.03, 50, None),
    ],
)  # fmt: skip
def test_the_words_have_exact_borders(share_: float, bound: float, word: str | None) -> None:
    assert classify(share_, bound) == word


def test_the_cache_of_each_user_is_read_and_the_weights_once() -> None:
    model = size(10, kv_token_bytes=100_000.0)
    assert decode_bound(model, STRIX_HALO) == pytest.approx(25.6)
    assert decode_bound(model, STRIX_HALO, users=8, context=8192) == pytest.approx(8 * 256e9 / (10e9 + 8 * 8192e5))
    assert decode_bound(model, STRIX_HALO, gpus=2) == pytest.approx(51.2)


def test_a_window_bounds_the_cache_that_is_read() -> None:
    model = size(10, kv_token_bytes=0.0, sliding_token_bytes=100_000.0, window=1024)
    assert decode_bound(model, STRIX_HALO, context=1024) == decode_bound(model, STRIX_HALO, context=100_000)


def test_compute_bounds_many_users() -> None:
    model = size(28, params=14e9)
    assert decode_bound(model, STRIX_HALO, users=1000) == pytest.approx(59.4e12 / 28e9)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("7900 XTX", "Radeon RX 7900 XTX"), ("RX 7900 XTX", "Radeon RX 7900 XTX"), ("rx7900xt", "Radeon RX 7900 XT"),
        ("AMD Radeon(TM) RX 7900 XTX", "Radeon RX 7900 XTX"), ("Strix Halo", "Radeon 8060S"),
        ("strix-halo", "Radeon 8060S"), ("8060S", "Radeon 8060S"), ("Radeon 8060S Graphics", "Radeon 8060S"),
        ("gfx1151", "Radeon 8060S"), ("GFX942", "Instinct MI300X"), ("MI325X", "Instinct MI325X"),
        ("W7900", "Radeon PRO W7900"), ("R9700", "Radeon AI PRO R9700"), ("mi300x", "Instinct MI300X"),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_any_usual_name(given: str, name: str) -> None:
    assert find_gpu(given).name == name


@pytest.mark.parametrize("given", ["", "7900", "RTX 4090", "gfx", "x" * 10_000])
def test_an_unknown_gpu_is_an_error_that_names_the_other_way(given: str) -> None:
    with pytest.raises(HarnessError, match="--gpu") as caught:
        find_gpu(given)
    assert "--bandwidth" in caught.value.next_step


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("gfx906", "known: gfx1100, "), ("MI100", "known: Instinct MI210, "),
        ("x" * 99, "known: Instinct MI210, "), ("7800 XTX", "known: Radeon RX 7800 XT"),
        ("gfx1150x", "did you mean 'gfx1150'?"), ("Strix Hallo", "did you mean 'Strix Halo'?"),
    ],
)  # fmt: skip
def test_a_gpu_of_another_number_is_not_suggested(given: str, shown: str, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        find_gpu(given)
    assert "--gpu" in caught.value.what and str(shown) in caught.value.what
    wording(caught.value)


def test_each_target_has_one_default() -> None:
    targets = [spec.target for spec in gpu_specs() if spec.default]
    assert sorted(targets) == sorted({spec.target for spec in gpu_specs()})


@pytest.mark.parametrize(
    ("target", "units", "gib", "name"),
    [
        ("gfx1100", 96, 24, "Radeon RX 7900 XTX"), ("gfx1100", 96, 48, "Radeon PRO W7900"),
        ("gfx1100", 84, 20, "Radeon RX 7900 XT"), ("gfx942", 304, 256, "Instinct MI325X"),
        ("gfx942", None, None, "Instinct MI300X"), ("gfx1151", 40, 1, "Radeon 8060S"), ("gfx900", 64, 16, None),
    ],
)  # fmt: skip
def test_a_card_is_told_from_others_of_its_target(
    target: str, units: int | None, gib: int | None, name: str | None
) -> None:
    card = {"target": target, "compute_units": units, "vram_bytes": None if gib is None else gib << 30}
    found = identify_gpu(card)
    assert (None if found is None else found.name) == name
    assert gpu_title(card | {"name": "ip discovery"}) == f"{name or 'ip discovery'} {target}"


def test_a_card_without_a_name_has_its_target() -> None:
    assert gpu_title({"target": "gfx900"}) == "gfx900" and gpu_title({"name": "Vega 10"}) == "Vega 10"
    assert gpu_title({}) is None


def made_run(
    folder: Path, *, tok_s: float = 6.4, gpu: str = "gfx1151", users: int = 1, prompt: int = 20,
    cards: list[dict[str, Any]] | None = None, variables: dict[str, Any] | None = None, **served: Any
) -> Any:  # fmt: skip
    """The share of a run whose users get their tokens at `tok_s` each."""
    values: dict[str, Any] = {"template": "vllm-rocm", "startup": Startup(weights_gib=28e9 / (1 << 30))} | served

    def records(cell: Cell, process: int, start_s: float) -> Any:
        chunks = [0.05 + i / tok_s for i in range(11)]
        for number in range(4 * users):
            yield request(
                id=f"{number}", index=number, cell=cell.id, load=cell.load, process=process, prompt_tokens=prompt,
                sent_s=start_s + number // users * (chunks[-1] + 0.01), ended_s=chunks[-1], chunks_s=chunks,
                first_visible_s=0.05,
            )  # fmt: skip

    write_made_run(
        folder,
        made_of=scenario(
            servers={"a": Server(template="vllm-rocm", variables=variables or {})},
            loads={"x": Load(user="chat", users=users, requests=4 * users, output_tokens=11)},
            repeats=1,
        ),
        requests=lambda *known: list(records(*known)),
        served=lambda cell: served_by(**values),
        machine=Machine(name="strix", gpus=cards or [{"target": gpu, "compute_units": 40, "integrated": True}]),
    )
    data = load(folder)
    return share(data, next(iter(data.cells.values())))


def test_a_run_has_its_share_of_the_bound(tmp_path: Path, wording: Wording) -> None:
    found = made_run(tmp_path / "run")
    assert (round(found.share, 3), found.word, round(found.bound_tok_s, 2)) == (0.7, "normal", 9.14)
    assert found.measured_tok_s == pytest.approx(6.4)
    assert "70" in found.sentence
    wording(found.sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {"startup": None}, {"gpu": "gfx900"}, {"template": "vllm-cpu"}, {"template": None, "url": "http://10.0.0.1:80"},
        {"template": "llamacpp", "startup": Startup(weights_gib=8.0, offloaded_layers="0/25")},
        {"startup": Startup(weights_gib=60.0, architecture="Qwen3MoeForCausalLM")},
    ],
)  # fmt: skip
def test_a_run_without_a_known_model_or_gpu_has_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert made_run(tmp_path / "run", **changes) is None


def test_active_parameters_are_read_from_the_name(tmp_path: Path) -> None:
    startup = Startup(weights_gib=60e9 / (1 << 30), architecture="Qwen3MoeForCausalLM")
    found = made_run(tmp_path / "run", tok_s=30, model="Qwen/Qwen3-30B-A3B", startup=startup)
    assert round(found.bound_tok_s, 1) == 42.7


def test_the_bandwidth_of_several_gpus_adds_up(tmp_path: Path) -> None:
    startup = Startup(weights_gib=14e9 / (1 << 30))  # of each rank
    found = made_run(tmp_path / "run", startup=startup, effective={"tensor_parallel_size": 2})
    assert round(found.bound_tok_s, 2) == 18.29


CARDS: list[dict[str, Any]] = [
    {"target": "gfx1100", "compute_units": units, "integrated": False, "render_node": f"/dev/dri/renderD{node}"}
    for node, units in ((128, 96), (129, 84))
]


@pytest.mark.parametrize(
    ("variables", "ranks", "gb_s"),
    [
        ({}, 1, 960), ({"gpus": [1]}, 1, 800), ({"gpus": [0]}, 1, 960), ({"gpus": [1, 0]}, 2, 1600),
        ({"environment": {"ROCR_VISIBLE_DEVICES": "1"}}, 1, 800),
        ({"devices": ["/dev/kfd", "/dev/dri/renderD129"]}, 1, 800),
        ({"gpus": [2]}, 1, None), ({"environment": {"HIP_VISIBLE_DEVICES": "GPU-1234"}}, 1, None),
        ({"gpus": "1", "devices": None, "environment": [1]}, 1, 960),
    ],
)  # fmt: skip
def test_the_bound_is_of_the_cards_that_the_server_was_given(
    tmp_path: Path, variables: dict[str, Any], ranks: int, gb_s: float | None
) -> None:
    """A 7900 XTX and a 7900 XT; together each waits for the slower one."""
    effective = {"tensor_parallel_size": ranks}
    found = made_run(tmp_path / "run", cards=CARDS, variables=variables, effective=effective, model_size=size(28))
    assert (None if found is None else round(found.bound_tok_s, 2)) == (None if gb_s is None else round(gb_s / 28, 2))


def test_each_token_of_a_prompt_attends_to_those_before_it() -> None:
    """48 layers of 40 heads of 128: 2 x 48 x 40 x 128 x n^2 operations next to 2 x 14e9 x n."""
    model = size(28, params=14e9, attention_width=48 * 40 * 128)
    for tokens in (512, 32_768):
        expected = (2 * 14e9 * tokens + 2 * 48 * 40 * 128 * tokens**2) / 59.4e12
        assert ttft_floor(model, STRIX_HALO, tokens)[1] == pytest.approx(expected)
    # The second half of a prompt attends to the first, which is cached.
    whole, first, second = (ttft_floor(model, STRIX_HALO, 4096, cached=cached)[1] or 0 for cached in (0, 0, 4096))
    assert first + second == pytest.approx(ttft_floor(model, STRIX_HALO, 8192)[1])
    assert second > whole
    sliding = size(28, params=14e9, sliding_attention_width=48 * 40 * 128, window=1024)
    pairs = 1024**2 / 2 + (8192 - 1024) * 1024
    expected = (2 * 14e9 * 8192 + 4 * 48 * 40 * 128 * pairs) / 59.4e12
    assert ttft_floor(sliding, STRIX_HALO, 8192)[1] == pytest.approx(expected)


# Compute units, GHz, FP16 operations of a unit and clock; bits of the bus, GT/s of the memory.
DATA_SHEETS = {
    "Radeon 8060S": (40, 2.9, 512, 256, 8), "Radeon 8050S": (32, 2.8, 512, 256, 8),
    "Radeon 890M": (16, 2.9, 512, 128, 7.5), "Radeon 780M": (12, 2.7, 512, 128, 7.5),
    "Radeon RX 7900 XTX": (96, 2.5, 512, 384, 20), "Radeon RX 7900 XT": (84, 2.4, 512, 320, 20),
    "Radeon PRO W7900": (96, 2.495, 512, 384, 18), "Radeon RX 7800 XT": (60, 2.43, 512, 256, 19.5),
    "Radeon RX 7700 XT": (54, 2.544, 512, 192, 18), "Radeon RX 7600": (32, 2.655, 512, 128, 18),
    "Radeon RX 9070 XT": (64, 2.97, 1024, 256, 20), "Radeon RX 9070": (56, 2.52, 1024, 256, 20),
    "Radeon AI PRO R9700": (64, 2.92, 1024, 256, 20), "Radeon RX 9060 XT": (32, 3.13, 1024, 128, 20),
    "Instinct MI210": (104, 1.7, 1024, 4096, 3.2), "Instinct MI250X (one die)": (110, 1.7, 1024, 4096, 3.2),
    "Instinct MI300X": (304, 2.1, 2048, 8192, 5.2), "Instinct MI300A": (228, 2.1, 2048, 8192, 5.2),
    "Instinct MI325X": (304, 2.1, 2048, 8192, 5.86), "Instinct MI350X": (256, 2.2, 4096, 8192, 7.8),
    "Instinct MI355X": (256, 2.4, 4096, 8192, 7.8),
}  # fmt: skip


def test_the_table_agrees_with_units_clocks_and_buses() -> None:
    assert [spec.name for spec in gpu_specs()] == [*DATA_SHEETS]
    for spec in gpu_specs():
        units, ghz, operations, bits, rate = DATA_SHEETS[spec.name]
        assert spec.compute_units == units and spec.source
        assert spec.fp16_tflops == pytest.approx(units * ghz * operations / 1000, rel=0.005), spec.name
        assert spec.bandwidth_gb_s == pytest.approx(bits / 8 * rate, rel=0.01), spec.name
        if spec.fp8_tflops is not None and spec.fp16_tflops is not None:
            assert spec.fp8_tflops == pytest.approx(2 * spec.fp16_tflops, rel=0.01), spec.name


def test_many_users_have_a_word_unless_prompts_take_the_time(tmp_path: Path, wording: Wording) -> None:
    found = made_run(tmp_path / "a", tok_s=5, users=8)
    assert (found.word, round(found.share, 2)) == ("normal", 0.55)
    slow = made_run(tmp_path / "b", tok_s=2, users=8)
    assert slow.word == "slow"
    wording(slow.sentence)
    assert made_run(tmp_path / "c", tok_s=2, users=8, prompt=2000).word is None


def test_the_word_counts_the_experts_of_all_users(tmp_path: Path, wording: Wording) -> None:
    values: dict[str, Any] = {
        "model": "Qwen/Qwen3-30B-A3B",
        "startup": Startup(weights_gib=60e9 / (1 << 30), architecture="Qwen3MoeForCausalLM"),
    }
    found = made_run(tmp_path / "run", tok_s=5, users=8, **values)
    assert found.measured_tok_s / found.bound_tok_s < 0.2, "of a bound with the experts of one user"
    assert (found.word, found.share) == ("normal", found.measured_tok_s / found.of_tok_s)
    wording(found.sentence)


def test_the_files_of_the_model_count_more_than_the_log(tmp_path: Path) -> None:
    found = made_run(tmp_path / "a", model_size=size(14, kv_token_bytes=1e6))
    context = 20 + 11 / 2
    assert found.bound_tok_s == pytest.approx(256e9 / (14e9 + context * 1e6))
    halved = made_run(tmp_path / "b", model_size=size(14, kv_token_bytes=1e6), effective={"kv_cache_dtype": "fp8_e4m3"})
    assert halved.bound_tok_s == pytest.approx(256e9 / (14e9 + context * 5e5))
    assert made_run(tmp_path / "c", model_size=size(0)) is None
