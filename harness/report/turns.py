"""The turns of agents: as a table, and as a chart for each row."""

from harness.base import units
from harness.base.summary import Row, Summary, TurnNumbers
from harness.report.charts import Chart, Figure
from harness.report.elements import Element, plain_grid

_HEAD = ("Turn", "Requests", "Prompt tokens", "Cached", "New", "Computed again", "TTFT p50, ms")


def _tokens(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:,.0f}"


def _cells(one: TurnNumbers) -> list[str]:
    tokens = (one.prompt_tokens, one.cached_tokens, one.new_tokens, one.recomputed_tokens)
    return [f"{one.turn}", f"{one.requests:,}", *map(_tokens, tokens), units.milliseconds(one.ttft_p50)]


def turns_page(summary: Summary) -> list[Element]:
    """The turns of each row of agents."""
    rows = [[row.name, *_cells(one)] for row in summary.rows for one in row.turns]
    return [plain_grid(("Row", *_HEAD), rows)] if rows else []


def turn_charts(summary: Summary) -> list[Chart]:
    return [_chart(row, number) for number, row in enumerate(summary.rows) if row.turns]


def _chart(row: Row, number: int) -> Chart:
    def bar(name: str, hue: str, values: list[float | None]) -> Figure:
        hover = "<b>%{y:,.0f} tokens</b> in turn %{x}<extra>%{fullData.name}</extra>"
        turns = [one.turn for one in row.turns]
        return {"type": "bar", "name": name, "x": turns, "y": values, "marker": {"color": hue}, "hovertemplate": hover}

    data = [
        bar("from the cache", "@s3", [one.cached_tokens for one in row.turns]),
        bar("new", "@s1", [one.new_tokens for one in row.turns]),
        bar("computed again", "@s2", [one.recomputed_tokens for one in row.turns]),
    ]
    layout: Figure = {
        "barmode": "stack", "xaxis": {"title": {"text": "turn"}},
        "yaxis": {"title": {"text": "prompt tokens"}, "rangemode": "tozero", "tickformat": ","}, "showlegend": True,
    }  # fmt: skip
    return Chart(
        id=f"turns-{number}",
        title=f"Prompt tokens by turn: {row.name}",
        caption="Mean of each turn. What is computed again was in the context of the turn before.",
        formula="new = growth since the turn before; computed again = prompt − cached − new",
        figure={"data": data, "layout": layout},
        head=list(_HEAD),
        body=[_cells(one) for one in row.turns],
        empty="" if any(one.cached_tokens is not None for one in row.turns) else "The server reports no cached tokens.",
    )
