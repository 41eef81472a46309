"""The timeline of one cell as a plotly figure, and the events that it marks."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from harness import units
from harness.report.charts.marks import Figure, colour, plain
from harness.report.charts.observed import Timeline
from harness.report.charts.telemetry import MachineSamples, ServerSamples
from harness.rundir.manifest import CellRun, ServerDeath
from harness.summary import CellSummary

MOST_ALIKE = 12  # about so many of one kind in a cell: what lies closer together is one
Span = tuple[float, float, float]  # start, end, the most within it

_BROKEN = ("connect", "disconnect", "truncated")  # what a client sees first of a server that is gone


class TimelineEvent(Struct, frozen=True, order=True):
    """A mark: seconds since the first measured request, and what it was."""

    at_s: float
    text: str
    bad: bool = False
    label: str = ""  # what is written beside the mark, where there is room


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
    near_s = (line.ends_s - (line.warmup_until_s or 0.0)) / MOST_ALIKE
    for start, end, most in _joined(_waiting(line.server), near_s):
        lasted = units.figures(end - start)
        found.append(TimelineEvent(start, f"requests wait in the server during {lasted} s, {most:,.0f} at most"))
    found += [TimelineEvent(start, text, True, "heat") for start, text in _heat(line.machine, near_s)]
    found += [
        TimelineEvent(at, units.count(int(many), "preemption")) for at, many in _summed(line.server.preempted, near_s)
    ]
    return sorted(found)


def _death(line: Timeline, ran: CellRun | None) -> TimelineEvent | None:
    if ran is None or (ran.served_by.exit_code is None and not _dead(ran.served_by.death)):
        return None
    broken = [line.failures[kind].first_s for kind in _BROKEN if kind in line.failures]
    code = ran.served_by.exit_code
    why = ", out of memory" if ran.served_by.oom_killed else "" if code is None else f", exit code {code}"
    return TimelineEvent(min(broken) if broken else line.ends_s, f"the server died{why}", True, "died")


def _dead(death: ServerDeath | None) -> bool:
    return death is not None and death.how != "unreachable"


def _waiting(server: ServerSamples) -> Iterator[Span]:
    """When the server's queue was seen not empty, and the most that waited."""
    start: float | None = None
    most = 0.0
    for at, value in zip(server.at_s, server.values.get("waiting", []), strict=False):
        if value:
            start, most = (at, value) if start is None else (start, max(most, value))
        elif start is not None:
            yield start, at, most
            start = None
    if start is not None:
        yield start, server.at_s[-1], most


def _heat(machine: MachineSamples, near_s: float) -> Iterator[tuple[float, str]]:
    """When heat held a GPU back, as the spans between two samples say."""
    for name in dict.fromkeys(name for _, _, name in machine.heat):
        spans = [(start, end, 0.0) for start, end, gpu in machine.heat if gpu == name]
        for start, end, _ in _joined(spans, near_s):
            yield start, f"heat throttles the GPU {name}, last seen at {end:.1f} s"


def _joined(spans: Iterable[Span], near_s: float) -> list[Span]:
    """Spans of which each begins at least so long after the one before it; those between belong to that one."""
    joined: list[Span] = []
    for start, end, most in spans:
        if joined and start - joined[-1][0] < near_s:
            first, _, before = joined[-1]
            joined[-1] = first, end, max(before, most)
        else:
            joined.append((start, end, most))
    return joined


def _summed(counts: Iterable[tuple[float, float]], near_s: float) -> list[tuple[float, float]]:
    """Counts that lie closer together than that as one."""
    summed: list[tuple[float, float]] = []
    for at, many in counts:
        if summed and at - summed[-1][0] < near_s:
            summed[-1] = summed[-1][0], summed[-1][1] + many
        else:
            summed.append((at, many))
    return summed


# Panels of what is beside requests and tokens: title, factor to what is shown, hover text, colour of a single line.
# The first is the server's own gauge, the others are what its machine was seen to do.
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
_MOST_POINTS = 80
_FEW_POINTS = 5
_ROOM = 0.08  # of the width, that a label of an event needs


