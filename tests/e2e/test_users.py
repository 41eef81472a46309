"""What every user class has, under real Locust as the harness starts it, against the embedded engine."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.base.process import free_port
from harness.load.openai_api import Call, Tools, add_tool_calls, tool_call_message, tool_result_message
from harness.scenario import Load, Prompts, Warmup
from harness.scenario.behaviour import Agent, Pause, Rag, chance, document_of
from tests.support.load_runs import (
    ROOT,
    driven,
    end,
    ends_of,
    log_of,
    make_job,
    most_in_flight,
    records_of,
    start_job,
    wait_for_records,
)
from tests.support.simulated import spawned


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fixed_amount_of_work_is_done_exactly(tmp_path: Path, engine: str, processes: int) -> None:
    load = Load(user="batch", users=2, requests=23, batch_size=5, output_tokens=8, processes=processes)
    records = driven(tmp_path, engine, load, Warmup(requests=3), "--json-file", str(tmp_path / "stats"))
    assert [(r.phase, r.index) for r in records] == [("warmup", n) for n in range(-5, 0)] + [
        ("measured", n) for n in range(23)
    ]
    ends = ends_of(tmp_path, processes)
    assert sum(mark.sent or 0 for mark in ends) == 28
    assert {r.process for r in records} <= {mark.process for mark in ends}
    assert [r.error for r in records] == [None] * 28
    assert {(r.output_tokens, len(r.chunks_s), r.fixed_length, r.finish) for r in records} == {(8, 8, True, "length")}
    assert {(r.cell, r.load, r.user_class, r.clock) for r in records} == {("r1-a-b", "b", "BatchAgent", "kernel")}
    assert len({r.id for r in records}) == 28
    assert {r.user for r in records} <= {0, 1}
    assert most_in_flight(records) <= 10
    batches = Counter(r.batch for r in records)
    assert sorted(batches.values()) == [3, 5, 5, 5, 5, 5]
    (stats,) = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["name"], stats["method"], stats["num_requests"], stats["num_failures"]) == ("b", "POST", 28, 0)
    slowest_s = max(r.chunks_s[-1] for r in records)
    assert stats["max_response_time"] == pytest.approx(slowest_s * 1000)
    assert stats["total_content_length"] == 28 * 8


@pytest.mark.parametrize(("processes", "signum"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_an_interrupted_run_loses_nothing(
    tmp_path: Path, slow_engine: str, processes: int, signum: signal.Signals
) -> None:
    load = Load(user="batch", users=4, requests=1000, batch_size=2, output_tokens=20, processes=processes)
    options = ["--processes", str(processes)] if processes > 1 else []
    options += ["--stop-timeout", "30", "--json-file", str(tmp_path / "stats")]
    child = start_job(tmp_path, slow_engine, make_job(tmp_path, load), *options)
    wait_for_records(tmp_path, 4)
    time.sleep(0.3)
    child.send_signal(signum)
    end(child)
    records = records_of(tmp_path)
    assert sum(mark.sent or 0 for mark in ends_of(tmp_path, processes)) == len(records)
    unfinished = [r for r in records if r.error == "unfinished"]
    assert 1 <= len(unfinished) <= 8
    assert [r.error for r in records if r.error != "unfinished"] == [None] * (len(records) - len(unfinished))
    assert len({r.index for r in records}) == len(records)
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert [row["num_failures"] for row in stats if row["num_failures"]] == []  # to be cut is no failure
    # Locust's own table lacks what several load processes sent in the last 3 s: at an interruption it does not wait.
    if processes == 1:
        assert [row["num_requests"] for row in stats] == [len(records)]
        assert [row["num_none_requests"] for row in stats] == [len(unfinished)]  # and no response time
    else:
        assert sum(row["num_requests"] for row in stats) <= len(records)


def test_so_many_are_always_in_flight(tmp_path: Path, engine: str) -> None:
    load = Load(user="batch", users=2, requests=60, in_flight=4, output_tokens=20)
    records = driven(tmp_path, engine, load, Warmup(requests=8))
    assert [(r.index, r.error, r.batch) for r in records] == [(index, None, None) for index in range(-8, 60)]
    assert most_in_flight(records) == 8
    # No user waits for a burst: each request but the first eight goes out when another has ended, and not in eights.
    assert len({round(r.sent_s, 3) for r in sorted(records, key=lambda r: r.sent_s)[8:]}) > 10


@pytest.mark.parametrize("in_flight", [None, 3])
def test_a_timed_load_stops_in_time_and_lets_answers_finish_or_cuts_them(
    tmp_path: Path, slow_engine: str, in_flight: int | None
) -> None:
    load = Load(user="batch", users=3, duration_s=1.0, output_tokens=12, drain_s=10, in_flight=in_flight)
    found = driven(tmp_path / "finish", slow_engine, load, Warmup(duration_s=0.5))
    records = sorted(found, key=lambda record: record.sent_s)
    assert [r.error for r in records] == [None] * len(records)
    phases = [r.phase for r in records]
    first = phases.index("measured")
    assert first and set(phases[first:]) == {"measured"}
    # All end, also those that were sent in the last moments.
    assert max(r.sent_s + r.ended_s for r in records) - records[first].sent_s > 1.0
    assert most_in_flight(records) == 3 * (in_flight or 1)
    load = Load(user="batch", users=2, duration_s=0.5, output_tokens=400, drain_s=0.3, in_flight=in_flight)
    cut = [(r.error, len(r.chunks_s) > 5) for r in driven(tmp_path / "cut", slow_engine, load)]
    assert cut == [("unfinished", True)] * 2 * (in_flight or 1)


def test_a_server_that_is_gone_fails_every_request_once(tmp_path: Path) -> None:
    load = Load(user="batch", users=4, requests=12, batch_size=2)
    records = driven(tmp_path, f"http://127.0.0.1:{free_port()}", load)
    assert [r.error for r in records] == ["connect"] * 12
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) > 0.4  # users pause, they do not spin


OWN = """
from locust import task
from harness.load.user import LLMUser

