"""The words of users: no text has one by itself, whatever is searched takes linear time, and who asks for them."""

import time
from importlib.resources import files
from typing import Any

import pytest

from harness.scenario import Load, Prompts, asks_own_words
from harness.scenario.behaviour import Structured
from harness.workload import text
from harness.workload.own_words import MAX_CHARS, OwnWords, WordOwner, ask_for

WORDS = OwnWords(42, [1000, 0, 50])


def test_each_user_has_a_word_of_its_own_which_is_the_same_in_every_run() -> None:
    words = [WORDS.word(0, user) for user in range(1000)] + [WORDS.word(2, user) for user in range(50)]
    assert len(set(words)) == 1050 and all(word.count("-") == 2 for word in words)
    assert OwnWords(42, [1000, 0, 50]).word(0, 999) == WORDS.word(0, 999) != OwnWords(43, [1000]).word(0, 999)


@pytest.mark.parametrize(
    "form", ["{}", "**{}**.", '"{}"', "x-{}-y", "The word is {}: hello", "<think>{}</think>", "{}{}", "({})\n"]
)
def test_a_word_is_found_however_it_is_written(form: str) -> None:
    word = WORDS.word(0, 7)
    for spelled in (word, word.upper(), word.title()):
        owners = WORDS.owners(form.format(spelled, "-" + WORDS.word(2, 1)))
        assert WordOwner(0, 7) in owners and owners <= {WordOwner(0, 7), WordOwner(2, 1)}


@pytest.mark.parametrize(
    "spelled", ["{0} {1} {2}", "{0}-{1}", "{0}_{1}_{2}", "x{0}-{1}-{2}", "{0}-{1}-{2}s", "{2}-{1}-{0}"]
)
def test_what_only_resembles_a_word_is_none(spelled: str) -> None:
    assert WORDS.owners(spelled.format(*WORDS.word(0, 7).split("-"))) == set()


def test_no_text_that_ships_or_is_made_has_a_word() -> None:
    """A million words, 360,000 of them with hyphens between them, where a load would have a few."""
    words = OwnWords(7, [50])
    shipped = "".join(path.read_text() for path in files("harness").joinpath("data").iterdir() if path.is_file())
    assert words.owners(shipped) == set()
    for number in range(200):
        prompt = text(5000, number, "false alarms")
        assert words.owners(prompt) == words.owners(prompt[:10_000].replace(" ", "-")) == set()


@pytest.mark.parametrize("unit", ["ab-", "a", "-", "ab - ", "a-b-c-d ", WORDS.word(0, 1) + "-", "ä-", "A-"])
def test_the_search_takes_linear_time(unit: str) -> None:
    """CPU time of this thread, far above what a busy machine changes; a quadratic search would take hours."""
    long = unit * (MAX_CHARS // len(unit))
    began = time.thread_time()
    WORDS.owners(long)
    assert time.thread_time() - began < 60


def test_only_so_much_of_an_answer_is_searched() -> None:
    assert WORDS.owners(" " * MAX_CHARS + WORDS.word(0, 1)) == set()


@pytest.mark.parametrize(
    ("changes", "prompts", "asks"),
    [
        ({}, {}, True),
        ({"user": "agent"}, {}, True),
        ({"endpoint": "messages"}, {}, True),
        ({"isolation": False}, {}, False),
        ({"output": "fixed"}, {}, False),
        ({"user": "batch"}, {}, False),
        ({"answer": Structured(choice=["a", "b"])}, {}, False),
        ({}, {"tokenizer": "server"}, False),
        ({}, {"kind": "file", "file": "prompts.jsonl"}, False),
        ({}, {"kind": "classification"}, False),
        ({"prompts": Prompts(kind="classification")}, {}, False),
    ],
)
def test_words_are_asked_for_where_they_change_nothing_that_was_asked_for(
    changes: dict[str, Any], prompts: dict[str, Any], asks: bool
) -> None:
    given: dict[str, Any] = {"user": "chat", "users": 2, "requests": 4, "output": "natural", **changes}
    assert asks_own_words(Load(**given), Prompts(**prompts)) is asks


def test_the_word_comes_before_the_question() -> None:
    assert ask_for("a-b-c", "What is it?").endswith("What is it?") and "a-b-c" in ask_for("a-b-c", "What is it?")
