"""Whether a run may be believed: the rules of docs/method.md that its files can show.

A reason makes a cell and its run INVALID. A note is what a reader should know all the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from harness.analysis.schedule import counts_arrivals
from harness.analysis.self_check import called, client_limits, killed
from harness.analysis.tally import CellCounts
from harness.rundir.manifest import CellRun, Run
from harness.rundir.records import CLOSING_S, LATE_READ_S, MAX_CPU, ProcessMark
from harness.rundir.samples import MAX_GAP_S
from harness.scenario import Load, at_once, is_open
from harness.summary import CellSummary, ClientLimit, MachineLoad, Numbers, Reason, ServerLoad, Warmed, because
from harness.workers import Workers

MAX_TOKEN_DIFFERENCE = 0.01
MAX_FOREIGN_MEMORY = 0.25  # of a GPU; a desktop on an APU needs some
MAX_COALESCED = 0.01
MAX_OPENED = 0.10  # of the requests
MAX_RESENT = 0.01  # of the requests
MAX_HEAT = 0.05  # of the measured time in which heat holds a GPU back
HOST_CPU_FULL = 0.95  # of all cores, on average
MAX_ENERGY_DIFFERENCE = 0.10  # between power readings and a counter of the GPU


class Findings(Struct, frozen=True):
    reasons: list[Reason]
    notes: list[Reason]
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
    """The reasons why a cell is invalid, the notes on it, and where the load generator limited it."""
    reasons: list[Reason] = []
    if not (evidence.reached or evidence.going_on):
        reasons.append(because("not_reached"))
    elif evidence.ran is None:
        reasons.append(because("going_on" if evidence.going_on else "not_ended"))
    if evidence.ran is not None:
        reasons += _server(evidence.ran, evidence.server_load)
        reasons += _memory(evidence.ran)
        reasons += evidence.ran.problems
    reasons += [] if evidence.imported else _processes(evidence) + _contradictions(evidence)
    reasons += _work(evidence) + _prompts(evidence) + _bad_fields(evidence.tally, invalid=True)
    # Of a cell that was cut, what is missing is already known to be missing.
    if evidence.ran is not None and not evidence.ran.problems and not evidence.mixed:
        reasons += _tokens(evidence.tally, evidence.server_load)
    found = client_limits(evidence.load, evidence.tally, evidence.numbers, evidence.marks, evidence.workers)
    limits = [limit for limit, _ in found]
    reasons += [reason for limit, reason in found if limit.invalid]
    reasons += _heat(evidence, invalid=True)
    notes = [reason for limit, reason in found if not limit.invalid] + _notes(evidence, limits)
    return Findings(_of(evidence.cell, reasons), _of(evidence.cell, notes), limits)


def _of(cell: str, reasons: Sequence[Reason]) -> list[Reason]:
    return [replace(reason, cell=cell) for reason in reasons]


def whole(ran: CellRun | None, marks: Sequence[ProcessMark]) -> bool:
    """Whether the load of a cell came to its own end."""
    return ran is not None and not ran.problems and not killed(marks)


def of_run(run: Run, damaged: Mapping[str, Sequence[int]], unknown_cells: Counter[str]) -> list[Reason]:
    """Return why the whole run is not valid, so that no row of it has a verdict.

    `damaged`: lines by file; `unknown_cells`: records by unknown cell.
    """
    reasons = list(run.reasons) if run.status in ("failed", "interrupted", "live") else []
    for file, numbers in damaged.items():
        if numbers:
            reasons.append(because("unreadable_lines", file=file, lines=list(numbers[:5]), total=len(numbers)))
    return reasons + [
        because("unknown_cell", records=number, unknown=cell) for cell, number in sorted(unknown_cells.items())
    ]


def host_cpu(cells: Sequence[CellSummary], marks: Iterable[ProcessMark]) -> list[Reason]:
    """A busy host next to a load generator that had enough is no fault of a run, and readers ask about it."""
    loads = [cell.machine_load for cell in cells if cell.machine_load is not None]
    full = [share for load in loads if (share := load.host_cpu_mean) is not None and share >= HOST_CPU_FULL]
    if not full:
        return []
    client = max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None)
    return [because("host_cpu_full", cells=len(full), share=max(full), client=client, max_share=MAX_CPU)]


def not_run(run: Run) -> list[str]:
    """Return the planned cells that did not come to their end."""
    return [] if run.status == "live" else [cell for cell in run.order if cell not in run.ran]


def _server(ran: CellRun, load: ServerLoad) -> list[Reason]:
    served = ran.served_by
    reasons = []
    if served.oom_killed:
        reasons.append(because("out_of_memory"))
    if served.exit_code is not None and served.death is None and not ran.problems:
        reasons.append(because("server_exit", exit_code=served.exit_code))
    if served.restarts:
        reasons.append(because("server_restarted", times=served.restarts))
    elif load.restarted:
        reasons.append(because("counters_restarted"))
    return reasons


def _memory(ran: CellRun) -> list[Reason]:
    """Memory that another process held when the server was started."""
    return [
        because(
            "memory_in_use",
            gpu=gpu.render_node,
            used_bytes=gpu.used_bytes,
            total_bytes=gpu.total_bytes,
            max_share=MAX_FOREIGN_MEMORY,
        )
        for gpu in ran.gpu_memory_before
        if gpu.used_bytes > MAX_FOREIGN_MEMORY * gpu.total_bytes
    ]


def _processes(evidence: Evidence) -> list[Reason]:
    """Load processes without an end record, and records that were lost."""
    starts = {mark.process for mark in evidence.marks if mark.event == "start"}
    dead = killed(evidence.marks)
    ends = {mark.process: mark for mark in evidence.marks if mark.event == "end"}
    reasons = []
    planned = evidence.load.processes if evidence.workers is None else evidence.workers.total
    if len(starts) < planned:
        reasons.append(because("processes_missing", started=len(starts), planned=planned))
    if dead:
        names = [called(process, evidence.marks, evidence.workers) for process in dead]
        remote = evidence.workers is not None
        reasons.append(because("processes_killed", processes=names, going_on=evidence.going_on, remote=remote))
    for process, mark in sorted(ends.items()):
        found, name = evidence.tally.by_process[process], called(process, evidence.marks, evidence.workers)
        if mark.sent is not None and mark.sent != found:
            reasons.append(because("records_lost", process=name, sent=mark.sent, found=found))
        elif mark.recorded is not None and mark.recorded != found:
            reasons.append(because("records_unwritten", process=name, recorded=mark.recorded, found=found))
    if evidence.ran is not None and not evidence.ran.problems:
        reasons += _cut_short(evidence, ends)
    return reasons


def _contradictions(evidence: Evidence) -> list[Reason]:
    """What no load process writes: duplicate records or marks, times that contradict each other."""
    reasons, repeated = [], evidence.tally.repeated()
    if repeated:
        reasons.append(because("request_repeated", requests=len(repeated), indices=repeated[:5]))
    for (process, event), times in Counter((mark.process, mark.event) for mark in evidence.marks).items():
        if times > 1:
            name = called(process, evidence.marks, evidence.workers)
            reasons.append(because("mark_repeated", process=name, marks=times, event=event))
    if backwards := evidence.tally.backwards:
        reasons.append(because("times_contradict", answers=backwards))
    return reasons


def _cut_short(evidence: Evidence, ends: Mapping[int, ProcessMark]) -> list[Reason]:
    """Load processes that sent for less than the time that was asked for, and users that were not there."""
    load, asked_s = evidence.load, evidence.load.duration_s
    stopped = _stopped_s(evidence) is not None  # as planned, so nothing is missing
    reasons = [
        because(
            "stopped_early",
            process=called(process, evidence.marks, evidence.workers),
            left_s=mark.left_s,
            asked_s=asked_s,
        )
        for process, mark in sorted(ends.items())
        if mark.left_s and asked_s and not stopped
    ]
    gone = sum(mark.users_gone or 0 for mark in ends.values())
    if gone:
        reasons.append(because("users_gone", gone=gone, users=load.users))
    if asked_s and not reasons and ends and all(mark.users is not None for mark in ends.values()):
        had = sum(mark.users or 0 for mark in ends.values())
        if had < load.users:
            reasons.append(because("users_missing", came=had, users=load.users))
    return reasons


def _clocks(evidence: Evidence) -> list[Reason]:
    """How well the clocks of several machines are joined. Latencies need no second clock."""
    errors = [mark.wall_error_s for mark in evidence.marks if mark.wall_error_s is not None]
    machines = {mark.host for mark in evidence.marks}
    if len(machines) < 2 or not errors:
        return []
    return [because("clocks_joined", machines=len(machines), error_ms=1000 * max(errors))]


def _work(evidence: Evidence) -> list[Reason]:
    """Whether the work that was planned was done, without more errors than allowed."""
    numbers, load = evidence.numbers, evidence.load
    reasons = []
    if load.requests is not None and numbers.sent != load.requests:
        reasons.append(because("requests_missing", planned=load.requests, sent=numbers.sent))
    kept = numbers.schedule
    if kept is not None and kept.never_sent and load.requests is None:
        lost = "going_on" if evidence.going_on else "killed"
        reasons.append(
            because(
                "never_sent",
                never_sent=kept.never_sent,
                planned=kept.planned or 0,
                what="arrivals" if counts_arrivals(load) else "requests",
                why=lost if killed(evidence.marks) else "busy",
                users=load.users,
                processes=load.processes,
            )
        )
    if load.requests is not None and numbers.unfinished:
        reasons.append(because("work_unfinished", requests=numbers.unfinished))
    rate, allowed = numbers.error_rate, evidence.max_error_rate
    if rate is not None and rate > allowed:
        kinds = {kind: n for kind, n in numbers.errors.items() if kind not in ("unfinished", "abandoned")}
        reasons.append(
            because("error_rate", failed=numbers.failed, sent=numbers.sent, kinds=kinds, rate=rate, max_rate=allowed)
        )
    ended = evidence.ran is not None and bool(evidence.ran.problems)  # the end of a server closes connections, too
    if numbers.resent > MAX_RESENT * numbers.sent and not ended:
        reasons.append(_resent(numbers, max_share=MAX_RESENT))
    if not numbers.succeeded and evidence.reached and _stopped_s(evidence) != 0:
        reasons.append(because("none_succeeded"))
    if wrong := evidence.tally.wrong_length:
        trace, tokens = load.trace is not None, load.output_tokens if isinstance(load.output_tokens, int) else None
        reasons.append(because("wrong_length", wrong=wrong, answers=numbers.succeeded, tokens=tokens, trace=trace))
    return reasons


def _stopped_s(evidence: Evidence) -> float | None:
    """Measured seconds after which the harness stopped the load as planned; 0: during its warm-up."""
    return None if evidence.ran is None else evidence.ran.stopped_after_s


def _resent(numbers: Numbers, **more: float) -> Reason:
    return because("resent", resent=numbers.resent, sent=numbers.sent, within_s=CLOSING_S, **more)


def _listen_queue(evidence: Evidence) -> list[Reason]:
    """Connections that had to wait because the server's listen queue was full."""
    retried, load = evidence.numbers.connect_retried, evidence.machine_load
    overflows = (load.listen_overflows if load is not None else None) or 0
    if not retried and not overflows:
        return []
    return [because("listen_queue", retried=retried, overflows=overflows, open_loop=is_open(evidence.load))]


