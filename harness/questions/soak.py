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
from harness.records.samples import TelemetrySample, machine_load
from harness.report.charts import Chart, Figure, escape_markup, scatter
from harness.report.elements import Grid, plain_grid

_SHOWN_EVENTS = 20
_EVENTS = ("After", "Event", "In flight", "Failed", "Kernel log")

SOAK_BLOCKS = 20  # of the time of a soak: half a minute each in the shortest one that shows a drift
MIN_SOAK_BLOCKS = 8  # of these, with answers or samples: they leave a line 6 degrees of freedom
MIN_S = 600.0  # of a trend: a shorter time says nothing about an hour
MILD = ("kernel.throttled",)  # slower, but no failure
_OF_A_PROCESS = ("kernel.segfault", "host.oom_kill", "kernel.page_fault")  # that the line names: no failure of others
_SLACK_S = 1.0  # between the clocks of the kernel's lines and of requests
_RING, _RECOVERED = "kernel.ring_timeout", "timeout, but soft recovered"
_RECOVERY_S = 10.0  # of a ring, after its timeout
_TOO_LONG = "req.context"  # of the table of failures: the load's mistake, which says nothing about hours
_STEADY = 0.1  # change of the speed over the whole time: where the interval allows more, nothing is known
_GROWTH = 0.01  # of the level, over the whole time: less is no growth


def soak_results(data: RunData) -> list[Soak]:
    """The result of each cell whose load is a soak."""
    names = [name for name in data.cells if data.run.scenario.loads[data.planned[name].load].soak]
    return [found for name in names if (found := _result(data, name)) is not None]


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
    serious = [one for one in events if one.serious]
    at_s = [*(one.at_s for one in failed[:1]), *(one.at_s for one in serious[:1])]
    first_s = max(0.0, min(at_s)) if at_s else None  # 0: in the warm-up
    until = end if first_s is None else min(end, begin + first_s)
    memory = [] if start_wall_s is None else _memory(data, name, start_wall_s, until - begin)
    span = None if start_wall_s is None else (start_wall_s, start_wall_s + until - begin)
    load = machine_load(samples, span, None)
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
        kernel_log=None if not samples else any(one.kernel is not None for one in samples),
        word="failed" if first_s is not None else _drift_word(speed, (until - begin) / 3600),
    )


def _drift_word(speed: Trend | None, hours: float) -> Literal["stable", "drifts", "unknown"]:
    if speed is None:
        return "unknown"
    if not speed.low <= 0 <= speed.high and abs(speed.per_hour) * hours > MARGIN:
        return "drifts"
    return "stable" if max(-speed.low, speed.high) * hours <= _STEADY else "unknown"


def _refused(rows: Rows) -> Bools:
    """The requests that did not fit into the server's context."""
    found = [scan_text(text or "").findings for text in rows.message.texts]
    refused: Bools = np.array([bool(one) and one[0].id == _TOO_LONG for one in found])[rows.message.codes]
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
    near = [one for one in serious if one.at_s <= first_s + 60]
    return near[0].cause if near else failed[0].error


def _events(samples: Sequence[TelemetrySample], cell: CellData, start_wall_s: float, begin: float) -> list[KernelEvent]:
    """The kernel's events that the table of failures knows, each with the requests that were in flight then."""
    lines = [line for sample in samples for line in sample.kernel or []]
    rows, found = cell.rows, list[KernelEvent]()
    recovered_s: dict[str | None, list[float]] = {}
    for line in lines:
        if _RECOVERED in line.text:
            recovered_s.setdefault(_ring(line.text), []).append(line.wall_s)
    for line in lines:
        known = scan_text(line.text).findings
        if not known:
            continue
        at = begin + line.wall_s - start_wall_s
        in_flight = (rows.sent_s <= at) & (at <= rows.sent_s + rows.ended_s)
        failed = int((in_flight & ~rows.good).sum())
        # A crash of the server ends all that it answers: a request that outlived it was answered by another process.
        outlived = bool((in_flight & rows.good & (rows.sent_s + rows.last_chunk_s > at + _SLACK_S)).any())
        of_other = known[0].id in _OF_A_PROCESS and (line.of_server is False or (line.of_server is None and outlived))
        is_note = (
            known[0].id in MILD
            or of_other
            or (known[0].id == _RING and not failed and _is_soon(recovered_s.get(_ring(line.text), []), line.wall_s))
        )
        found.append(
            KernelEvent(
                at_s=line.wall_s - start_wall_s,
                id=known[0].id,
                cause=known[0].cause + ", which is not the server's" * of_other,
                text=line.text,
                serious=known[0].severity != "warning" and not known[0].hint and not is_note,
                in_flight=int(in_flight.sum()),
                failed=failed,
            )
        )
    return found


