"""What hours of load show: drift of the speed, growth of memory, the first failure, and the kernel's events."""

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from harness.base import units
from harness.base.reason import Reason, because
from harness.base.units import count, duration, gib, percent, short_percent
from harness.failures.diagnosis import scan_text
from harness.numbers.block_statistics import fit_trend
from harness.numbers.comparison import MARGIN
from harness.numbers.summary import KernelEvent, Soak, Summary, Trend
from harness.numbers.validity import MIN_HANG_S
from harness.numbers.warnings import HOST_CPU_FULL
from harness.records.columns import Bools, Rows
from harness.records.run_data import CellData, RunData
from harness.records.samples import MAX_GAP_S, TelemetrySample, machine_load
from harness.report.charts import Chart, Figure, escape_markup, scatter
from harness.report.elements import Grid, plain_grid

_SHOWN_EVENTS = 20
_EVENTS = ("After", "Event", "In flight", "Failed", "Kernel log")

SOAK_BLOCKS = 20  # of the time of a soak: half a minute each in the shortest one that shows a drift
MIN_SOAK_BLOCKS = 8  # of these, with answers or samples: they leave a line 6 degrees of freedom
MIN_S = 600.0  # of a trend: a shorter time says nothing about an hour
MILD = ("kernel.throttled",)  # slower, but no failure
# Failures of the process that the line names, not of others.
_PROCESS_FAILURES = ("kernel.segfault", "host.oom_kill", "kernel.page_fault")
_SLACK_S = 1.0  # between the clocks of the kernel's lines and of requests
_RING, _RECOVERED = "kernel.ring_timeout", "timeout, but soft recovered"
_RECOVERY_S = 10.0  # of a ring, after its timeout
_TOO_LONG = "req.context"  # of the table of failures: the load's mistake, which says nothing about hours
_STEADY = 0.1  # change of the speed over the whole time: where the interval allows more, nothing is known
_GROWTH = 0.01  # of the level, over the whole time: less is no growth


def soak_results(data: RunData) -> list[Soak]:
    """The result of each cell whose load is a soak."""
    names = [name for name in data.cells if data.run.scenario.loads[data.planned[name].load].soak]
    return [soak for name in names if (soak := _result(data, name)) is not None]


def _result(data: RunData, name: str) -> Soak | None:
    cell = data.cells[name]
    window, rows = cell.window_s, cell.counted
    if window is None or not len(rows):
        return None
    begin, end = window
    start_wall_s = cell.clock.wall_s(begin)
    samples = data.telemetry.get(name, [])
    refused = _refused(rows)
    failed = _failures(rows.where(~refused), begin)
    events = [] if start_wall_s is None else _events(samples, cell, start_wall_s, begin)
    serious = [event for event in events if event.serious]
    at_s = [*(failure.at_s for failure in failed[:1]), *(event.at_s for event in serious[:1])]
    first_s = min(at_s, default=None)
    until = end if first_s is None else min(end, begin + max(0.0, first_s))
    memory = [] if start_wall_s is None else _memory(data, name, start_wall_s, until - begin)
    span = None if start_wall_s is None else (start_wall_s, start_wall_s + until - begin)
    load = machine_load(samples, span, None)
    is_read = any(sample.kernel is not None for sample in samples)
    speed = _speed(cell, begin, until)
    return Soak(
        cell=name,
        row=f"{data.planned[name].server} / {data.planned[name].load}",
        measured_s=end - begin,
        speed=speed,
        memory=memory,
        failed=len(failed),
        refused=int(refused.sum()),
        first_failure_s=first_s,
        cause="" if first_s is None else _cause(serious, first_s, failed),
        events=events,
        cpu_busy=None if load is None else load.host_cpu_mean,
        kernel_log=is_read if samples else None,
        kernel_lost_s=0.0
        if start_wall_s is None or data.run.remote is None or not is_read
        else _lost_log_s(samples, start_wall_s, start_wall_s + end - begin),
        word="failed" if first_s is not None else _drift_word(speed, (until - begin) / 3600),
    )


def _lost_log_s(samples: Sequence[TelemetrySample], start_wall_s: float, end_wall_s: float) -> float:
    """How long the kernel log of another machine is not known: while its connection was lost, and to the end."""
    spans_s = [(sample.wall_s - sample.kernel_lost_s, sample.wall_s) for sample in samples if sample.kernel_lost_s]
    last_s = max(sample.wall_s for sample in samples)
    if end_wall_s - last_s >= MAX_GAP_S:
        spans_s.append((last_s, end_wall_s))
    return sum(max(0.0, min(last, end_wall_s) - max(first, start_wall_s)) for first, last in spans_s)


