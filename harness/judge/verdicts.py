"""From run-level values to verdicts: the rules of docs/method.md, in one place."""

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from harness.judge import stats
from harness.judge.stats import ALPHA, MOST_REPEATS, Ratio
from harness.rundir.origin import unlike_rows
from harness.scenario.mixes import alone, mix_of
from harness.scenario.scenario import Load, Scenario, is_open
from harness.summary import NEEDED, Comparison, Numbers, Row, Verdict
from harness.units import count, figures

RATES = {"output_tok_s": "output tok/s", "input_tok_s": "prompt tok/s"}  # more of these is faster, of others less
_LATENCIES = {
    "ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "ttft_sched": "TTFT from schedule", "e2e_sched": "E2E from schedule",
}  # fmt: skip
METRIC_WORDS = {"wall_s": "wall time", **RATES} | {
    f"{name}_{at}": f"{word.replace(' ', f' {at} ', 1)}" if " " in word else f"{word} {at}"
    for name, word in _LATENCIES.items()
    for at in NEEDED
}


class NoiseFloor(Struct, frozen=True):
    """The relative effect below which a difference is not believed."""

    relative: float = 0.02
    source: str = "assumed"
    rows: dict[tuple[str, str], float] = {}  # by metric and load, where it was measured for them

    def of(self, metric: str, loads: Sequence[str]) -> float:
        """The floor between rows of these loads: the widest of them."""
        return max((self.rows.get((metric, load), self.relative) for load in loads), default=self.relative)


class Pair(Struct, frozen=True, kw_only=True):
    """Two sides and their run-level values, as speeds: more is faster."""

    side: str
    baseline: str
    metric: str
    side_speeds: list[float]
    baseline_speeds: list[float]
    loads: tuple[str, ...] = ()  # of the two sides; they choose the noise floor
    refused: str | None = None  # why the two have no ratio


def compare_rows(
    rows: Sequence[Row], baseline: tuple[str, str], scenario: Scenario, floor: NoiseFloor | None = None
) -> Comparison | None:
    """Every row of a run against its baseline row (server, load), and what else the scenario wants compared.

    A part of a mix is compared with the same load alone. Where there are mixes, loads that do other work than the
    baseline's are compared with the same load of the baseline's server: that a job makes more tokens than a chat says
    nothing about either.

    None when the baseline row is missing or alone.
    """
    base = next((row for row in rows if row.key == baseline), None)
    others = [row for row in rows if row is not base]
    if base is None or not others:
        return None
    named = {f"{row.server}/{row.load}": row for row in rows}
    wanted = [(named.get(pair.row), named.get(pair.against)) for pair in scenario.compare]
    own = [(row, _against(row, base, named, scenario)) for row in others]
    pairs = [
        _pair(row, against, scenario)
        for row, against in [*sorted(own, key=lambda pair: pair[1] is not base), *wanted]
        if row is not None and against is not None
    ]
    if not pairs:
        return None
    return verdicts(pairs, floor or NoiseFloor())


def comparisons_of(scenario: Scenario, baseline: tuple[str, str]) -> int:
    """How many comparisons a run will be corrected for: those of one in which every row has one value."""
    nothing = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
    rows = [
        Row(server=server, load=load, cells=[], wall_s=[1.0], output_tok_s=[1.0], input_tok_s=[1.0], pooled=nothing)
        for server in scenario.servers
        for load in scenario.loads
    ]
    found = compare_rows(rows, baseline, scenario)
    return 0 if found is None else found.comparisons


def _against(row: Row, base: Row, named: Mapping[str, Row], scenario: Scenario) -> Row | None:
    """What a row is compared with by itself."""
    if mix_of(row.load) is not None:
        return named.get(f"{row.server}/{alone(row.load)}") or base
    load, other = scenario.loads[row.load], scenario.loads[base.load]
    if not scenario.mixes or but_for_concurrency(load) == but_for_concurrency(other):
        return base
    same = named.get(f"{base.server}/{row.load}")
    return None if same is row else same


