"""What a load process counts of its ended requests, second by second and by user class, until it hands it over."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.files import UNDECODABLE
from harness.load.live.histogram import Histogram, add, note
from harness.rundir.records import CUT, Request
from harness.scenario.check_syntax import Slo
from harness.summarize import derive
from harness.summarize.goodput import meets

MOST_KINDS = 20


class Counted(msgspec.Struct, array_like=True):
    """The measured requests that ended in some time."""

    ended: int = 0
    failed: int = 0
    tokens: int = 0  # of answers that succeeded, where the server counted them
    met: int = 0  # succeeded and met every SLO
    unknown: int = 0  # of those, whether they met them is not known
    ttft: Histogram = msgspec.field(default_factory=dict)
    tpot: Histogram = msgspec.field(default_factory=dict)
    e2e: Histogram = msgspec.field(default_factory=dict)

    def add(self, other: "Counted") -> None:
        self.ended += other.ended
        self.failed += other.failed
        self.tokens += other.tokens
        self.met += other.met
        self.unknown += other.unknown
        for mine, theirs in ((self.ttft, other.ttft), (self.tpot, other.tpot), (self.e2e, other.e2e)):
            add(mine, theirs)


class Failures(msgspec.Struct, array_like=True):
    """Of one kind."""

    count: int
    message: str  # the last one


class HandOver(msgspec.Struct, array_like=True):
    """What a load process counted since its last hand-over. Ages are seconds before it: no clock is sent."""

    seconds: list[tuple[int, dict[str, Counted]]]  # age, by user class
    failures: dict[str, Failures]
    in_flight: int
    warmup: int  # warm-up requests that ended
    in_flight_of: dict[str, int] = {}  # by user class
    busy: float | None = None  # share of the last seconds in which it ran, or waited for a core
    warmup_failed: int = 0  # of the warm-up requests


class Tally:
    """Counts by the second in which a request ended. Warm-up is only counted."""

    def __init__(self, slos: Sequence[Slo] = ()) -> None:
        self._slos = slos
        self._seconds: dict[int, dict[str, Counted]] = {}
        self._failures: dict[str, Failures] = {}
        self._warmup = self._warmup_failed = 0

    def add(self, request: Request) -> None:
        """A request has ended. Called once each, off the measuring path: its record is already made."""
        failed = request.error is not None and request.error not in CUT
        if request.phase == "warmup":
            self._warmup += 1
            self._warmup_failed += failed
            return
        by_class = self._seconds.setdefault(int(time.monotonic()), {})
        counted = by_class.get(request.user_class)
        if counted is None:
            counted = by_class[request.user_class] = Counted()
        counted.ended += 1
        if request.error is not None:
            if failed:
                counted.failed += 1
                before = self._failures.get(request.error)
                count = 1 if before is None else before.count + 1
                self._failures[request.error] = Failures(count, request.message or "")
            return
        counted.tokens += request.output_tokens or 0
        for histogram, value in (
            (counted.ttft, derive.ttft_s(request)),
            (counted.tpot, derive.shown_tpot_s(request)),
            (counted.e2e, derive.e2e_s(request)),
        ):
            if value is not None:
                note(histogram, value)
        if self._slos:
            met = meets(request, self._slos)
            counted.met += met is True
            counted.unknown += met is None

    def hand_over(self, in_flight: int, of: Mapping[str, int] | None = None, busy: float | None = None) -> HandOver:
        """What was counted since the last call, which is forgotten here."""
        now = int(time.monotonic())
        given = HandOver(
            [(now - second, by_class) for second, by_class in sorted(self._seconds.items())],
            self._failures,
            in_flight,
            self._warmup,
            {name: number for name, number in (of or {}).items() if number},
            busy,
            self._warmup_failed,
        )
        self._seconds, self._failures, self._warmup, self._warmup_failed = {}, {}, 0, 0
        return given


def packed(given: HandOver) -> bytes:
    """For the way from a worker to the master."""
    return msgspec.msgpack.encode(given)


def unpacked(raw: Any) -> HandOver | None:
    """None for what no worker of this version has sent."""
    try:
        return msgspec.msgpack.decode(raw, type=HandOver)
    except (*UNDECODABLE, TypeError):
        return None
