"""Findings about requests that wait for each other."""

import numpy as np

from harness.base.reason import Reason
from harness.base.units import GIB, count, figures, gib, milliseconds, short_percent
from harness.numbers.cell_numbers import generated_tokens
from harness.numbers.summary import ENOUGH, Action
from harness.numbers.time_split import SHARE
from harness.questions.findings.rules import RowFacts, RuleResult, gain, rule, shorter
from harness.records.columns import Floats, Gaps, join_gaps

MUCH_SLOWER = 0.9  # of the throughput with fewer requests at once
FREEZE_TIMES, FREEZE_S = 4.0, 0.1  # a pause is long beyond so many times the median, and so many seconds
HALF = 0.5  # of the tokens that abandoned requests asked for
GATEWAY_SHARE = 0.03  # of the time
MIN_SAMPLES = 5  # of the server's metrics
MIN_COMPARED, MIN_WAVES = 20, 2  # requests of a row whose rate is compared, and how often all of them at once
ROOM = 0.75  # of the KV cache: with less in use, it has room for more requests
USUAL_CHAT = 8192  # tokens of a context that holds a usual conversation: no advice makes it shorter
LONG_CONTEXT = 8.0  # a context this many times as long as the longest request
SMALL_STEP = 2048  # prompt tokens in a step, the smallest default of the engines, where the step is not known


@rule(
    when="more of the same requests at once gave less than 90 % of the tokens per second, in each repeat, and the "
    "engine runs more of them at once",
    means="The server is beyond its best concurrency: each further request slows the others by more than it adds.",
    actions="as many sequences as gave the most; the others wait in the queue",
    requests=MIN_COMPARED,
)
def more_is_slower(row: RowFacts) -> RuleResult | None:
    best = faster_with_fewer(row)
    if best is None:
        return None
    rate, best_rate = row.row.pooled.output_tok_s or 0.0, best.row.pooled.output_tok_s or 0.0
    preempted, usage = row.most("preemptions") or 0.0, row.most("kv_usage_max") or 0.0
    why = "what the server does for each further request grows faster than the gain of a larger batch"
    if preempted:
        times = count(int(preempted), "time")
        why = f"the KV cache was {short_percent(usage)} full, and a request was preempted and computed again {times}"
    factor, at_once, least = best_rate / rate, best.in_flight, ""
    if preempted and (fits := row.sequences_that_fit) is not None and best.in_flight < fits < row.in_flight:
        at_once, least = fits, "at least "  # more than was measured, and still none is preempted
    text = f"{least}{figures(factor)} times the tokens per second, as measured with {best.in_flight} at once"
    expected = gain("output_tok_s", factor, text)
    return RuleResult(
        cost=1 - rate / best_rate,
        measured=f"{figures(rate)} tok/s with {count(row.in_flight, 'request')} at once, and {figures(best_rate)} with "
        f"{best.in_flight}",
        why=why,
        actions=[slower_action(row, at_once, expected)],
        values={
            "tok_s": rate, "in_flight": row.in_flight, "best_tok_s": best_rate, "best_in_flight": best.in_flight,
            "at_once": at_once, "preemptions": preempted,
        },
    )  # fmt: skip


def faster_with_fewer(row: RowFacts) -> RowFacts | None:
    """The row with fewer of the same requests at once and the highest throughput, if this one has clearly less."""
    rates = row.row.output_tok_s
    at_once = min(row.in_flight, row.whole("sequences") or row.in_flight)  # the engine queues the rest
    fewer = [other for other in row.neighbours if other.in_flight < at_once and other.row.output_tok_s]
    best = max(fewer, key=lambda other: min(other.row.output_tok_s), default=None)
    if best is None or not rates or row.load.arrivals is not None:
        return None
    if any(facts.row.pooled.succeeded < max(MIN_COMPARED, MIN_WAVES * facts.in_flight) for facts in (row, best)):
        return None
    return best if max(rates) < MUCH_SLOWER * min(best.row.output_tok_s) else None


def slower_action(row: RowFacts, sequences: int, expected: Reason | None) -> Action:
    """At most so many sequences at once."""
    return row.action(
        f"At most {count(sequences, 'sequence')} at once",
        {"sequences": sequences},
        gain=expected,
        risk="requests beyond it wait for their first token",
    )


