"""The command `harness expect`: what fits, how fast it can be, and whether a speed is normal."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.hardware.bandwidth import cache_file, read_measured, store_measured
from harness.hardware.gpu_table import find_gpu, fitted_memory
from harness.hardware.model import read_model
from harness.questions.expect.decide import Expectation, Question, parse_bits, parse_params, parse_tokens
from harness.questions.expect.page import expect_page
from harness.questions.expect.sources import answer
from tests.support.command import harness
from tests.support.machines import gpu, radeon, strix_halo_carve_out, write
from tests.support.made_models import QWEN3, QWEN25_14B, model, qwen3
from tests.support.printed import printed_lines
from tests.support.wording import Wording

QWEN30_A3: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_question_of_the_strix_halo_owner(tmp_path: Path) -> None:
    """6.4 tok/s with a 14B model in FP16: normal, and AWQ is what moves the bound."""
    model(tmp_path / "m", QWEN25_14B)
    found = answer(Question(model=str(tmp_path / "m"), gpu="Strix Halo", measured_tok_s=6.4), tmp_path)
    assert found.one_user_max_tok_s == pytest.approx(9.15, abs=0.02)
    assert found.one_user_typical_tok_s == pytest.approx((5.49, 8.23), abs=0.02)
    assert (round(found.share or 0, 2), found.word) == (0.70, "normal")
    bounds = {each.name: round(each.max_tok_s) for each in found.weights}
    assert bounds == {"FP16": 9, "FP8": 17, "AWQ": 29, "Q8_0": 17, "Q4_K_M": 30}
    assert [(each.context, round(each.max_tok_s, 2)) for each in found.contexts][:2] == [(512, 9.12), (4096, 8.89)]
    assert [round(each.max_tok_s) for each in found.many_users] == [9, 33, 100, 206]
    assert {each.context for each in found.many_users} == {4096}
    assert any(line.startswith("Users, context 4,096 ") for line in printed_lines(expect_page(found)))
    assert round(found.prompts[1].min_ttft_s, 2) == 0.95
    assert len(printed_lines(expect_page(found))) <= 25


@pytest.mark.parametrize(
    ("bits", "tok_s", "word"),
    [("16", 6.4, "normal"), ("Q4_K_M", 24, "at-limit"), ("4", 5.6, "slow"), ("fp8", 19.5, None)],
)
def test_a_model_by_hand(tmp_path: Path, bits: str, tok_s: float, word: str | None, wording: Wording) -> None:
    found = answer(Question(params="14B", bits=bits, gpu="gfx1151", measured_tok_s=tok_s), tmp_path)
    assert (found.word, found.gpu) == (word, "Radeon 8060S")
    wording(found.bandwidth_source or "")


@pytest.mark.parametrize(
    ("given", "params", "active"),
    [("14B", "14B", None), ("0.6b", "0.6b", None), ("30B-A3B", "30B", "3B"), ("500m", "500m", None)],
)
def test_a_size_is_enough_for_a_model(
    tmp_path: Path, given: str, params: str, active: str | None, wording: Wording
) -> None:
    by_hand = answer(Question(params=params, active_params=active, gpu="gfx1151"), tmp_path)
    assert answer(Question(model=given, gpu="gfx1151"), tmp_path) == by_hand
    assert by_hand.sentence.startswith(f"{given.upper()} ")
    wording(by_hand.sentence)


def test_a_folder_whose_name_is_a_size_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "14B", {"model_type": "new"})
    monkeypatch.chdir(tmp_path)
    assert answer(Question(model="14B", gpu="gfx1151"), tmp_path).one_user_max_tok_s is None


def test_a_slow_speed_says_what_may_be_wrong(tmp_path: Path, wording: Wording) -> None:
    found = answer(Question(params="14B", bits="4", gpu="gfx1151", measured_tok_s=5.6), tmp_path)
    assert "5.6" in found.sentence and "17" in found.sentence
    wording(found.sentence)


def test_a_model_whose_size_is_not_known(tmp_path: Path, wording: Wording) -> None:
    """The answer says so, and does not ask for the model that was given."""
    folder = model(tmp_path / "m", {"model_type": "new"})
    found = answer(Question(model=str(folder), gpu="gfx1151"), tmp_path)
    assert found.one_user_max_tok_s is None
    assert "harness expect 14B" in found.sentence
    wording(found.sentence)


def test_experts_of_many_users(tmp_path: Path) -> None:
    found = answer(Question(params="30B", active_params="3B", bits="8", gpu="Strix Halo", users=64), tmp_path)
    assert found.one_user_max_tok_s == pytest.approx(256 / 3)
    last = found.many_users[-1]
    assert last.max_tok_s == pytest.approx(64 * 256 / 3)
    assert last.spread_max_tok_s == pytest.approx(64 * 256 / (30 * (1 - 0.9**64)), rel=0.001)


@pytest.mark.parametrize(
    ("tok_s", "word", "part", "of"),
    [
        (100, "normal", "50 % of about 200 tok/s ", 200),
        (300, "at-limit", "150 % of about 200 ", 200),
        (1300, None, "114 % of at", 1138),
    ],
)
def test_the_share_in_the_sentence_is_the_one_of_its_word(
    tmp_path: Path, tok_s: float, word: str | None, part: str, of: float
) -> None:
    """Of experts: all users together read more than one user, and routers that agree read less than the estimate."""
    asked = Question(params="30B", active_params="3B", bits="Q4_K_M", gpu="Strix Halo", users=8, measured_tok_s=tok_s)
    found = answer(asked, tmp_path)
    assert (found.word, round(found.users_max_tok_s or 0)) == (word, 1138)
    assert part in found.sentence and "1,138 tok/s" in found.sentence
    assert found.share == pytest.approx(tok_s / of, rel=0.002) and round(found.share_of_tok_s or 0) == of
    measured = answer(asked, strix_halo_carve_out(tmp_path / "root"), measured_gb_s=256.0)
    assert measured.share_of_measured == measured.share


def test_what_fits_without_a_cache_is_the_weights(tmp_path: Path, wording: Wording) -> None:
    """The size of the cache is not known from a size: nothing is said of its fit, and the context is not dropped."""
    by_hand = answer(Question(params="14B", bits="8", gpu="7900 XTX", users=8, context=32768), tmp_path)
    assert "32,768" in by_hand.sentence
    wording(by_hand.sentence)
    assert any(line.startswith("weights fit") for line in printed_lines(expect_page(by_hand)))
    model(tmp_path / "m", QWEN25_14B)
    known = answer(Question(model=str(tmp_path / "m"), gpu="W7900", users=8, context=32768), tmp_path)
    assert "after 32,768 tokens" in known.sentence
    assert any(line.startswith("fits ") for line in printed_lines(expect_page(known)))


def test_the_bandwidth_by_hand_has_no_compute(tmp_path: Path) -> None:
    found = answer(Question(params="1B", bits="8", bandwidth_gb_s=100.0), tmp_path)
    assert (found.one_user_max_tok_s, found.fp16_tflops, found.prompts[0].typical_ttft_s) == (100.0, None, None)
    both = answer(Question(params="1B", bits="8", gpu="MI300X", bandwidth_gb_s=100.0), tmp_path)
    assert (both.one_user_max_tok_s, both.fp16_tflops) == (100.0, 1307)


def test_what_fits_into_a_card_of_the_table(tmp_path: Path) -> None:
    fits = {
        each.name: each.fits for each in answer(Question(params="14B", gpu="RX 7900 XT", users=1), tmp_path).weights
    }
    assert fits == {"FP16": False, "FP8": True, "AWQ": True, "Q8_0": True, "Q4_K_M": True}


def test_this_machines_gpu_and_its_memory(tmp_path: Path, wording: Wording) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    qwen3(tmp_path / "m")
    found = answer(Question(model=str(tmp_path / "m"), context=8192), root)
    assert (found.gpu, found.bandwidth_gb_s, found.fits) == ("Radeon 8060S", 256, True)
    assert "8000" in (found.bandwidth_source or "")
    wording(found.bandwidth_source)
    card = answer(Question(params="8B"), radeon(tmp_path / "card", 110000, 24))
    assert (card.gpu, card.memory is not None) == ("Radeon RX 7900 XTX", True)


@pytest.mark.parametrize(("gpus", "gb_s", "which"), [(1, 960, "first"), (2, 640, "slowest of the first 2")])
def test_of_different_cards_the_slowest_that_is_used_counts(
    tmp_path: Path, gpus: int, gb_s: float, which: str, wording: Wording
) -> None:
    """As in reports of runs. A 7900 XTX and an R9700."""
    root = radeon(tmp_path, 110000, 24)
    gpu(root, 120001, minor=129, vram_gib=32, gtt_gib=31, card=True)
    found = answer(Question(params="8B", gpus=gpus), root)
    assert found.bandwidth_gb_s == gb_s
    names = "Radeon RX 7900 XTX, Radeon AI PRO R9700"
    assert found.bandwidth_source is not None and which in found.bandwidth_source and names in found.bandwidth_source
    wording(found.bandwidth_source)


def test_prompts_go_up_to_the_context(tmp_path: Path) -> None:
    for context, lengths in ((None, [512, 2048, 8192]), (1000, [512, 1000]), (32768, [512, 2048, 8192, 32768])):
        found = answer(Question(params="14B", gpu="Strix Halo", context=context), tmp_path)
        assert [each.tokens for each in found.prompts] == lengths


def test_other_weights_are_for_the_users_of_the_question(tmp_path: Path) -> None:
    """The type of the model itself has the numbers of the answer, with experts too."""
    by_hand = Question(params="30B", gpu="Strix Halo", users=8, measured_tok_s=1)
    experts = replace(by_hand, params=None, model=str(model(tmp_path / "m", QWEN30_A3)))
    for asked in (by_hand, replace(by_hand, active_params="3B"), experts):
        found = answer(asked, tmp_path)
        own = found.weights[0]
        assert (own.name, own.typical_tok_s) == ("FP16", None)
        assert own.max_tok_s == pytest.approx(found.users_max_tok_s)
        assert (own.spread_max_tok_s is None) == (asked is by_hand)
        assert (own.spread_max_tok_s or own.max_tok_s) == pytest.approx(found.share_of_tok_s)
        assert any("8 users" in line and "FP16" in line for line in printed_lines(expect_page(found)))


def test_other_weights_of_a_model_whose_experts_alone_have_4_bit(tmp_path: Path) -> None:
    """gpt-oss-120b: 1.55 B parameters in 16 bit, and 114.7 B of experts, of which a token uses 4 of 128."""
    found = answer(Question(model=str(model(tmp_path, GPT_OSS)), gpu="MI300X", context=10), tmp_path)
    assert found.model is not None and found.model.params is not None
    assert found.model.params / 1e9 == pytest.approx(0.9688 + 3.583 + 0.579, abs=0.002)
    assert found.model.read_bytes / 1e9 == pytest.approx(2 * (0.9688 + 0.579) + 0.53 * 3.583, abs=0.003)
    fits = {each.name: each.fits for each in found.weights}
    assert fits == {"FP16": False, "FP8": True, "AWQ": True, "Q8_0": True, "Q4_K_M": True}, "FP16 has 233 GB"


def test_a_prompt_reads_all_experts(tmp_path: Path) -> None:
    """Not surely, so that the bound is of one token's; 512 tokens of 8 of 128 experts miss none."""
    asked = Question(model=str(model(tmp_path, QWEN30_A3)), gpu="Strix Halo", context=512)
    prompt, size = answer(asked, tmp_path).prompts[0], read_model(tmp_path).size
    assert size is not None and prompt.typical_ttft_s is not None
    all_s = (size.read_bytes + size.routed_bytes * (1 - size.routed_share)) / 256e9
    assert prompt.min_ttft_s < 0.06 < prompt.typical_ttft_s[0] == pytest.approx(all_s, rel=1e-6)


