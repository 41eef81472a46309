"""Live numbers of a load: counted in each load process, merged in the process with the web UI.

Reports do not use them: they are made from requests.jsonl.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from harness.base.files import UNDECODABLE
from harness.base.measured import NEEDED, PERCENTILES
from harness.base.metrics import LIVE
from harness.numbers import formulas
from harness.numbers.formulas import MET, OPEN
from harness.records.columns import Floats, rows_of
from harness.records.records import AT_LEAST, CUT, MAX_CPU, OBSERVED, ErrorKind, Request, Samples
from harness.scenario.check_syntax import Slo

if TYPE_CHECKING:  # the harness, which has no gevent, uses this module, too
    from harness.load.recorder import Recorder

RESOLUTION = 0.01  # of a percentile: histogram buckets are 2 % wide
WINDOW_S = 10
STEP_S = 2
MAX_POINTS = 1200  # with more, every second point is dropped and the step doubles: 40 minutes, 80, 160 ...
ALL = "all"
_SHARES = tuple(percentile.share for percentile in PERCENTILES.values())
CENSORED = ("ttft", "e2e")  # latencies of which a request in flight shows a value or a lower bound
SERVER = ("running", "waiting", "kv_usage", "preemptions")
GPU = ("busy_percent", "vram_used_bytes", "gtt_used_bytes", "power_w")
TOKEN_TYPES = ("input", "output")  # as OpenTelemetry names them

_BUCKET = math.log(1.0 + 2 * RESOLUTION)
_MIN_S = 1e-6
_MIN_CHUNKS = 16  # of an answer that shows how many tokens a chunk has: the last chunk of a shorter one counts too much
_MAX_COUNTS = 32  # of generated tokens that are kept: more than those of the lag of a report
_COUNT_LAG_S = 2  # between a sample of the server and the requests of the same moment
_SILENT_WORKER_S = 10.0  # a worker that has not reported for so long is no longer counted

Histogram = dict[int, int]  # count by bucket; bucket b is from 1.02^b to 1.02^(b+1) seconds
Numbers = dict[str, float | int | None]


def percentiles(
    histogram: Histogram, shares: tuple[float, ...], censored: Histogram | None = None
) -> list[float | None]:
    """Return percentiles in seconds, at most 1 % off; None for one that is not reached, as of an empty histogram.

    A percentile is the middle of the bucket with the ceil(share * n)-th of n values. `censored`: values of which only
    a lower bound is known; with them the percentiles are Kaplan-Meier, as in a report.
    """
    if not histogram:
        return [None] * len(shares)
    buckets = sorted(histogram)
    counts = np.array([histogram[bucket] for bucket in buckets])
    counted = np.cumsum(counts)
    if not censored:
        ranks = np.maximum(1, np.ceil(np.array(shares) * counted[-1] - 1e-9))
        return [bucket_middle_s(buckets[place]) for place in np.searchsorted(counted, ranks)]
    bounds = sorted(censored)
    below = np.append(0, np.cumsum([censored[bucket] for bucket in bounds]))
    at_risk = counted[-1] - counted + counts + below[-1] - below[np.searchsorted(bounds, buckets)]
    places = np.searchsorted(1 - np.cumprod(1 - counts / at_risk), np.array(shares) - 1e-9)
    return [bucket_middle_s(buckets[place]) if place < len(buckets) else None for place in places]


def bucket_middle_s(bucket: int) -> float:
    return math.exp((bucket + 0.5) * _BUCKET)


def _histogram(values_s: Floats) -> Histogram:
    buckets = np.floor(np.log(np.maximum(values_s, _MIN_S)) / _BUCKET).astype(np.int64)
    return dict(zip(*(array.tolist() for array in np.unique(buckets, return_counts=True)), strict=True))


class RequestInFlight(NamedTuple):
    """What is known of a request that has no record yet."""

    user_class: str
    sent_s: float  # monotonic clock
    ttft_s: float | None = None  # None: no token has arrived
    chunks: int = 0  # with generated tokens
    streams: bool = True  # so that its first token can be seen
    ended: bool = False  # its record is being made
    warmup: bool = False  # its tokens and wait count as those of others, until it has ended

    @property
    def is_waiting(self) -> bool:
        """Whether its first token has not arrived."""
        return self.streams and self.ttft_s is None and not self.ended


class ArrivedTokens:
    """Counts the output tokens of a process at the time at which they arrive, by user class.

    What the server counted is known at the end of a request. Until then a chunk counts as one token, and later as the
    fewest tokens a chunk of a request that ended: the end of a request adds the rest, and a sum never falls.
    """

    def __init__(self) -> None:
        self._ended_tokens: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._per_chunk: dict[str, float] = {}

    def add_ended(self, request: Request) -> None:
        """Add the tokens of a request. A failed one has those that arrived."""
        name, chunks, tokens = request.user_class, len(request.chunks_s), request.output_tokens
        if tokens is not None and chunks >= _MIN_CHUNKS:
            self._per_chunk[name] = min(self._per_chunk.get(name, math.inf), tokens / chunks)
        self._ended_tokens[name] += int(chunks * self._per_chunk.get(name, 1.0)) if tokens is None else tokens

    def take_new(self, in_flight: Sequence[RequestInFlight]) -> dict[str, int]:
        """Return the tokens since the last call."""
        chunks: Counter[str] = Counter()
        for request in in_flight:
            chunks[request.user_class] += request.chunks
        new = {}
        for name in {*chunks, *self._ended_tokens}:
            total = self._ended_tokens[name] + int(chunks[name] * self._per_chunk.get(name, 1.0))
            if total > self._reported[name]:
                new[name], self._reported[name] = total - self._reported[name], total
        return new


class Accumulator(msgspec.Struct, array_like=True):
    """Sums over measured requests that ended in a period, or over those in flight."""

    ended: int = 0
    failures: dict[ErrorKind, int] = {}
    met: int = 0  # requests that succeeded and met every SLO
    unknown: int = 0  # requests that succeeded, but lack a number for an SLO
    latencies: dict[str, Histogram] = msgspec.field(default_factory=lambda: {latency.name: {} for latency in LIVE})
    cut: int = 0  # requests that ended with the load, or because the user left
    cut_met: int = 0  # of these, those that had met every SLO
    cut_unknown: int = 0  # and those that had neither met nor missed them
    sums_s: dict[str, float] = msgspec.field(default_factory=lambda: {latency.name: 0.0 for latency in LIVE})
    # Tokens of requests that succeeded, as the server counted them.
    token_sums: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(TOKEN_TYPES, 0))
    token_counts: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(TOKEN_TYPES, 0))  # of requests
    arrived: int = 0  # output tokens that arrived in the period; see ArrivedTokens
    # Latencies of requests in flight and of cut ones, by what is known of each: its value, or only a lower bound.
    others: dict[str, Histogram] = {}
    censored: dict[str, Histogram] = {}

    @property
    def succeeded(self) -> int:
        return self.ended - self.failed - self.cut

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.token_sums["output"]

    def count(self, requests: Sequence[Request], slos: Sequence[Slo]) -> None:
        """Add measured requests, by the formulas of a report."""
        rows = rows_of(requests)
        met, cut, good = formulas.meets_slos(rows, slos), rows.error.is_in(*CUT), rows.good
        self.ended += len(rows)
        self.cut += int(cut.sum())
        if slos:
            self.cut_met += int((cut & (met == MET)).sum())
            self.cut_unknown += int((cut & (met == OPEN)).sum())
            self.met += int((good & (met == MET)).sum())
            self.unknown += int((good & (met == OPEN)).sum())
        self.failures = _sum(self.failures, rows.error.where(~cut).counts())
        answers = rows.where(good)
        for name, tokens in zip(TOKEN_TYPES, (answers.prompt_tokens, answers.output_tokens), strict=True):
            self.token_sums[name] += int(np.nansum(tokens))
            self.token_counts[name] += int((~np.isnan(tokens)).sum())
        for name in (latency.name for latency in LIVE):
            values_s = formulas.latency_s(answers, name)
            values_s = values_s[~np.isnan(values_s)]
            self.latencies[name] = _sum(self.latencies[name], _histogram(values_s))
            self.sums_s[name] += float(values_s.sum())
            if not good.all():
                values_s, states = formulas.latency_states(rows, name)
                self._add_others(name, values_s[(states == OBSERVED) & ~good], values_s[states == AT_LEAST])

    def add_in_flight(self, requests: Sequence[RequestInFlight], now_s: float) -> None:
        """Add the latencies of requests in flight: a request that waits is censored at its age."""
        ages_s = np.array([now_s - request.sent_s for request in requests if not request.ended])
        waits_s = np.array([now_s - request.sent_s for request in requests if request.is_waiting])
        self._add_others(
            "ttft", np.array([request.ttft_s for request in requests if request.ttft_s is not None]), waits_s
        )
        self._add_others("e2e", np.array([]), ages_s)

    def _add_others(self, name: str, values_s: Floats, bounds_s: Floats) -> None:
        for into, seconds in ((self.others, values_s), (self.censored, bounds_s)):
            if len(seconds):
                into[name] = _sum(into.get(name, {}), _histogram(seconds))

    def merge(self, other: "Accumulator") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))

    def numbers(
        self, span_s: float | None, *, with_slos: bool, tokens: int | None = None, successful_only: bool = False
    ) -> Numbers:
        """Return counts, rates over `span_s` seconds (None: unknown), SLO attainment, and latencies.

        As in a report, `requests_per_s` counts successful requests, and `attainment` leaves out requests of which it is
        unknown. `tokens`: the output tokens; without it, those of requests that succeeded. `successful_only`: the
        latencies, too, are of these alone, each percentile of however few.
        """
        tokens = self.tokens if tokens is None else tokens
        numbers: Numbers = {"ended": self.ended, "failed": self.failed, "tokens": tokens}
        met = self.met if with_slos and not self.unknown else None
        rates = {
            "requests_per_s": self.succeeded,
            "failed_per_s": self.failed,
            "output_tok_s": tokens,
            "goodput": met,
        }
        for name, count in rates.items():
            numbers[name] = float(f"{count / span_s:.4g}") if span_s and count is not None else None
        decided = self.ended - self.unknown - self.cut_unknown
        attained = self.met + self.cut_met
        numbers["attainment"] = float(f"{attained / decided:.4g}") if with_slos and decided else None
        for name in self.latencies:
            numbers |= self._latency_numbers(name, successful_only=successful_only)
        return numbers

    def _latency_numbers(self, name: str, *, successful_only: bool) -> Numbers:
        """Return the number of values, percentiles and maximum of a latency.

        A percentile other than the median is None where a report would not have it: there are too few values. Where
        only a lower bound is known, it has the name with `_above`. That of a percentile counts each censored value as
        its bound.
        """
        others, censored = ({}, {}) if successful_only else (self.others.get(name, {}), self.censored.get(name, {}))
        observed = _sum(self.latencies[name], others)
        every = _sum(observed, censored)
        n = sum(every.values())
        numbers: Numbers = {f"{name}_n": n}
        rows = zip(PERCENTILES, percentiles(observed, _SHARES, censored), percentiles(every, _SHARES), strict=True)
        for percentile, value, above in rows:
            key = f"{name}_{percentile}"
            is_carried = successful_only or percentile == "p50" or n >= NEEDED[percentile]
            numbers[key] = _rounded(value) if is_carried else None
            if is_carried and value is None and above is not None:
                numbers[f"{key}_above"] = _rounded(above)
        largest = bucket_middle_s(max(every)) if every else None
        is_open = bool(every) and max(every) == max(censored, default=None)
        numbers[f"{name}_max"] = None if is_open else _rounded(largest)
        if is_open:
            numbers[f"{name}_max_above"] = _rounded(largest)
        return numbers


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _sum(a: Any, b: Any) -> Any:
    """Add two numbers, or two dicts of them that may have different keys."""
    if not isinstance(a, dict):
        return a + b
    return a | {key: _sum(a[key], value) if key in a else value for key, value in b.items()}


def _joined(a: tuple[float, float] | None, b: tuple[float, float]) -> tuple[float, float]:
    """Return the span from the first start to the last end."""
    return b if a is None else (min(a[0], b[0]), max(a[1], b[1]))


class CounterDelta(msgspec.Struct, array_like=True):
    """The counts of a load process between two reports. Times are on its monotonic clock."""

    seconds: dict[int, dict[str, Accumulator]] = {}  # by the second in which requests ended, and by user class
    messages: dict[ErrorKind, str] = {}  # of the last failure of each kind
    warmup: int = 0  # warm-up requests that ended
    warmup_failed: int = 0
    # Of the measured requests that ended or are in flight, and of all: when the first was sent, and the last ended;
    # with requests in flight the time of the report.
    span: tuple[float, float] | None = None
    whole_span: tuple[float, float] | None = None
    now: float = 0.0  # time of the report
    in_flight_of: dict[str, int] = {}  # by user class
    busy: float | None = None  # share of the last seconds in which the process ran, or waited for a core
    waiting: dict[int, dict[str, list[Request]]] = {}  # by second and user class: not counted yet
    others: list[Request] = []  # likewise; only their tokens count: of the warm-up, and of the test before
    # The tokens that the server can have generated at most: for requests that ended, and for those in flight.
    max_tokens: float = 0.0  # NaN: no bound
    requests: int = 0  # that ended
    max_in_flight: int = 0
    in_flight: dict[str, Accumulator] = {}  # latencies of the requests in flight, by user class
    waiting_of: dict[str, int] = {}  # requests without a first token, by user class
    oldest_waiting_s: float | None = None  # the age of the oldest of these

    def pending(self) -> list[Request]:
        """Return the requests that are not counted yet."""
        return [
            *self.others,
            *(
                request
                for waiting_by_class in self.waiting.values()
                for requests in waiting_by_class.values()
                for request in requests
            ),
        ]

    def add(self, request: Request) -> None:
        """Keep a request until the report, which counts all of them at once."""
        failure = None if request.error in CUT else request.error
        now = time.monotonic()
        span = now - request.ended_s, now
        self.whole_span = _joined(self.whole_span, span)
        if request.phase == "warmup":
            self.others.append(request)
            self.warmup += 1
            self.warmup_failed += failure is not None
            return
        if failure is not None:
            self.messages[failure] = request.message or ""
        self.span = _joined(self.span, span)
        self.waiting.setdefault(int(now), {}).setdefault(request.user_class, []).append(request)

    def note_in_flight(self, requests: Sequence[RequestInFlight], new_tokens: dict[str, int]) -> None:
        """Note the state of the requests in flight, and the tokens since the last call. Call it each second.

        The call at the end of a second counts for that second, also if it is a little late.
        """
        now = time.monotonic()
        for user_class, tokens in new_tokens.items():
            by_class = self.seconds.setdefault(int(now - 0.5), {})
            by_class.setdefault(user_class, Accumulator()).arrived += tokens
        requests_by_class: dict[str, list[RequestInFlight]] = {}
        for request in requests:
            requests_by_class.setdefault(request.user_class, []).append(request)
        self.in_flight = {name: Accumulator() for name in requests_by_class}
        for name, own in requests_by_class.items():
            self.in_flight[name].add_in_flight(own, now)
        waiting = [request for request in requests if request.is_waiting]
        self.waiting_of = dict(Counter(request.user_class for request in waiting))
        self.oldest_waiting_s = max((now - request.sent_s for request in waiting), default=None)
        for request in requests:
            self.whole_span = _joined(self.whole_span, (request.sent_s, now))
            if not request.warmup:
                self.span = _joined(self.span, (request.sent_s, now))

    def close(self, recorder: "Recorder", slos: Sequence[Slo]) -> None:
        """Count the requests, and add the state at the time of the report."""
        if pending := self.pending():
            is_unbounded = any(bad.code == "above" for request in pending for bad in request.bad_fields)
            self.max_tokens = math.nan if is_unbounded else float(formulas.max_generated(rows_of(pending)).sum())
            self.requests, self.others = len(pending), []
        self.max_in_flight = recorder.asked_in_flight
        for second, waiting_by_class in self.waiting.items():
            by_class = self.seconds.setdefault(second, {})
            for user_class, requests in waiting_by_class.items():
                by_class.setdefault(user_class, Accumulator()).count(requests, slos)
        self.waiting = {}
        self.now = time.monotonic()
        self.in_flight_of = {name: count for name, count in recorder.in_flight_of.items() if count}
        self.busy = recorder.health.busy_share()


def decode_delta(raw: Any) -> CounterDelta | None:
    try:
        return msgspec.msgpack.decode(raw, type=CounterDelta)
    except (*UNDECODABLE, TypeError):
        return None


class Observed:
    """The newest samples of server metrics and telemetry, which the harness writes during a live load."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is the run directory; None with stock Locust, which does not sample the server."""
        self.watched = folder is not None
        self.values: dict[str, Any] = {"server": None, "gpus": None, "host": None}
        self._files = [] if folder is None else [Samples(folder / f"{name}.jsonl") for name in ("metrics", "telemetry")]
        self.first_count: tuple[float, float] | None = None  # the first one of this server start
        # Time, and tokens generated until then; the last ones.
        self.token_counts: deque[tuple[float, float]] = deque(maxlen=_MAX_COUNTS)
        self._tok_s: float | None = None

    def update(self) -> None:
        """Read what was written since the last call. Values without a recent sample are None."""
        if not self._files:
            return
        metrics, telemetry = self._files
        for sample in metrics.read_new():
            self._update_rate(sample["wall_s"], sample["values"].get("generated_tokens"))
        telemetry.read_new()
        server, machine = None, telemetry.newest or {}
        if metrics.newest is not None:
            values = metrics.newest["values"]
            server = {key: values[key] for key in SERVER if key in values}
            server |= {} if self._tok_s is None else {"tok_s": round(self._tok_s, 2)}
        gpus = {
            name: {key: gpu[key] for key in (*GPU, "package") if key in gpu}
            for name, gpu in machine.get("gpus", {}).items()
        }
        self.values = {"server": server, "gpus": gpus or None, "host": machine.get("host")}

    def _update_rate(self, wall_s: float, tokens: float | None) -> None:
        """Update the server's token rate by a new count of generated tokens."""
        previous, self._tok_s = self.token_counts[-1] if self.token_counts else None, None
        if tokens is not None:
            if previous is not None and wall_s > previous[0] and tokens >= previous[1]:
                self._tok_s = (tokens - previous[1]) / (wall_s - previous[0])
            if self.first_count is None or (previous is not None and tokens < previous[1]):
                self.first_count = (wall_s, tokens)
                self.token_counts.clear()
            self.token_counts.append((wall_s, tokens))


