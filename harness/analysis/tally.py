"""What each cell's summary needs of a run's records, gathered request by request, and the numbers that it gives.

Latencies are kept as plain arrays of doubles, a few per request; records are not kept. For chunk gaps see
harness.analysis.gaps.
"""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from harness.analysis import derive, gaps
from harness.analysis.charted import ChartCounts
from harness.analysis.derive import Latencies, add_up, doubles, earliest, latest, meets, missed_before_leaving
from harness.analysis.gaps import Gaps
from harness.analysis.schedule import ScheduleTally, pooled
from harness.failures.explain import ErrorMessages
from harness.judge.stats import Array, percentile, percentile_interval
from harness.rundir.records import CUT, ProcessMark, Request
from harness.scenario.check_syntax import Slo
from harness.summary import (
    NEEDED,
    NO_SAMPLE,
    Answers,
    BadFields,
    Distribution,
    Numbers,
    PromptLengths,
    SloAttainment,
    median_of_known,
)

_NO_TOKENS = ("connect", "rejected", "http", "not_api")  # the server generated nothing for these
_FROM_SCHEDULE = ("ttft_sched_s", "e2e_sched_s")
_OF_SUCCESSES = derive.FORMULAS.keys() - {"send_lag_s", *_FROM_SCHEDULE}
_GIVEN = ("clock", "window_s", "scheduled", "begun_s", "mixed")  # of a tally: what it knows before it counts
_VALUES = ("latencies", "chunk_gap_s", "indices", "tokens_inside", "said", "chart")  # kept for each request


class Clock:
    """Joins the clocks of a cell's processes: `offset_s(process)` takes its times to the cell's axis.

    The axis is the monotonic clock of the process that started first. Processes of one boot of one machine share that
    clock, containers included; only those of others are moved, by the difference of the anchors.
    """

    def __init__(self, marks: Iterable[ProcessMark]) -> None:
        starts = [mark for mark in marks if mark.event == "start"]
        self._anchors = {mark.process: mark.wall_s - mark.monotonic_s for mark in starts}
        self._boots = {mark.process: _boot(mark) for mark in starts}
        self._boot = _boot(starts[0]) if starts else None
        self.anchor_s = starts[0].wall_s - starts[0].monotonic_s if starts else None  # axis to Unix time
        self.start_s = starts[0].monotonic_s if starts else 0.0  # of the first process, on the axis

    def knows(self, process: int) -> bool:
        """Whether the process left a start record, without which its times cannot be joined with others."""
        return process in self._anchors

    def offset_s(self, process: int) -> float:
        anchor = self._anchors.get(process)
        if anchor is None or self.anchor_s is None or self._boots[process] == self._boot:
            return 0.0
        return anchor - self.anchor_s

    def wall_s(self, axis_s: float | None) -> float | None:
        return None if axis_s is None or self.anchor_s is None else axis_s + self.anchor_s


def _boot(mark: ProcessMark) -> str | None:
    """The boot of a machine that a process ran in: the last part of its host."""
    return mark.host.rpartition("-")[2] if mark.host else None


class BadTally(Struct):
    """Fields of answers whose values were not possible, by field and code."""

    found: dict[tuple[str, str], BadFields] = {}

    def add(self, bad: BadFields) -> None:
        """Add some requests; the first of them stays the example."""
        key = (bad.field, bad.code)
        known = self.found.get(key)
        more = 0 if known is None else known.requests
        self.found[key] = msgspec.structs.replace(known or bad, requests=more + bad.requests)

    def merge(self, other: "BadTally") -> None:
        for bad in other.found.values():
            self.add(bad)


