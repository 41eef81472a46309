"""Bad input ends in one clear sentence with what to do next, the documented exit code, and nothing left running."""

import ctypes
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.process import free_port
from harness.reasons import sentences
from harness.rundir.manifest import read_run
from tests.command import Done, harness, only_run, server, write
from tests.faults import fault
from tests.http_double import Handler, listening

CORRECT = "next: Correct the file and run `harness check` on it.\n"
ALONE = "next: Correct it; it can be tried alone with `locust -f FILE --host URL`.\n"


def run(path: Path, *args: str, **more: Any) -> Done:
    return harness("run", path.name, *args, "--runs", "runs", cwd=path.parent, **more)


def without_rights() -> None:
    """In the child, before its exec: a root without the right to read and write what it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def unused_port() -> int:
    return free_port()


# What is found before anything is started leaves no run directory.


def refused(path: Path, done: Done, sentence: str) -> None:
    assert (done.code, done.out, done.err) == (1, "", sentence)
    assert not (path.parent / "runs").exists()


PROMPT_LINES = (
    'next: Each line is a JSON object: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}. '
    "Files of ShareGPT conversations and OpenAI batch files are known as well.\n"
)
LENGTHS = {"user": "batch", "requests": 1, "output_tokens": {"file": "lengths.txt"}}


@pytest.mark.parametrize(
    ("changes", "files", "said"),
    [
        pytest.param(
            {"servers": {"one": {"template": "vllm-rocn"}}}, {},
            "small.yaml: 1 problem\n"
            "$.servers.one.template (line 6): there is no server template 'vllm-rocn'; did you mean 'vllm-rocm'?\n"
            + CORRECT,
            id="template",
        ),
        pytest.param(
            {"servers": {"one": {"template": "vllm-rocm", "variables": {"max_num_seq": 4}}}}, {},
            "small.yaml: 1 problem\n"
            "$.servers.one.variables.max_num_seq (line 8): unknown variable; did you mean 'max_num_seqs'?\n" + CORRECT,
            id="variable",
        ),
        pytest.param(
            {"repeat": 3, "seed": -1, "loads": {"Burst": {"user": "bach", "requests": "many"}}}, {},
            "small.yaml: 5 problems\n"
            "$.loads.Burst (line 11): 'Burst' is not a name: lower-case letters, digits and '-', at most 40\n"
            "$.loads.Burst.requests (line 13): a whole number is expected, got 'many'\n"
            "$.repeat (line 19): unknown key; did you mean 'repeats'?\n"
            "$.seed (line 20): a whole number of at least 0 is expected, got -1\n"
            "$.loads.Burst.user (line 12): 'bach' is neither a user class that ships nor a .py file; "
            "did you mean 'batch'?\n" + CORRECT,
            id="several",
        ),
        pytest.param(
            {"prompts": {"kind": "file", "file": "empty.jsonl"}}, {"empty.jsonl": "\n"},
            "small.yaml: 1 problem\n"
            "$.prompts.file (line 18): empty.jsonl is empty; one JSON object a line is expected\n" + CORRECT,
            id="empty prompts",
        ),
        pytest.param(
            {"prompts": {"kind": "file", "file": "some.jsonl"}},
            {"some.jsonl": '{"prompt": "a"}\n{"promt": "b"}\n'},
            "some.jsonl:2: exactly one of 'prompt' and 'messages' is expected\n" + PROMPT_LINES,
            id="damaged prompts",
            marks=fault(
                "input", "a damaged line in a file of prompts",
                seen="some.jsonl:2: exactly one of 'prompt' and 'messages' is expected", code=1, kept="no run is begun",
            ),
        ),
        pytest.param(
            {"loads": {"a": LENGTHS, "b": LENGTHS}, "repeat": 3}, {"lengths.txt": "ten\n5\n"},
            "small.yaml: 2 problems\n"
            "$.repeat (line 22): unknown key; did you mean 'repeats'?\n"
            "$.loads.a.output_tokens (line 14): lengths.txt:1: 'ten' is not one or two lengths of 1 to 1,000,000 "
            "tokens\n" + CORRECT,
            id="a damaged file of several loads",
        ),
        pytest.param(
            {"loads": {"mine": {"user": "mine.py", "requests": 2}}}, {},
            "small.yaml: 1 problem\n"
            "$.loads.mine.user (line 12): there is no file mine.py next to the scenario\n" + CORRECT,
            id="no locustfile",
        ),
    ],
)  # fmt: skip
def test_a_scenario_that_cannot_be_run(
    tmp_path: Path, changes: dict[str, Any], files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = write(tmp_path, **changes)
    refused(path, run(path), f"error: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"version: 1\nservers: {}\n", "$ (line 1): 'model' is missing\n", id="model"),
        pytest.param(
            b"version: 1\nquestion: [a\nmodel: x\n",
            "not valid YAML at line 3, column 6: expected ',' or ']', but got ':'\n",
            id="yaml",
            marks=fault(
                "input", "a scenario that is no YAML", seen="not valid YAML at line 3, column 6", code=1,
                kept="no run is begun",
            ),
        ),
        pytest.param(
            b"\x89PNG\r\n\x1a\n\xff", "not a text file in UTF-8\n",
            id="binary",
            marks=fault(
                "input", "a binary file as a scenario", seen="not a text file in UTF-8", code=1, kept="no run is begun"
            ),
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_scenario(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_bytes(content)
    done = run(path)
    assert done.code == 1 and done.err.startswith("error: small.yaml: ") and said in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("run", "first-lok"),
            "first-lok: there is no such scenario; did you mean 'first-look'?\n"
            "next: Give a file, or the name of a scenario that ships: `harness scenarios` lists them.\n",
        ),
        (
            ("check", "."),
            ".: the scenario cannot be read (Is a directory)\nnext: `harness scenarios` lists those that ship.\n",
        ),
        *(
            (
                (*command, "nothing", *more),
                "nothing: neither a run directory nor the id of a run in runs\n"
                "next: `harness runs --runs runs` lists the runs.\n",
            )
            for command, more in ((["report"], []), (["compare"], ["other"]), (["diff"], ["other"]))
        ),
    ],
)
def test_what_is_not_there(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    assert harness(*arguments, cwd=tmp_path) == (1, "", f"error: {said}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("from locust import task\nclass X(:\n", ", line 2: syntax error in the locustfile: invalid syntax\n" + ALONE),
        (
            'x = 1\n\ndef f():\n    raise ValueError("boom")\nf()\n',
            ", line 4: the locustfile cannot be imported: ValueError: boom\n" + ALONE,
        ),
        (
            "import no_such_package\n",
            ", line 1: the locustfile cannot be imported: "
            "ModuleNotFoundError: No module named 'no_such_package'\n" + ALONE,
        ),
        (
            "import locust\nfrom locustfiles.chat import ChatUser\n\nclass Steps(locust.LoadTestShape):\n    pass\n",
            ", line 4: a LoadTestShape and the scenario both say how many users there are\n"
            "next: Remove it, and give the load 'stages'; docs/users.md. By hand, with `locust -f`, shapes work.\n",
        ),
        (
            "from locust import HttpUser\nclass Stock(HttpUser):\n    pass\n",
            ": the locustfile has no user class of the harness\n"
            "next: Derive one from harness.load.user.LLMUser; docs/users.md shows how.\n",
        ),
        (
            "from harness.load.user import LLMUser\n",
            ": the locustfile has no user class of the harness\n"
            "next: Derive one from harness.load.user.LLMUser; docs/users.md shows how.\n",
        ),
    ],
    ids=["syntax", "raises", "imports", "shape", "stock", "none"],
)
@fault("input", "a locustfile with a mistake (6 cases)", seen="mine.py", code=1, kept="no run is begun")
def test_locustfile(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    path = write(tmp_path, loads={"mine": {"user": "mine.py", "requests": 2}})
    refused(path, run(path), f"error: {tmp_path}/mine.py{sentence}")


@pytest.mark.parametrize("value", [None, "", "  "])
@fault(
    "input",
    "the API key is not set",
    seen="the environment variable MY_TEST_KEY is not set",
    code=1,
    kept="no run is begun",
)
def test_api_key_not_set(tmp_path: Path, value: str | None) -> None:
    path = write(tmp_path, api_key_env="MY_TEST_KEY")
    refused(
        path,
        run(path, env={} if value is None else {"MY_TEST_KEY": value}),
        "error: the environment variable MY_TEST_KEY is not set, which api_key_env names\n"
        "next: export MY_TEST_KEY=... before the run; the key is never written anywhere.\n",
    )


@pytest.mark.parametrize("url", ["ftp://host", "http://127.0.0.1:99999", "http://a b", "http://", ""])
def test_url_that_is_none(tmp_path: Path, url: str) -> None:
    path = write(tmp_path)
    refused(
        path,
        run(path, "--url", url),
        f"error: --url: '{url}' is not the address of a server\nnext: Write it like http://127.0.0.1:8000.\n",
    )


@fault(
    "disk",
    "the run directory cannot be written",
    seen="the run directory cannot be written (Permission denied)",
    code=1,
    kept="no run is begun",
)
def test_run_directory_not_writable(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "runs").mkdir(mode=0o555)
    done = run(path, before=without_rights)
    assert (done.code, done.out) == (1, "")
    sentence, advice = done.err.splitlines()
    assert sentence.startswith("error: runs/")
    assert sentence.endswith(": the run directory cannot be written (Permission denied)")
    assert advice == "next: Make room if the disk is full, or give another folder with --runs DIR."


def test_run_directory_below_a_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "runs").touch()
    done = run(path)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[0].endswith(": the run directory cannot be written (Not a directory)")


# What is found while a server is started leaves a run directory that says so.


def failed(path: Path, done: Done, code: int, sentence: str, advice: str) -> None:
    assert done.code == code
    lines = done.err.splitlines()
    assert [line for line in lines if not line.startswith("  | ")] == [f"error: {sentence}", f"next: {advice}"]
    manifest = read_run(only_run(path.parent / "runs"))
    assert (manifest.status, sentences(manifest.reasons)) == ("failed", [sentence])


@fault(
    "network", "the port of the server is taken", seen="port ... is in use already", code=2, kept="a run marked failed"
)
def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        one = server()
        one["variables"]["host_port"] = port
        path = write(tmp_path, servers={"one": one})
        failed(
            path,
            run(path),
            2,
            f"port {port} is in use already",
            "Leave host_port out to get a free one, or stop what uses it "
            f"(ss -ltnp 'sport = :{port}'); `harness clean` removes leftovers of earlier runs.",
        )


CONTAINER = {"one": {"template": "vllm-cpu"}}


@fault(
    "engine",
    "there is no Docker Engine",
    seen="there is no Docker Engine at unix://...",
    code=2,
    kept="a run marked failed",
)
def test_no_docker(tmp_path: Path) -> None:
    path = write(tmp_path, servers=CONTAINER)
    where = f"unix://{tmp_path}/none.sock"
    failed(
        path,
        run(path, env={"DOCKER_HOST": where}),
        2,
        f"there is no Docker Engine at {where}",
        "Install and start it (on Debian: sudo apt-get install docker.io), or set DOCKER_HOST. "
        "The embedded engine needs none: `container: false`.",
    )


def unix_socket(path: Path) -> None:
    """A socket's file, on which nobody listens any more."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@fault(
    "engine",
    "the Docker Engine does not run",
    seen="does not run (connection refused)",
    code=2,
    kept="a run marked failed",
)
def test_docker_does_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, servers=CONTAINER)
    unix_socket(tmp_path / "d.sock")
    where = f"unix://{tmp_path}/d.sock"
    failed(
        path,
        run(path, env={"DOCKER_HOST": where}),
        2,
        f"the Docker Engine at {where} does not run (connection refused)",
        "Start it: sudo systemctl start docker.",
    )


