"""What `harness compare` says: the verdicts of sides, their values, and what else differs between them."""

from collections.abc import Sequence
from typing import Any

from harness.base.reason import sentence
from harness.base.units import count
from harness.numbers.comparison import Comparison, Difference
from harness.questions.crossover.speculation import short_answers
from harness.questions.same_answers.page import answers_case, answers_sentence, same_answers_page
from harness.report import sentences, words
from harness.report.charts.compared import format_side, row_name, side_charts, side_titles
from harness.report.comparisons import _verdict_cells, gates_answer, largest_effect, verdict_grid, verdicts
from harness.report.elements import (
    Element,
    Grid,
    Paragraph,
    TableColumn,
    plain_grid,
)
from harness.report.junit import check_case, difference_properties, document, verdict_cases
from harness.report.sections import checks, simulated_note
from harness.report.verdict_text import describe_change

_MAX_VALUE_CHARS = 300  # that are shown of a value; JSON has all of it


def comparison_page(comparison: Comparison) -> list[Element]:
    """The page of `harness compare`."""
    return [
        Paragraph(comparison_answer(comparison), "lead"),
        *simulated_note(comparison.simulated),
        compared_grid(comparison),
        *sides_sentence(comparison),
        *side_charts(comparison),
        *(Paragraph(f"Warning: {sentence(note)}", "warning") for note in comparison.notes),
        *verdicts(comparison, "the table has all of them"),
        *same_answers_page(comparison.same_answers),
        *([Paragraph("Checks", "heading"), *checks(comparison.checks)] if comparison.checks else []),
        *(differences(comparison.differences, comparison.sides) if comparison.sides else []),
    ]


def compared_grid(comparison: Comparison) -> Grid:
    """The values of both sides, their ratio with its interval, and the verdict; on a phone as cards."""
    before, after = side_titles(comparison)
    titles = {
        "load": "Row", "by": "By", "before": before, "after": after, "ratio": "Speed, after / before",
        "interval": "95\u00a0% interval",
        "samples": "Samples", "p": "p", "verdict": "Verdict",
    }  # fmt: skip
    groups: dict[str, Any] = {"load": "name", "by": "text", "verdict": "verdict"}
    rows = []
    for verdict in comparison.verdicts:
        _, _, samples, by, speed, interval, p, word = _verdict_cells(verdict)
        values = [format_side(verdict, side_values) for side_values in reversed(verdict.values)]
        rows.append([row_name(verdict, (before, after)), by, *values, speed, interval, samples, p, word])
    return Grid(
        columns=[TableColumn(key, title, group=groups.get(key, "work")) for key, title in titles.items()],
        rows=rows,
        styles=verdict_grid(comparison.verdicts).styles,
        below=[""] * len(rows),
    )


def sides_sentence(comparison: Comparison) -> list[Element]:
    """Which runs the two columns of values are of, where these do not have their names."""
    names = comparison.sides
    if len(names) < 2 or side_titles(comparison)[0] == names[0]:
        return []
    return [Paragraph(f"Before: {names[0]} (the baseline). After: {', '.join(names[1:])}.", "fine")]


def differences(items: Sequence[Difference], sides: Sequence[str]) -> list[Element]:
    """The keys in which manifests differ, with the value of each side."""
    if not items:
        return [Paragraph(f"Nothing that is recorded differs between {' and '.join(sides)}.", "fine")]
    rows = [[difference.key, *map(_shorten, difference.values)] for difference in items]
    return [plain_grid(["What differs", *sides], rows)]


def _shorten(value: str) -> str:
    """A value on one line, with a limit of its length."""
    line = words.one_line(value)
    return line if len(line) <= _MAX_VALUE_CHARS else f"{line[: _MAX_VALUE_CHARS - 3]}..."


def comparison_answer(comparison: Comparison) -> str:
    """The answer of `harness compare`: whether a side is slower than the first; and other versions of the engine."""
    versions = [difference for difference in comparison.differences if difference.key.endswith("startup.version")]
    shown = [f"The engine's versions differ: {', '.join(difference.values)}." for difference in versions[:1]]
    answers = map(answers_sentence, comparison.same_answers)
    verdicts = [_comparison_answer(comparison)] if comparison.verdicts else []
    return " ".join([*map(sentence, short_answers(comparison.answers)), *verdicts, *answers, *shown])


def _comparison_answer(comparison: Comparison) -> str:
    """What the worst verdict shows of a slowdown, and how many others there are."""
    verdicts = comparison.verdicts
    faster = None if comparison.answers else largest_effect(verdicts, "faster")
    shown = "" if faster is None else f"{faster.side} is {describe_change(faster)}. "
    failed = [check.check for check in comparison.checks if check.status == "failed"]
    checks = f" {count(len(failed), 'check')} failed: {', '.join(failed)}." if failed else ""
    return f"{shown}{gates_answer(verdicts)}{checks}"


def comparison_xml(comparison: Comparison) -> str:
    """The XML of a comparison: a case for each check and verdict; the sides and their differences are properties."""
    properties = {"method": sentences.method_sentence(comparison)}
    if comparison.simulated:
        properties["simulated"] = words.SIMULATED
    for number, name in enumerate(comparison.sides):
        properties["baseline" if number == 0 else f"side.{number}"] = name
    properties |= difference_properties(comparison.sides, comparison.differences)
    cases = [*map(check_case, comparison.checks), *verdict_cases(comparison)]
    cases += [answers_case(answers, within=False) for answers in comparison.same_answers]
    return document("compare", cases, properties)