class SloTally(Struct, kw_only=True):
    """How many of a cell's measured requests met each set of SLOs that a check asks about, by the name of the set."""

    sets: Mapping[str, tuple[Slo, ...]] = {}
    met: Counter[str] = msgspec.field(default_factory=Counter)
    met_ended: Counter[str] = msgspec.field(default_factory=Counter)  # of those that ended inside the window
    unknown: Counter[str] = msgspec.field(default_factory=Counter)
    left: Counter[str] = msgspec.field(default_factory=Counter)  # abandoned before any SLO was missed

    def add(self, request: Request) -> None:
        """Count a successful measured request; others met nothing."""
        for name, slos in self.sets.items():
            met = meets(request, slos)
            self.met[name] += met is True
            self.unknown[name] += met is None

    def add_ended(self, request: Request) -> None:
        """Count a successful request that ended inside the window, one of the warm-up as well."""
        for name, slos in self.sets.items():
            self.met_ended[name] += meets(request, slos) is True

    def add_abandoned(self, request: Request) -> None:
        for name, slos in self.sets.items():
            self.left[name] += not missed_before_leaving(request, slos)

    def merge(self, other: "SloTally") -> None:
        add_up(self, other, given=("sets",))


class AnswerTally(Struct, kw_only=True):
    """Quality and prompts of a cell's successful measured requests; a server that answers nonsense fast must show."""

    checked: int = 0  # answers that were to have a form
    valid: int = 0  # and have it
    labelled: int = 0  # those of which the right label is known
    right: int = 0
    embedded: int = 0  # answers that are vectors
    vectors: int = 0
    asked: int = 0  # tokens of the prompts whose length was planned and counted by the server
    got: int = 0
    beyond: Counter[int] = msgspec.field(default_factory=Counter)  # requests by got - asked

    def add(self, request: Request) -> None:
        self.checked += request.answer_valid is not None
        self.valid += bool(request.answer_valid)
        self.labelled += request.answer_right is not None
        self.right += bool(request.answer_right)
        self.embedded += request.vectors is not None
        self.vectors += request.vectors or 0
        if request.asked_prompt_tokens is not None and request.prompt_tokens is not None:
            self.asked += request.asked_prompt_tokens
            self.got += request.prompt_tokens
            self.beyond[request.prompt_tokens - request.asked_prompt_tokens] += 1


