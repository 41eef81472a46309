"""Decides verdicts from run-level values, by the rules of docs/method.md."""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.measured import NEEDED, TAIL_PERCENTILES, Distribution, Numbers
from harness.base.metrics import METRICS, WORK
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, ratio_text, short_percent
from harness.numbers import stats
from harness.numbers.comparable import definition_conflict
from harness.numbers.comparison import ALPHA, MARGIN, Basis, Comparison, Inconclusive, Verdict, known_bounds
from harness.numbers.share_test import SLO_ALPHA
from harness.numbers.stats import Effect
from harness.numbers.summary import CellSummary, Row
from harness.scenario import Load, Scenario, asks_known, is_open_loop, prompts_of
from harness.scenario.check_syntax import parse_check
from harness.scenario.plan import load_of_part, mix_of

_OTHER_WORK = because("other_work", "one makes text and the other embeddings, which have no output tokens")
_NO_REQUESTS = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
CONFIRMING_REPEATS = 5  # where nothing shows how far repeats differ: so many find 15 % at 4 % noise, and 10 % at 2 %
PRIOR_SD = 0.015  # expected standard deviation of the logarithm of a cell's speed, for the test of drift;
PRIOR_PAIRS = 4  # it counts as much as so many pairs of cells


class Measured(Struct, frozen=True, kw_only=True):
    """One row (server, load) of one side, as each run of the side measured it."""

    name: str
    load: Load
    rows: Sequence[Row]  # one for each run
    cells: Sequence[Mapping[str, CellSummary]]  # by id, one mapping for each run

    def values(self, metric: str) -> list[list[float | None]]:
        """The values of a metric: a list for each run, with one value for each valid cell."""
        return [metric_values(row, cells, metric) for row, cells in zip(self.rows, self.cells, strict=True)]

    @property
    def valid_cells(self) -> list[CellSummary]:
        by_run = zip(self.rows, self.cells, strict=True)
        return [cell for row, cells in by_run for name in row.cells if (cell := cells.get(name)) and not cell.problems]

    def error_within(self, metric: str) -> tuple[float, float] | None:
        """The standard error of the logarithm of a metric over the repeats, or within the only one, with its degrees
        of freedom. None: the only repeat has too few requests.
        """
        speeds = [to_speeds(metric, [value for value in run if value is not None]) for run in self.values(metric)]
        values = speeds[0] if speeds else []
        if len(values) > 1:
            return math.sqrt(stats.var_log(values) / len(values)), len(values) - 1
        if len(self.valid_cells) != 1:
            return None
        (cell,) = self.valid_cells
        if metric in WORK:
            return None if cell.rate_error is None else (cell.rate_error, (cell.rate_blocks or 2) - 1)
        sample, statistic = METRICS[metric].sample(cell.numbers), METRICS[metric].statistic
        value, (low, high) = getattr(sample, statistic), sample.intervals.get(statistic, (None, None))
        if not value or not low or high is None:
            return None
        errors = stats.t_quantile(1 - SLO_ALPHA / 2, math.inf)
        return max(math.log(value / low), math.log(high / value)) / errors, math.inf

    def client_error_margins(self, metric: str) -> tuple[float, float]:
        """By how much the logarithm of the mean speed may be lower and higher, because the load generator was late."""
        lower, higher = [], []
        for cell in self.valid_cells:
            below, above = (math.log1p(-min(share, 0.999)) for share in _as_shares(cell.client_error.get(metric)))
            lower.append(-below if METRICS[metric].more_is_better else -above)
            higher.append(-above if METRICS[metric].more_is_better else -below)
        return (statistics.fmean(lower), statistics.fmean(higher)) if lower else (0.0, 0.0)

    def distributions(self, name: str) -> list[Distribution]:
        """The distributions of a latency in all valid cells."""
        return [METRICS[name].sample(cell.numbers) for cell in self.valid_cells]


class ComparedSides(Struct, frozen=True, kw_only=True):
    """Two sides to compare by one metric. Their values are speeds (more is faster): a list of repeats for each run.

    Within a run each side has one list, and its repeats are the sample. Otherwise the runs are the sample.
    """

    side: str
    baseline: str
    metric: str
    side_speeds: Sequence[Sequence[float]]
    baseline_speeds: Sequence[Sequence[float]]
    within_run: bool
    refused: Reason | None = None  # why there is no ratio
    apart: bool = False  # the repeats of the sides were not interleaved, see `are_apart`
    errors: tuple[tuple[float, float] | None, tuple[float, float] | None] = (None, None)  # `error_within` of both sides
    # By how much the logarithm of the ratio may be lower and higher, because the load generator was late.
    error_margins: tuple[float, float] = (0.0, 0.0)
    earlier: tuple[float, int] = (0.0, 0)  # of other equal runs: the sum of squares of logarithms, degrees of freedom


