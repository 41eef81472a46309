"""Whether a run may be believed: the rules of docs/method.md that its files can show.

A reason makes a cell and its run INVALID. A note is what a reader should know all the same.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from harness.analysis.limits import called, client_limits, killed
from harness.analysis.schedule import counts_arrivals
from harness.analysis.tally import CellCounts
from harness.rundir.manifest import CellRun, Run
from harness.rundir.records import CLOSING_S, LATE_READ_S, MAX_CPU, ProcessMark
from harness.rundir.samples import MAX_GAP_S
from harness.scenario import Load, is_open_loop, max_concurrency
from harness.summary import (
    OPEN,
    Answers,
    CellSummary,
    ClientLimit,
    Comparison,
    MachineLoad,
    Numbers,
    Reason,
    Row,
    ServerLoad,
    WarmupResult,
    because,
)
from harness.workers import Workers

MAX_TOKEN_DIFFERENCE = 0.01
MAX_FOREIGN_MEMORY = 0.25  # of a GPU; a desktop on an APU needs some
MAX_COALESCED = 0.01
MAX_OPENED = 0.10  # of the requests
MAX_RESENT = 0.01  # of the requests
MAX_HEAT = 0.05  # of the measured time in which heat holds a GPU back
MAX_ENERGY_DIFFERENCE = 0.10  # between power readings and a counter of the GPU
GAP_S = 3600.0  # an hour without a measurement: the machine may be warmer, or busy with something else
HOST_CPU_FULL = 0.95  # of all cores, on average


class Findings(Struct, frozen=True):
    reasons: list[Reason]
    notes: list[Reason]
    limits: list[ClientLimit] = []  # where the load generator was the limit; all of them are reasons or notes as well


class Evidence(Struct, frozen=True, kw_only=True):
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
    warmup: WarmupResult | None = None
    going_on: bool = False  # the run has not ended, as far as its files say
    imported: bool = False  # by another tool, whose load processes left no marks
    workers: Workers | None = None  # on other machines


def of_cell(evidence: Evidence) -> Findings:
    """The reasons why a cell is invalid, the notes on it, and where the load generator limited it."""
    ran, tally = evidence.ran, evidence.tally
    found = client_limits(evidence.load, tally, evidence.numbers, evidence.marks, evidence.workers)
    limits = [limit for limit, _ in found]
    reasons = [
        *_end(evidence),
        *(() if ran is None else (*_server(ran, evidence.server_load), *_memory(ran), *ran.problems)),
        *(() if evidence.imported else (*_processes(evidence), *_contradictions(evidence))),
        *_work(evidence),
        *_prompts(evidence),
        *_bad_counts(tally),
        # Of a cell that was cut, what is missing is already known to be missing.
        *(() if ran is None or ran.problems or evidence.mixed else _tokens(tally, evidence.server_load)),
        *(reason for limit, reason in found if limit.invalid),
        *_heat(evidence, invalid=True),
    ]
    notes = [*(reason for limit, reason in found if not limit.invalid), *_notes(evidence, limits)]
    return Findings(_of(evidence.cell, reasons), _of(evidence.cell, notes), limits)


def _of(cell: str, reasons: Iterable[Reason]) -> list[Reason]:
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


def not_run(run: Run) -> list[str]:
    return [] if run.status == "live" else [cell for cell in run.order if cell not in run.ran]


def _end(evidence: Evidence) -> Iterator[Reason]:
    if not (evidence.reached or evidence.going_on):
        yield because("not_reached")
    elif evidence.ran is None:
        yield because("going_on" if evidence.going_on else "not_ended")


def _server(ran: CellRun, load: ServerLoad) -> Iterator[Reason]:
    served = ran.served_by
    if served.oom_killed:
        yield because("out_of_memory")
    if served.exit_code is not None and served.death is None and not ran.problems:
        yield because("server_exit", exit_code=served.exit_code)
    if served.restarts:
        yield because("server_restarted", times=served.restarts)
    elif load.restarted:
        yield because("counters_restarted")


def _memory(ran: CellRun) -> Iterator[Reason]:
    for gpu in ran.gpu_memory_before:
        if gpu.used_bytes > MAX_FOREIGN_MEMORY * gpu.total_bytes:
            sizes = {"used_bytes": gpu.used_bytes, "total_bytes": gpu.total_bytes, "max_share": MAX_FOREIGN_MEMORY}
            yield because("memory_in_use", gpu=gpu.render_node, **sizes)


def _called(evidence: Evidence, process: int) -> str:
    return called(process, evidence.marks, evidence.workers)


def _processes(evidence: Evidence) -> Iterator[Reason]:
    """Load processes without an end record, and records that were lost."""
    starts = {mark.process for mark in evidence.marks if mark.event == "start"}
    ends = {mark.process: mark for mark in evidence.marks if mark.event == "end"}
    planned = evidence.load.processes if evidence.workers is None else evidence.workers.total
    if len(starts) < planned:
        yield because("processes_missing", started=len(starts), planned=planned)
    if dead := killed(evidence.marks):
        names, remote = [_called(evidence, process) for process in dead], evidence.workers is not None
        yield because("processes_killed", processes=names, going_on=evidence.going_on, remote=remote)
    for process, mark in sorted(ends.items()):
        found, name = evidence.tally.by_process[process], _called(evidence, process)
        if mark.sent is not None and mark.sent != found:
            yield because("records_lost", process=name, sent=mark.sent, found=found)
        elif mark.recorded is not None and mark.recorded != found:
            yield because("records_unwritten", process=name, recorded=mark.recorded, found=found)
    if evidence.ran is not None and not evidence.ran.problems:
        yield from _cut_short(evidence, ends)


def _contradictions(evidence: Evidence) -> Iterator[Reason]:
    """What no load process writes: duplicate records or marks, times that contradict each other."""
    if repeated := evidence.tally.repeated():
        yield because("request_repeated", requests=len(repeated), indices=repeated[:5])
    for (process, event), times in Counter((mark.process, mark.event) for mark in evidence.marks).items():
        if times > 1:
            yield because("mark_repeated", process=_called(evidence, process), marks=times, event=event)
    if backwards := evidence.tally.backwards:
        yield because("times_contradict", answers=backwards)


def _cut_short(evidence: Evidence, ends: Mapping[int, ProcessMark]) -> Iterator[Reason]:
    """Load processes that sent for less than the time that was asked for, and users that were not there."""
    load, asked_s, complete = evidence.load, evidence.load.duration_s, True
    for process, mark in sorted(ends.items()):
        if mark.left_s and asked_s and _stopped_s(evidence) is None:  # if stopped as planned, nothing is missing
            yield because("stopped_early", process=_called(evidence, process), left_s=mark.left_s, asked_s=asked_s)
            complete = False
    if gone := sum(mark.users_gone or 0 for mark in ends.values()):
        yield because("users_gone", gone=gone, users=load.users)
        complete = False
    if asked_s and complete and ends and all(mark.users is not None for mark in ends.values()):
        had = sum(mark.users or 0 for mark in ends.values())
        if had < load.users:
            yield because("users_missing", came=had, users=load.users)


def _work(evidence: Evidence) -> Iterator[Reason]:
    """Whether the work that was planned was done, without more errors than allowed."""
    numbers, load = evidence.numbers, evidence.load
    if load.requests is not None and numbers.sent != load.requests:
        yield because("requests_missing", planned=load.requests, sent=numbers.sent)
    kept = numbers.schedule
    if kept is not None and kept.never_sent and load.requests is None:
        lost = "going_on" if evidence.going_on else "killed"
        yield because(
            "never_sent",
            never_sent=kept.never_sent,
            planned=kept.planned or 0,
            what="arrivals" if counts_arrivals(load) else "requests",
            why=lost if killed(evidence.marks) else "busy",
            users=load.users,
            processes=load.processes,
        )
    if load.requests is not None and numbers.unfinished:
        yield because("work_unfinished", requests=numbers.unfinished)
    rate, allowed = numbers.error_rate, evidence.max_error_rate
    if rate is not None and rate > allowed:
        kinds = {kind: n for kind, n in numbers.errors.items() if kind not in ("unfinished", "abandoned")}
        counts = {"failed": numbers.failed, "sent": numbers.sent, "kinds": kinds}
        yield because("error_rate", **counts, rate=rate, max_rate=allowed)
    ended = evidence.ran is not None and bool(evidence.ran.problems)  # the end of a server closes connections, too
    if numbers.resent > MAX_RESENT * numbers.sent and not ended:
        yield _resent(numbers, max_share=MAX_RESENT)
    # A load that was stopped as planned may have ended before its first answer came.
    if not numbers.succeeded and evidence.reached and (_stopped_s(evidence) is None or numbers.failed):
        yield because("none_succeeded")
    if wrong := evidence.tally.wrong_length:
        trace, tokens = load.trace is not None, load.output_tokens if isinstance(load.output_tokens, int) else None
        yield because("wrong_length", wrong=wrong, answers=numbers.succeeded, tokens=tokens, trace=trace)


def _stopped_s(evidence: Evidence) -> float | None:
    """Measured seconds after which the harness stopped the load as planned."""
    return None if evidence.ran is None else evidence.ran.stopped_after_s


def _resent(numbers: Numbers, **more: float) -> Reason:
    return because("resent", resent=numbers.resent, sent=numbers.sent, within_s=CLOSING_S, **more)


def _prompts(evidence: Evidence) -> Iterator[Reason]:
    """Whether prompts that were made to an exact length have it, but for what a chat template adds to all of them."""
    prompts = evidence.numbers.prompts
    if evidence.exact_prompts and prompts is not None and prompts.otherwise:
        yield because("prompt_lengths", otherwise=prompts.otherwise, prompts=prompts.requests, added=prompts.added)


def _tokens(tally: CellCounts, load: ServerLoad) -> Iterator[Reason]:
    """The server's counter against the tokens of all requests of the cell, warm-up included."""
    served = load.generated_tokens
    if served is None or load.restarted:
        return
    low, high = tally.min_tokens, tally.max_tokens
    missing = low - served if served < low else served - high if high is not None and served > high else 0.0
    if missing > MAX_TOKEN_DIFFERENCE * max(served, low):
        yield because("tokens_differ", server=served, min_tokens=low, max_tokens=high, max_share=MAX_TOKEN_DIFFERENCE)


