"""The page of a run and its history."""

from collections.abc import Mapping, Sequence

from harness.base import units
from harness.base.metrics import METRICS
from harness.base.units import format_date
from harness.numbers.comparison import MARGIN, Gate, known_bounds
from harness.numbers.stats import MIN_HISTORY
from harness.questions.compare.page import differences
from harness.questions.history.decide import ChangePoint, History, LeftOut, Moved, Series
from harness.report import words
from harness.report.charts import Chart, Figure, escape_markup, scatter
from harness.report.elements import Bullet, Bullets, Element, Paragraph, plain_grid
from harness.report.html import render_page
from harness.report.junit import GATES, Case, difference_properties, document
from harness.report.sections import simulated_note
from harness.report.verdict_text import format_speedup, gate_text

LEFT_OUT: dict[LeftOut, str] = {  # by code: which runs were left out
    "unreadable": "that cannot be read",
    "not_valid": "with a status other than VALID",
    "machine": "of another machine",
    "engine_kind": "of the other kind of engine (simulated or real)",
    "model": "of another model",
    "workload": "of another workload",
    "later": "that started later",
    "power": "with other power settings",
    "no_row": "without this row",
    "client_limited": "whose number the load generator limited",
    "no_value": "with too few requests, or without this number",
    "definition": "with another definition of this number",
}
_WORDS: dict[Gate, str] = {
    "no_slowdown": "no slowdown", "slower": "slower", "size_unknown": "slower (size not known)",
    "cannot_tell": "cannot tell", "provisional": "slower (provisional)",
}  # fmt: skip
_STYLES: dict[Gate, str] = {
    "no_slowdown": "no_slowdown", "slower": "slower", "size_unknown": "size_unknown", "cannot_tell": "cannot_tell",
    "provisional": "probably_slower",
}  # fmt: skip
HEAD = ("Row", "By", "History", "Level", "Change points", "Outliers", "Speed", "Expected", "Verdict")


def history_page(history: History) -> list[Element]:
    """The verdict of each series, and what changed at the change points."""
    left_out = [Bullet(text, "inconclusive") for text in left_out_sentences(history)]
    outcomes = [Bullet(outcome_sentence(series, history.run), _STYLES[series.gate]) for series in history.series]
    page: list[Element] = [
        Paragraph(history_title(history), "title"),
        *simulated_note(history.simulated),
        *([Bullets(left_out)] if left_out else []),
        plain_grid(HEAD, list(map(series_cells, history.series)), [_STYLES[series.gate] for series in history.series]),
        Bullets(outcomes),
        *(differences(history.differences, history.sides) if len(history.sides) > 1 else []),
    ]
    for change in history.change_points:
        moved = [Bullet(describe_shift(shift), _direction(shift)) for shift in change.moved]
        page += [Paragraph(f"Change point: {change.before} → {change.after}", "heading"), Bullets(moved, "verdicts")]
        page += [Paragraph(near, "unsure")] if (near := nearby_sentence(change)) else []
        page += differences(change.differences, change.sides)
    return page


def history_html(history: History) -> str:
    """The page with a chart for each series."""
    charts = [_series_chart(f"series-{number}", series, history) for number, series in enumerate(history.series)]
    page = [*history_page(history), Paragraph("Runs over time", "heading"), *charts]
    return render_page(page, f"{history.run} and its history", ["history", history.scenario])


def history_title(history: History) -> str:
    earlier = units.count(len(history.runs) - 1, "earlier run")
    return f"{history.run} against {earlier} of {history.scenario} on {history.machine}, model {history.model}"


def left_out_sentences(history: History) -> list[str]:
    """The runs that were left out as a whole, then those left out of single rows."""
    lines = _left_out(history.left_out)
    for series in history.series:
        lines += [f"{series.name}, {METRICS[series.metric].title}: {text}" for text in _left_out(series.left_out)]
    if history.unknown_power:
        runs = units.count(len(history.unknown_power), "run")
        lines.append(f"not known: the power settings of {runs}, which may be others than those of this run")
    return lines


def _left_out(groups: Mapping[LeftOut, Sequence[str]]) -> list[str]:
    return [f"left out: {units.count(len(runs), 'run')} {LEFT_OUT[reason]}" for reason, runs in groups.items()]


def series_cells(series: Series) -> list[str]:
    outliers = sum(point.state == "outlier" for point in series.points)
    undecided = sum(point.state == "undecided" for point in series.points)
    is_bounded = series.low is not None and series.high is not None
    return [
        series.name,
        METRICS[series.metric].title,
        units.count(series.runs, "run"),
        units.NOTHING if series.level is None else words.format_metric(series.level, series.metric),
        str(max(0, len(series.levels) - 1)),
        str(outliers) + (f", and the newest {undecided} differ" if undecided else ""),
        units.NOTHING if series.ratio is None else f"{series.ratio:.3f}×",
        f"{series.low:.3f} to {series.high:.3f}" if is_bounded else units.NOTHING,
        _WORDS[series.gate],
    ]


