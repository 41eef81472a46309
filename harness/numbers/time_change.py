"""Which part of a request's time makes one side slower than another: queueing, prefill, decode, or more tokens."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from msgspec import Struct

from harness.base.measured import Numbers
from harness.numbers.summary import CellSummary

MAIN_SHARE = 0.5  # of the change: a part with so much of it is named as its cause
Part = Literal["queue", "prefill", "decode", "api", "tokens", "first_token"]


class TimeChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the mean time of a request, and by how much it changed. The parts add up to about the change of E2E."""

    part: Part
    seconds: float  # how much longer it takes; below 0: it is shorter
    share: float  # of the change of E2E


def time_changes(side: Sequence[CellSummary], base: Sequence[CellSummary]) -> list[TimeChange]:
    """Return the parts of the change from the cells of `base` to those of `side`, the largest first.

    The server's own times where both sides report them, else the client's: the first token and the tokens after it.
    "tokens": longer answers, at the speed of `base`. Empty where E2E is not known or did not change. A mean is over the
    cells that have the time: of each load more than half of them, on both sides.
    """
    before, after = _mean_e2e(base), _mean_e2e(side)
    if before is None or after is None or before == after:
        return []
    parts = _server_parts(side, base) or _client_parts(side, base)
    longer = (tokens := _tokens_part(side, base)) or 0.0
    if "decode" in parts:
        parts["decode"] -= longer
    if tokens is not None:
        parts["tokens"] = longer
    total = after - before
    changes = [TimeChange(part=part, seconds=seconds, share=seconds / total) for part, seconds in parts.items()]
    return sorted(changes, key=lambda change: -change.share)


def main_part(changes: Sequence[TimeChange]) -> Part | None:
    """Return the part that makes most of the change; None: no part does."""
    return changes[0].part if changes and changes[0].share >= MAIN_SHARE else None


def _server_parts(side: Sequence[CellSummary], base: Sequence[CellSummary]) -> dict[Part, float]:
    """The changes of the server's stages; empty where one is not known. The time outside the engine may be missing."""
    changes: dict[Part, float] = {}
    for name in _STAGES:
        after, before = (_mean(cells, partial(_stage_s, name)) for cells in (side, base))
        if after is not None and before is not None:
            changes[name] = after - before
        elif name != "api":
            return {}
    return changes


def _stage_s(name: Part, cell: CellSummary) -> float | None:
    seconds: float | None = getattr(cell.time, f"{name}_s", None)
    return seconds


_STAGES: tuple[Part, ...] = ("queue", "prefill", "decode", "api")


def _client_parts(side: Sequence[CellSummary], base: Sequence[CellSummary]) -> dict[Part, float]:
    """The changes of the time to the first token and of the time after it; empty for answers that do not stream."""
    firsts = [_mean(cells, lambda cell: cell.numbers.ttft.mean) for cells in (side, base)]
    totals = [_mean_e2e(cells) for cells in (side, base)]
    if None in firsts or None in totals:
        return {}
    (after, before), (all_after, all_before) = ([value or 0.0 for value in pair] for pair in (firsts, totals))
    return {"first_token": after - before, "decode": (all_after - after) - (all_before - before)}


def _tokens_part(side: Sequence[CellSummary], base: Sequence[CellSummary]) -> float | None:
    """How much longer answers take because they have more tokens; None where the tokens or the speed are not known."""
    lengths = [_mean(cells, lambda cell: _answer_tokens(cell.numbers)) for cells in (side, base)]
    per_token = _mean(base, lambda cell: cell.numbers.tpot.mean)
    if lengths[0] is None or lengths[1] is None or per_token is None:
        return None
    return (lengths[0] - lengths[1]) * per_token


def _answer_tokens(numbers: Numbers) -> float | None:
    tokens = numbers.output_tokens
    return None if tokens is None or not numbers.succeeded else tokens / numbers.succeeded


def _mean_e2e(cells: Sequence[CellSummary]) -> float | None:
    return _mean(cells, lambda cell: cell.numbers.e2e.mean)


def _mean(cells: Sequence[CellSummary], value_of: Callable[[CellSummary], float | None]) -> float | None:
    """The mean over the cells that have a value, each load with the same weight.

    None where no more than half of the cells of a load have one.
    """
    by_load: dict[str, list[float | None]] = {}
    for cell in cells:
        by_load.setdefault(cell.load, []).append(value_of(cell))
    means = []
    for values in by_load.values():
        numbers = [value for value in values if value is not None]
        if 2 * len(numbers) <= len(values):
            return None
        means.append(statistics.fmean(numbers))
    return statistics.fmean(means) if means else None
