"""A probe: one level of a load, measured in blocks until a rule decides it; and the rule of the SLOs.

An SLO such as `ttft_p95 <= 2 s` requires that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. `harness.analysis.slo_rule` decides it, as it decides a check: by the effective number of dependent requests. A
failed request does not meet the SLO.

- The blocks are examined at some of their numbers. Each examination has an equal part of the error (Bonferroni), so
  that the error holds wherever the probe stops; that of a wrong `fail` is also divided by the number of SLOs.
- Some servers miss in rare waves, which the ranks of the latency do not show. So the effect is also estimated from the
  misses of the blocks, and a `pass` needs so many blocks that it rules out incidents: one loses at most MAX_LOSS of a
  block, because it lasts an answer, and a block is BLOCK_ANSWERS long.
- `unresolved`: no decision within `block_limit`, or earlier when none is to be expected. It bounds nothing.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from harness.analysis.answers import Answered, answered, join
from harness.analysis.derive import MISSED, meets_slos, waited_in_listen_queue
from harness.analysis.slo import BLOCK_ANSWERS, BlockCutter, CapacitySlo, ProbeBlock, count_met
from harness.analysis.slo_rule import Decision, DesignEffect, LatencySample, decide, design_effect
from harness.records.records import CUT
from harness.records.table import Bools, Rows, rows_of
from harness.scenario.plan import load_of_part

# done: of a probe for throughput or drift. stopped: the budget was spent, or its load generator failed.
ProbeState = Literal["open", "pass", "fail", "unresolved", "done", "died", "stopped"]
Purpose = Literal["slo", "knee", "drift"]
# Why a level is not held although its latencies meet the SLOs.
Unheld = Literal["refused", "unserved", "short"]
UNHELD: dict[Unheld, str] = {
    "refused": "most answers are refused or empty", "unserved": "users are left waiting",
    "short": "the answers are cut short",
}  # fmt: skip

MAX_LOSS = 1 / BLOCK_ANSWERS  # of a block, by one incident
ERROR = 0.15  # of one probe; the capacity needs two passed probes, and the level above it two failed ones
MAX_BLOCKS = 40  # for shares up to ...
_SHARE = 0.95  # ... this one; higher shares need more blocks, in proportion to 1 / (1 - share)
MIN_BLOCKS = 3  # two blocks can still be affected by the start
_FAIL_LOOKS = (0.075, 0.125, 0.225, 0.375, 0.55, 0.75, 1.0)  # of the limit
_PASS_LOOKS = 3  # at the first number of blocks that rules out incidents, at the limit, and halfway
# A probe is hopeless after HOPE of the limit if even PACE times its remaining blocks decide nothing.
HOPE = 0.4
PACE = 2.0


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
        slos: Sequence[CapacitySlo] = (),
        decide: "Callable[[Probe], ProbeState] | None" = None,
        *,
        purpose: Purpose = "slo",
        cutter: BlockCutter | None = None,
        deadline_s: float = math.inf,
        min_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`decide`: default `decide_slos`. `deadline_s`: monotonic. `min_s`: returns the time that the probe must have
        at least, once the duration of an answer is known.
        """
        self.level, self.purpose, self.slos = level, purpose, slos
        self.cutter = BlockCutter(slos) if cutter is None else cutter
        self.blocks: list[ProbeBlock] = []
        self.settled = 0  # number of the first block with a steady throughput, where this is what is measured
        self.steady = True
        self.state: ProbeState = "open"
        self.chance = 0.5  # the probability that the level meets all SLOs, by this probe alone; of an ended one
        self.answer_s: float | None = None  # mean time of an answer
        self.unheld: Unheld | None = None  # see MeasuredProbe
        self.hopeless = False  # the first answers show that the time until the deadline is too short
        self.missed = self.queued = 0  # see MeasuredProbe
        self._answered: dict[str | None, list[Answered]] = {}  # by load of a mix
        self.failure: str | None = None  # the message of the first failed request
        bounds = [] if purpose == "knee" else [bound.bound_s for slo in slos for bound in slo.bounds]
        self.report_after_s = min(bounds, default=None)
        self._decide = decide or decide_slos
        self._deadline_s, self._min_s, self._began_s = deadline_s, min_s, time.monotonic()
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
            messages = (each.message for each in requests if each.error not in (None, *CUT))
            self.failure = self.failure or next(messages, None)
            rows = rows_of(requests)
            for load in dict.fromkeys(rows.load.texts):
                of_load = rows.where(rows.load.is_in(load))
                if load is not None and len(of_load):
                    self._answered.setdefault(load_of_part(load), []).append(answered(of_load))
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
            min_s = None if self.blocks else self._min_s()
            self.hopeless |= min_s is not None and self._began_s + min_s > self._deadline_s
            if self.state == "open":
                for block in self.cutter.cut(now_s):
                    self.add(block, self.cutter.answer_s)
        return self.state != "open" or self.hopeless or now_s > self._deadline_s

    def measured_s(self, stopped_s: float) -> float:
        return 0.0 if self.cutter.begun_s is None else max(0.0, stopped_s - self.cutter.begun_s)

    def end(self, state: ProbeState = "unresolved") -> ProbeState:
        """Use what the end of the load cut. `state`: of a probe that its blocks did not decide, or `died`."""
        if state == "died":  # all requests in flight are lost: none met the SLOs
            self.state, self.chance = "died", 0.0
        elif self.purpose == "slo" and self.blocks:
            evidence = [*self.blocks, ProbeBlock(seconds=0.0, samples=self.cutter.cut_samples())]
            self.answer_s = self.cutter.answer_s or self.answer_s
            self.state = _decide_cut(self.state, self.shares, evidence, self.answer_s)
            self.chance = math.prod(
                _chance(share, _samples(evidence, slo), self.answer_s) for slo, share in enumerate(self.shares)
            )
        if self.state == "open":
            self.state = state
        return self.state

    def fail(self, unheld: Unheld) -> None:
        """Fail a level whose answers are refused or cut short, whatever their latencies."""
        self.state, self.chance, self.unheld = "fail", 0.0, unheld

    def result(self, cells: list[str]) -> MeasuredProbe:
        """The result of the ended probe. `cells`: of the run."""
        counts = [block.counts for block in self.blocks]
        measured = self.steady_blocks or self.blocks
        measured_s = sum(block.seconds for block in measured)
        return MeasuredProbe(
            cells=cells,
            level=self.level,
            purpose=self.purpose,
            state=self.state,
            blocks=len(self.blocks),
            answers=sum(block.answers for block in self.blocks),
            seconds=self.seconds,
            counts=[
                (sum(each[slo][0] for each in counts), sum(each[slo][1] for each in counts))
                for slo in range(len(self.slos))
            ],
            missed=self.missed,
            queued=self.queued,
            answer_s=self.cutter.answer_s,
            unheld=self.unheld,
            tok_s=sum(block.output_tokens for block in measured) / measured_s if measured_s else None,
        )


