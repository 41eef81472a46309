"""What an ideal prefix cache reuses of the prompts of a conversation."""

from pathlib import Path
from typing import Literal

import pytest

from harness.workload.agent_traces.conversation import Conversation
from harness.workload.agent_traces.prefix_reuse import PrefixCache, planned_tokens, prompt_reuse
from tests.support.agent_traces import made_files, read_all, read_weka, weka_request


def reuse(made: Conversation, of: Literal["any", "agent"] = "any") -> list[tuple[int, int]]:
    return [(one.size, one.shared) for one in prompt_reuse(made, of=of)]


@pytest.mark.parametrize(
    ("name", "any_step", "same_agent"),
    [
        # Characters: 10 + 15; 14 + (10 + 15) + (4 + 2) + 7 + 6; 10 + 13
        ("edge-agentic", [(25, 0), (83, 25), (106, 83)], [(25, 0), (83, 25), (106, 83)]),
        # The second sub-agent starts with blocks of the first one.
        ("weka", [(9, 0), (17, 8), (21, 16), (8, 0), (14, 8), (12, 8)],
         [(9, 0), (17, 8), (21, 16), (8, 0), (14, 8), (12, 0)]),
        ("otel", [(23, 0), (44, 23), (6, 0), (57, 23)], [(23, 0), (44, 23), (6, 0), (57, 0)]),
        ("tracelab", [(200, 0), (330, 192), (400, 64)], [(200, 0), (330, 192), (400, 64)]),
        ("copilot", [(100, 0), (150, 100), (90, 60)], [(100, 0), (150, 100), (90, 60)]),
    ],
)  # fmt: skip
def test_the_leading_parts_that_were_sent_before(
    tmp_path: Path, name: str, any_step: list[tuple[int, int]], same_agent: list[tuple[int, int]]
) -> None:
    made = read_all(made_files(tmp_path)[name])[0]
    assert reuse(made) == any_step
    assert reuse(made, "agent") == same_agent


def test_an_id_counts_only_after_equal_ones(tmp_path: Path) -> None:
    made = read_weka(
        tmp_path, weka_request(0, 12, [1, 2, 3]), weka_request(1, 12, [1, 9, 3]), weka_request(2, 11, [1, 2])
    )
    assert reuse(made) == [(12, 0), (12, 4), (11, 8)]
    assert reuse(made, "agent") == [(12, 0), (12, 4), (11, 4)]


def test_a_prompt_that_continues_one_that_was_not_sent_is_new(tmp_path: Path) -> None:
    """After a start inside the trace the first prompt holds all that was recorded before."""
    made = read_all(made_files(tmp_path)["edge-agentic"])[0]
    cache = PrefixCache(made)
    assert [cache.add(made.steps[number])[:] for number in (1, 2, 0)] == [(83, 0), (106, 83), (25, 25)]
    assert 0 in cache and 3 not in cache


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("edge-agentic", [(None, 0), (None, None), (None, None)]),
        ("weka", [(9, 0), (17, 8), (21, 16), (8, 0), (14, 8), (12, 8)]),
        ("tracelab", [(200, 0), (330, 192), (400, 64)]),
    ],
)
def test_tokens_are_planned_where_the_trace_has_no_text(
    tmp_path: Path, name: str, planned: list[tuple[int | None, int | None]]
) -> None:
    made = read_all(made_files(tmp_path)[name])[0]
    cache = PrefixCache(made)
    assert [planned_tokens(made, step, cache.add(step))[:] for step in made.steps] == planned


def test_what_other_conversations_share_is_not_planned(tmp_path: Path) -> None:
    made = read_weka(tmp_path, weka_request(0, 8, [1, 2]), hash_id_scope="global")
    assert planned_tokens(made, made.steps[0], PrefixCache(made).add(made.steps[0])) == (8, None)


def test_the_order_of_the_steps_is_the_callers(tmp_path: Path) -> None:
    made = read_all(made_files(tmp_path)["weka"])[0]
    by_time = sorted(made.steps, key=lambda step: step.start_s or 0.0)
    assert [step.number for step in by_time] == [0, 3, 5, 4, 1, 2]
    assert [one.shared for one in prompt_reuse(made, by_time)] == [0, 0, 8, 8, 8, 16]
