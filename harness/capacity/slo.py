"""The SLOs of a capacity search, and the blocks of time that its probes are made of, cut from the records of a load."""

import re
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec import Struct

from harness.analysis import derive
from harness.analysis.derive import meets_slos, missed_slo_before_leaving
from harness.capacity.evidence import BLOCK_ANSWERS
from harness.errors import HarnessError
from harness.rundir.records import Request
from harness.scenario import Scenario
from harness.scenario.check_syntax import LATENCIES, Check, Slo, parse_check
from harness.scenario.plan import load_of_part

KNEE_BLOCK_ANSWERS = 2  # a block of the knee's search lasts so many answers, thinking included
MIN_BLOCK_S = 0.5  # shorter ones would show the flushing of the records
FLUSH_S = 0.6  # a record is in its file so long after the end of its answer, at the latest
_FIRST, _NEWEST = 20, 200  # answers
EXAMPLE = '--slo "ttft_p95<=2s" --slo "tpot_p95<=60ms"'


class CapacitySlo(Struct, frozen=True, kw_only=True):
    """So large a share of the requests must meet these bounds: `ttft_p95<=2s` is a share of 0.95 and one bound.

    `load`: the load of a mix whose requests count; None: all requests.
    """

    text: str
    load: str | None = None
    bounds: tuple[Slo, ...]
    share: float  # 0 to 1


def slo_of(check: Check) -> CapacitySlo | None:
    """The SLO that a check asks for; None where it is of another kind, such as a throughput or a mean."""
    if check.relative:
        return None
    text = check.text.rpartition(":")[2].strip()  # without SERVER/LOAD
    if check.metric == "attainment" and check.operator in (">=", ">") and 0 < check.bound < 1:
        return CapacitySlo(text=text, bounds=check.slos, share=check.bound)
    latency, _, statistic = check.metric.rpartition("_")
    quantile = re.fullmatch(r"p(\d+(?:\.\d+)?)", statistic)
    if quantile is None or latency not in LATENCIES or not LATENCIES[latency].slo or check.operator not in ("<=", "<"):
        return None
    bound = Slo(text=text, latency=latency, operator=check.operator, bound_s=check.bound)
    return CapacitySlo(text=text, bounds=(bound,), share=float(quantile[1]) / 100)


def parse_slos(texts: Sequence[str], loads: Collection[str] = ()) -> list[CapacitySlo]:
    """The SLOs of the command line, each a check, or several with commas; `LOAD: CHECK` is of one of the `loads` of a
    mix. Raises HarnessError."""
    found = []
    for text in (part for given in texts for part in _parts(given)):
        load, colon, rest = text.partition(":")
        of_load = bool(colon) and load.strip() in loads
        try:
            check = parse_check(rest if of_load else text)
        except ValueError as error:
            raise HarnessError(f"--slo '{text}': {error}", next_step=f"Write {EXAMPLE}.") from None
        slo = slo_of(check) if check.server is None else None
        if slo is None:
            raise HarnessError(
                f"--slo '{text}': not an upper bound on a quantile of a latency of requests",
                next_step=f"Write {EXAMPLE}.",
            )
        found.append(_of_load(slo, load.strip()) if of_load else slo)
    return found


def _of_load(slo: CapacitySlo, load: str) -> CapacitySlo:
    return msgspec.structs.replace(slo, load=load, text=f"{load}: {slo.text}")