def _drift_word(speed: Trend | None, hours: float) -> Literal["stable", "drifts", "unknown"]:
    if speed is None:
        return "unknown"
    if not speed.low <= 0 <= speed.high and abs(speed.per_hour) * hours > MARGIN:
        return "drifts"
    return "stable" if max(-speed.low, speed.high) * hours <= _STEADY else "unknown"


def _refused(rows: Rows) -> Bools:
    """The requests that did not fit into the server's context."""
    findings_by_text = [scan_text(text or "").findings for text in rows.message.texts]
    refused: Bools = np.array([bool(findings) and findings[0].id == _TOO_LONG for findings in findings_by_text])[
        rows.message.codes
    ]
    return refused


class _Failure(NamedTuple):
    at_s: float  # since the start of the window
    error: str


def _failures(rows: Rows, begin: float) -> list[_Failure]:
    """The requests that failed, the first one first. One that hung failed at its last byte, however the run ended."""
    signs_s = np.fmax(np.fmax(rows.headers_s, rows.last_chunk_s), 0.0)
    silent_s = rows.ended_s - signs_s
    hung = rows.error.is_in("timeout", "unfinished") & (silent_s >= MIN_HANG_S)
    failed = hung | (~rows.good & ~rows.error.is_in("unfinished", "abandoned"))
    at_s = rows.sent_s + np.where(hung, signs_s, rows.ended_s) - begin
    return sorted(
        _Failure(
            float(at_s[place]),
            f"the server sent nothing more to a request, for {duration(float(silent_s[place]))} until its end"
            if hung[place]
            else rows.message.texts[rows.message.codes[place]] or "",
        )
        for place in np.flatnonzero(failed).tolist()
    )


def _cause(serious: Sequence[KernelEvent], first_s: float, failed: Sequence[_Failure]) -> str:
    """The first serious kernel event up to a minute after the first failure; else the error of the first request."""
    near = [event for event in serious if event.at_s <= first_s + 60]
    return near[0].cause if near else failed[0].error


def _events(samples: Sequence[TelemetrySample], cell: CellData, start_wall_s: float, begin: float) -> list[KernelEvent]:
    """The kernel's events that the table of failures knows, each with the requests that were in flight then."""
    lines = [line for sample in samples for line in sample.kernel or []]
    rows, events = cell.rows, list[KernelEvent]()
    recovered_s: dict[str | None, list[float]] = {}
    for line in lines:
        if _RECOVERED in line.text:
            recovered_s.setdefault(_ring(line.text), []).append(line.wall_s)
    for line in lines:
        findings = scan_text(line.text).findings
        if not findings:
            continue
        at = begin + line.wall_s - start_wall_s
        in_flight = (rows.sent_s <= at) & (at <= rows.sent_s + rows.ended_s)
        failed = int((in_flight & ~rows.good).sum())
        # A crash of the server ends all that it answers: a request that outlived it was answered by another process.
        outlived = bool((in_flight & rows.good & (rows.sent_s + rows.last_chunk_s > at + _SLACK_S)).any())
        is_other = findings[0].id in _PROCESS_FAILURES and (
            line.of_server is False or (line.of_server is None and outlived)
        )
        is_note = (
            findings[0].id in MILD
            or is_other
            or (findings[0].id == _RING and not failed and _is_soon(recovered_s.get(_ring(line.text), []), line.wall_s))
        )
        events.append(
            KernelEvent(
                at_s=line.wall_s - start_wall_s,
                id=findings[0].id,
                cause=findings[0].cause + ", which is not the server's" * is_other,
                text=line.text,
                serious=findings[0].severity != "warning" and not findings[0].hint and not is_note,
                in_flight=int(in_flight.sum()),
                failed=failed,
            )
        )
    return events


def _is_soon(recovered_s: Sequence[float], at_s: float) -> bool:
    """Whether one of the ascending times is within _RECOVERY_S after `at_s`."""
    place = bisect_left(recovered_s, at_s)
    return place < len(recovered_s) and recovered_s[place] - at_s <= _RECOVERY_S


def _ring(text: str) -> str | None:
    """The ring of a line about its timeout."""
    match = re.search(r"\bring (\S{1,60}) timeout", text)
    return None if match is None else match[1]