class OtherClient:
    """What the server generated for other clients since this process began, by the rule of `formulas.foreign_tokens`.

    All tests of the process are ours, also the answers with which a server goes on after a test.
    """

    def __init__(self, lag_s: int = 0) -> None:
        """`lag_s`: reports of load processes come so late, so later counts of the server are not compared yet."""
        self._lag_s = lag_s + _COUNT_LAG_S
        self._max_tokens = 0.0
        self._requests = 0
        self._max_in_flight: dict[str, int] = {}  # by process
        self._first: tuple[float, float] | None = None  # count of the server
        # Time, tokens beyond the bound of ours, and those beyond the tolerance, too.
        self._excess: deque[tuple[float, float, float]] = deque(maxlen=_MAX_COUNTS)

    def add_delta(self, process: str, delta: CounterDelta) -> None:
        self._max_tokens += delta.max_tokens
        self._requests += delta.requests
        self._max_in_flight[process] = delta.max_in_flight

    def update(self, observed: Observed) -> None:
        """Compare the newest count that the reports have reached. Call it each second."""
        first, now_s = observed.first_count, time.time()
        count = next((point for point in reversed(observed.token_counts) if point[0] <= now_s - self._lag_s), None)
        if first != self._first:
            self._first = first
            self._excess.clear()
        if first is None or count is None or (self._excess and count[0] <= self._excess[-1][0]):
            return
        most = self._max_tokens + sum(self._max_in_flight.values())
        tokens = formulas.foreign_tokens(count[1] - first[1], most)
        self._excess.append((count[0], count[1] - first[1] - most, tokens))

    def state(self) -> Numbers | None:
        """Return the tokens of others, and how many tokens and answers a second others get now; None: no others, or not
        known. Answers have the mean length of ours.
        """
        if not self._excess or not self._excess[-1][2]:
            return None
        (begin_s, before, _), (end_s, now, tokens) = self._excess[0], self._excess[-1]
        tokens_per_s = max(0.0, now - before) / (end_s - begin_s) if end_s > begin_s else None
        mean = self._max_tokens / self._requests if self._requests else 0.0
        return {
            "tokens": tokens,
            "tokens_per_s": None if tokens_per_s is None else float(f"{tokens_per_s:.3g}"),
            "answers_per_s": float(f"{tokens_per_s / mean:.3g}") if mean and tokens_per_s is not None else None,
        }


