"""Charts over time: the timeline of one cell with its events, and the start of each server by phase."""

import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

from harness import units
from harness.engines import engines
from harness.judge import comparable
from harness.report.charts import COLOURS, Chart, Figure, colour, plain, scatter
from harness.report.charts.data import MachineSamples, ServerSamples, Timeline
from harness.rundir.manifest import CellRun, Run, ServedBy
from harness.summary import CellSummary

MAX_ALIKE = 12  # about so many of one kind in a cell: closer events become one
Span = tuple[float, float, float]  # start, end, and how many: the most within it, or their sum

_BROKEN = ("connect", "disconnect", "truncated")  # what a client sees first of a server that is gone


class TimelineEvent(Struct, frozen=True, order=True):
    """A mark: seconds since the first measured request, and what it was."""

    at_s: float
    text: str
    bad: bool = False
    label: str = ""  # written next to the mark, where there is room


def events_of(line: Timeline, cell: CellSummary | None, ran: CellRun | None) -> list[TimelineEvent]:
    """The events of one cell in the order of time."""
    found = [TimelineEvent(0.0, "measurement starts", label="start")]
    if cell is not None and cell.numbers.window == "timed" and cell.numbers.window_s is not None:
        found.append(TimelineEvent(round(cell.numbers.window_s, 2), "measured time is over", label="end"))
    died = _death(line, ran)
    found += [died] if died else []
    for kind, failures in line.failures.items():
        many = "a request fails" if failures.count == 1 else f"the first of {failures.count:,} requests fails"
        found.append(TimelineEvent(failures.first_s, f"{many}: {kind}", True))
    near_s = (line.ends_s - (line.warmup_until_s or 0.0)) / MAX_ALIKE
    for start, end, peak in _joined(_waiting(line.server), near_s):
        lasted = units.figures(end - start)
        found.append(TimelineEvent(start, f"requests wait in the server during {lasted} s, {peak:,.0f} at most"))
    found += [TimelineEvent(start, text, True, "heat") for start, text in _heat(line.machine, near_s)]
    preempted = _joined([(at, at, many) for at, many in line.server.preempted], near_s, operator.add)
    found += [TimelineEvent(at, units.count(int(many), "preemption")) for at, _, many in preempted]
    return sorted(found)


def _death(line: Timeline, ran: CellRun | None) -> TimelineEvent | None:
    if ran is None:
        return None
    death = ran.served_by.death
    if ran.served_by.exit_code is None and (death is None or death.how == "unreachable"):
        return None
    broken = [line.failures[kind].first_s for kind in _BROKEN if kind in line.failures]
    code = ran.served_by.exit_code
    why = ", out of memory" if ran.served_by.oom_killed else "" if code is None else f", exit code {code}"
    return TimelineEvent(min(broken) if broken else line.ends_s, f"the server died{why}", True, "died")


def _waiting(server: ServerSamples) -> Iterator[Span]:
    """When the server's queue was seen not empty, and the longest it was."""
    start: float | None = None
    peak = 0.0
    for at, value in zip(server.at_s, server.values.get("waiting", []), strict=False):
        if value:
            start, peak = (at, value) if start is None else (start, max(peak, value))
        elif start is not None:
            yield start, at, peak
            start = None
    if start is not None:
        yield start, server.at_s[-1], peak


def _heat(machine: MachineSamples, near_s: float) -> Iterator[tuple[float, str]]:
    """When heat held a GPU back, as the spans between two samples say."""
    for name in dict.fromkeys(name for _, _, name in machine.heat):
        spans = [(start, end, 0.0) for start, end, gpu in machine.heat if gpu == name]
        for start, end, _ in _joined(spans, near_s):
            yield start, f"heat throttles the GPU {name}, last seen at {end:.1f} s"


def _joined(spans: Iterable[Span], near_s: float, both: Callable[[float, float], float] = max) -> list[Span]:
    """Spans of which each begins at least so long after the one before it; those between belong to that one."""
    joined: list[Span] = []
    for start, end, peak in spans:
        if joined and start - joined[-1][0] < near_s:
            first, _, before = joined[-1]
            joined[-1] = first, end, both(before, peak)
        else:
            joined.append((start, end, peak))
    return joined


