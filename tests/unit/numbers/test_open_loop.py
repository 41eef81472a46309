"""Open loops: what is asked and what is achieved, what is never sent, and what is in flight at the end."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.base.measured import ScheduleKept
from harness.numbers import formulas
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.latencies import latency_sample
from harness.numbers.schedule import due_times_s, load_kind, planned_count, schedule_kept
from harness.numbers.summarize import read_summary
from harness.records.clock import Clock
from harness.records.manifest import read_run
from harness.records.run_data import CellContext, CellData, cell_data
from harness.report.results_table import schedule_table
from harness.scenario import Arrivals, Load, Trace
from harness.scenario.behaviour import Agent
from tests.support.command import Done, called, harness, only_run
from tests.support.made_runs import cells_in, request, value_of, write_lines
from tests.support.wording import Wording

EVEN = Arrivals(rate=10.0, spacing="even")


def counted(*dues_and_lags: tuple[float, float]) -> CellData:
    return cell_data([request(scheduled_s=-lag_s, sent_s=due_s + lag_s) for due_s, lag_s in dues_and_lags])


@pytest.mark.parametrize(
    ("load", "kind", "planned"),
    [
        (Load(user="batch", batch_size=4, requests=4), "bursts", None),
        (Load(user="batch", in_flight=4, requests=4), "closed loop", None),
        (Load(user="batch", requests=40, arrivals=EVEN), "open loop", 40),
        (Load(user="batch", batch_size=4, duration_s=2.05, arrivals=EVEN), "open loop", 84),
        (Load(user="chat", turns=3, requests=10, arrivals=EVEN), "open loop", 4),
        (Load(user="rag", duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="agent", agent=Agent(steps=3, sub_agents=1), requests=13, arrivals=EVEN), "open loop", 3),
        (Load(user="agent", agent=Agent(steps=3, sub_agents=1), duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="mine.py", requests=40, arrivals=EVEN), "open loop", None),
        (Load(user="chat", turns=3, arrivals=EVEN), "open loop", None),
        (Load(user="mine.py", requests=7, trace=Trace(file="t")), "trace", 7),
        # A course that ends before the time plans no more.
        (Load(user="batch", duration_s=60.0, arrivals=Arrivals(points=[[0, 1], [10, 0]], spacing="even")), "open loop",
         10),
    ],
)  # fmt: skip
def test_what_is_planned(load: Load, kind: str, planned: int | None) -> None:
    assert (load_kind(load), planned_count(load, 1)) == (kind, planned)


def test_asked_and_achieved() -> None:
    found = counted((100.0, 0.0), (101.0, 0.5), (102.0, 2.0))
    fixed = schedule_kept(found, Load(user="batch", requests=3, arrivals=EVEN), 1, 9.0)
    assert fixed == ScheduleKept(planned=3, sent=3, never_sent=0, asked_per_s=1.0, achieved_per_s=0.5)
    timed = schedule_kept(found, Load(user="batch", duration_s=0.5, arrivals=EVEN), 1, 0.5)
    assert timed == ScheduleKept(planned=5, sent=3, never_sent=2, asked_per_s=10.0, achieved_per_s=6.0)
    assert schedule_kept(found, Load(user="batch", requests=3), 1, 9.0) is None
    single = schedule_kept(counted((100.0, 0.0)), Load(user="batch", requests=1, arrivals=EVEN), 1, None)
    assert single == ScheduleKept(planned=1, sent=1, never_sent=0)


def test_from_schedule_and_from_send_part_by_the_lag() -> None:
    latencies = [partial(formulas.latency_s, latency=name) for name in ("ttft_sched", "e2e_sched")]
    later = [[value_of(one, made) for one in latencies] for made in (request(scheduled_s=-0.25), request(turn=2))]
    assert later == [[0.75, 1.75], [0.5, 1.5]]  # a later turn is due when it is sent
    failed = request(scheduled_s=-9.0, error="timeout", sent_s=110.0)
    rows = cell_data([request(scheduled_s=-0.25, sent_s=100.25), failed, request(turn=2)]).rows
    assert due_times_s(rows).tolist() == [100.0, 101.0]


def test_both_ways_are_about_the_same_requests(tmp_path: Path) -> None:
    """First turns are slow and punctual, later ones fast: from schedule must not look slower than from send."""
    records = [
        request(index=0, sent_s=1000.0, scheduled_s=0.0, turn=1, chunks_s=[2.0, 2.1]),
        request(index=1, sent_s=1005.0, turn=2, chunks_s=[0.1, 0.2]),
        request(index=2, sent_s=1006.0, turn=3, chunks_s=[0.1, 0.2]),
    ]
    write_lines(tmp_path / "requests.jsonl", records)
    for place in (CellContext(Clock([]), duration_s=10.0, first_due_s=0.0), CellContext(Clock([]))):
        (found,) = cells_in(tmp_path, {"r1-a-x": place}).values()
        open_loop = place.first_due_s is not None
        assert sorted(latency_sample(found, "ttft_sched").value_s) == ([0.1, 0.1, 2.0] if open_loop else [2.0])
        assert len(due_times_s(found.counted)) == 1


SCENARIO = """\
version: 1
question: What becomes of what is in flight?
model: tiny
servers: {a: {template: simulated, container: false, variables: {preset: instant, extra_args: [--step-base-s, "0.1"]}}}
loads:
  open: {user: batch, users: 40, EVEN, duration_s: 1.5, output_tokens: 10}
  cut: {user: batch, users: 40, drain_s: 0.2, EVEN, duration_s: 1.5, output_tokens: 10}
  few: {user: batch, users: 1, EVEN, duration_s: 1.5, output_tokens: 10}
  shut: {user: batch, requests: 1, output_tokens: 2}
