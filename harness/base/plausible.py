"""Which numbers of other programs can be a speed. docs/method.md has the rule."""

import math

from harness.base.units import count

MAX_USER_TOK_S = 20_000.0  # of one user: a token in 50 µs, several times what any GPU decodes


def why_no_speed(tok_s: float, *, tokens: int | None = None, decoding: bool = True) -> str | None:
    """Return why a number cannot be the tokens a second of one user; None: it can be.

    `tokens`: of an answer, where they are known: no time passes between the tokens of an answer of one, so servers
    divide it by 0 or by the clock's resolution. `decoding`: whether tokens were generated; prompts have no bound.
    """
    if not math.isfinite(tok_s) or tok_s <= 0:
        return f"{tok_s:g} tok/s is no speed"
    if decoding and tokens is not None and tokens <= 1:
        return f"{tok_s:,.7g} tok/s is of answers of {count(tokens, 'token')}, which have no time between tokens"
    if decoding and tok_s > MAX_USER_TOK_S:
        return f"{tok_s:,.7g} tok/s is more than one user can get ({MAX_USER_TOK_S:,.0f})"
    return None
