"""What load processes report while a load runs, made by hand."""

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.load.live_metrics import (
    ArrivedTokens,
    CounterDelta,
    RequestInFlight,
    decode_delta,
)
from harness.records.records import ErrorKind, Request
from harness.scenario.check_syntax import Slo


class Worker:
    """A load process, and of its recorder what a report asks for."""

    def __init__(self, slos: Sequence[Slo] = ()) -> None:
        self.slos = slos
        self.counted = CounterDelta()
        self.arrived = ArrivedTokens()
        self.health = self
        self.in_flight_of: dict[str, int] = {}
        self.busy: float | None = None
        self.asked_in_flight = 0

    def busy_share(self) -> float | None:
        return self.busy

    def add(self, request: Request) -> None:
        self.counted.add(request)
        self.arrived.add_ended(request)
        self.note()

    def note(self, *in_flight: RequestInFlight) -> None:
        """The end of a second."""
        self.counted.note_in_flight(in_flight, self.arrived.take_new(in_flight))


def delta(worker: Worker, in_flight_of: dict[str, int] | None = None, busy: float | None = None) -> CounterDelta:
    """What the worker counted, as the master gets it."""
    worker.in_flight_of, worker.busy = in_flight_of or {}, busy
    worker.counted.close(worker, worker.slos)  # type: ignore[arg-type]
    given = decode_delta(msgspec.msgpack.encode(worker.counted))
    worker.counted = CounterDelta()
    assert given is not None
    return given


def request(
    ttft: float = 0.1, tpot: float = 0.02, tokens: int = 11, error: ErrorKind | None = None, **more: Any
) -> Request:
    ended, chunks_s = ttft + tpot * (tokens - 1), [ttft + tpot * i for i in range(tokens)]
    given = {
        "id": "x", "cell": "c", "load": "l", "user_class": "Chat", "index": 0, "user": 0, "process": 1,
        "phase": "measured", "sent_s": 5.0, "ended_s": ended, "chunks_s": [] if error else chunks_s,
        "output_tokens": None if error else tokens, "error": error, "message": f"it was {error}" if error else None,
    }  # fmt: skip
    return Request(**{**given, **more})