class LiveNumbers:
    """The merged numbers of one test: the last seconds, the whole test, and the time series.

    `lag_s`: the numbers of a second may come so late, because workers report every few seconds.
    """

    def __init__(self, lag_s: int = 0, slos: str = "") -> None:
        self.slos = slos
        self.series_id = time.time_ns()  # changes with the test and with the step of the time series
        self.step_s = STEP_S
        self.points: list[dict[str, Any]] = []
        self.messages: dict[ErrorKind, str] = {}  # of the last failure of each kind
        self.warmup = self.warmup_failed = 0
        self.total: dict[str, Accumulator] = {}  # by user class
        self._lag_s = lag_s
        self._start_s = time.monotonic()
        self._start_wall_s = time.time()
        self._first_second: int | None = None  # second in which the first measured request ended
        self._span: tuple[float, float] | None = None  # of the measured requests, see CounterDelta
        self._whole_span: tuple[float, float] | None = None  # of all
        self._seconds: deque[tuple[int, dict[str, Accumulator]]] = deque()
        self._newest_by_process: dict[str, tuple[float, CounterDelta]] = {}  # with the time at which it came
        self._next_point_s = self._start_s
        self._recent: tuple[int, dict[str, Numbers]] = (-1, {})  # the last second of these numbers

    def add_delta(self, process: str, delta: CounterDelta) -> None:
        now = time.monotonic()
        self._newest_by_process[process] = (now, delta)
        self.warmup += delta.warmup
        self.warmup_failed += delta.warmup_failed
        self.messages |= delta.messages
        ahead_s = now - delta.now  # our clock minus that of the process
        if delta.span is not None:
            self._span = _joined(self._span, (delta.span[0] + ahead_s, delta.span[1] + ahead_s))
        if delta.whole_span is not None:
            span = delta.whole_span[0] + ahead_s, delta.whole_span[1] + ahead_s
            self._whole_span = _joined(self._whole_span, span)
        for process_second, by_class in delta.seconds.items():
            second = process_second + int(now) - int(delta.now)
            self._first_second = second if self._first_second is None else min(self._first_second, second)
            self._seconds.append((second, by_class))
            _merge_classes(self.total, by_class)
        while self._seconds and self._seconds[0][0] < now - WINDOW_S - self._lag_s - 5:
            self._seconds.popleft()

    def reset(self) -> None:
        """Reset the sums but not the time series, for Locust's button "reset stats"."""
        self.total, self.warmup, self.warmup_failed = {}, 0, 0
        now = time.monotonic()
        self._span = self._whole_span = (now, now)
        self._first_second = int(now)

    def _newest_deltas(self) -> Iterator[CounterDelta]:
        """Yield the newest report of each process that is not silent."""
        now = time.monotonic()
        return (delta for came_s, delta in self._newest_by_process.values() if now - came_s < _SILENT_WORKER_S)

    def in_flight(self) -> dict[str, int]:
        """Return the requests sent and not ended, of each user class and of all."""
        by_class = sum((Counter(delta.in_flight_of) for delta in self._newest_deltas()), Counter[str]())
        return {ALL: by_class.total(), **by_class}

    def waiting(self) -> dict[str, int]:
        """Return the requests that wait for their first token, of each user class and of all."""
        by_class = sum((Counter(delta.waiting_of) for delta in self._newest_deltas()), Counter[str]())
        return {ALL: by_class.total(), **by_class}

    def oldest_waiting_s(self) -> float | None:
        """Return the age of the oldest request without a first token; None: no request waits."""
        ages = (delta.oldest_waiting_s for delta in self._newest_deltas())
        return _rounded(max((age for age in ages if age is not None), default=None))

    def client_limited(self) -> float | None:
        """Return the busy share of the busiest load process if it is a client-side bottleneck, else None."""
        busiest = max((delta.busy for delta in self._newest_deltas() if delta.busy is not None), default=0.0)
        return round(busiest, 3) if busiest > MAX_CPU else None

    def tick(self, users: int, observed: Observed) -> None:
        """Add a point to the time series if one is due. Call it each second of a load."""
        now = time.monotonic()
        if now < self._next_point_s:
            return
        self._next_point_s = max(self._next_point_s + self.step_s, now)
        point = {
            "t": round(now - self._start_s, 1),
            "wall_s": round(self._start_wall_s + now - self._start_s, 1),
            "users": users,
            "in_flight": self.in_flight()[ALL],
            "waiting": self.waiting()[ALL],
            "oldest_waiting_s": self.oldest_waiting_s(),
            "classes": self.recent(),
            **observed.values,
        }
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.step_s *= 2
            self.series_id += 1

    def recent(self) -> dict[str, Numbers]:
        """Return numbers of the last seconds: of all user classes together, then of each.

        They have the tokens that arrived, the requests that ended, and the latencies of these and of those in flight.
        """
        last = int(time.monotonic()) - self._lag_s - 1  # the current second is not over yet
        if self._recent[0] != last:
            first = last - WINDOW_S + 1
            by_class: dict[str, Accumulator] = {name: Accumulator() for name in self.total}
            for second, counted in self._seconds:
                if first <= second <= last:
                    _merge_classes(by_class, counted)
            first_counted = first if self._first_second is None else max(first, self._first_second)
            seconds = max(1, last - first_counted + 1)
            self._recent = (last, self._numbers(by_class, seconds, seconds))
        return self._recent[1]

    def whole_test(self) -> dict[str, Numbers]:
        """Return numbers from the first request sent until the last one ended; until now with requests in flight.

        Tokens, which include those of the warm-up, are over its time, too; requests are over that of measured ones.
        """
        span_s, tokens_span_s = (None if span is None else span[1] - span[0] for span in (self._span, self._whole_span))
        return self._numbers(self.total, span_s, tokens_span_s)

    def failures(self) -> dict[ErrorKind, int]:
        return dict(sorted(_merge_all(self.total).failures.items()))

    def _numbers(
        self, by_class: dict[str, Accumulator], span_s: float | None, tokens_span_s: float | None
    ) -> dict[str, Numbers]:
        merged: dict[str, Accumulator] = {}
        for part in (by_class, *(delta.in_flight for delta in self._newest_deltas())):
            _merge_classes(merged, part)
        rows = {ALL: _merge_all(merged)} | dict(sorted(merged.items()))
        with_slos = bool(self.slos)
        numbers = {name: row.numbers(span_s, with_slos=with_slos, tokens=row.arrived) for name, row in rows.items()}
        for name, row in rows.items():
            numbers[name]["output_tok_s"] = float(f"{row.arrived / tokens_span_s:.4g}") if tokens_span_s else None
        return numbers


def _merge_all(by_class: dict[str, Accumulator]) -> Accumulator:
    total = Accumulator()
    for accumulator in by_class.values():
        total.merge(accumulator)
    return total


def _merge_classes(into: dict[str, Accumulator], by_class: dict[str, Accumulator]) -> None:
    for name, accumulator in by_class.items():
        into.setdefault(name, Accumulator()).merge(accumulator)