def _bad_counts(tally: CellCounts) -> Iterator[Reason]:
    """Counts in answers, warm-up included, that are out of bounds."""
    for bad in tally.bad_fields.found.values():
        if bad.code != "type":
            values = {"requests": bad.requests, "code": bad.code, "limit": bad.limit, "got": bad.got}
            yield because("value_out_of_bounds", field=bad.field, **values)


def _heat(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """GPUs that worked for the server and were throttled: for so long that the run is not valid, or for less.

    A limit of power or current is no reason: at full load it is what sets the clocks, of an APU always.
    """
    load, window_s = evidence.machine_load, evidence.numbers.window_s
    for name, gpu in load.gpus.items() if load is not None and window_s else ():
        if gpu.used and gpu.heat_s and (gpu.heat_s > MAX_HEAT * (window_s or 0.0)) == invalid:
            times = {"heat_s": gpu.heat_s, "window_s": window_s, "max_share": MAX_HEAT}
            yield because("gpu_throttled", gpu=name, **times, invalid=invalid)


def _clocks(marks: Sequence[ProcessMark]) -> Iterator[Reason]:
    """How well the clocks of several machines are joined. Latencies need no second clock."""
    errors = [mark.wall_error_s for mark in marks if mark.wall_error_s is not None]
    machines = {mark.host for mark in marks}
    if len(machines) > 1 and errors:
        yield because("clocks_joined", machines=len(machines), error_ms=1000 * max(errors))


def _front(ran: CellRun, load: Load) -> Iterator[Reason]:
    """What is in front of the engine, and how many requests it lets through at once."""
    served, in_flight = ran.served_by, max_concurrency(load)
    yield from served.notes
    if served.max_parallel is not None and in_flight > served.max_parallel:
        yield because("own_queue", in_flight=in_flight, server=served.version, at_once=served.max_parallel)


def _telemetry(load: MachineLoad) -> Iterator[Reason]:
    """Gaps between samples, and an energy that contradicts the GPUs' own counters."""
    if load.gap_max_s >= MAX_GAP_S:
        yield because("telemetry_gap", gap_s=load.gap_max_s, took_s=load.took_max_s or 0.0)
    power_j, counter_j = load.energy_j, load.counted_energy_j
    if power_j and counter_j and abs(power_j - counter_j) > MAX_ENERGY_DIFFERENCE * counter_j:
        yield because("energy_differs", power_j=power_j, counter_j=counter_j, max_share=MAX_ENERGY_DIFFERENCE)


def _shared_reads(tally: CellCounts, numbers: Numbers, limits: Sequence[ClientLimit]) -> Iterator[Reason]:
    """Chunks that arrived together, where the self-check does not report them.

    Of a stream that is faster than a read is late it is not known who put them together: the stamp is of the last one.
    """
    together = tally.coalesced - tally.coalesced_late
    if together <= MAX_COALESCED * tally.chunks or any(limit.what == "shared_reads" for limit in limits):
        return
    share, gap_s = together / tally.chunks, numbers.chunk_gap_s.mean
    fast = gap_s is not None and gap_s < LATE_READ_S
    if fast or tally.coalesced_told < tally.coalesced:
        yield because("shared_reads_unclear", share=share, chunk_s=gap_s if fast else None)
    else:
        yield because("shared_reads_server", share=share)


def _notes(evidence: Evidence, limits: Sequence[ClientLimit]) -> Iterator[Reason]:
    tally, numbers, load, machine = evidence.tally, evidence.numbers, evidence.load, evidence.machine_load
    succeeded, opened = numbers.succeeded, numbers.connect_s
    yield from _clocks(evidence.marks)
    yield from _heat(evidence, invalid=False)
    yield from () if machine is None else _telemetry(machine)
    yield from () if evidence.ran is None else _front(evidence.ran, load)
    yield from note_on(evidence.warmup)
    for bad in tally.bad_fields.found.values():
        if bad.code == "type":
            yield because("value_of_other_type", field=bad.field, requests=bad.requests, got=bad.got)
    if tally.read_clock:
        yield because("read_clock", answers=tally.read_clock, requests=succeeded)
    yield from _shared_reads(tally, numbers, limits)
    # Each load process opens some until it has seen that the server keeps them.
    if opened.n > max(2 * max_concurrency(load) + 2 * load.processes, MAX_OPENED * succeeded):
        took = {"mean_s": opened.mean or 0.0, "max_s": opened.max or 0.0}
        yield because("connections_opened", opened=opened.n, requests=succeeded, **took)
    retried, overflows = numbers.connect_retried, (machine.listen_overflows if machine is not None else None) or 0
    if retried or overflows:
        yield because("listen_queue", retried=retried, overflows=overflows, open_loop=is_open_loop(load))
    if 0 < numbers.resent <= MAX_RESENT * numbers.sent:
        yield _resent(numbers)
    if numbers.retry_after:
        total_s = numbers.retry_after_s or 0.0
        yield because("retry_after", requests=numbers.retry_after, total_s=total_s, open_loop=is_open_loop(load))
    if tally.without_output_tokens and load.endpoint != "embeddings":
        yield because("tokens_unknown", answers=tally.without_output_tokens, requests=succeeded)
    if tally.fewer_tokens and not evidence.imported:
        yield because("tokens_too_few", answers=tally.fewer_tokens, requests=succeeded)
    if numbers.reasoning_tokens and numbers.output_tokens:
        share = numbers.reasoning_tokens / numbers.output_tokens
        yield because("reasoning_share", share=share, tokens=numbers.output_tokens)
    if numbers.tool_calls is not None:
        yield because("tool_calls", answers=succeeded, calls=numbers.tool_calls, valid=numbers.tool_calls_valid)
    if numbers.abandoned:
        yield because("abandoned", requests=numbers.abandoned)
    if load.requests is None and numbers.unfinished:
        drained = whole(evidence.ran, evidence.marks) and _stopped_s(evidence) is None
        yield because("unfinished", requests=numbers.unfinished, drain_s=load.drain_s if drained else None)


def warmed(counted: CellCounts, marks: Iterable[ProcessMark], first_due_s: float | None = None) -> WarmupResult | None:
    """None where there was none. `first_due_s`: of an open loop, when the first is due after the measurement began."""
    if not counted.warmup:
        return None
    begun, measured, due_s = counted.first_any_s, counted.begun_s, counted.schedule.first_due_s
    if measured is None:
        # At first there may be no request.
        measured = counted.first_sent_s if first_due_s is None or due_s is None else due_s - first_due_s
    said = [mark.steady for mark in marks if mark.steady is not None]
    return WarmupResult(
        requests=counted.warmup,
        seconds=None if begun is None or measured is None else measured - begun,
        steady=all(said) if said else None,  # of several machines each looks at what it sent
    )


def note_on(warm: WarmupResult | None) -> list[Reason]:
    """A note on a warm-up that was to last until the server is steady."""
    if warm is None or warm.steady is None:
        return []
    return [because("steady" if warm.steady else "not_steady", requests=warm.requests, seconds=warm.seconds)]


# Notes on a run as a whole.


def sessions_of(run: Run) -> dict[str, int]:
    """The session of each cell that came to its end, from 0: a new one begins after a resume or a pause of GAP_S."""
    resumed = [one.wall_s for one in run.resumed]
    found: dict[str, int] = {}
    session, ended_s = 0, math.inf
    for cell in sorted(run.ran.values(), key=lambda cell: cell.started_wall_s):
        since = [at for at in resumed if ended_s < at <= cell.started_wall_s]
        session += bool(since) or cell.started_wall_s - ended_s >= GAP_S
        found[cell.id] = session
        ended_s = cell.ended_wall_s or cell.started_wall_s
    return found


def of_sessions(run: Run) -> Iterator[Reason]:
    """When a run was resumed, and pauses of hours between its cells."""
    if run.resumed:
        yield because(
            "resumed",
            times=len(run.resumed),
            at=[one.wall_s for one in run.resumed],
            again=len({cell for one in run.resumed for cell in one.again}),
            attempts=[one.attempts for one in run.resumed if one.attempts],
        )
    cells = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    pauses = [
        after.started_wall_s - (before.ended_wall_s or before.started_wall_s)
        for before, after in itertools.pairwise(cells)
    ]
    if longest := [pause for pause in pauses if pause >= GAP_S]:
        yield because("hours_apart", gaps=len(longest), hours=max(longest) / 3600)


def of_budget(run: Run, comparison: Comparison | None) -> Iterator[Reason]:
    """How far the budget of a run went: rows that were not measured, and verdicts that are open."""
    if run.budget is None:
        return
    verdicts = [] if comparison is None else comparison.verdicts
    decided, looks = sum(one.reason is None for one in verdicts), len(run.budget.looks)
    yield because("budget", seconds=run.budget.seconds, decided=decided, verdicts=len(verdicts), looks=looks)
    if run.budget.unmeasured:
        yield because("budget_unmeasured", rows=run.budget.unmeasured)
    if left := [one for one in verdicts if one.reason in OPEN]:
        names = list(dict.fromkeys(one.side for one in left))
        needed = [one.needed for one in left if one.needed is not None]
        yield because("budget_open", rows=names, needed=max(needed) if len(needed) == len(left) else None)


def of_answers(rows: Sequence[Row], comparison: Comparison | None) -> list[Reason]:
    """Where of two compared rows one has more valid or more right answers."""
    named = {row.name: row.pooled.answers for row in rows}
    found = comparison.verdicts if comparison is not None else []
    notes = [
        answer_difference(side, [named.get(side)], base, [named.get(base)])
        for side, base in dict.fromkeys((verdict.side, verdict.baseline) for verdict in found)
    ]
    return [note for note in notes if note is not None]


def answer_difference(
    side: str, answers: Sequence[Answers | None], baseline: str, others: Sequence[Answers | None]
) -> Reason | None:
    """A note that the answers of two sides, each of one or more runs, differ in quality; None where they do not."""
    pairs = {
        "valid": [_sum(answers, "valid", "checked"), _sum(others, "valid", "checked")],
        "right": [_sum(answers, "right", "labelled"), _sum(others, "right", "labelled")],
    }
    unequal = {
        word: [mine, other]
        for word, (mine, other) in pairs.items()
        if mine[1] and other[1] and mine[0] * other[1] != other[0] * mine[1]
    }
    return because("answers_differ", side=side, baseline=baseline, **unequal) if unequal else None


def _sum(answers: Sequence[Answers | None], number: str, of: str) -> list[int]:
    known = [one for one in answers if one is not None]
    return [sum(getattr(one, number) or 0 for one in known), sum(getattr(one, of) for one in known)]


def of_failed_settings(rows: Iterable[Row]) -> list[Reason]:
    """A note on each setting of a sweep that failed: one for all rows of a server that did not start."""
    found: dict[tuple[str, str], Reason] = {}
    for row in rows:
        if row.failed is not None:
            which = row.server if row.failed.code == "setting_not_started" else row.name
            found.setdefault((which, row.failed.code), because("setting_failed", row=which, why=row.failed))
    return list(found.values())


def of_token_counters(cells: Sequence[CellSummary]) -> Iterator[Reason]:
    """Where the client's count of tokens was not checked against the server's, whose counter knows no stages."""
    alone = [cell for cell in cells if cell.stage is None]
    if unchecked := sum(cell.server_load.generated_tokens is None for cell in alone):
        yield because("no_token_counter", cells=unchecked, of=len(cells))
    if len(alone) < len(cells):
        yield because("stages_unchecked")


def of_host_cpu(cells: Sequence[CellSummary], marks: Iterable[ProcessMark]) -> Iterator[Reason]:
    """A busy host next to a load generator that had enough: no fault of the run, but readers ask about it."""
    loads = [cell.machine_load for cell in cells if cell.machine_load is not None]
    full = [share for load in loads if (share := load.host_cpu_mean) is not None and share >= HOST_CPU_FULL]
    if full:
        client = max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None)
        yield because("host_cpu_full", cells=len(full), share=max(full), client=client, max_share=MAX_CPU)
