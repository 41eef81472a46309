"""Bad input ends in one clear sentence with what to do next, the documented exit code, and nothing left running."""

import ctypes
import json
import socket
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.base.process import free_port
from harness.base.reason import sentences
from harness.records.manifest import read_run
from tests.support.command import Done, harness, only_run, server, write
from tests.support.faults import fault
from tests.support.http_double import Handler
from tests.support.wording import Wording


def run(path: Path, *args: str, **more: Any) -> Done:
    return harness("run", path.name, *args, "--runs", "runs", cwd=path.parent, **more)


def without_rights() -> None:
    """In the child, before its exec: a root without the right to read and write what it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


# What is found before anything is started leaves no run directory.


def refused(wording: Wording, path: Path, done: Done, *starts: str) -> None:
    """An error in which each of these starts a line."""
    assert (done.code, done.out) == (1, "")
    lines = done.err.splitlines()
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == [], done.err
    assert lines[0].startswith("error: ") and lines[-1].startswith("next: ")
    assert not (path.parent / "runs").exists()
    wording(done.err)


LENGTHS = {"user": "batch", "requests": 1, "output_tokens": {"file": "lengths.txt"}}


@pytest.mark.parametrize(
    ("changes", "files", "starts"),
    [
        pytest.param(
            {"repeat": 3, "seed": -1, "loads": {"Burst": {"user": "bach", "requests": "many"}}}, {},
            ["error: small.yaml: 4 ", "$.loads.Burst (line 11): 'Burst' ", "$.loads.Burst.requests (line 13): ",
             "$.repeat (line 19): ", "$.seed (line 20): "],
            id="several",
        ),
        pytest.param(
            {"prompts": {"kind": "file", "file": "some.jsonl"}},
            {"some.jsonl": '{"prompt": "a"}\n{"promt": "b"}\n'},
            ["error: some.jsonl:2: "],
            id="damaged prompts",
            marks=fault(
                "input", "a damaged line in a file of prompts",
                seen="some.jsonl:2: exactly one of 'prompt' and 'messages' is expected", code=1, kept="no run is begun",
            ),
        ),
        pytest.param(
            {"loads": {"a": LENGTHS, "b": LENGTHS}, "checks": ["wall"]}, {"lengths.txt": "ten\n5\n"},
            ["error: small.yaml: 2 ", "$.loads.a.output_tokens (line 14): lengths.txt:1: 'ten' "],
            id="a damaged file of several loads",
        ),
    ],
)  # fmt: skip
def test_an_invalid_scenario(
    tmp_path: Path, changes: dict[str, Any], files: dict[str, str], starts: list[str], wording: Wording
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = write(tmp_path, **changes)
    refused(wording, path, run(path), *starts)


def test_a_mistake_in_an_option_is_reported_with_those_of_the_scenario(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path, checks=["wall"])
    refused(
        wording, path, run(path, "--check", "two/burst: wall < 1 s"), "error: small.yaml: 2 ",
        "$.checks[0] (line 22): check 'wall': ", "--check 'two/burst: wall < 1 s': 'two' ",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            b"version: 1\nquestion: [a\nmodel: x\n",
            " line 3, column 6: ",
            id="yaml",
            marks=fault(
                "input", "a scenario that is no YAML", seen="not valid YAML at line 3, column 6", code=1,
                kept="no run is begun",
            ),
        ),
        pytest.param(
            b"\x89PNG\r\n\x1a\n\xff", "UTF-8",
            id="binary",
            marks=fault(
                "input", "a binary file as a scenario", seen="not a text file in UTF-8", code=1, kept="no run is begun"
            ),
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_scenario(tmp_path: Path, content: bytes, message: str, wording: Wording) -> None:
    path = tmp_path / "small.yaml"
    path.write_bytes(content)
    done = run(path)
    assert done.code == 1 and done.err.startswith("error: small.yaml: ") and message in done.err
    wording(done.err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "first-lok"), "first-lok: "),
        (("check", "."), ".: "),
        (("compare", "nothing", "other"), "nothing: "),
    ],
)
def test_missing_files_and_runs(tmp_path: Path, arguments: tuple[str, ...], message: str, wording: Wording) -> None:
    refused(wording, tmp_path / "none", harness(*arguments, cwd=tmp_path), f"error: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from locust import task\nclass X(:\n", ", line 2: "),
        ('x = 1\n\ndef f():\n    raise ValueError("boom")\nf()\n',
         ", line 4: "),
        ("import locust\nfrom locustfiles.chat import ChatUser\n\nclass Steps(locust.LoadTestShape):\n    pass\n",
         ", line 4: "),
        ("from locust import HttpUser\nclass Stock(HttpUser):\n    pass\n",
         ": "),
    ],
    ids=["syntax", "raises", "shape", "stock"],
)  # fmt: skip
@fault("input", "a locustfile with a mistake (4 cases)", seen="mine.py", code=1, kept="no run is begun")
def test_locustfile(tmp_path: Path, text: str, message: str, wording: Wording) -> None:
    (tmp_path / "mine.py").write_text(text)
    path = write(tmp_path, loads={"mine": {"user": "mine.py", "requests": 2}})
    refused(wording, path, run(path), f"error: {tmp_path}/mine.py{message}")


@pytest.mark.parametrize("value", [None, "  "])
@fault("input", "the API key is not set",
       seen="the environment variable MY_TEST_KEY, which should hold the API key, is not set", code=1,
       kept="no run is begun")  # fmt: skip
def test_api_key_not_set(tmp_path: Path, value: str | None, wording: Wording) -> None:
    path = write(tmp_path, api_key_env="MY_TEST_KEY")
    done = run(path, env={} if value is None else {"MY_TEST_KEY": value})
    refused(wording, path, done)
    assert " MY_TEST_KEY" in done.err.splitlines()[0]


@pytest.mark.parametrize("value", ["sk-\u0142-key", "two\nlines", "key\r\nX-Other: b", "key\x7fy"])
@fault("input", "the API key has a line end or a character outside of latin-1",
       seen="character 4 of the API key cannot be sent in a header of HTTP", code=1,
       kept="no run is begun")  # fmt: skip
def test_an_api_key_that_no_header_carries(tmp_path: Path, value: str, wording: Wording) -> None:
    path = write(tmp_path, api_key_env="MY_TEST_KEY")
    done = run(path, "--url", "http://127.0.0.1:9", env={"MY_TEST_KEY": value})
    refused(wording, path, done)
    assert " MY_TEST_KEY: character 4 " in done.err.splitlines()[0] and value not in done.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://a b"])
def test_an_invalid_url(tmp_path: Path, url: str, wording: Wording) -> None:
    path = write(tmp_path)
    refused(wording, path, run(path, "--url", url), f"error: --url: '{url}' ")


@fault("disk", "the run directory cannot be written",
       seen="the run directory cannot be written (Permission denied)", code=1, kept="no run is begun")  # fmt: skip
def test_run_directory_not_writable(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "runs").mkdir(mode=0o555)
    done = run(path, before=without_rights)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: runs/")
    assert done.err.splitlines()[0].endswith("(Permission denied)")


# What is found while a server is started leaves a run directory only where the server has a log.


def failed(path: Path, fact: str, *args: str, **more: Any) -> Done:
    """A run that fails with exit code 2 says what is wrong, with this in it, and what to do."""
    done = run(path, *args, **more)
    first, advice = [line for line in done.err.splitlines() if not line.startswith("  | ")]
    assert (done.code, first[:7], advice[:6]) == (2, "error: ", "next: ")
    assert fact in first
    if not list(path.parent.glob("runs/*/logs/*.server.log")):
        assert list(path.parent.glob("runs/*")) == []
        return done
    manifest = read_run(only_run(path.parent / "runs"))
    (reason,) = sentences(manifest.reasons)
    assert manifest.status == "failed" and reason.endswith(first.removeprefix("error: "))
    return done


@fault("network", "the port of the server is taken", seen="port ... is in use already", code=2,
       kept="nothing, no request was sent")  # fmt: skip
def test_port_in_use(tmp_path: Path, wording: Wording) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one, port = server(), listening.getsockname()[1]
        one["variables"]["host_port"] = port
        done = failed(write(tmp_path, servers={"one": one}), f" {port} ")
    wording(done.err, PORT=port)


@pytest.mark.parametrize(
    ("socket_mode", "sentence"),
    [
        pytest.param(None, "No such file or directory", marks=fault(
            "engine", "there is no Docker Engine", seen="cannot be used: No such file or directory", code=2,
            kept="nothing, no request was sent")),
        pytest.param(0o600, "Connection refused", marks=fault(
            "engine", "the Docker Engine does not run", seen="cannot be used: Connection refused", code=2,
            kept="nothing, no request was sent")),
        pytest.param(0, "Permission denied", marks=fault(
            "engine", "no permission on the socket of the Docker Engine",
            seen="cannot be used: Permission denied", code=2, kept="nothing, no request was sent")),
    ],
)  # fmt: skip
def test_a_docker_engine_that_cannot_be_used(
    tmp_path: Path, socket_mode: int | None, sentence: str, wording: Wording
) -> None:
    path, where = write(tmp_path, servers={"one": {"template": "vllm-cpu"}}), tmp_path / "d.sock"
    if socket_mode is not None:  # the socket's file, on which nothing listens any more
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(where))
        where.chmod(socket_mode)
    rights = without_rights if socket_mode == 0 else None
    done = failed(path, sentence, env={"DOCKER_HOST": f"unix://{where}"}, before=rights)
    assert f" unix://{where} " in done.err
    wording(done.err)


class OfflineEngine(Handler):
    """As much of a Docker Engine without a network as is asked before a pull fails."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].split("/", 2)[-1] if self.path.startswith("/v1") else self.path[1:]
        if path == "version":
            self.answer(200, json.dumps({"ApiVersion": "1.45", "Version": "26.1.0"}))
        elif path.startswith("images/"):
            self.answer(404, json.dumps({"message": "No such image"}))
        elif path == "volumes":
            self.answer(200, json.dumps({"Volumes": []}))
        else:
            self.answer(200, json.dumps([]))

    def do_POST(self) -> None:
        message = 'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io: no such host'
        self.answer(500, json.dumps({"message": message}))


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        pytest.param(
            {"template": "vllm-cpu", "variables": {"image": "example/engine:1"}},
            " example/engine:1 ",
            marks=fault("engine", "the image is not there and its registry cannot be reached",
                        seen="is not on this machine and cannot be pulled: its registry cannot be reached", code=2,
                        kept="nothing, no request was sent"),
        ),
        ({"template": "simulated"}, " amd-llm-load:local "),
    ],
)  # fmt: skip
def test_image_not_available(tmp_path: Path, one: dict[str, Any], sentence: str, wording: Wording) -> None:
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "d.sock"), OfflineEngine) as engine:
        thread = threading.Thread(target=engine.serve_forever, args=(0.01,))
        thread.start()
        try:
            path = write(tmp_path, servers={"one": one})
            done = failed(path, sentence, env={"DOCKER_HOST": f"unix://{engine.server_address}"})
            wording(done.err)
        finally:
            engine.shutdown()
            thread.join()


