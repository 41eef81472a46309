"""A scenario file: defaults, problems with their places, the plan and its estimated time."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.base.errors import HarnessError
from harness.questions.check import estimate_s
from harness.scenario import (
    Arrivals,
    Baseline,
    Load,
    Prompts,
    Scenario,
    Server,
    Trace,
    Warmup,
    request_tokens,
    warmup_of,
)
from harness.scenario.behaviour import Agent, Pause
from harness.scenario.file import load_scenario
from harness.scenario.plan import baseline_of, plan
from tests.support.scenario_texts import GOOD, problems_of, write
from tests.support.wording import Wording, short_id


def test_a_small_scenario_gets_the_documented_defaults_and_an_interleaved_plan(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD + "compare: [{row: b/five, against: a/five}]\n"))
    assert (scenario.repeats, scenario.seed, scenario.restart) == (5, 42, True)
    in_flight = Load(user="batch", users=3, in_flight=4, requests=9)
    more = {"in_flight": in_flight, "turns": Load(user="chat", users=3, turns=5)}
    assert [warmup_of(scenario, load).requests for load in (scenario.loads | more).values()] == [1, 5, 12, 15]
    assert scenario.loads["one"].output == "fixed"
    assert baseline_of(scenario) == Baseline(server="a", load="one")
    assert [cell.id for cell in plan(scenario)][:12] == [
        "r1-a-one", "r1-a-five", "r1-b-one", "r1-b-five",
        "r2-b-five", "r2-b-one", "r2-a-five", "r2-a-one",
        "r3-a-one", "r3-a-five", "r3-b-one", "r3-b-five",
    ]  # fmt: skip


def test_all_problems_are_reported_at_once_with_path_line_value_and_advice(tmp_path: Path, wording: Wording) -> None:
    text = """
version: 1
question: What?
model: 5
servers: {a: {templat: simulated}}
loads:
  One: {user: batch, requests: 10}
  two: {user: batch, requests: ten, batchsize: 5}
  three: {user: chat, requests: 1, think: {mean_s: 1, maximum: 3}, answer: {choice: [yes, no]}}
