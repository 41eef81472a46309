"""The knee of throughput over concurrency, found on 200 servers of the embedded engine in virtual time."""

import math

import msgspec
import numpy as np
import pytest

from harness.capacity.knee import GRID_STEP, KneeAnswer
from tests.knee_servers import SERVERS, Truth, knee_server, searched, truth, truths
from tests.nightly import NIGHTLY


class KneeTrial(msgspec.Struct, frozen=True):
    """One search of a server whose truth is known."""

    server: int
    kind: str
    truth: Truth
    answer: KneeAnswer
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


def tried(numbers: range) -> list[KneeTrial]:
    known, found = truths(), []
    for number in numbers:
        server = knee_server(number)
        answer, seconds = searched(server, number)
        found.append(KneeTrial(number, server.kind, known[number], answer, seconds))
    return found


def test_simulated_servers() -> None:
    trials = tried(range(0, 20, 3))
    assert sum(trial.within_a_step for trial in trials) >= 6
    assert sum(trial.covered for trial in trials) >= 5
    assert all(trial.answer.kind != "knee" for trial in trials if trial.truth.level is None)
    assert sum(trial.seconds for trial in trials) <= 0.5 * sum(trial.truth.grid_s for trial in trials)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
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
    assert np.mean([trial.answer.drifted for trial in trials]) <= 0.05


@pytest.mark.parametrize("number", [12] if not NIGHTLY else range(0, SERVERS, 10))
def test_the_stored_truth_is_what_is_measured(number: int) -> None:
    measured, stored = truth(knee_server(number)), truths()[number]
    assert measured.level == stored.level, "python -m tests.knee_servers writes the truth of a changed engine"
    assert measured.last_share == pytest.approx(stored.last_share, rel=1e-3)
    assert measured.grid_s == pytest.approx(stored.grid_s, rel=1e-3)
