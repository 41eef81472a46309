"""What each turn of an agent's task costs: how much of its context came from the cache, and how much was recomputed."""

from collections.abc import Mapping, Sequence

import numpy as np

from harness.base.summary import Reason, Row, TurnNumbers, because
from harness.base.units import count, milliseconds, percent
from harness.numbers import formulas
from harness.records.run_data import CellData
from harness.records.table import Floats
from harness.scenario import Load


def turn_numbers(cells: Sequence[CellData], *, nothing_cached: bool = False) -> list[TurnNumbers]:
    """The turns of the successful requests of some cells, in order; none where they have only one.

    `nothing_cached`: the server has no prefix cache, so a count that it does not report is 0.
    """
    good = [cell.counted.where(cell.counted.good) for cell in cells]
    turns, prompts, cached, ttft = (
        np.concatenate([np.empty(0), *parts])
        for parts in (
            [rows.turn for rows in good],
            [rows.prompt_tokens for rows in good],
            [rows.cached_tokens for rows in good],
            [formulas.ttft(rows) for rows in good],
        )
    )
    cached = np.nan_to_num(cached) if nothing_cached else cached
    found: list[TurnNumbers] = []
    for turn in np.unique(turns[~np.isnan(turns)]).tolist():
        chosen = turns == turn
        prompt, hit = _mean(prompts[chosen]), _mean(cached[chosen])
        new = prompt if prompt is None or hit is None else prompt - hit
        if found:  # what the context grew by since the turn before
            before = found[-1].prompt_tokens
            new = None if prompt is None or before is None else max(0.0, prompt - before)
        again = None if prompt is None or hit is None or new is None else max(0.0, prompt - hit - new)
        known = ttft[chosen][~np.isnan(ttft[chosen])]
        found.append(
            TurnNumbers(
                turn=int(turn),
                requests=int(chosen.sum()),
                prompt_tokens=prompt,
                cached_tokens=hit,
                new_tokens=new,
                recomputed_tokens=again,
                ttft_p50=float(np.median(known)) if len(known) else None,
            )
        )
    return found if len(found) > 1 else []


def _mean(values: Floats) -> float | None:
    """The mean; None where a value is not known."""
    return float(values.mean()) if len(values) and not np.isnan(values).any() else None


def recomputed_by_turn(turns: Sequence[TurnNumbers]) -> dict[int, tuple[float, float]]:
    """By turn after the first: the tokens of all requests that were in the context before, and those computed again.

    Without the turns of which the server does not report what came from its cache.
    """
    return {
        one.turn: (one.requests * (one.prompt_tokens - one.new_tokens), one.requests * one.recomputed_tokens)
        for one in turns[1:]
        if one.prompt_tokens is not None and one.new_tokens is not None and one.recomputed_tokens is not None
    }


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
