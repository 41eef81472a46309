"""The page of a run: one list of elements for terminal, Markdown and HTML."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from harness.base import units
from harness.base.command_line import command_line
from harness.base.reason import Reason, sentence
from harness.numbers.summarize import Summarized
from harness.numbers.summary import Summary
from harness.questions.agents.agent_turns import turn_tables
from harness.questions.agents.replay import replay_elements
from harness.questions.bisect.bisected import BisectReport, read_bisected
from harness.questions.bisect.page import answer_line as bisect_line
from harness.questions.bisect.page import bisect_elements, bisect_question
from harness.questions.capacity.page import capacity_lines
from harness.questions.capacity.record import CapacityReport, read_capacity
from harness.questions.crossover.page import speculation_tables
from harness.questions.isolation import isolation_elements
from harness.questions.mlperf_edge import edge_tables
from harness.questions.quick.combinations_page import combination_elements, lead_of_combinations
from harness.questions.quick.decide import CombinationNumbers, QuickLevel, quick_notes
from harness.questions.quick.page import LEGEND, lead, levels_grid
from harness.questions.quick.record import read_levels
from harness.questions.report import html_parts
from harness.questions.report.headline import run_answer
from harness.questions.same_answers.page import same_answers_page
from harness.questions.soak import soak_tables
from harness.questions.startup import startup_facts, startup_tables, startup_tiles
from harness.questions.tune.page import answer_line, tune_elements, tune_question
from harness.questions.tune.proof import read_answered
from harness.questions.tune.record import TuneReport
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.charts.data import ChartData, chart_data, read_chart_data
from harness.report.comparisons import verdict_grid, verdicts
from harness.report.elements import (
    LIMITED,
    Bullet,
    Bullets,
    Chart,
    Element,
    Fold,
    Grid,
    Paragraph,
    Section,
    Sides,
    Tile,
    Tiles,
)
from harness.report.html import render_page
from harness.report.results_table import machine_table, results_table, schedule_table, time_table
from harness.report.sections import checks, simulated_note
from harness.report.terminal import print_page

_RUN_HINT = "with --explain"
_SHORT_TEXT = 400  # characters
_REASONS = 4  # why a run is INVALID: so many are not folded
# Notes that are not folded: results of a sweep, what a container may do, answers that say nothing, missing samples.
_SHOWN = (
    "setting_failed", "host_access", "answers_cut", "answers_guessed", "answers_wrong", "telemetry_elsewhere",
    "telemetry_lost", "telemetry_connection_lost", "telemetry_other_machine", "kernel_event",
    "unreadable_samples", "telemetry_rejected",
)  # fmt: skip


class Searched(NamedTuple):
    """What a run directory has of a search or of `harness quick`."""

    capacity: CapacityReport | None = None
    tune: TuneReport | None = None
    bisect: BisectReport | None = None
    levels: Sequence[QuickLevel] = ()
    combinations: Sequence[CombinationNumbers] = ()

    @property
    def is_of_settings(self) -> bool:
        """Whether settings or builds were searched, whose page has their starts."""
        return self.tune is not None or self.bisect is not None


NO_SEARCH = Searched()


def read_searched(folder: Path, summary: Summary, run: Run) -> Searched:
    bisection = read_bisected(folder, summary, run)
    return Searched(read_capacity(folder), read_answered(folder), bisection, *read_levels(folder, summary))


def run_page(
    summary: Summary,
    run: Run,
    searched: Searched = NO_SEARCH,
    *,
    data: ChartData | None = None,
    explain: bool = False,
) -> list[Element]:
    """The page of a run: the answer, the findings, the main table, the verdicts, and what else is known.

    `data`: for the HTML page, which also has charts, every cell, and what ran. `explain`: with the host metrics.
    """
    summary = shown_summary(summary, is_searched=searched.is_of_settings)
    charts = (
        []
        if data is None
        else html_parts.answer_charts(summary, run, searched.capacity, searched.tune, searched.bisect)
    )
    first_charts, others = (charts[:1], charts[1:]) if _is_sure(summary, run) else ([], charts)
    is_described = data is not None and len(summary.rows) <= html_parts.FEW
    described = sentences.load_descriptions(run) if is_described else {}
    results = levels_grid(searched.levels) if searched.levels else results_table(summary, run, described)
    details = [
        *edge_tables(summary),
        *speculation_tables(summary),
        *turn_tables(summary),
        *soak_tables(summary),
        *schedule_table(summary, run),
        *time_table(summary),
    ]
    machine = machine_table(summary) if explain or data is not None else []
    page: list[Element] = [
        _answer_section(summary, run, searched, results, first_charts, charted=data is not None),
        Section("results", "Results", [
            *(combination_elements(searched.combinations) if searched.combinations else []),
            *startup_tables(summary),
            *([results] if results.rows else []),
            *([Paragraph(LEGEND, "fine")] if searched.levels else []),
            design(summary, run),
            *isolation_elements(summary),
            *([] if searched.is_of_settings else _variables_of_servers(run)),
            *([] if data is None or searched.bisect is not None else html_parts.servers_differ(run)),
        ]),
        Section("replay", "Replay of the trace", replay_elements(summary), is_titled=True),
        _verdicts(summary, run, charted=data is not None),
        Section("details", "Details", html_parts.folded_details(details, machine) if data else [*details, *machine]),
        Section("errors", "Errors", failures(summary) or ([_NO_ERRORS] if data is not None else [])),
        Section("checks", "Checks", checks(summary.checks), is_titled=True),
        Section("loads", "Loads", [] if described else loads(run)),
    ]  # fmt: skip
    if data is not None:
        cells = html_parts.cells_table(summary, results)
        page += [
            html_parts.charts_section(summary, run, data, others),
            html_parts.cells_section(summary, cells),
            html_parts.method_section([results, cells, *details, *machine]),
            *html_parts.what_ran(run),
        ]
    return page


_NO_ERRORS = Paragraph("None: no measured request failed.", "fine")


def _is_sure(summary: Summary, run: Run) -> bool:
    """Whether the numbers can be believed at first sight, as tiles and as the first chart."""
    return summary.valid is not False and run.status not in ("running", "interrupted", "failed")


def _answer_section(
    summary: Summary, run: Run, searched: Searched, results: Grid, first_charts: Sequence[Chart], *, charted: bool
) -> Section:
    """The answer, whether it counts, and the findings; with the chart that shows it."""
    tiles: list[Tile] = []
    if charted and _is_sure(summary, run) and not searched.is_of_settings:
        tiles = html_parts.quick_tiles(searched.levels) if searched.levels else html_parts.tiles(summary, run)
        tiles = startup_tiles(summary.starts) or tiles
    numbers = [*itertools.chain(*results.rows), *(tile.value for tile in tiles)]
    return Section("answer", "", [
        *_what_if(summary.what_if),
        *answer(summary, run, searched),
        *([Tiles(tiles)] if tiles else []),
        *_facts(summary),
        *state(summary, run, numbers),
        *([] if searched.tune is None else tune_elements(searched.tune)),
        *([] if searched.bisect is None else bisect_elements(searched.bisect)),
        Sides(findings(summary), first_charts),
    ])  # fmt: skip


def _facts(summary: Summary) -> list[Element]:
    """What the answer about starts rests on."""
    _, facts = startup_facts(summary.answers)
    return [Bullets([Bullet(sentence(fact), "fine") for fact in facts])] if facts else []


def _verdicts(summary: Summary, run: Run, *, charted: bool) -> Section:
    """The verdicts; the HTML page has their intervals and p-values too."""
    same = same_answers_page(summary.same_answers)
    if summary.comparison is None:
        return Section("verdicts", "Verdicts", same)
    folded = Fold(
        "Confidence: intervals, p-values and what would settle it", [verdict_grid(summary.comparison.verdicts)]
    )
    elements = run_verdicts(summary, run, "" if charted else _RUN_HINT)
    return Section("verdicts", "Verdicts", [*elements, *([folded] if charted else []), *same], is_titled=True)


def shown_summary(summary: Summary, *, is_searched: bool) -> Summary:
    """What a page shows of a summary: of a search of settings or builds no findings, which the search has tried or
    shows by side, and neither settings that failed nor starts that do not count, which its history has.
    """
    if not is_searched:
        return summary
    notes = [note for note in summary.notes if note.code != "setting_failed"]
    rows = [row for row in summary.rows if row.failed is None] or summary.rows
    cells = [cell for cell in summary.cells if cell.failed is None]
    # A search plans no cells: it starts what its results so far ask for.
    reasons = [reason for reason in summary.reasons if reason.cell is None and reason.code != "cells_missing"]
    shown = replace(summary, findings=None, hardware_shares=[], notes=notes, rows=rows, cells=cells)
    return replace(shown, reasons=reasons, valid=not reasons)


def answer(summary: Summary, run: Run, searched: Searched) -> list[Element]:
    """The question and its answer."""
    question = summary.question if searched.tune is None else tune_question(searched.tune)
    question = question if searched.bisect is None else bisect_question(searched.bisect)
    return [
        Paragraph(question, "title"),
        *(Paragraph(line, "lead") for line in _answer_lines(summary, run, searched)),
        *simulated_note(summary.simulated),
    ]


def _answer_lines(summary: Summary, run: Run, searched: Searched) -> list[str]:
    """The answer of `harness quick`, of a search, or of the run."""
    if searched.levels and summary.valid and run.status == "valid":
        return [lead(searched.levels, is_known=not quick_notes(summary))]
    if searched.combinations and summary.valid and run.status == "valid":
        return [lead_of_combinations(searched.combinations)]
    if searched.tune is not None:
        return [answer_line(searched.tune)]
    if searched.bisect is not None:
        return [bisect_line(searched.bisect)]
    return [run_answer(summary, run)] if searched.capacity is None else capacity_lines(searched.capacity)


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
        sentences.state(summary, run, sign),
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


def _variables_of_servers(run: Run) -> list[Element]:
    """The variables in which the servers of a run differ, where they fit into a few lines."""
    servers = run.scenario.servers
    names = {name for server in servers.values() for name in server.variables}
    values = {name: [server.variables.get(name) for server in servers.values()] for name in sorted(names)}
    differing = [name for name, given in values.items() if any(value != given[0] for value in given[1:])]
    if not differing:
        return []
    texts = []
    for name, server in servers.items():
        own = {key: server.variables.get(key) for key in differing}
        given = [
            f"{key} {words.format_setting(value)}" for key, value in own.items() if value not in (None, "", [], {})
        ]
        texts.append(f"{name} has {', '.join(given) or 'the values of its template'}")
    text = f"The servers differ in their variables: {'; '.join(texts)}."
    return [Paragraph(text, "fine")] if len(text) <= _SHORT_TEXT else []


def findings(summary: Summary) -> list[Element]:
    """How near the hardware the run is, why it is slower than it could be, and what to change."""
    items = [
        Bullet(sentences.finding_sentence(finding), "inconclusive", parts=list(sentences.finding_parts(finding)))
        for finding in summary.findings or ()
    ]
    codes = [finding.code for finding in summary.findings or ()][1:]
    more = f"{units.count(len(codes), 'more finding')}: {', '.join(codes)}"
    none = summary.findings is not None and not items and summary.valid
    requests = [row.pooled.succeeded for row in summary.rows if row.failed is None]
    return [
        *(Paragraph(sentence(reason)) for reason in summary.hardware_shares),
        *([sentences.no_findings(requests, sentences.shown_problems(summary))] if none else []),
        *([Paragraph("Findings, the worst first", "heading"), *_some(items, 1, more, "findings")] if items else []),
    ]


def _what_if(answers: Sequence[Reason]) -> list[Element]:
    """The answers for the SLOs of `report --check` of a capacity search."""
    items = [Bullet(sentence(answer)) for answer in answers]
    return [Paragraph("What if", "heading"), Bullets(items)] if items else []


def run_verdicts(summary: Summary, run: Run, hint: str) -> list[Element]:
    """The verdicts of a run, and which rows have none."""
    other = sentences.other_work_sentence(summary, run)
    elements = [] if summary.comparison is None else verdicts(summary.comparison, hint)
    return [*elements, *([Paragraph(other, "fine")] if other else [])]


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
    command = command_line("harness", "report", folder, "--format", "html")
    where = str(page) if page.exists() else f"`{command} > report.html` writes it"
    console.print(Text("Report: ", "bold") + Text(where, no_wrap=True, overflow="ignore"), soft_wrap=True)


def report_page(summary: Summary, run: Run, folder: Path, *, explain: bool = False) -> list[Element]:
    """Return the page of a run, with what its folder has of a search or a quick run."""
    return run_page(summary, run, read_searched(folder, summary, run), explain=explain)


def render_html(summary: Summary, run: Run, data: ChartData, searched: Searched = NO_SEARCH) -> str:
    """Return the HTML page of a run."""
    page = run_page(summary, run, searched, data=data)
    return render_page(page, f"{summary.question} · {run.id}", [run.scenario_name, run.id])


def run_html(folder: Path, run: Run, summary: Summary, summarized: Summarized | None = None) -> str:
    """Return the HTML page of the run in `folder`. `summarized`: the counts of which the summary was made; None: the
    records are read for them. Raises HarnessError.
    """
    data = read_chart_data(folder) if summarized is None else chart_data(summarized.data)
    return render_html(summary, run, data, read_searched(folder, summary, run))
