"""Open loops: what is asked and what is achieved, what is never sent, and what is in flight at the end."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import derive
from harness.analysis.count import CellContext, tally
from harness.analysis.derive import add_up
from harness.analysis.schedule import ScheduleTally, kept_of, kind_of, planned_of, pooled
from harness.analysis.summarize import read_summary
from harness.analysis.tally import Clock
from harness.errors import HarnessError
from harness.prepare.experiment import prepare
from harness.reasons import sentences
from harness.report import words
from harness.report.charts.data import observe
from harness.report.table import schedule_table
from harness.rundir.manifest import read_run
from harness.scenario import Arrivals, Load, Trace
from harness.scenario.behaviour import Agent
from harness.summary import Kept
from tests.command import harness, only_run, write
from tests.made_runs import request, write_lines

EVEN = Arrivals(rate=10.0, spacing="even")


def counted(*dues_and_lags: tuple[float, float]) -> ScheduleTally:
    found = ScheduleTally()
    for due_s, lag_s in dues_and_lags:
        found.add(request(scheduled_s=-lag_s), due_s + lag_s)
    return found


@pytest.mark.parametrize(
    ("load", "kind", "planned"),
    [
        (Load(user="chat", requests=4), "closed loop", None),
        (Load(user="batch", batch_size=4, requests=4), "bursts", None),
        (Load(user="batch", in_flight=4, requests=4), "closed loop", None),
        (Load(user="batch", requests=40, arrivals=EVEN), "open loop", 40),
        (Load(user="batch", batch_size=4, duration_s=2.05, arrivals=EVEN), "open loop", 84),
        (Load(user="chat", turns=3, requests=10, arrivals=EVEN), "open loop", 4),
        (Load(user="chat", turns=3, duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="rag", requests=10, arrivals=EVEN), "open loop", 10),
        (Load(user="rag", duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="agent", agent=Agent(steps=3, sub_agents=1), requests=13, arrivals=EVEN), "open loop", 3),
        (Load(user="agent", agent=Agent(steps=3, sub_agents=1), duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="mine.py", duration_s=2.0, arrivals=EVEN), "open loop", 20),
        (Load(user="mine.py", requests=40, arrivals=EVEN), "open loop", None),
        (Load(user="chat", turns=3, arrivals=EVEN), "open loop", None),
        (Load(user="mine.py", requests=7, trace=Trace(file="t")), "trace", 7),
    ],
)
def test_what_is_planned(load: Load, kind: str, planned: int | None) -> None:
    assert (kind_of(load), planned_of(load, 1)) == (kind, planned)


def test_a_course_that_ends_before_the_time_plans_no_more() -> None:
    load = Load(user="batch", duration_s=60.0, arrivals=Arrivals(points=[[0, 1], [10, 0]], spacing="even"))
    assert planned_of(load, 1) == 10


def test_asked_and_achieved() -> None:
    found = counted((100.0, 0.0), (101.0, 0.5), (102.0, 2.0))
    fixed = kept_of(found, Load(user="batch", requests=3, arrivals=EVEN), 1, 9.0)
    assert fixed == Kept(planned=3, sent=3, never_sent=0, asked_per_s=1.0, achieved_per_s=0.5)
    timed = kept_of(found, Load(user="batch", duration_s=0.5, arrivals=EVEN), 1, 0.5)
    assert timed == Kept(planned=5, sent=3, never_sent=2, asked_per_s=10.0, achieved_per_s=6.0)
    assert kept_of(found, Load(user="batch", requests=3), 1, 9.0) is None
    single = kept_of(counted((100.0, 0.0)), Load(user="batch", requests=1, arrivals=EVEN), 1, None)
    assert single == Kept(planned=1, sent=1, never_sent=0)


def test_of_an_own_locustfile_arrivals_are_counted() -> None:
    """One of them sends bursts of three and single requests: how many begin with an arrival is up to it."""
    found = counted((100.0, 0.0))
    for index, batch in ((1, 1), (2, 1), (3, 1)):
        found.add(request(index=index, batch=batch, scheduled_s=-0.5), 101.5)
    assert (found.sent, found.arrived) == (4, 2)
    timed = kept_of(found, Load(user="mine.py", duration_s=0.5, arrivals=EVEN), 1, 0.5)
    assert timed == Kept(planned=5, sent=2, never_sent=3, asked_per_s=10.0, achieved_per_s=4.0)
    fixed = kept_of(found, Load(user="mine.py", requests=4, arrivals=EVEN), 1, 9.0)
    assert fixed == Kept(sent=2, asked_per_s=1.0, achieved_per_s=1 / 1.5)


OWN = """
import gevent
from locust import task

