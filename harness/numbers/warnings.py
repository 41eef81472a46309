"""Notes on the cells of a run and on the run: what readers of a valid run should know."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import numpy as np
from msgspec.structs import replace

from harness.base.process import is_loopback
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, date_time, duration, figures, milliseconds, percent, verb
from harness.failures.diagnosis import scan_text
from harness.numbers import formulas
from harness.numbers.load_generator import Limited, read_clock_answers
from harness.numbers.prefill import blank_starts, is_first_token_blank
from harness.numbers.summary import CellSummary, ClientLimit, Row
from harness.numbers.validity import (
    MAX_RESENT,
    Evidence,
    counts_text,
    ended_normally,
    finish_reasons,
    hang_reasons,
    name_counts,
    refused_reasons,
    resent_reason,
    throttling_reasons,
)
from harness.records.manifest import RemoteMachine, Run, ServedBy
from harness.records.records import AT_MOST, KNOWN_FINISHES, MAX_CPU, BadField, ProcessMark
from harness.records.run_data import RunData
from harness.records.samples import MAX_GAP_S, KernelLine, MachineLoad
from harness.scenario import Load, RequestTokens, is_open_loop, max_concurrency

MAX_COALESCED = 0.01
MAX_FINGERPRINTS = 0.5  # of the answers that have one: with more, it is the name of an answer
MAX_OPENED = 0.10  # of the requests
MAX_ENERGY_DIFFERENCE = 0.10  # between power readings and the GPU's energy counter
GAP_S = 3600.0  # after a pause this long, the machine may be warmer or busy
_NO_CHANNEL = ("finish_reason", "usage")  # fields of another type that have no text
# Failures of processes, which may be others, and throttling, which is checked by itself.
_OTHERS = ("kernel.segfault", "host.oom_kill", "kernel.page_fault", "kernel.throttled")
HOST_CPU_FULL = 0.95  # of all cores, on average
_SAMPLED = {  # by file: what its samples show
    "metrics.jsonl": "the server's own numbers (its token counter, its queue, where the time goes)",
    "telemetry.jsonl": "GPU, memory, heat, energy and the kernel log",
}


def _context_note(served: ServedBy, tokens: RequestTokens | None) -> Iterator[Reason]:
    limit = None if served.startup is None else served.startup.max_model_len
    if limit is None or tokens is None or tokens.is_estimate:
        return
    if tokens.prompt_max + tokens.output_max > limit:
        needed = tokens.prompt_max + tokens.output_max
        text = f"a request has up to {needed:,} tokens with its answer, and the server takes {limit:,} of one request: "
        text += "longer ones are refused or end early"
        yield because("context_short", text, needed=needed, limit=limit)


def queue_notes(served: ServedBy, loads: Sequence[Load]) -> Iterator[Reason]:
    """Yield a note if one of the loads has more requests in flight than the server, or its engine, works on at once."""
    in_flight, slots = max(map(max_concurrency, loads)), served.effective.get("parallel")
    if isinstance(slots, int) and in_flight > slots:
        text = f"up to {in_flight:,} requests are in flight, and the engine has {count(slots, 'slot')}: the others "
        text += "wait in its queue. For more, raise the engine's --parallel, and the context with it"
        yield because("engine_slots", text, in_flight=in_flight, slots=slots)
    if served.max_parallel is not None and in_flight > served.max_parallel:
        text = f"up to {in_flight:,} requests were in flight, and {served.version or 'the server'} serves "
        text += f"{served.max_parallel} at once: above that the numbers include its own queue"
        yield because("own_queue", text, in_flight=in_flight, server=served.version, at_once=served.max_parallel)


def _telemetry_notes(load: MachineLoad) -> Iterator[Reason]:
    """Gaps between samples, and an energy that contradicts the GPUs' own counters."""
    if load.gap_max_s >= MAX_GAP_S:
        gap_s, took_s = load.gap_max_s, load.took_max_s
        took = "" if took_s is None else f" (reading its files took up to {took_s:.1f} s)"
        text = f"no telemetry sample for {gap_s:.1f} s of the measured time{took}: the energy is not known"
        yield because("telemetry_gap", text, gap_s=gap_s, took_s=took_s)
    power_j, counter_j = load.energy_j, load.counted_energy_j
    if power_j and counter_j and abs(power_j - counter_j) > MAX_ENERGY_DIFFERENCE * counter_j:
        text = f"the energy is {power_j:,.0f} J by the power readings and {counter_j:,.0f} J by the GPUs' own "
        text += f"counters: they differ by more than {percent(MAX_ENERGY_DIFFERENCE, 0)}"
        yield because("energy_differs", text, power_j=power_j, counter_j=counter_j, max_share=MAX_ENERGY_DIFFERENCE)


