"""Numbers derived from one record. Each formula takes a Request and returns None where the number is undefined.

Times are in seconds. All times of a record except `sent_s` are relative to the moment of sending.
"""

import math
import operator
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from harness.columns import LATENCIES
from harness.rundir.records import (
    AT_LEAST,
    AT_MOST,
    CUT,
    FAILED,
    OBSERVED,
    SLACK_S,
    UNKNOWN,
    Request,
    find_impossible_counts,
)
from harness.scenario.check_syntax import Slo

SYN_TIMES_S = (1.0, 3.0, 7.0)  # after which Linux sends a SYN again: 1 s, then twice as long each time
SYN_SLACK_S = 0.5  # what the connection itself may take in addition
MIN_PROMPT_SHARE = 0.75  # of the planned tokens; a few tokenizers join frequent words


def drop_impossible_counts(request: Request) -> Request:
    """Replace impossible counts by None and list them in `bad_fields`. Other tools store them."""
    counts = (request.prompt_tokens, request.output_tokens, request.cached_tokens, request.reasoning_tokens)
    bad = find_impossible_counts(*counts, request.asked_tokens)
    if not bad:
        return request
    unknown: dict[str, None] = dict.fromkeys(bad)
    return msgspec.structs.replace(request, **unknown, bad_fields=[*request.bad_fields, *bad.values()])


def ttft_s(request: Request) -> float | None:
    """Time to first token: first chunk of any channel - sent. None without streaming."""
    return request.chunks_s[0] if request.chunks_s else None


def ttfo_s(request: Request) -> float | None:
    """Time to first output: first visible content - sent. It differs from TTFT for models that reason first."""
    return request.first_visible_s


def e2e_s(request: Request) -> float | None:
    """End-to-end latency: last chunk - sent; without streaming, end of the response - sent. None for a failure."""
    if request.error is not None:
        return None
    return request.chunks_s[-1] if request.chunks_s else request.ended_s


def carried_tokens(request: Request) -> int | None:
    """Output tokens that the chunks carry: those of the usage, less the end token and other tokens without text that
    come before the first chunk or after the last. None without streaming, or when the server did not count tokens.
    """
    tokens, chunks = request.output_tokens, len(request.chunks_s)
    if tokens is None or not chunks:
        return None
    textless = request.textless
    if textless is None:  # other tools do not record it; an answer that did not reach its limit has an end token
        textless = int(request.finish not in (None, "length"))
    elif textless == 0 and request.finish == "stop" and tokens == chunks + 1:
        return chunks  # each chunk has one token, and the last one also has the end token
    return max(min(tokens, chunks), tokens - textless)  # some servers do not count the end token


def has_fewer_tokens(request: Request) -> bool:
    """Whether the server counted fewer tokens than it sent chunks of text, each of which has at least one token.

    Chunks of tool calls do not count, since one token may make several. One token may end the reasoning and start the
    answer, so that reasoning allows one chunk more.
    """
    pieces = len(request.chunks_s) - request.tool_chunks - bool(request.reasoning_chunks)
    return request.output_tokens is not None and request.output_tokens < pieces


def has_more_pieces(request: Request) -> bool:
    """Whether an answer has more pieces of text than its max_tokens. The exceptions are those of `has_fewer_tokens`."""
    pieces = len(request.chunks_s) - request.tool_chunks - bool(request.reasoning_chunks)
    return request.asked_tokens is not None and pieces > request.asked_tokens


def has_short_prompt(request: Request) -> bool:
    """Whether the server counted far fewer tokens than the prompt has words, each of which has at least one token."""
    planned, counted = request.asked_prompt_tokens, request.prompt_tokens
    return planned is not None and counted is not None and counted < MIN_PROMPT_SHARE * planned


def has_contradicting_times(request: Request) -> bool:
    """Whether times of a successful request contradict each other: chunks out of order or after its end, or a stream
    without chunks.
    """
    chunks = request.chunks_s
    if not chunks:
        return request.textless is not None
    if chunks[-1] > request.ended_s + SLACK_S:
        return True
    return chunks != sorted(chunks) and any(b < a - SLACK_S for a, b in pairwise(chunks))