from harness.load.user import LLMUser


class Slow(LLMUser):
    @task
    def work(self):
        self.ask_all(self.take(2))
        gevent.sleep(1.2)
"""


def test_an_own_locustfile_that_cannot_keep_up(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    load = {
        "user": "mine.py",
        "users": 1,
        "duration_s": 2,
        "output_tokens": 2,
        "arrivals": {"rate": 5, "spacing": "even"},
    }
    path = write(tmp_path, loads={"slow": load}, repeats=1, warmup={"requests": 0})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert done.code == 3
    (cell,) = read_summary(only_run(tmp_path / "runs")).cells
    assert cell.numbers.schedule == Kept(planned=10, sent=2, never_sent=8, asked_per_s=5.0, achieved_per_s=1.0)
    assert cell.numbers.sent == 4
    assert sentences(cell.problems)[0].startswith(
        "r1-one-slow: 8 of the 10 arrivals that were due in the measured time were never sent: "
    )


def test_several_runs_are_pooled() -> None:
    one = Kept(planned=5, sent=3, never_sent=2, asked_per_s=10.0, achieved_per_s=6.0)
    two = Kept(planned=5, sent=5, never_sent=0, asked_per_s=10.0, achieved_per_s=10.0)
    assert pooled([one, None, two]) == Kept(planned=10, sent=8, never_sent=2, asked_per_s=10.0, achieved_per_s=8.0)
    assert pooled([None]) is None


def test_from_schedule_and_from_send_part_by_the_lag() -> None:
    found = counted((100.0, 0.25), (101.0, 0.0))
    found.add(request(scheduled_s=-9.0, error="timeout"), 110.0)
    found.add(request(turn=2), 111.0)  # a later turn is due when it is sent
    assert found.sent == 3
    sched = [derive.FORMULAS[name] for name in ("ttft_sched_s", "e2e_sched_s")]
    later = [[formula(one) for formula in sched] for one in (request(scheduled_s=-0.25), request(turn=2))]
    assert later == [[0.75, 1.75], [0.5, 1.5]]
    both = ScheduleTally()
    for part in (counted((101.0, 0.0)), counted((100.0, 0.25))):
        add_up(both, part)
    assert (both.sent, both.first_due_s, both.last_sent_s) == (2, 100.0, 101.0)


def test_both_ways_are_about_the_same_requests(tmp_path: Path) -> None:
    """First turns are slow and punctual, later ones fast: from schedule must not look slower than from send."""
    records = [
        request(index=0, sent_s=1000.0, scheduled_s=0.0, turn=1, chunks_s=[2.0, 2.1]),
        request(index=1, sent_s=1005.0, turn=2, chunks_s=[0.1, 0.2]),
        request(index=2, sent_s=1006.0, turn=3, chunks_s=[0.1, 0.2]),
    ]
    write_lines(tmp_path / "requests.jsonl", records)
    for place in (CellContext(Clock([]), duration_s=10.0, first_due_s=0.0), CellContext(Clock([]))):
        (found,) = tally(tmp_path / "requests.jsonl", {"r1-a-x": place}, [], Counter()).values()
        open_loop = place.first_due_s is not None
        assert sorted(found.latencies["ttft_sched_s"]) == ([0.1, 0.1, 2.0] if open_loop else [2.0])
        assert found.schedule.sent == 1


def test_schedules_in_words() -> None:
    waves = Load(user="batch", users=9, requests=5, arrivals=Arrivals(points=[[0, 1], [60, 4]]))
    assert words.loop(waves) == "open loop, by chance, 1 a second from 0 s, 4 a second from 60 s"
    assert words.load_in_words(waves) == (
        "open loop: user batch, users 9, requests 5, arrivals {points: [[0 1] [60 4]], between: steps, "
        "spacing: poisson, burstiness: 1}, output_tokens 128"
    )
    assert words.load_in_words(Load(user="batch", in_flight=5, stream=False)) == (
        "closed loop: user batch, in_flight 5, output_tokens 128, stream false"
    )
    trace = Trace(file="day.csv", from_s=60, to_s=120, speed=2, max_requests=1000)
    assert words.loop(Load(user="batch", trace=trace)) == (
        "trace day.csv from 60 s to 120 s, 1,000 rows at most, at 2 times its speed"
    )
    assert words.loop(Load(user="batch")) == ""


SCENARIO = """\
version: 1
question: What becomes of what is in flight?
model: tiny
servers: {a: {template: simulated, container: false, variables: {preset: instant, extra_args: [--step-base-s, "0.1"]}}}
loads:
  open: {user: batch, LOAD, duration_s: 1.5, output_tokens: 10}
  shut: {user: batch, requests: 1, output_tokens: 2}
