"""The formulas of docs/method.md: columns derived from the columns of the table, with a value for each request.

Times are in seconds; all but `sent_s` are relative to the moment of sending. NaN: the number is undefined.
A latency has its name in `harness.base.metrics`.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np
from numpy.typing import NDArray

from harness.records.columns import Bools, Floats, Rows
from harness.records.records import (
    AT_LEAST,
    AT_MOST,
    CUT,
    FAILED,
    MAX_PIECES,
    MIN_BUFFERED,
    OBSERVED,
    SLACK_S,
    UNKNOWN,
)
from harness.scenario.check_syntax import Slo

States = NDArray[np.int8]  # what is known of a latency, in the words of harness.records.records

SYN_TIMES_S = (1.0, 3.0, 7.0)  # after which Linux sends a SYN again: 1 s, then twice as long each time
SYN_SLACK_S = 0.5  # what the connection itself may take in addition
MIN_ARRIVALS = 5  # of a TPOT, where they carry several tokens each
MIN_TOKENS = 5  # a shorter answer has no TPOT to miss
TWO_TOKENS = 1.5  # of a first arrival, by its share of the text
MANY_TOKENS = 5.0  # by its share of the text: one word alone is rarely so many
MAX_DOUBT = 0.03  # of a TPOT, from the number of tokens that came first
MAX_BLANK_GAPS = 10.0  # usual gaps after a blank until the first text: it was sent before the prompt was computed
MIN_PROMPT_SHARE = 0.75  # of the planned tokens; a few tokenizers join frequent words
# Finish reasons of refused answers: OpenAI's, to which Anthropic's "refusal" is translated, and those of gateways.
REFUSING = ("content_filter", "content-filter", "content_filtered", "refusal", "safety", "SAFETY", "PROHIBITED_CONTENT")
FROM_SCHEDULE = ("ttft_sched", "e2e_sched")
ABSENT = -1  # state of a request without such a latency
MET, MISSED, OPEN = 1, 0, -1  # an SLO; OPEN: not known
_CENSORED = (*CUT, "timeout")  # their latencies are at least their age
_NOT_STARTED = ("connect", "rejected")  # errors of requests that no engine began; behind another one it may go on
MAX_FOREIGN, MAX_FOREIGN_TOKENS = 0.02, 50  # generated tokens above the bound of ours: both must be exceeded


def _kept(formula: Callable[[Rows], Floats]) -> Callable[[Rows], Floats]:
    """Compute a formula, which several others use, once for the same rows. Its column is read-only."""

    @wraps(formula)
    def column(rows: Rows) -> Floats:
        if formula.__name__ not in rows.derived:
            values = rows.derived[formula.__name__] = formula(rows)
            values.flags.writeable = False
        return rows.derived[formula.__name__]

    return column


def ttft(rows: Rows) -> Floats:
    """Time to first token: first chunk of any channel - sent. None without streaming."""
    return rows.first_chunk_s


def ttfo(rows: Rows) -> Floats:
    """Time to first output: first visible content - sent. It differs from TTFT for models that reason first."""
    return rows.first_visible_s


def e2e(rows: Rows) -> Floats:
    """End-to-end latency: last chunk - sent; without streaming, end of the response - sent. None for a failure."""
    answer_s: Floats = np.where(rows.good, np.where(rows.chunks > 0, rows.last_chunk_s, rows.ended_s), np.nan)
    return answer_s


@_kept
def carried_tokens(rows: Rows) -> Floats:
    """Output tokens that the chunks carry: those of the usage, less the end token and other tokens without text that
    come before the first chunk or after the last. None without streaming, or when the server did not count tokens.
    """
    tokens, chunks = rows.output_tokens, rows.chunks
    # Other tools do not record `textless`; an answer that did not reach its limit has an end token.
    textless = np.where(np.isnan(rows.textless), ~rows.finish.is_in(None, "length"), rows.textless)
    # Where each chunk has one token, the last one also has the end token.
    in_last = (rows.textless == 0) & rows.finish.is_in("stop") & (tokens == chunks + 1)
    # Some servers do not count the end token.
    carried = np.where(in_last, chunks, np.maximum(np.minimum(tokens, chunks), tokens - textless))
    carried = np.where(hides_reasoning(rows), np.maximum(chunks, carried - rows.reasoning_tokens), carried)
    tokens_carried: Floats = np.where((chunks > 0) & ~np.isnan(tokens), carried, np.nan)
    return tokens_carried


def hides_reasoning(rows: Rows) -> Bools:
    """Whether the server counted reasoning that it did not send: as text, the chunks would have been more."""
    rest = rows.output_tokens - rows.reasoning_tokens
    mask: Bools = (rows.reasoning_tokens > 0) & (rows.reasoning_chunks == 0) & (rows.chunks <= rest + 1)
    return mask & (rows.chunks > 0)


def starts_blank(rows: Rows) -> Bools:
    """Whether an answer began with a blank, and its text came more than MAX_BLANK_GAPS usual gaps later."""
    mask: Bools = (rows.blank_gaps > MAX_BLANK_GAPS) & np.isfinite(rows.blank_gaps)
    return mask


def max_generated(rows: Rows) -> Floats:
    """The most tokens that the server can have generated for a request; NaN: there is no bound.

    A server may go on with an answer that was cut. A request that was sent twice may have been computed twice; one for
    embeddings counts with a token for each vector, if at all.
    """
    asked = np.where(rows.chunks > rows.asked_tokens, np.nan, rows.asked_tokens)  # the server does not keep to it
    cut: Floats = np.where(rows.error.is_in(*_NOT_STARTED), 0.0, np.where(np.isnan(asked), rows.vectors, asked))
    bound: Floats = np.where(np.isnan(rows.output_tokens), cut, rows.output_tokens)
    return bound + np.where(rows.resent, cut, 0.0)


def foreign_tokens(generated: float, most: float) -> float:
    """The tokens beyond what a server can have generated for us; 0 where the difference is within the tolerance."""
    return generated - most if generated > max((1 + MAX_FOREIGN) * most, most + MAX_FOREIGN_TOKENS) else 0.0


def _pieces(rows: Rows) -> Floats:
    """Pieces of text, each of which has at least one token.

    Chunks of tool calls do not count, since one token may make several. One token may end the reasoning and start the
    answer, so that reasoning allows one chunk more.
    """
    pieces: Floats = rows.chunks - rows.tool_chunks - (rows.reasoning_chunks > 0)
    return pieces


def has_fewer_tokens(rows: Rows) -> Bools:
    """Whether the server counted fewer tokens than it sent pieces of text."""
    mask: Bools = rows.output_tokens < _pieces(rows)
    return mask


def has_more_pieces(rows: Rows) -> Bools:
    """Whether an answer has more pieces of text than its max_tokens."""
    mask: Bools = _pieces(rows) > rows.asked_tokens
    return mask


def streamed(rows: Rows) -> Bools:
    """Whether an answer succeeded and was streamed as text, to a client of this suite: its finish reason is known."""
    mask: Bools = rows.good & (rows.chunks > 0) & ~np.isnan(rows.textless)
    return mask


def is_refused(rows: Rows) -> Bools:
    """Whether the server or the model refused to answer, or a filter cut the answer off."""
    mask: Bools = rows.refused | rows.finish.is_in(*REFUSING)
    return mask


def is_empty(rows: Rows) -> Bools:
    """Whether an answer is complete and has no text, or only white space. One that was cut at its limit is odd text."""
    blank = rows.good & rows.odd_text.is_in("blank") & ~rows.finish.is_in("length") & ~rows.fixed_length
    mask: Bools = rows.error.is_in("empty") | blank
    return mask


def prompt_length(rows: Rows) -> Floats:
    """Tokens of the prompt as the server counts them, else as planned."""
    lengths: Floats = np.where(np.isnan(rows.prompt_tokens), rows.asked_prompt_tokens, rows.prompt_tokens)
    return lengths


def has_short_prompt(rows: Rows) -> Bools:
    """Whether the server counted far fewer tokens than the prompt has words, each of which has at least one token."""
    mask: Bools = rows.prompt_tokens < MIN_PROMPT_SHARE * rows.asked_prompt_tokens
    return mask


def has_contradicting_times(rows: Rows) -> Bools:
    """Whether times of a successful request contradict each other: chunks out of order or after its end, or a stream
    without chunks.
    """
    mask: Bools = np.where(
        rows.chunks > 0, rows.disordered | (rows.last_chunk_s > rows.ended_s + SLACK_S), ~np.isnan(rows.textless)
    )
    return mask


def has_wrong_length(rows: Rows) -> Bools:
    """Whether a successful request of fixed length returned another number of tokens than requested."""
    counted = ~np.isnan(rows.output_tokens)
    wrong = np.where(counted, rows.output_tokens != rows.asked_tokens, ~rows.finish.is_in("length"))
    mask: Bools = rows.fixed_length & rows.good & ~np.isnan(rows.asked_tokens) & wrong
    return mask


@_kept
def first_arrival_tokens(rows: Rows) -> Floats:
    """Tokens of the first arrival: its share of the text. None where nothing tells it.

    Most servers send the first token alone, and with a stream interval or speculation several tokens an event after it.
    """
    tokens, chunks, first = carried_tokens(rows), rows.chunks, rows.first_arrival_chunks
    later = np.maximum(tokens - (chunks - first), first)  # each later chunk has one token or more
    share = tokens * rows.first_arrival_chars / np.maximum(rows.text_chars, 1)
    usual = (tokens - 1) / np.maximum(chunks - 1, 1)  # tokens of a chunk after the first one
    is_word = (rows.first_words <= 1) & (share < MANY_TOKENS)
    alone = (first == 1) & ((share < np.sqrt(np.maximum(usual, 1.0))) | is_word)
    by_text = np.where(alone, 1.0, np.clip(share, first, later))
    mean = np.clip(first * tokens / np.maximum(chunks, 1), first, later)
    steps = tokens - first
    # Records without the lengths of the text: as few and as many tokens as there may be must give the same TPOT.
    is_same = (tokens - mean) * (1 + MAX_DOUBT) >= steps
    by_chunks = np.where(is_same, first, np.nan)
    estimate: Floats = np.where(np.isnan(rows.text_chars), by_chunks, by_text)
    return np.where(tokens <= chunks, np.minimum(first, np.maximum(tokens, 1)), estimate)


def is_bundled(rows: Rows) -> Bools:
    """Whether an answer of many tokens came in so few pieces that nothing is known of the time between its tokens."""
    mask: Bools = (carried_tokens(rows) >= MIN_BUFFERED) & (rows.arrivals <= MAX_PIECES)
    return mask


def starts_in_bundle(rows: Rows) -> Bools:
    """Whether the first arrival of an answer has two tokens or more. One sign of several tokens, an emoji, has to wait
    for its last one.
    """
    is_sign = (rows.first_arrival_chunks == 1) & (rows.first_arrival_chars <= 2)
    several = first_arrival_tokens(rows) >= TWO_TOKENS
    mask: Bools = (carried_tokens(rows) >= MIN_TOKENS) & several & ~is_sign
    return mask


def tpot(rows: Rows) -> Floats:
    """Time per output token: (last arrival - first arrival) / tokens that came after the first arrival.

    An arrival is a group of chunks that came together (`harness.records.arrivals`). None for a single arrival, for
    fewer than MIN_ARRIVALS that carry more tokens than arrivals, when the server did not count tokens, and for a tool
    call with more tokens than chunks, because the number of tokens before its first chunk is unknown. A blank that was
    sent before the prompt was computed is not its start.
    """
    tokens = carried_tokens(rows)
    has_tpot = (rows.arrivals >= 2) & ((rows.arrivals >= MIN_ARRIVALS) | (tokens <= rows.arrivals))
    has_tpot &= (tokens >= 2) & ~((rows.tool_chunks == rows.chunks) & (rows.chunks < tokens))
    after = tokens - first_arrival_tokens(rows) - starts_blank(rows)  # the first text after a blank is not timed
    started_s = np.where(starts_blank(rows), rows.first_text_s, rows.first_arrival_s)
    steps = np.where(has_tpot & (after > 0), after, np.nan)
    tpot_s: Floats = (rows.last_chunk_s - started_s) / steps
    return tpot_s


def reasoning_tokens(rows: Rows) -> Floats:
    """Output tokens that are reasoning: the server's count, else estimated by the share of chunks. None: unknown."""
    estimated = carried_tokens(rows) * rows.reasoning_chunks / np.maximum(rows.chunks, 1)
    tokens: Floats = np.where(np.isnan(rows.reasoning_tokens), estimated, rows.reasoning_tokens)
    return tokens


