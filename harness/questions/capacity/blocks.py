"""The SLOs of a capacity search, and the blocks of its probes, which are cut from the records of a load."""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec import Struct

from harness.base.errors import HarnessError
from harness.numbers import formulas
from harness.numbers.formulas import MISSED, meets_slos
from harness.numbers.latencies import margin_sample, token_shares_between
from harness.numbers.share_test import LatencySample
from harness.records.columns import Rows, rows_of
from harness.records.records import AT_LEAST, CUT, FAILED, OBSERVED, UNKNOWN, Request
from harness.scenario import Load, Scenario, is_open_loop
from harness.scenario.behaviour import mean_pause_s
from harness.scenario.check_syntax import Check, parse_check, split_checks
from harness.scenario.plan import load_of_part

BLOCK_ANSWERS = 3  # a block lasts as long as so many answers, thinking included
RAMP_BLOCK_ANSWERS = 1  # a block of the ramp lasts as long as so many answers, thinking included
KNEE_BLOCK_ANSWERS = 2  # a block of the knee's search lasts as long as so many answers and pauses
MIN_ARRIVALS = 3.0  # of an open loop in a block
MIN_BLOCK_S = 0.5  # shorter blocks would show when records are flushed
FLUSH_S = 0.6  # longest time between the end of an answer and its record in the file
_FIRST, _NEWEST = 20, 200  # answers of which latencies are kept
EXAMPLE = '--check "ttft_p95 <= 2s" --check "tpot_p95 <= 60ms"'


def slo_from_check(check: Check) -> Check | None:
    """The check without its server and load, if it is an SLO; None for others, such as of a throughput or a mean."""
    if not check.is_slo:
        return None
    return msgspec.structs.replace(check, text=check.text.rpartition(":")[2].strip(), server=None, load=None)


def parse_slos(texts: Sequence[str], loads: Collection[str] = ()) -> list[Check]:
    """Parse the SLOs of the command line, which are checks. `LOAD: CHECK` is for one of the `loads` of a mix.

    Raises HarnessError.
    """
    slos = []
    for text in split_checks(texts):
        try:
            check = parse_check(text)
        except ValueError as error:
            raise HarnessError(f"--{error}", next_step=f"Write {EXAMPLE}.") from None
        if check.server is not None or (check.load is not None and check.load not in loads):
            raise HarnessError(
                f"--check '{text}': an SLO is for all servers, and for the load or one load of the mix "
                f"({', '.join(loads) or 'here there is one load'})",
                next_step=f"Write {EXAMPLE}.",
            )
        if (slo := slo_from_check(check)) is None:
            raise HarnessError(
                f"--check '{text}': not an upper bound on a quantile of a latency of requests, nor an attainment of "
                "more than 0 and less than 100 %",
                next_step=f"Write {EXAMPLE}.",
            )
        if any(bound.bound_s <= 0 for bound in slo.bounds):
            raise HarnessError(
                f"--check '{text}': no request takes 0 s or less", next_step="Write a bound above 0, such as 2s."
            )
        slos.append(slo if check.load is None else _for_load(slo, check.load))
    return slos


def _for_load(slo: Check, load: str) -> Check:
    return msgspec.structs.replace(slo, load=load, text=f"{load}: {slo.text}")


def scenario_slos(scenario: Scenario, server: str, load: str) -> list[Check]:
    """The SLOs of a scenario's checks for this server and load. For each load of a mix: its checks in the mix, or else
    those of the same load alone.
    """
    if load not in scenario.mixes:
        return _row_slos(scenario, server, load)
    return [
        _for_load(slo, part)
        for part in scenario.mixes[load]
        for slo in _row_slos(scenario, server, f"{load}.{part}") or _row_slos(scenario, server, part)
    ]


def _row_slos(scenario: Scenario, server: str, load: str) -> list[Check]:
    slos = []
    for text in scenario.checks:
        check = parse_check(text)
        slo = slo_from_check(check) if check.concerns(server, load) else None
        if slo is not None and slo not in slos:
            slos.append(slo)
    return slos


