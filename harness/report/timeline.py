"""The timeline of one cell as a plotly figure: panels one above the other that share the time."""

from collections.abc import Sequence

from harness.report.events import Event
from harness.report.marks import Figure
from harness.report.observed import Timeline

# Gauges with a panel of their own: title, factor to what is shown, hover text, colour.
PANELS = {
    "kv_usage": ("KV cache, %", 100.0, "%{y:.1f} % of the KV cache", "s4"),
    "power_w": ("power, W", 1.0, "%{y:,.0f} W", "s5"),
    "vram_used_bytes": ("VRAM, GiB", 2.0**-30, "%{y:,.1f} GiB of VRAM", "s6"),
    "temperature_c": ("°C", 1.0, "%{y:,.0f} °C", "s8"),
}
_GAP = 26  # pixels between panels
_STRIP = 20  # height of the strip of events
_MOST_POINTS = 80
_FEW_POINTS = 5
_ROOM = 0.08  # of the width, that a label of an event needs


def figure_of(line: Timeline, events: Sequence[Event]) -> Figure:
    """Requests, tokens per second, and whatever else was recorded, over the seconds of one cell."""
    gauges = [name for name in PANELS if name in line.server.values]
    heights = [_STRIP, 170, 130, *(90 for _ in gauges)]
    total = sum(heights) + _GAP * (len(heights) - 2)
    layout: Figure = {
        "height": total + 110,
        "hovermode": "x",
        "showlegend": True,
        "shapes": _shade(line) + [_rule(event) for event in events],
        "annotations": _warmup(line),
    }
    titles = ["", "requests", "tok/s", *(PANELS[name][0] for name in gauges)]
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
    data += [_gauge(line, name, f"y{4 + number}") for number, name in enumerate(gauges)]
    return {"data": data, "layout": layout}


def _axis(number: int) -> str:
    return "yaxis" if number == 1 else f"yaxis{number}"


def _marks(events: Sequence[Event], line: Timeline) -> Figure:
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


def _labels(events: Sequence[Event], line: Timeline) -> list[str]:
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
                    "type": "scatter", "mode": _mode(line), "name": f"{gauge} (server)", "x": line.server.at_s,
                    "y": line.server.values[gauge], "yaxis": "y2",
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


def _gauge(line: Timeline, name: str, place: str) -> Figure:
    title, factor, hover, hue = PANELS[name]
    return {
        "type": "scatter", "mode": _mode(line), "name": title.partition(",")[0], "x": line.server.at_s,
        "y": [None if value is None else round(factor * value, 3) for value in line.server.values[name]],
        "yaxis": place, "line": {"color": f"@{hue}", "width": 2}, "marker": {"size": 4, "color": f"@{hue}"},
        "showlegend": False, "hovertemplate": f"{hover}<extra></extra>",
    }  # fmt: skip


def _mode(line: Timeline) -> str:
    """Points show when the server was asked, as long as there is room between them. A line through few would invent."""
    if len(line.server.at_s) <= _FEW_POINTS:
        return "markers"
    return "lines+markers" if len(line.server.at_s) <= _MOST_POINTS else "lines"


def _rule(event: Event) -> Figure:
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
