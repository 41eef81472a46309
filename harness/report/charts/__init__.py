"""What all charts share: their type, legends, styles, axes. "@s1" is a colour of the page's style sheet."""

from collections.abc import Sequence
from typing import Any

from harness.numbers.summary import Row, Summary
from harness.report.elements import Chart as Chart
from harness.report.elements import Key

Figure = dict[str, Any]  # {"data": [...], "layout": {...}} of plotly, or a trace of it

COLOURS = 8  # @s1 to @s8
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
STROKES = dict(zip(DASHES, ("", "7 4", "1.5 3.5", "7 3 1.5 3", "11 4", "11 3 1.5 3"), strict=True))
NAME = "<extra>%{fullData.name}</extra>"  # ends a hover text that names the line


def escape_markup(text: str) -> str:
    """Escape a text that plotly would read as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def scatter(name: str, x: Sequence[Any], y: Sequence[Any], hover: str, mode: str = "lines", **more: Any) -> Figure:
    """A trace of lines or points."""
    return {
        "type": "scatter", "mode": mode, "name": escape_markup(name), "x": x, "y": y, "hovertemplate": hover, **more,
    }  # fmt: skip


def whiskers(middles: Sequence[float], samples: Sequence[Sequence[float]], hue: str) -> Figure:
    """Error bars from the lowest to the highest of each sample."""
    return {
        "type": "data", "symmetric": False, "color": hue, "thickness": 1.5, "width": 5,
        "array": [max([*sample, middle]) - middle for middle, sample in zip(middles, samples, strict=True)],
        "arrayminus": [middle - min([*sample, middle]) for middle, sample in zip(middles, samples, strict=True)],
    }  # fmt: skip


def colour(index: int) -> str:
    return f"s{index % COLOURS + 1}"


def symbol(index: int) -> str:
    return SYMBOLS[index % len(SYMBOLS)]


def server_names(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.server for row in summary.rows))


def row_style(summary: Summary, row: Row) -> tuple[str, str]:
    """Colour and dash of a row: a colour for each server (of one server: each load), a dash for each load."""
    names = server_names(summary)
    load = list(dict.fromkeys(other.load for other in summary.rows)).index(row.load)
    return colour(names.index(row.server) if len(names) > 1 else load), DASHES[load % len(DASHES)]


def row_keys(summary: Summary) -> list[Key]:
    styles, shown = [(row.name, *row_style(summary, row)) for row in summary.rows], shown_rows(summary)
    return [Key(name=name, colour=hue, stroke=STROKES[dash], shown=name in shown) for name, hue, dash in styles]


def shown_rows(summary: Summary) -> set[str]:
    """The rows that charts of single requests show at first: all, or of many the first, the fastest and the slowest."""
    if len(summary.rows) <= COLOURS:
        return {row.name for row in summary.rows}
    by_rate = sorted(summary.rows, key=lambda row: row.pooled.output_tok_s or row.pooled.input_tok_s or 0.0)
    return {row.name for row in (summary.rows[0], by_rate[0], by_rate[-1])}


def axis(unit: str, values: Sequence[float] = (), logarithmic_from: float = 30) -> Figure:
    """An axis from zero; logarithmic where the positive values span more than a factor of `logarithmic_from`."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > logarithmic_from:
        steps = [mantissa * 10.0**power for power in range(-4, 9) for mantissa in (1, 2, 5)]
        shown = [step for step in steps if min(positive) / 2 < step < 2 * max(positive)]
        shown = [step for step in shown if f"{step:.0e}"[0] != "5"] if len(shown) > 7 else shown
        return {
            "title": {"text": f"{unit} (logarithmic)"},
            "type": "log",
            "tickvals": shown,
            "ticktext": [f"{step:,g}" for step in shown],
        }
    return {"title": {"text": unit}, "rangemode": "tozero", "tickformat": ","}