def send_lag(rows: Rows) -> Floats:
    """Sent - scheduled: the load generator's delay, not the server's. None in a closed loop."""
    lag_s: Floats = 0.0 - rows.scheduled_s
    return lag_s


def silences_s(rows: Rows) -> tuple[Floats, Floats]:
    """How long each request waited for its first token, and the longest wait for a further one (0: none)."""
    streamed = rows.chunks > 0
    after_s = np.where(streamed & ~rows.good, rows.ended_s - rows.last_chunk_s, -np.inf)
    longest_s = np.maximum(np.where(np.isnan(rows.longest_gap_s), -np.inf, rows.longest_gap_s), after_s)
    return np.where(streamed, rows.first_chunk_s, rows.ended_s), np.where(np.isinf(longest_s), 0.0, longest_s)


def waited_in_listen_queue(rows: Rows) -> Bools:
    """Whether the server's full listen queue dropped the first SYN: the client's kernel sends it again after 1, 3 and
    7 s (METHOD 3, "connect").
    """
    connect_s = rows.connect_s
    at_times = [(at_s <= connect_s) & (connect_s < at_s + SYN_SLACK_S) for at_s in SYN_TIMES_S]
    mask: Bools = np.where(np.isnan(rows.connect_retries), np.any(at_times, axis=0), rows.connect_retries > 0)
    return mask


