"""Counts each cell's records, request by request, and computes the numbers of its summary from the counts.

Records are not kept, only a few latencies per request in arrays. For chunk gaps see harness.analysis.gaps.
"""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from harness.analysis import derive, gaps
from harness.analysis.charted import ChartCounts
from harness.analysis.derive import float_array, max_known, meets_slos, merge_counts, min_known
from harness.analysis.gaps import Gaps
from harness.analysis.hang import Signs
from harness.analysis.latencies import LatencyColumns, distribution, gap_distribution, pool_distributions
from harness.analysis.schedule import ScheduleTally, pool_schedules
from harness.failures.explain import ErrorMessages
from harness.judge.slo_rule import LatencySample
from harness.judge.stats import Array
from harness.rundir.records import AT_LEAST, CUT, KNOWN_FINISHES, OBSERVED, ProcessMark, Request
from harness.scenario.check_syntax import Slo
from harness.summary import (
    Answers,
    BadFields,
    Distribution,
    Numbers,
    PromptLengths,
    SloAttainment,
    median_of_known,
)

_NO_TOKENS = ("connect", "rejected", "http", "not_api")  # errors after which the server generated nothing
_MAX_NAMES = 10  # different finish reasons or models that are counted by name
_CONSTANT = ("clock", "window_s", "open_loop", "measured_start_s", "in_mix")  # fields of CellCounts set before counting
_PER_REQUEST = (
    "latencies",
    "spans",
    "first_room_s",
    "chunk_gap_s",
    "indices",
    "tokens_inside",
    "error_messages",
    "chart",
    "signs",
)


class Clock:
    """Joins the clocks of a cell's processes: a process's time plus `offset_s(process)` is a time on the cell's axis.

    The axis is the monotonic clock of the process that started first. All processes of one boot of a machine share that
    clock, containers included. Times of other machines are moved by the difference of the anchors.
    """

    def __init__(self, marks: Iterable[ProcessMark]) -> None:
        starts = [mark for mark in marks if mark.event == "start"]
        self._anchors = {mark.process: mark.wall_s - mark.monotonic_s for mark in starts}
        self._boots = {mark.process: _boot(mark) for mark in starts}
        self._boot = _boot(starts[0]) if starts else None
        self.anchor_s = starts[0].wall_s - starts[0].monotonic_s if starts else None  # Unix time - time on the axis
        self.start_s = starts[0].monotonic_s if starts else 0.0  # of the first process, on the axis

    def knows(self, process: int) -> bool:
        """Whether the process has a start record. Without one its times cannot be moved to the axis."""
        return process in self._anchors

    def offset_s(self, process: int) -> float:
        anchor = self._anchors.get(process)
        if anchor is None or self.anchor_s is None or self._boots[process] == self._boot:
            return 0.0
        return anchor - self.anchor_s

    def wall_s(self, axis_s: float | None) -> float | None:
        return None if axis_s is None or self.anchor_s is None else axis_s + self.anchor_s


def _boot(mark: ProcessMark) -> str | None:
    """The id of the machine's boot in which a process ran: the last part of its host."""
    return mark.host.rpartition("-")[2] if mark.host else None


class BadTally(Struct):
    """Fields of answers with impossible values, by field and code."""

    by_field: dict[tuple[str, str], BadFields] = {}

    def add(self, bad: BadFields) -> None:
        """Add some requests. The value of the first request stays the example."""
        key = (bad.field, bad.code)
        known = self.by_field.get(key)
        self.by_field[key] = bad if known is None else replace(known, requests=known.requests + bad.requests)

    def merge(self, other: "BadTally") -> None:
        for bad in other.by_field.values():
            self.add(bad)


class SloTally(Struct, kw_only=True):
    """How many of a cell's measured requests met each set of SLOs of the checks, by the name of the set."""

    sets: Mapping[str, tuple[Slo, ...]] = {}
    met: Counter[str] = field(default_factory=Counter)
    met_ended: Counter[str] = field(default_factory=Counter)  # successful, and ended inside the window
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_ended: Counter[str] = field(default_factory=Counter)  # likewise

    def add(self, request: Request) -> None:
        """Count a measured request."""
        for name, slos in self.sets.items():
            met = meets_slos(request, slos)
            self.met[name] += met is True
            self.unknown[name] += met is None

    def add_ended(self, request: Request) -> None:
        """Count a successful request that ended inside the window, warm-up included."""
        for name, slos in self.sets.items():
            met = meets_slos(request, slos)
            self.met_ended[name] += met is True
            self.unknown_ended[name] += met is None

    def merge(self, other: "SloTally") -> None:
        merge_counts(self, other, skipped=("sets",))