def _is_soon(recovered_s: Sequence[float], at_s: float) -> bool:
    """Whether one of the ascending times is within _RECOVERY_S after `at_s`."""
    place = bisect_left(recovered_s, at_s)
    return place < len(recovered_s) and recovered_s[place] - at_s <= _RECOVERY_S


def _ring(text: str) -> str | None:
    """The ring of a line about its timeout."""
    found = re.search(r"\bring (\S{1,60}) timeout", text)
    return None if found is None else found[1]


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
    ends = [math.expm1(max(-50.0, min(50.0, each))) for each in (slope, slope - error, slope + error)]
    rates = [round(float(each) / seconds, 3) for each in tokens]
    return Trend(name="tok/s", level=level, per_hour=ends[0], low=ends[1], high=ends[2], grows=False, values=rates)


def _memory(data: RunData, name: str, start_wall_s: float, seconds: float) -> list[Trend]:
    """The growth of each kind of memory after the first tenth of the time."""
    samples = data.telemetry.get(name, [])

    def total(sample: TelemetrySample, field: str) -> float | None:
        known = [value for gpu in sample.gpus.values() if (value := getattr(gpu, field)) is not None]
        return sum(known) if known else None

    series: dict[str, list[tuple[float, float | None]]] = {
        "VRAM": [(one.wall_s, total(one, "vram_used_bytes")) for one in samples],
        "GTT": [(one.wall_s, total(one, "gtt_used_bytes")) for one in samples],
        "container": [(one.wall_s, None if one.container is None else one.container.memory_bytes) for one in samples],
        "KV cache": [(one.wall_s, one.values.get("kv_usage")) for one in data.metrics.get(name, [])],
    }
    return [found for what, points in series.items() if (found := _growth(what, points, start_wall_s, seconds))]


def _growth(
    what: str, points: Sequence[tuple[float, float | None]], start_wall_s: float, seconds: float
) -> Trend | None:
    known = [(at - start_wall_s, value) for at, value in points if value is not None]
    kept = [(at, value) for at, value in known if 0.1 * seconds <= at <= seconds]
    blocks: list[tuple[float, float]] = []
    for _, group in itertools.groupby(kept, key=lambda point: int(point[0] / max(seconds, 1e-9) * SOAK_BLOCKS)):
        found = list(group)
        blocks.append((sum(at for at, _ in found) / len(found), sum(value for _, value in found) / len(found)))
    if len(blocks) < MIN_SOAK_BLOCKS or seconds < MIN_S:
        return None
    at, values = (np.array(column, dtype=np.float64) for column in zip(*blocks, strict=True))
    fit = fit_trend(at / 3600, values)
    slope, error = fit.value, fit.half_width()
    level = float(values.mean())
    least = 0.05 if what == "KV cache" else _GROWTH * level
    grows = slope - error > 0 and slope * seconds / 3600 > least
    return Trend(name=what, level=level, per_hour=slope, low=slope - error, high=slope + error, grows=grows)


