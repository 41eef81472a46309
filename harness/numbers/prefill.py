"""How fast a server computes prompts: only of requests whose time to first token is that of their own prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.numbers import formulas
from harness.numbers.cell_numbers import find_bundle
from harness.records.columns import Bools, Floats, Rows
from harness.records.records import CUT, SLACK_S
from harness.records.run_data import CellData

MIN_SHARE = 0.5  # of the answers with a first token


class TimedPrompts(NamedTuple):
    """TimedPrompts and their times to first token."""

    uncached: Floats  # tokens
    cached: Floats  # 0 where the server does not report them
    ttft_s: Floats


def prefill_tok_s(cells: Sequence[CellData], *, planned: bool = False) -> float | None:
    """Return uncached prompt tokens / TTFT, both means; None where most requests waited for others. `planned`: a prompt
    has its planned tokens where the server reports none.
    """
    prompts = [group for cell in cells if (group := timed_prompts(cell, planned=planned)) is not None]
    tokens = sum(float(group.uncached.sum()) for group in prompts)
    total_s = sum(float(group.ttft_s.sum()) for group in prompts)
    return tokens / total_s if tokens > 0 and total_s > 0 else None


def timed_prompts(cell: CellData, *, planned: bool = False) -> TimedPrompts | None:
    """Return the prompts of a cell that were computed alone, right before a first token that was seen.

    None where fewer than MIN_SHARE of its answers have such a prompt, and where answers came in bundles.
    """
    rows = cell.counted
    if find_bundle([rows.where(rows.good)]) is not None:
        return None
    prompts = formulas.prompt_length(rows) if planned else rows.prompt_tokens
    started = rows.error.is_in(None, *CUT) & ~np.isnan(formulas.ttft(rows))
    # A blank may be sent before the prompt is computed, and reasoning that is not sent comes before what is.
    seen = ~(rows.blank_gaps > formulas.MAX_BLANK_GAPS) & ~formulas.hides_reasoning(rows)
    usable = started & ~np.isnan(prompts) & seen & is_alone(cell, formulas.ttft(rows))
    usable &= np.where(np.isnan(rows.cached_tokens), 0, rows.cached_tokens) < prompts
    if not usable.any() or usable.sum() < MIN_SHARE * (started & ~np.isnan(prompts)).sum():
        return None
    cached = np.nan_to_num(rows.cached_tokens[usable])
    return TimedPrompts(prompts[usable] - cached, cached, formulas.ttft(rows)[usable])


def is_alone(cell: CellData, until_s: Floats) -> Bools:
    """Return whether each counted request was the only one in flight from its sending for `until_s` seconds."""
    rows = cell.counted
    if cell.in_mix:  # the requests of the other loads are in other cells
        return np.zeros(len(rows), dtype=np.bool_)
    others: list[Rows] = [source.rows for source in (cell, *cell.neighbours)]
    sent_s = np.sort(np.concatenate([source_rows.sent_s for source_rows in others]))
    ended_s = np.sort(np.concatenate([source_rows.sent_s + source_rows.ended_s for source_rows in others]))
    # Those sent before the end, without those that ended before the start.
    begun = np.searchsorted(sent_s, rows.sent_s + until_s, "left")
    done = np.searchsorted(ended_s, rows.sent_s + SLACK_S, "right")
    mask: Bools = ~np.isnan(until_s) & (begun - done <= 1)
    return mask


def is_first_token_blank(cell: CellData) -> bool:
    """Return whether the first token of most answers is a blank that came long before their text."""
    blank, alone = blank_starts(cell)
    return alone > 0 and blank >= MIN_SHARE * alone and alone >= MIN_SHARE * int(cell.counted.good.sum())


def blank_starts(cell: CellData) -> tuple[int, int]:
    """Return how many answers of requests that were alone began with such a blank, and how many were alone.

    With others in flight the text may wait for those.
    """
    rows = cell.counted
    text_s = np.where(np.isnan(rows.first_text_s), formulas.ttft(rows), rows.first_text_s)
    alone = rows.good & ~np.isnan(text_s) & is_alone(cell, text_s)
    return int((alone & formulas.starts_blank(rows)).sum()), int(alone.sum())