repeats: 1
restart: false
warmup: {requests: 0}
checks: ['a/few: ttft_sched_mean <= 1s', 'a/few: e2e_sched_mean >= 1s', 'a/few: send_lag_mean <= 1ms']
""".replace("EVEN", "arrivals: {rate: 10, spacing: even}")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path, dict[str, Any]]:
    """A run of open loops, its directory and its rows by load.

    15 requests of about a second each are due within 1.5 s: the last ten end after it.
    """
    folder = tmp_path_factory.mktemp("open")
    (folder / "s.yaml").write_text(SCENARIO)
    done = harness("run", "s.yaml", "--runs", "runs", cwd=folder)
    assert (done.code, done.err) == (3, "")
    run = only_run(folder / "runs")
    return done, run, {row["load"]: row for row in json.loads((run / "summary.json").read_text())["rows"]}


def test_what_is_in_flight_at_the_end_counts(ran: tuple[Done, Path, dict[str, Any]]) -> None:
    done, _, rows = ran
    numbers = rows["open"]["pooled"]
    assert (numbers["sent"], numbers["succeeded"], numbers["unfinished"]) == (15, 15, 0)
    assert [numbers[name]["n"] for name in ("ttft", "e2e", "ttft_sched", "e2e_sched")] == [15] * 4
    assert numbers["e2e"]["min"] > 0.8
    assert numbers["requests_per_s"] * 1.5 < 10  # those that ended after the time are no part of the rate
    assert 0 < numbers["output_tok_s"] * 1.5 < 130  # nor their tokens that came after it
    assert numbers["window_s"] == 1.5
    assert numbers["schedule"]["asked_per_s"] == numbers["schedule"]["achieved_per_s"] == 10.0
    assert (numbers["schedule"]["planned"], numbers["schedule"]["never_sent"]) == (15, 0)
    assert [rows[name]["kind"] for name in ("open", "shut")] == ["open loop", "bursts"]
    assert "open loop, evenly, 10 a second" in " ".join(done.out.split())


def test_what_the_drain_cuts_is_counted_as_unfinished(ran: tuple[Done, Path, dict[str, Any]]) -> None:
    _, folder, rows = ran
    numbers = rows["cut"]["pooled"]
    assert numbers["sent"] == numbers["succeeded"] + numbers["unfinished"] == 15
    assert numbers["unfinished"] > 0
    assert numbers["e2e"]["n"] == numbers["e2e_sched"]["n"] == numbers["succeeded"]
    assert "unfinished" in [note.code for note in read_summary(folder).notes]


def test_too_few_users_make_a_row_invalid_and_say_what_to_do(
    tmp_path: Path, ran: tuple[Done, Path, dict[str, Any]], wording: Wording
) -> None:
    done, folder, rows = ran
    text = " ".join(done.out.split())
    (reason,) = [each for each in read_summary(folder).reasons if each.code == "never_sent"]
    assert reason.values["planned"] == 15 and reason.text in text
    wording(reason.values["remedy"]["text"])
    numbers = rows["few"]["pooled"]
    assert numbers["schedule"]["never_sent"] > 10
    assert numbers["e2e_sched"]["max"] > numbers["e2e"]["max"]
    (table,) = schedule_table(read_summary(folder), read_run(folder))
    found = {name.rpartition(" / ")[2]: texts for name, *texts in table.rows}
    assert list(found) == ["open", "cut", "few"] and "10" in found["few"][0]
    wording(found["few"][0])
    assert found["few"][3] == f"{numbers['schedule']['never_sent']} of 15"
    rows_of = csv.DictReader(called("report", str(folder), "--format", "csv", cwd=tmp_path).out.splitlines())
    kinds = {row["load"]: (row["kind"], row["planned"], row["asked_per_s"]) for row in rows_of}
    assert (kinds["few"], kinds["shut"]) == (("open loop", "15", "10.0"), ("bursts", "", ""))


def test_the_time_of_an_open_loop_begins_with_its_schedule(tmp_path: Path) -> None:
    """The first of a random schedule is due later; the measured time has begun by then."""
    sent = [(1003.01, -0.01), (1005.5, 0.0), (1004.5, -0.5)]
    records = [request(sent_s=at, scheduled_s=lag) for at, lag in sent]
    write_lines(tmp_path / "requests.jsonl", records)
    place = CellContext(Clock([]), duration_s=10.0, first_due_s=3.0)
    (found,) = cells_in(tmp_path, {"r1-a-x": place}).values()
    assert found.window_s == pytest.approx((1000.0, 1010.0))
    closed = cells_in(tmp_path, {"r1-a-x": CellContext(Clock([]), duration_s=10.0)})
    assert closed["r1-a-x"].window_s == pytest.approx((1003.01, 1013.01))


def test_the_warm_up_is_no_part_of_the_rate_of_an_open_loop(tmp_path: Path) -> None:
    """One that ends in the measured time counts in a closed loop, where the server did it instead of others."""
    records = [request(sent_s=999.0, phase="warmup", index=-1), request(sent_s=1000.0, scheduled_s=0.0)]
    write_lines(tmp_path / "requests.jsonl", records)
    for first_due_s, ended in ((0.0, 1), (None, 2)):
        place = CellContext(Clock([]), duration_s=10.0, first_due_s=first_due_s)
        (found,) = cells_in(tmp_path, {"r1-a-x": place}).values()
        numbers = compute_numbers([found])
        assert (numbers.requests_per_s, numbers.input_tok_s) == (ended / 10, 20 * ended / 10)


def test_of_a_part_of_a_mix_only_the_common_time_is_planned(tmp_path: Path) -> None:
    """Ten a second for 4 s, of which the other part was measured from second 1.05 to 3.05 only."""
    opened = [request(sent_s=1000 + k / 10 + 0.06, scheduled_s=-0.06, index=k) for k in range(40)]
    other = [request(cell="r1-a-y", sent_s=1001.05)]
    write_lines(tmp_path / "requests.jsonl", [*opened, *other])
    places = {
        "r1-a-x": CellContext(Clock([]), duration_s=4.0, first_due_s=0.0, mix="m"),
        "r1-a-y": CellContext(Clock([]), duration_s=2.0, mix="m"),
    }
    found = cells_in(tmp_path, places)["r1-a-x"]
    assert found.mix_window_s() == pytest.approx((1.05, 3.05))
    kept_there = schedule_kept(found, Load(user="batch", duration_s=4.0, arrivals=EVEN), 1, 2.0)
    assert kept_there is not None
    assert (kept_there.planned, kept_there.sent, kept_there.never_sent) == (20, 20, 0)
    assert kept_there.asked_per_s == pytest.approx(10.0)


def test_the_window_of_an_interrupted_cell_ends_with_its_last_record(tmp_path: Path) -> None:
    write_lines(tmp_path / "requests.jsonl", [request(sent_s=1000.0 + k, ended_s=1.5, index=k) for k in range(4)])
    for interrupted, end in ((True, 1004.5), (False, 1060.0)):
        place = CellContext(Clock([]), duration_s=60.0, interrupted=interrupted)
        (found,) = cells_in(tmp_path, {"r1-a-x": place}).values()
        assert found.window_s == pytest.approx((1000.0, end))