def _prompts(evidence: Evidence) -> list[Reason]:
    """Whether prompts that were made to an exact length have it, but for what a chat template adds to all of them."""
    prompts = evidence.numbers.prompts
    if not evidence.exact_prompts or prompts is None or not prompts.otherwise:
        return []
    return [because("prompt_lengths", otherwise=prompts.otherwise, prompts=prompts.requests, added=prompts.added)]


def _tokens(tally: CellCounts, load: ServerLoad) -> list[Reason]:
    """The server's counter against the tokens of all requests of the cell, warm-up included."""
    served = load.generated_tokens
    if served is None or load.restarted:
        return []
    low, high = tally.min_tokens, tally.max_tokens
    missing = low - served if served < low else served - high if high is not None and served > high else 0.0
    if missing <= MAX_TOKEN_DIFFERENCE * max(served, low):
        return []
    return [because("tokens_differ", server=served, min_tokens=low, max_tokens=high, max_share=MAX_TOKEN_DIFFERENCE)]


def _bad_fields(tally: CellCounts, *, invalid: bool) -> list[Reason]:
    """Fields of answers, warm-up included: counts out of bounds, or values of another JSON type."""
    found = [bad for bad in tally.bad_fields.found.values() if (bad.code != "type") == invalid]
    if not invalid:
        return [because("value_of_other_type", field=bad.field, requests=bad.requests, got=bad.got) for bad in found]
    return [
        because(
            "value_out_of_bounds", field=bad.field, requests=bad.requests, code=bad.code, limit=bad.limit, got=bad.got
        )
        for bad in found
    ]


