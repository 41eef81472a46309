"""The chart of a bisection: how fast each entry is against the good one."""

from harness.base.units import factor
from harness.questions.bisect.bisected import BisectReport, EntryLevel
from harness.questions.bisect.entry_list import cut_middle
from harness.report.charts import NAME, Chart, Figure, escape_markup, scatter

_HUES = {"good": "@s3", "bad": "@s2", "": "@muted"}
_SYMBOLS = {"good": "circle", "bad": "diamond", "": "square"}
MAX_LABEL = 20  # characters
_NAMES = {"good": "good side", "bad": "bad side", "": "not known"}


def levels_chart(report: BisectReport) -> Chart:
    """The speed of each measured entry over that of the good one, with its interval, in the order of the list."""
    measured = [level for level in report.levels if level.ratio is not None]
    data = [
        _side([level for level in measured if _side_of(level) == side], side)
        for side in _NAMES
        if any(_side_of(level) == side for level in measured)
    ]
    rule: Figure = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
                    "line": {"color": "@muted", "width": 1.5, "dash": "dot"}}  # fmt: skip
    every = max(1, len(report.levels) // 16)
    ticks = [level for level in report.levels if level.entry % every == 0]
    good = escape_markup(cut_middle(report.levels[0].short, MAX_LABEL))
    layout: Figure = {
        "xaxis": {
            "title": {"text": report.question.variable},
            "tickvals": [level.entry + 1 for level in ticks],
            "ticktext": [escape_markup(cut_middle(level.short, MAX_LABEL)) for level in ticks],
        },
        "yaxis": {
            "title": {"text": f"speed, times {good}"},
            "rangemode": "tozero",
        },
        "shapes": [rule],
        "showlegend": len(data) > 1,
    }
    return Chart(
        id="bisect",
        title="The entries of the list",
        caption="Each entry that was started, with its 95 % interval, in the order of the list. Higher is faster.",
        formula="speed of the entry ÷ that of the good one, both at the middle of the search",
        figure={"data": data, "layout": layout},
        head=["Entry", "Starts", "Speed", "95 % interval", "Side"],
        body=[_cells(level) for level in measured],
        empty="" if data else "No entry has a result.",
    )


def _side_of(level: EntryLevel) -> str:
    return level.side if level.side in ("good", "bad") else ""


def _side(levels: list[EntryLevel], side: str) -> Figure:
    ratios = [level.ratio or 0.0 for level in levels]
    bars = {
        "type": "data", "symmetric": False, "color": _HUES[side], "thickness": 2, "width": 6,
        "array": [(level.high or ratio) - ratio for level, ratio in zip(levels, ratios, strict=True)],
        "arrayminus": [ratio - (level.low or ratio) for level, ratio in zip(levels, ratios, strict=True)],
    }  # fmt: skip
    return scatter(
        _NAMES[side],
        [level.entry + 1 for level in levels],
        ratios,
        f"%{{text}}: <b>%{{y:.3f}}x</b>{NAME}",
        "markers",
        text=[escape_markup(level.short) for level in levels],
        marker={"color": _HUES[side], "symbol": _SYMBOLS[side], "size": 10},
        error_y=bars,
    )


def _cells(level: EntryLevel) -> list[str]:
    interval = "" if level.low is None or level.high is None else f"{factor(level.low, 3)} to {factor(level.high, 3)}"
    return [level.name, str(level.starts), factor(level.ratio or 0.0, 3), interval, level.side]
