"""Finds out whether another client used a server while the harness did, by the server's own count of generated tokens.

The count is compared over the whole time that the harness used a server: from a sample before the first request to the
last one, over all loads, their warm-up, and what was between them. The bound of our own tokens is an upper one, so a
sample that is too early or lacks tokens hides another client, and never makes one up.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from harness.base.reason import Reason, because
from harness.numbers import formulas
from harness.numbers.load_generator import killed_processes
from harness.records.columns import Floats
from harness.records.manifest import CellRun
from harness.records.run_data import CellData, RunData
from harness.records.samples import MetricsSample

PROBE_TOKENS = 1  # of the request with which the harness asks a running server before each load


class Part(Struct):
    """What one load generator sent: a cell, the stages of a load, or the loads of a mix."""

    cells: list[str]
    data: list[CellData]
    samples: list[MetricsSample]
    complete: bool  # every request that was sent has its record

    def span_s(self) -> tuple[float, float] | None:
        """When the first request was sent and the last one ended, as Unix time; None: nothing was sent, or unknown."""
        times = [
            (cell.clock.wall_s(float(cell.rows.sent_s.min())), cell.clock.wall_s(float(_ended_s(cell).max())))
            for cell in self.data
            if len(cell.rows)
        ]
        sent = [sent_s for sent_s, _ in times if sent_s is not None]
        ended = [ended_s for _, ended_s in times if ended_s is not None]
        return (min(sent), max(ended)) if sent and ended else None

    def max_own_tokens(self) -> float:
        """The most tokens that the server can have generated for it; NaN: there is no bound."""
        if any(("usage.completion_tokens", "above") in cell.bad for cell in self.data):
            return np.nan
        return PROBE_TOKENS + sum(float(formulas.max_generated(cell.rows).sum()) for cell in self.data)


def _ended_s(cell: CellData) -> Floats:
    ended: Floats = cell.rows.sent_s + cell.rows.ended_s
    return ended


def find_other_clients(data: RunData) -> dict[str, Reason]:
    """Return a reason for each cell: `other_client`, or `clients_unchecked` where that is not known.

    Cells without requests, and those of which records are missing, have none.
    """
    reasons: dict[str, Reason] = {}
    for parts in [] if data.run.origin is not None else _uses(data):
        reasons |= _check(data, parts)
    return reasons


def _uses(data: RunData) -> list[list[Part]]:
    """The parts of a run, in their order, by the time in which the harness used one server without a pause.

    A server that already runs may count on where the harness attaches to it again. A resumed run has lost records of
    its earlier sessions: each part of these is on its own, and what was between them does not count.
    """
    runs = {cell.id: cell for cell in data.run.cells}
    parts: dict[str, Part] = {}
    for name, cell in data.cells.items():
        marks = data.marks.get(name, [])
        ends = [mark for mark in marks if mark.event == "end"]
        complete = not killed_processes(marks) and sum(mark.sent or 0 for mark in ends) == len(cell.rows)
        part = parts.setdefault(data.planned[name].group, Part([], [], [], True))
        if data.planned[name].mix is None or not part.samples:  # the loads of a mix share their samples
            part.samples = sorted([*part.samples, *data.metrics.get(name, [])], key=lambda sample: sample.wall_s)
        part.cells.append(name)
        part.data.append(cell)
        part.complete &= complete
    uses: dict[object, list[Part]] = {}
    for group, part in parts.items():
        uses.setdefault(_server_of(data, runs.get(part.cells[0]), group), []).append(part)
    return [piece for use in uses.values() for piece in _split_at_restarts(use)]


def _server_of(data: RunData, ran: CellRun | None, group: str) -> object:
    """What is equal for parts that used the same server without a pause."""
    if ran is None:
        return group
    session = sum(resumption.wall_s <= ran.started_wall_s for resumption in data.run.resumed)
    start = tuple(phase.seconds for phase in ran.served_by.phases)  # of a server that already ran: none
    return ran.served_by.url, start, session, group if session < len(data.run.resumed) else ""


def _split_at_restarts(parts: Sequence[Part]) -> list[list[Part]]:
    """Split the parts where the counter is lower than before: the server was started again between them."""
    uses: list[list[Part]] = [[]]
    last = 0.0
    for part in parts:
        counts = _counts(part.samples)
        if counts and counts[0] < last:
            uses.append([])
        uses[-1].append(part)
        last = counts[-1] if counts else last
    return uses


def _counts(samples: Iterable[MetricsSample]) -> list[float]:
    """The generated tokens that a server had counted."""
    return [sample.values["generated_tokens"] for sample in samples if "generated_tokens" in sample.values]


def _check(data: RunData, parts: Sequence[Part]) -> dict[str, Reason]:
    """The reasons of the cells of one use of a server."""
    cells = [name for part in parts for name, cell in zip(part.cells, part.data, strict=True) if len(cell.rows)]
    samples = [sample for part in parts for sample in part.samples]
    counts = _counts(samples)
    if any(after < before for before, after in pairwise(counts)) or not all(part.complete for part in parts):
        return {}  # the cells are INVALID for that
    why = _why_unchecked(data, parts, samples)
    if why is None:
        if formulas.foreign_tokens(counts[-1] - counts[0], sum(part.max_own_tokens() for part in parts)):
            return _blame(parts)  # also where the last sample is too early: it lacks tokens
        ended_s = max((span[1] for part in parts if (span := part.span_s()) is not None), default=0.0)
        why = _TOO_FEW if samples[-1].wall_s < ended_s else None
    text = f"whether another client used the server is not known: {why}"
    return {} if why is None else dict.fromkeys(cells, because("clients_unchecked", text, why=why))


_TOO_FEW = "its metrics were not read both before the first request and after the last one"


def _why_unchecked(data: RunData, parts: Sequence[Part], samples: Sequence[MetricsSample]) -> str | None:
    """Why the counter cannot tell; None: it can."""
    spans = [span for part in parts if (span := part.span_s()) is not None]
    if not spans:
        return _TOO_FEW
    if not _counts(samples):
        return "no count of the tokens that it generates was read"
    served = [cell.served_by for cell in data.run.cells if cell.id in parts[0].cells]
    if any(start.gateway is not None or start.metrics_url is not None for start in served):
        return "a gateway in front of it, which other clients may use, takes the requests"
    if "running" not in samples[-1].values:
        return "its metrics do not show whether it is idle"
    first, last = samples[0], samples[-1]
    if len(samples) < 2 or first.wall_s > min(sent_s for sent_s, _ in spans):
        return _TOO_FEW
    if "generated_tokens" not in first.values or not first.values.keys() <= last.values.keys():
        return "its metrics were not the same at both ends"
    if np.isnan(sum(part.max_own_tokens() for part in parts)):
        return "the length of some answers has no bound"
    return None


def _blame(parts: Sequence[Part]) -> dict[str, Reason]:
    """A reason for the cells in whose time, until the next load, too many tokens were generated; else for all."""
    loads: list[tuple[list[Part], MetricsSample]] = []  # with the first sample; a part without one joins its neighbour
    waiting: list[Part] = []
    for part in parts:
        waiting.append(part)
        if (
            first := next((sample for sample in part.samples if "generated_tokens" in sample.values), None)
        ) is not None:
            loads.append((waiting, first))
            waiting = []
    loads[-1][0].extend(waiting)
    ends = [*(first for _, first in loads[1:]), max((part.samples[-1] for part in parts if part.samples), key=_wall_s)]
    reasons = [_reason(load, first, last) for (load, first), last in zip(loads, ends, strict=True)]
    if not any(reasons):
        reasons = [_reason(parts, loads[0][1], ends[-1])] * len(loads)
    return {
        name: reason
        for (load, _), reason in zip(loads, reasons, strict=True)
        if reason is not None
        for part in load
        for name in part.cells
    }


def _wall_s(sample: MetricsSample) -> float:
    return sample.wall_s


def _growth(first: MetricsSample, last: MetricsSample, key: str) -> float:
    return last.values[key] - first.values.get(key, 0.0)


def _reason(parts: Sequence[Part], first: MetricsSample, last: MetricsSample) -> Reason | None:
    """The reason for parts between two samples; None: their tokens are within the bound of ours."""
    most = sum(part.max_own_tokens() for part in parts)
    generated, seconds = _growth(first, last, "generated_tokens"), last.wall_s - first.wall_s
    tokens = formulas.foreign_tokens(generated, most)
    if not tokens or seconds <= 0:
        return None
    tokens_per_s, answers_per_s = tokens / seconds, _foreign_answers(parts, first, last, tokens) / seconds
    rate = f"{answers_per_s:,.1f} answers" if answers_per_s >= 0.05 else f"{tokens_per_s:,.1f} tokens"
    text = f"another client used the server: it generated {generated:,.0f} tokens, and at most {most:,.0f} of them for "
    text += f"this load, warm-up and the harness's own requests included. About {rate} a second are not ours. End the "
    text += "other client, or give the load a server of its own, and run it again"
    values = {"generated": generated, "max_tokens": most, "seconds": seconds, "tokens_per_s": tokens_per_s}
    return because("other_client", text, **values, answers_per_s=answers_per_s or None)


def _foreign_answers(parts: Sequence[Part], first: MetricsSample, last: MetricsSample, tokens: float) -> float:
    """About how many answers others got: by the server's count of them, else by the mean length of ours; 0: unknown."""
    rows = [cell.rows for part in parts for cell in part.data]
    if "timed_requests" in last.values:
        answers = _growth(first, last, "timed_requests") - sum(map(len, rows))
        if answers > 0:
            return answers
    lengths = np.concatenate(
        [answered_rows.output_tokens[~np.isnan(answered_rows.output_tokens)] for answered_rows in rows]
    )
    return tokens / float(lengths.mean()) if len(lengths) and lengths.sum() else 0.0
