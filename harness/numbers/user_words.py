"""Whether each user got answers to its own prompts alone: each has a word, which no other user's answer may have."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from harness.base.reason import Reason, because
from harness.base.units import count
from harness.records.columns import Rows
from harness.records.run_data import CellData

MIN_OWN_SHARE = 0.2  # of the answers with their own user's word; with fewer, the model does not repeat words
MAX_LISTED = 10  # answers that a reason lists


class Isolation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The words of users in the answers of a row or cell, warm-up included."""

    answers: int  # with text, of users who have a word
    own: int  # of these: with the word of their user
    foreign: int  # answers, failed ones too, with the word of another user

    @property
    def is_tested(self) -> bool:
        return self.foreign > 0 or self.own >= MIN_OWN_SHARE * self.answers > 0


def isolation_of(cells: Sequence[CellData]) -> Isolation | None:
    """Return the counts of some cells; None where no user had a word."""
    own = np.concatenate([cell.rows.own_word for cell in cells] or [np.empty(0)])
    foreign = sum(int((~np.isnan(cell.rows.foreign_user)).sum()) for cell in cells)
    answers = int((~np.isnan(own)).sum())
    return Isolation(answers=answers, own=int(np.nansum(own)), foreign=foreign) if answers or foreign else None


def isolation_reasons(cell: CellData) -> Iterator[Reason]:
    """The reason that a server mixes its users: an answer has the word of another one."""
    rows, isolation = cell.rows, isolation_of([cell])
    if isolation is None or not isolation.foreign:
        return
    places = np.flatnonzero(~np.isnan(rows.foreign_user)).tolist()
    leaks = [_leak(cell, place) for place in places[:MAX_LISTED]]
    text = f"{count(isolation.foreign, 'answer')} had the word of another user"
    text += f"{'; the first' if len(places) > 1 else ''}: {_leak_text(leaks[0])}"
    yield because("users_mixed", text, answers=isolation.answers, foreign=isolation.foreign, leaks=leaks)


def _leak(cell: CellData, place: int) -> dict[str, Any]:
    """Return what is known of an answer with another user's word, and of the request of that user at the time."""
    rows, load = cell.rows, cell.rows.foreign_load
    first_s = float(rows.sent_s.min())
    other_load = load.texts[load.codes[place]] if load.is_set[place] else None
    leak = {"load": other_load, "other": int(rows.foreign_user[place])} | _request(rows, place, first_s)
    if other_load is not None:  # its requests are in another cell
        return leak | {"of": None}
    began_s, ended_s = rows.sent_s[place], rows.sent_s[place] + rows.ended_s[place]
    others = np.flatnonzero((rows.user == rows.foreign_user[place]) & (rows.sent_s < ended_s))
    if not len(others):
        return leak | {"of": None}
    last = int(others[np.argmax(rows.sent_s[others])])
    is_open = bool(rows.sent_s[last] + rows.ended_s[last] > began_s)
    return leak | {"of": _request(rows, last, first_s) | {"at_the_same_time": is_open}}


def _request(rows: Rows, place: int, first_s: float) -> dict[str, Any]:
    cached, prompt = float(rows.cached_tokens[place]), float(rows.prompt_tokens[place])
    return {
        "user": int(rows.user[place]), "index": int(rows.index[place]),
        "sent_s": round(float(rows.sent_s[place]) - first_s, 3),
        "ended_s": round(float(rows.sent_s[place] + rows.ended_s[place]) - first_s, 3),
        "cached_tokens": None if math.isnan(cached) else int(cached),
        "prompt_tokens": None if math.isnan(prompt) else int(prompt),
    }  # fmt: skip


def _leak_text(leak: dict[str, Any]) -> str:
    whose = f"user {leak['other']}" + ("" if leak["load"] is None else f" of {leak['load']}")
    text = f"user {leak['user']} got that of {whose} ({_request_text(leak)}"
    if (other := leak["of"]) is not None:
        when = "at the same time" if other["at_the_same_time"] else "the last one before"
        text += f"; user {other['user']}, {when}: {_request_text(other)}"
    return f"{text})"


def _request_text(request: dict[str, Any]) -> str:
    text = f"request {request['index']}, {request['sent_s']:g} to {request['ended_s']:g} s"
    if request["cached_tokens"] is None:
        return f"{text}, cache not known"
    of = "" if request["prompt_tokens"] is None else f" of {request['prompt_tokens']:,}"
    return f"{text}, {request['cached_tokens']:,}{of} prompt tokens cached"