def _as_shares(error: tuple[float, float] | None) -> tuple[float, float]:
    """An error of a cell as shares below: of the measured value, and of the true one that is above it."""
    below, above = error or (0.0, 0.0)
    return below, above / (1 + above)


def metric_values(row: Row, cells: Mapping[str, CellSummary], metric: str) -> list[float | None]:
    """The value of each valid cell of a row. A latency is None where the cell has too few requests for it."""
    if metric in WORK:
        return list(getattr(row, metric))
    row_cells = [cells[cell] for cell in row.cells if cell in cells]
    return [METRICS[metric].of(cell.numbers) for cell in row_cells if not cell.problems]


def is_paced(load: Load) -> bool:
    """Whether think time or a schedule, and not the server, decides when requests are sent. Then latency counts."""
    return is_open_loop(load) or load.think is not None or any(load.think_s or ())


def comparison_metrics(side: Measured, base: Measured) -> list[str]:
    """The metrics that two rows are compared by: wall time or throughput of work, latencies of paced loads.

    Latencies are TTFT and TPOT, or E2E without streaming, from schedule where there is one; of each the median and the
    highest percentile that every cell has requests for.
    """
    if not (is_paced(side.load) or is_paced(base.load)):
        return [work_metric([side.load, base.load])]

    def samples(latency: str) -> list[Distribution]:
        return [*side.distributions(latency), *base.distributions(latency)]

    def is_known(latency: str) -> bool:
        return any(sample.n for sample in samples(latency))

    def from_schedule(latency: str) -> str:
        both_open = is_open_loop(side.load) and is_open_loop(base.load)
        return f"{latency}_sched" if both_open and is_known(f"{latency}_sched") else latency

    latencies = [from_schedule("e2e")]
    if is_known("ttft"):
        latencies = [from_schedule("ttft"), *(["tpot"] if is_known("tpot") else [])]
    metrics = []
    for latency in latencies:
        distributions = samples(latency)
        tails = [
            at
            for at in TAIL_PERCENTILES
            if distributions and all(getattr(sample, at) is not None for sample in distributions)
        ]
        metrics += [f"{latency}_{statistic}" for statistic in ("p50", *tails[:1])]
    return metrics


def pair_by_metric(
    side: Measured,
    base: Measured,
    *,
    within_run: bool,
    earlier: Callable[[str], tuple[float, int]] | None = None,
    metrics: Sequence[str] | None = None,
) -> Iterator[ComparedSides]:
    """The comparisons of two rows, one for each metric. `earlier`: what other equal runs show of a metric.

    `metrics` replaces those of the verdicts.
    """
    is_other_work = (side.load.endpoint == "embeddings") != (base.load.endpoint == "embeddings")
    for metric in comparison_metrics(side, base) if metrics is None else metrics:
        values = [side.values(metric), base.values(metric)]
        speeds = [[to_speeds(metric, [v for v in run if v is not None]) for run in runs] for runs in values]
        refused = (
            invalid_row_reason(*side.rows, *base.rows)
            or (_OTHER_WORK if is_other_work else None)
            or _definition_reason(side, base, metric)
        )
        if refused is None and any(value is None for runs in values for run in runs for value in run):
            needed = NEEDED.get(METRICS[metric].statistic, 1)
            text = f"a {METRICS[metric].title} needs {count(needed, 'successful request')} in each repeat"
            refused = because("too_few_requests", text, metric=metric, needed=needed)
        yield ComparedSides(
            side=side.name,
            baseline=base.name,
            metric=metric,
            side_speeds=speeds[0],
            baseline_speeds=speeds[1],
            within_run=within_run,
            errors=(side.error_within(metric), base.error_within(metric)) if within_run else (None, None),
            error_margins=_ratio_error_margins(side.client_error_margins(metric), base.client_error_margins(metric)),
            earlier=earlier(metric) if earlier is not None else (0.0, 0),
            apart=within_run
            and are_apart(*([cell.session or 0 for cell in measured.valid_cells] for measured in (side, base))),
            refused=refused or _client_limit_reason(side, base, metric),
        )


