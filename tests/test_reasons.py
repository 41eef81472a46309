"""Reasons are codes with values: every code that the program uses has its sentence, and none is left over."""

import re

from harness.files import ROOT
from harness.reasons import sentence
from harness.summary import Reason, because
from tests.made_docs import documented_reasons

_USED = re.compile(r'(?:(?:because|Reason|_missing_value)\(\s*|_limited\(.*)"(?!\w+_s")(\w+)"')
_CHOSEN = (  # by an expression, or a table
    "load_retried",
    "server_died", "server_unreachable", "steady", "not_steady", "no_prompt_tokens", "no_wall_time", "none_sent",
    "none_measured", "not_ended", "no_tokens", "labels_unknown", "no_drift",
    "capacity_found", "capacity_more_than", "capacity_none", "capacity_unresolved", "capacity_knee_knee",
    "capacity_knee_none", "capacity_knee_unclear",
    "crossing_from", "crossing_until", "crossing_always", "crossing_never", "crossing_cannot_tell",
)  # fmt: skip


def test_the_codes_of_the_program_are_those_of_the_table() -> None:
    text = "".join(path.read_text() for path in (ROOT / "harness").rglob("*.py"))
    assert {*_USED.findall(text), *_CHOSEN} == set(documented_reasons())
    assert all(documented_reasons().values())


def test_a_reason_becomes_a_sentence_with_its_cell() -> None:
    assert sentence(because("server_restarted", times=1)) == "the server was restarted 1 time"
    failed = because("error_rate", failed=1, sent=10, kinds={}, rate=0.1, max_rate=0.0)
    assert sentence(failed) == "1 of 10 requests failed: an error rate of 10.00%, and at most 0.00% is allowed"
    short = [sentence(because("plan_too_short", needed_s=needed_s)) for needed_s in (2.911, 66.2)]
    assert ["needs 2.92 s or more" in short[0], "needs 67 s or more" in short[1]] == [True, True], "rounded up"
    counts = {"server": 200.0, "min_tokens": 190, "max_share": 0.01}
    tokens = [sentence(because("tokens_differ", max_tokens=high, **counts)) for high in (190, 195, None)]
    assert [text.split(" client ")[1].split(",")[0] for text in tokens] == ["190", "190 to 195", "at least 190"]
    spent = [sentence(because("capacity_budget", budget_s=60.0, servers=servers)) for servers in (None, 2)]
    assert spent[0].startswith("its budget of 60 s was spent before")
    assert spent[1].startswith("its budget of 60 s, shared by 2 servers, was spent before")
    assert sentence(Reason("not_run", cell="r1-a-x")) == "r1-a-x: it has not run"
    assert sentence(because("of_a_newer_harness", n=1)) == 'of_a_newer_harness {"n":1}'
    inner = {"code": "not_run", "cell": "r1-a-x"}
    assert sentence(because("row_not_valid", row="a / x", why=inner)) == (
        "a / x has a cell that is not valid (r1-a-x: it has not run)"
    )