def _pair(row: Row, against: Row, scenario: Scenario) -> Pair:
    loads = [scenario.loads[one.load] for one in (row, against)]
    metric = metric_of(loads)
    return Pair(
        side=row.name,
        baseline=against.name,
        metric=metric,
        side_speeds=speeds(metric, values_of(row, metric)),
        baseline_speeds=speeds(metric, values_of(against, metric)),
        loads=(row.load, against.load),
        refused=not_valid(row, against)
        or unlike_work(*loads)
        or _refused(row, against, metric)
        or scheduled(*loads)
        or client_limited(metric, [(one.name, one.client_limited) for one in (row, against)]),
    )


def _refused(row: Row, against: Row, metric: str) -> str | None:
    """Why two rows have no ratio. Only numbers that mean the same have one."""
    for one in (row, against):
        if metric in one.missing and not values_of(one, metric):
            return f"the {METRIC_WORDS[metric]} of {one.name} is not known: {one.missing[metric]}"
    return unlike_rows(row, against, [metric])


def not_valid(*rows: Row) -> str | None:
    """Why rows have no ratio, of which one has a cell that is not valid."""
    return next((f"{row.name} has a cell that is not valid ({row.invalid})" for row in rows if row.invalid), None)


def unlike_work(*loads: Load) -> str | None:
    """Why loads have no ratio, whatever the servers say of them."""
    kinds = {load.endpoint == "embeddings" for load in loads}
    return "one makes text and the other embeddings, which have no output tokens" if len(kinds) > 1 else None


def scheduled(*loads: Load) -> str | None:
    """Why loads have no ratio of throughputs: a schedule says when requests come, however fast the server is."""
    if not any(is_open(load) for load in loads):
        return None
    return "the schedule sets the throughput; compare latencies from schedule, ttft_sched and e2e_sched"