class AnswerTally(Struct, kw_only=True):
    """Answers and prompts of a cell's successful measured requests."""

    checked: int = 0  # answers with a required form
    valid: int = 0  # of these, those that have it
    labelled: int = 0  # of these, those with a known right label
    right: int = 0
    embedded: int = 0  # answers that are vectors
    vectors: int = 0
    planned_tokens: int = 0  # of the prompts whose length was planned and counted by the server
    counted_tokens: int = 0  # of these prompts, by the server
    excess_tokens: Counter[int] = field(default_factory=Counter)  # requests by counted - planned tokens

    def add(self, request: Request) -> None:
        self.checked += request.answer_valid is not None
        self.valid += bool(request.answer_valid)
        self.labelled += request.answer_right is not None
        self.right += bool(request.answer_right)
        self.embedded += request.vectors is not None
        self.vectors += request.vectors or 0
        if request.asked_prompt_tokens is not None and request.prompt_tokens is not None:
            self.planned_tokens += request.asked_prompt_tokens
            self.counted_tokens += request.prompt_tokens
            self.excess_tokens[request.prompt_tokens - request.asked_prompt_tokens] += 1


class ProcessTimes(Struct):
    """When the first request of each load process was sent, and the last one ended, on the clock of the process."""

    first_sent_s: dict[int, float] = {}
    last_ended_s: dict[int, float] = {}

    def add(self, request: Request) -> None:
        self._add(request.process, request.sent_s, request.sent_s + request.ended_s)

    def merge(self, other: "ProcessTimes") -> None:
        for process, sent_s in other.first_sent_s.items():
            self._add(process, sent_s, other.last_ended_s[process])

    def _add(self, process: int, sent_s: float, ended_s: float) -> None:
        self.first_sent_s[process] = min_known(self.first_sent_s.get(process), sent_s)
        self.last_ended_s[process] = max_known(self.last_ended_s.get(process), ended_s)


