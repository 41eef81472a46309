"""Whether a run may be believed: the rules of docs/method.md that its files can show.

A reason makes a cell and its run INVALID. A note is what a reader should know all the same. Both are sentences.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from harness.rundir.manifest import CellRun, Run
from harness.rundir.records import CLOSING_S, LATE_READ_S, ProcessMark
from harness.rundir.telemetry import MOST_GAP_S
from harness.scenario.scenario import Load, at_once, is_open
from harness.summarize.schedule import counts_arrivals
from harness.summarize.self_check import called, client_limits, killed, more_users
from harness.summarize.tally import CellCounts
from harness.summarize.warmup import in_words
from harness.summary import ClientLimit, MachineLoad, Numbers, ServerLoad, Warmed
from harness.units import GIB, count, figures, gib
from harness.workers import Workers

MOST_TOKEN_DIFFERENCE = 0.01
MOST_FOREIGN_MEMORY = 0.25  # of a GPU; a desktop on an APU needs some
MOST_COALESCED = 0.01
MOST_OPENED = 0.10  # of the requests
MAX_RESENT = 0.01  # of the requests
MOST_HEAT = 0.05  # of the measured time in which heat holds a GPU back
MOST_ENERGY_DIFFERENCE = 0.10  # between power readings and a counter of the GPU


class Findings(Struct, frozen=True):
    reasons: list[str]
    notes: list[str]
    limits: list[ClientLimit] = []  # where the load generator was the limit; all of them are reasons or notes as well


class Evidence(Struct, frozen=True, kw_only=True):
    """What is known of one cell."""

    cell: str
    ran: CellRun | None  # None: the run ended before the cell did
    reached: bool = True  # by the load; False: a stage whose turn never came
    load: Load
    max_error_rate: float
    tally: CellCounts
    numbers: Numbers
    server_load: ServerLoad
    machine_load: MachineLoad | None = None
    marks: Sequence[ProcessMark]
    exact_prompts: bool = False  # prompts were made to an exact number of tokens
    mixed: bool = False  # the server served other loads as well at that time
    warmup: Warmed | None = None
    going_on: bool = False  # the run has not ended, as far as its files say
    imported: bool = False  # by another tool, whose load processes left no marks
    workers: Workers | None = None  # on other machines


def of_cell(evidence: Evidence) -> Findings:
    """Judge one cell."""
    cell = evidence.cell
    reasons: list[str] = []
    if not (evidence.reached or evidence.going_on):
        reasons.append("it was not reached: the load ended before its turn")
    elif evidence.ran is None:
        reasons.append("it has not come to its end" if evidence.going_on else "it did not run to its end")
    if evidence.ran is not None:
        reasons += _server(evidence.ran, evidence.server_load)
        reasons += _memory(evidence.ran)
        reasons += evidence.ran.problems
    reasons += [] if evidence.imported else _processes(evidence) + _contradictions(evidence)
    reasons += _work(evidence) + _prompts(evidence) + _bad_fields(evidence.tally, invalid=True)
    # Of a cell that was cut, what is missing is already known to be missing.
    if evidence.ran is not None and not evidence.ran.problems and not evidence.mixed:
        reasons += _tokens(evidence.tally, evidence.server_load)
    limits = client_limits(evidence.load, evidence.tally, evidence.numbers, evidence.marks, evidence.workers)
    reasons += [limit.text for limit in limits if limit.invalid]
    reasons += _heat(evidence, invalid=True)
    notes = [limit.text for limit in limits if not limit.invalid] + _notes(evidence, limits)
    return Findings([f"{cell}: {text}" for text in reasons], [f"{cell}: {text}" for text in notes], limits)


def whole(ran: CellRun | None, marks: Sequence[ProcessMark]) -> bool:
    """Whether the load of a cell came to its own end."""
    return ran is not None and not ran.problems and not killed(marks)


def of_run(run: Run, damaged: Mapping[str, Sequence[int]], strangers: Counter[str]) -> list[str]:
    """Return why the whole run is not valid, so that no row of it has a verdict.

    `damaged`: lines by file; `strangers`: records by unknown cell.
    """
    reasons = list(run.reasons) if run.status in ("failed", "interrupted", "live") else []
    for file, numbers in damaged.items():
        if numbers:
            lines = ", ".join(map(str, numbers[:5])) + (" ..." if len(numbers) > 5 else "")
            reasons.append(f"{file}: {count(len(numbers), 'line')} cannot be read (line {lines})")
    reasons += [
        f"requests.jsonl: {count(number, 'record')} of the cell '{cell}', which is not in the plan"
        for cell, number in sorted(strangers.items())
    ]
    return reasons


def not_run(run: Run) -> list[str]:
    """Return the planned cells that did not come to their end."""
    return [] if run.status == "live" else [cell for cell in run.order if cell not in run.ran]


def _server(ran: CellRun, load: ServerLoad) -> list[str]:
    served = ran.served_by
    reasons = []
    if served.oom_killed:
        reasons.append("the server was killed because memory ran out")
    if served.exit_code is not None and served.death is None and not ran.problems:
        reasons.append(f"the server died with exit code {served.exit_code}")
    if served.restarts:
        reasons.append(f"the server was restarted {count(served.restarts, 'time')}")
    elif load.restarted:
        reasons.append("the server was restarted: its counters began anew")
    return reasons


def _memory(ran: CellRun) -> list[str]:
    """Memory that somebody else held when the server was started."""
    return [
        f"{gpu.used_bytes / GIB:.1f} of {gib(gpu.total_bytes)} of the memory of {gpu.render_node} "
        f"were in use before the server started; at most {MOST_FOREIGN_MEMORY:.0%} is allowed"
        for gpu in ran.gpu_memory_before
        if gpu.used_bytes > MOST_FOREIGN_MEMORY * gpu.total_bytes
    ]


def _processes(evidence: Evidence) -> list[str]:
    """Load processes that did not say goodbye, and records that got lost."""
    starts = {mark.process for mark in evidence.marks if mark.event == "start"}
    dead = killed(evidence.marks)
    ends = {mark.process: mark for mark in evidence.marks if mark.event == "end"}
    reasons = []
    planned = evidence.load.processes if evidence.workers is None else evidence.workers.total
    if len(starts) < planned:
        reasons.append(f"{len(starts)} of {count(planned, 'load process', 'load processes')} started")
    if dead:
        names = ", ".join(called(process, evidence.marks, evidence.workers) for process in dead)
        whose, be, was = ("process", "is", "was") if len(dead) == 1 else ("processes", "are", "were")
        still = f"{be} still going on, or " if evidence.going_on else ""
        how = "killed" if evidence.workers is None else "lost (killed, or its link was cut)"
        advice = "" if evidence.going_on else "; run again (the kernel kills when memory runs out, which `dmesg` tells)"
        reasons.append(
            f"load {whose} {names} {still}{was} {how}: what was sent and not yet recorded is not known{advice}"
        )
    for process, mark in sorted(ends.items()):
        found, name = evidence.tally.by_process[process], called(process, evidence.marks, evidence.workers)
        if mark.sent is not None and mark.sent != found:
            reasons.append(
                f"load process {name} sent {count(mark.sent, 'request')} and the file has {count(found, 'record')}"
            )
        elif mark.recorded is not None and mark.recorded != found:
            reasons.append(f"load process {name} wrote {count(mark.recorded, 'record')} and the file has {found:,}")
    if evidence.ran is not None and not evidence.ran.problems:
        reasons += _cut_short(evidence, ends)
    return reasons


def _contradictions(evidence: Evidence) -> list[str]:
    """What no load process writes: records or marks that are there twice, times that contradict each other."""
    reasons, repeated = [], evidence.tally.repeated()
    if repeated:
        which = ", ".join(map(str, repeated[:5])) + (" ..." if len(repeated) > 5 else "")
        reasons.append(f"requests.jsonl: {count(len(repeated), 'request')} recorded more than once (index {which})")
    for (process, event), times in Counter((mark.process, mark.event) for mark in evidence.marks).items():
        if times > 1:
            name = called(process, evidence.marks, evidence.workers)
            reasons.append(f"processes.jsonl: load process {name} has {times:,} {event} marks")
    if backwards := evidence.tally.backwards:
        reasons.append(
            f"requests.jsonl: the times of {count(backwards, 'answer')} contradict each other (chunks that go back in "
            "time, end after their answer or are missing)"
        )
    return reasons


def _cut_short(evidence: Evidence, ends: Mapping[int, ProcessMark]) -> list[str]:
    """Load processes that sent for less than the time that was asked for, and users that were not there."""
    load, asked_s = evidence.load, evidence.load.duration_s
    reasons = [
        f"load process {called(process, evidence.marks, evidence.workers)} was told to end (SIGTERM or SIGINT) "
        f"{mark.left_s:.1f} s before the end of the {asked_s:g} s to measure; run again"
        for process, mark in sorted(ends.items())
        if mark.left_s and asked_s
    ]
    gone = sum(mark.users_gone or 0 for mark in ends.values())
    if gone:
        reasons.append(
            f"{count(gone, 'user')} of {load.users:,} ended before the load did (an exception, or StopUser in the "
            "locustfile): the log of the load generator says more"
        )
    if asked_s and not reasons and ends and all(mark.users is not None for mark in ends.values()):
        had = sum(mark.users or 0 for mark in ends.values())
        if had < load.users:
            reasons.append(f"{had:,} of {count(load.users, 'user')} had come at the end of the measured time")
    return reasons


def _clocks(evidence: Evidence) -> list[str]:
    """How well the clocks of several machines are joined. Latencies need no second clock."""
    errors = [mark.wall_error_s for mark in evidence.marks if mark.wall_error_s is not None]
    machines = {mark.host for mark in evidence.marks}
    if len(machines) < 2 or not errors:
        return []
    return [
        f"{len(machines)} machines sent the load, their clocks joined to {1000 * max(errors):.1f} ms: "
        "wall time and rates may be off by so much, latencies are not"
    ]


def _work(evidence: Evidence) -> list[str]:
    """Whether the work that was planned was done, without more errors than allowed."""
    numbers, load = evidence.numbers, evidence.load
    reasons = []
    if load.requests is not None and numbers.sent != load.requests:
        reasons.append(f"{load.requests:,} measured requests were planned and {numbers.sent:,} were sent")
    kept = numbers.schedule
    if kept is not None and kept.never_sent and load.requests is None:
        what = "arrivals" if counts_arrivals(load) else "requests"
        dead = killed(evidence.marks)
        lost = "it has not come to its end" if evidence.going_on else "a load process was killed"
        why = lost if dead else f"nobody was free until its end; {more_users(load)}"
        reasons.append(
            f"{kept.never_sent:,} of the {kept.planned or 0:,} {what} that were due in the measured time were never "
            f"sent: {why}"
        )
    if load.requests is not None and numbers.unfinished:
        reasons.append(f"{count(numbers.unfinished, 'request')} of the planned work did not finish")
    rate = numbers.error_rate
    if rate is not None and rate > evidence.max_error_rate:
        failures = {kind: n for kind, n in numbers.errors.items() if kind not in ("unfinished", "abandoned")}
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in failures.items())
        reasons.append(
            f"{numbers.failed:,} of {count(numbers.sent, 'request')} failed "
            f"({kinds}): an error rate of {rate:.2%}, and at most {evidence.max_error_rate:.2%} is allowed"
        )
    ended = evidence.ran is not None and bool(evidence.ran.problems)  # the end of a server closes connections, too
    if numbers.resent > MAX_RESENT * numbers.sent and not ended:
        reasons.append(f"{_resent(numbers)}; at most {MAX_RESENT:.0%} is allowed, because the server may do them twice")
    if not numbers.succeeded and evidence.reached:
        reasons.append("no measured request succeeded")
    wrong = evidence.tally.wrong_length
    if wrong:
        reasons.append(f"{wrong:,} of {numbers.succeeded:,} answers do not have the fixed length {_length(load)}")
    return reasons


def _resent(numbers: Numbers) -> str:
    share = (
        f"{numbers.resent:,} of {count(numbers.sent, 'request')} were sent twice ({numbers.resent / numbers.sent:.1%})"
    )
    return f"{share}: the server closed a kept connection within {CLOSING_S:g} s after a response"


def _listen_queue(evidence: Evidence) -> list[str]:
    """Connections that had to wait because the server's listen queue was full."""
    numbers, load = evidence.numbers, evidence.machine_load
    turned_away = (load.listen_overflows if load is not None else None) or 0
    facts = []
    if numbers.connect_retried:
        waited = f"{count(numbers.connect_retried, 'connection')} waited 1 s or more for the server to accept"
        schedule = ", TTFT and E2E latency from schedule" if is_open(evidence.load) else ""
        facts.append(f"{waited}; this is in wall time and rates{schedule}, and in no other latency")
    if turned_away:
        inside = f"the kernel counted {count(turned_away, 'overflow')} in the server's container"
        facts.append(f"{inside}; where Docker's proxy forwards the port, TTFT and E2E latency include the wait")
    if not facts:
        return []
    return [
        f"the server's listen queue overflowed: {'; '.join(facts)}. Put a gateway that keeps connections in front of "
        "the server, or let fewer requests arrive at once"
    ]


