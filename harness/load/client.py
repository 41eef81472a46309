"""The measuring HTTP client: one keep-alive connection, and the time at which each piece of an answer arrived.

Per read there is one system call, one clock reading and one append; what the bytes mean is worked out after the
response is complete (`harness.load.answer`), so that parsing never delays a stamp.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httptools
from gevent import socket, ssl

from harness.errors import HarnessError
from harness.load.clock import CONTROL_BYTES, KernelClock, ask_for_stamps, believable
from harness.records import ErrorKind

Clock = Literal["kernel", "read"]

_READ_BYTES = 65_536
_DONE = (b"[DONE]\n", b"[DONE]\r")  # never inside an event's JSON, which cannot hold a line end
_DONE_GRACE_S = 2.0  # a server that has said [DONE] gets this long to end its body; some proxies leave it open
_CONNECT_TIMEOUT_S = 10.0
_STALE_S = 1.0  # a reused connection that closes unread within this time was closed while idle
_IDLE_SHARE = 0.8  # of the server's stated idle limit, so that it never closes first


class Target(NamedTuple):
    """Where an API lives."""

    host: str
    port: int
    tls: bool
    prefix: str  # path up to and with /v1

    @classmethod
    def of(cls, url: str) -> "Target":
        """The API behind a base URL, with or without its /v1. Raises HarnessError that says what is wrong with it."""
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            raise HarnessError(f"host: {url!r} has a port that is not a number") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HarnessError(f"host: {url!r} is not a URL", next_step="Give one such as http://127.0.0.1:8000.")
        path = parts.path.rstrip("/")
        prefix = path if path.endswith("/v1") else path + "/v1"
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Failure(Exception):
    """Why a response did not arrive in full: the kind and the words of a record."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(slots=True)
class Exchange:
    """One request and what came back, filled in as it happens, so a cut leaves what there was. Monotonic ns."""

    id: str
    began_ns: int = field(default_factory=time.monotonic_ns)
    connect_ns: int | None = None  # duration of opening the connection; None when it was open
    sent_ns: int | None = None
    arrivals: list[tuple[int, int | None]] = field(default_factory=list)  # of each read: its time, the kernel's stamp
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    headers_read: int | None = None  # the read that completed the headers
    body: list[tuple[int, bytes]] = field(default_factory=list)  # (read, bytes)
    complete: bool = False
    failure: Failure | None = None
    ended_ns: int | None = None  # when it was complete, or had failed

    @property
    def start_ns(self) -> int:
        """When it was sent; for one that never was, when it was begun."""
        return self.began_ns if self.sent_ns is None else self.sent_ns

    def times_ns(self) -> tuple[Clock, list[int]]:
        """The clock and the time of each read: the kernel's where all are believable, else that of the read."""
        if self.sent_ns is not None and believable(self.arrivals, self.sent_ns):
            return "kernel", [stamp for _, stamp in self.arrivals if stamp is not None]
        return "read", [read for read, _ in self.arrivals]


class _Collector:
    """What httptools calls back: sorts the pieces of one response into an Exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.parser = httptools.HttpResponseParser(self)
        self.keep_alive = False
        self._informational = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self._informational = 100 <= status < 200  # such as "100 Continue": the response itself is still to come
        if not self._informational:
            self.exchange.status = status
            self.exchange.headers_read = len(self.exchange.arrivals) - 1

    def on_body(self, data: bytes) -> None:
        self.exchange.body.append((len(self.exchange.arrivals) - 1, data))

    def on_message_complete(self) -> None:
        if self._informational:
            self.exchange.headers.clear()
        else:
            self.exchange.complete = True
            self.keep_alive = self.parser.should_keep_alive()  # llhttp only knows it now

    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is how this body ends."""
        headers = self.exchange.headers
        return self.exchange.status is not None and not {"content-length", "transfer-encoding"} & headers.keys()


