"""The finding about a limit that the server's own metrics show, and whose reason no other finding has."""

from harness.base.units import count, short_percent, verb
from harness.numbers.summary import ENOUGH
from harness.numbers.time_split import LimitedBy, kv_cache_share
from harness.questions.findings import cache, queue, setup
from harness.questions.findings.rules import AdviceRule, RowFacts, RuleResult, rule

# What explains each limit. Prefill and decode are the work itself: that they take the time is no problem.
_EXPLAINS: dict[LimitedBy, tuple[AdviceRule, ...]] = {
    "kv_cache": (cache.kv_cache_full, queue.more_is_slower),
    "queue": (queue.queue_with_room, cache.kv_cache_full, queue.more_is_slower),
    "api": (queue.api_process, queue.gateway_share),
    "client": (setup.load_generator,),
}


@rule(
    when="the load generator, the KV cache, the queue or the API process limited the row, as its column *Limited by* "
    "says, and no other finding has the reason",
    means="Requests waited for something other than the model's own work. What is behind it is not known.",
    actions="a longer run where there are too few requests for other findings",
)
def unexplained_limit(row: RowFacts) -> RuleResult | None:
    limit, numbers = row.row.limited_by, row.row.pooled
    if limit not in _EXPLAINS or any(other_rule.finding(row) for other_rule in _EXPLAINS[limit]):
        return None
    is_few = numbers.succeeded < ENOUGH
    why = "no other finding has the reason"
    action = row.action("Compare it with a run with fewer requests at once")
    if limit == "queue" and (row.most("kv_usage_max") or 0.0) > queue.ROOM:
        why = "the KV cache has no room for many more requests at once"
    if is_few:
        why = f"findings need {ENOUGH} requests that succeeded, and {verb(numbers.succeeded, 'this is', 'these are')} "
        why += f"{numbers.succeeded}"
        action = row.action(f"Measure longer, until {ENOUGH} requests have succeeded", about="")
    return RuleResult(
        cost=_cost(row, limit),
        measured=_measured(row, limit),
        why=why,
        actions=[action],
        values={"limited_by": limit, "succeeded": numbers.succeeded, "few": is_few},
    )


def _cost(row: RowFacts, limit: LimitedBy) -> float | None:
    split = row.row.time
    if limit == "kv_cache":
        return kv_cache_share(split, row.most("preemptions"), row.row.pooled.sent / max(1, len(row.cells)))
    if limit == "queue":
        return row.queued_part
    return split.api_s / split.e2e_s if limit == "api" and split is not None and split.api_s is not None else None


def _measured(row: RowFacts, limit: LimitedBy) -> str:
    if limit == "client":
        return "the load generator's delays may be a fifth or more of a number"
    if limit == "api":
        return f"{short_percent(_cost(row, limit) or 0.0)} of the time was spent outside the engine"
    most = {"requests ran at once": row.most("running_max"), "waited": row.most("waiting_max")}
    seen = [f"up to {value:.0f} {what}" for what, value in most.items() if value is not None]
    parts = [" and ".join(seen)] if seen else []
    if (usage := row.most("kv_usage_max")) is not None:
        parts.append(f"the KV cache was up to {short_percent(usage)} full")
    if preempted := row.most("preemptions"):
        parts.append(count(int(preempted), "preemption"))
    return "; ".join(parts)


RULES = (unexplained_limit,)
