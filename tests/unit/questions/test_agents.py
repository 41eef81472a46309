"""What each turn of an agent costs."""

from harness.base.measured import Numbers
from harness.numbers.summary import Row, TurnNumbers
from harness.numbers.turns import turn_numbers
from harness.questions.agents.agent_turns import turn_answers
from harness.records.run_data import cell_data
from harness.scenario import Load
from tests.support.faults import fault
from tests.support.made_runs import request
from tests.support.made_summaries import row_of
from tests.support.wording import Wording

AGENT = Load(user="agent", endpoint="messages", requests=6, output="natural")


def turns(*prompts: tuple[int | None, int | None]) -> list[TurnNumbers]:
    """The turns of two tasks with these prompts: tokens in total, and from the cache."""
    made = [
        request(id=f"{task}-{turn}", index=turn, turn=turn + 1, prompt_tokens=prompt, cached_tokens=cached)
        for task in range(2)
        for turn, (prompt, cached) in enumerate(prompts)
    ]
    return turn_numbers([cell_data(made)])


def row(found: list[TurnNumbers]) -> Row:
    numbers = Numbers(sent=6, succeeded=6, failed=0, unfinished=0)
    return row_of(numbers, "s", "l", turns=found)


def test_cached_new_and_recomputed_tokens_add_up_to_the_prompt(wording: Wording) -> None:
    found = turns((1000, 900), (1500, 1000), (1800, 300))
    assert [(one.turn, one.requests, one.new_tokens, one.recomputed_tokens) for one in found] == [
        (1, 2, 100, 0),
        (2, 2, 500, 0),
        (3, 2, 300, 1200),
    ]
    for one in found:
        assert (one.cached_tokens or 0) + (one.new_tokens or 0) + (one.recomputed_tokens or 0) == one.prompt_tokens
    (answer,) = turn_answers([row(found)], {"l": AGENT})
    assert answer.values["recomputed_share"] == 1200 / (1000 + 1500)
    assert "1,000" in answer.text and "1,800" in answer.text
    wording(answer.text)


def test_unknown_tokens_stay_unknown_and_one_turn_is_no_task(wording: Wording) -> None:
    found = turns((1000, None), (1500, None))
    assert [(one.new_tokens, one.recomputed_tokens) for one in found] == [(1000, None), (500, None)]
    (answer,) = turn_answers([row(found)], {"l": AGENT})
    assert answer.values.get("recomputed_share") is None
    wording(answer.text)
    assert turns((1000, 0)) == []
    assert turn_answers([row(found)], {"l": AGENT, "chat": Load(user="chat", requests=1)}) == []


@fault(
    "server", "it does not report the tokens of a prompt", seen="the size of the context is not known; no report has 0"
)
def test_a_context_whose_size_the_server_does_not_report_is_unknown_and_not_0(wording: Wording) -> None:
    """The question of the run is not answered, and the sentence says that."""
    for found in (turns((None, None), (None, None)), turns((1000, None), (None, None))):
        (answer,) = turn_answers([row(found)], {"l": AGENT})
        assert " 0 " not in answer.text and " tokens" in answer.text
        wording(answer.text)
        assert not {"first_tokens", "last_tokens", "recomputed_share"} & answer.values.keys()
    (known,) = turn_answers([row(turns((1000, 900), (1500, 1000)))], {"l": AGENT})
    assert (known.values["first_tokens"], known.values["last_tokens"]) == (1000, 1500)
    (new,) = turn_answers([row(turns((1000, 0), (1000, 0)))], {"l": AGENT})
    assert new.values["recomputed_share"] == 1.0
