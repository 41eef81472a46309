"""What each turn of an agent's task costs: how much of its context came from the cache, and how much was recomputed."""

from collections.abc import Mapping, Sequence

from harness.base.summary import Reason, Row, because
from harness.base.units import count, milliseconds, percent
from harness.numbers.turns import recomputed_by_turn
from harness.scenario import Load


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
    waits = [f"{milliseconds(one.ttft_p50)}\u00a0ms" for one in (first, last) if one.ttft_p50 is not None]
    text += (
        f"; the first token comes after {' and '.join(waits)} (median of the first and the last turn)" if waits else ""
    )
    tokens = recomputed_by_turn(row.turns).values()
    known, again = (sum(pair[place] for pair in tokens) for place in (0, 1))
    if not known:
        text += "; the server does not report what came from its cache" if None not in sizes else ""
    else:
        values["recomputed_share"] = again / known
        text += f"; of the context that was there before, {percent(values['recomputed_share'])} is computed again"
    return because("turns", f"{text}.", row=row.name, turns=last.turn, **values)