def cell_notes(evidence: Evidence, limited: Sequence[Limited]) -> list[Reason]:
    """The notes on a cell, first those on where the load generator limited it."""
    notes = [
        *(note for _, note in limited),
        *throttling_reasons(evidence, invalid=False),
        *hang_reasons(evidence, invalid=False),
        *_server_notes(evidence),
        *_first_token_notes(evidence),
        *_read_notes(evidence, [limit for limit, _ in limited]),
        *_connection_notes(evidence),
        *_answer_notes(evidence),
        *_missing_notes(evidence),
        *([evidence.clients] if evidence.clients is not None and evidence.clients.code == "clients_unchecked" else []),
    ]
    return [replace(note, cell=evidence.cell) for note in notes]


def _server_notes(evidence: Evidence) -> Iterator[Reason]:
    """The machine, the server's start and its warm-up, and impossible values in its answers."""
    if evidence.machine_load is not None:
        yield from _telemetry_notes(evidence.machine_load)
    if evidence.ran is not None:
        notes, is_messages = evidence.ran.served_by.notes, evidence.load.endpoint == "messages"
        yield from (note for note in notes if is_messages or note.code != "engine_direct")
        yield from _context_note(evidence.ran.served_by, evidence.tokens)
        # Of slots, the finding `queue_with_room` says what they cost.
        yield from (
            note for note in queue_notes(evidence.ran.served_by, [evidence.load]) if note.code != "engine_slots"
        )
    if (warmup := evidence.warmup) is not None and warmup.steady is not None:
        after = "its bound" if warmup.seconds is None else f"{warmup.seconds:.1f} s"
        sent = count(warmup.requests, "warm-up request")
        values = {"requests": warmup.requests, "seconds": warmup.seconds}
        if warmup.steady:
            yield because("steady", f"the server was steady after {after} and {sent}", **values)
        else:
            text = f"the server was NOT steady after {after} and {sent}, the bound of the warm-up (max_s, "
            text += "max_requests): the measured numbers may still drift"
            yield because("not_steady", text, **values)
    for requests, bad in evidence.data.bad.values():
        if bad.code == "type" and bad not in _unread(evidence):
            text = f"{bad.field} of the server's answers is not possible in {count(requests, 'request')}: it has a "
            text += f"value of another type ({bad.got}), and counts as missing"
            yield because("value_of_other_type", text, field=bad.field, requests=requests, got=bad.got)
        elif bad.code == "zero":
            text = f"{bad.field} of the server's answers is 0 in {count(requests, 'request')}, which cannot be: it "
            text += "counts as missing"
            yield because("value_zero", text, field=bad.field, requests=requests)


def _unread(evidence: Evidence) -> list[BadField]:
    """The fields whose text could not be read, if there are any: those of a known channel, and unknown ones."""
    if not (evidence.data.rows.unread > 0).any():
        return []
    bad = [field for _, field in evidence.data.bad.values()]
    return [
        bad_field
        for bad_field in bad
        if bad_field.code == "unknown" or (bad_field.code == "type" and not bad_field.field.startswith(_NO_CHANNEL))
    ]


