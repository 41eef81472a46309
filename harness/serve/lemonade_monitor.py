"""A loaded Lemonade under load: the numbers of the engine behind it, and what it hides from its clients.

When its backend dies or hangs, Lemonade's watchdog starts it anew; a request of which nothing was sent yet is sent
again, and its client sees one very slow success. So the backend's process is compared before and after each cell.
"""

import contextlib
import re
import struct
import threading
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import requests
from docker.models.containers import Container

from harness.failures.unexpected_response import decoded, model_ids
from harness.serve.engine import DOCKER_ERRORS
from harness.serve.lemonade import NAME
from harness.serve.lemonade_client import HEALTH_S, Api, RunningModel, health
from harness.serve.probe import text_of
from harness.serve.watch import LogFile
from harness.summary import Reason, because
from harness.trust import MAX_ANSWER_BYTES, open_session

FETCH_S = 3.0
_BEYOND_S = 2.0  # for the way to an engine elsewhere
_SCRIPT = (  # a line is an address, and after a space the JSON to post
    'while read -r url body; do if [ -n "$body" ]; then printf %s "$body" | curl --silent --fail --max-time {limit:g} '
    '--header "Content-Type: application/json" --data-binary @- "$url"; '
    'else curl --silent --fail --max-time {limit:g} "$url"; fi; printf "\\000"; done'
)
_HEADER = struct.Struct(">BxxxL")  # of the engine's frames: which stream, how many bytes


class Shell:
    """Fetches URLs inside a container's network, again and again, with one shell.

    To start a process in a container costs the Docker Engine some 100 ms of CPU; an engine on the same machine would
    notice one each second. So one shell waits there, and fetches an address for each line that it is given. It is open
    from the first `fetch` to `close`, or to the first that fails; then the next one opens it again.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._stream: Any = None  # what the Docker SDK gives, which keeps the connection open
        self._socket: Any = None
        self._lock = threading.Lock()  # metrics are read while others ask

    def fetch(self, url: str, body: str | None = None) -> str:
        """The answer's text to a GET, or to a POST of JSON without line ends; empty when none comes in time."""
        with self._lock:
            try:
                if self._socket is None:
                    self._open()
                self._socket.sendall(f"{url} {body or ''}\n".encode())
                text = b""
                while not text.endswith(b"\0"):
                    text += self._frame()
                    if len(text) > MAX_ANSWER_BYTES:
                        raise ConnectionError("an answer without an end")
            except (OSError, *DOCKER_ERRORS):
                self.close()
                return ""
        return text[:-1].decode("utf-8", "replace")

    def close(self) -> None:
        """Its input ends, and so does the shell."""
        stream, self._stream, self._socket = self._stream, None, None
        if stream is None:
            return
        response = getattr(stream, "_response", None)  # the SDK hangs it there, so that it lives as long
        for part in (response, stream, getattr(stream, "_sock", None)):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # one may have closed the other
                part.close()  # type: ignore[union-attr]

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        api = self._container.client.api  # type: ignore[union-attr]
        command = ["sh", "-c", _SCRIPT.format(limit=FETCH_S)]
        run = api.exec_create(self._container.id, command, stdin=True, stdout=True, stderr=False)["Id"]
        self._stream = api.exec_start(run, socket=True)
        self._socket = getattr(self._stream, "_sock", self._stream)
        self._socket.settimeout(FETCH_S + _BEYOND_S)

    def _frame(self) -> bytes:
        _kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionError("the shell ended")
            found += part
        return found


OWN_METRICS_S = 1.0  # above the pool's size they wait with all else, and must not hold up the engine's
_UNAVAILABLE = re.compile(r"\(BackendWatchdog\).*marked unavailable: (?P<reason>.+)")
_RESET = re.compile(r"has been reset by the backend watchdog")