def _prompts(evidence: Evidence) -> list[str]:
    """Whether prompts that were made to an exact length have it, beside what a chat template adds to all of them."""
    prompts = evidence.numbers.prompts
    if not evidence.exact_prompts or prompts is None or not prompts.otherwise:
        return []
    return [
        f"{prompts.otherwise:,} of {prompts.requests:,} prompts do not have the exact length that was asked for "
        f"(beyond the {prompts.added:,} tokens that were added to most of them): the tokenizer is not the server's"
    ]


def _tokens(tally: CellCounts, load: ServerLoad) -> list[str]:
    """The server's counter against the tokens of all requests of the cell, warm-up included."""
    served = load.generated_tokens
    if served is None or load.restarted:
        return []
    least, most = tally.least_tokens, tally.most_tokens
    missing = least - served if served < least else served - most if most is not None and served > most else 0.0
    if missing <= MOST_TOKEN_DIFFERENCE * max(served, least):
        return []
    own = f"{least:,}" if least == most else f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
    return [
        f"the server counted {served:,.0f} generated tokens and the client {own}, warm-up included: "
        f"they differ by more than {MOST_TOKEN_DIFFERENCE:.0%}"
    ]


def _bad_fields(tally: CellCounts, *, invalid: bool) -> list[str]:
    """Fields of answers, warm-up included: counts out of bounds, or values of another JSON type."""
    return [
        f"{bad.field} of the server's answers is not possible in {count(bad.requests, 'request')}: it "
        + (
            f"must be at {'least' if bad.code == 'below' else 'most'} {bad.limit:,} (got {bad.got})"
            if invalid
            else f"has a value of another type ({bad.got}), and counts as missing"
        )
        for bad in tally.bad_fields.found.values()
        if (bad.code != "type") == invalid
    ]


