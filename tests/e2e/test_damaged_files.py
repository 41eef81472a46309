"""What is read is a regular file with bounded values, and a damaged one costs an error that names file and line."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.files import ROOT, open_file
from harness.base.reason import sentences
from harness.base.redact import csv_field
from harness.base.versions import FORMAT_VERSION
from harness.failures.diagnosis import scan_text
from harness.failures.table import patterns
from harness.imports.write import read_file
from harness.load.live_metrics import decode_delta
from harness.numbers.summarize import summarize, write_summary
from harness.records.manifest import read_run
from harness.records.records import read_requests
from harness.scenario import Load
from harness.simulated.wire import BadRequest, parse_json
from tests.support.command import harness, write
from tests.support.faults import fault
from tests.support.made_runs import scenario, write_made_run
from tests.support.report_runs import write_report
from tests.support.wording import Wording


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for path, problem in (
        (tmp_path / "pipe", "not a regular file but a named pipe"),
        (tmp_path / "socket", "not a regular file but a socket"),
        (Path("/dev/zero"), "not a regular file but a device"),
        (tmp_path / "folder", "Is a directory"),
    ):
        with pytest.raises(OSError) as caught:
            open_file(path)
        assert caught.value.strerror == problem


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "pipe"), ("check", "pipe"), ("import", "pipe"), ("report", "runs/made"), ("list",),
        ("run", "small.yaml"),
        ("run", "small.yaml", "--url", "https://127.0.0.1:1", "--ca", "pipe"),
    ],
)  # fmt: skip
@fault("disk", "a named pipe in place of a file", seen="not a regular file but a named pipe", kept="as it was")
def test_no_command_waits_for_a_named_pipe(tmp_path: Path, command: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_made_run(tmp_path / "runs" / "made")
    (tmp_path / "runs" / "made" / "run.json").unlink()
    os.mkfifo(tmp_path / "runs" / "made" / "run.json")
    write(tmp_path, prompts={"kind": "file", "file": "pipe"})
    done = harness(*command, cwd=tmp_path)
    assert (done.code, "Traceback" in done.err) == (0 if command == ("list",) else 1, False)
    assert "pipe" in done.out + done.err


def damaged(runs: Path, name: str, change: Any) -> None:
    write_made_run(runs / name, made_of=scenario(repeats=1))
    path = runs / name / "run.json"
    manifest = json.loads(path.read_text())
    if not isinstance(change, str):
        change(manifest)
    path.write_text(change if isinstance(change, str) else json.dumps(manifest, indent=1))


CASES: dict[str, Any] = {
    "deep": "[" * 200_000,
    "torn": '{"id": "x",\n "status": ',
    "empty": "",
    "huge": lambda run: run.update(started_wall_s=10**400),
    "no-servers": lambda run: run["scenario"].update(servers={}),
    "no-such-load": lambda run: run["cells"][1].update(load="other"),
    "unknown-field": lambda run: run.update({"\x1b[31m\nerror: forged": 1}),
    "many-cells": lambda run: run["scenario"].update(
        repeats=1000, loads=dict.fromkeys(map("l{}".format, range(200)), run["scenario"]["loads"]["x"])
    ),
}


def test_a_damaged_run_is_one_line_in_the_list_and_an_error_elsewhere(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "runs" / "good")
    for name, change in CASES.items():
        damaged(tmp_path / "runs", name, change)
    listed = harness("list", "runs", "--runs", "runs", cwd=tmp_path)
    lines = {line.split()[0]: line for line in listed.out.splitlines()[1:]}
    assert (listed.code, listed.err, sorted(lines)) == (0, "", sorted([*CASES, "good"]))
    assert lines["good"].rstrip().endswith("valid")
    assert all("unreadable: run.json" in lines[name] for name in CASES)
    for name in CASES:
        begin = time.process_time()
        with pytest.raises(HarnessError) as caught:
            read_run(tmp_path / "runs" / name)
        assert time.process_time() - begin < 2
        assert caught.value.what.startswith(f"{tmp_path / 'runs' / name / 'run.json'}:"), caught.value.what
        assert "\n" not in caught.value.what
    with pytest.raises(HarnessError) as caught:
        read_run(tmp_path / "runs" / "no-such-load")
    assert "'other'" in str(caught.value)
    wording(caught.value)
    done = harness("report", "runs/no-servers", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)


@pytest.mark.parametrize(
    "change",
    [
        {}, {"sent_s": 1e308}, {"chunks_s": [-1e300, 1e300]}, {"ended_s": -5.0}, {"output_tokens": 2**70},
        {"error": "http", "message": "=1+\x1b[31m\x00"}, {"deep": [[[[]]]]},
    ],
)  # fmt: skip
@fault("disk", "duplicated and extreme records", seen="a report, INVALID where records are lost or doubled")
def test_duplicated_and_extreme_records_are_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    write_made_run(folder, made_of=scenario(repeats=1))
    path = folder / "requests.jsonl"
    first, second, *others = path.read_bytes().splitlines()
    odd = json.dumps(json.loads(second) | change).encode()
    path.write_bytes(b"\n".join([first, *[odd] * 700, *others, b"[" * 100_000, b""]))
    damaged = list[int]()
    list(read_requests(path, damaged))
    summary = summarize(folder)
    write_summary(folder, summary)
    assert not summary.valid and any("requests.jsonl" in reason for reason in sentences(summary.reasons))
    write_report(folder)


def test_what_a_spreadsheet_computes_or_a_terminal_obeys_is_in_no_csv() -> None:
    assert csv_field("=1+1") == "'=1+1"
    assert csv_field(" \x1b[31m\x00=cmd|' /C calc'!A0") == "' =cmd|' /C calc'!A0"
    assert csv_field("\x00-1") == "'-1"
    assert csv_field("\uff1d1") == "'\uff1d1"
    assert csv_field(-1.5) == -1.5


def test_no_expression_takes_quadratic_time() -> None:
    for pattern in patterns():
        for part in (pattern.needle, pattern.rule.samples[0], "-a", "1", "a "):
            line = (part * 20_000)[:10_000] + pattern.needle + (part * 20_000)[:10_000]
            begin = time.process_time()
            pattern.regex.search(line)
            assert time.process_time() - begin < 2, (pattern.regex.pattern, part)


def test_a_long_log_is_explained_in_a_short_time() -> None:
    line = "(EngineCore pid=8) ERROR 11-21 10:00:00 [core.py:867] {}\n"
    parts = (
        "Traceback (most recent call last):",
        '  File "/x.py", line 3, in f',
        "ValueError: no block {:x}",
        "{:x} x",
    )
    log = "".join(line.format(parts[n % 4].format(n * 7919)) for n in range(60_000)) + "HIP out of memory. Tried to\n"
    begin = time.process_time()
    scanned = scan_text("torch.OutOfMemoryError: HIP out of memory.\n" + log)
    assert time.process_time() - begin < 5, "half a second; several where each line is explained"
    cause = scanned.cause()
    assert cause is not None and cause.id == "mem.hip_oom"


def test_a_scenario_is_checked_in_a_short_time_and_told_in_a_few_lines(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path)
    good = path.read_text()
    path.write_text(good + "".join(f"u{number}: 1\n" for number in range(10_000)))
    done = harness("check", "small.yaml", cwd=tmp_path)
    assert done.code == 1 and "10,000" in done.err
    wording([done.err.splitlines()[0], *done.err.splitlines()[-2:]])
    path.write_text(good + "# " + "x" * 300_000)
    done = harness("check", "small.yaml", cwd=tmp_path)
    assert "256 KiB" in done.err
    wording(done.err)
    path.write_text(good.replace("Does", '"\\e[31mDoes\\u009b1m\\a').replace("work?", 'work?"'))
    done = harness("check", "small.yaml", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)


NO_JSON = {"not UTF-8": b'{"cell": "\xff", "message": "\xff"}', "too deep": b'{"cell":' + b"[" * 100_000}


@pytest.mark.parametrize("line", NO_JSON.values(), ids=NO_JSON)
def test_json_that_cannot_be_decoded_is_damage_in_every_reader(tmp_path: Path, line: bytes) -> None:
    timed = {"x": Load(user="batch", users=2, duration_s=10, output_tokens=11)}
    write_made_run(tmp_path / "run", made_of=scenario(repeats=1, loads=timed))
    with (tmp_path / "run" / "requests.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert any("requests.jsonl" in reason for reason in sentences(summarize(tmp_path / "run").reasons))
    whole, second = tmp_path / "whole.json", tmp_path / "lines.jsonl"
    whole.write_bytes(line)
    second.write_bytes(b'{"a": 1}\n' + line)
    for path in (whole, second):
        with pytest.raises(HarnessError) as caught:
            read_file(path)
        assert caught.value.what.startswith(f"{path}: ") and "\n" not in caught.value.what
    assert decode_delta(b"\xd9\x01\xff") is None and decode_delta(b"\x91" * 100_000) is None
    with pytest.raises(BadRequest):
        parse_json(line)


def test_a_newer_format_is_refused(tmp_path: Path, wording: Wording) -> None:
    folder = Path(shutil.copytree(ROOT / "examples" / "before", tmp_path / "before"))
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": FORMAT_VERSION + 1, "new": 1}))
    done = harness("report", "before", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": "1"'))
    done = harness("report", "before", cwd=tmp_path)
    assert done.code == 1 and "$.format_version" in done.err


def test_a_summary_without_its_records_is_shown_as_it_is(tmp_path: Path) -> None:
    """As of a published run: made anew without records it would say that nothing was measured."""
    shutil.copytree(ROOT / "docs" / "example", tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    done = harness("report", "run", cwd=tmp_path)
    assert done.code == 0 and "\nPASSED: " in done.out
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    judged = harness("report", "run", "--check", "error_rate == 0", cwd=tmp_path)
    assert judged.code == 1 and "requests.jsonl" in judged.err.splitlines()[0]
