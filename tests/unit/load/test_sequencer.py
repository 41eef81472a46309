"""Parts of the sequence: together they are the whole, each request once, and what belongs together stays together."""

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.load.load_process import quota_of
from harness.load.sequencer import Quota, Sequencer, Shard, Work
from harness.numbers.schedule import WarmupResult, summarize_warmup
from harness.numbers.summarize import read_summary
from harness.records.records import ProcessMark
from harness.records.run_data import cell_data
from harness.scenario import Arrivals, Load, Trace, Warmup
from harness.scenario.plan import Schedule, Steadiness, means_agree
from tests.support.command import harness, only_run
from tests.support.load_runs import driven, ends_of, make_job
from tests.support.made_runs import request
from tests.support.scenario_texts import GOOD, problems_of, write
from tests.support.simulated import spawned
from tests.support.wording import Wording


def test_all_parts_are_the_whole_sequence_each_request_once() -> None:
    for whole, of, block in itertools.product([0, 1, 7, 12, 97], [1, 2, 3, 8], [1, 4, 5]):
        parts = [Shard(number, of, block) for number in range(of)]
        sent = [[part.index_at(place) for place in range(part.count_of(whole))] for part in parts]
        assert sorted(itertools.chain(*sent)) == list(range(whole))
        for number, indices in enumerate(sent):
            assert indices == sorted(indices)
            assert {index // block % of for index in indices} <= {number}


def taken(sequencer: Sequencer, maximum: int) -> list[list[Work]]:
    return list(iter(lambda: sequencer.take(maximum), []))


def test_two_machines_send_the_sequence_of_one(tmp_path: Path) -> None:
    plan = Quota(requests=26, warmup_requests=8)
    alone = taken(Sequencer(str(tmp_path / "alone"), plan), 4)
    machines = [
        taken(Sequencer(str(tmp_path / f"machine{k}"), plan._replace(shard=Shard(k, 2, 4))), 4) for k in range(2)
    ]
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
        sequencer = Sequencer(str(tmp_path / f"machine{k}"), Quota(requests=20, schedule=schedule, shard=Shard(k, 3)))
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
        plan = Quota(requests=8, warmup_requests=warmup, schedule=even, warmup_schedule=even, shard=Shard(k, 2))
        parts.append(Sequencer(str(tmp_path / f"machine{k}"), plan))
        parts[k].hold_warmup()
    for _ in range(warmup):  # one of them is ahead of the other
        assert [one.phase for one in parts[1].take()] == ["warmup"]
    assert [one.phase for one in parts[0].take()] == ["warmup"] * bool(warmup)
    begin_s = time.monotonic() + 0.3
    measured, before = list[float](), list[float]()
    for sequencer in parts:
        sequencer.begin_s, sequencer.released_stage = begin_s, 0
        while taken := sequencer.take():
            (measured if taken[0].phase == "measured" else before).append(taken[0].due_s or 0.0)
    assert sorted(measured) == pytest.approx([begin_s + number / 10 for number in range(8)])
    assert all(due_s < begin_s for due_s in before)
    assert bool(before) == bool(warmup)  # which goes on until then


def test_the_loads_of_a_mix_have_one_measured_time(tmp_path: Path, clock: list[float]) -> None:
    """It starts when the last of them has had its warm-up; each has its own sequence and users."""
    quotas = [Quota(duration_s=8.0, warmup_requests=number) for number in (1, 3)]
    one, other = (Sequencer(str(tmp_path / "t"), *quotas) for _ in range(2))  # of two processes
    assert [one.take(1, load)[0] for load in (0, 0, 1, 1)] == [
        Work("warmup", -1), Work("warmup", -2), Work("warmup", -1, load_number=1), Work("warmup", -2, load_number=1),
    ]  # fmt: skip
    assert not one.is_warmed_up()
    assert other.take(1, 1) == [Work("warmup", -3, load_number=1)]
    assert one.is_warmed_up()
    clock[0] += 1.0
    assert one.take(1, 0) == [Work("measured", 0)]
    clock[0] += 3.0
    assert other.take(2, 1) == [Work("measured", 0, load_number=1), Work("measured", 1, load_number=1)]
    assert (one.left_s(), other.left_s()) == (5.0, 5.0)
    assert [other.add_user(load) for load in (0, 1, 1)] == [0, 0, 1]
    clock[0] += 5.0
    assert one.take(1, 0) == one.take(1, 1) == []
    assert not one.is_finished()
    one.settle(3)
    other.settle(5, work=Work("measured", 0, load_number=1))
    assert one.is_finished()


@pytest.mark.parametrize("duration_s", [None, 5.0])
def test_the_warm_up_lasts_until_the_cache_is_filled(
    tmp_path: Path, clock: list[float], duration_s: float | None
) -> None:
    """What fills the cache is in addition to the planned warm-up, and is never measured."""
    quota = Quota(requests=None if duration_s else 9, duration_s=duration_s, warmup_requests=1)
    one, other = (Sequencer(str(tmp_path / "t"), quota) for _ in range(2))  # of two processes
    (fill,) = one.take(fills_cache=True)
    assert (fill.phase, fill.fills_cache) == ("warmup", True)
    assert [other.take()[0].phase for _ in range(3)] == ["warmup"] * 3
    one.settle(work=fill)
    assert [other.take()[0].phase for _ in range(2)] == ["measured"] * 2
    (late,) = one.take(fills_cache=True)
    assert (late.phase, one.when_sent(late)) == ("warmup", late)
    assert other.take()[0].phase == "measured", "the measurement goes on"
    one.settle(work=late)
    clock[0] += 5.0
    assert one.take(fills_cache=True) == [] if duration_s else len(one.take(fills_cache=True)) == 1


def test_users_of_all_machines_have_numbers_of_their_own(tmp_path: Path) -> None:
    numbers = []
    for k in range(2):
        sequencer = Sequencer(str(tmp_path / f"machine{k}"), Quota(shard=Shard(k, 2)))
        numbers += [sequencer.add_user() for _ in range(3)]
    assert sorted(numbers) == list(range(6))


# The warm-up that goes on until the server is steady: the rule by simulation, the sequencer, and whole runs.


RULE = Steadiness(wave=8, within=0.05, max_s=600.0)
MAX_REQUESTS = 1600
TIMES = 200  # simulated warm-ups of each kind

Server = Callable[[int], float]  # how much slower than at its best it answers request number i


def found_after(server: Server, draw: random.Random) -> int | None:
    """Requests until it is taken for steady; None: not within MAX_REQUESTS."""
    answers: list[tuple[float, float]] = []
    for number in range(MAX_REQUESTS):
        slower = server(number)
        answers.append((0.3 * slower * draw.gauss(1, 0.1), 0.02 * slower))
        if RULE.is_check_due(len(answers)) and RULE.is_steady(answers):
            return len(answers)
    return None


def all_found(make: Callable[[random.Random], Server], times: int = TIMES) -> list[int | None]:
    draw = random.Random(1)
    return sorted((found_after(make(draw), draw) for _ in range(times)), key=lambda found: found or math.inf)


@pytest.mark.parametrize(("width", "at_once", "p95"), [(0.05, 184, 80), (0.2, 181, 80), (1.0, 126, 128)])
def test_a_steady_server_is_found_steady_whatever_its_jitter(width: float, at_once: int, p95: int) -> None:
    found = all_found(lambda draw: lambda _: draw.lognormvariate(0, width))
    assert None not in found
    assert (found.count(48), found[int(0.95 * TIMES)]) == (at_once, p95)


def test_a_server_that_gets_slower_and_slower_is_never_steady() -> None:
    found = all_found(lambda draw: lambda number: draw.gauss(1, 0.05) * (1 + 0.01 * number), times=40)
    assert found == [None] * 40


def test_the_warm_up_waits_for_a_server_that_slowly_gets_faster() -> None:
    found = all_found(lambda draw: lambda number: draw.gauss(1, 0.05) * (1 + 2 * math.exp(-number / 100)))
    assert None not in found
    left = [2 * math.exp(-(number or 0) / 100) for number in found]
    assert sum(part < 0.05 for part in left) >= 0.9 * TIMES


@pytest.mark.parametrize(("cold", "after"), [(16, 64), (40, 96)])
def test_the_warm_up_ends_three_windows_after_the_last_cold_answer(cold: int, after: int) -> None:
    found = all_found(lambda draw: lambda number: draw.gauss(1, 0.05) * (5 if number < cold else 1))
    assert found[0] == found[TIMES // 2] == after


def test_windows_are_whole_waves_and_grow_with_the_warm_up() -> None:
    assert [Steadiness(wave, 0.05, 1.0).step for wave in (1, 5, 8, 16, 25, 60)] == [16, 20, 16, 16, 25, 60]
    assert [RULE.window(seen) for seen in (48, 96, 191, 192, 480)] == [16, 16, 16, 32, 80]
    assert [seen for seen in range(100) if RULE.is_check_due(seen)] == [48, 64, 80, 96]


def test_unknown_values_are_ignored() -> None:
    whole = [(math.nan, 1.0 + 0.001 * (number % 3)) for number in range(48)]
    assert RULE.is_steady(whole)
    assert means_agree([[], [], []], 0.05)
    assert not means_agree([[1.0, 1.0], [], [1.0, 1.0]], 0.05)
    assert means_agree([[1.0, 1.0], [1.05, 1.05]], 0.05 + 1e-9)
    assert not means_agree([[1.0, 1.0], [1.06, 1.06]], 0.05)


def steady_plan(**changes: Any) -> Quota:
    return Quota(requests=4, steady=Steadiness(1, 0.05, 600.0))._replace(**changes)


def answer(sequencer: Sequencer, per_token_s: float = 0.01) -> str:
    """One request; whether it was warm-up."""
    (slot,) = sequencer.take()
    sequencer.settle(sample=(10**9, 0.1, per_token_s) if slot.phase == "warmup" else None)
    return slot.phase


def test_the_phase_changes_after_the_deciding_answer(tmp_path: Path) -> None:
    both = [Sequencer(str(tmp_path / "t"), steady_plan()) for _ in range(2)]  # of two processes
    phases = [answer(both[number % 2], 0.1 if number < 5 else 0.01) for number in range(64)]
    assert phases == ["warmup"] * 64
    assert [sequencer.steady() for sequencer in both] == [True, True]
    line, _, rest = (tmp_path / "t").read_bytes().partition(b"\n")  # what follows the line is no part of it
    assert (json.loads(line)[0][0][9], len(rest)) == (64, 64 * 24)
    assert [answer(both[0]) for _ in range(4)] == ["measured"] * 4
    assert both[1].take() == []
    assert both[1].is_finished()


def test_failed_requests_do_not_count_and_max_requests_ends_the_warm_up(tmp_path: Path) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), steady_plan(steady=Steadiness(1, 0.05, 600.0, max_requests=100)))
    for _ in range(100):
        assert sequencer.take()[0].phase == "warmup"
        sequencer.settle()
    assert sequencer.is_warmed_up()
    assert sequencer.steady() is None  # no more were asked for yet
    assert answer(sequencer) == "measured"
    assert sequencer.steady() is False


