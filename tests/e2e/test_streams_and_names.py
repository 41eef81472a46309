"""Closed standard streams, names that are not UTF-8, named pipes, an engine that does not answer: words, and an end."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as xml
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.base import files
from harness.base.command_line import command_line
from harness.base.errors import ServerError
from harness.numbers.summarize import summarize
from harness.questions.findings.rules import RowFacts
from harness.records.manifest import read_run
from harness.records.run_data import load
from harness.serve import docker_engine
from harness.serve.containers import remove_containers
from tests.support.command import ENDED, HARNESS, PATIENCE_S, Done, going, harness, only_run, write
from tests.support.fake_server import DONE, FINISH, TOKEN, UNTIL_CLOSED, read_request, serving, whole
from tests.support.faults import fault
from tests.support.wording import Wording


def shell(command: str, folder: Path) -> Done:
    """A command with redirections, as a shell starts it."""
    done = subprocess.run(
        ["bash", "-c", command, "bash", HARNESS], capture_output=True, text=True, cwd=folder, timeout=PATIENCE_S
    )
    assert "Traceback" not in done.stdout + done.stderr and "defect" not in done.stderr
    ENDED.append(Done(done.returncode, done.stdout, done.stderr))
    return ENDED[-1]


@fault("input", "a command is started with closed standard streams", seen="the standard output is closed", code=0)
def test_a_run_with_closed_streams_is_whole(tmp_path: Path, wording: Wording) -> None:
    write(tmp_path)
    done = shell('"$1" run small.yaml --runs runs >&- <&-', tmp_path)
    assert (done.code, done.out) == (0, "")
    wording(done.err)
    run = only_run(tmp_path / "runs")
    assert (run / "summary.json").is_file() and not (run / "requests.jsonl").read_bytes().count(b"closed")
    assert shell('"$1" run small.yaml --runs two >&- 2>&-', tmp_path).code == 0
    assert (only_run(tmp_path / "two") / "summary.json").is_file()


@fault("disk", "the disk with the printed output is full, that with the runs is not",
       seen="the output: No space left on device; what else would be printed is dropped", code=1)  # fmt: skip
def test_a_full_output_does_not_end_a_run(tmp_path: Path) -> None:
    write(tmp_path)
    assert shell('"$1" run small.yaml --runs runs >/dev/full', tmp_path).code == 1
    run = only_run(tmp_path / "runs")
    assert read_run(run).status == "valid" and (run / "summary.json").is_file()
    assert shell('"$1" report last --runs runs >/dev/full', tmp_path).code == 1
    assert shell('"$1" run missing.yaml 2>/dev/full', tmp_path).code == 1


def test_an_error_goes_to_the_stream_that_is_open(tmp_path: Path) -> None:
    done = shell('"$1" run missing.yaml 2>&-', tmp_path)
    assert (done.code, done.err) == (1, "") and "missing.yaml" in done.out
    assert shell('"$1" run missing.yaml >&-', tmp_path).code == 1
    assert shell('"$1" run missing.yaml >&- 2>&-', tmp_path).code == 1
    assert shell('"$1" init x.yaml <&-', tmp_path).code == 1, "it cannot ask"


@fault("input", "a shell lets a process have too little memory (`ulimit -v`)", seen="MiB of memory (`ulimit -v`)",
       code=1, kept="no run is begun")  # fmt: skip
@pytest.mark.parametrize("limit_kib", [40_000, 220_000, 400_000, 520_000])
def test_too_little_memory_is_an_error_before_anything_is_sent(tmp_path: Path, limit_kib: int) -> None:
    """In less, libraries wait for ever, or fail in words of their own."""
    write(tmp_path)
    done = shell(f'ulimit -v {limit_kib}; "$1" run small.yaml --runs runs', tmp_path)
    assert done.code == 1 and f"{limit_kib // 1024} MiB" in done.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", b"\xff.yaml"],
        ["run", "small.yaml", "--runs", b"runs-\xe9"],
        ["run", "small.yaml", "--junit", b"\xfe.xml"],
        ["report", b"last\x80"],
        ["export", "last", "--to", b"\xff.csv"],
        ["check", "small.yaml", "--model", b"m\xff"],
        ["explain", b"\xff.log"],
    ],
)
def test_a_name_that_is_not_utf_8_is_refused_in_words(tmp_path: Path, arguments: list[str | bytes]) -> None:
    write(tmp_path)
    (tmp_path / os.fsdecode(b"\xff.yaml")).write_text((tmp_path / "small.yaml").read_text())
    done = subprocess.run([HARNESS, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 1 and "not in UTF-8" in done.stderr and "\\x" in done.stderr
    assert "defect" not in done.stderr and "Traceback" not in done.stderr


def test_a_folder_whose_name_is_not_utf_8_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    write(folder)
    done = subprocess.run([HARNESS, "run", "small.yaml"], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 1 and "caf\\xe9'" in done.stderr
    assert not (folder / "runs").exists()


@fault("input", "--junit names a named pipe that no program reads", seen="not a regular file but a named pipe", code=1)
def test_no_output_waits_for_the_reader_of_a_named_pipe(tmp_path: Path, wording: Wording) -> None:
    write(tmp_path)
    os.mkfifo(tmp_path / "p.csv")
    done = harness("run", "small.yaml", "--junit", "p.csv", "--runs", "runs", cwd=tmp_path)
    assert done.code == 1 and "p.csv" in done.err
    wording(done.err)
    done = harness("run", "small.yaml", "--junit", ".", "--runs", "runs", cwd=tmp_path)
    assert done.code == 1 and "--junit" in done.err
    assert not (tmp_path / "runs").exists(), "before the load"
    assert harness("run", "small.yaml", "--runs", "runs", "--junit", "j.xml", cwd=tmp_path).code == 0
    done = harness("export", "last", "--runs", "runs", "--to", "p.csv", cwd=tmp_path)
    assert done.code == 1 and "p.csv" in done.err
    wording(done.err)
    assert (tmp_path / "p.csv").is_fifo()
    with pytest.raises(OSError) as caught:
        files.open_output(tmp_path / "p.csv", "ab")
    assert caught.value.errno == errno.EINVAL


def test_junit_through_a_pipe_of_the_shell_is_written_once(tmp_path: Path) -> None:
    write(tmp_path)
    done = shell('"$1" run small.yaml --runs runs --junit >(cat >j.xml)', tmp_path)
    assert done.code == 0
    until = threading.Event()
    for _ in range(100):
        if (tmp_path / "j.xml").read_text().count("</testsuites>"):
            break
        until.wait(0.1)
    assert (tmp_path / "j.xml").read_text().count("<?xml") == 1


@pytest.mark.parametrize("option", ["--csv", "--html", "--json-file"])
def test_stock_locust_refuses_named_pipes(tmp_path: Path, option: str) -> None:
    for name in ("p_failures.csv", "p", "p.json"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "locust", "-f", str(files.LOCUSTFILES / "chat.py"), "--headless", option, "p"]
    command += ["--host", "http://127.0.0.1:9", "--users", "1", "--run-time", "1s"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode != 0 and f"{option}: p" in done.stderr and "a named pipe" in done.stderr


def silent_engine(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "d.sock"))
    listener.listen(16)
    return listener


@fault("engine", "the socket of the Docker Engine does not answer", seen="it did not answer within", code=2)
def test_an_engine_that_does_not_answer_has_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    path = write(tmp_path, servers={"one": {"template": "vllm-cpu"}})
    with silent_engine(tmp_path):
        address = f"unix://{tmp_path / 'd.sock'}"
        env = {"DOCKER_HOST": address}
        done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, env=env)
        assert done.code == 2 and address in done.err
        assert not list(tmp_path.glob("runs/*"))
        monkeypatch.setenv("DOCKER_HOST", address)
        monkeypatch.setattr(docker_engine, "ANSWER_S", 0.3)
        docker_engine._silent_since_s.clear()
        asked: list[int] = []
        for _ in range(3):
            facts = docker_engine.get_engine_facts()
            assert facts.problem is not None and "0.3" in facts.problem
            wording(facts.problem)
            asked.append(len(docker_engine._silent_since_s))
        assert docker_engine.get_engine_version() is None and docker_engine.get_local_digests(["x"]) == {}
        with pytest.raises(ServerError) as caught:
            docker_engine.connect()
        wording(caught.value)
    docker_engine._silent_since_s.clear()


def test_an_answer_that_no_engine_gives_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'd.sock'}")
    for error in (TypeError("indices"), KeyError("Id"), AttributeError("get"), IndexError("0")):

        def answer(error: Exception = error) -> None:
            raise error

        with pytest.raises(ServerError, match="Docker Engine"):
            docker_engine.ask_engine(answer)


def test_what_removes_a_server_says_that_no_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'd.sock'}")

    def junk(**_: Any) -> list[Any]:
        raise TypeError("string indices must be integers")

    client: Any = SimpleNamespace(containers=SimpleNamespace(list=junk), networks=SimpleNamespace(list=junk))
    with pytest.raises(ServerError, match="Docker Engine"):
        remove_containers(client, docker_engine.make_labels("run", "cell"), grace_s=0.0)


@fault("engine", "the Docker Engine answers with a byte now and then", seen="it did not answer within 10 s")
def test_an_engine_that_drips_has_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'd.sock'}")
    monkeypatch.setattr(docker_engine, "ANSWER_S", 0.5)
    docker_engine._silent_since_s.clear()
    done = threading.Event()

    def drip(listener: socket.socket) -> None:
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while not done.wait(0.05):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        break

    with silent_engine(tmp_path) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(ServerError) as caught:
            docker_engine.connect()
        wording(caught.value)
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    docker_engine._silent_since_s.clear()


@pytest.mark.parametrize("name", ["a\x1b[31mb", "two\nlines", "x" * 1001, "a\x00b", "\ud800"])
def test_a_model_whose_name_cannot_be_recorded_is_named(tmp_path: Path, name: str) -> None:
    def handler(connection: socket.socket, _: int) -> None:
        head = read_request(connection)
        models = whole(json.dumps({"data": [{"id": name}]}).encode())
        connection.sendall(models if head.startswith(b"GET") else UNTIL_CLOSED + TOKEN * 3 + FINISH + DONE)

    with serving(handler) as url:
        for words in (["quick", url], ["run", "--url", url], ["capacity", "--url", url]):
            done = harness(*words, "--runs", "runs", cwd=tmp_path)
            assert done.code in (1, 2), done
            assert "defect" not in done.err and "/tmp" not in done.err and ".yaml" not in done.err, done.err
            assert "Correct the file" not in done.err


def test_several_runs_share_one_junit_file(tmp_path: Path) -> None:
    write(tmp_path)
    assert harness("run", "small.yaml", "--times", "2", "--junit", "j.xml", "--runs", "r", cwd=tmp_path).code == 0
    root = xml.fromstring((tmp_path / "j.xml").read_text())
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["small 1", "small 2"]
    assert int(root.get("tests", "")) == sum(len(suite.findall("testcase")) for suite in suites)
    names = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(set(names)) == len(names)


def test_a_misspelt_file_is_found_before_a_scenario_that_ships(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("sub/mine.yaml", "own.yaml"):
        (tmp_path / name).write_text("version: 1\n")
    for given, near in (
        ("sub/mine.ymal", "sub/mine.yaml"),
        ("sub/mine.yml", "sub/mine.yaml"),
        ("chat-user", "chat-users"),
        ("sub/MINE.yaml", "sub/mine.yaml"),
        ("Chat-Users", "chat-users"),
        ("no-such-folder/own.yaml", "own.yaml"),
    ):
        done = harness("check", given, cwd=tmp_path)
        assert done.code == 1 and f"'{near}'" in done.err, done.err


MINE = """
from locust import task
from harness.load.user import LLMUser