def test_what_is_typical_falls_with_the_context(tmp_path: Path) -> None:
    found = answer(Question(model=str(model(tmp_path, QWEN30_A3)), gpu="RX 7900 XTX"), tmp_path)
    low = [each.typical_tok_s[0] for each in found.contexts]
    assert low == sorted(low, reverse=True) and low[0] >= 60


def test_cards_that_are_not_in_the_table_are_named(tmp_path: Path, wording: Wording) -> None:
    root = radeon(tmp_path, 90006, 16)
    gpu(root, 110000, minor=129, vram_gib=24, gtt_gib=31, card=True)
    wording(answer(Question(params="8B"), root).sentence)


def memory_device(speed: int, width: int, size: int = 0x4000) -> bytes:
    raw = bytearray(0x30)
    raw[0x0A:0x0C], raw[0x0C:0x0E] = width.to_bytes(2, "little"), size.to_bytes(2, "little")
    raw[0x20:0x22] = speed.to_bytes(2, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    ("devices", "gb_s"),
    [
        ([(8000, 32)] * 8, 256.0), ([(8533, 32)] * 8, 273.056), ([(5600, 64)] * 2, 89.6), ([(5600, 64)], 44.8),
        ([(8000, 64)] * 8, 256.0), ([], None), ([(0, 64)], None), ([(0xFFFF, 0xFFFF)], None),
    ],
)  # fmt: skip
def test_an_apu_has_the_bandwidth_of_its_memory(tmp_path: Path, devices: Any, gb_s: float | None) -> None:
    for number, (speed, width) in enumerate(devices):
        path = tmp_path / f"sys/firmware/dmi/entries/17-{number}/raw"
        path.parent.mkdir(parents=True)
        path.write_bytes(memory_device(speed, width))
    found = fitted_memory(find_gpu("Strix Halo"), tmp_path)
    assert (None if found is None else found[0].bandwidth_gb_s) == gb_s
    assert fitted_memory(find_gpu("MI300X"), tmp_path) is None