@rule(
    when="requests waited in the server's queue for 20 % of their time while at most 75 % of the KV cache was in use; "
    "by fewer than 5 samples of the server's metrics: its slots and the time in its queue are known, 20 requests "
    "succeeded, and more were sent at once than it has slots for 20 % of their time; "
    "of a server without metrics: its slots are known, and no more answers than slots were sent at once, or the TTFT "
    "of fewer users is known; 20 requests, or one of each user or known slot, also if the end of the load cut them",
    means="The server computes fewer requests at once than its memory allows.",
    actions="more sequences or slots; where slots share a context, so many times the context as well, or a shorter "
    "context of each slot if the memory has no room for that",
)
def queue_with_room(row: RowFacts) -> RuleResult | None:
    split, usage = row.row.time, row.most("kv_usage_max")
    running, waiting, sequences = row.most("running_max"), row.most("waiting_max"), row.whole("sequences")
    slots = sequences or (None if running is None else int(running))
    if slots is None or row.in_flight <= slots or (usage or 0.0) > ROOM:
        return None
    sent = row.row.pooled.sent - row.row.pooled.failed - row.row.pooled.abandoned
    # The end of a short load cuts many requests: the server's samples show where they were.
    seen = row.row.pooled.succeeded if waiting is None else sent
    if seen < min(ENOUGH, sequences or row.in_flight):
        return None
    queued, beyond = _queued_part(row, slots), _beyond_slots(row, slots)[1]
    if queued < SHARE:
        return None
    fits = row.in_flight if not usage else min(row.in_flight, int(0.9 * slots / usage))
    waited_s, waited = None if split is None else split.queue_s, waiting if _is_sampled(row) and waiting else beyond
    measured = f"{count(slots, 'request')} ran at once and up to {waited:.0f} waited"
    if waited_s is not None:
        measured += f", {milliseconds(waited_s)} ms on average"
    if usage is not None:
        measured += f"; at most {short_percent(usage)} of the KV cache was in use"
    expected = _shorter_wait(row, waited_s) if fits == row.in_flight else None
    return RuleResult(
        cost=queued,
        measured=measured,
        why=f"{row.title} runs at most {slots} at once",
        actions=_more_at_once(row, slots, fits, expected),
        values={"slots": slots, "in_flight": row.in_flight, "queue_s": waited_s, "kv_usage": usage, "fits": fits},
    )


def _queued_part(row: RowFacts, slots: int) -> float:
    """The share of the requests' time that they waited for a slot; 0: they did not, or it is not known."""
    running, waiting = row.most("running_max"), row.most("waiting_max")
    if waiting is not None and not (waiting and _is_sampled(row)):
        return row.queued_part if _waited_for_slots(row, slots) else 0.0
    if running is not None and running <= slots / 2:  # something else keeps requests from running
        return 0.0
    return _later_part(row, slots) if waiting is None else row.queued_part


def _is_sampled(row: RowFacts) -> bool:
    return len(row.samples) >= MIN_SAMPLES


def _waited_for_slots(row: RowFacts, slots: int) -> bool:
    """Whether the server's times show a wait that its samples missed, and the slots are the reason."""
    is_timed = row.row.time is not None and row.row.time.queue_s is not None
    if not is_timed or row.whole("sequences") is None or row.row.pooled.succeeded < ENOUGH:
        return False
    fits, ran = row.sequences_that_fit, (1 - row.queued_part) * row.in_flight
    if (fits is not None and slots > ROOM * fits) or ran <= slots / 2:  # something else keeps requests from running
        return False
    return _beyond_slots(row, slots)[0] >= SHARE


