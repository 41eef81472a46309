"""Checks whether a run is valid, by the rules of docs/method.md.

A reason makes a cell and its run INVALID. A note is what readers of a valid run should know.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.analysis import derive
from harness.analysis.derive import MIN_PROMPT_SHARE
from harness.analysis.hang import Hang, find_hang
from harness.analysis.latencies import latency_sample
from harness.analysis.limits import (
    client_errors,
    client_limits,
    killed_processes,
    process_name,
    read_clock_answers,
    users_remedy,
)
from harness.analysis.numbers import generated_tokens, prompt_lengths
from harness.analysis.schedule import counts_arrivals, due_times_s
from harness.base.columns import WORK
from harness.base.summary import (
    LARGE,
    CellSummary,
    ClientLimit,
    MachineLoad,
    Numbers,
    Reason,
    Row,
    ServerLoad,
    WarmupResult,
    because,
)
from harness.records.manifest import CellRun, Run, ServedBy
from harness.records.records import CLOSING_S, KNOWN_FINISHES, MAX_CPU, OBSERVED, SLACK_S, ProcessMark
from harness.records.run_data import CellData
from harness.records.samples import MAX_GAP_S, MetricsSample
from harness.records.table import Rows, Words
from harness.scenario import Load, RequestTokens, is_open_loop, max_concurrency
from harness.scenario.workers import Workers

MAX_TOKEN_DIFFERENCE = 0.01
MAX_FOREIGN_MEMORY = 0.25  # of a GPU's memory; a desktop on an APU needs some
MAX_COALESCED = 0.01
MAX_OPENED = 0.10  # of the requests
MAX_RESENT = 0.01  # of the requests
MAX_SILENT = 0.01  # of the requests, each silent for longer than ...
SILENT_S = 30.0  # ... this, and ...
SILENT_TIMES = 10.0  # ... so many times the median wait for the first token, or for the next one
MAX_HEAT = 0.05  # of the measured time, throttled by heat
MAX_ENERGY_DIFFERENCE = 0.10  # between power readings and the GPU's energy counter
MIN_HANG_S = 30.0  # a shorter silence is no hang, ...
HANG_TIMES = 10.0  # ... nor is one below so many times the median TTFT
MAX_NAMES = 10  # different finish reasons or models that are counted by name
NOTED_HANG_S = 5.0  # where the metrics are silent, too
GAP_S = 3600.0  # after a pause this long, the machine may be warmer or busy
HOST_CPU_FULL = 0.95  # of all cores, on average


class Findings(Struct, frozen=True):
    reasons: list[Reason]
    notes: list[Reason]
    limits: list[ClientLimit] = []  # of the load generator; each is also a note
    client_error: dict[str, tuple[float, float]] = {}  # see CellSummary


class Evidence(Struct, frozen=True, kw_only=True):
    """What is known of one cell."""

    cell: str
    ran: CellRun | None  # None: the run ended before the cell did
    was_reached: bool = True  # False: a stage that the load did not reach
    load: Load
    max_error_rate: float
    data: CellData
    numbers: Numbers
    server_load: ServerLoad
    machine_load: MachineLoad | None = None
    marks: Sequence[ProcessMark]
    last_sample: MetricsSample | None = None  # the last one of the server's metrics
    model: str | None = None  # that most answers of the server name in this run
    sends_finish: bool = False  # a streamed answer of the server had a finish reason in this run
    exact_prompts: bool = False  # prompts were made to an exact number of tokens
    tokens: RequestTokens | None = None  # of its requests
    shared_server: bool = False  # the server served other loads at the same time
    warmup: WarmupResult | None = None
    running: bool = False  # the run has not ended, as far as its files show
    imported: bool = False  # from another tool, whose load processes have no start and end records
    workers: Workers | None = None  # on other machines

    @property
    def stopped_after_s(self) -> float | None:
        """Measured seconds after which the harness stopped the load as planned; None: it did not."""
        return None if self.ran is None else self.ran.stopped_after_s

    @property
    def never_measured(self) -> bool:
        """Whether the harness stopped the load as planned before a measured request; some processes may not have
        started by then."""
        return self.stopped_after_s == 0

    @property
    def good(self) -> Rows:
        """The counted requests that succeeded."""
        return self.data.counted.where(self.data.counted.good)

    def process_name(self, process: int) -> str:
        return process_name(process, self.marks, self.workers)


def check_cell(evidence: Evidence) -> Findings:
    """The reasons why a cell is invalid, the notes on it, and where the load generator limited it."""
    found = client_limits(evidence.load, evidence.data, evidence.numbers, evidence.marks, evidence.workers)
    limits = [limit for limit, _ in found]
    errors = client_errors(evidence.load, evidence.data, evidence.numbers, evidence.marks, limits)
    reasons = [
        *_server_reasons(evidence),
        *(() if evidence.imported else (*_process_reasons(evidence), *_contradiction_reasons(evidence))),
        *_model_reasons(evidence),
        *_finish_reasons(evidence, invalid=True),
        *_hang_reasons(evidence, invalid=True),
        *_work_reasons(evidence),
        *_count_reasons(evidence),
        *_throttling_reasons(evidence, invalid=True),
    ]
    notes = [*(reason for _, reason in found), *_notes(evidence, limits)]
    return Findings(
        reasons=[replace(reason, cell=evidence.cell) for reason in reasons],
        notes=[replace(note, cell=evidence.cell) for note in notes],
        limits=limits,
        client_error=errors,
    )


def with_client_errors(
    cells: Sequence[CellSummary], is_judged: Callable[[str, CellSummary], bool]
) -> list[CellSummary]:
    """The cells of a row, with a problem where the load generator's delays are too large a part of what decides.

    The value is that of the row, so the mean error of its cells counts. `is_judged`: whether a verdict or a check needs
    the metric of a cell more exactly.
    """
    metrics = dict.fromkeys(metric for cell in cells for metric in cell.client_error)
    shares = {
        metric: statistics.fmean(max(cell.client_error.get(metric, (0.0,))) for cell in cells) for metric in metrics
    }
    found = []
    for cell in cells:
        too_large = [
            metric
            for metric, error in cell.client_error.items()
            if min(shares[metric], max(error)) > LARGE and is_judged(metric, cell)
        ]
        if too_large:
            worst = max(too_large, key=lambda metric: max(cell.client_error[metric]))
            values = {"metric": worst, "share": max(cell.client_error[worst]), "max_share": LARGE}
            fields = {metric if metric in WORK else f"{metric.rpartition('_')[0]}_s" for metric in too_large}
            cell = replace(
                cell,
                problems=[*cell.problems, Reason("client_error", values=values, cell=cell.id)],
                limits=[replace(limit, invalid=not fields.isdisjoint(limit.numbers)) for limit in cell.limits],
            )
        found.append(cell)
    return found


def ended_normally(ran: CellRun | None, marks: Sequence[ProcessMark]) -> bool:
    """Whether a cell's load ended as planned."""
    return ran is not None and not ran.problems and not killed_processes(marks)


