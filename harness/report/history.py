"""The history of a scenario, in the terminal and as an HTML page, and the result of the gate."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness import units
from harness.columns import METRIC_WORDS, RATES
from harness.comparison.history import ChangePoint, Gate, Gated, History, LeftOut, Moved, Series
from harness.judge.noise_floors import format_date
from harness.judge.stats import DETECTED, MIN_HISTORY
from harness.report import words
from harness.report.charts import Chart, Figure, escape_markup, scatter
from harness.report.html import chart_page
from harness.report.markdown import EQUAL, differences_markdown, escape, grid
from harness.report.terminal import STYLES, print_differences, simple_table
from harness.summary import MARGIN, MAX_REPEATS

LEFT_OUT = {  # by code: which runs were left out
    "unreadable": "that cannot be read",
    "not_valid": "with a status other than VALID",
    "noise_run": "of `harness noise` (A/A)",
    "machine": "of another machine",
    "engine_kind": "of the other kind of engine (simulated or real)",
    "model": "of another model",
    "workload": "of another workload (the newest run counts)",
    "later": "that started after the run that is checked",
    "no_row": "without this row",
    "client_limited": "whose number the load generator limited",
    "no_value": "with too few requests, or without this number",
    "definition": "with another definition of this number",
}
SERIES_HEAD = ("Row", "By", "Runs", "First level", "Newest level", "Change points", "Outliers")
GATE_HEAD = ("Row", "By", "History", "Speed", "Expected", "Verdict")
_GATE_STYLES = STYLES | {"no_shift": "cyan"}


def print_history(history: History, console: Console) -> None:
    left_out = left_out_sentences(history.left_out, history.series)
    _print_head(history.simulated, history_title(history), left_out, console)
    console.print(simple_table(SERIES_HEAD, map(series_cells, history.series)))
    if not history.change_points:
        console.print(Text("\nNo change point.", "dim"))
    for change in history.change_points:
        console.print()
        console.print(Text(words.one_line(f"Change point: {change.before} -> {change.after}"), "bold"))
        for moved in change.moved:
            text = f"- {moved.server} / {moved.load}: {_direction(moved)}, {describe_shift(moved)}"
            console.print(Text(words.one_line(text), STYLES[_direction(moved)]))
        if near := nearby_sentence(change):
            console.print(Text(words.one_line(near), "yellow"))
        print_differences(change.differences, change.sides, console)


def print_gate(gate: Gate, console: Console) -> None:
    _print_head(gate.simulated, gate_title(gate), left_out_sentences(gate.left_out, gate.rows), console)
    styles = [_GATE_STYLES[row.word] for row in gate.rows]
    console.print(simple_table(GATE_HEAD, map(gate_cells, gate.rows), styles))
    console.print()
    for row, style in zip(gate.rows, styles, strict=True):
        console.print(Text(f"- {words.one_line(gate_sentence(row, gate.run))}", style))
    if len(gate.sides) > 1:
        console.print()
        print_differences(gate.differences, gate.sides, console)


def _print_head(simulated: bool, title: str, notes: Sequence[str], console: Console) -> None:
    if simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(title), "bold"))
    for text in notes:
        console.print(Text(words.one_line(text), "yellow"))


def history_page(history: History) -> str:
    """The page: a chart for each series, the change points, what was left out."""
    charts = [_series_chart(f"series-{number}", series, history) for number, series in enumerate(history.series)]
    return chart_page(
        "history.html.j2",
        {chart.id: chart.figure for chart in charts if not chart.empty},
        {},
        history=history,
        title=history_title(history),
        left_out=left_out_sentences(history.left_out, history.series),
        series_head=SERIES_HEAD,
        series_cells=series_cells,
        describe_shift=describe_shift,
        word=_direction,
        nearby_sentence=nearby_sentence,
        charts=charts,
        nothing_differs=EQUAL,
    )


def gate_markdown(gate: Gate) -> str:
    """The check of a run against its history as Markdown."""
    parts = [f"> **{words.SIMULATED}**"] if gate.simulated else []
    parts += [escape(gate_title(gate)), *map(escape, left_out_sentences(gate.left_out, gate.rows))]
    parts.append(grid(GATE_HEAD, [gate_cells(row) for row in gate.rows]))
    parts.append("\n".join(f"- {escape(gate_sentence(row, gate.run))}" for row in gate.rows))
    if len(gate.sides) > 1:
        parts.append(differences_markdown(gate.differences, gate.sides))
    return "\n\n".join(parts)


def history_title(history: History) -> str:
    days = sorted({format_date(point.started_wall_s) for series in history.series for point in series.points})
    when = f", {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    runs = units.count(len(history.runs), "run")
    return f"{history.scenario} on {history.machine}: {runs}{when}, model {history.model}"


def gate_title(gate: Gate) -> str:
    return f"{gate.run} against {units.count(gate.runs, 'earlier run')} of {gate.scenario} on {gate.machine}"


def left_out_sentences(groups: Sequence[LeftOut], rows: Sequence[Series] | Sequence[Gated] = ()) -> list[str]:
    """The runs that were left out as a whole, then those left out of single rows."""
    lines = [f"Left out: {units.count(len(group.runs), 'run')} {LEFT_OUT[group.reason]}" for group in groups]
    for row in rows:
        of_row = f"{row.server} / {row.load}, {METRIC_WORDS[row.metric]}"
        lines += [f"{of_row}: {text[0].lower()}{text[1:]}" for text in left_out_sentences(row.left_out)]
    return lines


def series_cells(series: Series) -> list[str]:
    outliers = sum(point.state == "outlier" for point in series.points)
    undecided = sum(point.state == "undecided" for point in series.points)
    levels = [words.format_metric(level.value, series.metric) for level in series.levels] or [units.NOTHING]
    return [
        series.name,
        METRIC_WORDS[series.metric],
        str(len(series.points)),
        levels[0],
        levels[-1],
        str(max(0, len(series.levels) - 1)),
        str(outliers) + (f", and the newest {undecided} differ" if undecided else ""),
    ]


def describe_shift(moved: Moved) -> str:
    return f"{moved.ratio:.3f} times the speed before, by {METRIC_WORDS[moved.metric]}"


def nearby_sentence(change: ChangePoint) -> str:
    """Say that the differences are those of other runs than the two at the change point; empty if they are not."""
    if change.sides == (change.before, change.after):
        return ""
    return f"At the change point nothing differs; the nearby runs {change.sides[0]} and {change.sides[1]} do."


def gate_cells(row: Gated) -> list[str]:
    known = row.low is not None and row.high is not None
    return [
        f"{row.server} / {row.load}",
        METRIC_WORDS[row.metric],
        units.count(row.runs, "run"),
        units.NOTHING if row.ratio is None else f"{row.ratio:.3f}×",
        f"{row.low:.3f} to {row.high:.3f}" if known else units.NOTHING,
        "no shift" if row.word == "no_shift" else row.word,
    ]


def gate_sentence(row: Gated, run: str) -> str:
    name = f"{row.server} / {row.load}: {METRIC_WORDS[row.metric]}"
    if row.word in ("slower", "faster"):
        shown = "this run shows" if row.window == 1 else f"the newest {row.window} runs together show"
        return f"{name}: {row.word}: {shown} a shift that equal runs on this machine do not show (p = {row.p:.1e})."
    share = None if row.detectable is None else f"{row.detectable * 100:.0f} %"
    sensitivity = f"a slowdown of {share} or more is found within 3 runs in 80 %" if share else ""
    if row.word == "no_shift":
        return f"{name}: no shift; {sensitivity}."
    if row.value is None:
        why = next((LEFT_OUT[group.reason] for group in row.left_out if run in group.runs), LEFT_OUT["no_value"])
        return f"{name}: inconclusive: the run is one {why}."
    if row.runs < MIN_HISTORY:
        runs = units.count(row.runs, "run")
        return f"{name}: inconclusive: {runs} since the last change point, at least {MIN_HISTORY} are needed."
    needed = f"more than {MAX_REPEATS}" if row.needed is None else f"about {row.needed}"
    return f"{name}: inconclusive: {sensitivity}; {DETECTED * 100:.0f} % needs {needed} runs of history at this spread."


def _direction(moved: Moved) -> str:
    return "faster" if moved.ratio > 1 else "slower"


def _series_chart(name: str, series: Series, history: History) -> Chart:
    """A series: its runs as dots, its levels as lines, outliers as crosses."""
    metric = series.metric
    scale, unit = (1.0, "tok/s") if metric in RATES else (1.0, "s") if metric == "wall_s" else (1e3, "ms")
    places = {run: number for number, run in enumerate(history.runs, 1)}
    data: list[Figure] = []
    symbols = {"level": ("circle", "@s1"), "undecided": ("diamond-open", "@s2"), "outlier": ("x", "@s7")}
    for state, (symbol, colour) in symbols.items():
        points = [point for point in series.points if point.state == state]
        if points:
            x, y = [places[point.run] for point in points], [point.value * scale for point in points]
            hover = f"%{{text}}<br><b>%{{y:,.4g}} {unit}</b><extra>{state}</extra>"
            text = [escape_markup(f"{point.run}, {units.date_time(point.started_wall_s)}") for point in points]
            marker = {"color": colour, "symbol": symbol, "size": 9}
            data.append(scatter(state, x, y, hover, "markers", text=text, marker=marker))
    for level in series.levels:
        ends, style = [places[level.first] - 0.5, places[level.last] + 0.5], {"color": "@s2", "width": 2.5}
        data.append(scatter("level", ends, [level.value * scale] * 2, "", line=style, hoverinfo="skip"))
    rule = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "@bad", "width": 1.5, "dash": "dot"}}
    edges = [places[level.first] - 0.5 for level in series.levels[1:]]
    dates = [format_date(point.started_wall_s) for point in series.points]
    step = max(1, -(-len(dates) // 10))
    layout: Figure = {
        "xaxis": {
            "tickvals": [places[point.run] for point in series.points][::step], "ticktext": dates[::step],
            "zeroline": False,
        },
        "yaxis": {"title": {"text": unit}, "tickformat": ","},
        "shapes": [rule | {"x0": edge, "x1": edge} for edge in edges],
    }  # fmt: skip
    values = [point.value * scale for point in series.points]
    if values and max(values) - min(values) < 2 * MARGIN * max(values):  # almost equal: plotly would show noise
        layout["yaxis"]["range"] = [min(values) * (1 - 2 * MARGIN), max(values) * (1 + 2 * MARGIN)]
    return Chart(
        id=name,
        title=f"{series.name}: {METRIC_WORDS[metric]}",
        caption="A dot is a run, the geometric mean of its repeats; a line is a level. "
        f"{'Higher' if metric in RATES else 'Lower'} is better. The axis does not start at zero.",
        findings=left_out_sentences(series.left_out),
        formula=f"run = geometric mean of {METRIC_WORDS[metric]} over its repeats",
        figure={"data": data, "layout": layout},
        head=["Run", "Started", METRIC_WORDS[metric].capitalize(), "State"],
        body=[
            [point.run, units.date_time(point.started_wall_s), words.format_metric(point.value, metric), point.state]
            for point in series.points
        ],
        empty="" if series.points else "No run has this number.",
    )
