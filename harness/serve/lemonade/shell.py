"""What a URL answers inside a container's network, fetched again and again by one shell.

To start a process in a container costs the Docker Engine some 100 ms of CPU; one each second would be felt by an engine
on the same machine. So one shell waits there, and fetches an address for each line that it is given.
"""

import contextlib
import struct
import threading
from typing import Any

from docker.models.containers import Container

from harness.serve.docker.daemon import DOCKER_ERRORS
from harness.trust import MAX_ANSWER_BYTES

FETCH_S = 3.0
_BEYOND_S = 2.0  # for the way to an engine elsewhere
_SCRIPT = (  # a line is an address, and behind a space the JSON to post
    'while read -r url body; do if [ -n "$body" ]; then printf %s "$body" | curl --silent --fail --max-time {limit:g} '
    '--header "Content-Type: application/json" --data-binary @- "$url"; '
    'else curl --silent --fail --max-time {limit:g} "$url"; fi; printf "\\000"; done'
)
_HEADER = struct.Struct(">BxxxL")  # of the engine's frames: which stream, how many bytes


class Shell:
    """Open from the first `fetch` to `close`, or to the first that fails; then the next one opens it again."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._stream: Any = None  # what the Docker SDK gives, which keeps the connection open
        self._socket: Any = None
        self._lock = threading.Lock()  # metrics are read while others ask

    def fetch(self, url: str, body: str | None = None) -> str:
        """The answer's text to a GET, or to a POST of JSON without line ends; empty when there is none in time."""
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