def _ratio_error_margins(side: tuple[float, float], base: tuple[float, float]) -> tuple[float, float]:
    """By how much the logarithm of the ratio of two sides may be lower and higher. Each side adds its own errors."""
    return side[0] + base[1], side[1] + base[0]


def row_error_margins(row: Row, base: Row, metric: str) -> tuple[float, float]:
    """By how much the logarithm of the ratio of two rows' values may be lower and higher, see `client_error`."""
    ends = [
        [-math.log1p(-min(share, 0.999)) for share in _as_shares(side.client_error.get(metric))] for side in (row, base)
    ]
    return ends[0][0] + ends[1][1], ends[0][1] + ends[1][0]


def are_apart(side_sessions: Sequence[int], base_sessions: Sequence[int]) -> bool:
    """Whether one side was measured in later sessions than the other, so that a drift affects them differently.

    At each change of sessions, the numbers of later repeats may differ by one: with 5 repeats a side a drift then makes
    at most 1.3 % false alarms. At a difference of two it makes up to 9 %, and with one side wholly later nearly 100 %.
    """
    later = range(1, max([0, *side_sessions, *base_sessions]) + 1)
    return any(
        abs(sum(session >= start for session in side_sessions) - sum(session >= start for session in base_sessions)) > 1
        for start in later
    )


def compare_rows(
    rows: Sequence[Row],
    cells: Mapping[str, CellSummary],
    baseline: tuple[str, str],
    scenario: Scenario,
) -> Comparison | None:
    """Compare the pairs of rows that the scenario names, and every other row with its baseline row.

    That is the row of the baseline's server under the same load. A load of a mix is compared with the same load alone.
    If all rows are of one server, a load with the same kind of work is compared with the load of `baseline`.

    Two rows are compared by the repeats that both have. None when there is no pair.
    """
    pairs: list[ComparedSides] = []
    for first, second in _compared_rows(rows, cells, baseline, scenario):
        side, base = _with_common_repeats(first, second), _with_common_repeats(second, first)
        pairs += pair_by_metric(side, base, within_run=True)
    return decide_verdicts(pairs) if pairs else None


def _with_common_repeats(measured: Measured, other: Measured) -> Measured:
    """The row with only the repeats that the other row has too, because these were interleaved."""
    (row,), (cells,) = measured.rows, measured.cells
    common = {cells[cell].repeat for cell in other.rows[0].cells if cell in cells}
    kept = [index for index, cell in enumerate(row.cells) if cell not in cells or cells[cell].repeat in common]
    if len(kept) == len(row.cells):
        return measured
    fields: dict[str, Any] = {"cells": [row.cells[index] for index in kept]}
    for name in WORK:
        values = getattr(row, name)
        fields[name] = [values[index] for index in kept] if len(values) == len(row.cells) else values
    return msgspec.structs.replace(measured, rows=[msgspec.structs.replace(row, **fields)])


def planned_comparisons(scenario: Scenario, baseline: tuple[str, str]) -> int:
    """How many comparisons a run will be corrected for, if all compared percentiles have enough requests."""
    rows = [
        Row(server=server, load=load, cells=[], wall=[], output_tok_s=[], pooled=_NO_REQUESTS)
        for server in scenario.servers
        for load in scenario.loads
    ]
    count = 0
    for load in (side.load for side, _ in _compared_rows(rows, {}, baseline, scenario)):
        latencies = 2 if load.stream and load.endpoint != "embeddings" else 1
        count += 2 * latencies if is_paced(load) else 1  # of each latency the median and a higher percentile
    return count


def _compared_rows(
    rows: Sequence[Row], cells: Mapping[str, CellSummary], baseline: tuple[str, str], scenario: Scenario
) -> list[tuple[Measured, Measured]]:
    """The pairs of rows to compare: first those that the scenario names, then those of each load."""
    rows = [row for row in rows if not asks_known(scenario.loads[row.load])]  # they are compared by their answers
    named = {f"{row.server}/{row.load}": row for row in rows}
    requested = [(named.get(pair.row), named.get(pair.against)) for pair in scenario.compare]
    default = [(row, _default_baseline(row, baseline, named, scenario)) for row in rows]
    requested_ids = {(id(row), id(against)) for row, against in requested}
    requested_ids |= {(against, row) for row, against in requested_ids}

    def measured(row: Row) -> Measured:
        return Measured(name=row.name, load=scenario.loads[row.load], rows=[row], cells=[cells])

    return [
        (measured(row), measured(against))
        for row, against in [*requested, *(pair for pair in default if (id(pair[0]), id(pair[1])) not in requested_ids)]
        if row is not None and against is not None
    ]


