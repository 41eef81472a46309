"""The charts of a sweep: a heat map for two varied settings, lines for one, and the Pareto front of any."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.base import units
from harness.numbers.summary import Row, Summary
from harness.records.manifest import Run
from harness.report import words
from harness.report.charts import NAME, Chart, Figure, axis, colour, escape_markup, scatter, symbol, whiskers
from harness.scenario import Sweep

CONCURRENCY = ("users", "batch_size", "in_flight")  # settings of the chart of throughput over concurrency
_LABEL_CHARS = 18
_FAINT, _STRONG = 0.06, 0.6  # opacity of the lowest and the highest value of a heat map; numbers must stay readable


class Measure(NamedTuple):
    """A number of a row that the charts of a sweep show."""

    id: str
    title: str
    unit: str
    more_is_better: bool

    def value_of(self, row: Row) -> float | None:
        if row.failed is not None:
            return None
        if self.id == "rate":
            rates = row.output_tok_s or row.input_tok_s
            return statistics.median(rates) if rates else None
        p50_s = row.pooled.ttft.p50 if self.id == "ttft" else row.pooled.e2e.p50
        return None if p50_s is None else 1000 * p50_s

    def rank(self, row: Row) -> tuple[bool, float]:
        """A sort key: the better row has the larger one."""
        value = self.value_of(row)
        return value is not None, (value or 0.0) * (1 if self.more_is_better else -1)


RATE = Measure("rate", "Throughput", "tok/s", True)
TTFT = Measure("ttft", "Time to first token (p50)", "ms", False)
E2E = Measure("e2e", "End-to-end latency (p50)", "ms", False)


def sweep_charts(summary: Summary, run: Run) -> list[Chart]:
    """The charts of the varied settings; empty for a run without a sweep."""
    swept = run.scenario.swept
    if swept is None:
        return []
    settings = varied_settings(summary, swept)
    measures = [RATE, TTFT if any(TTFT.value_of(row) is not None for row in summary.rows) else E2E]
    if len(settings) >= 2:
        return [_heat_map_chart(summary, swept, settings, measure) for measure in measures]
    if len(settings) == 1 and settings[0] not in CONCURRENCY:
        return [_lines_chart(summary, swept, settings[0], measure) for measure in measures]
    return []


def varied_settings(summary: Summary, swept: Sweep) -> list[str]:
    """The settings that have several values; those of servers first."""
    values: dict[str, set[str]] = {}
    for row in summary.rows:
        for key, value in swept.settings(row.server, row.load).items():
            values.setdefault(key, set()).add(words.format_setting(value))
    return [key for key, distinct in values.items() if len(distinct) > 1]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points (throughput, latency) that no other point beats in both, by ascending throughput."""
    best: list[int] = []
    for place in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        if not best or points[place][1] < points[best[-1]][1]:
            best.append(place)
    return best[::-1]


def pareto_trace(rows: Sequence[Row], points: Sequence[tuple[float, float]]) -> tuple[list[Figure], list[str]]:
    """A line through the Pareto front of (tok/s, ms), and a sentence on it."""
    places = pareto_front(points)
    if not places:
        return [], []
    x, y = [points[i][0] for i in places], [points[i][1] for i in places]
    hover = f"%{{text}}<br>%{{x:,.1f}} tok/s, <b>%{{y:,.1f}} ms</b>{NAME}"
    line = {"color": "@ink", "width": 1.5, "dash": "dash"}
    marker = {"color": "@ink", "symbol": "circle-open", "size": 15, "line": {"width": 1.5}}
    text = [escape_markup(rows[i].name) for i in places]
    ends = [f"{rows[i].name} ({units.significant(points[i][0])} tok/s, {units.significant(points[i][1])} ms)"
            for i in dict.fromkeys((places[0], places[-1]))]  # fmt: skip
    number = units.count(len(places), "row")
    finding = f"{number} of {len(points)} on the Pareto front (dashed): from {' to '.join(ends)}"
    return [scatter("Pareto front", x, y, hover, "lines+markers", marker=marker, line=line, text=text)], [finding]


