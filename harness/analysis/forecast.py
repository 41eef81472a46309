"""How long a number of items takes on this machine, predicted from a finished run; formulas in docs/method.md.

First how a cell worked through its requests: its rate, how that varies, its trend and what tokens cost.
"""

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from harness.analysis.schedule import load_kind
from harness.analysis.summarize import cell_contexts, summarize
from harness.analysis.tally import Clock
from harness.errors import BadLines, HarnessError, RunError
from harness.files import UNDECODABLE, read_bytes, read_lines
from harness.judge import stats
from harness.judge.noise_floors import known_noise
from harness.judge.stats import Array, Variation
from harness.reasons import sentence
from harness.rundir.manifest import Run, read_run
from harness.rundir.records import CUT, group_by_cell, read_marks
from harness.scenario import Load
from harness.summary import CellSummary, Reason, Row, Summary, because

COVERS = 0.90  # of the intervals
TREND_ALPHA = 0.01  # how often the test finds a trend where there is none
MIN_BLOCKS, MAX_BLOCKS = 10, 20  # of the measured time; a block is at least two p95 latencies long
PARTS = 10  # of the measured time, of which up to half are left out at the start
BINS = 5  # of a block: where a block that is drawn may begin
ASSUMED_SD = 0.05  # of the rate between runs, where nothing shows it
MAX_SCALE_ERROR = 0.10  # standard error of the factor that other lengths make
_DRAWS = 1000
_ERRORS = 100_000
MAX_TREND = 0.10  # change of the rate over the measured time, beyond which there is no prediction
_WORKERS = ("batch", "chat", "rag")  # of these one request is one item


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

    def after(self, share: float) -> "CellProgress":
        """The progress after this share of the blocks."""
        left = self.blocks - round(share * self.blocks)
        bins = self.bins[:, (self.blocks - left) * BINS :]
        return self._replace(window_s=self.window_s * left / self.blocks, bins=bins, blocks=left)

    def by_block(self) -> Array:
        found: Array = self.bins.reshape(3, self.blocks, BINS).sum(axis=2)
        return found