def are_missed(rows: Rows, slos: Sequence[CapacitySlo]) -> Bools:
    """Whether each request failed, or missed one of the SLOs that count for it."""
    missed = rows.error.known & ~rows.error.is_in(*CUT)
    for slo in slos:
        of_load = [text for text in rows.load.texts if text is not None and load_of_part(text) == slo.load]
        counts = rows.load.is_in(*of_load) if slo.load is not None else np.ones(len(rows), dtype=np.bool_)
        missed |= counts & (meets_slos(rows, slo.bounds) == MISSED)
    return missed


def block_limit(shares: Sequence[float]) -> int:
    """The largest number of blocks of a probe with these shares."""
    return round(MAX_BLOCKS * max(1.0, (1 - _SHARE) / (1 - max(shares))))


def decide_slos(probe: Probe) -> ProbeState:
    """Decide whether the level meets all SLOs, with a probability of ERROR at most of a wrong `pass` or `fail` each."""
    number, limit, hope = len(probe.blocks), block_limit(probe.shares), round(HOPE * block_limit(probe.shares))
    fail_looks, pass_looks = _fail_looks(limit), _pass_looks(probe.shares)
    if number not in {*pass_looks, *fail_looks, hope}:
        return "open"
    rules = _rules(probe.shares, probe.blocks, probe.answer_s)
    if number in pass_looks and _all_pass(rules):
        return "pass"
    if number in fail_looks and _one_fails(rules, limit):
        return "fail"
    times = 1 + PACE * (limit - number) / number
    hopeless = number >= hope and not _all_pass(rules, times) and not _one_fails(rules, limit, times)
    return "unresolved" if number >= limit or hopeless else "open"


