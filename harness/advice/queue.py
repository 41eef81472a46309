"""Findings about requests that wait for each other."""

from harness.advice.rules import Found, RowFacts, gain, rule
from harness.analysis.time_split import SHARE
from harness.base.summary import Action, Reason
from harness.base.units import figures, milliseconds

MUCH_SLOWER = 0.9  # of the throughput with fewer requests at once
ROOM = 0.75  # of the KV cache: with less in use, it has room for more requests


@rule(
    when="more of the same requests at once gave less than 90 % of the tokens per second, in each repeat",
    means="The server is beyond its best concurrency: each further request slows the others by more than it adds.",
    actions="as many sequences as gave the most; the others wait in the queue",
)
def more_is_slower(row: RowFacts) -> Found | None:
    best = faster_with_fewer(row)
    if best is None:
        return None
    rate, best_rate = row.row.pooled.output_tok_s or 0.0, best.row.pooled.output_tok_s or 0.0
    preempted, usage = row.most("preemptions") or 0.0, row.most("kv_usage_max") or 0.0
    why = "what the server does for each further request grows faster than the gain of a larger batch"
    if preempted:
        why = (
            f"the KV cache was {usage:.0%} full, and {preempted:,.0f} times a request was preempted and computed again"
        )
    factor = best_rate / rate
    text = f"{figures(factor)} times the tokens per second, as measured with {best.in_flight} at once"
    expected = gain("output_tok_s", factor, text)
    return Found(
        cost=1 - rate / best_rate,
        measured=f"{figures(rate)} tok/s with {row.in_flight} requests at once, and {figures(best_rate)} with "
        f"{best.in_flight}",
        why=why,
        actions=[slower_action(row, best.in_flight, expected)],
        values={
            "tok_s": rate, "in_flight": row.in_flight, "best_tok_s": best_rate, "best_in_flight": best.in_flight,
            "preemptions": preempted,
        },
    )  # fmt: skip


def faster_with_fewer(row: RowFacts) -> RowFacts | None:
    """The row with fewer of the same requests at once and the highest throughput, if this one has clearly less."""
    rates = row.row.output_tok_s
    fewer = [one for one in row.neighbours if one.in_flight < row.in_flight and one.row.output_tok_s]
    best = max(fewer, key=lambda one: min(one.row.output_tok_s), default=None)
    if best is None or not rates or row.load.arrivals is not None:
        return None
    return best if max(rates) < MUCH_SLOWER * min(best.row.output_tok_s) else None


def slower_action(row: RowFacts, sequences: int, expected: Reason | None) -> Action:
    """At most so many sequences at once."""
    return row.action(
        f"At most {sequences} sequences at once",
        {"sequences": sequences},
        gain=expected,
        risk="requests beyond it wait for their first token",
    )


@rule(
    when="requests waited in the server's queue for 20 % of their time while at most 75 % of the KV cache was in use",
    means="The server computes fewer requests at once than its memory allows.",
    actions="more sequences or slots",
)
def queue_with_room(row: RowFacts) -> Found | None:
    split, usage = row.row.time, row.most("kv_usage_max")
    running = row.most("running_max")
    slots = row.whole("sequences") or (None if running is None else int(running))
    if slots is None or not row.most("waiting_max") or row.in_flight <= slots or (usage or 0.0) > ROOM:
        return None
    if running is not None and running < slots:  # something else keeps requests from running
        return None
    share = 1 - slots / row.in_flight  # of the time, in a closed loop
    if split is not None and split.queue_s is not None:
        share = split.queue_s / split.e2e_s
    if share < SHARE:
        return None
    fits = row.in_flight if not usage else min(row.in_flight, int(0.9 * slots / usage))
    ttft_s, waited_s = row.row.pooled.ttft_s.mean, None if split is None else split.queue_s
    expected = None
    measured = f"{slots} requests ran at once and up to {row.most('waiting_max'):.0f} waited"
    if waited_s is not None:
        measured += f", {milliseconds(waited_s)} ms on average"
        if ttft_s and fits == row.in_flight:
            left_s = max(0.0, ttft_s - waited_s)
            text = f"a mean TTFT of about {milliseconds(left_s)} instead of {milliseconds(ttft_s)} ms"
            expected = gain("ttft_mean", left_s / ttft_s, text)
    if usage is not None:
        measured += f"; at most {usage:.0%} of the KV cache was in use"
    changes: dict[str, object] = {"sequences": fits}
    if (context := row.whole("context")) is not None and row.shares_context:
        changes["context"] = fits * context
    return Found(
        cost=share,
        measured=measured,
        why=f"{row.title} runs at most {slots} at once",
        actions=[
            row.action(
                f"Up to {fits} sequences at once",
                changes,
                gain=expected,
                risk="each answer is slower while more run at once; more memory where slots share a context",
            )
        ],
        values={"slots": slots, "in_flight": row.in_flight, "queue_s": waited_s, "kv_usage": usage, "fits": fits},
    )


RULES = (more_is_slower, queue_with_room)
