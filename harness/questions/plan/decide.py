"""Predicts how long a number of items takes on this machine, from a finished run. docs/method.md has the formulas."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import PurePath
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, RunError
from harness.base.files import DOCS
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, figures, percent, verb
from harness.numbers import stats
from harness.numbers.block_statistics import fit_trend, work_between
from harness.numbers.schedule import load_kind
from harness.numbers.stats import Array
from harness.numbers.summarize import summarize_data
from harness.numbers.summary import CellSummary, Row
from harness.numbers.validity import DEATHS
from harness.records.columns import Rows
from harness.records.records import CUT
from harness.records.run_data import CellData, RunData
from harness.scenario import Load, max_concurrency

COVERAGE = 0.90  # of the intervals
TREND_ALPHA = 0.01  # of the test for a trend
MAX_TREND = 0.10  # change of the rate over the measured time; with a larger one there is no interval
MIN_WAVES = 10  # a wave is one request per concurrency slot; with fewer in a repeat there is no interval
MIN_COUNTED_WAVES = 4  # that the rate counts: failed requests may leave few
END_WAVES = 0.25  # bias of the rate: a part of a wave may be counted at one end and not at the other
MIN_TREND_BLOCKS = 10  # of a repeat: next to a trend and two lengths they leave a line 6 degrees of freedom
MAX_TREND_BLOCKS = 20  # of a repeat: a trend shows as well in longer blocks, and those scatter less
TREND_BLOCK_WAVES = 2  # at least, in a block: one wave may end just in it or just after it
MAX_FACTOR = 4.0  # an interval that is wider either way is not known
NOTED_DIFFERENCE = 0.01  # between the plan's rate and the report's
ASSUMED_RUN_SD = 0.05  # of the logarithm of the rate between runs, where it is unknown
_USERS_OF_ITEMS = ("batch", "chat", "rag")  # one request of these is one item


class Prediction(Struct, frozen=True, kw_only=True):
    """A value with its 90 % interval; None: the interval is not known."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> "Prediction":
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Prediction(value=self.value * factor, low=low, high=high)


class RowForecast(Struct, frozen=True, kw_only=True):
    """The prediction of one row. Energy and cost are None where no energy was measured."""

    server: str
    load: str
    repeats: int
    items_per_s: float  # under full load
    requests_per_s: float | None = None  # as the report has it: over the wall time, or the measured time
    start_s: float
    tail_s: float  # besides start and items / rate: the server fills, and drains
    time_s: Prediction
    no_interval: Reason | None = None  # why the interval is not known
    requests_needed: int | None = None  # in each repeat, for an interval; None: more requests do not help
    energy_kwh: Prediction | None = None
    cost: Prediction | None = None
    deadline: Literal["met", "missed", "inconclusive"] | None = None
    machines: int | None = None  # number that meets the deadline by the upper bound; None: none does, or not known
    notes: list[Reason] = []

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"


class Forecast(Struct, frozen=True, kw_only=True):
    """The predictions of all rows: first those that meet the deadline, of these and of the others the fastest first."""

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
    data: RunData, items: int, *, deadline_s: float | None = None, price_per_kwh: float | None = None
) -> Forecast:
    """Predict time, energy and cost of `items` for each row of a run.

    Raises HarnessError for wrong input, and RunError for a run that allows no prediction.
    """
    if not isinstance(items, Integral) or items < 1:
        raise HarnessError(f"items: a whole number of at least 1 is expected (got {items!r})")
    for name, number in (("deadline_s", deadline_s), ("price_per_kwh", price_per_kwh)):
        if number is not None and not 0 <= number < math.inf:
            raise HarnessError(f"{name}: a number of at least 0 is expected (got {number!r})")
    run, summary = data.run, summarize_data(data).summary
    reason = next((reason for reason in summary.reasons if reason.cell is None), None)  # about the whole run
    is_complete = run.origin is not None or run.status in ("valid", "invalid")
    if not is_complete or reason is not None:
        why = f"its status is {run.status}" if reason is None else sentence(reason)
        raise RunError(
            f"{run.id}: no prediction from a run that is not complete: {why}",
            next_step=f"`{command_line('harness', 'report', data.folder)}` shows all reasons. Run the scenario again.",
        )
    cells = {cell.id: cell for cell in summary.cells}
    rows, refused = [], dict[str, Reason]()
    for row in summary.rows:
        load, row_cells = run.scenario.loads.get(row.load), [cells[name] for name in row.cells]
        result = _refusal_of_row(row, load, row_cells, items)
        if result is None and load is not None:
            result = forecast_row(row, load, row_cells, [data.cells.get(name) for name in row.cells], items)
        if isinstance(result, RowForecast):
            rows.append(_with_cost_and_deadline(result, deadline_s, price_per_kwh))
        elif result is not None:
            refused[row.name] = result
    if not rows:
        raise RunError(
            f"{run.id}: no row allows a prediction",
            detail="\n".join(f"{name}: {sentence(why)}" for name, why in refused.items()),
            next_step=_what_to_measure(data.folder, refused.values()),
        )
    has_power = any(row.energy_kwh is not None for row in rows)
    package = any(row.machine_load is not None and row.machine_load.package for row in summary.rows)
    return Forecast(
        run=run.id,
        machine=run.server_machine.name,
        simulated=run.simulated,
        items=items,
        deadline_s=deadline_s,
        price_per_kwh=price_per_kwh,
        rows=sorted(rows, key=lambda row: (row.deadline != "met", row.time_s.value)),
        refused=refused,
        assumptions=_assumptions(has_power, package),
    )


