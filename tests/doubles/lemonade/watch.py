"""A streamed answer of the backend, with what Lemonade adds: pings, the watchdog, error events."""

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from tests.doubles.lemonade.backend import Backend
from tests.doubles.lemonade.settings import Settings

PING_S = 1.0


class Died(Exception):
    """The backend died or hung before its first byte (`sent` False), or later."""

    def __init__(self, reason: str, sent: bool) -> None:
        super().__init__(reason)
        self.reason, self.sent = reason, sent


def error_event(status: int, found: Any) -> bytes:
    """A backend's error as it looks inside a stream."""
    inner = dict(found["error"]) if isinstance(found, dict) and isinstance(found.get("error"), dict) else {}
    return b"data: " + json.dumps({"error": {**inner, "status_code": status}}, sort_keys=True).encode() + b"\n\n"


def reset_event(backend: Backend, reason: str) -> bytes:
    """The error event of a backend that died in the middle of a stream."""
    text = (
        f"{backend.name} was unresponsive and has been reset by the backend watchdog. "
        "The model will be reloaded automatically on retry."
    )
    details = {"backend": backend.name, "code": "backend_watchdog_reset", "reason": reason, "retryable": True}
    found = {"error": {"details": details, "message": text, "type": "backend_error"}}
    return b"data: " + json.dumps(found, sort_keys=True).encode() + b"\n\n"


def answered(
    settings: Settings, backend: Backend, send: Callable[[], http.client.HTTPResponse]
) -> Generator[bytes, None, http.client.HTTPResponse]:
    """The backend's response, whose headers may take their time: pings until then. Raises Died."""
    got: queue.SimpleQueue[http.client.HTTPResponse | Exception] = queue.SimpleQueue()
    threading.Thread(target=_put, args=(send, got), daemon=True).start()
    begin = time.monotonic()
    while True:
        try:
            found = got.get(timeout=PING_S)
            break
        except queue.Empty:
            yield from _silence(settings, backend, begin, sent=False)
    if isinstance(found, Exception):
        raise found
    return found


def pieces(settings: Settings, backend: Backend, response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The backend's events, and pings while it is silent. Raises Died."""
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(response, arrived), daemon=True).start()
    sent, ended, heard = False, False, time.monotonic()
    while True:
        try:
            piece = arrived.get(timeout=PING_S)
        except queue.Empty:
            yield from _silence(settings, backend, heard, sent)
            continue
        if piece is None:
            if not ended:
                raise Died("backend process exited during streaming request", sent)
            return
        heard, sent = time.monotonic(), True
        ended = ended or piece.startswith(b"data: [DONE]")
        yield piece


def _silence(settings: Settings, backend: Backend, heard: float, sent: bool) -> Iterator[bytes]:
    if settings.behaviour.pings:
        yield b": ping\n\n"
    grace_s = settings.watchdog_grace_s
    if grace_s is not None and time.monotonic() - heard > grace_s and _hangs(settings, backend):
        raise Died("backend stopped answering health checks during streaming request", sent)


def _put(
    send: Callable[[], http.client.HTTPResponse], into: "queue.SimpleQueue[http.client.HTTPResponse | Exception]"
) -> None:
    try:
        into.put(send())
    except Exception as error:
        into.put(error)


def _hangs(settings: Settings, backend: Backend) -> bool:
    for _ in range(settings.watchdog_failures):
        if backend.healthy(2.0):
            return False
        time.sleep(settings.watchdog_poll_s)
    return True


def _read(response: http.client.HTTPResponse, into: "queue.SimpleQueue[bytes | None]") -> None:
    """Whole events; None at the end, however it came."""
    event = b""
    try:
        while line := response.readline():
            event += line
            if line.strip() == b"":
                into.put(event)
                event = b""
    except (OSError, http.client.HTTPException, ValueError):
        pass
    into.put(None)
