"""`harness explain` as a person calls it, and what a run says of requests that fail."""

import json
import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from harness.failures.explain import FIRST
from harness.reasons import sentence
from harness.run.drive import scenario_mistake
from harness.rundir.manifest import read_run
from harness.rundir.records import Request, read_requests
from tests.command import HARNESS, harness, only_run, server, write

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


def test_a_log_is_explained(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(FAILED)
    done = harness("explain", "vllm.log", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "vllm.log: 6 lines"
    assert lines[2].startswith("cause gpu_memory_utilization 0.92 asks for 88.32 GiB, but only 76.45 of 96.0 GiB were")
    assert lines[3].startswith("line 5 ValueError: Free memory on device cuda:0 (76.45/96.0 GiB)")
    text = " ".join(lines)
    assert "came through line 6: RuntimeError: Engine core initialization failed." in text
    assert "fix set gpu_memory_utilization lower (to 0.78 or less)" in text
    assert "known from vLLM, vllm/v1/worker/utils.py, request_memory [mem.free_lt_util, start]" in text
    assert "warnings (also seen in healthy starts): line 1 the server may open 20000 files" in text


def test_for_programs(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(FAILED)
    done = harness("explain", "--json", "vllm.log", cwd=tmp_path)
    told = json.loads(done.out)
    assert (done.code, told["lines"], told["recognised"]) == (0, 6, True)
    assert (told["cause"]["id"], told["cause"]["number"], told["cause"]["wrapper_number"]) == ("mem.free_lt_util", 5, 6)
    assert [one["id"] for one in told["findings"]] == ["mem.free_lt_util", "engine.init_failed"]
    assert [one["id"] for one in told["warnings"]] == ["host.ulimit"]


def test_a_pipe() -> None:
    piped = subprocess.run([HARNESS, "explain", "-"], input=FAILED, capture_output=True, text=True, timeout=60)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert piped.stdout.startswith("the standard input: 6 lines\n")
    read, write = os.pipe()  # as <(docker logs vllm) in a shell
    with os.fdopen(write, "w") as pipe:
        pipe.write(FAILED)
    named = subprocess.run(
        [HARNESS, "explain", f"/dev/fd/{read}"], capture_output=True, text=True, timeout=60, pass_fds=[read]
    )
    os.close(read)
    assert (named.returncode, named.stderr) == (0, "")
    assert named.stdout.startswith(f"/dev/fd/{read}: 6 lines\n")


def test_what_docker_inspect_says(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"Status":"exited","OOMKilled":true,"ExitCode":137}\n')
    done = harness("explain", "state.json", cwd=tmp_path)
    assert done.code == 0 and "the container's memory limit was reached" in done.out


@pytest.mark.parametrize("text", ["", "all is well\n", "Found ulimit of 20000 and failed to automatically increase\n"])
def test_nothing_recognised_has_an_exit_code_and_a_next_step(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.log").write_text(text)
    done = harness("explain", "some.log", cwd=tmp_path)
    assert (done.code, done.err) == (4, "")
    assert "No failure that the table knows is in this log." in done.out
    assert "dmesg | harness explain -" in done.out
    assert json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)["cause"] is None


STARTS = Path(__file__).parent / "data" / "startup"
GOOD_STARTS = {
    "vLLM": "(APIServer pid=1) INFO 11-21 08:53:41 [api.py:1] vLLM API server\nHIP out of memory\n"
    "(APIServer pid=1) INFO:     Application startup complete.\n"
    "Found ulimit of 20000 and failed to automatically increase\n",
    "llama.cpp": "llama_model_loader: loaded\n0.00.100.000 I main: server is listening on http://0.0.0.0:8080\n",
}


@pytest.mark.parametrize("server_name", GOOD_STARTS)
def test_a_good_start_is_said_to_be_one(tmp_path: Path, server_name: str) -> None:
    text = GOOD_STARTS[server_name]
    (tmp_path / "some.log").write_text(text)
    done = harness("explain", "some.log", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    said = " ".join(done.out.split())
    ready = next(
        n for n, line in enumerate(text.splitlines(), start=1) if "startup complete" in line or "listen" in line
    )
    assert f"It started well, and the log names no failure after that. line {ready} it says that it is ready" in said
    assert "No failure that the table knows" not in said and "DEBUG" not in said
    assert ("got over the GPU's memory is used up" in said) == ("HIP" in text)
    told = json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)
    assert (told["started"], told["cause"]) == (True, None)


@pytest.mark.parametrize(
    "name", ["llamacpp", "llamacpp-docker", "vllm-cold", "vllm-eager-docker", "lemonade-vllm-warm", "sglang-cpu"]
)
def test_logs_of_real_starts_are_good_ones(name: str) -> None:
    told = json.loads(harness("explain", f"{name}.txt", "--json", cwd=STARTS).out)
    assert (told["started"], told["recognised"], told["findings"]) == (True, False, [])


STOPPED = Path(__file__).parent / "data" / "stopped"
# The first three, sglang and vllm-killed are of real servers. Lemonade's lines are put around vLLM's as it puts them;
# Ollama's, which logs its end with OLLAMA_DEBUG=1 alone, are written after its source.
STOPS = {"vllm": 6, "vllm-busy": 7, "llamacpp": 20, "lemonade-vllm": 8, "ollama": 6, "sglang": 32}


@pytest.mark.parametrize("name", STOPS)
def test_logs_of_servers_that_were_stopped(name: str) -> None:
    done = harness("explain", f"{name}.txt", "--json", cwd=STOPPED)
    told = json.loads(done.out)
    assert (done.code, told["stopped"]) == (0, True)
    assert (told["cause"], told["findings"], told["recognised"]) == (None, [], False)
    shown = " ".join(harness("explain", f"{name}.txt", cwd=STOPPED).out.split())
    assert f"It stopped normally. line {STOPS[name]} it began to stop" in shown
    assert "No failure that the table knows" not in shown and "It started well" not in shown


def test_an_engine_that_lemonade_unloads_has_not_crashed_and_lemonade_goes_on(tmp_path: Path) -> None:
    lines = (STOPPED / "lemonade-vllm.txt").read_text().splitlines(keepends=True)
    (tmp_path / "some.log").write_text("".join([*lines[:7], *lines[10:-2]]))
    told = json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)
    assert (told["stopped"], told["started"], told["findings"]) == (False, True, [])


def test_a_crash_before_the_stop_is_a_crash(tmp_path: Path) -> None:
    """A killed engine makes vLLM's API server shut down as in order, even with exit code 0."""
    told = json.loads(harness("explain", "vllm-killed.txt", "--json", cwd=STOPPED).out)
    assert (told["stopped"], told["cause"]["id"], told["cause"]["number"]) == (False, "engine.dead", 18)
    stopped = (STOPPED / "lemonade-vllm.txt").read_text()
    first = stopped.splitlines(keepends=True)
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    (tmp_path / "some.log").write_text("".join([*first[:7], dead, *first[7:]]))
    told = json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)
    assert (told["stopped"], told["cause"]["id"], told["cause"]["number"]) == (False, "engine.dead", 8)


@pytest.mark.parametrize("start", ["vllm", "lemonade-vllm", "llamacpp"])
def test_a_crash_of_the_next_start_is_one(tmp_path: Path, start: str) -> None:
    """`docker logs` of a container that was restarted; Lemonade that loaded another model."""
    text = (STOPPED / f"{start}.txt").read_text()
    again = "".join(text.splitlines(keepends=True)[: STOPS[start] - 1])
    for crash in ("vllm.v1.engine.exceptions.EngineDeadError: x", "RuntimeError: Engine core initialization failed."):
        (tmp_path / "some.log").write_text(f"{text}{again}{crash}\n")
        told = json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)
        assert (told["stopped"], told["recognised"]) == (False, True)
    (tmp_path / "some.log").write_text(text + "torch.OutOfMemoryError: HIP out of memory.\n")
    assert json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)["cause"]["id"] == "mem.hip_oom"


