"""Checks whether a run is valid, by the rules of docs/method.md. A reason makes a cell and its run INVALID."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.measured import Numbers
from harness.base.plausible import MAX_USER_TOK_S
from harness.base.reason import Reason, because
from harness.base.units import GIB, count, gib, percent, verb
from harness.numbers import formulas
from harness.numbers.cell_numbers import generated_tokens, prompt_lengths
from harness.numbers.formulas import MIN_PROMPT_SHARE
from harness.numbers.hang import Hang, find_hang
from harness.numbers.latencies import latency_sample
from harness.numbers.load_generator import killed_processes, process_name, users_remedy
from harness.numbers.schedule import WarmupResult, counts_arrivals
from harness.numbers.user_words import isolation_reasons
from harness.records.columns import Rows, Words
from harness.records.manifest import CellRun, Run
from harness.records.records import CLOSING_S, OBSERVED, SLACK_S, ProcessMark
from harness.records.run_data import CellData
from harness.records.samples import MachineLoad, MetricsSample, ServerLoad
from harness.scenario import Load, RequestTokens, model_at
from harness.scenario.workers import Workers

MAX_TOKEN_DIFFERENCE = 0.01
MAX_FOREIGN_MEMORY = 0.25  # of a GPU's memory; a desktop on an APU needs some
MAX_REFUSED = 0.5  # of the answers, refused or empty
MAX_RESENT = 0.01  # of the requests
MAX_SILENT = 0.01  # of the requests, each silent for longer than ...
SILENT_S = 30.0  # ... this, and ...
SILENT_TIMES = 10.0  # ... so many times the median wait for the first token, or for the next one
MAX_HEAT = 0.05  # of the measured time, throttled by heat
MIN_HANG_S = 30.0  # a shorter silence is no hang, ...
HANG_TIMES = 10.0  # ... nor is one below so many times the median TTFT
MAX_TURN_S = 600.0  # of a turn of an agent whose answers are scored: a rule of MLPerf's edge workload
MAX_NAMES = 10  # different finish reasons or models that are counted by name
NOTED_HANG_S = 5.0  # where the metrics are silent, too

DEATHS = ("server_died", "server_exit", "server_unreachable", "out_of_memory")  # codes of reasons: the server is gone
RESTARTS = (
    "server_restarted", "counters_restarted", "counters_decreased", "backend_lost", "backend_reset",
    "backend_restarted",
)  # fmt: skip
BROKEN = ("connect", "disconnect", "truncated")  # the first errors of a client when the server is gone


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
    clients: Reason | None = None  # of harness.numbers.other_clients

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


def check_cell(evidence: Evidence) -> list[Reason]:
    """The reasons why a cell is invalid."""
    reasons = [
        *_server_reasons(evidence),
        *(() if evidence.imported else (*_process_reasons(evidence), *_contradiction_reasons(evidence))),
        *_model_reasons(evidence),
        *isolation_reasons(evidence.data),
        *finish_reasons(evidence, invalid=True),
        *hang_reasons(evidence, invalid=True),
        *_work_reasons(evidence),
        *refused_reasons(evidence, invalid=True),
        *_count_reasons(evidence),
        *([evidence.clients] if evidence.clients is not None and evidence.clients.code == "other_client" else []),
        *throttling_reasons(evidence, invalid=True),
    ]
    reasons = [replace(reason, cell=evidence.cell) for reason in reasons]
    ended = _last_moment(evidence.data.rows)
    return [
        replace(reason, values=reason.values | ended) if reason.code in (*DEATHS, *RESTARTS) else reason
        for reason in reasons
    ]


def _last_moment(rows: Rows) -> dict[str, Any]:
    """When the first connection of a load broke, in seconds after its first request, and the requests sent until then.

    Where none broke, that is when its last request ended. Warm-up included.
    """
    if not len(rows):
        return {}
    ended_s = rows.sent_s + rows.ended_s
    broken_s = ended_s[rows.error.is_in(*BROKEN)]
    at_s = float(broken_s.min() if len(broken_s) else ended_s.max())
    sent = int((rows.sent_s < at_s).sum())
    return {"after_s": at_s - float(rows.sent_s.min()), "sent": sent, "broken": len(broken_s)}


def ended_normally(ran: CellRun | None, marks: Sequence[ProcessMark]) -> bool:
    """Whether a cell's load ended as planned."""
    return ran is not None and not ran.problems and not killed_processes(marks)


