"""The rows of a run for github-action-benchmark: a list of values that its history charts.

The action reads `name`, `unit`, `value`, `range` and `extra`. All values of a file have one direction, its `tool`.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from harness.base.metrics import METRICS
from harness.base.units import count, short_percent
from harness.numbers.row_estimate import estimate_row
from harness.numbers.summary import CellSummary, Row, Summary
from harness.numbers.verdicts import is_client_limited
from harness.records.manifest import Run
from harness.report.words import one_line

Direction = Literal["bigger", "smaller"]
TOOLS: dict[Direction, str] = {"bigger": "customBiggerIsBetter", "smaller": "customSmallerIsBetter"}
CHARTED: dict[Direction, tuple[str, ...]] = {
    "bigger": ("output_tok_s", "requests_per_s"),
    "smaller": ("wall", "ttft_p50", "ttft_p95", "tpot_p50", "e2e_p50", "e2e_p95"),
}


class Charted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of the action's file."""

    name: str  # what the history joins: the same in each run of a scenario
    unit: str
    value: float
    range: str | None = None
    extra: str | None = None


def charted_rows(summary: Summary, run: Run, direction: Direction) -> list[Charted]:
    """The values of a direction: of each row the metrics that it has. A value that is not known has no entry.

    The value is the geometric mean of the repeats, and the range its 95 % interval. A percentile that only all requests
    together carry is that of all requests, without a range.
    """
    cells = {cell.id: cell for cell in summary.cells}
    entries = [
        _charted(row, run, cells, metric)
        for row in summary.rows
        if row.invalid is None and row.failed is None
        for metric in CHARTED[direction]
    ]
    return [entry for entry in entries if entry is not None]


def _charted(row: Row, run: Run, cells: Mapping[str, CellSummary], name: str) -> Charted | None:
    metric = METRICS[name]
    mean = estimate_row(row, cells, name)
    if mean is None:
        return None
    factor = 1000 if metric.latency else 1
    low, high = mean.low, mean.high
    facts = [f"run {run.id}", f"model {run.scenario.model}", count(len(row.cells), "repeat")]
    facts += ["of the requests of all repeats together"] if low is None and len(row.cells) > 1 else []
    failed = row.pooled.failed
    facts += [f"{failed:,} of {count(row.pooled.sent, 'request')} failed"] if failed else []
    facts += ["SIMULATED: the numbers come from a model, not from hardware"] if run.simulated else []
    facts += ["UNCHECKED: imported, so its validity is not known"] if run.origin is not None else []
    if is_client_limited(row, name):
        error = max(row.client_error.get(name, (0.0, 0.0)))
        facts.append("the load generator was late" + f", by up to {short_percent(error)} of this value" * bool(error))
    return Charted(
        name=f"{row.name}: {metric.title}",
        unit="ms" if metric.latency else metric.unit,
        value=mean.value * factor,
        range=None if low is None or high is None else f"{low * factor:.4g} to {high * factor:.4g}",
        extra="\n".join(one_line(fact) for fact in facts),
    )
