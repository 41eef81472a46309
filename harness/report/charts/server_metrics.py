"""What a server said of itself over the time of a cell."""

from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from harness.rundir.metrics import read_samples

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


def shifted(samples: ServerSamples, zero_s: float, most: int) -> ServerSamples:
    """The same with times relative to `zero_s` and about `most` samples at most."""
    keep = range(0, len(samples.at_s), max(1, -(-len(samples.at_s) // most)))
    return ServerSamples(
        at_s=[round(samples.at_s[i] - zero_s, 2) for i in keep],
        values={gauge: [values[i] for i in keep] for gauge, values in samples.values.items()},
        preempted=[(round(at - zero_s, 2), count) for at, count in samples.preempted],
    )