def soak_answer(found: Soak) -> Reason:
    """Whether a soak was stable, how it drifts, or when and why it failed."""
    values = {"row": found.row, "word": found.word, "first_failure_s": found.first_failure_s}
    if found.word == "failed":
        after = "" if found.first_failure_s is None else f" after {duration(found.first_failure_s)}"
        text = f"failed{after}: {found.cause or 'no cause is known'}"
        first = next((one for one in found.events if one.serious), None)
        if first is not None:
            text += f" [{first.id}], {count(first.in_flight, 'request')} in flight, {first.failed} of them failed"
        text += f"; {count(found.failed, 'request')} failed in all"
    else:
        text = {"stable": "stable", "drifts": "drifts", "unknown": "no failure"}[found.word]
        text += f" over {duration(found.measured_s)}"
    if found.word == "unknown" and found.speed is not None:
        text += "; whether the speed drifts is inconclusive, and more hours would tell"
    elif found.word == "unknown":
        shown = f"{MIN_S / 60:.0f} min or more with answers in {MIN_SOAK_BLOCKS} of {SOAK_BLOCKS} blocks"
        text += f"; a drift shows over {shown}"
    if found.speed is not None:
        low, high = (f"{100 * end:+.1f}" for end in (found.speed.low, found.speed.high))
        text += f"; speed {100 * found.speed.per_hour:+.1f}\u00a0% per hour ({low} to {high})"
    growing = [
        f"{one.name} {short_percent(one.per_hour) if one.name == 'KV cache' else gib(one.per_hour, 2)} per hour"
        for one in found.memory
        if one.grows
    ]
    if found.word == "drifts" and found.cpu_busy is not None and found.cpu_busy >= HOST_CPU_FULL:
        text += f"; the machine's CPU was {percent(found.cpu_busy, 0)} busy: another program may be the cause"
    if growing:
        text += f"; growing: {', '.join(growing)}"
    elif found.memory:
        text += f"; no growth of {', '.join(one.name for one in found.memory)}"
    if found.refused:
        text += f"; {count(found.refused, 'request')} did not fit into the server's context: give it more, or send less"
    if found.kernel_log is False:
        text += ". The kernel log could not be read (root may): it would show a reset of the GPU or a lack of memory"
    return because("soak", f"{found.row}: {text}.", **values)


def _trends(found: Soak) -> list[Trend]:
    return [*([] if found.speed is None else [found.speed]), *found.memory]


def _trend_cells(one: Trend) -> list[str]:
    if one.name in ("tok/s", "KV cache"):
        level = units.significant(one.level) if one.name == "tok/s" else units.percent(one.level)
        ends = [f"{100 * each:+.2f}\u00a0%" for each in (one.per_hour, one.low, one.high)]
    else:
        level = units.gib(one.level, 2)
        ends = [f"{each / units.GIB:+.3f} GiB" for each in (one.per_hour, one.low, one.high)]
    return [one.name, level, ends[0], f"{ends[1]} to {ends[2]}"]


def _soak_chart(found: Soak, number: int) -> Chart:
    """The speed of each block up to the first failure, and the kernel's events."""
    rates = [] if found.speed is None else found.speed.values
    until_s = found.measured_s if found.first_failure_s is None else found.first_failure_s
    at = [round((place + 0.5) * until_s / len(rates) / 3600, 4) for place in range(len(rates))]
    events = [one for one in found.events if one.at_s >= 0]
    hover = "<b>%{y:,.1f} tok/s</b> after %{x} h<extra></extra>"
    data: list[Figure] = [scatter("tok/s", at, list(rates), hover, "lines+markers")]
    if events:
        data.append(
            scatter(
                "kernel", [round(one.at_s / 3600, 4) for one in events], [0.0] * len(events), "%{text}<extra></extra>",
                "markers", text=[escape_markup(one.text) for one in events],
                marker={"color": "@s2", "symbol": "x", "size": 10},
            )
        )  # fmt: skip
    layout: Figure = {
        "xaxis": {"title": {"text": "hours"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "output tok/s"}, "rangemode": "tozero"}, "showlegend": len(data) > 1,
    }  # fmt: skip
    return Chart(
        id=f"soak-{number}",
        title=f"Speed over the hours: {found.row}",
        caption="Each point is a twentieth of the time up to the first failure. Crosses: events of the kernel.",
        formula="output tokens of the requests that ended in the block ÷ its time; drift: the slope of the logarithms",
        figure={"data": data, "layout": layout},
        head=["Hours", "tok/s"],
        body=[[f"{hours:g}", units.significant(rate)] for hours, rate in zip(at, rates, strict=True)],
        empty="" if rates else "Too few answers for a line.",
    )


def soak_tables(summary: Summary) -> list[Grid]:
    """The trends and the kernel's events of each soak."""
    trends = [[found.row, *_trend_cells(one)] for found in summary.soaks for one in _trends(found)]
    events = [
        [found.row, units.duration(max(0.0, one.at_s)), one.id, f"{one.in_flight}", f"{one.failed}", one.text]
        for found in summary.soaks
        for one in found.events[:_SHOWN_EVENTS]
    ]
    tables = [
        replace(plain_grid(("Row", "What", "Mean", "Per hour", "95 % interval"), trends), title="Over the hours"),
        replace(plain_grid(("Row", *_EVENTS), events), title="Events of the kernel"),
    ]
    return [one for one in tables if one.rows]


def soak_charts(summary: Summary) -> list[Chart]:
    return [_soak_chart(found, number) for number, found in enumerate(summary.soaks)]
