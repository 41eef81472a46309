"""The chart of a capacity search: what share of requests met each SLO at each level, and the answers."""

from collections.abc import Iterator

from harness.capacity.result import CapacityReport, MeasuredProbe, ServerCapacity
from harness.report.capacity import capacity_lines, probe_head, probe_texts
from harness.report.charts import NAME, Chart, Figure, colour, plain, scatter, symbol

_MOST_TICKS = 12


def attainment(found: CapacityReport) -> Chart:
    """Attainment over levels: a point for each probe, the share that each SLO needs, and the 95 % interval."""
    data = [trace for number, server in enumerate(found.servers) for trace in _points(found, number, server)]
    levels = sorted({probe.level for server in found.servers for probe in server.probes if probe.purpose == "slo"})
    ticks = levels if len(levels) <= _MOST_TICKS else levels[:: -(-len(levels) // _MOST_TICKS)]
    axis: Figure = {
        "title": {"text": f"{found.unit} (logarithmic)"},
        "type": "log",
        "tickvals": [found.amount(level) for level in ticks],
        "ticktext": [f"{found.amount(level):.3g}" for level in ticks],
    }
    layout: Figure = {
        "xaxis": axis,
        "yaxis": {"title": {"text": "requests that met it, %"}, "rangemode": "tozero"},
        "shapes": [
            *_bounds(found),
            *(shape for i, server in enumerate(found.servers) for shape in _answer(found, i, server)),
        ],
        "showlegend": len(data) > 1,
    }
    return Chart(
        id="capacity",
        title=f"Share of requests within the SLOs over {found.unit}",
        caption="A point for each probe. Dotted: the share that an SLO needs. Line and area: the answer with its "
        "95\u00a0% interval. Higher is better.",
        formula="share = requests that ended in the blocks of the probe and met the SLO ÷ those that ended in them; "
        "failed ones met none",
        findings=capacity_lines(found),
        figure={"data": data, "layout": layout},
        head=probe_head(found),
        body=[probe_texts(found, server, probe) for server in found.servers for probe in server.probes],
        empty="" if data else "No probe was measured for an SLO.",
    )


def _points(found: CapacityReport, number: int, server: ServerCapacity) -> Iterator[Figure]:
    """A trace for each SLO of one server."""
    for at, slo in enumerate(found.slos):
        probes = [probe for probe in server.probes if probe.purpose == "slo" and _share(probe, at) is not None]
        probes.sort(key=lambda probe: probe.level)
        if not probes:
            continue
        name = f"{server.server}: {slo}" if len(found.servers) > 1 else slo
        hue = f"@{colour(number if len(found.servers) > 1 else at)}"
        text = [f"{probe.answers:,} answers, {probe.state}" for probe in probes]
        yield scatter(
            name,
            [found.amount(probe.level) for probe in probes],
            [100 * (_share(probe, at) or 0.0) for probe in probes],
            f"<b>%{{y:.1f}} %</b> at %{{x}}<br>%{{text}}{NAME}",
            "lines+markers",
            text=[plain(one) for one in text],
            line={"color": hue, "width": 1.5},
            marker={"color": hue, "symbol": symbol(at), "size": 10},
        )


def _share(probe: MeasuredProbe, slo: int) -> float | None:
    return probe.met[slo] if slo < len(probe.met) else None


def _bounds(found: CapacityReport) -> list[Figure]:
    """A horizontal rule at each share that an SLO needs."""
    return [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * share, "y1": 100 * share,
            "line": {"color": "@muted", "width": 1.5, "dash": "dot"},
        }
        for share in sorted(set(found.shares))
    ]  # fmt: skip


def _answer(found: CapacityReport, number: int, server: ServerCapacity) -> list[Figure]:
    """The answer of a server as a line, its interval as an area."""
    slo = server.slo
    if slo is None:
        return []
    hue, shapes = f"@{colour(number)}", []
    full = {"yref": "paper", "y0": 0, "y1": 1}
    if slo.low is not None and slo.high is not None:
        ends = {"x0": found.amount(max(slo.low, 0.5)), "x1": found.amount(slo.high)}
        shapes.append({"type": "rect", **full, **ends, "fillcolor": hue, "opacity": 0.12, "line": {"width": 0}})
    if slo.level:
        at = found.amount(slo.level)
        shapes.append({"type": "line", **full, "x0": at, "x1": at, "line": {"color": hue, "width": 2}})
    return shapes
