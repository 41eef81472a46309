"""What all charts share: the noun, legends, styles, axes. Colours are names such as "@s1", the page's own."""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from harness.summary import Row, Summary, Verdict

Figure = dict[str, Any]  # {"data": [...], "layout": {...}} of plotly

COLOURS = 8  # @s1 to @s8
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
# Symbols of points that tell loads apart, and how a legend writes them.
GLYPHS = {
    "circle": "●", "square-open": "□", "triangle-up": "▲", "diamond-open": "◇", "circle-open": "○", "square": "■",
}  # fmt: skip
STROKES = dict(zip(DASHES, ("", "7 4", "1.5 3.5", "7 3 1.5 3", "11 4", "11 3 1.5 3"), strict=True))


class Key(Struct, frozen=True, kw_only=True):
    """An entry of a legend that several charts share."""

    name: str
    colour: str  # CSS variable
    stroke: str = ""  # SVG dash pattern
    glyph: str = ""  # what stands for its points


class Chart(Struct, frozen=True, kw_only=True):
    """A chart, what it shows in words, and its numbers as a table."""

    id: str
    title: str
    caption: str
    figure: Figure
    head: list[str]
    body: list[list[str]]
    formula: str = ""
    findings: list[str] = []  # what it shows, in words
    empty: str = ""  # why there is nothing to draw


def plain(text: str) -> str:
    """A text that plotly must not read as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def colour(index: int) -> str:
    return f"s{index % COLOURS + 1}"


def symbol(index: int) -> str:
    return SYMBOLS[index % len(SYMBOLS)]


def servers(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.server for row in summary.rows))


def loads(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.load for row in summary.rows))


def other_rates(summary: Summary) -> list[Row]:
    """The rows whose tok/s means something else than the first row's; they do not belong on one axis."""
    meant = [row.definitions.get("output_tok_s") for row in summary.rows]
    return [row for row, meaning in zip(summary.rows, meant, strict=True) if meaning != meant[0]]


def left_out(rows: Sequence[Row]) -> list[str]:
    """What a chart says of rows with other rates."""
    names = ", ".join(row.name for row in rows)
    return [f"Not drawn, since their tok/s is defined otherwise: {names}"] if rows else []


def open_loops(summary: Summary) -> list[str]:
    """What a chart over concurrency says of open loops."""
    names = ", ".join(row.name for row in summary.rows if row.pooled.schedule is not None)
    return [f"Not drawn, since an open loop has no concurrency of its own: {names}"] if names else []


def server_keys(summary: Summary) -> list[Key]:
    return [Key(name=name, colour=colour(i)) for i, name in enumerate(servers(summary))]


def row_style(summary: Summary, row: Row) -> tuple[str, str]:
    """Colour and dash of a row: colour tells servers apart, dash loads; with one server colour tells loads apart."""
    names, kinds = servers(summary), loads(summary)
    load = kinds.index(row.load)
    hue = names.index(row.server) if len(names) > 1 else load
    return colour(hue), DASHES[load % len(DASHES)]


def row_keys(summary: Summary) -> list[Key]:
    keys = []
    for row in summary.rows:
        hue, dash = row_style(summary, row)
        glyph = tuple(GLYPHS.values())[loads(summary).index(row.load) % len(GLYPHS)]
        keys.append(Key(name=row.name, colour=hue, stroke=STROKES[dash], glyph=glyph))
    return keys


def line(name: str, index: int, x: list[int], y: list[Any]) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": x,
        "y": y,
        "line": {"color": f"@{colour(index)}", "width": 2.5},
        "marker": {"color": f"@{colour(index)}", "symbol": symbol(index), "size": 9},
    }


def whiskers(middles: list[float], samples: list[list[float]], index: int) -> Figure:
    """Error bars from the least to the most of each sample."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max([*many, middle]) - middle for middle, many in zip(middles, samples, strict=True)],
        "arrayminus": [middle - min([*many, middle]) for middle, many in zip(middles, samples, strict=True)],
        "color": f"@{colour(index)}",
        "thickness": 1.5,
        "width": 5,
    }


def axis(unit: str, values: list[float] | None = None, logarithmic_from: float = 30) -> Figure:
    """An axis from zero; logarithmic where the positive values span more than a factor of `logarithmic_from`."""
    positive = [value for value in values or [] if value > 0]
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


class Forest(Struct, frozen=True):
    """A logarithmic scale that holds every interval and the 1 of the baseline."""

    low: float
    high: float

    @classmethod
    def of(cls, verdicts: list[Verdict]) -> "Forest":
        values = [v for verdict in verdicts for v in (verdict.ratio, verdict.low, verdict.high) if v and v > 0]
        low, high = min([0.9, *values]), max([1.1, *values])
        margin = (high / low) ** 0.06
        return cls(low / margin, high * margin)

    def place(self, ratio: float) -> float:
        """Where a ratio lies, 0 to 100."""
        inside = min(max(ratio, self.low), self.high)
        return round(100 * math.log(inside / self.low) / math.log(self.high / self.low), 2)