def test_max_s_counts_from_the_end_of_the_ramp(tmp_path: Path) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), steady_plan(ramp_s=0.2, steady=Steadiness(1, 0.05, 0.2)))
    sequencer.take()
    assert not sequencer.is_warmed_up()
    for _ in range(50):
        sequencer.settle(sample=(0.0, 0.1, 0.01))  # sent before all users were there
    assert sequencer.steady() is None
    assert json.loads((tmp_path / "t").read_bytes().partition(b"\n")[0])[0][0][9] == 0


def test_each_machine_has_its_part_of_the_wave(tmp_path: Path) -> None:
    load = Load(user="batch", users=10, batch_size=8, requests=100)
    job = make_job(tmp_path, load, Warmup(until="steady", within=0.1, max_requests=500))
    assert quota_of(job).steady == Steadiness(80, 0.1, 600.0, 500)
    parts = quota_of(msgspec.structs.replace(job, machine=1, machines=2))
    assert parts.steady == Steadiness(40, 0.1, 600.0, 500)
    assert parts.shard == Shard(1, 2, 8)


def test_a_trace_is_warmed_up_at_its_mean_rate(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = "\n".join(f"{number * 2},ChatGPT,10,10,20,Conversation log" for number in range(11))
    trace.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}\n")
    load = Load(user="batch", users=10, requests=11, trace=Trace(file="t.csv"))
    job = make_job(tmp_path, load, Warmup(until="steady"), trace_file=str(trace))
    schedule = quota_of(job).warmup_schedule
    assert schedule is not None
    assert 1500 < (schedule.at(1000) or 0.0) < 2200  # 0.55 a second