def test_a_measurement_is_kept_with_the_machine() -> None:
    assert read_measured() is None
    store_measured(37.5)
    assert read_measured() == 37.5
    found = json.loads(cache_file().read_text())
    cache_file().write_text(json.dumps(found | {"machine": "another"}))
    assert read_measured() is None
    cache_file().write_text("{")
    assert read_measured() is None


def test_the_share_of_the_measured_bandwidth(tmp_path: Path, wording: Wording) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    found = answer(Question(params="14B", measured_tok_s=6.4), root, measured_gb_s=202.0)
    assert (round(found.share or 0, 2), round(found.share_of_measured or 0, 2)) == (0.70, 0.89)
    low = answer(Question(params="14B", measured_tok_s=6.4), root, measured_gb_s=150.0)
    wording([line for line in printed_lines(expect_page(low)) if "measured bandwidth" in line])


def test_the_cpu_is_measured_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = harness("expect", "1B", "--bits", "8", "--measure", "--json", cwd=tmp_path)
    page = json.loads(done.out)
    gb_s = page["measured_bandwidth_gb_s"]
    assert 0.5 < gb_s < 5000
    assert (page["one_user_max_tok_s"], page["bandwidth_source"]) == (pytest.approx(gb_s), "measured")
    assert read_measured() == gb_s
    kept = json.loads(harness("expect", "1B", "--bits", "8", "--json", cwd=tmp_path).out)
    assert kept["one_user_max_tok_s"] == page["one_user_max_tok_s"]


