"""A run's report as one HTML file that needs nothing else: no network, no other file."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml
from markupsafe import Markup

from harness import units
from harness.compare.differences import server_differences
from harness.files import replace_file
from harness.report import machine_load, schedules, sentences, words
from harness.report.charts import figures, marks, starts, tradeoff
from harness.report.charts.marks import Forest
from harness.report.charts.observed import ChartData, observe
from harness.report.charts.timeline import TimelineEvent, events_of, figure_of
from harness.report.page import LIBRARY, asset, neutral, packed, policy, template
from harness.report.table import columns, errors, interval, lines
from harness.rundir.manifest import Run, ServedBy, read_run
from harness.summarize.summarize import read_summary
from harness.summary import Summary


def write_report(folder: Path) -> Path:
    """Write report.html of a run directory from its files, and return its path.

    Raises HarnessError when run.json or summary.json cannot be read.
    """
    run = read_run(folder)
    page = render(read_summary(folder), run, observe(folder, run))
    path = folder / "report.html"
    replace_file(path, page.encode())
    return path


def render(summary: Summary, run: Run, observed: ChartData) -> str:
    """The page."""
    filters = {"seconds": units.seconds, "ms": units.milliseconds, "number": units.significant}
    report = template("report.html.j2", moment=_moment, yaml=_yaml, **filters)
    style, theme, script, library = map(asset, ("report.css", "theme.js", "report.js", LIBRARY))
    rows = lines(summary, run)
    charts = [
        figures.throughput(summary, run),
        figures.first_token(summary, run),
        *tradeoff.tradeoffs(summary, run),
        *figures.distributions(summary, observed),
        *figures.scatters(summary, observed),
        starts.startup(run),
    ]
    drawn = {chart.id: chart.figure for chart in charts if not chart.empty}
    cells = {cell.id: cell for cell in summary.cells}
    events = {line.cell: events_of(line, cells.get(line.cell), run.ran.get(line.cell)) for line in observed.timelines}
    timelines = {line.cell: figure_of(line, events[line.cell]) for line in observed.timelines}
    return report.render(
        summary=summary,
        run=run,
        columns=columns(summary),
        rows=rows,
        forest=Forest.of([line.verdict for line in rows if line.verdict]),
        interval=interval,
        errors=errors,
        sentences=sentences,
        starts=starts,
        units=units,
        check_marks=words.CHECK_MARKS,
        charts={chart.id: chart for chart in charts},
        server_keys=marks.server_keys(summary),
        row_keys=marks.row_keys(summary),
        timelines=list(timelines),
        timeline_first=_shown_first(run, events),
        events=events,
        schedules=schedules.lines(summary, run),
        schedule_columns=schedules.COLUMNS,
        machine=machine_load.table_of(summary),
        gpu_head=machine_load.GPU_HEAD,
        gpu_lines=machine_load.gpu_lines(summary),
        observed=observed,
        differences=server_differences(run),
        served=_served(run),
        style=Markup(style),
        theme=Markup(theme),
        script=Markup(script),
        policy=policy([theme, script, library]),
        library=packed(library.encode()),
        chart_data=packed(neutral(msgspec.json.encode({"charts": drawn, "timelines": timelines}).decode()).encode()),
    )


def _shown_first(run: Run, events: dict[str, list[TimelineEvent]]) -> str:
    """The cell whose timeline is shown first: where a server died or requests failed, else the most at once."""
    best, most = next(iter(events), ""), (False, False, -1)
    for cell in run.cells:
        if cell.id not in events or cell.repeat > 1:
            continue
        load = run.scenario.loads.get(cell.load)
        found = events[cell.id]
        worth = (
            any(event.label == "died" for event in found),
            any(event.bad for event in found),
            words.concurrency(load) if load else 0,
        )
        if worth >= most:
            best, most = cell.id, worth
    return best


def _served(run: Run) -> dict[str, list[ServedBy]]:
    """What served each server's cells; more than one entry where something differs between them."""
    result: dict[str, list[ServedBy]] = {}
    seen: set[tuple[str, bytes]] = set()
    for cell in run.cells:
        # What belongs to a single start is left out of the comparison: time, port, and what the engine measured.
        what = msgspec.structs.replace(
            cell.served_by, phases=[], url="", container=None, gateway=None, startup=None, effective={}
        )
        key = (cell.server, msgspec.json.encode(what))
        if key not in seen:
            seen.add(key)
            result.setdefault(cell.server, []).append(cell.served_by)
    return result


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _yaml(value: Any) -> str:
    return yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True, width=100)
