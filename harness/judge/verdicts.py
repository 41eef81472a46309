"""From run-level values to verdicts: the rules of docs/method.md, in one place."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from harness.columns import RATES, WORK
from harness.judge import stats
from harness.judge.stats import Effect, Variation
from harness.rundir.manifest import definitions_differ
from harness.scenario import Load, Scenario, is_open_loop
from harness.scenario.plan import load_of_part, mix_of
from harness.summary import (
    ALPHA,
    MARGIN,
    NEEDED,
    CellSummary,
    Comparison,
    Distribution,
    Inconclusive,
    Numbers,
    Reason,
    Row,
    Verdict,
    because,
)

_TAILS = ("p99", "p95", "p90")
_NOTHING = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
# The standard deviation of the logarithm of a cell's speed that is expected before the pairs of a run show one, and
# how many pairs that counts for.
EXPECTED_SD = 0.015
WORTH = 4


class Noise(Struct, frozen=True):
    """How far equal runs differ on the machines of a comparison, by metric and load, and how that is known."""

    rows: dict[tuple[str, str], Variation] = {}
    source: list[Reason] = msgspec.field(default_factory=lambda: [because("noise_not_measured")])


class Measured(Struct, frozen=True, kw_only=True):
    """One row (server, load) of one side: as each of the side's runs measured it."""

    name: str
    load_name: str
    load: Load
    rows: Sequence[Row]  # one a run
    cells: Sequence[Mapping[str, CellSummary]]  # by id, one mapping a run

    def values(self, metric: str) -> list[list[float | None]]:
        """The values of a metric: a list for each run, in it one for each valid cell."""
        return [values_of(row, cells, metric) for row, cells in zip(self.rows, self.cells, strict=True)]

    @property
    def valid(self) -> list[CellSummary]:
        """All valid cells."""
        by_run = zip(self.rows, self.cells, strict=True)
        return [cell for row, cells in by_run for name in row.cells if (cell := cells.get(name)) and not cell.problems]

    def sampled(self, name: str) -> list[Distribution]:
        """The latency distributions of all valid cells."""
        return [getattr(cell.numbers, f"{name}_s") for cell in self.valid]


class ComparedSides(Struct, frozen=True, kw_only=True):
    """Two sides and their values as speeds: more is faster. A list for each run, in it a value for each repeat.

    Within a run each side has one list, and repeats are the sample; else runs are.
    """

    side: str
    baseline: str
    metric: str
    side_speeds: Sequence[Sequence[float]]
    baseline_speeds: Sequence[Sequence[float]]
    within_run: bool
    load: str = ""  # of both sides, where they are of different runs
    refused: Reason | None = None  # why the two have no ratio
    apart: bool = False  # the repeats of the sides were not interleaved, see `are_apart`
    parts: int = 1  # the level of the test is ALPHA / parts, see `level_parts`


def values_of(row: Row, cells: Mapping[str, CellSummary], metric: str) -> list[float | None]:
    """A row's run-level values: one for each valid cell; of a latency None where a cell has too few requests."""
    if metric in WORK:
        return list(getattr(row, metric))
    latency, _, at = metric.rpartition("_")
    found = [cells[cell] for cell in row.cells if cell in cells]
    return [getattr(getattr(cell.numbers, f"{latency}_s"), at) for cell in found if not cell.problems]


def is_paced(load: Load) -> bool:
    """Whether think time or a schedule, and not the server, says when requests come: then latency is what counts."""
    return is_open_loop(load) or load.think is not None or any(load.think_s or ())


def metrics_of(side: Measured, base: Measured) -> list[str]:
    """What two rows are compared by: work by wall time or throughput, users who think or follow a schedule by latency.

    Latencies are TTFT and TPOT, E2E without streaming; from schedule where there is one. Of each the median and the
    highest percentile that every cell carries.
    """
    if not (is_paced(side.load) or is_paced(base.load)):
        return [metric_of([side.load, base.load])]
    both = (side, base)

    def known(name: str) -> bool:
        return any(sample.n for one in both for sample in one.sampled(name))

    def of(name: str) -> str:
        return f"{name}_sched" if all(is_open_loop(one.load) for one in both) and known(f"{name}_sched") else name

    names = [of("ttft"), *(["tpot"] if known("tpot") else [])] if known("ttft") else [of("e2e")]
    found = []
    for name in names:
        samples = [sample for one in both for sample in one.sampled(name)]
        carried = [at for at in _TAILS if samples and all(getattr(sample, at) is not None for sample in samples)]
        found += [f"{name}_p50", *(f"{name}_{at}" for at in carried[:1])]
    return found