def run_reasons(run: Run, damaged: Mapping[str, Sequence[int]], unknown_cells: Mapping[str, int]) -> list[Reason]:
    """Return the reasons that make the whole run invalid, so that no row of it has a verdict.

    `damaged`: numbers of unreadable lines by file. `unknown_cells`: number of records by unknown cell.
    """
    reasons = list(run.reasons) if run.status in ("failed", "interrupted", "live") else []
    reasons += [
        because(
            "unreadable_lines",
            f"{file}: {count(len(lines), 'line')} cannot be read (first: {', '.join(map(str, lines[:5]))})",
            file=file,
            lines=list(lines[:5]),
            total=len(lines),
        )
        for file, lines in damaged.items()
        if lines
    ]
    for cell, records in sorted(unknown_cells.items()):
        text = f"requests.jsonl: {count(records, 'record')} of the cell '{cell}', which is not in the plan"
        reasons.append(because("unknown_cell", text, records=records, unknown=cell))
    return reasons


def missing_cells(run: Run) -> list[str]:
    """Planned cells that did not run. A live load has none."""
    return [] if run.status == "live" else [cell for cell in run.order if cell not in run.ran]


def _server_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Cells that did not end, servers that died, and GPU memory that another process held."""
    ran = evidence.ran
    if not (evidence.was_reached or evidence.running or evidence.never_measured):
        yield because("not_reached", "it was not reached: the load ended before its turn")
    elif ran is None and evidence.running:
        yield because("going_on", "it has not ended")
    elif ran is None:
        yield because("not_ended", "it did not complete")
    if ran is None:
        return
    served = ran.served_by
    if served.oom_killed:
        yield because("out_of_memory", "the server was killed because memory ran out")
    if served.exit_code is not None and served.death is None and not ran.problems:
        text = f"the server died with exit code {served.exit_code}"
        yield because("server_exit", text, exit_code=served.exit_code)
    if served.restarts:
        text = f"the server was restarted {count(served.restarts, 'time')}"
        yield because("server_restarted", text, times=served.restarts)
    elif evidence.server_load.restarted:
        yield because("counters_restarted", "the server was restarted: its counters restarted at 0")
    elif evidence.server_load.decreased:
        text = "the server's counters went back: a restart, or several servers behind this address"
        yield because("counters_decreased", text)
    for gpu in ran.gpu_memory_before:
        if gpu.used_bytes > MAX_FOREIGN_MEMORY * gpu.total_bytes:
            text = f"{gpu.used_bytes / GIB:.1f} of {gib(gpu.total_bytes)} of the memory of {gpu.render_node} were in "
            text += f"use before the server started; at most {percent(MAX_FOREIGN_MEMORY, 0)} is allowed"
            sizes = {"used_bytes": gpu.used_bytes, "total_bytes": gpu.total_bytes, "max_share": MAX_FOREIGN_MEMORY}
            yield because("memory_in_use", text, gpu=gpu.render_node, **sizes)
    yield from ran.problems


def _process_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Load processes that did not start or end, and records that were lost."""
    starts = {mark.process for mark in evidence.marks if mark.event == "start"}
    ends = {mark.process: mark for mark in evidence.marks if mark.event == "end"}
    planned = evidence.load.processes if evidence.workers is None else evidence.workers.total
    if len(starts) < planned and not evidence.never_measured:
        text = f"{len(starts)} of {count(planned, 'load process', 'load processes')} started"
        yield because("processes_missing", text, started=len(starts), planned=planned)
    if killed := killed_processes(evidence.marks):
        names = list(map(evidence.process_name, killed))
        text = f"load process {', '.join(names)} {'is still running, or ' if evidence.running else ''}was killed or "
        text += "lost: what was sent and not yet recorded is not known (the kernel kills when memory runs out; `dmesg` "
        text += "reports it)"
        yield because("processes_killed", text, processes=names, going_on=evidence.running)
    for process, mark in sorted(ends.items()):
        recorded = int((evidence.data.rows.process == process).sum())
        if mark.sent is not None and mark.sent != recorded:
            name = evidence.process_name(process)
            text = (
                f"load process {name} sent {count(mark.sent, 'request')} and the file has {count(recorded, 'record')}"
            )
            yield because("records_lost", text, process=name, sent=mark.sent, found=recorded)
    if evidence.ran is not None and not evidence.ran.problems:
        yield from _missing_load_reasons(evidence, ends)