def is_asked_by_check(row: Row, scenario: Scenario) -> bool:
    """Whether a check names the row and compares it, such as `vllm/five-at-a-time: speedup >= 1.5`."""
    for text in scenario.checks:
        with contextlib.suppress(ValueError, HarnessError):
            check = parse_check(text)
            is_named = check.load == row.load and check.server in (None, row.server)
            if is_named and (check.relative or check.metric == "speedup"):
                return True
    return False


def _default_baseline(row: Row, baseline: tuple[str, str], named: Mapping[str, Row], scenario: Scenario) -> Row | None:
    """The row that a row is compared with, unless the scenario names another; None: it is a baseline, or alone."""
    server, base_load_name = baseline
    if mix_of(row.load) is not None and (alone := named.get(f"{row.server}/{load_of_part(row.load)}")) is not None:
        return alone
    if row.server != server:
        return named.get(f"{server}/{row.load}")
    base = named.get(f"{server}/{base_load_name}")
    if base is None or row is base:
        return None
    if len(scenario.servers) > 1:
        return base if is_asked_by_check(row, scenario) else None
    load, base_load = scenario.loads[row.load], scenario.loads[base.load]
    same_pacing = (is_paced(load), is_open_loop(load)) == (is_paced(base_load), is_open_loop(base_load))
    same_work = (
        (load.endpoint == base_load.endpoint or load.user != "imported")
        and prompts_of(scenario, load) == prompts_of(scenario, base_load)
        and (load.output, load.output_tokens) == (base_load.output, base_load.output_tokens)
        and (same_pacing and not scenario.mixes or without_concurrency(load) == without_concurrency(base_load))
    )
    return base if same_work else None


def _definition_reason(side: Measured, base: Measured, metric: str) -> Reason | None:
    """Why two rows have no ratio: a number is unknown, or its definitions differ."""
    for measured in (side, base):
        for row in measured.rows:
            if metric in row.missing and not getattr(row, metric):
                text = f"the {METRICS[metric].title} of {measured.name} is not known: {row.missing[metric]}"
                return because("number_unknown", text, row=measured.name, metric=metric)
    return definition_difference(side, base, metric)


def definition_difference(side: Measured, base: Measured, metric: str) -> Reason | None:
    """Why the runs of two sides have no ratio: the metric is defined differently in one of them."""
    reasons = (
        definition_conflict(row, base.rows[0], METRICS[metric].defined_fields) for row in (*side.rows, *base.rows[1:])
    )
    return next(filter(None, reasons), None)


def invalid_row_reason(*rows: Row) -> Reason | None:
    """Why rows have no ratio: one of them has an invalid cell."""
    row = next((row for row in rows if row.invalid is not None), None)
    if row is None or row.invalid is None:
        return None
    text = f"{row.name} has a cell that is not valid ({sentence(row.invalid)})"
    return because("row_not_valid", text, row=row.name, why=row.invalid)


def is_client_limited(row: Row, metric: str) -> bool:
    """Whether the load generator may have changed the metric of a row by more than MARGIN, or it is not known."""
    return METRICS[metric].field in row.client_limited and max(row.client_error.get(metric, (1.0, 1.0))) > MARGIN


def _client_limit_reason(side: Measured, base: Measured, metric: str) -> Reason | None:
    """Why two rows have no ratio: the load generator limited the metric in some run, and it is not known how much."""
    names = [
        measured.name if len(measured.rows) == 1 else f"{measured.name}, run {number} of it"
        for measured in (side, base)
        for number, row in enumerate(measured.rows, 1)
        if METRICS[metric].field in row.client_limited and metric not in row.client_error
    ]
    text = (
        f"client-side bottleneck: the load generator limited the {METRICS[metric].title} of one side or both, and by "
    )
    text += "how much is not known; the validity of the run lists the rows, the cause and the remedy"
    return because("client_limited", text, metric=metric, names=names) if names else None


