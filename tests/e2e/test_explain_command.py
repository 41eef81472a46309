"""`harness explain` as a person calls it, and what a run says of requests that fail."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.reason import sentence
from harness.failures.diagnosis import FIRST_REQUESTS, scan_text
from harness.questions.explain import explanation_data, explanation_page
from harness.records.manifest import read_run
from harness.records.records import Request, read_requests
from harness.report.terminal import print_page
from harness.run.drive import scenario_mistake
from tests.support.command import HARNESS, PATIENCE_S, harness, only_run, server, write
from tests.support.wording import Wording

FAILED = """\
2026-11-21T09:15:01.0000Z (APIServer pid=1) WARNING 11-21 09:15:01 [system_utils.py:255] Found ulimit of 20000 and \
failed to automatically increase with error x
2026-11-21T09:15:29.0000Z (EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510] Traceback (most recent call last):
2026-11-21T09:15:29.0000Z (EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510]   File "/x.py", line 3, in f
2026-11-21T09:15:29.0000Z (EngineCore pid=9) ERROR 11-21 09:15:29 [core.py:1510]     except OutOfMemoryError:
2026-11-21T09:15:29.000000000Z \x1b[31m(EngineCore pid=9)\x1b[0m ERROR 11-21 09:15:29 [core.py:1510] ValueError: Free \
memory on device cuda:0 (76.45/96.0 GiB) on startup is less than desired GPU memory utilization (0.92, 88.32 GiB). Decr
2026-11-21T09:15:30.000000000Z RuntimeError: Engine core initialization failed. See root cause above.
"""


def explained(log: str | Path) -> dict[str, Any]:
    """What `harness explain --json` prints of a log."""
    return explanation_data("some.log", scan_text(log))


def explained_text(log: str | Path) -> str:
    """What `harness explain` prints of a log, without line breaks."""
    console = Console(width=200)
    with console.capture() as capture:
        print_page(explanation_page("some.log", scan_text(log)), console)
    return " ".join(capture.get().split())


def test_a_log_is_explained(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "vllm.log").write_text(FAILED)
    done = harness("explain", "vllm.log", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "0.78" in done.out and "mem.free_lt_util" in done.out
    wording(done.out)


def test_for_programs_and_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(FAILED)
    done = harness("explain", "--json", "vllm.log", cwd=tmp_path)
    found = json.loads(done.out)
    assert (done.code, found["lines"], found["recognised"]) == (0, 6, True)
    assert (found["cause"]["id"], found["cause"]["number"], found["cause"]["wrapper_number"]) == (
        "mem.free_lt_util", 5, 6,
    )  # fmt: skip
    assert [one["id"] for one in found["findings"]] == ["mem.free_lt_util", "engine.init_failed"]
    assert [one["id"] for one in found["warnings"]] == ["host.ulimit"]
    stopped = harness("explain", "vllm.txt", "--json", cwd=STOPPED)
    assert (stopped.code, json.loads(stopped.out)["stopped"]) == (0, True)
    for place, name in (("-", "the standard input"), ("/dev/fd/0", "/dev/fd/0")):  # as <(docker logs vllm) in a shell
        piped = subprocess.run(
            [HARNESS, "explain", place], input=FAILED, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (piped.returncode, piped.stderr) == (0, "")
        assert piped.stdout.startswith(f"{name}: 6 lines\n")


def test_nothing_recognised_has_an_exit_code_and_a_next_step(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "some.log").write_text("all is well\nFound ulimit of 20000 and failed to automatically increase\n")
    done = harness("explain", "some.log", cwd=tmp_path)
    assert (done.code, done.err) == (4, "")
    wording(done.out)


STARTS = Path(__file__).parents[1] / "data" / "startup"
GOOD_STARTS = {
    "vLLM": "(APIServer pid=1) INFO 11-21 08:53:41 [api.py:1] vLLM API server\nHIP out of memory\n"
    "(APIServer pid=1) INFO:     Application startup complete.\n"
    "Found ulimit of 20000 and failed to automatically increase\n",
    "llama.cpp": "llama_model_loader: loaded\n0.00.100.000 I main: server is listening on http://0.0.0.0:8080\n",
}


@pytest.mark.parametrize("server_name", GOOD_STARTS)
def test_a_good_start_is_said_to_be_one(server_name: str, wording: Wording) -> None:
    text = GOOD_STARTS[server_name]
    said = explained_text(text)
    wording(said)
    assert "DEBUG" not in said
    assert ("got over" in said) == ("HIP" in text)
    assert (explained(text)["started"], explained(text)["cause"]) == (True, None)


@pytest.mark.parametrize(
    "name", ["llamacpp", "llamacpp-docker", "vllm-cold", "vllm-eager-docker", "lemonade-vllm-warm", "sglang-cpu"]
)
def test_logs_of_real_starts_are_good_ones(name: str) -> None:
    found = explained(STARTS / f"{name}.txt")
    assert (found["started"], found["recognised"], found["findings"]) == (True, False, [])


STOPPED = Path(__file__).parents[1] / "data" / "stopped"
# The first three, sglang and vllm-killed are of real servers. Lemonade's lines are put around vLLM's as it puts them;
# Ollama's, which logs its end with OLLAMA_DEBUG=1 alone, are written after its source.
STOPS = {"vllm": 6, "vllm-busy": 7, "llamacpp": 20, "lemonade-vllm": 8, "ollama": 6, "sglang": 32}


@pytest.mark.parametrize("name", STOPS)
def test_logs_of_servers_that_were_stopped(name: str, wording: Wording) -> None:
    found, said = explained(STOPPED / f"{name}.txt"), explained_text(STOPPED / f"{name}.txt")
    assert (found["stopped"], found["cause"], found["findings"], found["recognised"]) == (True, None, [], False)
    wording(said)


def test_a_crash_before_the_stop_is_a_crash() -> None:
    """A killed engine makes vLLM's API server shut down as in order, even with exit code 0."""
    found = explained(STOPPED / "vllm-killed.txt")
    assert (found["stopped"], found["cause"]["id"], found["cause"]["number"]) == (False, "engine.dead", 18)
    first = (STOPPED / "lemonade-vllm.txt").read_text().splitlines(keepends=True)
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    found = explained("".join([*first[:7], dead, *first[7:]]))
    assert (found["stopped"], found["cause"]["id"], found["cause"]["number"]) == (False, "engine.dead", 8)


@pytest.mark.parametrize("start", ["vllm", "lemonade-vllm", "llamacpp"])
def test_a_crash_of_the_next_start_is_one(start: str) -> None:
    """`docker logs` of a container that was restarted; Lemonade that loaded another model."""
    text = (STOPPED / f"{start}.txt").read_text()
    again = "".join(text.splitlines(keepends=True)[: STOPS[start] - 1])
    for crash in ("vllm.v1.engine.exceptions.EngineDeadError: x", "RuntimeError: Engine core initialization failed."):
        found = explained(f"{text}{again}{crash}\n")
        assert (found["stopped"], found["recognised"]) == (False, True)
    assert explained(text + "torch.OutOfMemoryError: HIP out of memory.\n")["cause"]["id"] == "mem.hip_oom"


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "r1-a-b.server.log").touch()
    for name, said in (
        ("none.log", "none.log: there is no such file"),
        ("run", "run is a directory; it holds run/logs/r1-a-b.server.log"),
    ):
        done = harness("explain", name, cwd=tmp_path)
        assert (done.code, done.err.startswith(f"error: {said}")) == (1, True), done.err


def failing(message: str, count: int = FIRST_REQUESTS) -> list[Request]:
    made = Request(
        id="a", cell="c", load="l", user_class="u", index=0, user=0, process=1, phase="warmup", sent_s=0.0, ended_s=0.1,
        error="http", message=message,
    )  # fmt: skip
    return [made] * count


def test_the_rule_that_ends_a_load(wording: Wording) -> None:
    wrong = "status 404: NotFoundError 404: The model `nope` does not exist."
    said = scenario_mistake(failing(wrong))
    assert said is not None
    wording(sentence(said))
    good = replace(failing(wrong)[0], error=None, message=None)
    assert scenario_mistake([*failing(wrong, 4), good]) is None, "one that succeeded is enough to go on"
    assert scenario_mistake(failing("status 500: boom")) is None
    assert scenario_mistake([*failing(wrong, 4), *failing("status 500: boom", 1)]) is None


def test_requests_that_do_not_fit_end_the_load_at_once(tmp_path: Path) -> None:
    # Some would fit, so the load is sent.
    lengths = {"uniform": [1, 100_000]}
    loads = {"burst": {"user": "batch", "batch_size": 5, "requests": 10_000, "output_tokens": lengths}}
    path = write(tmp_path, loads=loads, repeats=2, servers={"one": server("--max-model-len", "2048")})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    run = only_run(tmp_path / "runs")
    assert done.code == 3
    assert len(list(read_requests(run / "requests.jsonl"))) < 2_000
    manifest = read_run(run)
    assert [len(cell.problems) for cell in manifest.cells] == [1, 1]
    mistake = manifest.cells[0].problems[0]
    assert (mistake.code, mistake.values["requests"]) == ("scenario_mistake", 5)
    assert "2048" in mistake.values["cause"]
    assert "(http): " in " ".join(done.out.split())
    markdown = harness("report", run.name, "--runs", "runs", "--format", "markdown", cwd=tmp_path).out
    assert "\n- one / burst: " in markdown
    page = (run / "report.html").read_text()
    assert "one / burst: " in page
