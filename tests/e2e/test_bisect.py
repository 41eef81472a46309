"""`harness bisect` on the embedded engine: the search, a kill, entries that fail, builds, Ctrl-C, every mistake."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from harness.questions.bisect.record import BisectRecord, read_bisect
from harness.records.manifest import read_run
from tests.support.command import Done, going, harness, only_run, server, until, write

# Prefill takes 0.2 s up to the fifth value, then 1 s: a step that no busy machine hides.
VALUES = [0.0001, 0.000101, 0.000102, 0.000103, 0.000104, 0.0005, 0.000501, 0.000502]
LIST = f"--values=--prefill-per-token-s={','.join(map(str, VALUES))}"
QUICK: dict[str, Any] = {
    "servers": {"one": server()},
    "loads": {"ten": {"user": "batch", "batch_size": 10, "requests": 10, "output_tokens": 5}},
    "prompts": {"tokens": 200},
    "warmup": {"requests": 0},
}


def bisect(folder: Path, *options: str, **changes: Any) -> Done:
    return harness("bisect", str(write(folder, **(QUICK | changes))), "--runs", "runs", *options, cwd=folder)


def record_of(folder: Path) -> BisectRecord | None:
    return next(filter(None, (read_bisect(path) for path in sorted(folder.glob("runs/*")))), None)


def started(folder: Path) -> int:
    record = record_of(folder)
    return 0 if record is None else len(record.starts)


def test_a_killed_search_goes_on_and_finds_the_step(tmp_path: Path) -> None:
    path = write(tmp_path, **QUICK)
    with going("bisect", str(path), LIST, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: started(tmp_path) >= 3)
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
    folder, killed = only_run(tmp_path / "runs"), record_of(tmp_path)
    assert killed is not None and killed.ended is None
    unfinished = harness("report", folder.name, "--runs", "runs", cwd=tmp_path)
    assert unfinished.code == 5 and "planned" not in unfinished.out and "search on" in unfinished.out, unfinished.out
    refused = harness("run", "--resume", folder.name, "--runs", "runs", cwd=tmp_path)
    assert refused.code == 1 and "harness bisect --resume" in refused.err
    done = harness("bisect", "--resume", "last", "--runs", "runs", "--json", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    answer = json.loads(done.out)
    assert (answer["change"]["low_entry"], answer["change"]["high_entry"], answer["ended"]) == (4, 5, "pair")
    assert answer["cause"] == "prefill" and answer["change"]["ratio"] < 0.7 and answer["word"] == "slower"
    ended = record_of(tmp_path)
    assert ended is not None and ended.starts[: len(killed.starts)] == killed.starts, "no measurement is lost"
    run = read_run(folder)
    assert set(run.ran) == {cell for start in ended.starts for cell in start.cells} and len(run.resumed) == 1
    shown = harness("report", folder.name, "--runs", "runs", cwd=tmp_path)
    assert shown.code == 0 and "0.0005" in shown.out and "To go on" in shown.out
    page = (folder / "report.html").read_text()
    assert "The entries of the list" in page and "What differs between the servers" not in page
    assert harness("bisect", "--resume", folder.name, "--runs", "runs", cwd=tmp_path).code == 0, (
        "there is nothing to do"
    )


def test_a_build_that_fails_is_skipped_with_its_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    lines = [
        "import sys",
        "if sys.argv[1] == '8':",
        "    sys.exit('no rule for 8')",
        "open('built', 'a').write(sys.argv[1])",
    ]
    script.write_text("\n".join(lines))
    build = f"{sys.executable} {script} {{}}"
    list_ = "--values=max_num_seqs=10,8,1"
    done = bisect(tmp_path, list_, "--build", build, "--json", servers={"one": server("--step-base-s", "0.02")})
    assert done.code == 0, done.out + done.err
    answer = json.loads(done.out)
    assert (answer["change"]["low_entry"], answer["change"]["high_entry"]) == (0, 2)
    assert answer["levels"][1]["side"] == "skipped" and answer["levels"][1]["failed"]["code"] == "build_failed"
    assert "no rule for 8" in answer["levels"][1]["failed"]["text"]
    assert (tmp_path / "built").read_text() == "101", "each is built once"


def test_a_start_whose_requests_fail_does_not_count_and_says_why(tmp_path: Path) -> None:
    done = bisect(tmp_path, "--values=--fault=503@1000,503@3", servers={"one": server()})
    assert done.code == 3, done.out + done.err
    assert done.out.count("  does not count: ") == 3 and "3 starts do not count" in done.out, done.out
    record = record_of(tmp_path)
    assert record is not None and record.ended is not None and "requests failed" in record.ended.text


def write_build(folder: Path, *lines: str) -> None:
    """A build command that notes what it builds in its own folder."""
    script = folder / "build.sh"
    script.write_text("\n".join(["#!/bin/sh", *lines, 'printf "$1 " >> built', ""]))
    script.chmod(0o755)


def test_a_build_runs_where_the_search_was_started_and_its_command_is_no_result(tmp_path: Path) -> None:
    write_build(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(tmp_path, **(QUICK | {"servers": {"one": server("--step-base-s", "0.02")}}))
    options = ("--values=max_num_seqs=10,8,1", "--build", "./build.sh {}", "--runs", "runs")
    with going("bisect", str(path), *options, cwd=tmp_path) as command:
        until(lambda: started(tmp_path) >= 2)
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
    script = (tmp_path / "build.sh").rename(tmp_path / "away")
    run = str(only_run(tmp_path / "runs"))
    stopped = harness("bisect", "--resume", run, cwd=elsewhere)
    assert stopped.code == 1 and "./build.sh: No such file" in stopped.err and "--resume" in stopped.err, stopped.err
    record = record_of(tmp_path)
    assert record is not None and record.ended is None and not any(start.failed for start in record.starts)
    script.rename(tmp_path / "build.sh")
    done = harness("bisect", "--resume", run, cwd=elsewhere)
    assert done.code == 0 and f"cd -- {tmp_path} && harness bisect" in done.out.replace("\n", " "), done.out + done.err
    assert (tmp_path / "built").read_text().split() == ["10", "1", "8"] and not list(elsewhere.iterdir())


def test_a_build_that_the_budget_cuts_off_is_built_by_the_resumed_search(tmp_path: Path) -> None:
    write_build(tmp_path, "test -e go || exec sleep 3600")
    servers = {"one": server("--step-base-s", "0.02")}
    options = ("--values=max_num_seqs=10,1", "--build", "./build.sh {}")
    cut = bisect(tmp_path, *options, "--budget", "1s", servers=servers)
    record = record_of(tmp_path)
    assert cut.code == 5 and record is not None and record.starts == [], cut.out + cut.err
    assert record.ended is not None and record.ended.code == "bisect_budget"
    (tmp_path / "go").touch()
    done = harness("bisect", "--resume", "last", "--runs", "runs", "--budget", "1h", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert (tmp_path / "built").read_text().split() == ["10", "1"]


def test_an_end_that_does_not_start_exits_with_its_code(tmp_path: Path) -> None:
    done = bisect(tmp_path, "--values=--fail-start=none,other", servers={"one": server()})
    assert done.code == 2 and "The good entry" in done.out, done.out + done.err
    shown = harness("report", only_run(tmp_path / "runs").name, "--runs", "runs", cwd=tmp_path)
    assert shown.code == 2, shown.out


def test_a_spent_budget_and_an_interrupt_give_the_answer_so_far(tmp_path: Path) -> None:
    done = bisect(tmp_path, "--values=max_num_seqs=10,9", "--budget", "1s")
    assert done.code == 5, done.out + done.err
    record = record_of(tmp_path)
    assert record is not None and record.ended is not None and record.ended.code == "bisect_budget"
    folder = only_run(tmp_path / "runs").name
    assert harness("bisect", "--resume", folder, "--runs", "runs", "--budget", "1ms", cwd=tmp_path).code == 1
    begun = len(record.starts)
    with going("bisect", "--resume", folder, "--runs", "runs", "--budget", "1h", cwd=tmp_path) as command:
        until(lambda: started(tmp_path) > begun)
        command.interrupt()
        ended = command.end()
    assert ended.code == 130 and "harness bisect --resume" in ended.out and "The entries" in ended.out, ended.out
    assert harness("report", folder, "--runs", "runs", cwd=tmp_path).code == 5


def test_mistakes_are_explained_before_a_start(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text("a:1\nb:2\n")
    for options, words in (
        ([], "no list"),
        (["--images", "images.txt", "--values", "x=1,2"], "--images"),
        (["--images", "none.txt"], "none.txt"),
        (["--values", "colour=1,2"], "colour"),
        (["--values", "max_num_seqs=0,2"], "max_num_seqs 0"),
        (["--images", "images.txt"], "has no effect with container: false"),
        (["--values", "cpus=0.05,0.1"], "has no effect with container: false"),
        (["--values", "max_num_seqs=4,2", "--good", "3"], "--good"),
        (["--values", "max_num_seqs=4,2", "--build", "make"], "--build"),
        (["--values", "max_num_seqs=4,2", "--for", "fun"], "--for"),
        (["--values", "max_num_seqs=4,2", "--load", "x"], "has no load 'x'"),
        (["--values", "max_num_seqs=4,2", "--budget", "soon"], "--budget"),
    ):
        done = bisect(tmp_path, *options)
        assert (done.code, words in done.err, "defect" in done.err) == (1, True, False), (options, done.err)
    assert harness("bisect", "--runs", "runs", cwd=tmp_path).code == 1
    assert not list(tmp_path.glob("runs/*"))
