"""Arrivals of an open loop: exact where they are exact, by their law where they are random."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.sequencer import Quota, Sequencer, Work
from harness.scenario import Arrivals, Load, Wave
from harness.scenario.behaviour import Agent, Pause
from harness.scenario.plan import Schedule, arrival_times, steady_arrivals
from tests.support.load_runs import driven
from tests.support.simulated import spawned


def first(number: int, seed: int = 1, **given: object) -> list[float]:
    return list(itertools.islice(arrival_times(Arrivals(**given), seed), number))  # type: ignore[arg-type]


def test_an_even_rate_has_constant_intervals() -> None:
    assert first(5, rate=4.0, spacing="even") == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_steps_and_ramps_follow_their_points() -> None:
    steps = first(100, points=[[0, 1], [10, 4], [20, 0]], spacing="even")
    assert steps[:10] == [float(second) for second in range(10)]
    assert steps[10:13] == [10.0, 10.25, 10.5]
    assert len(steps) == 50  # 10 * 1 + 10 * 4, then nobody comes any more
    ramp = first(60, points=[[0, 0], [10, 10]], between="ramps", spacing="even")
    # The expected number after t seconds is t^2 / 2, and 10 a second after the ramp.
    assert ramp[:51] == pytest.approx([math.sqrt(2 * number) for number in range(51)])
    assert ramp[51:53] == pytest.approx([10.1, 10.2])


def test_no_arrival_while_the_rate_is_0() -> None:
    pause = first(30, points=[[0, 1], [10, 0], [20, 1]], spacing="even")
    assert pause[:10] == [float(second) for second in range(10)]
    assert pause[10:12] == [20.0, 21.0]


def test_a_wave_has_its_mean_and_its_amplitude() -> None:
    day = first(1000, wave=Wave(min=1, max=9, period_s=100), spacing="even")
    assert sum(at < 100 for at in day) == 500
    assert sum(at < 200 for at in day) == 1000
    assert sum(40 <= at < 60 for at in day) == pytest.approx(
        20 * (5 + 4 * math.sin(math.pi / 5) / (math.pi / 5)), abs=1
    )
    assert sum(at < 20 for at in day) == 40  # 5 * 20 - 400 / (2 pi) * sin(0.4 pi) = 39.5, and the one at 0


@pytest.mark.parametrize(
    ("spacing", "burstiness", "cv"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4, 0.5)]
)
def test_random_gaps_have_their_mean_and_spread(spacing: str, burstiness: float, cv: float) -> None:
    found = first(40_000, rate=5.0, spacing=spacing, burstiness=burstiness)
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_the_schedule_is_a_function_of_the_seed() -> None:
    assert first(50, seed=7, rate=3.0) == first(50, seed=7, rate=3.0) != first(50, seed=8, rate=3.0)
    schedule = Schedule(Arrivals(rate=3.0), 7)
    assert [schedule.at(9), schedule.at(3)] == [first(10, seed=7, rate=3.0)[9], first(10, seed=7, rate=3.0)[3]]
    assert Schedule(Arrivals(points=[[0, 1], [2, 0]], spacing="even"), 7).at(2) is None


@pytest.mark.parametrize(
    ("course", "rate"),
    [
        ({"rate": 3.0}, 3.0),
        ({"points": [[0, 2], [9, 5]]}, 2.0),
        ({"points": [[0, 0], [9, 5]]}, 5.0),
        ({"wave": Wave(min=1, max=9, period_s=9)}, 1.0),
        ({"wave": Wave(min=0, max=9, period_s=9)}, 4.5),
    ],
)
def test_a_warm_up_has_the_rate_of_the_start(course: dict[str, Any], rate: float) -> None:
    found = steady_arrivals(Arrivals(spacing="gamma", burstiness=0.5, **course))
    assert found == Arrivals(rate=rate, spacing="gamma", burstiness=0.5)


def test_a_warm_up_has_the_arrivals_of_the_load(tmp_path: Path, clock: list[float]) -> None:
    """Ten users would send ten at once; 4 a second are asked for, and the measured time begins with the last."""
    even = Schedule(Arrivals(rate=4.0, spacing="even"), 1)
    plan = Quota(requests=2, warmup_requests=4, schedule=even, warmup_schedule=even)
    sequencer = Sequencer(str(tmp_path / "t"), plan)
    begin_s = clock[0]
    assert [slot.index for _ in range(2) for slot in sequencer.take()] == [-1, -2]
    while clock[0] < begin_s + 0.2:
        assert all(slot.index == -3 for slot in sequencer.take())
        clock[0] += 1 / 64
    found: list[Work] = []
    while len(found) < 3 and clock[0] < begin_s + 5:
        found += sequencer.take()
        clock[0] += 1 / 64
    assert [slot.index for slot in found[-3:]] == [-4, 0, 1]
    due = [slot.due_s or 0.0 for slot in found[-3:]]
    assert due[0] == pytest.approx(begin_s + 0.75)
    assert due[1] >= due[0] and due[2] == pytest.approx(due[1] + 0.25)


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 100)), min_size=1, max_size=6),
    st.sampled_from(["steps", "ramps"]),
    st.sampled_from(["poisson", "even", "gamma"]),
)
def test_arrivals_are_in_order(course: list[tuple[float, float]], between: str, spacing: str) -> None:
    ends = itertools.accumulate((length for length, _ in course), initial=0.0)
    points = [[at, rate] for at, (_, rate) in zip(ends, course, strict=False)]
    found = first(200, points=points, between=between, spacing=spacing, burstiness=0.5 if spacing == "gamma" else 1.0)
    assert all(earlier <= later for earlier, later in itertools.pairwise(found))
    assert all(at >= 0 for at in found)


def test_arrivals_are_on_time_when_the_server_is_too_slow(tmp_path: Path) -> None:
    """20 a second for a server that does 10: latency from the schedule grows, and nothing is left out."""
    load = Load(user="batch", users=60, arrivals=Arrivals(rate=20.0, spacing="even"), requests=40, output_tokens=5)
    flags = ("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.1", "--max-num-seqs", "5")
    with spawned(*flags) as server:
        records = driven(tmp_path, server.url, load)
    assert [record.index for record in records] == list(range(40))
    due = [record.sent_s + (record.scheduled_s or 0.0) for record in records]
    assert [at - due[0] for at in due] == pytest.approx([number / 20 for number in range(40)], abs=1e-6)
    lags = [-(record.scheduled_s or 0.0) for record in records]
    assert all(lag >= 0 for lag in lags)
    ttft_s = [record.chunks_s[0] for record in records]
    assert statistics.median(lags) < statistics.median(ttft_s) / 2  # it is more where users wait for the server
    assert statistics.median(ttft_s[-10:]) > 2 * statistics.median(ttft_s[:5])


def test_a_conversation_arrives_once_and_its_later_turns_follow(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=10, turns=2, arrivals=Arrivals(rate=10.0), duration_s=1.5, output_tokens=5)
    records = driven(tmp_path, engine, load)
    expected = sum(at < 1.5 for at in first(100, seed=1, rate=10.0))
    starts = [record for record in records if record.turn == 1]
    assert {record.scheduled_s is None for record in starts} == {False}
    assert {record.scheduled_s for record in records if record.turn == 2} == {None}
    assert len(starts) == expected


OWN = """
from locust import task
from harness.load.user import LLMUser

class Mixed(LLMUser):
    @task
    def work(self) -> None:
        first, *others = self.take(3)
        if first.index % 2:
            self.ask_all([first, *others])
        else:
            self.ask(first)
            self.ask_all(others)
"""


def test_only_the_first_request_of_a_task_has_a_scheduled_time(tmp_path: Path, engine: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    agent = Agent(steps=2, sub_agents=1, tool_time=Pause(mean_s=0.01))
    tasks = Load(user="agent", users=4, agent=agent, arrivals=Arrivals(rate=20.0), requests=8, output_tokens=2)
    own = Load(user="own.py", users=4, arrivals=Arrivals(rate=20.0), requests=6, output_tokens=2)
    for load, path, timely in ((tasks, None, [0, 4]), (own, tmp_path / "own.py", [0, 3, 4, 5])):
        records = driven(tmp_path / load.user[:3], engine, load, locustfile=path)
        assert len(records) == load.requests
        assert [one.index for one in records if one.scheduled_s is not None] == timely