@fault("server", "the server ends while it starts", seen="the server did not start; it ended with exit code 1", code=2,
       kept="its log")  # fmt: skip
def test_server_that_exits_at_once(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path, servers={"one": server("--fail-start", "RuntimeError: no memory left for it")})
    done = failed(path, ": RuntimeError: no memory left for it")
    wording(done.err.splitlines()[0])
    log = only_run(tmp_path / "runs").relative_to(tmp_path) / "logs" / "r1-one-burst.server.log"
    assert "line 4: RuntimeError: " in done.err
    assert str(log) in done.err


@fault("server", "the server never becomes ready", code=2, kept="its log",
       seen="the server did not become ready within 1.5 s; last seen at GET .../health: HTTP 503")  # fmt: skip
def test_server_that_is_never_ready(tmp_path: Path, wording: Wording) -> None:
    one, port = server("--fault", "never-ready", startup_timeout_s=1.5), free_port()
    one["variables"]["host_port"] = port
    done = failed(write(tmp_path, servers={"one": one}), f" 1.5 s; last seen at GET http://127.0.0.1:{port}/health: ")
    wording(done.err.splitlines()[0], PORT=port)


@fault("server", "the answers are HTML pages", code=2, kept="nothing, no request was sent",
       seen="answers with an HTML page, not with an OpenAI-compatible API (HTTP 200)")  # fmt: skip
