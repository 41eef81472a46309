"""How a cell worked through its requests: its rate, how that varies, its trend and what tokens cost."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from harness.analysis.schedule import kind_of
from harness.analysis.summarize import places_of
from harness.analysis.tally import Clock
from harness.files import read_lines
from harness.judge import stats
from harness.judge.stats import Array, Variation
from harness.rundir.manifest import Run
from harness.rundir.records import CUT, by_cell, read_marks
from harness.scenario import Load
from harness.summary import Reason, because

COVERS = 0.90  # of the intervals
TREND_ALPHA = 0.01  # how often the test finds a trend where there is none
MIN_BLOCKS, MAX_BLOCKS = 10, 20  # of the measured time; a block is at least two p95 latencies long
BINS = 5  # of a block: where a block that is drawn may begin
ASSUMED_SD = 0.05  # of the rate between runs, where nothing shows it
MAX_SCALE_ERROR = 0.10  # standard error of the factor that other lengths make
_DRAWS = 1000
_ERRORS = 100_000


class _ItemRecord(msgspec.Struct):
    """The part of a record that a prediction needs."""

    cell: str
    process: int
    phase: str
    sent_s: float
    ended_s: float
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class CellProgress(NamedTuple):
    """The measured time of one cell in equal bins. A request counts in each bin by the share of its time in it."""

    window_s: float
    bins: Array  # three rows: items, their prompt tokens, their output tokens
    blocks: int  # 0: the measured time is too short for them
    needed_s: float  # of measured time, for MIN_BLOCKS
    tail_s: float
    lengths: Array  # of each item: prompt and output tokens; NaN: not reported

    @property
    def rate(self) -> float:
        return float(self.bins[0].sum()) / self.window_s

    def by_block(self) -> Array:
        found: Array = self.bins.reshape(3, self.blocks, BINS).sum(axis=2)
        return found


def read_progress(folder: Path, run: Run) -> dict[str, CellProgress | None]:
    """The progress of each cell with records; None: too few requests, or no time."""
    clocks = {
        name: place.clock for name, place in places_of(run, by_cell(read_marks(folder / "processes.jsonl"))).items()
    }
    records: dict[str, list[_ItemRecord]] = defaultdict(list)
    for record in read_lines(folder / "requests.jsonl", _ItemRecord):
        records[record.cell].append(record)
    loads = {cell.id: run.scenario.loads[cell.load] for cell in run.cells}
    return {name: _progress(mine, clocks[name], loads[name]) for name, mine in records.items() if name in loads}


def _progress(records: Sequence[_ItemRecord], clock: Clock, load: Load) -> CellProgress | None:
    """Divide a cell's measured time into bins: from the first request until nothing is left to send.

    After that fewer and fewer requests run: the tail. None: fewer than two requests, or no time at all.
    """
    measured = [one for one in records if one.phase == "measured"]
    good = [one for one in records if one.error is None]
    if len(good) < 2 or not measured:
        return None
    sent, ended, prompt, output = np.array(
        [
            (
                at := one.sent_s + clock.offset_s(one.process),
                at + max(one.ended_s, 1e-6),
                math.nan if one.prompt_tokens is None else one.prompt_tokens,
                math.nan if one.output_tokens is None else one.output_tokens,
            )
            for one in good
        ]
    ).T
    due = [one.sent_s + clock.offset_s(one.process) for one in measured]
    begin, last = min(due), float(ended.max())
    # A lone user's bursts have no tail: each waits for all of its answers.
    end = last if kind_of(load) == "bursts" and load.users == 1 else max(due)
    end = min([end, *(at for at, one in zip(due, measured, strict=True) if one.error in CUT)])
    if end <= begin:
        return None
    block_s = 2 * float(np.quantile(ended - sent, 0.95))
    blocks = min(MAX_BLOCKS, int((end - begin) / block_s))
    blocks = blocks if blocks >= MIN_BLOCKS else 0
    weights = np.array([np.ones(len(sent)), prompt, output])
    edges = np.linspace(begin, end, max(1, blocks * BINS) + 1)
    done = np.array([weights @ np.clip((edge - sent) / (ended - sent), 0, 1) for edge in edges])
    rate = (done[-1, 0] - done[0, 0]) / (end - begin)
    if not rate > 0:
        return None
    tail_s = max(0.0, last - end - (len(sent) - done[-1, 0]) / rate)
    lengths = np.array([prompt, output]).T
    return CellProgress(end - begin, np.diff(done, axis=0).T, blocks, MIN_BLOCKS * block_s, tail_s, lengths)


def variance_within(work: CellProgress) -> float:
    """Variance of the logarithm of a cell's rate: bootstrap of blocks that begin anywhere, the end joined to the start.

    A block keeps its requests with their pairs of lengths, so lengths are drawn jointly.
    """
    bins = work.bins[0]
    moving = np.convolve(np.concatenate([bins, bins[: BINS - 1]]), np.ones(BINS), mode="valid")
    dice = np.random.default_rng(20261123)
    drawn = moving[dice.integers(0, len(moving), (_DRAWS, work.blocks))].mean(axis=1)
    return float((drawn / moving.mean()).var()) * work.blocks / (work.blocks - 1)


def half(values: Sequence[float], within: float, blocks: int, longer: float, noise: Variation | None) -> float:
    """Half of the 90 % interval of the logarithm of what a new run has, given the values of the repeats.

    `within` is the variance of one repeat's value inside it; the new run is `longer` times as long. Of what the
    repeats, the stored noise of the machine and an assumption say, the widest counts.
    """
    count, share = len(values), (1 + COVERS) / 2
    inside = within * (1 / count + 1 / longer)
    found = []
    if count > 1:
        # Variances of repeats that agree with those seen; what is not from inside the repeats is from run to run.
        dice = np.random.default_rng(20261123)
        total = (count - 1) * stats.var_log(values) / dice.chisquare(count - 1, _ERRORS)
        between_runs = np.maximum(total - within, 0) * (1 + 1 / count)
        errors = np.sqrt(between_runs + inside) * dice.standard_normal(_ERRORS)
        found.append(float(np.quantile(np.abs(errors), COVERS)))
    if noise is not None:
        between = 2 * noise.between_runs + noise.between_repeats * (1 + 1 / count)
        found.append(stats.t_quantile(share, noise.freedom) * math.sqrt(between + inside))
    if not found:
        found.append(stats.t_quantile(share, blocks - 1) * math.sqrt(2 * ASSUMED_SD**2 + inside))
    return max(found)


class Blocks(NamedTuple):
    """The blocks of all repeats, each value less its mean over the repeat: what differs within repeats."""

    at: Array  # place in the measured time, from -0.5 to 0.5
    each: Array  # time per item, relative to the repeat's
    lengths: Array  # mean prompt and output tokens of the items, of each the column where it varies
    varies: list[bool]  # whether these two vary; not where they were not reported
    freedom: int  # degrees of freedom, without those of regressors

    def fit(self, columns: Array) -> tuple[Array, Array]:
        """Regress the time per item on columns: coefficients and their covariance, infinite where undetermined."""
        solved = np.linalg.lstsq(columns, self.each, rcond=None)
        found, rank = np.asarray(solved[0], dtype=np.float64), int(solved[2])
        if rank < columns.shape[1]:
            return found, np.full((len(found), len(found)), math.inf)
        squares = float(((self.each - columns @ found) ** 2).sum()) / (self.freedom - len(found))
        spread = np.asarray(squares * np.linalg.inv(columns.T @ columns), dtype=np.float64)
        return found, spread


def blocks_of(work: Sequence[CellProgress]) -> Blocks | None:
    """The blocks of a row's repeats. None: a block without any progress."""
    at, each, lengths = [], [], []
    for one in work:
        done = one.by_block()
        if not done[0].all():
            return None
        at.append((np.arange(one.blocks) + 0.5) / one.blocks - 0.5)
        each_s, means = 1 / done[0], done[1:] / done[0]
        each.append(each_s / each_s.mean() - 1)
        lengths.append(means - means.mean(axis=1, keepdims=True))
    joined = np.concatenate(lengths, axis=1).T
    varies = [bool(abs(column).max() > 1e-6) for column in joined.T]  # NaN is not
    return Blocks(np.concatenate(at), np.concatenate(each), joined[:, varies], varies, len(joined) - len(work))


