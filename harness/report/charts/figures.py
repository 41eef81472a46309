"""The charts of rows as plotly figures in plain data, each with a caption and its numbers as a table."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harness import units
from harness.analysis.charted import MAX_DOTS, SLOWEST, Dot, thin_dots
from harness.columns import FORMULAS, LatencyColumn
from harness.judge.verdicts import without_concurrency
from harness.report import words
from harness.report.charts import (
    NAME,
    Chart,
    Figure,
    axis,
    colour,
    escape_markup,
    load_symbol,
    row_style,
    scatter,
    server_names,
    symbol,
    whiskers,
)
from harness.report.charts.data import ChartData, RowData, distribution_points
from harness.report.charts.sweeps import pareto_trace
from harness.rundir.manifest import Run
from harness.scenario.check_syntax import LATENCIES, STATISTICS, parse_check
from harness.scenario.plan import mix_of
from harness.summary import Row, Summary

MAX_CHART_DOTS = 2400  # dots of one chart, whatever the number of rows; two charts of 6,000 take a browser 0.8 s
KNEE_SHARE = 0.95  # of the best throughput
KNEE = (
    "best = highest median throughput of the server; knee = least concurrency whose median is ≥ 95 % of best; "
    "falls = least concurrency beyond the best one whose median is < 95 % of best"
)
# By chart: its latency, and the axis that shows it in milliseconds.
_AXES = {
    "first-token": ("ttft", "y"), "trade-ttft": ("ttft", "y"), "trade-e2e": ("e2e", "y"), "dots-ttft": ("ttft", "y"),
    "dots-e2e": ("e2e", "y"), "cdf-ttft": ("ttft", "x"), "cdf-tpot": ("tpot", "x"), "cdf-e2e": ("e2e", "x"),
}  # fmt: skip
_FAR = 3  # times the largest value: a line beyond that would flatten the curves, so a sentence replaces it


class Knee(Struct, frozen=True, kw_only=True):
    """The knee of one server's throughput over concurrency."""

    at: int  # the lowest concurrency with KNEE_SHARE of the best throughput
    rate: float  # throughput there
    share: float  # of the best
    highest: int  # the highest concurrency measured
    falls_at: int | None  # the lowest concurrency beyond the best with less than KNEE_SHARE of it; None: no such

    @property
    def is_open(self) -> bool:
        """Whether the knee is the highest concurrency measured: the true one may be beyond it."""
        return self.at == self.highest

    def __str__(self) -> str:
        if self.is_open:
            return f"no knee up to {self.highest} at once: it still rises there"
        share = "the best" if self.share == 1 else f"{100 * self.share:.0f}\u00a0% of the best"
        falls = "more does not help" if self.falls_at is None else f"falls from {self.falls_at} at once on"
        return f"knee at {self.at} at once, {share}; {falls}"


def find_knee(points: Sequence[tuple[int, float]]) -> Knee | None:
    """The knee of (concurrency, throughput) points; None for fewer than two concurrencies.

    Of several points with one concurrency the best counts.
    """
    rates: dict[int, float] = {}
    for level, rate in points:
        rates[level] = max(rate, rates.get(level, 0.0))
    best = max(rates, key=lambda level: (rates[level], -level), default=0)
    if len(rates) < 2 or rates[best] <= 0:
        return None
    enough = KNEE_SHARE * rates[best]
    knee = min(level for level in rates if rates[level] >= enough)
    falls_at = min((level for level in rates if level > best and rates[level] < enough), default=None)
    return Knee(at=knee, rate=rates[knee], share=rates[knee] / rates[best], highest=max(rates), falls_at=falls_at)


def row_concurrency(row: Row, run: Run) -> int:
    load = run.scenario.loads.get(row.load)
    return words.max_in_flight(load) if load else 1