def client_limited(metric: str, sides: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """Why sides, each a name and what the load generator limited of it, have no ratio."""
    field = metric if metric.endswith("_s") else f"{metric.rpartition('_')[0]}_s"
    names = [name for name, numbers in sides if field in numbers]
    if not names:
        return None
    return (
        f"the client was the limit of the {METRIC_WORDS[metric]} of {' and '.join(names)}; by what, and what to do, "
        "stands with the validity of the run"
    )


def _fixed(load: Load) -> bool:
    """Whether each request is the same work for every server: an answer of a form ends where its form does."""
    return load.output == "fixed" or load.endpoint == "embeddings" or load.answer is not None


def _form(load: Load) -> object:
    """What answers are to be, however the server is told."""
    return None if load.answer is None else (load.answer.choice, load.answer.json_schema)


def but_for_concurrency(load: Load) -> bytes:
    """What a load is beside how many requests it keeps in flight, and how many or for how long: loads of which this is
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
    """The wall time where all loads are the same fixed amount of work, else the rate of output tokens.

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


def values_of(row: Row, metric: str) -> list[float]:
    """A row's run-level values."""
    values: list[float] = getattr(row, metric)
    return values


def verdicts(pairs: Sequence[Pair], floor: NoiseFloor) -> Comparison:
    """Judge a table of pairs, corrected for how many there are. Pairs without values are not comparisons."""
    raw = [
        stats.permutation_p(pair.side_speeds, pair.baseline_speeds)
        if pair.side_speeds and pair.baseline_speeds and pair.refused is None
        else None
        for pair in pairs
    ]
    made = [p for p in raw if p is not None]
    corrected = iter(stats.holm(made))
    judged = [
        _judge(pair, None if p is None else next(corrected), len(made), floor.of(pair.metric, pair.loads))
        for pair, p in zip(pairs, raw, strict=True)
    ]
    metrics = {pair.metric for pair in pairs}
    return Comparison(
        metric=metrics.pop() if len(metrics) == 1 else None,
        comparisons=len(made),
        noise_floor=max((floor.of(pair.metric, pair.loads) for pair in pairs), default=floor.relative),
        noise_source=floor.source,
        verdicts=judged,
    )


def speeds(metric: str, values: Sequence[float]) -> list[float]:
    """Run-level values as speeds: a time turned round, a rate as it is. A rate of zero has no ratio."""
    return [value if metric in RATES else 1 / value for value in values if value > 0]


def _judge(pair: Pair, p: float | None, comparisons: int, floor: float) -> Verdict:
    side, base = pair.side_speeds, pair.baseline_speeds
    if p is None:
        why = f"cannot tell: {pair.refused}" if pair.refused else _no_values(pair)
        return _verdict(pair, None, None, None, "cannot tell", why)
    interval = stats.ratio_interval(side, base)
    ratio = stats.geometric_ratio(side, base)
    if interval is None:
        needed = stats.repeats_to_reach_p(comparisons)
        text = (
            f"cannot tell: by {METRIC_WORDS[pair.metric]}, {len(side)} against {count(len(base), 'run')} have no "
            f"spread to judge the difference by; {needed} repeats a side is the least that can decide"
        )
        return _verdict(pair, ratio, None, p, "cannot tell", text)
    word, text = _weigh(pair, interval, p, comparisons, floor)
    return _verdict(pair, ratio, interval, p, word, text)


def _weigh(pair: Pair, seen: Ratio, p: float, comparisons: int, floor: float) -> tuple[str, str]:
    """The verdict's word and sentence for two sides that have an interval."""
    n, m = len(pair.side_speeds), len(pair.baseline_speeds)
    band = math.log1p(floor)
    excludes_one = seen.low > 1 or seen.high < 1
    effect = abs(math.log(seen.ratio)) > band
    by = f"by {METRIC_WORDS[pair.metric]}"
    bounds = f"95 % interval {_factor(seen.low)} to {_factor(seen.high)}"
    evidence = f"{by} ({bounds}, p = {_p(p)})"
    if p < ALPHA and excludes_one and effect:
        if seen.ratio > 1:
            return "faster", f"faster: {_factor(seen.ratio)} times as fast as {pair.baseline} {evidence}"
        return "slower", f"slower: {_factor(seen.ratio)} times as fast as {pair.baseline} {evidence}"
    if -band < math.log(seen.low) and math.log(seen.high) < band:
        return "same", f"the same within ±{_percent(floor)} as {pair.baseline} {evidence}"
    smallest = stats.smallest_p(n, m) * comparisons
    if not effect:
        why = (
            f"a difference of {_percent(abs(seen.ratio - 1))} lies within the noise floor of ±{_percent(floor)}, "
            f"but the {bounds} does not"
        )
    elif smallest >= ALPHA:
        among = "" if comparisons == 1 else f" in {comparisons} comparisons"
        why = f"{n} against {count(m, 'run')} can never reach p < {ALPHA:g}{among}"
    elif not excludes_one:
        why = f"the {bounds} includes 1"
    else:
        why = f"p = {_p(p)} is not below {ALPHA:g}"
    return "cannot tell", f"cannot tell: {by}, {why}; {_settle(pair, comparisons, floor)}"


def _settle(pair: Pair, comparisons: int, floor: float) -> str:
    needed = stats.repeats_to_settle(pair.side_speeds, pair.baseline_speeds, comparisons, floor)
    if needed is None:
        return f"more than {MOST_REPEATS} repeats a side would be needed at this spread"
    return f"about {needed} repeats a side would settle it at this spread"


def _no_values(pair: Pair) -> str:
    sides = ((pair.side, pair.side_speeds), (pair.baseline, pair.baseline_speeds))
    empty = " and ".join(name for name, values in sides if not values)
    reason = "it has to be run" if pair.metric == "wall_s" else "the server has to report the tokens of every answer"
    return f"cannot tell: there is no {METRIC_WORDS[pair.metric]} of {empty}; {reason}"


def _verdict(
    pair: Pair, ratio: float | None, interval: Ratio | None, p: float | None, word: str, sentence: str
) -> Verdict:
    return Verdict(
        side=pair.side,
        baseline=pair.baseline,
        metric=pair.metric,
        ratio=ratio,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        p=p,
        n=(len(pair.side_speeds), len(pair.baseline_speeds)),
        word=word,
        sentence=f"{pair.side}: {sentence}.",
    )


def _factor(value: float) -> str:
    """A ratio with so many digits that its distance from 1 is seen."""
    distance = abs(value - 1)
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{figures(value * 100)} %"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
