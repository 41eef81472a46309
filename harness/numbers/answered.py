"""Whether the requests of a load were answered at all: by whole answers, and those of all users.

A server beyond its limit may answer with a stub, or leave some users waiting for good while it serves others. Both look
fast, and neither fails.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.numbers import formulas
from harness.numbers.stats import fisher_greater
from harness.records.columns import Bools, Floats, Rows
from harness.scenario import Load, Prompts

SHORTER = 0.5  # of the median length with fewer requests at once
_CHANCE = 0.01  # that so many answers are short without a cause
STUB_TOKENS, MIN_ASKED, MIN_ANSWERS = 2, 16, 5  # a stub; tokens that were asked for; answers of which most are stubs
MIN_UNSERVED = 0.1  # of the requests at once
# Later requests that are sent before one starts, in requests at once, and some more: in a queue in order of arrival
# fewer than are in flight. For answers in one piece it is more: their start is their end.
_LATER, _LATER_WHOLE, _MORE = 1.5, 7.5, 3
_PIECES = 2  # of an answer in one piece


class Answered(NamedTuple):
    """What became of some requests: arrays with a value for each."""

    measured: Bools  # not of the warm-up
    user: Floats
    sent_s: Floats
    begun_s: Floats  # when the answer started, or the request ended without one
    good: Bools
    whole: Bools  # an answer that came in one piece
    waits: Bools  # it ended without a chunk, cut or after a timeout
    length: Floats  # tokens, of measured ones; infinite where it was cut; NaN without an answer, and of tool calls
    poor: Bools  # refused or empty


def answered(rows: Rows) -> Answered:
    good, streamed = rows.good, rows.chunks > 0
    tokens = np.where(np.isnan(rows.output_tokens), rows.chunks, rows.output_tokens)
    length = np.where(good, tokens, np.where(rows.error.is_in("unfinished", "abandoned"), np.inf, np.nan))
    return Answered(
        measured=rows.measured,
        user=np.nan_to_num(rows.user),  # its number is unique in a load
        sent_s=rows.sent_s,
        begun_s=rows.sent_s + np.where(streamed, rows.first_chunk_s, rows.ended_s),
        good=good,
        whole=good & (rows.arrivals <= _PIECES),
        waits=~streamed & rows.error.is_in("unfinished", "timeout"),
        length=np.where(rows.measured & np.isnan(rows.tool_calls), length, np.nan),
        poor=(good & formulas.is_refused(rows)) | formulas.is_empty(rows),
    )


def join(parts: Sequence[Answered]) -> Answered:
    return Answered(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def unserved(requests: Answered, at_once: int) -> int:
    """The number of requests at once that a server left waiting while it served many later ones.

    `at_once`: requests in flight, of a closed loop. Counted are requests that got nothing, and users whose every answer
    started so late.
    """
    served_s = np.sort(requests.sent_s[requests.good])
    later = np.searchsorted(served_s, requests.begun_s) - np.searchsorted(served_s, requests.sent_s, "right")
    is_whole = int(requests.whole.sum()) > requests.good.sum() / 2
    overtaken = later >= (_LATER_WHOLE if is_whole else _LATER) * at_once + _MORE
    users, numbers = np.unique(requests.user[requests.good], return_inverse=True)
    in_time = np.bincount(numbers, ~overtaken[requests.good], minlength=len(users))
    late = int((in_time == 0).sum()) if len(users) > 1 else 0
    return min(at_once, int((requests.waits & overtaken).sum()) + late)


def has_free_lengths(load: Load, prompts: Prompts) -> bool:
    """Whether the answers of a load may be long, and are so on any number of requests at once.

    Labels, structured answers and tool calls are short; those of a trace have the lengths of its rows.
    """
    is_text = load.endpoint != "embeddings" and load.answer is None and prompts.kind != "classification"
    return is_text and load.user != "agent" and load.trace is None and load.agent_trace is None


def are_stubs(requests: Answered, asked_tokens: float | None) -> bool:
    """Whether most answers to synthetic prompts have one or two tokens although many were asked for."""
    lengths = requests.length[~np.isnan(requests.length)]
    is_asked = asked_tokens is not None and asked_tokens >= MIN_ASKED
    return is_asked and len(lengths) >= MIN_ANSWERS and bool(np.median(lengths) <= STUB_TOKENS)


def are_shorter(requests: Answered, with_fewer: Answered) -> bool:
    """Whether the median length is below half of that with fewer requests at once, beyond chance (Fisher's exact test).

    Answers that were cut count as long: the end of a load cuts the long ones.
    """
    lengths, before = (group.length[~np.isnan(group.length)] for group in (requests, with_fewer))
    if not len(lengths) or not len(before):
        return False
    limit = SHORTER * float(np.median(before))
    if not np.isfinite(limit):
        finite = before[np.isfinite(before)]
        limit = SHORTER * float(finite.max()) if len(finite) else 0.0
    if not np.median(lengths) < limit:
        return False
    short, short_before = int((lengths < limit).sum()), int((before < limit).sum())
    return fisher_greater(short, len(lengths), short_before, len(before)) < _CHANCE


def median_length(requests: Answered) -> float | None:
    """The median length in tokens; None without an answer, or where most were cut."""
    lengths = requests.length[~np.isnan(requests.length)]
    median = float(np.median(lengths)) if len(lengths) else np.inf
    return median if np.isfinite(median) else None


def poor_share(requests: Answered) -> float:
    """The share of refused and empty answers in the measured ones."""
    answers = int((requests.measured & (requests.good | requests.poor)).sum())
    return int((requests.measured & requests.poor).sum()) / answers if answers else 0.0