@pytest.mark.parametrize(
    ("given", "params"), [("14B", 14e9), ("0.6b", 0.6e9), ("500M", 5e8), ("1e9", 1e9), ("1T", 1e12)]
)
def test_parameters(given: str, params: float) -> None:
    assert parse_params("MODEL", given) == params


def test_tokens_have_a_suffix() -> None:
    assert [parse_tokens("--context", each) for each in ("8192", "32k", "1M")] == [8192, 32768, 1 << 20]
    for given in ("", "k", "0", "-1", "1.5k", "32g", "9" * 30, "100000001", "١k"):
        with pytest.raises(HarnessError, match="--context: "):
            parse_tokens("--context", given)


@pytest.mark.parametrize("given", ["", "B", "-1B", "14G", "nan", "infB", "1e99", "0", "x" * 9999, "1_0B", "١B"])
def test_no_parameters(given: str) -> None:
    with pytest.raises(HarnessError, match="MODEL: "):
        parse_params("MODEL", given)


@pytest.mark.parametrize(
    ("given", "per_param"), [("16", 2.0), ("bf16", 2.0), ("4", 0.55), ("q4_k_m", 0.6), ("GPTQ", 0.55)]
)
def test_types_of_weights(given: str, per_param: float) -> None:
    assert parse_bits(given)[0] == per_param


