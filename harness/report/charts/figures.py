"""The charts as plotly figures in plain data, each with a caption and a table that says the same.

See `harness.report.charts.marks` for what they share.
"""

import statistics
from collections.abc import Callable

from harness import units
from harness.judge.verdicts import but_for_concurrency
from harness.report import words
from harness.report.charts.knee import FORMULA, Knee, in_words, knee_of
from harness.report.charts.marks import (
    GLYPHS,
    Chart,
    Figure,
    axis,
    colour,
    left_out,
    line,
    loads,
    open_loops,
    other_rates,
    plain,
    row_style,
    servers,
    symbol,
    whiskers,
)
from harness.report.charts.observed import ChartData, LatencySamples, distribution
from harness.report.charts.request_dots import MOST_DOTS, SLOWEST, Choice, Dot
from harness.report.words import FORMULAS
from harness.rundir.manifest import Run
from harness.scenario.mixes import mix_of
from harness.summary import Distribution, Row, Summary

MOST_OF_ALL = 2400  # dots of one chart, whatever the number of rows; two charts of 6,000 take a browser 0.8 s

_DOT_TITLES = {"ttft": "Time to first token of single requests", "e2e": "Whole answers of single requests"}


def throughput(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    knees: list[tuple[int, str, Knee]] = []
    others = other_rates(summary)
    for i, server in enumerate(servers(summary)):
        curves = by_concurrency(summary, run, server, lambda row: bool(row.output_tok_s) and row not in others)
        for rows in curves:
            medians = [statistics.median(row.output_tok_s) for row in rows]
            data.append(
                line(server, i, [at_once(row, run) for row in rows], medians)
                | {
                    "text": [plain(row.load) for row in rows],
                    "error_y": whiskers(medians, [row.output_tok_s for row in rows], i),
                    "hovertemplate": "%{text}, %{x} at once<br><b>%{y:,.1f} tok/s</b><extra>%{fullData.name}</extra>",
                }
            )
            knee = knee_of([(at_once(row, run), rate) for row, rate in zip(rows, medians, strict=True)])
            if knee is not None:
                which = "" if len(curves) == 1 else f" ({', '.join(row.load for row in rows)})"
                knees.append((i, f"{server}{which}", knee))
    data += [_ring(i, server, knee) for i, server, knee in knees if not knee.open]
    body = [
        [row.server, row.load, str(at_once(row, run)), *_three(row.output_tok_s), str(len(row.output_tok_s))]
        for row in summary.rows
    ]
    return Chart(
        id="throughput",
        title="Throughput over concurrency",
        caption="Aggregate output tokens per second, median of the runs; whiskers from the least to the most. "
        "A line joins loads that differ in concurrency alone. Ring: the knee, the least concurrency that gives "
        "95\u00a0% of the best. Higher is better.",
        findings=[f"{server}: {in_words(knee)}" for _, server, knee in knees] + left_out(others) + open_loops(summary),
        formula=f"tok/s = output tokens inside the window ÷ window; {FORMULA}",
        figure={"data": data, "layout": {"xaxis": _concurrency_axis(summary, run), "yaxis": axis("tok/s")}},
        head=["Server", "Load", "At once", "Median tok/s", "Least", "Most", "Runs"],
        body=body,
        empty="" if any(trace["x"] for trace in data) else without_closed(summary, "No valid run gave a throughput."),
    )


def _ring(index: int, server: str, knee: Knee) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(server),
        "x": [knee.at],
        "y": [knee.rate],
        "text": [in_words(knee)],
        # Rings of servers that are alike lie within each other.
        "marker": {"symbol": "circle-open", "size": 20 + 7 * index, "color": f"@{colour(index)}", "line": {"width": 2}},
        "hovertemplate": "<b>%{text}</b><extra>%{fullData.name}</extra>",
    }


def first_token(summary: Summary, run: Run) -> Chart:
    data: list[Figure] = []
    for i, server in enumerate(servers(summary)):
        for rows in by_concurrency(summary, run, server, lambda row: row.pooled.ttft_s.p50 is not None):
            data += _first_token_lines(summary, run, rows, i, server)
    values = [value for trace in data for value in trace["y"] if value is not None]
    return Chart(
        id="first-token",
        title="Time to first token over concurrency",
        caption="Solid: half of the requests (p50), whiskers from the least to the most p50 of a run. Dotted: 95 of "
        "100 requests (p95), where the sample carries it. Lower is better.",
        formula=f"{words.FORMULAS['ttft']}; pXX: XX % of the successful requests of all repeats took at most so long",
        figure={"data": data, "layout": {"xaxis": _concurrency_axis(summary, run), "yaxis": axis("ms", values)}},
        head=["Server", "Load", "At once", "TTFT p50, ms", "TTFT p95, ms", "Requests"],
        body=[
            [
                row.server,
                row.load,
                str(at_once(row, run)),
                words.percentile(row.pooled.ttft_s, "p50"),
                words.percentile(row.pooled.ttft_s, "p95"),
                f"{row.pooled.ttft_s.n:,}",
            ]
            for row in summary.rows
        ],
        findings=open_loops(summary),
        empty="" if values else without_closed(summary, "No row has the 11 successful requests that a p50 needs."),
    )


