"""Decides whether a slowdown fails a pipeline: the gate of comparisons, of runs and of histories (docs/method.md).

A verdict's word has a margin of 2 %. A gate has a tolerance: the slowdown that must not be.
"""

import math
from collections.abc import Iterable

from msgspec.structs import replace

from harness.base.errors import ExitCode
from harness.numbers.comparison import LARGE, MARGIN, MAX_REPEATS, Gate, Verdict
from harness.numbers.summary import Summary

ENOUGH_RUNS = 5  # a side, which the advice asks for: equal sides pass in 99 % at a noise of 3 %


def decide_gate(low: float | None, high: float | None, tolerance: float) -> Gate:
    """Return what the interval of a ratio of speeds shows of a slowdown by `tolerance`. None: no bound is known."""
    limit = 1 / (1 + tolerance)
    if low is not None and low > limit:
        return "no_slowdown"
    if high is None or high >= 1:
        return "cannot_tell"
    return "slower" if high < limit else "size_unknown"


def with_gate(verdict: Verdict, tolerance: float, *, provisional: bool) -> Verdict:
    """Return the verdict with its effect on the exit code.

    A provisional `slower` fails where `provisional` asks for that, or where its whole interval is beyond LARGE. One
    that does not count among so many comparisons does not fail.
    """
    gate = decide_gate(verdict.low, verdict.high, tolerance)
    if gate == "slower" and verdict.word != "slower":
        gate = "size_unknown"
    is_large = verdict.high is not None and verdict.high < 1 / (1 + LARGE)
    if gate == "slower" and verdict.provisional and not provisional and not is_large:
        gate = "provisional"
    return replace(verdict, gate=gate, tolerance=tolerance, gate_needed=_needed(verdict, gate, tolerance))


def _needed(verdict: Verdict, gate: Gate, tolerance: float) -> int | None:
    """Return how many values of each side would decide a gate, if the ratio stays; an interval shrinks with the root of
    their number.
    """
    if gate in ("no_slowdown", "slower"):
        return None
    runs = max(verdict.n)
    if gate == "provisional":
        return max(ENOUGH_RUNS, verdict.needed or 0)
    if not verdict.ratio or not verdict.low or verdict.high is None:
        return ENOUGH_RUNS if runs < ENOUGH_RUNS else None
    distance = abs(math.log(verdict.ratio) + math.log1p(tolerance))
    half_width = math.log(verdict.high / verdict.low) / 2
    needed = math.inf if distance == 0 else min(verdict.n) * (half_width / distance) ** 2
    if runs < ENOUGH_RUNS:  # their interval says little of that of more runs, but not of a ratio at the tolerance
        is_at_limit = gate == "size_unknown" and distance < MARGIN / 2 and needed > MAX_REPEATS
        return None if is_at_limit else ENOUGH_RUNS
    return max(math.ceil(needed), runs + 1) if needed <= MAX_REPEATS else None


def with_gates(summary: Summary, tolerance: float | None, *, provisional: bool) -> Summary:
    """Return the summary of a run in which servers under the same load pass a gate, or not. None: there is no gate.

    A load against another one has none: that more users wait longer is no regression.
    """
    if tolerance is None or summary.comparison is None:
        return summary
    keys = {row.name: row.key for row in summary.rows}

    def is_gated(verdict: Verdict) -> bool:
        (server, load), (base_server, base_load) = keys[verdict.side], keys[verdict.baseline]
        return server != base_server and load == base_load

    verdicts = [
        with_gate(verdict, tolerance, provisional=provisional) if is_gated(verdict) else verdict
        for verdict in summary.comparison.verdicts
    ]
    return replace(summary, comparison=replace(summary.comparison, verdicts=verdicts))


def gate_code(gates: Iterable[Gate | None]) -> ExitCode:
    """Return the exit code of verdicts or series; a slower one comes before one that is not known."""
    words = {gate for gate in gates if gate is not None}
    if "slower" in words:
        return ExitCode.FAILED
    return ExitCode.INCONCLUSIVE if words - {"no_slowdown"} else ExitCode.OK
