"""Stages of a load that is sent by several workers."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.reasons import sentences
from harness.rundir.manifest import read_run
from harness.rundir.records import Request, read_marks
from harness.simulated import Spawned
from tests.command import delivered, only_run, records, run_with_workers, until
from tests.faults import fault

STAGES = [{"users": 2, "for_s": 1.5}, {"users": 8, "for_s": 1.5}, {"users": 4, "for_s": 1.5}]


CELLS = ["r1-running-l@2", "r1-running-l@8", "r1-running-l@4"]


@pytest.mark.parametrize(
    ("load", "block", "warmup"),
    [
        pytest.param({"user": "batch", "batch_size": 3}, 3, None, marks=pytest.mark.nightly),
        ({"user": "chat", "turns": 2, "think_s": [0, 0.1], "ramp_s": 0.3}, 2, {"until": "steady", "max_s": 2}),
        pytest.param({"user": "chat", "turns": 2, "think_s": [0, 0.1]}, 2, {"requests": 0}, marks=pytest.mark.nightly),
    ],
)
def test_the_users_of_all_workers_follow_the_stages(
    tmp_path: Path, engine_process: Spawned, load: dict[str, Any], block: int, warmup: dict[str, Any] | None
) -> None:
    with run_with_workers(tmp_path, engine_process, {**load, "output_tokens": 20, "stages": STAGES}, warmup=warmup) as (
        run,
        workers,
    ):
        done = run.end()
        assert done.code == 0, done.out + done.err
        assert [worker.end().code for worker in workers] == [0, 0]
    folder = only_run(tmp_path)
    sent = records(tmp_path)
    assert len({(one.cell, one.index) for one in sent}) == len({one.id for one in sent}) == len(sent)
    marks = read_marks(folder / "processes.jsonl")
    spans = []
    for cell, stage in zip(CELLS, STAGES, strict=True):
        of = [one for one in sent if one.cell == cell]
        measured = [one for one in of if one.phase == "measured"]
        # The users of the stage, each machine its half of them, and each machine its part of the stage's sequence.
        assert len({one.user for one in measured}) == stage["users"]
        for number, process in enumerate(sorted({one.process for one in sent})):
            own = [one for one in measured if one.process == process]
            assert len({one.user for one in own}) == stage["users"] / 2
            # Chats are broken off where the stage ends, and those of the warm-up go on into it.
            blocks = sorted({one.index // block for one in own if one.index >= 0})
            assert blocks == list(range(number, 2 * len(blocks), 2))
        spans.append((min(one.sent_s for one in measured), max(one.sent_s for one in measured)))
        ends = [mark for mark in marks if mark.cell == cell and mark.event == "end"]
        assert len(ends) == 2
        assert sum(mark.sent or 0 for mark in ends) == sum(mark.recorded or 0 for mark in ends) == len(of)
    for (_, last), (first, _) in pairwise(spans):
        assert first > last  # of all machines
    assert all(last - first < 2.0 for first, last in spans)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["valid"], summary["reasons"]) == (True, [])
    assert [row["pooled"]["unfinished"] for row in summary["rows"]] == [0, 0, 0]
    maximum = [cell["server_load"]["running_max"] for cell in summary["cells"]]
    of_each = load.get("batch_size", 1)
    assert all(seen <= of_each * stage["users"] for seen, stage in zip(maximum, STAGES, strict=True))
    assert {json.loads(line)["cell"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()} == set(CELLS)
    assert [path.name for path in (tmp_path / "spool").glob("amd-llm-load-*")] == []


@fault("worker", "kill -9 of a worker in a later stage", seen="was lost (killed, or its link was cut)", code=3,
       kept="earlier stages stay valid")  # fmt: skip
@pytest.mark.nightly
def test_a_worker_that_is_lost_in_a_later_stage_makes_the_run_invalid(tmp_path: Path, engine_process: Spawned) -> None:
    stages = [{"users": 2, "for_s": 1}, {"users": 4, "for_s": 600}]
    load = {"user": "chat", "output_tokens": 5, "think_s": [0.05, 0.05], "stages": stages}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        of_second = partial(in_stage, tmp_path, "r1-running-l@4")
        until(lambda: len({one.process for one in of_second()}) == 2, within_s=40)
        for process in workers[0].others("locust"):
            process.kill()
        assert run.end().code == 3  # long before the stage would end
        assert [worker.end().code for worker in workers] == [1, 0]
    lost = [reason for reason in sentences(read_run(only_run(tmp_path)).reasons) if "was lost" in reason]
    assert [reason.partition(":")[0] for reason in lost] == ["r1-running-l@2", "r1-running-l@4"]


def in_stage(folder: Path, cell: str) -> list[Request]:
    return [one for one in delivered(folder) if one.cell == cell and one.phase == "measured"]


def test_an_interrupted_run_with_stages_has_all_that_was_recorded(tmp_path: Path, engine_process: Spawned) -> None:
    stages = [{"users": 4, "for_s": 1}, {"users": 2, "for_s": 60}]
    load = {"user": "batch", "output_tokens": 5, "stages": stages}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        until(lambda: bool(in_stage(tmp_path, "r1-running-l@2")), within_s=40)
        run.interrupt()
        assert run.end().code == 130
        for worker in workers:
            worker.end()
    ends = [mark for mark in read_marks(only_run(tmp_path) / "processes.jsonl") if mark.event == "end"]
    assert len(ends) == 4
    assert sum(mark.sent or 0 for mark in ends) == len(records(tmp_path))