class Spans(Struct):
    """When the measured requests of a closed loop were sent and ended, on the cell's axis, and by which user."""

    sent_s: "array[float]" = field(default_factory=float_array)
    ended_s: "array[float]" = field(default_factory=float_array)
    work: "array[float]" = field(default_factory=float_array)  # tokens; 0 for a request that failed
    user: "array[float]" = field(default_factory=float_array)  # unique within the cell

    def add(self, request: Request, sent_s: float) -> None:
        self.sent_s.append(sent_s)
        self.ended_s.append(sent_s + request.ended_s)
        tokens = request.output_tokens or request.prompt_tokens or 1
        self.work.append(0.0 if request.error is not None else tokens)
        self.user.append(hash((request.process, request.user)) % 2**53)

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Sent, ended, work and user."""
        sent_s, ended_s, work, user = (
            np.array(values, dtype=np.float64) for values in (self.sent_s, self.ended_s, self.work, self.user)
        )
        return sent_s, ended_s, work, user


class CellCounts(Struct, kw_only=True):
    """The counts of one cell. Times are on the cell's axis, see Clock."""

    clock: Clock
    window_s: tuple[float, float] | None = None  # the measured time of a timed load; in a mix, the common part of it
    open_loop: bool = False  # then answers to warm-up requests do not count in the rates of the window
    measured_start_s: float | None = None  # of a timed load: the start of its own measured time
    in_mix: bool = False  # then only requests that were due inside the window are measured
    chart: ChartCounts | None = None  # None: no chart is drawn
    # Measured requests:
    sent: int = 0
    succeeded: int = 0
    resent: int = 0
    connect_retried: int = 0  # needed more than one SYN
    errors: Counter[str] = field(default_factory=Counter)
    error_messages: ErrorMessages = field(default_factory=ErrorMessages)
    retry_after: int = 0  # failed requests with a `retry_after_s`,
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
    counted_chunks: int = 0  # chunks of the successful streams with known tokens,
    chunked_tokens: int = 0  # and the tokens in these chunks
    slos: SloTally = field(default_factory=SloTally)
    answers: AnswerTally = field(default_factory=AnswerTally)
    wrong_length: int = 0
    read_clock: int = 0  # streams without the kernel's receive times
    unknown_finishes: Counter[str] = field(default_factory=Counter)  # answers by finish reason, of unknown ones
    models: Counter[str] = field(default_factory=Counter)  # answers by the model that they name
    more_pieces: int = 0  # answers with more pieces of text than their max_tokens
    short_prompts: int = 0  # answers whose prompt has far fewer tokens than planned
    fewer_tokens: int = 0  # answers with fewer tokens than chunks of text
    contradicting_times: int = 0  # answers whose times contradict each other
    chunks: int = 0
    coalesced: int = 0  # chunks that shared a read with the chunk before,
    coalesced_late: int = 0  # and those of them whose read was late
    first_shared: int = 0  # streams whose first chunk shared a read with the second,
    first_shared_late: int = 0  # and those of them with a late read
    latencies: LatencyColumns = field(default_factory=LatencyColumns)
    # Of each stream, how long the read before its first chunk was before it, if the chunk shared its read with the
    # second one; negative where that read was not late; else 0.
    first_room_s: "array[float]" = field(default_factory=float_array)
    spans: Spans = field(default_factory=Spans)
    chunk_gap_s: Gaps = field(default_factory=Gaps)
    schedule: ScheduleTally = field(default_factory=ScheduleTally)
    # Requests of the warm-up and the measured time that were (partly) answered inside the window:
    ended_inside: int = 0  # successful requests that ended inside it,
    prompts_inside: int = 0  # their prompt tokens,
    uncounted_inside: int = 0  # and those of them whose prompt the server did not count
    tokens_inside: "array[float]" = field(default_factory=float_array)  # of each request that has any
    cut_chunks_inside: int = 0  # chunks of unfinished and abandoned requests, whose tokens the server did not count
    # All requests, warm-up included:
    warmup: int = 0  # requests of the warm-up
    first_any_s: float | None = None
    last_any_s: float | None = None
    indices: "array[int]" = field(default_factory=lambda: array("q"))
    by_process: Counter[int] = field(default_factory=Counter)
    process_times: ProcessTimes = field(default_factory=ProcessTimes)
    signs: Signs = field(default_factory=Signs)
    min_tokens: int = 0  # that the server generated, as far as the client knows;
    max_tokens: int | None = 0  # larger where requests were cut. None: no bound
    bad_fields: BadTally = field(default_factory=BadTally)

    def add(self, request: Request) -> None:
        request = derive.drop_impossible_counts(request)
        for bad in request.bad_fields:
            self.bad_fields.add(BadFields(field=bad.field, code=bad.code, requests=1, got=bad.got, limit=bad.limit))
        sent_s = request.sent_s + self.clock.offset_s(request.process)
        ended_s = sent_s + request.ended_s
        self.first_any_s = min_known(self.first_any_s, sent_s)
        self.last_any_s = max_known(self.last_any_s, ended_s)
        self.indices.append(request.index)
        self.by_process[request.process] += 1
        self.process_times.add(request)
        self.signs.add(request, sent_s)
        self.warmup += request.phase == "warmup"
        self._count_generated(request)
        if request.phase == "measured" or not self.open_loop:
            self.count_in_window(request, sent_s)
        counted = self._is_counted(request, sent_s)
        if self.chart is not None and self.clock.knows(request.process):
            self.chart.add(request, sent_s - self.clock.start_s, counted)
        if not counted:
            return
        self.sent += 1
        self.first_sent_s = min_known(self.first_sent_s, sent_s)
        self.last_ended_s = max_known(self.last_ended_s, ended_s)
        self.resent += request.resent
        self.connect_retried += bool(request.connect_retries)
        self.latencies.add(request, sent_s)
        self.slos.add(request)
        if not self.open_loop:
            self.spans.add(request, sent_s)
        if self.open_loop or request.scheduled_s is not None:  # requests of a trace also have scheduled times
            self.schedule.add(request, sent_s)
        if request.error is not None:
            self.errors[request.error] += 1
            if request.retry_after_s is not None:
                self.retry_after += 1
                self.retry_after_s += request.retry_after_s
            if request.error not in CUT:
                self.error_messages.add(request.error, request.message)
            return
        self.succeeded += 1
        self.answers.add(request)
        self._add_success(request)

    def _is_counted(self, request: Request, sent_s: float) -> bool:
        """Whether the cell's numbers include a request. In a mix it must be due inside the common window, or be sent
        inside it without a scheduled time, so that the planned number of requests is known.
        """
        if request.phase != "measured" or not self.in_mix or self.window_s is None:
            return request.phase == "measured"
        return self.window_s[0] <= sent_s + (request.scheduled_s or 0.0) <= self.window_s[1]

    def mix_window_s(self) -> tuple[float, float] | None:
        """The common window of a mix, in seconds since the start of this load's own measured time."""
        if not self.in_mix or self.window_s is None or self.measured_start_s is None:
            return None
        return self.window_s[0] - self.measured_start_s, self.window_s[1] - self.measured_start_s

    def merge(self, later: "CellCounts") -> None:
        """Add the counts of the same cell from a later part of the file."""
        unbounded = self.max_tokens is None or later.max_tokens is None
        merge_counts(self, later, skipped=_CONSTANT)
        if unbounded:
            self.max_tokens = None
        if self.chart is not None:
            self.chart.reduce()

    def repeated_indices(self) -> list[int]:
        """Indices of the request sequence that more than one record has, although each is sent once."""
        indices, times = np.unique(np.frombuffer(self.indices, dtype=np.int64), return_counts=True)
        repeated: list[int] = indices[times > 1].tolist()
        return repeated

    def median_send_lag_s(self) -> float | None:
        """The median of all measured requests, however few: it is about the load generator, not the server."""
        lags = [lag_s for lag_s in self.latencies.lag_s if math.isfinite(lag_s)]
        return statistics.median(lags) if lags else None

    def median_waits_s(self) -> tuple[float | None, float | None]:
        """The median wait for the first token (without streaming: for the answer), and for a further one."""
        times = self.sample("ttft_s").of_state(OBSERVED)
        if not len(times):
            times = self.sample("e2e_s").of_state(OBSERVED)
        self.chunk_gap_s.flush()
        blocks = self.chunk_gap_s.blocks
        return float(np.median(times)) if len(times) else None, gaps.percentile_of(blocks, 500) if blocks else None

    def sample(self, name: str) -> LatencySample:
        """The latency of the measured requests; see harness.columns for the names."""
        return self.latencies.sample(name, open_loop=self.open_loop)

    def _add_success(self, request: Request) -> None:
        self.chunk_gap_s.add([] if derive.arrived_in_one_read(request) else request.chunks_s)
        if request.finish not in KNOWN_FINISHES:
            _count_name(self.unknown_finishes, request.finish)
        _count_name(self.models, request.model)
        self.more_pieces += derive.has_more_pieces(request)
        self.short_prompts += derive.has_short_prompt(request)
        self.fewer_tokens += derive.has_fewer_tokens(request)
        self.contradicting_times += derive.has_contradicting_times(request)
        self.chunks += len(request.chunks_s)
        self.coalesced += request.coalesced
        self.coalesced_late += request.coalesced_late or 0
        room_s = 0.0
        if request.coalesced and request.chunks_s[0] == request.chunks_s[1]:
            self.first_shared += 1
            self.first_shared_late += bool(request.coalesced_late)
            room_s = max(0.0, request.chunks_s[0] - (request.headers_s or 0.0))
            room_s = room_s if request.coalesced_late else -room_s
        if request.chunks_s:
            self.first_room_s.append(room_s)
        self.wrong_length += derive.has_wrong_length(request)
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
        """Add the bounds on the tokens that the server generated for a request."""
        minimum: int = request.output_tokens or 0
        maximum: int | None = minimum
        if request.output_tokens is None and request.error not in _NO_TOKENS:
            minimum = len(request.chunks_s)  # a chunk has at least one token
            maximum = None if request.asked_tokens is None else max(minimum, request.asked_tokens)
        self.min_tokens += minimum
        self.max_tokens = None if maximum is None or self.max_tokens is None else self.max_tokens + maximum

    def count_in_window(self, request: Request, sent_s: float) -> None:
        """Count the answer, or the part of it, that the server generated inside the window.

        In a closed loop this includes answers to warm-up requests, since the server worked on them in that time. All
        rates count the same answers, so goodput equals requests/s where every request met its SLOs. Tokens of failed
        requests do not count: they are of no use.
        """
        if request.error is None:
            if self.window_s is None:
                inside = request.phase == "measured"
            else:
                inside = self.window_s[0] < sent_s + request.ended_s <= self.window_s[1]
            if inside:
                self.ended_inside += 1
                self.prompts_inside += request.prompt_tokens or 0
                self.uncounted_inside += request.prompt_tokens is None
                self.slos.add_ended(request)
        if self.window_s is None:
            if request.error == "abandoned" and request.phase == "measured":
                self.cut_chunks_inside += len(request.chunks_s)
        elif request.error in (None, *CUT):
            share = derive.token_share_between(request, self.window_s[0] - sent_s, self.window_s[1] - sent_s)
            if request.output_tokens is not None:
                self.tokens_inside.append(request.output_tokens * share)
            elif request.error is not None:
                self.cut_chunks_inside += round(len(request.chunks_s) * share)