def _first_token_notes(evidence: Evidence) -> Iterator[Reason]:
    """Generated tokens that were not seen, and blank first tokens."""
    good, succeeded = evidence.good, evidence.numbers.succeeded
    if unread := int((good.unread > 0).sum()):
        fields = [bad.field for bad in _unread(evidence)]
        text = f"{unread:,} of {count(succeeded, 'answer')} had text in no known form ({', '.join(fields)}): the time "
        text += "of the first token is not known, so TTFT, TPOT and chunk gaps are missing"
        yield because("text_unread", text, answers=unread, requests=succeeded, fields=fields)
    if is_first_token_blank(evidence.data):
        blank, alone = blank_starts(evidence.data)
        blanks = good.where(formulas.starts_blank(good))
        ttft_s, text_s = float(np.median(blanks.first_chunk_s)), float(np.median(blanks.first_text_s))
        text = f"the first token of {blank:,} of {count(alone, 'answer')} is a blank after {milliseconds(ttft_s)} ms, "
        text += f"and the first text came after {milliseconds(text_s)} ms, with no other request in flight: the blank "
        text += "was probably sent before the prompt was computed. No prefill speed and no share of the hardware is "
        text += "given; TPOT and tok/s per user include this wait"
        yield because("first_token_blank", text, answers=blank, of=alone, ttft_s=ttft_s, text_s=text_s)
    hidden = formulas.hides_reasoning(good)
    if hidden.any():
        tokens = int(good.reasoning_tokens[hidden].sum())
        text = f"the server counted {count(tokens, 'reasoning token')} in {count(int(hidden.sum()), 'answer')} and did "
        text += "not send them: TTFT includes their time, and TPOT is of the other tokens"
        yield because("reasoning_hidden", text, answers=int(hidden.sum()), tokens=tokens)


def _read_notes(evidence: Evidence, limits: Sequence[ClientLimit]) -> Iterator[Reason]:
    """Chunks whose times are not their own."""
    good, succeeded = evidence.good, evidence.numbers.succeeded
    if by_read := read_clock_answers(evidence.data):
        text = f"the chunk times of {by_read:,} of {count(succeeded, 'request')} are those of the read, not of the "
        text += "kernel"
        yield because("read_clock", text, answers=by_read, requests=succeeded)
    joined, chunks = float((good.coalesced - np.nan_to_num(good.coalesced_late)).sum()), float(good.chunks.sum())
    if joined > MAX_COALESCED * chunks and all(limit.what != "shared_reads" for limit in limits):
        text = f"{percent(joined / chunks, 1)} of the chunks arrived together with a later one (usually the server "
        text += "or a proxy sends several at once): their times are upper bounds"
        yield because("shared_reads", text, share=joined / chunks)


def _connection_notes(evidence: Evidence) -> Iterator[Reason]:
    """Connections that were opened, waited for or closed, and waits that the server asked for."""
    numbers, load, machine = evidence.numbers, evidence.load, evidence.machine_load
    opened, succeeded = numbers.connect, numbers.succeeded
    # Each load process opens some connections until it knows that the server keeps them open.
    if opened.n > max(2 * max_concurrency(load) + 2 * load.processes, MAX_OPENED * succeeded):
        mean_s, max_s = opened.mean or 0.0, opened.max or 0.0
        text = f"{opened.n:,} of {count(succeeded, 'request')} opened a connection of their own, which took "
        text += f"{figures(1000 * mean_s)} ms on average and {figures(1000 * max_s)} ms at most. "
        text += "Latencies exclude it; wall time and rates include it"
        yield because("connections_opened", text, opened=opened.n, requests=succeeded, mean_s=mean_s, max_s=max_s)
    retried, overflows = numbers.connect_retried, (machine.listen_overflows if machine is not None else None) or 0
    if retried or overflows:
        text = "the server's listen queue overflowed"
        if retried:
            text += f": {count(retried, 'connection')} waited 1 s or more for the server to accept, which is in wall "
            text += "time, rates and latencies from schedule"
        if overflows:
            text += f"; the kernel counted {count(overflows, 'overflow')} in the server's container, and where "
            text += "Docker's proxy forwards the port, TTFT and E2E latency include the wait"
        text += ". Put a gateway that keeps connections in front of the server, or let fewer requests arrive at once"
        yield because("listen_queue", text, retried=retried, overflows=overflows, open_loop=is_open_loop(load))
    if 0 < numbers.resent <= MAX_RESENT * numbers.sent:
        yield resent_reason(numbers)
    if numbers.retry_after:
        total_s, waited = numbers.retry_after_s or 0.0, "their users waited as long as asked, or until the load ended"
        if is_open_loop(load):
            waited = "only continued conversations waited, the schedule did not"
        text = f"after {count(numbers.retry_after, 'request')} the server asked for a wait (Retry-After), "
        text += f"{total_s:,.1f} s in total: {waited}. Latencies exclude it; wall time and rates include it"
        values = {"requests": numbers.retry_after, "total_s": total_s, "open_loop": is_open_loop(load)}
        yield because("retry_after", text, **values)