def _heat(evidence: Evidence, *, invalid: bool) -> list[Reason]:
    """GPUs that worked for the server and were throttled: for so long that the run is not valid, or for less.

    A limit of power or current is no reason: at full load it is what sets the clocks, of an APU always.
    """
    load, window_s = evidence.machine_load, evidence.numbers.window_s
    if load is None or not window_s:
        return []
    return [
        because("gpu_throttled", gpu=name, heat_s=gpu.heat_s, window_s=window_s, max_share=MAX_HEAT, invalid=invalid)
        for name, gpu in load.gpus.items()
        if gpu.used and gpu.heat_s and (gpu.heat_s > MAX_HEAT * window_s) == invalid
    ]


def _front(evidence: Evidence) -> list[Reason]:
    """What is in front of the engine, and how many requests it lets through at once."""
    if evidence.ran is None:
        return []
    served, in_flight = evidence.ran.served_by, at_once(evidence.load)
    notes = list(served.notes)
    if served.max_parallel is not None and in_flight > served.max_parallel:
        notes.append(because("own_queue", in_flight=in_flight, server=served.version, at_once=served.max_parallel))
    return notes


def _telemetry(load: MachineLoad | None) -> list[Reason]:
    """Gaps between samples, and an energy that contradicts the GPUs' own counters."""
    notes = []
    if load is not None and load.gap_max_s >= MAX_GAP_S:
        notes.append(because("telemetry_gap", gap_s=load.gap_max_s, took_s=load.took_max_s or 0.0))
    if load is not None and load.energy_j and load.counted_energy_j:
        power_j, counter_j = load.energy_j, load.counted_energy_j
        if abs(power_j - counter_j) > MAX_ENERGY_DIFFERENCE * counter_j:
            notes.append(
                because("energy_differs", power_j=power_j, counter_j=counter_j, max_share=MAX_ENERGY_DIFFERENCE)
            )
    return notes


