"""A soak: its trends and events as tables, and the speed over time as a chart."""

from msgspec.structs import replace

from harness.base import units
from harness.base.summary import Soak, Summary, Trend
from harness.report.charts import Chart, Figure, escape_markup, scatter
from harness.report.elements import Element, plain_grid

_SHOWN = 20  # events


def soak_page(summary: Summary) -> list[Element]:
    """The trends and the kernel's events of each soak."""
    if not summary.soaks:
        return []
    trends = [[found.row, *_cells(one)] for found in summary.soaks for one in _trends(found)]
    page: list[Element] = []
    head: tuple[str, ...]
    if trends:
        head = ("Row", "What", "Mean", "Per hour", "95 % interval")
        page.append(replace(plain_grid(head, trends), title="Over the hours"))
    events = [
        [found.row, units.duration(max(0.0, one.at_s)), one.id, f"{one.in_flight}", f"{one.failed}", one.text]
        for found in summary.soaks
        for one in found.events[:_SHOWN]
    ]
    if events:
        head = ("Row", "After", "Event", "In flight", "Failed", "Kernel log")
        page.append(replace(plain_grid(head, events), title="Events of the kernel"))
    return page


def _trends(found: Soak) -> list[Trend]:
    return [*([] if found.speed is None else [found.speed]), *found.memory]


def _cells(one: Trend) -> list[str]:
    if one.name in ("tok/s", "KV cache"):
        level = units.significant(one.level) if one.name == "tok/s" else units.percent(one.level)
        ends = [f"{100 * each:+.2f}\u00a0%" for each in (one.per_hour, one.low, one.high)]
    else:
        level = units.gib(one.level, 2)
        ends = [f"{each / units.GIB:+.3f} GiB" for each in (one.per_hour, one.low, one.high)]
    return [one.name, level, ends[0], f"{ends[1]} to {ends[2]}"]


def soak_charts(summary: Summary) -> list[Chart]:
    return [_chart(found, number) for number, found in enumerate(summary.soaks)]


def _chart(found: Soak, number: int) -> Chart:
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