repeats: 1
warmup: {requests: 0}
"""


def run(folder: Path, load: str, checks: str = "") -> tuple[int, str, Path]:
    (folder / "s.yaml").write_text(SCENARIO.replace("LOAD", load) + checks)
    done = harness("run", "s.yaml", "--runs", "runs", cwd=folder)
    assert done.err == "", done.err
    (found,) = (folder / "runs").iterdir()
    return done.code, done.out, found


def row_of(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())["rows"][0]


@pytest.fixture(scope="module")
def in_flight_at_the_end(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """15 requests of about a second each are due within 1.5 s: the last ten end after it, and none is lost."""
    return run(tmp_path_factory.mktemp("open"), "users: 40, arrivals: {rate: 10, spacing: even}")[1:]


def test_what_is_in_flight_at_the_end_counts(tmp_path: Path, in_flight_at_the_end: tuple[str, Path]) -> None:
    out, folder = in_flight_at_the_end
    row = row_of(folder)
    numbers = row["pooled"]
    assert (numbers["sent"], numbers["succeeded"], numbers["unfinished"]) == (15, 15, 0)
    assert [numbers[name]["n"] for name in ("ttft_s", "e2e_s", "ttft_sched_s", "e2e_sched_s")] == [15] * 4
    assert numbers["e2e_s"]["min"] > 0.8
    assert numbers["requests_per_s"] * 1.5 < 10  # those that ended after the time are no part of the rate
    assert 0 < numbers["output_tok_s"] * 1.5 < 130  # nor their tokens that came after it
    assert numbers["window_s"] == 1.5
    assert numbers["schedule"]["asked_per_s"] == numbers["schedule"]["achieved_per_s"] == 10.0
    assert (numbers["schedule"]["planned"], numbers["schedule"]["never_sent"]) == (15, 0)
    assert (row["kind"], row["load"]) == ("open loop", "open")
    assert "open loop, evenly, 10 a second" in " ".join(out.split())
    assert "a / shut: " not in out.split("Report:")[0].split("open loop")[0]
    shown = harness("report", str(folder), "--format", "openmetrics", cwd=tmp_path).out.splitlines()
    samples = {name.partition("{")[0]: float(value) for name, _, value in (line.rpartition(" ") for line in shown)
               if 'load="open"' in name}  # fmt: skip
    prefix = "amd_llm_load_"
    assert samples[f"{prefix}asked_requests_per_second"] == samples[f"{prefix}achieved_requests_per_second"] == 10.0
    assert (samples[f"{prefix}planned_requests"], samples[f"{prefix}never_sent_requests"]) == (15, 0)
    assert samples[f"{prefix}send_lag_seconds_count"] == samples[f"{prefix}e2e_sched_seconds_count"] == 15
    assert not any(f"{prefix}asked" in line and 'load="shut"' in line for line in shown)
    junit = harness("report", str(folder), "--format", "junit", cwd=tmp_path).out
    assert 'name="schedule.a/open" value="a / open: open loop, evenly, 10 a second. target 10/s; actual 10/s' in junit
    assert 'name="schedule.a/shut"' not in junit


def test_what_the_drain_cuts_is_counted_as_unfinished(tmp_path: Path) -> None:
    _, out, folder = run(tmp_path, "users: 40, drain_s: 0.2, arrivals: {rate: 10, spacing: even}")
    numbers = row_of(folder)["pooled"]
    assert numbers["sent"] == 15
    assert numbers["unfinished"] > 0
    assert numbers["succeeded"] + numbers["unfinished"] == 15
    assert numbers["e2e_s"]["n"] == numbers["e2e_sched_s"]["n"] == numbers["succeeded"]
    assert "did not finish within drain_s (0.2 s) after the end: latencies lack the longest" in " ".join(out.split())


def test_too_few_users_make_the_run_invalid_and_say_what_to_do(tmp_path: Path) -> None:
    checks = (
        "checks: ['a/open: ttft_sched_mean <= 1s', 'a/open: e2e_sched_mean >= 1s', 'a/open: send_lag_mean <= 1ms']\n"
    )
    code, out, folder = run(tmp_path, "users: 1, arrivals: {rate: 10, spacing: even}", checks)
    text = " ".join(out.split())
    assert code == 3
    assert "of the 15 requests that were due in the measured time were never sent: all users were busy" in text
    assert "raise 'users' (1), the maximum number in flight, or 'processes' (1)" in text
    row = row_of(folder)
    assert row["pooled"]["schedule"]["never_sent"] > 10
    assert row["pooled"]["e2e_sched_s"]["max"] > row["pooled"]["e2e_s"]["max"]
    results = json.loads((folder / "summary.json").read_text())["checks"]
    assert [one["status"] for one in results][1:] == ["passed", "failed"]
    found = schedule_table(read_summary(folder), read_run(folder)).rows
    assert [(one.load, one.texts[0]) for one in found] == [("open", "open loop, evenly, 10 a second")]
    assert found[0].texts[3] == f"{row['pooled']['schedule']['never_sent']} of 15"
    shown = harness("report", str(folder), "--explain", cwd=tmp_path)
    assert "send lag = sent − scheduled; p50" in shown.out
    table = harness("report", str(folder), "--format", "csv", cwd=tmp_path).out.splitlines()
    first = dict(zip(table[0].split(","), table[1].split(","), strict=True))
    second = dict(zip(table[0].split(","), table[2].split(","), strict=True))
    assert (first["kind"], first["planned"], first["asked_per_s"]) == ("open loop", "15", "10.0")
    assert (second["kind"], second["planned"], second["asked_per_s"]) == ("bursts", "", "")


def edges_of(middles: list[float]) -> list[float]:
    """Where steps begin: the first is a second long, each begins where the one before ended."""
    edges = [middles[0] - 0.5]
    for middle in middles[:-1]:
        edges.append(2 * middle - edges[-1])
    return edges


def test_the_timeline_has_asked_and_sent(in_flight_at_the_end: tuple[str, Path]) -> None:
    _, folder = in_flight_at_the_end
    open_, shut = observe(folder).timelines
    steps = [2 * (at - begin) for at, begin in zip(open_.arrivals_at_s, edges_of(open_.arrivals_at_s), strict=True)]
    assert steps[0] == pytest.approx(1.0)
    for rates in (open_.asked_s, open_.gone_s):
        assert sum(rate * step for rate, step in zip(rates, steps, strict=True)) == pytest.approx(15, abs=0.3)
    assert (shut.asked_s, shut.gone_s) == ([], [])
    page = (folder / "report.html").read_text()
    assert "How the schedules were kept" in page


def test_the_time_of_an_open_loop_begins_with_its_schedule(tmp_path: Path) -> None:
    """The first of a random schedule is due later; the measured time has begun by then."""
    sent = [(1003.01, -0.01), (1005.5, 0.0), (1004.5, -0.5)]
    records = [request(sent_s=at, scheduled_s=lag) for at, lag in sent]
    write_lines(tmp_path / "requests.jsonl", records)
    place = CellContext(Clock([]), duration_s=10.0, first_due_s=3.0)
    (found,) = tally(tmp_path / "requests.jsonl", {"r1-a-x": place}, [], Counter()).values()
    assert found.window_s == pytest.approx((1000.0, 1010.0))
    closed = tally(tmp_path / "requests.jsonl", {"r1-a-x": CellContext(Clock([]), duration_s=10.0)}, [], Counter())
    assert closed["r1-a-x"].window_s == pytest.approx((1003.01, 1013.01))


def test_the_warm_up_is_no_part_of_the_rate_of_an_open_loop(tmp_path: Path) -> None:
    """One that ends in the measured time counts in a closed loop, where the server did it instead of others."""
    records = [request(sent_s=999.0, phase="warmup", index=-1), request(sent_s=1000.0, scheduled_s=0.0)]
    write_lines(tmp_path / "requests.jsonl", records)
    for first_due_s, ended in ((0.0, 1), (None, 2)):
        place = CellContext(Clock([]), duration_s=10.0, first_due_s=first_due_s)
        (found,) = tally(tmp_path / "requests.jsonl", {"r1-a-x": place}, [], Counter()).values()
        assert (found.ended_inside, len(found.tokens_inside)) == (ended, ended)


def test_requests_that_never_come_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    for load, come in (("user: batch", 20), ("user: chat, turns: 2", 40), ("user: batch, batch_size: 4", 80)):
        course = "arrivals: {points: [[0, 2], [10, 0]], spacing: even}"
        file.write_text(SCENARIO.replace("user: batch, LOAD, duration_s: 1.5", f"{load}, {course}, requests: {come}"))
        assert prepare(file).scenario.loads["open"].requests == come
        file.write_text(file.read_text().replace(f"requests: {come}", f"requests: {come + 1}"))
        with pytest.raises(HarnessError) as caught:
            prepare(file)
        expected = f"only {come} of {come + 1} ever come: the rate of 'arrivals' is 0 from second 10 on; give fewer"
        assert expected in caught.value.detail


def test_of_a_part_of_a_mix_only_the_common_time_is_planned(tmp_path: Path) -> None:
    """Ten a second for 4 s, of which the other part was measured from second 1.05 to 3.05 only."""
    opened = [request(sent_s=1000 + k / 10 + 0.06, scheduled_s=-0.06, index=k) for k in range(40)]
    other = [request(cell="r1-a-y", sent_s=1001.05)]
    write_lines(tmp_path / "requests.jsonl", [*opened, *other])
    places = {
        "r1-a-x": CellContext(Clock([]), duration_s=4.0, first_due_s=0.0, mix="m"),
        "r1-a-y": CellContext(Clock([]), duration_s=2.0, mix="m"),
    }
    found = tally(tmp_path / "requests.jsonl", places, [], Counter())["r1-a-x"]
    assert found.part_s() == pytest.approx((1.05, 3.05))
    kept_there = kept_of(found.schedule, Load(user="batch", duration_s=4.0, arrivals=EVEN), 1, 2.0, found.part_s())
    assert kept_there is not None
    assert (kept_there.planned, kept_there.sent, kept_there.never_sent) == (20, 20, 0)
    assert kept_there.asked_per_s == pytest.approx(10.0)


def test_the_window_of_an_interrupted_cell_ends_with_its_last_record(tmp_path: Path) -> None:
    write_lines(tmp_path / "requests.jsonl", [request(sent_s=1000.0 + k, ended_s=1.5, index=k) for k in range(4)])
    for interrupted, end in ((True, 1004.5), (False, 1060.0)):
        place = CellContext(Clock([]), duration_s=60.0, interrupted=interrupted)
        (found,) = tally(tmp_path / "requests.jsonl", {"r1-a-x": place}, [], Counter()).values()
        assert found.window_s == pytest.approx((1000.0, end))
