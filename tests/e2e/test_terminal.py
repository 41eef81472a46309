"""Nothing that a server, a model or a log says reaches a terminal as a control sequence."""

import json
import os
import pty
import re
import select
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.command import HARNESS, write
from tests.support.fake_server import read_request, serving, whole
from tests.support.made_runs import write_made_run

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m\x85\u202e\r"


def terminal_output(*args: str, cwd: Path) -> str:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([HARNESS, *args], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd) as process:
        os.close(theirs)
        printed = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # how Linux ends it
                break
        process.wait(60)
    os.close(ours)
    return printed.decode().replace("\r\n", "\n")


def control_in(text: str) -> list[str]:
    """What of EVIL got through; colours, and the control that rewrites the lines of progress, are rich's own."""
    return re.findall(r"\x1b\]|\x07|\x1b\[2J|\x1b\[31mred|[\x80-\x9f\u202e]", text)


def test_what_a_server_says(tmp_path: Path) -> None:
    body = json.dumps({"error": {"message": f"no model {EVIL}here"}}, ensure_ascii=False).encode()

    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(whole(body, status=b"400 Bad Request"))

    with serving(handler) as url:
        text = terminal_output("run", write(tmp_path).name, "--url", url, cwd=tmp_path)
    assert "no model " in text and "redhere" in text
    assert control_in(text) == []


@pytest.mark.parametrize("form", ["terminal", "markdown"])
def test_what_a_run_holds(tmp_path: Path, form: str) -> None:
    write_made_run(tmp_path / "made", scenario_name=f"which {EVIL}one")
    text = terminal_output("report", "made", "--format", form, cwd=tmp_path)
    assert control_in(text) == [] and re.search("red.*one", text)