def _length(load: Load) -> str:
    if load.trace is not None:
        return "of their row of the trace"
    known = f"of {load.output_tokens:,} tokens " if isinstance(load.output_tokens, int) else ""
    return f"{known}that was asked for"


def _heat(evidence: Evidence, *, invalid: bool) -> list[str]:
    """GPUs that worked for the server and were throttled: for so long that the run is not valid, or for less.

    A limit of power or current is no reason: at full load it is what sets the clocks, of an APU always.
    """
    load, window_s = evidence.machine_load, evidence.numbers.window_s
    if load is None or not window_s:
        return []
    allowed = f"{'at most' if invalid else 'up to'} {MOST_HEAT:.0%} is allowed"
    return [
        f"the GPU {name} was throttled by heat (or PROCHOT) during {gpu.heat_s:.1f} of {window_s:.1f} s; {allowed}"
        for name, gpu in load.gpus.items()
        if gpu.used and gpu.heat_s and (gpu.heat_s > MOST_HEAT * window_s) == invalid
    ]


def _front(evidence: Evidence) -> list[str]:
    """What stands before the engine, and how many requests it lets through at once."""
    if evidence.ran is None:
        return []
    served, most = evidence.ran.served_by, at_once(evidence.load)
    notes = list(served.notes)
    if served.most_at_once is not None and most > served.most_at_once:
        notes.append(
            f"up to {most:,} requests were in flight, and {served.version or 'the server'} serves "
            f"{served.most_at_once} at once: above that its own queue was measured, not the engine's"
        )
    return notes