def _curves(summary: Summary, run: Run, drawn: Callable[[Row], bool]) -> Iterator[tuple[int, str, list[Row]]]:
    """The number and name of a server with the rows on one curve: their loads differ only in concurrency.

    Open loops have no concurrency of their own. A load of a mix runs together with others. Both are on no curve.
    """
    for number, server in enumerate(server_names(summary)):
        closed = [row for row in summary.rows if row.server == server and row.pooled.schedule is None and drawn(row)]
        curves: dict[bytes | None, list[Row]] = {}
        for row in sorted(closed, key=lambda row: row_concurrency(row, run)):
            if mix_of(row.load) is None:
                load = run.scenario.loads.get(row.load)
                curves.setdefault(None if load is None else without_concurrency(load), []).append(row)
        for rows in curves.values():
            yield number, server, rows


def _curve_trace(
    index: int, server: str, rows: list[Row], x: list[Any], y: list[Any], hover: str, **more: Any
) -> Figure:
    hue = f"@{colour(index)}"
    style = {"line": {"color": hue, "width": 2.5}, "marker": {"color": hue, "symbol": symbol(index), "size": 9}}
    text = [escape_markup(row.load) for row in rows]
    hover = f"%{{text}}, %{{x}} at once<br>{hover}{NAME}"
    return scatter(server, x, y, hover, "lines+markers", **(style | {"text": text} | more))


def _concurrency_axis(summary: Summary, run: Run) -> Figure:
    values = sorted({row_concurrency(row, run) for row in summary.rows if row.pooled.schedule is None})
    users = {load.user for row in summary.rows if (load := run.scenario.loads.get(row.load))}
    title = "chat users" if users == {"chat"} else "requests at once"
    marked: Figure = {"title": {"text": title}, "tickvals": values, "ticktext": [f"{v:,}" for v in values]}
    return marked | {"type": "log"} if values and values[-1] / values[0] > 20 else marked


def _rows_of_other_rate(summary: Summary) -> list[Row]:
    """The rows whose tok/s is defined otherwise than the first row's: they do not belong on the same axis."""
    definitions = [row.definitions.get("output_tok_s") for row in summary.rows]
    return [row for row, meaning in zip(summary.rows, definitions, strict=True) if meaning != definitions[0]]


def _not_drawn_findings(summary: Summary, others: Sequence[Row] = ()) -> list[str]:
    open_loops = [row for row in summary.rows if row.pooled.schedule is not None]
    reasons = (("their tok/s is defined otherwise", others), ("an open loop has no concurrency of its own", open_loops))
    return [f"Not drawn, since {why}: {', '.join(row.name for row in rows)}" for why, rows in reasons if rows]


def _why_empty(summary: Summary, otherwise: str) -> str:
    """Why there is nothing to draw."""
    only_open = all(row.pooled.schedule is not None for row in summary.rows)
    return "All loads are open loops, which have no concurrency of their own." if only_open else otherwise