def test_a_failure_after_a_good_start_is_no_good_start(tmp_path: Path) -> None:
    for later, code in (("HIP out of memory\n", 0), ("KeyError: 'x'\n", 4)):
        (tmp_path / "some.log").write_text(GOOD_STARTS["vLLM"] + later)
        done = harness("explain", "some.log", cwd=tmp_path)
        assert done.code == code and "started well" not in done.out
        assert json.loads(harness("explain", "some.log", "--json", cwd=tmp_path).out)["started"] is False


def test_only_the_log_of_a_server_without_a_reason_asks_it_to_say_more(tmp_path: Path) -> None:
    advice = {
        "INFO 11-21 08:53:41 [api.py:1] vLLM API server\nbye\n": "(VLLM_LOGGING_LEVEL=DEBUG)",
        "llama_model_loader: x\nbye\n": "(--verbose)",
        "2026-08-20 10:00:00.000 [Info] (WrappedServer) x\n": "(log_level debug)",
        "[ 12.3] usb 1-1: new device\n": None,
        '{"Status":"running","ExitCode":0}\n': None,
    }
    for text, expected in advice.items():
        (tmp_path / "some.log").write_text(text)
        done = harness("explain", "some.log", cwd=tmp_path)
        said = " ".join(done.out.split())
        assert done.code == 4
        assert ("Have the server say more" in said) == (expected is not None)
        if expected is not None:
            assert f"{expected} and start it again; switch that off before you measure" in said


