"""The charts of `harness compare`: the values of both sides of each row, and their texts."""

import math
import statistics
from collections.abc import Sequence

from harness.base import units
from harness.base.metrics import METRICS, Metric
from harness.numbers.comparison import Comparison, Verdict
from harness.report import words
from harness.report.charts import Chart, Figure, colour, escape_markup, whiskers


def side_titles(comparison: Comparison) -> tuple[str, str]:
    """The titles of the values of the baseline and of the other side: the machines, where these are compared."""
    machines = [difference.values for difference in comparison.differences if difference.key == "machine.name"]
    if len(comparison.sides) == 2 and comparison.sides in machines:
        return comparison.sides[0], comparison.sides[1]
    return "Before", "After"


def row_name(verdict: Verdict, titles: tuple[str, str]) -> str:
    """The row, without the machine that a title names."""
    return verdict.side.removesuffix(f" ({titles[1]})")


def format_side(verdict: Verdict, values: Sequence[float]) -> str:
    """The value of a side: the geometric mean of its repeats or runs, as in the ratio."""
    return words.format_metric(_mean(values), verdict.metric) if values else "n/a"


def _mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def side_charts(comparison: Comparison) -> list[Chart]:
    """A chart for each metric; the percentiles of a latency share one. None where no row has values on both sides."""
    by_field: dict[str, list[Verdict]] = {}
    for verdict in comparison.verdicts:
        if all(verdict.values):
            by_field.setdefault(METRICS[verdict.metric].field, []).append(verdict)
    return [_chart(METRICS[name], verdicts, side_titles(comparison)) for name, verdicts in by_field.items()]


def _chart(metric: Metric, verdicts: Sequence[Verdict], titles: tuple[str, str]) -> Chart:
    """`metric`: a latency without its statistic, or another metric."""
    scale, unit = (1000, "ms") if metric.latency else (1, metric.unit)
    rows = [
        f"{row_name(verdict, titles)}{metric.latency and f', {METRICS[verdict.metric].statistic}'}"
        for verdict in verdicts
    ]
    names = [escape_markup(row).replace(" / ", " /<br>").replace(" (", "<br>(") for row in rows]
    is_repeated = max(verdict.n[side] for verdict in verdicts for side in (0, 1)) > 1
    data: list[Figure] = []
    body: list[list[str]] = []
    for number, title in enumerate(titles):
        samples = [[scale * value for value in verdict.values[1 - number]] for verdict in verdicts]
        means = list(map(_mean, samples))
        data.append({
            "type": "bar", "orientation": "h", "name": escape_markup(title), "y": names, "x": means,
            "marker": {"color": f"@{colour(number)}"},
            **({"error_x": whiskers(means, samples, "@ink")} if is_repeated else {}),
            "hovertemplate": f"%{{y}}<br><b>%{{x:,.4g}} {unit}</b><extra>%{{fullData.name}}</extra>",
        })  # fmt: skip
        for row, mean, values in zip(rows, means, samples, strict=True):
            shown = [units.significant(value) for value in (mean, min(values), max(values))]
            body.append([row, title, *shown, str(len(values))])
    name = f"{metric.title[0].upper()}{metric.title[1:]}"
    spread = (
        f"Mean of the {verdicts[0].unit} of each side; whiskers from the minimum to the maximum. "
        if is_repeated
        else ""
    )
    return Chart(
        id=f"sides-{metric.name}",
        title=f"{name} of both sides",
        caption=f"{spread}{'More' if metric.more_is_better else 'Less'} is better.",
        formula=f"{metric.formula or metric.title}; mean = geometric mean of the {verdicts[0].unit}",
        figure={
            "data": data,
            "layout": {
                "height": 120 + 68 * len(verdicts), "showlegend": True, "barmode": "group",
                "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
                "yaxis": {"autorange": "reversed", "type": "category"},
            },
        },
        head=["Row", "Side", f"Mean, {unit}", "Min", "Max", verdicts[0].unit.capitalize()],
        body=body,
    )  # fmt: skip
