"""`harness tune RUN`: what a finding of a run advises is tried, without a search."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.reason import Reason, because
from harness.numbers.summarize import summarize
from harness.numbers.summary import Action, RunFinding, Summary
from harness.questions.tune.advised import read_advice
from harness.questions.tune.decide import MAX_DISTURBED, Proposal, Setting, Suggestion, Trial, make_search, next_advised
from harness.records.manifest import Run
from tests.support.made_runs import scenario, write_made_run

ADVISED: Suggestion = ("queue_with_room", {"sequences": 8})
REFERENCE = Trial(value=10.0, took_s=1.0)
LATE = because("client_error", "late")


def finding(code: str, row: str, **changes: Any) -> RunFinding:
    actions = [Action(do="Look at it", verify="v"), Action(do="", changes=changes, verify="v")]
    return RunFinding(code=code, rows=[row], measured="", means="", why="", actions=actions, cost=0.5)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Run, Summary]:
    run = write_made_run(tmp_path / "r", made_of=scenario())
    return tmp_path / "r", run, summarize(tmp_path / "r")


def with_findings(summary: Summary, *findings: RunFinding) -> Summary:
    return replace(summary, findings=list(findings))


def test_the_worst_finding_that_names_settings_is_tried(made: tuple[Path, Run, Summary]) -> None:
    folder, run, summary = made
    row = summary.rows[0]
    found = [finding("setup", row.name), finding("queue_with_room", row.name, sequences=8), finding("x", row.name, a=1)]
    advice = read_advice(folder, run, with_findings(summary, *found))
    assert (advice.finding, advice.server, advice.load) == ("queue_with_room", row.server, row.load)
    assert advice.settings == {"sequences": 8}
    assert read_advice(folder, run, with_findings(summary, *found), "x").settings == {"a": 1}


@pytest.mark.parametrize(
    ("findings", "code", "where"),
    [
        ([], None, "has no finding"),
        ([("setup", {})], None, "no finding names"),
        ([("setup", {})], "setup", "'setup' names no setting"),
        ([("queue_with_room", {"sequences": 2})], "queue", "--finding"),
        ([], "queue", "--finding"),
    ],
)
def test_no_advice_to_try(
    made: tuple[Path, Run, Summary], findings: list[tuple[str, dict[str, int]]], code: str | None, where: str
) -> None:
    folder, run, summary = made
    given = [finding(name, summary.rows[0].name, **changes) for name, changes in findings]
    with pytest.raises(HarnessError) as caught:
        read_advice(folder, run, with_findings(summary, *given), code)
    assert where in caught.value.what


SEARCH = make_search([Setting(name="sequences", values=(1, 2, 4, 8), default=1, gain=0.2)])


def test_the_reference_comes_first_and_then_the_advice() -> None:
    first = next_advised(SEARCH, [], ADVISED)
    assert isinstance(first, Proposal) and (first.settings, first.why) == ({}, "first")
    second = next_advised(SEARCH, [REFERENCE], ADVISED)
    assert isinstance(second, Proposal)
    assert (second.settings, second.why, second.finding) == ({"sequences": 8}, "finding", "queue_with_room")
    tried = Trial(settings={"sequences": 8}, why="finding", value=20.0)
    ended = next_advised(SEARCH, [REFERENCE, tried], ADVISED)
    assert isinstance(ended, Reason) and ended.code == "tune_tried"


def test_a_start_that_was_disturbed_is_repeated_but_not_for_ever() -> None:
    late = Trial(settings={"sequences": 8}, why="finding", finding="queue_with_room", reason=LATE)
    repeated = next_advised(SEARCH, [REFERENCE, late], ADVISED)
    assert isinstance(repeated, Proposal)
    assert (repeated.settings, repeated.why, repeated.finding) == ({"sequences": 8}, "finding", "queue_with_room")
    ended = next_advised(SEARCH, [REFERENCE, *[late] * (MAX_DISTURBED - 1)], ADVISED)
    assert isinstance(ended, Reason) and ended.code == "tune_tried"


def test_a_server_that_gives_no_result_as_it_is_ends_the_trial() -> None:
    ended = next_advised(SEARCH, [Trial(reason=because("no_goal_value", "x"))], ADVISED)
    assert isinstance(ended, Reason) and ended.code == "tune_nothing_starts"


def test_settings_that_cannot_be_set_here_are_not_tried() -> None:
    ended = next_advised(SEARCH, [REFERENCE], ("x", {"unknown": 3}))
    assert isinstance(ended, Reason) and ended.code == "tune_not_allowed"