def _contradiction_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Duplicate records, and times that contradict each other. No load process writes these."""
    indices, times = np.unique(evidence.data.rows.index, return_counts=True)
    if repeated := indices[times > 1].tolist():  # each request of the sequence is sent once
        text = f"requests.jsonl: {count(len(repeated), 'request')} recorded more than once "
        text += f"(first: index {', '.join(map(str, repeated[:5]))})"
        yield because("request_repeated", text, requests=len(repeated), indices=repeated[:5])
    if contradicting := int(formulas.has_contradicting_times(evidence.good).sum()):
        text = f"requests.jsonl: the times of {count(contradicting, 'answer')} contradict each other (chunks that go "
        text += "back in time, end after their answer or are missing)"
        yield because("times_contradict", text, answers=contradicting)
    yield from _times_reasons(evidence)


def _times_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Requests that were sent before the start of their load process, ended after its end, or have no such process."""
    rows, clock = evidence.data.rows, evidence.data.clock
    starts = {mark.process: mark.monotonic_s for mark in evidence.marks if mark.event == "start"}
    ends = {mark.process: mark.monotonic_s for mark in evidence.marks if mark.event == "end"}
    for process in np.unique(rows.process).tolist():
        own_rows, start_s = rows.where(rows.process == process), starts.get(process)
        if start_s is None:
            text = f"requests.jsonl: {count(len(own_rows), 'request')} of load process {process}, which has no start "
            text += "in processes.jsonl"
            yield because("process_unknown", text, process=process, requests=len(own_rows))
            continue
        sent_s = own_rows.sent_s - clock.offset_s(process)  # on the clock of the process
        before_s = max(0.0, start_s - float(sent_s.min()))
        after_s = max(0.0, float((sent_s + own_rows.ended_s).max()) - ends.get(process, math.inf))
        if max(before_s, after_s) > SLACK_S:
            name = evidence.process_name(process)
            text = f"requests.jsonl: requests of load process {name} were sent {before_s:.3g} s before its start or "
            text += f"ended {after_s:.3g} s after its end"
            yield because("times_outside", text, process=name, before_s=before_s, after_s=after_s)


def _model_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Answers of another model than the others of this server."""
    models = name_counts(evidence.good.model)
    if evidence.load.model is not None:
        yield from _own_model_reasons(evidence)
    elif len(models) > 1 or (models and evidence.model is not None and evidence.model not in models):
        usual = f"; most answers of this server name {evidence.model}" if evidence.model else ""
        text = f"the answers name different models: {counts_text(models)}{usual}. Another model answered requests"
        yield because("model_changed", text, usual=evidence.model, models=dict(models.most_common()))


def _own_model_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Answers of several models to requests for one."""
    good = evidence.good
    asked = np.array([model_at(evidence.load, index) for index in good.index.tolist()], dtype=object)
    for model in dict.fromkeys(asked.tolist()):
        models = name_counts(good.model.where(asked == model))
        if len(models) > 1:
            text = f"requests for {model} were answered by different models: {counts_text(models)}"
            yield because("model_changed", text, usual=model, models=dict(models.most_common()))