def _answer_notes(evidence: Evidence) -> Iterator[Reason]:
    """Tokens, finish reasons and content of the answers."""
    good, numbers, succeeded = evidence.good, evidence.numbers, evidence.numbers.succeeded
    uncounted = int(np.isnan(good.output_tokens).sum())
    if uncounted and evidence.load.endpoint != "embeddings":
        text = f"the server did not report the tokens of {uncounted:,} of {count(succeeded, 'request')}: tok/s is not "
        text += "known"
        yield because("tokens_unknown", text, answers=uncounted, requests=succeeded)
    yield from finish_reasons(evidence, invalid=False)
    yield from refused_reasons(evidence, invalid=False)
    yield from _fingerprint_notes(evidence)
    if finishes := name_counts(good.finish.where(~good.finish.is_in(*KNOWN_FINISHES))):
        text = f"{finishes.total():,} of {count(succeeded, 'answer')} ended with a finish reason that the OpenAI API "
        text += f"does not have: {counts_text(dict(finishes.most_common()))}. They count as complete"
        values = {"answers": finishes.total(), "requests": succeeded, "finishes": dict(finishes.most_common())}
        yield because("unknown_finish", text, **values)
    fewer = int(formulas.has_fewer_tokens(good).sum())
    if fewer and not evidence.imported:
        text = f"the server counted fewer tokens than it sent pieces of text in {count(fewer, 'answer')} of "
        text += f"{succeeded:,}: its count, and every rate that uses it, is too low"
        yield because("tokens_too_few", text, answers=fewer, requests=succeeded)
    if numbers.reasoning_tokens and numbers.output_tokens:
        share = numbers.reasoning_tokens / numbers.output_tokens
        text = f"{percent(share, 0)} of the {numbers.output_tokens:,} output tokens were reasoning"
        yield because("reasoning_share", text, share=share, tokens=numbers.output_tokens)
    if numbers.tool_calls is not None:
        text = f"{count(succeeded, 'answer')} had {count(numbers.tool_calls, 'tool call')}"
        text += f", {numbers.tool_calls_valid or 0:,} of them valid" if numbers.tool_calls else ""
        text += "; the planned steps were sent all the same"
        yield because("tool_calls", text, answers=succeeded, calls=numbers.tool_calls, valid=numbers.tool_calls_valid)


def _fingerprint_notes(evidence: Evidence) -> Iterator[Reason]:
    """Answers of several fingerprints: a gateway hands the requests to servers that differ, or the server changed.

    Only inside a cell, which has one start of the server. A fingerprint for each answer says nothing.
    """
    named = evidence.good.where(evidence.good.fingerprint.is_set)
    names = name_counts(named.fingerprint)
    is_one_model = not isinstance(evidence.load.model, list)
    if len(names) < 2 or len(named.fingerprint.counts()) > MAX_FINGERPRINTS * len(named) or not is_one_model:
        return
    codes = named.fingerprint.codes[np.argsort(named.sent_s, kind="stable")]
    changes = int((codes[1:] != codes[:-1]).sum())
    alternate = changes >= len(names)  # one of them came back
    which = f"change {count(changes, 'time')} and come back: servers with different builds or settings answer, such as "
    which += "replicas behind a gateway. Measure each of them alone"
    if not alternate:
        which = "come one after the other: the server was replaced or changed while it was measured"
    text = f"the answers name {len(names)} values of system_fingerprint ({counts_text(dict(names.most_common()))}), "
    text += f"which {which}"
    values = {"fingerprints": dict(names.most_common()), "changes": changes, "alternate": alternate}
    yield because("fingerprints_differ", text, **values)