def _beyond_slots(row: RowFacts, slots: int) -> tuple[float, int]:
    """Which share of the requests' time they were more than the slots, and by how many at most, by the client."""
    excess_s = total_s = 0.0
    most = 0
    for name in row.row.cells:
        rows = row.data.cells[name].rows
        times_s = np.concatenate([rows.sent_s, rows.sent_s + rows.ended_s])
        changes = np.repeat([1, -1], len(rows.sent_s))
        order = np.lexsort((changes, times_s))  # of two at the same time, the one that ended first
        at_once, steps_s = np.cumsum(changes[order])[:-1], np.diff(times_s[order])
        beyond = np.maximum(at_once - slots, 0)
        excess_s, total_s = excess_s + float(beyond @ steps_s), total_s + float(at_once @ steps_s)
        most = max(most, int(beyond.max(initial=0)))
    return (excess_s / total_s if total_s else 0.0), most


def _shorter_wait(row: RowFacts, waited_s: float | None) -> Reason | None:
    ttft_s = row.row.pooled.ttft.mean
    if waited_s is None or not ttft_s:
        return None
    least_s = max(0.0, ttft_s - waited_s)
    text = f"a mean TTFT of at least {milliseconds(least_s)} instead of {milliseconds(ttft_s)} ms: the wait in the "
    text += "queue ends, and more requests at once slow each other"
    return gain("ttft_mean", least_s / ttft_s, text)


def _more_at_once(row: RowFacts, slots: int, fits: int, expected: Reason | None) -> list[Action]:
    """So many sequences at once. Slots that share a context need one each: in more memory, or in that of shorter ones.

    Each slot keeps its context where the memory has room for it, or is not known.
    """
    context = row.whole("context") if row.shares_context else None
    changes: dict[str, object] = {"sequences": fits}
    do, risk = (
        f"Run up to {count(fits, 'sequence')} at once (now {slots})",
        "each answer is slower while more run at once",
    )
    if context is None:
        return [row.action(do, changes, gain=expected, risk=risk)]
    needed = slot_context(row)
    short = None if needed is None or 2 * needed > context else min(fits, slots * context // needed)
    startup, free = row.served.startup, _free_bytes(row)
    cache_gib = None if startup is None else startup.kv_cache_gib
    more_gib = None if cache_gib is None else cache_gib * (fits / slots - 1)
    memory = "more memory" if more_gib is None else f"{gib(more_gib * GIB)} more of memory"
    kept = row.action(do, changes | {"context": fits * context}, gain=expected, risk=f"{risk}; {memory}")
    if short is None or short <= slots:
        return [kept]
    do = f"{count(short, 'slot')} of {needed:,} tokens, in the memory of {count(slots, 'slot')} of {context:,}"
    risk = f"longer requests fail; {risk}"
    has_room = more_gib is None or free is None or more_gib * GIB <= free
    do = f"If the memory has no room for that: {do}" if has_room else do
    shorter_ones = row.action(do, {"sequences": short, "context": short * (needed or 0)}, risk=risk)
    return [kept, shorter_ones] if has_room else [shorter_ones]


def slot_context(row: RowFacts) -> int | None:
    """The tokens of a context that holds the row's requests and a usual conversation; None: not known, or not long."""
    startup = row.served.startup
    context = None if startup is None else startup.max_model_len
    if context is None or not len(row.tokens) or context < LONG_CONTEXT * float(row.tokens[-1]):
        return None
    return max(USUAL_CHAT, 1 << int(np.ceil(np.log2(1.5 * float(row.tokens[-1])))))


def _free_bytes(row: RowFacts) -> float | None:
    """The least memory that the server's GPUs had free during the load; None: not known."""
    cards = {str(gpu.get("render_node")).rpartition("/")[2]: gpu for gpu in row.data.run.server_machine.gpus}
    least: list[float] = []
    for load in (cell.machine_load for cell in row.cells if cell.machine_load is not None):
        free = [
            total - gpu.vram_max_bytes + (load.host_memory_min_bytes or 0) * (cards[name].get("integrated") is True)
            for name, gpu in load.gpus.items()
            if gpu.used and gpu.vram_max_bytes is not None
            and isinstance(total := cards.get(name, {}).get("vram_bytes"), int)
        ]  # fmt: skip
        least += [sum(free)] if free else []
    return min(least, default=None)


def _later_part(row: RowFacts, slots: int) -> float:
    """The share of the time by which the first token came later than where each request had a slot; 0: not known.

    A slot is free where fewer requests were sent at once. Else the fastest of this row had one, if answers came from no
    more requests at once than there are slots.
    """
    free = [other.row.pooled.ttft.mean for other in row.neighbours if other.in_flight <= slots]
    ttft_s, e2e_s = row.row.pooled.ttft.mean, row.row.pooled.e2e.mean
    alone_s = max((mean_s for mean_s in free if mean_s is not None), default=None)
    if alone_s is None and _answers_at_once(row) <= slots:
        alone_s = row.row.pooled.ttft.min
    if alone_s is None or ttft_s is None or not e2e_s or row.load.arrivals is not None:
        return 0.0
    return min((ttft_s - alone_s) / e2e_s, 1 - slots / row.in_flight)


def _answers_at_once(row: RowFacts) -> int:
    """How many answers came at the same time at most."""
    most = 0
    for name in row.row.cells:
        rows = row.data.cells[name].rows
        rows = rows.where(rows.chunks > 1)
        starts, ends = np.sort(rows.sent_s + rows.first_chunk_s), np.sort(rows.sent_s + rows.last_chunk_s)
        at_once = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, "right")
        most = max(most, int(at_once.max(initial=0)))
    return most


