"""Whether a server hung: from when on neither its API nor its metrics answered, although requests waited."""

from array import array

import numpy as np
from msgspec import Struct, field

from harness.rundir.records import Request

_SILENT = ("timeout", "unfinished", "abandoned")  # errors of requests that waited until their end
_GONE = ("connect", "disconnect", "client")  # errors that the server did not answer with


def _floats() -> "array[float]":
    return array("d")


class Signs(Struct):
    """The signs of life of a cell's server, and the requests that waited for one. Times are on the cell's axis."""

    last_sign_s: float | None = None  # the last byte of any response
    waits_from_s: "array[float]" = field(default_factory=_floats)  # of each request that ended without an answer,
    waits_until_s: "array[float]" = field(default_factory=_floats)  # since its own last sign

    def merge(self, later: "Signs") -> None:
        """Add the signs of a later part of the file."""
        known = [at_s for at_s in (self.last_sign_s, later.last_sign_s) if at_s is not None]
        self.last_sign_s = max(known, default=None)
        self.waits_from_s.extend(later.waits_from_s)
        self.waits_until_s.extend(later.waits_until_s)

    def add(self, request: Request, sent_s: float) -> None:
        """Add a request that was sent at `sent_s`."""
        data = [request.headers_s, *request.chunks_s[-1:]]
        if request.error not in (*_SILENT, *_GONE):
            data.append(request.ended_s)
        signs = [sent_s + at_s for at_s in data if at_s is not None]
        if signs:
            self.last_sign_s = max(signs) if self.last_sign_s is None else max(self.last_sign_s, *signs)
        if request.error in _SILENT:
            self.waits_from_s.append(max(signs, default=sent_s))
            self.waits_until_s.append(sent_s + request.ended_s)


class Hang(Struct, frozen=True):
    """A silence that lasted until the end of the load."""

    begin_s: float  # on the axis of the signs
    seconds: float
    requests: int  # that waited
    without_metrics: bool  # the metrics were silent as well; False: they answered, or there are none


def find_hang(signs: Signs, last_sample_s: float | None, min_s: float) -> Hang | None:
    """Return the silence at the end of a load, if it lasted for `min_s` or longer; None otherwise.

    `last_sample_s`: when the server's metrics answered for the last time; None: it has none. A silence begins with the
    last sign of life, or with the first request that waited after that.
    """
    begins, ends = np.frombuffer(signs.waits_from_s), np.frombuffer(signs.waits_until_s)
    last_s = -np.inf if signs.last_sign_s is None else signs.last_sign_s
    waited = ends > last_s
    if not waited.any():
        return None
    begin_s, end_s = max(last_s, float(begins[waited].min())), float(ends.max())
    without_metrics = last_sample_s is not None and end_s - last_sample_s >= (end_s - begin_s) / 2
    if without_metrics and last_sample_s is not None:
        begin_s = max(begin_s, last_sample_s)
    if end_s - begin_s < min_s:
        return None
    return Hang(begin_s, end_s - begin_s, int(waited.sum()), without_metrics)
