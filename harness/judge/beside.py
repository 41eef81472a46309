"""What each load of a mix feels of the others: its latencies together against alone."""

from collections.abc import Iterable, Mapping, Sequence

from harness.judge.verdicts import METRIC_WORDS, NoiseFloor, Pair, client_limited, not_valid, speeds, verdicts
from harness.scenario.mixes import alone, mix_of
from harness.scenario.scenario import Scenario, is_open
from harness.summary import NEEDED, CellSummary, Comparison, Distribution, Row

_TAILS = ("p99", "p95", "p90")


def beside_others(
    rows: Sequence[Row], cells: Iterable[CellSummary], scenario: Scenario, floor: NoiseFloor | None = None
) -> list[Comparison]:
    """A table for each part of a mix, against the same load of the same server alone.

    Each table is corrected for itself: what the chat lost is one question, and what the job lost another.
    """
    floor = floor or NoiseFloor()
    named = {(row.server, row.load): row for row in rows}
    of = {cell.id: cell for cell in cells}
    return [
        verdicts(latencies(row, against, of, scenario), floor)
        for row in rows
        if mix_of(row.load) is not None
        if (against := named.get((row.server, alone(row.load) or ""))) is not None
    ]


def latencies(row: Row, against: Row, of: Mapping[str, CellSummary], scenario: Scenario) -> list[Pair]:
    """Of two rows the median and the highest percentile that every run carries.

    People who come by a schedule wait from then on.
    """
    since = "_sched" if is_open(scenario.loads[row.load]) else ""
    names = ("ttft", "tpot") if row.pooled.ttft_s.n else ("e2e",)
    pairs = []
    for name in (f"{name}{since if name != 'tpot' else ''}" for name in names):
        runs = [[_sample(of[cell], name) for cell in one.cells] for one in (row, against)]
        carried = [p for p in _TAILS if all(getattr(sample, p) is not None for side in runs for sample in side)]
        pairs += [_pair(row, against, name, p, runs) for p in ("p50", (carried or ["p90"])[0])]
    return pairs


def _pair(row: Row, against: Row, name: str, at: str, runs: list[list[Distribution]]) -> Pair:
    metric = f"{name}_{at}"
    values: list[list[float | None]] = [[getattr(sample, at) for sample in side] for side in runs]
    known = [[value for value in side if value is not None] for side in values]
    too_few = f"a {METRIC_WORDS[metric]} needs {NEEDED[at]} successful requests in each run"
    return Pair(
        side=row.name,
        baseline=against.name,
        metric=metric,
        side_speeds=speeds(metric, known[0]),
        baseline_speeds=speeds(metric, known[1]),
        loads=(row.load, against.load),
        refused=not_valid(row, against)
        or (too_few if any(None in side for side in values) else None)
        or client_limited(metric, [(one.name, one.client_limited) for one in (row, against)]),
    )


def _sample(cell: CellSummary, name: str) -> Distribution:
    sample: Distribution = getattr(cell.numbers, f"{name}_s")
    return sample
