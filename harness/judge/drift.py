"""Whether a server, or its machine, became slower or faster during its starts: the first cell of each start of a sweep
is repeated at its end."""

import math
import statistics
from collections.abc import Sequence

from harness.judge.stats import Effect
from harness.judge.verdicts import is_paced, metric_of
from harness.scenario import Scenario
from harness.summary import MARGIN, CellSummary, Reason, because

# The standard deviation of the logarithm of a cell's speed that is expected before the pairs of a run show one, and
# how many pairs that counts for.
EXPECTED_SD = 0.015
WORTH = 4


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
