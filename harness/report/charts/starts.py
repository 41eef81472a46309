"""How servers started: a chart of the phases, a sentence for each server, and what it said that it runs with."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from harness import units
from harness.engines import engines
from harness.judge import server_starts
from harness.report.charts.marks import COLOURS, Chart, colour, plain
from harness.rundir.manifest import Run, ServedBy

MEANS = {
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
_RULE = "phase = its end − end of the phase before it, the median over the starts"
_BY_LOG = "process to warm-up by the server’s own log; ready = what was waited − those"


def startup(run: Run) -> Chart:
    """How long each server took to start, phase by phase, median over its starts."""
    starts = starts_of(run)
    order = _order(chain.from_iterable(starts.values()))
    data: list[dict[str, Any]] = []
    for i, name in enumerate(order):
        having = [server for server in starts if _seconds(starts[server], name)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(name),
                "y": having,
                "x": [round(statistics.median(_seconds(starts[server], name)), 3) for server in having],
                "marker": {"color": f"@{colour(i)}", "line": {"color": "@card", "width": 1.5}, **_pattern(i)},
                "hovertemplate": "%{fullData.name}: <b>%{x:,.2f} s</b><extra>%{y}</extra>",
            }
        )
    by_log = [_BY_LOG] if "process" in order else []
    return Chart(
        id="startup",
        title="Start of each server",
        caption="Seconds from the order to start until the model answered, by phase; median over the server’s starts.",
        formula="; ".join([_RULE, *by_log, *(f"{name}: {MEANS[name]}" for name in order if name in MEANS)]),
        findings=[f"{server}: {text}." for server, text in sentences(run)],
        figure={
            "data": data,
            "layout": {
                "barmode": "stack",
                "height": 120 + 46 * len(starts),
                "showlegend": True,
                "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
                "yaxis": {
                    "autorange": "reversed",
                    "type": "category",
                    "categoryorder": "array",
                    "categoryarray": list(starts),
                },
            },
        },
        head=["Server", "Phase", "Median, s", "Least, s", "Most, s", "Starts"],
        body=[
            [server, name, f"{statistics.median(v):,.2f}", f"{min(v):,.2f}", f"{max(v):,.2f}", str(len(v))]
            for server, known in starts.items()
            for name in order
            if (v := _seconds(known, name))
        ],
        empty="" if data else "No start was observed: the server already ran.",
    )


def _pattern(index: int) -> dict[str, Any]:
    """Stripes for phases beyond the number of colours, so that no two of a bar look alike."""
    return {} if index < COLOURS else {"pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": "@card", "size": 6}}


def starts_of(run: Run) -> dict[str, list[ServedBy]]:
    """The starts of each server that were observed; cells that share one count once."""
    found: dict[tuple[str, object], ServedBy] = {}
    for cell in run.cells:
        if cell.served_by.phases:
            found.setdefault((cell.server, cell.id if run.scenario.restart else cell.repeat), cell.served_by)
    result: dict[str, list[ServedBy]] = {}
    for (server, _), served in found.items():
        result.setdefault(server, []).append(served)
    return result


def sentences(run: Run) -> list[tuple[str, str]]:
    """Each server whose start was observed, with its start in a sentence without the full stop."""
    return [(server, _sentence(starts)) for server, starts in starts_of(run).items()]


def _sentence(starts: Sequence[ServedBy]) -> str:
    total = statistics.median(sum(phase.seconds for phase in served.phases) for served in starts)
    order = _order(starts)
    medians = {name: statistics.median(_seconds(starts, name)) for name in order}
    longest = max(medians, key=lambda name: medians[name])
    told = server_starts.told(starts)
    parts = [f"ready after {units.seconds(total)}, the most of it {longest} ({units.seconds(medians[longest])})"]
    if (cache := told.get("startup.compile_cache")) is not None:
        parts.append(f"compile cache {cache}")
    if (tokens := told.get("startup.kv_cache_tokens")) is not None:
        most = told.get("startup.max_concurrency")
        parts.append(f"KV cache {tokens:,} tokens" + (f", {most:,.4g} requests of full length" if most else ""))
    return "; ".join(parts)


def explained(run: Run) -> list[tuple[str, str]]:
    """The same with every phase, and what the phases mean, for a terminal."""
    result = []
    starts = starts_of(run)
    for server, text in sentences(run):
        order = _order(starts[server])
        phases = ", ".join(f"{name} {statistics.median(_seconds(starts[server], name)):,.2f}" for name in order)
        result.append((f"Start of {server}", f"{text}; in seconds: {phases}"))
    order = _order(chain.from_iterable(starts.values()))
    return result + [(name, MEANS[name]) for name in order if name in MEANS]


def pairs(served: ServedBy) -> list[tuple[str, str | None]]:
    """What a server said of itself, as names and values; None where it did not say."""
    known = served.startup
    if known is None:
        return []
    graphs, kv_cache = (_told("{:,.4g} GiB", size) for size in (known.graphs_gib, known.kv_cache_gib))
    weights, loading_s = _told("{:,.4g} GiB", known.weights_gib), known.model_load_s or known.weights_s
    return [
        ("Engine", _joined(" ", known.engine, known.version)),
        ("Architecture", known.architecture),
        ("Longest request", _told("{:,} tokens", known.max_model_len)),
        ("Attention", known.attention_backend),
        ("Layers on a GPU", known.offloaded_layers),
        ("Weights", _joined(" in ", weights, _took(loading_s))),
        ("Downloaded in", _took(known.download_s)),
        ("Compiled in", _joined(", ", _took(known.compile_s), _told("{} cache", known.compile_cache))),
        ("Graphs", _joined(" in ", graphs, _took(known.graphs_s))),
        ("KV cache", _joined(", ", _told("{:,} tokens", known.kv_cache_tokens), kv_cache)),
        ("Requests that it holds", _told("{:,.4g}", known.max_concurrency)),
        ("ROCm of the image", served.contents.rocm if served.contents is not None else None),
    ]


def _told(form: str, value: float | str | None) -> str | None:
    return None if value is None else form.format(value)


def _took(seconds: float | None) -> str | None:
    return None if seconds is None else units.seconds(seconds)


def _joined(by: str, *texts: str | None) -> str | None:
    return by.join(filter(None, texts)) or None


def _seconds(starts: Sequence[ServedBy], name: str) -> list[float]:
    return [phase.seconds for served in starts for phase in served.phases if phase.name == name]


def _order(starts: Iterable[ServedBy]) -> list[str]:
    """All phases in an order that is that of each start."""
    order: list[str] = []
    for served in starts:
        at = 0
        for phase in served.phases:
            if phase.name not in order:
                order.insert(at, phase.name)
            at = order.index(phase.name) + 1
    return order