@pytest.fixture(scope="module")
def cold() -> Iterator[str]:
    """An engine that needs 0.2 s more for the first two steps of each shape."""
    # Steps of 20 ms: without them the times of a busy machine's processes would be all that is measured.
    times = ("--step-base-s", "0.02", "--compile-s", "0.2", "--compile-steps", "2", "--jitter", "0.05")
    with spawned("--model", "m", "--preset", "instant", *times) as found:
        yield found.url


def test_a_cold_server_is_measured_when_it_is_steady(tmp_path: Path, cold: str) -> None:
    load = Load(user="batch", users=4, processes=2, in_flight=2, requests=40, output_tokens=5)
    records = driven(tmp_path, cold, load, Warmup(until="steady", within=0.5))
    warm = [record for record in records if record.phase == "warmup"]
    measured = [record for record in records if record.phase == "measured"]
    assert sorted(record.index for record in measured) == list(range(40))
    assert sorted(record.index for record in warm) == list(range(-len(warm), 0))
    assert len(warm) >= 48
    assert max(record.ended_s for record in warm) > 0.2
    begun = min(record.sent_s for record in measured)
    ended = sorted((one.sent_s + one.ended_s, one.ended_s > 0.25) for one in warm)
    before = [slow for at, slow in ended if at < begun]
    # Which requests meet new shapes depends on the batches that the machine's load makes: most of the first do.
    assert sum(before[:16]) > sum(before[-16:])
    assert len(ended) - len(before) >= 4  # undrained: others were in flight when the first measured one was sent
    assert [mark.steady for mark in ends_of(tmp_path, 2)] == [True, True]