class Mine(LLMUser):
    @task
    def go(self) -> None:
        {line}
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("self.ask(self.takee()[0])", "'Mine' object has no attribute 'takee'; did you mean 'take'?"),
        ("self.ask(self.take(count=1)[0])", "TypeError"),
        ("self.ask(works[0])", "name 'works' is not defined"),
    ],
)
def test_a_mistake_in_a_user_class_ends_the_load_at_once(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(line=line))
    write(tmp_path, loads={"own": {"user": "mine.py", "users": 2, "requests": 4, "output_tokens": 2}})
    with going("run", "small.yaml", "--runs", "runs", cwd=tmp_path) as command:
        done = command.end()
    assert done.code == 3
    shown = " ".join(done.out.split() + done.err.split())
    assert said in shown and "mine.py, line 8" in shown, shown


def test_a_locustfile_without_a_user_class_says_so_whatever_pytest_finds(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\naddopts = "--x"\n')
    (tmp_path / "mine.py").write_text("import locust\nX = 1\n")
    write(tmp_path, loads={"own": {"user": "mine.py", "users": 2, "requests": 4, "output_tokens": 2}})
    done = harness("check", "small.yaml", cwd=tmp_path)
    assert done.code == 1
    wording(done.err)


def test_a_finding_is_verified_with_the_path_that_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my scenarios"
    folder.mkdir()
    write(folder, "two")
    done = harness("run", "my scenarios/two.yaml", "--runs", "runs", cwd=tmp_path)
    assert done.code == 0
    run = only_run(tmp_path / "runs").resolve()
    facts = RowFacts(load(run), (summary := summarize(run)), summary.rows[0])
    monkeypatch.chdir(tmp_path)
    assert facts.run_again == "harness run 'my scenarios/two.yaml'"
    monkeypatch.chdir(folder.parent / "runs")
    assert facts.run_again == command_line("harness", "run", folder / "two.yaml", "--runs", ".")