repeats: 0
warmup: {requests: 1, duration_s: 1}
"""
    wording(problems_of(tmp_path, text))


def test_contradictions_and_wrong_references_are_found(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "t.csv").write_text("")
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
  whole: {user: chat, requests: 1, stream: false, abandon: {share: 0.1, after_tokens: 5}}
  trace: {user: batch, in_flight: 4, trace: {file: t.csv}}
  ramp: {user: batch, requests: 1, arrivals: {rate: 1, between: ramps}}
baseline: {server: b, load: bth}
warmup: {requests: 1, duration_s: 1}
prompts: {kind: file}
checks: ["error_rate = 0"]
compare: [{row: a/whol, against: a/who}, {row: a/who, against: a/who}]
"""
    problems = problems_of(tmp_path, text)
    assert [problem.split(" (line")[0] for problem in problems] == [
        "$.loads.both.requests",
        "$.loads.chat.batch_size",
        "$.loads.chat.think_s",
        "$.loads.who.user",
        "$.loads.own.user",
        "$.loads.own.processes",
        "$.loads.whole.abandon.after_tokens",
        "$.loads.trace.trace",
        "$.loads.ramp.arrivals.between",
        "$.servers.a.container",
        "$.prompts.file",
        "$.warmup",
        "$.baseline.server",
        "$.baseline.load",
        "$.compare[0].row",
        "$.compare[1]",
        "$.checks[0]",
    ]
    assert "'batch'" in problems[3]
    wording(problems[3])
    assert "'in_flight'" in problems[7]
    wording(problems[7])
    assert "'both'" in problems[13]
    wording(problems[13])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("seed: 1\nseed: 2", "$.seed (line 10): "),
        ('"\\ude00": 1', "line 9: "),
        ("seed: 1:30", "$.seed (line 9): '1:30' "),
        ("seed: " + "9" * 5000, "$.seed (line 9): '9999999999999999999999999999999999999999' "),
        ("repeats: 100000", "$.repeats (line 9): "),
        ("metrics_interval_s: .inf",
         "$.metrics_interval_s (line 9): "),
        ("repeats: .nan", "$.repeats (line 9): a finite number is expected, got nan"),
        ("checks: !!binary aaaa", "$.checks (line 9): a list is expected, got binary data; "),
        ("checks: [2020-01-01]", "$.checks[0] (line 9): a text is expected, got a date (2020-01-01); "),
        ("checks: &a [*a]", "its "),
        (
            "checks: [&a [x, x, x, x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], "
            "&c [*b, *b, *b, *b, *b, *b, *b, *b, *b], &d [*c, *c, *c, *c, *c, *c, *c, *c, *c], "
            "&e [*d, *d, *d, *d, *d, *d, *d, *d, *d], &f [*e, *e, *e, *e, *e, *e, *e, *e, *e]]",
            "it has more than 50,000 ",
        ),
        ("checks: " + 5000 * "[", "its "),
        ("? [a]\n: 1", "$ (line 9): "),
        ("<<: {seed: 1}", "$ (line 9): "),
        ("api_key_env: sk-SECRET-123",
         "$.api_key_env (line 9): "),
        ("checks: ['ttft_p95 <= " + "9" * 400 + "s']", "$.checks[0] (line 9): "),
    ],
    ids=short_id,
)  # fmt: skip
def test_traps_of_yaml_typing_errors_and_a_pasted_key(
    tmp_path: Path, line: str, problem: str, wording: Wording
) -> None:
    (text,) = problems_of(tmp_path, f"{GOOD}{line}\n")
    assert text.startswith(problem) and len(text) <= 1003
    wording(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("question: q\n", "$ (line 1): 'version' "),
        ('version: "1"\n', "$.version (line 1): "),
        ("version: 2\n", "$.version: "),
        ("version: [1\n", "not valid YAML at line 2, column 1: "),
        ("- 1\n", "$: "),
        ("\x00", "not valid YAML"),
        ("version: 1\nservers: {a: vllm}\n", "$.servers.a (line 2): "),
        ("version: 1\nloads: [1]\n", "$.loads (line 2): "),
        ("version: 1\nchecks: x\n", "$.checks (line 2): "),
        ("version: 1\nquestion: [q]\n",
         "$.question (line 2): "),
    ],
    ids=short_id,
)  # fmt: skip
def test_problems_use_the_terms_of_the_file(tmp_path: Path, text: str, problem: str, wording: Wording) -> None:
    found = problems_of(tmp_path, text)
    assert any(each.startswith(problem) for each in found)
    wording(found)


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        # 3 s to start the embedded engine and Locust; 100 tokens are 3 s. The warm-up is 4 requests.
        (Load(user="batch", requests=40), 3 + 4 * 3 + 40 * 3),
        (Load(user="batch", batch_size=4, requests=40, think_s=[1, 3]), 3 + (3 + 2) + 10 * (3 + 2)),
        (Load(user="batch", in_flight=4, requests=40), 3 + 3 + 10 * 3),
        (Load(user="chat", users=2, turns=2, requests=40, think=Pause(mean_s=7)), 3 + 2 * 10 + 20 * 10),
        (Load(user="agent", agent=Agent(tool_time=Pause(mean_s=2)), requests=40), 3 + 4 * 5 + 40 * 5),
        (Load(user="batch", in_flight=4, duration_s=60), 3 + 3 + 60 + 3),
        (Load(user="batch", users=99, requests=41, arrivals=Arrivals(rate=2, spacing="even")), 3 + 3 + 20 + 3),
        (Load(user="batch", users=99, requests=3, trace=Trace(file="t.csv")), 3 + 3 + 40 + 0.6),
        (Load(user="batch", endpoint="embeddings", requests=40), 3),
    ],
)
def test_the_estimated_time_of_each_kind_of_load(tmp_path: Path, load: Load, seconds: float) -> None:
    rows = "".join(f"{at},ChatGPT,10,20,30,Conversation log\n" for at in (0, 10, 40))
    (tmp_path / "t.csv").write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}")
    loads = {"x": msgspec.structs.replace(load, output_tokens=100)}
    assert estimated_s(tmp_path, loads, Warmup(requests=4)) == pytest.approx(2 * seconds)


def estimated_s(folder: Path, loads: dict[str, Load], warmup: Warmup) -> float:
    servers = {"a": Server(template="simulated", container=False)}
    scenario = Scenario(version=1, question="?", model="m", servers=servers, loads=loads, repeats=2, warmup=warmup)
    return estimate_s(scenario, folder)


def test_the_estimate_counts_the_parts_of_a_mix_once(tmp_path: Path) -> None:
    loads = {name: Load(user="batch", duration_s=60, output_tokens=100) for name in ("m.a", "m.b")}
    assert estimated_s(tmp_path, loads, Warmup(duration_s=5)) == 2 * (3 + 5 + 60 + 3)