def tpot_s(request: Request) -> float | None:
    """Time per output token: (last chunk - first chunk) / (tokens that the chunks carry - 1).

    It assumes one token in the first chunk. None for a single token or chunk, when the server did not count tokens, and
    for a tool call with more tokens than chunks, because the number of tokens before its first chunk is unknown.
    """
    tokens, chunks = carried_tokens(request), request.chunks_s
    if tokens is None or tokens < 2 or len(chunks) < 2:
        return None
    if request.tool_chunks == len(chunks) < tokens:
        return None
    return (chunks[-1] - chunks[0]) / (tokens - 1)


def arrived_in_one_read(request: Request) -> bool:
    """Whether all chunks arrived in one read, so that the time between them is unknown."""
    return 0 < len(request.chunks_s) - 1 <= request.coalesced


def reasoning_tokens(request: Request) -> float | None:
    """Output tokens that are reasoning: the server's count, else estimated by the share of chunks. None: unknown."""
    if request.reasoning_tokens is not None:
        return float(request.reasoning_tokens)
    tokens = carried_tokens(request)
    return None if tokens is None else tokens * request.reasoning_chunks / len(request.chunks_s)


def send_lag_s(request: Request) -> float | None:
    """Sent - scheduled: the load generator's delay, not the server's. None in a closed loop."""
    return None if request.scheduled_s is None else -request.scheduled_s


def _from_schedule(latency_s: Callable[[Request], float | None]) -> Callable[[Request], float | None]:
    """The latency plus the send lag. A request without a scheduled time was due when it was sent."""
    return lambda request: None if (value := latency_s(request)) is None else value + (send_lag_s(request) or 0.0)


FROM_SCHEDULE = ("ttft_sched_s", "e2e_sched_s")
# The formulas of the latencies in harness.columns, as distributions use them.
FORMULAS: dict[str, Callable[[Request], float | None]] = {
    "ttft_s": ttft_s,
    "ttfo_s": ttfo_s,
    "tpot_s": lambda request: None if arrived_in_one_read(request) else tpot_s(request),
    "e2e_s": e2e_s,
    "ttft_sched_s": _from_schedule(ttft_s),
    "e2e_sched_s": _from_schedule(e2e_s),
    "send_lag_s": send_lag_s,
    "connect_s": lambda request: request.connect_s,
}

_FIELDS = {column.check: column.field for column in LATENCIES if column.slo}
_CENSORED = (*CUT, "timeout")  # their latencies are at least their age
State = tuple[float, int]  # seconds, and a state of harness.rundir.records


def latency_state(request: Request, field: str) -> State | None:
    """What is known of a latency: seconds (infinite: none) and the state.

    None: the request has no such latency, as a vector has no TPOT. Each latency is censored by itself: a
    request that did not end has a TTFT if its first token came.
    """
    if request.error is not None and request.error not in _CENSORED:
        return math.inf, FAILED
    if field == "tpot_s":
        return _tpot_state(request)
    if (value := FORMULAS[field](request)) is not None:
        return value, OBSERVED
    if request.error is None:
        return math.inf, UNKNOWN
    return request.ended_s + ((send_lag_s(request) or 0.0) if field in FROM_SCHEDULE else 0.0), AT_LEAST


def _tpot_state(request: Request) -> State | None:
    chunks = request.chunks_s
    if request.error is not None:
        if request.asked_tokens is not None and request.asked_tokens < 2:
            return None
        if not chunks or request.asked_tokens is None:
            return math.inf, UNKNOWN
        until_s = chunks[-1] if len(chunks) >= request.asked_tokens else request.ended_s
        return (until_s - chunks[0]) / (request.asked_tokens - 1), AT_LEAST  # the answer has at most so many tokens
    if (value := tpot_s(request)) is None:
        return None if request.vectors is not None else (math.inf, UNKNOWN)
    if arrived_in_one_read(request):
        return chunks[-1] / ((carried_tokens(request) or 2) - 1), AT_MOST
    return value, OBSERVED


def meets_slos(request: Request, slos: Sequence[Slo]) -> bool | None:
    """Whether a request met every SLO. None: it missed no SLO, but it is unknown whether it met one.

    A failed request meets none. A request that was cut has missed a bound that its age reached. Whether an answer of
    one token or one chunk met a bound on TPOT is unknown.
    """
    if request.error is not None and request.error not in CUT:
        return False
    known = True
    for slo in slos:
        state = latency_state(request, _FIELDS[slo.latency])
        met = True if state is None else _is_within(*state, slo)
        if met is False:
            return False
        known = known and met is True
    return True if known else None