def describe_shift(moved: Moved) -> str:
    how = f"{format_speedup(moved.ratio)} than before by {METRICS[moved.metric].title}"
    return f"{moved.server} / {moved.load}: {how}"


def nearby_sentence(change: ChangePoint) -> str:
    """Say that the differences are those of other runs than the two at the change point; empty if they are not."""
    if change.sides == (change.before, change.after):
        return ""
    return f"At the change point nothing differs; the nearby runs {change.sides[0]} and {change.sides[1]} do."


def outcome_sentence(series: Series, run: str) -> str:
    """What the newest run shows of a slowdown, and what would settle it."""
    low, high = (
        (None, None) if series.ratio is None else known_bounds(series.ratio, series.ratio_low, series.ratio_high)
    )
    name = f"{series.name}: {METRICS[series.metric].title}"
    if series.value is None:
        why = next((LEFT_OUT[reason] for reason, runs in series.left_out.items() if run in runs), LEFT_OUT["no_value"])
        return f"{name}: cannot tell: the run is one {why}."
    shown = gate_text(series.gate, low, high, series.tolerance)
    if series.word in ("slower", "faster") and series.p is not None:
        who = "" if series.window == 1 else f"the newest {series.window} runs together: "
        shown = f"{series.word}: {shown}" if series.gate == "no_slowdown" else shown
        return f"{name}: {shown}; {who}equal runs differ as much {_how_often(series.p)}."
    if series.gate == "no_slowdown":
        return f"{name}: {shown}."
    if series.runs < MIN_HISTORY:
        runs = units.count(series.runs, "run")
        return f"{name}: {shown}; {runs} since the last change point, at least {MIN_HISTORY} are needed."
    if series.needed is None:
        return f"{name}: {shown}; {_spread(series)}: find what differs between them, or choose another --tolerance."
    advice = "" if series.runs >= series.needed else f", or measure about {series.needed} runs"
    return f"{name}: {shown}; run it again{advice}."


def _how_often(p: float) -> str:
    """Say a p value of a shift: in which share of histories of equal runs it is as large."""
    return f"in {100 * p:.2g} % of cases" if p >= 0.001 else "in fewer than 1 of 1,000 cases"


def _spread(series: Series) -> str:
    """How far the runs of the history are apart, which more runs do not change."""
    start = next((number for number, point in enumerate(series.points) if point.run == series.since), 0)
    values = [point.value for point in series.points[start:-1] if point.state == "level"]
    least, most = (words.format_metric(value, series.metric) for value in (min(values), max(values)))
    return f"the {units.count(len(values), 'earlier run varies', 'earlier runs vary')} too much, from {least} to {most}"


def _direction(moved: Moved) -> str:
    return "faster" if moved.ratio > 1 else "slower"


def _series_chart(name: str, series: Series, history: History) -> Chart:
    """A series: its runs as dots, its levels as lines, outliers as crosses."""
    metric = series.metric
    scale, unit = (1e3, "ms") if METRICS[metric].latency else (1.0, METRICS[metric].unit)
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
        title=f"{series.name}: {METRICS[metric].title}",
        caption="A dot is a run, the geometric mean of its repeats; a line is a level. "
        f"{'Higher' if METRICS[metric].more_is_better else 'Lower'} is better. The axis does not start at zero.",
        findings=_left_out(series.left_out),
        formula=f"run = geometric mean of {METRICS[metric].title} over its repeats",
        figure={"data": data, "layout": layout},
        head=["Run", "Started", METRICS[metric].title.capitalize(), "State"],
        body=[
            [point.run, units.date_time(point.started_wall_s), words.format_metric(point.value, metric), point.state]
            for point in series.points
        ],
        empty="" if series.points else "No run has this number.",
    )


def history_xml(history: History) -> str:
    """The XML of a run against its history: a case for each row and metric."""
    cases = []
    for series in history.series:
        name, text = f"{series.name}: {METRICS[series.metric].title}", outcome_sentence(series, history.run)
        outcome = GATES.get(series.gate, "skipped")
        cases.append(Case(group="history", name=name, outcome=outcome, kind=series.gate, message=text, evidence=text))
    properties = {"run": history.run, "machine": history.machine, "history": history_title(history)}
    if history.simulated:
        properties["simulated"] = words.SIMULATED
    properties |= difference_properties(history.sides, history.differences)
    return document("compare", cases, properties, history.machine)
