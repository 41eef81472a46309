"""Findings about answers that are refused, cut short or nonsense: their speed says nothing about the server."""

from functools import partial
from typing import Any

import numpy as np

from harness.base.units import count, figures, milliseconds, short_percent
from harness.numbers.answered import (
    MIN_UNSERVED,
    Answered,
    answered,
    are_shorter,
    are_stubs,
    has_free_lengths,
    join,
    median_length,
    unserved,
)
from harness.questions.findings.rules import RowFacts, RuleResult, rule
from harness.records.columns import Rows
from harness.scenario import is_open_loop, prompts_of

NONE_S, NONE_TIMES = 2.0, 10.0  # without a token; times the usual wait for the first one
MIN_ODD, ODD_SHARE = 2, 0.1  # answers, and of all
ODD_WORDS = {
    "repeated": "one token again and again", "reserved": "only reserved tokens, such as <unused49>",
    "blank": "only white space",
}  # fmt: skip


def _rows(row: RowFacts) -> list[Rows]:
    return [row.data.cells[name].counted for name in row.row.cells]


def _answered(row: RowFacts) -> Answered:
    return join([answered(rows) for rows in _rows(row)])


@rule(
    when="10 % of the answers, and two or more, are one token again and again, only reserved tokens such as "
    "`<unused49>`, or only white space",
    means="The text is nonsense, whatever its speed: a broken kernel or conversion computes as fast as a good one. A "
    "small model that is made to go on after its end (`output: fixed`) may also repeat itself.",
    actions="a look at one answer; another build or attention backend",
    misleads=True,
)
def nonsense_answers(row: RowFacts) -> RuleResult | None:
    good = [rows.where(rows.good) for rows in _rows(row)]
    kinds = {kind: sum(int(rows.odd_text.is_in(kind).sum()) for rows in good) for kind in ODD_WORDS}
    odd, answers = sum(kinds.values()), sum(map(len, good))
    if odd < MIN_ODD or odd < ODD_SHARE * answers:
        return None
    what = " or ".join(ODD_WORDS[kind] for kind, number in kinds.items() if number)
    return RuleResult(
        cost=None,
        measured=f"the text of {odd:,} of {count(answers, 'answer')} ({short_percent(odd / answers)}) is {what}",
        why="a broken build, kernel, quantization or chat template; else a model that has ended and must go on",
        actions=[
            row.action(
                "Read one answer by hand. If it is nonsense, try another version or build, attention without flash "
                "attention, or other weights, before you trust a speed",
            )
        ],
        values={"answers": answers, "odd": odd, **{kind: number for kind, number in kinds.items() if number}},
    )


@rule(
    when="the median answer has less than half the tokens that it has with fewer requests at once, beyond chance; or "
    "most answers to synthetic prompts have one or two tokens of 16 or more that were asked for. Not for labels, "
    "structured answers, tool calls, embeddings and traces",
    means="The server, or a gateway, cuts its answers short instead of refusing requests, so that its latencies look "
    "good.",
    actions="a look at one answer; the limits of server and gateway; fewer requests at once",
    misleads=True,
)
def short_answers(row: RowFacts) -> RuleResult | None:
    prompts = prompts_of(row.data.run.scenario, row.load)
    if not has_free_lengths(row.load, prompts) or row.data.run.origin:
        return None
    mine, median = _answered(row), median_length(_answered(row))
    fewer = [other for other in row.neighbours if other.in_flight < row.in_flight]
    better = [other for other in fewer if are_shorter(mine, _answered(other))]
    best = max(better, key=lambda other: median_length(_answered(other)) or np.inf, default=None)
    if median is None or (best is None and not (prompts.kind == "synthetic" and are_stubs(mine, _asked(row)))):
        return None
    measured = f"with {count(row.in_flight, 'request')} at once the median answer has {count(round(median), 'token')}"
    values: dict[str, Any] = {"tokens": median, "in_flight": row.in_flight, "asked": _asked(row)}
    if best is not None:
        before = median_length(_answered(best))
        measured += f", and {'more' if before is None else figures(before)} with {best.in_flight} at once"
        values |= {"best_tokens": before, "best_in_flight": best.in_flight}
    elif (asked := _asked(row)) is not None:
        measured += f"; up to {asked:,.0f} were asked for"
    return RuleResult(
        cost=None,
        measured=measured,
        why="a limit of the server or of a gateway, or a model that ends at once (a wrong chat template)",
        actions=[
            row.action(
                "Read one of these answers by hand, and look for limits of tokens, requests or users in the settings "
                "of server and gateway; until then count only on the smaller number of requests at once",
            )
        ],
        values=values,
    )


def _asked(row: RowFacts) -> float | None:
    asked = np.concatenate([rows.asked_tokens[rows.good] for rows in _rows(row)])
    lengths = asked[~np.isnan(asked)]
    return float(np.median(lengths)) if len(lengths) else None


@rule(
    when="10 % of the requests at once got nothing, or users got each answer late, while 1.5 times as many later "
    "requests as are in flight, and 3 more, were served (closed loops); or no request got a token for 10 times as long "
    "as with fewer at once, and 2 s",
    means="Some users wait for good while others are served. Percentiles of requests hide it, because the others send "
    "many more of them.",
    actions="a look at the queue and its order, at limits of connections, and at replicas that do not answer",
    misleads=True,
)
def users_unserved(row: RowFacts) -> RuleResult | None:
    if is_open_loop(row.load) or row.data.run.origin:
        return None
    if not row.row.pooled.succeeded:
        return _none_served(row)
    count_unserved = partial(unserved, at_once=row.in_flight)
    waiting = max((count_unserved(answered(row.data.cells[name].rows)) for name in row.row.cells), default=0)
    if waiting < MIN_UNSERVED * row.in_flight or not waiting:
        return None
    what = "users" if row.in_flight == row.load.users else "requests at once"
    measured = f"{waiting:,} of {row.in_flight:,} {what} were left waiting while later requests were served"
    return _unserved(row, measured, {"unserved": waiting, "in_flight": row.in_flight})


def _none_served(row: RowFacts) -> RuleResult | None:
    """A row in which nothing came, although requests with fewer at once started soon."""
    requests, means_s = _answered(row), [other.row.pooled.ttft.mean for other in row.neighbours]
    usual_s = max((mean_s for mean_s in means_s if mean_s is not None), default=None)
    if usual_s is None or not len(requests.waits) or not requests.waits.all():
        return None
    waited_s = float((requests.begun_s - requests.sent_s).max())
    if waited_s < max(NONE_S, NONE_TIMES * usual_s):
        return None
    measured = f"with {count(row.in_flight, 'request')} at once none got a token within {figures(waited_s)} s; with "
    measured += f"fewer the first one came after {milliseconds(usual_s)} ms"
    values = {"unserved": row.in_flight, "in_flight": row.in_flight, "waited_s": waited_s, "usual_s": usual_s}
    return _unserved(row, measured, values)


def _unserved(row: RowFacts, measured: str, values: dict[str, Any]) -> RuleResult:
    return RuleResult(
        cost=None,
        measured=measured,
        why="the order of the queue is unfair, a limit of connections or slots holds some back, or a replica is stuck",
        actions=[
            row.action(
                "Look at the server's queue and its limits of connections and slots, and ask each replica behind a "
                "gateway by itself; until then count only on the users that were served",
            )
        ],
        values=values,
    )


RULES = (nonsense_answers, short_answers, users_unserved)
