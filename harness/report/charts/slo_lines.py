"""The bounds of the scenario's SLOs as lines in the charts of latencies."""

import msgspec

from harness.report.charts import Chart, Figure, plain
from harness.scenario.check_syntax import LATENCIES, STATISTICS, parse_check
from harness.summary import Summary

# By chart: its latency, and the axis that shows it in milliseconds.
_AXES = {
    "first-token": ("ttft", "y"), "trade-ttft": ("ttft", "y"), "trade-e2e": ("e2e", "y"), "dots-ttft": ("ttft", "y"),
    "dots-e2e": ("e2e", "y"), "cdf-ttft": ("ttft", "x"), "cdf-tpot": ("tpot", "x"), "cdf-e2e": ("e2e", "x"),
}  # fmt: skip
_FAR = 3  # times the largest value: a line beyond that would flatten the curves, so a sentence says where it is


def slo_bounds(summary: Summary) -> dict[str, dict[str, float]]:
    """By latency, such as `ttft`: each SLO as it is written, and its bound in seconds."""
    found: dict[str, dict[str, float]] = {}
    for result in summary.checks:
        try:
            check = parse_check(result.check)
        except ValueError:
            continue  # the list of checks says what is wrong with it
        latency, _, statistic = check.metric.rpartition("_")
        if not check.relative and latency in LATENCIES and statistic in STATISTICS:
            found.setdefault(latency, {})[check.text.strip()] = check.bound
        for slo in check.slos:
            found.setdefault(slo.latency, {})[slo.text.strip()] = slo.bound_s
    return found


def with_slo_lines(chart: Chart, bounds: dict[str, dict[str, float]]) -> Chart:
    """A chart with the bounds of its latency."""
    latency, axis = _AXES.get(chart.id, ("", ""))
    if chart.empty or latency not in bounds:
        return chart
    largest = max((value for trace in chart.figure["data"] for value in trace[axis] if value is not None), default=0.0)
    near = {text: 1000 * bound for text, bound in bounds[latency].items() if 1000 * bound <= _FAR * largest}
    far = [text for text in bounds[latency] if text not in near]
    layout = chart.figure["layout"]
    shapes = [*layout.get("shapes", []), *(_line(axis, at, text) for text, at in near.items())]
    figure = {**chart.figure, "layout": {**layout, "shapes": shapes}}
    findings = [f"Far beyond what is shown: {', '.join(far)}"] if far else []
    return msgspec.structs.replace(chart, figure=figure, findings=[*chart.findings, *findings])


def _line(axis: str, at_ms: float, text: str) -> Figure:
    other = "x" if axis == "y" else "y"
    below = {"yanchor": "top"} if axis == "y" else {}  # above it, the label of a line at the top is cut
    return {
        "type": "line", f"{axis}0": at_ms, f"{axis}1": at_ms, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper",
        "line": {"color": "@bad", "width": 1.3, "dash": "dash"},
        "label": {"text": plain(text), "textposition": "end", "font": {"color": "@bad", "size": 11}, **below},
    }  # fmt: skip
