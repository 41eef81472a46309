"""The HTML page of a run: its elements, with tiles and charts."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness.base import units
from harness.base.metrics import LIVE
from harness.base.summary import Distribution, Row, Summary, sentence
from harness.numbers.comparable import server_differences
from harness.numbers.summarize import Summarized
from harness.questions.agents import turn_charts, turn_tables
from harness.questions.capacity.chart import attainment_chart
from harness.questions.capacity.decide import CapacityReport, read_capacity
from harness.questions.compare.page import differences
from harness.questions.crossover.chart import crossover_charts
from harness.questions.quick.decide import QuickLevel, read_levels
from harness.questions.quick.page import LEGEND, levels_grid
from harness.questions.report import page
from harness.questions.same_answers.page import answers_charts, same_answers_page
from harness.questions.soak import soak_charts, soak_tables
from harness.questions.tune.page import tune_chart, tune_elements
from harness.questions.tune.proof import read_answered
from harness.questions.tune.record import TuneReport
from harness.records.manifest import Run, ServedBy
from harness.report import results_table, sentences
from harness.report.charts import figures, row_keys
from harness.report.charts.data import ChartData, chart_data, read_chart_data
from harness.report.charts.sweeps import sweep_charts
from harness.report.charts.timeline import TimelineEvent, startup_chart, startup_facts, timeline_events, timeline_figure
from harness.report.comparisons import short_row_names, verdict_grid
from harness.report.elements import LIMITED, Chart, Element, Fold, Grid, with_names
from harness.report.html import render_template
from harness.report.sections import checks


def render_run(folder: Path, run: Run, summary: Summary, summarized: Summarized | None = None) -> str:
    """Return the page of the run in `folder`. `summarized`: the counts of which the summary was made; None: the records
    are read for them. Raises HarnessError.
    """
    data = read_chart_data(folder) if summarized is None else chart_data(summarized.data)
    return render(summary, run, data, read_capacity(folder), read_answered(folder), read_levels(folder, summary))


def render(
    summary: Summary,
    run: Run,
    data: ChartData,
    capacity: CapacityReport | None = None,
    tune: TuneReport | None = None,
    levels: Sequence[QuickLevel] = (),
) -> str:
    """Return the page. `capacity`, `tune`: the result of such a search. `levels`: of a quick run."""
    summary = page.shown_summary(summary, tune)
    bounds, named = figures.slo_bounds(summary), partial(with_names, names=page.load_names(run, tune))
    answers, others = (
        [named(figures.with_slo_lines(chart, bounds)) for chart in charts if not chart.empty]
        for charts in (_answer_charts(summary, run, capacity, tune), _charts(summary, data))
    )
    is_sure = summary.valid is not False and run.status not in ("running", "interrupted", "failed")
    starts = startup_chart(run)
    drawn = {chart.id: chart.figure for chart in (*answers, *others, starts) if not chart.empty}
    cells = {cell.id: cell for cell in summary.cells}
    events = {line.cell: timeline_events(line, cells.get(line.cell), run.ran.get(line.cell)) for line in data.timelines}
    loads = sentences.load_descriptions(run) if len(summary.rows) <= _FEW else {}
    results = levels_grid(levels) if levels else results_table.results_table(summary, run, loads)
    shown_tiles = (quick_tiles(levels) if levels else tiles(summary, run)) if is_sure and tune is None else []
    numbers = itertools.chain(*results.rows, (value for _, value, _ in shown_tiles))
    return render_template(
        "report.html.j2",
        drawn,
        {line.cell: timeline_figure(line, events[line.cell]) for line in data.timelines},
        summary=summary,
        run=run,
        answer=named(page.answer(summary, run, capacity, tune, levels)),
        tiles=named(shown_tiles),
        state=named([*page.state(summary, run, numbers), *([] if tune is None else tune_elements(tune))]),
        findings=named(page.findings(summary)),
        first_charts=answers[:1] if is_sure else [],
        verdicts=named(_verdicts(summary, run)),
        design=[page.design(summary, run), *(page.loads(run) if len(summary.rows) > _FEW else [])],
        results=named(results),
        quick_legend=LEGEND if levels else "",
        details=named(_details(summary, run)),
        fold_long=fold_long,
        machine=named(results_table.machine_table(summary)),
        checks=named(checks(summary.checks)),
        failures=named(page.failures(summary)),
        errors=results_table.format_errors,
        sentence=sentence,
        startup_facts=startup_facts,
        units=units,
        answer_charts=answers[is_sure:],
        charts=others,
        starts=starts,
        row_keys=named(row_keys(summary)),
        timelines=list(events),
        timeline_first=_first_timeline(events),
        events=events,
        differences=_server_differences(run),
        served=_distinct_servers(run),
    )


def _details(summary: Summary, run: Run) -> list[Grid]:
    tables = results_table.time_table(summary), results_table.schedule_table(summary, run)
    return [*turn_tables(summary), *soak_tables(summary), *itertools.chain(*tables)]


def _answer_charts(summary: Summary, run: Run, capacity: CapacityReport | None, tune: TuneReport | None) -> list[Chart]:
    """The charts of what the run varied, the one that shows its answer first."""
    throughput = figures.throughput_chart(summary, run)
    found = [
        *([] if capacity is None else [attainment_chart(capacity)]),
        *([] if tune is None else [tune_chart(tune)]),
        *answers_charts(summary),
        *turn_charts(summary),
        *soak_charts(summary),
        *(crossover_charts(summary, run) or sweep_charts(summary, run) if tune is None else []),
        throughput,
    ]
    rows = [figures.rows_chart(summary)] if all(chart.empty for chart in found) else []
    return [*found, *rows, figures.first_token_chart(summary, run), figures.tradeoff_chart(summary, run)]


def _charts(summary: Summary, data: ChartData) -> list[Chart]:
    """The charts of single requests."""
    distributions = (figures.distribution_chart(summary, data, column) for column in LIVE)
    return [*distributions, figures.request_chart(summary, data)]


def tiles(summary: Summary, run: Run) -> list[tuple[str, str, str]]:
    """The three numbers that a reader looks for first: title, value with unit, and the row that has it.

    What one user gets is all of one row, the fastest of those with the fewest requests in flight. What all get together
    is of the row that has the most.
    """
    rows = [row for row in summary.rows if row.failed is None and row.invalid is None]
    levels = {row.name: sentences.in_flight(row, run) for row in rows}
    fewest = min((level for level in levels.values() if level is not None), default=None)
    lowest = [row for row in rows if levels[row.name] == fewest]
    one, names, found = min(lowest, key=_time_s, default=None), short_row_names(rows), []
    for title, unit, field, is_of_one, of in _TILES:
        known = [(value, row) for row in rows if (row is one or not is_of_one) and (value := of(row))]
        if not known:
            continue
        value, row = max(known, key=lambda each: each[0])
        number, level = len(lowest if is_of_one else known), levels[row.name]
        if title == "One user gets" and fewest != 1:
            title = "Each user gets" if fewest is None else f"Each of {fewest:,} gets"
        if title == "All together" and level is not None and level > 1 and len(rows) > 1:
            title = f"{level:,} together"
        limited, best = LIMITED if field in row.client_limited else "", f", the best of {number}" if number > 1 else ""
        found.append((title, f"{units.figures(value)}{limited} {unit}", f"{names.get(row.name, row.name)}{best}"))
    return found[:_SHOWN_TILES]


def _time_s(row: Row) -> float:
    """What a user waits for: the time of a token, else of an answer."""
    return _middle(row.pooled.tpot) or _middle(row.pooled.e2e) or math.inf


def quick_tiles(levels: Sequence[QuickLevel]) -> list[tuple[str, str, str]]:
    """The three numbers of a quick run, as in its table."""
    one, most = levels[0], max(levels, key=lambda level: level.tok_s or 0.0)
    found = [
        ("One user gets", one.user_tok_s or one.answer_tok_s, "tok/s", one),
        ("All together", most.tok_s, "tok/s", most),
        ("First token after", one.ttft_ms, "ms", one),
    ]
    return [
        (title, f"{units.figures(value)} {unit}", units.count(level.users, "user"))
        for title, value, unit, level in found
        if value is not None
    ]


def fold_long(tables: Sequence[Grid]) -> list[Element]:
    """The tables of details; those of many rows are folded."""
    return [Fold(one.title, [replace(one, title="")]) if len(one.rows) > _FEW else one for one in tables]


def _middle(sample: Distribution) -> float | None:
    """The median, or the mean of few requests."""
    return sample.mean if sample.p50 is None else sample.p50


def _middle_ms(sample: Distribution) -> float | None:
    return None if (middle_s := _middle(sample)) is None else 1000 * middle_s


_FEW = 8  # rows, each of which the main table describes


_SHOWN_TILES = 3


def _verdicts(summary: Summary, run: Run) -> list[Element]:
    """The verdicts with their intervals and p-values."""
    if summary.comparison is None:
        return same_answers_page(summary.same_answers)
    found = page.run_verdicts(summary, run, "")
    confidence = verdict_grid(summary.comparison.verdicts)
    folded = Fold("Confidence: intervals, p-values and what would settle it", [confidence])
    return [*found, folded, *same_answers_page(summary.same_answers)]


def _server_differences(run: Run) -> list[Element]:
    """What differs between the servers of a run; none with one server."""
    if len(run.scenario.servers) < 2:
        return []
    found = server_differences(run)
    title = f"What differs between the servers: {units.count(len(found), 'thing')}"
    return [Fold(title, differences(found, list(run.scenario.servers)))]


def _first_timeline(events: dict[str, list[TimelineEvent]]) -> str:
    """The cell whose timeline is shown first: one where something failed, else the last one."""
    failed = [cell for cell, of_cell in events.items() if any(event.bad for event in of_cell)]
    return next(iter([*failed, *reversed(events)]), "")


def _distinct_servers(run: Run) -> dict[str, list[ServedBy]]:
    """By server what served its cells; several entries if its cells differ."""
    distinct: dict[str, dict[bytes, ServedBy]] = {}
    for cell in run.served:
        # Each start has its own time and port, and the engine measures anew.
        settings = replace(cell.served_by, phases=[], url="", container=None, gateway=None, startup=None, effective={})
        distinct.setdefault(cell.server, {}).setdefault(msgspec.json.encode(settings), cell.served_by)
    return {server: list(served.values()) for server, served in distinct.items()}


# Title, unit, field of Numbers, whether it is of one user, value.
_TILES: tuple[tuple[str, str, str, bool, Callable[[Row], float | None]], ...] = (
    ("One user gets", "tok/s", "tpot", True, lambda row: 1 / tpot_s if (tpot_s := _middle(row.pooled.tpot)) else None),
    ("All together", "tok/s", "output_tok_s", False, lambda row: row.pooled.output_tok_s),
    ("First token after", "ms", "ttft", True, lambda row: _middle_ms(row.pooled.ttft)),
    ("Prompt tokens", "tok/s", "input_tok_s", False, lambda row: row.pooled.input_tok_s),
    ("Answer after", "ms", "e2e", True, lambda row: _middle_ms(row.pooled.e2e)),
    ("Requests", "a second", "requests_per_s", False, lambda row: row.pooled.requests_per_s),
)  # fmt: skip