def throughput_chart(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    rings: list[Figure] = []
    findings: list[str] = []
    others = _rows_of_other_rate(summary)
    curves = list(_curves(summary, run, lambda row: bool(row.output_tok_s) and row not in others))
    for i, server, rows in curves:
        medians = [statistics.median(row.output_tok_s) for row in rows]
        x = [row_concurrency(row, run) for row in rows]
        errors = whiskers(medians, [row.output_tok_s for row in rows], f"@{colour(i)}")
        data.append(_curve_trace(i, server, rows, x, medians, "<b>%{y:,.1f} tok/s</b>", error_y=errors))
        knee = find_knee(list(zip(x, medians, strict=True)))
        if knee is not None:
            only_curve = sum(name == server for _, name, _ in curves) == 1
            loads = "" if only_curve else f" ({', '.join(row.load for row in rows)})"
            findings.append(f"{server}{loads}: {knee}")
            if not knee.is_open:  # rings differ in size, because those of similar servers are concentric
                ring = {"symbol": "circle-open", "size": 20 + 7 * i, "color": f"@{colour(i)}", "line": {"width": 2}}
                hover = f"<b>%{{text}}</b>{NAME}"
                rings.append(scatter(server, [knee.at], [knee.rate], hover, "markers", text=[str(knee)], marker=ring))
    return Chart(
        id="throughput",
        title="Throughput over concurrency",
        caption="Aggregate output tokens per second, median of the repeats; whiskers from the least to the most. "
        "A line joins loads that differ in concurrency alone. Ring: the knee, the least concurrency that gives "
        "95\u00a0% of the best. Higher is better.",
        findings=findings + _not_drawn_findings(summary, others),
        formula=f"tok/s = output tokens inside the window ÷ window; {KNEE}",
        figure={"data": data + rings, "layout": {"xaxis": _concurrency_axis(summary, run), "yaxis": axis("tok/s")}},
        head=["Server", "Load", "At once", "Median tok/s", "Least", "Most", "Repeats"],
        body=[
            [
                row.server,
                row.load,
                str(row_concurrency(row, run)),
                *_median_min_max(row.output_tok_s),
                str(len(row.output_tok_s)),
            ]
            for row in summary.rows
        ],
        empty="" if data else _why_empty(summary, "No valid cell gave a throughput."),
    )


def _median_min_max(values: list[float]) -> list[str]:
    if not values:
        return [units.NOTHING] * 3
    return [units.significant(value) for value in (statistics.median(values), min(values), max(values))]


def first_token_chart(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    p50_of = {cell.id: cell.numbers.ttft_s.p50 for cell in summary.cells}
    for i, server, rows in _curves(summary, run, lambda row: row.pooled.ttft_s.p50 is not None):
        x = [row_concurrency(row, run) for row in rows]
        middles = [1000 * (row.pooled.ttft_s.p50 or 0.0) for row in rows]
        spread = [[1000 * p50 for name in row.cells if (p50 := p50_of.get(name)) is not None] for row in rows]
        hover, hue = "<b>%{y:,.1f} ms</b> ", f"@{colour(i)}"
        data.append(_curve_trace(i, server, rows, x, middles, f"{hover}p50", error_y=whiskers(middles, spread, hue)))
        tails = [None if (p95 := row.pooled.ttft_s.p95) is None else 1000 * p95 for row in rows]
        if any(tail is not None for tail in tails):
            thin, small = {"width": 1.5, "dash": "dot"}, {"symbol": f"{symbol(i)}-open", "size": 7}
            style = {"line": {"color": hue} | thin, "marker": {"color": hue} | small}
            data.append(_curve_trace(i, server, rows, x, tails, f"{hover}p95", **style))
    values = [value for trace in data for value in trace["y"] if value is not None]
    return Chart(
        id="first-token",
        title="Time to first token over concurrency",
        caption="Solid: half of the requests (p50), whiskers from the least to the most p50 of a cell. Dotted: 95 of "
        "100 requests (p95), where the sample carries it. Lower is better.",
        formula=f"{FORMULAS['ttft']}; pXX: XX % of the successful requests of all repeats took at most so long",
        figure={"data": data, "layout": {"xaxis": _concurrency_axis(summary, run), "yaxis": axis("ms", values)}},
        head=["Server", "Load", "At once", "TTFT p50, ms", "TTFT p95, ms", "Requests"],
        body=[
            [row.server, row.load, str(row_concurrency(row, run)), *_percentile_cells(row, "ttft_s")]
            for row in summary.rows
        ],
        findings=_not_drawn_findings(summary),
        empty="" if values else _why_empty(summary, "No row has the 11 successful requests that a p50 needs."),
    )


def _percentile_cells(row: Row, field: str) -> list[str]:
    sample = getattr(row.pooled, field)
    return [words.format_percentile(sample, "p50"), words.format_percentile(sample, "p95"), f"{sample.n:,}"]


def tradeoff_charts(summary: Summary, run: Run) -> list[Chart]:
    """TTFT and E2E over throughput."""
    titles = {"ttft": "Time to first token over throughput", "e2e": "E2E latency over throughput"}
    return [_tradeoff_chart(summary, run, key, title) for key, title in titles.items()]


def _tradeoff_chart(summary: Summary, run: Run, key: str, title: str) -> Chart:
    data: list[Figure] = []
    others = _rows_of_other_rate(summary)
    for i, server, rows in _curves(summary, run, lambda row: row.pooled.output_tok_s is not None):
        for name in ("p50", "p95"):
            values = {row.name: getattr(getattr(row.pooled, f"{key}_s"), name) for row in rows}
            known = [row for row in rows if row not in others and values[row.name] is not None]
            if known:
                data.append(_tradeoff_line(known, [1000 * values[row.name] for row in known], run, name, i, server))
    heights = [value for trace in data for value in trace["y"]]
    best: list[str] = []
    if run.scenario.swept is not None:
        p50 = {row.name: getattr(row.pooled, f"{key}_s").p50 for row in summary.rows if row.failed is None}
        drawn = [row for row in summary.rows if p50.get(row.name) is not None and row.pooled.output_tok_s is not None]
        line, best = pareto_trace(drawn, [(row.pooled.output_tok_s or 0.0, 1000 * p50[row.name]) for row in drawn])
        data += line
    return Chart(
        id=f"trade-{key}",
        title=title,
        caption="A point for each load, the number says how many requests at once. Solid: p50, dotted: p95 where the "
        "sample carries it. A line joins loads that differ in concurrency alone. Right and low is best.",
        formula="across: tok/s = output tokens inside the window ÷ window, median of the repeats; "
        f"up: {FORMULAS[key]}, percentile over the successful requests of all repeats",
        figure={"data": data, "layout": {"xaxis": axis("output tok/s"), "yaxis": axis("ms", heights)}},
        findings=best + _not_drawn_findings(summary, others),
        head=["Server", "Load", "At once", "tok/s", "p50, ms", "p95, ms", "Requests"],
        body=[
            [row.server, row.load, str(row_concurrency(row, run)), units.significant(row.pooled.output_tok_s)]
            + _percentile_cells(row, f"{key}_s")
            for row in summary.rows
        ],
        empty=""
        if heights
        else _why_empty(summary, "No row has both a throughput and the 11 successful requests that a p50 needs."),
    )


def _tradeoff_line(rows: list[Row], y: list[float], run: Run, name: str, index: int, server: str) -> Figure:
    median, hue = name == "p50", f"@{colour(index)}"
    x = [row.pooled.output_tok_s or 0.0 for row in rows]
    concurrency = [str(row_concurrency(row, run)) for row in rows]
    return scatter(
        server,
        x,
        y,
        f"%{{customdata}}<br>%{{x:,.1f}} tok/s, <b>%{{y:,.1f}} ms</b> {name}{NAME}",
        "lines+markers+text" if median else "lines+markers",
        text=_merge_close_labels(concurrency, x, y),
        customdata=[
            f"{escape_markup(row.load)}, {number} at once" for row, number in zip(rows, concurrency, strict=True)
        ],
        # The points of similar servers cover each other, so their labels are on different sides.
        textposition=("top center", "middle right", "bottom center", "middle left")[index % 4],
        textfont={"color": hue, "size": 11},
        cliponaxis=False,
        line={"color": hue, "width": 2.2 if median else 1.4, "dash": "solid" if median else "dot"},
        marker={"color": hue, "symbol": symbol(index) + ("" if median else "-open"), "size": 8},
    )


def _merge_close_labels(concurrency: list[str], x: list[float], y: list[float]) -> list[str]:
    """The labels of points; close neighbours share one."""
    labels: list[str] = []
    for i, label in enumerate(concurrency):
        if i and abs(x[i - 1] - x[i]) / (max(x) or 1.0) < 0.06 and max(y[i - 1 : i + 1]) < 1.3 * min(y[i - 1 : i + 1]):
            label = f"{labels[-1]}, {label}"
            labels[-1] = ""
        labels.append(label)
    return labels


def distribution_chart(summary: Summary, observed: ChartData, column: LatencyColumn) -> Chart:
    """The distribution function of a latency, with a line for each row."""
    curves, body = [], []
    for i, row in enumerate(summary.rows):
        sample = observed.rows.get(row.key, RowData()).latencies[column.field]
        values, shares = distribution_points(1000 * value for value in sample)
        hue, dash = row_style(summary, row)
        line = {"shape": "hv", "color": f"@{hue}", "dash": dash, "width": 2}
        hover = f"%{{y:.1%}} within <b>%{{x:,.1f}} ms</b>{NAME}"
        curves.append(scatter(row.name, [round(value, 3) for value in values], shares, hover, line=line, meta=i))
        pooled = getattr(row.pooled, column.field)
        percentiles = [words.format_percentile(pooled, name) for name in ("p50", "p90", "p95", "p99")]
        minimum, maximum = units.milliseconds(pooled.min), units.milliseconds(pooled.max)
        body.append([row.server, row.load, f"{pooled.n:,}", minimum, *percentiles, maximum])
    ends = [end for curve in curves for end in (*curve["x"][:1], *curve["x"][-1:])]
    return Chart(
        id=f"cdf-{column.name}",
        title=f"{column.about} ({column.title})",
        caption=f"Share of requests that {column.outcome}.",
        formula=f"{column.formula}; share(t) = successful requests that took ≤ t ÷ successful requests",
        figure={
            "data": curves,
            "layout": {
                "xaxis": axis("ms", ends, logarithmic_from=10) | {"rangemode": "normal"},
                "yaxis": {"tickformat": ".0%", "range": [0, 1.01], "tickvals": [0, 0.25, 0.5, 0.75, 0.95]},
            },
        },
        head=["Server", "Load", "Requests", "Least, ms", "p50", "p90", "p95", "p99", "Most, ms"],
        body=body,
        empty="" if ends else "No successful request has this number.",
    )


def scatter_charts(summary: Summary, observed: ChartData) -> list[Chart]:
    """TTFT and E2E of requests over their time of sending, thinned for long runs."""
    row_dots = max(30, min(MAX_DOTS, MAX_CHART_DOTS // max(1, len(summary.rows))))
    dots = []
    for row in summary.rows:
        data = observed.rows.get(row.key, RowData())
        shown = sorted(thin_dots(data.dots, row_dots), key=lambda dot: (dot.cell, dot.sent_s, dot.draw))
        dots.append((row, data, shown))
    return [
        _scatter_chart(summary, dots, "ttft", "Time to first token of single requests"),
        _scatter_chart(summary, dots, "e2e", "E2E latency of single requests"),
    ]


def _scatter_chart(summary: Summary, dots: list[tuple[Row, RowData, list[Dot]]], key: str, title: str) -> Chart:
    data: list[Figure] = []
    for i, (row, _, shown) in enumerate(dots):
        good = [dot for dot in shown if dot.error is None and (key == "e2e" or dot.ttft_s is not None)]
        failed = [dot for dot in shown if dot.error is not None]
        if good:
            hue, _ = row_style(summary, row)
            y = [round(1000 * ((dot.ttft_s or 0.0) if key == "ttft" else dot.took_s), 2) for dot in good]
            hover = f"sent at %{{x:.1f}} s: <b>%{{y:,.1f}} ms</b>{NAME}"
            marker = {"color": f"@{hue}", "symbol": load_symbol(summary, row), "size": 6, "opacity": 0.6}
            x = [round(dot.sent_s, 2) for dot in good]
            data.append(scatter(row.name, x, y, hover, "markers", marker=marker, meta=i))
        if failed:
            x, y = [round(dot.sent_s, 2) for dot in failed], [round(1000 * dot.took_s, 2) for dot in failed]
            hover = f"sent at %{{x:.1f}} s, <b>%{{text}}</b> after %{{y:,.1f}} ms{NAME}"
            marker, text = {"color": "@bad", "symbol": "x", "size": 9}, [dot.error for dot in failed]
            data.append(scatter(row.name, x, y, hover, "markers", text=text, marker=marker, meta=i))
    thinned = any(len(shown) < row_data.count + row_data.failures for _, row_data, shown in dots)
    few = f" Long rows are thinned at random; the {SLOWEST} slowest of each are always there." if thinned else ""
    return Chart(
        id=f"dots-{key}",
        title=title,
        caption=f"All repeats over each other. ✕: failed, at the time until it failed.{few}",
        formula=f"across: second of sending − second of its cell’s first measured request; up: {FORMULAS[key]}",
        figure={
            "data": data,
            "layout": {
                "xaxis": {"title": {"text": "sent, seconds after the first measured request"}, "zeroline": False},
                "yaxis": axis("ms", [value for trace in data for value in trace["y"]], logarithmic_from=10),
            },
        },
        head=["Server", "Load", "Requests", "Drawn", "Failed", "Slowest, ms"],
        body=[
            [row.server, row.load, f"{row_data.count + row_data.failures:,}", f"{len(shown):,}"]
            + [f"{row_data.failures:,}", units.milliseconds(getattr(row.pooled, f"{key}_s").max)]
            for row, row_data, shown in dots
        ],
        empty="" if data else "No measured request was recorded.",
    )


def slo_bounds(summary: Summary) -> dict[str, dict[str, float]]:
    """By latency, such as `ttft`: each SLO as the scenario has it, with its bound in seconds."""
    bounds: dict[str, dict[str, float]] = {}
    for result in summary.checks:
        try:
            check = parse_check(result.check)
        except ValueError:
            continue  # the list of checks shows the mistake
        latency, _, statistic = check.metric.rpartition("_")
        if not check.relative and latency in LATENCIES and statistic in STATISTICS:
            bounds.setdefault(latency, {})[check.text.strip()] = check.bound
        for slo in check.slos:
            bounds.setdefault(slo.latency, {})[slo.text.strip()] = slo.bound_s
    return bounds


def with_slo_lines(chart: Chart, bounds: dict[str, dict[str, float]]) -> Chart:
    """The chart with lines for the SLOs of its latency."""
    latency, axis = _AXES.get(chart.id, ("", ""))
    if chart.empty or latency not in bounds:
        return chart
    largest = max((value for trace in chart.figure["data"] for value in trace[axis] if value is not None), default=0.0)
    near = {text: 1000 * bound for text, bound in bounds[latency].items() if 1000 * bound <= _FAR * largest}
    far = [text for text in bounds[latency] if text not in near]
    layout = chart.figure["layout"]
    shapes = [*layout.get("shapes", []), *(_slo_line(axis, at, text) for text, at in near.items())]
    figure = {**chart.figure, "layout": {**layout, "shapes": shapes}}
    findings = [f"Far beyond what is shown: {', '.join(far)}"] if far else []
    return replace(chart, figure=figure, findings=[*chart.findings, *findings])


def _slo_line(axis: str, at_ms: float, text: str) -> Figure:
    other = "x" if axis == "y" else "y"
    below = {"yanchor": "top"} if axis == "y" else {}  # above it, the label of a line at the top is cut
    return {
        "type": "line", f"{axis}0": at_ms, f"{axis}1": at_ms, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper",
        "line": {"color": "@bad", "width": 1.3, "dash": "dash"},
        "label": {"text": escape_markup(text), "textposition": "end", "font": {"color": "@bad", "size": 11}, **below},
    }  # fmt: skip
