"""The answer, the facts and the tables of a replay, of made numbers."""

from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.numbers.summary import CacheHits, ReplayNumbers, Row, StepRange
from harness.questions.agents.replay import replay_answers, replay_elements
from harness.report.elements import Facts, Grid, Paragraph, walk
from harness.report.markdown import render
from harness.scenario import Load
from harness.scenario.behaviour import AgentTrace
from tests.support.made_summaries import row_of, summary
from tests.support.wording import Wording

LOADS = {"l": Load(user="agent_trace", users=2, requests=100, agent_trace=AgentTrace(file="traces"))}
STEPS = [
    StepRange(first=1, last=1, requests=20, prompt_tokens=9000.0, new_tokens=9000.0, cached_tokens=0.0,
              recomputed_tokens=0.0, ttft_p50=9.1),
    StepRange(first=2, last=4, requests=70, prompt_tokens=12000.0, new_tokens=700.0, cached_tokens=11000.0,
              recomputed_tokens=300.0, ttft_p50=0.8, ttft_p90=2.5),
]  # fmt: skip
HITS = CacheHits(requests=90, prompt_tokens=1_200_000, planned=186_048, served=186_048, beyond=0, template_tokens=6)


def times(n: int, middle_s: float, **more: Any) -> Distribution:
    values = {"n": n, "mean": middle_s, "min": middle_s / 2, "max": 2 * middle_s} | more
    return Distribution(**values)


def replay(**changes: Any) -> ReplayNumbers:
    values: dict[str, Any] = {
        "conversations": 12, "whole": 8, "ended": 90, "failed": 0, "not_sent": 0, "too_long": 0, "before_start": 0,
        "open": 7, "delays_s": 573.0, "removed_s": 180.0, "duration": times(8, 192.0), "served": times(8, 127.0),
        "tools": times(8, 65.0), "by_step": STEPS, "by_depth": STEPS, "uncached_tok_s": 310.0, "hits": HITS,
    }  # fmt: skip
    return ReplayNumbers(**(values | changes))


def row(found: ReplayNumbers, turn: Distribution | None = None, **more: Any) -> Row:
    e2e = turn or times(90, 5.0, p50=4.1, p90=9.8)
    numbers = Numbers(
        sent=90, succeeded=90, failed=0, unfinished=0, output_tok_s=45.2, input_tok_s=8900.0, e2e=e2e,
        tpot=times(90, 0.05, p50=0.04, p90=0.08),
    )  # fmt: skip
    return row_of(numbers, "s", "l", replay=found, **more)


def text_of(found: Row) -> str:
    return render(replay_elements(replace(summary(), rows=[found])))


def test_the_answer_has_a_turn_a_conversation_and_the_tools(wording: Wording) -> None:
    (answer,) = replay_answers([row(replay())], LOADS)
    assert answer.code == "replay"
    assert answer.values == {
        "row": "s / l", "users": 2, "conversations": 8, "turn_s": 4.1, "turn_p90_s": 9.8, "turns": 90,
        "conversation_s": 192.0, "tools_s": 65.0,
    }  # fmt: skip
    wording(answer)


def test_without_a_whole_conversation_the_turn_is_still_known(wording: Wording) -> None:
    untimed = replay(duration=NO_SAMPLE, served=NO_SAMPLE, tools=NO_SAMPLE)
    found = row(untimed, times(7, 5.0))
    (answer,) = replay_answers([found], LOADS)
    assert answer.values == {"row": "s / l", "users": 2, "conversations": 0, "turn_s": 5.0, "turns": 7}
    (other,) = replay_answers([row(replace(untimed, whole=0), times(7, 5.0))], LOADS)
    wording([answer.text, other.text])


def test_records_without_conversations_claim_nothing_of_them(wording: Wording) -> None:
    """Of stock Locust, which stores requests alone."""
    untold = replay(conversations=0, whole=0, ended=0, open=0, delays_s=0.0, removed_s=0.0)
    wording(text_of(row(untold)))


def test_other_loads_get_no_answer_of_a_replay() -> None:
    assert replay_answers([row(replay())], LOADS | {"chat": Load(user="chat", requests=1)}) == []
    assert replay_answers([row_of(Numbers(sent=0, succeeded=0, failed=0, unfinished=0), "s", "l")], LOADS) == []
    assert replay_elements(summary()) == []


def test_each_row_has_its_facts_and_two_tables(wording: Wording) -> None:
    (facts, by_step, by_depth) = replay_elements(replace(summary(), rows=[row(replay())]))
    assert isinstance(facts, Facts) and isinstance(by_step, Grid) and isinstance(by_depth, Grid)
    assert [list(cells) for cells in by_step.rows] == [
        ["1", "20", "9,000", "9,000", "0", "0", "9,100", "–"],
        ["2 to 4", "70", "12,000", "700", "11,000", "300", "800", "2,500"],
    ]
    wording(text_of(row(replay())))


def test_the_slow_tail_of_a_speed_is_the_inverse_of_the_slow_tail_of_its_seconds() -> None:
    """40 ms a token at p50 and 80 ms at p90: 25 tok/s, and 12.5 or less in the slowest tenth; never more than 25."""
    facts = next(part for part in replay_elements(replace(summary(), rows=[row(replay())])) if isinstance(part, Facts))
    (text,) = [fact.text for fact in facts.items if fact.label == "Output"]
    assert "25 tok/s" in text and "12.50 tok/s" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"failed": 2, "not_sent": 31, "too_long": 12, "before_start": 5},
        {"hits": replace(HITS, served=93_024, beyond=540, template_tokens=None)},
        {"hits": replace(HITS, is_scaled=True, template_tokens=None)},
        {"hits": None, "uncached_tok_s": None},
        {"delays_s": 0.0, "removed_s": 0.0, "open": 0, "duration": times(1, 20.0)},
    ],
)
def test_what_was_not_sent_and_what_is_not_known_is_printed(changes: dict[str, Any], wording: Wording) -> None:
    wording(text_of(row(replay(**changes))).split("\n\n")[0])


def test_several_rows_are_named() -> None:
    rows = [row(replay()), row_of(row(replay()).pooled, "t", "l", replay=replay())]
    answers = replay_answers(rows, LOADS)
    assert [answer.text.split(":")[0] for answer in answers] == ["s / l", "t / l"]
    elements = list(walk(replay_elements(replace(summary(), rows=rows))))
    assert [part.text for part in elements if isinstance(part, Paragraph)] == ["s / l", "t / l"]