def without_concurrency(load: Load) -> bytes:
    """A load as JSON, without its concurrency and its amount of work. Loads with the same result do the same work, and
    are on one curve over concurrency.
    """
    plain = Load(user=load.user)
    return msgspec.json.encode(
        msgspec.structs.replace(
            load,
            users=1,
            processes=1,
            requests=None,
            duration_s=None,
            batch_size=None,
            in_flight=None if load.in_flight is None else 1,
            ramp_s=plain.ramp_s,
            drain_s=plain.drain_s,
            timeout_s=plain.timeout_s,
        )
    )


def work_metric(loads: Sequence[Load]) -> str:
    """The metric of unpaced loads: the wall time if all have the same fixed amount of work, else the rate of tokens.

    Answers of natural length may differ from server to server, and with them the work. Structured answers do not.
    """
    work = set()
    for load in loads:
        form = None if load.answer is None else (load.answer.choice, load.answer.json_schema)
        fixed = (load.user, load.requests, load.output, load.turns, load.stream, load.endpoint, load.regenerate)
        spread = (load.output_tokens, load.think_s, load.think, load.agent, load.rag, load.abandon, load.agent_trace)
        work.add((*fixed, repr((*spread, form, load.arrivals, load.trace))))  # as text: lists have no hash
    if len(work) == 1 and all(
        load.requests is not None
        and load.user != "imported"
        and (load.output == "fixed" or load.endpoint == "embeddings" or load.answer is not None)
        for load in loads
    ):
        return "wall"
    return "input_tok_s" if all(load.endpoint == "embeddings" for load in loads) else "output_tok_s"


def decide_verdicts(pairs: Sequence[ComparedSides], source: Sequence[Reason] = ()) -> Comparison:
    """The verdicts of a table of pairs, corrected for the number of comparisons by Holm's method.

    `source`: how far equal runs differ, and how that is known. Comparisons within one run do not need it.
    """
    measured_effects = [None if pair.refused else _find_effect(pair) for pair in pairs]
    p_values = [
        _p_value(pair, measured.effect)
        for pair, measured in zip(pairs, measured_effects, strict=True)
        if measured is not None
    ]
    corrected = iter(stats.holm(p_values))
    verdicts = [
        _make_verdict(pair, "refused", len(p_values), refused=pair.refused or _no_values(pair))
        if measured is None
        else _decide(pair, measured, next(corrected), len(p_values))
        for pair, measured in zip(pairs, measured_effects, strict=True)
    ]
    metrics = {pair.metric for pair in pairs}
    return Comparison(
        metric=metrics.pop() if len(metrics) == 1 else None,
        comparisons=len(p_values),
        noise_floor=MARGIN,
        noise_source=list(source),
        verdicts=verdicts,
    )


def _no_values(pair: ComparedSides) -> Reason:
    """Why two sides have no ratio: one of them has no value of the metric."""
    sides = zip((pair.side, pair.baseline), _independent_values(pair), strict=True)
    empty = " and ".join(name for name, values in sides if not values)
    why = "no valid repeat has one" if pair.metric == "wall" else "no valid repeat reports it"
    return because("no_values", f"there is no {METRICS[pair.metric].title} of {empty}; {why}", metric=pair.metric)


def to_speeds(metric: str, values: Sequence[float]) -> list[float]:
    """Values as speeds: rates stay, times are inverted. Zeros are left out, since they have no ratio."""
    return [value if METRICS[metric].more_is_better else 1 / value for value in values if value > 0]


def from_speeds(metric: str, speeds: Sequence[float]) -> list[float]:
    """Speeds of `to_speeds` as values of their metric."""
    is_rate = metric not in METRICS or METRICS[metric].more_is_better  # a goal of tune is no metric
    return [speed if is_rate else 1 / speed for speed in speeds]


def _independent_values(pair: ComparedSides) -> tuple[list[float], list[float]]:
    """The samples of both sides: the repeats of one run, or the geometric means of several runs."""
    if pair.within_run:
        return list(pair.side_speeds[0]), list(pair.baseline_speeds[0])
    side, base = (
        [math.exp(stats.mean_log(run)) for run in runs if run] for runs in (pair.side_speeds, pair.baseline_speeds)
    )
    return side, base


class _MeasuredEffect(NamedTuple):
    """The effect of a pair, and what it rests on."""

    effect: Effect
    basis: Basis
    provisional: bool


