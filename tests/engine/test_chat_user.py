"""People in a chat, under real Locust, against the embedded engine."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.base.process import free_port
from harness.records.records import Request
from harness.scenario import Load, Prompts, Warmup
from harness.scenario.behaviour import Abandon, Structured, abandon_of, chance
from tests.support.http_double import Handler, listening
from tests.support.load_runs import driven, end, make_job, records_of, start, start_job, wait_for_records
from tests.support.simulated import spawned


def test_a_conversation_grows_by_what_was_said(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=2, requests=12, turns=3, output_tokens=6, think_s=[0.0, 0.02])
    records = driven(tmp_path, engine, load, prompts=Prompts(tokens=20, system_tokens=10))
    assert [r.index for r in records] == list(range(12))
    talks: dict[int | None, list[Request]] = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        talks.setdefault(record.conversation, []).append(record)
    assert sorted(talks) == [0, 3, 6, 9]  # type: ignore[type-var]
    for number, talk in talks.items():
        assert talk[0].index == number
        assert [r.turn for r in talk] == list(range(1, len(talk) + 1))
        assert len({r.user for r in talk}) == 1
        lengths = [r.prompt_tokens or 0 for r in talk]
        assert [b - a >= 24 for a, b in zip(lengths, lengths[1:], strict=False)] == [True] * (len(talk) - 1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_who_pauses_when_the_process_is_ended_sends_nothing_more(tmp_path: Path, engine: str, by_hand: bool) -> None:
    load = Load(user="chat", users=20, requests=1000, turns=3, output_tokens=3, think_s=[60, 60])
    if by_hand:
        ui = ["--autostart", "--web-host", "127.0.0.1", "--web-port", str(free_port())]
        more = ["--users", "20", "--spawn-rate", "100", "--think", "60", "--records", str(tmp_path / "requests.jsonl")]
        process = start(tmp_path, engine, "chat", *ui, *more)
    else:
        process = start_job(tmp_path, engine, make_job(tmp_path, load))
    wait_for_records(tmp_path, 20)
    process.terminate()
    assert end(process) == 0
    assert [(record.turn, record.error) for record in records_of(tmp_path)] == [(1, None)] * 20


Talks = dict[int | None, list[tuple[int, int | None]]]


def talks_of(records: list[Request]) -> Talks:
    """Of each conversation the index and the turn of its requests, in the order of sending."""
    talks: Talks = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        talks.setdefault(record.conversation, []).append((record.index, record.turn))
    return talks


def planned_talks(requests: int, turns: int) -> Talks:
    spans = [range(first, min(first + turns, requests)) for first in range(0, requests, turns)]
    return {span[0]: [(index, turn) for turn, index in enumerate(span, start=1)] for span in spans}


def test_conversations_do_not_depend_on_who_is_faster(tmp_path: Path, slow_engine: str) -> None:
    load = Load(user="chat", users=5, requests=25, turns=3, output_tokens=4, think_s=[0.0, 0.15], processes=2)
    records = driven(tmp_path, slow_engine, load, Warmup(requests=4))
    assert len({r.process for r in records}) == 2
    talks = talks_of(records)
    assert talks == {-1: [(-1, 1), (-2, 2), (-3, 3)], -4: [(-4, 1), (-5, 2), (-6, 3)], **planned_talks(25, 3)}
    assert [r.error for r in records] == [None] * 31


def test_of_fixed_time_counts_what_is_sent_in_it_late_turns_as_well(tmp_path: Path, slow_engine: str) -> None:
    load = Load(user="chat", users=5, duration_s=1.5, turns=6, output_tokens=2, think_s=[0.0, 0.4])
    records = sorted(driven(tmp_path, slow_engine, load, Warmup(duration_s=0.6)), key=lambda r: r.sent_s)
    phases = [r.phase for r in records]
    first = phases.index("measured")
    assert phases == ["warmup"] * first + ["measured"] * (len(phases) - first)
    # Nobody waits for the end of a conversation of the warm-up, which takes two seconds.
    assert records[first].index < 0 and (records[first].turn or 0) > 1


@pytest.fixture
def failing_engine() -> Iterator[str]:
    """Every third request is refused; of the others the usage counts the messages."""
    seen = itertools.count()

    class Answer(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            choice = {"message": {"content": "said"}, "finish_reason": "stop"}
            usage = {"prompt_tokens": len(json.loads(self.body())["messages"])}
            self.answer(500 if next(seen) % 3 == 1 else 200, json.dumps({"choices": [choice], "usage": usage}))

    with listening(Answer) as url:
        yield url


def test_a_failed_turn_leaves_no_trace_and_the_conversation_goes_on(tmp_path: Path, failing_engine: str) -> None:
    load = Load(user="chat", requests=6, turns=3, output_tokens=6, stream=False, think_s=[0.0, 0.0])
    records = driven(tmp_path, failing_engine, load, prompts=Prompts(tokens=20, system_tokens=10))
    assert talks_of(records) == planned_talks(6, 3)
    assert [r.error for r in records] == [None, "http", None, None, "http", None]
    # system, question | refused | system, question, answer, third question: the refused one is not in it
    assert [r.prompt_tokens for r in records] == [2, None, 4, 2, None, 4]


def test_a_timed_conversation_ends_with_the_time(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=3, duration_s=1.0, turns=5000, output_tokens=4, think_s=[0.1, 0.3], drain_s=600)
    talks = talks_of(driven(tmp_path, engine, load))
    assert talks and set(talks) <= {0, 5000, 10000}
    for number, talk in talks.items():
        assert talk == planned_talks(15000, 5000)[number][: len(talk)]


@pytest.mark.parametrize("how", [Abandon(share=0.4, after_tokens=3), Abandon(share=0.4, after_s=0.25)])
def test_some_leave_before_the_answer_is_there(tmp_path: Path, slow_engine: str, how: Abandon) -> None:
    load = Load(user="chat", users=4, requests=16, turns=4, output_tokens=12, think_s=[0.0, 0.0], abandon=how)
    records = driven(tmp_path, slow_engine, load, None, "--json-file", str(tmp_path / "stats"))
    left = [r for r in records if abandon_of(how, 1, r.index)]
    assert [r.index for r in left] == [0, 3, 4, 6, 7, 8, 10, 11, 13, 15]
    assert left == [r for r in records if r.error == "abandoned"]
    words = "the user left after 3 chunks" if how.after_tokens else "the user left after 0.25 s"
    assert {r.message for r in left} == {words}
    assert {(len(r.chunks_s), r.output_tokens) for r in records if r.error is None} == {(12, 12)}
    assert all((3 if how.after_tokens else 0) <= len(r.chunks_s) < 12 for r in left)
    # Locust's own table: no failure, and no response time that nobody waited for
    stats = {entry["name"]: entry for entry in json.loads((tmp_path / "stats.json").read_text())}
    assert {name: (one["num_requests"], one["num_failures"]) for name, one in stats.items()} == {
        "b": (6, 0),
        "b (abandoned)": (10, 0),
    }


def test_who_is_not_content_asks_the_same_again(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=2, requests=20, turns=5, output_tokens=6, think_s=[0.0, 0.0], regenerate=0.4)
    records = driven(tmp_path, engine, load)
    assert talks_of(records) == planned_talks(20, 5)
    again = [r.index for r in records if r.again]
    assert again == [index + 1 for index in range(19) if index % 5 != 4 and chance(1, "regenerate", index) < 0.4]
    for before, after in itertools.pairwise(records):
        if after.again:
            assert after.prompt_tokens == before.prompt_tokens  # word for word, without its first answer
    assert len(again) > 3


def test_a_question_that_is_asked_again_is_judged_as_that_question(tmp_path: Path, engine: str) -> None:
    load = Load(
        user="chat", users=2, requests=20, turns=5, think_s=[0.0, 0.0], regenerate=0.4, output="natural",
        output_tokens=8, answer=Structured(choice="auto"),
    )  # fmt: skip
    records = driven(tmp_path, engine, load, prompts=Prompts(kind="classification"))
    assert sum(r.again for r in records) > 3
    assert {(r.error, r.answer_valid, r.answer_right) for r in records} == {(None, True, True)}


def test_reasoning_is_reported_apart(tmp_path: Path) -> None:
    load = Load(user="chat", requests=2, turns=2, output_tokens=10, think_s=[0.0, 0.0])
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "reasoning:4") as server:
        first, second = driven(tmp_path, server.url, load)
    assert (first.reasoning_chunks, len(first.chunks_s)) == (4, 10)
    assert first.first_visible_s == first.chunks_s[4]
    # 24 words and the template's 5; then the visible 6 words alone and their 3, 24 words and their 3
    assert (first.prompt_tokens, second.prompt_tokens) == (29, 65)
