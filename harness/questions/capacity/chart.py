"""The chart of a capacity search: the share of requests that met each SLO."""

from collections.abc import Iterator

from harness.questions.capacity.level import MeasuredProbe
from harness.questions.capacity.page import probe_cells, probe_headings
from harness.questions.capacity.record import CapacityReport, ServerCapacity
from harness.report.charts import NAME, Chart, Figure, colour, escape_markup, scatter, symbol


def attainment_chart(report: CapacityReport) -> Chart:
    """The share of requests that met each SLO over levels: a point for each probe, a rule for each SLO."""
    data = [
        trace for number, server in enumerate(report.servers) for trace in _attainment_lines(report, number, server)
    ]
    levels = sorted({probe.level for server in report.servers for probe in server.probes if probe.purpose == "slo"})
    axis: Figure = {
        "title": {"text": f"{report.unit} (logarithmic)"},
        "type": "log",
        "tickvals": [report.amount(level) for level in levels],
        "ticktext": [f"{report.amount(level):.3g}" for level in levels],
    }
    layout: Figure = {
        "xaxis": axis,
        "yaxis": {"title": {"text": "requests that met it"}, "rangemode": "tozero", "ticksuffix": "\u00a0%"},
        "shapes": _slo_rules(report),
        "showlegend": len(data) > 1,
    }
    return Chart(
        id="capacity",
        title=f"Share of requests within the SLOs over {report.unit}",
        caption="A point for each probe. Dotted: the share that an SLO needs. Higher is better.",
        formula="share = requests that ended in the blocks of the probe and met the SLO ÷ those that ended in them; "
        "failed ones met none",
        figure={"data": data, "layout": layout},
        head=probe_headings(report),
        body=[probe_cells(report, server, probe) for server in report.servers for probe in server.probes],
        empty="" if data else "No probe was measured for an SLO.",
    )


def _attainment_lines(report: CapacityReport, number: int, server: ServerCapacity) -> Iterator[Figure]:
    """The points of each SLO of one server."""
    for place, slo in enumerate(report.slos_of(server)):
        probes = [p for p in server.probes if p.purpose == "slo" and _attained_share(p, place) is not None]
        if not probes:
            continue
        name = f"{server.server}: {slo}" if len(report.servers) > 1 else slo
        hue = f"@{colour(number if len(report.servers) > 1 else place)}"
        text = [f"{probe.answers:,} answers, {probe.state}" for probe in probes]
        yield scatter(
            name,
            [report.amount(probe.level) for probe in probes],
            [100 * (_attained_share(probe, place) or 0.0) for probe in probes],
            f"<b>%{{y:.1f}} %</b> at %{{x}}<br>%{{text}}{NAME}",
            "markers",
            text=list(map(escape_markup, text)),
            marker={"color": hue, "symbol": symbol(report.all_slos.index(slo)), "size": 10},
        )


def _attained_share(probe: MeasuredProbe, slo: int) -> float | None:
    return probe.met[slo] if slo < len(probe.met) else None


def _slo_rules(report: CapacityReport) -> list[Figure]:
    """A horizontal rule at each share that an SLO needs."""
    return [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * share, "y1": 100 * share,
            "line": {"color": "@muted", "width": 1.5, "dash": "dot"},
        }
        for share in sorted({*report.shares, *(share for server in report.servers for share in server.shares)})
    ]  # fmt: skip
