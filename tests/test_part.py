"""Parts of the sequence: together they are the whole, each request once, and what belongs together stays together."""

import itertools
import time
from pathlib import Path

import pytest

from harness.load.sequencer import Part, Plan, Sequencer, Slot
from harness.scenario import Arrivals
from harness.scenario.plan import Schedule


def test_all_parts_are_the_whole_sequence_each_request_once() -> None:
    for whole, of, block in itertools.product([0, 1, 7, 12, 97], [1, 2, 3, 8], [1, 4, 5]):
        parts = [Part(number, of, block) for number in range(of)]
        sent = [[part.index_at(place) for place in range(part.count_of(whole))] for part in parts]
        assert sorted(itertools.chain(*sent)) == list(range(whole))
        for number, indices in enumerate(sent):
            assert indices == sorted(indices)
            assert {index // block % of for index in indices} <= {number}


def taken(sequencer: Sequencer, maximum: int) -> list[list[Slot]]:
    return list(iter(lambda: sequencer.take(maximum), []))


def test_two_machines_send_the_sequence_of_one(tmp_path: Path) -> None:
    plan = Plan(requests=26, warmup_requests=8)
    alone = taken(Sequencer(str(tmp_path / "alone"), plan), 4)
    machines = [taken(Sequencer(str(tmp_path / f"machine{k}"), plan._replace(part=Part(k, 2, 4))), 4) for k in range(2)]
    together = [*machines[0], *machines[1]]
    assert sorted(alone, key=str) == sorted(together, key=str)
    assert [[slot.index for slot in group] for group in machines[1]] == [
        [-5, -6, -7, -8], [4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23],
    ]  # fmt: skip
    assert [slot.index for slot in machines[0][-1]] == [24, 25]


def test_an_open_loop_is_one_schedule_for_all_machines(tmp_path: Path) -> None:
    schedule = Schedule(Arrivals(rate=50), 42)
    due: list[float] = []
    for k in range(3):
        sequencer = Sequencer(str(tmp_path / f"machine{k}"), Plan(requests=20, schedule=schedule, part=Part(k, 3)))
        groups = taken(sequencer, 1)
        first = groups[0][0].due_s
        assert first is not None
        due += [(slot.due_s or 0.0) - first + (schedule.at(k) or 0.0) for (slot,) in groups]
        assert [slot.index for (slot,) in groups] == list(range(k, 20, 3))
    assert sorted(due) == pytest.approx([schedule.at(number) for number in range(20)])


@pytest.mark.parametrize("warmup", [0, 2])
def test_an_open_loop_is_measured_from_the_same_moment_on_all_machines(tmp_path: Path, warmup: int) -> None:
    even = Schedule(Arrivals(rate=10, spacing="even"), 42)
    parts = []
    for k in range(2):
        plan = Plan(requests=8, warmup_requests=warmup, schedule=even, warmup_schedule=even, part=Part(k, 2))
        parts.append(Sequencer(str(tmp_path / f"machine{k}"), plan))
        parts[k].on_hold = True
    for _ in range(warmup):  # one of them is ahead of the other
        assert [one.phase for one in parts[1].take()] == ["warmup"]
    assert [one.phase for one in parts[0].take()] == ["warmup"] * bool(warmup)
    begin_s = time.monotonic() + 0.3
    measured, before = list[float](), list[float]()
    for sequencer in parts:
        sequencer.begin_s, sequencer.on_hold = begin_s, False
        while taken := sequencer.take():
            (measured if taken[0].phase == "measured" else before).append(taken[0].due_s or 0.0)
    assert sorted(measured) == pytest.approx([begin_s + number / 10 for number in range(8)])
    assert all(due_s < begin_s for due_s in before)
    assert bool(before) == bool(warmup)  # which goes on until then


def test_users_of_all_machines_have_numbers_of_their_own(tmp_path: Path) -> None:
    numbers = []
    for k in range(2):
        sequencer = Sequencer(str(tmp_path / f"machine{k}"), Plan(part=Part(k, 2)))
        numbers += [sequencer.add_user() for _ in range(3)]
    assert sorted(numbers) == list(range(6))


def test_the_warm_up_goes_on_until_all_machines_are_warm(tmp_path: Path) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), Plan(requests=4, warmup_requests=2, part=Part(0, 2)))
    sequencer.on_hold = True
    assert not sequencer.is_warmed_up()
    assert [sequencer.take()[0].phase for _ in range(3)] == ["warmup"] * 3
    assert sequencer.is_warmed_up()
    sequencer.on_hold = False
    assert sequencer.take() == [Slot("measured", 0)]
    without = Sequencer(str(tmp_path / "without"), Plan(requests=4))  # a warm-up: nothing is held
    without.on_hold = True
    assert without.is_warmed_up() and without.take() == [Slot("measured", 0)]