def _count_name(counts: Counter[str], name: str | None) -> None:
    if name is not None:
        counts[name if name in counts or len(counts) < _MAX_NAMES else "others"] += 1


def pool_numbers(cells: Sequence[Numbers]) -> Numbers:
    """The numbers of a row of an import, whose cells may have no records: sums, and medians of times and rates."""
    if len(cells) == 1:
        return cells[0]

    def total(name: str) -> int | None:
        values = [getattr(cell, name) for cell in cells]
        return None if None in values else sum(values)

    fields: dict[str, Any] = {
        name: pool_distributions([getattr(cell, name) for cell in cells])
        for name in Numbers.__struct_fields__
        if isinstance(getattr(cells[0], name), Distribution)
    }
    for name in ("wall_s", "window_s", "output_tok_s", "input_tok_s", "requests_per_s"):
        fields[name] = median_of_known(getattr(cell, name) for cell in cells)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        fields[name] = total(name)
    return Numbers(
        sent=sum(cell.sent for cell in cells),
        succeeded=sum(cell.succeeded for cell in cells),
        failed=sum(cell.failed for cell in cells),
        unfinished=sum(cell.unfinished for cell in cells),
        abandoned=sum(cell.abandoned for cell in cells),
        errors=dict(sum((Counter(cell.errors) for cell in cells), Counter())),
        window=cells[0].window,
        **fields,
    )