def _setting_values(rows: Sequence[Row], swept: Sweep, key: str) -> list[Any]:
    """The values of a setting: numbers ascending, others in the order of the rows."""
    values: dict[str, Any] = {}
    for row in rows:
        settings = swept.settings(row.server, row.load)
        if key in settings:
            values[words.format_setting(settings[key])] = settings[key]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    return sorted(values.values()) if numbers else list(values.values())


def _heat_map_chart(summary: Summary, swept: Sweep, settings: list[str], measure: Measure) -> Chart:
    down, across = settings[0], settings[-1]
    x, y = _setting_values(summary.rows, swept, across), _setting_values(summary.rows, swept, down)
    rows: dict[tuple[int, int], Row] = {}  # the best of each place
    for row in summary.rows:
        row_settings = swept.settings(row.server, row.load)
        if across in row_settings and down in row_settings:
            place = (x.index(row_settings[across]), y.index(row_settings[down]))
            rows[place] = max(rows.get(place, row), row, key=measure.rank)
    values = {place: value for place, row in rows.items() if (value := measure.value_of(row)) is not None}
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
    shapes = []
    for place, value in values.items():
        height = (value - low) / (high - low) if high > low else 1.0
        shapes.append(_heat_map_square(place, "@s1", _FAINT + (_STRONG - _FAINT) * height))
    data = []
    if values:
        text = [units.significant(value) for value in values.values()]
        names = [rows[place].name for place in values]
        data.append(_heat_map_labels(list(values), text, names, "@ink", measure.unit))
    if missing := {place: row for place, row in rows.items() if place not in values}:
        kinds = [words.failure_kind(row.failed) if row.failed is not None else "no value" for row in missing.values()]
        names = [f"{row.name}: {kind}" for row, kind in zip(missing.values(), kinds, strict=True)]
        data.append(_heat_map_labels(list(missing), ["✕"] * len(missing), names, "@bad", ""))
    others = [key for key in settings if key not in (down, across)]
    best = f" Of several rows with the same two values ({', '.join(others)} differ) the best." if others else ""
    layout: Figure = {"xaxis": category_axis(across, x), "yaxis": category_axis(down, y), "shapes": shapes}
    layout["height"] = 130 + 46 * max(3, len(y))
    return Chart(
        id=f"heat-{measure.id}",
        title=f"{measure.title} by {down} and {across}",
        caption=f"{measure.unit}; {'higher' if measure.more_is_better else 'lower'} is better."
        f"{' ✕: the setting failed.' * bool(missing)}{best}",
        formula="median of the repeats" if measure is RATE else "p50 of the successful requests of all repeats",
        figure={"data": data, "layout": layout},
        head=["Row", down, across, f"{measure.title}, {measure.unit}"],
        body=_table_body(summary, swept, [down, across], measure),
        findings=_best_finding(list(rows.values()), measure),
        empty="" if values else "No row has this number.",
    )


def _heat_map_square(place: tuple[int, int], hue: str, opacity: float) -> Figure:
    """A square of a heat map."""
    x, y = place
    return {
        "type": "rect", "layer": "below", "x0": x - 0.48, "x1": x + 0.48, "y0": y - 0.46, "y1": y + 0.46,
        "fillcolor": hue, "opacity": round(opacity, 3), "line": {"width": 0},
    }  # fmt: skip


def _heat_map_labels(places: list[tuple[int, int]], text: list[str], names: list[str], hue: str, unit: str) -> Figure:
    """The texts of squares of a heat map."""
    x, y = [place[0] for place in places], [place[1] for place in places]
    hover = f"%{{customdata}}<br><b>%{{text}}</b> {unit}<extra></extra>"
    marker, font = {"opacity": 0, "size": 30, "symbol": "square"}, {"color": hue, "size": 12}
    labels = list(map(escape_markup, names))
    return scatter("", x, y, hover, "markers+text", text=text, customdata=labels, marker=marker, textfont=font)