class Careless(LLMUser):
    @task
    def work(self) -> None:
        work = self.take()[0]
        if work.index % 2:
            raise KeyError("a mistake in the locustfile")
        self.ask(work)
        if work.index == 4:
            self.ask(work)
        self.think()
"""


def test_an_own_locustfile_with_mistakes(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    job = make_job(tmp_path, Load(user="own.py", users=1, requests=6, output_tokens=2))
    assert end(start_job(tmp_path, engine, job, "--exit-code-on-error", "0", locustfile=path)) == 1
    assert sorted(r.index for r in records_of(tmp_path)) == [0, 2, 4]
    assert {r.user_class for r in records_of(tmp_path)} == {"Careless"}
    assert "a mistake in the locustfile" in log_of(tmp_path)
    assert "ValueError: request 4 " in log_of(tmp_path)


def test_a_load_process_imports_no_heavy_package() -> None:
    code = "import sys, harness.load.user; print(*sorted({'docker', 'rich', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# Users of documents: the same long texts again and again.


@pytest.mark.parametrize(("cache", "system_tokens"), [(True, 10), (False, 0)])
def test_a_document_that_was_asked_about_is_in_the_prefix_cache(
    tmp_path: Path, cache: bool, system_tokens: int
) -> None:
    rag = Rag(documents=3, document_tokens=200)
    load = Load(user="rag", requests=12, output_tokens=3, rag=rag)
    flags = [] if cache else ["--no-enable-prefix-caching"]
    with spawned("--preset", "instant", "--served-model-name", "m", *flags) as server:
        records = driven(tmp_path, server.url, load, prompts=Prompts(tokens=20, system_tokens=system_tokens))
    assert [r.error for r in records] == [None] * 12
    assert len({r.prompt_tokens for r in records}) == 1
    seen: set[int] = set()
    for record in records:
        document = document_of(rag, 1, record.index)
        cached = record.cached_tokens or 0
        assert cached >= 190 if document in seen and cache else cached < 20
        seen.add(document)
    assert seen == {0, 1, 2}


def test_some_documents_are_more_popular() -> None:
    rag = Rag(documents=10, skew=1.0)
    counted = Counter(document_of(rag, 1, index) for index in range(20_000))
    assert set(counted) == set(range(10))
    for rank in (2, 5, 10):
        assert counted[rank - 1] / counted[0] == pytest.approx(1 / rank, rel=0.1)
    even = Counter(document_of(Rag(documents=10, skew=0), 1, index) for index in range(20_000))
    assert min(even.values()) > 1850
    assert document_of(Rag(documents=1), 1, 5) == 0


# Agents with tools: their steps under real Locust, and the calls that a server answers with.


QUICK = Pause(mean_s=0.01)


@pytest.fixture(scope="module")
def calling_engine() -> Iterator[str]:
    """Every second answer is a tool call."""
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "tool-call@2") as server:
        yield server.url


@pytest.mark.parametrize("stream", [True, False])
def test_the_context_grows_alike_whether_the_model_calls_tools_or_not(
    tmp_path: Path, calling_engine: str, stream: bool
) -> None:
    agent = Agent(steps=4, tools=3, result_tokens=50, tool_time=QUICK)
    load = Load(user="agent", requests=10, output_tokens=12, stream=stream, agent=agent)
    records = driven(tmp_path, calling_engine, load)
    assert [(r.index, r.conversation, r.turn) for r in records] == [
        (index, index // 4 * 4, index % 4 + 1) for index in range(10)
    ]
    assert [r.error for r in records] == [None] * 10
    assert [r.tool_calls for r in records] == [0, 1] * 5
    assert [r.tool_calls_valid for r in records] == [0, 1] * 5
    assert [r.tool_chunks for r in records] == ([0, 12] * 5 if stream else [0] * 10)
    lengths = [r.prompt_tokens or 0 for r in records]
    assert all(50 < after - before < 100 for before, after in zip(lengths[:3], lengths[1:4], strict=True))
    cached = [r.cached_tokens or 0 for r in records]
    assert cached[1] > lengths[0] * 0.8 and cached[3] > lengths[2] * 0.8  # what was sent before comes again


def test_the_plan_says_when_a_task_is_done(tmp_path: Path, calling_engine: str) -> None:
    agent = Agent(steps=5, done=0.4, tool_time=QUICK, choice="none")
    records = driven(tmp_path, calling_engine, Load(user="agent", users=2, requests=20, output_tokens=4, agent=agent))
    begun = [index for index in range(20) if index % 5 == 0 or chance(1, "done", index - 1) < 0.4]
    assert begun[:4] == [0, 3, 5, 7]
    assert [r.conversation for r in records] == [max(b for b in begun if b <= index) for index in range(20)]
    assert {r.tool_calls for r in records} == {0}  # none may be called


def test_sub_agents_work_at_once_and_with_parts_of_their_own(tmp_path: Path, calling_engine: str) -> None:
    agent = Agent(steps=2, sub_agents=3, tool_time=QUICK)
    records = driven(tmp_path, calling_engine, Load(user="agent", requests=14, output_tokens=8, agent=agent))
    assert [(r.conversation, r.turn, r.batch) for r in records] == [
        (0, 1, None), (0, 2, None), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 2, 0), (6, 1, 0), (6, 2, 0),
        (8, 1, None), (8, 2, None), (10, 1, 8), (10, 2, 8), (12, 1, 8), (12, 2, 8),
    ]  # fmt: skip
    first, second, *others = records[:8]
    begun = [r.sent_s for r in others[::2]]
    assert first.sent_s + first.ended_s <= min(begun)
    assert max(begun) < min(r.sent_s + r.ended_s for r in others[::2])  # at once
    assert second.sent_s >= max(r.sent_s + r.ended_s for r in others)  # it waits for their reports


def test_a_failed_step_is_tried_again(tmp_path: Path) -> None:
    agent = Agent(steps=3, tool_time=QUICK)
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "503@2") as server:
        records = driven(tmp_path, server.url, Load(user="agent", requests=4, output_tokens=4, agent=agent))
    assert [r.error for r in records] == [None, "rejected", None, "rejected"]
    assert [r.turn for r in records] == [1, 2, 3, 1]


def test_calls_are_put_together_from_their_pieces() -> None:
    calls: list[Call] = []
    for delta in (
        {"index": 0, "id": "a", "function": {"name": "search", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"pattern"'}},
        {"index": 1, "id": "b", "function": {"name": "list_files", "arguments": "{"}},
        {"index": 0, "function": {"arguments": ': "x"}'}},
    ):
        add_tool_calls(calls, [delta])
    assert calls == [Call("a", "search", '{"pattern": "x"}'), Call("b", "list_files", "{", index=1)]
    tools = Tools.first(8, "auto")
    assert [tools.is_valid(call) for call in calls] == [True, False]
    assert tools.first_valid(calls) is calls[0]


@pytest.mark.parametrize("indexes", [(1, 2), (0, 0)], ids=["from one", "all alike"])
def test_calls_are_told_apart_however_a_server_numbers_them(indexes: tuple[int, int]) -> None:
    calls: list[Call] = []
    for index, id, name in zip(indexes, ("a", "b"), ("search", "list_files"), strict=True):
        add_tool_calls(calls, [{"index": index, "id": id, "function": {"name": name, "arguments": ""}}])
        for part in ('{"pattern": ', '"x"}'):
            # As vLLM 0.8 did: a new id in each delta.
            add_tool_calls(calls, [{"index": index, "id": f"new-{part}", "function": {"arguments": part}}])
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        ("a", "search", '{"pattern": "x"}'),
        ("b", "list_files", '{"pattern": "x"}'),
    ]


def test_whatever_a_server_sends_is_counted_and_never_an_error() -> None:
    for delta in (5, None, {"index": 7}, {"index": True}, {"index": "0"}, {"function": 1}, {}):
        calls: list[Call] = []
        add_tool_calls(calls, [delta])
        assert all(not Tools.first(4, "auto").is_valid(call) for call in calls)
    for name, arguments in (("rm", "{}"), ("search", "{}"), ("search", "[]"), ("search", '{"pattern": "x"')):
        assert not Tools.first(4, "auto").is_valid(Call("a", name, arguments))
    calls = []
    add_tool_calls(calls, [{"id": "a", "function": {"name": "search", "arguments": {"pattern": "x"}}}])
    assert Tools.first(2, "auto").is_valid(calls[0])  # arguments as an object are taken


def test_the_planned_call_is_valid_and_its_messages_fit_together() -> None:
    tools = Tools.first(20, "auto")
    assert len({one["function"]["name"] for one in tools.definitions}) == 20
    for index in range(-20, 20):
        assert tools.is_valid(tools.planned_call(index))
    call = tools.planned_call(3)
    asked, answered = tool_call_message("", call), tool_result_message(call, "done")
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_3"
