"""Predicts how long a number of items takes on this machine, from a finished run. docs/method.md has the formulas.

First come the rate of a cell, its variation and trend, and the cost of tokens; then the forecast and its inputs.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct, convert, json
from msgspec.structs import replace

from harness.analysis import stats
from harness.analysis.schedule import load_kind
from harness.analysis.stats import Array
from harness.analysis.summarize import summarize_data
from harness.base.errors import HarnessError, RunError, reason_of
from harness.base.files import DOCS, UNDECODABLE, read_text
from harness.base.reasons import sentence
from harness.base.summary import CellSummary, Reason, Row, because
from harness.records.records import CUT
from harness.records.run_data import CellData
from harness.records.run_data import load as load_run_data
from harness.scenario import Load, max_concurrency

COVERAGE = 0.90  # of the intervals
TREND_ALPHA = 0.01  # of the test for a trend
MIN_BLOCKS, MAX_BLOCKS = 10, 20  # of the measured time; a block is at least two p95 latencies long
SETTLING_PARTS = 10  # of the measured time; at most the first half of them is left out
BINS_PER_BLOCK = 5  # a drawn block may start at any bin
ASSUMED_RUN_SD = 0.05  # of the logarithm of the rate between runs, where it is unknown
MAX_SCALE_ERROR = 0.10  # standard error of the factor for other lengths
_DRAWS = 1000
_ERROR_DRAWS = 100_000
MAX_TREND = 0.10  # change of the rate over the measured time; with a larger one there is no prediction
_USERS_OF_ITEMS = ("batch", "chat", "rag")  # one request of these is one item


class CellProgress(NamedTuple):
    """The measured time of one cell in equal bins. A request counts in each bin by the share of its time in it."""

    window_s: float
    bins: Array  # three rows: items, their prompt tokens, their output tokens
    blocks: int  # 0: the measured time is too short for blocks
    needed_s: float  # measured time that MIN_BLOCKS need
    tail_s: float  # after the measured time, until the last request ended
    lengths: Array  # prompt and output tokens of each item; NaN: not reported

    @property
    def rate(self) -> float:
        return float(self.bins[0].sum()) / self.window_s

    def without_first(self, share: float) -> "CellProgress":
        """The progress without this share of the blocks at the start."""
        blocks = self.blocks - round(share * self.blocks)
        bins = self.bins[:, (self.blocks - blocks) * BINS_PER_BLOCK :]
        return self._replace(window_s=self.window_s * blocks / self.blocks, bins=bins, blocks=blocks)

    def block_sums(self) -> Array:
        """Items, prompt tokens and output tokens of each block."""
        sums: Array = self.bins.reshape(3, self.blocks, BINS_PER_BLOCK).sum(axis=2)
        return sums


def cell_progress(cell: CellData, load: Load) -> CellProgress | None:
    """Divide a cell's measured time into bins. It lasts from the first request until the last one is sent.

    In the tail after it fewer and fewer requests run. None: fewer than two requests, or no measured time.
    """
    measured, good = cell.rows.where(cell.rows.measured), cell.rows.where(cell.rows.good)
    if len(good) < 2 or not len(measured):
        return None
    sent, prompt, output = good.sent_s, good.prompt_tokens, good.output_tokens
    ended = sent + np.maximum(good.ended_s, 1e-6)
    start, last = float(measured.sent_s.min()), float(ended.max())
    # Bursts of a single user have no tail, since each burst waits for all of its answers.
    end = last if load_kind(load) == "bursts" and load.users == 1 else float(measured.sent_s.max())
    end = float(measured.sent_s[measured.error.is_in(*CUT)].min(initial=end))
    if end <= start:
        return None
    block_s = 2 * float(np.quantile(ended - sent, 0.95))
    blocks = min(MAX_BLOCKS, int((end - start) / block_s))
    blocks = blocks if blocks >= MIN_BLOCKS else 0
    weights = np.array([np.ones(len(sent)), prompt, output])
    edges = np.linspace(start, end, max(1, blocks * BINS_PER_BLOCK) + 1)
    done = np.array([weights @ np.clip((edge - sent) / (ended - sent), 0, 1) for edge in edges])
    rate = (done[-1, 0] - done[0, 0]) / (end - start)
    if not rate > 0:
        return None
    tail_s = max(0.0, last - end - (len(sent) - done[-1, 0]) / rate)
    lengths = np.array([prompt, output]).T
    return CellProgress(end - start, np.diff(done, axis=0).T, blocks, MIN_BLOCKS * block_s, tail_s, lengths)


def settling_share(work: Sequence[CellProgress], blocks: "Blocks") -> float:
    """The share of the measured time, at most half, in which the server was not yet steady.

    Without it the mean rate of all repeats together has the smallest standard error (MSER, White 1997). Rates are of
    items of equal lengths, so that a run which begins with short items is not taken for a server that settles.
    """
    places = np.linspace(0, 1, SETTLING_PARTS + 1)
    rates = np.zeros(SETTLING_PARTS)
    costs, _ = blocks.fit(blocks.lengths)
    of_repeats = np.split(blocks.lengths @ costs, np.cumsum([progress.blocks for progress in work])[:-1])
    for progress, effects in zip(work, of_repeats, strict=True):
        items = progress.bins[0] * np.repeat(1 + effects, BINS_PER_BLOCK)
        done = np.concatenate([[0.0], items.cumsum() / items.sum()])
        rates += np.diff(np.interp(places, np.linspace(0, 1, len(done)), done))
    errors = [float(rates[cut:].var()) / (SETTLING_PARTS - cut) for cut in range(SETTLING_PARTS // 2 + 1)]
    return int(np.argmin(errors)) / SETTLING_PARTS


def variance_within_repeat(work: CellProgress) -> float:
    """Variance of the logarithm of a cell's rate, by a circular bootstrap of blocks.

    A drawn block may start at any bin. It keeps its requests, so prompt and output lengths are drawn jointly.
    """
    bins = work.bins[0]
    moving = np.convolve(np.concatenate([bins, bins[: BINS_PER_BLOCK - 1]]), np.ones(BINS_PER_BLOCK), mode="valid")
    generator = np.random.default_rng(20261123)
    drawn = moving[generator.integers(0, len(moving), (_DRAWS, work.blocks))].mean(axis=1)
    return float((drawn / moving.mean()).var()) * work.blocks / (work.blocks - 1)


def half_interval(values: Sequence[float], within: float, blocks: int, longer: float) -> float:
    """Half the width of the 90 % interval of the logarithm of a new run's value, given the values of the repeats.

    `within` is the variance of a value within its repeat. The new run is `longer` times as long as a repeat. Of a
    single repeat the variation between runs is assumed.
    """
    count = len(values)
    inside = within * (1 / count + 1 / longer)
    if count > 1:
        # Draw the variance of repeats. The part that does not come from within the repeats is from run to run.
        generator = np.random.default_rng(20261123)
        total = (count - 1) * stats.var_log(values) / generator.chisquare(count - 1, _ERROR_DRAWS)
        between_runs = np.maximum(total - within, 0) * (1 + 1 / count)
        errors = np.sqrt(between_runs + inside) * generator.standard_normal(_ERROR_DRAWS)
        return float(np.quantile(np.abs(errors), COVERAGE))
    return stats.t_quantile((1 + COVERAGE) / 2, blocks - 1) * math.sqrt(2 * ASSUMED_RUN_SD**2 + inside)


class Blocks(NamedTuple):
    """The blocks of all repeats. Each value is relative to the mean of its repeat."""

    places: Array  # in the measured time, from -0.5 to 0.5
    relative_times: Array  # time per item
    lengths: Array  # mean prompt and output tokens of the items; a column for each of them that varies
    varies: list[bool]  # whether prompt and output tokens vary; False where they were not reported
    freedom: int  # degrees of freedom, before those of regressors are subtracted

    def fit(self, columns: Array) -> tuple[Array, Array]:
        """Regress the time per item on columns. Return coefficients and covariance, infinite where undetermined."""
        solved = np.linalg.lstsq(columns, self.relative_times, rcond=None)
        coefficients, rank = np.asarray(solved[0], dtype=np.float64), int(solved[2])
        count = len(coefficients)
        if rank < columns.shape[1]:
            return coefficients, np.full((count, count), math.inf)
        variance = float(((self.relative_times - columns @ coefficients) ** 2).sum()) / (self.freedom - count)
        return coefficients, np.asarray(variance * np.linalg.inv(columns.T @ columns), dtype=np.float64)


def split_blocks(work: Sequence[CellProgress]) -> Blocks | None:
    """The blocks of a row's repeats. None: a block has no progress."""
    places, relative_times, lengths = [], [], []
    for progress in work:
        sums = progress.block_sums()
        items, tokens = sums[0], sums[1:]
        if not items.all():
            return None
        places.append((np.arange(progress.blocks) + 0.5) / progress.blocks - 0.5)
        times = 1 / items
        relative_times.append(times / times.mean() - 1)
        means = tokens / items
        lengths.append(means - means.mean(axis=1, keepdims=True))
    joined = np.concatenate(lengths, axis=1).T
    varies = [bool(abs(column).max() > 1e-6) for column in joined.T]  # False for NaN
    freedom = len(joined) - len(work)
    return Blocks(np.concatenate(places), np.concatenate(relative_times), joined[:, varies], varies, freedom)