class CellCounts(Struct, kw_only=True):
    """What was counted of one cell. Times on the cell's axis, see Clock."""

    clock: Clock
    window_s: tuple[float, float] | None = None  # the measured time of a timed load
    scheduled: bool = False  # an open loop: what its warm-up leaves over is no part of the rate that it offers
    begun_s: float | None = None  # of a timed load: when its own measured time began
    mixed: bool = False  # only what was due or sent inside it was measured together with the other parts of the mix
    chart: ChartCounts | None = None  # None: no chart is drawn
    # Measured requests:
    sent: int = 0
    succeeded: int = 0
    resent: int = 0
    connect_retried: int = 0  # needed more than one SYN
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    said: ErrorMessages = msgspec.field(default_factory=ErrorMessages)  # by failed requests
    retry_after: int = 0  # of these, those that have a `retry_after_s`,
    retry_after_s: float = 0.0  # and its sum
    first_sent_s: float | None = None
    last_ended_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: float = 0.0
    tool_calls: int | None = None  # None: no request had tools
    tool_calls_valid: int = 0
    without_prompt_tokens: int = 0
    without_output_tokens: int = 0
    counted_chunks: int = 0  # chunks of the successful streams whose tokens are known,
    chunked_tokens: int = 0  # and these tokens
    ended_inside: int = 0  # successful requests that ended inside the window, of the warm-up as well,
    prompts_inside: int = 0  # their prompt tokens,
    uncounted_inside: int = 0  # and those whose prompt the server did not count
    slos: SloTally = msgspec.field(default_factory=SloTally)
    answers: AnswerTally = msgspec.field(default_factory=AnswerTally)
    wrong_length: int = 0
    read_clock: int = 0
    fewer_tokens: int = 0  # answers with fewer tokens than pieces of text
    backwards: int = 0  # answers whose times contradict each other
    chunks: int = 0
    coalesced: int = 0  # of the chunks
    coalesced_told: int = 0  # of these, those of which it is known whether their read was late,
    coalesced_late: int = 0  # and those whose read was
    first_shared: int = 0  # streams whose first chunk shared a read with the second,
    first_shared_late: int = 0  # and some read of theirs that chunks shared was late
    latencies: Latencies = msgspec.field(default_factory=Latencies)
    chunk_gap_s: Gaps = msgspec.field(default_factory=Gaps)
    schedule: ScheduleTally = msgspec.field(default_factory=ScheduleTally)
    # All requests, warm-up included:
    warmup: int = 0  # of all, those of the warm-up
    first_any_s: float | None = None
    last_any_s: float | None = None
    indices: "array[int]" = msgspec.field(default_factory=lambda: array("q"))
    by_process: Counter[int] = msgspec.field(default_factory=Counter)
    min_tokens: int = 0  # what the server must have generated by the client's account ...
    max_tokens: int | None = 0  # ... and can have; the two differ by requests that were cut. None: no bound
    tokens_inside: "array[float]" = msgspec.field(default_factory=doubles)  # of each request that has any
    bad_fields: BadTally = msgspec.field(default_factory=BadTally)
    cut_chunks_inside: int = 0  # chunks of unfinished and abandoned requests, whose tokens the server did not count

    def add(self, request: Request) -> None:
        request = derive.possible(request)
        for bad in request.bad_fields:
            self.bad_fields.add(BadFields(field=bad.field, code=bad.code, requests=1, got=bad.got, limit=bad.limit))
        sent_s = request.sent_s + self.clock.offset_s(request.process)
        ended_s = sent_s + request.ended_s
        self.first_any_s = earliest(self.first_any_s, sent_s)
        self.last_any_s = latest(self.last_any_s, ended_s)
        self.indices.append(request.index)
        self.by_process[request.process] += 1
        self.warmup += request.phase == "warmup"
        self._count_generated(request)
        if request.phase == "measured" or not self.scheduled:
            self._count_inside(request, sent_s)
            self._count_ended(request, ended_s)
        counted = self._is_counted(request, sent_s)
        if self.chart is not None and self.clock.knows(request.process):
            self.chart.add(request, sent_s - self.clock.start_s, counted)
        if not counted:
            return
        self.sent += 1
        self.first_sent_s = earliest(self.first_sent_s, sent_s)
        self.last_ended_s = latest(self.last_ended_s, ended_s)
        self.resent += request.resent
        self.connect_retried += bool(request.connect_retries)
        self.latencies.add(request, ["send_lag_s"])
        if self.scheduled or request.scheduled_s is not None:  # each row of a trace has its time
            self.schedule.add(request, sent_s)
            if request.error is None:
                self.latencies.add(request, _FROM_SCHEDULE)
        if request.error is not None:
            self.errors[request.error] += 1
            if request.retry_after_s is not None:
                self.retry_after += 1
                self.retry_after_s += request.retry_after_s
            if request.error == "abandoned":
                self.slos.add_abandoned(request)
            elif request.error != "unfinished":
                self.said.add(request.error, request.message)
            return
        self.succeeded += 1
        self.slos.add(request)
        self.answers.add(request)
        self._add_success(request)

    def _is_counted(self, request: Request, sent_s: float) -> bool:
        """Whether the cell's numbers are about a request. Of a part of a mix, what counts is the time that it was due,
        where it has one: so it is known how many there were to be.
        """
        if request.phase != "measured" or not self.mixed or self.window_s is None:
            return request.phase == "measured"
        return self.window_s[0] <= sent_s + (request.scheduled_s or 0.0) <= self.window_s[1]

    def add_of_other_stage(self, request: Request) -> None:
        """A request of another stage of the load: what the server did for it in this one's time is in the rates."""
        sent_s = request.sent_s + self.clock.offset_s(request.process)
        self._count_inside(request, sent_s)
        self._count_ended(request, sent_s + request.ended_s)

    def part_s(self) -> tuple[float, float] | None:
        """Of a part of a mix: the common window, in seconds after the start of its own measured time."""
        if not self.mixed or self.window_s is None or self.begun_s is None:
            return None
        return self.window_s[0] - self.begun_s, self.window_s[1] - self.begun_s

    def merge(self, other: "CellCounts") -> None:
        """Add what was counted of the same cell further on in the file."""
        unbounded = self.max_tokens is None or other.max_tokens is None
        add_up(self, other, given=_GIVEN)
        if unbounded:
            self.max_tokens = None
        if self.chart is not None:
            self.chart.reduce()

    def repeated(self) -> list[int]:
        """The places in the sequence that more than one record has: each of them is sent once."""
        places, times = np.unique(np.frombuffer(self.indices, dtype=np.int64), return_counts=True)
        repeated: list[int] = places[times > 1].tolist()
        return repeated

    def median_send_lag_s(self) -> float | None:
        """Of all measured requests, however few: it judges the load generator, not the server."""
        return statistics.median(lags) if (lags := self.latencies["send_lag_s"]) else None

    def _add_success(self, request: Request) -> None:
        self.latencies.add(request, _OF_SUCCESSES)
        self.chunk_gap_s.add([] if derive.in_one_read(request) else request.chunks_s)
        self.fewer_tokens += derive.has_fewer_tokens(request)
        self.backwards += derive.is_backwards(request)
        self.chunks += len(request.chunks_s)
        self.coalesced += request.coalesced
        self.coalesced_told += request.coalesced if request.coalesced_late is not None else 0
        self.coalesced_late += request.coalesced_late or 0
        if request.coalesced and request.chunks_s[0] == request.chunks_s[1]:
            self.first_shared += 1
            self.first_shared_late += bool(request.coalesced_late)
        self.wrong_length += derive.length_is_wrong(request)
        self.read_clock += bool(request.chunks_s) and request.clock == "read"
        self.without_prompt_tokens += request.prompt_tokens is None
        self.prompt_tokens += request.prompt_tokens or 0
        self.without_output_tokens += request.output_tokens is None
        self.output_tokens += request.output_tokens or 0
        if request.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + request.cached_tokens
        self.reasoning_tokens += derive.reasoning_tokens(request) or 0.0
        if request.tool_calls is not None:
            self.tool_calls = (self.tool_calls or 0) + request.tool_calls
            self.tool_calls_valid += request.tool_calls_valid or 0
        carried = derive.carried_tokens(request)
        if carried is not None:
            self.counted_chunks += len(request.chunks_s)
            self.chunked_tokens += carried

    def _count_generated(self, request: Request) -> None:
        if request.output_tokens is not None:
            minimum, maximum = request.output_tokens, request.output_tokens
        elif request.error in _NO_TOKENS:
            minimum, maximum = 0, 0
        else:  # a chunk holds at least one token
            minimum = len(request.chunks_s)
            maximum = -1 if request.asked_tokens is None else max(minimum, request.asked_tokens)
        self.min_tokens += minimum
        self.max_tokens = None if maximum < 0 or self.max_tokens is None else self.max_tokens + maximum

    def _count_ended(self, request: Request, ended_s: float) -> None:
        """An answer that the rates of the window count: in a closed loop also one that ends a warm-up request. All of
        them count the same answers, so that where every request met its SLOs goodput is requests a second.
        """
        if request.error is not None:
            return
        if self.window_s is None:
            inside = request.phase == "measured"
        else:
            inside = self.window_s[0] < ended_s <= self.window_s[1]
        if inside:
            self.ended_inside += 1
            self.prompts_inside += request.prompt_tokens or 0
            self.uncounted_inside += request.prompt_tokens is None
            self.slos.add_ended(request)

    def _count_inside(self, request: Request, sent_s: float) -> None:
        """Tokens that the server generated within a timed load's window: in a closed loop also those that end a
        warm-up request, since the server worked on them in that time; not those of failed requests, which are of no
        use to anyone.
        """
        if self.window_s is None:
            if request.error == "abandoned" and request.phase == "measured":
                self.cut_chunks_inside += len(request.chunks_s)
            return
        if request.error not in (None, *CUT):
            return
        share = derive.share_inside(request, self.window_s[0] - sent_s, self.window_s[1] - sent_s)
        if request.output_tokens is not None:
            self.tokens_inside.append(request.output_tokens * share)
        elif request.error in CUT:
            self.cut_chunks_inside += round(len(request.chunks_s) * share)