def pairs_of(side: Measured, base: Measured, *, within_run: bool, parts: int = 1) -> Iterator[ComparedSides]:
    """The comparisons of two rows, one for each metric."""
    for metric in metrics_of(side, base):
        found = [one.values(metric) for one in (side, base)]
        too_few = any(value is None for runs in found for values in runs for value in values)
        known = [[speeds(metric, [v for v in run if v is not None]) for run in runs] for runs in found]
        limited = [
            (one.name if len(one.rows) == 1 else f"{one.name}, run {number} of it", row.client_limited)
            for one in (side, base)
            for number, row in enumerate(one.rows, 1)
        ]
        yield ComparedSides(
            side=side.name,
            baseline=base.name,
            metric=metric,
            side_speeds=known[0],
            baseline_speeds=known[1],
            within_run=within_run,
            load=side.load_name,
            parts=parts,
            apart=within_run and are_apart(*([cell.session or 0 for cell in one.valid] for one in (side, base))),
            refused=not_valid(*side.rows, *base.rows)
            or unlike_work(side.load, base.load)
            or _unlike(side, base, metric)
            or (
                because("too_few_requests", metric=metric, needed=NEEDED[metric.rpartition("_")[2]])
                if too_few
                else client_limited(metric, limited)
            ),
        )


def are_apart(side: Sequence[int], base: Sequence[int]) -> bool:
    """Whether one side was measured in later sessions than the other, so that a drift does not fall on both alike.

    After no change of sessions may the numbers of their repeats differ by more than one: at 5 a side a drift then makes
    at most 1.3 % false alarms; at a difference of two it is up to 9 %, and with one side wholly later nearly all.
    """
    later = range(1, max([0, *side, *base]) + 1)
    return any(abs(sum(one >= at for one in side) - sum(one >= at for one in base)) > 1 for at in later)


def compare_rows(
    rows: Sequence[Row],
    cells: Mapping[str, CellSummary],
    baseline: tuple[str, str],
    scenario: Scenario,
    looks: Sequence[int] = (),
) -> Comparison | None:
    """Every row of a run against its baseline row (server, load), and what else the scenario wants compared.

    A part of a mix is compared with the same load alone. A load that does other work than the baseline's, or of which
    the server, think time or a schedule sets the pace where it is another for the baseline's, is compared with the
    same load of the baseline's server.

    `looks`: after how many repeats verdicts were checked, to see whether more are needed; then two rows are compared by
    the repeats that both have. None when the baseline row is missing or alone.
    """
    chosen = [
        (_with_repeats_of(base, side), _with_repeats_of(side, base))
        for side, base in _chosen(rows, cells, baseline, scenario)
    ]
    repeats = [min(len(one.rows[0].cells) for one in pair) for pair in chosen]
    pairs = [
        pair
        for (side, base), number in zip(chosen, repeats, strict=True)
        for pair in pairs_of(side, base, within_run=True, parts=level_parts(number, looks))
    ]
    return verdicts(pairs) if pairs else None


def level_parts(repeats: int, looks: Sequence[int]) -> int:
    """In how many parts ALPHA is divided for a pair of so many repeats, in a run that was looked at before its end.

    The first look has half of ALPHA, the second half of the rest, and so on; an analysis after the last look has all of
    the rest. So a false verdict at any look has a probability of ALPHA at most, whatever was decided on the way.
    """
    return 1 << sum(look <= repeats for look in looks)


def _with_repeats_of(other: Measured, one: Measured) -> Measured:
    """One row with only those repeats that the other row has as well: they were interleaved."""
    (row,), (cells,) = one.rows, one.cells
    known = {cells[cell].repeat for cell in other.rows[0].cells if cell in cells}
    places = [place for place, cell in enumerate(row.cells) if cell not in cells or cells[cell].repeat in known]
    if len(places) == len(row.cells):
        return one

    def common(values: list[float]) -> list[float]:
        return [values[place] for place in places] if len(values) == len(row.cells) else values

    cut = msgspec.structs.replace(
        row, cells=[row.cells[place] for place in places], **{name: common(getattr(row, name)) for name in WORK}
    )
    return msgspec.structs.replace(one, rows=[cut])