def finish_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """Streamed answers without a finish reason: cut where the server sends them in others, else only a note."""
    streamed = evidence.good.where(formulas.streamed(evidence.good))
    without = int(streamed.finish.is_in(None).sum())
    if without and evidence.sends_finish == invalid:
        ended = f"{without:,} of {count(len(streamed), 'streamed answer')} ended without a finish reason"
        text = f"{ended}. No answer of this server has one: whether they are complete is not known"
        if invalid:
            text = f"{ended}, which other answers of this server have: they were cut"
        yield because("finish_missing", text, answers=without, requests=len(streamed), cut=invalid)


def refused_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """Answers that are refusals or empty: most of them, so that the speed is not that of answers, or a few."""
    rows = evidence.data.counted
    refused, empty = rows.good & formulas.is_refused(rows), formulas.is_empty(rows)
    number, answers = int((refused | empty).sum()), int((rows.good | empty).sum())
    # Where all failed, or more than are allowed, that is the reason.
    rate = evidence.numbers.error_rate
    failed = rate is not None and rate > evidence.max_error_rate
    counted = int((rows.good & (refused | empty)).sum()) if failed else number
    if evidence.imported or not counted or not rows.good.any() or (number > MAX_REFUSED * answers) != invalid:
        return
    kinds = {"refused": int(refused.sum()), "empty": int((empty & ~refused).sum())}
    text = f"{number:,} of {count(answers, 'answer')} {verb(number, 'is', 'are')} refused or empty "
    text += f"({counts_text({name: kind for name, kind in kinds.items() if kind})})"
    if not invalid:
        yield because("answers_refused", f"{text}, which count as answers", **kinds, answers=answers, invalid=False)
        return
    text += ": the numbers are not those of answers. Send a prompt of this load by hand; look at the server's filters "
    text += "(guardrails) and at its chat template"
    yield because("answers_refused", text, **kinds, answers=answers, invalid=invalid)


def hang_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
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
    state: dict[str, int] = {key: int(values[key]) for key in ("running", "waiting") if key in values}
    second, kv_usage = hang.begin_s - start_s, values.get("kv_usage")
    silent = "neither the API nor /metrics answered" if hang.without_metrics else "the API did not answer"
    text = f"the server hung: from second {second:.0f} on {silent} for {hang.seconds:.0f} s, although "
    text += f"{count(hang.requests, 'request')} waited"
    text += f"; its last metrics: {counts_text(state)}" if state else ""
    text += f", {percent(kv_usage, 0)} of the KV cache in use" if kv_usage else ""
    return because(
        "server_hung",
        text,
        second=second,
        seconds=hang.seconds,
        requests=hang.requests,
        without_metrics=hang.without_metrics,
        state=state,
        kv_usage=kv_usage,
    )


def _missing_load_reasons(evidence: Evidence, ends: Mapping[int, ProcessMark]) -> Iterator[Reason]:
    """Load processes that stopped early, and missing users."""
    load, asked_s, complete = evidence.load, evidence.load.duration_s, True
    for process, mark in sorted(ends.items()):
        if mark.left_s and asked_s and evidence.stopped_after_s is None:
            name = evidence.process_name(process)
            text = f"load process {name} was stopped (SIGTERM or SIGINT) {mark.left_s:.1f} s before the end of the "
            text += f"{asked_s:g} s to measure; run again"
            yield because("stopped_early", text, process=name, left_s=mark.left_s, asked_s=asked_s)
            complete = False
    if gone := sum(mark.users_gone or 0 for mark in ends.values()):
        text = f"{count(gone, 'user')} of {load.users:,} ended before the load did (an exception, or StopUser in the "
        text += "locustfile): see the log of the load generator"
        yield because("users_gone", text, gone=gone, users=load.users)
        complete = False
    if asked_s and complete and ends and all(mark.users is not None for mark in ends.values()):
        had = sum(mark.users or 0 for mark in ends.values())
        # A probe that the harness stopped measures nothing before all users have started.
        if had < load.users and evidence.stopped_after_s is None:
            text = f"{had:,} of {count(load.users, 'user')} had started at the end of the measured time"
            yield because("users_missing", text, came=had, users=load.users)


