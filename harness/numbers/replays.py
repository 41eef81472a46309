"""The numbers of a replayed trace of agents: steps by number and depth, times of conversations, hits of the cache."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from harness.base.measured import NEEDED, NO_SAMPLE, Distribution, median_of_known
from harness.numbers import formulas, stats
from harness.numbers.cell_numbers import uncached_tok_s
from harness.numbers.latencies import PERMILLES
from harness.numbers.summary import CacheHits, ReplayNumbers, StepRange
from harness.records.columns import Floats, Rows
from harness.records.records import ProcessMark, ReplayedConversation
from harness.records.run_data import CellData

_FIRST_DEPTH = 1024  # tokens; each further range ends at twice as many


def replay_numbers(cells: Sequence[CellData], marks: Sequence[Sequence[ProcessMark]]) -> ReplayNumbers | None:
    """The numbers of a row's cells, each with its marks; None for a load that replays no conversations."""
    replays = [[replay for mark in cell_marks for replay in mark.replays or ()] for cell_marks in marks]
    every = [replay for cell_replays in replays for replay in cell_replays]
    good = [cell.counted.where(cell.counted.good) for cell in cells]
    if not every and not any((~np.isnan(rows.step)).any() for rows in good):
        return None
    prompts = [_PromptTokens(cell, rows) for cell, rows in zip(cells, good, strict=True)]
    times = np.array(
        [time for cell, own in zip(cells, replays, strict=True) for time in _conversation_times(cell.rows, own)]
    ).reshape(-1, 2)
    steps, depths = (np.concatenate([getattr(rows, name) for rows in good]) for name in ("turn", "prompt_tokens"))
    return ReplayNumbers(
        conversations=len(every),
        whole=sum(replay.is_whole for replay in every),
        ended=sum(replay.ended for replay in every),
        failed=sum(replay.failed for replay in every),
        not_sent=sum(replay.not_sent for replay in every),
        too_long=sum(replay.too_long for replay in every),
        before_start=sum(replay.before_start for replay in every),
        open=sum(replay.open for replay in every),
        delays_s=sum(replay.delays_s for replay in every),
        removed_s=sum(replay.removed_s for replay in every),
        duration=_distribution(times[:, 0]),
        served=_distribution(times[:, 1]),
        tools=_distribution(times[:, 0] - times[:, 1]),
        by_step=_ranges(steps, _step_ends(), good, prompts),
        by_depth=_ranges(depths, _depth_ends(), good, prompts),
        uncached_tok_s=median_of_known(uncached_tok_s(cell) for cell in cells),
        hits=_cache_hits(prompts),
    )


class _PromptTokens:
    """The tokens of the prompts of a cell's requests, NaN where not known."""

    def __init__(self, cell: CellData, rows: Rows) -> None:
        reports = not np.isnan(cell.rows.cached_tokens).all()
        self.counted = rows.prompt_tokens
        # A server that reports some leaves them out where they are 0.
        self.cached: Floats = np.nan_to_num(rows.cached_tokens) if reports else rows.cached_tokens
        self.asked = rows.asked_prompt_tokens
        self.planned = _planned(cell.rows, rows)
        added = np.unique((self.counted - self.asked)[~np.isnan(self.counted - self.asked)])
        self.template = int(added[0]) if len(added) == 1 else None
        self.is_scaled = len(added) > 1
        if self.is_scaled:
            ratio: Floats = np.where(np.isnan(self.asked), 1.0, self.counted / np.maximum(self.asked, 1))
            self.planned = np.minimum(np.round(self.planned * ratio), self.counted)


def _planned(every: Rows, rows: Rows) -> Floats:
    """The tokens of each prompt that a cache without bounds could have, NaN where not known.

    Of recorded text they are the prompt of the earlier request that this one continues, as the server counted it.
    """
    planned = rows.planned_cached_tokens.copy()
    continuing = np.flatnonzero(np.isnan(planned) & ~np.isnan(rows.continues))
    if len(continuing):
        roots = every.conversation - every.agent
        counted = dict(zip(zip(roots.tolist(), every.step.tolist(), strict=True), every.prompt_tokens, strict=True))
        own_roots = rows.conversation - rows.agent
        for place in continuing.tolist():
            planned[place] = counted.get((float(own_roots[place]), float(rows.continues[place])), np.nan)
    return np.minimum(planned, rows.prompt_tokens)


