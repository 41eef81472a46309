"""The charts of a sweep: a heat map for two varied settings, lines for one, and the Pareto front of any."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness import units
from harness.report import words
from harness.report.charts import COLOURS, NAME, Chart, Figure, axis, colour, plain, scatter, symbol, whiskers
from harness.rundir.manifest import Run
from harness.scenario import Sweep
from harness.summary import Row, Summary

# What the chart of throughput over concurrency shows already.
CONCURRENCY = ("users", "batch_size", "in_flight")
_LOGARITHMIC_FROM = 10
_LABEL_CHARS = 18
_ROOMY = 6  # columns of a heat map whose labels have room for words
_FAINT, _STRONG = 0.06, 0.6  # opacity of the lowest and the highest value of a heat map: its numbers stay readable


class Measure(NamedTuple):
    """A number of a row that is drawn."""

    id: str
    title: str
    unit: str
    more_is_better: bool

    def of(self, row: Row) -> float | None:
        if row.failed is not None:
            return None
        if self.id == "rate":
            rates = row.output_tok_s or row.input_tok_s
            return statistics.median(rates) if rates else None
        found = row.pooled.ttft_s.p50 if self.id == "ttft" else row.pooled.e2e_s.p50
        return None if found is None else 1000 * found

    def rank(self, row: Row) -> tuple[bool, float]:
        """The better row has the higher one."""
        value = self.of(row)
        return value is not None, (value or 0.0) * (1 if self.more_is_better else -1)


RATE = Measure("rate", "Throughput", "tok/s", True)
TTFT = Measure("ttft", "Time to first token (p50)", "ms", False)
E2E = Measure("e2e", "End-to-end latency (p50)", "ms", False)


def sweep_charts(summary: Summary, run: Run) -> list[Chart]:
    """The charts of what was varied; none for a run without a sweep."""
    swept = run.scenario.swept
    if swept is None:
        return []
    settings = varied(summary, swept)
    measures = [RATE, TTFT if any(TTFT.of(row) is not None for row in summary.rows) else E2E]
    if len(settings) >= 2:
        return [_heat_map(summary, swept, settings, measure) for measure in measures]
    if len(settings) == 1 and settings[0] not in CONCURRENCY:
        return [_lines(summary, swept, settings[0], measure) for measure in measures]
    return []


def varied(summary: Summary, swept: Sweep) -> list[str]:
    """The settings that have several values, those of servers first."""
    values: dict[str, set[str]] = {}
    for row in summary.rows:
        for key, value in swept.settings(row.server, row.load).items():
            values.setdefault(key, set()).add(words.setting(value))
    return [key for key, found in values.items() if len(found) > 1]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points (throughput, latency) that no other one beats in both, by ascending throughput."""
    best: list[int] = []
    for place in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        if not best or points[place][1] < points[best[-1]][1]:
            best.append(place)
    return best[::-1]


def pareto(rows: Sequence[Row], points: Sequence[tuple[float, float]]) -> tuple[list[Figure], list[str]]:
    """A line through the front of (tok/s, ms), and what is on it in words."""
    places = front(points)
    if not places:
        return [], []
    x, y = [points[i][0] for i in places], [points[i][1] for i in places]
    hover = f"%{{text}}<br>%{{x:,.1f}} tok/s, <b>%{{y:,.1f}} ms</b>{NAME}"
    style = {"line": {"color": "@ink", "width": 1.5, "dash": "dash"}, "text": [plain(rows[i].name) for i in places]}
    marker = {"color": "@ink", "symbol": "circle-open", "size": 15, "line": {"width": 1.5}}
    ends = [f"{rows[i].name} ({units.significant(points[i][0])} tok/s, {units.significant(points[i][1])} ms)"
            for i in dict.fromkeys((places[0], places[-1]))]  # fmt: skip
    number = units.count(len(places), "row")
    said = f"{number} of {len(points)} on the Pareto front (dashed): from {' to '.join(ends)}"
    return [scatter("Pareto front", x, y, hover, "lines+markers", marker=marker, **style)], [said]


