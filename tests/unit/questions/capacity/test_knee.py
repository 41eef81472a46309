"""The knee of throughput over concurrency: the fit, the search on made curves and on simulated servers."""

import math
import random
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import numpy as np
import pytest

from harness.numbers.peak_curve import fit_unimodal
from harness.questions.capacity.blocks import ProbeBlock
from harness.questions.capacity.knee import (
    GRID_STEP,
    MAX_KNEE_BLOCKS,
    decide_throughput,
    estimate_throughput,
    knee_answer,
    make_knee_probe,
    next_knee_level,
)
from harness.questions.capacity.level import Probe
from harness.questions.capacity.page import knee_reason
from harness.questions.capacity.record import CapacityAnswer
from tests.support.knee_servers import SERVERS, Truth, knee_server, searched, truth, truths
from tests.support.wording import Wording


def run(
    curve: Callable[[int], float], max_level: int = 256, noise: float = 0.02, until: int | None = None
) -> list[Probe]:
    """A search with one block a second of a throughput that is `curve` with seeded noise; `until`: probes."""
    probes, dice = list[Probe](), random.Random(5)
    while (step := next_knee_level(probes, max_level)) is not None and (until is None or len(probes) < until):
        probe = make_knee_probe(*step, probes)
        while probe.state == "open":
            probe.add(block(curve(probe.level) * (1 + dice.gauss(0, noise))))
        probes.append(probe)
    return probes


def answer_of(probes: list[Probe], max_level: int = 256) -> CapacityAnswer:
    answer = knee_answer(probes, max_level)
    assert answer is not None
    return answer


def block(tokens: float) -> ProbeBlock:
    return ProbeBlock(seconds=1.0, output_tokens=tokens)


def probe_of(level: int, precision: float, best: float = 0.0) -> Probe:
    return Probe(level, decide=partial(decide_throughput, precision=precision, best=best), purpose="knee")


def corner(level: int) -> float:
    return 100.0 * min(level, 20)


def cliff(level: int) -> float:
    return 100.0 * level if level <= 20 else 600.0


def rising(level: int) -> float:
    return 100.0 * level / (1 + level / 1000)


def test_a_fit_that_rises_and_falls() -> None:
    y = np.array([1.0, 3.0, 2.0, 5.0, 4.0, 4.5, 1.0])
    assert fit_unimodal(y, np.ones(7)) == pytest.approx([1, 2.5, 2.5, 5, 4.25, 4.25, 1])


def test_batch_means_count_what_one_block_hands_to_the_next() -> None:
    dice = random.Random(1)
    high, low = 110.0, 90.0
    pairs = [value for _ in range(40) for value in [dice.choice([high, low])] * 5]
    dependent = estimate_throughput(list(map(block, pairs)))
    dice.shuffle(pairs)
    assert dependent.error > 1.4 * estimate_throughput(list(map(block, pairs))).error


def test_a_probe_drops_what_it_measured_while_the_server_still_settled() -> None:
    probe = probe_of(4, 0.03)
    dice = random.Random(2)
    for number in range(60):
        if probe.state == "open":
            probe.add(block((50 if number < 6 else 100) * (1 + dice.gauss(0, 0.01))))
    assert probe.state == "done" and probe.steady
    assert estimate_throughput(probe.steady_blocks).tok_s == pytest.approx(100, rel=0.02)
    assert probe.seconds > len(probe.steady_blocks)


def test_a_probe_ends_at_its_limit_or_clearly_below_the_peak() -> None:
    probe = probe_of(4, 0.001)
    for number in range(MAX_KNEE_BLOCKS):
        probe.add(block(100 + 5 * number))
    assert probe.state == "done" and not probe.steady
    for best, state in ((100.0, "open"), (1000.0, "done")):
        probe = probe_of(4, 0.03, best)
        for number in range(8):
            probe.add(block(100 + (20 if number % 2 else -20)))
        assert probe.state == state


def test_a_corner() -> None:
    answer = answer_of(run(corner))
    assert answer.kind == "knee" and answer.level is not None and answer.low is not None and answer.high is not None
    assert 16 <= answer.low <= answer.level <= answer.high <= 21
    assert answer.low <= 18 <= answer.high
    assert answer.hurts_from is None
    assert answer.peak_tok_s == pytest.approx(2000, rel=0.02)
    assert max(point.level for point in answer.points) < 256  # two rungs beyond were enough


def test_a_cliff_is_where_it_hurts() -> None:
    answer = answer_of(run(cliff))
    assert answer.kind == "knee" and answer.low is not None and answer.high is not None
    assert answer.low <= 18 <= answer.high
    assert answer.hurts_from is not None and 21 <= answer.hurts_from <= 25
    assert (answer.peak_level or 99) <= 20


@pytest.mark.parametrize("max_level", [4, 256])
def test_no_knee_in_range(max_level: int) -> None:
    answer = answer_of(run(rising, max_level), max_level)
    assert (answer.kind, answer.level, answer.low, answer.high, answer.hurts_from) == ("none", None, None, None, None)
    assert answer.peak_level == max_level


@pytest.mark.parametrize("max_level", [1, 2])
@pytest.mark.parametrize("curve", [rising, lambda level: 100.0])
def test_two_levels_show_no_knee(curve: Callable[[int], float], max_level: int) -> None:
    answer = answer_of(run(curve, max_level), max_level)
    assert (answer.kind, answer.level, answer.complete) == ("unclear", None, True)
    reason = knee_reason(answer, max_level)
    assert (reason.code, reason.values) == (
        "capacity_knee_levels",
        {"levels": max_level, "needed": 3, "complete": True},
    )
    unmeasured = CapacityAnswer(kind="unclear", level=None, low=None, high=None, complete=False)
    assert knee_reason(unmeasured, 4).values == {"levels": 0, "needed": 3, "complete": False}