def _what_to_measure(folder: PurePath, refused: Iterable[Reason]) -> str:
    """What makes a prediction possible: a server that lives, a run that counts, or another load."""
    invalid = [why for reason in refused if isinstance(why := reason.values.get("why"), dict)]
    for why in invalid:
        if why["code"] in DEATHS:
            log = folder / "logs" / f"{why.get('cell')}.server.log"
            explain = command_line("harness", "explain", log)
            return f"The server died: find out why (`{explain}`), fix that, and run the scenario again."
    if invalid:
        return f"`{command_line('harness', 'report', folder)}` shows all reasons. Run the scenario again."
    return f"Measure a batch load with in_flight: {DOCS}/plan.md has a scenario."


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
        else because("plan_no_power", "no energy was measured, so energy and cost are not known"),
    ]


def read_price(given: str) -> float:
    """The price of a kWh, in any currency. Raises HarnessError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(?:/\s*kWh)?", given.strip())
    if match is None:
        raise HarnessError(f"--price: a price per kWh is expected, got '{given}'", next_step="Write 0.30/kWh.")
    return float(match[1])


class CellWork(NamedTuple):
    """What a server completed in one cell, and how fast it was under full load."""

    rate: float  # items a second
    done: int  # items completed in the wall time; also those of a warm-up that ran into it
    wall_s: float  # from the first measured request to the last answer, or to the end that cut requests
    waves: float  # of measured requests
    counted_waves: float  # of items that the rate counts
    blocks: Array  # of equal time; three rows: seconds, prompt tokens and output tokens an item. NaN: not reported

    @property
    def is_enough(self) -> bool:
        return self.waves >= MIN_WAVES and self.counted_waves >= MIN_COUNTED_WAVES

    @property
    def tail_s(self) -> float:
        return max(0.0, self.wall_s - self.done / self.rate)

    def variance(self) -> float:
        """Of the logarithm of the rate, from the scatter of the blocks."""
        times = self.blocks[0]
        return float(times.var(ddof=1)) / float(times.mean()) ** 2 / len(times)


def cell_work(cell: CellData, slots: int) -> CellWork | None:
    """Return what a cell with so many concurrency slots completed; None without an answer.

    The rate counts the items completed between the mean time of the first `slots` completions under full load and that
    of the last ones before the last send. One completion is no mark: a server completes many requests at once, and
    whether such a group is just in or just out would change the rate by as much as a wave.
    """
    rows = cell.rows
    measured, good = rows.where(rows.measured), rows.where(rows.good)
    if not len(measured) or not len(good):
        return None
    sent_s, ended_s = np.sort(measured.sent_s), np.sort(good.sent_s + good.ended_s)
    # Until the last answer, or until the end of the load cut requests: the server worked on those until then.
    cut = measured.where(measured.error.is_in(*CUT))
    over_s = max(float(ended_s[-1]), float((cut.sent_s + cut.ended_s).max(initial=0.0)))
    done, wall_s = int((ended_s > sent_s[0]).sum()), over_s - float(sent_s[0])
    if not done or wall_s <= 0:
        return None
    is_full = (ended_s > sent_s[min(slots, len(sent_s)) - 1]) & (ended_s <= sent_s[-1])
    counted, first_s, last_s = _ends(ended_s[is_full], slots)
    waves, counted_waves = len(measured) / slots, counted / slots
    if counted < slots or last_s <= first_s:  # nearly all of it is start and end: the best known rate is the report's
        return CellWork(done / wall_s, done, wall_s, waves, 0.0, np.empty((3, 0)))
    count = max(1, min(MAX_TREND_BLOCKS, int(counted_waves / TREND_BLOCK_WAVES)))
    blocks = _divide(good, np.linspace(first_s, last_s, count + 1))
    return CellWork(counted / (last_s - first_s), done, wall_s, waves, counted_waves, blocks)


def _ends(ended_s: Array, slots: int) -> tuple[int, float, float]:
    """The mean times of the first and the last wave of completions, and the items completed in between."""
    if len(ended_s) <= slots:
        return 0, math.nan, math.nan
    return len(ended_s) - slots, float(ended_s[:slots].mean()), float(ended_s[-slots:].mean())


def _divide(good: Rows, edges_s: Array) -> Array:
    """The blocks of `CellWork`. A request counts in each block by the share of its time in it."""
    work = np.array([np.ones(len(good)), good.prompt_tokens, good.output_tokens])
    sums = work_between(edges_s, good.sent_s, good.sent_s + good.ended_s, work)
    items = np.where(sums[0] > 0, sums[0], np.nan)
    blocks: Array = np.vstack([np.diff(edges_s) / items, sums[1:] / items])
    return blocks


def rate_trend(work: Sequence[CellWork]) -> float | None:
    """The relative change of the rate over the measured time, all repeats together; 0 where the test finds none.

    The mean lengths of each block are also in the regression, so that different lengths do not look like a trend, or
    hide one. None: too few blocks.
    """
    if any(repeat.blocks.shape[1] < MIN_TREND_BLOCKS or np.isnan(repeat.blocks[0]).any() for repeat in work):
        return None
    places, times, lengths = [], [], []
    for repeat in work:
        seconds, block_lengths = repeat.blocks[0], repeat.blocks[1:]
        places.append((np.arange(len(seconds)) + 0.5) / len(seconds) - 0.5)
        times.append(seconds / seconds.mean() - 1)
        lengths.append(block_lengths - block_lengths.mean(axis=1, keepdims=True))
    columns = np.concatenate(lengths, axis=1)
    others = columns[[bool(abs(column).max() > 1e-6) for column in columns]].T  # False for NaN
    fit = fit_trend(np.concatenate(places), np.concatenate(times), others, series=len(work))
    # The rate is the inverse of the time per item.
    return math.expm1(-fit.value) if fit.is_significant(TREND_ALPHA) else 0.0


def half_interval(values: Sequence[float], work: Sequence[CellWork]) -> float:
    """Half the width of the 90 % interval of the logarithm of a new run's value, given the values of the repeats.

    A new run is taken to vary like a repeat, although a longer one varies less. Of a single repeat the variation
    between runs is assumed, and the rest comes from its blocks.
    """
    if len(values) > 1:
        error = math.sqrt(stats.var_log(values) * (1 + 1 / len(values)))
        return stats.t_quantile((1 + COVERAGE) / 2, len(values) - 1) * error
    error = math.sqrt(2 * (ASSUMED_RUN_SD**2 + work[0].variance()))
    return stats.t_quantile((1 + COVERAGE) / 2, work[0].blocks.shape[1] - 1) * error


def _refusal_of_row(row: Row, load: Load | None, cells: Sequence[CellSummary], items: int) -> Reason | None:
    """Why nothing is known of the time for so many items from this row; None where something is."""
    if row.invalid is not None:
        return because("plan_invalid", f"a cell of it is not valid ({sentence(row.invalid)})", why=row.invalid)
    if any(cell.mix or cell.stage for cell in cells):
        return because("plan_mixed", "it is part of a mix or a stage; measure the load alone")
    is_import = load is None or load.user == "imported"
    if load is not None and not is_import and load.user not in _USERS_OF_ITEMS:
        return because(
            "plan_not_items",
            f"a request of user `{load.user}` is not one item; measure a batch load",
            user=load.user,
        )
    if not row.pooled.requests_per_s:
        if is_import:
            return because("plan_no_records", "imported: the file has no rate of its requests")
        return because("plan_too_short", "too few requests to measure a rate; run more requests")
    if load is not None and not is_import and items < (concurrency := max_concurrency(load)):
        return because(
            "plan_too_few_items",
            f"its rate is that of {concurrency:,} items at once, and {items:,} {verb(items, 'is', 'are')} fewer",
            items=items,
            concurrency=concurrency,
        )
    return None


def forecast_row(
    row: Row, load: Load, cells: Sequence[CellSummary], data: Sequence[CellData | None], items: int
) -> RowForecast | Reason:
    """Predict the time for so many items from the requests of a row, or return why it allows no prediction."""
    slots, start_s = max_concurrency(load), statistics.median([cell.ready_s or 0.0 for cell in cells])
    if (reason := _rate_of_another(load)) is not None:
        return _by_rate_alone(row, reason, start_s, items)
    work = [cell_work(cell, slots) if cell is not None else None for cell in data]
    repeats = [repeat for repeat in work if repeat is not None]
    if not repeats or len(repeats) < len(work):
        return because("plan_too_short", "too few requests to measure a rate; run more requests")
    rate = math.exp(stats.mean_log([repeat.rate for repeat in repeats]))
    times_s = [start_s + repeat.tail_s + items / repeat.rate for repeat in repeats]
    trend, needed = rate_trend(repeats), _requests_needed(repeats, slots)
    reason = _why_no_interval(row, load, trend, needed, round(min(repeat.waves for repeat in repeats) * slots), rate)
    widening = None if reason else abs(trend or 0.0) + _bias(repeats, times_s, items)
    time_s = _make_prediction(times_s, repeats, widening)
    if reason is None and time_s.high is None:
        text = f"the interval is wider than a factor of {MAX_FACTOR:g} either way; measure longer, or run 5 repeats"
        reason, widening = because("plan_wide", text, max_factor=MAX_FACTOR), None
    energy = None
    watts = [power for cell in cells if (power := _mean_power_w(cell)) is not None]
    if len(watts) == len(times_s):
        joules = [power * time for power, time in zip(watts, times_s, strict=True)]
        energy = _make_prediction(joules, repeats, widening).times(1 / 3.6e6)
    return RowForecast(
        server=row.server,
        load=row.load,
        repeats=len(repeats),
        items_per_s=rate,
        requests_per_s=row.pooled.requests_per_s,
        start_s=start_s,
        tail_s=statistics.fmean(repeat.tail_s for repeat in repeats),
        time_s=time_s,
        no_interval=reason,
        requests_needed=needed,
        energy_kwh=energy,
        notes=[*([] if reason else _notes_on_interval(trend, len(repeats))), *_notes_on_rate(row, cells, rate)],
    )


def _bias(repeats: Sequence[CellWork], times_s: Sequence[float], items: int) -> float:
    """By how much the ends of the rate may change the logarithm of the time; 0 for as many items as were measured."""
    return statistics.fmean(
        END_WAVES / repeat.counted_waves * abs(items - repeat.done) / repeat.rate / time_s
        for repeat, time_s in zip(repeats, times_s, strict=True)
    )


def _rate_of_another(load: Load) -> Reason | None:
    """Why the rate of a load says nothing about what the server could do; None where it does."""
    if load.user == "imported":
        text = "imported: it is not known what limited its rate; measure the load with `harness run`"
        return because("plan_no_records", text)
    if load_kind(load) not in ("closed loop", "bursts"):
        text = "a schedule decides its rate, and the machine may be faster; measure a load without arrivals or trace"
        return because("plan_open_loop", text)
    return None


def _by_rate_alone(row: Row, reason: Reason, start_s: float, items: int) -> RowForecast:
    """The prediction from the report's requests/s."""
    rate = row.pooled.requests_per_s or math.nan  # `_refusal_of_row` refused a row without one
    return RowForecast(
        server=row.server,
        load=row.load,
        repeats=len(row.cells),
        items_per_s=rate,
        requests_per_s=rate,
        start_s=start_s,
        tail_s=0.0,
        time_s=Prediction(value=start_s + items / rate),
        no_interval=reason,
    )