class LemonadeMonitor:
    """One model of one Lemonade. `container` is None where the harness cannot look inside."""

    def __init__(self, api: Api, model: str, log: LogFile | None, container: Container | None) -> None:
        self._api, self._model, self._log, self._container = api, model, log, container
        self._shell = None if container is None else Shell(container)
        self._running = self._look()
        self._engine = self._running.url if self._running is not None else None
        self._own: dict[str, bool] = {}  # by address: whether the engine there is this Lemonade's
        self._lines = len(self._log_lines())

    def metrics(self) -> str:
        """The engine's own metrics, then Lemonade's. Raises OSError when neither can be had."""
        parts = [self._engine_metrics(), self._own_metrics()]
        text = "\n".join(part for part in parts if part)
        if not text:
            raise OSError("neither Lemonade nor its engine gave metrics")
        return text

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What the engine answers to a GET, or to a POST with `body`; empty where that is no good answer.

        Lemonade passes on requests of the OpenAI API alone.
        """
        port = urlsplit(self._engine or "").port
        if port is None:
            return ""
        url, sent = f"http://127.0.0.1:{port}", None if body is None else msgspec.json.encode(body).decode()
        if self._shell is not None:
            return self._shell.fetch(url + path, sent)
        if self._own.get(url) is None:
            self._own[url] = self._is_own(url)
        return _here(url + path, sent) if self._own[url] else ""

    def effective(self) -> dict[str, Any]:
        """With what the model runs. The command line is Lemonade's word (since v11.8.0), or that of the process."""
        running = self._running
        if running is None:
            return {}
        command = running.command
        if not command and running.pid is not None and self._container is not None:
            command = command_inside(self._container, running.pid)
        return ({"launch_command": command} if command else {}) | running.facts

    def problems(self) -> list[Reason]:
        """Why what was measured since the last call, or since the start, cannot be trusted."""
        if self._shell is not None:
            self._shell.close()  # until the next load
        before, now, lines = self._running, self._look(), self._log_lines()
        news, self._lines = lines[self._lines :], len(lines)
        found = [match["reason"].strip() for line in news if (match := _UNAVAILABLE.search(line)) is not None]
        reset = bool(found) or any(_RESET.search(line) for line in news) or (now is not None and now.watchdog_reset)
        problems = []
        if reset:
            problems.append(because("backend_reset", server=NAME, reason=found[0] if found else None))
        elif before is not None and now is not None and before.pid != now.pid:
            options, earlier = _options(now), _options(before)
            pids = {"before": before.pid, "now": now.pid}
            problems.append(because("backend_restarted", server=NAME, **pids, options=options, options_before=earlier))
        elif before is not None and now is None:
            problems.append(because("backend_lost", server=NAME))
        self._running = now or self._running
        orphans = [] if self._container is None else orphans_of(self._container)
        return problems + [because("orphan_memory", name=name) for name in orphans]

    def _look(self, timeout_s: float = HEALTH_S) -> RunningModel | None:
        found = health(self._api, timeout_s)
        return None if found is None else found.of(self._model)

    def _log_lines(self) -> list[str]:
        return [] if self._log is None else self._log.text().splitlines()

    def _engine_metrics(self) -> str:
        text = self.fetch("/metrics")
        if not text:  # it may have been started anew, on another port
            found = self._look(FETCH_S)
            if found is not None and found.url != self._engine:
                self._engine = found.url
                text = self.fetch("/metrics")
        return text

    def _is_own(self, url: str) -> bool:
        """Whether a port of this machine is the engine's: another Lemonade or container may use the same numbers."""
        if urlsplit(self._api.url).hostname not in ("127.0.0.1", "localhost", "::1"):
            return False
        path = None if self._running is None else self._running.argument("-m")
        try:
            if path is not None:  # of llama-server, which answers to any name
                return bool(decoded(_here(url + "/props"))["model_path"] == path)
            return self._model in model_ids(_here(url + "/v1/models").encode())
        except (ValueError, KeyError, TypeError):
            return False

    def _own_metrics(self) -> str:
        try:
            response = self._api.get("/metrics", OWN_METRICS_S)
        except requests.RequestException:
            return ""
        return text_of(response) if response.status_code == 200 else ""


def _options(running: RunningModel) -> str:
    """Those of its load; without the pin, which changes no speed."""
    given = running.facts.get("recipe_options")
    named = given.items() if isinstance(given, dict) else []
    return ", ".join(f"{name}={value}" for name, value in sorted(named) if name != "pinned" and value != "")


def _here(url: str, body: str | None = None) -> str:
    """The good answer of an address on this machine, else nothing. The engine behind Lemonade wants no key."""
    try:
        with open_session(None) as session:
            method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"}
            response = session.request(method, url, data=body, headers=headers, timeout=FETCH_S, allow_redirects=False)
    except requests.RequestException:
        return ""
    return text_of(response) if response.status_code == 200 else ""


def command_inside(container: Container, pid: int) -> list[str]:
    """The command line of a process, by its number inside the container; empty when it cannot be had."""
    try:
        command = ["cat", f"/proc/{pid}/cmdline"]
        code, text = cast(tuple[int, bytes], container.exec_run(command, stderr=False))
    except DOCKER_ERRORS:
        return []
    return (text or b"").decode("utf-8", "replace").rstrip("\0").split("\0") if code == 0 else []


def orphans_of(container: Container) -> list[str]:
    """`VLLM::EngineCore` processes whose server is gone: the container's first process inherited them."""
    try:
        container.reload()
        first = str(container.attrs["State"].get("Pid"))
        rows = container.top(ps_args="-eo pid,ppid,rss,args").get("Processes") or []
    except DOCKER_ERRORS:
        return []
    pids = {str(row[0]) for row in rows}
    engines = [row for row in rows if "VLLM::EngineCor" in str(row[-1])]
    return [
        f"an orphaned VLLM::EngineCore (process {pid} of the host, {int(kib) / 1024:.0f} MiB)"
        for pid, parent, kib, *_ in engines
        if parent == first or parent not in pids
    ]