def run_reasons(run: Run, damaged: Mapping[str, Sequence[int]], unknown_cells: Mapping[str, int]) -> list[Reason]:
    """Return the reasons that make the whole run invalid, so that no row of it has a verdict.

    `damaged`: numbers of unreadable lines by file. `unknown_cells`: number of records by unknown cell.
    """
    reasons = list(run.reasons) if run.status in ("failed", "interrupted", "live") else []
    reasons += [
        because("unreadable_lines", file=file, lines=list(lines[:5]), total=len(lines))
        for file, lines in damaged.items()
        if lines
    ]
    return reasons + [
        because("unknown_cell", records=count, unknown=cell) for cell, count in sorted(unknown_cells.items())
    ]


def missing_cells(run: Run) -> list[str]:
    """Planned cells that did not run. A live load has none."""
    return [] if run.status == "live" else [cell for cell in run.order if cell not in run.ran]


def _server_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Cells that did not end, servers that died, and GPU memory that another process held."""
    ran = evidence.ran
    if not (evidence.was_reached or evidence.running or evidence.never_measured):
        yield because("not_reached")
    elif ran is None:
        yield because("going_on" if evidence.running else "not_ended")
    if ran is None:
        return
    served = ran.served_by
    if served.oom_killed:
        yield because("out_of_memory")
    if served.exit_code is not None and served.death is None and not ran.problems:
        yield because("server_exit", exit_code=served.exit_code)
    if served.restarts:
        yield because("server_restarted", times=served.restarts)
    elif evidence.server_load.restarted:
        yield because("counters_restarted")
    for gpu in ran.gpu_memory_before:
        if gpu.used_bytes > MAX_FOREIGN_MEMORY * gpu.total_bytes:
            sizes = {"used_bytes": gpu.used_bytes, "total_bytes": gpu.total_bytes, "max_share": MAX_FOREIGN_MEMORY}
            yield because("memory_in_use", gpu=gpu.render_node, **sizes)
    yield from ran.problems


def _process_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Load processes that did not start or end, and records that were lost."""
    starts = {mark.process for mark in evidence.marks if mark.event == "start"}
    ends = {mark.process: mark for mark in evidence.marks if mark.event == "end"}
    planned = evidence.load.processes if evidence.workers is None else evidence.workers.total
    if len(starts) < planned and not evidence.never_measured:
        yield because("processes_missing", started=len(starts), planned=planned)
    if killed := killed_processes(evidence.marks):
        names = list(map(evidence.process_name, killed))
        yield because("processes_killed", processes=names, going_on=evidence.running)
    for process, mark in sorted(ends.items()):
        found = int((evidence.data.rows.process == process).sum())
        if mark.sent is not None and mark.sent != found:
            yield because("records_lost", process=evidence.process_name(process), sent=mark.sent, found=found)
    if evidence.ran is not None and not evidence.ran.problems:
        yield from _missing_load_reasons(evidence, ends)


