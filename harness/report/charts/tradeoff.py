"""Latency against throughput: what each server's users wait for what it gives."""

from harness import units
from harness.report import words
from harness.report.charts.figures import at_once, by_concurrency, without_closed
from harness.report.charts.marks import (
    Chart,
    Figure,
    axis,
    colour,
    left_out,
    open_loops,
    other_rates,
    plain,
    servers,
    symbol,
)
from harness.rundir.manifest import Run
from harness.summary import Distribution, Row, Summary

_TITLES = {"ttft": "Time to first token over throughput", "e2e": "Whole answer over throughput"}


def tradeoffs(summary: Summary, run: Run) -> list[Chart]:
    return [_tradeoff(summary, run, key) for key in _TITLES]


def _tradeoff(summary: Summary, run: Run, key: str) -> Chart:
    field = f"{key}_s"
    data: list[Figure] = []
    others = other_rates(summary)
    for i, server in enumerate(servers(summary)):
        for rows in by_concurrency(summary, run, server, lambda row: row.pooled.output_tok_s is not None):
            for name, dash in (("p50", "solid"), ("p95", "dot")):
                data += _line([row for row in rows if row not in others], run, field, name, i, server, dash)
    values = [value for trace in data for value in trace["y"]]
    return Chart(
        id=f"trade-{key}",
        title=_TITLES[key],
        caption="A point for each load, the number says how many requests at once. Solid: p50, dotted: p95 where the "
        "sample carries it. A line joins loads that differ in concurrency alone. Right and low is best.",
        formula="across: tok/s = output tokens inside the window ÷ window, median of the runs; "
        f"up: {words.FORMULAS[key]}, percentile over the successful requests of all repeats",
        figure={"data": data, "layout": {"xaxis": axis("output tok/s"), "yaxis": axis("ms", values)}},
        findings=left_out(others) + open_loops(summary),
        head=["Server", "Load", "At once", "tok/s", "p50, ms", "p95, ms", "Requests"],
        body=[_words(row, run, getattr(row.pooled, field)) for row in summary.rows],
        empty=""
        if values
        else without_closed(summary, "No row has both a throughput and the 11 successful requests that a p50 needs."),
    )


def _line(rows: list[Row], run: Run, field: str, name: str, index: int, server: str, dash: str) -> list[Figure]:
    known = [row for row in rows if getattr(getattr(row.pooled, field), name) is not None]
    if not known:
        return []
    open_symbol = "" if name == "p50" else "-open"
    return [
        {
            "type": "scatter",
            "mode": "lines+markers+text" if name == "p50" else "lines+markers",
            "name": plain(server),
            "x": [row.pooled.output_tok_s for row in known],
            "y": [1000 * getattr(getattr(row.pooled, field), name) for row in known],
            "text": _labels(known, run, field, name),
            "customdata": [f"{plain(row.load)}, {at_once(row, run)} at once" for row in known],
            # Servers that behave alike lie on each other; their labels then stand on different sides.
            "textposition": ("top center", "middle right", "bottom center", "middle left")[index % 4],
            "textfont": {"color": f"@{colour(index)}", "size": 11},
            "cliponaxis": False,
            "line": {"color": f"@{colour(index)}", "width": 2.2 if name == "p50" else 1.4, "dash": dash},
            "marker": {"color": f"@{colour(index)}", "symbol": symbol(index) + open_symbol, "size": 8},
            "hovertemplate": f"%{{customdata}}<br>%{{x:,.1f}} tok/s, <b>%{{y:,.1f}} ms</b> {name}"
            "<extra>%{fullData.name}</extra>",
        }
    ]


def _labels(rows: list[Row], run: Run, field: str, name: str) -> list[str]:
    """How many requests at once, by each point; points that lie close together share a label."""
    most = max(row.pooled.output_tok_s or 0.0 for row in rows)
    labels: list[list[str]] = []
    for i, row in enumerate(rows):
        label = [str(at_once(row, run))]
        if i and _close(rows[i - 1], row, most, field, name):
            label = labels[-1] + label
            labels[-1] = []
        labels.append(label)
    return [", ".join(label) for label in labels]


def _close(one: Row, other: Row, most: float, field: str, name: str) -> bool:
    across = abs((one.pooled.output_tok_s or 0.0) - (other.pooled.output_tok_s or 0.0)) / (most or 1.0)
    low, high = sorted(getattr(getattr(row.pooled, field), name) for row in (one, other))
    return across < 0.06 and high < 1.3 * low


def _words(row: Row, run: Run, sample: Distribution) -> list[str]:
    return [
        row.server,
        row.load,
        str(at_once(row, run)),
        units.significant(row.pooled.output_tok_s),
        words.percentile(sample, "p50"),
        words.percentile(sample, "p95"),
        f"{sample.n:,}",
    ]