def _work_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Planned work that was not done, and more errors than allowed."""
    numbers, load = evidence.numbers, evidence.load
    if load.requests is not None and numbers.sent != load.requests:
        text = f"{load.requests:,} measured requests were planned and {numbers.sent:,} were sent"
        yield because("requests_missing", text, planned=load.requests, sent=numbers.sent)
    yield from _missing_turn_reasons(evidence)
    schedule = numbers.schedule
    if schedule is not None and schedule.never_sent and load.requests is None:
        what, remedy = "arrivals" if counts_arrivals(load) else "requests", users_remedy(load, evidence.marks)
        never_sent, planned = schedule.never_sent, schedule.planned or 0
        text = f"{never_sent:,} of the {planned:,} {what} that were due in the measured time "
        text += f"{verb(never_sent, 'was', 'were')} never sent; "
        text += f"{remedy.text}"
        yield because("never_sent", text, never_sent=never_sent, planned=planned, what=what, remedy=remedy)
    if load.requests is not None and numbers.unfinished:
        text = f"{count(numbers.unfinished, 'request')} of the planned work did not finish"
        yield because("work_unfinished", text, requests=numbers.unfinished)
    if evidence.stopped_after_s is None:
        yield from _silent_reasons(evidence)
    rate, allowed = numbers.error_rate, evidence.max_error_rate
    if rate is not None and rate > allowed:
        kinds = {kind: n for kind, n in numbers.errors.items() if kind not in ("unfinished", "abandoned")}
        text = f"{numbers.failed:,} of {count(numbers.sent, 'request')} "
        text += f"failed{f' ({counts_text(kinds)})' if kinds else ''}: an error rate of {percent(rate)}, and at most "
        text += f"{percent(allowed)} is allowed"
        counts = {"failed": numbers.failed, "sent": numbers.sent, "kinds": kinds}
        yield because("error_rate", text, **counts, rate=rate, max_rate=allowed)
    server_ended = evidence.ran is not None and bool(evidence.ran.problems)  # it closes connections when it ends
    if numbers.resent > MAX_RESENT * numbers.sent and not server_ended:
        yield resent_reason(numbers, max_share=MAX_RESENT)
    # A load that was stopped as planned, or a short stage, may have ended before its first answer.
    is_cut = evidence.stopped_after_s is not None or (bool(load.stages) and numbers.unfinished == numbers.sent)
    if not numbers.succeeded and evidence.was_reached and (numbers.failed or not is_cut):
        yield because("none_succeeded", "no measured request succeeded")
    if wrong := int(formulas.has_wrong_length(evidence.good).sum()):
        trace = load.trace is not None or load.agent_trace is not None
        tokens = load.output_tokens if isinstance(load.output_tokens, int) else None
        text = (
            f"{wrong:,} of {count(numbers.succeeded, 'answer')} {verb(wrong, 'does', 'do')} not have the fixed length "
        )
        text += f"{f'of {tokens:,} tokens ' if tokens else ''}that "
        text += "their row of the trace asks for" if trace else "was asked for"
        yield because("wrong_length", text, wrong=wrong, answers=numbers.succeeded, tokens=tokens, trace=trace)


def _missing_turn_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Turns of scored agents without an answer in time; those that were not sent have a reason of their own."""
    trace, rows = evidence.load.agent_trace, evidence.data.counted
    if trace is None or trace.score is None:
        return
    rate = evidence.numbers.error_rate
    # More failed ones than allowed are the reason `error_rate`.
    failed = 0 if rate is not None and rate > evidence.max_error_rate else evidence.numbers.failed
    late = int((rows.good & (rows.ended_s > MAX_TURN_S)).sum())
    if failed or late:
        text = f"{failed + late:,} of {count(len(rows), 'turn')} {verb(failed + late, 'is', 'are')} missing: "
        text += f"{failed:,} failed, {late:,} took longer than {MAX_TURN_S:g} s"
        yield because("turns_missing", text, failed=failed, late=late, turns=len(rows), max_s=MAX_TURN_S)


