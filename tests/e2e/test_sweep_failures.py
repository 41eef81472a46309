"""Settings of a sweep that fail are results of their rows; drift within a server start is reported."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from harness.failures.table import rules_by_id
from harness.machine.gpus import wait_until_free
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.numbers.verdicts import estimate_drift, is_drift
from harness.records.manifest import CellRun, GpuMemory, Run, read_run
from harness.run.running import FailedSettings
from harness.scenario import Sweep, SweepRow
from harness.scenario.plan import cell_of
from tests.support.command import Done, harness, only_run, slow_server, write
from tests.support.faults import fault
from tests.support.made_runs import scenario, served_by
from tests.support.nightly import draws, room

# What servers log before they end, by the id of the failure.
STARTS = (
    "cli.unknown_flag", "cli.maxlen", "cli.batched_lt_seqs", "cli.heads", "hf.gated", "model.architecture", "gpu.arch",
    "mem.free_lt_util", "mem.no_cache_blocks", "mem.hip_oom", "mem.llamacpp_no_room", "img.module",
)  # fmt: skip


def sweep(tmp_path: Path, values: list[list[str]], **more: Any) -> tuple[Done, Run, Summary]:
    """Run the embedded engine, with 50 ms a token, with several lists of arguments."""
    lists = [["--step-base-s", "0.05", *value] for value in values]
    engine = {
        "template": "simulated", "container": False, "variables": {"preset": "instant"}, "vary": {"extra_args": lists},
        "startup_timeout_s": more.pop("startup_timeout_s", 60),
    }  # fmt: skip
    path = write(tmp_path, servers={"e": engine}, **more)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    folder = only_run(tmp_path / "runs")
    return done, read_run(folder), summarize(folder)


@fault("server", "settings of a sweep with which the server does not start (12 causes)",
       seen="e-extra-args-11 failed: did not start: the GPU's memory is used up", code=0, kept="all other rows, VALID"
)  # fmt: skip
def test_twelve_starts_that_fail_each_with_its_cause(tmp_path: Path) -> None:
    known = rules_by_id()
    bad = [["--fail-start", known[name].samples[0]] for name in STARTS]
    done, run, summary = sweep(tmp_path, [[], *bad, ["--jitter", "0.01"]])
    assert (done.code, run.status, summary.reasons) == (0, "valid", [])
    failures = {row.server: row.failed and row.failed.values.get("failure") for row in summary.rows}
    assert failures == {
        "e-extra-args-1": None,
        **{f"e-extra-args-{number}": name for number, name in enumerate(STARTS, 2)},
        "e-extra-args-14": None,
    }
    assert len(run.cells) == 14
    assert [row.pooled.succeeded for row in summary.rows if row.failed is None] == [6, 6]
    assert len([note for note in summary.notes if note.code == "setting_failed"]) == 12
    assert done.out.count("failed: memory") == 4


@fault("server", "a server of a sweep dies under a load",
       seen="e-extra-args-1 / l-requests-12 failed: the server died during the load: it ended with exit code 1", code=0,
       kept="all other rows, VALID")  # fmt: skip
def test_a_server_that_dies_is_started_again_for_the_other_loads(tmp_path: Path) -> None:
    loads = {"l": {"user": "batch", "output_tokens": 4, "batch_size": 2, "vary": {"requests": [4, 12, 5]}}}
    loads["too-long"] = {"user": "batch", "requests": 4, "prompts": {"tokens": 900_000}}  # is not sent
    # The server ends with its eleventh request, one of which is that of the start.
    done, run, summary = sweep(tmp_path, [["--fault", "exit:10"], []], loads=loads, warmup={"requests": 0})
    assert (done.code, run.status, summary.reasons) == (0, "valid", [])
    rows = {row.key: row for row in summary.rows}
    failed = rows["e-extra-args-1", "l-requests-12"].failed
    assert failed is not None and failed.code == "setting_died"
    fresh = rows["e-extra-args-1", "l-requests-5"]
    assert (fresh.failed, fresh.pooled.succeeded, fresh.invalid) == (None, 5, None), "it ran on a fresh server"
    other = [row for row in summary.rows if row.server == "e-extra-args-2"]
    assert [(row.failed, row.pooled.succeeded) for row in other[:3]] == [(None, 4), (None, 12), (None, 5)]
    too_long = [rows[server, "too-long"] for server in ("e-extra-args-1", "e-extra-args-2")]
    assert [(row.failed and row.failed.code, row.pooled.sent) for row in too_long] == [("setting_too_long", 0)] * 2
    assert "failed: too long" in done.out
    compared = {verdict.side for verdict in (summary.comparison.verdicts if summary.comparison else [])}
    assert "e-extra-args-1 / l-requests-12" not in compared


def test_what_failed_is_not_tried_again(tmp_path: Path) -> None:
    done, run, _ = sweep(tmp_path, [["--fault", "never-ready"], []], repeats=2, startup_timeout_s=1.5)
    assert done.code == 0
    said = done.out.split("Does the smallest run work?")  # while it runs, and on its page
    assert [part.count("e-extra-args-1 failed: ") for part in said] == [1, 1]
    failed = [(cell.id, cell.served_by.url) for cell in run.cells if cell.failed is not None]
    assert failed == [(f"r{repeat}-e-extra-args-1-burst", "") for repeat in (1, 2)], "nothing served them"


@fault("server", "no setting of a sweep starts", seen="the server did not start; it ended with exit code 3", code=2,
       kept="a run marked failed")  # fmt: skip
def test_a_sweep_without_a_server_that_starts_is_no_answer(tmp_path: Path) -> None:
    bad = [["--fail-start", rules_by_id()["mem.hip_oom"].samples[0], "--exit-code", "3"], ["--fail-start", "b"]]
    done, run, summary = sweep(tmp_path, bad)
    assert (done.code, run.status, summary.valid) == (2, "failed", False)
    (reason,) = run.reasons
    assert (reason.code, reason.values["kind"], reason.values["failure"]) == ("run_error", "StartError", "mem.hip_oom")


def test_a_load_under_which_every_server_dies_is_invalid(tmp_path: Path) -> None:
    done, run, summary = sweep(tmp_path, [["--fault", "exit:3"], ["--fault", "exit:2"]])
    assert (done.code, run.status) == (3, "invalid")
    assert [reason.code for reason in summary.reasons] == ["settings_failed"]


def test_a_server_that_runs_with_another_value_has_no_valid_row() -> None:
    rows = {"s-4": SweepRow(of="s", settings={"--max-num-seqs": 4, "name": "a"})}
    failed = FailedSettings(scenario(swept=Sweep(servers=rows)), print)
    for ran, problems in ((4, []), (2, [("setting_not_applied", {"key": "--max-num-seqs", "asked": 4, "ran": 2})])):
        cell = CellRun(
            id="r1-s-4-l", server="s-4", load="l", repeat=1, started_wall_s=1, ended_wall_s=2,
            served_by=served_by(effective={"max_num_seqs": ran, "name": "b"}),
        )  # fmt: skip
        (result,) = failed.run_start([cell_of("s-4", "l", 1)], lambda cells, cell=cell: iter([cell]))  # type: ignore[misc]
        assert [(problem.code, problem.values) for problem in result.problems] == problems


@pytest.mark.parametrize(("readings", "waited"), [([10], 0), ([60, 60, 11], 2), ([60] * 50, None)])
def test_the_next_server_starts_when_the_memory_is_free(
    readings: list[int], waited: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(used: int) -> list[GpuMemory]:
        return [GpuMemory(render_node="/dev/dri/renderD128", used_bytes=used, total_bytes=100)]

    slept: list[float] = []
    monkeypatch.setattr("harness.machine.gpus.time.sleep", slept.append)
    monkeypatch.setattr("harness.machine.gpus.time.monotonic", lambda: sum(slept))
    left = iter(readings)
    freed = wait_until_free(memory(9), read=lambda: memory(next(left)), max_s=5)
    assert freed[0].used_bytes == (readings[-1] if waited is None else readings[waited])
    assert len(slept) == (10 if waited is None else waited)


@pytest.mark.parametrize("starts", [1, 2, 5])
def test_a_drift_of_ten_percent_is_reported_and_none_is_not(starts: int) -> None:
    dice, trials, spread = random.Random(starts), draws(4000), 0.015

    def reported(factor: float) -> float:
        def speed() -> float:
            return math.exp(dice.gauss(0, spread))

        drifts = [estimate_drift([(speed(), factor * speed()) for _ in range(starts)]) for _ in range(trials)]
        return sum(drift is not None and is_drift(drift) for drift in drifts) / trials

    assert min(reported(0.9), reported(1.1)) >= 0.95 - room(0.95, trials)
    assert reported(1.0) <= 0.05 + room(0.05, trials)
    assert estimate_drift([]) is None


def test_a_run_reports_drift(tmp_path: Path) -> None:
    load = {"user": "batch", "requests": 8, "output_tokens": 4, "vary": {"batch_size": [1, 2]}}
    path = write(tmp_path, servers={"one": slow_server()}, loads={"l": load}, repeats=2)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert done.code == 0
    folder = only_run(tmp_path / "runs")
    run, summary = read_run(folder), summarize(folder)
    again = [cell.id for cell in run.cells if cell.again is not None]
    assert again == ["r1-one-l-batch-size-1_again", "r2-one-l-batch-size-2_again"]
    assert [row.cells for row in summary.rows] == [
        ["r1-one-l-batch-size-1", "r2-one-l-batch-size-1"],
        ["r1-one-l-batch-size-2", "r2-one-l-batch-size-2"],
    ], "repeated cells are in no row"
    (note,) = [note for note in summary.notes if note.code in ("drift", "no_drift")]  # a busy machine may drift
    assert note.values["starts"] == 2