def trend(blocks: Blocks) -> float:
    """The relative change of the rate over the measured time, all repeats together; 0 where the test finds none.

    Lengths are in the regression as well: what they explain hides no trend.
    """
    found, spread = blocks.fit(np.column_stack([blocks.at, blocks.lengths]))
    bound = stats.t_quantile(1 - TREND_ALPHA / 2, blocks.freedom - len(found)) * math.sqrt(spread[0, 0])
    return -float(found[0]) if abs(found[0]) > bound else 0.0


def scale(
    work: Sequence[CellProgress], blocks: Blocks | None, asked: Array, items: int, load: Load | None
) -> tuple[float, float] | Reason:
    """How many times as long an item of the lengths asked for takes, and the standard error of that.

    Time per item of each block, regressed on the mean lengths of its items: a cost for each prompt and output token, to
    the whole server and not to that request alone.
    """
    if load is not None and (load.batch_size or 1) > 1:
        return because("plan_lengths_bursts")
    if blocks is None:
        return because("plan_too_short", needed_s=max(one.needed_s for one in work))
    if any(np.isnan(one.lengths).any() for one in work):
        return because("plan_lengths_unknown")
    own, wanted, kept = np.concatenate([one.lengths for one in work]), asked.mean(axis=0), []
    for place, name in enumerate(("prompt", "output")):
        low, high = float(own[:, place].min()), float(own[:, place].max())
        if not low * 0.99 <= wanted[place] <= high * 1.01:
            return because("plan_lengths_outside", which=name, mean=float(wanted[place]), low=low, high=high)
        if blocks.varies[place]:
            kept.append(place)
    costs, spread = blocks.fit(blocks.lengths)
    away = (wanted - own.mean(axis=0))[kept]
    # The items are a sample of such pairs: their prompt and output lengths vary together.
    sampled = float((asked[:, kept] @ costs).var()) / items
    error = math.sqrt(float(away @ spread @ away) + sampled) if kept else 0.0
    factor = 1 + float(away @ costs)
    if not error <= min(MAX_SCALE_ERROR, factor):
        return because("plan_lengths_unidentified", error=error if math.isfinite(error) else None)
    return factor, error / factor
