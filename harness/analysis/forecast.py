"""Predicts how long a number of items takes on this machine, from a finished run. docs/method.md has the formulas."""

import math
import re
import statistics
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.analysis import stats
from harness.analysis.schedule import load_kind
from harness.analysis.stats import Array
from harness.analysis.summarize import summarize_data
from harness.base.errors import HarnessError, RunError
from harness.base.files import DOCS
from harness.base.summary import CellSummary, Reason, Row, because, sentence
from harness.base.units import figures, percent
from harness.records.records import CUT
from harness.records.run_data import CellData
from harness.records.run_data import load as load_run_data
from harness.scenario import Load, max_concurrency

COVERAGE = 0.90  # of the intervals
TREND_ALPHA = 0.01  # of the test for a trend
MAX_TREND = 0.10  # change of the rate over the measured time; with a larger one there is no prediction
MIN_BLOCKS, MAX_BLOCKS = 10, 20  # of the measured time; a block is at least two p95 latencies long
ASSUMED_RUN_SD = 0.05  # of the logarithm of the rate between runs, where it is unknown
_USERS_OF_ITEMS = ("batch", "chat", "rag")  # one request of these is one item


class Prediction(Struct, frozen=True, kw_only=True):
    """A value with its 90 % interval."""

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


class Forecast(Struct, frozen=True, kw_only=True):
    """The predictions of all rows, the fastest row first."""

    run: str
    machine: str
    simulated: bool
    items: int
    deadline_s: float | None
    price_per_kwh: float | None
    rows: list[RowForecast]
    refused: dict[str, Reason]  # by SERVER / LOAD: why the row allows no prediction
    assumptions: list[Reason]


def forecast(
    folder: Path, items: int, *, deadline_s: float | None = None, price_per_kwh: float | None = None
) -> Forecast:
    """Predict time, energy and cost of `items` for each row of a run.

    Raises HarnessError for wrong input, and RunError for a run that allows no prediction.
    """
    if not isinstance(items, Integral) or items < 1:
        raise HarnessError(f"items: a whole number of at least 1 is expected (got {items!r})")
    for name, number in (("deadline_s", deadline_s), ("price_per_kwh", price_per_kwh)):
        if number is not None and not 0 <= number < math.inf:
            raise HarnessError(f"{name}: a number of at least 0 is expected (got {number!r})")
    data = load_run_data(folder)
    run, summary = data.run, summarize_data(data).summary
    reason = next((reason for reason in summary.reasons if reason.cell is None), None)  # about the whole run
    if run.status not in ("valid", "invalid") or reason is not None:
        why = f"its status is {run.status}" if reason is None else sentence(reason)
        raise RunError(
            f"{run.id}: no prediction from a run that is not complete: {why}",
            next_step=f"harness report {folder} shows all reasons. Run the scenario again.",
        )
    cells = {cell.id: cell for cell in summary.cells}
    rows, refused = [], dict[str, Reason]()
    for row in summary.rows:
        load = run.scenario.loads.get(row.load)
        of_row = [cells[name] for name in row.cells]
        found = _refusal_of_row(row, load, of_row, items)
        if found is None and load is not None:
            work = [cell_progress(data.cells[name], load) if name in data.cells else None for name in row.cells]
            found = _forecast_row(row, of_row, work, items)
        if isinstance(found, RowForecast):
            rows.append(_with_cost_and_deadline(found, deadline_s, price_per_kwh))
        elif found is not None:
            refused[row.name] = found
    if not rows:
        raise RunError(
            f"{run.id}: no row allows a prediction",
            detail="\n".join(f"{name}: {sentence(why)}" for name, why in refused.items()),
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
        assumptions=_assumptions(has_power, package),
    )


def _assumptions(has_power: bool, package: bool) -> list[Reason]:
    power = "the package with its CPU (APU)" if package else "the GPUs that served"
    return [
        because("plan_same_lengths", "the items have the lengths of the run's requests"),
        because(
            "plan_same_server",
            "same machine, server, model, settings and load; one start of the server, and no failure",
        ),
        because("plan_alone", "nothing else uses the machine"),
        because("plan_steady", "the measured rate holds for the whole job; its warm-up takes no extra time"),
        because("plan_power", f"energy and cost are of {power} alone, not of the whole machine at the wall")
        if has_power
        else because("plan_no_power", "no power was measured, so energy and cost are not known"),
    ]


