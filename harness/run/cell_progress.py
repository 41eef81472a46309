"""How a cell is doing while it runs, from files that grow: records, server metrics, the machine's telemetry."""

import time
from collections import Counter, deque
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from harness.files import UNDECODABLE, open_file
from harness.job import Job
from harness.rundir.records import CUT, Request
from harness.rundir.samples import Samples, Tail
from harness.rundir.telemetry import GpuSample
from harness.scenario.scenario import at_once
from harness.summarize import derive
from harness.workers import MACHINE

RECENT_S = 10.0  # of rates, or as long as the longest answer took that ended in it
_SETTLED_S = 1.0  # before that a rate is one of single answers
_SHOWN = 10_000  # the newest requests whose latencies are shown: a run of a million does not grow
_FEWEST = 3  # requests before the time left is told by their rate


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU now; what is not read is None."""

    name: str
    busy_percent: float | None = None
    memory_bytes: int | None = None  # of an APU with GTT, which is where most of it lies
    power_w: float | None = None


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A cell until now. Latencies in seconds of its newest measured requests, exact; rates of those that ended last."""

    done: int = 0  # measured requests that ended
    planned: int | None = None
    warmup: int = 0
    failed: dict[str, int] = {}
    ttft_s: tuple[float, float] | None = None  # p50 and p95
    tpot_s: tuple[float, float] | None = None
    tok_s: float | None = None
    req_s: float | None = None
    in_flight: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    gpus: list[Gpu] = []
    left_s: float | None = None


class _Ended(NamedTuple):
    """The measured requests that were found at one look."""

    last_s: float  # when the last of them ended
    number: int
    tokens: int
    longest_s: float


class Watch:
    """Looks at one cell again and again, and reads only what is new."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._requests = Tail(Path(job.requests_path), from_end=True)
        self._metrics = Samples(folder / "metrics.jsonl", job.cell)
        self._telemetry = Samples(folder / "telemetry.jsonl", job.cell)
        self._ttft: deque[float] = deque(maxlen=_SHOWN)
        self._tpot: deque[float] = deque(maxlen=_SHOWN)
        self._failed: Counter[str] = Counter()
        self._done = self._warmup = 0
        self._recent: deque[_Ended] = deque()
        self._before_s: float | None = None  # when the last ended that are no longer in it
        self._offset_s: dict[int, float] = {}  # of each machine's clock to ours, about
        self._began: float | None = None  # when the first measured request was sent, about
        self._decoder = msgspec.json.Decoder(Request)

    def look(self) -> Glance:
        now = time.monotonic()
        self._take_records(now)
        self._metrics.look()
        self._telemetry.look()
        values = (self._metrics.newest or {}).get("values", {})
        ended, tokens, span_s = self._lately(now)
        return Glance(
            done=self._done,
            planned=self._job.load.requests,
            warmup=self._warmup,
            failed=dict(self._failed.most_common()),
            ttft_s=_percentiles(self._ttft),
            tpot_s=_percentiles(self._tpot),
            tok_s=tokens / span_s if span_s else None,
            req_s=ended / span_s if span_s else None,
            in_flight=self._in_flight(),
            running=values.get("running"),
            waiting=values.get("waiting"),
            kv_usage=values.get("kv_usage"),
            gpus=_gpus(self._telemetry.newest),
            left_s=self._left_s(now),
        )

    def _take_records(self, now: float) -> None:
        ended = tokens = 0
        first_s, last_s = inf, -inf  # sent, ended
        longest_s = 0.0
        ends: dict[int, float] = {}  # by machine
        for line in self._requests.lines():
            try:
                request = self._decoder.decode(line)
            except UNDECODABLE:
                continue
            if request.cell != self._job.cell:
                continue
            if request.phase == "warmup":
                self._warmup += 1
                continue
            first_s = min(first_s, request.sent_s)
            last_s = max(last_s, request.sent_s + request.ended_s)
            longest_s = max(longest_s, request.ended_s)
            machine = request.process // MACHINE
            ends[machine] = max(ends.get(machine, -inf), request.sent_s + request.ended_s)
            ended += 1
            if request.error is not None:
                if request.error not in CUT:
                    self._failed[request.error] += 1
                continue
            tokens += request.output_tokens or 0
            for values, value in ((self._ttft, derive.ttft_s(request)), (self._tpot, derive.tpot_s(request))):
                if value is not None:
                    values.append(value)
        if self._began is None and ended:
            self._began = now - (last_s - first_s)  # the clock of the records may be another machine's
        self._done += ended
        for machine, end_s in ends.items():
            self._offset_s.setdefault(machine, now - end_s)
        if ended:
            last_here_s = max(end_s + self._offset_s[machine] for machine, end_s in ends.items())
            self._recent.append(_Ended(last_here_s, ended, tokens, longest_s))

    def _lately(self, now: float) -> tuple[int, int, float | None]:
        """Requests and tokens of the last seconds, and how many seconds these are.

        Answers that take long end in waves, and a window that begins or ends between two of them has one too many or
        too few. So it lasts from the end of an answer to that of the last one, unless the next one is overdue.
        """
        if self._began is None:
            return 0, 0, None
        longest_s = max((look.longest_s for look in self._recent), default=0.0)
        span_s = max(RECENT_S, longest_s)
        end_s = max((look.last_s for look in self._recent), default=now)
        end_s = now if now - end_s > longest_s else end_s
        while self._recent and self._recent[0].last_s <= end_s - span_s:
            self._before_s = self._recent.popleft().last_s
        span_s = end_s - (self._began if self._before_s is None else self._before_s)
        if span_s < _SETTLED_S:
            return 0, 0, None
        return sum(look.number for look in self._recent), sum(look.tokens for look in self._recent), span_s

    def _in_flight(self) -> int | None:
        """Of batch agents, whose tickets are sent as they are taken; of others the records do not tell."""
        load = self._job.load
        if load.user != "batch" or load.arrivals is not None:
            return None
        try:
            with open_file(self._job.tickets_path) as file:
                counts = msgspec.json.decode(file.readline())
            out = counts["warmup_taken"] + counts["measured_taken"] - counts["settled"]
            return min(max(int(out), 0), at_once(load))
        except (OSError, *UNDECODABLE, KeyError, TypeError):
            return None

    def _left_s(self, now: float) -> float | None:
        """Of the load; what is in flight at the end of a timed one may take longer."""
        load = self._job.load
        if self._began is None:
            return None
        if load.duration_s is not None:
            return max(0.0, self._began + load.duration_s - now)
        open_loop = load.arrivals is not None or load.trace is not None
        # Of users who wait for answers, the first have ended when all have worked as long: one wave is the least.
        if load.requests is None or self._done < (_FEWEST if open_loop else max(_FEWEST, at_once(load))):
            return None
        return max(0.0, (load.requests - self._done) * (now - self._began) / self._done)


def _percentiles(values: deque[float]) -> tuple[float, float] | None:
    if not values:
        return None
    p50, p95 = np.percentile(list(values), [50, 95])
    return float(p50), float(p95)


def _gpus(sample: dict[str, Any] | None) -> list[Gpu]:
    found = []
    for name, raw in sorted((sample or {}).get("gpus", {}).items()):
        gpu = msgspec.convert(raw, GpuSample)
        memory = gpu.vram_used_bytes
        if gpu.package and gpu.gtt_used_bytes is not None:
            memory = (memory or 0) + gpu.gtt_used_bytes
        found.append(Gpu(name=name, busy_percent=gpu.busy_percent, memory_bytes=memory, power_w=gpu.power_w))
    return found