def test_server_whose_answers_are_html(tmp_path: Path) -> None:
    done = run(write(tmp_path, servers={"one": server("--fault", "html")}))
    first = done.err.splitlines()[0]
    assert done.code == 2 and first.startswith("error: http://127.0.0.1:")
    assert first.endswith("(HTTP 200)")


@fault("network", "nothing listens at the address", seen="connection refused, nothing listens there", code=2,
       kept="nothing, no request was sent")  # fmt: skip
def test_nothing_listens(tmp_path: Path, wording: Wording) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    done = failed(write(tmp_path), f" {url}/models: ", "--url", f"{url}/")
    wording(done.err, URL=url)
    assert done.out == "" and not (tmp_path / "runs").exists()


# After a run.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{ garbage", "JSON is malformed: object keys must be strings (byte 2)"),
        ('{"format_version": 1, "weather": "fine"}', "Object contains unknown field `weather`"),
    ],
)
@fault("disk", "a damaged run directory", seen="run.json", code=1, kept="the other runs can be read")
def test_damaged_run(tmp_path: Path, text: str, why: str, wording: Wording) -> None:
    (tmp_path / "[bold]x").mkdir()
    (tmp_path / "[bold]x" / "run.json").write_text(text)
    done = harness("report", "[bold]x", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: [bold]x/run.json: ") and f"({why})\n" in done.err
    wording(done.err)
    listed = harness("list", "runs", "--runs", ".", cwd=tmp_path)
    assert listed.code == 0 and "unreadable" in listed.out
    assert listed.out.splitlines()[1].startswith("[bold]x "), "by its name, whatever brackets it has"
