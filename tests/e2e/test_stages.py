"""Loads whose number of users changes while they run: what is planned, who is there, and rows for each stage."""

import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.load.sequencer import Quota, Sequencer, Work
from harness.numbers.cell_numbers import compute_numbers
from harness.records.clock import Clock
from harness.records.manifest import read_run
from harness.records.records import Request, read_marks, read_requests
from harness.records.run_data import CellContext, CellData
from harness.records.samples import read_metrics
from harness.scenario import Load
from harness.scenario import Stage as Planned
from harness.scenario.file import load_scenario
from harness.scenario.plan import load_of_stage, plan, stage_names
from harness.scenario.workers import parse_workers
from harness.workload import workload_sha256
from harness.workload.job import JobStage
from tests.support.command import called, going, harness, only_run, reasons_but_slowness, until
from tests.support.made_runs import cells_in, request, write_lines
from tests.support.scenario_texts import problems_of, write
from tests.support.wording import Wording

HEAD = """
version: 1
question: How many users does it hold?
model: m
servers: {a: {template: simulated, container: false, variables: {preset: instant}}, b: {template: vllm-rocm}}
loads:
  alone: {user: batch, requests: 4}
"""
UP = (
    "  people: {user: chat, turns: 2, stages: [{users: 5, for_s: 30}, {users: 20, for_s: 30}, {users: 5, for_s: 10}]}\n"
)


def test_each_stage_is_a_load_a_cell_and_a_row_of_its_own(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, HEAD + UP + "repeats: 2\nbaseline: {server: a, load: people@5}\n"))
    assert [(name, load.users, load.duration_s, load.requests) for name, load in scenario.loads.items()][1:] == [
        ("people@5", 5, 30.0, None), ("people@20", 20, 30.0, None), ("people@5-2", 5, 10.0, None),
    ]  # fmt: skip
    order = [cell.id for cell in plan(scenario)]
    assert order[4:8] == ["r1-b-alone", "r1-b-people@5", "r1-b-people@20", "r1-b-people@5-2"]
    assert order[8:11] == ["r2-b-people@5", "r2-b-people@20", "r2-b-people@5-2"]  # not the other way round
    planned = [Planned(users=users, for_s=1) for users in (2, 3, 2, 2)]
    assert stage_names("x", planned) == ["x@2", "x@3", "x@2-2", "x@2-3"]
    assert [load_of_stage(name) for name in ("x", "x@2", "x@2-2", "mix.x")] == [None, "x", "x", None]


def test_the_order_of_the_stages_is_part_of_the_workload(tmp_path: Path) -> None:
    def sha(stages: str) -> str:
        path = write(tmp_path, f"{HEAD}  p: {{user: chat, stages: [{stages}]}}\n")
        return workload_sha256(load_scenario(path), tmp_path)

    low, high = "{users: 2, for_s: 9}", "{users: 4, for_s: 9}"
    assert sha(f"{low}, {high}") == sha(f"{low}, {high}")
    assert sha(f"{low}, {high}") != sha(f"{high}, {low}")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("{user: chat, stages: [{users: 5, for_s: 3}]}",
         ["$.loads.p.stages (line 8): two or more are expected; else give 'users' and 'duration_s'"]),
        ("{user: chat, stages: [{users: 5}, {users: 6, for_s: 3}]}",
         ["$.loads.p.stages[0] (line 8): 'for_s' is missing"]),
        ("{user: chat, processes: 4, stages: [{users: 5, for_s: 1}, {users: 3, for_s: 3}]}",
         ["$.loads.p.processes (line 8): 4 load processes for 3 users; use at most one per user"]),
    ],
)  # fmt: skip
def test_invalid_stages(tmp_path: Path, load: str, expected: list[str]) -> None:
    assert problems_of(tmp_path, f"{HEAD}  p: {load}\n") == expected


def test_a_load_has_no_name_of_a_stage_and_a_mix_no_stages(tmp_path: Path, wording: Wording) -> None:
    text = HEAD + "  p@4: {user: chat, duration_s: 4}\n"
    wording(problems_of(tmp_path, text))
    mixed = (
        f"{HEAD}  job: {{user: batch, duration_s: 9}}\n{UP}mixes: {{both: [job, people]}}\nwarmup: {{duration_s: 1}}\n"
    )
    (problem,) = problems_of(tmp_path, mixed)
    assert "10" in problem and "'duration_s'" in problem
    wording(problem)