def comparisons_of(scenario: Scenario, baseline: tuple[str, str]) -> int:
    """How many comparisons a run will be corrected for, if every percentile that is compared has its sample."""
    rows = [
        Row(server=server, load=load, cells=[], wall_s=[], output_tok_s=[], pooled=_NOTHING)
        for server in scenario.servers
        for load in scenario.loads
    ]
    chosen = _chosen(rows, {}, baseline, scenario)
    return sum(_planned_metrics(side.load) if is_paced(side.load) else 1 for side, _ in chosen)


def _planned_metrics(load: Load) -> int:
    return 4 if load.stream and load.endpoint != "embeddings" else 2


def _chosen(
    rows: Sequence[Row], cells: Mapping[str, CellSummary], baseline: tuple[str, str], scenario: Scenario
) -> list[tuple[Measured, Measured]]:
    """Which row of a run is compared with which; those with the baseline come first."""
    base = next((row for row in rows if row.key == baseline), None)
    if base is None:
        return []
    named = {f"{row.server}/{row.load}": row for row in rows}
    own = [(row, _against(row, base, named, scenario)) for row in rows if row is not base]
    wanted = [(named.get(pair.row), named.get(pair.against)) for pair in scenario.compare]

    def measured(row: Row) -> Measured:
        return Measured(name=row.name, load_name=row.load, load=scenario.loads[row.load], rows=[row], cells=[cells])

    return [
        (measured(row), measured(against))
        for row, against in [*sorted(own, key=lambda pair: pair[1] is not base), *wanted]
        if row is not None and against is not None
    ]


def _against(row: Row, base: Row, named: Mapping[str, Row], scenario: Scenario) -> Row | None:
    """What a row is compared with by itself."""
    if mix_of(row.load) is not None:
        return named.get(f"{row.server}/{load_of_part(row.load)}") or base
    load, other = scenario.loads[row.load], scenario.loads[base.load]
    alike = not scenario.mixes and (is_paced(load), is_open_loop(load)) == (is_paced(other), is_open_loop(other))
    if alike or but_for_concurrency(load) == but_for_concurrency(other):
        return base
    same = named.get(f"{base.server}/{row.load}")
    return None if same is row else same


def _unlike(side: Measured, base: Measured, metric: str) -> Reason | None:
    """Why two rows have no ratio. Only numbers that mean the same have one."""
    for one in (side, base):
        for row in one.rows:
            if metric in row.missing and not getattr(row, metric):
                return because("number_unknown", row=one.name, metric=metric, why=row.missing[metric])
    found = (definitions_differ(row, base.rows[0], fields_of(metric)) for row in (*side.rows, *base.rows[1:]))
    return next(filter(None, found), None)


def fields_of(metric: str) -> list[str]:
    """The fields of Numbers that a metric is made of, as far as they have a definition."""
    return [metric] if metric in WORK else [f"{metric.rpartition('_')[0]}_s", "percentiles"]


def not_valid(*rows: Row) -> Reason | None:
    """Why rows have no ratio, of which one has a cell that is not valid."""
    row = next((row for row in rows if row.invalid is not None), None)
    return None if row is None else because("row_not_valid", row=row.name, why=row.invalid)


def unlike_work(*loads: Load) -> Reason | None:
    """Why loads have no ratio, whatever the servers report of them."""
    kinds = {load.endpoint == "embeddings" for load in loads}
    return because("other_work") if len(kinds) > 1 else None


def client_limited(metric: str, sides: Sequence[tuple[str, Sequence[str]]]) -> Reason | None:
    """Why sides, each a name and what the load generator limited of it, have no ratio."""
    field = metric if metric.endswith("_s") else f"{metric.rpartition('_')[0]}_s"
    names = [name for name, numbers in sides if field in numbers]
    return because("client_limited", metric=metric, names=names) if names else None


def _fixed(load: Load) -> bool:
    """Whether each request is the same work for every server: an answer of a form ends where its form does."""
    return load.output == "fixed" or load.endpoint == "embeddings" or load.answer is not None


def _form(load: Load) -> object:
    """The expected form of answers, however the server gets it."""
    return None if load.answer is None else (load.answer.choice, load.answer.json_schema)