FORMULAS: dict[str, Callable[[Rows], Floats]] = {
    "ttft": ttft, "ttfo": ttfo, "tpot": tpot, "e2e": e2e, "send_lag": send_lag,
    "connect": lambda rows: rows.connect_s,
}  # fmt: skip
SAMPLES = (*FORMULAS, *FROM_SCHEDULE)  # latencies of which a request has one


def latency_s(rows: Rows, latency: str) -> Floats:
    """A latency of harness.base.metrics, as distributions use it."""
    if latency in FROM_SCHEDULE:  # a request without a scheduled time was due when it was sent
        total_s: Floats = latency_s(rows, latency.removesuffix("_sched")) + np.nan_to_num(send_lag(rows))
        return total_s
    return FORMULAS[latency](rows)


def latency_states(rows: Rows, latency: str) -> tuple[Floats, States]:
    """What is known of a latency: seconds (infinite: none) and the state.

    ABSENT: the request has no such latency, as a vector has no TPOT. Each latency is censored by itself: a
    request that did not end has a TTFT if its first token came.
    """
    is_tpot = latency == "tpot"
    values_s, states = _tpot_states(rows) if is_tpot else (latency_s(rows, latency), np.full(len(rows), OBSERVED))
    if not is_tpot:
        missing, ages_s = np.isnan(values_s), rows.ended_s
        if latency in FROM_SCHEDULE:
            ages_s = ages_s + np.nan_to_num(send_lag(rows))
        states = np.where(missing, np.where(rows.good, UNKNOWN, AT_LEAST), states)
        values_s = np.where(missing, np.where(rows.good, np.inf, ages_s), values_s)
    failed = rows.error.is_set & ~rows.error.is_in(*_CENSORED)
    return np.where(failed, np.inf, values_s), np.where(failed, FAILED, states).astype(np.int8)