def _missing_notes(evidence: Evidence) -> Iterator[Reason]:
    """Latencies that are not known, and requests that did not end."""
    numbers, load = evidence.numbers, evidence.load
    for sample, what in ((numbers.ttft, "TTFT"), (numbers.ttfo, "TTFO")):
        if sample.unknown:
            total = sample.known_count + sample.unknown
            text = f"{what} is unknown for {sample.unknown:,} of {count(total, 'request')} (not streamed, nothing "
            text += "visible, or in no known form): checks must hold whether or not these meet the bound"
            yield because("latency_unknown", text, what=what, requests=sample.unknown, of=total)
    in_few = int((formulas.latency_states(evidence.good, "tpot")[1] == AT_MOST).sum())
    if in_few > MAX_COALESCED * numbers.succeeded:
        text = f"TPOT is not known for {in_few:,} of {count(numbers.succeeded, 'answer')}: they came in fewer than "
        text += f"{formulas.MIN_ARRIVALS} pieces with several tokens each. Checks take E2E / tokens as its "
        text += "upper bound"
        yield because("few_pieces", text, answers=in_few, requests=numbers.succeeded)
    if numbers.abandoned:
        abandoned = count(
            numbers.abandoned, "request was abandoned by its user", "requests were abandoned by their users"
        )
        text = f"{abandoned}: in percentiles a latency that had not ended is longer than their wait"
        yield because("abandoned", text, requests=numbers.abandoned)
    if load.requests is None and numbers.unfinished:
        drained = ended_normally(evidence.ran, evidence.marks) and evidence.stopped_after_s is None
        when = f"within drain_s ({load.drain_s:g} s) after the end" if drained else "before the load was ended early"
        text = f"{count(numbers.unfinished, 'request')} did not finish {when}: in percentiles each is longer than "
        text += "its age"
        yield because("unfinished", text, requests=numbers.unfinished, drain_s=load.drain_s if drained else None)


# Notes on a run as a whole.


def number_sessions(run: Run) -> dict[str, int]:
    """The session of each cell that ended, from 0. A new session starts after a resume or a pause of GAP_S."""
    sessions: dict[str, int] = {}
    session, ended_s = 0, math.inf
    for cell in sorted(run.ran.values(), key=lambda cell: cell.started_wall_s):
        was_resumed = any(ended_s < resumption.wall_s <= cell.started_wall_s for resumption in run.resumed)
        session += was_resumed or cell.started_wall_s - ended_s >= GAP_S
        sessions[cell.id] = session
        ended_s = cell.ended_wall_s or cell.started_wall_s
    return sessions


def damaged_sample_notes(damaged: Mapping[str, Sequence[int]]) -> Iterator[Reason]:
    """A note on each file of samples with damaged lines, by the numbers of these lines, and what is unknown for it."""
    for file, lines in damaged.items():
        if lines:
            text = f"{file}: {count(len(lines), 'line')} cannot be read (first: {', '.join(map(str, lines[:5]))}), so "
            text += f"{_SAMPLED[file]} may be missing or incomplete"
            yield because("unreadable_samples", text, file=file, lines=list(lines[:5]), total=len(lines))


def telemetry_notes(
    run: Run, cells: Sequence[CellSummary], sampled: Collection[str], *, is_damaged: bool = False
) -> Iterator[Reason]:
    """A note on a server elsewhere whose machine was not sampled: no GPU, no energy, no kernel log.

    `sampled`: the cells with samples of a machine. `is_damaged`: there are others that cannot be read.
    """
    measured = [cell for cell in cells if cell.id in run.ran and cell.failed is None]
    if run.remote is not None:
        yield from _remote_machine_notes(run.remote)
        urls = dict.fromkeys(run.ran[cell.id].served_by.url for cell in measured)
        notes = [note for url in urls if (note := other_machine_note(url, run.machine.name, run.remote)) is not None]
        yield from notes[:1]
        lost = sum(cell.machine_load is None for cell in measured)
        if lost and not is_damaged:
            cells_text = f"{lost:,} of {count(len(measured), 'cell')}"
            text = f"no {'valid ' if run.remote.rejected else ''}telemetry came from the server's machine "
            text += f"{run.remote.machine.name} in the measured time of "
            text += f"{cells_text}: heat and energy are not known there"
            yield because("telemetry_lost", text, machine=run.remote.machine.name, cells=lost, of=len(measured))
        return
    is_elsewhere = bool(measured) and all(run.ran[cell.id].served_by.template is None for cell in measured)
    if run.origin is None and is_elsewhere and not is_damaged and not any(cell.id in sampled for cell in measured):
        text = "the server is on another machine: its GPU, its memory and its kernel log were not sampled, so heat, "
        text += "energy and the share of the hardware are not known. `--telemetry ssh://HOST` samples them there"
        yield because("telemetry_elsewhere", text)