def _find_effect(pair: ComparedSides) -> _MeasuredEffect | None:
    """Compare two sides by the rule for their values; None where one side has none."""
    side, base = _independent_values(pair)
    if not side or not base:
        return None
    if not pair.within_run:
        effect = stats.pooled_effect(side, base, *pair.earlier)
        return _MeasuredEffect(effect, "runs", stats.is_mostly_assumed(effect))
    means = [math.exp(stats.mean_log(side))], [math.exp(stats.mean_log(base))]
    if pair.apart:
        return _MeasuredEffect(stats.pooled_effect(*means), "apart", provisional=True)
    if (repeats_effect := stats.welch_effect(side, base)) is not None:
        return _MeasuredEffect(repeats_effect, "repeats", provisional=False)
    errors = [error for error in pair.errors if error is not None]
    if len(errors) < 2:  # too few blocks
        return _MeasuredEffect(stats.pooled_effect(*means), "one_run", provisional=True)
    log_ratio = stats.mean_log(side) - stats.mean_log(base)
    return _MeasuredEffect(stats.difference_of(log_ratio, errors), "one_run", provisional=True)


def _p_value(pair: ComparedSides, effect: Effect) -> float:
    """The p-value of a difference beyond the margin, before the correction for several comparisons."""
    return effect.p_beyond_margin(pair.error_margins[0 if effect.log_ratio > 0 else 1])


def _decide(pair: ComparedSides, measured: _MeasuredEffect, p: float, comparisons: int) -> Verdict:
    """The verdict on two sides with an interval. `p`: corrected for the number of comparisons."""
    effect, factors = measured.effect, (math.exp(pair.error_margins[0]), math.exp(pair.error_margins[1]))
    exact_low, exact_high = effect.interval()
    low, high = exact_low / factors[0], exact_high * factors[1]
    margin = math.log1p(MARGIN)
    numbers: dict[str, Any] = {
        "ratio": effect.ratio, "low": low, "high": high, "p": p,
        "basis": measured.basis, "provisional": measured.provisional,
        "widened": None if factors == (1.0, 1.0) else factors,
    }  # fmt: skip
    includes_one, is_beyond = low <= 1 <= high, _is_beyond(low, high)
    numbers["needed"] = _needed_to_confirm(pair, measured)
    if is_beyond and p < ALPHA:
        return _make_verdict(pair, "faster" if effect.log_ratio > 0 else "slower", comparisons, **numbers)
    if _is_inside(low, high):
        return _make_verdict(pair, "same", comparisons, **numbers)
    numbers |= _needed_to_decide(pair, measured, comparisons, includes_one=includes_one)
    if includes_one and None in known_bounds(effect.ratio, low, high):
        few = min(map(len, _independent_values(pair))) < CONFIRMING_REPEATS
        numbers |= {"low": None, "high": None, "needed": CONFIRMING_REPEATS if few else numbers["needed"]}
        return _make_verdict(pair, "interval_unknown", comparisons, **numbers)
    reason: Inconclusive = "not_beyond"
    if is_beyond:
        reason = "corrected"
    elif numbers["widened"] and (_is_beyond(exact_low, exact_high) or _is_inside(exact_low, exact_high)):
        reason = "client"
    elif abs(effect.log_ratio) <= margin:
        reason = "in_margin"
    elif includes_one:
        reason = "includes_one"
    return _make_verdict(pair, reason, comparisons, **numbers)


def _is_beyond(low: float, high: float) -> bool:
    return low > 1 + MARGIN or high < 1 / (1 + MARGIN)


def _is_inside(low: float, high: float) -> bool:
    return low > 1 / (1 + MARGIN) and high < 1 + MARGIN


def _needed_to_confirm(pair: ComparedSides, measured: _MeasuredEffect) -> int | None:
    """How many values a side confirm a provisional verdict. None: the verdict is not provisional."""
    if not measured.provisional:
        return None
    sizes = [len(values) for values in _independent_values(pair)]
    if measured.basis == "runs":
        return stats.runs_to_confirm(measured.effect, *sizes)
    return max(CONFIRMING_REPEATS, *sizes)  # the spread of repeats is not known


