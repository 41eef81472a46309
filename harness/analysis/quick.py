"""The numbers of `harness quick`: what one, four and eight users at once get, from however few requests there are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from harness.analysis import derive
from harness.analysis.latencies import token_shares_between
from harness.analysis.numbers import compute_numbers
from harness.analysis.prefill import prefill_tok_s
from harness.analysis.summarize import Summarized
from harness.base.summary import NEEDED, Distribution, RunFinding, Summary, median_of_known, sentence
from harness.records.records import CUT
from harness.records.run_data import CellData
from harness.records.table import Floats, Rows
from harness.scenario.plan import load_of_stage

NAME = "quick"  # of its runs
NOTES = ("text_unread", "first_token_blank", "reasoning_hidden", "prefill_above_hardware")


class QuickLevel(Struct, frozen=True, kw_only=True):
    """What so many users got: medians, of few requests means, as in the run's table. None: unknown."""

    users: int
    answers: int  # that are complete
    cut: int  # requests that the end of the time cut
    failed: int
    tok_s: float | None  # output tokens a second of all users together
    user_tok_s: float | None  # output tokens a second of one user after the first token, 1 / TPOT
    answer_tok_s: float | None  # output tokens of an answer / its E2E latency
    prefill_tok_s: float | None  # uncached prompt tokens / TTFT; None where requests waited for others
    ttft_ms: float | None
    reasons: bool  # whether the model reasons before it answers
    visible_ms: float | None  # TTFO of such answers; None also where no text was visible


class QuickReport(Struct, frozen=True, kw_only=True):
    """The output of `harness quick --json`. Missing is null."""

    run: str  # its directory
    url: str
    model: str
    server: str | None  # its version
    simulated: bool
    valid: bool
    reasons: list[str]
    one_user_tok_s: float | None
    prefill_tok_s: float | None  # with one user, as of the following
    ttft_ms: float | None
    users: list[QuickLevel]
    tokens_counted: bool  # False: the server does not report tokens, and a chunk is taken for one
    prompt_tokens: int | None  # the median
    answer_tokens: int  # at most
    level_s: float | None  # seconds of each level
    share: float | None  # of what the hardware allows for one user
    share_sentence: str | None
    finding: RunFinding | None  # the worst one
    notes: list[str] = []  # on numbers that are missing, or are not what they seem
    next: dict[str, str]  # commands, each with what it answers


def quick_levels(made: Summarized) -> list[QuickLevel]:
    """Return the levels of a run whose load has stages, in their order, with the numbers of its table: there TTFT is
    the median of each level, or the mean of each.
    """
    planned = {name: cell for name, cell in made.data.planned.items() if name in made.data.cells and cell.repeat == 1}
    known = {name: made.data.cells[name] for name, cell in planned.items() if load_of_stage(cell.load)}
    samples = [compute_numbers([cell]).ttft for cell in known.values()]
    is_few = any(sample.n and sample.known < NEEDED["p50"] for sample in samples)
    users = {name: made.data.run.scenario.loads[planned[name].load].users for name in known}
    return [level_of(users[name], cell, is_few=is_few) for name, cell in known.items()]


def quick_notes(summary: Summary) -> list[str]:
    """Return the notes on numbers of the levels, each kind once, of the level with the fewest users that has it."""
    return [
        sentence(note) for note in {note.code: note for note in reversed(summary.notes)}.values() if note.code in NOTES
    ]


def level_of(users: int, cell: CellData, *, is_few: bool) -> QuickLevel:
    """Return the numbers of a cell. `is_few`: the TTFT is a mean, because a level has too few for a median."""
    rows = cell.counted
    good, started = rows.where(rows.good), rows.where(rows.good | rows.error.is_in(*CUT))
    numbers = compute_numbers([cell])
    tpot_s = _usual(numbers.tpot) or _median(_seconds_per_token(good)) or _median(_seconds_per_token(started))
    ttft_s = _usual(numbers.ttft, is_few)
    ttfo_s = good.first_visible_s
    late = ttfo_s > good.first_chunk_s
    is_whole = numbers.bundle is not None and numbers.bundle.pieces <= 1  # its first token comes with its last
    cut = int(rows.error.is_in(*CUT).sum())
    return QuickLevel(
        users=users,
        answers=len(good),
        cut=cut,
        failed=len(rows) - len(good) - cut,
        tok_s=_all_tok_s(cell),
        user_tok_s=None if tpot_s is None else 1 / tpot_s,
        answer_tok_s=numbers.answer_tok_s,
        prefill_tok_s=prefill_tok_s([cell], planned=True) if ttft_s else None,
        ttft_ms=None if is_whole else _milliseconds(ttft_s),
        reasons=bool((started.reasoning_chunks > 0).any()),
        visible_ms=_milliseconds(_median(ttfo_s[late])) if late.any() else None,
    )


def _usual(sample: Distribution, is_few: bool = False) -> float | None:
    """The median, of few requests the mean. None: no request has it, or the end cut most of them before it."""
    if not is_few and sample.known >= NEEDED["p50"]:
        return sample.p50
    return sample.mean if sample.n > sample.censored else None


def counts_tokens(cells: Sequence[CellData]) -> bool:
    """Whether the server reports the tokens of its answers."""
    return not any(np.isnan(cell.counted.output_tokens[cell.counted.good]).any() for cell in cells)


def median_prompt(cells: Sequence[CellData]) -> int | None:
    """Return the median length of the prompts in tokens, as the server counts them, else as planned."""
    median = median_of_known(value for cell in cells for value in _known(_prompt_tokens(cell.counted)))
    return None if median is None else round(median)


def _seconds_per_token(rows: Rows) -> Floats:
    """TPOT; where the tokens are not known, the time per chunk after the first arrival."""
    known = np.isnan(rows.output_tokens) & (rows.arrivals >= derive.MIN_ARRIVALS)
    steps = np.where(known, rows.chunks - rows.first_arrival_chunks, np.nan)
    tpot_s = derive.latency_s(rows, "tpot")
    found: Floats = np.where(np.isnan(tpot_s), (rows.last_chunk_s - rows.first_arrival_s) / steps, tpot_s)
    return np.where(found > 0, found, np.nan)


def _prompt_tokens(rows: Rows) -> Floats:
    return np.where(np.isnan(rows.prompt_tokens), rows.asked_prompt_tokens, rows.prompt_tokens)


def _all_tok_s(cell: CellData) -> float | None:
    """Output tokens that all users got inside the window / window. A chunk of an unknown number of tokens is one."""
    if cell.window_s is None or cell.window_s[1] <= cell.window_s[0]:
        return None
    total = 0.0
    for one in (cell, *cell.neighbours):
        rows = one.rows.where(one.rows.error.is_in(None, *CUT))
        tokens = np.where(np.isnan(rows.output_tokens), rows.chunks, rows.output_tokens)
        total += float((tokens * token_shares_between(rows, *cell.window_s, one.fetch)).sum())
    return total / (cell.window_s[1] - cell.window_s[0]) or None


def _known(values: Floats) -> list[float]:
    known: list[float] = values[~np.isnan(values)].tolist()
    return known


def _median(values: Any) -> float | None:
    """Return the median of the known values; None without any, or if it is infinite."""
    known = values[~np.isnan(values)]
    median = float(np.median(known)) if len(known) else np.inf
    return median if np.isfinite(median) else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
