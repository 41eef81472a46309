"""A probe: one level of a load, measured in blocks until a rule decides it; and the rule of the SLOs.

An SLO such as `ttft_p95 <= 2 s` requires that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. `harness.numbers.share_test` decides it, as it decides a check: by the effective number of dependent requests. A
failed request does not meet the SLO.

- A probe of the *ramp* is short: a few answers, enough for an estimate. It may break a level, but proves none.
- A probe that *proves* is examined at some numbers of its blocks, each time with an error of LOOK_ERROR on either
  side, and a last time when the budget ends it. What the looks add up to is simulated (docs/capacity.md).
- `unresolved`: no decision within `block_limit`, or earlier when none is to be expected. It bounds nothing. A level of
  which all requests met the SLOs is not given up: it goes on until it is proven.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from harness.numbers.answered import Answered, answered, join
from harness.numbers.block_statistics import cluster_effect
from harness.numbers.formulas import MISSED, meets_slos, waited_in_listen_queue
from harness.numbers.share_test import LatencySample, ShareDecision, decide_share
from harness.questions.capacity.blocks import BlockCutter, ProbeBlock, count_met
from harness.records.columns import Bools, Rows, rows_of
from harness.records.records import AT_LEAST, CUT, FAILED, OBSERVED
from harness.scenario.check_syntax import Check
from harness.scenario.plan import load_of_part

# done: of a probe of the ramp, for throughput or drift. stopped: the budget was spent. invalid: its load generator
# failed, or its cells do not count for another reason; it decides nothing.
ProbeState = Literal["open", "pass", "fail", "unresolved", "done", "died", "stopped", "invalid"]
Purpose = Literal["ramp", "slo", "knee", "drift"]
# Why a level is not held although its latencies meet the SLOs.
Unheld = Literal["refused", "unserved", "short"]
UNHELD: dict[Unheld, str] = {
    "refused": "most answers are refused or empty", "unserved": "users are left waiting",
    "short": "the answers are cut short",
}  # fmt: skip

LOOK_ERROR = 0.025  # one-sided, of each examination of a probe
MAX_SLO_BLOCKS = 40  # with misses a level that is undecided after so many is close to a bound; for shares up to ...
_SHARE = 0.95  # ... this one; higher shares need more blocks, in proportion to 1 / (1 - share)
_LOOKS = (3, 8, 12, 20, 30, 40)  # of MAX_SLO_BLOCKS; two blocks can still be affected by the start
MIN_PASS_BLOCKS = 8  # fewer answer times show no stalls
_PATIENCE = 4  # times the limit, for a level without a request that missed an SLO
# A probe is hopeless after HOPE of the limit if even PACE times its remaining blocks decide nothing.
HOPE = 0.4
PACE = 2.0
RAMP_BLOCKS, RAMP_ANSWERS, RAMP_S = 2, 5, 3.0  # of a probe of the ramp, at least: its blocks, requests and seconds
RAMP_MAX_BLOCKS = 12
_CLEAR = 3.0  # the ramp ends at a level with so many times the misses that an SLO allows
_MIN_MISSES = 2  # ... and not because of a single one


SLO_PURPOSES: tuple[Purpose, ...] = ("ramp", "slo")  # of the search for the SLOs


class MeasuredProbe(Struct, frozen=True, kw_only=True):
    """The result of a probe, as capacity.json has it."""

    cells: list[str]  # of the run: one, or one for each load of a mix
    level: int
    purpose: Purpose
    state: ProbeState
    blocks: int
    answers: int
    seconds: float  # measured, without the warm-up
    counts: list[tuple[int, int]] = []  # for each SLO the requests that met it, and those that count
    missed: int = 0  # measured requests that missed an SLO ...
    queued: int = 0  # ... and of these, those whose connection waited in the server's listen queue
    answer_s: float | None  # mean end-to-end latency
    tok_s: float | None  # of a probe for the knee: of its blocks with a steady throughput, as the knee's points
    unheld: Unheld | None = None  # why it failed, if not by an SLO
    # The quantile of the latency / its bound, of the SLO that is closest to being broken: above 1 it is broken.
    margin: float | None = None

    @property
    def met(self) -> list[float | None]:
        """For each SLO the share of requests that met it; None without a request."""
        return [met / total if total else None for met, total in self.counts]


class Probe:
    """The load at a level, followed by its records until `decide` finds the evidence of its blocks enough, or its time
    is over.
    """

    def __init__(
        self,
        level: int,
        slos: Sequence[Check] = (),
        decide: "Callable[[Probe], ProbeState] | None" = None,
        *,
        purpose: Purpose = "slo",
        cutter: BlockCutter | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        """`decide`: default `decide_slos`, of the ramp `decide_ramp`. `deadline_s`: monotonic."""
        self.level, self.purpose, self.slos = level, purpose, slos
        self.cutter = BlockCutter(slos) if cutter is None else cutter
        self.blocks: list[ProbeBlock] = []
        self.settled = 0  # number of the first block with a steady throughput, where this is what is measured
        self.steady = True
        self.state: ProbeState = "open"
        self.answer_s: float | None = None  # mean time of an answer
        self.unheld: Unheld | None = None  # see MeasuredProbe
        self.missed = self.queued = 0  # see MeasuredProbe
        self._answered: dict[str | None, list[Answered]] = {}  # by load of a mix
        self._evidence: list[ProbeBlock] = []  # of an ended probe: its blocks, and what the end of the load cut
        self.failure: str | None = None  # the message of the first failed request
        bounds = [] if purpose == "knee" else [bound.bound_s for slo in slos for bound in slo.bounds]
        self.report_after_s = min(bounds, default=None)
        self._decide = decide or (decide_ramp if purpose == "ramp" else decide_slos)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()

    @property
    def shares(self) -> list[float]:
        return [slo.share for slo in self.slos]

    @property
    def seconds(self) -> float:
        return sum(block.seconds for block in self.blocks)

    @property
    def steady_blocks(self) -> list[ProbeBlock]:
        return self.blocks[self.settled :]

    def add(self, block: ProbeBlock, answer_s: float | None = None) -> ProbeState:
        """Add a block while the probe is open; return the state. `answer_s`: mean time of an answer."""
        if self.state == "open":
            self.blocks.append(block)
            self.answer_s = answer_s
            self.state = self._decide(self)
        return self.state

    def add_records(self, requests: list[Any]) -> None:
        with self._lock:
            messages = (request.message for request in requests if request.error not in (None, *CUT))
            self.failure = self.failure or next(messages, None)
            rows = rows_of(requests)
            for load in dict.fromkeys(rows.load.texts):
                load_rows = rows.where(rows.load.is_in(load))
                if load is not None and len(load_rows):
                    self._answered.setdefault(load_of_part(load), []).append(answered(load_rows))
            missed = rows.where(rows.measured & are_missed(rows, () if self.purpose == "knee" else self.slos))
            self.missed += len(missed)
            self.queued += int(waited_in_listen_queue(missed).sum())
            self.cutter.add(requests)

    def answered(self, load: str | None) -> Answered:
        """What became of the requests of a load so far, warm-up included. `load`: of a mix; None: the only one."""
        return join(self._answered.get(load) or [answered(rows_of([]))])

    def note_in_flight(self, cell: str, requests: list[Any]) -> None:
        with self._lock:
            self.cutter.note_in_flight(cell, requests)

    def is_done(self) -> bool:
        now_s = time.monotonic()
        with self._lock:
            if self.state == "open":
                for block in self.cutter.cut(now_s):
                    self.add(block, self.cutter.answer_s)
        return self.state != "open" or now_s > self._deadline_s

    def measured_s(self, stopped_s: float) -> float:
        return 0.0 if self.cutter.begun_s is None else max(0.0, stopped_s - self.cutter.begun_s)

    def end(self, state: ProbeState = "unresolved") -> ProbeState:
        """Use what the end of the load cut. `state`: of a probe that its blocks did not decide, or `died`."""
        self._evidence = [*self.blocks, ProbeBlock(seconds=0.0, samples=self.cutter.cut_samples())]
        if state == "died":  # all requests in flight are lost: none met the SLOs
            self.state = "died"
        elif self.purpose in SLO_PURPOSES and self.blocks:
            self.answer_s = self.cutter.answer_s or self.answer_s
            self.state = _decide_cut(self.state, self.shares, self._evidence, self.answer_s)
        if self.state == "open":
            self.state = state
        return self.state

    def fail(self, unheld: Unheld) -> None:
        """Fail a level whose answers are refused or cut short, whatever their latencies."""
        self.state, self.unheld = "fail", unheld

    @property
    def margin(self) -> float | None:
        """See MeasuredProbe; infinite where the server died or the level is not held, None without a request."""
        if self.state == "died" or self.unheld is not None:
            return math.inf
        if not self.blocks:
            return None
        margins = [_margin(share, _samples(self._evidence, slo)) for slo, share in enumerate(self.shares)]
        return max((margin for margin in margins if margin is not None), default=None)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """For each SLO the requests that met it, and of which it is known, with those that the end of the load cut."""
        evidence = self._evidence or self.blocks
        return [_count(_samples(evidence, slo))[:2] for slo in range(len(self.shares))]

    @property
    def clearly_missed(self) -> bool:
        """Whether the level breaks an SLO by far, or the server died, or its answers do not count."""
        if self.state in ("fail", "died"):
            return True
        return any(
            decided - met >= max(_MIN_MISSES, _CLEAR * (1 - share) * decided)
            for share, (met, decided) in zip(self.shares, self.counts, strict=True)
        )

    def result(self, cells: list[str]) -> MeasuredProbe:
        """The result of the ended probe. `cells`: of the run."""
        return MeasuredProbe(
            cells=cells,
            level=self.level,
            purpose=self.purpose,
            state=self.state,
            blocks=len(self.blocks),
            answers=sum(block.answers for block in self.blocks),
            seconds=self.seconds,
            counts=self.counts,
            missed=self.missed,
            queued=self.queued,
            answer_s=self.cutter.answer_s,
            unheld=self.unheld,
            margin=None if self.purpose not in SLO_PURPOSES or self.margin == math.inf else self.margin,
            tok_s=self._tok_s(),
        )

    def _tok_s(self) -> float | None:
        """Tokens a second of the blocks, or of those with a steady throughput; None without one."""
        measured = self.steady_blocks or self.blocks
        measured_s = sum(block.seconds for block in measured)
        if not measured_s:
            return None
        return (sum(block.output_tokens for block in measured) + self.cutter.open_tokens()) / measured_s


def is_valid(probe: Probe | MeasuredProbe) -> bool:
    """Whether the requests of a probe count for the SLOs."""
    return probe.purpose in SLO_PURPOSES and probe.state != "invalid"


def are_missed(rows: Rows, slos: Sequence[Check]) -> Bools:
    """Whether each request failed, or missed one of the SLOs that count for it."""
    missed = rows.error.is_set & ~rows.error.is_in(*CUT)
    for slo in slos:
        parts = [text for text in rows.load.texts if text is not None and load_of_part(text) == slo.load]
        counts = rows.load.is_in(*parts) if slo.load is not None else np.ones(len(rows), dtype=np.bool_)
        missed |= counts & (meets_slos(rows, slo.bounds) == MISSED)
    return missed


def block_limit(shares: Sequence[float]) -> int:
    """The largest number of blocks of a probe with these shares."""
    return round(MAX_SLO_BLOCKS * max(1.0, (1 - _SHARE) / (1 - max(shares))))


def decide_slos(probe: Probe) -> ProbeState:
    """Decide whether the level meets all SLOs, at some numbers of blocks."""
    number, limit = len(probe.blocks), block_limit(probe.shares)
    hope = round(HOPE * limit)
    if number not in _looks(limit) and number != hope and (number < limit or number % limit):
        return "open"
    state = _decide(probe.shares, probe.blocks, probe.answer_s)
    if state != "open" or number < hope or not _has_misses(probe.blocks):
        return "unresolved" if state == "open" and number >= _PATIENCE * limit else state
    if number >= limit:
        return "unresolved"
    # Even PACE times the remaining blocks would decide nothing.
    times = 1 + PACE * (limit - number) / number
    open_decisions = [
        decision
        for decision in _share_decisions(probe.shares, probe.blocks, probe.answer_s)
        if decision.decision != "pass"
    ]
    return (
        "unresolved"
        if any(decision.needed is None or decision.needed > times * decision.n for decision in open_decisions)
        else "open"
    )


def decide_ramp(probe: Probe) -> ProbeState:
    """End a probe of the ramp after some answers. They may break an SLO, and are too few to prove a level."""
    number = len(probe.blocks)
    requests = max(sum(len(block.samples[slo].state) for block in probe.blocks) for slo in range(len(probe.shares)))
    is_short = number < RAMP_BLOCKS or requests < RAMP_ANSWERS or probe.seconds < RAMP_S
    if is_short and number < RAMP_MAX_BLOCKS:
        return "open"
    return "fail" if _decide(probe.shares, probe.blocks, probe.answer_s) == "fail" else "done"


def _decide(shares: Sequence[float], blocks: Sequence[ProbeBlock], answer_s: float | None) -> ProbeState:
    """Decide by all blocks at once; a pass needs MIN_PASS_BLOCKS."""
    decisions = {decision.decision for decision in _share_decisions(shares, blocks, answer_s)}
    if "fail" in decisions:
        return "fail"
    is_long = sum(block.seconds > 0 for block in blocks) >= MIN_PASS_BLOCKS  # the last one has what the end cut
    return "pass" if decisions == {"pass"} and is_long else "open"


def _share_decisions(
    shares: Sequence[float], blocks: Sequence[ProbeBlock], answer_s: float | None
) -> list[ShareDecision]:
    """Decide each SLO, that at least its share of all requests must meet."""
    flight, decided = _in_flight(blocks), []
    for slo, share in enumerate(shares):
        samples = _samples(blocks, slo)
        together = [LatencySample(*map(np.concatenate, zip(*samples, strict=True)))] if samples else []
        # Half of what is in flight is the least effect of the rule; the misses may come in larger clusters.
        clusters = max(flight or 0.0, 2 * cluster_effect([count_met(sample) for sample in samples]))
        decided.append(decide_share(together, share, answer_s=answer_s, in_flight=clusters, alpha=2 * LOOK_ERROR))
    return decided


def _in_flight(blocks: Sequence[ProbeBlock]) -> float | None:
    """The mean number of requests in flight, by Little's law; None where no answer came."""
    seconds = sum(block.seconds for block in blocks)
    busy_s = sum(block.answers * block.e2e_s for block in blocks if block.e2e_s is not None)
    return busy_s / seconds if seconds and busy_s else None


