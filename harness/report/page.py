"""The pages of a run and of a comparison, as elements. To add something to every report, add it to `run_page`."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from harness.base import units
from harness.base.metrics import METRICS
from harness.base.summary import (
    CheckResult,
    Comparison,
    Difference,
    Reason,
    Summary,
    Verdict,
    evidence,
    sentence,
)
from harness.questions.capacity.decide import CapacityReport
from harness.questions.capacity.page import capacity_lines
from harness.questions.quick.decide import QuickLevel, quick_notes
from harness.questions.quick.page import LEGEND, lead, levels_grid
from harness.questions.same_answers.page import same_answers_page, trust_tables
from harness.questions.tune.page import TuneReport, answer_line, tune_elements, tune_question
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.charts.compared import format_side, row_name, side_charts, side_titles
from harness.report.elements import (
    LIMITED,
    Bullet,
    Bullets,
    Element,
    Fold,
    Grid,
    Paragraph,
    TableColumn,
    plain_grid,
    with_names,
)
from harness.report.table import machine_table, results_table, schedule_table, time_table
from harness.report.verdict_text import format_bounds, gate_word, shown_bounds, verdict_style

_MAX_VALUE_CHARS = 300  # that are shown of a value; JSON has all of it
_RUN_HINT = "--explain shows them"
_REASONS = 4  # why a run is INVALID: so many are not folded
# Notes that are not folded: results of a sweep, what a container may do, and answers that say nothing.
_SHOWN = ("setting_failed", "host_access", "answers_cut", "answers_guessed", "answers_wrong")


def run_page(
    summary: Summary,
    run: Run,
    capacity: CapacityReport | None = None,
    tune: TuneReport | None = None,
    levels: Sequence[QuickLevel] = (),
    *,
    explain: bool = False,
) -> list[Element]:
    """The page of a run: the answer, the findings, the main table, the verdicts, and what else is known.

    `capacity`: the result of a capacity search. `tune`: of a search of settings. `levels`: of a quick run. `explain`:
    with the host metrics.
    """
    summary = shown_summary(summary, tune)
    results = levels_grid(levels) if levels else results_table(summary, run)
    page = [
        *_what_if(summary.what_if),
        *answer(summary, run, capacity, tune, levels),
        *state(summary, run, itertools.chain(*results.rows)),
        *([] if tune is None else tune_elements(tune)),
        *findings(summary),
        results,
        *([Paragraph(LEGEND, "fine")] if levels else []),
        design(summary, run),
        *([Paragraph("Verdicts", "heading"), *run_verdicts(summary, run, _RUN_HINT)] if summary.comparison else []),
        *same_answers_page(summary.same_answers),
        *trust_tables(summary),
        *schedule_table(summary, run),
        *time_table(summary),
        *(machine_table(summary) if explain else []),
        *failures(summary),
        *checks(summary.checks),
        *loads(run),
    ]
    return with_names(page, load_names(run, tune))


def load_names(run: Run, tune: TuneReport | None) -> dict[str, str]:
    """What people read in place of the names of loads that the harness made."""
    return words.load_names(run, [] if tune is None else tune.levels)


def shown_summary(summary: Summary, tune: TuneReport | None) -> Summary:
    """What a page shows of a summary: of a search of settings no findings, whose actions it has tried, and neither
    settings that failed nor starts that do not count, which its history has. Its answer rests on the proof.
    """
    if tune is None:
        return summary
    notes = [note for note in summary.notes if note.code != "setting_failed"]
    rows = [row for row in summary.rows if row.failed is None] or summary.rows
    cells = [cell for cell in summary.cells if cell.failed is None]
    reasons = [reason for reason in summary.reasons if reason.cell is None]
    shown = replace(summary, findings=None, hardware_shares=[], notes=notes, rows=rows, cells=cells)
    return replace(shown, reasons=reasons, valid=not reasons)


def answer(
    summary: Summary,
    run: Run,
    capacity: CapacityReport | None = None,
    tune: TuneReport | None = None,
    levels: Sequence[QuickLevel] = (),
) -> list[Element]:
    """The question and its answer."""
    answers = [sentences.run_answer(summary, run)] if capacity is None else capacity_lines(capacity)
    answers = answers if tune is None else [answer_line(tune)]
    if levels and summary.valid and run.status == "valid":
        answers = [lead(levels, is_known=not quick_notes(summary))]
    return [
        Paragraph(summary.question if tune is None else tune_question(tune), "title"),
        *(Paragraph(line, "lead") for line in answers),
        *_simulated(summary.simulated),
    ]


def state(summary: Summary, run: Run, shown_numbers: Iterable[str]) -> list[Element]:
    """Whether the run counts and its checks passed, in one word, and why not; the notes are folded.

    `shown_numbers`: of which the notes explain the sign, if one has it.
    """
    sign = LIMITED if any(LIMITED in number for number in shown_numbers) else ""
    reasons = [Bullet(text, "bad") for text in sentences.group_reasons(summary.reasons)]
    limits = list(filter(None, [sentences.client_limit_sentence(summary, sign)]))
    shown = [note for note in summary.notes if note.code in _SHOWN]
    others = [note for note in summary.notes if note not in shown]
    notes = [Bullet(text, "fine") for text in (*limits, *sentences.group_reasons(others))]
    return [
        Paragraph(*sentences.state_sentence(summary, run)),
        *_some(reasons, _REASONS, f"{units.count(len(reasons) - _REASONS, 'more reason')}"),
        *([Bullets([Bullet(text, "bad") for text in sentences.group_reasons(shown)])] if shown else []),
        *(
            [Fold(sentences.notes_sentence(summary, len(notes), sign), [Bullets(notes)], "--explain shows the notes")]
            if notes
            else []
        ),
    ]


def _some(items: Sequence[Bullet], number: int, title: str, kind: Literal["findings", ""] = "") -> list[Element]:
    """A list of so many items; the others are folded."""
    shown: list[Element] = [Bullets(items[:number], kind)] if items else []
    return [*shown, Fold(title, [Bullets(items[number:], kind)], _RUN_HINT)] if len(items) > number else shown


def design(summary: Summary, run: Run) -> Paragraph:
    return Paragraph(f"{summary.scenario}, run {summary.run}. {sentences.design_sentence(run)}", "fine")


def findings(summary: Summary) -> list[Element]:
    """How near the hardware the run is, why it is slower than it could be, and what to change."""
    items = [
        Bullet(sentences.finding_sentence(each), "inconclusive", parts=list(sentences.finding_parts(each)))
        for each in summary.findings or ()
    ]
    codes = [each.code for each in summary.findings or ()][1:]
    more = f"{units.count(len(codes), 'more finding')}: {', '.join(codes)}"
    none = summary.findings is not None and not items and summary.valid
    requests = [row.pooled.succeeded for row in summary.rows if row.failed is None]
    return [
        *(Paragraph(sentence(reason)) for reason in summary.hardware_shares),
        *([Paragraph(*sentences.no_findings_sentence(requests, sentences.shown_problems(summary)))] if none else []),
        *([Paragraph("Findings, the worst first", "heading"), *_some(items, 1, more, "findings")] if items else []),
    ]


def _what_if(answers: Sequence[Reason]) -> list[Element]:
    """The answers for the SLOs of `report --check` of a capacity search."""
    items = [Bullet(sentence(answer)) for answer in answers]
    return [Paragraph("What if", "heading"), Bullets(items)] if items else []


def _simulated(simulated: bool) -> list[Element]:
    return [Paragraph(words.SIMULATED, "simulated")] if simulated else []


def verdicts(comparison: Comparison, hint: str) -> list[Element]:
    """The verdicts as sentences, some of many folded, and how they were reached."""
    items = [Bullet(text, word) for word, text in sentences.verdict_sentences(comparison.verdicts)]
    shown, hidden = items[: sentences.SHOWN], items[sentences.SHOWN :]
    elements: list[Element] = [Bullets(shown, "verdicts")] if shown else []
    if hidden:
        title = sentences.hidden_verdicts_text(item.style for item in hidden)
        elements.append(Fold(title, [Bullets(hidden, "verdicts")], hint))
    return [*elements, Paragraph(sentences.method_sentence(comparison), "fine")]


def run_verdicts(summary: Summary, run: Run, hint: str) -> list[Element]:
    """The verdicts of a run, and which rows have none."""
    other = sentences.other_work_sentence(summary, run)
    found = [] if summary.comparison is None else verdicts(summary.comparison, hint)
    return [*found, *([Paragraph(other, "fine")] if other else [])]


def failures(summary: Summary) -> list[Element]:
    items = [Bullet(text) for text in sentences.failure_sentences(summary)]
    return [Paragraph("Why requests failed", "heading"), Bullets(items)] if items else []


def checks(results: Sequence[CheckResult]) -> list[Element]:
    """Each check with its evidence."""
    items = [
        Bullet(evidence(result.evidence), result.status, words.CHECK_MARKS[result.status], result.check)
        for result in results
    ]
    return [Paragraph("Checks", "heading"), Bullets(items, "checks")] if items else []


def loads(run: Run) -> list[Element]:
    items = [Bullet(text, code=name) for name, text in sentences.load_descriptions(run).items()]
    return [Fold("Each load", [Bullets(items)])] if items else []


def comparison_page(comparison: Comparison) -> list[Element]:
    """The page of `harness compare`."""
    return [
        Paragraph(sentences.comparison_answer(comparison), "lead"),
        *_simulated(comparison.simulated),
        compared_grid(comparison),
        *sides_sentence(comparison),
        *side_charts(comparison),
        *(Paragraph(f"Warning: {sentence(note)}", "warning") for note in comparison.notes),
        *verdicts(comparison, "the table has all of them"),
        *same_answers_page(comparison.same_answers),
        *checks(comparison.checks),
        *(differences(comparison.differences, comparison.sides) if comparison.sides else []),
    ]


def verdict_grid(found: Sequence[Verdict]) -> Grid:
    """The intervals, p-values and words of verdicts."""
    head = ("Side", "Baseline", "Samples", "By", "Speed", "95 % interval", "p", "Verdict")
    return plain_grid(head, list(map(_verdict_cells, found)), [verdict_style(verdict) for verdict in found])


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    interval = format_bounds(*shown_bounds(verdict), lambda bound: units.factor(bound, 3))
    return (
        verdict.side,
        verdict.baseline,
        f"{verdict.n[0]} : {verdict.n[1]}",
        METRICS[verdict.metric].title,
        "n/a" if verdict.ratio is None else f"{units.factor(verdict.ratio, 3)}×",
        interval or ("not known" if verdict.reason == "interval_unknown" else "n/a"),
        "n/a" if verdict.p is None else "< 0.001" if verdict.p < 0.001 else f"{verdict.p:.3f}",
        gate_word(verdict),
    )


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
        values = [format_side(verdict, of) for of in reversed(verdict.values)]
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


def differences(found: Sequence[Difference], sides: Sequence[str]) -> list[Element]:
    """The keys in which manifests differ, with the value of each side."""
    if not found:
        return [Paragraph(f"Nothing that is recorded differs between {' and '.join(sides)}.", "fine")]
    rows = [[each.key, *map(_shorten, each.values)] for each in found]
    return [plain_grid(["What differs", *sides], rows)]


def _shorten(value: str) -> str:
    """A value on one line, with a limit of its length."""
    line = words.one_line(value)
    return line if len(line) <= _MAX_VALUE_CHARS else f"{line[: _MAX_VALUE_CHARS - 3]}..."