def _contradiction_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Duplicate records, and times that contradict each other. No load process writes these."""
    indices, times = np.unique(evidence.data.rows.index, return_counts=True)
    if repeated := indices[times > 1].tolist():  # each request of the sequence is sent once
        yield because("request_repeated", requests=len(repeated), indices=repeated[:5])
    if contradicting := int(derive.has_contradicting_times(evidence.good).sum()):
        yield because("times_contradict", answers=contradicting)
    yield from _times_reasons(evidence)


def _times_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Requests that were sent before the start of their load process, ended after its end, or have no such process."""
    rows, clock = evidence.data.rows, evidence.data.clock
    starts = {mark.process: mark.monotonic_s for mark in evidence.marks if mark.event == "start"}
    ends = {mark.process: mark.monotonic_s for mark in evidence.marks if mark.event == "end"}
    for process in np.unique(rows.process).tolist():
        of_process, start_s = rows.where(rows.process == process), starts.get(process)
        if start_s is None:
            yield because("process_unknown", process=process, requests=len(of_process))
            continue
        sent_s = of_process.sent_s - clock.offset_s(process)  # on the clock of the process
        before_s = start_s - float(sent_s.min())
        after_s = float((sent_s + of_process.ended_s).max()) - ends.get(process, math.inf)
        if max(before_s, after_s) > SLACK_S:
            name = evidence.process_name(process)
            yield because("times_outside", process=name, before_s=max(0.0, before_s), after_s=max(0.0, after_s))