def _decide_cut(
    state: ProbeState, shares: Sequence[float], blocks: Sequence[ProbeBlock], answer_s: float | None
) -> ProbeState:
    """Decide again with the requests that the end of the load cut: those older than a bound have missed it.

    They can take a pass back, or make an undecided probe fail. What the budget ended is examined a last time.
    """
    decided = _decide(shares, blocks, answer_s)
    if decided == "fail":
        return "fail"
    if state == "pass":
        return "pass" if decided == "pass" else "unresolved"
    return decided if state == "open" else state


def blocks_needed(shares: Sequence[float], blocks: int) -> int:
    """The number of blocks at which an open probe with so many blocks is examined next."""
    limit = block_limit(shares)
    return min((look for look in _looks(limit) if look > blocks), default=(blocks // limit + 1) * limit)


def _looks(limit: int) -> set[int]:
    return {max(_LOOKS[0], round(look * limit / MAX_SLO_BLOCKS)) for look in _LOOKS}


def _has_misses(blocks: Sequence[ProbeBlock]) -> bool:
    return any(met < decided for block in blocks for met, decided in block.counts)


def _samples(blocks: Sequence[ProbeBlock], slo: int) -> list[LatencySample]:
    return [block.samples[slo] for block in blocks if len(block.samples[slo].state)]


def _count(samples: Sequence[LatencySample]) -> tuple[int, int, int]:
    """The numbers of requests that met the SLO, of which it is known whether they did, and of which it is not."""
    counts = [count_met(sample) for sample in samples]
    decided = sum(count[1] for count in counts)
    return sum(count[0] for count in counts), decided, sum(len(sample.state) for sample in samples) - decided


def _margin(share: float, samples: Sequence[LatencySample]) -> float | None:
    """The latency / bound that `share` of the requests do not exceed; failed ones are beyond every bound."""
    values = [
        np.where(sample.state == FAILED, math.inf, sample.value_s)[np.isin(sample.state, (OBSERVED, AT_LEAST, FAILED))]
        for sample in samples
    ]
    together = np.sort(np.concatenate(values)) if values else np.empty(0)
    return float(together[math.ceil(share * len(together) - 1e-9) - 1]) if len(together) else None
