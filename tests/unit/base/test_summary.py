"""Reasons are codes with values, and have their sentence where they arise."""

from harness.base.summary import Reason, because, sentence
from tests.support.reasons_in_source import reasons_in_source


def test_each_reason_has_a_text() -> None:
    assert [code for code, texts in reasons_in_source().items() if not all(texts)] == []


def test_the_cell_of_a_reason_comes_first() -> None:
    assert sentence(because("interrupted", "it ended")) == "it ended"
    assert sentence(Reason("not_run", "it has not run", cell="r1-a-x")) == "r1-a-x: it has not run"
