"""What only the HTML page of a run has: tiles, charts, every cell, the meaning of each number, and what ran."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from harness.base import reason, units
from harness.base.measured import Distribution
from harness.base.metrics import LIVE
from harness.numbers.comparable import server_differences
from harness.numbers.summary import Row, Summary
from harness.questions.agents.agent_turns import turn_charts
from harness.questions.bisect.bisected import BisectReport
from harness.questions.bisect.chart import levels_chart
from harness.questions.capacity.chart import attainment_chart
from harness.questions.capacity.record import CapacityReport
from harness.questions.compare.page import differences
from harness.questions.crossover.chart import crossover_charts
from harness.questions.quick.decide import QuickLevel
from harness.questions.same_answers.page import answers_charts
from harness.questions.soak import soak_charts
from harness.questions.tune.page import tune_chart
from harness.questions.tune.record import TuneReport
from harness.records.manifest import Machine, Run, ServedBy
from harness.report import results_table, sentences
from harness.report.charts import figures, row_keys
from harness.report.charts.data import ChartData
from harness.report.charts.sweeps import sweep_charts
from harness.report.charts.timeline import startup_chart, startup_facts, timeline_events, timeline_figure
from harness.report.comparisons import short_row_names
from harness.report.elements import (
    LIMITED,
    Chart,
    Charts,
    Definitions,
    Element,
    Fact,
    Facts,
    Fold,
    Grid,
    Paragraph,
    Section,
    TableColumn,
    Tile,
    Timelines,
    Verbatim,
)

FEW = 8  # rows: the main table describes the load of each, and longer tables of details are folded
_SHOWN_TILES = 3


def tiles(summary: Summary, run: Run) -> list[Tile]:
    """The three numbers that a reader looks for first.

    What one user gets is all of one row, the fastest of those with the fewest requests in flight. What all get together
    is of the row that has the most.
    """
    rows = [row for row in summary.rows if row.failed is None and row.invalid is None]
    levels = {row.name: sentences.in_flight(row, run) for row in rows}
    fewest = min((level for level in levels.values() if level is not None), default=None)
    lowest = [row for row in rows if levels[row.name] == fewest]
    lowest_row, names, shown = min(lowest, key=_time_s, default=None), short_row_names(rows), []
    for title, unit, field, is_single, get_value in _TILES:
        values = [(value, row) for row in rows if (row is lowest_row or not is_single) and (value := get_value(row))]
        if not values:
            continue
        value, row = max(values, key=lambda pair: pair[0])
        number, level = len(lowest if is_single else values), levels[row.name]
        if field == "tpot" and fewest != 1:
            title = "Each user gets" if fewest is None else f"Each of {fewest:,} gets"
        if field == "output_tok_s" and level is not None and level > 1 and len(rows) > 1:
            title = f"{level:,} together"
        limited, best = LIMITED if field in row.client_limited else "", f", the best of {number}" if number > 1 else ""
        shown.append(Tile(title, f"{units.figures(value)}{limited} {unit}", f"{names.get(row.name, row.name)}{best}"))
    return shown[:_SHOWN_TILES]


def quick_tiles(levels: Sequence[QuickLevel]) -> list[Tile]:
    """The three numbers of a quick run, as in its table."""
    lowest, most = levels[0], max(levels, key=lambda level: level.tok_s or 0.0)
    rows = [
        ("One user gets", lowest.user_tok_s or lowest.answer_tok_s, "tok/s", lowest),
        ("All together", most.tok_s, "tok/s", most),
        ("First token after", lowest.ttft_ms, "ms", lowest),
    ]
    return [
        Tile(title, f"{units.figures(value)} {unit}", units.count(level.users, "user"))
        for title, value, unit, level in rows
        if value is not None
    ]


def _time_s(row: Row) -> float:
    """What a user waits for: the time of a token, else of an answer."""
    return _middle(row.pooled.tpot) or _middle(row.pooled.e2e) or math.inf


def _middle(sample: Distribution) -> float | None:
    """The median, or the mean of few requests."""
    return sample.mean if sample.p50 is None else sample.p50


def _middle_ms(sample: Distribution) -> float | None:
    return None if (middle_s := _middle(sample)) is None else 1000 * middle_s


def fold_long(tables: Sequence[Grid]) -> list[Element]:
    """The tables of details; those of many rows are folded."""
    return [Fold(table.title, [replace(table, title="")]) if len(table.rows) > FEW else table for table in tables]


def folded_details(tables: Sequence[Grid], machine: Sequence[Grid]) -> list[Element]:
    """The tables of details, and the host metrics with how they were sampled."""
    how = (
        "Sampled each second while the work was measured; medians over the cells of a row. Of several GPUs those count "
        "that worked for the server."
    )
    return [*fold_long([*tables, *machine]), *(Paragraph(f"{how} {table.note}.", "fine") for table in machine)]


def answer_charts(
    summary: Summary,
    run: Run,
    capacity: CapacityReport | None,
    tune: TuneReport | None,
    bisection: BisectReport | None = None,
) -> list[Chart]:
    """The charts of what the run varied, the one that shows its answer first."""
    question_charts = [
        *([startup_chart(run)] if summary.starts else []),
        *([] if capacity is None else [attainment_chart(capacity)]),
        *([] if tune is None else [tune_chart(tune)]),
        *([] if bisection is None else [levels_chart(bisection)]),
        *answers_charts(summary),
        *turn_charts(summary),
        *soak_charts(summary),
        *(crossover_charts(summary, run) or sweep_charts(summary, run) if tune is None and bisection is None else []),
        figures.throughput_chart(summary, run),
    ]
    rows = [figures.rows_chart(summary)] if all(chart.empty for chart in question_charts) else []
    charts = [*question_charts, *rows, figures.first_token_chart(summary, run), figures.tradeoff_chart(summary, run)]
    bounds = figures.slo_bounds(summary)
    return [figures.with_slo_lines(chart, bounds) for chart in charts if not chart.empty]


def charts_section(summary: Summary, run: Run, data: ChartData, others: Sequence[Chart]) -> Section:
    """The charts that are not next to the answer: `others`, those of single requests, over time, and of the starts."""
    bounds, keys = figures.slo_bounds(summary), row_keys(summary)
    distributions, requests = (
        [figures.with_slo_lines(chart, bounds) for chart in charts if not chart.empty]
        for charts in (
            [figures.distribution_chart(summary, data, column) for column in LIVE],
            [figures.request_chart(summary, data)],
        )
    )
    curves = "Successful measured requests of all repeats; a curve further left is better. Click a row to hide or show "
    dots = "Each dot is a request, by the moment of sending. Click a row to hide or show it."
    starts = startup_chart(run)
    is_answer = summary.starts and not starts.empty
    parts: list[Element] = [
        *([Charts(charts=others)] if others else []),
        *(
            [Charts(title="Latency distributions", text=f"{curves}it.", charts=distributions, keys=keys,
                    shape="triple")]
            if distributions else []
        ),
        Paragraph("Timeline", "part"),
        *_timelines(summary, run, data),
        *([Charts(title="Single requests", text=dots, charts=requests, keys=keys, shape="wide")] if requests else []),
        *([Charts(title="Start-up", charts=[starts], shape="wide")] if starts.body and not is_answer else []),
    ]  # fmt: skip
    return Section("charts", "Charts", parts)


def _timelines(summary: Summary, run: Run, data: ChartData) -> list[Element]:
    """The chart over time. First is a cell where something failed, else the last one."""
    cells = {cell.id: cell for cell in summary.cells}
    events = {line.cell: timeline_events(line, cells.get(line.cell), run.ran.get(line.cell)) for line in data.timelines}
    if not events:
        why = "There is no timeline of an imported run." if run.origin else "No request was recorded."
        return [Paragraph(why, "fine")]
    drawn = {line.cell: timeline_figure(line, events[line.cell]) for line in data.timelines}
    failed = [cell for cell, cell_events in events.items() if any(event.bad for event in cell_events)]
    return [Timelines(figures=drawn, events=events, first=next(iter([*failed, *reversed(events)])))]


def cells_section(summary: Summary, table: Grid) -> Section:
    """Each cell with its problems and notes."""
    what = "A cell is one server under one load, measured once. Verdicts compare these."
    fold = Fold(units.count(len(summary.cells), "cell"), [table])
    return Section("cells", "Every cell", [Paragraph(what, "fine"), fold])


def cells_table(summary: Summary, results: Grid) -> Grid:
    """The numbers of each cell. What a column of the main table means is explained there."""
    explained = {column.key: column for column in results.columns}
    columns = [
        replace(column, explanation=explained[column.key].explanation, formula=explained[column.key].formula)
        if column.key in explained else column
        for column in _CELL_COLUMNS
    ]  # fmt: skip
    below = [" ".join(reason.sentences([*cell.problems, *cell.notes])) for cell in summary.cells]
    return Grid(
        id=results.id,
        columns=columns,
        rows=[[column.show(cell) for column in columns] for cell in summary.cells],
        styles=["bad" if cell.problems else "" for cell in summary.cells],
        below=below if any(below) else (),
    )


def _percent(share: float | None) -> str | None:
    return None if share is None else units.percent(share, 1)


_BY_SERVER = "By the server’s own metrics, scraped while the cell ran; a server without this metric shows a dash."
_CELL_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("cell", "Cell", text=lambda cell: cell.id, group="name"),
    *(
        replace(results_table.column_named(key), title=title, text=text, group="", field="", unit="")
        for key, title, text in (
            ("wall", "Wall time", lambda cell: units.seconds(cell.numbers.wall)),
            ("tokens", "Tokens", lambda cell: units.significant(cell.numbers.output_tokens)),
            ("rate", "tok/s", lambda cell: units.significant(cell.numbers.output_tok_s)),
            ("ttft_p50", "TTFT p50, ms", lambda cell: units.milliseconds(cell.numbers.ttft.p50)),
            ("tpot_p50", "TPOT p50, ms", lambda cell: units.milliseconds(cell.numbers.tpot.p50)),
            ("errors", "Errors", lambda cell: results_table.format_errors(cell.numbers)),
        )
    ),
    TableColumn("running", "Running, most", f"Requests that the server worked on. {_BY_SERVER}", "maximum",
                lambda cell: units.significant(cell.server_load.running_max)),
    TableColumn("waiting", "Waiting, most", f"Requests that waited for their turn. {_BY_SERVER}", "maximum",
                lambda cell: units.significant(cell.server_load.waiting_max)),
    TableColumn("kv", "KV cache, most", f"How full the KV cache was. {_BY_SERVER}", "maximum",
                lambda cell: _percent(cell.server_load.kv_usage_max)),
    TableColumn("preemptions", "Preemptions", f"Requests that were put back for lack of KV cache. {_BY_SERVER}",
                "count after − count before", lambda cell: units.significant(cell.server_load.preemptions)),
    TableColumn("ready", "Ready after", "From the order to start the server until the model answered.",
                "Σ phases of the start", lambda cell: units.seconds(cell.ready_s)),
)  # fmt: skip


def method_section(tables: Iterable[Grid]) -> Section:
    """What each number of these tables means."""
    rules = (
        "Every number is derived from one record per request (times by the client’s monotonic clock). Failed and good "
        "requests never share a latency distribution. A percentile is exact (of chunk gaps: to 0.1 %) and is printed "
        "only when the sample bounds it at 99 % confidence: p50 needs 11 requests, p90 64, p95 130, p99 662."
    )
    columns = [(f"means-{table.id}-{column.key}", column) for table in tables for column in table.columns]
    explained: dict[str, TableColumn] = {}
    for anchor, column in (*columns, *((f"means-{column.key}", column) for column in _MORE_COLUMNS)):
        if column.explanation:
            explained.setdefault(anchor, column)
    definitions = Definitions(list(explained.items()))
    return Section(
        "method", "Method",
        [Paragraph(rules, "fine"), Fold("What each number means, with its formula", [definitions])],
    )  # fmt: skip


_MORE_COLUMNS = (  # of charts
    TableColumn("e2e", "E2E", "How long the whole answer took.", "E2E = last chunk − request sent"),
    TableColumn(
        "in-flight", "In flight", "Requests that the client had sent and that had not ended.",
        "sent − ended, counted over time",
    ),
)  # fmt: skip


def what_ran(run: Run) -> list[Section]:
    """The servers, the machine and the experiment; and what run.json recorded, in full."""
    served = _distinct_servers(run)
    return [
        Section("setup", "What ran", [*_server_facts(served), *_machine_facts(run), *_experiment_facts(run)]),
        Section("appendix", "Appendix", _appendix(run, served)),
    ]


def _facts(pairs: Iterable[tuple[str, Any]]) -> Facts:
    """The facts that are known."""
    return Facts([Fact(name, str(value)) for name, value in pairs if value not in (None, "")])


def _server_facts(served: dict[str, list[ServedBy]]) -> list[Element]:
    parts: list[Element] = []
    for server, kinds in served.items():
        parts.append(Paragraph(server, "part"))
        if len(kinds) > 1:
            parts.append(Paragraph("Not all cells of this server were alike; each variant is shown.", "warning"))
        for by in kinds:
            facts = [
                ("Template", by.template or "none: it already ran"), ("Image", by.image), ("Digest", by.image_digest),
                ("Version", by.version), ("Model", by.model), ("URL", by.url), ("Restarts", by.restarts or None),
                ("Killed for memory", "yes" if by.oom_killed else None), ("Died with code", by.exit_code),
            ]  # fmt: skip
            parts.append(_facts([*facts, *startup_facts(by).items()]))
    return parts


def _machine_facts(run: Run) -> list[Element]:
    parts = _facts_of_machine("Machine", run.machine)
    return parts if run.remote is None else [*parts, *_facts_of_machine("Machine of the server", run.remote.machine)]


def _facts_of_machine(title: str, machine: Machine) -> list[Element]:
    memory = f"{machine.ram_bytes / units.GIB:.1f} GiB" if machine.ram_bytes else None
    facts = [
        ("Name", machine.name), ("CPU", machine.cpu), ("Cores", machine.cores), ("Memory", memory),
        ("Kernel", machine.kernel), ("Docker", machine.docker), ("ROCm of the host", machine.rocm),
    ]  # fmt: skip
    return [Paragraph(title, "part"), _facts(facts)]


def _experiment_facts(run: Run) -> list[Element]:
    took = None if run.ended_wall_s is None else units.seconds(run.ended_wall_s - run.started_wall_s)
    facts = [
        ("Run", run.id), ("Started", units.date_time(run.started_wall_s)), ("Took", took),
        ("Model", run.scenario.model), ("Seed", run.scenario.seed), ("Workload", run.workload_sha256),
        ("Commit", run.git_commit),
    ]  # fmt: skip
    return [Paragraph("Experiment", "part"), _facts(facts)]


def _appendix(run: Run, served: dict[str, list[ServedBy]]) -> list[Element]:
    texts: list[tuple[str, Any, bool]] = [("Scenario as resolved", _as_yaml(run.scenario), True)]
    for server, by in ((server, by) for server, kinds in served.items() for by in kinds):
        texts += [
            (f"Arguments of {server}", "\n".join(by.arguments or ()), True),
            (f"Settings that {server} reports", by.effective and _as_yaml(by.effective), True),
            (f"Contents of the image of {server}", by.contents and _as_yaml(by.contents), False),
            (f"Container of {server} as inspected", by.container and _as_yaml(by.container), False),
        ]
    parameters, gpus = run.server_machine.kernel_parameters, run.server_machine.gpus
    texts += [
        ("GPUs", gpus and _as_yaml(gpus), True),
        ("Kernel parameters", parameters and _as_yaml(parameters), False),
    ]
    return [
        Paragraph("What `run.json` recorded, in full.", "fine"),
        *(Fold(title, [Verbatim(text)], is_printed=is_printed) for title, text, is_printed in texts if text),
        Fold("Versions of the packages that measure", [_facts(run.versions.items())]),
        Fold("Order of the cells", [Paragraph(", ".join(run.order), "fine")], is_printed=False),
    ]


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True, width=100)
    return text


def servers_differ(run: Run) -> list[Element]:
    """What differs between the servers of a run; none with one server."""
    if len(run.scenario.servers) < 2:
        return []
    differing = server_differences(run)
    title = f"What differs between the servers: {units.count(len(differing), 'thing')}"
    return [Fold(title, differences(differing, list(run.scenario.servers)))]


def _distinct_servers(run: Run) -> dict[str, list[ServedBy]]:
    """By server what served its cells; several entries if its cells differ."""
    distinct: dict[str, dict[bytes, ServedBy]] = {}
    for cell in run.served:
        # Each start has its own time and port, and the engine measures anew.
        settings = replace(
            cell.served_by, phases=[], compiled=[], url="", container=None, gateway=None, startup=None, effective={}
        )
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