def distribution(parts: Sequence["array[float]"], requests: int | None = None) -> Distribution:
    """Statistics of a sample given in parts. `requests`: how many its values come from, when not one each. Such values
    are not independent, so their percentiles have no intervals.
    """
    values: Array = np.sort(
        np.concatenate([np.frombuffer(part, dtype=np.float64) for part in parts if len(part)] or [np.empty(0)])
    )
    n = len(values)
    if n == 0:
        return NO_SAMPLE
    carried = n if requests is None else requests

    at: dict[str, Any] = {
        name: percentile(values, permille) if carried >= NEEDED[name] else None
        for name, permille in gaps.PERMILLES.items()
    }
    if requests is None:
        at["intervals"] = {name: percentile_interval(values, permille) for name, permille in gaps.PERMILLES.items()}
    return Distribution(n=n, mean=float(values.mean()), min=float(values[0]), max=float(values[-1]), **at)


def gap_distribution(parts: Sequence[Gaps]) -> Distribution:
    """Statistics of the chunk gaps of some cells together, whose percentiles need as many requests as any other."""
    for part in parts:
        part.flush()
    known = [part for part in parts if part.n]
    carried = sum(part.requests for part in known)
    if all(part.whole for part in known):
        return distribution([part.kept[0].values for part in known], carried)
    at: dict[str, Any] = {
        name: gaps.value_at(known, permille) if carried >= NEEDED[name] else None
        for name, permille in gaps.PERMILLES.items()
    }
    return Distribution(
        n=sum(part.n for part in known),
        mean=gaps.mean(known),
        min=min(part.minimum for part in known),
        max=max(part.maximum for part in known),
        **at,
    )


