"""Stock Locust with its web UI, driven by its own routes."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import psutil

from harness.base.process import free_port
from tests.support.command import PATIENCE_S, until
from tests.support.load_runs import end, log_of, start


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class UI(NamedTuple):
    port: int
    folder: Path
    server: str

    def open_files(self) -> int:
        """Of the process that serves it."""
        listening = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
        return next(
            psutil.Process(one.pid).num_fds() for one in listening if getattr(one.laddr, "port", 0) == self.port
        )

    def ask(self, path: str, form: object = None, method: str | None = None, **headers: str) -> Answer:
        """One request, as it is given: `Sec_Fetch_Site` is the header Sec-Fetch-Site; Host is that of the UI."""
        given = {"Host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): text for name, text in headers.items()}}
        body = urlencode(form) if isinstance(form, Mapping) else form
        if isinstance(form, Mapping):
            given.setdefault("Content-Type", "application/x-www-form-urlencoded")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method or ("GET" if form is None else "POST"), path, body, given)  # type: ignore[arg-type]
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read().decode(errors="replace"))
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path).text)

    def state(self) -> Any:
        return self.json("/llm/live.json")

    def swarm(self, **form: object) -> dict[str, Any]:
        """Start a load; the answer is a success, or HTTP 400."""
        answer = self.ask("/swarm", {"user_count": 1, "spawn_rate": 1, **form})
        result: dict[str, Any] = json.loads(answer.text)
        assert answer.status == (200 if result["success"] else 400)
        return result

    def stop(self) -> None:
        assert self.ask("/stop", {}).status == 200


@contextmanager
def ui(folder: Path, server: str, *options: str, locustfile: Path | str = "chat") -> Iterator[UI]:
    """Stock Locust with its web UI. Chat users pause for a moment only."""
    opened = UI(free_port(), folder, server)

    def up() -> bool:
        try:
            return opened.ask("/").status > 0
        except OSError:
            return False

    think = [] if locustfile == "batch" else ["--think", "0.2"]
    child = start(folder, server, locustfile, "--web-port", str(opened.port), *think, *options)
    try:
        until(up)
        yield opened
    finally:
        child.terminate()
        end(child)
    assert "Traceback" not in log_of(folder)
