"""Findings about the KV cache and the context."""

from harness.base.units import count, short_percent
from harness.engines import default_reserve, safe_utilization
from harness.numbers.summary import ENOUGH, Action
from harness.numbers.time_split import KV_FULL, KV_SHARE, kv_cache_share
from harness.numbers.turns import recomputed_by_turn, turn_numbers
from harness.questions.findings.queue import faster_with_fewer, slot_context, slower_action
from harness.questions.findings.rules import RowFacts, RuleResult, rule, shorter

MIN_COST = 0.05  # of the time
MIN_RECOMPUTED = 0.3  # of the tokens of earlier turns
FEW_CONTEXTS = 2.0  # of the whole length, that the cache holds: then the length decides whether the server starts


@rule(
    when="requests were preempted, or waited while the KV cache was 95 % full, and that took 5 % of the time",
    means="The KV cache holds fewer requests than run at once. A preempted request loses its part of the cache; its "
    "prompt and its answer so far are computed again.",
    actions="as many sequences as fit; a larger safe share of the memory; a KV cache of smaller numbers",
    requests=ENOUGH,
)
def kv_cache_full(row: RowFacts) -> RuleResult | None:
    usage, preempted = row.most("kv_usage_max") or 0.0, row.most("preemptions") or 0.0
    if faster_with_fewer(row) is not None or not (preempted or (usage >= KV_FULL and row.most("waiting_max"))):
        return None
    requests = row.row.pooled.sent / max(1, len(row.cells))
    cost = kv_cache_share(row.row.time, preempted, requests)
    if cost is None or cost < KV_SHARE:
        return None
    fits = row.sequences_that_fit
    measured = f"{count(int(preempted), 'preemption')} in {count(round(requests), 'request')}"
    if (kv_usage := row.most("kv_usage_max")) is not None:
        measured += f"; the KV cache was up to {short_percent(kv_usage)} full"
    if fits is not None:
        measured += f"; the KV cache holds {fits} of these requests at once"
        measured += "" if (ran := row.most("running_max")) is None else f"; up to {ran:.0f} ran"
    return RuleResult(
        cost=cost,
        measured=measured,
        why="more sequences run at once than the cache has room for",
        actions=_room_actions(row, fits),
        values={"preemptions": preempted, "requests": requests, "kv_usage": usage, "fits": fits},
    )


def _room_actions(row: RowFacts, fits: int | None) -> list[Action]:
    """What gives the cache room, by the number of requests that fit."""
    actions = []
    running = row.most("running_max") or 0
    if fits is not None and fits < running:
        actions.append(slower_action(row, fits, None))
    if (share := _safe_share(row)) is not None:
        do = f"Give {row.title} the largest share of the GPU's memory that is safe"
        actions.append(row.action(do, {"memory": share}, risk="other programs on the GPU have less"))
    if row.engine is not None and "kv_type" in row.engine.settings and row.setting("kv_type") in (None, "auto", "f16"):
        actions.append(
            row.action("Store the KV cache in numbers of 8 bits: about twice as many tokens", {"kv_type": None})
        )
    return actions


def _safe_share(row: RowFacts) -> float | None:
    """The largest safe share of the GPU's memory, if it is clearly above the one in use."""
    used = row.setting("memory")
    ran = [cell for cell in row.data.run.cells if cell.id in row.row.cells and cell.gpu_memory_before]
    if not isinstance(used, float) or not ran:
        return None
    shares = []
    for gpu in ran[-1].gpu_memory_before:
        free = gpu.total_bytes - gpu.used_bytes
        shares.append(safe_utilization(free, gpu.total_bytes, reserve=default_reserve(free)))
    numbers = [float(share) for share in shares if share is not None]
    return min(numbers) if len(numbers) == len(shares) and min(numbers) >= used + 0.02 else None