def numbers_of(tallies: Sequence[CellCounts], cells: Sequence[Numbers] = ()) -> Numbers:
    """The numbers of one cell's tally, or of several pooled: then times and rates are medians over `cells`."""
    one = _total(tallies)
    known_prompts = one.succeeded and not one.without_prompt_tokens
    known_output = one.succeeded and not one.without_output_tokens
    rates = _medians(cells) if cells or len(tallies) != 1 else _rates(one)
    samples: dict[str, Any] = {field: distribution([t.latencies[field] for t in tallies]) for field in derive.FORMULAS}
    return Numbers(
        sent=one.sent,
        succeeded=one.succeeded,
        failed=one.errors.total() - one.errors["unfinished"] - one.errors["abandoned"],
        unfinished=one.errors["unfinished"],
        abandoned=one.errors["abandoned"],
        errors=dict(sorted(one.errors.items())),
        resent=one.resent,
        connect_retried=one.connect_retried,
        retry_after=one.retry_after,
        retry_after_s=one.retry_after_s if one.retry_after else None,
        prompt_tokens=one.prompt_tokens if known_prompts else None,
        output_tokens=one.output_tokens if known_output else None,
        cached_tokens=one.cached_tokens,
        # None where nothing was: most models do not reason, and most reports need no such number.
        reasoning_tokens=(one.reasoning_tokens or None) if known_output else None,
        tool_calls=one.tool_calls,
        tool_calls_valid=None if one.tool_calls is None else one.tool_calls_valid,
        **rates,
        **samples,
        chunk_gap_s=gap_distribution([t.chunk_gap_s for t in tallies]),
        schedule=pooled([cell.schedule for cell in cells]),
        tokens_per_chunk=one.chunked_tokens / one.counted_chunks if one.counted_chunks else None,
        vectors=one.answers.vectors if one.answers.embedded else None,
        answers=answers_of(one.answers),
        prompts=prompts_of(one.answers),
        slos=attained(one.slos, one.sent, rates.get("window_s"), cells),
    )