X = {"user": "batch", "requests": 1}


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        # Wrong values.
        ({"x": {**X, "duration_s": 2, "timeout_s": -1, "users": "ten"}}, {"x.timeout_s", "x.users"}),
        ({"x": {"user": "bach", "requests": "many"}, "prompts": {"kind": "fle"}}, {"x.requests", "prompts.kind"}),
        ({"x": {"user": "batch", "request": 20, "turns": 3, "think_s": [3]}}, {"x.request", "x.think_s"}),
        ({"x": {"user": "chat", "users": 2, "requests": 4, "turns": 0, "arrivals": 4}}, {"x.turns", "x.arrivals"}),
        ({"x": {**X, "output": "free", "answer": {"choice": ["a", True]}}}, {"x.output", "x.answer.choice"}),
        ({"x": {"user": "batch", "stages": 5}, "compare": [{"row": "a/one"}]}, {"x.stages", "compare[0]"}),
        ({"x": {"user": "batch", "trace": {"file": "none.csv", "speeed": 3}}}, {"x.trace.speeed"}),
        ({"x": {"user": 3, "requests": 1, "duration_s": 2}}, {"x.user"}),
        ({"x": {"user": "batch", "stages": [{"users": 1, "for_s": "x"}]}}, {"x.stages[0].for_s"}),
        ({"X": {"user": 1, "requests": 1}, "checks": ["wall < 1"]}, {"X", "X.user"}),
        ({"x": {**X, "batch_size": 0}, "baseline": {"server": "c", "laod": "x"}},
         {"x.batch_size", "baseline", "baseline.laod"}),
        ({"servers": 5, "seed": -1}, {"servers", "seed"}),
        # Rows that cannot be made.
        ({"x": {"user": "chat", "vary": {"requests": [0, 1]}, "batch_size": 2},
          "checks": ["a/x-requests-1: wall < 1s"]}, {"x.vary"}),
        ({"x": X, "mixes": {"m": ["x", "y"]}, "checks": ["a/m.one: wall < 1s"]}, {"mixes.m"}),
        # Contradictions.
        ({"servers": {}, "x": {**X, "duration_s": 2}}, {"servers", "x.requests"}),
        ({"x": {"user": "bach", "requests": 1}, "prompts": {"kind": "file"}}, {"x.user", "prompts.file"}),
        ({"x": {**X, "model": [], "prompts": {"tokenizer": "server"}}}, {"x.model", "x.prompts.tokenizer"}),
        ({"x": {**X, "model": ["a", ""], "prompts": {"kind": "file"}}}, {"x.model", "x.prompts.file"}),
        ({"x": {"user": "batch", "turns": 3, "think_s": [3, 1]}}, {"x.requests", "x.turns", "x.think_s"}),
        ({"x": {**X, "users": 2, "processes": 4, "in_flight": 2, "batch_size": 2}}, {"x.processes", "x.batch_size"}),
        ({"x": {**X, "answer": {"choice": "auto"}}}, {"x.answer", "x.answer.choice"}),
        ({"x": {"user": "batch", "stages": [{"users": 1, "for_s": 2}] * 2, "requests": 5},
          "checks": ["a/x@1: wall < 1 s"]}, {"x.requests"}),
        ({"x": {"user": "chat", "vary": {"requests": [1, 2]}, "batch_size": 2},
          "checks": ["a/x-requests-1: wall < 1s"]}, {"x-requests-1.batch_size"}),
        ({"x": X, "checks": ["eror_rate == 0", "a/x: wall < 1s", "a/y: wall < 1s"],
          "compare": [{"row": "a/x", "against": "z/x"}], "baseline": {"server": "c", "load": "x"}},
         {"checks[0]", "checks[2]", "compare[0].against", "baseline.server"}),
        ({"servers": {"a": {"template": "vllm", "container": False}}, "checks": ["a/one: wall < 1s"]},
         {"servers.a.container"}),
        ({"x": {"user": "batch", "requests": 1, "endpoint": "embeddings", "omit": ["temperature"],
                "answer": {"choice": ["a", "b"]}, "output": "natural"}}, {"x.omit", "x.answer"}),
    ],
)  # fmt: skip
def test_mistakes_of_one_kind_are_reported_together(tmp_path: Path, changes: dict[str, Any], places: set[str]) -> None:
    good = yaml.safe_load(GOOD)
    loads = {name: changes[name] for name in ("x", "X") if name in changes}
    others = {key: value for key, value in changes.items() if key not in loads}
    problems = problems_of(tmp_path, yaml.safe_dump({**good, "loads": {**good["loads"], **loads}, **others}))
    found = [problem.split()[0].removeprefix("$.").removeprefix("loads.") for problem in problems]
    assert (set(found), len(found)) == (places, len(places)), problems


def test_a_missing_and_a_too_large_scenario_are_refused(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        load_scenario(tmp_path / "nothing.yaml")
    wording(caught.value)
    for count, repeats, problem in (
        (201, 1, "it has 201 "),
        (120, 1000, " 120,000 "),
    ):
        changes: dict[str, Any] = {"servers": {f"s{number}": {"template": "simulated"} for number in range(count)}}
        changes |= {"loads": {"l": {"user": "batch", "requests": 1}}, "repeats": repeats}
        found = problems_of(tmp_path, yaml.safe_dump(yaml.safe_load(GOOD) | changes))
        (told,) = [each for each in found if problem in each]
        wording(told)


@pytest.mark.parametrize(
    ("kind", "tokens", "fit"),
    [
        ("synthetic", 5000, "none"),
        ("code", 5000, "some"),
        ("code", 50_000, "none"),
        ("chat", 3000, "all"),
        ("file", 9, None),
    ],
)
def test_made_prompts_are_compared_with_the_context_as_far_as_their_length_is_known(
    kind: Any, tokens: int, fit: str | None
) -> None:
    asked = request_tokens(Load(user="batch", output_tokens=100), Prompts(kind=kind, tokens=tokens))
    assert (asked.fit(4096, output_counts=True) if asked else None) == fit
    assert asked is None or asked.is_estimate == (kind == "code" or kind == "chat")
