"""Bounds on what a scenario may ask for: each is refused in words, in a time that does not grow with the request."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base.errors import HarnessError
from harness.run.experiment import prepare
from harness.scenario.behaviour import Structured, check_answer
from harness.scenario.file import load_scenario
from tests.support.command import called
from tests.support.wording import Wording

SCENARIO = """version: 1
question: q
model: m
servers: {{s: {{template: simulated, container: false, variables: {{preset: instant}}{server} }} }}
loads: {{l: {{user: batch, {load} }} }}
{more}
"""
LARGE = ", vary: {a: {from: 1, to: 1000, step: 1}, b: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}"
REQUESTS = "requests: 10"
NATURAL = f"output: natural, {REQUESTS}, answer: "


def scenario(server: str = "", load: str = REQUESTS, more: str = "") -> str:
    return SCENARIO.format(server=server, load=load, more=more)


REFUSED: dict[str, tuple[str, str]] = {
    "nan in a range": (scenario(", vary: {x: {from: .nan, to: 3, step: 1}}"), "got nan"),
    "nan as an end": (scenario(", vary: {x: {from: 1, to: .nan, step: 1}}"), "got nan"),
    "inf in a list": (scenario(", vary: {x: [.inf, 1]}"), "got inf"),
    "inf as an exponent": (scenario(", vary: {x: {from: 1, to: 1e999, step: 1}}"), "got inf"),
    "nan as a variable": (scenario().replace("preset: instant", "preset: .nan"), "got nan"),
    "an endless range": (scenario(", vary: {x: {from: -1e308, to: 1e308, step: 1e307}}"), " at most 1,000"),
    "many rows": (scenario(", vary: {x: {from: 1, to: 1.79e308, factor: 10}}"), " 309 "),
    "a long condition": (scenario(f"{LARGE}, where: ['{'a' * 50_000} > 1']"), ".where"),
    "many conditions": (scenario(f"{LARGE}, where: [{'a > b, ' * 21}]"), "it has 21 "),
    "a name with a line end": (scenario().replace("{s:", '{"s\\n":'), "line 4: "),
    "a name with a control character": (scenario().replace("{l:", '{"l\\e[31m":'), "line 5: "),
    "a model with a line end": (scenario().replace("model: m", 'model: "m\\nx"'), "$.model"),
    "a file with NUL": (scenario(more='prompts: {kind: file, file: "a\\0b"}'), "$.prompts.file"),
    "a variable's name with a line end": (scenario(more='api_key_env: "A\\n"'), "$.api_key_env"),
    "a nested schema": (
        scenario(load=f"{NATURAL}{{json_schema: {'{items: ' * 300}{{}}{'}' * 300}}}"),
        "nested too deeply",
    ),
    "a pattern": (
        scenario(load=f"{NATURAL}{{json_schema: {{pattern: '(a+)+$'}}}}"),
        "answer.json_schema.pattern (line 5): ",
    ),
    "stages": (scenario(load=f"stages: [{'{users: 1, for_s: 1}, ' * 5000}]"), "it has 5,000 "),
    "metrics at every moment": (scenario(more="metrics_interval_s: 1e-9"), " 0.1 "),
    "a moment as time limit": (scenario(load=f"{REQUESTS}, timeout_s: 1e-9"), " 0.001 "),
    "comparisons": (scenario(more=f"compare: [{'{row: a/b, against: c/d}, ' * 3000}]"), " 3,000 "),
    "checks": (scenario(more=f"checks: [{'ttft_p95 <= 1s, ' * 3000}]"), " 3,000 "),
    "a long check": (scenario(more=f"checks: ['{' ' * 200_000}']"), " 1,000 "),
    "aliases of aliases": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        " 50,000 ",
    ),
    "aliases of a text": (f"a: &a {'x' * 200_000}\nb: [{'*a, ' * 10_000}]\n", " 1,048,576 "),
    "an alias of itself": ("a: &a [*a]\n", "(*name)"),
    "brackets": (f"a: {'[' * 5000}", "nested too deeply"),
    "a long key": (f"? {'k' * 100_000}\n: 1\n", "(got 100,000)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused(tmp_path: Path, name: str, wording: Wording) -> None:
    text, problem = REFUSED[name]
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        prepare(path)
    told = f"{caught.value.what}\n{caught.value.detail}"
    assert problem in told
    wording(told)
    assert caught.value.exit_code == 1


def test_large_scenarios_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(scenario(load=f"{REQUESTS}{LARGE.replace('a:', 'output_tokens:').replace('b:', 'timeout_s:')}"))
    assert len(load_scenario(path).loads) == 10_000
    path.write_text(scenario(load=f"stages: [{'{users: 1, for_s: 1}, ' * 100}]"))
    assert len(load_scenario(path).loads) == 100
    path.write_text(scenario(", vary: {x: {from: 1, to: 1.0e+308, factor: 1.0e+300}}"))
    assert len(load_scenario(path).servers) == 2


DEEP = "[" * 100_000 + "]" * 100_000
ANSWERS: dict[str, tuple[dict[str, object], Callable[[], str]]] = {
    "a long text": ({"type": "string"}, lambda: f'"{"x" * 2_000_000}"'),
    "many values": ({"items": {"anyOf": [{"const": n} for n in range(1000)]}}, lambda: f"[{'-1,' * 200_000}-1]"),
    "many names": ({"required": [str(n) for n in range(10_000)]}, lambda: '{"1": 1}'),
    "nested lists": ({"items": {"items": {}}}, lambda: DEEP),
    "a long number": ({"type": "integer"}, lambda: "9" * 100_000),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_check_of_an_answer_ends(name: str) -> None:
    schema, answer = ANSWERS[name]
    assert check_answer(Structured(json_schema=schema), [], None, answer()).valid is False


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_options_take_finite_numbers(tmp_path: Path, value: str) -> None:
    done = called("expect", "8B", "--free", value, "--total", "4", cwd=tmp_path)
    assert done.code == 1 and "--free" in done.err