# Panels of the samples other than requests and tokens: title, factor to what is shown, hover text, colour of a single
# line. The first is the server's own gauge, the others are of its machine.
KV_CACHE = ("KV cache, %", 100.0, "%{y:.1f} % of the KV cache", "s4")
PANELS = {
    "busy": ("busy, %", 1.0, "%{y:.0f} % busy", "s7"),
    "memory": ("memory, GiB", 2.0**-30, "%{y:,.1f} GiB", "s6"),
    "power": ("power, W", 1.0, "%{y:,.0f} W", "s5"),
    "temperature": ("°C", 1.0, "%{y:,.0f} °C", "s8"),
    "clock": ("clock, MHz", 1.0, "%{y:,.0f} MHz", "s3"),
}
_GAP = 26  # pixels between panels
_STRIP = 20  # height of the strip of events
_LOW = 90  # height of what is least looked at
_MAX_POINTS = 80  # up to so many, each point is marked
_FEW_POINTS = 5  # up to so many, no line joins them
_ROOM = 0.08  # of the width, that a label of an event needs


def figure_of(line: Timeline, events: Sequence[TimelineEvent]) -> Figure:
    """Requests, tokens per second, and whatever else was recorded, over the seconds of one cell."""
    panels: list[tuple[str, int, list[Figure]]] = [
        ("", _STRIP, [_events(events, line)]), ("requests", 170, _requests(line)), ("tok/s", 130, [_tokens(line)]),
    ]  # fmt: skip
    if line.asked_s:
        panels.append(("arrivals/s", _LOW, _arrivals(line)))
    if (cache := line.server.values.get("kv_usage")) is not None:
        panels.append((KV_CACHE[0], _LOW, [_panel(KV_CACHE, "", line.server.at_s, cache)]))
    known: set[str] = set()
    for name in PANELS:
        if name in line.machine.panels:
            panels.append((PANELS[name][0], _LOW, _watched(line, name, known)))
    total = sum(height for _, height, _ in panels) + _GAP * (len(panels) - 2)
    layout: Figure = {
        "height": total + 110 + (60 if line.machine.drawn > 1 else 0),  # a legend of many GPUs
        "hovermode": "x",
        "showlegend": True,
        "shapes": [_rule(event) for event in events],
        "annotations": [],
        "xaxis": {
            "title": {"text": "seconds since the first measured request"},
            "anchor": f"y{len(panels)}",
            "zeroline": False,
        },
    }
    if line.warmup_until_s is not None:
        layout["shapes"].insert(0, _shade(line.warmup_until_s))
        layout["annotations"].append(_warmup(line.warmup_until_s))
    data: list[Figure] = []
    top = 0
    for place, (title, height, traces) in enumerate(panels):
        number = str(place + 1) if place else ""
        layout[f"yaxis{number}"] = {
            "title": {"text": title},
            "domain": [round(max(0.0, 1 - (top + height) / total), 4), round(1 - top / total, 4)],
            "rangemode": "tozero",
            "nticks": 4 if height < 120 else 6,
        }
        data += [trace | {"yaxis": f"y{number}"} for trace in traces]
        top += height + (_GAP if place else 0)
    layout["yaxis"] |= {"range": [0, 1], "visible": False, "fixedrange": True}
    return {"data": data, "layout": layout}


def _events(events: Sequence[TimelineEvent], line: Timeline) -> Figure:
    x = [event.at_s for event in events]
    room = _ROOM * (line.ends_s - (line.warmup_until_s or 0.0))
    nexts = [*x[1:], float("inf")]
    return scatter(
        "event", x, [0.5] * len(events), "%{x:.1f} s: <b>%{customdata}</b><extra></extra>", "markers+text",
        customdata=[event.text for event in events], cliponaxis=False,
        text=[event.label if after - event.at_s > room else "" for event, after in zip(events, nexts, strict=True)],
        textposition="middle right", textfont={"size": 11, "color": "@muted"},
        marker={
            "symbol": ["x" if event.bad else "triangle-down" for event in events], "size": 10,
            "color": ["@bad" if event.bad else "@muted" for event in events],
        },
    )  # fmt: skip


def _area(name: str, x: Sequence[float], y: Sequence[float], hover: str) -> Figure:
    return scatter(name, x, y, hover, line={"shape": "hvh", "width": 0}, fill="tozeroy", fillcolor="@area")


def _requests(line: Timeline) -> list[Figure]:
    hover = "%{y:,} %{fullData.name}<extra></extra>"
    data = [_area("in flight (client)", line.at_s, line.in_flight, hover)]
    for gauge, hue, dash in (("running", "s1", "solid"), ("waiting", "s2", "dash")):
        if gauge in line.server.values:
            x, style = line.server.at_s, {"color": f"@{hue}", "dash": dash, "width": 2}
            values = line.server.values[gauge]
            data.append(scatter(f"{gauge} (server)", x, values, hover, _mode(x), line=style, marker={"size": 5}))
    return data


