"""What the charts show of single requests: a choice of them for each row, and when each cell's failures began.

The choice is the same however the file is divided and in whatever order it is read.
"""

import heapq
from zlib import crc32

from msgspec import Struct, structs

from harness.rundir.records import Request
from harness.summarize import derive

MOST_DOTS = 600  # requests of a row that are drawn at most
SLOWEST = 20  # of them those that took longest
MOST_FAILED = 150  # and failed ones

RowKey = tuple[str, str]  # server, load


class Dot(Struct, frozen=True):
    """A measured request."""

    draw: int  # what chooses it: as good as random, and always the same
    cell: str
    sent_s: float  # within its cell
    took_s: float  # until the answer was whole, or until it failed
    ttft_s: float | None
    error: str | None


def _order(dot: Dot) -> tuple[int, str, float, float]:
    """An order of known values, for copies of one record as well."""
    return dot.draw, dot.cell, dot.sent_s, dot.took_s


class Choice(Struct):
    """The requests of one row that are drawn."""

    good: list[Dot] = []
    slow: list[Dot] = []
    failed: list[Dot] = []
    count: int = 0
    failures: int = 0
    limit: int = 1 << 32  # successful requests that drew more are not among the chosen ...
    slow_from_s: float = 0.0  # ... unless they took at least that long

    def add(self, request: Request, sent_s: float) -> None:
        draw = crc32(request.id.encode()) * 2654435761 & 0xFFFFFFFF
        took_s = request.ended_s if request.error is not None else derive.e2e_s(request) or 0.0
        among_slow = took_s >= self.slow_from_s
        if request.error is None and draw > self.limit and not among_slow:
            self.count += 1
            return
        dot = Dot(draw, request.cell, sent_s, took_s, derive.ttft_s(request), request.error)
        if request.error is not None:
            self.failures += 1
            self.failed.append(dot)
        else:
            self.count += 1
            self.good.append(dot)
            if among_slow:
                self.slow.append(dot)
        if len(self.good) > 8 * MOST_DOTS or len(self.failed) > 8 * MOST_FAILED or len(self.slow) > 8 * SLOWEST:
            self.thin()

    def merge(self, other: "Choice") -> None:
        self.good += other.good
        self.slow += other.slow
        self.failed += other.failed
        self.count += other.count
        self.failures += other.failures
        self.thin()

    def thin(self) -> None:
        self.good = heapq.nsmallest(MOST_DOTS, self.good, key=_order)
        if len(self.good) == MOST_DOTS:
            self.limit = self.good[-1].draw
        self.failed = heapq.nsmallest(MOST_FAILED, self.failed, key=_order)
        self.slow = sorted(self.slow, key=lambda dot: (dot.took_s, *_order(dot)))[-SLOWEST:]
        if len(self.slow) == SLOWEST:
            self.slow_from_s = self.slow[0].took_s

    def since(self, zero_s: dict[str, float]) -> "Choice":
        def moved(dots: list[Dot]) -> list[Dot]:
            return [structs.replace(dot, sent_s=dot.sent_s - zero_s[dot.cell]) for dot in dots]

        self.thin()
        return structs.replace(self, good=moved(self.good), slow=moved(self.slow), failed=moved(self.failed))

    def chosen(self, most: int) -> list[Dot]:
        """At most so many requests in the order of sending: the slowest, some failed ones, the others by chance."""
        self.thin()
        kept = {*self.slow, *self.failed[: most // 4]}
        for dot in self.good:
            if len(kept) >= most:
                break
            kept.add(dot)
        return sorted(kept, key=lambda dot: (dot.cell, dot.sent_s, dot.draw))


class FailureCount(Struct):
    """How often one kind of failure came in a cell, and when first (seconds of the cell)."""

    count: int
    first_s: float


class RequestChoices(Struct):
    """What is kept of single requests of a run."""

    rows: dict[RowKey, Choice] = {}
    failures: dict[str, dict[str, FailureCount]] = {}  # by cell and kind

    def add(self, request: Request, row: RowKey, sent_s: float) -> None:
        """A measured request, sent at that second of its cell."""
        if row not in self.rows:
            self.rows[row] = Choice()
        self.rows[row].add(request, sent_s)
        if request.error is not None and request.error != "unfinished":
            self._note(request.cell, request.error, FailureCount(1, sent_s + request.ended_s))

    def merge(self, other: "RequestChoices") -> None:
        for row, choice in other.rows.items():
            self.rows.setdefault(row, Choice()).merge(choice)
        for cell, kinds in other.failures.items():
            for kind, failures in kinds.items():
                self._note(cell, kind, failures)

    def thin(self) -> None:
        """Before it goes to another process."""
        for choice in self.rows.values():
            choice.thin()

    def since(self, zero_s: dict[str, float]) -> dict[RowKey, Choice]:
        """The choice of each row, with seconds that count from `zero_s` of each cell."""
        return {row: choice.since(zero_s) for row, choice in self.rows.items()}

    def _note(self, cell: str, kind: str, more: FailureCount) -> None:
        known = self.failures.setdefault(cell, {}).setdefault(kind, FailureCount(0, more.first_s))
        known.count += more.count
        known.first_s = min(known.first_s, more.first_s)
