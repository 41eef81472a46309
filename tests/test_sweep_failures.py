"""Settings of a sweep that fail are results of their rows, each with its cause; the other rows are measured."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.analysis.summarize import summarize
from harness.failures.table import rules_by_id
from harness.machine.gpus import wait_until_free
from harness.report import sentences
from harness.run.running import FailedSettings
from harness.rundir.manifest import CellRun, GpuMemory, Run, read_run
from harness.scenario import Sweep, SweepRow
from harness.scenario.plan import cell_of
from harness.summary import Summary
from tests.command import Done, harness, write
from tests.faults import fault
from tests.made_runs import scenario, served_by

# What servers log before they end, by the id of the failure.
STARTS = (
    "cli.unknown_flag", "cli.maxlen", "cli.batched_lt_seqs", "cli.heads", "hf.gated", "model.architecture", "gpu.arch",
    "mem.free_lt_util", "mem.no_cache_blocks", "mem.hip_oom", "mem.llamacpp_no_room", "img.module",
)  # fmt: skip


def sweep(tmp_path: Path, values: list[list[str]], **more: Any) -> tuple[Done, Run, Summary]:
    """Run the embedded engine with several lists of arguments."""
    engine = {
        "template": "simulated", "container": False, "variables": {"preset": "instant"}, "vary": {"extra_args": values},
        "startup_timeout_s": more.pop("startup_timeout_s", 60),
    }  # fmt: skip
    path = write(tmp_path, servers={"e": engine}, **more)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    return done, read_run(folder), summarize(folder)


@fault("server", "settings of a sweep with which the server does not start (12 causes)",
       seen="e-extra-args-11 failed: did not start: the GPU's memory is used up", code=0, kept="all other rows, VALID"
)  # fmt: skip
def test_twelve_starts_that_fail_each_with_its_cause(tmp_path: Path) -> None:
    known = rules_by_id()
    bad = [["--fail-start", known[name].samples[0]] for name in STARTS]
    done, run, summary = sweep(tmp_path, [[], *bad, ["--jitter", "0.01"]])
    assert (done.code, run.status, summary.reasons) == (0, "valid", [])
    found = {row.server: row.failed and row.failed.values.get("failure") for row in summary.rows}
    assert found == {
        "e-extra-args-1": None,
        **{f"e-extra-args-{number}": name for number, name in enumerate(STARTS, 2)},
        "e-extra-args-14": None,
    }
    assert len(run.cells) == 14
    assert [row.pooled.succeeded for row in summary.rows if row.failed is None] == [6, 6]
    assert len([note for note in summary.notes if note.code == "setting_failed"]) == 12
    assert done.out.count("failed: memory") == 4
    # A busy machine may limit the client, which the sentence would name instead.
    rows = [msgspec.structs.replace(row, client_limited=[]) for row in summary.rows]
    assert sentences.validity_sentence(msgspec.structs.replace(summary, rows=rows, cells=[]), run) == (
        "VALID: all conditions of a trustworthy measurement held; 12 of 14 rows failed, which is their result"
    )


@fault("server", "a server of a sweep dies under a load",
       seen="e-extra-args-1 / l-requests-12 failed: the server died during the load: it ended with exit code 1", code=0,
       kept="all other rows, VALID")  # fmt: skip
def test_a_server_that_dies_is_started_again_for_the_other_loads(tmp_path: Path) -> None:
    loads = {"l": {"user": "batch", "output_tokens": 4, "batch_size": 2, "vary": {"requests": [4, 12, 5]}}}
    # The server ends with its eleventh request, one of which is that of the start.
    done, run, summary = sweep(tmp_path, [["--fault", "exit:10"], []], loads=loads, warmup={"requests": 0})
    assert (done.code, run.status, summary.reasons) == (0, "valid", [])
    failed = {row.load: row.failed and row.failed.code for row in summary.rows if row.server == "e-extra-args-1"}
    assert failed["l-requests-12"] == "setting_died"
    assert failed["l-requests-5"] is None, "it ran on a fresh server"
    row = next(row for row in summary.rows if row.key == ("e-extra-args-1", "l-requests-5"))
    assert (row.pooled.succeeded, row.invalid) == (5, None)
    other = [row for row in summary.rows if row.server == "e-extra-args-2"]
    assert [(row.failed, row.pooled.succeeded) for row in other] == [(None, 4), (None, 12), (None, 5)]
    compared = {verdict.side for verdict in (summary.comparison.verdicts if summary.comparison else [])}
    assert "e-extra-args-1 / l-requests-12" not in compared


def test_what_failed_is_not_tried_again(tmp_path: Path) -> None:
    done, run, _ = sweep(tmp_path, [["--fault", "never-ready"], []], repeats=2, startup_timeout_s=1.5)
    assert done.code == 0
    assert done.out.count("e-extra-args-1 is a result: did not start: the server did not become ready") == 1
    failed = [(cell.id, cell.served_by.url) for cell in run.cells if cell.failed is not None]
    assert failed == [(f"r{repeat}-e-extra-args-1-burst", "") for repeat in (1, 2)], "nothing served them"
    assert len(run.served) == 2


@fault("server", "no setting of a sweep starts", seen="the server did not start; it ended with exit code 3", code=2,
       kept="a run marked failed")  # fmt: skip
def test_a_sweep_without_a_server_that_starts_is_no_answer(tmp_path: Path) -> None:
    bad = [["--fail-start", text, "--exit-code", "3"] for text in ("a", "b")]
    done, run, summary = sweep(tmp_path, bad)
    assert (done.code, run.status) == (2, "failed")
    assert not summary.valid


def test_a_load_under_which_every_server_dies_is_invalid(tmp_path: Path) -> None:
    done, run, summary = sweep(tmp_path, [["--fault", "exit:3"], ["--fault", "exit:2"]])
    assert (done.code, run.status) == (3, "invalid")
    assert [reason.code for reason in summary.reasons] == ["settings_failed"]


def test_a_server_that_runs_with_another_value_has_no_valid_row() -> None:
    rows = {"s-4": SweepRow(of="s", settings={"--max-num-seqs": 4, "name": "a"})}
    cell = CellRun(
        id="r1-s-4-l", server="s-4", load="l", repeat=1, started_wall_s=1, ended_wall_s=2,
        served_by=served_by(effective={"max_num_seqs": 2, "name": "b"}),
    )  # fmt: skip
    failed = FailedSettings(scenario(swept=Sweep(servers=rows)), print)
    (result,) = failed.run_start([cell_of("s-4", "l", 1)], lambda cells: iter([cell]))
    assert [(one.code, one.values) for one in result.problems] == [
        ("setting_not_applied", {"key": "--max-num-seqs", "asked": 4, "ran": 2})
    ]
    same = msgspec.structs.replace(cell, served_by=served_by(effective={"max_num_seqs": 4}))
    assert list(failed.run_start([cell_of("s-4", "l", 1)], lambda cells: iter([same]))) == [same]


@pytest.mark.parametrize(("readings", "waited"), [([10], 0), ([60, 60, 11], 2), ([60] * 50, None)])
def test_the_next_server_starts_when_the_memory_is_free(
    readings: list[int], waited: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(used: int) -> list[GpuMemory]:
        return [GpuMemory(render_node="/dev/dri/renderD128", used_bytes=used, total_bytes=100)]

    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr("harness.machine.gpus.time.sleep", sleep)
    monkeypatch.setattr("harness.machine.gpus.time.monotonic", lambda: now)
    left = iter(readings)
    found = wait_until_free(memory(9), read=lambda: memory(next(left)), max_s=5)
    assert found[0].used_bytes == (readings[-1] if waited is None else readings[waited])
    assert len(slept) == (10 if waited is None else waited)
