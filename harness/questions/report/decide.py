"""What a run decides with the options of its command: the gate of a tolerance, and provisional checks."""

from msgspec.structs import replace

from harness.numbers.gate import with_gates
from harness.numbers.summary import Summary


def decided(summary: Summary, tolerance: float | None, *, provisional: bool) -> Summary:
    """Return the summary with its gates, so that pages, JUnit and exit code agree.

    `provisional`: a check that only a provisional verdict breaks has failed.
    """
    summary = with_gates(summary, tolerance, provisional=provisional)
    if not provisional:
        return summary
    checks = [
        replace(result, status="failed", code="broken") if result.code == "provisional" else result
        for result in summary.checks
    ]
    return replace(summary, checks=checks)