def compute_numbers(tallies: Sequence[CellCounts], cells: Sequence[Numbers] = ()) -> Numbers:
    """The numbers of one cell, or of several pooled: then times and rates are medians over `cells`."""
    total = _sum_counts(tallies)
    known_prompts = total.succeeded and not total.without_prompt_tokens
    known_output = total.succeeded and not total.without_output_tokens
    rates = _rates(total)
    if cells or len(tallies) != 1:
        names = ("wall_s", "window_s", "output_tok_s", "input_tok_s", "requests_per_s")
        rates = {name: median_of_known(getattr(cell, name) for cell in cells) for name in names}
        rates["window"] = next((cell.window for cell in cells if cell.window is not None), None)
    answer_s = mean_answer_s(tallies)
    samples: dict[str, Any] = {
        name: distribution([one.sample(name) for one in tallies], answer_s) for name in derive.FORMULAS
    }
    return Numbers(
        sent=total.sent,
        succeeded=total.succeeded,
        failed=total.errors.total() - total.errors["unfinished"] - total.errors["abandoned"],
        unfinished=total.errors["unfinished"],
        abandoned=total.errors["abandoned"],
        errors=dict(sorted(total.errors.items())),
        resent=total.resent,
        connect_retried=total.connect_retried,
        retry_after=total.retry_after,
        retry_after_s=total.retry_after_s if total.retry_after else None,
        prompt_tokens=total.prompt_tokens if known_prompts else None,
        output_tokens=total.output_tokens if known_output else None,
        cached_tokens=total.cached_tokens,
        # None instead of 0: most models do not reason, and their reports need no such number.
        reasoning_tokens=(total.reasoning_tokens or None) if known_output else None,
        tool_calls=total.tool_calls,
        tool_calls_valid=None if total.tool_calls is None else total.tool_calls_valid,
        **rates,
        **samples,
        chunk_gap_s=gap_distribution([t.chunk_gap_s for t in tallies]),
        schedule=pool_schedules([cell.schedule for cell in cells]),
        tokens_per_chunk=total.chunked_tokens / total.counted_chunks if total.counted_chunks else None,
        vectors=total.answers.vectors if total.answers.embedded else None,
        answers=answer_quality(total.answers),
        prompts=prompt_lengths(total.answers),
        slos=slo_attainment(total.slos, total.sent, rates.get("window_s"), cells),
    )