def without_closed(summary: Summary, otherwise: str) -> str:
    """Why there is nothing to draw."""
    only_open = all(row.pooled.schedule is not None for row in summary.rows)
    return "All loads are open loops, which have no concurrency of their own." if only_open else otherwise


def _first_token_lines(summary: Summary, run: Run, rows: list[Row], index: int, server: str) -> list[Figure]:
    """A server's p50 with whiskers, and its p95 where a row has one."""
    cells = {cell.id: cell.numbers.ttft_s.p50 for cell in summary.cells}
    x = [at_once(row, run) for row in rows]
    middles = [1000 * (row.pooled.ttft_s.p50 or 0.0) for row in rows]
    spread = [[1000 * p50 for name in row.cells if (p50 := cells.get(name)) is not None] for row in rows]
    hover = "%{text}, %{x} at once<br><b>%{y:,.1f} ms</b> "
    names = [plain(row.load) for row in rows]
    half = line(server, index, x, middles) | {
        "text": names,
        "error_y": whiskers(middles, spread, index),
        "hovertemplate": hover + "p50<extra>%{fullData.name}</extra>",
    }
    if all(row.pooled.ttft_s.p95 is None for row in rows):
        return [half]
    tails = [None if (p95 := row.pooled.ttft_s.p95) is None else 1000 * p95 for row in rows]
    tail = line(server, index, x, tails) | {
        "text": names,
        "line": {"color": f"@{colour(index)}", "width": 1.5, "dash": "dot"},
        "marker": {"color": f"@{colour(index)}", "symbol": f"{symbol(index)}-open", "size": 7},
        "hovertemplate": hover + "p95<extra>%{fullData.name}</extra>",
    }
    return [half, tail]


LATENCIES = (
    ("ttft", "Time to first token (TTFT)", "Share of requests whose first token came within the time."),
    ("tpot", "Time per output token (TPOT)", "Share of requests that streamed a token within the time."),
    ("e2e", "Whole answer (E2E)", "Share of requests whose last token came within the time."),
)


def distributions(summary: Summary, observed: ChartData) -> list[Chart]:
    """The distribution functions of TTFT, TPOT and E2E, a line per row."""
    charts = []
    for key, title, caption in LATENCIES:
        curves = [_curve(summary, row, observed, f"{key}_s") | {"meta": i} for i, row in enumerate(summary.rows)]
        ends = [end for curve in curves for end in (*curve["x"][:1], *curve["x"][-1:])]
        charts.append(
            Chart(
                id=f"cdf-{key}",
                title=title,
                caption=caption,
                formula=f"{words.FORMULAS[key]}; share(t) = successful requests that took ≤ t ÷ successful requests",
                figure={
                    "data": curves,
                    "layout": {
                        "xaxis": axis("ms", ends, logarithmic_from=10) | {"rangemode": "normal"},
                        "yaxis": {"tickformat": ".0%", "range": [0, 1.01], "tickvals": [0, 0.25, 0.5, 0.75, 0.95]},
                    },
                },
                head=["Server", "Load", "Requests", "Least, ms", "p50", "p90", "p95", "p99", "Most, ms"],
                body=[_spread(row, getattr(row.pooled, f"{key}_s")) for row in summary.rows],
                empty="" if ends else "No successful request has this number.",
            )
        )
    return charts


def _curve(summary: Summary, row: Row, observed: ChartData, field: str) -> Figure:
    sample: list[float] = getattr(observed.samples.get(row.key, LatencySamples()), field)
    values, shares = distribution(1000 * value for value in sample)
    hue, dash = row_style(summary, row)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(row.name),
        "x": [round(value, 3) for value in values],
        "y": shares,
        "line": {"shape": "hv", "color": f"@{hue}", "dash": dash, "width": 2},
        "hovertemplate": "%{y:.1%} within <b>%{x:,.1f} ms</b><extra>%{fullData.name}</extra>",
    }


def by_concurrency(summary: Summary, run: Run, server: str, drawn: Callable[[Row], bool]) -> list[list[Row]]:
    """The rows that have a concurrency, those on one curve together: their loads differ in nothing else.

    In an open loop the server's speed decides how many are in flight. A part of a mix has others beside it, and lies
    on no curve of its own.
    """
    closed = [row for row in summary.rows if row.server == server and row.pooled.schedule is None and drawn(row)]
    curves: dict[bytes | None, list[Row]] = {}
    for row in sorted(closed, key=lambda row: at_once(row, run)):
        if mix_of(row.load) is None:
            load = run.scenario.loads.get(row.load)
            curves.setdefault(None if load is None else but_for_concurrency(load), []).append(row)
    return list(curves.values())