def _silent_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Requests that the server left without a token for much longer than others."""
    rows, sent = evidence.data.counted, evidence.numbers.sent
    long = rows.where((rows.ended_s > SILENT_S) & ~(rows.good & (rows.chunks == 0)))  # an answer in one piece: no wait
    if len(long) <= MAX_SILENT * sent:
        return
    first_s, next_s = (max(SILENT_S, SILENT_TIMES * (median_s or 0.0)) for median_s in median_waits_s(evidence.data))
    waits_s = formulas.silences_s(long)
    longest_s = np.maximum(*waits_s)[(waits_s[0] > first_s) | (waits_s[1] > next_s)]
    if len(longest_s) > MAX_SILENT * sent:
        requests, longest_wait_s = len(longest_s), float(longest_s.max())
        text = f"{requests} of {count(sent, 'request')} waited up to {longest_wait_s:.0f} s without a token: more than "
        text += f"{percent(MAX_SILENT, 0)} waited over {first_s:.0f} s for the first or over {next_s:.0f} s for the "
        text += "next one"
        limits = {"first_s": first_s, "next_s": next_s, "max_share": MAX_SILENT}
        yield because("requests_silent", text, requests=requests, sent=sent, longest_s=longest_wait_s, **limits)


def median_waits_s(cell: CellData) -> tuple[float | None, float | None]:
    """The median wait for the first token (without streaming: for the answer), and for a further one."""
    times = latency_sample(cell, "ttft").of_state(OBSERVED)
    if not len(times):
        times = latency_sample(cell, "e2e").of_state(OBSERVED)
    gaps = cell.counted_gaps
    return float(np.median(times)) if len(times) else None, gaps.percentile_s(500) if gaps.n else None


def name_counts(names: Words) -> Counter[str]:
    """The number of rows of each name; all beyond the first MAX_NAMES are counted as one."""
    counts: Counter[str] = Counter()
    for name, number in names.counts().items():
        counts[name if len(counts) < MAX_NAMES else "others"] += number
    return counts


def counts_text(counts: Mapping[str, int]) -> str:
    """Numbers by name: "timeout 3, http 1"."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def resent_reason(numbers: Numbers, **values: float) -> Reason:
    """Requests that were sent twice. `max_share`: of the requests, if more were than are allowed."""
    text = f"{numbers.resent:,} of {count(numbers.sent, 'request')} {verb(numbers.resent, 'was', 'were')} sent twice: "
    text += "the server closed a kept "
    text += f"connection within {CLOSING_S:g} s after a response"
    if values:
        text += f"; at most {percent(MAX_RESENT, 0)} is allowed, because the server may process them twice"
    return because("resent", text, resent=numbers.resent, sent=numbers.sent, within_s=CLOSING_S, **values)


