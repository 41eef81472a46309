"""Numbers derived from one record: a function of a Request gives None where the number is undefined.

`add_up` joins what was counted in the parts of a file.

Times in seconds. Fields of a record but `sent_s` are already relative to the moment of sending.
"""

import operator
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from harness.columns import LATENCIES
from harness.rundir.records import SLACK_S, Request, find_impossible_counts
from harness.scenario.check_syntax import Slo


def possible(request: Request) -> Request:
    """The record without counts that are not possible, which other tools and older harnesses keep."""
    bad = find_impossible_counts(request, request.asked_tokens)
    if not bad:
        return request
    without: dict[str, None] = dict.fromkeys(bad)
    return msgspec.structs.replace(request, **without, bad_fields=[*request.bad_fields, *bad.values()])


def ttft_s(request: Request) -> float | None:
    """Time to first token: first chunk - sent. A chunk of any channel counts; without streaming it is not known."""
    return request.chunks_s[0] if request.chunks_s else None


def ttfo_s(request: Request) -> float | None:
    """Time to first output: first visible content - sent, for models that reason first."""
    return request.first_visible_s


def e2e_s(request: Request) -> float | None:
    """End-to-end latency: last chunk - sent. A response in one piece arrives when it ends. None: it failed."""
    if request.error is not None:
        return None
    return request.chunks_s[-1] if request.chunks_s else request.ended_s


def carried_tokens(request: Request) -> int | None:
    """Output tokens that the chunks carry: those that the usage counts, without the end token and others that have no
    text, before the first chunk or after the last. None: without streaming, or when the tokens were not counted.
    """
    tokens, chunks = request.output_tokens, len(request.chunks_s)
    if tokens is None or not chunks:
        return None
    textless = request.textless
    if textless is None:  # not observed by older harnesses: an answer that did not reach its limit has an end token
        textless = int(request.finish not in (None, "length"))
    elif textless == 0 and request.finish == "stop" and tokens == chunks + 1:
        return chunks  # one token a chunk, and an end token that came with the last of them
    return max(min(tokens, chunks), tokens - textless)  # a server may not count its end token


def has_fewer_tokens(request: Request) -> bool:
    """Whether the server counted fewer tokens than it sent pieces of text, each of which has at least one.

    Several pieces of a tool call may come of one token, and the last of the reasoning with the first of the answer.
    """
    pieces = len(request.chunks_s) - request.tool_chunks - bool(request.reasoning_chunks)
    return request.output_tokens is not None and request.output_tokens < pieces


def is_backwards(request: Request) -> bool:
    """Whether the times of a success contradict each other: chunks that go back or end after it did, or a stream
    without any.
    """
    chunks = request.chunks_s
    if not chunks:
        return request.textless is not None
    if chunks[-1] > request.ended_s + SLACK_S:
        return True
    return chunks != sorted(chunks) and any(b < a - SLACK_S for a, b in pairwise(chunks))


def tpot_s(request: Request) -> float | None:
    """Time per output token: (last chunk - first chunk) / (tokens that the chunks carry - 1).

    The first chunk is taken to hold one token. None for a single token or chunk, when the tokens were not counted, and
    where the answer is a tool call with more tokens than events: how many of them precede its first chunk is not known.
    """
    tokens, chunks = carried_tokens(request), request.chunks_s
    if tokens is None or tokens < 2 or len(chunks) < 2:
        return None
    if request.tool_chunks == len(chunks) < tokens:
        return None
    return (chunks[-1] - chunks[0]) / (tokens - 1)


def in_one_read(request: Request) -> bool:
    """Whether all chunks came in one read: then they say when that was, and nothing about the time between them."""
    return 0 < len(request.chunks_s) - 1 <= request.coalesced


def shown_tpot_s(request: Request) -> float | None:
    """TPOT where it says something about the server; what a distribution is made of."""
    return None if in_one_read(request) else tpot_s(request)


def reasoning_tokens(request: Request) -> float | None:
    """Output tokens that are reasoning: as the server says, else by the share of the chunks. None: it is not known."""
    if request.reasoning_tokens is not None:
        return float(request.reasoning_tokens)
    tokens = carried_tokens(request)
    return None if tokens is None else tokens * request.reasoning_chunks / len(request.chunks_s)


def send_lag_s(request: Request) -> float | None:
    """Sent - scheduled: the load generator's delay, not the server's. None in a closed loop."""
    return None if request.scheduled_s is None else -request.scheduled_s


def late_s(request: Request) -> float:
    """What comes before sending in a latency from schedule. What has no time of its own was due when it was sent."""
    return send_lag_s(request) or 0.0


