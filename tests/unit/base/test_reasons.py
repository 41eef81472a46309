"""Reasons are codes with values: every code that the program uses has its sentence, and none is left over."""

from harness.base.reasons import COMPOSED, reason_templates, sentence
from harness.base.summary import Reason, because
from tests.support.reasons_in_source import reasons_in_source


def test_each_reason_has_a_text_in_one_place() -> None:
    made = {code for code, texts in reasons_in_source().items() if texts}
    assert made.isdisjoint(documented := {*reason_templates(), *COMPOSED})
    assert {code for code in reasons_in_source() if code not in made} <= documented


def test_a_reason_becomes_a_sentence_with_its_cell() -> None:
    assert sentence(because("interrupted", "it ended")) == "it ended"
    assert sentence(because("server_restarted", times=1)) == "the server was restarted 1 time"
    failed = because("error_rate", failed=1, sent=10, kinds={}, rate=0.1, max_rate=0.0)
    assert sentence(failed) == "1 of 10 requests failed: an error rate of 10.00%, and at most 0.00% is allowed"
    rare = because("error_rate", failed=1, sent=25_000, kinds={}, rate=0.00004, max_rate=0.0)
    assert sentence(rare).startswith("1 of 25,000 requests failed: an error rate of 0.00400%")
    counts = {"server": 200.0, "min_tokens": 190, "max_share": 0.01}
    tokens = [sentence(because("tokens_differ", max_tokens=high, **counts)) for high in (190, 195, None)]
    assert [text.split(" client ")[1].split(",")[0] for text in tokens] == ["190", "190 to 195", "at least 190"]
    assert sentence(Reason("not_run", cell="r1-a-x")) == "r1-a-x: it has not run"
    assert sentence(because("of_a_newer_harness", n=1)) == 'of_a_newer_harness {"n":1}'
