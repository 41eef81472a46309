"""The answer of `harness bisect` by its records, its page and its exit code."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from typer import Exit

from harness.base.errors import ImageError
from harness.base.reason import Reason, because, sentence
from harness.questions.bisect.bisected import BisectReport, bisected, start_speed, starts_of
from harness.questions.bisect.chart import levels_chart
from harness.questions.bisect.command import exit_after_bisect
from harness.questions.bisect.decide import BisectStart, BisectStep, End
from harness.questions.bisect.page import answer_line, bisect_page, bisect_question, entry_grid
from harness.questions.bisect.search import UNKNOWN_FLAG, end_reason, image_failure, in_words_of
from harness.report import html, markdown
from harness.report.elements import Chart
from harness.report.verdict_text import format_range
from tests.support.bisections import ASKED, cell_of_start, made_bisection, report_of
from tests.support.wording import Wording

NOISE = (1.0, 1.004, 0.997, 1.002, 0.999, 1.001, 0.996, 1.003)
NOT_STARTED = because("setting_not_started", "did not start: no kernel for this GPU", error="e")
ENDS = [0, 4, 4, 0, 0, 4]


def walls(entries: Sequence[int], levels: Sequence[float]) -> list[tuple[int, float | Reason]]:
    return [(entry, levels[entry] * NOISE[number % 8]) for number, entry in enumerate(entries)]


def code_of(report: BisectReport) -> int:
    try:
        exit_after_bisect(report)
    except Exit as end:
        return end.exit_code
    return 0


def page_of(report: BisectReport) -> str:
    return markdown.render(bisect_page(report)).replace("\\", "")


FOUND_ORDER = [*ENDS, 2, 3, 2, 3]
FOUND = walls(FOUND_ORDER, [1.0, 1.0, 1.0, 1.38, 1.38])


def test_a_pair_has_its_change_its_cause_and_both_sides(wording: Wording) -> None:
    report = report_of(FOUND, ended=because("bisect_pair", "the difference of two neighbours is proven"))
    change = report.change
    assert change is not None and (change.low_entry, change.high_entry, report.ended) == (2, 3, "pair")
    assert 1 / change.ratio == pytest.approx(1.38, rel=0.02) and change.low < change.ratio < change.high
    assert report.cause == "prefill" and report.part == pytest.approx(1.0, abs=0.02) and report.rest == []
    assert [level.side for level in report.levels] == ["good", "good", "good", "bad", "bad"]
    assert report.levels[1].ratio is None and report.levels[1].starts == 0
    keys = {difference.key for difference in report.differences}
    assert {"version", "arguments"} <= keys
    assert report.levels[4].findings == ["slow_prefill"] and code_of(report) == 0
    text = page_of(report)
    assert "38 % slower" in text and "b4" in text
    wording(text)


def test_two_changes_are_told_with_the_command_for_the_rest(wording: Wording) -> None:
    levels = [1.0, 1.0, 1.06, 1.06, 1.40]
    report = report_of(walls([*ENDS, 2, 4, 3, 3, 4], levels))
    assert report.change is not None and (report.change.low_entry, report.change.high_entry) == (3, 4)
    assert report.part is not None and 0.75 < report.part < 0.9
    assert [(change.low_entry, change.high_entry) for change in report.rest] == [(0, 3)]
    text = page_of(report)
    assert "--bad ghcr.io/example/engine:b4" in text.replace("\n", " ").replace("  ", " ")
    wording(text)


def test_a_skipped_entry_makes_a_range_with_its_reason(wording: Wording) -> None:
    starts = [
        *walls([*ENDS], [1.0, 1.0, 1.0, 1.38, 1.38]),
        (2, NOT_STARTED),
        *walls([1, 3, 1, 3], [1, 1.0, 1, 1.38, 1]),
    ]
    report = report_of(starts)
    assert report.change is not None and (report.change.low_entry, report.change.high_entry) == (1, 3)
    assert (
        [level.short for level in report.skipped] == ["engine:b3"] and report.ended == "pair" and code_of(report) == 0
    )
    assert report.levels[2].failed == NOT_STARTED
    text = page_of(report)
    assert "no kernel for this GPU" in text
    wording(text)


def test_a_spent_budget_has_the_range_that_is_proven(wording: Wording) -> None:
    spent = because("bisect_budget", "the budget of 1 h 0 min is spent", starts=6, more_starts=5, more_s=300)
    report = report_of(walls(ENDS, [1.0, 1.0, 1.0, 1.38, 1.38]), ended=spent)
    assert report.change is not None and (report.change.low_entry, report.change.high_entry) == (0, 4)
    assert (report.ended, code_of(report)) == (None, 5)
    text = page_of(report)
    assert "--budget 66min" in text.replace("\n", " ")
    wording(text)


def test_no_change_says_between_what_it_is(wording: Wording) -> None:
    same = report_of(walls(ENDS, [1.0] * 5))
    assert (same.word, same.ended, same.change, code_of(same)) == ("same", "same", None, 0)
    wording(answer_line(same))
    wide = [(entry, value) for entry, value in zip([0, 4] * 12, [10.0, 10.4, 10.3, 10.1] * 6, strict=True)]
    unknown = report_of(wide)
    assert (unknown.ended, unknown.change, code_of(unknown)) == ("not_shown", None, 5)
    wording(answer_line(unknown))
    begun = report_of(walls([0, 4], [1.0] * 5))
    assert (begun.word, begun.ended, code_of(begun)) == (None, None, 5)
    wording(page_of(begun))


def test_an_end_without_a_result_has_the_code_of_its_reason(wording: Wording) -> None:
    never = report_of([(0, NOT_STARTED)])
    assert (never.ended, code_of(never)) == ("end_failed", 2)
    wording(page_of(never))
    died = report_of([(0, 1.0), (4, because("setting_died", "the server died"))])
    assert code_of(died) == 3


def test_an_entry_without_an_image_has_no_start(wording: Wording) -> None:
    pull = image_failure(ImageError("the image b1 cannot be pulled", next_step="Check the network."))
    assert (pull.code, pull.values["step"]) == ("setting_not_started", "pull")
    record, summary, run = made_bisection([(0, pull)])
    record = replace(record, starts=[replace(start, has_server=False) for start in record.starts])
    report = bisected(record, summary, run)
    assert (report.levels[0].starts, report.starts, code_of(report)) == (0, 0, 2)
    wording(page_of(report))


def test_advice_on_a_flag_names_the_option_of_the_list() -> None:
    unknown = because("setting_not_started", "t", failure=UNKNOWN_FLAG, cause="unknown: --x 1", fix="f")
    flag = replace(ASKED, variable="--x", values=[1, 2], images=None)
    assert "--values" in in_words_of(flag, unknown).values["fix"]
    assert in_words_of(ASKED, unknown) == unknown and in_words_of(flag, NOT_STARTED) == NOT_STARTED


def test_the_two_ends_have_one_interval() -> None:
    for starts in (FOUND, walls(ENDS, [1.0, 1.0, 1.0, 1.38, 1.38]), walls(ENDS, [1.0] * 5)):
        report = report_of(starts)
        bad = report.levels[-1]
        ends = report.ends
        assert ends is not None and (bad.ratio, bad.low, bad.high) == (ends.ratio, ends.low, ends.high)
        if report.change is not None and (report.change.low_entry, report.change.high_entry) == (0, 4):
            assert report.change == report.ends


def test_the_question_has_the_word_of_the_answer() -> None:
    slower, faster = report_of(FOUND), report_of(walls(FOUND_ORDER, [1.38, 1.38, 1.38, 1.0, 1.0]))
    assert (slower.word, faster.word) == ("slower", "faster")
    words = [bisect_question(report).removesuffix("?").split()[-1] for report in (slower, faster)]
    assert words == ["slower", "faster"]
    unknown = bisect_question(report_of(walls(ENDS, [1.0] * 5)))
    assert "slower" not in unknown and "faster" not in unknown


def test_the_commands_name_the_directory_of_the_run_and_only_their_entries() -> None:
    asked = replace(ASKED, images=None, variable="x", values=[1, 2, 3, 4, 5])
    report = replace(report_of(FOUND, asked=asked), folder="elsewhere/20261129-120000-s-ab12")
    text = page_of(report).replace("\n", " ")
    assert "--values x=3,4 " in text and "--runs elsewhere" in text and "--good" not in text


def test_a_long_entry_is_cut_in_sentences_and_breaks_in_the_table() -> None:
    asked = replace(ASKED, values=[f"{'long/' * 60}{'x' * 70}{number}" for number in range(5)])
    report = report_of(FOUND, asked=asked)
    assert len(answer_line(report)) < 200
    assert entry_grid(report).has_long_words and not entry_grid(report_of(FOUND)).has_long_words
    labels = levels_chart(report).figure["layout"]["xaxis"]["ticktext"]
    assert len(set(labels)) == 5 and all("…" in label for label in labels)
    assert "breaking" in html.render_page(bisect_page(report), "t", ["t"])


def test_a_start_with_a_problem_has_no_result() -> None:
    broken = because("client_error", "the load generator was late")
    speed = start_speed([cell_of_start("a", "s", 1, 2.0)], "wall")
    assert speed == pytest.approx(0.5)
    both = start_speed([cell_of_start("a", "s", 1, 2.0), cell_of_start("b", "s", 1, 8.0)], "wall")
    assert both == pytest.approx(0.25), "the geometric mean"
    assert start_speed([cell_of_start("a", "s", 1, 2.0, problems=[broken])], "wall") == broken
    missing = start_speed([cell_of_start("a", "s", 1, 2.0)], "ttft_p99")
    assert isinstance(missing, Reason) and missing.code == "no_bisect_value" and missing.values["needed"] == 662
    record, summary, _ = made_bisection([(0, 1.0), (4, 1.4)])
    lost = replace(summary, cells=summary.cells[:1])
    assert [start.value for start in starts_of(record, lost.cells)] == [1.0, None], "its records are gone"


def test_starts_that_do_not_count_have_their_reason(wording: Wording) -> None:
    broken = because("failed_requests", "3 of 10 requests failed")

    def disturbed(walls: Sequence[tuple[int, float | Reason]], *places: int) -> BisectReport:
        record, summary, run = made_bisection(walls)
        names = {cell for place in places for cell in record.starts[place].cells}
        cells = [replace(cell, problems=[broken]) if cell.id in names else cell for cell in summary.cells]
        return bisected(record, replace(summary, cells=cells), run)

    begun = disturbed(walls([0, 4, 4], [1.0] * 5), 1)
    assert [(start.number, start.entry, start.reason) for start in begun.dropped] == [(2, 4, broken)]
    wording(answer_line(begun))
    assert page_of(begun).count("do not count") + page_of(begun).count("does not count") == 1
    found = disturbed(walls([*ENDS, 2, 2, 3, 2, 3], [1.0, 1.0, 1.0, 1.38, 1.38]), 6)
    assert found.ended == "pair" and len(found.dropped) == 1 and found.change is not None
    wording(page_of(found))
    skipped = disturbed(walls([*ENDS, 2, 2, 2, 1, 3, 1, 3], [1.0, 1.0, 1.0, 1.38, 1.38]), 6, 7, 8)
    assert skipped.levels[2].failed == broken and "3 starts do not count: 3 of 10" in page_of(skipped)
    stuck = disturbed(walls([0, 4, 4, 4, 4], [1.0] * 5), 2, 3, 4)
    assert (stuck.ended, code_of(stuck)) == ("end_failed", 3)
    wording(page_of(stuck))


def test_the_end_of_a_search_has_its_reason(wording: Wording) -> None:
    broken = because("failed_requests", "3 of 10 requests failed")
    lost = [BisectStart(entry=2, value=1.0), BisectStart(entry=2, reason=broken)]
    steps: list[tuple[int, End]] = [(2, "pair"), (3, "pair"), (4, "end_failed")]
    ends = [end_reason(BisectStep(None, 1, high, None, None, ended), lost, ASKED) for high, ended in steps]
    assert [end.code for end in ends] == ["bisect_pair", "bisect_pair", "bisect_end_failed"]
    wording("\n".join(map(sentence, ends)))


def test_what_took_longer_than_the_budget_is_printed() -> None:
    report = report_of(FOUND)
    late = replace(report, spent_s=report.question.budget_s + 90)
    assert "--budget was 1 h 0 min" in page_of(late) and "--budget was" not in page_of(report)


def test_bounds_that_look_equal_have_one_more_digit() -> None:
    change = report_of(FOUND).change
    assert change is not None
    narrow = replace(report_of(FOUND), change=replace(change, ratio=1 / 1.31, low=1 / 1.3123, high=1 / 1.3071))
    assert "31 % slower (30.7 to 31.2 %)" in answer_line(narrow)
    wide = replace(report_of(FOUND), change=replace(change, ratio=1 / 1.31, low=1 / 1.34, high=1 / 1.28))
    assert "31 % slower (28 to 34 %)" in answer_line(wide)
    levels = [*narrow.levels[:-1], replace(narrow.levels[-1], low=1 / 1.3123, high=1 / 1.3071)]
    assert "30.7 to 31.2 % slower" in entry_grid(replace(narrow, levels=levels)).rows[-1]
    exact = replace(report_of(FOUND), change=replace(change, ratio=0.5, low=0.5, high=0.5))
    assert "2.00x slower" in answer_line(exact)


def test_several_loads_have_no_value_in_a_unit() -> None:
    record, summary, run = made_bisection(FOUND)
    assert [column.title for column in entry_grid(bisected(record, summary, run)).columns][2] == "Wall time"
    twice = [replace(cell, id=f"{cell.id}-2", load="m") for cell in summary.cells]
    starts = [replace(start, cells=[*start.cells, *(f"{cell}-2" for cell in start.cells)]) for start in record.starts]
    report = bisected(replace(record, starts=starts), replace(summary, cells=[*summary.cells, *twice]), run)
    assert "Wall time" not in [column.title for column in entry_grid(report).columns] and report.loads == 2
    assert "2 loads" in page_of(report)


def test_the_page_has_the_chart_and_is_html() -> None:
    report = report_of(FOUND)
    page: list[Any] = bisect_page(report)
    (chart,) = [element for element in page if isinstance(element, Chart)]
    assert [trace["x"] for trace in chart.figure["data"]] == [[1, 3], [4, 5]] and len(chart.body) == 4
    assert "b3" in html.render_page(page, "t", ["t"])
    evil = replace(ASKED, values=["<b>x", "y", "z"], images=None, variable="x")
    shown = html.render_page(bisect_page(bisected(*made_bisection([(0, 1.0), (2, 1.0)], evil))), "t", ["t"])
    assert "<b>x" not in shown


def test_a_change_and_its_interval_have_one_unit() -> None:
    change = report_of(FOUND).change
    assert change is not None
    wide = replace(report_of(FOUND), change=replace(change, ratio=1 / 1.87, low=1 / 2.07, high=1 / 1.68))
    assert "%" not in answer_line(wide) and "1.87x" in answer_line(wide)
    unknown = format_range(1 / 2.5, 1.1)
    assert "%" not in unknown and "2.50x" in unknown and "1.10x" in unknown
