"""What a comparison says: verdicts, checks, and whether answers are the same; and by which margins."""

from typing import Literal

from msgspec import Struct

from harness.base.reason import Reason

# The rules of verdicts, see docs/method.md.
ALPHA = 0.05  # of tests and intervals
POWER = 0.8  # with which a recommended number of repeats, runs or requests decides
ANSWER_MARGIN = 0.03  # of right answers: a server that has at most so many less gives the same answers
MARGIN = 0.02  # smaller differences are treated as noise: "faster" and "slower" are larger, "same" is within it
MAX_FACTOR = 4.0  # by which a bound of an interval may be away from its ratio: a bound that is farther says nothing
TOLERANCE = 0.10  # of a gate: how much longer the work may take; `--tolerance` replaces it
LARGE = 0.25  # a difference that a provisional verdict, and an error of the load generator that a result, cannot carry
MAX_REPEATS = 100  # beyond which no number of repeats is suggested


class SameAnswers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answers of a row, or of a side, to the same questions as those of the baseline. Shares are of 0 to 1."""

    side: str
    baseline: str
    load: str
    questions: int  # that both answered; 0: a side has no valid cell, and the other numbers are not known
    differ: float | None = None  # share of the pairs of answers, one of each side, that differ
    noise: tuple[float | None, float | None]  # such a share within the side and within the baseline; None: asked once
    flips: float | None = None  # differ - the mean of the noise: what the other server changes; None: noise not known
    flips_low: float | None = None  # its 95 % interval, as of the following
    flips_high: float | None = None
    right: tuple[float | None, float | None]  # share of right answers of side and baseline
    # Questions that only the baseline answers right; one of two answers counts half, as of the following.
    lost: float | None = None
    gained: float | None = None  # questions that only the side answers right
    difference: float | None = None  # right answers of the side - those of the baseline
    low: float | None = None
    high: float | None = None
    cut: float = 0.0  # share of the answers of the side with more of them that max_tokens cut; above 5 %: inconclusive
    word: Literal["same", "worse", "inconclusive"]  # same: at most ANSWER_MARGIN less right answers
    reason: Reason | None = None  # of "inconclusive": why
    needed: int | None = None  # about so many questions would decide it
    left_out: list[Reason] = []  # the first problem of each cell of the two that is not valid and does not count


Inconclusive = Literal[
    "refused",  # the two sides have no ratio; `refused` says why
    "in_margin",  # the difference is within the margin, but its interval is not
    "includes_one",  # the interval includes 1
    "not_beyond",  # the interval excludes 1, but not the margin
    "corrected",  # the interval is beyond the margin, but does not count among so many comparisons
    "client",  # the interval decides without what the load generator's delays add to it
    "interval_unknown",  # the interval includes 1 and is wider than MAX_FACTOR either way: the values say nothing
]  # fmt: skip
OPEN = ("in_margin", "includes_one", "not_beyond", "corrected")  # more repeats may decide these


class CheckResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a check. Its numbers are those of the worst row, in the unit of the check's bound."""

    check: str
    status: Literal["passed", "failed", "inconclusive"] = "inconclusive"
    code: (
        Literal[
            "met",  # passed
            "broken",  # failed
            "no_row",  # failed: it applies to no row of the run
            "unreadable",  # failed
            "too_close",  # inconclusive: the interval contains the bound
            "too_few_requests",  # inconclusive
            "provisional",  # inconclusive: a provisional verdict breaks it; failed with --provisional
            "unknown_requests",  # inconclusive: the others decide, but so many requests were cut or lack the latency
            "no_value",  # inconclusive: the row has no such number
            "no_baseline",  # inconclusive: there is no baseline with such a number, or it is not comparable
        ]
        | None
    ) = None
    evidence: list[Reason] = []  # of each row that decides
    row: str | None = None
    value: float | None = None
    low: float | None = None  # the interval of the value, see docs/method.md; None: unbounded on that side
    high: float | None = None
    bound: float | None = None
    more_requests: int | None = None  # that would decide it; None: unknown, too many, or they do not help


def known_bounds(ratio: float, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """The bounds of an interval of a ratio that say something: those within MAX_FACTOR of it, and those between it and
    1, which show the smallest difference. None for another bound.
    """
    return (
        low if low is not None and (low > 1 or low * MAX_FACTOR >= ratio) else None,
        high if high is not None and (high < 1 or high <= ratio * MAX_FACTOR) else None,
    )


Basis = Literal[
    "repeats",  # Welch's interval over the repeats of one run
    "one_run",  # one repeat: blocks of its requests
    "apart",  # repeats that are not interleaved; compared like runs
    "runs",  # runs; the variation between equal ones is assumed until it is known
]
Gate = Literal[
    "no_slowdown",  # the interval excludes a slowdown of the tolerance; exit code 0, of all others 5 but for "slower"
    "slower",  # the whole interval is a slowdown of the tolerance or more; exit code 4
    "provisional",  # likewise, of a provisional verdict; exit code 4 with --provisional
    "size_unknown",  # it is slower, and whether by the tolerance is not known
    "cannot_tell",  # the interval contains 1 and the tolerance, or there is none
]  # fmt: skip


class Verdict(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One side against the baseline side, for one metric."""

    side: str  # "SERVER / LOAD", or the run's name
    baseline: str
    metric: str  # such as "wall", "output_tok_s" or "ttft_p50"
    values: tuple[list[float], list[float]] = ([], [])  # of side and baseline, as `n` counts them, in the metric's unit
    ratio: float | None  # of speed: above 1 if the side is faster than the baseline
    low: float | None  # 95 % interval of the ratio; None: not known
    high: float | None
    p: float | None  # two-sided, of a difference beyond the margin, corrected for the number of comparisons
    n: tuple[int, int]  # number of values of side and baseline: repeats of one run, or runs
    word: str  # "faster", "slower", "same", "inconclusive"
    provisional: bool = False  # one repeat, or a variation between runs that is mostly assumed
    basis: Basis = "repeats"
    reason: Inconclusive | None = None
    refused: Reason | None = None  # why the two sides have no ratio
    unit: Literal["repeats", "runs"] = "repeats"  # what the values are of
    comparisons: int = 1  # for which p is corrected
    needed: int | None = None  # values of each side that would decide the verdict; None: not known, or too many
    needed_for_same: int | None = None  # those that would show that there is no difference beyond the margin
    widened: tuple[float, float] | None = None  # by which factors `low` and `high` are farther, see `client_error`
    gate: Gate | None = None  # of a comparison of runs, and of servers with `--tolerance`: what the exit code follows
    tolerance: float | None = None  # of the gate: 0.1 is a slowdown of 10 %
    # Values of each side that would decide the gate, if the ratio stays; None: decided, not known, or too many.
    gate_needed: int | None = None


class Difference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key in which the manifests of the sides differ."""

    key: str
    values: list[str]  # one for each side


class Comparison(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of verdicts."""

    metric: str | None  # of all verdicts; None: they have different ones
    comparisons: int  # for which p-values are corrected
    noise_floor: float  # smaller relative differences are treated as noise
    noise_source: list[Reason]  # in a comparison of runs: the source of the variation between them
    verdicts: list[Verdict]
    # In a comparison of runs:
    simulated: bool = False  # an engine's model was measured, not hardware
    sides: list[str] = []  # baseline first
    answers: list[Reason] = []  # up to how many users speculation pays, where one side speculates
    differences: list[Difference] = []  # of the manifests of the sides
    same_answers: list[SameAnswers] = []  # of loads whose right answers are known
    checks: list[CheckResult] = []
    notes: list[Reason] = []  # on the sides