def _needed_to_decide(
    pair: ComparedSides, measured: _MeasuredEffect, comparisons: int, *, includes_one: bool
) -> dict[str, int | None]:
    """How many values a side would decide a pair: show a difference of this size, and show that there is none."""
    confirming = _needed_to_confirm(pair, measured)
    if measured.basis in ("one_run", "apart"):
        return {"needed": confirming}
    side, base = _independent_values(pair)
    effect, freedom = measured.effect, 0
    variances = stats.var_log(side) if len(side) > 1 else 0.0, stats.var_log(base) if len(base) > 1 else 0.0
    if measured.basis == "runs":
        variance = effect.error**2 / (1 / len(side) + 1 / len(base))
        variances, freedom = (variance, variance), int(effect.freedom)
    needed = stats.sample_size_to_settle(effect.log_ratio, variances, max(len(side), len(base)), comparisons, freedom)
    if needed is not None and confirming is not None:
        needed = max(needed, confirming)
    for_same = None
    if includes_one and abs(effect.log_ratio) > math.log1p(MARGIN):  # there may be no difference at all
        for_same = stats.sample_size_to_settle(0.0, variances, 1, comparisons, freedom)
    return {"needed": needed, "needed_for_same": for_same}


def _make_verdict(pair: ComparedSides, result: str, comparisons: int, **numbers: Any) -> Verdict:
    """Make a verdict. `result` is its word, or the reason why it is inconclusive."""
    is_decided = result in ("faster", "slower", "same")
    side, base = _independent_values(pair)
    return Verdict(
        side=pair.side,
        baseline=pair.baseline,
        metric=pair.metric,
        values=(from_speeds(pair.metric, side), from_speeds(pair.metric, base)),
        **{"ratio": None, "low": None, "high": None, "p": None, **numbers},
        n=(len(side), len(base)),
        word=result if is_decided else "inconclusive",
        reason=None if is_decided else result,  # type: ignore[arg-type]
        unit="repeats" if pair.within_run else "runs",
        comparisons=comparisons,
    )


def estimate_drift(pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """How much faster repeated cells were than the first ones, from pairs of speeds (first, repeated). None: no pairs.

    The variance of the pairs is combined with an expected one, so that a single pair also has an interval.
    """
    if not pairs:
        return None
    logs = [math.log(later / first) for first, later in pairs]
    mean = statistics.fmean(logs)
    freedom = PRIOR_PAIRS + len(logs) - 1
    variance = (PRIOR_PAIRS * 2 * PRIOR_SD**2 + sum((log - mean) ** 2 for log in logs)) / freedom
    return Effect(mean, math.sqrt(variance / len(logs)), freedom)


def is_drift(effect: Effect) -> bool:
    """Whether the change is beyond the noise: its interval excludes 1, and it is larger than MARGIN."""
    low, high = effect.interval()
    return not low <= 1 <= high and abs(effect.log_ratio) > math.log1p(MARGIN)


def drift_notes(cells: Sequence[CellSummary], scenario: Scenario) -> list[Reason]:
    """A note on the drift that the repeated cells of a run show; none without a valid pair."""
    by_id = {cell.id: cell for cell in cells}
    pairs = []
    for cell in cells:
        first = None if cell.again is None else by_id.get(cell.again)
        if first is not None and not first.problems and not cell.problems:
            first_speed, later_speed = _cell_speed(first, scenario), _cell_speed(cell, scenario)
            if first_speed and later_speed:
                pairs.append((first_speed, later_speed))
    effect = estimate_drift(pairs)
    if effect is None:
        return []
    low, high = known_bounds(effect.ratio, *effect.interval())
    change = f"{short_percent(abs(effect.ratio - 1))} {'faster' if effect.ratio >= 1 else 'slower'}"
    interval = "interval not known"
    if low is not None and high is not None:
        interval = f"95 % interval {ratio_text(low)} to {ratio_text(high)} times as fast"
    text = f"the first cell of a server start was {change} ({interval}, {count(len(pairs), 'start')}) when it was "
    text += "repeated at its end"
    code = "no_drift"
    if is_drift(effect):
        code = "drift"
        text += ". Rows that were measured early and late in a start differ by more than their settings; look at heat, "
        text += "and at other programs"
    text = f"{code.replace('_', ' ')}: {text}"
    return [because(code, text, starts=len(pairs), ratio=effect.ratio, low=low, high=high)]


def _cell_speed(cell: CellSummary, scenario: Scenario) -> float | None:
    """The speed of a cell: of work by its wall time or rate, of a paced load by its TPOT or E2E latency."""
    load, numbers = scenario.loads[cell.load], cell.numbers
    if is_paced(load):
        time_s = numbers.tpot.p50 or numbers.e2e.p50
    elif (metric := work_metric([load])) == "wall":
        time_s = numbers.wall
    else:
        rate: float | None = getattr(numbers, metric)
        return rate
    return 1 / time_s if time_s else None