def rate_trend(blocks: Blocks) -> float:
    """The relative change of the rate over the measured time, all repeats together; 0 where the test finds none.

    Lengths are also in the regression, so that different lengths do not look like a trend, or hide one.
    """
    coefficients, covariance = blocks.fit(np.column_stack([blocks.places, blocks.lengths]))
    slope, freedom = float(coefficients[0]), blocks.freedom - len(coefficients)
    bound = stats.t_quantile(1 - TREND_ALPHA / 2, freedom) * math.sqrt(covariance[0, 0])
    return math.expm1(-slope) if abs(slope) > bound else 0.0  # the rate is the inverse of the time per item


def length_factor(
    work: Sequence[CellProgress], blocks: Blocks | None, lengths: Array, items: int, load: Load | None
) -> tuple[float, float] | Reason:
    """How many times as long an item of the given lengths takes, with the relative standard error; or why not known.

    The time per item of each block is regressed on the mean lengths of its items. This gives a cost per prompt and
    output token, for the whole server and not only for the request with the token.
    """
    if load is not None and (load.batch_size or 1) > 1:
        return because("plan_lengths_bursts")
    if blocks is None:
        return because("plan_lengths_too_short", needed_s=max(progress.needed_s for progress in work))
    if any(np.isnan(progress.lengths).any() for progress in work):
        return because("plan_lengths_unknown")
    measured, mean_lengths = np.concatenate([progress.lengths for progress in work]), lengths.mean(axis=0)
    for column, name in enumerate(("prompt", "output")):
        low, high = float(measured[:, column].min()), float(measured[:, column].max())
        if not low * 0.99 <= mean_lengths[column] <= high * 1.01:
            return because("plan_lengths_outside", which=name, mean=float(mean_lengths[column]), low=low, high=high)
    costs, covariance = blocks.fit(blocks.lengths)
    difference = (mean_lengths - measured.mean(axis=0))[blocks.varies]
    # The items are a sample of pairs of prompt and output lengths, which vary together.
    sampling_variance = float((lengths[:, blocks.varies] @ costs).var()) / items
    error = math.sqrt(float(difference @ covariance @ difference) + sampling_variance) if any(blocks.varies) else 0.0
    factor = 1 + float(difference @ costs)
    if not error <= min(MAX_SCALE_ERROR, factor):
        return because("plan_lengths_unidentified", error=error if math.isfinite(error) else None)
    return factor, error / factor