class ProbeBlock(Struct, frozen=True, kw_only=True):
    """A period of the measured time of a load. `begin_s`: on the monotonic clock.

    `samples`: for each SLO, latency / bound of the requests that ended in the block: at most 1 meets it.
    """

    begin_s: float = 0.0
    seconds: float
    samples: list[LatencySample] = []
    output_tokens: float = 0.0
    answers: int = 0
    failed: int = 0  # of the answers
    e2e_s: float | None = None  # mean end-to-end latency of successful requests

    @property
    def counts(self) -> list[tuple[int, int]]:
        """For each SLO the numbers of requests that met it, and of which it is known whether they did."""
        return [count_met(sample) for sample in self.samples]


def count_met(sample: LatencySample) -> tuple[int, int]:
    """The numbers of requests that met the SLO, and of which it is known whether they did."""
    decided = (sample.state != UNKNOWN) & ~((sample.state == AT_LEAST) & (sample.value_s < 1))
    return int((decided & (sample.state != FAILED) & (sample.value_s <= 1)).sum()), int(decided.sum())


def pause_s(load: Load) -> float:
    """The mean think time after an answer."""
    return mean_pause_s(load.think if load.think is not None else load.think_s)


def _min_block_s(load: Load) -> float:
    """The shortest time in which an open loop has some arrivals."""
    rate = None if load.arrivals is None else load.arrivals.rate
    return MIN_ARRIVALS / rate if rate else 0.0