def test_the_command(tmp_path: Path, wording: Wording) -> None:
    root = strix_halo_carve_out(tmp_path / "root")
    qwen3(tmp_path / "m")
    qwen3(tmp_path / "large", gib=80)

    def expect(*given: str) -> tuple[int, list[str]]:
        done = harness("expect", *given, cwd=tmp_path)
        return done.code, (done.out or done.err).splitlines()

    assert "--gpu-memory-utilization 0.78 (74.88 GiB)" in expect("--free", "76.45", "--total", "96.0")[1]
    code, lines = expect("m", "--root", str(root), "--context", "8k", "--measured", "80", "--json")
    page = json.loads("\n".join(lines))
    assert (code, [each["target"] for each in page["pools"]]) == (0, ["gfx1151"])
    assert (page["memory"]["utilization"], page["fit"]["token_bytes"], page["fit"]["fits"]) == ("0.92", 114688, True)
    assert (page["word"], page["one_user_max_tok_s"] > page["one_user_typical_tok_s"][1]) == ("at-limit", True)
    assert Expectation.__struct_fields__ == tuple(page)
    code, lines = expect("--root", str(tmp_path))
    assert code == 1
    wording(lines[0])
    # The exit code says that it does not fit.
    assert expect("large", "--free", "76.45", "--total", "96")[0] == 4
    code, lines = expect("--free", "1", "--total", "96")
    assert code == 4
    wording(lines[0])


FREE, TOTAL = ["--free", "76.45"], ["--total", "96"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--free", "1", "--total", "0"], "GiB"),
        (["--free", "1", "--total", "inf"], "--total"),
        ([*FREE, *TOTAL, "--kv-cache-dtype", "fp9"], "'fp8'"),
        (FREE, "--free needs --total"),
        (["--bits", "4"], "--bits"),
        (["m", "--active-params", "1B"], "--active-params"),
        (["acme/Big-30B-A3B"], "'acme/Big-30B-A3B'"),
        (["1B", "--bits", "5"], "--bits: '5' "),
        (["1B", "--active-params", "2B"], "--active-params: "),
        (["1B", "--gpu", "RTX 4090"], "--gpu: 'RTX 4090' "),
        (["1B", "--gpu", "MI300X", "--measure"], "--measure"),
        (["absent.gguf"], "absent.gguf: "),
        (["absent/model"], "'absent/model'"),
        (["1B", "--gpu", "MI300X", "--measured", "nan"], "--measured"),
        (["1B", "--bandwidth", "0"], "--bandwidth"),
    ],
)
def test_questions_that_cannot_be_meant(tmp_path: Path, given: list[str], what: str, wording: Wording) -> None:
    done = harness("expect", *given, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert what in done.err.splitlines()[0]
    wording(done.err)


def test_a_model_that_is_not_here_can_be_asked_for_by_its_size(tmp_path: Path) -> None:
    for name, size in (("acme/Big-30B-A3B-Instruct", "30B-A3B"), ("Qwen3-0.6B", "0.6B"), ("a/v2.5-14b-gguf", "14b")):
        with pytest.raises(HarnessError) as caught:
            answer(Question(model=name, gpu="gfx1151"), tmp_path)
        assert f"harness expect {size} --bits 4" in caught.value.next_step
    with pytest.raises(HarnessError) as caught:
        answer(Question(model="gpt-oss", gpu="gfx1151"), tmp_path)
    assert "--bits" not in caught.value.next_step


MIXTURE = QWEN25_14B | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("config", "changes", "is_known"),
    [
        (QWEN25_14B, {"num_hidden_layers": -3}, False), (QWEN25_14B, {"num_key_value_heads": float("nan")}, False),
        (QWEN25_14B, {"vocab_size": "many"}, False), (MIXTURE, {"num_experts_per_tok": -8}, False),
        (MIXTURE, {"num_experts": "128"}, False), (QWEN25_14B, {"hidden_size": [1]}, False),
        (QWEN25_14B, {"max_position_embeddings": -1}, True), (QWEN25_14B, {"num_key_value_heads": 80}, False),
        (MIXTURE, {"first_k_dense_replace": 49}, False),
        (QWEN25_14B, {"quantization_config": {"quant_method": "gptq", "bits": -4}}, True),
    ],
)  # fmt: skip
def test_broken_values_of_a_configuration_are_named(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], is_known: bool
) -> None:
    found = answer(Question(model=str(model(tmp_path, config | changes)), gpu="MI300X", context=10), tmp_path)
    assert (found.one_user_max_tok_s is not None) == is_known
    key, value = list(changes.get("quantization_config", changes).items())[-1]
    assert f"{key} is {value!r}" in "\n".join(printed_lines(expect_page(found)))