def _requests_needed(repeats: Sequence[CellWork], slots: int) -> int | None:
    """How many requests each repeat needs for an interval; None where all have enough."""
    if all(repeat.is_enough for repeat in repeats):
        return None
    if any(repeat.waves < MIN_WAVES for repeat in repeats):
        return MIN_WAVES * slots
    return round(2 * slots * max(repeat.waves for repeat in repeats))  # of most requests failed


def _why_no_interval(
    row: Row, load: Load, trend: float | None, needed: int | None, sent: int, rate: float
) -> Reason | None:
    """`sent`: requests of the shortest repeat."""
    if {"wall", "output_tok_s", "requests_per_s"} & set(row.client_limited):
        text = "the load generator was the limit of its rate, and the machine may be faster"
        return because("plan_client_limited", text)
    if needed is not None:
        slots = max_concurrency(load)
        about = "" if load.duration_s is None else f" (about {figures(needed / rate)} s)"
        text = f"too few requests ({sent:,}) with {slots:,} in flight; each repeat needs {needed:,} or more{about}"
        return because("plan_few_waves", text, requests=sent, in_flight=slots, needed=needed)
    if trend is not None and abs(trend) > MAX_TREND:
        text = f"its rate {_changed(trend)} during the measured time, so no steady rate is known (heat, or too short a "
        text += "warm-up); measure longer, after `warmup: {until: steady}`"
        return because("plan_trend", text, change=trend)
    return None


