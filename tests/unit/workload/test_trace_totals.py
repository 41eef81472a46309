"""What a scenario with a trace of agents says before anything is sent."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.questions.check import estimate_s, preview
from harness.run.experiment import prepare
from harness.scenario import Load, Prompts, Scenario, Server, Stage, Trace
from harness.scenario.behaviour import AgentTrace
from harness.scenario.contradictions import contradictions
from harness.workload import workload_sha256
from harness.workload.agent_traces.trace_totals import min_duration_s, trace_totals
from tests.support.agent_traces import (
    edge_rows,
    made_files,
    weka_file,
    weka_request,
    weka_with_sub_agents,
    write_document,
    write_rows,
)
from tests.support.command import called
from tests.support.wording import Wording


def test_the_totals_are_of_all_files_of_a_folder(tmp_path: Path) -> None:
    made_files(tmp_path)
    totals = trace_totals(tmp_path, AgentTrace(file=".", context_tokens=120, max_delay_s=2.0))
    assert totals.formats == ("copilot", "edge-agentic", "otel", "tracelab", "weka")
    assert (totals.conversations, totals.agents, totals.steps) == (7, 9, 25)
    assert totals.delays_s == pytest.approx(2 * 3.25 + 12.0 + 2.5 + 2.0 + 2 * 7.0)
    assert totals.removed_s == pytest.approx(2 * 1.0 + (1.75 + 2.0 + 1.0) + 2 * 3.5)
    assert (totals.fit.kept_steps, totals.fit.too_long_steps, totals.fit.after_steps) == (18, 5, 2)
    assert totals.notes == {"cut_segments": 2, "overlap": 1, "settings_not_sent": 2}
    assert totals.shared_share is None, "some prompts are text, and some are tokens"


def test_a_start_inside_changes_no_totals(tmp_path: Path) -> None:
    made_files(tmp_path)
    trace = AgentTrace(file=".", context_tokens=120, start=[0.25, 0.75])
    assert trace_totals(tmp_path, trace).steps == 25


@pytest.mark.parametrize("declared", ["edge-agentic", "weka", "copilot"])
def test_a_file_of_another_format_than_the_declared_is_refused(tmp_path: Path, declared: Any) -> None:
    made_files(tmp_path)
    with pytest.raises(HarnessError) as caught:
        trace_totals(tmp_path, AgentTrace(file=".", format=declared))
    assert f"agent_trace.format is {declared}" in caught.value.what


def test_the_user_with_most_delays_sets_the_least_time(tmp_path: Path) -> None:
    texts = [weka_file(weka_request(0, 4, [1], api_time=1.0), weka_request(1 + after, 4, [1], think_time=float(after)),
                       id=str(after)) for after in (2, 30, 5, 1)]  # fmt: skip
    path = write_rows(tmp_path / "w.jsonl", texts)
    totals = trace_totals(path, AgentTrace(file="w.jsonl", max_delay_s=10))
    assert totals.chains_s == (2.0, 10.0, 5.0, 1.0)
    assert [min_duration_s(totals, users) for users in (1, 2, 3, 9)] == [18.0, 11.0, 10.0, 10.0]


def test_how_much_a_prefix_cache_can_have(tmp_path: Path) -> None:
    path = write_document(tmp_path / "w.json", weka_file(weka_request(0, 4, [1]), weka_request(1, 8, [1, 2])))
    assert trace_totals(path, AgentTrace(file="w.json")).shared_share == pytest.approx(4 / 12)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path, trace = tmp_path / "w.json", AgentTrace(file="w.json")
    write_document(path, weka_file(weka_request(0, 4, [1])))
    first = trace_totals(path, trace)
    write_document(path, weka_with_sub_agents())
    second = trace_totals(path, trace)
    assert (first.steps, second.steps) == (1, 6) and first.sha256 != second.sha256


def test_a_context_in_which_nothing_fits_is_refused(tmp_path: Path, wording: Wording) -> None:
    path = write_document(tmp_path / "w.json", weka_with_sub_agents())
    with pytest.raises(HarnessError, match="5 tokens") as caught:
        trace_totals(path, AgentTrace(file="w.json", context_tokens=5))
    wording(caught.value)


def load(**given: Any) -> Load:
    trace = AgentTrace(file="w.json", **given.pop("trace", {}))
    return Load(**{"user": "agent_trace", "requests": 6, "agent_trace": trace, **given})


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (load(agent_trace=None), ".agent_trace"),
        (load(user="chat"), ".agent_trace"),
        (load(endpoint="completions"), ".endpoint"),
        (load(think_s=[1.0, 2.0]), ".think_s"),
        (load(trace={"start": [0.5, 0.25]}), ".agent_trace.start"),
        (load(agent_trace=AgentTrace(file="none.json")), ".agent_trace.file"),
    ],
)
def test_contradictions(tmp_path: Path, made: Load, path: str) -> None:
    write_document(tmp_path / "w.json", weka_with_sub_agents())
    assert [problem.path for problem in contradictions(made, tmp_path, Prompts())] == [path]
    assert list(contradictions(load(), tmp_path, Prompts())) == []
    assert list(contradictions(load(agent_trace=AgentTrace(file=".")), tmp_path, Prompts())) == []


def test_stages_and_open_loops_do_not_go_with_it(tmp_path: Path) -> None:
    write_document(tmp_path / "w.json", weka_with_sub_agents())
    stages = load(requests=None, stages=[Stage(users=1, for_s=1.0), Stage(users=2, for_s=1.0)])
    assert ".stages" in [problem.path for problem in contradictions(stages, tmp_path, Prompts())]
    traced = Load(user="agent_trace", agent_trace=AgentTrace(file="w.json"), trace=Trace(file="w.json"))
    assert ".trace" in [problem.path for problem in contradictions(traced, tmp_path, Prompts())]


def test_runs_that_keep_other_steps_have_another_workload(tmp_path: Path) -> None:
    write_document(tmp_path / "w.json", weka_with_sub_agents())

    def sha256(**trace: Any) -> str:
        made = Scenario(version=1, question="?", model="m", servers={"s": Server(template="simulated")},
                        loads={"a": load(trace=trace)})  # fmt: skip
        return workload_sha256(made, tmp_path)

    assert sha256() == sha256() != sha256(context_tokens=23)


def test_harness_check_prints_what_fits(tmp_path: Path, wording: Wording) -> None:
    write_document(tmp_path / "w.json", weka_with_sub_agents())
    (tmp_path / "s.yaml").write_text(
        "{version: 1, question: '?', model: simulated, servers: {s: {template: simulated, container: false}}, "
        "loads: {a: {user: agent_trace, requests: 6, agent_trace: {file: w.json, context_tokens: 23, max_delay_s: 2}}}}"
    )
    done = called("check", "s.yaml", cwd=tmp_path)
    text = " ".join(done.out.split())
    assert done.code == 0 and "3 of 6 steps" in text and "29 of 81 prompt tokens, 30 of 60 output tokens" in text
    wording(text[text.index("note: a: w.json") :])
    (tmp_path / "w.json").write_text('{"block_size": 4, "requests": [{"type": "s", "t": -1}]}')
    done = called("check", "s.yaml", cwd=tmp_path)
    assert done.code == 1 and "w.json:1: " in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("given", "exceeding"), [("", [3]), (", context_tokens: 23", []), (", context_tokens: 99", [3])]
)
def test_steps_beyond_the_servers_context_are_counted(tmp_path: Path, given: str, exceeding: list[int]) -> None:
    write_document(tmp_path / "w.json", weka_with_sub_agents())
    (tmp_path / "s.yaml").write_text(
        "{version: 1, question: '?', model: m, servers: {s: {template: vllm-cpu, variables: {max_model_len: 23}}}, "
        f"loads: {{a: {{user: agent_trace, requests: 6, agent_trace: {{file: w.json{given}}}}}}}}}"
    )
    notes = preview(prepare(tmp_path / "s.yaml")).notes
    (note,) = [note for note in notes if "exceed" in note] or [""]
    assert [int(number) for number in re.findall(r"(\d+) steps?", note)] == exceeding


@pytest.mark.parametrize(
    ("size", "given", "estimated_at"), [(20, "", 4), (20, ", characters_per_token: 2", None), (2000, "", None)]
)
def test_recorded_text_is_compared_with_the_context_by_an_estimate(
    tmp_path: Path, size: int, given: str, estimated_at: int | None
) -> None:
    write_rows(tmp_path / "e.jsonl", edge_rows())
    (tmp_path / "s.yaml").write_text(
        f"{{version: 1, question: '?', model: m, servers: {{s: {{template: vllm-cpu, variables: {{max_model_len: {size}"
        "}}}, loads: {a: {user: agent_trace, requests: 3, output_tokens: 4, agent_trace: {file: e.jsonl"
        f"{given}}}}}}}}}"
    )
    notes = [note for note in preview(prepare(tmp_path / "s.yaml")).notes if "exceed" in note]
    assert len(notes) == (size < 2000)
    at = [re.search(r"at (\d) characters a token", note) for note in notes]
    assert [int(match[1]) for match in at if match] == ([estimated_at] if estimated_at else [])


@pytest.mark.parametrize(
    ("users", "scale", "requests", "seconds"), [(1, 1.0, 3, 3.25), (2, 1.0, 6, 3.25), (1, 0.0, 3, 0.0)]
)
def test_the_estimated_time_has_the_recorded_delays(
    tmp_path: Path, users: int, scale: float, requests: int, seconds: float
) -> None:
    path = write_rows(tmp_path / "e.jsonl", edge_rows())
    estimated = {}
    for name, trace in (
        ("without", AgentTrace(file="e.jsonl", delay_scale=0.0)),
        ("with", AgentTrace(file="e.jsonl", delay_scale=scale)),
    ):
        loads = {"a": Load(user="agent_trace", users=users, requests=requests, agent_trace=trace)}
        server = Server(template="simulated", container=False)
        estimated[name] = estimate_s(
            Scenario(version=1, question="?", model="m", servers={"s": server}, loads=loads, repeats=1), path.parent
        )
    assert estimated["with"] - estimated["without"] == pytest.approx(seconds)


@pytest.mark.parametrize(("asked_for", "is_noted"), [(1, False), (3, True)])
def test_more_conversations_than_the_trace_has_are_noted(tmp_path: Path, asked_for: int, is_noted: bool) -> None:
    write_rows(tmp_path / "e.jsonl", edge_rows())
    (tmp_path / "s.yaml").write_text(
        "{version: 1, question: '?', model: m, servers: {s: {template: simulated, container: false}}, "
        "loads: {a: {user: agent_trace, requests: 3, "
        f"agent_trace: {{file: e.jsonl, conversations: {asked_for}}}}}}}}}"
    )
    notes = preview(prepare(tmp_path / "s.yaml")).notes
    assert any("asked for" in note for note in notes) == is_noted