SCENARIO = """
version: 1
question: q
model: m
servers: {a: {template: simulated, container: false, variables: {preset: instant}}}
loads: {x: {user: batch, in_flight: 4, requests: 30, output_tokens: 5}}
repeats: 1
"""


def test_a_run_reports_its_warm_up_and_whether_it_was_steady_in_time(tmp_path: Path) -> None:
    for warmup, steady, code in (
        ("{until: steady}", True, "steady"), ("{until: steady, max_requests: 20}", False, "not_steady"),
    ):  # fmt: skip
        folder = tmp_path / str(steady)
        folder.mkdir()
        done = harness("run", str(write(folder, f"{SCENARIO}warmup: {warmup}\n")), "--runs", ".", cwd=folder)
        assert done.code == 0, done.out + done.err
        summary = read_summary(only_run(folder))
        (cell,) = summary.cells
        assert cell.warmup is not None and cell.warmup.steady is steady
        assert cell.warmup.requests >= 48 if steady else cell.warmup.requests == 20
        assert (summary.valid, cell.numbers.sent) == (True, 30)
        assert code in [note.code for note in (*cell.notes, *summary.notes)]


def test_the_result_of_a_warm_up() -> None:
    marks = [
        ProcessMark(event="end", process=process, cell="c", wall_s=0.0, monotonic_s=0.0, steady=steady)
        for process, steady in ((1, True), (2, False))
    ]
    assert summarize_warmup(cell_data([]), marks) is None
    sent = ((1000.0, "warmup"), (1002.0, "warmup"), (1003.5, "measured"))
    counted = cell_data([request(sent_s=at, phase=phase) for at, phase in sent])
    assert summarize_warmup(counted, []) == WarmupResult(requests=2, seconds=3.5)
    assert summarize_warmup(counted, marks[:1]) == WarmupResult(requests=2, seconds=3.5, steady=True)
    assert summarize_warmup(counted, marks) == WarmupResult(requests=2, seconds=3.5, steady=False)


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ("{until: steady, requests: 4}", "$.warmup (line 9): "),
        ("{requests: 4, within: 0.1}", "$.warmup.within (line 9): "),
        ("{until: warm}", "$.warmup.until (line 9): "),
    ],
)
def test_invalid_warm_ups(tmp_path: Path, warmup: str, expected: str, wording: Wording) -> None:
    (problem,) = problems_of(tmp_path, f"{GOOD}warmup: {warmup}\n")
    assert problem.startswith(expected)
    wording(problem)