def _mean_power_w(cell: CellSummary) -> float | None:
    """None too where the report does not know the energy, such as after a gap between samples."""
    load = cell.machine_load
    return load.power_mean_w if load is not None and load.energy_j else None


def _notes_on_interval(trend: float | None, repeats: int) -> list[Reason]:
    notes = []
    if trend is None:
        notes.append(because("plan_no_blocks", "the measured time is too short to see a trend"))
    elif trend:
        change = f"its rate {_changed(trend)} during the measured time"
        notes.append(because("plan_widened", f"{change}; the interval is wider by as much", change=trend))
    if repeats == 1:
        text = f"run-to-run variation is unknown (one repeat): a standard deviation of {percent(ASSUMED_RUN_SD, 0)} "
        text += "is assumed; "
        return [*notes, because("plan_runs_unknown", text + "`--repeats 5` measures it", sd=ASSUMED_RUN_SD)]
    text = f"run-to-run variation is that of {repeats} repeats of one run; other days can differ more"
    return [*notes, because("plan_repeats_only", text, repeats=repeats)]


def _notes_on_rate(row: Row, cells: Sequence[CellSummary], rate: float) -> list[Reason]:
    notes, requests_per_s = [], row.pooled.requests_per_s
    if requests_per_s and abs(math.log(rate / requests_per_s)) > NOTED_DIFFERENCE:
        text = "items/s is counted under full load, from the first wave of answers to the last before the last send; "
        text += f"the report's {figures(requests_per_s)} requests/s is over the whole measured time"
        notes.append(because("plan_full_load", text, items_per_s=rate, requests_per_s=requests_per_s))
    if failed := row.pooled.failed:
        text = f"{failed:,} of {count(row.pooled.sent, 'request')} failed; the time includes sending such items again"
        notes.append(because("plan_failed", text, failed=failed, sent=row.pooled.sent))
    return notes + [note for cell in cells for note in cell.notes if note.code == "energy_differs"][:1]