def other_machine_note(url: str, own_name: str, remote: RemoteMachine) -> Reason | None:
    """Return a note on a server whose address is one of this machine, while telemetry is that of another one.

    With an ssh tunnel to that machine both are right, which the address does not show; so it is a note only.
    """
    address, name = urlsplit(url).hostname or "", remote.machine.name
    if not remote.host or not is_loopback(address) or is_loopback(remote.host) or name == own_name:
        return None
    text = f"the server's address, {address}, is on this machine, and GPUs, memory and power are those of {name} "
    text += f"(ssh://{remote.host}): they are the server's only if a tunnel leads from the address to {name}"
    return because("telemetry_other_machine", text, address=address, machine=name, host=remote.host)


def _remote_machine_notes(remote: RemoteMachine) -> Iterator[Reason]:
    """Notes on a lost connection to the server's machine, and on facts that it sent and that cannot be."""
    if remote.losses:
        first, times = remote.losses[0], len(remote.losses)
        text = f"telemetry: the connection to {first.host} was lost after {first.after_s:.0f} s: {first.reason}"
        if times > 1:
            text += f" (and {count(times - 1, 'more time')})"
        gone_s = sum(loss.lasted_s for loss in remote.losses if loss.lasted_s is not None)
        is_back = all(loss.lasted_s is not None for loss in remote.losses)
        text += f"; without samples for {gone_s:.0f} s" if is_back else "; it was not open again at the end"
        yield because(
            "telemetry_connection_lost", text, host=first.host, after_s=first.after_s, reason=first.reason, times=times,
            lost_s=gone_s if is_back else None,
        )  # fmt: skip
    if remote.rejected:
        text = f"{count(remote.rejected, 'line')} came from the machine {remote.machine.name} that "
        text += f"{verb(remote.rejected, 'is', 'are')} no valid telemetry; the first: '{remote.first_rejected}'"
        yield because(
            "telemetry_rejected", text, machine=remote.machine.name, lines=remote.rejected, first=remote.first_rejected
        )
    if remote.dropped:
        text = f"the machine {remote.machine.name} sent facts or samples that cannot be, which count as not known: "
        text += f"{', '.join(remote.dropped)}"
        yield because("telemetry_invalid_facts", text, machine=remote.machine.name, facts=remote.dropped)


def session_notes(run: Run) -> Iterator[Reason]:
    """Notes on resumptions of a run, and on pauses of hours between its cells."""
    if run.resumed:
        times, repeated = len(run.resumed), len({cell for resumption in run.resumed for cell in resumption.again})
        cells = count(repeated, "incomplete or invalid cell was", "incomplete or invalid cells were")
        text = f"the run was resumed {count(times, 'time')} (last: {date_time(run.resumed[-1].wall_s)}); {cells} "
        text += "measured again"
        at = [resumption.wall_s for resumption in run.resumed]
        yield because("resumed", text, times=times, at=at, again=repeated)
    ordered = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    pauses_s = [
        after.started_wall_s - (before.ended_wall_s or before.started_wall_s)
        for before, after in itertools.pairwise(ordered)
    ]
    if long_pauses_s := [pause_s for pause_s in pauses_s if pause_s >= GAP_S]:
        hours = max(long_pauses_s) / 3600
        text = f"up to {hours:.1f} hours are between cells of this run: what changed on the machine meanwhile widens "
        text += "the intervals, and rows whose repeats are not interleaved across such a pause have a provisional "
        text += "verdict"
        yield because("hours_apart", text, gaps=len(long_pauses_s), hours=hours)


def budget_notes(run: Run) -> Iterator[Reason]:
    """A note on a run whose time, and not its scenario, decided the number of repeats."""
    if run.budget_s is not None:
        repeats = max((cell.repeat for cell in run.cells), default=0)
        text = f"the budget of {duration(run.budget_s)} decided the number of repeats: {repeats}"
        yield because("budget", text, seconds=run.budget_s, repeats=repeats)


