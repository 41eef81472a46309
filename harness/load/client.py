"""The measuring HTTP client: one keep-alive connection, and the time at which each piece of an answer arrived.

The bytes are read by `harness.load.reader`, one place for all connections; what they mean is worked out afterwards
(`harness.load.exchange`, `harness.load.answer`), so that parsing never delays a stamp.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import gevent
import httptools
from gevent import socket, ssl
from gevent.lock import Semaphore

from harness.errors import HarnessError
from harness.load.clock import KernelClock, ask_for_stamps
from harness.load.exchange import Collector, Exchange, Failure
from harness.load.reader import Direct, Inbox, Reader

_DONE_GRACE_S = 0.02  # for the end of the body after [DONE], which some proxies leave open
_CONNECT_TIMEOUT_S = 10.0
# A kept connection whose end arrives this soon after the request was being closed as the request was on its way: the
# two crossed, which takes a round trip. An end that comes later is what the server did with the request.
_CROSSED_S = 0.02
# Until a connection is closed here that the server said it closes: who closes first keeps the local port for a minute.
_LEAVING_S = 0.1
_TCP_CLOSE = 7  # after a reset
_IDLE_SHARE = 0.8  # of the server's stated idle limit, so that it never closes first

Body = Callable[[], bytes]  # makes it


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


class Known:
    """Where a name was found: looked up once for all connections of a process."""

    def __init__(self) -> None:
        self._looking = Semaphore()
        self._found: list[tuple[Any, ...]] = []  # as getaddrinfo says it

    def look_up(self, target: Target) -> None:
        """Raises OSError."""
        with self._looking:
            if not self._found:
                self._found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)

    def connect(self, target: Target) -> socket.socket:
        """Raises OSError."""
        self.look_up(target)
        failed = OSError(f"no address of {target.host}")
        for one in self._found:
            sock = socket.socket(one[0], one[1])
            try:
                sock.settimeout(_CONNECT_TIMEOUT_S)
                sock.connect(one[4])
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                failed = error
            else:
                self._found = [one]
                return sock
        self._found = []  # it may have moved
        raise failed


class Client:
    """One connection to one server, opened when needed and kept; for one request at a time."""

    __slots__ = (
        "_clock", "_headers", "_idle_until_ns", "_known", "_reader", "_requests_left", "_socket", "_stamped",
        "_target", "_timeout_s", "_tls"
    )  # fmt: skip

    def __init__(
        self,
        target: Target,
        clock: KernelClock,
        reader: Reader,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        known: Known | None = None,
    ) -> None:
        self._target = target
        self._clock = clock
        self._reader = reader
        self._known = Known() if known is None else known
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._tls = ssl.create_default_context() if target.tls else None  # CAs from SSL_CERT_FILE, else the system's
        self._socket: socket.socket | None = None
        self._stamped = False
        self._requests_left: int | None = None  # on this connection, where the server limits them
        self._idle_until_ns: int | None = None

    def post(self, path: str, body: Body, exchange: Exchange) -> None:
        """Send `body`, a JSON text, to the API's `path` and collect the response in `exchange`; failures go there too.

        It is asked for when it is sent, and again if it has to be sent again: prompts may be long, and are not kept
        for as long as the answer takes.

        A greenlet that is cut meanwhile (GreenletExit, gevent.Timeout) sees that raised, with the connection closed.
        """
        self._run("POST", path, body, exchange)

    def get(self, path: str, exchange: Exchange) -> None:
        """As `post`, for reading a page of the API."""
        self._run("GET", path, None, exchange)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _request(self, method: str, path: str, body: Body | None, request_id: str) -> bytes:
        content = b"" if body is None else body()
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head = (
            f"{method} {self._target.prefix}{path} HTTP/1.1\r\nHost: {self._target.authority}\r\n"
            f"Accept: text/event-stream, application/json\r\nAccept-Encoding: identity\r\n"
            f"X-Request-Id: {request_id}\r\n{self._headers}{length}\r\n"
        )
        return head.encode("latin-1") + content  # in one packet where it fits

    def _run(self, method: str, path: str, body: Body | None, exchange: Exchange) -> None:
        try:
            if not self._attempt(method, path, body, exchange):
                self._attempt(method, path, body, exchange)
        except Failure as failure:
            exchange.failure = failure
        finally:
            exchange.ended_ns = time.monotonic_ns()
            if not exchange.complete:
                self.close()

    def _attempt(self, method: str, path: str, body: Body | None, exchange: Exchange) -> bool:
        """One try. False: the kept connection was closed as the request was on its way; use a new one."""
        self._drop_if_stale()
        reused = self._socket is not None
        sock = self._socket or self._connect(exchange)
        sock.settimeout(self._timeout_s)
        request = self._request(method, path, body, exchange.id)
        sent_ns = time.monotonic_ns()
        if exchange.sent_ns is None:
            exchange.sent_ns = sent_ns
        sending = True
        try:
            _send(sock, request)
            del request
            sending = False
            self._receive(sock, exchange)
        except TimeoutError:
            raise Failure("timeout", f"no data arrived for {self._timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            crossed = sending or _was_refused(sock) or time.monotonic_ns() - sent_ns < _CROSSED_S * 1e9
            if reused and crossed and not exchange.arrivals:
                self.close()
                exchange.resent = True
                return False
            how = "the server closed the connection" if isinstance(error, EOFError) else _words(error)
            when = "it answered" if exchange.status is None else "the response was complete"
            raise Failure("disconnect", f"{how} before {when}") from None
        except httptools.HttpParserError as error:
            raise Failure("not_api", f"the answer is not HTTP/1.1: {error}") from None
        return True

    def _receive(self, sock: socket.socket, exchange: Exchange) -> None:
        """Read until the response is complete. Raises EOFError when the connection ends before that."""
        collector = Collector(exchange)
        try:
            self._collect(sock, collector)
        except (OSError, EOFError, httptools.HttpParserError):
            if not (collector.done or exchange.complete):
                raise
            exchange.complete = True  # all was said; only the connection is of no more use
            self.close()
        finally:
            collector.close()
        self._keep(collector)

    def _collect(self, sock: socket.socket, collector: Collector) -> None:
        exchange = collector.exchange
        began_ns = time.monotonic_ns()
        inbox = self._inbox(sock, exchange)
        try:
            while not exchange.complete:
                # Pings keep a connection open, but they do not keep us waiting.
                said_ns = began_ns if collector.said_read is None else exchange.arrivals[collector.said_read][0]
                patience_s = _DONE_GRACE_S if collector.done else self._timeout_s
                left_s = patience_s - (time.monotonic_ns() - said_ns) / 1e9
                if left_s <= 0:
                    raise TimeoutError
                inbox.wait(left_s)
                collector.take_in(inbox)
                if collector.waits_for_end and not exchange.watched:
                    inbox.form, inbox.in_passing = collector.form, collector
        except (gevent.GreenletExit, gevent.Timeout):
            # Cut: what has come by now has come. If that is the connection's end, cut is still what it is: an error
            # raised here would take the place of the cut, and the greenlet would live on.
            with contextlib.suppress(OSError, EOFError, httptools.HttpParserError):
                collector.catch_up()
                for data in inbox.rest():
                    collector.take(data)
            raise
        finally:
            inbox.close()

    def _inbox(self, sock: socket.socket, exchange: Exchange) -> Inbox:
        if self._stamped:
            return self._reader.open(sock, exchange.arrivals)
        return Direct(sock, self._clock, exchange.arrivals)

    def _connect(self, exchange: Exchange) -> socket.socket:
        began_ns = time.monotonic_ns()
        sock = None
        try:
            sock = self._known.connect(self._target)
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

    def _keep(self, collector: Collector) -> None:
        """Keep the connection for the next request, within the limits that the server has stated."""
        headers = collector.exchange.headers
        if not collector.keep_alive:
            if self._socket is not None:
                gevent.spawn_later(_LEAVING_S, self._socket.close)
                self._socket = None
            return
        if "keep-alive" in headers:
            self._note_limits(headers["keep-alive"])
        if self._requests_left is not None:
            self._requests_left -= 1

    def _note_limits(self, said: str) -> None:
        limits = dict(part.strip().partition("=")[::2] for part in said.lower().split(","))
        with contextlib.suppress(KeyError, ValueError):
            self._idle_until_ns = time.monotonic_ns() + int(float(limits["timeout"]) * _IDLE_SHARE * 1e9)
        if self._requests_left is None:  # servers either count "max" down or repeat the same number
            with contextlib.suppress(KeyError, ValueError):
                self._requests_left = int(limits["max"])

    def _drop_if_stale(self) -> None:
        """Close a kept connection that the server has closed, or is about to."""
        sock = self._socket
        if sock is None:
            return
        worn = self._requests_left is not None and self._requests_left <= 0
        idle = self._idle_until_ns is not None and time.monotonic_ns() > self._idle_until_ns
        if worn or idle or (self._tls is None and _has_ended(sock)):
            self.close()


def _send(sock: socket.socket, request: bytes) -> None:
    """As `sendall` of gevent, which asks the kernel for the size of its buffer each time."""
    sent = sock.send(request)
    if sent < len(request):
        sock.sendall(memoryview(request)[sent:])


def _has_ended(sock: socket.socket) -> bool:
    """Whether there is an end, or anything else that no request asked for, on an idle connection."""
    raw: Any = sock._sock  # type: ignore[attr-defined]  # without gevent's waiting
    try:
        raw.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _was_refused(sock: socket.socket) -> bool:
    """Whether the server's kernel did not take what was sent last, or threw it away unread: it never came to it,
    however late that is noticed. Of a request that it has read a connection ends in order, with all acknowledged.
    """
    if not hasattr(socket, "TCP_INFO"):  # not Linux
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
    return info[0] == _TCP_CLOSE or info[24:28] != bytes(4)  # tcpi_state, tcpi_unacked


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_TIMEOUT_S:g} s"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no free local port (or no local address that it could be reached from)"
    return str(error.strerror or error or type(error).__name__).lower()


def _proxy_remark() -> str:
    named = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    return f" ({named[0]} is set, but a load test never goes through a proxy)" if named else ""
