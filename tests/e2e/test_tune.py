"""`harness tune` on the embedded engine: the search, the proof, every end, and going on after a kill."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.reason import because
from harness.numbers.comparison import MARGIN
from harness.questions.tune.decide import Trial
from harness.questions.tune.page import answer_line
from harness.questions.tune.record import TuneReport, read_tune
from harness.questions.tune.search import TuneSearch
from harness.records.manifest import read_run, write_run
from harness.run.progress import Progress
from harness.run.resume import reopened
from tests.support.command import Done, going, harness, only_run, server, until, write
from tests.support.tune_reports import changed_report, store

QUICK: dict[str, Any] = {
    "servers": {"one": server("--step-base-s", "0.02")},
    "loads": {"ten": {"user": "batch", "batch_size": 10, "requests": 20, "output_tokens": 5}},
    "warmup": {"requests": 0},
}
# The evening of the seed: vLLM's share of 0.92 is refused, and with ten requests at once the KV cache is too small.
STORY: dict[str, Any] = {
    "servers": {
        "vllm": {
            "template": "simulated",
            "container": False,
            "variables": {
                "preset": "strix-halo-qwen3.5-0.8b",
                "gpu_memory_utilization": 0.92,
                "extra_args": ["--preemption-s", "0.3"],
            },
        }
    },
    "loads": {"ten": {"user": "batch", "batch_size": 10, "requests": 30, "output_tokens": 40}},
    "prompts": {"tokens": 300},
    "warmup": {"requests": 10},
}


def tune(folder: Path, *options: str, **changes: Any) -> Done:
    return harness("tune", str(write(folder, **(QUICK | changes))), "--runs", "runs", *options, cwd=folder)


def report_of(folder: Path) -> TuneReport:
    found = [report for path in sorted((folder / "runs").iterdir()) if (report := read_tune(path)) is not None]
    assert len(found) == 1
    return found[0]


def tried(folder: Path) -> list[Trial]:
    reports = [report for path in folder.glob("runs/*") if (report := read_tune(path)) is not None]
    return [trial for report in reports for trial in report.trials.starts]


def test_a_killed_search_goes_on_and_a_spent_budget_is_inconclusive(tmp_path: Path) -> None:
    path = write(tmp_path, **QUICK)
    with going("tune", str(path), "--runs", "runs", "--budget", "1s", cwd=tmp_path) as command:
        until(lambda: any(file.stat().st_size for file in tmp_path.glob("runs/*/requests.jsonl")))
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
    folder = only_run(tmp_path / "runs")
    assert report_of(tmp_path).trials.starts == []
    run = read_run(folder)
    write_run(folder, replace(run, versions=run.versions | {"locust": "0.1"}))
    refused = harness("tune", "--resume", folder.name, "--runs", "runs", cwd=tmp_path)
    assert refused.code == 1 and "versions.locust: 0.1 " in refused.err, refused.err
    write_run(folder, run)
    done = harness("tune", "--resume", folder.name, "--runs", "runs", "--json", cwd=tmp_path)
    assert done.code == 5, done.out + done.err
    answer = json.loads(done.out)
    assert [answer[key] for key in ("verdict", "settings", "ratio", "low", "high", "starts")] == [
        "inconclusive", {}, None, None, None, 1
    ]  # fmt: skip
    (start,) = report_of(tmp_path).trials.starts
    is_over = answer["spent_s"] > 1  # one start may take less
    assert [reason["code"] for reason in answer["reasons"]] == ["tune_over_budget"] * is_over
    assert start.value and start.cells == ["r1-default-ten"] and report_of(tmp_path).trials.ended is not None
    run = read_run(folder)
    assert (run.status, [cell.id for cell in run.cells], len(run.resumed)) == ("valid", start.cells, 1)
    shown = harness("report", folder.name, "--runs", "runs", cwd=tmp_path)
    assert shown.code == 5 and answer_line(report_of(tmp_path)) in " ".join(shown.out.split()), shown.out + shown.err
    assert "What was tried" in shown.out and "What was tried" in (folder / "report.html").read_text()
    with reopened(folder, start.cells, Progress(Console(quiet=True))) as running:  # what is known of the starts stays
        report = report_of(tmp_path)
        search = TuneSearch(running, report.question, report.trials, 0.0)
    assert search.reference == run.ran["r1-default-ten"].served_by and search.advice.keys() == {"default"}
    assert "harness tune --resume" in harness("run", "--resume", folder.name, "--runs", "runs", cwd=tmp_path).err


DAMAGE: dict[str, tuple[str, object]] = {
    "a result below zero": ("trials.0.value", -3.0),
    "a result of zero": ("trials.0.value", 0.0),
    "a time below zero": ("trials.0.took_s", -1.0),
    "a ratio below zero": ("trials.0.ratio", -1.0),
    "a budget of nothing": ("budget_s", 0.0),
    "cells that never were": ("trials.0.cells", ["r9-other-none"]),
    "a setting of another type": ("trials.0.settings", {"max_num_seqs": {"a": [1]}}),
    "levels of another load": ("levels", {"other": 1.0}),
    "a goal without its levels": ("goal", "users"),
    "an SLO without a latency": ("slos", ["nothing <= 1"]),
    "an end without its time": ("ended.values", {}),
    "an unknown goal": ("goal", "fun"),
}


def test_an_edited_search_is_a_damaged_file_in_words(tmp_path: Path) -> None:
    path = write(tmp_path, **QUICK)
    assert harness("tune", str(path), "--runs", "runs", "--budget", "1s", cwd=tmp_path).code == 5
    file = only_run(tmp_path / "runs") / "tune.json"
    whole = json.loads(file.read_text())
    for name, (place, value) in DAMAGE.items():
        edited = json.loads(file.read_text())
        *outer, last = place.split(".")
        inner: Any = edited
        for key in outer:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value
        file.write_text(json.dumps(edited))
        done = harness("tune", "--resume", file.parent.name, "--runs", "runs", "--budget", "1h", cwd=tmp_path)
        assert done.code == 1 and "defect" not in done.err, (name, done)
        assert "tune.json" in done.err or "slo" in done.err.lower() or "nothing" in done.err, (name, done.err)
        shown = harness("report", file.parent.name, "--runs", "runs", cwd=tmp_path)
        assert "defect" not in shown.err, (name, shown.err)
        file.write_text(json.dumps(whole))


def test_a_server_that_never_starts_exits_with_its_code(tmp_path: Path) -> None:
    done = tune(tmp_path, servers={"one": server("--fail-start", "no kernel for this GPU")})
    assert done.code == 2 and "no kernel for this GPU" in done.out, done.out + done.err
    report = report_of(tmp_path)
    assert [reason.code for reason in report.proof.reasons] == ["nothing_started"]


def test_bad_options_are_explained_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path))  # where no GPU is
    for options, words in (
        (["--for", "goodput"], "--for goodput: no --check"),
        (["--for", "energy"], "--for energy: no GPU of this machine reports its power"),
        (["--slo", "output_tok_s>=3"], "not an upper bound"),
        (["--url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["--load", "x"], "has no load 'x'"),
        (["--budget", "soon"], "--budget"),
    ):
        done = tune(tmp_path, *options)
        assert (done.code in (1, 2), words in done.err) == (True, True), done.err
    assert not list(tmp_path.glob("runs/*"))


def test_settings_are_proven_where_the_default_does_not_start_and_nothing_is_better(tmp_path: Path) -> None:
    changes = STORY | {"loads": {"one": {"user": "batch", "batch_size": 1, "requests": 5, "output_tokens": 5}}}
    path = write(tmp_path, **QUICK | changes | {"warmup": {"requests": 0}})
    with going("tune", str(path), "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: len(tried(tmp_path)) == 2)
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
    report = report_of(tmp_path)  # as if the search had ended, and with it the budget
    folder = tmp_path / "runs" / report.question.run
    store(folder, changed_report(report, ended=because("tune_patience", "x"), budget_s=report.spent_s))
    resume = ["tune", "--resume", folder.name, "--runs", "runs"]
    done, report = harness(*resume, cwd=tmp_path), report_of(tmp_path)
    assert (done.code, report.proof.verdict, report.proof.run) == (5, "inconclusive", None), done.out + done.err
    assert report.proof.settings == {"gpu_memory_utilization": 0.78} and (report.proof.more_s or 0) > 0
    assert harness(*resume, "--budget", "1ms", cwd=tmp_path).code == 1
    done, report = harness(*resume, "--budget", "1h", cwd=tmp_path), report_of(tmp_path)
    proof = report.proof
    assert (done.code, proof.sides, proof.blocks) == (0, [], 3), done.out + done.err
    assert proof.run is not None and read_run(folder.parent / proof.run).status == "valid"
    assert (proof.verdict, proof.settings, proof.ratio) == ("set", {"gpu_memory_utilization": 0.78}, None)
    store(folder, changed_report(report, settings={"max_num_seqs": 5}, ratio=9.0, low=8.9, high=9.1))
    told = harness("report", folder.name, "--runs", "runs", cwd=tmp_path)
    assert told.code == 0 and "0.78" in told.out and "0.92" in told.out, told.out + told.err
    (folder.parent / proof.run / "requests.jsonl").unlink()
    told = harness("report", folder.name, "--runs", "runs", cwd=tmp_path)
    assert told.code == 5 and "Set " not in told.out and "9.00" not in told.out, told.out + told.err


@pytest.mark.nightly  # two minutes: some thirty starts, of which each takes two seconds of the processor
def test_the_evening_of_the_seed_ends_with_its_two_settings(tmp_path: Path) -> None:
    done = tune(tmp_path, "--budget", "40min", "--json", **STORY)
    assert done.code == 0, done.out + done.err
    report = report_of(tmp_path)
    first, base, *_ = report.trials.starts
    assert (first.cause, first.reason and first.reason.values["failure"]) == ("memory", "mem.free_lt_util")
    assert report.proof.reference == {"gpu_memory_utilization": 0.78} == report.question.spell(base.settings)
    answer = json.loads(done.out)
    assert answer["verdict"] == "set" and answer["settings"]["gpu_memory_utilization"] <= 0.78
    assert 4 <= answer["settings"]["max_num_seqs"] <= 10
    assert answer["ratio"] > 2.5 and 1 + MARGIN < answer["low"] < answer["ratio"] < answer["high"]
    proof = report.proof
    assert proof.run is not None and read_run(tmp_path / "runs" / proof.run).status == "valid"
    assert "--max-num-seqs" in proof.commands["command of the embedded engine"]


@pytest.mark.nightly  # a minute
def test_the_default_is_kept_where_nothing_is_better(tmp_path: Path) -> None:
    alone = {"one": {"user": "batch", "batch_size": 1, "requests": 10, "output_tokens": 20}}
    done = tune(tmp_path, "--budget", "40min", loads=alone)
    assert done.code == 0 and "Keep the default" in done.out, done.out + done.err
    proof = report_of(tmp_path).proof
    assert (proof.settings, proof.run is not None, proof.blocks >= 2) == ({}, True, True)


@pytest.mark.nightly  # two minutes: a start of each setting
def test_settings_that_answer_worse_are_left_out(tmp_path: Path) -> None:
    cache = ["--step-base-s", "0.02", "--max-model-len", "320", "--num-gpu-blocks-override", "20"]
    made_of = {
        "servers": {"one": {**server(*cache), "variables": server(*cache)["variables"] | {"max_num_seqs": 16}}},
        "loads": {"ten": {"user": "batch", "batch_size": 10, "requests": 20, "output_tokens": 20}},
        "prompts": {"tokens": 40},
    }
    done = tune(tmp_path, "--budget", "40min", "--same-answers", "--json", **made_of)
    assert done.code in (0, 5), done.out + done.err
    report = report_of(tmp_path)
    (left_out,) = [start for start in report.trials.starts if start.reason and start.reason.code == "answers_worse"]
    assert left_out.settings["kv_type"] == "fp8" and left_out.blamed == ["kv_type"]
    assert not any("kv_cache_dtype" in settings for settings in [report.proof.settings, *report.proof.sides])
    assert all(one is not None and one.word == "same" for one in report.proof.answers)


def test_what_a_run_advises_is_tried_and_proven(tmp_path: Path) -> None:
    """Ten requests at once do not fit the KV cache of the seed's evening; five do."""
    loads = {
        f"{size}-at-a-time": {"user": "batch", "batch_size": size, "requests": 2 * size, "output_tokens": 10}
        for size in (5, 10)
    }
    variables = STORY["servers"]["vllm"]["variables"] | {"gpu_memory_utilization": 0.78}
    servers = {"vllm": STORY["servers"]["vllm"] | {"variables": variables}}
    write(tmp_path, **STORY | {"loads": loads, "servers": servers, "prompts": {"tokens": 400}})
    harness("run", "small.yaml", "--runs", "runs", cwd=tmp_path)
    reported = harness("report", "last", "--runs", "runs", "--format", "json", cwd=tmp_path)
    findings = json.loads(reported.out)["findings"]  # on a busy machine, one of them is the load generator
    action = next(action for finding in findings for action in finding["actions"] if action["changes"])
    run = only_run(tmp_path / "runs").name
    assert action["verify"] == f"harness tune {run}", findings
    for option in (["--load", "10-at-a-time"], ["--server", "vllm"], ["--finding", "none"], ["--keep"]):
        refused = harness("tune", "last", "--runs", "runs", *option, cwd=tmp_path)
        assert (refused.code, option[0] in refused.err) == (1, True), refused.err
    done = harness("tune", "last", "--runs", "runs", "--json", cwd=tmp_path)
    answer = json.loads(done.out)
    assert (done.code, answer["verdict"], answer["of_run"]) == (0, "set", run), done.out + done.err
    assert {trial.get("why", "first") for trial in answer["trials"]} == {"first", "finding"}
    assert answer["settings"] == {"max_num_seqs": action["changes"]["sequences"]}
    assert answer["low"] > 1 + MARGIN and answer["blocks"] >= 2