def _changed(change: float) -> str:
    return f"{'rose' if change > 0 else 'fell'} by {figures(100 * abs(change))} %"


def _make_prediction(values: Sequence[float], repeats: Sequence[CellWork], widening: float | None) -> Prediction:
    """A new run's value, given those of the repeats. `widening` of the logarithm; None: the interval is not known."""
    value = math.exp(stats.mean_log(values))
    half_width = math.inf if widening is None else half_interval(values, repeats) + widening
    if half_width > math.log(MAX_FACTOR):
        return Prediction(value=value)
    return Prediction(value=value, low=value * math.exp(-half_width), high=value * math.exp(half_width))


def _with_cost_and_deadline(row: RowForecast, deadline_s: float | None, price: float | None) -> RowForecast:
    cost = None if price is None or row.energy_kwh is None else row.energy_kwh.times(price)
    if deadline_s is None:
        return replace(row, cost=cost)
    low_s, high_s = row.time_s.low, row.time_s.high
    if low_s is None or high_s is None:
        return replace(row, cost=cost, deadline="inconclusive")
    deadline: Literal["met", "missed", "inconclusive"] = "inconclusive"
    if high_s <= deadline_s:
        deadline = "met"
    elif low_s > deadline_s:
        deadline = "missed"
    fixed_s = row.start_s + row.tail_s  # on each machine
    remaining_s = deadline_s - fixed_s
    machines = math.ceil((high_s - fixed_s) / remaining_s) if remaining_s > 0 else None
    return replace(row, cost=cost, deadline=deadline, machines=machines)
