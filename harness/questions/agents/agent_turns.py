"""What each turn of an agent's task costs: how much of its context came from the cache, and how much was recomputed."""

from collections.abc import Mapping, Sequence

from harness.base import units
from harness.base.reason import Reason, because
from harness.base.units import count, milliseconds, percent
from harness.numbers.summary import Row, Summary, TurnNumbers
from harness.numbers.turns import recomputed_by_turn
from harness.report.charts import Chart, Figure
from harness.report.elements import Grid, plain_grid
from harness.scenario import Load

_TURNS = ("Turn", "Requests", "Prompt tokens", "Cached", "New", "Computed again", "TTFT p50, ms")


def turn_answers(rows: Sequence[Row], loads: Mapping[str, Load]) -> list[Reason]:
    """How a coding agent's context grows and what of it is computed again; none unless all loads are such agents."""
    if not rows or not all(load.user == "agent" and load.endpoint == "messages" for load in loads.values()):
        return []
    return [answer for row in rows if (answer := _answer(row)) is not None]


def _answer(row: Row) -> Reason | None:
    if not row.turns:
        return None
    first, last = row.turns[0], row.turns[-1]
    turns, sizes = count(last.turn, "turn"), (first.prompt_tokens, last.prompt_tokens)
    values: dict[str, float] = {}
    if None in sizes:
        text = f"{row.name}: how far the context grows in {turns} is not known, because the server does not report the "
        text += "tokens of prompts"
    else:
        values = {"first_tokens": first.prompt_tokens or 0, "last_tokens": last.prompt_tokens or 0}
        text = f"{row.name}: in {turns} the context grows from {values['first_tokens']:,.0f} to "
        text += f"{values['last_tokens']:,.0f} tokens"
    waits = [f"{milliseconds(turn.ttft_p50)}\u00a0ms" for turn in (first, last) if turn.ttft_p50 is not None]
    text += (
        f"; the first token comes after {' and '.join(waits)} (median of the first and the last turn)" if waits else ""
    )
    tokens = recomputed_by_turn(row.turns).values()
    reusable, recomputed = (sum(pair[place] for pair in tokens) for place in (0, 1))
    if not reusable:
        text += "; the server does not report what came from its cache" if None not in sizes else ""
    else:
        values["recomputed_share"] = recomputed / reusable
        text += f"; of the context that was there before, {percent(values['recomputed_share'])} is computed again"
    return because("turns", f"{text}.", row=row.name, turns=last.turn, **values)


def _tokens(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:,.0f}"


def _turn_cells(turn: TurnNumbers) -> list[str]:
    tokens = (turn.prompt_tokens, turn.cached_tokens, turn.new_tokens, turn.recomputed_tokens)
    return [f"{turn.turn}", f"{turn.requests:,}", *map(_tokens, tokens), units.milliseconds(turn.ttft_p50)]


def _turns_chart(row: Row, number: int) -> Chart:
    def bar(name: str, hue: str, values: list[float | None]) -> Figure:
        hover = "<b>%{y:,.0f} tokens</b> in turn %{x}<extra>%{fullData.name}</extra>"
        turns = [turn.turn for turn in row.turns]
        return {"type": "bar", "name": name, "x": turns, "y": values, "marker": {"color": hue}, "hovertemplate": hover}

    data = [
        bar("from the cache", "@s3", [turn.cached_tokens for turn in row.turns]),
        bar("new", "@s1", [turn.new_tokens for turn in row.turns]),
        bar("computed again", "@s2", [turn.recomputed_tokens for turn in row.turns]),
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
        head=list(_TURNS),
        body=[_turn_cells(turn) for turn in row.turns],
        empty=""
        if any(turn.cached_tokens is not None for turn in row.turns)
        else "The server reports no cached tokens.",
    )


def turn_tables(summary: Summary) -> list[Grid]:
    """The turns of each row of agents."""
    rows = [[row.name, *_turn_cells(turn)] for row in summary.rows for turn in row.turns]
    return [plain_grid(("Row", *_TURNS), rows)] if rows else []


def turn_charts(summary: Summary) -> list[Chart]:
    return [_turns_chart(row, number) for number, row in enumerate(summary.rows) if row.turns]