def test_the_users_of_each_stage_must_divide_among_the_workers(wording: Wording) -> None:
    stages = {f"p@{users}": Load(user="chat", users=users, duration_s=5.0) for users in (4, 3)}
    with pytest.raises(HarnessError) as caught:
        parse_workers("2", "127.0.0.1", stages)
    wording(caught.value)


def course(folder: Path, *durations_s: float, **more: Any) -> Sequencer:
    folder.mkdir(exist_ok=True)
    stages = [JobStage("c", "l", number + 1, duration_s) for number, duration_s in enumerate(durations_s)]
    return Sequencer(str(folder / "t"), Quota(warmup_requests=2)._replace(**more), stages=stages)


def test_a_stage_is_measured_once_all_its_users_have_started(tmp_path: Path, clock: list[float]) -> None:
    one, other = course(tmp_path, 0.2, 60.0), course(tmp_path, 0.2, 60.0)  # of two processes
    assert [one.take()[0] for _ in range(5)] == [Work("warmup", -1 - n) for n in range(5)]
    one.set_users_complete()
    assert [other.take()[0] for _ in range(3)] == [Work("warmup", -6), Work("warmup", -7), Work("measured", 0)]
    assert (one.user_count(), one.left_s(), one.is_over(0)) == (1, None, False)
    clock[0] += 0.25
    assert one.is_over(0)
    assert one.take(2) == [Work("warmup", -8, stage=1), Work("warmup", -9, stage=1)]  # the sequence goes on
    assert (one.user_count(), other.user_count()) == (2, 2)
    other.set_users_complete()
    assert [one.take()[0].phase for _ in range(3)] == ["warmup", "warmup", "measured"]
    assert other.left_s() == 60
    assert one.unmeasured_s() == [0, 60]
    without = course(tmp_path / "without", 5.0, 5.0, warmup_requests=0)  # it waits for the users all the same
    assert without.take()[0].phase == "warmup"
    without.set_users_complete()
    assert without.take()[0].phase == "measured"


def test_the_rate_includes_work_on_requests_of_the_stage_before(tmp_path: Path) -> None:
    """Eleven tokens each, the first 0.5 s after it was sent and then each 0.1 s; stages of 1.05 s."""
    made = [
        request(cell="r1-a-p@1", load="p@1", sent_s=1000.0),
        request(cell="r1-a-p@2", load="p@2", sent_s=1001.08),
        request(cell="r1-a-p@2", load="p@2", sent_s=1000.8, phase="warmup"),
    ]
    write_lines(tmp_path / "requests.jsonl", made)
    places = {cell: CellContext(Clock([]), duration_s=1.05, staged="p") for cell in ("r1-a-p@1", "r1-a-p@2")}
    one, two = map(in_window, cells_in(tmp_path, places).values())
    assert one == (1, 6, 0)
    # Of its own 6, of its warm-up 9, of the stage before the last 5, whose request ended in it.
    assert two == (1, 6 + 9 + 5, 1)
    alone = {cell: CellContext(Clock([]), duration_s=1.05) for cell in places}
    assert in_window(cells_in(tmp_path, alone)["r1-a-p@2"]) == (1, 6 + 9, 0)


def in_window(cell: CellData) -> tuple[int, float, float]:
    """Requests sent, tokens, and requests that ended in the window of 1.05 s."""
    numbers = compute_numbers([cell])
    assert numbers.output_tok_s is not None and numbers.requests_per_s is not None
    return numbers.sent, round(1.05 * numbers.output_tok_s, 6), round(1.05 * numbers.requests_per_s, 6)


RUN = """
version: 1
question: How many users does it hold?
model: m
servers: {a: {template: simulated, container: false, variables: {preset: instant, extra_args: [--step-base-s, "0.01"]}}}
loads:
  p: {user: USER, processes: N, think_s: [0, 0.1], output_tokens: 20, stages: [
       {users: 2, for_s: 1.2}, {users: 6, for_s: 1.2}, {users: 3, for_s: 1.2}]}
repeats: 1
checks: ["a/p@6: error_rate == 0"]
"""


