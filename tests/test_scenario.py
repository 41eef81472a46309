"""A scenario file: what is accepted, and that everything wrong with it is said at once."""

from pathlib import Path

import pytest

from harness.errors import HarnessError, ScenarioError
from harness.paths import SCENARIOS
from harness.plan import baseline_of, plan
from harness.scenario import load_scenario, warmup_of

GOOD = """
version: 1
question: Is five at a time faster than one?
model: some/model
servers: {a: {template: simulated, container: false}, b: {template: vllm-rocm}}
loads:
  one: {user: batch, requests: 10}
  five: {user: batch, batch_size: 5, requests: 10}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(write(folder, text))
    return caught.value.problems


def test_a_small_scenario_gets_the_documented_defaults(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD))
    assert scenario.repeats == 5
    assert scenario.seed == 42
    assert scenario.restart is True
    assert [warmup_of(scenario, load).requests for load in scenario.loads.values()] == [1, 5]
    assert scenario.loads["one"].output == "fixed"
    assert baseline_of(scenario).server == "a"
    assert baseline_of(scenario).load == "one"


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_scenario_that_ships_loads(path: Path) -> None:
    assert load_scenario(path).question


def test_all_problems_are_reported_at_once_with_path_line_value_and_advice(tmp_path: Path) -> None:
    text = """
version: 1
question: What?
model: 5
servers: {a: {templat: simulated}}
loads:
  One: {user: batch, requests: 10}
  two: {user: batch, requests: ten, batchsize: 5}
repeats: 0
"""
    problems = problems_of(tmp_path, text)
    assert problems == [
        "$.model (line 4): Expected `str`, got 5",
        "$.servers.a.templat (line 5): unknown key; did you mean 'template'?",
        "$.servers.a (line 5): 'template' is missing",
        "$.loads.One (line 7): 'One' is not a name: lower-case letters, digits and '-', at most 40",
        "$.loads.two.requests (line 8): Expected `int`, got 'ten'",
        "$.loads.two.batchsize (line 8): unknown key; did you mean 'batch_size'?",
        "$.repeats (line 9): Expected `int` >= 1, got 0",
    ]


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD + "seed: 1\nseed: 2\n") == ["$.seed (line 10): written twice; keep one"]


def test_broken_yaml_names_the_place(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "version: [1\n") == [
        "not valid YAML at line 2, column 1: expected ',' or ']', but got '<stream end>'"
    ]


@pytest.mark.parametrize("text", ["", "- 1\n", "hello\n", "\x00"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert len(problems_of(tmp_path, text)) == 1


def test_contradictions_are_found(tmp_path: Path) -> None:
    text = """
version: 1
question: What?
model: m
servers: {a: {template: vllm-rocm, container: false}}
loads:
  both: {user: batch, requests: 1, duration_s: 2}
  chat: {user: chat, duration_s: 5, batch_size: 2, think_s: [5, 1]}
  who: {user: bach, requests: 1}
  own: {user: mine.py, requests: 1, processes: 2}
baseline: {server: b, load: bth}
warmup: {requests: 1, duration_s: 1}
prompts: {kind: file}
checks: ["error_rate = 0"]
"""
    problems = problems_of(tmp_path, text)
    assert [problem.split(":")[0] for problem in problems] == [
        "$.loads.both.requests",
        "$.loads.chat.batch_size",
        "$.loads.chat.think_s",
        "$.loads.who.user",
        "$.loads.own.user",
        "$.loads.own.processes",
        "$.servers.a.container",
        "$.baseline.server",
        "$.baseline.load",
        "$.warmup",
        "$.prompts.file",
        "$.checks[0]",
    ]
    assert problems[3].endswith("did you mean 'batch'?")
    assert problems[8].endswith("did you mean 'both'?")


def test_an_empty_prompts_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n")
    text = GOOD + "prompts: {kind: file, file: prompts.jsonl}\n"
    assert problems_of(tmp_path, text) == ["$.prompts.file: prompts.jsonl is empty; one JSON object a line is expected"]


def test_a_newer_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "version: 2\n") == [
        "$.version: 2 was written for a newer harness; this one reads version 1"
    ]


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="the scenario cannot be read"):
        load_scenario(tmp_path / "nothing.yaml")


def test_the_plan_is_interleaved_and_turns_round_each_repeat(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD + "repeats: 3\n"))
    assert [cell.id for cell in plan(scenario)] == [
        "r1-a-one", "r1-a-five", "r1-b-one", "r1-b-five",
        "r2-b-five", "r2-b-one", "r2-a-five", "r2-a-one",
        "r3-a-one", "r3-a-five", "r3-b-one", "r3-b-five",
    ]  # fmt: skip