def _values(rows: Sequence[Row], swept: Sweep, key: str) -> list[Any]:
    """The values of a setting in their order: numbers ascending, others as they are written."""
    found = {words.setting(value): value for row in rows if (value := _setting(row, swept, key)) is not _ABSENT}
    values = list(found.values())
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return sorted(values)
    return values


_ABSENT: Any = object()


def _setting(row: Row, swept: Sweep, key: str) -> Any:
    return swept.settings(row.server, row.load).get(key, _ABSENT)


def _heat_map(summary: Summary, swept: Sweep, settings: list[str], measure: Measure) -> Chart:
    down, across = settings[0], settings[-1]
    x, y = _values(summary.rows, swept, across), _values(summary.rows, swept, down)
    rows: dict[tuple[int, int], Row] = {}  # the best of each place
    for row in summary.rows:
        at = (_setting(row, swept, across), _setting(row, swept, down))
        if _ABSENT not in at:
            place = (x.index(at[0]), y.index(at[1]))
            rows[place] = max(rows.get(place, row), row, key=measure.rank)
    values = {place: value for place, row in rows.items() if (value := measure.of(row)) is not None}
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
    shapes = [
        square(place, "@s1", _FAINT + (_STRONG - _FAINT) * _share(value, low, high)) for place, value in values.items()
    ]
    roomy, data = len(x) <= _ROOMY, []
    if values:
        text = [units.significant(value) for value in values.values()]
        data.append(labels(list(values), text, [rows[at].name for at in values], "@ink", measure.unit, roomy))
    if missing := {place: row for place, row in rows.items() if place not in values}:
        why = [words.failed(row.failed) if row.failed is not None else "no value" for row in missing.values()]
        said = [f"✕ {one}" if roomy else "✕" for one in why]
        names = [f"{row.name}: {one}" for row, one in zip(missing.values(), why, strict=True)]
        data.append(labels(list(missing), said, names, "@bad", "", roomy))
    others = [key for key in settings if key not in (down, across)]
    best = f" Of several rows with the same two values ({', '.join(others)} differ) the best." if others else ""
    layout: Figure = {"xaxis": categories(across, x), "yaxis": categories(down, y), "shapes": shapes}
    layout["height"] = 130 + 46 * max(3, len(y))
    return Chart(
        id=f"heat-{measure.id}",
        title=f"{measure.title} by {down} and {across}",
        caption=f"{measure.unit}; the stronger the colour, the higher the number; "
        f"{'higher' if measure.more_is_better else 'lower'} is better. ✕: the setting failed.{best}",
        formula="median of the runs" if measure is RATE else "p50 of the successful requests of all repeats",
        figure={"data": data, "layout": layout},
        head=["Row", down, across, f"{measure.title}, {measure.unit}"],
        body=_body(summary, swept, [down, across], measure),
        findings=_best(list(rows.values()), measure),
        empty="" if values else "No row has this number.",
    )


def _share(value: float, low: float, high: float) -> float:
    """0 for the lowest value, 1 for the highest; on a logarithmic scale where they are far apart."""
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 1.0


def square(place: tuple[int, int], hue: str, opacity: float) -> Figure:
    """A square of a heat map."""
    x, y = place
    return {
        "type": "rect", "layer": "below", "x0": x - 0.48, "x1": x + 0.48, "y0": y - 0.46, "y1": y + 0.46,
        "fillcolor": hue, "opacity": round(opacity, 3), "line": {"width": 0},
    }  # fmt: skip


def labels(
    places: list[tuple[int, int]], text: list[str], names: list[str], hue: str, unit: str, roomy: bool
) -> Figure:
    """The texts of squares of a heat map; `roomy`: they have room for words."""
    x, y = [place[0] for place in places], [place[1] for place in places]
    hover = f"%{{customdata}}<br><b>%{{text}}</b> {unit}<extra></extra>"
    marker = {"opacity": 0, "size": 30, "symbol": "square"}
    font = {"color": hue, "size": 13 if roomy else 10}
    return scatter(
        "", x, y, hover, "markers+text", text=text, customdata=list(map(plain, names)), marker=marker, textfont=font
    )