def _speed(cell: CellData, begin: float, end: float) -> Trend | None:
    """The change of the output tokens a second, as a share per hour."""
    rows = cell.rows.where(cell.rows.good)
    at = rows.sent_s + rows.ended_s
    inside = (at > begin) & (at <= end) & ~np.isnan(rows.output_tokens)
    edges = np.linspace(begin, end, SOAK_BLOCKS + 1)
    tokens, _ = np.histogram(at[inside], edges, weights=rows.output_tokens[inside])
    seconds = (end - begin) / SOAK_BLOCKS
    if end - begin < MIN_S or (tokens > 0).sum() < MIN_SOAK_BLOCKS:
        return None
    hours = (edges[:-1] + seconds / 2 - begin)[tokens > 0] / 3600
    fit = fit_trend(hours, np.log(tokens[tokens > 0]))
    slope, error = fit.value, fit.half_width()
    level = float(tokens.mean() / seconds)
    ends = [math.expm1(max(-50.0, min(50.0, change))) for change in (slope, slope - error, slope + error)]
    rates = [round(float(number) / seconds, 3) for number in tokens]
    return Trend(name="tok/s", level=level, per_hour=ends[0], low=ends[1], high=ends[2], grows=False, values=rates)


def _memory(data: RunData, name: str, start_wall_s: float, seconds: float) -> list[Trend]:
    """The growth of each kind of memory after the first tenth of the time."""
    samples = data.telemetry.get(name, [])

    def total(sample: TelemetrySample, field: str) -> float | None:
        values = [value for gpu in sample.gpus.values() if (value := getattr(gpu, field)) is not None]
        return sum(values) if values else None

    series: dict[str, list[tuple[float, float | None]]] = {
        "VRAM": [(sample.wall_s, total(sample, "vram_used_bytes")) for sample in samples],
        "GTT": [(sample.wall_s, total(sample, "gtt_used_bytes")) for sample in samples],
        "container": [
            (sample.wall_s, None if sample.container is None else sample.container.memory_bytes) for sample in samples
        ],
        "KV cache": [(sample.wall_s, sample.values.get("kv_usage")) for sample in data.metrics.get(name, [])],
    }
    return [trend for what, points in series.items() if (trend := _growth(what, points, start_wall_s, seconds))]


def _growth(
    what: str, points: Sequence[tuple[float, float | None]], start_wall_s: float, seconds: float
) -> Trend | None:
    readings = [(at - start_wall_s, value) for at, value in points if value is not None]
    kept = [(at, value) for at, value in readings if 0.1 * seconds <= at <= seconds]
    blocks: list[tuple[float, float]] = []
    for _, group in itertools.groupby(kept, key=lambda point: int(point[0] / max(seconds, 1e-9) * SOAK_BLOCKS)):
        block = list(group)
        blocks.append((sum(at for at, _ in block) / len(block), sum(value for _, value in block) / len(block)))
    if len(blocks) < MIN_SOAK_BLOCKS or seconds < MIN_S:
        return None
    at, values = (np.array(column, dtype=np.float64) for column in zip(*blocks, strict=True))
    fit = fit_trend(at / 3600, values)
    slope, error = fit.value, fit.half_width()
    level = float(values.mean())
    least = 0.05 if what == "KV cache" else _GROWTH * level
    grows = slope - error > 0 and slope * seconds / 3600 > least
    return Trend(name=what, level=level, per_hour=slope, low=slope - error, high=slope + error, grows=grows)


def soak_answer(soak: Soak) -> Reason:
    """Whether a soak was stable, how it drifts, or when and why it failed."""
    values = {"row": soak.row, "word": soak.word, "first_failure_s": soak.first_failure_s}
    if soak.word == "failed":
        when = "" if soak.first_failure_s is None else _when(soak.first_failure_s)
        text = f"failed{when}: {soak.cause or 'no cause is known'}"
        first = next((event for event in soak.events if event.serious), None)
        if first is not None:
            text += f" [{first.id}], {count(first.in_flight, 'request')} in flight, {first.failed} of them failed"
        text += f"; {count(soak.failed, 'request')} failed in all"
    else:
        text = {"stable": "stable", "drifts": "drifts", "unknown": "no failure"}[soak.word]
        text += f" over {duration(soak.measured_s)}"
    if soak.word == "unknown" and soak.speed is not None:
        text += "; whether the speed drifts is inconclusive, and more hours would tell"
    elif soak.word == "unknown":
        shown = f"{MIN_S / 60:.0f} min or more with answers in {MIN_SOAK_BLOCKS} of {SOAK_BLOCKS} blocks"
        text += f"; a drift shows over {shown}"
    if soak.speed is not None:
        low, high = (f"{100 * end:+.1f}" for end in (soak.speed.low, soak.speed.high))
        text += f"; speed {100 * soak.speed.per_hour:+.1f}\u00a0% per hour ({low} to {high})"
    growing = [
        f"{trend.name} {short_percent(trend.per_hour) if trend.name == 'KV cache' else gib(trend.per_hour, 2)} per hour"
        for trend in soak.memory
        if trend.grows
    ]
    if soak.word == "drifts" and soak.cpu_busy is not None and soak.cpu_busy >= HOST_CPU_FULL:
        text += f"; the machine's CPU was {percent(soak.cpu_busy, 0)} busy: another program may be the cause"
    if growing:
        text += f"; growing: {', '.join(growing)}"
    elif soak.memory:
        text += f"; no growth of {', '.join(trend.name for trend in soak.memory)}"
    if soak.refused:
        text += f"; {count(soak.refused, 'request')} did not fit into the server's context: give it more, or send less"
    if soak.kernel_log is False:
        text += ". The kernel log could not be read (root may): it would show a reset of the GPU or a lack of memory"
    elif soak.kernel_lost_s:
        text += f". The kernel log is not known for {duration(soak.kernel_lost_s)}, while the connection to the "
        text += "server's machine was lost: a reset of the GPU in that time is not shown"
    return because("soak", f"{soak.row}: {text}.", **values)


