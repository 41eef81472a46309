"""Where the hand-overs of all load processes meet: the last seconds, the whole test, and the course between."""

import time
from collections import Counter, deque
from typing import Any, NamedTuple

import msgspec

from harness.load.live.histogram import percentiles
from harness.load.live.observed import Observed
from harness.load.live.tally import MOST_KINDS, Counted, Failures, HandOver
from harness.rundir.records import MOST_CPU

WINDOW_S = 10
STEP_S = 2
MOST_POINTS = 1200  # then every second one goes, and the step doubles: 40 minutes, 80, 160 ...
ALL = "all"
SHARES = (0.5, 0.9, 0.95, 0.99)
_SILENT_S = 10.0  # a worker that has not reported for so long is not counted any more

Numbers = dict[str, float | int | None]


class Point(NamedTuple):
    """Of the course. It is made JSON once: a page that is opened late asks for a thousand at once."""

    t: float
    values: dict[str, Any]
    raw: msgspec.Raw


class Book:
    """Of one test. `lag_s`: how late the last second may come, because workers report now and then only."""

    def __init__(self, lag_s: int = 0, slos: str = "") -> None:
        self.slos = slos
        self.number = time.time_ns()  # tells two tests, and two steps of one, apart
        self.step_s = STEP_S
        self.points: list[Point] = []
        self.failures: dict[str, Failures] = {}
        self.warmup = self.warmup_failed = 0
        self.total: dict[str, Counted] = {}
        self._lag_s = lag_s
        self._began = time.monotonic()
        self._began_wall_s = time.time()
        self._first: int | None = None  # second in which the first measured request ended
        self._seconds: deque[tuple[int, dict[str, Counted]]] = deque()
        self._in_flight: dict[str, tuple[float, HandOver]] = {}
        self._until: float | None = None  # when its load was over
        self._due = self._began
        self._recent: tuple[int, dict[str, Numbers]] = (-1, {})  # of the second that ends it

    def take(self, sender: str, given: HandOver) -> None:
        """Enter what a load process has handed over."""
        now = time.monotonic()
        self._in_flight[sender] = (now, given)
        self.warmup += given.warmup
        self.warmup_failed += given.warmup_failed
        for kind, failures in given.failures.items():
            if kind in self.failures or len(self.failures) < MOST_KINDS:
                before = self.failures.get(kind)
                self.failures[kind] = Failures(failures.count + (before.count if before else 0), failures.message)
        for age, by_class in given.seconds:
            second = int(now) - age
            self._first = second if self._first is None else min(self._first, second)
            self._seconds.append((second, by_class))
            for name, counted in by_class.items():
                self.total.setdefault(name, Counted()).add(counted)
        while self._seconds and self._seconds[0][0] < now - WINDOW_S - self._lag_s - 5:
            self._seconds.popleft()

    def reset(self) -> None:
        """As Locust's button "reset stats": the course stays, the sums begin anew."""
        self.total, self.failures, self.warmup, self.warmup_failed = {}, {}, 0, 0
        self._first = int(time.monotonic())

    def in_flight(self) -> int:
        return sum(given.in_flight for given in self._heard())

    def in_flight_of(self) -> dict[str, int]:
        """By user class; of those that have none it has nothing."""
        found: Counter[str] = Counter()
        for given in self._heard():
            found.update(given.in_flight_of)
        return dict(found)

    def client_limited(self) -> float | None:
        """How busy the busiest load process is, where that is so much that these are its numbers as well."""
        most = max((given.busy for given in self._heard() if given.busy is not None), default=0.0)
        return round(most, 3) if most > MOST_CPU else None

    def _heard(self) -> list[HandOver]:
        now = time.monotonic()
        return [given for at, given in self._in_flight.values() if now - at < _SILENT_S]

    def tick(self, users: int, observed: Observed) -> None:
        """To be called each second: adds a point to the course when it is time."""
        now, self._until = time.monotonic(), None
        if now < self._due:
            return
        self._due = max(self._due + self.step_s, now)
        t = round(now - self._began, 1)
        values = {
            "t": t,
            "wall_s": round(self._began_wall_s + now - self._began, 1),
            "users": users,
            "in_flight": self.in_flight(),
            "classes": self.recent(),
            "server": observed.server,
            "gpus": observed.gpus,
            "host": observed.host,
        }
        self.points.append(Point(t, values, msgspec.Raw(msgspec.json.encode(values))))
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.step_s *= 2
            self.number += 1

    def rest(self) -> None:
        """To be called each second in which there is no load: the time of the whole test does not go on."""
        if self._until is None:
            self._until = time.monotonic()

    def recent(self) -> dict[str, Numbers]:
        """Numbers of the last seconds: of all user classes together, then of each."""
        last = int(time.monotonic()) - self._lag_s - 1  # the current second is not over yet
        if self._recent[0] == last:
            return self._recent[1]
        first = last - WINDOW_S + 1
        by_class: dict[str, Counted] = {name: Counted() for name in self.total}
        for second, found in self._seconds:
            if first <= second <= last:
                for name, counted in found.items():
                    by_class.setdefault(name, Counted()).add(counted)
        began = first if self._first is None else max(first, self._first)
        self._recent = (last, self._numbers(by_class, max(1, last - began + 1)))
        return self._recent[1]

    def whole(self) -> dict[str, Numbers]:
        """The same of the whole test."""
        until = time.monotonic() if self._until is None else self._until
        return self._numbers(self.total, None if self._first is None else max(0.0, until - self._first))

    def _numbers(self, by_class: dict[str, Counted], span_s: float | None) -> dict[str, Numbers]:
        rows = {ALL: _sum(list(by_class.values()))} | dict(sorted(by_class.items()))
        return {name: _numbers(counted, span_s, bool(self.slos)) for name, counted in rows.items()}


def _sum(parts: list[Counted]) -> Counted:
    whole = Counted()
    for part in parts:
        whole.add(part)
    return whole


def _numbers(counted: Counted, span_s: float | None, judged: bool) -> Numbers:
    numbers: Numbers = {"ended": counted.ended, "failed": counted.failed, "tokens": counted.tokens}
    known = judged and not counted.unknown
    for name, count in (("req_s", counted.ended), ("tok_s", counted.tokens), ("goodput_req_s", counted.met)):
        numbers[name] = None if not span_s else round(count / span_s, 3)
    if not known:
        numbers["goodput_req_s"] = None
    numbers["attainment"] = round(counted.met / counted.ended, 4) if known and counted.ended else None
    for name, histogram in (("ttft", counted.ttft), ("tpot", counted.tpot), ("e2e", counted.e2e)):
        for share, value in zip(SHARES, percentiles(histogram, SHARES), strict=True):
            numbers[f"{name}_p{share * 100:g}_s"] = None if value is None else float(f"{value:.4g}")
    return numbers