def categories(key: str, values: list[Any]) -> Figure:
    """An axis of a heat map."""
    return {
        "title": {"text": plain(key)}, "tickvals": list(range(len(values))), "showgrid": False, "zeroline": False,
        "ticktext": [plain(_shortened(words.setting(value))) for value in values], "range": [-0.5, len(values) - 0.5],
    }  # fmt: skip


def _shortened(text: str) -> str:
    return text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…"


def _lines(summary: Summary, swept: Sweep, key: str, measure: Measure) -> Chart:
    values = _values(summary.rows, swept, key)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    of_server = any(key in row.settings for row in swept.servers.values())
    lines: dict[str, list[tuple[float, Row, float]]] = {}
    for row in summary.rows:
        value, found = _setting(row, swept, key), measure.of(row)
        if value is not _ABSENT and found is not None:
            x = value if numbers else values.index(value)
            lines.setdefault(row.load if of_server else row.server, []).append((x, row, found))
    data = [_line(place, name, sorted(points, key=lambda one: one[0]), measure)
            for place, (name, points) in enumerate(lines.items())]  # fmt: skip
    logarithmic = numbers and min(values) > 0 and max(values) / min(values) > 20
    across = {"title": {"text": plain(key)}, "tickvals": values, "ticktext": [words.setting(one) for one in values]}
    across |= {"type": "log"} if logarithmic else {}
    heights = [found for points in lines.values() for _, _, found in points]
    return Chart(
        id=f"lines-{measure.id}",
        title=f"{measure.title} over {key}",
        caption=f"A line for each {'load' if of_server else 'server'}"
        + ("; whiskers from the least to the most of the runs. " if measure is RATE else ". ")
        + f"{'Higher' if measure.more_is_better else 'Lower'} is better. Settings that failed are not on it.",
        formula="median of the runs" if measure is RATE else "p50 of the successful requests of all repeats",
        figure={
            "data": data,
            "layout": {
                "xaxis": across if numbers else categories(key, values),
                "yaxis": axis(measure.unit, heights),
                "showlegend": len(lines) > 1,
            },
        },
        head=["Row", key, f"{measure.title}, {measure.unit}"],
        body=_body(summary, swept, [key], measure),
        findings=_best([row for points in lines.values() for _, row, _ in points], measure),
        empty="" if data else "No row has this number.",
    )


def _line(place: int, name: str, points: list[tuple[float, Row, float]], measure: Measure) -> Figure:
    hue = f"@{colour(place % COLOURS)}"
    x, y = [at for at, _, _ in points], [found for _, _, found in points]
    more: Figure = {"line": {"color": hue, "width": 2.5}, "marker": {"color": hue, "symbol": symbol(place), "size": 9}}
    if measure is RATE:
        more["error_y"] = whiskers(y, [row.output_tok_s or row.input_tok_s for _, row, _ in points], hue)
    text = [plain(row.name) for _, row, _ in points]
    hover = f"%{{text}}<br><b>%{{y:,.1f}} {measure.unit}</b>{NAME}"
    return scatter(name, x, y, hover, "lines+markers", text=text, **more)


def _body(summary: Summary, swept: Sweep, keys: list[str], measure: Measure) -> list[list[str]]:
    body = []
    for row in summary.rows:
        settings = swept.settings(row.server, row.load)
        shown = [words.setting(settings[key]) if key in settings else units.NOTHING for key in keys]
        value = units.significant(measure.of(row)) if row.failed is None else f"failed: {words.failed(row.failed)}"
        body.append([row.name, *shown, value])
    return body


def _best(rows: Sequence[Row], measure: Measure) -> list[str]:
    best = max(rows, key=measure.rank, default=None)
    if best is None or measure.of(best) is None:
        return []
    word = "highest" if measure.more_is_better else "lowest"
    return [f"{word} measured: {units.significant(measure.of(best))} {measure.unit} with {best.name}"]