def of_cell(path: Path, cell: str) -> list[Request]:
    return [record for record in read_requests(path) if record.cell == cell]


def users_at_once(records: list[Request]) -> int:
    return len({record.user for record in records if record.phase == "measured"})


def test_stages_follow_each_other_without_draining(tmp_path: Path) -> None:
    path = write(tmp_path, RUN.replace("USER", "batch").replace("N", "1"))
    done = harness("run", str(path), "--runs", str(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    (folder,) = (found.parent for found in tmp_path.glob("*/run.json"))
    cells = ["r1-a-p@2", "r1-a-p@6", "r1-a-p@3"]
    records = list(read_requests(folder / "requests.jsonl"))
    of = {cell: [record for record in records if record.cell == cell] for cell in cells}
    assert [users_at_once(found) for found in of.values()] == [2, 6, 3]
    measured = [[one for one in found if one.phase == "measured"] for found in of.values()]
    spans = [(min(one.sent_s for one in found), max(one.sent_s for one in found)) for found in measured]
    for (_, last), (first, _) in pairwise(spans):
        assert first > last
    begun = [min(one.sent_s for one in found) for found in list(of.values())[1:]]
    over = [one for one in records for at in begun if one.sent_s < at < one.sent_s + one.ended_s]
    assert over  # the next stage begins while requests are in flight
    assert len({json.dumps(one.index) + one.cell for one in records}) == len(records)
    marks = read_marks(folder / "processes.jsonl")
    for cell in cells:
        ends = [mark for mark in marks if mark.cell == cell and mark.event == "end"]
        assert len(ends) == 1
        assert sum(mark.sent or 0 for mark in ends) == sum(mark.recorded or 0 for mark in ends) == len(of[cell])
        assert all(mark.cpu_max is not None for mark in ends)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert reasons_but_slowness(folder) == []
    counters = [note["values"] for note in summary["notes"] if note["code"] == "counter_of_stages"]
    assert counters == [{"cells": 3, "of": 3}]
    assert [row["load"] for row in summary["rows"]] == ["p@2", "p@6", "p@3"]
    rates = [row["pooled"]["output_tok_s"] for row in summary["rows"]]
    assert rates[1] > 1.8 * rates[0] and rates[1] > 1.4 * rates[2]
    assert [row["pooled"]["unfinished"] for row in summary["rows"]] == [0, 0, 0]
    maximum = [cell["server_load"]["running_max"] for cell in summary["cells"]]
    assert maximum[0] <= 2 and maximum[1] <= 6 and maximum[2] <= 3
    assert [run.id for run in read_run(folder).cells] == cells
    assert set(read_metrics(folder / "metrics.jsonl")) == set(cells)


def test_an_interrupted_load_with_stages_keeps_its_results(tmp_path: Path) -> None:
    text = RUN.replace("USER", "batch").replace("N", "2")
    path = write(tmp_path, text.replace("{users: 6, for_s: 1.2}", "{users: 6, for_s: 20}"))
    with going("run", str(path), "--runs", str(tmp_path), cwd=tmp_path) as run:
        files = partial(tmp_path.glob, "*/requests.jsonl")
        until(lambda: any(users_at_once(of_cell(path, "r1-a-p@6")) for path in files()))
        until(lambda: len(read_run(only_run(tmp_path)).ran) == 1)
        run.interrupt()
        assert run.end().code == 130
    folder = only_run(tmp_path)
    marks = read_marks(folder / "processes.jsonl")
    assert Counter(mark.event for mark in marks) == {"start": 6, "end": 6}
    assert sum(mark.sent or 0 for mark in marks) == len(list(read_requests(folder / "requests.jsonl")))
    listed = " ".join(called("list", "runs", "--runs", str(tmp_path), cwd=tmp_path).out.split())
    assert "1/3 interrupted" in listed and "(simulated)" in listed
    reasons = json.loads((folder / "summary.json").read_bytes())["reasons"]
    assert [(reason["code"], reason.get("values"), reason.get("cell")) for reason in reasons] == [
        ("interrupted", None, None),
        ("cells_missing", {"ran": 1, "planned": 3}, None),
        ("not_ended", None, "r1-a-p@6"),
        ("not_reached", None, "r1-a-p@3"),
    ]