def _model_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Answers of another model than the others of this server."""
    models = name_counts(evidence.good.model)
    if len(models) > 1 or (models and evidence.model is not None and evidence.model not in models):
        yield because("model_changed", usual=evidence.model, models=dict(models.most_common()))


def _finish_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """Streamed answers without a finish reason: cut where the server sends them in others, else only a note."""
    streamed = evidence.good.where(derive.streamed(evidence.good))
    without = int(streamed.finish.is_in(None).sum())
    if without and evidence.sends_finish == invalid:
        yield because("finish_missing", answers=without, requests=len(streamed), cut=invalid)


def _hang_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """A server that hung until the end of the load: for long, or so shortly that it is only a note."""
    clock, sample = evidence.data.clock, evidence.last_sample
    last_sample_s = None if sample is None or clock.anchor_s is None else sample.wall_s - clock.anchor_s
    hang = find_hang(evidence.data.rows, last_sample_s, NOTED_HANG_S)
    if hang is None or evidence.imported:
        return
    is_long = hang.seconds >= max(MIN_HANG_S, HANG_TIMES * (median_waits_s(evidence.data)[0] or 0.0))
    if is_long == invalid and (invalid or hang.without_metrics):
        yield _hang_reason(hang, clock.start_s, sample)


def _hang_reason(hang: Hang, start_s: float, sample: MetricsSample | None) -> Reason:
    values = {} if sample is None else sample.values
    return because(
        "server_hung",
        second=hang.begin_s - start_s,
        seconds=hang.seconds,
        requests=hang.requests,
        without_metrics=hang.without_metrics,
        state={key: int(values[key]) for key in ("running", "waiting") if key in values},
        kv_usage=values.get("kv_usage"),
    )


def _missing_load_reasons(evidence: Evidence, ends: Mapping[int, ProcessMark]) -> Iterator[Reason]:
    """Load processes that stopped early, and missing users."""
    load, asked_s, complete = evidence.load, evidence.load.duration_s, True
    for process, mark in sorted(ends.items()):
        if mark.left_s and asked_s and evidence.stopped_after_s is None:
            name = evidence.process_name(process)
            yield because("stopped_early", process=name, left_s=mark.left_s, asked_s=asked_s)
            complete = False
    if gone := sum(mark.users_gone or 0 for mark in ends.values()):
        yield because("users_gone", gone=gone, users=load.users)
        complete = False
    if asked_s and complete and ends and all(mark.users is not None for mark in ends.values()):
        had = sum(mark.users or 0 for mark in ends.values())
        if had < load.users:
            yield because("users_missing", came=had, users=load.users)


def _work_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Planned work that was not done, and more errors than allowed."""
    numbers, load = evidence.numbers, evidence.load
    if load.requests is not None and numbers.sent != load.requests:
        yield because("requests_missing", planned=load.requests, sent=numbers.sent)
    schedule = numbers.schedule
    if schedule is not None and schedule.never_sent and load.requests is None:
        what = "arrivals" if counts_arrivals(load) else "requests"
        counts = {"never_sent": schedule.never_sent, "planned": schedule.planned or 0, "what": what}
        yield because("never_sent", **counts, remedy=users_remedy(load, evidence.marks))
    if load.requests is not None and numbers.unfinished:
        yield because("work_unfinished", requests=numbers.unfinished)
    if evidence.stopped_after_s is None:
        yield from _silent_reasons(evidence)
    rate, allowed = numbers.error_rate, evidence.max_error_rate
    if rate is not None and rate > allowed:
        kinds = {kind: n for kind, n in numbers.errors.items() if kind not in ("unfinished", "abandoned")}
        counts = {"failed": numbers.failed, "sent": numbers.sent, "kinds": kinds}
        yield because("error_rate", **counts, rate=rate, max_rate=allowed)
    server_ended = evidence.ran is not None and bool(evidence.ran.problems)  # it closes connections when it ends
    if numbers.resent > MAX_RESENT * numbers.sent and not server_ended:
        yield _resent_reason(numbers, max_share=MAX_RESENT)
    # A load that was stopped as planned may have ended before its first answer.
    if not numbers.succeeded and evidence.was_reached and (evidence.stopped_after_s is None or numbers.failed):
        yield because("none_succeeded")
    if wrong := int(derive.has_wrong_length(evidence.good).sum()):
        trace, tokens = load.trace is not None, load.output_tokens if isinstance(load.output_tokens, int) else None
        yield because("wrong_length", wrong=wrong, answers=numbers.succeeded, tokens=tokens, trace=trace)