def _total(tallies: Sequence[CellCounts]) -> CellCounts:
    """The counts of all cells together, without what is kept for each request."""
    if len(tallies) == 1:
        return tallies[0]
    total = CellCounts(clock=Clock([]), slos=SloTally(sets=tallies[0].slos.sets if tallies else {}))
    for one in tallies:
        add_up(total, one, given=(*_GIVEN, *_VALUES))
    return total


def _rates(one: CellCounts) -> dict[str, Any]:
    if one.first_sent_s is None or one.last_ended_s is None:
        return {}
    known = one.succeeded > 0 and one.without_output_tokens == 0
    if one.window_s is None:
        window_s, tokens, ended = one.last_ended_s - one.first_sent_s, float(one.output_tokens), one.succeeded
        which: dict[str, Any] = {"window": "wall", "wall_s": window_s}
    else:
        # Whatever the order of the tokens.
        window_s, tokens, ended = one.window_s[1] - one.window_s[0], math.fsum(one.tokens_inside), one.ended_inside
        which = {"window": "timed"}
    if window_s <= 0:
        return {}
    return {
        **which,
        "window_s": window_s,
        "output_tok_s": (tokens + _cut_tokens(one)) / window_s if known else None,
        "input_tok_s": one.prompts_inside / window_s if one.succeeded and not one.uncounted_inside else None,
        "requests_per_s": ended / window_s,
    }


def _cut_tokens(one: CellCounts) -> float:
    """About how many tokens the requests had that were cut: by their chunks, as many tokens each as in the others."""
    if not one.cut_chunks_inside or not one.counted_chunks:
        return 0.0
    return one.cut_chunks_inside * one.chunked_tokens / one.counted_chunks


def _medians(cells: Sequence[Numbers]) -> dict[str, Any]:
    rates = ("wall_s", "window_s", "output_tok_s", "input_tok_s", "requests_per_s")
    medians = {name: median_of_known(getattr(cell, name) for cell in cells) for name in rates}
    return {**medians, "window": next((cell.window for cell in cells if cell.window is not None), None)}


def attained(
    one: SloTally, sent: int, window_s: float | None, cells: Sequence[Numbers] = ()
) -> dict[str, SloAttainment]:
    """What was attained by one cell, or by several pooled: then a goodput is the median over `cells`."""
    found: dict[str, SloAttainment] = {}
    for name in one.sets:
        met, left, unknown = one.met[name], one.left[name], one.unknown[name]
        if cells:
            goodput = median_of_known(cell.slos[name].goodput_req_s for cell in cells if name in cell.slos)
        else:
            goodput = one.met_ended[name] / window_s if window_s else None
        found[name] = SloAttainment(
            met=met,
            left=left,
            unknown=unknown,
            attainment=met / (sent - left) if sent > left and not unknown else None,
            goodput_req_s=None if unknown else goodput,
        )
    return found


def answers_of(one: AnswerTally) -> Answers | None:
    """How many answers were valid and right; None where no form was asked for."""
    if not one.checked:
        return None
    return Answers(
        checked=one.checked,
        valid=one.valid,
        valid_share=one.valid / one.checked,
        labelled=one.labelled,
        right=one.right if one.labelled else None,
        right_share=one.right / one.labelled if one.labelled else None,
    )


def prompts_of(one: AnswerTally) -> PromptLengths | None:
    """Planned against counted prompt lengths; None where none was planned, or the server counts none."""
    if not one.beyond:
        return None
    usual, alike = min(one.beyond.items(), key=lambda found: (-found[1], abs(found[0])))
    total = one.beyond.total()
    return PromptLengths(requests=total, asked=one.asked, got=one.got, added=usual, otherwise=total - alike)
