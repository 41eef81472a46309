"""Samples of a server and of its machine over the time of a cell: the lines of its timeline."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from harness.rundir.metrics import read_samples
from harness.rundir.telemetry import GpuSample, TelemetrySample, read_telemetry, serving

# Lines of the timeline in the order in which they are drawn; a run shows those that it has.
GAUGES = ("running", "waiting", "kv_usage")


class ServerSamples(Struct):
    """Samples of one cell; None where one of them lacks the value."""

    at_s: list[float] = []
    values: dict[str, list[float | None]] = {}  # by gauge; those without any value are left out
    preempted: list[tuple[float, float]] = []  # when it was noticed, and how many since the last look


def server_samples(path: Path) -> dict[str, ServerSamples]:
    """The gauges in metrics.jsonl by cell, times as Unix time."""
    result = {}
    for cell, scrapes in read_samples(path).items():
        known = [scrape for scrape in scrapes if any(gauge in scrape.values for gauge in GAUGES)]
        counted = [(one.wall_s, one.values["preemptions"]) for one in scrapes if "preemptions" in one.values]
        result[cell] = ServerSamples(
            at_s=[scrape.wall_s for scrape in known],
            values={
                gauge: [scrape.values.get(gauge) for scrape in known]
                for gauge in GAUGES
                if any(gauge in scrape.values for scrape in known)
            },
            preempted=[(at, count - before) for (_, before), (at, count) in pairwise(counted) if count > before],
        )
    return result


def shifted_server(samples: ServerSamples, zero_s: float, most: int) -> ServerSamples:
    """The same with times relative to `zero_s` and about `most` samples at most."""
    keep = range(0, len(samples.at_s), max(1, -(-len(samples.at_s) // most)))
    return ServerSamples(
        at_s=[round(samples.at_s[i] - zero_s, 2) for i in keep],
        values={gauge: [values[i] for i in keep] for gauge, values in samples.values.items()},
        preempted=[(round(at - zero_s, 2), count) for at, count in samples.preempted],
    )


Line = list[float | None]
MOST_GPUS = 8  # that are drawn; a ninth would have no colour of its own
HEAT = ("heat", "prochot")


class MachineSamples(Struct):
    """Samples of one cell; None where one of them lacks the value."""

    at_s: list[float] = []
    panels: dict[str, dict[str, Line]] = {}  # panel -> name of a line -> its values; those without any are left out
    heat: list[tuple[float, float, str]] = []  # from when until when heat held a GPU back, and which
    drawn: int = 0  # GPUs
    left_out: int = 0  # GPUs that did not work for the server, or beyond MOST_GPUS


def machine_samples(path: Path) -> dict[str, MachineSamples]:
    """What telemetry.jsonl holds by cell, times as Unix time."""
    return {cell: of_cell(samples) for cell, samples in read_telemetry(path).items()}


def of_cell(samples: Sequence[TelemetrySample]) -> MachineSamples:
    """The lines of one cell, times as Unix time."""
    names = sorted({name for one in samples for name in one.gpus})
    used = [name for name in names if name in serving(samples)] or names
    drawn = used[:MOST_GPUS]
    panels: dict[str, dict[str, Line]] = {}
    for name in drawn:
        for panel, values in _lines(samples, name, len(drawn)).items():
            for what, line in values.items():
                if any(value is not None for value in line):
                    label = what if len(drawn) == 1 else name if len(values) == 1 else f"{name} {what}"
                    panels.setdefault(panel, {})[label] = line
    return MachineSamples(
        at_s=[one.wall_s for one in samples],
        panels=panels,
        heat=[span for name in used for span in _heat(samples, name)],
        drawn=len(drawn),
        left_out=len(names) - len(drawn),
    )


def _lines(samples: Sequence[TelemetrySample], name: str, gpus: int) -> dict[str, dict[str, Line]]:
    def line(value: Callable[[GpuSample], float | None]) -> Line:
        return [None if gpu is None else value(gpu) for gpu in seen]

    seen = [one.gpus.get(name) for one in samples]
    labels = dict.fromkeys(label for gpu in seen if gpu is not None for label in gpu.temperatures_c)
    # Of cards of their own, GTT is no more than a window to the machine's memory: nobody misses a line at the bottom.
    gtt = line(lambda gpu: gpu.gtt_used_bytes)
    big = max((value or 0.0 for value in gtt), default=0.0) > 2**30
    sensors = {label: [None if gpu is None else gpu.temperatures_c.get(label) for gpu in seen] for label in labels}
    if gpus > 1:  # three lines for each would be no picture
        sensors = {"hottest": line(lambda gpu: max(gpu.temperatures_c.values(), default=None))}
    return {
        "busy": {"busy": line(lambda gpu: gpu.busy_percent)},
        "memory": {"VRAM": line(lambda gpu: gpu.vram_used_bytes), **({"GTT": gtt} if big else {})},
        "power": {"power": line(lambda gpu: gpu.power_w)},
        "temperature": sensors,
        "clock": {"GPU": line(lambda gpu: gpu.clock_mhz)},
    }


def _heat(samples: Sequence[TelemetrySample], name: str) -> list[tuple[float, float, str]]:
    """Spans of samples, one behind the other, in which heat held the GPU back."""
    spans: list[tuple[float, float, str]] = []
    for before, one in pairwise(samples):
        held = one.gpus[name].held_back if name in one.gpus else None
        if held and any(held.get(kind) for kind in HEAT):
            if spans and spans[-1][1] == before.wall_s:
                spans[-1] = spans[-1][0], one.wall_s, name
            else:
                spans.append((before.wall_s, one.wall_s, name))
    return spans


def shifted_machine(samples: MachineSamples, zero_s: float, most: int) -> MachineSamples:
    """The same with times relative to `zero_s` and about `most` samples at most."""
    keep = range(0, len(samples.at_s), max(1, -(-len(samples.at_s) // most)))
    return MachineSamples(
        at_s=[round(samples.at_s[i] - zero_s, 2) for i in keep],
        panels={
            panel: {name: [line[i] for i in keep] for name, line in lines.items()}
            for panel, lines in samples.panels.items()
        },
        heat=[(round(start - zero_s, 2), round(end - zero_s, 2), name) for start, end, name in samples.heat],
        drawn=samples.drawn,
        left_out=samples.left_out,
    )