def failed_setting_notes(rows: Iterable[Row]) -> list[Reason]:
    """A note on each failed setting of a sweep. All rows of a server that did not start share one note."""
    notes: dict[tuple[str, str], Reason] = {}
    for row in rows:
        if row.failed is not None:
            name = row.server if row.failed.code == "setting_not_started" else row.name
            text = f"{name} failed: {sentence(row.failed)}"
            notes.setdefault((name, row.failed.code), because("setting_failed", text, row=name, why=row.failed))
    return list(notes.values())


def answer_notes(rows: Iterable[Row]) -> Iterator[Reason]:
    """A note on each row whose answers to questions with a known answer say nothing about the model."""
    for row in rows:
        if row.pooled.answers is not None and (doubt := row.pooled.answers.doubt) is not None:
            yield replace(doubt, text=f"{row.name}: {doubt.text}")


def token_counter_notes(cells: Sequence[CellSummary], *, is_damaged: bool = False) -> Iterator[Reason]:
    """Notes on cells whose tokens were not checked against the server's counter.

    `is_damaged`: there are samples of it that cannot be read.
    """
    stages = sum(cell.stage is not None for cell in cells)
    unchecked = sum(cell.stage is None and cell.server_load.generated_tokens is None for cell in cells)
    if stages:
        text = f"the server's token counter does not distinguish stages: the client's count of {stages} of "
        text += f"{count(len(cells), 'cell')} was not checked against it"
        yield because("counter_of_stages", text, cells=stages, of=len(cells))
    if unchecked and is_damaged:
        text = f"the client's count of tokens could not be checked against the server's counter for {unchecked} of "
        text += f"{count(len(cells), 'cell')}: samples of it are damaged"
        yield because("token_counter_damaged", text, cells=unchecked, of=len(cells))
    elif unchecked:
        text = f"the server gave no token counter of its own for {unchecked} of {count(len(cells), 'cell')}: the "
        text += "client's count could not be checked against it"
        yield because("no_token_counter", text, cells=unchecked, of=len(cells))


def kernel_notes(data: RunData) -> Iterator[Reason]:
    """A note on what the kernel logged during the cells, where the table of failures knows it as a failure.

    A soak has these events in its answer. The crash of a process may be another one's, and throttling has checks of its
    own: both are left out.
    """
    loads = data.run.scenario.loads
    events: list[tuple[str, KernelLine]] = []
    for name, samples in data.telemetry.items():
        planned = data.planned.get(name)
        if planned is None or (planned.load in loads and loads[planned.load].soak):
            continue
        events += [(name, line) for sample in samples for line in sample.kernel or [] if _is_failure(line.text)]
    if events:
        cell, first = events[0]
        finding = scan_text(first.text).findings[0]
        more = f", and {count(len(events) - 1, 'more such line')}" if len(events) > 1 else ""
        text = f"during {cell} the kernel logged `{first.text}`{more}: {finding.cause} [{finding.id}]"
        yield because("kernel_event", text, cell=cell, id=finding.id, line=first.text, lines=len(events))


def _is_failure(text: str) -> bool:
    findings = scan_text(text).findings
    return (
        bool(findings)
        and findings[0].severity != "warning"
        and not findings[0].hint
        and (findings[0].id not in _OTHERS)
    )


def host_cpu_notes(
    cells: Sequence[CellSummary], marks: Iterable[ProcessMark], *, is_remote: bool = False
) -> Iterator[Reason]:
    """A note on a busy host whose load generator still had enough CPU. The run is valid, but readers ask about it."""
    where = "the CPU of the server's machine" if is_remote else "the host's CPU"
    loads = [cell.machine_load for cell in cells if cell.machine_load is not None]
    full = [share for load in loads if (share := load.host_cpu_mean) is not None and share >= HOST_CPU_FULL]
    if full:
        own = [mark.cpu_max for mark in marks if mark.cpu_max is not None]
        client = None if is_remote else max(own, default=None)  # the load came from another machine
        text = f"{where} was up to {percent(max(full), 0)} busy in {count(len(full), 'cell')}, which does not "
        text += "make them INVALID"
        if client:
            text += f": the busiest load process used {percent(client, 0)} of one core ({percent(MAX_CPU, 0)} is "
            text += "allowed), so the server or another program used the rest"
        yield because("host_cpu_full", text, cells=len(full), share=max(full), client=client, max_share=MAX_CPU)