def _decide_cut(
    state: ProbeState, shares: Sequence[float], blocks: Sequence[ProbeBlock], answer_s: float | None
) -> ProbeState:
    """Decide again with the requests that the end of the load cut: those older than a bound have missed it.

    They can only take a pass back, or make an undecided probe fail.
    """
    rules = _rules(shares, blocks, answer_s)
    if _one_fails(rules, block_limit(shares)):
        return "fail"
    return "unresolved" if state == "pass" and not _all_pass(rules) else state


def blocks_needed(shares: Sequence[float], blocks: int) -> int:
    """The number of blocks at which an open probe with so many blocks is examined next."""
    looks = _fail_looks(block_limit(shares)) | _pass_looks(shares)
    return min((look for look in looks if look > blocks), default=blocks)


def _pass_looks(shares: Sequence[float]) -> set[int]:
    limit, allowed = block_limit(shares), 1 - max(shares)
    loss = max(MAX_LOSS, min(1.0, 4 * allowed))  # lower shares allow incidents of a third of a block
    first = math.ceil(math.log(ERROR / _PASS_LOOKS) / math.log1p(-allowed / loss))
    first = min(max(first, MIN_BLOCKS), limit)
    return {first, (first + limit) // 2, limit}


def _fail_looks(limit: int) -> set[int]:
    return {max(MIN_BLOCKS, round(look * limit)) for look in _FAIL_LOOKS}


# The decision about one SLO at a one-sided level, as if there were so many times as many requests like those measured.
_Rule = Callable[[float, float], Decision]


def _all_pass(rules: Sequence[_Rule], times: float = 1.0) -> bool:
    return all(rule(ERROR / _PASS_LOOKS, times) == "pass" for rule in rules)


def _one_fails(rules: Sequence[_Rule], limit: int, times: float = 1.0) -> bool:
    return any(rule(ERROR / len(_fail_looks(limit)) / len(rules), times) == "fail" for rule in rules)


def _samples(blocks: Sequence[ProbeBlock], slo: int) -> list[LatencySample]:
    return [block.samples[slo] for block in blocks if len(block.samples[slo].state)]


def _rules(shares: Sequence[float], blocks: Sequence[ProbeBlock], answer_s: float | None) -> list[_Rule]:
    return [_rule(share, _samples(blocks, slo), answer_s) for slo, share in enumerate(shares)]


def _rule(share: float, samples: Sequence[LatencySample], answer_s: float | None) -> _Rule:
    """The rule of one SLO, that at least `share` of all requests must meet. `samples`: of each block."""
    if not samples:
        return lambda alpha, times: "inconclusive"
    counts, effects = _count(samples), _effects(samples, answer_s)

    def decision(alpha: float, times: float) -> Decision:
        met, known, unknown = (round(times * count) for count in counts)
        effect = max(one.effect for one in effects)
        return decide(met, unknown, known + unknown, share, effect, 2 * alpha)

    return decision


def _count(samples: Sequence[LatencySample]) -> tuple[int, int, int]:
    """The numbers of requests that met the SLO, of which it is known whether they did, and of which it is not."""
    counts = [count_met(sample) for sample in samples]
    known = sum(count[1] for count in counts)
    return sum(count[0] for count in counts), known, sum(len(sample.state) for sample in samples) - known


def _effects(samples: Sequence[LatencySample], answer_s: float | None) -> list[DesignEffect]:
    """The design effects by the ranks of the latency, and by the misses of the blocks."""
    columns = [np.concatenate(parts) for parts in zip(*samples, strict=True)]
    effects = [design_effect([LatencySample(*columns)], answer_s)]
    met, known = np.array([count_met(sample) for sample in samples]).T
    share = met.sum() / max(1, known.sum())
    if len(met) > 1 and 0 < share < 1:
        squares = float(((met - share * known) ** 2).sum()) * len(met) / (len(met) - 1)
        effect = squares / float(known.sum() * share * (1 - share))
        effects += [DesignEffect(effect, len(met))] if effect > 1 else []
    return effects


def _chance(share: float, samples: Sequence[LatencySample], answer_s: float | None) -> float:
    """The probability that the attainment is at least the share, by the effective requests (Jeffreys' prior)."""
    if not samples:
        return 0.5
    from scipy.special import betainc

    met, known, _ = _count(samples)
    effect = max(one.effect for one in _effects(samples, answer_s))
    return 1 - float(betainc(met / effect + 0.5, (known - met) / effect + 0.5, share))