def _parts(given: str) -> list[str]:
    """Split at the commas outside of parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", given) if part.strip()] or [given]


def slos_of_scenario(scenario: Scenario, server: str, load: str) -> list[CapacitySlo]:
    """The checks of a scenario that are quantile latencies of this server and load. Of a mix: those of its parts, else
    of the same load alone."""
    if load not in scenario.mixes:
        return _slos_of_row(scenario, server, load)
    return [
        _of_load(slo, part)
        for part in scenario.mixes[load]
        for slo in _slos_of_row(scenario, server, f"{load}.{part}") or _slos_of_row(scenario, server, part)
    ]


def _slos_of_row(scenario: Scenario, server: str, load: str) -> list[CapacitySlo]:
    found = []
    for text in scenario.checks:
        check = parse_check(text)
        slo = slo_of(check) if check.server in (None, server) and check.load in (None, load) else None
        if slo is not None and slo not in found:
            found.append(slo)
    return found


class LoadBlock(Struct, frozen=True, kw_only=True):
    """A part of the measured time of a load; times are of the monotonic clock.

    `counts`: of each SLO, how many of the requests that ended in it met the SLO, and how many these are.
    """

    begin_s: float
    end_s: float
    counts: list[tuple[int, int]]
    output_tokens: float
    answers: int
    e2e_s: float | None  # mean end-to-end latency of the good ones

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class LoadPace(Struct, frozen=True, kw_only=True):
    """What the length of blocks of a load depends on, but for its answers.

    pause_s: think time after an answer. min_s: of a block, such as that of some arrivals. open_loop: the first answers
    alone count, because above capacity the queue makes later ones longer and longer, and no block would end.
    """

    pause_s: float = 0.0
    min_s: float = 0.0
    open_loop: bool = False


class BlockCutter:
    """Cuts the records of a load, or of all loads of a mix, into blocks while they grow.

    Requests count in the block in which they end, in order that a block is complete soon after its end: in a closed
    loop also those that the warm-up sent. Failed ones met nothing; those cut by the end of the load are not counted.
    A block of a mix is as long as its slowest load needs.
    """

    def __init__(
        self,
        slos: Sequence[CapacitySlo],
        paces: Mapping[str | None, LoadPace] = MappingProxyType({None: LoadPace()}),
        *,
        whole_tokens: bool = False,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Prepare for the records.

        paces: by load of a mix; None is the key of a load alone. whole_tokens: for the knee; a block is complete only
        when the answers that it has a part of have ended, so that its tokens are exact. flush_s: so long after the end
        of a block its records have been read.
        """
        self._slos = slos
        self._paces = paces
        self._whole_tokens = whole_tokens
        self._flush_s = flush_s
        self._answers = KNEE_BLOCK_ANSWERS if whole_tokens else BLOCK_ANSWERS
        self._waiting: list[Request] = []  # those that a later block may count
        self._newest_s: dict[str | None, deque[float]] = {load: deque(maxlen=_NEWEST) for load in paces}  # latencies
        self._first_s: dict[str | None, list[float]] = {load: [] for load in paces}
        self.begun_s: float | None = None  # sending of the first measured request
        self._next_s = 0.0  # where the next block begins
        self.answers = 0

    @property
    def answer_s(self) -> float | None:
        """The mean end-to-end latency of the newest answers, of the slowest load; None before the first."""
        return max((_mean(list(found)) or 0.0 for found in self._newest_s.values()), default=None) or None

    @property
    def typical_s(self) -> float | None:
        """The mean end-to-end latency that lengths of blocks are made of; None before the first answer."""
        return max((self._typical_s(load) or 0.0 for load in self._paces), default=None) or None

    @property
    def block_s(self) -> float | None:
        """How long the next block lasts; None before the first answer of each load."""
        lengths = [MIN_BLOCK_S]
        for load, pace in self._paces.items():
            if (answer_s := self._typical_s(load)) is None:
                return None
            lengths += [pace.min_s, self._answers * (answer_s + pace.pause_s)]
        return max(lengths)

    def _typical_s(self, load: str | None) -> float | None:
        return _mean(self._first_s[load] if self._paces[load].open_loop else list(self._newest_s[load]))

    def see(self, requests: Sequence[Request]) -> None:
        """Add new records, warm-up included."""
        for request in requests:
            if request.phase == "measured" and (self.begun_s is None or not self.answers):
                due_s = request.sent_s
                self.begun_s = due_s if self.begun_s is None else min(self.begun_s, due_s)
                self._next_s = self.begun_s
            if (e2e_s := derive.e2e_s(request)) is not None:
                load = load_of_part(request.load)
                self._newest_s[load].append(e2e_s)
                if len(self._first_s[load]) < _FIRST:
                    self._first_s[load].append(e2e_s)
        self._waiting += requests

    def cut(self, now_s: float) -> list[LoadBlock]:
        """The blocks that are complete now. One in which fewer requests of a load ended than make a sample is joined to
        the next one."""
        found: list[LoadBlock] = []
        longest_s = max((request.ended_s for request in self._waiting), default=0.0) if self._whole_tokens else 0.0
        end_s = self._next_s
        while self.begun_s is not None and self.block_s is not None:
            end_s += self.block_s
            if now_s - self._flush_s - longest_s < end_s:
                return found
            ended = [one for one in self._waiting if self._next_s < one.sent_s + one.ended_s <= end_s]
            answers = Counter(load_of_part(one.load) for one in ended if one.error != "unfinished")
            if min(answers[load] for load in self._paces) < (1 if self._whole_tokens else BLOCK_ANSWERS):
                continue
            found.append(self._block(self._next_s, end_s, ended))
            self.answers += answers.total()
            self._next_s = end_s
            self._waiting = [one for one in self._waiting if one.sent_s + one.ended_s > end_s]
        return found

    def _block(self, begin_s: float, end_s: float, ended: list[Request]) -> LoadBlock:
        e2e_s = [value for one in ended if (value := derive.e2e_s(one)) is not None]
        tokens = 0.0
        for one in self._waiting:
            if one.error is None and one.output_tokens is not None:
                tokens += one.output_tokens * derive.token_share_between(one, begin_s - one.sent_s, end_s - one.sent_s)
        return LoadBlock(
            begin_s=begin_s,
            end_s=end_s,
            counts=[
                _counted(slo, [one for one in ended if slo.load in (None, load_of_part(one.load))])
                for slo in self._slos
            ],
            output_tokens=tokens,
            answers=sum(one.error != "unfinished" for one in ended),
            e2e_s=_mean(e2e_s),
        )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counted(slo: CapacitySlo, requests: Sequence[Request]) -> tuple[int, int]:
    """How many met the SLO, and how many count."""
    met = total = 0
    for request in requests:
        if request.error is None:
            verdict = meets_slos(request, slo.bounds)
            met, total = met + (verdict is True), total + (verdict is not None)
        elif request.error == "abandoned":
            total += missed_slo_before_leaving(request, slo.bounds)
        elif request.error != "unfinished":
            total += 1
    return met, total