def _unseen(load: MachineLoad | None) -> list[str]:
    if load is None or load.gap_most_s < MOST_GAP_S:
        return []
    return [
        f"the machine was not looked at for {load.gap_most_s:.1f} s of the measured time (reading its files took up to "
        f"{load.took_most_s or 0.0:.1f} s): the energy is not known"
    ]


def _energy(load: MachineLoad | None) -> list[str]:
    if load is None or not load.energy_j or not load.counted_energy_j:
        return []
    if abs(load.energy_j - load.counted_energy_j) <= MOST_ENERGY_DIFFERENCE * load.counted_energy_j:
        return []
    return [
        f"the energy is {load.energy_j:,.0f} J by the power readings and {load.counted_energy_j:,.0f} J by the GPUs' "
        f"own counters: they differ by more than {MOST_ENERGY_DIFFERENCE:.0%}"
    ]


def _shared_reads(tally: CellCounts, numbers: Numbers, limits: Sequence[ClientLimit]) -> list[str]:
    """Chunks that arrived together, where that is not what the self-check says.

    Of a stream that is faster than a read is late nobody can say who put them together: the stamp is of the last one.
    """
    together = tally.coalesced - tally.coalesced_late
    if together <= MOST_COALESCED * tally.chunks or any(limit.what == "shared_reads" for limit in limits):
        return []
    share = f"{together / tally.chunks:.1%} of the chunks arrived together with a later one"
    gap_s = numbers.chunk_gap_s.mean
    fast = gap_s is not None and gap_s < LATE_READ_S
    if fast or tally.coalesced_told < tally.coalesced:
        why = f"; of a chunk each {gap_s * 1000:.2g} ms nobody can tell" if fast and gap_s is not None else ""
        return [
            f"{share} (the server or a proxy sends several at once, or the load generator was late{why}): their times "
            "are upper bounds"
        ]
    return [f"{share} and were read in good time: the server, or what is before it, sends several at once"]