class BlockCutter:
    """Cuts the growing records of a load, or of all loads of a mix, into blocks.

    A request counts in the block in which it ends, so that a block is complete soon after its end. In a closed loop
    this includes requests of the warm-up. Failed requests do not meet an SLO. Requests that the end of the load cut
    count only in `cut_samples`: those older than a bound have missed it. A block of a mix is as long as its slowest
    load needs.
    """

    def __init__(
        self,
        slos: Sequence[Check],
        loads: Mapping[str | None, Load] = MappingProxyType({None: Load(user="batch")}),
        *,
        whole_tokens: bool = False,
        flush_s: float = FLUSH_S,
        answers: int | None = None,
    ) -> None:
        """`loads`: those of a mix by name; None is the key of a load alone. `whole_tokens`: for the knee; a block is
        complete only when all answers with a part in it have ended, so that its tokens are exact. `flush_s`: time after
        the end of a block until its records have been read. `answers`: a block lasts as long as so many.
        """
        self._slos = slos
        self._loads = loads
        self._whole_tokens = whole_tokens
        self._flush_s = flush_s
        self._answers = answers or (KNEE_BLOCK_ANSWERS if whole_tokens else BLOCK_ANSWERS)
        self._waiting: list[Request] = []  # requests that a later block may count
        # Latencies by load: of the newest and of the first answers.
        self._newest_s: dict[str | None, deque[float]] = {load: deque(maxlen=_NEWEST) for load in loads}
        self._first_s: dict[str | None, list[float]] = {load: [] for load in loads}
        self.begun_s: float | None = None  # when the first measured request was sent
        self._next_s = 0.0  # start of the next block
        self._is_cut = False  # there was a block
        self._chunks = self._carried_tokens = 0.0  # of the streamed answers, and the tokens in these chunks
        self._recorded: set[str] = set()  # ids of requests
        self._in_flight: dict[str, list[Request]] = {}  # by cell, those older than some bound
        self._overdue: list[dict[str, Request]] = [{} for _ in slos]  # by id: missed the SLO while in flight ...
        self._uncounted: list[list[Request]] = [[] for _ in slos]  # ... and of these, those that are in no block
        self._min_answer_s: dict[str | None, float] = {}  # by load: the age of its first overdue request

    @property
    def answer_s(self) -> float | None:
        """The mean latency of the newest answers of the slowest load; None before the first answer."""
        return max(_mean(latencies_s) or 0.0 for latencies_s in self._newest_s.values()) or None

    @property
    def typical_s(self) -> float | None:
        """The mean latency that the length of blocks depends on; None before the first answer."""
        return max(self._typical_s(load) or 0.0 for load in self._loads) or None

    @property
    def block_s(self) -> float | None:
        """The length of the next block; None until each load has an answer."""
        lengths = [MIN_BLOCK_S]
        for name, load in self._loads.items():
            if (answer_s := self._typical_s(name)) is None:
                return None
            lengths += [_min_block_s(load), self._answers * (answer_s + pause_s(load))]
        return max(lengths)

    def _typical_s(self, load: str | None) -> float | None:
        """Of an open loop only of the first answers: above capacity the queue grows, and no block would end."""
        mean_s = _mean(self._first_s[load] if is_open_loop(self._loads[load]) else self._newest_s[load])
        return self._min_answer_s.get(load) if mean_s is None else mean_s

    def add(self, requests: Sequence[Request]) -> None:
        """Add new records, warm-up included."""
        self._note_begin(requests)
        rows = rows_of(requests)
        carried = formulas.carried_tokens(rows)
        has_tokens = rows.good & ~np.isnan(carried)
        self._chunks += float(rows.chunks[has_tokens].sum())
        self._carried_tokens += float(carried[has_tokens].sum())
        for request, e2e_s in zip(requests, formulas.e2e(rows).tolist(), strict=True):
            self._recorded.add(request.id)
            if not math.isnan(e2e_s):
                load = load_of_part(request.load)
                self._newest_s[load].append(e2e_s)
                if len(self._first_s[load]) < _FIRST:
                    self._first_s[load].append(e2e_s)
        self._waiting += requests

    def note_in_flight(self, cell: str, requests: Sequence[Request]) -> None:
        """Use a report of a cell's requests in flight. One older than the bound of an SLO has missed it at once.

        It counts in the next block, and its record never again. Call it before `add` of newer records.
        """
        requests = [request for request in requests if request.id not in self._recorded]
        self._note_begin(requests)
        if self.begun_s is None:
            return
        self._in_flight[cell] = []
        rows = rows_of(requests)
        missed = [(meets_slos(rows, slo.bounds) == MISSED).tolist() for slo in self._slos]
        for place, request in enumerate(requests):
            load, is_late = load_of_part(request.load), False
            for slo, late, overdue, uncounted in zip(self._slos, missed, self._overdue, self._uncounted, strict=True):
                if slo.load in (None, load) and late[place]:
                    is_late = True
                    if request.id not in overdue:
                        overdue[request.id] = request
                        uncounted.append(request)
            if is_late:
                self._in_flight[cell].append(request)
                self._min_answer_s.setdefault(load, request.ended_s)

    def _note_begin(self, requests: Sequence[Request]) -> None:
        if self._is_cut:
            return
        for request in requests:
            if request.phase == "measured":
                begun_s = request.sent_s if self.begun_s is None else self.begun_s
                self.begun_s = self._next_s = min(begun_s, request.sent_s)

    def cut(self, now_s: float) -> list[ProbeBlock]:
        """The blocks that are complete now. A block with too few answers of a load is joined with the next one."""
        blocks: list[ProbeBlock] = []
        longest_s = max((request.ended_s for request in self._waiting), default=0.0) if self._whole_tokens else 0.0
        end_s = self._next_s
        while self.begun_s is not None and self.block_s is not None:
            end_s += self.block_s
            if now_s - self._flush_s - longest_s < end_s:
                return blocks
            ended = [request for request in self._waiting if self._next_s < request.sent_s + request.ended_s <= end_s]
            answers = Counter(load_of_part(request.load) for request in ended if request.error != "unfinished")
            stuck = {  # no answer comes of those that were in flight for the whole block
                load_of_part(late_request.load)
                for late in self._in_flight.values()
                for late_request in late
                if late_request.sent_s <= self._next_s
            }
            few = 1 if self._whole_tokens or self._answers < BLOCK_ANSWERS else BLOCK_ANSWERS
            if any(answers[load] < few for load in self._loads if load not in stuck):
                # Blocks that end before the next answer change nothing: clocks of stored records may have jumped.
                ends_s = (request.sent_s + request.ended_s for request in self._waiting)
                later_s = min((time_s for time_s in ends_s if time_s > end_s), default=now_s)
                end_s += max(0, (later_s - end_s) // self.block_s) * self.block_s
                continue
            blocks.append(self._make_block(self._next_s, end_s, ended, answers.total()))
            self._is_cut = True
            self._next_s = end_s
            self._waiting = [request for request in self._waiting if request.sent_s + request.ended_s > end_s]
        return blocks

    def cut_samples(self) -> list[LatencySample]:
        """For each SLO the requests that the end of the load cut after they had missed it; others had just begun."""
        samples = self._samples([request for request in self._waiting if request.error == "unfinished"], [])
        return [LatencySample(*(column[sample.state == OBSERVED] for column in sample)) for sample in samples]

    def _samples(self, requests: Sequence[Request], late: Sequence[Sequence[Request]]) -> list[LatencySample]:
        """For each SLO the sample of requests and of its overdue ones, each of which counts once."""
        samples = []
        for number, (slo, overdue) in enumerate(zip(self._slos, self._overdue, strict=True)):
            own = [
                request
                for request in requests
                if request.id not in overdue and slo.load in (None, load_of_part(request.load))
            ]
            samples.append(slo_sample(slo, rows_of([*own, *(late[number] if late else ())])))
        return samples

    def _make_block(self, begin_s: float, end_s: float, ended: list[Request], answers: int) -> ProbeBlock:
        ended_e2e_s = formulas.e2e(rows_of(ended))
        # An answer counts where it ends; `open_tokens` has the part of those that are still open at the last end.
        counted = (self._waiting, begin_s, end_s) if self._whole_tokens else (ended, self.begun_s or begin_s, math.inf)
        samples = self._samples([request for request in ended if request.error != "unfinished"], self._uncounted)
        self._uncounted = [[] for _ in self._slos]
        return ProbeBlock(
            begin_s=begin_s,
            seconds=end_s - begin_s,
            samples=samples,
            output_tokens=self._tokens_between(*counted),
            answers=answers,
            failed=sum(request.error not in (None, "unfinished", "abandoned") for request in ended),
            e2e_s=_mean(ended_e2e_s[~np.isnan(ended_e2e_s)].tolist()),
        )

    def open_tokens(self) -> float:
        """The tokens that came before the end of the last block, of answers that ended or were cut after it."""
        if self._whole_tokens or self.begun_s is None:
            return 0.0
        return self._tokens_between(self._waiting, self.begun_s, self._next_s)

    def _tokens_between(self, requests: list[Request], begin_s: float, end_s: float) -> float:
        """The tokens of requests that did not fail in a time. A chunk of one that was cut has as many as the others."""
        rows = rows_of(requests)
        rows = rows.where(rows.good | rows.error.is_in(*CUT))
        shares = token_shares_between(rows, begin_s, end_s, lambda places: (requests[at] for at in places))
        is_counted = ~np.isnan(rows.output_tokens)
        cut_chunks = float((rows.chunks * shares)[~is_counted].sum())
        cut = cut_chunks * self._carried_tokens / self._chunks if self._chunks else 0.0
        return float((rows.output_tokens * shares)[is_counted].sum()) + cut


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None


def slo_sample(slo: Check, rows: Rows) -> LatencySample:
    """The latencies of requests relative to the bound of an SLO: at most 1 meets it. Of several bounds the worst."""
    return margin_sample(rows, slo.bounds)