def test_experts_without_the_number_of_a_token_are_no_dense_model(tmp_path: Path) -> None:
    for used in (200, None):
        folder = model(tmp_path, MIXTURE | {"num_experts_per_tok": used})
        assert answer(Question(model=str(folder), gpu="MI300X", context=10), tmp_path).one_user_max_tok_s is None
    dense = answer(Question(model=str(model(tmp_path, QWEN25_14B | {"num_experts": 0})), gpu="MI300X"), tmp_path)
    assert dense.one_user_max_tok_s is not None and len(dense.doubts) == 1


def test_a_damaged_configuration_is_an_error(tmp_path: Path, wording: Wording) -> None:
    configs: list[dict[str, Any]] = [
        QWEN3 | {"num_hidden_layers": "x"}, {"model_type": 5}, {"text_config": {}}, {},
        QWEN25_14B | {"num_hidden_layers": 10**400}, QWEN25_14B | {"vocab_size": True},
        QWEN25_14B | {"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": "x"},
        QWEN25_14B | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": [1]},
        QWEN25_14B | {"kv_lora_rank": {}},
    ]  # fmt: skip
    for config in configs:
        shape = model(tmp_path, config)
        found = answer(Question(model=str(shape), gpu="MI300X", context=10), tmp_path)
        assert found.one_user_max_tok_s is None and found.model is None
    write(tmp_path, {"config.json": "[]"})
    with pytest.raises(HarnessError) as caught:
        answer(Question(model=str(tmp_path), gpu="MI300X"), tmp_path)
    wording(caught.value)


@pytest.mark.parametrize(
    ("gpu", "params", "fits"),
    [("RX 7900 XTX", "70B", False), ("RX 7900 XTX", "7B", None), ("gfx1151", "60B", None), ("gfx1151", "70B", False)],
)
def test_weights_by_hand_that_do_not_fit_are_said(gpu: str, params: str, fits: bool | None, wording: Wording) -> None:
    found = answer(Question(params=params, bits="16", gpu=gpu))
    assert found.fits is fits
    lines = [line for line in printed_lines(expect_page(found)) if " fit" in line]
    assert any(line.startswith(("does not", "whether")) for line in lines) == (fits is False or params == "60B")
    wording(lines)


def test_several_users_of_a_mixture_are_told_the_speed_with_the_experts_of_all(wording: Wording) -> None:
    found = answer(Question(params="30B", active_params="3B", bits="Q4_K_M", gpu="gfx1151", users=16))
    assert "279" in found.sentence and "2,276" in found.sentence
    wording(found.sentence)
    assert found.share is None and found.share_of_tok_s == pytest.approx(279, rel=0.01)