def _when(at_s: float) -> str:
    """When something failed; negative: before the measured time."""
    return f" after {duration(at_s)}" if at_s >= 0 else f" in the warm-up, {duration(-at_s)} before the measured time"


def _trends(soak: Soak) -> list[Trend]:
    return [*([] if soak.speed is None else [soak.speed]), *soak.memory]


def _trend_cells(trend: Trend) -> list[str]:
    if trend.name in ("tok/s", "KV cache"):
        level = units.significant(trend.level) if trend.name == "tok/s" else units.percent(trend.level)
        ends = [f"{100 * change:+.2f}\u00a0%" for change in (trend.per_hour, trend.low, trend.high)]
    else:
        level = units.gib(trend.level, 2)
        ends = [f"{change / units.GIB:+.3f} GiB" for change in (trend.per_hour, trend.low, trend.high)]
    return [trend.name, level, ends[0], f"{ends[1]} to {ends[2]}"]


def _soak_chart(soak: Soak, number: int) -> Chart:
    """The speed of each block up to the first failure, and the kernel's events."""
    rates = [] if soak.speed is None else soak.speed.values
    until_s = soak.measured_s if soak.first_failure_s is None else max(0.0, soak.first_failure_s)
    at = [round((place + 0.5) * until_s / len(rates) / 3600, 4) for place in range(len(rates))]
    events = [event for event in soak.events if event.at_s >= 0]
    hover = "<b>%{y:,.1f} tok/s</b> after %{x} h<extra></extra>"
    data: list[Figure] = [scatter("tok/s", at, list(rates), hover, "lines+markers")]
    if events:
        data.append(
            scatter(
                "kernel", [round(event.at_s / 3600, 4) for event in events], [0.0] * len(events),
                "%{text}<extra></extra>", "markers", text=[escape_markup(event.text) for event in events],
                marker={"color": "@s2", "symbol": "x", "size": 10},
            )
        )  # fmt: skip
    layout: Figure = {
        "xaxis": {"title": {"text": "hours"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "output tok/s"}, "rangemode": "tozero"}, "showlegend": len(data) > 1,
    }  # fmt: skip
    return Chart(
        id=f"soak-{number}",
        title=f"Speed over the hours: {soak.row}",
        caption="Each point is a twentieth of the time up to the first failure. Crosses: events of the kernel.",
        formula="output tokens of the requests that ended in the block ÷ its time; drift: the slope of the logarithms",
        figure={"data": data, "layout": layout},
        head=["Hours", "tok/s"],
        body=[[f"{hours:g}", units.significant(rate)] for hours, rate in zip(at, rates, strict=True)],
        empty="" if rates else "Too few answers for a line.",
    )


def soak_tables(summary: Summary) -> list[Grid]:
    """The trends and the kernel's events of each soak."""
    trends = [[soak.row, *_trend_cells(trend)] for soak in summary.soaks for trend in _trends(soak)]
    events = [
        [
            soak.row,
            f"{'' if event.at_s >= 0 else '−'}{units.duration(abs(event.at_s))}",
            event.id,
            f"{event.in_flight}",
            f"{event.failed}",
            event.text,
        ]
        for soak in summary.soaks
        for event in soak.events[:_SHOWN_EVENTS]
    ]
    tables = [
        replace(plain_grid(("Row", "What", "Mean", "Per hour", "95 % interval"), trends), title="Over the hours"),
        replace(plain_grid(("Row", *_EVENTS), events), title="Events of the kernel"),
    ]
    return [table for table in tables if table.rows]


def soak_charts(summary: Summary) -> list[Chart]:
    return [_soak_chart(soak, number) for number, soak in enumerate(summary.soaks)]