def slo_margin(request: Request, slos: Sequence[Slo]) -> float:
    """The largest latency relative to its bound, of those that are known at least in part; 0 without any."""
    states = [(latency_state(request, _FIELDS[slo.latency]), slo.bound_s) for slo in slos]
    known = [state[0] / max(bound_s, 1e-9) for state, bound_s in states if state and math.isfinite(state[0])]
    return max(known, default=0.0)


def _is_within(value_s: float, state: int, slo: Slo) -> bool | None:
    """Whether a latency is within the bound of an SLO; None: unknown."""
    if state == AT_LEAST:
        return False if value_s >= slo.bound_s else None
    if state == UNKNOWN:
        return None
    is_met = (operator.le if slo.operator == "<=" else operator.lt)(value_s, slo.bound_s)
    return is_met or (None if state == AT_MOST else False)


def silences_s(request: Request) -> tuple[float, float]:
    """How long a request waited for its first token, and the longest wait for a further one (0: none)."""
    chunks = request.chunks_s
    if not chunks:
        return request.ended_s, 0.0
    waits = [after - before for before, after in pairwise(chunks)]
    if request.error is not None:
        waits.append(request.ended_s - chunks[-1])
    return chunks[0], max(waits, default=0.0)


def waited_in_listen_queue(request: Request) -> bool:
    """Whether the server's full listen queue dropped the first SYN: the client's kernel sends it again after 1, 3 and
    7 s (METHOD 3, "connect").
    """
    if request.connect_retries is not None:
        return request.connect_retries > 0
    connect_s = request.connect_s
    return connect_s is not None and any(at <= connect_s < at + SYN_SLACK_S for at in SYN_TIMES_S)


class Latencies(dict[str, "array[float]"]):
    """The latencies of some requests in seconds, by field of Numbers."""

    def __missing__(self, field: str) -> "array[float]":
        self[field] = float_array()
        return self[field]

    def add(self, request: Request, fields: Iterable[str]) -> None:
        for field in fields:
            if (value := FORMULAS[field](request)) is not None:
                self[field].append(value)

    def merge(self, other: "Latencies") -> None:
        for field, values in other.items():
            self[field].extend(values)


def has_wrong_length(request: Request) -> bool:
    """Whether a successful request of fixed length returned another number of tokens than requested."""
    if not request.fixed_length or request.error is not None or request.asked_tokens is None:
        return False
    if request.output_tokens is None:
        return request.finish != "length"
    return request.output_tokens != request.asked_tokens


def token_share_between(request: Request, start_s: float, end_s: float) -> float:
    """The share (0 to 1) of a request's tokens that came within [start_s, end_s], in seconds after sending.

    It follows the chunk times. A response without streaming is spread evenly over the time that it took.
    """
    chunks = request.chunks_s
    if chunks:
        if start_s <= chunks[0] and chunks[-1] <= end_s:
            return 1.0
        return sum(start_s <= at <= end_s for at in chunks) / len(chunks)
    if request.ended_s <= 0:
        return 1.0 if start_s <= 0 <= end_s else 0.0
    return max(0.0, min(end_s, request.ended_s) - max(start_s, 0.0)) / request.ended_s


def float_array() -> "array[float]":
    return array("d")


def min_known(known: float | None, value: float) -> float:
    return value if known is None else min(known, value)


def max_known(known: float | None, value: float) -> float:
    return value if known is None else max(known, value)


def merge_counts(total: Struct, part: Struct, *, skipped: Collection[str] = ()) -> None:
    """Add the counts of a later part of a file to `total`, except the `skipped` fields. None: unknown.

    Arrays and lists are appended and numbers added, but `first_..._s` keeps the minimum and `last_..._s` the maximum.
    """
    for name in total.__struct_fields__:
        known, added = getattr(total, name), getattr(part, name)
        if name in skipped or added is None:
            continue
        if hasattr(known, "merge"):
            known.merge(added)
        elif isinstance(known, Struct):
            merge_counts(known, added)
        elif isinstance(known, array):
            known.extend(added)
        elif known is None:
            setattr(total, name, added)
        elif name.startswith("first_") and name.endswith("_s"):
            setattr(total, name, min(known, added))
        elif name.startswith("last_") and name.endswith("_s"):
            setattr(total, name, max(known, added))
        else:
            setattr(total, name, known + added)
