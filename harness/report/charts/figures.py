"""The charts of rows as plotly figures in plain data, each with a caption and its numbers as a table."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from harness.base import units
from harness.base.measured import NEEDED
from harness.base.metrics import METRICS, Metric
from harness.numbers.peak_curve import KNEE_SHARE, MIN_KNEE_LEVELS
from harness.numbers.summary import Row, Summary
from harness.numbers.verdicts import metric_values, without_concurrency
from harness.records.manifest import QUICK, Run
from harness.report import words
from harness.report.charts import (
    NAME,
    Chart,
    Figure,
    axis,
    colour,
    escape_markup,
    row_style,
    scatter,
    server_names,
    shown_rows,
    symbol,
    whiskers,
)
from harness.report.charts.data import MAX_DOTS, SLOWEST, ChartData, RowData, distribution_points, thin_dots
from harness.report.charts.sweeps import pareto_trace
from harness.scenario.check_syntax import parse_check
from harness.scenario.plan import mix_of

MAX_CHART_DOTS = 2400  # of all rows: a browser draws more of them slowly
KNEE = (
    "best = highest median throughput of the server; knee = least concurrency whose median is ≥ 90 % of best; "
    "falls = least concurrency beyond the best one whose median is < 90 % of best"
)
# By chart: its latency, and the axis that shows it in milliseconds.
_AXES = {
    "first-token": ("ttft", "y"), "trade-e2e": ("e2e", "y"), "dots-e2e": ("e2e", "y"), "cdf-ttft": ("ttft", "x"),
    "cdf-tpot": ("tpot", "x"), "cdf-e2e": ("e2e", "x"),
}  # fmt: skip
_SHARES = (0, 25, 50, 75, 95)  # that the axis of a distribution names
_FAR = 3  # times the largest value: a line beyond that would flatten the curves
_NO_CURVE = "No load with a fixed concurrency has enough successful requests for it."


def describe_knee(points: Sequence[tuple[int, float]]) -> str:
    """The knee of (concurrency, throughput) points, which needs three concurrencies; empty for fewer than two.

    Of several points with one concurrency the best counts.
    """
    rates: dict[int, float] = {}
    for level, rate in points:
        rates[level] = max(rate, rates.get(level, 0.0))
    best = max(rates, key=lambda level: (rates[level], -level), default=0)
    if len(rates) < 2 or rates[best] <= 0:
        return ""
    least, most = min(rates), max(rates)
    if len(rates) < MIN_KNEE_LEVELS:
        gain = f"{units.factor(rates[most] / rates[least])}x the tok/s of {least}" if rates[least] > 0 else "the best"
        return f"{most} at once give {gain}; a knee needs {MIN_KNEE_LEVELS} levels or more"
    enough = KNEE_SHARE * rates[best]
    knee = min(level for level in rates if rates[level] >= enough)
    if knee == most:
        return f"no knee among the {len(rates)} levels up to {knee} at once: it still rises there"
    falls_at = [level for level in rates if level > best and rates[level] < enough]
    beyond = f"falls from {min(falls_at)} at once on" if falls_at else "more does not help"
    return f"knee at {knee} at once, {units.figures(100 * rates[knee] / rates[best])}\u00a0% of the best; {beyond}"


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
    return scatter(server, x, y, f"{hover}{NAME}", "lines+markers", **(style | {"text": text} | more))


def _concurrency_axis(summary: Summary, run: Run) -> Figure:
    values = sorted({row_concurrency(row, run) for row in summary.rows if row.pooled.schedule is None})
    users = {load.user for row in summary.rows if (load := run.scenario.loads.get(row.load))}
    title = "chat users" if users == {"chat"} else "requests at once"
    marked: Figure = {"title": {"text": title}, "tickvals": values, "ticktext": [f"{v:,}" for v in values]}
    return marked | {"type": "log"} if values and values[-1] / values[0] > 20 else marked


def _has_same_rate(summary: Summary, row: Row) -> bool:
    """Whether the row's tok/s means the same as the first row's; others do not belong on the same axis."""
    return row.definitions.get("output_tok_s") == summary.rows[0].definitions.get("output_tok_s")


def throughput_chart(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    findings: list[str] = []
    curves = list(_curves(summary, run, lambda row: bool(row.output_tok_s) and _has_same_rate(summary, row)))
    for i, server, rows in curves:
        medians = [statistics.median(row.output_tok_s) for row in rows]
        x = [row_concurrency(row, run) for row in rows]
        errors = whiskers(medians, [row.output_tok_s for row in rows], f"@{colour(i)}")
        hover = "%{text}, %{x} at once<br><b>%{y:,.1f} tok/s</b>"
        data.append(_curve_trace(i, server, rows, x, medians, hover, error_y=errors))
        # The probes of a search are too short for a knee, which `--knee` measures.
        if run.kind != "search" and (knee := describe_knee(list(zip(x, medians, strict=True)))):
            only_curve = sum(name == server for _, name, _ in curves) == 1
            loads = "" if only_curve else f" ({', '.join(row.load for row in rows)})"
            findings.append(f"{server}{loads}: {knee}" if len(curves) > 1 else knee)
    return Chart(
        id="throughput",
        title="Throughput over concurrency",
        caption="Output tokens a second of all requests together, median and range of the repeats. Higher is better.",
        findings=findings,
        formula=f"tok/s = output tokens inside the window ÷ window; {KNEE}",
        figure=_concurrency_figure(data, summary, run, axis("tok/s")),
        head=["Server", "Load", "At once", "Median tok/s", "Least", "Most", "Repeats"],
        body=[
            [*_row_cells(row, run), *_median_min_max(row.output_tok_s), str(len(row.output_tok_s))]
            for row in summary.rows
        ],
        empty=_empty_curve(data),
    )


def _concurrency_figure(data: list[Figure], summary: Summary, run: Run, y_axis: Figure) -> Figure:
    names = {trace["name"] for trace in data}
    layout = {"xaxis": _concurrency_axis(summary, run), "yaxis": y_axis, "showlegend": len(names) > 1}
    return {"data": data, "layout": layout}


def _empty_curve(data: Sequence[Figure]) -> str:
    """Why nothing is drawn: no line has two points."""
    return "" if any(len(set(trace["x"])) > 1 for trace in data) else _NO_CURVE


def rows_chart(summary: Summary) -> Chart:
    """The rows as bars, by the number that they are compared by."""
    verdicts = [] if summary.comparison is None else summary.comparison.verdicts
    wanted = ([verdicts[0].metric] if verdicts else []) + ["output_tok_s", "input_tok_s", "e2e_p50"]
    cells = {cell.id: cell for cell in summary.cells}
    valued: list[tuple[Row, list[float]]] = []
    for name in wanted:
        metric = METRICS[name]
        samples = ((row, [value for value in metric_values(row, cells, name) if value]) for row in summary.rows)
        valued = [(row, values) for row, values in samples if values and row.failed is None]
        if len(valued) > 1:
            break
    scale, unit = (1000, "ms") if metric.latency else (1, metric.unit)
    samples_shown = [[scale * value for value in values] for _, values in valued]
    medians, names = list(map(statistics.median, samples_shown)), [row.name for row, _ in valued]
    bars: Figure = {
        "type": "bar", "orientation": "h", "y": list(map(escape_markup, names)), "x": medians,
        "marker": {"color": [f"@{row_style(summary, row)[0]}" for row, _ in valued]},
        "error_x": whiskers(medians, samples_shown, "@ink"),
        "hovertemplate": f"%{{y}}<br><b>%{{x:,.4g}} {unit}</b><extra></extra>",
    }  # fmt: skip
    return Chart(
        id="rows",
        title=f"{metric.title[0].upper()}{metric.title[1:]} of each row",
        caption="Median of the repeats; whiskers from the least to the most. "
        f"{'More' if metric.more_is_better else 'Less'} is better.",
        formula=metric.formula,
        figure={
            "data": [bars],
            "layout": {
                "height": 110 + 34 * len(valued), "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
                "yaxis": {"autorange": "reversed", "type": "category"},
            },
        },
        head=["Row", f"Median, {unit}", "Least", "Most", "Repeats"],
        body=[[row.name, *_median_min_max([scale * value for value in values]), str(len(values))]
              for row, values in valued],
        empty="" if len(valued) > 1 else "There is one row.",
    )  # fmt: skip


def _row_cells(row: Row, run: Run) -> list[str]:
    return [row.server, row.load, str(row_concurrency(row, run))]


def _median_min_max(values: list[float]) -> list[str]:
    if not values:
        return [units.NOTHING] * 3
    return [units.significant(value) for value in (statistics.median(values), min(values), max(values))]


def first_token_chart(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    for i, server, rows in _curves(summary, run, lambda row: row.pooled.ttft.p50 is not None):
        x, hue = [row_concurrency(row, run) for row in rows], f"@{colour(i)}"
        hover = "%{text}, %{x} at once<br><b>%{y:,.1f} ms</b>"
        medians = [1000 * (row.pooled.ttft.p50 or 0.0) for row in rows]
        data.append(_curve_trace(i, server, rows, x, medians, f"{hover} p50"))
        tails = [None if (p95 := row.pooled.ttft.p95) is None else 1000 * p95 for row in rows]
        if any(tail is not None for tail in tails):
            line = {"color": hue, "width": 1.5, "dash": "dot"}
            marker = {"color": hue, "symbol": f"{symbol(i)}-open", "size": 7}
            style = {"line": line, "marker": marker, "showlegend": False}
            data.append(_curve_trace(i, server, rows, x, tails, f"{hover} p95", **style))
    values = [value for trace in data for value in trace["y"] if value is not None]
    return Chart(
        id="first-token",
        title="Time to first token over concurrency",
        caption="Solid: half of the requests (p50). Dotted: 95 of 100 requests (p95), where the sample carries it. "
        "Lower is better.",
        formula=f"{METRICS['ttft'].formula}; pXX: XX % of the successful requests of all repeats took at most so long",
        figure=_concurrency_figure(data, summary, run, axis("ms", values)),
        head=["Server", "Load", "At once", "TTFT p50, ms", "TTFT p95, ms", "Requests"],
        body=[[*_row_cells(row, run), *_percentile_cells(row, "ttft")] for row in summary.rows],
        empty=_empty_curve(data),
    )


def _percentile_cells(row: Row, latency: str) -> list[str]:
    texts = [words.format_percentile(row, METRICS[f"{latency}_{name}"]) for name in ("p50", "p95")]
    return [*texts, f"{METRICS[latency].sample(row.pooled).n:,}"]


def tradeoff_chart(summary: Summary, run: Run) -> Chart:
    """E2E over throughput."""

    def has_both(row: Row) -> bool:
        numbers = row.pooled
        return numbers.output_tok_s is not None and numbers.e2e.p50 is not None and _has_same_rate(summary, row)

    def point(row: Row) -> tuple[float, float]:
        return row.pooled.output_tok_s or 0.0, 1000 * (row.pooled.e2e.p50 or 0.0)

    data: list[Figure] = []
    for i, server, rows in _curves(summary, run, has_both):
        x, y = map(list, zip(*map(point, rows), strict=True))
        at_once = [f"{row_concurrency(row, run)} at once" for row in rows]
        hover = "%{text}, %{customdata}<br>%{x:,.1f} tok/s, <b>%{y:,.1f} ms</b>"
        data.append(_curve_trace(i, server, rows, x, y, hover, customdata=at_once))
    heights = [value for trace in data for value in trace["y"]]
    findings: list[str] = []
    if run.scenario.swept is not None:
        rows = [row for row in summary.rows if row.failed is None and has_both(row)]
        front, findings = pareto_trace(rows, list(map(point, rows)))
        data += front
    return Chart(
        id="trade-e2e",
        title="E2E latency over throughput",
        caption="A point for each load: half of the requests were answered within this time (p50). A line joins loads "
        "that differ in concurrency alone. Right and low is best.",
        formula="across: tok/s = output tokens inside the window ÷ window, median of the repeats; "
        f"up: {METRICS['e2e'].formula}, percentile over the successful requests of all repeats",
        figure={
            "data": data,
            "layout": {
                "xaxis": axis("output tok/s"),
                "yaxis": axis("ms", heights),
                "showlegend": len({trace["name"] for trace in data}) > 1,
            },
        },
        findings=findings,
        head=["Server", "Load", "At once", "tok/s", "p50, ms", "p95, ms", "Requests"],
        body=[
            [*_row_cells(row, run), units.significant(row.pooled.output_tok_s), *_percentile_cells(row, "e2e")]
            for row in summary.rows
        ],
        empty="" if len(heights) > 1 else _NO_CURVE,
    )


def distribution_chart(summary: Summary, observed: ChartData, latency: Metric) -> Chart:
    """The distribution function of a latency, with a line for each row."""
    curves, body, shown = [], [], shown_rows(summary)
    names = () if summary.scenario == QUICK else tuple(NEEDED)  # the results of quick have the median of few requests
    for i, row in enumerate(summary.rows):
        values, shares = distribution_points(observed.rows.get(row.key, RowData()).latencies.get(latency.name, []))
        hue, dash = row_style(summary, row)
        line = {"shape": "hv", "color": f"@{hue}", "dash": dash, "width": 2}
        hover = f"%{{y:.1f}}\u00a0% within <b>%{{x:,.1f}} ms</b>{NAME}"
        x, y = [round(1000 * value, 3) for value in values], [round(100 * share, 3) for share in shares]
        curves.append(scatter(row.name, x, y, hover, line=line, meta=i, visible=row.name in shown))
        pooled = latency.sample(row.pooled)
        percentiles = [words.format_percentile(row, METRICS[f"{latency.name}_{name}"]) for name in names]
        minimum, maximum = units.milliseconds(pooled.min), words.format_maximum(pooled)
        body.append([row.server, row.load, f"{pooled.known_count:,}", minimum, *percentiles, maximum])
    ends = [end for curve in curves for end in (*curve["x"][:1], *curve["x"][-1:])]
    return Chart(
        id=f"cdf-{latency.name}",
        title=f"{latency.about} ({latency.title})",
        caption=f"Share of requests that {latency.outcome}.",
        formula=f"{latency.formula}; share(t) = requests that took ≤ t ÷ requests (Kaplan-Meier)",
        figure={
            "data": curves,
            "layout": {
                "xaxis": axis("ms", ends, logarithmic_from=10) | {"rangemode": "normal"},
                "yaxis": {"range": [0, 101], "tickvals": _SHARES, "ticktext": [f"{share}\u00a0%" for share in _SHARES]},
            },
        },
        head=["Server", "Load", "Requests", "Least, ms", *names, "Most, ms"],
        body=body,
        empty="" if len(set(ends)) > 1 else "No two requests have different numbers.",
    )


def request_chart(summary: Summary, observed: ChartData) -> Chart:
    """E2E of requests over their time of sending, thinned for long runs."""
    row_dots = max(30, min(MAX_DOTS, MAX_CHART_DOTS // max(1, len(summary.rows))))
    data: list[Figure] = []
    body, shown = [], shown_rows(summary)
    for i, row in enumerate(summary.rows):
        row_data = observed.rows.get(row.key, RowData())
        dots = sorted(thin_dots(row_data.dots, row_dots), key=lambda dot: (dot.cell, dot.sent_s, dot.took_s))
        good = [dot for dot in dots if dot.error is None]
        failed = [dot for dot in dots if dot.error is not None]
        good_marker = {"color": f"@{row_style(summary, row)[0]}", "size": 6, "opacity": 0.6}
        failed_marker = {"color": "@bad", "symbol": "x", "size": 9}
        for group, marker in ((good, good_marker), (failed, failed_marker)):
            if group:
                x, y = [round(dot.sent_s, 2) for dot in group], [round(1000 * dot.took_s, 2) for dot in group]
                text = [dot.error or "answered" for dot in group]
                hover = f"sent at %{{x:.1f}} s, %{{text}} after <b>%{{y:,.1f}} ms</b>{NAME}"
                more = {"text": text, "marker": marker, "meta": i, "visible": row.name in shown}
                data.append(scatter(row.name, x, y, hover, "markers", **more))
        requests = row_data.count + row_data.failures
        slowest = words.format_maximum(row.pooled.e2e)
        body.append([row.server, row.load, f"{requests:,}", f"{len(dots):,}", f"{row_data.failures:,}", slowest])
    return Chart(
        id="dots-e2e",
        title="E2E latency of single requests",
        caption="All repeats over each other. ✕: failed, at the time until it failed. Long rows are thinned at random; "
        f"the {SLOWEST} slowest of each are always there.",
        formula="across: second of sending − second of its cell’s first measured request; up: "
        + METRICS["e2e"].formula,
        figure={
            "data": data,
            "layout": {
                "xaxis": {"title": {"text": "sent, seconds after the first measured request"}, "zeroline": False},
                "yaxis": axis("ms", [value for trace in data for value in trace["y"]], logarithmic_from=10),
            },
        },
        head=["Server", "Load", "Requests", "Drawn", "Failed", "Slowest, ms"],
        body=body,
        empty="" if sum(len(trace["x"]) for trace in data) > 1 else "No two measured requests were recorded.",
    )


def slo_bounds(summary: Summary) -> dict[str, dict[str, float]]:
    """By latency, such as `ttft`: each SLO as the scenario has it, with its bound in seconds."""
    bounds: dict[str, dict[str, float]] = {}
    for result in summary.checks:
        try:
            check = parse_check(result.check)
        except ValueError:
            continue  # the list of checks shows the mistake
        metric = METRICS[check.metric]
        if not check.relative and metric.latency:
            bounds.setdefault(metric.latency, {})[check.text.strip()] = check.bound
        for slo in check.slos:
            bounds.setdefault(slo.latency, {})[slo.text.strip()] = slo.bound_s
    return bounds


def with_slo_lines(chart: Chart, bounds: dict[str, dict[str, float]]) -> Chart:
    """The chart with lines for the SLOs of its latency, unless they are far beyond what it shows."""
    latency, axis = _AXES.get(chart.id, ("", ""))
    if chart.empty or latency not in bounds:
        return chart
    largest = max((value for trace in chart.figure["data"] for value in trace[axis] if value is not None), default=0.0)
    lines = [
        _slo_line(axis, 1000 * bound, text) for text, bound in bounds[latency].items() if 1000 * bound <= _FAR * largest
    ]
    layout = chart.figure["layout"]
    return replace(chart, figure={**chart.figure, "layout": {**layout, "shapes": [*layout.get("shapes", []), *lines]}})


def _slo_line(axis: str, at_ms: float, text: str) -> Figure:
    other = "x" if axis == "y" else "y"
    below = {"yanchor": "top"} if axis == "y" else {}  # above it, the label of a line at the top is cut
    return {
        "type": "line", f"{axis}0": at_ms, f"{axis}1": at_ms, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper",
        "line": {"color": "@bad", "width": 1.3, "dash": "dash"},
        "label": {"text": escape_markup(text), "textposition": "end", "font": {"color": "@bad", "size": 11}, **below},
    }  # fmt: skip