def but_for_concurrency(load: Load) -> bytes:
    """A load without how many requests it keeps in flight, and how many or for how long: loads of which this is
    the same do the same work, and lie on one curve over concurrency.
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


def metric_of(loads: Sequence[Load]) -> str:
    """Of work the wall time where all loads are the same fixed amount of it, else the rate of output tokens.

    Of natural length the answers, and with them the work, may differ from server to server; structured ones do not.
    """
    work = {
        (load.user, load.requests, load.output_tokens, load.output, load.turns, load.stream, *(load.think_s or ()))
        + (load.endpoint, repr((_form(load), load.agent, load.rag, load.abandon, load.regenerate)))
        + (repr((load.arrivals, load.trace, load.think)),)
        for load in loads
    }
    same = len(work) == 1 and all(load.requests is not None and _fixed(load) for load in loads)
    if same:
        return "wall_s"
    return "input_tok_s" if all(load.endpoint == "embeddings" for load in loads) else "output_tok_s"


def verdicts(pairs: Sequence[ComparedSides], noise: Noise | None = None) -> Comparison:
    """The verdicts of a table of pairs, corrected for how many there are.

    `noise` is what is known of how far equal runs differ on the machine; within one run it is not needed.
    """
    noise = noise or Noise()
    found = [None if pair.refused or pair.apart else _effect(pair, noise) for pair in pairs]
    made = [p for _, p in filter(None, found)]
    corrected = iter(stats.holm(made))
    decided = [
        _without_effect(pair, len(made)) if one is None else _verdict(pair, one[0], next(corrected), len(made), noise)
        for pair, one in zip(pairs, found, strict=True)
    ]
    metrics = {pair.metric for pair in pairs}
    return Comparison(
        metric=metrics.pop() if len(metrics) == 1 else None,
        comparisons=len(made),
        noise_floor=MARGIN,
        noise_source=[] if all(pair.within_run for pair in pairs) else noise.source,
        verdicts=decided,
    )


def speeds(metric: str, values: Sequence[float]) -> list[float]:
    """Values as speeds: a time turned round, a rate as it is. A rate of zero has no ratio."""
    return [value if metric in RATES else 1 / value for value in values if value > 0]


def _sample(pair: ComparedSides) -> tuple[list[float], list[float]]:
    """The values of both sides that are independent: of one run its repeats, of several runs their geometric means."""
    if pair.within_run:
        return list(pair.side_speeds[0]), list(pair.baseline_speeds[0])
    side, base = (
        [math.exp(stats.mean_log(run)) for run in runs if run] for runs in (pair.side_speeds, pair.baseline_speeds)
    )
    return side, base


def _known(pair: ComparedSides, noise: Noise) -> Variation | None:
    return None if pair.within_run else noise.rows.get((pair.metric, pair.load))


def _effect(pair: ComparedSides, noise: Noise) -> tuple[Effect, float] | None:
    """The effect with its standard error and p-value; None where nothing says how large the error is.

    Repeats of one run, and runs about which nothing else is known, are compared by what they show: Welch's interval and
    an exact permutation test. Where the variation between runs is known, it can only widen the interval.
    """
    side, base = _sample(pair)
    known = _known(pair, noise)
    if not side or not base:
        return None
    if known is None:
        seen = stats.effect(side, base)
        return None if seen is None else (seen, min(1.0, pair.parts * stats.permutation_p(side, base)))
    repeats = [len(run) for run in (*pair.side_speeds, *pair.baseline_speeds) if run]
    variance = known.of_run(len(repeats) / sum(1 / n for n in repeats))
    found = stats.effects_of_runs(side, base, variance, known.freedom)
    return max(found, key=Effect.half), max(one.p() for one in found)


def _without_effect(pair: ComparedSides, comparisons: int) -> Verdict:
    """A pair whose difference has no interval: the ratio where there is one, and what would settle it."""
    side, base = _sample(pair)
    if pair.refused:
        return _made(pair, "refused", comparisons)
    if not side or not base:
        return _made(pair, "no_values", comparisons)
    reason: Inconclusive = "too_few" if pair.within_run else "run_variation_unknown"
    ratio = stats.geometric_ratio(side, base)
    if pair.apart:
        return _made(pair, "apart", comparisons, ratio=ratio)
    return _made(pair, reason, comparisons, ratio=ratio, needed=stats.repeats_to_reach_p(1))


def _verdict(pair: ComparedSides, seen: Effect, p: float, comparisons: int, noise: Noise) -> Verdict:
    """The verdict on two sides that have an interval."""
    side, base = _sample(pair)
    known = _known(pair, noise)
    low, high = seen.interval(pair.parts)
    band = math.log1p(MARGIN)
    effect = abs(seen.log) > band
    numbers = {"ratio": seen.ratio, "low": low, "high": high, "p": p}
    if p < ALPHA and not low <= 1 <= high and effect:
        return _made(pair, "faster" if seen.log > 0 else "slower", comparisons, **numbers)
    if -band < math.log(low) and math.log(high) < band:
        return _made(pair, "same", comparisons, **numbers)
    variances = (
        (stats.var_log(side), stats.var_log(base))
        if known is None
        else (seen.error**2 / (1 / len(side) + 1 / len(base)),) * 2
    )
    repeats, freedom = max(len(side), len(base)), None if known is None else int(seen.freedom)
    tests = comparisons * pair.parts
    needed = stats.needed_to_settle(seen.log, variances, repeats, tests, MARGIN, freedom)
    open_ = effect and low <= 1 <= high  # whether there is a difference at all
    for_same = stats.needed_to_settle(0.0, variances, 1, tests, MARGIN, freedom) if open_ else None
    reason: Inconclusive = "p_too_large"
    if not effect:
        reason = "in_margin"
    elif known is None and stats.smallest_p(len(side), len(base)) * tests >= ALPHA:
        reason = "too_few"
    elif low <= 1 <= high:
        reason = "includes_one"
    return _made(pair, reason, comparisons, **numbers, needed=needed, needed_for_same=for_same)


def _made(pair: ComparedSides, found: str, comparisons: int, **numbers: Any) -> Verdict:
    """A verdict; `found` is its word, or the reason why it is inconclusive."""
    decided = found in ("faster", "slower", "same")
    side, base = _sample(pair)
    return Verdict(
        side=pair.side,
        baseline=pair.baseline,
        metric=pair.metric,
        **{"ratio": None, "low": None, "high": None, "p": None, **numbers},
        n=(len(side), len(base)),
        word=found if decided else "inconclusive",
        reason=None if decided else found,  # type: ignore[arg-type]
        refused=pair.refused,
        unit="repeats" if pair.within_run else "runs",
        comparisons=comparisons,
    )


def drift(pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """How much faster the repeated cells were than the first ones: each pair has the speeds of one server start.

    None without a pair. The spread of the pairs is moderated by what is expected, so that one pair has an interval.
    """
    if not pairs:
        return None
    logs = [math.log(again / first) for first, again in pairs]
    mean = statistics.fmean(logs)
    freedom = WORTH + len(logs) - 1
    variance = (WORTH * 2 * EXPECTED_SD**2 + sum((log - mean) ** 2 for log in logs)) / freedom
    return Effect(mean, math.sqrt(variance / len(logs)), freedom)


def is_drift(seen: Effect) -> bool:
    """Whether the change is beyond the noise: its interval excludes 1, and it is more than what is treated as noise."""
    low, high = seen.interval()
    return not low <= 1 <= high and abs(seen.log) > math.log1p(MARGIN)


def of_sweep(cells: Sequence[CellSummary], scenario: Scenario) -> list[Reason]:
    """What the repeated cells of a run show; nothing where there is none, or no valid pair."""
    by_id = {cell.id: cell for cell in cells}
    pairs = []
    for cell in cells:
        first = None if cell.again is None else by_id.get(cell.again)
        if first is not None and not first.problems and not cell.problems:
            found = [speed(one, scenario) for one in (first, cell)]
            pairs += [(found[0], found[1])] if found[0] and found[1] else []
    seen = drift(pairs)
    if seen is None:
        return []
    low, high = seen.interval()
    values = {"starts": len(pairs), "ratio": seen.ratio, "low": low, "high": high}
    return [because("drift" if is_drift(seen) else "no_drift", **values)]


def speed(cell: CellSummary, scenario: Scenario) -> float | None:
    """The speed of a cell: of work by its time or rate, of users who think or follow a schedule by TPOT, else E2E."""
    load, numbers = scenario.loads[cell.load], cell.numbers
    if is_paced(load):
        latency = numbers.tpot_s.p50 or numbers.e2e_s.p50
        return 1 / latency if latency else None
    metric = metric_of([load])
    if metric == "wall_s":
        return 1 / numbers.wall_s if numbers.wall_s else None
    rate: float | None = getattr(numbers, metric)
    return rate