def read_price(given: str) -> float:
    """The price of a kWh, in any currency. Raises HarnessError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(?:/\s*kWh)?", given.strip())
    if match is None:
        raise HarnessError(f"--price: a price per kWh is expected, got '{given}'", next_step="Write 0.30/kWh.")
    return float(match[1])


class CellProgress(NamedTuple):
    """The measured time of one cell in equal blocks. A request counts in each block by the share of its time in it."""

    window_s: float
    sums: Array  # three rows: items, their prompt tokens and their output tokens in each block; NaN: not reported
    needed_s: float  # measured time that MIN_BLOCKS need; with less there is one block
    tail_s: float  # after the measured time, until the last request ended

    @property
    def blocks(self) -> int:
        return int(self.sums.shape[1])

    @property
    def rate(self) -> float:
        return float(self.sums[0].sum()) / self.window_s

    def variance(self) -> float:
        """Of the logarithm of the rate, from the scatter of the blocks."""
        items = self.sums[0]
        return float(items.var(ddof=1)) / float(items.mean()) ** 2 / self.blocks


def cell_progress(cell: CellData, load: Load) -> CellProgress | None:
    """Divide a cell's measured time into blocks. It lasts from the first request until the last one is sent.

    In the tail after it fewer and fewer requests run. None: fewer than two requests, or no measured time.
    """
    measured, good = cell.rows.where(cell.rows.measured), cell.rows.where(cell.rows.good)
    if len(good) < 2:
        return None
    sent, ended = good.sent_s, good.sent_s + np.maximum(good.ended_s, 1e-6)
    start, last = float(measured.sent_s.min()), float(ended.max())
    # Bursts of a single user have no tail, since each burst waits for all of its answers.
    end = last if load_kind(load) == "bursts" and load.users == 1 else float(measured.sent_s.max())
    end = float(measured.sent_s[measured.error.is_in(*CUT)].min(initial=end))
    if end <= start:
        return None
    block_s = 2 * float(np.quantile(ended - sent, 0.95))
    blocks = min(MAX_BLOCKS, int((end - start) / block_s))
    edges = np.linspace(start, end, (blocks if blocks >= MIN_BLOCKS else 1) + 1)
    weights = np.array([np.ones(len(sent)), good.prompt_tokens, good.output_tokens])
    done = np.array([weights @ np.clip((edge - sent) / (ended - sent), 0, 1) for edge in edges])
    rate = (done[-1, 0] - done[0, 0]) / (end - start)
    if not rate > 0:
        return None
    tail_s = max(0.0, last - end - (len(sent) - done[-1, 0]) / rate)
    return CellProgress(end - start, np.diff(done, axis=0).T, MIN_BLOCKS * block_s, tail_s)


def rate_trend(work: Sequence[CellProgress]) -> float | None:
    """The relative change of the rate over the measured time, all repeats together; 0 where the test finds none.

    The mean lengths of each block are also in the regression, so that different lengths do not look like a trend, or
    hide one. None: no request made progress during a block.
    """
    times, columns = [], []
    for progress in work:
        items = progress.sums[0]
        if not items.all():
            return None
        places = (np.arange(progress.blocks) + 0.5) / progress.blocks - 0.5
        means = progress.sums[1:] / items
        times.append(1 / items / (1 / items).mean() - 1)
        columns.append(np.vstack([places, means - means.mean(axis=1, keepdims=True)]))
    relative_times, regressors = np.concatenate(times), np.concatenate(columns, axis=1).T
    varies = [bool(abs(column).max() > 1e-6) for column in regressors.T]  # False for NaN
    regressors = regressors[:, varies]
    coefficients = np.linalg.lstsq(regressors, relative_times, rcond=None)[0]
    freedom = len(relative_times) - len(work) - len(coefficients)
    variance = float(((relative_times - regressors @ coefficients) ** 2).sum()) / freedom
    error = math.sqrt(variance * float(np.linalg.pinv(regressors.T @ regressors)[0, 0]))
    slope = float(coefficients[0])
    # The rate is the inverse of the time per item.
    return math.expm1(-slope) if abs(slope) > stats.t_quantile(1 - TREND_ALPHA / 2, freedom) * error else 0.0


def half_interval(values: Sequence[float], work: Sequence[CellProgress]) -> float:
    """Half the width of the 90 % interval of the logarithm of a new run's value, given the values of the repeats.

    A new run is taken to vary like a repeat, although a longer one varies less. Of a single repeat the variation
    between runs is assumed, and the rest comes from its blocks.
    """
    if len(values) > 1:
        error = math.sqrt(stats.var_log(values) * (1 + 1 / len(values)))
        return stats.t_quantile((1 + COVERAGE) / 2, len(values) - 1) * error
    error = math.sqrt(2 * (ASSUMED_RUN_SD**2 + work[0].variance()))
    return stats.t_quantile((1 + COVERAGE) / 2, work[0].blocks - 1) * error


def _refusal_of_row(row: Row, load: Load | None, cells: Sequence[CellSummary], items: int) -> Reason | None:
    """Why the rate of a row does not predict work on so many items; None where it does."""
    if row.invalid is not None:
        return because("plan_invalid", f"a cell of it is not valid ({sentence(row.invalid)})", why=row.invalid)
    if load is None or row.definitions or row.missing:
        return because("plan_no_records", "imported: there are no records of its requests")
    if load.user not in _USERS_OF_ITEMS:
        return because(
            "plan_not_items",
            f"a request of user `{load.user}` is not one item; measure a batch load",
            user=load.user,
        )
    if load_kind(load) not in ("closed loop", "bursts"):
        return because(
            "plan_open_loop",
            "a schedule decides its rate, not the machine; measure a load without arrivals or trace",
        )
    if any(cell.mix or cell.stage for cell in cells):
        return because("plan_mixed", "it is part of a mix or a stage; measure the load alone")
    if {"wall", "output_tok_s", "requests_per_s"} & set(row.client_limited):
        return because("plan_client_limited", "the load generator was the limit of its rate")
    if items < (concurrency := max_concurrency(load)):
        return because(
            "plan_too_few_items",
            f"its rate is that of {concurrency:,} items at once, and {items:,} are fewer",
            items=items,
            concurrency=concurrency,
        )
    return None


def _forecast_row(
    row: Row, cells: Sequence[CellSummary], work: Sequence[CellProgress | None], items: int
) -> RowForecast | Reason:
    repeats = [progress for progress in work if progress is not None]
    if not repeats or len(repeats) < len(work):
        return because("plan_too_short", "too few requests to measure a rate; run more requests")
    trend = _checked_trend(repeats)
    if isinstance(trend, Reason):
        return trend
    notes = [_note_on_repeats(len(repeats))]
    if trend is None:
        notes.insert(0, because("plan_no_blocks", "the measured time is too short to see a trend"))
    elif trend:
        change = f"its rate {_changed(trend)} during the measured time"
        notes.insert(0, because("plan_widened", f"{change}; the interval is wider by as much", change=trend))
    rates = [progress.rate for progress in repeats]
    rate = math.exp(stats.mean_log(rates))
    start_s = statistics.median([cell.ready_s or 0.0 for cell in cells])
    tail_s = statistics.fmean(progress.tail_s for progress in repeats)
    energy, widening = None, abs(trend or 0.0)
    watts = [cell.machine_load.power_mean_w for cell in cells if cell.machine_load and cell.machine_load.power_mean_w]
    if len(watts) == len(rates):
        item_joules = [power / item_rate for power, item_rate in zip(watts, rates, strict=True)]
        joules = items * math.exp(stats.mean_log(item_joules))
        fixed_joules = (start_s + tail_s) * statistics.fmean(watts)
        half_width = half_interval(item_joules, repeats) + widening
        energy = _make_prediction(fixed_joules, joules, half_width).times(1 / 3.6e6)
    return RowForecast(
        server=row.server,
        load=row.load,
        repeats=len(rates),
        items_per_s=rate,
        start_s=start_s,
        tail_s=tail_s,
        time_s=_make_prediction(start_s + tail_s, items / rate, half_interval(rates, repeats) + widening),
        energy_kwh=energy,
        notes=notes,
    )


def _checked_trend(repeats: Sequence[CellProgress]) -> float | None | Reason:
    """The trend of a row, or why it allows no prediction. None: too short to see a trend."""
    if any(progress.blocks == 1 for progress in repeats):
        if len(repeats) >= 3:
            return None
        needed_s = max(progress.needed_s for progress in repeats)
        text = "measured for too short a time to know how the rate varies; each repeat needs "
        text += f"{math.ceil(needed_s):,} s or more (20 times the p95 latency), or run 3 or more repeats"
        return because("plan_too_short", text, needed_s=needed_s)
    trend = rate_trend(repeats)
    if trend is None:
        return because("plan_stalled", "no request made progress during a part of the measured time")
    if abs(trend) > MAX_TREND:
        text = f"its rate {_changed(trend)} during the measured time, so no steady rate is known (heat, or too short a "
        text += "warm-up); measure longer, after `warmup: {until: steady}`"
        return because("plan_trend", text, change=trend)
    return trend


def _note_on_repeats(repeats: int) -> Reason:
    if repeats == 1:
        text = f"run-to-run variation is unknown (one repeat): a standard deviation of {percent(ASSUMED_RUN_SD, 0)} "
        text += "is assumed; "
        return because("plan_runs_unknown", text + "`--repeats 5` measures it", sd=ASSUMED_RUN_SD)
    text = f"run-to-run variation is that of {repeats} repeats of one run; other days can differ more"
    return because("plan_repeats_only", text, repeats=repeats)


def _changed(change: float) -> str:
    return f"{'rose' if change > 0 else 'fell'} by {figures(100 * abs(change))} %"


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