class Prediction(Struct, frozen=True, kw_only=True):
    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Prediction":
        return Prediction(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class RowForecast(Struct, frozen=True, kw_only=True):
    """The prediction of one row. Energy and cost are None where no power was measured."""

    server: str
    load: str
    repeats: int
    items_per_s: float
    start_s: float
    tail_s: float
    time_s: Prediction
    energy_kwh: Prediction | None = None
    cost: Prediction | None = None
    deadline: Literal["met", "missed", "inconclusive"] | None = None
    machines: int | None = None  # number that meets the deadline by the upper bound; None: none does, or no deadline
    notes: list[Reason] = []

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"


class RefusedRow(Struct, frozen=True, kw_only=True):
    server: str
    load: str
    reason: Reason


class Forecast(Struct, frozen=True, kw_only=True):
    """The predictions of all rows, the fastest row first."""

    run: str
    machine: str
    simulated: bool
    items: int
    deadline_s: float | None
    price_per_kwh: float | None
    rows: list[RowForecast]
    refused: list[RefusedRow]
    assumptions: list[Reason]


def forecast(
    folder: Path,
    items: int,
    *,
    deadline_s: float | None = None,
    price_per_kwh: float | None = None,
    lengths: Path | None = None,
) -> Forecast:
    """Predict time, energy and cost of `items` for each row of a run.

    Raises HarnessError for wrong input, and RunError for a run that allows no prediction.
    """
    if not isinstance(items, Integral) or items < 1:
        raise HarnessError(f"items: a whole number of at least 1 is expected (got {items!r})")
    for name, number in (("deadline_s", deadline_s), ("price_per_kwh", price_per_kwh)):
        if number is not None and not 0 <= number < math.inf:
            raise HarnessError(f"{name}: a number of at least 0 is expected (got {number!r})")
    item_lengths = None if lengths is None else read_lengths(lengths)
    data = load_run_data(folder)
    run, summary = data.run, summarize_data(data).summary
    reason = next((reason for reason in summary.reasons if reason.cell is None), None)  # about the whole run
    if run.status not in ("valid", "invalid") or reason is not None:
        why = f"its status is {run.status}" if reason is None else sentence(reason)
        raise RunError(
            f"{run.id}: no prediction from a run that is not complete: {why}",
            next_step=f"harness report {folder} shows all reasons. Run the scenario again.",
        )
    loads = {cell.id: run.scenario.loads[cell.load] for cell in run.cells}
    work = {name: cell_progress(cell, loads[name]) for name, cell in data.cells.items() if name in loads}
    cells = {cell.id: cell for cell in summary.cells}
    rows, refused = [], []
    for row in summary.rows:
        load = run.scenario.loads.get(row.load)
        row_cells, progress = [cells[name] for name in row.cells], [work.get(name) for name in row.cells]
        result = _refusal_of_row(row, load, cells, items) or _forecast_row(
            row, row_cells, progress, items, load, item_lengths
        )
        if isinstance(result, Reason):
            refused.append(RefusedRow(server=row.server, load=row.load, reason=result))
        else:
            rows.append(_with_cost_and_deadline(result, deadline_s, price_per_kwh))
    if not rows:
        raise RunError(
            f"{run.id}: no row allows a prediction",
            detail="\n".join(f"{row.server} / {row.load}: {sentence(row.reason)}" for row in refused),
            next_step=f"Measure a batch load with in_flight: {DOCS}/plan.md has a scenario.",
        )
    has_power = any(row.energy_kwh is not None for row in rows)
    package = any(row.machine_load is not None and row.machine_load.package for row in summary.rows)
    return Forecast(
        run=run.id,
        machine=run.machine.name,
        simulated=run.simulated,
        items=items,
        deadline_s=deadline_s,
        price_per_kwh=price_per_kwh,
        rows=sorted(rows, key=lambda row: row.time_s.value),
        refused=refused,
        assumptions=[
            because("plan_same_lengths")
            if item_lengths is None
            else because("plan_given_lengths", rows=len(item_lengths)),
            because("plan_same_server"),
            because("plan_alone"),
            because("plan_steady"),
            because("plan_power", package=package) if has_power else because("plan_no_power"),
        ],
    )


def read_price(given: str) -> float:
    """The price of a kWh, in any currency. Raises HarnessError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(?:/\s*kWh)?", given.strip())
    if match is None:
        raise HarnessError(f"--price: a price per kWh is expected, got '{given}'", next_step="Write 0.30/kWh.")
    return float(match[1])


class _ItemLengths(Struct):
    prompt_tokens: Annotated[float, Meta(ge=0, lt=1e9)]
    output_tokens: Annotated[float, Meta(ge=0, lt=1e9)]


def read_lengths(path: Path) -> Array:
    """Return prompt and output tokens of each row of a CSV or JSONL file. Raises HarnessError."""
    advice = "Give a CSV with the header prompt_tokens,output_tokens, or a JSON object with both in each line."
    try:
        text = read_text(path, "utf-8-sig")
        is_json = text.lstrip().startswith("{")
        rows: list[Any] = text.splitlines() if is_json else list(csv.DictReader(io.StringIO(text)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HarnessError(f"--lengths: {path}: it cannot be read ({reason_of(error)})", next_step=advice) from None
    items = []
    for number, row in enumerate(rows, start=1 if is_json else 2):
        try:
            item = json.decode(row, type=_ItemLengths) if is_json else convert(row, _ItemLengths, strict=False)
        except UNDECODABLE as error:
            raise HarnessError(f"--lengths: {path}:{number}: {error}", next_step=advice) from None
        items.append((item.prompt_tokens, item.output_tokens))
    if not items:
        raise HarnessError(f"--lengths: {path} has no rows", next_step=advice)
    return np.array(items)


def _refusal_of_row(row: Row, load: Load | None, cells: dict[str, CellSummary], items: int) -> Reason | None:
    """Why the rate of a row does not predict work on so many items; None where it does."""
    if row.invalid is not None:
        return because("plan_invalid", why=row.invalid)
    if load is None or row.definitions or row.missing:
        return because("plan_no_records")
    if load.user not in _USERS_OF_ITEMS:
        return because("plan_not_items", user=load.user)
    if load_kind(load) not in ("closed loop", "bursts"):
        return because("plan_open_loop")
    if any(cells[name].mix or cells[name].stage for name in row.cells):
        return because("plan_mixed")
    if {"wall_s", "output_tok_s", "requests_per_s"} & set(row.client_limited):
        return because("plan_client_limited")
    if items < (concurrency := max_concurrency(load)):
        return because("plan_too_few_items", items=items, concurrency=concurrency)
    return None


def _forecast_row(
    row: Row,
    cells: Sequence[CellSummary],
    work: Sequence[CellProgress | None],
    items: int,
    load: Load | None,
    item_lengths: Array | None,
) -> RowForecast | Reason:
    repeats = [progress for progress in work if progress is not None]
    if not repeats or len(repeats) < len(work):
        return because("plan_too_short", needed_s=None)
    has_blocks = all(progress.blocks for progress in repeats)
    if not has_blocks and len(repeats) < 3:
        return because("plan_too_short", needed_s=max(progress.needed_s for progress in repeats))
    notes = [] if has_blocks else [because("plan_no_blocks", repeats=len(repeats))]
    blocks = split_blocks(repeats) if has_blocks else None
    if has_blocks and blocks is None:
        return because("plan_stalled")
    trend = 0.0 if blocks is None else rate_trend(blocks)
    if abs(trend) > MAX_TREND:
        return because("plan_trend", change=trend)
    if trend:
        notes.append(because("plan_widened", change=trend))
    factor, factor_error = 1.0, 0.0
    if item_lengths is not None:
        result = length_factor(repeats, blocks, item_lengths, items, load)
        if isinstance(result, Reason):
            return result
        factor, factor_error = result
    if blocks is not None and (share := settling_share(repeats, blocks)):
        repeats = [progress.without_first(share) for progress in repeats]
        notes.append(because("plan_settling", share=share))
    rates = [progress.rate for progress in repeats]
    rate = math.exp(stats.mean_log(rates)) / factor
    if len(rates) == 1:
        notes.append(because("plan_runs_unknown", sd=ASSUMED_RUN_SD))
    else:
        notes.append(because("plan_repeats_only", repeats=len(rates)))
    within = statistics.fmean(map(variance_within_repeat, repeats)) if has_blocks else 0.0
    longer = items / rate / statistics.fmean(progress.window_s for progress in repeats)

    def log_half_width(values: Sequence[float]) -> float:
        """Half the width of the interval of the logarithm of a value that is proportional to the time per item."""
        error = half_interval(values, within, repeats[0].blocks, longer)
        return math.hypot(error, stats.t_quantile((1 + COVERAGE) / 2, 20) * factor_error) + abs(trend)

    start_s = statistics.median([cell.ready_s or 0.0 for cell in cells])
    tail_s = statistics.fmean(progress.tail_s for progress in repeats)
    energy = None
    watts = [cell.machine_load.power_mean_w for cell in cells if cell.machine_load and cell.machine_load.power_mean_w]
    if len(watts) == len(rates):
        item_joules = [power / item_rate for power, item_rate in zip(watts, rates, strict=True)]
        joules = items * math.exp(stats.mean_log(item_joules)) * factor
        fixed_joules = (start_s + tail_s) * statistics.fmean(watts)
        energy = _make_prediction(fixed_joules, joules, log_half_width(item_joules)).times(1 / 3.6e6)
    return RowForecast(
        server=row.server,
        load=row.load,
        repeats=len(rates),
        items_per_s=rate,
        start_s=start_s,
        tail_s=tail_s,
        time_s=_make_prediction(start_s + tail_s, items / rate, log_half_width(rates)),
        energy_kwh=energy,
        notes=notes,
    )


def _make_prediction(fixed: float, work: float, half_width: float) -> Prediction:
    low, high = fixed + work * math.exp(-half_width), fixed + work * math.exp(half_width)
    return Prediction(value=fixed + work, low=low, high=high)


def _with_cost_and_deadline(row: RowForecast, deadline_s: float | None, price: float | None) -> RowForecast:
    cost = None if price is None or row.energy_kwh is None else row.energy_kwh.times(price)
    if deadline_s is None:
        return replace(row, cost=cost)
    deadline: Literal["met", "missed", "inconclusive"] = "inconclusive"
    if row.time_s.high <= deadline_s:
        deadline = "met"
    elif row.time_s.low > deadline_s:
        deadline = "missed"
    fixed_s = row.start_s + row.tail_s  # on each machine
    left_s = deadline_s - fixed_s
    machines = math.ceil((row.time_s.high - fixed_s) / left_s) if left_s > 0 else None
    return replace(row, cost=cost, deadline=deadline, machines=machines)