@fault(
    "engine",
    "no permission on the socket of the Docker Engine",
    seen="no permission to use the Docker Engine at unix://...",
    code=2,
    kept="a run marked failed",
)
def test_no_permission_on_the_socket(tmp_path: Path) -> None:
    path = write(tmp_path, servers=CONTAINER)
    unix_socket(tmp_path / "d.sock")
    os.chmod(tmp_path / "d.sock", 0)
    where = f"unix://{tmp_path}/d.sock"
    failed(
        path,
        run(path, env={"DOCKER_HOST": where, "LOGNAME": "ada"}, before=without_rights),
        2,
        f"no permission to use the Docker Engine at {where}",
        "sudo usermod -aG docker $USER, then log in again (members of that group rule the host).",
    )


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
        said = 'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io: no such host'
        self.answer(500, json.dumps({"message": said}))


@fault(
    "engine",
    "the image is not there and its registry cannot be reached",
    seen="is not on this machine and cannot be pulled: its registry cannot be reached",
    code=2,
    kept="a run marked failed",
)
def test_image_not_available(tmp_path: Path) -> None:
    one = {"template": "vllm-cpu", "variables": {"image": "example/engine:1"}}
    path = write(tmp_path, servers={"one": one})
    with listening(OfflineEngine) as url:
        failed(
            path,
            run(path, env={"DOCKER_HOST": url.replace("http", "tcp")}),
            2,
            "the image example/engine:1 is not on this machine and cannot be pulled: its registry cannot be reached",
            "To solve it: connect the machine, or bring the image: `docker save` it there, `docker load` it here.",
        )


