"""A number of a row with its interval over the repeats."""

from collections.abc import Mapping

from harness.base.metrics import METRICS
from harness.numbers.stats import Estimate, mean_of_repeats
from harness.numbers.summary import CellSummary, Row
from harness.numbers.verdicts import metric_values


def estimate_row(row: Row, cells: Mapping[str, CellSummary], metric: str) -> Estimate | None:
    """Return the geometric mean of the repeats of a row with its 95 % interval; None: not known.

    A percentile that only all requests together carry is that of all requests, without an interval.
    """
    values = metric_values(row, cells, metric)
    positive = [value for value in values if value]
    if positive and len(positive) == len(values):
        return mean_of_repeats(positive)
    if METRICS[metric].latency and (pooled := METRICS[metric].of(row.pooled)):
        return Estimate(pooled, None, None)
    return None