def _count_reasons(evidence: Evidence) -> Iterator[Reason]:
    """Lengths and counts that contradict the plan, their bounds, or the server's own counter."""
    good, ran, served = evidence.good, evidence.ran, evidence.server_load.generated_tokens
    prompts = evidence.numbers.prompts
    # A chat template adds the same number of tokens to all prompts.
    if evidence.exact_prompts and prompts is not None and prompts.otherwise:
        text = f"{prompts.otherwise:,} of {count(prompts.requests, 'prompt')} {verb(prompts.otherwise, 'does', 'do')} "
        text += "not have the exact length that was asked for "
        text += f"(beyond the {prompts.added:,} tokens that were added to most of them): the tokenizer is not the "
        text += "server's"
        numbers = {"otherwise": prompts.otherwise, "prompts": prompts.requests, "added": prompts.added}
        yield because("prompt_lengths", text, **numbers)
    short, lengths = int(formulas.has_short_prompt(good).sum()), prompt_lengths([good])
    if short and lengths is not None:
        text = f"the server counted far fewer tokens than {short:,} of {count(lengths.requests, 'prompt')} "
        text += f"{verb(short, 'has', 'have')} words "
        text += (
            f"({lengths.got:,} of {lengths.asked:,} in total; at least {percent(MIN_PROMPT_SHARE, 0)} is needed): it "
        )
        text += "cut the prompts off, or does not count cached tokens. Give it a longer context per slot"
        numbers = {"short": short, "prompts": lengths.requests, "planned": lengths.asked, "counted": lengths.got}
        yield because("prompts_short", text, **numbers, min_share=MIN_PROMPT_SHARE)
    more = int(formulas.has_more_pieces(good).sum())
    if more and not evidence.imported:
        text = f"{count(more, 'answer')} of {evidence.numbers.succeeded:,} came in more pieces of text than the tokens "
        text += "that they may have (max_tokens): the server does not keep to it"
        yield because("more_pieces", text, answers=more, requests=evidence.numbers.succeeded)
    for tok_s in list(impossible_speeds(evidence.numbers).values())[:1]:
        text = f"{tok_s:,.0f} tok/s of one user is more than a server can generate ({MAX_USER_TOK_S:,.0f}): it counts "
        text += "tokens that it did not send, or answers without a model"
        yield because("impossible_speed", text, tok_s=tok_s, max_tok_s=MAX_USER_TOK_S)
    for requests, bad in evidence.data.bad.values():
        if bad.code in ("below", "above"):
            text = f"{bad.field} of the server's answers is not possible in {count(requests, 'request')}: it must be "
            text += f"at {'least' if bad.code == 'below' else 'most'} {bad.limit:,} (got {bad.got})"
            values = {"requests": requests, "code": bad.code, "limit": bad.limit, "got": bad.got}
            yield because("value_out_of_bounds", text, field=bad.field, **values)
    # A cell that was cut already has a reason for its missing tokens.
    # While a probe of a capacity search runs, the server may still work on requests of the last one.
    is_shared = evidence.shared_server or evidence.stopped_after_s is not None
    is_set_back = evidence.server_load.restarted or evidence.server_load.decreased
    if ran is None or ran.problems or is_shared or served is None or is_set_back:
        return
    low, _ = generated_tokens(evidence.data.rows)  # more than ours are those of another client
    if low - served > MAX_TOKEN_DIFFERENCE * low:
        text = f"the server counted {served:,.0f} generated tokens, and the client received at least {low:,}, warm-up "
        text += f"included: over {percent(MAX_TOKEN_DIFFERENCE, 0)} more"
        yield because("tokens_differ", text, server=served, min_tokens=low, max_share=MAX_TOKEN_DIFFERENCE)


def impossible_speeds(numbers: Numbers) -> dict[str, float]:
    """The speeds of one user that nothing can have, in tok/s, by their field of Numbers."""
    speeds = {"answer_tok_s": numbers.answer_tok_s, "tpot.p50": 1 / numbers.tpot.p50 if numbers.tpot.p50 else None}
    return {name: tok_s for name, tok_s in speeds.items() if tok_s is not None and tok_s > MAX_USER_TOK_S}


def throttling_reasons(evidence: Evidence, *, invalid: bool) -> Iterator[Reason]:
    """GPUs that the server used and heat throttled: long enough to make the run invalid, or for a shorter time.

    Limits of power or current do not count: at full load they normally set the clocks.
    """
    load, window_s = evidence.machine_load, evidence.numbers.window_s
    for name, gpu in load.gpus.items() if load is not None and window_s else ():
        if gpu.used and gpu.heat_s and (gpu.heat_s > MAX_HEAT * (window_s or 0.0)) == invalid:
            text = f"the GPU {name} was throttled by heat (or PROCHOT) during {gpu.heat_s:.1f} of {window_s:.1f} s; "
            text += f"{'at most' if invalid else 'up to'} {percent(MAX_HEAT, 0)} is allowed"
            times = {"heat_s": gpu.heat_s, "window_s": window_s, "max_share": MAX_HEAT}
            yield because("gpu_throttled", text, gpu=name, **times, invalid=invalid)