def figure_of(line: Timeline, events: Sequence[TimelineEvent]) -> Figure:
    """Requests, tokens per second, and whatever else was recorded, over the seconds of one cell."""
    cache = [KV_CACHE[0]] if "kv_usage" in line.server.values else []
    watched = [name for name in PANELS if name in line.machine.panels]
    arrivals = ["arrivals/s"] if line.asked_s else []
    others = [*arrivals, *cache, *(PANELS[name][0] for name in watched)]
    heights = [_STRIP, 170, 130, *(90 for _ in others)]
    total = sum(heights) + _GAP * (len(heights) - 2)
    layout: Figure = {
        "height": total + 110 + (60 if line.machine.drawn > 1 else 0),  # a legend of many GPUs
        "hovermode": "x",
        "showlegend": True,
        "shapes": _shade(line) + [_rule(event) for event in events],
        "annotations": _warmup(line),
    }
    titles = ["", "requests", "tok/s", *others]
    top = 0
    for number, (height, title) in enumerate(zip(heights, titles, strict=True), 1):
        layout[_axis(number)] = {
            "title": {"text": title},
            "domain": [round(max(0.0, 1 - (top + height) / total), 4), round(1 - top / total, 4)],
            "rangemode": "tozero",
            "nticks": 4 if height < 120 else 6,
        }
        top += height + (_GAP if number > 1 else 0)
    layout["yaxis"] |= {"range": [0, 1], "visible": False, "fixedrange": True}
    layout["xaxis"] = {
        "title": {"text": "seconds since the first measured request"},
        "anchor": f"y{len(heights)}",
        "zeroline": False,
    }
    data = [_marks(events, line), *_requests(line), _tokens(line)]
    data += _arrivals(line, "y4") if arrivals else []
    data += [_cache(line, f"y{4 + len(arrivals)}")] if cache else []
    known: set[str] = set()
    for number, name in enumerate(watched, 4 + len(arrivals) + len(cache)):
        data += _watched(line, name, f"y{number}", known)
    return {"data": data, "layout": layout}


def _axis(number: int) -> str:
    return "yaxis" if number == 1 else f"yaxis{number}"


def _marks(events: Sequence[TimelineEvent], line: Timeline) -> Figure:
    return {
        "type": "scatter", "mode": "markers+text", "name": "event",
        "customdata": [event.text for event in events], "x": [event.at_s for event in events],
        "y": [0.5] * len(events), "text": _labels(events, line), "textposition": "middle right",
        "textfont": {"size": 11, "color": "@muted"},
        "marker": {
            "symbol": ["x" if event.bad else "triangle-down" for event in events], "size": 10,
            "color": ["@bad" if event.bad else "@muted" for event in events],
        },
        "cliponaxis": False, "hovertemplate": "%{x:.1f} s: <b>%{customdata}</b><extra></extra>",
    }  # fmt: skip


def _labels(events: Sequence[TimelineEvent], line: Timeline) -> list[str]:
    """The labels of those events that have room to their right."""
    room = _ROOM * (line.ends_s - (line.warmup_until_s or 0.0))
    nexts = [event.at_s for event in events[1:]] + [float("inf")]
    return [event.label if after - event.at_s > room else "" for event, after in zip(events, nexts, strict=True)]


def _requests(line: Timeline) -> list[Figure]:
    hover = "%{y:,} %{fullData.name}<extra></extra>"
    data: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "name": "in flight (client)", "x": line.at_s, "y": line.in_flight,
            "yaxis": "y2", "line": {"shape": "hvh", "width": 0}, "fill": "tozeroy", "fillcolor": "@area",
            "hovertemplate": hover,
        }
    ]  # fmt: skip
    for gauge, hue, dash in (("running", "s1", "solid"), ("waiting", "s2", "dash")):
        if gauge in line.server.values:
            data.append(
                {
                    "type": "scatter", "mode": _mode(line.server.at_s), "name": f"{gauge} (server)",
                    "x": line.server.at_s, "y": line.server.values[gauge], "yaxis": "y2",
                    "line": {"color": f"@{hue}", "dash": dash, "width": 2}, "marker": {"size": 5},
                    "hovertemplate": hover,
                }
            )  # fmt: skip
    return data


def _tokens(line: Timeline) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "name": "output tok/s", "x": line.at_s, "y": line.tok_s, "yaxis": "y3",
        "line": {"color": "@s3", "width": 1.8, "shape": "hvh"}, "hovertemplate": "%{y:,.0f} tok/s<extra></extra>",
    }  # fmt: skip