def _tpot_states(rows: Rows) -> tuple[Floats, NDArray[np.int64]]:
    chunks, asked = rows.chunks, rows.asked_tokens
    steps = np.where(asked >= 2, asked - 1, np.nan)
    until_s = np.where(chunks >= asked, rows.last_chunk_s, rows.ended_s)
    ages_s = (until_s - rows.first_chunk_s) / steps  # a cut answer has at most so many tokens
    cut_states = np.where(asked < 2, ABSENT, np.where(np.isnan(ages_s), UNKNOWN, AT_LEAST))
    values_s, tokens = tpot(rows), carried_tokens(rows)
    # All tokens after the first were generated within the time of the whole answer.
    at_most_s = rows.last_chunk_s / np.maximum(np.nan_to_num(tokens, nan=2.0) - 1, 1)
    missing = np.where(np.isnan(tokens), UNKNOWN, AT_MOST)
    missing = np.where(np.where(np.isnan(tokens), rows.output_tokens, tokens) < MIN_TOKENS, ABSENT, missing)
    missing = np.where(np.isnan(rows.vectors), missing, ABSENT)
    states = np.where(np.isnan(values_s), missing, OBSERVED)
    values_s = np.where(np.isnan(values_s) & (states == AT_MOST), at_most_s, values_s)
    values_s = np.where(rows.good, values_s, ages_s)
    return np.where(np.isnan(values_s), np.inf, values_s), np.where(rows.good, states, cut_states)


def meets_slos(rows: Rows, slos: Sequence[Slo]) -> States:
    """Whether each request MET every SLO, MISSED one, or neither is known (OPEN).

    A failed request meets none. A request that was cut has missed a bound that its age reached. A short answer without
    TPOT meets a bound on it.
    """
    missed = rows.error.is_set & ~rows.error.is_in(*CUT)
    unknown = np.zeros(len(rows), dtype=np.bool_)
    for slo in slos:
        values_s, states = latency_states(rows, slo.latency)
        within = values_s <= slo.bound_s if slo.operator == "<=" else values_s < slo.bound_s
        reached = values_s >= slo.bound_s
        missed = missed | (states == FAILED) | ((states == OBSERVED) & ~within) | ((states == AT_LEAST) & reached)
        unknown |= (states == UNKNOWN) | ((states == AT_LEAST) & ~reached) | ((states == AT_MOST) & ~within)
    return np.where(missed, MISSED, np.where(unknown, OPEN, MET)).astype(np.int8)


def slo_margins(
    rows: Rows, slos: Sequence[Slo], counted_states: Sequence[int] = (OBSERVED, AT_LEAST, AT_MOST)
) -> Floats:
    """The largest latency relative to its bound, of those in one of these states; 0 without any."""
    margins = np.zeros(len(rows))
    for slo in slos:
        values_s, states = latency_states(rows, slo.latency)
        counted = np.isin(states, counted_states) & np.isfinite(values_s)
        margins = np.maximum(margins, np.where(counted, values_s / max(slo.bound_s, 1e-9), 0.0))
    return margins