def _shared_reads(tally: CellCounts, numbers: Numbers, limits: Sequence[ClientLimit]) -> list[Reason]:
    """Chunks that arrived together, where the self-check does not report them.

    Of a stream that is faster than a read is late it is not known who put them together: the stamp is of the last one.
    """
    together = tally.coalesced - tally.coalesced_late
    if together <= MAX_COALESCED * tally.chunks or any(limit.what == "shared_reads" for limit in limits):
        return []
    share, gap_s = together / tally.chunks, numbers.chunk_gap_s.mean
    fast = gap_s is not None and gap_s < LATE_READ_S
    if fast or tally.coalesced_told < tally.coalesced:
        return [because("shared_reads_unclear", share=share, chunk_s=gap_s if fast else None)]
    return [because("shared_reads_server", share=share)]


def _notes(evidence: Evidence, limits: Sequence[ClientLimit]) -> list[Reason]:
    tally, numbers, load = evidence.tally, evidence.numbers, evidence.load
    succeeded, opened = numbers.succeeded, numbers.connect_s
    notes = _clocks(evidence) + _heat(evidence, invalid=False) + _telemetry(evidence.machine_load) + _front(evidence)
    notes += note_on(evidence.warmup) + _bad_fields(tally, invalid=False)
    if tally.read_clock:
        notes.append(because("read_clock", answers=tally.read_clock, requests=succeeded))
    notes += _shared_reads(tally, numbers, limits)
    # Each load process opens some until it has seen that the server keeps them.
    if opened.n > max(2 * at_once(load) + 2 * load.processes, MAX_OPENED * succeeded):
        took = {"mean_s": opened.mean or 0.0, "max_s": opened.max or 0.0}
        notes.append(because("connections_opened", opened=opened.n, requests=succeeded, **took))
    notes += _listen_queue(evidence)
    if 0 < numbers.resent <= MAX_RESENT * numbers.sent:
        notes.append(_resent(numbers))
    if numbers.retry_after:
        total_s = numbers.retry_after_s or 0.0
        notes.append(because("retry_after", requests=numbers.retry_after, total_s=total_s, open_loop=is_open(load)))
    if tally.without_output_tokens and load.endpoint != "embeddings":
        notes.append(because("tokens_unknown", answers=tally.without_output_tokens, requests=succeeded))
    if tally.fewer_tokens and not evidence.imported:
        notes.append(because("tokens_too_few", answers=tally.fewer_tokens, requests=succeeded))
    if numbers.reasoning_tokens and numbers.output_tokens:
        share = numbers.reasoning_tokens / numbers.output_tokens
        notes.append(because("reasoning_share", share=share, tokens=numbers.output_tokens))
    if numbers.tool_calls is not None:
        valid = numbers.tool_calls_valid
        notes.append(because("tool_calls", answers=succeeded, calls=numbers.tool_calls, valid=valid))
    if numbers.abandoned:
        notes.append(because("abandoned", requests=numbers.abandoned))
    if load.requests is None and numbers.unfinished:
        drained = whole(evidence.ran, evidence.marks) and _stopped_s(evidence) is None
        drain_s = load.drain_s if drained else None
        notes.append(because("unfinished", requests=numbers.unfinished, drain_s=drain_s))
    return notes


def warmed(counted: CellCounts, marks: Iterable[ProcessMark], first_due_s: float | None = None) -> Warmed | None:
    """None where there was none. `first_due_s`: of an open loop, when the first is due after the measurement began."""
    if not counted.warmup:
        return None
    begun, measured, due_s = counted.first_any_s, counted.begun_s, counted.schedule.first_due_s
    if measured is None:
        # At first there may be no request.
        measured = counted.first_sent_s if first_due_s is None or due_s is None else due_s - first_due_s
    said = [mark.steady for mark in marks if mark.steady is not None]
    return Warmed(
        requests=counted.warmup,
        seconds=None if begun is None or measured is None else measured - begun,
        steady=all(said) if said else None,  # of several machines each looks at what it sent
    )


def note_on(warm: Warmed | None) -> list[Reason]:
    """A note on a warm-up that was to last until the server is steady."""
    if warm is None or warm.steady is None:
        return []
    return [because("steady" if warm.steady else "not_steady", requests=warm.requests, seconds=warm.seconds)]
