"""HTTP/1.1 over an asyncio transport: requests in, one socket write per piece out, connections kept alive."""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

import httptools

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large",
            429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip
MAX_BODY_BYTES = 64 << 20


class HttpRequest:
    """One request and the way to answer it. Header names are lower case."""

    def __init__(self, connection: "Connection", received_s: float) -> None:
        self.method = ""
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.received_s = received_s
        self.on_disconnect: Callable[[], None] | None = None
        self.closes_after_s: float | None = None  # the connection, although it says keep-alive
        self._connection = connection
        self._keep_alive = True

    @property
    def closed(self) -> bool:
        return self._connection.transport.is_closing()

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """The whole response in one write."""
        self.raw(_head(status, kind, {"content-length": str(len(body)), **headers}, self._keep_alive) + body)
        self.done()

    def start_stream(self, **headers: str) -> None:
        kind = "text/event-stream; charset=utf-8"
        self.raw(_head(200, kind, {"transfer-encoding": "chunked", **headers}, self._keep_alive))

    def piece(self, data: bytes) -> None:
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.raw(b"0\r\n\r\n")
        self.done()

    def raw(self, data: bytes) -> None:
        if not self.closed:
            self._connection.transport.write(data)

    def done(self) -> None:
        self.on_disconnect = None
        if self.closes_after_s is None:
            self._connection.finished(self._keep_alive)
        else:
            self._connection.close_later(self.closes_after_s)

    def drop(self) -> None:
        """Close the connection without an end, as a dying server or proxy does."""
        self.on_disconnect = None
        self._connection.transport.close()


def _head(status: int, kind: str, headers: dict[str, str], keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", "server: harness-simulated", f"content-type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.Protocol):
    """Parses one connection; a pipelined request waits until the one before is answered."""

    def __init__(self, handle: Callable[[HttpRequest], None], connections: set["Connection"]) -> None:
        self._handle = handle
        self._connections = connections
        self._queue: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._next: HttpRequest | None = None
        self.transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._current and self._current.on_disconnect:
            self._current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.write(_head(400, "text/plain", {"content-length": "0"}, keep_alive=False))
            self.transport.close()

    def on_message_begin(self) -> None:
        self._next = HttpRequest(self, asyncio.get_running_loop().time())
        self._body, self._size = [], 0

    def on_url(self, url: bytes) -> None:
        assert self._next
        self._next.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._next
        self._next.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._next
        if self._next.headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._next
        assert request
        request.method = self._parser.get_method().decode("latin-1")
        request.path = request.path.partition("?")[0]
        request.body = b"".join(self._body)
        request._keep_alive = self._parser.should_keep_alive()
        self._queue.append(request)
        self._serve_next()

    def _serve_next(self) -> None:
        if self._current is None and self._queue and not self.transport.is_closing():
            self._current = self._queue.popleft()
            if self._size > MAX_BODY_BYTES:
                self._current.answer(413, b"{}")
            else:
                self._handle(self._current)

    def close_later(self, wait_s: float) -> None:
        """Read no more requests, and close."""
        if not self.transport.is_closing():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(wait_s, self._shut)

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the client was faster
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.transport.close()

    def finished(self, keep_alive: bool) -> None:
        self._current = None
        if keep_alive:
            self._serve_next()
        else:
            self.transport.close()