def mean_answer_s(tallies: Sequence[CellCounts]) -> float | None:
    """The mean time of an answer, of requests that did not end their age; None without any."""
    times = np.concatenate([one.sample("e2e_s").of_state(OBSERVED, AT_LEAST) for one in tallies] or [np.empty(0)])
    return float(times.mean()) if len(times) else None


def _sum_counts(tallies: Sequence[CellCounts]) -> CellCounts:
    """The counts of all cells together, without the values of single requests."""
    if len(tallies) == 1:
        return tallies[0]
    total = CellCounts(clock=Clock([]), slos=SloTally(sets=tallies[0].slos.sets if tallies else {}))
    for tally in tallies:
        merge_counts(total, tally, skipped=(*_CONSTANT, *_PER_REQUEST))
    return total


def _rates(counts: CellCounts) -> dict[str, Any]:
    """The window of one cell and the rates in it, as fields of Numbers; empty where there is no such time."""
    if counts.first_sent_s is None or counts.last_ended_s is None:
        return {}
    if counts.window_s is None:
        window_s = counts.last_ended_s - counts.first_sent_s
        tokens, ended = float(counts.output_tokens), counts.succeeded
        window: dict[str, Any] = {"window": "wall", "wall_s": window_s}
    else:
        window_s = counts.window_s[1] - counts.window_s[0]
        tokens, ended = math.fsum(counts.tokens_inside), counts.ended_inside  # the sum must not depend on the order
        window = {"window": "timed"}
    if window_s <= 0:
        return {}
    if counts.counted_chunks:  # a chunk of a request that was cut has about as many tokens as the others
        tokens += counts.cut_chunks_inside * counts.chunked_tokens / counts.counted_chunks
    return {
        **window,
        "window_s": window_s,
        "output_tok_s": tokens / window_s if counts.succeeded and not counts.without_output_tokens else None,
        "input_tok_s": counts.prompts_inside / window_s if counts.succeeded and not counts.uncounted_inside else None,
        "requests_per_s": ended / window_s,
    }


def slo_attainment(
    counts: SloTally, sent: int, window_s: float | None, cells: Sequence[Numbers] = ()
) -> dict[str, SloAttainment]:
    """Attainment and goodput by set of SLOs, of one cell or several pooled: then goodput is the median over `cells`."""
    attained: dict[str, SloAttainment] = {}
    for name in counts.sets:
        met, unknown = counts.met[name], counts.unknown[name]
        if cells:
            goodput = median_of_known(cell.slos[name].goodput_req_s for cell in cells if name in cell.slos)
        else:
            goodput = counts.met_ended[name] / window_s if window_s else None
        attained[name] = SloAttainment(
            met=met,
            unknown=unknown,
            attainment=met / (sent - unknown) if sent > unknown else None,
            goodput_req_s=None if counts.unknown_ended[name] else goodput,
        )
    return attained


def answer_quality(counts: AnswerTally) -> Answers | None:
    """How many answers were valid and right; None where no form was required."""
    if not counts.checked:
        return None
    return Answers(
        checked=counts.checked,
        valid=counts.valid,
        valid_share=counts.valid / counts.checked,
        labelled=counts.labelled,
        right=counts.right if counts.labelled else None,
        right_share=counts.right / counts.labelled if counts.labelled else None,
    )


def prompt_lengths(counts: AnswerTally) -> PromptLengths | None:
    """Planned and counted prompt lengths; None where no length was planned or the server counted none."""
    if not counts.excess_tokens:
        return None
    usual_excess, usual_count = min(counts.excess_tokens.items(), key=lambda item: (-item[1], abs(item[0])))
    total = counts.excess_tokens.total()
    return PromptLengths(
        requests=total,
        asked=counts.planned_tokens,
        got=counts.counted_tokens,
        added=usual_excess,
        otherwise=total - usual_count,
    )
