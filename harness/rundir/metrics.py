"""The server's own metrics: scraped while a cell runs, one line of metrics.jsonl a scrape, and what they say.

A sample keeps few values under names of our own, whatever the server calls them:

running, waiting    requests in the running batch, requests in the queue
kv_usage            part of the KV cache in use, 0 to 1
preemptions         counter
prompt_tokens       counter; with vLLM tokens found in the prefix cache count too
generated_tokens    counter
prefix_queries      counter, tokens looked up in the prefix cache
prefix_hits         counter, tokens found there
queue_s             counter, seconds that finished requests waited for their first turn
prefill_s           counter, seconds from there to their first token
decode_s            counter, seconds from there to their last token
timed_requests      counter, the requests that these three are of
started_s           when the server's process started, Unix time
"""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

import msgspec
import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.engines import engines
from harness.files import read_lines
from harness.rundir.lines import append_sample, by_cell
from harness.rundir.records import Number, Seconds
from harness.summary import ServerLoad
from harness.trust import open_session

KEYS = (
    "running", "waiting", "kv_usage", "preemptions", "prompt_tokens", "generated_tokens", "prefix_queries",
    "prefix_hits", "queue_s", "prefill_s", "decode_s", "timed_requests", "started_s",
)  # fmt: skip
STAGES = ("queue_s", "prefill_s", "decode_s", "timed_requests")
COUNTERS = ("preemptions", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits", *STAGES)
_NOT_SUMMED = ("kv_usage", "started_s")  # over engines (data parallel): the most of any

_MAX_VALUE = 2.0**53  # beyond this a float does not count
_SAME_START_S = 0.5  # a restarted server needs longer than that


class MetricsSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl."""

    wall_s: Seconds  # when the server was asked
    cell: str
    values: dict[str, Number]  # what the server has of KEYS


def parse(text: str) -> dict[str, float]:
    """The values of KEYS in a text of the Prometheus format; of several names the first one found.

    Raises ValueError for anything else than that format, such as HTML.
    """
    found: dict[str, list[float]] = defaultdict(list)
    names_of = _names()
    known = set(itertools.chain.from_iterable(names_of.values()))
    try:
        families = list(text_string_to_metric_families(text))
    except (ArithmeticError, LookupError, TypeError) as error:  # what its parser makes of some other texts
        raise ValueError(f"no metrics ({type(error).__name__})") from None
    for family in families:
        for sample in family.samples:
            # A counter may come without its suffix, depending on the version of the exporter.
            name = sample.name if sample.name in known else f"{sample.name}_total"
            if name in known and 0 <= sample.value <= _MAX_VALUE:  # NaN: not known yet
                found[name].append(float(sample.value))
    values = {}
    for key, names in names_of.items():
        numbers = next((found[name] for name in names if name in found), None)
        if numbers is not None:
            values[key] = max(numbers) if key in _NOT_SUMMED else sum(numbers)
    return values


@cache
def _names() -> dict[str, list[str]]:
    """By key what servers call it: the engines' names, and one that all of them may have."""
    found = {key: [name for engine in engines() for name in engine.metrics.get(key, [])] for key in KEYS}
    return {**found, "started_s": ["process_start_time_seconds"]}


class Scraper:
    """Reads a server's metrics into a file: at the start, each interval, and at the end.

    `source` is a URL, or a function that gives the text. A scrape that fails is counted and leaves a gap, nothing
    more. Without a source it does nothing.
    """

    def __init__(
        self,
        source: str | Callable[[], str] | None,
        cell: str,
        path: Path,
        interval_s: float = 1.0,
        *,
        api_key: str | None = None,
    ) -> None:
        self.source = source
        self.cell = cell
        self.samples = 0
        self.failures = 0
        self.last_failure: str | None = None
        self._path = path
        self._interval_s = interval_s
        self._session = open_session(api_key)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._keep_scraping, name=f"metrics of {cell}", daemon=True)

    def __enter__(self) -> "Scraper":
        if self.source is not None:
            self.scrape_now()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.source is not None and kind is None:
            self.scrape_now()
        self._session.close()

    def scrape_now(self) -> bool:
        """Ask once and append what came. False when nothing usable came."""
        wall_s = time.time()
        try:
            values = parse(self._text())
            append_sample(self._path, MetricsSample(wall_s, self.cell, values))
        except (requests.RequestException, ValueError, OSError) as error:
            self.failures += 1
            self.last_failure = f"{type(error).__name__}: {error}"
            return False
        self.samples += 1
        return True

    def _text(self) -> str:
        assert self.source is not None
        if not isinstance(self.source, str):
            return self.source()
        response = self._session.get(self.source, timeout=min(5.0, max(1.0, self._interval_s)))
        if response.status_code != 200:
            raise OSError(f"HTTP {response.status_code}")
        return response.content.decode("utf-8", "replace")

    def _keep_scraping(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            self.scrape_now()
            due = max(due + self._interval_s, time.monotonic())  # a slow server is not asked twice at once


def read_samples(path: Path) -> dict[str, list[MetricsSample]]:
    """The samples of a metrics.jsonl by cell, in the order of the file; a torn line is skipped."""
    return by_cell(read_lines(path, MetricsSample))


def server_load(
    samples: Sequence[MetricsSample],
    sent_wall_s: float | None = None,
    ended_wall_s: float | None = None,
    measured_wall_s: tuple[float, float] | None = None,
) -> ServerLoad:
    """What a cell's samples say.

    Counters are differences of the last and the first sample, and given only when these lie before the first
    request was sent and after the last one ended (`sent_wall_s`, `ended_wall_s`: warm-up included); those of STAGES
    from the last sample before to the first one after `measured_wall_s`. Means are over the samples within
    `measured_wall_s`, or all of them when it is not given.
    """
    restarted = _restarted(samples)
    covered = (
        len(samples) >= 2
        and bool(samples[0].values)
        and (sent_wall_s is None or samples[0].wall_s <= sent_wall_s)
        and (ended_wall_s is None or samples[-1].wall_s >= ended_wall_s)
    )
    deltas: dict[str, float] = {}
    if covered and not restarted:
        first, last = samples[0].values, samples[-1].values
        # A counter with labels appears with its first event: absent at first means that nothing was counted.
        deltas = {key: last[key] - first.get(key, 0.0) for key in COUNTERS if key in last}
    queries = deltas.get("prefix_queries")
    stages = {} if restarted else _stages(samples, measured_wall_s)
    inside = [s for s in samples if measured_wall_s is None or measured_wall_s[0] <= s.wall_s <= measured_wall_s[1]]
    running = _values(inside, "running")
    return ServerLoad(
        running_max=max(_values(samples, "running"), default=None),
        running_mean=sum(running) / len(running) if running else None,
        waiting_max=max(_values(samples, "waiting"), default=None),
        kv_usage_max=max(_values(samples, "kv_usage"), default=None),
        preemptions=deltas.get("preemptions"),
        generated_tokens=deltas.get("generated_tokens"),
        restarted=restarted,
        prefix_hit_ratio=deltas["prefix_hits"] / queries if queries and "prefix_hits" in deltas else None,
        **stages,
    )


def _stages(samples: Sequence[MetricsSample], measured_wall_s: tuple[float, float] | None) -> dict[str, float]:
    """What the counters of STAGES gained in the measured time; nothing where no sample is before it, or none after."""
    if measured_wall_s is None:
        return {}
    begin_s, end_s = measured_wall_s
    before = next((sample for sample in reversed(samples) if sample.wall_s <= begin_s), None)
    after = next((sample for sample in samples if sample.wall_s >= end_s), None)
    if before is None or after is None or not before.values:
        return {}
    return {key: after.values[key] - before.values.get(key, 0.0) for key in STAGES if key in after.values}


def _values(samples: Iterable[MetricsSample], key: str) -> list[float]:
    return [sample.values[key] for sample in samples if key in sample.values]


def _restarted(samples: Sequence[MetricsSample]) -> bool:
    for before, after in itertools.pairwise(samples):
        for key in COUNTERS:
            if key in before.values and key in after.values and after.values[key] < before.values[key]:
                return True
        start, later_start = before.values.get("started_s"), after.values.get("started_s")
        if start is not None and later_start is not None and abs(later_start - start) > _SAME_START_S:
            return True
    return False