def _arrivals(line: Timeline, place: str) -> list[Figure]:
    """What the schedule asked for, as an area, and what was sent, as a line: where they part, it was not kept."""
    hover = "%{y:,.2f}/s %{fullData.name}<extra></extra>"
    return [
        {
            "type": "scatter", "mode": "lines", "name": "asked", "x": line.arrivals_at_s, "y": line.asked_s,
            "yaxis": place, "line": {"shape": "hvh", "width": 0}, "fill": "tozeroy",
            "fillcolor": "@area", "hovertemplate": hover,
        },
        {
            "type": "scatter", "mode": "lines", "name": "sent", "x": line.arrivals_at_s, "y": line.gone_s,
            "yaxis": place, "line": {"color": "@s2", "width": 1.6, "shape": "hvh"}, "hovertemplate": hover,
        },
    ]  # fmt: skip


def _cache(line: Timeline, place: str) -> Figure:
    values = line.server.values["kv_usage"]
    return _panel(KV_CACHE, "", line.server.at_s, values, place) | {"mode": _mode(line.server.at_s)}


def _watched(line: Timeline, name: str, place: str, known: set[str]) -> list[Figure]:
    """A line for each GPU, or for each sensor of the only one. `known`: what the legend has already."""
    drawn = line.machine.panels[name]
    traces = []
    for number, (label, values) in enumerate(drawn.items()):
        trace = _panel(PANELS[name], label if len(drawn) > 1 else "", line.machine.at_s, values, place)
        if len(drawn) > 1 or line.machine.drawn > 1:
            hue, dash = _style(line, label, number)
            trace["line"] |= {"color": f"@{hue}", "dash": dash, "width": 1.6}
            trace["marker"] |= {"color": f"@{hue}", "size": 3}
            # Of several GPUs each has one entry, which shows and hides it in all panels.
            entry = trace["name"] if line.machine.drawn == 1 else label.partition(" ")[0]
            trace |= {"name": entry, "legendgroup": entry, "showlegend": entry not in known}
            known.add(entry)
        traces.append(trace | {"mode": _mode(line.machine.at_s)})
    return traces


def _style(line: Timeline, label: str, number: int) -> tuple[str, str]:
    """Of one GPU a colour for each line; of several a colour for each GPU, dashed what is not its own memory."""
    if line.machine.drawn == 1:
        return colour(number + 4), "solid"
    gpus = sorted({one.partition(" ")[0] for lines in line.machine.panels.values() for one in lines})
    name, _, what = label.partition(" ")
    return colour(gpus.index(name)), "dot" if what == "GTT" else "solid"


def _panel(
    panel: tuple[str, float, str, str], label: str, at_s: Sequence[float], values: Sequence[float | None], place: str
) -> Figure:
    title, factor, hover, hue = panel
    name = title.partition(",")[0]
    return {
        "type": "scatter", "name": f"{name}, {plain(label)}" if label else name, "x": at_s,
        "y": [None if value is None else round(factor * value, 3) for value in values],
        "yaxis": place, "line": {"color": f"@{hue}", "width": 2}, "marker": {"size": 4, "color": f"@{hue}"},
        "showlegend": False, "hovertemplate": f"{plain(label)} {hover}".strip() + "<extra></extra>",
    }  # fmt: skip


def _mode(at_s: Sequence[float]) -> str:
    """Points show when was looked, as long as there is room between them. A line through few would invent."""
    if len(at_s) <= _FEW_POINTS:
        return "markers"
    return "lines+markers" if len(at_s) <= _MOST_POINTS else "lines"


def _rule(event: TimelineEvent) -> Figure:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": event.at_s, "x1": event.at_s, "y0": 0, "y1": 1,
        "line": {"color": "@bad" if event.bad else "@strong", "width": 1, "dash": "dot"}, "layer": "below",
    }  # fmt: skip


def _shade(line: Timeline) -> list[Figure]:
    if line.warmup_until_s is None:
        return []
    return [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": line.warmup_until_s, "x1": 0, "y0": 0, "y1": 1,
            "fillcolor": "@shade", "line": {"width": 0}, "layer": "below",
        }
    ]  # fmt: skip


def _warmup(line: Timeline) -> list[Figure]:
    if line.warmup_until_s is None:
        return []
    return [
        {
            "xref": "x", "yref": "y2 domain", "x": line.warmup_until_s, "y": 1, "text": "warm-up", "showarrow": False,
            "xanchor": "left", "yanchor": "top", "font": {"color": "@muted", "size": 11},
        }
    ]  # fmt: skip
