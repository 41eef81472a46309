"""The timeline of one cell as a plotly figure."""

from harness.report.marks import Figure
from harness.report.observed import Timeline


def figure_of(line: Timeline) -> Figure:
    """Requests above, tokens per second below, over the seconds of one cell."""
    hover = "%{y:,} %{fullData.name}<extra></extra>"
    data: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "name": "in flight (client)", "x": line.at_s, "y": line.in_flight,
            "line": {"shape": "hvh", "width": 0}, "fill": "tozeroy", "fillcolor": "@area", "hovertemplate": hover,
        }
    ]  # fmt: skip
    for name, values, hue, dash in (
        ("running (server)", line.server.running, "s1", "solid"),
        ("waiting (server)", line.server.waiting, "s2", "dash"),
    ):
        if any(value is not None for value in values):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": line.server.at_s,
                    "y": values,
                    "line": {"color": f"@{hue}", "dash": dash, "width": 2},
                    "marker": {"size": 5},
                    "hovertemplate": hover,
                }  # fmt: skip
            )
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "output tok/s", "x": line.at_s, "y": line.tok_s,
            "yaxis": "y2", "line": {"color": "@s3", "width": 1.8, "shape": "hvh"},
            "hovertemplate": "%{y:,.0f} tok/s<extra></extra>",
        }
    )  # fmt: skip
    layout: Figure = {
        "height": 400,
        "hovermode": "x",
        "showlegend": True,
        "xaxis": {"title": {"text": "seconds since the first measured request"}, "anchor": "y2", "zeroline": False},
        "yaxis": {"title": {"text": "requests"}, "domain": [0.56, 1], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "tok/s"}, "domain": [0, 0.44], "rangemode": "tozero"},
    }
    if line.warmup_until_s is not None:
        layout["shapes"] = [
            {
                "type": "rect", "xref": "x", "yref": "paper", "x0": line.warmup_until_s, "x1": 0, "y0": 0, "y1": 1,
                "fillcolor": "@shade", "line": {"width": 0}, "layer": "below",
            }
        ]  # fmt: skip
        layout["annotations"] = [
            {
                "xref": "x", "yref": "paper", "x": line.warmup_until_s, "y": 1, "text": "warm-up", "showarrow": False,
                "xanchor": "left", "yanchor": "top", "font": {"color": "@muted", "size": 11},
            }
        ]  # fmt: skip
    return {"data": data, "layout": layout}
