"""Single requests over the time of sending."""

from harness import units
from harness.report.charts.marks import GLYPHS, Chart, Figure, axis, loads, plain, row_style
from harness.report.charts.observed import Observed
from harness.report.charts.request_dots import MOST_DOTS, SLOWEST, Choice, Dot
from harness.report.words import FORMULAS
from harness.summary import Row, Summary

MOST_OF_ALL = 2400  # dots of one chart, whatever the number of rows; two charts of 6,000 take a browser 0.8 s

_TITLES = {"ttft": "Time to first token of single requests", "e2e": "Whole answers of single requests"}


def scatters(summary: Summary, observed: Observed) -> list[Chart]:
    """TTFT and E2E of requests over the second in which they were sent, thinned for long runs."""
    each = max(30, min(MOST_DOTS, MOST_OF_ALL // max(1, len(summary.rows))))
    choices = [observed.chosen.get(row.key, Choice()) for row in summary.rows]
    dots = [choice.chosen(each) for choice in choices]
    thinned = any(len(shown) < choice.count + choice.failures for shown, choice in zip(dots, choices, strict=True))
    return [_scatter(summary, dots, choices, key, thinned) for key in _TITLES]


def _scatter(summary: Summary, dots: list[list[Dot]], choices: list[Choice], key: str, thinned: bool) -> Chart:
    data: list[Figure] = []
    for i, row in enumerate(summary.rows):
        good = [(dot, _value(dot, key)) for dot in dots[i] if dot.error is None]
        known = [(dot, value) for dot, value in good if value is not None]
        failed = [dot for dot in dots[i] if dot.error is not None]
        if known:
            data.append(_good(summary, row, known) | {"meta": i})
        if failed:
            data.append(_failed(row, failed) | {"meta": i})
    values = [value for trace in data for value in trace["y"]]
    few = f" Long rows are thinned by chance; the {SLOWEST} slowest of each are always there." if thinned else ""
    return Chart(
        id=f"dots-{key}",
        title=_TITLES[key],
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


def _good(summary: Summary, row: Row, known: list[tuple[Dot, float]]) -> Figure:
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


def _failed(row: Row, failed: list[Dot]) -> Figure:
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


def _value(dot: Dot, key: str) -> float | None:
    """Milliseconds."""
    seconds = dot.ttft_s if key == "ttft" else dot.took_s
    return None if seconds is None else 1000 * seconds