def _tokens(line: Timeline) -> Figure:
    style = {"color": "@s3", "width": 1.8, "shape": "hvh"}
    return scatter("output tok/s", line.at_s, line.tok_s, "%{y:,.0f} tok/s<extra></extra>", line=style)


def _arrivals(line: Timeline) -> list[Figure]:
    """The target rate of the schedule as an area and the actual rate as a line: where they part, it was not kept."""
    hover, style = "%{y:,.2f}/s %{fullData.name}<extra></extra>", {"color": "@s2", "width": 1.6, "shape": "hvh"}
    return [
        _area("asked", line.arrivals_at_s, line.asked_s, hover),
        scatter("sent", line.arrivals_at_s, line.gone_s, hover, line=style),
    ]


def _watched(line: Timeline, name: str, known: set[str]) -> list[Figure]:
    """A line for each GPU, or for each sensor of the only one. `known`: the entries that the legend has already."""
    drawn = line.machine.panels[name]
    gpus = sorted({label.partition(" ")[0] for lines in line.machine.panels.values() for label in lines})
    traces = []
    for number, (label, values) in enumerate(drawn.items()):
        trace = _panel(PANELS[name], label if len(drawn) > 1 else "", line.machine.at_s, values)
        if len(drawn) > 1 or line.machine.drawn > 1:
            gpu, _, what = label.partition(" ")
            entry, hue, dash = trace["name"], colour(number + 4), "solid"
            if line.machine.drawn > 1:  # each GPU has one colour, and one entry, which shows and hides it in all panels
                entry, hue, dash = gpu, colour(gpus.index(gpu)), "dot" if what == "GTT" else "solid"
            trace["line"] |= {"color": f"@{hue}", "dash": dash, "width": 1.6}
            trace["marker"] |= {"color": f"@{hue}", "size": 3}
            trace |= {"name": entry, "legendgroup": entry, "showlegend": entry not in known}
            known.add(entry)
        traces.append(trace)
    return traces


def _panel(
    panel: tuple[str, float, str, str], label: str, at_s: Sequence[float], values: Sequence[float | None]
) -> Figure:
    title, factor, hover, hue = panel
    name = title.partition(",")[0]
    y = [None if value is None else round(factor * value, 3) for value in values]
    hover = f"{plain(label)} {hover}".strip() + "<extra></extra>"
    line, marker = {"color": f"@{hue}", "width": 2}, {"size": 4, "color": f"@{hue}"}
    name = f"{name}, {label}" if label else name
    return scatter(name, at_s, y, hover, _mode(at_s), line=line, marker=marker, showlegend=False)


def _mode(at_s: Sequence[float]) -> str:
    """Points show when samples were taken, as long as there is room between them. A line through few would invent."""
    if len(at_s) <= _FEW_POINTS:
        return "markers"
    return "lines+markers" if len(at_s) <= _MAX_POINTS else "lines"


def _rule(event: TimelineEvent) -> Figure:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": event.at_s, "x1": event.at_s, "y0": 0, "y1": 1,
        "line": {"color": "@bad" if event.bad else "@strong", "width": 1, "dash": "dot"}, "layer": "below",
    }  # fmt: skip


def _shade(from_s: float) -> Figure:
    return {
        "type": "rect", "xref": "x", "yref": "paper", "x0": from_s, "x1": 0, "y0": 0, "y1": 1,
        "fillcolor": "@shade", "line": {"width": 0}, "layer": "below",
    }  # fmt: skip


def _warmup(from_s: float) -> Figure:
    return {
        "xref": "x", "yref": "y2 domain", "x": from_s, "y": 1, "text": "warm-up", "showarrow": False,
        "xanchor": "left", "yanchor": "top", "font": {"color": "@muted", "size": 11},
    }  # fmt: skip


PHASES = {
    "pull": "the image, where it was not on the machine yet",
    "flags": "the server’s flags, checked against the image’s own help (runs before version 0.2.0)",
    "create": "the container, made and started",
    **{name: text for engine in engines() for name, text in engine.phases.items()},
    "model": "the server gets the model",
    "process": "from the start of the process until it reads weights: imports, configuration, workers",
    "weights": "weights into memory, downloaded first where they were not there",
    "compile": "compiling, or reading compiled graphs from the cache, and the first run",
    "graphs": "the KV cache, and graphs captured",
    "warm-up": "the rest of what the engine prepares",
    "ready": "from then until the server says that it is healthy",
    "port open": "until something listens",
    "health": "until the server says that it is healthy",
    "load": "the model, loaded on request",
    "first answer": "the first real answer",
}
_PHASE_RULE = "phase = its end − end of the phase before it, the median over the starts"
_PHASES_BY_LOG = "process to warm-up by the server’s own log; ready = what was waited − those"