def test_a_level_has_one_throughput(wording: Wording) -> None:
    """The probe's, the curve's, and that of the sentence, also where the server settled during the probe."""
    dice, probes = random.Random(2), list[Probe]()
    for level in (1, 2, 4):
        probe = make_knee_probe(level, 0.03, [])
        for number in range(60):
            probe.add(block((500 if level == 1 and number > 5 else 300 / level) * (1 + dice.gauss(0, 0.01))))
        probes.append(probe)
    assert probes[0].settled and (answer := answer_of(probes, 4)).peak_level == 1
    shown = [probe.result([]) for probe in probes]
    assert [probe.tok_s for probe in shown] == [point.tok_s for point in answer.points]
    reason = knee_reason(answer, 4, shown)
    assert reason.values["peak_tok_s"] == shown[0].tok_s
    wording(reason.text)


def test_one_user_is_enough() -> None:
    answer = answer_of(run(lambda level: 100.0))
    assert (answer.kind, answer.level, answer.low) == ("knee", 1, 1)
    assert answer.high is not None and answer.high <= 2  # one step of the grid


def test_a_search_that_was_stopped_early_leaves_the_knee_open() -> None:
    answer = answer_of(run(corner, until=4))
    assert (answer.kind, answer.level, answer.high) == ("unclear", None, None)
    assert answer.low is not None and answer.low >= 5


def dead(level: int) -> Probe:
    probe = probe_of(level, 0.03)
    probe.end("died")
    return probe


def test_a_level_at_which_the_server_failed_ends_the_ladder() -> None:
    probes = run(rising, until=5)
    assert next_knee_level(probes, 256) == (32, 0.03)
    probes.append(dead(32))
    assert next_knee_level(probes, 256) is None
    assert (answer_of(probes).kind, answer_of(probes).hurts_from) == ("unclear", 32)


def test_after_a_failure_the_measured_levels_are_narrowed_until_the_next_one() -> None:
    probes = [*run(lambda level: 100.0 * min(level, 6), until=5), dead(32)]
    step = next_knee_level(probes, 256)
    assert step is not None and step[0] < 16
    assert next_knee_level([*probes, dead(step[0])], 256) is None


def test_a_server_that_failed_at_once_has_no_answer() -> None:
    empty = make_knee_probe(1, 0.03, [])
    empty.end()
    assert next_knee_level([empty], 8) == (1, 0.03), "a probe that was stopped at once does not count"
    assert next_knee_level([empty, dead(1)], 8) is None
    assert knee_answer([empty, dead(1)], 8) is None


# On 200 servers of the embedded engine in virtual time.


class KneeTrial(msgspec.Struct, frozen=True):
    """One search of a server whose truth is known."""

    server: int
    kind: str
    truth: Truth
    answer: CapacityAnswer
    seconds: float

    @property
    def within_a_step(self) -> bool:
        true, level = self.truth.level, self.answer.level
        if true is None:
            return self.answer.kind == "none"
        return level is not None and (abs(level - true) <= 1 or abs(math.log(level / true)) <= math.log(GRID_STEP))

    @property
    def covered(self) -> bool:
        true, low, high = self.truth.level, self.answer.low, self.answer.high
        if true is None:
            return self.answer.kind != "knee"
        return low is not None and low <= true and (high is None or true <= high)


def tried(numbers: Iterable[int]) -> list[KneeTrial]:
    known, trials = truths(), []
    for number in numbers:
        server = knee_server(number)
        answer, seconds = searched(server, number)
        trials.append(KneeTrial(number, server.kind, known[number], answer, seconds))
    return trials


def test_simulated_servers() -> None:
    """One of each kind."""
    trials = tried((3, 6, 9, 12, 18))
    assert sum(trial.within_a_step for trial in trials) >= 4
    assert sum(trial.covered for trial in trials) >= 4
    assert all(trial.answer.kind != "knee" for trial in trials if trial.truth.level is None)
    assert sum(trial.seconds for trial in trials) <= 0.5 * sum(trial.truth.grid_s for trial in trials)


@pytest.mark.nightly
def test_proof_on_200_simulated_servers() -> None:
    trials = tried(range(SERVERS))
    with_knee = [trial for trial in trials if trial.truth.level is not None]
    without = [trial for trial in trials if trial.truth.level is None]
    assert len(without) >= 0.15 * SERVERS
    assert np.mean([trial.within_a_step for trial in trials]) >= 0.95
    assert 0.92 <= np.mean([trial.covered for trial in with_knee]) <= 0.98
    assert np.mean([trial.answer.kind == "knee" for trial in without]) <= 0.02
    assert np.mean([trial.seconds / trial.truth.grid_s for trial in trials]) <= 1 / 3
    assert all(trial.answer.hurts_from is not None for trial in trials if trial.kind in ("cliff", "falling"))
    assert not any(trial.answer.hurts_from for trial in trials if trial.kind not in ("cliff", "falling"))


@pytest.mark.nightly  # of data that is stored
@pytest.mark.parametrize("number", range(0, SERVERS, 10))
def test_the_stored_truth_is_what_is_measured(number: int) -> None:
    measured, stored = truth(knee_server(number)), truths()[number]
    assert measured.level == stored.level, "python -m tests.support.knee_servers writes the truth of a changed engine"
    assert measured.last_share == pytest.approx(stored.last_share, rel=1e-3)
    assert measured.grid_s == pytest.approx(stored.grid_s, rel=1e-3)