def _from_schedule(latency_s: Callable[[Request], float | None]) -> Callable[[Request], float | None]:
    return lambda request: None if (value := latency_s(request)) is None else value + late_s(request)


# The formula of each latency of harness.columns that a request has one of; what a distribution is made of.
FORMULAS: dict[str, Callable[[Request], float | None]] = {
    "ttft_s": ttft_s,
    "ttfo_s": ttfo_s,
    "tpot_s": shown_tpot_s,
    "e2e_s": e2e_s,
    "ttft_sched_s": _from_schedule(ttft_s),
    "e2e_sched_s": _from_schedule(e2e_s),
    "send_lag_s": send_lag_s,
    "connect_s": lambda request: request.connect_s,
}


# Whether all chunks came in one read or not: an SLO is about each request.
_OF_SLO = {column.check: FORMULAS[column.field] for column in LATENCIES if column.slo} | {"tpot": tpot_s}


def meets(request: Request, slos: Sequence[Slo]) -> bool | None:
    """Whether a successful request met every SLO. None: it missed none, but has a latency that is not known.

    An answer of a single token has no time per further token, and misses no bound on it; nor has one in a single chunk,
    such as a label and the end of sequence, which is a token and no chunk.
    """
    known = True
    for slo in slos:
        value = _OF_SLO[slo.latency](request)
        if value is None:
            known = known and slo.latency == "tpot" and (request.output_tokens == 1 or len(request.chunks_s) == 1)
        elif not (operator.le if slo.operator == "<=" else operator.lt)(value, slo.bound_s):
            return False
    return True if known else None


def missed_before_leaving(request: Request, slos: Sequence[Slo]) -> bool:
    """Whether an abandoned request had missed an SLO when the user left: one who leaves a slow one was not served."""
    for slo in slos:
        if slo.latency == "tpot":
            continue  # how many tokens came by then is not known
        value = _OF_SLO[slo.latency](request)
        if value is None:  # it had not come by then
            value = request.ended_s + (late_s(request) if slo.latency.endswith("_sched") else 0.0)
        if value > slo.bound_s:
            return True
    return False


class Latencies(dict[str, "array[float]"]):
    """The latencies of some requests, by field of Numbers."""

    def __missing__(self, field: str) -> "array[float]":
        self[field] = doubles()
        return self[field]

    def add(self, request: Request, fields: Iterable[str]) -> None:
        for field in fields:
            if (value := FORMULAS[field](request)) is not None:
                self[field].append(value)

    def merge(self, other: "Latencies") -> None:
        for field, values in other.items():
            self[field].extend(values)


def length_is_wrong(request: Request) -> bool:
    """Whether a successful request of fixed length brought another number of tokens than asked for."""
    if not request.fixed_length or request.error is not None or request.asked_tokens is None:
        return False
    if request.output_tokens is None:
        return request.finish != "length"
    return request.output_tokens != request.asked_tokens


def share_inside(request: Request, start_s: float, end_s: float) -> float:
    """The part (0 to 1) of its tokens that came within [start_s, end_s], seconds after sent.

    By chunk times; a response in one piece is spread evenly over the time that it took.
    """
    chunks = request.chunks_s
    if chunks:
        if start_s <= chunks[0] and chunks[-1] <= end_s:
            return 1.0
        return sum(start_s <= at <= end_s for at in chunks) / len(chunks)
    if request.ended_s <= 0:
        return 1.0 if start_s <= 0 <= end_s else 0.0
    return max(0.0, min(end_s, request.ended_s) - max(start_s, 0.0)) / request.ended_s


def doubles() -> "array[float]":
    return array("d")


def earliest(known: float | None, at: float) -> float:
    return at if known is None else min(known, at)


def latest(known: float | None, at: float) -> float:
    return at if known is None else max(known, at)


def add_up(mine: Struct, other: Struct, *, given: Collection[str] = ()) -> None:
    """Add the counts of a part further on in the file, but for what is `given` to both.

    Values are joined, numbers added up; of `first_..._s` the least is kept, of `last_..._s` the most. None: not known.
    """
    for name in mine.__struct_fields__:
        here, there = getattr(mine, name), getattr(other, name)
        if name in given or there is None:
            continue
        if hasattr(here, "merge"):
            here.merge(there)
        elif isinstance(here, Struct):
            add_up(here, there)
        elif isinstance(here, array):
            here.extend(there)
        else:
            setattr(mine, name, there if here is None else _how(name)(here, there))


def _how(name: str) -> Callable[[Any, Any], Any]:
    if not name.endswith("_s"):
        return operator.add
    return {"first": min, "last": max}.get(name.partition("_")[0], operator.add)
