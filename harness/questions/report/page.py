"""The page of a run as elements. What is added to `run_page` is added to `html_page.py` as well."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from harness.base import units
from harness.base.command_line import command_line
from harness.base.summary import (
    Reason,
    Summary,
    sentence,
)
from harness.questions.agents import turn_tables
from harness.questions.capacity.decide import CapacityReport, read_capacity
from harness.questions.capacity.page import capacity_lines
from harness.questions.quick.decide import QuickLevel, quick_notes, read_levels
from harness.questions.quick.page import LEGEND, lead, levels_grid
from harness.questions.report.headline import run_answer
from harness.questions.same_answers.page import same_answers_page
from harness.questions.soak import soak_tables
from harness.questions.tune.page import answer_line, tune_elements, tune_question
from harness.questions.tune.proof import read_answered
from harness.questions.tune.record import TuneReport
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.comparisons import verdicts
from harness.report.elements import (
    LIMITED,
    Bullet,
    Bullets,
    Element,
    Fold,
    Paragraph,
    with_names,
)
from harness.report.results_table import machine_table, results_table, schedule_table, time_table
from harness.report.sections import checks, simulated_note
from harness.report.terminal import print_page

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
        *turn_tables(summary),
        *soak_tables(summary),
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
    answers = [run_answer(summary, run)] if capacity is None else capacity_lines(capacity)
    answers = answers if tune is None else [answer_line(tune)]
    if levels and summary.valid and run.status == "valid":
        answers = [lead(levels, is_known=not quick_notes(summary))]
    return [
        Paragraph(summary.question if tune is None else tune_question(tune), "title"),
        *(Paragraph(line, "lead") for line in answers),
        *simulated_note(summary.simulated),
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


def run_verdicts(summary: Summary, run: Run, hint: str) -> list[Element]:
    """The verdicts of a run, and which rows have none."""
    other = sentences.other_work_sentence(summary, run)
    found = [] if summary.comparison is None else verdicts(summary.comparison, hint)
    return [*found, *([Paragraph(other, "fine")] if other else [])]


def failures(summary: Summary) -> list[Element]:
    items = [Bullet(text) for text in sentences.failure_sentences(summary)]
    return [Paragraph("Why requests failed", "heading"), Bullets(items)] if items else []


def loads(run: Run) -> list[Element]:
    items = [Bullet(text, code=name) for name, text in sentences.load_descriptions(run).items()]
    return [Fold("Each load", [Bullets(items)])] if items else []


def print_report(summary: Summary, run: Run, folder: Path, console: Console, *, explain: bool = False) -> None:
    """Print the report of a run; `explain` adds what each column means."""
    print_page(report_page(summary, run, folder, explain=explain), console, explain=explain)
    console.print()
    page = folder / "report.html"
    again = command_line("harness", "report", folder, "--format", "html")
    where = str(page) if page.exists() else f"`{again} > report.html` writes it"
    console.print(Text("Report: ", "bold") + Text(where, no_wrap=True, overflow="ignore"), soft_wrap=True)


def report_page(summary: Summary, run: Run, folder: Path, *, explain: bool = False) -> list[Element]:
    """Return the page of a run, with what its folder has of a search or a quick run."""
    levels = read_levels(folder, summary)
    return run_page(summary, run, read_capacity(folder), read_answered(folder), levels, explain=explain)