def read_progress(folder: Path, run: Run) -> dict[str, CellProgress | None]:
    """The progress of each cell with records; None: too few requests, or no time."""
    clocks = {
        name: place.clock
        for name, place in cell_contexts(run, group_by_cell(read_marks(folder / "processes.jsonl"))).items()
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
    end = last if load_kind(load) == "bursts" and load.users == 1 else max(due)
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


def settling(work: Sequence[CellProgress]) -> float:
    """The share of the measured time during which the server still settled, at most half.

    What is left has the mean rate with the least standard error (MSER, White 1997), over all repeats together.
    """
    places = np.linspace(0, 1, PARTS + 1)
    rates = np.zeros(PARTS)
    for one in work:
        done = np.concatenate([[0.0], one.bins[0].cumsum() / one.bins[0].sum()])
        rates += np.diff(np.interp(places, np.linspace(0, 1, len(done)), done))
    errors = [float(rates[cut:].var()) / (PARTS - cut) for cut in range(PARTS // 2 + 1)]
    return int(np.argmin(errors)) / PARTS


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


def split_blocks(work: Sequence[CellProgress]) -> Blocks | None:
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


class Prediction(Struct, frozen=True, kw_only=True):
    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Prediction":
        return Prediction(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class RowForecast(Struct, frozen=True, kw_only=True):
    """What the items would take with one row. Energy and cost are None where no power was measured."""

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
    machines: int | None = None  # that meet the deadline by the upper bound; None: no number does, or no deadline
    notes: list[Reason] = []

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"


class RefusedRow(Struct, frozen=True, kw_only=True):
    server: str
    load: str
    reason: Reason


class Forecast(Struct, frozen=True, kw_only=True):
    """What a number of items would take, with the fastest row first."""

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
    results: Path | None = None,
    deadline_s: float | None = None,
    price_per_kwh: float | None = None,
    lengths: Path | None = None,
) -> Forecast:
    """Predict time, energy and cost of `items` for each row of a run. `results` has the stored noise of the machine.

    Raises HarnessError for wrong input, and RunError for a run that allows no prediction.
    """
    if not (isinstance(items, Integral) and not isinstance(items, bool) and items >= 1):
        raise HarnessError(f"items: a whole number of at least 1 is expected, got {items!r}")
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise HarnessError(f"deadline_s: seconds above 0 are expected, got {deadline_s!r}")
    if price_per_kwh is not None and not 0 <= price_per_kwh < math.inf:
        raise HarnessError(f"price_per_kwh: a number of at least 0 is expected, got {price_per_kwh!r}")
    asked = None if lengths is None else read_lengths(lengths)
    run, summary = read_run(folder), summarize(folder)
    _refuse_unfinished(run, summary, folder)
    noise = known_noise([run], results).rows if results is not None else {}
    work = read_progress(folder, run)
    cells = {cell.id: cell for cell in summary.cells}
    rows, refused = [], []
    for row in summary.rows:
        load = run.scenario.loads.get(row.load)
        found = _refused(row, load, cells) or _row(
            row, [cells[name] for name in row.cells], [work.get(name) for name in row.cells], items, load,
            noise.get(("wall_s", row.load)) or noise.get(("output_tok_s", row.load)), asked,
        )  # fmt: skip
        if isinstance(found, Reason):
            refused.append(RefusedRow(server=row.server, load=row.load, reason=found))
        else:
            rows.append(_with_bounds(found, deadline_s, price_per_kwh))
    if not rows:
        raise RunError(
            f"{run.id}: no row allows a prediction",
            detail="\n".join(f"{row.server} / {row.load}: {sentence(row.reason)}" for row in refused),
            next_step="Measure a batch load with in_flight: docs/plan.md has a scenario.",
        )
    powered = [row.energy_kwh is not None for row in rows]
    package = any(row.machine_load is not None and row.machine_load.package for row in summary.rows)
    return Forecast(
        run=run.id,
        machine=run.machine.name,
        simulated=run.simulated,
        items=items,
        deadline_s=deadline_s,
        price_per_kwh=price_per_kwh,
        rows=sorted(rows, key=lambda one: one.time_s.value),
        refused=refused,
        assumptions=[
            because("plan_same_lengths") if asked is None else because("plan_given_lengths", rows=len(asked)),
            because("plan_same_server"),
            because("plan_alone"),
            because("plan_steady"),
            because("plan_power", package=package) if any(powered) else because("plan_no_power"),
        ],
    )


def read_duration(option: str, given: str) -> float:
    """Seconds of a duration such as 8h. Raises HarnessError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", given.strip())
    seconds = (
        float(match[1]) * {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}[match[2]] if match else 0.0
    )
    if not 0 < seconds < 1e11:
        raise HarnessError(
            f"{option}: a time above 0 with its unit is expected, got '{given}'",
            next_step="Write 8h, 90min, 45s or 2d.",
        )
    return seconds


def read_price(given: str) -> float:
    """The price of a kWh, in any currency. Raises HarnessError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:/\s*kWh)?", given.strip())
    if match is None or float(match[1]) > 1e6:
        raise HarnessError(f"--price: a price per kWh is expected, got '{given}'", next_step="Write 0.30/kWh.")
    return float(match[1])


def read_lengths(path: Path) -> Array:
    """Return prompt and output tokens of each row of a CSV or JSONL file. Raises HarnessError for what is wrong."""
    bad = BadLines(path, "A CSV with the header prompt_tokens,output_tokens, or a JSON object with both a line.")
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not text in UTF-8"
        raise HarnessError(f"--lengths: {path}: {why}", next_step="Give a readable CSV or JSONL file.") from None
    rows: list[tuple[int, dict[str, object]]] = []
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                rows += [(number, msgspec.json.decode(line, type=dict[str, object]))] if line.strip() else []
            except UNDECODABLE:
                bad.add(number, "not a JSON object")
    else:
        try:
            reader = csv.DictReader(io.StringIO(text))
            rows = [(reader.line_num, dict(row)) for row in reader]
        except csv.Error as error:
            bad.add(1, f"not CSV: {error}")
    found = []
    for number, row in rows:
        try:
            pair = [float(str(row[name])) for name in ("prompt_tokens", "output_tokens")]
        except (KeyError, ValueError):
            bad.add(number, "prompt_tokens and output_tokens are expected as numbers")
            continue
        if all(0 <= value < 1e9 for value in pair):
            found.append(pair)
        else:
            bad.add(number, "prompt_tokens and output_tokens must be at least 0 and below 1e9")
    bad.raise_errors()
    if not found:
        raise HarnessError(f"--lengths: {path} has no rows", next_step="Give one row for each item, or a sample.")
    return np.array(found)


def _refuse_unfinished(run: Run, summary: Summary, folder: Path) -> None:
    why = next((reason for reason in summary.reasons if reason.cell is None), None)
    if run.status not in ("valid", "invalid") or why is not None:
        said = f"its status is {run.status}" if why is None else sentence(why)
        raise RunError(
            f"{run.id}: no prediction from a run that is not complete: {said}",
            next_step=f"harness report {folder} shows all reasons. Run the scenario again.",
        )
    if not (folder / "requests.jsonl").exists():
        raise RunError(
            f"{run.id}: no prediction without its records (requests.jsonl)",
            next_step="Give the run directory itself, not what was published of it.",
        )


def _refused(row: Row, load: Load | None, cells: dict[str, CellSummary]) -> Reason | None:
    """Why a row's rate is not that of a machine that works through items."""
    if row.invalid is not None:
        return because("plan_invalid", why=row.invalid)
    if load is None or row.definitions or row.missing:
        return because("plan_no_records")
    if load.user not in _WORKERS:
        return because("plan_not_items", user=load.user)
    if load_kind(load) not in ("closed loop", "bursts"):
        return because("plan_open_loop")
    if any(cells[name].mix or cells[name].stage for name in row.cells):
        return because("plan_mixed")
    if {"wall_s", "output_tok_s", "requests_per_s"} & set(row.client_limited):
        return because("plan_client_limited")
    return None


def _row(
    row: Row,
    cells: Sequence[CellSummary],
    work: Sequence[CellProgress | None],
    items: int,
    load: Load | None,
    noise: Variation | None,
    asked: Array | None,
) -> RowForecast | Reason:
    known = [one for one in work if one is not None]
    if not known or len(known) < len(work):
        return because("plan_too_short", needed_s=None)
    blocked = all(one.blocks for one in known)
    if not blocked and len(known) < 3:
        return because("plan_too_short", needed_s=max(one.needed_s for one in known))
    notes = [] if blocked else [because("plan_no_blocks", repeats=len(known))]
    blocks = split_blocks(known) if blocked else None
    if blocked and blocks is None:
        return because("plan_stalled")
    drift = 0.0 if blocks is None else trend(blocks)
    if abs(drift) > MAX_TREND:
        return because("plan_trend", change=drift)
    if drift:
        notes.append(because("plan_widened", change=drift))
    scaled = (1.0, 0.0) if asked is None else scale(known, blocks, asked, items, load)
    if isinstance(scaled, Reason):
        return scaled
    if blocked and (share := settling(known)):
        known = [one.after(share) for one in known]
        notes.append(because("plan_settling", share=share))
    rates = [one.rate for one in known]
    rate = math.exp(stats.mean_log(rates)) / scaled[0]
    if len(rates) == 1 and noise is None:
        notes.append(because("plan_runs_unknown", sd=ASSUMED_SD))
    elif noise is None:
        notes.append(because("plan_repeats_only", repeats=len(rates)))
    within = statistics.fmean(map(variance_within, known)) if blocked else 0.0
    longer = items / rate / statistics.fmean(one.window_s for one in known)

    def around(values: Sequence[float]) -> float:
        """Half of the interval of the logarithm of a value that goes with the time per item."""
        error = half(values, within, known[0].blocks, longer, noise)
        return math.hypot(error, stats.t_quantile((1 + COVERS) / 2, 20) * scaled[1]) + abs(drift)

    start_s = statistics.median([cell.ready_s or 0.0 for cell in cells])
    tail_s = statistics.fmean(one.tail_s for one in known)
    fixed_s, work_s, width = start_s + tail_s, items / rate, around(rates)
    energy = None
    watts = [cell.machine_load.power_mean_w for cell in cells if cell.machine_load and cell.machine_load.power_mean_w]
    if len(watts) == len(rates):
        per_item = [power / one for power, one in zip(watts, rates, strict=True)]
        joules = items * math.exp(stats.mean_log(per_item)) * scaled[0]
        energy = _predicted(fixed_s * statistics.fmean(watts), joules, around(per_item)).times(1 / 3.6e6)
    return RowForecast(
        server=row.server,
        load=row.load,
        repeats=len(rates),
        items_per_s=rate,
        start_s=start_s,
        tail_s=tail_s,
        time_s=_predicted(fixed_s, work_s, width),
        energy_kwh=energy,
        notes=notes,
    )


def _predicted(fixed: float, work: float, width: float) -> Prediction:
    return Prediction(value=fixed + work, low=fixed + work * math.exp(-width), high=fixed + work * math.exp(width))


def _with_bounds(row: RowForecast, deadline_s: float | None, price: float | None) -> RowForecast:
    cost = None if price is None or row.energy_kwh is None else row.energy_kwh.times(price)
    if deadline_s is None:
        return msgspec.structs.replace(row, cost=cost)
    met = row.time_s.high <= deadline_s
    missed = row.time_s.low > deadline_s
    fixed_s = row.start_s + row.tail_s
    left_s = deadline_s - fixed_s
    machines = math.ceil((row.time_s.high - fixed_s) / left_s) if left_s > 0 else None
    word: Literal["met", "missed", "inconclusive"] = "met" if met else "missed" if missed else "inconclusive"
    return msgspec.structs.replace(row, cost=cost, deadline=word, machines=machines)