def at_once(row: Row, run: Run) -> int:
    load = run.scenario.loads.get(row.load)
    return words.concurrency(load) if load else 1


def _concurrency_axis(summary: Summary, run: Run) -> Figure:
    values = sorted({at_once(row, run) for row in summary.rows if row.pooled.schedule is None})
    people = {load.user for row in summary.rows if (load := run.scenario.loads.get(row.load))}
    title = "chat users" if people == {"chat"} else "requests at once"
    marked: Figure = {"title": {"text": title}, "tickvals": values, "ticktext": [f"{v:,}" for v in values]}
    return marked | {"type": "log"} if values and values[-1] / values[0] > 20 else marked


def _three(values: list[float]) -> list[str]:
    if not values:
        return [units.NOTHING] * 3
    return [units.significant(value) for value in (statistics.median(values), min(values), max(values))]


def _spread(row: Row, sample: Distribution) -> list[str]:
    ends = [units.milliseconds(value) for value in (sample.least, sample.most)]
    middle = [words.percentile(sample, name) for name in ("p50", "p90", "p95", "p99")]
    return [row.server, row.load, f"{sample.n:,}", ends[0], *middle, ends[1]]


def scatters(summary: Summary, observed: ChartData) -> list[Chart]:
    """TTFT and E2E of requests over the second in which they were sent, thinned for long runs."""
    each = max(30, min(MOST_DOTS, MOST_OF_ALL // max(1, len(summary.rows))))
    choices = [observed.chosen.get(row.key, Choice()) for row in summary.rows]
    dots = [choice.chosen(each) for choice in choices]
    thinned = any(len(shown) < choice.count + choice.failures for shown, choice in zip(dots, choices, strict=True))
    return [_scatter(summary, dots, choices, key, thinned) for key in _DOT_TITLES]


def _scatter(summary: Summary, dots: list[list[Dot]], choices: list[Choice], key: str, thinned: bool) -> Chart:
    data: list[Figure] = []
    for i, row in enumerate(summary.rows):
        good = [(dot, _dot_value(dot, key)) for dot in dots[i] if dot.error is None]
        known = [(dot, value) for dot, value in good if value is not None]
        failed = [dot for dot in dots[i] if dot.error is not None]
        if known:
            data.append(_good_dots(summary, row, known) | {"meta": i})
        if failed:
            data.append(_failed_dots(row, failed) | {"meta": i})
    values = [value for trace in data for value in trace["y"]]
    few = f" Long rows are thinned by chance; the {SLOWEST} slowest of each are always there." if thinned else ""
    return Chart(
        id=f"dots-{key}",
        title=_DOT_TITLES[key],
        caption=f"All repeats over each other. ✕: failed, at the time until it failed.{few}",
        formula=f"across: second of sending − second of its run’s first measured request; up: {FORMULAS[key]}",
        figure={
            "data": data,
            "layout": {
                "xaxis": {"title": {"text": "sent, seconds after the first measured request"}, "zeroline": False},
                "yaxis": axis("ms", values, logarithmic_from=10),
            },
        },
        head=["Server", "Load", "Requests", "Drawn", "Failed", "Slowest, ms"],
        body=[
            [
                row.server,
                row.load,
                f"{choice.count + choice.failures:,}",
                f"{len(shown):,}",
                f"{choice.failures:,}",
                units.milliseconds(getattr(row.pooled, f"{key}_s").most),
            ]
            for row, choice, shown in zip(summary.rows, choices, dots, strict=True)
        ],
        empty="" if data else "No measured request was recorded.",
    )


def _good_dots(summary: Summary, row: Row, known: list[tuple[Dot, float]]) -> Figure:
    hue, _ = row_style(summary, row)
    symbols = tuple(GLYPHS)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(row.name),
        "x": [round(dot.sent_s, 2) for dot, _ in known],
        "y": [round(value, 2) for _, value in known],
        "marker": {
            "color": f"@{hue}",
            "symbol": symbols[loads(summary).index(row.load) % len(symbols)],
            "size": 6,
            "opacity": 0.6,
        },
        "hovertemplate": "sent at %{x:.1f} s: <b>%{y:,.1f} ms</b><extra>%{fullData.name}</extra>",
    }


def _failed_dots(row: Row, failed: list[Dot]) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(row.name),
        "x": [round(dot.sent_s, 2) for dot in failed],
        "y": [round(1000 * dot.took_s, 2) for dot in failed],
        "text": [dot.error for dot in failed],
        "marker": {"color": "@bad", "symbol": "x", "size": 9},
        "hovertemplate": "sent at %{x:.1f} s, <b>%{text}</b> after %{y:,.1f} ms<extra>%{fullData.name}</extra>",
    }


def _dot_value(dot: Dot, key: str) -> float | None:
    """Milliseconds."""
    seconds = dot.ttft_s if key == "ttft" else dot.took_s
    return None if seconds is None else 1000 * seconds