def _conversation_times(rows: Rows, replays: Sequence[ReplayedConversation]) -> Iterator[tuple[float, float]]:
    """Yield the time of each whole conversation that was measured, and its time with a request in flight."""
    roots = rows.conversation - rows.agent
    for replay in replays:
        own = np.flatnonzero(roots == replay.conversation)
        if not replay.is_whole or len(own) != replay.ended or not rows.measured[own].all():
            continue
        starts = rows.sent_s[own]
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + rows.ended_s[own])[order]
        until = np.maximum.accumulate(ends)
        gaps = np.maximum(0.0, starts[1:] - until[:-1])
        took_s = float(until[-1] - starts[0])
        yield took_s, took_s - float(gaps.sum())


def _distribution(values: Floats) -> Distribution:
    if not len(values):
        return NO_SAMPLE
    ordered = np.sort(values)
    percentiles: dict[str, Any] = {
        name: stats.percentile(ordered, permille) if len(values) >= NEEDED[name] else None
        for name, permille in PERMILLES.items()
    }
    return Distribution(
        n=len(values), mean=float(values.mean()), min=float(ordered[0]), max=float(ordered[-1]), **percentiles
    )


def _step_ends() -> Iterator[int]:
    """Yield the last step of each range: 1, 4, 9, 19, 49, 99, 199, 499 ..."""
    yield 1
    for power in itertools.count():
        yield from (factor * 10**power - 1 for factor in (5, 10, 20))


def _depth_ends() -> Iterator[int]:
    end = _FIRST_DEPTH
    while True:
        yield end
        end *= 2


def _ranges(
    values: Floats, ends: Iterable[int], good: Sequence[Rows], prompts: Sequence[_PromptTokens]
) -> list[StepRange]:
    """The requests in ranges of a value, of which `ends` are the last ones. Empty ranges are left out."""
    highest = float(np.nanmax(values, initial=0.0))
    ttft = np.concatenate([formulas.ttft(rows) for rows in good])
    counted, cached, planned = (
        np.concatenate([getattr(cell, name) for cell in prompts]) for name in ("counted", "cached", "planned")
    )
    reused = np.maximum(planned, cached)
    columns = {
        "prompt_tokens": counted,
        "new_tokens": counted - reused,
        "cached_tokens": cached,
        "recomputed_tokens": reused - cached,
    }
    ranges, first = list[StepRange](), 1
    for last in ends:
        if first > highest:
            break
        chosen = (first <= values) & (values <= last)
        if chosen.any():
            times = np.sort(ttft[chosen & ~np.isnan(ttft)])
            means = {name: _mean(column[chosen]) for name, column in columns.items()}
            p50 = stats.percentile(times, 500) if len(times) else None
            p90 = stats.percentile(times, 900) if len(times) >= NEEDED["p90"] else None
            ranges.append(
                StepRange(first=first, last=last, requests=int(chosen.sum()), **means, ttft_p50=p50, ttft_p90=p90)
            )
        first = last + 1
    return ranges


def _mean(values: Floats) -> float | None:
    """The mean; None where a value is not known."""
    return float(values.mean()) if len(values) and not np.isnan(values).any() else None


def _cache_hits(prompts: Sequence[_PromptTokens]) -> CacheHits | None:
    counted, cached, planned = (
        np.concatenate([getattr(cell, name) for cell in prompts]) for name in ("counted", "cached", "planned")
    )
    has_all = ~np.isnan(counted) & ~np.isnan(cached) & ~np.isnan(planned)
    if not has_all.any():
        return None
    served = np.minimum(cached[has_all], planned[has_all])
    templates = {cell.template for cell in prompts if len(cell.counted)}
    return CacheHits(
        requests=int(has_all.sum()),
        prompt_tokens=int(counted[has_all].sum()),
        planned=int(planned[has_all].sum()),
        served=int(served.sum()),
        beyond=int((cached[has_all] - served).sum()),
        template_tokens=templates.pop() if len(templates) == 1 else None,
        is_scaled=any(cell.is_scaled for cell in prompts),
    )
