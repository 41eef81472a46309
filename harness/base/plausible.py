"""Which numbers of other programs can be a speed, a duration or a latency. docs/method.md has the rule."""

import math

from harness.base.measured import PERCENTILES, Distribution
from harness.base.units import count

MAX_USER_TOK_S = 20_000.0  # of one user: a token in 50 µs, several times what any GPU decodes
MAX_PROMPT_TOK_S = 1_000_000.0  # of one prompt
MIN_RUN_S, MAX_RUN_S = 1e-3, 10 * 365.25 * 86_400  # of a whole run: 1 ms, and 10 years
_SLACK, _SLACK_S = 1.01, 0.01  # of a limit that is itself measured: files round


def why_no_speed(tok_s: float, *, tokens: int | None = None, decoding: bool = True, users: int = 1) -> str | None:
    """Return why a number cannot be the tokens a second of so many users at once; None: it can be.

    `tokens`: of an answer, where they are known: no time passes between the tokens of an answer of one, so servers
    divide it by 0 or by the clock's resolution. `decoding`: whether tokens were generated; prompts are faster.
    """
    if not math.isfinite(tok_s) or tok_s <= 0:
        return f"{tok_s:g} tok/s is no speed"
    if decoding and tokens is not None and tokens <= 1:
        return f"{tok_s:,.7g} tok/s is of answers of {count(tokens, 'token')}, which have no time between tokens"
    most = MAX_USER_TOK_S * max(users, 1) if decoding else MAX_PROMPT_TOK_S
    if tok_s <= most:
        return None
    who = "a prompt" if not decoding else "one user" if users <= 1 else f"{count(users, 'request')} in flight"
    return f"{tok_s:,.7g} tok/s is more than {who} can get ({most:,.0f})"


def why_no_duration(seconds: float) -> str | None:
    """Return why a number cannot be the duration of a run; None: it can be."""
    if MIN_RUN_S <= seconds <= MAX_RUN_S:
        return None
    return f"{seconds:g} s is no duration of a run (1 ms to 10 years)"


def why_no_latency(seconds: float, run_s: float | None = None) -> str | None:
    """Return why a number cannot be a latency of a request of a run; None: it can be.

    `run_s`: the run's duration; one that cannot be true is no limit.
    """
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_RUN_S:
        return f"{seconds:g} s is no latency"
    if run_s is None or why_no_duration(run_s) is not None or seconds <= run_s * _SLACK + _SLACK_S:
        return None
    return f"{seconds:,.7g} s is longer than the run, which took {run_s:,.7g} s"


def why_not_within(ttft: Distribution, e2e: Distribution) -> str | None:
    """Return which statistic of TTFT is above that of E2E, of the same requests; None: none is."""
    for name in ("mean", "min", *PERCENTILES, "max"):
        first, whole = getattr(ttft, name), getattr(e2e, name)
        if first is not None and whole is not None and first > whole * _SLACK + _SLACK_S:
            return f"{name} of TTFT ({first:,.7g} s) is above that of E2E ({whole:,.7g} s): one of them is wrong"
    return None