@rule(
    when="pauses of over 4 times the median, and of 0.1 s or more, took 20 % of the time of answers, without "
    "preemptions, one step computes more than 256 tokens of a prompt, and another request got its first token during "
    "at least half of the answers with such a pause",
    means="While a long prompt is computed, all running answers wait: each step has tokens of prompts and of answers.",
    actions="fewer tokens in a step, so that prompts are computed in smaller chunks",
    requests=ENOUGH,
)
def prompts_freeze_answers(row: RowFacts) -> RuleResult | None:
    gaps = join_gaps(row.data.cells[name].counted_gaps for name in row.row.cells)
    numbers, running = row.row.pooled, row.most("running_max")
    if not gaps.n or not numbers.prompt_tokens or row.most("preemptions"):
        return None
    at_once = [row.in_flight, row.whole("sequences"), None if running is None else int(running)]
    if min(number for number in at_once if number is not None) < 2:  # no answer is under way while a prompt is computed
        return None
    usual_s, part = gaps.percentile_s(500), _paused(gaps, gaps.percentile_s(500))
    if part < SHARE or usual_s <= 0:
        return None
    setting = "batch" if row.engine is not None and "batch" in row.engine.settings else "batched_tokens"
    step = row.whole(setting) or row.default(setting)
    prompt = max(1.0, (numbers.prompt_tokens - (numbers.cached_tokens or 0)) / numbers.succeeded)
    chunk = min(SMALL_STEP if step is None else step, prompt)  # tokens of a prompt that one step computes
    less = max(256, int(chunk) // 4)
    # One small step computes the whole prompt, or no prompt was computed meanwhile: the pauses have another reason.
    if less >= chunk or _interrupted_part(row, usual_s) < HALF:
        return None
    size = "whose size is not known" if step is None else f"of up to {chunk:,.0f} tokens"
    return RuleResult(
        cost=part,
        measured=f"pauses of up to {milliseconds(gaps.max_s)} ms between chunks, with a median of "
        f"{milliseconds(usual_s)} ms; long ones took {short_percent(part)} of the time of answers",
        why=f"prompts of {prompt:,.0f} tokens are computed in steps {size}",
        actions=[
            row.action(
                f"At most {less:,} tokens in a step",
                {setting: less},
                gain=None if step is None else shorter("gap_max", "longest pauses", gaps.max_s, less / chunk),
                risk="the first token of long prompts comes later",
            )
        ],
        values={"gap_p50_s": usual_s, "gap_max_s": gaps.max_s, "share": part, "batched_tokens": step, "less": less},
    )


def _interrupted_part(row: RowFacts, usual_s: float) -> float:
    """The share of the answers with a long pause during which another request of the server got its first token."""
    paused = interrupted = 0
    for cell in row.cells:
        rows = row.data.cells[cell.id].counted
        rows = rows.where(rows.good & (rows.longest_gap_s > FREEZE_TIMES * usual_s) & (rows.longest_gap_s >= FREEZE_S))
        firsts_s, zero_s = _first_tokens_s(row, cell.group or cell.id), row.data.cells[cell.id].clock.wall_s(0.0) or 0.0
        begin_s, end_s = (zero_s + rows.sent_s + chunk_s for chunk_s in (rows.first_chunk_s, rows.last_chunk_s))
        others = np.searchsorted(firsts_s, end_s, "left") - np.searchsorted(firsts_s, begin_s, "right")
        paused, interrupted = paused + len(rows), interrupted + int((others > 0).sum())
    return interrupted / paused if paused else 0.0


def _first_tokens_s(row: RowFacts, group: str) -> Floats:
    """The times of the first tokens in the cells that ran together, warm-up and other loads included; increasing."""
    times_s = []
    for cell in row.summary.cells:
        if (cell.group or cell.id) == group and cell.id in row.data.cells:
            records = row.data.cells[cell.id]
            rows = records.rows.where(records.rows.chunks > 0)
            times_s.append((records.clock.wall_s(0.0) or 0.0) + rows.sent_s + rows.first_chunk_s)
    return np.sort(np.concatenate([*times_s, []]))


def _paused(gaps: Gaps, usual_s: float) -> float:
    """The share of the time in gaps that are over FREEZE_TIMES times as long as usual, without the usual part."""
    if not gaps.total_s or not len(gaps.counts):
        return 0.0
    middle_s = gaps.middles_s()
    long = (middle_s > FREEZE_TIMES * usual_s) & (middle_s >= FREEZE_S)
    return float(((middle_s - usual_s) * gaps.counts)[long].sum()) / gaps.total_s


@rule(
    when="users left before the answer was complete, and the server computed at least half of what they did not read",
    means="The server does not notice, or ignores, that the user is gone, and computes tokens that are never read.",
    actions="cancel on disconnect: no proxy that hides it; shorter answers",
    requests=ENOUGH,
)
def abandoned_computed(row: RowFacts) -> RuleResult | None:
    if not row.row.pooled.abandoned:
        return None
    unread = extra = computed = 0.0
    for cell in row.cells:
        least, most = generated_tokens(row.data.cells[cell.id].rows)
        counted = cell.server_load.generated_tokens
        if counted is None or most is None or cell.mix is not None or cell.stage is not None:
            return None
        unread, extra, computed = unread + most - least, extra + max(0.0, counted - least), computed + counted
    if not unread or extra < HALF * unread or not computed:
        return None
    return RuleResult(
        cost=extra / computed,
        measured=f"{count(row.row.pooled.abandoned, 'request was', 'requests were')} abandoned; the server computed "
        f"{extra:,.0f} tokens that no user read, {short_percent(extra / computed)} of all",
        why="a closed connection does not stop a request, for instance behind a proxy that keeps its own connection "
        "open",
        actions=[
            row.action(
                "Let clients connect to the server directly, or a proxy that passes the end of a connection on; "
                "else bound the length of answers",
                settings={row.load_key: f"output_tokens: {max(16, _typical_read(row))}"},
                risk="answers that users would read to the end are cut",
            )
        ],
        values={"abandoned": row.row.pooled.abandoned, "unread_tokens": unread, "computed_tokens": extra},
    )


def _typical_read(row: RowFacts) -> int:
    rows = [row.data.cells[name].counted for name in row.row.cells]
    chunks = np.concatenate([part.chunks[~part.good] for part in rows])
    return int(np.median(chunks)) if len(chunks) else 0


@rule(
    when="connections of 1 % of the requests needed a second SYN, or the listen queue of the server overflowed as "
    "often",
    means="The program accepts connections too slowly for its listen queue; a lost SYN is sent again after 1 s.",
    actions="fewer new connections at once; a proxy that keeps connections",
    requests=ENOUGH,
)
def listen_queue_full(row: RowFacts) -> RuleResult | None:
    numbers = row.row.pooled
    overflows = sum(cell.machine_load.listen_overflows or 0 for cell in row.cells if cell.machine_load)
    retried = max(numbers.connect_retried, overflows)
    if retried < 0.01 * numbers.sent or not retried:
        return None
    waited = f"{numbers.connect_retried:,} of {numbers.sent:,} requests waited 1 s or more for a connection"
    # The kernel's counter is not always readable, and does not see the queue of a proxy: 0 says nothing.
    counted = f"; the kernel counted {count(overflows, 'overflow')} of the listen queue" if overflows else ""
    busy_s, connect = (numbers.e2e.mean or 0.0) * numbers.succeeded, numbers.connect
    waited_s = (connect.mean or 0.0) * connect.n
    return RuleResult(
        cost=waited_s / (waited_s + busy_s) if waited_s and busy_s else None,
        measured=waited + counted,
        why="the program's listen queue is short, and a connection is opened for each request",
        actions=[
            row.action(
                "Send fewer requests at the same moment, or put a proxy that keeps its connections in front",
                settings={row.load_key: "in_flight: 5" if row.load.user == "batch" else "ramp_s: 30"},
                risk="fewer requests at once",
            )
        ],
        values={"retried": numbers.connect_retried, "overflows": overflows or None},
    )


@rule(
    when="a gateway is in front of the server, and takes 3 % of the time or more",
    means="Each request and each chunk passes through one more program.",
    actions="more processes of the gateway, or requests that go to the server itself",
    requests=ENOUGH,
)
def gateway_share(row: RowFacts) -> RuleResult | None:
    split, gateway = row.row.time, row.data.run.scenario.servers[row.row.server].gateway
    if gateway is None:
        return None
    direct = next((other for other in _alone(row) if other.row.pooled.e2e.mean), None)
    mine_s = row.row.pooled.e2e.mean
    if direct is not None and mine_s and direct.row.pooled.e2e.mean:
        direct_s = direct.row.pooled.e2e.mean
        part, without = 1 - direct_s / mine_s, f"{milliseconds(direct_s)} ms without ({direct.row.server})"
        measured = f"{milliseconds(mine_s)} ms for a request through the gateway, {without}"
        text = f"{short_percent(part)} less time, as measured without the gateway"
        expected = gain("e2e_mean", direct_s / mine_s, text)
    elif split is not None and split.api_s is not None:
        part, expected = split.api_s / split.e2e_s, None
        measured = f"{milliseconds(split.api_s)} of {milliseconds(split.e2e_s)} ms were spent outside the engine"
    else:
        return None
    if part < GATEWAY_SHARE:
        return None
    action = row.action(
        "Send requests to the server itself where the gateway is not needed; else give the gateway more processes",
        settings={row.server_key: "gateway: null"},
        gain=expected,
        risk="no keys, limits and logs of the gateway",
    )
    return RuleResult(part, measured, f"the gateway {gateway.template}", [action], {"share": part})


def _alone(row: RowFacts) -> list[RowFacts]:
    """Rows of the same load on the same server without its gateway."""
    servers, mine = row.data.run.scenario.servers, row.data.run.scenario.servers[row.row.server]
    rows = [other for other in row.run_rows if other.row.load == row.row.load and other.row.invalid is None]
    return [
        other
        for other in rows
        if (server := servers[other.row.server]).gateway is None
        and (server.template, server.variables) == (mine.template, mine.variables)
    ]


@rule(
    when="20 % of the time of requests was spent outside the engine, without a gateway",
    means="The program that takes requests, makes tokens of texts and sends the answers is the limit, not the GPU.",
    actions="more API processes; a free core; fewer and larger chunks",
    requests=ENOUGH,
)
def api_process(row: RowFacts) -> RuleResult | None:
    split = row.row.time
    if row.row.limited_by != "api" or split is None or split.api_s is None:
        return None
    if row.data.run.scenario.servers[row.row.server].gateway is not None:
        return None
    part = split.api_s / split.e2e_s
    return RuleResult(
        cost=part,
        measured=f"{milliseconds(split.api_s)} of {milliseconds(split.e2e_s)} ms of a request were spent outside the "
        f"engine",
        why="the API process, the network, or the load generator's machine is busy",
        actions=[row.action("More API processes, and a free core for each", {"api_processes": None})],
        values={"api_s": split.api_s, "e2e_s": split.e2e_s},
    )


RULES = (
    more_is_slower, queue_with_room, prompts_freeze_answers, abandoned_computed, listen_queue_full, gateway_share,
    api_process,
)  # fmt: skip
