"""Charts over time: the timeline of one cell with its events, and the start of each server by phase."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from harness.base import units
from harness.engines import engines
from harness.numbers.summary import CellSummary
from harness.numbers.validity import BROKEN
from harness.records.manifest import CellRun, Run, ServedBy
from harness.report.charts import COLOURS, Chart, Figure, colour, escape_markup, scatter
from harness.report.charts.data import Timeline, Values
from harness.report.elements import TimelineEvent
from harness.report.words import phase_name, phase_time


def timeline_events(line: Timeline, cell: CellSummary | None, ran: CellRun | None) -> list[TimelineEvent]:
    """The events of one cell in the order of time."""
    events = [TimelineEvent(0.0, "measurement starts", label="start")]
    if cell is not None and cell.numbers.window == "timed" and cell.numbers.window_s is not None:
        events.append(TimelineEvent(round(cell.numbers.window_s, 2), "measured time is over", label="end"))
    if (death := _death_event(line, ran)) is not None:
        events.append(death)
    for kind, failures in line.failures.items():
        what = "a request fails" if failures.count == 1 else f"the first of {failures.count:,} requests fails"
        events.append(TimelineEvent(failures.first_s, f"{what}: {kind}", True))
    for gpu, (start_s, lasted_s) in line.machine.heat.items():
        text = f"heat throttles the GPU {gpu}, for {lasted_s:.1f} s in all"
        events.append(TimelineEvent(start_s, text, True, "heat"))
    return sorted(events)


def _death_event(line: Timeline, ran: CellRun | None) -> TimelineEvent | None:
    if ran is None:
        return None
    death = ran.served_by.death
    if ran.served_by.exit_code is None and (death is None or death.how == "unreachable"):
        return None
    broken = [line.failures[kind].first_s for kind in BROKEN if kind in line.failures]
    code = ran.served_by.exit_code
    why = ", out of memory" if ran.served_by.oom_killed else "" if code is None else f", exit code {code}"
    return TimelineEvent(min(broken) if broken else line.ends_s, f"the server died{why}", True, "died")


# Panels of samples: title, unit, factor to the unit, hover text, colour of a single line. The first is a gauge of the
# server, the others are of its GPUs.
KV_CACHE = ("KV cache", "%", 100.0, "%{y:.1f} % of the KV cache", "s4")
PANELS = {
    "busy": ("busy", "%", 1.0, "%{y:.0f} % busy", "s7"),
    "memory": ("memory", "GiB", 2.0**-30, "%{y:,.1f} GiB", "s6"),
    "power": ("power", "W", 1.0, "%{y:,.0f} W", "s5"),
    "temperature": ("", "°C", 1.0, "%{y:,.0f} °C", "s8"),
    "clock": ("clock", "MHz", 1.0, "%{y:,.0f} MHz", "s3"),
}
_GAP = 26  # pixels between panels
_STRIP = 20  # height of the strip of events
_LOW = 90  # height of the less important panels
_MAX_POINTS = 80  # a line with more has no marks
_LABEL_SHARE = 0.08  # of the width: what the label of an event needs


def timeline_figure(line: Timeline, events: Sequence[TimelineEvent]) -> Figure:
    """Panels of requests, tokens per second and the recorded samples over the seconds of one cell."""
    tokens = {"color": "@s3", "width": 1.8, "shape": "hvh"}
    tok_s = scatter("output tok/s", line.at_s, line.tok_s, "%{y:,.0f} tok/s<extra></extra>", line=tokens)
    panels: list[tuple[str, int, list[Figure]]] = [
        ("", _STRIP, [_event_strip(events, line)]), ("requests", 170, _request_traces(line)), ("tok/s", 130, [tok_s]),
    ]  # fmt: skip
    if (cache := line.server.values.get("kv_usage")) is not None:
        panels.append((_panel_title(KV_CACHE), _LOW, [_panel_trace(KV_CACHE, line.server.at_s, cache)]))
    gpus = sorted({name for lines in line.machine.panels.values() for name in lines})
    in_legend: set[str] = set()
    for name, lines in line.machine.panels.items():
        traces = [_panel_trace(PANELS[name], line.machine.at_s, values) for values in lines.values()]
        if len(gpus) > 1:
            for gpu, trace in zip(lines, traces, strict=True):
                _mark_gpu(trace, gpu, f"@{colour(gpus.index(gpu))}", in_legend)
        panels.append((_panel_title(PANELS[name]), _LOW, traces))
    start_s = min(0.0, line.warmup_until_s or 0.0)
    margin_s = 0.03 * (line.ends_s - start_s) or 0.1
    total = sum(height for _, height, _ in panels) + _GAP * (len(panels) - 2)
    layout: Figure = {
        "height": total + 110 + (60 if len(gpus) > 1 else 0),  # a legend of many GPUs
        "hovermode": "x",
        "showlegend": True,
        "shapes": [_event_rule(event) for event in events],
        "annotations": [],
        "xaxis": {
            "title": {"text": "seconds since the first measured request"},
            "anchor": f"y{len(panels)}",
            "range": [start_s - margin_s, line.ends_s + margin_s],  # the server was sampled before, too
            "zeroline": False,
        },
    }
    if line.warmup_until_s is not None:
        _mark_warmup(layout, line.warmup_until_s)
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


def _event_strip(events: Sequence[TimelineEvent], line: Timeline) -> Figure:
    x = [event.at_s for event in events]
    room = _LABEL_SHARE * (line.ends_s - (line.warmup_until_s or 0.0))
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


def _request_traces(line: Timeline) -> list[Figure]:
    hover = "%{y:,} %{fullData.name}<extra></extra>"
    area: Figure = {"line": {"shape": "hvh", "width": 0}, "fill": "tozeroy", "fillcolor": "@area"}
    data = [scatter("in flight (client)", line.at_s, line.in_flight, hover, **area)]
    for gauge, hue, dash in (("running", "s1", "solid"), ("waiting", "s2", "dash")):
        if gauge in line.server.values:
            x, style = line.server.at_s, {"color": f"@{hue}", "dash": dash, "width": 2}
            values = line.server.values[gauge]
            data.append(scatter(f"{gauge} (server)", x, values, hover, _trace_mode(x), line=style, marker={"size": 5}))
    return data


_Panel = tuple[str, str, float, str, str]


def _panel_title(panel: _Panel) -> str:
    return ", ".join(filter(None, panel[:2]))


def _panel_trace(panel: _Panel, at_s: Sequence[float], values: Values) -> Figure:
    title, unit, factor, hover, hue = panel
    y = [None if value is None else round(factor * value, 3) for value in values]
    line, marker = {"color": f"@{hue}", "width": 2}, {"size": 4, "color": f"@{hue}"}
    name = title or unit
    hover = f"{hover}<extra></extra>"
    return scatter(name, at_s, y, hover, _trace_mode(at_s), line=line, marker=marker, showlegend=False)


def _mark_gpu(trace: Figure, gpu: str, hue: str, in_legend: set[str]) -> None:
    """Give a trace the colour of its GPU. One entry of the legend shows and hides the GPU in all panels."""
    trace["line"] |= {"color": hue, "width": 1.6}
    trace["marker"] |= {"color": hue, "size": 3}
    name = escape_markup(gpu)
    hover = f"{name} {trace['hovertemplate']}"
    trace |= {"name": name, "hovertemplate": hover, "legendgroup": name, "showlegend": gpu not in in_legend}
    in_legend.add(gpu)


def _trace_mode(at_s: Sequence[float]) -> str:
    return "lines+markers" if len(at_s) <= _MAX_POINTS else "lines"


def _event_rule(event: TimelineEvent) -> Figure:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": event.at_s, "x1": event.at_s, "y0": 0, "y1": 1,
        "line": {"color": "@bad" if event.bad else "@strong", "width": 1, "dash": "dot"}, "layer": "below",
    }  # fmt: skip


def _mark_warmup(layout: Figure, from_s: float) -> None:
    """Add the shade and the label of the warm-up."""
    layout["shapes"].insert(0, {
        "type": "rect", "xref": "x", "yref": "paper", "x0": from_s, "x1": 0, "y0": 0, "y1": 1,
        "fillcolor": "@shade", "line": {"width": 0}, "layer": "below",
    })  # fmt: skip
    layout["annotations"].append({
        "xref": "x", "yref": "y2 domain", "x": from_s, "y": 1, "text": "warm-up", "showarrow": False,
        "xanchor": "left", "yanchor": "top", "font": {"color": "@muted", "size": 11},
    })  # fmt: skip


PHASES = {
    "pull": "the image, where it was not on the machine yet",
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
_PHASES_BY_LOG = "process to warm-up by the server’s own log; until healthy = what was waited − those"


def startup_chart(run: Run) -> Chart:
    """The duration of each server's start by phase, median over its starts."""
    starts = observed_starts(run)
    phases = {server: phase_seconds(server_starts) for server, server_starts in starts.items()}
    order = list(phase_seconds(chain.from_iterable(starts.values())))
    data: list[Figure] = []
    for i, name in enumerate(order):
        pattern = {"shape": "/", "fillmode": "overlay", "fgcolor": "@card", "size": 6}
        stripes = {"pattern": pattern} if i >= COLOURS else {}  # two phases with the same colour
        medians = {
            server: statistics.median(seconds_of[name]) for server, seconds_of in phases.items() if name in seconds_of
        }
        data.append(
            {
                "type": "bar", "orientation": "h", "name": escape_markup(phase_name(name)), "y": list(medians),
                "x": [round(seconds, 3) for seconds in medians.values()],
                "marker": {"color": f"@{colour(i)}", "line": {"color": "@card", "width": 1.5}, **stripes},
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
        formula="; ".join(
            [_PHASE_RULE, *by_log, *(f"{phase_name(name)}: {PHASES[name]}" for name in order if name in PHASES)]
        ),
        figure={"data": data, "layout": layout},
        head=["Server", "Phase", "Median, s", "Least, s", "Most, s", "Starts"],
        body=[
            [
                server,
                phase_name(name),
                *(units.factor(phase_time(statistic(v))) for statistic in (statistics.median, min, max)),
                str(len(v)),
            ]
            for server, seconds_of in phases.items()
            for name in order
            if (v := seconds_of.get(name))
        ],
        empty="" if len(starts) > 1 else "No starts of several servers were observed.",
    )


def observed_starts(run: Run) -> dict[str, list[ServedBy]]:
    """The observed starts of each server; cells that share a start, as the parts of a mix do, count once."""
    starts: dict[str, dict[object, ServedBy]] = {}
    for cell in run.served:
        if cell.served_by.phases:
            start = (cell.group or cell.id) if run.scenario.restart else cell.repeat
            starts.setdefault(cell.server, {}).setdefault(start, cell.served_by)
    return {server: list(served.values()) for server, served in starts.items()}


def phase_seconds(starts: Iterable[ServedBy]) -> dict[str, list[float]]:
    """The seconds of each phase in all starts. The order of the phases fits each start."""
    order: list[str] = []
    seconds: dict[str, list[float]] = {}
    for served in starts:
        place = 0
        for phase in served.phases:
            if phase.name not in order:
                order.insert(place, phase.name)
            place = order.index(phase.name) + 1
            seconds.setdefault(phase.name, []).append(phase.seconds)
    return {name: seconds[name] for name in order}


def startup_facts(served: ServedBy) -> dict[str, Any]:
    """The facts that a server reported when it started, by their names in run.json."""
    facts = {} if served.startup is None else msgspec.structs.asdict(served.startup)
    return facts | {"rocm": None if served.contents is None else served.contents.rocm}