class Client:
    """One connection to one server, opened when needed and kept; for one request at a time."""

    def __init__(
        self, target: Target, clock: KernelClock, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self._target = target
        self._clock = clock
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._tls = ssl.create_default_context() if target.tls else None  # CAs from SSL_CERT_FILE, else the system's
        self._socket: socket.socket | None = None
        self._stamped = False
        self._requests_left: int | None = None  # on this connection, where the server limits them
        self._idle_until_ns: int | None = None

    def post(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Send `body`, a JSON text, to the API's `path` and collect the response in `exchange`; failures go there too.

        A greenlet that is killed meanwhile sees its GreenletExit, with the connection closed.
        """
        self._run(self._head("POST", path, exchange.id, body), exchange)

    def get(self, path: str, exchange: Exchange) -> None:
        """As `post`, for reading a page of the API."""
        self._run(self._head("GET", path, exchange.id, b""), exchange)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _head(self, method: str, path: str, request_id: str, body: bytes) -> bytes:
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = (
            f"{method} {self._target.prefix}{path} HTTP/1.1\r\nHost: {self._target.authority}\r\n"
            f"Accept: text/event-stream, application/json\r\nAccept-Encoding: identity\r\n"
            f"X-Request-Id: {request_id}\r\n{self._headers}{length}\r\n"
        )
        return head.encode("latin-1") + body

    def _run(self, request: bytes, exchange: Exchange) -> None:
        try:
            if not self._attempt(request, exchange):
                self._attempt(request, exchange)
        except Failure as failure:
            exchange.failure = failure
        finally:
            exchange.ended_ns = time.monotonic_ns()
            if not exchange.complete:
                self.close()

    def _attempt(self, request: bytes, exchange: Exchange) -> bool:
        """One try. False: the kept connection had been closed meanwhile and nothing was received; use a new one."""
        self._drop_if_stale()
        reused = self._socket is not None
        sock = self._socket or self._connect(exchange)
        sock.settimeout(self._timeout_s)
        exchange.sent_ns = time.monotonic_ns()
        try:
            sock.sendall(request)
            self._receive(sock, exchange)
        except TimeoutError:
            raise Failure("timeout", f"nothing arrived for {self._timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            age_s = (time.monotonic_ns() - exchange.sent_ns) / 1e9
            if reused and not exchange.arrivals and age_s < _STALE_S:
                self.close()
                return False
            raise Failure("disconnect", _disconnected(error, exchange)) from None
        except httptools.HttpParserError as error:
            raise Failure("not_api", f"the answer is not HTTP/1.1: {error}") from None
        return True

    def _receive(self, sock: socket.socket, exchange: Exchange) -> None:
        """Read until the response is complete. Raises EOFError when the connection ends before that."""
        collector = _Collector(exchange)
        feed = collector.parser.feed_data
        arrivals, clock = exchange.arrivals, self._clock.read
        while not exchange.complete:
            if self._stamped:
                data, control, _, _ = sock.recvmsg(_READ_BYTES, CONTROL_BYTES)
            else:
                data, control = sock.recv(_READ_BYTES), []
            arrival = clock(control)
            if not data:
                if not collector.ends_with_connection():
                    raise EOFError
                exchange.complete = True
                break
            arrivals.append(arrival)
            feed(data)
            if not exchange.complete and any(mark in data[-24:] for mark in _DONE):
                sock.settimeout(min(_DONE_GRACE_S, self._timeout_s))
        self._keep(collector)

    def _connect(self, exchange: Exchange) -> socket.socket:
        began_ns = time.monotonic_ns()
        sock = None
        try:
            sock = socket.create_connection((self._target.host, self._target.port), timeout=_CONNECT_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stamped = self._tls is None and ask_for_stamps(sock)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._target.host)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError):
                raise Failure("connect", f"{self._target.authority}: {_words(error)}{_proxy_remark()}") from None
            raise
        self._socket = sock
        self._requests_left = self._idle_until_ns = None
        exchange.connect_ns = time.monotonic_ns() - began_ns
        return sock

    def _keep(self, collector: _Collector) -> None:
        """Keep the connection for the next request, within the limits that the server has stated."""
        headers = collector.exchange.headers
        if not collector.keep_alive:
            self.close()
            return
        limits = dict(part.strip().partition("=")[::2] for part in headers.get("keep-alive", "").lower().split(","))
        with contextlib.suppress(KeyError, ValueError):
            self._idle_until_ns = time.monotonic_ns() + int(float(limits["timeout"]) * _IDLE_SHARE * 1e9)
        if self._requests_left is None:  # servers either count "max" down or repeat the same number
            with contextlib.suppress(KeyError, ValueError):
                self._requests_left = int(limits["max"])
        if self._requests_left is not None:
            self._requests_left -= 1

    def _drop_if_stale(self) -> None:
        """Close a kept connection that the server has closed, or is about to."""
        sock = self._socket
        if sock is None:
            return
        worn = self._requests_left is not None and self._requests_left <= 0
        idle = self._idle_until_ns is not None and time.monotonic_ns() > self._idle_until_ns
        if worn or idle or (self._tls is None and _has_ended(sock)):
            self.close()


def _has_ended(sock: socket.socket) -> bool:
    """Whether there is an end, or anything else that no request asked for, on an idle connection."""
    sock.settimeout(0.0)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _disconnected(error: OSError | EOFError, exchange: Exchange) -> str:
    how = "the server closed the connection" if isinstance(error, EOFError) else _words(error)
    return f"{how} before {'it answered' if exchange.status is None else 'the response was complete'}"


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_TIMEOUT_S:g} s"
    return str(error.strerror or error or type(error).__name__).lower()


def _proxy_remark() -> str:
    named = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    return f" ({named[0]} is set, but a load test never goes through a proxy)" if named else ""
