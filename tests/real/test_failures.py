"""Real servers that do not start or die, a harness that is killed: one sentence, the exit code, nothing left."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.base.errors import ExitCode
from harness.base.reason import sentences
from harness.failures.diagnosis import scan_text
from tests.real.conftest import Say
from tests.real.parts import (
    docker,
    left_behind,
    llamacpp,
    outcome,
    predicted,
    run,
    run_folder,
    running,
    vllm,
    write_scenario,
)
from tests.support.command import PATIENCE_S, until
from tests.support.engines.paths import QWEN3_4M

LOADS = {"bursts": {"user": "batch", "batch_size": 5, "requests": 10, "output_tokens": 16}}
LONG = {
    "bursts": {"user": "batch", "batch_size": 5, "requests": 5000, "output_tokens": 64},
    "more": {"user": "batch", "batch_size": 1, "requests": 10, "output_tokens": 64},
}
SHORTER = {**LONG["bursts"], "output_tokens": 16}
NOT_STARTED = "error: the server did not start; it ended with exit code "
FAILURES: dict[str, tuple[dict[str, Any], str, str, str]] = {  # server, row of the table, sentence, solution
    "llamacpp-unknown-flag": (
        llamacpp(extra_args=["--slots-of-memory", "5"]),
        "cli.unknown_flag",
        "2: the server does not know the argument: --slots-of-memory 5",
        "remove it from extra_args",
    ),
    "llamacpp-bad-model-path": (
        llamacpp(model_path="/models/absent.gguf"),
        "llamacpp.model_file",
        "1: llama.cpp cannot load the model file /models/absent.gguf: No such file or directory",
        "check model_path and that its folder is mounted",
    ),
}


@pytest.mark.parametrize("case", FAILURES)  # what vLLM says is in test_explained.py
def test_a_server_that_does_not_start_ends_in_one_sentence(case: str, tmp_path: Path, say: Say) -> None:
    server, row, sentence, solution = FAILURES[case]
    ran = run(write_scenario(tmp_path, case, model="some", servers={"s": server}, loads=LOADS))
    say(ran.error)
    first, *evidence, last = ran.error.splitlines()
    assert ran.code == ExitCode.SERVER
    assert first == NOT_STARTED + sentence
    assert last.startswith("next: ") and solution in last
    assert evidence and all(line.startswith("  | ") for line in evidence)
    assert any(line.startswith("  | known from: ") and line.endswith(f" [{row}]") for line in evidence)
    reason = f"r1-s-bursts: {first.removeprefix('error: ')}"
    assert (ran.manifest.status, sentences(ran.manifest.reasons)) == ("failed", [reason])
    assert ran.records == []
    scanned = scan_text(ran.folder / "logs" / "r1-s-bursts.server.log")
    cause = scanned.cause()
    assert cause is not None and (cause.id, cause.hint, scanned.ready) == (row, False, None)
    assert left_behind(ran.folder) == []


def engine_core(container: str) -> int:
    """The process of vLLM's engine in a container, as this host numbers it."""
    inside = {int(line.split()[0]) for line in docker("top", container, "-eo", "pid").splitlines()[1:]}
    (pid,) = (one for one in inside if psutil.Process(one).name().startswith("VLLM::EngineCor"))
    return pid


def records_are_there(process: "subprocess.Popen[bytes]", scenario: Path, at_least: int) -> Path:
    """Wait until a run that goes on has so many records; its directory."""

    def look() -> Path | None:
        assert process.poll() is None, scenario.with_suffix(".err").read_text()
        folder = run_folder(scenario)
        if folder is None or not (folder / "requests.jsonl").exists():
            return None
        return folder if (folder / "requests.jsonl").read_bytes().count(b"\n") >= at_least else None

    folder: Path = until(look)
    return folder


def test_an_engine_that_is_killed_in_mid_run_makes_the_run_invalid(tmp_path: Path, say: Say) -> None:
    """As the kernel does when memory runs out: vLLM's engine process is killed inside the container, nothing else."""
    scenario = write_scenario(
        tmp_path, "dies", model="qwen3-4m", servers={"s": vllm()}, loads={**LONG, "bursts": SHORTER}
    )
    with running(scenario) as process:
        folder = records_are_there(process, scenario, 10)
        (name,) = docker("ps", "--filter", f"label=amd-llm-load.run={folder.name}", "--format", "{{.Names}}").split()
        killed_wall_s = time.time()
        os.kill(engine_core(name), signal.SIGKILL)
        process.wait(PATIENCE_S)
        took = time.time() - killed_wall_s
    ran = outcome(scenario, process.returncode)
    (first,) = ran.manifest.cells  # what was to follow on the same server is not run
    noticed = (first.ended_wall_s or 0.0) - killed_wall_s
    say(f"{ran.said}\n{ran.error}\nnoticed and ended after {noticed:.1f} s, over after {took:.1f} s")
    assert (ran.code, ran.manifest.status) == (ExitCode.INVALID, "invalid")
    assert first.served_by.exit_code is not None and not first.served_by.oom_killed
    known = first.served_by.startup
    assert known is not None
    assert (known.kv_cache_gib, known.kv_cache_tokens, known.max_concurrency) == (1.0, *predicted(QWEN3_4M, 1))
    died = "r1-s-bursts: the server died during the load: it ended with exit code "
    (reason,) = [reason for reason in sentences(ran.manifest.reasons) if reason.startswith(died)]
    assert reason.endswith(": vLLM's engine process was killed or crashed without a word, since its log says no reason")
    (evidence,) = [reason for reason in sentences(ran.manifest.reasons) if "of its log says: " in reason]
    number = int(re.findall(r"r1-s-bursts: line (\d+) of its log says: ", evidence)[0])
    lines = (folder / "logs" / "r1-s-bursts.server.log").read_bytes().split(b"\n")
    first_said = next(place for place, line in enumerate(lines, start=1) if b"EngineDeadError: EngineCore" in line)
    assert number == first_said, "at the moment it died"
    assert "to solve it: look for 'Killed process' and for GPU faults in `dmesg`" in evidence
    told = [failed for failed in ran.summary.failures if failed.cause is not None]
    assert told != [] and {failed.id for failed in told} <= {"req.engine_dead", "req.disconnected", "req.refused"}
    assert any("1 of 2 " in reason for reason in sentences(ran.manifest.reasons))
    assert "r1-s-more is not run: the server died" in ran.said
    good = [record for record in ran.records if record.error is None]
    cut = [record.error for record in ran.records if record.error is not None]
    assert len(good) >= 10 and {record.output_tokens for record in good} == {16}
    assert cut and set(cut) <= {"disconnect", "connect", "unfinished", "http", "stream_error", "rejected"}
    assert left_behind(ran.folder) == []
