"""A running server without a scenario: `harness run --url`. The wheel's test has `harness quick`."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from harness.records.manifest import read_run
from tests.support.command import harness, only_run
from tests.support.simulated import spawned


def test_a_run_of_a_server_without_a_scenario_and_without_token_counts(tmp_path: Path) -> None:
    with spawned("--fault", "no-usage", "--model", "a-model", quiet=True) as running:
        done = harness("run", "--url", running.url, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    run = read_run(only_run(tmp_path / "runs"))
    assert (run.scenario.model, run.scenario_name, run.status) == ("a-model", "quick", "valid")
    assert [cell.load for cell in run.cells] == ["users@1", "users@4", "users@8"]


@contextmanager
def other_client(url: str) -> Iterator[None]:
    """One user who asks for an answer of 64 tokens after the other."""
    ended = threading.Event()
    body = {"model": "a-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "ignore_eos": True}

    def ask() -> None:
        while not ended.is_set():
            requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_another_client_of_the_server_makes_it_invalid(tmp_path: Path) -> None:
    with spawned("--model", "a-model", quiet=True) as running, other_client(running.url):
        done = harness("quick", running.url, "--json", cwd=tmp_path)
    report = json.loads(done.out)
    assert (done.code, report["valid"], len(report["reasons"])) == (3, False, 1)  # one sentence for all levels
    run = read_run(only_run(tmp_path / "runs"))
    assert [(reason.code, reason.cell) for reason in run.reasons] == [
        ("other_client", f"r1-running-users@{users}") for users in (1, 4, 8)
    ]
    values = run.reasons[0].values
    assert values["generated"] > values["max_tokens"] + 50
    assert values["answers_per_s"] > 0


def test_a_line_of_combinations_is_a_run(tmp_path: Path) -> None:
    asked = ["-p", "32", "-n", "6", "-d", "0", "1k", "--concurrency", "1", "2", "--repeats", "2", "--num-prompts", "4"]
    with spawned("--preset", "instant", "--enable-prefix-caching", "--model", "a|model", quiet=True) as running:
        done = harness("quick", "--base-url", running.url, *asked, "--ignore-eos", "--markdown", cwd=tmp_path)
        refused = harness("quick", running.url, *asked, "--budget", "1s", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert (refused.code, refused.out.count("cells")) == (1, 0)
    run = read_run(only_run(tmp_path / "runs"))
    names = [f"pp32-tg6{depth}-u{users}" for depth in ("", "-d1024") for users in (1, 2)]
    assert (run.scenario_name, run.status, list(run.scenario.loads)) == ("quick", "valid", names)
    assert [cell.load for cell in run.cells] == [*names, *reversed(names)]
    assert "## a\\|model" in done.out and "SIMULATED" in done.out
    tests = [line.split(" | ")[0].removeprefix("| ") for line in done.out.splitlines() if line.startswith("| pp32 ")]
    assert tests == ["pp32", "pp32 @ d1024"]
    assert "| 2 users | pp32+tg6 @ d1024 |" in done.out
    report = harness("report", "last", "--format", "json", cwd=tmp_path)
    rows = {row["load"]: row["pooled"] for row in json.loads(report.out)["rows"]}
    assert {name: row["succeeded"] for name, row in rows.items()} == dict.fromkeys(names, 8)
    assert {row["output_tokens"] for row in rows.values()} == {48}
    cached = rows["pp32-tg6-d1024-u1"]["cached_tokens"]
    assert cached is not None and cached >= 8 * 1000
    shown = harness("report", "last", cwd=tmp_path)
    assert shown.code == 0 and "pp32 @ d1024" in shown.out


def test_a_context_beyond_that_of_the_server_is_refused_before_the_load(tmp_path: Path) -> None:
    flags = ("--preset", "instant", "--max-model-len", "1024", "--model", "a-model")
    with spawned(*flags, quiet=True) as running:
        too_long = harness("quick", running.url, "--depth", "0,32k", "--users", "1,4", cwd=tmp_path)
        template = harness("quick", running.url, "--prompt", "892", "--output", "124", cwd=tmp_path)
        fits = harness(
            "quick",
            running.url,
            "--prompt",
            "891",
            "--output",
            "124",
            "-r",
            "1",
            "--requests",
            "1",
            "--json",
            cwd=tmp_path,
        )
    assert (too_long.code, template.code) == (1, 1)
    assert (
        too_long.err.startswith("error: --depth: ") and "1,024" in too_long.err and "prompts.tokens" not in too_long.err
    )
    assert template.err.startswith("error: --prompt: ") and "--prompt 891 or less" in template.err
    assert fits.code == 0, fits.err
    assert [row["answers"] for row in json.loads(fits.out)["combinations"]] == [1]
