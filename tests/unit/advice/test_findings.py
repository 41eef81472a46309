"""Each rule finds its cause in a run on the embedded engine, first; healthy runs have no finding; advice helps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.advice.findings import RULES, find
from harness.analysis.summarize import summarize_with_counts
from harness.base.summary import Action, RunFinding, Summary
from harness.records.run_data import load
from harness.scenario import Load
from harness.simulated.engine import EngineConfig
from tests.support.engine_runs import HEALTHY, STRIX, EngineSetup, write_engine_run


def batch(at_once: int, requests: int = 40, output_tokens: int = 10) -> Load:
    return Load(user="batch", in_flight=at_once, requests=requests, output_tokens=output_tokens)


def chat(users: int, requests: int = 60, **more: Any) -> Load:
    return Load(user="chat", users=users, requests=requests, output_tokens=20, think_s=[0.1, 1.0], **more)


def found(folder: Path, setup: EngineSetup, loads: dict[str, Load], **more: Any) -> list[RunFinding]:
    write_engine_run(folder, {"a": setup}, loads, **more)
    return find(load(folder))


def measure(folder: Path, setup: EngineSetup, one: Load, **more: Any) -> Summary:
    write_engine_run(folder, {"a": setup}, {"x": one}, **more)
    return summarize_with_counts(folder).summary


TIGHT = replace(STRIX, max_num_seqs=256)
# By rule: a server and loads with this one cause, and the prompts' length.
CAUSES: dict[str, tuple[EngineSetup, dict[str, Load], int]] = {
    "more_is_slower": (EngineSetup(engine=TIGHT), {"five": batch(5), "ten": batch(10)}, 360),
    "kv_cache_full": (EngineSetup(engine=TIGHT), {"ten": batch(10)}, 360),
    "queue_with_room": (EngineSetup(engine=replace(HEALTHY, max_num_seqs=2)), {"eight": batch(8)}, 100),
    "context_unused": (
        EngineSetup(engine=replace(HEALTHY, max_model_len=32_768, num_gpu_blocks=2100)), {"four": batch(4)}, 100,
    ),
}  # fmt: skip


def test_each_rule_has_a_cause() -> None:
    assert CAUSES.keys() == {rule.code for rule in RULES}


@pytest.mark.parametrize("code", CAUSES)
def test_a_run_with_one_cause_has_its_finding_first(tmp_path: Path, code: str) -> None:
    setup, loads, prompt_tokens = CAUSES[code]
    findings = found(tmp_path / "run", setup, loads, prompt_tokens=prompt_tokens)
    assert [one.code for one in findings][:1] == [code]
    assert all(action.settings and action.verify for action in findings[0].actions[:1])


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_finding(tmp_path: Path, seed: int) -> None:
    setups = [HEALTHY, replace(HEALTHY, enable_prefix_caching=True), replace(HEALTHY, max_num_batched_tokens=512),
              replace(HEALTHY, step_base_s=0.03, jitter=0.05)]  # fmt: skip
    loads = [
        {"one": batch(1), "eight": batch(8)},
        {"few": chat(3), "many": chat(12)},
        {"turns": chat(6, turns=4)},
        {"burst": Load(user="batch", batch_size=6, requests=48, output_tokens=16)},
        {"long": batch(4, output_tokens=60)},
    ]
    setup = EngineSetup(engine=setups[seed % 4], api_s=0.002 * (seed % 3))
    assert found(tmp_path / "run", setup, loads[seed % 5], prompt_tokens=50 + 37 * seed, seed=seed) == []


# By rule: a change of the engine that its first action asks for, as the engine is configured.
Change = Callable[[EngineConfig, RunFinding], EngineConfig]
BETTER: dict[str, Change] = {
    "more_is_slower": lambda engine, one: replace(engine, max_num_seqs=one.values["best_in_flight"]),
    "queue_with_room": lambda engine, one: replace(engine, max_num_seqs=one.values["fits"]),
}


@pytest.mark.parametrize("code", BETTER)
def test_an_expected_gain_has_the_direction_of_its_measurement(tmp_path: Path, code: str) -> None:
    setup, loads, prompt_tokens = CAUSES[code]
    (one, *_) = found(tmp_path / "before", setup, loads, prompt_tokens=prompt_tokens)
    expected = one.actions[0].gain
    assert expected is not None
    name = one.rows[0].rpartition(" / ")[2]
    values = []
    for folder, engine in (("a", setup.engine), ("b", BETTER[code](setup.engine, one))):
        made = replace(setup, engine=engine)
        row = measure(tmp_path / folder, made, loads[name], prompt_tokens=prompt_tokens).rows[0]
        values.append(row.pooled.ttft_s.mean if expected.values["metric"] == "ttft_mean" else row.pooled.output_tok_s)
    before, after = values
    assert before is not None and after is not None
    assert (after > before) == (expected.values["factor"] > 1)
    assert abs(after / before - 1) > 0.1


def first_settings(folder: Path, code: str, **served: Any) -> dict[str, str]:
    setup, loads, prompt_tokens = CAUSES[code]
    template = served.pop("template", "simulated")
    setup = replace(setup, served=served, startup=served.pop("startup", {}))
    (one, *_) = found(folder, setup, loads, prompt_tokens=prompt_tokens, template=template)
    action: Action = one.actions[0]
    return action.settings


def test_a_setting_is_spelled_as_the_server_is_configured(tmp_path: Path) -> None:
    vllm: dict[str, Any] = {"startup": {"engine": "vllm"}}
    of_lemonade = {"recipe_options": {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs=64"}}
    assert first_settings(tmp_path / "a", "more_is_slower") == {"servers.a.variables": "max_num_seqs: 5"}
    attached = first_settings(tmp_path / "b", "more_is_slower", template=None, **vllm)
    assert attached == {"arguments of vLLM": "--max-num-seqs 5"}
    lemonade = first_settings(
        tmp_path / "c", "more_is_slower", template=None, effective=of_lemonade, model="Qwen3.5-0.8B-FP16-vLLM", **vllm
    )
    entry = {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs 5"}
    assert json.loads(lemonade["recipe_options.json"]) == {"builtin.Qwen3.5-0.8B-FP16-vLLM": entry}
    started = first_settings(tmp_path / "d", "more_is_slower", template="lemonade", effective=of_lemonade, **vllm)
    assert started.keys() == {"servers.a.variables", "recipe_options.json"}
    llama = {"engine": "llama.cpp"}
    slots = {"parallel": 2, "ctx_per_slot": 4096}
    changed = first_settings(tmp_path / "e", "queue_with_room", template="llamacpp", effective=slots, startup=llama)
    assert changed == {"servers.a.variables": "parallel: 8\nctx_size: 32768"}