@rule(
    when="the context is at least 8 times as long as the longest request, and the KV cache, which slots do not share, "
    "holds fewer than two whole contexts",
    means="The server keeps room for requests that this load never sends. The length decides how much memory the "
    "server needs to start.",
    actions="a context as long as needed, and not below 8,192 tokens, which a usual conversation needs",
    requests=ENOUGH,
)
def context_unused(row: RowFacts) -> RuleResult | None:
    startup, usual, needed = row.served.startup, row.tokens, slot_context(row)
    # Slots that share a context are the matter of `queue_with_room`: there, more of them are what helps.
    if startup is None or startup.max_model_len is None or needed is None or row.shares_context or row.is_quick:
        return None
    longest, context, held = float(usual[-1]), startup.max_model_len, row.kv_tokens
    if needed * 2 > context or held is None or held >= FEW_CONTEXTS * context:
        return None
    action = row.action(f"A context of {needed:,} tokens", {"context": needed}, risk="longer requests are refused")
    return RuleResult(
        cost=None,
        measured=f"the context has {context:,} tokens, and the longest request had {longest:,.0f}",
        why=f"the KV cache has {held:,} tokens, and the server starts only if it holds one whole context",
        actions=[action],
        values={"context": context, "longest": longest, "needed": needed},
    )


@rule(
    when="later turns of conversations computed at least 30 % of their known beginning again, and that took 5 % of "
    "the time",
    means="A turn sends the whole conversation again. What the server still has in its prefix cache is not computed "
    "again; the rest delays the first token.",
    actions="the prefix cache; as many slots as conversations; a larger KV cache; templates that keep earlier turns",
    requests=ENOUGH,
)
def prefix_recomputed(row: RowFacts) -> RuleResult | None:
    cells = [row.data.cells[name] for name in row.row.cells] if row.load.user in ("chat", "agent") else []
    is_off = row.setting("prefix_cache") is False
    by_turn = recomputed_by_turn(turn_numbers(cells, nothing_cached=is_off))
    reusable, recomputed = (sum(turn[place] for turn in by_turn.values()) for place in (0, 1))
    split, numbers = row.row.time, row.row.pooled
    if not reusable or split is None or not split.prefill_s or not numbers.prompt_tokens:
        return None
    computed = numbers.prompt_tokens - (numbers.cached_tokens or 0)
    saved_s = split.prefill_s * min(1.0, recomputed / max(1, computed))
    if recomputed < MIN_RECOMPUTED * reusable or saved_s < MIN_COST * split.e2e_s:
        return None
    ttft_s, held = numbers.ttft.mean, row.kv_tokens
    turns = "; ".join(f"turn {turn}: {b:,.0f} of {a:,.0f}" for turn, (a, b) in by_turn.items())
    if is_off:
        expected = shorter("ttft_mean", "a mean TTFT", ttft_s, max(0.0, 1 - saved_s / ttft_s)) if ttft_s else None
        why = "the prefix cache is off"
        action = row.action("Switch the prefix cache on", {"prefix_cache": None}, gain=expected)
    elif (slots := row.whole("sequences")) is not None and row.shares_context and slots < row.in_flight:
        why = f"{row.in_flight} conversations share {count(slots, 'slot')}, and each keeps only the last one"
        context = row.whole("context")
        changes = {"sequences": row.in_flight} | ({} if context is None else {"context": context * row.in_flight})
        action = row.action(f"{row.in_flight} slots, one for each conversation", changes, risk="more memory")
    else:
        longest = float(row.tokens[-1]) * row.load.users
        conversations = count(row.load.users, "conversation has", "conversations have")
        room = "" if held is None else f": {conversations} up to {longest:,.0f} tokens, of {held:,}"
        why = f"the cache lost them{room}; or the chat template changes earlier turns, such as their thinking"
        action = row.action("A KV cache of 8-bit numbers, which holds about twice as much", {"kv_type": None})
    values = {
        "known": reusable,
        "again": recomputed,
        "turns": {str(turn): list(pair) for turn, pair in by_turn.items()},
    }
    measured = f"{recomputed:,.0f} of {reusable:,.0f} tokens of earlier turns were computed again ({turns})"
    return RuleResult(saved_s / split.e2e_s, measured, why, [action], values)


RULES = (kv_cache_full, context_unused, prefix_recomputed)