def test_own_image_not_built(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": {"template": "simulated"}})
    with listening(OfflineEngine) as url:
        failed(
            path,
            run(path, env={"DOCKER_HOST": url.replace("http", "tcp")}),
            2,
            "the project's image amd-llm-load:local was not built yet",
            "Build it: make image (in the project's folder).",
        )


@fault(
    "server",
    "the server ends while it starts",
    seen="the server did not start; it ended with exit code 1",
    code=2,
    kept="its log",
)
def test_server_that_exits_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--fail-start", "RuntimeError: no memory left for it")})
    done = run(path)
    log = only_run(tmp_path / "runs").relative_to(tmp_path) / "logs" / "r1-one-burst.server.log"
    failed(
        path,
        done,
        2,
        "the server did not start; it ended with exit code 1: it raised an exception that is not in the table: "
        "RuntimeError: no memory left for it",
        "To solve it: read the log around that line; search the server's issues for the message.",
    )
    assert "  | line 4: RuntimeError: no memory left for it" in done.err.splitlines()
    assert f"  | the whole log: {log}" in done.err.splitlines()


@fault(
    "server",
    "the server never becomes ready",
    seen="the server did not become ready within 1.5 s; last seen at GET .../health: HTTP 503",
    code=2,
    kept="its log",
)
def test_server_that_is_never_ready(tmp_path: Path) -> None:
    port = unused_port()
    one = server("--fault", "never-ready", startup_timeout_s=1.5)
    one["variables"]["host_port"] = port
    path = write(tmp_path, servers={"one": one})
    failed(
        path,
        run(path),
        2,
        f"the server did not become ready within 1.5 s; last seen at GET http://127.0.0.1:{port}/health: HTTP 503",
        "Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario.",
    )


class WebPage(Handler):
    def do_GET(self) -> None:
        self.answer(200, "<!doctype html><title>Router</title>", "text/html")


def test_endpoint_that_answers_html(tmp_path: Path) -> None:
    path = write(tmp_path)
    with listening(WebPage) as url:
        failed(
            path,
            run(path, "--url", url),
            2,
            f"{url} answers with an HTML page, not with an OpenAI-compatible API (HTTP 200)",
            "Check the address; a web page of another program may live on this port.",
        )


@fault(
    "server",
    "the answers are HTML pages",
    seen="answers with an HTML page, not with an OpenAI-compatible API (HTTP 200)",
    code=2,
    kept="a run marked failed",
)
def test_server_whose_answers_are_html(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--fault", "html")})
    done = run(path)
    assert done.code == 2
    sentence, advice = [line for line in done.err.splitlines() if not line.startswith("  | ")]
    assert sentence.startswith("error: http://127.0.0.1:")
    assert sentence.endswith(" answers with an HTML page, not with an OpenAI-compatible API (HTTP 200)")
    assert advice == "next: Check the address; a web page of another program may live on this port."


@fault(
    "network",
    "nothing listens at the address",
    seen="connection refused, nothing listens there",
    code=2,
    kept="a run marked failed",
)
def test_nothing_listens(tmp_path: Path) -> None:
    path, port = write(tmp_path), unused_port()
    failed(
        path,
        run(path, "--url", f"http://127.0.0.1:{port}/v1/"),
        2,
        f"no answer from http://127.0.0.1:{port}/v1/models: connection refused, nothing listens there",
        "Check the address and that the server runs.",
    )


# After a run.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Input data was truncated"),
        ("{ garbage", "JSON is malformed: object keys must be strings (byte 2)"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"format_version": 1, "id": "x"}', "Object missing required field `status`"),
    ],
)
@fault("disk", "a damaged run directory", seen="run.json", code=1, kept="the other runs can be read")
def test_damaged_run(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(text)
    done = harness("report", "bad", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: bad/run.json:1: cannot be read ({why})\nnext: The file was changed or damaged.\n"
    listed = harness("runs", "--runs", ".", cwd=tmp_path)
    assert listed.code == 0
    assert "unreadable" in listed.out


def test_a_run_with_brackets_in_its_name_is_listed_by_it(tmp_path: Path) -> None:
    (tmp_path / "[bold]x").mkdir()
    (tmp_path / "[bold]x" / "run.json").write_text("{")
    assert harness("runs", "--runs", ".", cwd=tmp_path).out.splitlines()[1].startswith("[bold]x ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"format_version": 1, "weather": "fine"}',
            "run.json:1: cannot be read (Object contains unknown field `weather`)\n"
            "next: A newer harness wrote it: update this one.\n",
        ),
        (
            '{"format_version": 99, "whatever": []}',
            "run.json: format 99 was written by a newer harness; this one reads up to 2\nnext: Update the harness.\n",
        ),
    ],
)
def test_a_run_of_a_newer_harness_is_no_damage(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text(text)
    assert harness("report", "new", cwd=tmp_path) == (1, "", f"error: new/{said}")