def _notes(evidence: Evidence, limits: Sequence[ClientLimit]) -> list[str]:
    tally, numbers, load = evidence.tally, evidence.numbers, evidence.load
    notes = _clocks(evidence) + _heat(evidence, invalid=False) + _unseen(evidence.machine_load)
    notes += _energy(evidence.machine_load) + _front(evidence)
    notes += in_words(evidence.warmup) + _bad_fields(tally, invalid=False)
    if tally.read_clock:
        notes.append(
            f"the chunk times of {tally.read_clock:,} of {count(numbers.succeeded, 'request')} are those of the read, "
            "not of the kernel"
        )
    notes += _shared_reads(tally, numbers, limits)
    opened = numbers.connect_s
    took = [figures(1000 * (value or 0.0)) for value in (opened.mean, opened.most)]
    # Each load process opens some until it has seen that the server keeps them.
    if opened.n > max(2 * at_once(load) + 2 * load.processes, MOST_OPENED * numbers.succeeded):
        notes.append(
            f"{opened.n:,} of {count(numbers.succeeded, 'request')} opened a connection of their own, which took "
            f"{took[0]} ms on average and {took[1]} ms at most: no latency has it, wall time and rates do"
        )
    notes += _listen_queue(evidence)
    if 0 < numbers.resent <= MAX_RESENT * numbers.sent:
        notes.append(_resent(numbers))
    if numbers.retry_after:
        how = (
            "their users waited as long as asked, or until the load ended"
            if not is_open(load)
            else "only conversations that went on waited, the schedule did not"
        )
        notes.append(
            f"after {count(numbers.retry_after, 'request')} the server asked for a wait (Retry-After), "
            f"{numbers.retry_after_s or 0.0:,.1f} s in total: {how}; no latency has it, wall time and rates do"
        )
    if tally.without_output_tokens and load.endpoint != "embeddings":
        notes.append(
            f"the server did not report the tokens of {tally.without_output_tokens:,} of "
            f"{count(numbers.succeeded, 'request')}: tok/s is not known"
        )
    if tally.fewer_tokens and not evidence.imported:
        notes.append(
            f"the server counted fewer tokens than it sent pieces of text in {count(tally.fewer_tokens, 'answer')} of "
            f"{numbers.succeeded:,}: its count, and every rate that uses it, is too low"
        )
    if numbers.reasoning_tokens and numbers.output_tokens:
        share = numbers.reasoning_tokens / numbers.output_tokens
        notes.append(f"{share:.0%} of the {numbers.output_tokens:,} output tokens were reasoning")
    if numbers.tool_calls is not None:
        notes.append(
            f"{count(numbers.succeeded, 'answer')} held {count(numbers.tool_calls, 'tool call')}, "
            f"{numbers.tool_calls_valid:,} of them valid; steps without one went on as planned"
        )
    if numbers.abandoned:
        left = "was abandoned by its user" if numbers.abandoned == 1 else "were abandoned by their users"
        notes.append(f"{count(numbers.abandoned, 'request')} {left}: no latency has them")
    if load.requests is None and numbers.unfinished:
        to_its_end = whole(evidence.ran, evidence.marks)
        when = f"within drain_s ({load.drain_s:g} s) after the end" if to_its_end else "before the load was ended early"
        notes.append(f"{count(numbers.unfinished, 'request')} did not finish {when}: latencies lack the longest")
    return notes