def test_no_secret_and_no_control_character_is_printed(tmp_path: Path) -> None:
    raised = "KeyError: 'HF_TOKEN=plainword --api-key sk-verysecret123456 \x1b[2J\x9b31m\x85'\n"
    log = f"{raised}{FAILED}last hf_abcdefghijk12\n"
    name = "so\x1bme.log"
    (tmp_path / name).write_text(log)
    for option in ((), ("--json",)):
        done = harness("explain", name, *option, cwd=tmp_path)
        assert done.code == 0
        assert not any(secret in done.out for secret in ("plainword", "verysecret", "hf_abc"))
        assert not any(control in done.out for control in "\x1b\x9b\x85")


def test_an_unknown_exception_is_shown_and_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_text("INFO x\nKeyError: 'model.layers.0'\n")
    done = harness("explain", "some.log", cwd=tmp_path)
    assert done.code == 4
    assert "it raised an exception that is not in the table: KeyError: 'model.layers.0'" in done.out


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "r1-a-b.server.log").touch()
    missing = harness("explain", "none.log", cwd=tmp_path)
    assert (missing.code, missing.err) == (
        1,
        "error: none.log: there is no such file\nnext: Give a log, or - to read a pipe.\n",
    )
    folder = harness("explain", "run", cwd=tmp_path)
    assert (folder.code, folder.err.splitlines()[0]) == (
        1, "error: run is a directory; it holds run/logs/r1-a-b.server.log",
    )  # fmt: skip


def test_a_long_log_takes_seconds(tmp_path: Path) -> None:
    line = '(APIServer pid=1) INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    with (tmp_path / "long.log").open("w") as file:
        for _ in range(20):
            file.write(line * 11_000)  # a megabyte
        file.write("torch.OutOfMemoryError: HIP out of memory.\n")
    began = time.process_time()
    done = harness("explain", "long.log", "--json", cwd=tmp_path)
    assert json.loads(done.out)["cause"]["number"] == 220_001
    assert time.process_time() - began < 5


def failing(message: str, count: int = FIRST) -> list[Request]:
    made = Request(
        id="a", cell="c", load="l", user_class="u", index=0, user=0, process=1, phase="warmup", sent_s=0.0, ended_s=0.1,
        error="http", message=message,
    )  # fmt: skip
    return [made] * count


def test_the_rule_that_ends_a_load() -> None:
    wrong = "status 404: NotFoundError 404: The model `nope` does not exist."
    said = scenario_mistake(failing(wrong))
    assert said is not None
    assert sentence(said).startswith(
        "the load was ended because the first 5 requests all failed because of a scenario error: "
        "the server has no model named nope; to solve it: set `model` to the id that its /v1/models names"
    )
    good = msgspec.structs.replace(failing(wrong)[0], error=None, message=None)
    assert scenario_mistake([*failing(wrong, 4), good]) is None, "one that succeeded is enough to go on"
    assert scenario_mistake(failing("status 500: boom")) is None
    assert scenario_mistake([*failing(wrong, 4), *failing("status 500: boom", 1)]) is None


def test_requests_that_do_not_fit_end_the_load_at_once(tmp_path: Path) -> None:
    loads = {"burst": {"user": "batch", "batch_size": 5, "requests": 10_000, "output_tokens": 5000}}
    path = write(tmp_path, loads=loads, repeats=2, servers={"one": server("--max-model-len", "2048")})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    run = only_run(tmp_path / "runs")
    assert done.code == 3
    assert len(list(read_requests(run / "requests.jsonl"))) < 2_000
    manifest = read_run(run)
    assert [len(cell.problems) for cell in manifest.cells] == [1, 1]
    mistake = manifest.cells[0].problems[0]
    assert (mistake.code, mistake.values["requests"], mistake.values["cause"]) == (
        "scenario_mistake", 5, "a request does not fit into the server's context (of 2048 tokens, answer 5000)"
    )  # fmt: skip
    assert "Why requests failed" in done.out
    assert "(http): a request does not fit into the server's context" in " ".join(done.out.split())
    markdown = harness("report", run.name, "--runs", "runs", "--format", "markdown", cwd=tmp_path).out
    assert "**Why requests failed**\n\n- one / burst: " in markdown
    page = (run / "report.html").read_text()
    assert "one / burst: " in page


def test_failed_requests_are_explained_with_counts(tmp_path: Path) -> None:
    loads = {"burst": {"user": "batch", "batch_size": 4, "requests": 12, "output_tokens": 5}}
    path = write(tmp_path, loads=loads, warmup={"requests": 0}, servers={"one": server("--fault", "500-html@2")})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    summary = json.loads((only_run(tmp_path / "runs") / "summary.json").read_text())
    print(done.out, summary["failures"])
    (failed,) = summary["failures"]
    assert (failed["server"], failed["load"], failed["kind"], failed["id"]) == (
        "one",
        "burst",
        "http",
        "req.server_error",
    )
    assert failed["count"] == sum(summary["rows"][0]["pooled"]["errors"].values())