def _silent_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Requests that the server left without a token for much longer than others."""
    rows, sent = evidence.data.counted, evidence.numbers.sent
    long = rows.where((rows.ended_s > SILENT_S) & ~(rows.good & (rows.chunks == 0)))  # an answer in one piece: no wait
    if len(long) <= MAX_SILENT * sent:
        return
    first_s, next_s = (max(SILENT_S, SILENT_TIMES * (median_s or 0.0)) for median_s in median_waits_s(evidence.data))
    waits_s = derive.silences_s(long)
    longest_s = np.maximum(*waits_s)[(waits_s[0] > first_s) | (waits_s[1] > next_s)]
    if len(longest_s) > MAX_SILENT * sent:
        limits = {"first_s": first_s, "next_s": next_s, "max_share": MAX_SILENT}
        yield because("requests_silent", requests=len(longest_s), sent=sent, longest_s=float(longest_s.max()), **limits)


def median_waits_s(cell: CellData) -> tuple[float | None, float | None]:
    """The median wait for the first token (without streaming: for the answer), and for a further one."""
    times = latency_sample(cell, "ttft_s").of_state(OBSERVED)
    if not len(times):
        times = latency_sample(cell, "e2e_s").of_state(OBSERVED)
    gaps = cell.counted_gaps
    return float(np.median(times)) if len(times) else None, gaps.percentile_s(500) if gaps.n else None


def name_counts(names: Words) -> Counter[str]:
    """The number of rows of each name; all beyond the first MAX_NAMES are counted as one."""
    counts: Counter[str] = Counter()
    for name, count in names.counts().items():
        counts[name if len(counts) < MAX_NAMES else "others"] += count
    return counts


def _resent_reason(numbers: Numbers, **values: float) -> Reason:
    return because("resent", resent=numbers.resent, sent=numbers.sent, within_s=CLOSING_S, **values)


def _count_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Lengths and counts that contradict the plan, their bounds, or the server's own counter."""
    good, ran, served = evidence.good, evidence.ran, evidence.server_load.generated_tokens
    prompts = evidence.numbers.prompts
    # A chat template adds the same number of tokens to all prompts.
    if evidence.exact_prompts and prompts is not None and prompts.otherwise:
        yield because("prompt_lengths", otherwise=prompts.otherwise, prompts=prompts.requests, added=prompts.added)
    short, known = int(derive.has_short_prompt(good).sum()), prompt_lengths([good])
    if short and known is not None:
        tokens = {"planned": known.asked, "counted": known.got}
        counts = {"short": short, "prompts": known.requests}
        yield because("prompts_short", **counts, **tokens, min_share=MIN_PROMPT_SHARE)
    more = int(derive.has_more_pieces(good).sum())
    if more and not evidence.imported:
        yield because("more_pieces", answers=more, requests=evidence.numbers.succeeded)
    for requests, bad in evidence.data.bad.values():
        if bad.code in ("below", "above"):
            values = {"requests": requests, "code": bad.code, "limit": bad.limit, "got": bad.got}
            yield because("value_out_of_bounds", field=bad.field, **values)
    # A cell that was cut already has a reason for its missing tokens.
    # While a probe of a capacity search runs, the server may still work on requests of the last one.
    is_shared = evidence.shared_server or evidence.stopped_after_s is not None
    if ran is None or ran.problems or is_shared or served is None or evidence.server_load.restarted:
        return
    low, high = generated_tokens(evidence.data.rows)
    difference = max(low - served, 0.0 if high is None else served - high)
    if difference > MAX_TOKEN_DIFFERENCE * max(served, low):
        yield because("tokens_differ", server=served, min_tokens=low, max_tokens=high, max_share=MAX_TOKEN_DIFFERENCE)


def _throttling_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """GPUs that the server used and heat throttled: long enough to make the run invalid, or for a shorter time.

    Limits of power or current do not count: at full load they normally set the clocks.
    """
    load, window_s = evidence.machine_load, evidence.numbers.window_s
    for name, gpu in load.gpus.items() if load is not None and window_s else ():
        if gpu.used and gpu.heat_s and (gpu.heat_s > MAX_HEAT * (window_s or 0.0)) == invalid:
            times = {"heat_s": gpu.heat_s, "window_s": window_s, "max_share": MAX_HEAT}
            yield because("gpu_throttled", gpu=name, **times, invalid=invalid)


def _context_note(served: ServedBy, tokens: RequestTokens | None) -> Iterator[Reason]:
    limit = None if served.startup is None else served.startup.max_model_len
    if limit is not None and tokens is not None and tokens.prompt_max + tokens.output_max > limit:
        yield because("context_short", needed=tokens.prompt_max + tokens.output_max, limit=limit)