def startup(run: Run) -> Chart:
    """How long each server took to start, phase by phase, median over its starts."""
    starts = starts_of(run)
    phases = {server: phases_of(known) for server, known in starts.items()}
    order = list(phases_of(chain.from_iterable(starts.values())))
    data: list[Figure] = []
    for i, name in enumerate(order):
        medians = {server: statistics.median(found[name]) for server, found in phases.items() if name in found}
        data.append(
            {
                "type": "bar", "orientation": "h", "name": plain(name), "y": list(medians),
                "x": [round(seconds, 3) for seconds in medians.values()],
                "marker": {"color": f"@{colour(i)}", "line": {"color": "@card", "width": 1.5}, **_pattern(i)},
                "hovertemplate": "%{fullData.name}: <b>%{x:,.2f} s</b><extra>%{y}</extra>",
            }
        )  # fmt: skip
    by_log = [_PHASES_BY_LOG] if "process" in order else []
    layout = {
        "barmode": "stack", "height": 120 + 46 * len(starts), "showlegend": True,
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {
            "autorange": "reversed", "type": "category", "categoryorder": "array", "categoryarray": list(starts),
        },
    }  # fmt: skip
    return Chart(
        id="startup",
        title="Start of each server",
        caption="Seconds from the order to start until the model answered, by phase; median over the server’s starts.",
        formula="; ".join([_PHASE_RULE, *by_log, *(f"{name}: {PHASES[name]}" for name in order if name in PHASES)]),
        findings=[f"{server}: {text}." for server, text in start_sentences(run)],
        figure={"data": data, "layout": layout},
        head=["Server", "Phase", "Median, s", "Least, s", "Most, s", "Starts"],
        body=[
            [server, name, f"{statistics.median(v):,.2f}", f"{min(v):,.2f}", f"{max(v):,.2f}", str(len(v))]
            for server, found in phases.items()
            for name in order
            if (v := found.get(name))
        ],
        empty="" if data else "No start was observed: the server already ran.",
    )


def _pattern(index: int) -> Figure:
    """Stripes for phases beyond the number of colours, so that no two of a bar look alike."""
    return {} if index < COLOURS else {"pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": "@card", "size": 6}}


def starts_of(run: Run) -> dict[str, list[ServedBy]]:
    """The starts of each server that were observed; cells that share one count once."""
    found: dict[tuple[str, object], ServedBy] = {}
    for cell in run.served:
        if cell.served_by.phases:
            found.setdefault((cell.server, cell.id if run.scenario.restart else cell.repeat), cell.served_by)
    result: dict[str, list[ServedBy]] = {}
    for (server, _), served in found.items():
        result.setdefault(server, []).append(served)
    return result


def phases_of(starts: Iterable[ServedBy]) -> dict[str, list[float]]:
    """The seconds of each phase in all starts; the phases are in an order that is that of each start."""
    order: list[str] = []
    seconds: dict[str, list[float]] = {}
    for served in starts:
        at = 0
        for phase in served.phases:
            if phase.name not in order:
                order.insert(at, phase.name)
            at = order.index(phase.name) + 1
            seconds.setdefault(phase.name, []).append(phase.seconds)
    return {name: seconds[name] for name in order}


def start_sentences(run: Run) -> list[tuple[str, str]]:
    """Each server whose start was observed, with its start in a sentence without the full stop."""
    return [(server, _start_sentence(starts)) for server, starts in starts_of(run).items()]


def _start_sentence(starts: Sequence[ServedBy]) -> str:
    total = statistics.median(sum(phase.seconds for phase in served.phases) for served in starts)
    medians = {name: statistics.median(seconds) for name, seconds in phases_of(starts).items()}
    longest = max(medians, key=lambda name: medians[name])
    reported = comparable.median_measurements(starts)
    parts = [f"ready after {units.seconds(total)}, the most of it {longest} ({units.seconds(medians[longest])})"]
    if (cache := reported.get("startup.compile_cache")) is not None:
        parts.append(f"compile cache {cache}")
    if (tokens := reported.get("startup.kv_cache_tokens")) is not None:
        room = reported.get("startup.max_concurrency")
        parts.append(f"KV cache {tokens:,} tokens" + (f", {room:,.4g} requests of full length" if room else ""))
    return "; ".join(parts)


def startup_facts(served: ServedBy) -> dict[str, Any]:
    """What a server reported of its start, by the names of run.json."""
    facts = {} if served.startup is None else msgspec.structs.asdict(served.startup)
    return facts | {"rocm": None if served.contents is None else served.contents.rocm}
