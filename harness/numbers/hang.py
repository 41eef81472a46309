"""Whether a server hung: from when on neither its API nor its metrics answered, although requests waited."""

import numpy as np
from msgspec import Struct

from harness.records.columns import Rows

_SILENT = ("timeout", "unfinished", "abandoned")  # errors of requests that waited until their end
_GONE = ("connect", "disconnect", "client")  # errors that the server did not answer with


class Hang(Struct, frozen=True):
    """A silence that lasted until the end of the load."""

    begin_s: float  # on the axis of the signs
    seconds: float
    requests: int  # that waited
    without_metrics: bool  # the metrics were silent as well; False: they answered, or there are none


def find_hang(rows: Rows, last_sample_s: float | None, min_s: float) -> Hang | None:
    """Return the silence at the end of a load, if it lasted for `min_s` or longer; None otherwise.

    `last_sample_s`: when the server's metrics answered for the last time; None: it has none. A silence begins with the
    last sign of life, the last byte of any response, or with the first request that waited after that.
    """
    silent = rows.error.is_in(*_SILENT)
    answered_s = np.where(silent | rows.error.is_in(*_GONE), np.nan, rows.ended_s)
    own_s = rows.sent_s + np.fmax(np.fmax(rows.headers_s, rows.last_chunk_s), answered_s)
    last_s = float(np.fmax.reduce(own_s, initial=-np.inf))
    waits_s = np.where(np.isnan(own_s), rows.sent_s, own_s)[silent]  # since the last sign of the request itself
    ends_s = (rows.sent_s + rows.ended_s)[silent]
    waited = ends_s > last_s
    if not waited.any():
        return None
    begin_s, end_s = max(last_s, float(waits_s[waited].min())), float(ends_s.max())
    without_metrics = last_sample_s is not None and end_s - last_sample_s >= (end_s - begin_s) / 2
    if without_metrics and last_sample_s is not None:
        begin_s = max(begin_s, last_sample_s)
    if end_s - begin_s < min_s:
        return None
    return Hang(begin_s, end_s - begin_s, int(waited.sum()), without_metrics)