def queue_notes(served: ServedBy, load: Load) -> Iterator[Reason]:
    """Yield a note if this load has more requests in flight than the server, or its engine, works on at once."""
    in_flight, slots = max_concurrency(load), served.effective.get("parallel")
    if isinstance(slots, int) and in_flight > slots:
        yield because("engine_slots", in_flight=in_flight, slots=slots)
    if served.max_parallel is not None and in_flight > served.max_parallel:
        yield because("own_queue", in_flight=in_flight, server=served.version, at_once=served.max_parallel)


def _telemetry_notes(load: MachineLoad) -> Iterator[Reason]:
    """Gaps between samples, and an energy that contradicts the GPUs' own counters."""
    if load.gap_max_s >= MAX_GAP_S:
        yield because("telemetry_gap", gap_s=load.gap_max_s, took_s=load.took_max_s or 0.0)
    power_j, counter_j = load.energy_j, load.counted_energy_j
    if power_j and counter_j and abs(power_j - counter_j) > MAX_ENERGY_DIFFERENCE * counter_j:
        yield because("energy_differs", power_j=power_j, counter_j=counter_j, max_share=MAX_ENERGY_DIFFERENCE)


def _notes(evidence: Evidence, limits: Sequence[ClientLimit]) -> Iterator[Reason]:
    good, numbers, load, machine = evidence.good, evidence.numbers, evidence.load, evidence.machine_load
    succeeded, opened = numbers.succeeded, numbers.connect_s
    yield from _throttling_reasons(evidence, invalid=False)
    yield from _hang_reasons(evidence, invalid=False)
    if machine is not None:
        yield from _telemetry_notes(machine)
    if evidence.ran is not None:
        yield from evidence.ran.served_by.notes
        yield from _context_note(evidence.ran.served_by, evidence.tokens)
        yield from queue_notes(evidence.ran.served_by, load)
    if (warmup := evidence.warmup) is not None and warmup.steady is not None:
        yield because("steady" if warmup.steady else "not_steady", requests=warmup.requests, seconds=warmup.seconds)
    for requests, bad in evidence.data.bad.values():
        if bad.code == "type":
            yield because("value_of_other_type", field=bad.field, requests=requests, got=bad.got)
        elif bad.code == "zero":
            yield because("value_zero", field=bad.field, requests=requests)
    if by_read := read_clock_answers(evidence.data):
        yield because("read_clock", answers=by_read, requests=succeeded)
    joined, chunks = float((good.coalesced - np.nan_to_num(good.coalesced_late)).sum()), float(good.chunks.sum())
    if joined > MAX_COALESCED * chunks and all(limit.what != "shared_reads" for limit in limits):
        yield because("shared_reads", share=joined / chunks)
    # Each load process opens some connections until it knows that the server keeps them open.
    if opened.n > max(2 * max_concurrency(load) + 2 * load.processes, MAX_OPENED * succeeded):
        times = {"mean_s": opened.mean or 0.0, "max_s": opened.max or 0.0}
        yield because("connections_opened", opened=opened.n, requests=succeeded, **times)
    retried, overflows = numbers.connect_retried, (machine.listen_overflows if machine is not None else None) or 0
    if retried or overflows:
        yield because("listen_queue", retried=retried, overflows=overflows, open_loop=is_open_loop(load))
    if 0 < numbers.resent <= MAX_RESENT * numbers.sent:
        yield _resent_reason(numbers)
    if numbers.retry_after:
        total_s = numbers.retry_after_s or 0.0
        yield because("retry_after", requests=numbers.retry_after, total_s=total_s, open_loop=is_open_loop(load))
    uncounted = int(np.isnan(good.output_tokens).sum())
    if uncounted and load.endpoint != "embeddings":
        yield because("tokens_unknown", answers=uncounted, requests=succeeded)
    yield from _finish_reasons(evidence, invalid=False)
    if finishes := name_counts(good.finish.where(~good.finish.is_in(*KNOWN_FINISHES))):
        yield because(
            "unknown_finish", answers=finishes.total(), requests=succeeded, finishes=dict(finishes.most_common())
        )
    fewer = int(derive.has_fewer_tokens(good).sum())
    if fewer and not evidence.imported:
        yield because("tokens_too_few", answers=fewer, requests=succeeded)
    if numbers.reasoning_tokens and numbers.output_tokens:
        share = numbers.reasoning_tokens / numbers.output_tokens
        yield because("reasoning_share", share=share, tokens=numbers.output_tokens)
    if numbers.tool_calls is not None:
        yield because("tool_calls", answers=succeeded, calls=numbers.tool_calls, valid=numbers.tool_calls_valid)
    for sample, what in ((numbers.ttft_s, "TTFT"), (numbers.ttfo_s, "TTFO")):
        if sample.unknown:
            yield because("latency_unknown", what=what, requests=sample.unknown, of=sample.known + sample.unknown)
    if numbers.abandoned:
        yield because("abandoned", requests=numbers.abandoned)
    if load.requests is None and numbers.unfinished:
        drained = ended_normally(evidence.ran, evidence.marks) and evidence.stopped_after_s is None
        yield because("unfinished", requests=numbers.unfinished, drain_s=load.drain_s if drained else None)