def category_axis(key: str, values: list[Any]) -> Figure:
    """An axis with a place for each value; long values are shortened."""
    texts = map(words.format_setting, values)
    labels = [text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…" for text in texts]
    return {
        "title": {"text": escape_markup(key)}, "showgrid": False, "zeroline": False, "range": [-0.5, len(values) - 0.5],
        "tickvals": list(range(len(values))), "ticktext": list(map(escape_markup, labels)),
    }  # fmt: skip


def _lines_chart(summary: Summary, swept: Sweep, key: str, measure: Measure) -> Chart:
    values = _setting_values(summary.rows, swept, key)
    is_server_setting = any(key in row.settings for row in swept.servers.values())
    lines: dict[str, list[tuple[int, float, Row]]] = {}
    for row in summary.rows:
        settings, y = swept.settings(row.server, row.load), measure.value_of(row)
        if key in settings and y is not None:
            lines.setdefault(row.load if is_server_setting else row.server, []).append(
                (values.index(settings[key]), y, row)
            )
    data = []
    for place, (name, points) in enumerate(lines.items()):
        data.append(_line_trace(place, name, sorted(points, key=lambda point: point[0]), measure))
    heights = [y for points in lines.values() for _, y, _ in points]
    return Chart(
        id=f"lines-{measure.id}",
        title=f"{measure.title} over {key}",
        caption=f"A line for each {'load' if is_server_setting else 'server'}"
        + ("; whiskers from the least to the most of the repeats. " if measure is RATE else ". ")
        + f"{'Higher' if measure.more_is_better else 'Lower'} is better. Settings that failed are not on it.",
        formula="median of the repeats" if measure is RATE else "p50 of the successful requests of all repeats",
        figure={
            "data": data,
            "layout": {
                "xaxis": category_axis(key, values), "yaxis": axis(measure.unit, heights), "showlegend": len(lines) > 1,
            },
        },
        head=["Row", key, f"{measure.title}, {measure.unit}"],
        body=_table_body(summary, swept, [key], measure),
        findings=_best_finding([row for points in lines.values() for _, _, row in points], measure),
        empty="" if data else "No row has this number.",
    )  # fmt: skip


def _line_trace(place: int, name: str, points: list[tuple[int, float, Row]], measure: Measure) -> Figure:
    hue = f"@{colour(place)}"
    x, y, rows = map(list, zip(*points, strict=True))
    style: Figure = {"line": {"color": hue, "width": 2.5}, "marker": {"color": hue, "symbol": symbol(place), "size": 9}}
    if measure is RATE:
        style["error_y"] = whiskers(y, [row.output_tok_s or row.input_tok_s for row in rows], hue)
    text = [escape_markup(row.name) for row in rows]
    hover = f"%{{text}}<br><b>%{{y:,.1f}} {measure.unit}</b>{NAME}"
    return scatter(name, x, y, hover, "lines+markers", text=text, **style)


def _table_body(summary: Summary, swept: Sweep, keys: list[str], measure: Measure) -> list[list[str]]:
    body = []
    for row in summary.rows:
        settings = swept.settings(row.server, row.load)
        shown = [words.format_setting(settings[key]) if key in settings else units.NOTHING for key in keys]
        failure = "" if row.failed is None else f"failed: {words.failure_kind(row.failed)}"
        body.append([row.name, *shown, failure or units.significant(measure.value_of(row))])
    return body


def _best_finding(rows: Sequence[Row], measure: Measure) -> list[str]:
    best = max(rows, key=measure.rank, default=None)
    if best is None or measure.value_of(best) is None:
        return []
    word = "highest" if measure.more_is_better else "lowest"
    return [f"{word} measured: {units.significant(measure.value_of(best))} {measure.unit} with {best.name}"]
