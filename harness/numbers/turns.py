"""The numbers of each turn of an agent's task: its context, and what of it was cached or computed again."""

from collections.abc import Sequence

import numpy as np

from harness.numbers import formulas
from harness.numbers.summary import TurnNumbers
from harness.records.columns import Floats
from harness.records.run_data import CellData


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
    results: list[TurnNumbers] = []
    for turn in np.unique(turns[~np.isnan(turns)]).tolist():
        chosen = turns == turn
        prompt, hit = _mean(prompts[chosen]), _mean(cached[chosen])
        new = prompt if prompt is None or hit is None else prompt - hit
        if results:  # what the context grew by since the turn before
            before = results[-1].prompt_tokens
            new = None if prompt is None or before is None else max(0.0, prompt - before)
        recomputed = None if prompt is None or hit is None or new is None else max(0.0, prompt - hit - new)
        times_s = ttft[chosen][~np.isnan(ttft[chosen])]
        results.append(
            TurnNumbers(
                turn=int(turn),
                requests=int(chosen.sum()),
                prompt_tokens=prompt,
                cached_tokens=hit,
                new_tokens=new,
                recomputed_tokens=recomputed,
                ttft_p50=float(np.median(times_s)) if len(times_s) else None,
            )
        )
    return results if len(results) > 1 else []


def _mean(values: Floats) -> float | None:
    """The mean; None where a value is not known."""
    return float(values.mean()) if len(values) and not np.isnan(values).any() else None


def recomputed_by_turn(turns: Sequence[TurnNumbers]) -> dict[int, tuple[float, float]]:
    """By turn after the first: the tokens of all requests that were in the context before, and those computed again.

    Without the turns of which the server does not report what came from its cache.
    """
    return {
        turn.turn: (turn.requests * (turn.prompt_tokens - turn.new_tokens), turn.requests * turn.recomputed_tokens)
        for turn in turns[1:]
        if turn.prompt_tokens is not None and turn.new_tokens is not None and turn.recomputed_tokens is not None
    }