def summarize_warmup(
    cell: CellData, marks: Iterable[ProcessMark], first_due_s: float | None = None
) -> WarmupResult | None:
    """The warm-up of a cell; None where there was none.

    `first_due_s`: of an open loop, seconds from the start of the measured time to its first arrival.
    """
    warmup, counted = int((~cell.rows.measured).sum()), cell.counted
    if not warmup:
        return None
    measured_s, due_s = cell.measured_start_s, due_times_s(counted)
    if measured_s is None and len(counted):
        by_schedule = first_due_s is not None and len(due_s) > 0
        measured_s = float(due_s.min()) - (first_due_s or 0.0) if by_schedule else float(counted.sent_s.min())
    steady = [mark.steady for mark in marks if mark.steady is not None]  # each machine checks its own requests
    return WarmupResult(
        requests=warmup,
        seconds=None if measured_s is None else measured_s - float(cell.rows.sent_s.min()),
        steady=all(steady) if steady else None,
    )


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


def session_notes(run: Run) -> Iterator[Reason]:
    """Notes on resumptions of a run, and on pauses of hours between its cells."""
    if run.resumed:
        yield because(
            "resumed",
            times=len(run.resumed),
            at=[resumption.wall_s for resumption in run.resumed],
            again=len({cell for resumption in run.resumed for cell in resumption.again}),
        )
    cells = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    pauses_s = [
        after.started_wall_s - (before.ended_wall_s or before.started_wall_s)
        for before, after in itertools.pairwise(cells)
    ]
    if long_pauses_s := [pause_s for pause_s in pauses_s if pause_s >= GAP_S]:
        yield because("hours_apart", gaps=len(long_pauses_s), hours=max(long_pauses_s) / 3600)


def budget_notes(run: Run) -> Iterator[Reason]:
    """A note on a run whose time, and not its scenario, decided the number of repeats."""
    if run.budget_s is not None:
        yield because("budget", seconds=run.budget_s, repeats=max((cell.repeat for cell in run.cells), default=0))


def failed_setting_notes(rows: Iterable[Row]) -> list[Reason]:
    """A note on each failed setting of a sweep. All rows of a server that did not start share one note."""
    notes: dict[tuple[str, str], Reason] = {}
    for row in rows:
        if row.failed is not None:
            name = row.server if row.failed.code == "setting_not_started" else row.name
            notes.setdefault((name, row.failed.code), because("setting_failed", row=name, why=row.failed))
    return list(notes.values())


def token_counter_notes(cells: Sequence[CellSummary]) -> Iterator[Reason]:
    """A note on cells whose tokens were not checked against the server's counter, which does not distinguish stages."""
    unchecked = sum(cell.stage is not None or cell.server_load.generated_tokens is None for cell in cells)
    if unchecked:
        yield because("no_token_counter", cells=unchecked, of=len(cells))


def host_cpu_notes(cells: Sequence[CellSummary], marks: Iterable[ProcessMark]) -> Iterator[Reason]:
    """A note on a busy host whose load generator still had enough CPU. The run is valid, but readers ask about it."""
    loads = [cell.machine_load for cell in cells if cell.machine_load is not None]
    full = [share for load in loads if (share := load.host_cpu_mean) is not None and share >= HOST_CPU_FULL]
    if full:
        client = max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None)
        yield because("host_cpu_full", cells=len(full), share=max(full), client=client, max_share=MAX_CPU)
