"""The report of a replay: a run of a made trace with sub-agents, whose counts are known; its page; its comparison."""

import json
from pathlib import Path

import pytest

from harness.numbers.summarize import read_summary
from harness.numbers.summary import Row
from harness.records.manifest import read_run
from tests.support.agent_traces import Json, sub_agent, weka_file, weka_request, write_document, write_rows
from tests.support.command import harness, only_run, run_with_workers
from tests.support.simulated import Spawned

SCENARIO = """
version: 1
question: How long does an agent wait?
model: m
servers:
  sim: {{template: simulated, container: false, variables: {{preset: instant}}}}
loads:
  agents: {{user: agent_trace, users: 2, requests: 14, agent_trace: {{file: traces, max_delay_s: 0.1{more}}}}}
warmup: {{requests: 0}}
repeats: 1
"""


def conversation(id: str) -> Json:
    """A root of four steps, and two sub-agents after its first: of two steps and of one, in blocks of 16 tokens."""
    return weka_file(
        weka_request(0, 40, [1, 2], api_time=1.0, think_time=0.0),
        sub_agent(7.0, 6_000, weka_request(0, 50, [50, 51, 52], api_time=2.0, think_time=0.0),
                  weka_request(3, 70, [50, 51, 52, 53], api_time=2.0, think_time=1.0)),
        sub_agent(9.0, 8_000, weka_request(0, 33, [80, 81], api_time=7.0, think_time=0.0)),
        weka_request(10, 60, [1, 2, 3], api_time=1.0, think_time=1.0),
        weka_request(13, 90, [1, 2, 3, 4, 5], api_time=1.0, think_time=2.0),
        weka_request(16, 95, [1, 2, 9, 10, 11], api_time=1.0, think_time=2.0),  # the history was changed
        id=id, block_size=16,
    )  # fmt: skip


def run(folder: Path, name: str, more: str = "") -> Path:
    """Run the scenario and return the run's directory."""
    (folder / "traces").mkdir(exist_ok=True)
    for id in ("one", "two"):
        write_document(folder / "traces" / f"{id}.json", conversation(id))
    (folder / "agents.yaml").write_text(SCENARIO.format(more=more))
    done = harness("run", "agents.yaml", "--runs", name, cwd=folder)
    assert done.code in (0, 3), done.err
    (found,) = (folder / name).iterdir()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("replay"), "whole")


def row_of(folder: Path) -> Row:
    (row,) = read_summary(folder).rows
    return row


def test_each_step_is_counted_by_its_number_and_depth_with_what_the_cache_had(whole: Path) -> None:
    replay = row_of(whole).replay
    assert replay is not None and replay.hits is not None
    counts = (replay.conversations, replay.whole, replay.ended, replay.failed, replay.not_sent, replay.open)
    assert counts == (2, 2, 14, 0, 0, 0)
    # Of each conversation: 0, 32, 48, 32 of the root, 0 and 48, 0 of the sub-agents.
    hits = (replay.hits.requests, replay.hits.planned, replay.hits.served, replay.hits.beyond)
    assert hits == (14, 320, 320, 0)
    template = replay.hits.template_tokens
    assert template is not None and replay.hits.prompt_tokens == 2 * (40 + 60 + 90 + 95 + 50 + 70 + 33) + 14 * template
    rows = [(one.first, one.last, one.requests, one.cached_tokens, one.recomputed_tokens) for one in replay.by_step]
    assert rows == [(1, 1, 6, 0, 0), (2, 4, 8, 40, 0)]
    assert replay.by_step[1].new_tokens == (60 + 90 + 95 + 70) / 4 + template - 40
    assert [(one.first, one.last, one.requests) for one in replay.by_depth] == [(1, 1024, 14)]
    assert [replay.delays_s, replay.removed_s] == pytest.approx([12.0, 12.0 - 2 * 4 * 0.1])


def test_the_time_of_a_conversation_is_that_of_the_server_and_of_the_tools(whole: Path) -> None:
    row = row_of(whole)
    assert row.replay is not None and row.pooled.wall is not None
    duration, served, tools = row.replay.duration, row.replay.served, row.replay.tools
    assert duration.n == served.n == tools.n == 2
    assert (served.mean or 0) + (tools.mean or 0) == pytest.approx(duration.mean)
    assert 0 < (served.mean or 0) < (duration.max or 0) <= row.pooled.wall
    assert (tools.min or 0) > 0.299  # three delays of the root, which were cut to 0.1 s


def test_the_page_says_what_a_turn_and_a_conversation_take(whole: Path) -> None:
    summary = read_summary(whole)
    (answer,) = summary.answers
    assert (answer.code, answer.values["users"], answer.values["conversations"]) == ("replay", 2, 2)
    assert answer.values["turns"] == 14
    page = harness("report", str(whole), cwd=whole).out
    assert answer.text[:40] in page and "of 320 tokens" in " ".join(page.split())
    html = (whole / "report.html").read_text()
    assert 'id="replay"' in html


def test_runs_that_kept_different_steps_are_not_compared(whole: Path) -> None:
    folder = whole.parents[1]
    shorter = run(folder, "shorter", ", context_tokens: 75")
    assert read_run(whole).kept_steps["agents"].kept == 14 and read_run(shorter).kept_steps["agents"].kept == 6
    for about in ([], ["--about", "kept_steps"], ["--about", "loads"]):
        done = harness("compare", str(whole), str(shorter), "--format", "json", *about, cwd=folder)
        differences = json.loads(done.out)["differences"]
        assert (done.code, differences[0]["key"]) == (1, "loads.agents.kept_steps")
        assert [value[:7] for value in differences[0]["values"]] == ["14 of 1", "6 of 14"]


def test_a_context_that_leaves_nothing_out_is_the_same_work(whole: Path) -> None:
    """Then the setting alone differs, and the comparison may be about it."""
    larger = run(whole.parents[1], "larger", ", context_tokens: 4096")
    assert read_run(larger).workload_sha256 == read_run(whole).workload_sha256
    done = harness("compare", str(whole), str(larger), "--about", "context_tokens", cwd=whole)
    assert done.code in (0, 4, 5), done.err


def test_each_worker_stores_its_conversations(tmp_path: Path, engine_process: Spawned) -> None:
    write_rows(tmp_path / "traces.jsonl", [conversation("one"), conversation("two")])
    trace = {"file": "traces.jsonl", "delay_scale": 0}
    load = {"user": "agent_trace", "users": 2, "requests": 14, "agent_trace": trace}
    with run_with_workers(tmp_path, engine_process, load, warmup={"requests": 0}) as (command, _):
        done = command.end()
    assert done.code in (0, 3), done.err
    replay = row_of(only_run(tmp_path)).replay
    assert replay is not None and replay.hits is not None
    assert (replay.conversations, replay.whole, replay.ended, replay.duration.n) == (2, 2, 14, 2)
    assert (replay.hits.planned, replay.hits.requests) == (320, 14)
