"""The measuring HTTP client: one keep-alive connection, and the time at which each piece of a response arrived.

The host name is resolved again and again, and all its addresses are used. The bytes are read by `harness.load.reader`,
one place for all connections, and parsed afterwards (`harness.load.exchange`), so that parsing never delays a time
stamp.
"""

import contextlib
import errno
import ipaddress
import itertools
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zlib import crc32

import gevent
import httptools
from gevent import socket, ssl

from harness.errors import HarnessError
from harness.load.exchange import Collector, Exchange, Failure
from harness.load.reader import AnyInbox, Direct, Reader, ask_for_stamps
from harness.rundir.records import CLOSING_S

CONNECT_TIMEOUT_S = 10.0
_FRESH_S = 1.0  # users who connect within this time of a look-up share its result
_FAILED_S = 30.0  # an address that failed is tried after all others for this time

_Address = tuple[int, tuple[Any, ...]]  # family, socket address


class ApiAddress(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str  # path up to and with /v1

    @classmethod
    def of(cls, url: str) -> "ApiAddress":
        """Return the API of a base URL, with or without its /v1. Raises HarnessError for a wrong URL."""
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


class Dialer:
    """Opens connections to one server, for all clients of a process. Made after the fork.

    Addresses take turns, so that a name with several (a Kubernetes headless service) gets load on each of them.
    """

    def __init__(self, target: ApiAddress) -> None:
        self.target = target
        self.tls = _tls_context() if target.tls else None
        # Learned: whether the server really keeps connections that it promises to keep, for streams and others.
        self.keeps: dict[bool, bool] = {}
        self._fresh_s = math.inf if is_address(target.host) else _FRESH_S
        self._found: list[_Address] = []
        self._found_s = -math.inf
        self._preferred = 0  # address family that the system prefers
        self._looking: gevent.Greenlet[[], OSError | None] | None = None
        self._failed_s: dict[_Address, float] = {}  # when each of `_found` failed last
        self._turn = os.getpid() + crc32(socket.gethostname().encode())  # load processes start at different addresses

    def look_up(self) -> None:
        """Resolve the name, at most once a second. Concurrent callers share one look-up.

        Raises OSError.
        """
        if time.monotonic() - self._found_s < self._fresh_s:
            return
        if self._looking is None:
            self._looking = gevent.spawn(self._resolve)  # not cut with the user who needs it first
        failure = self._looking.get()
        if failure is not None:
            raise failure.with_traceback(None)

    def connect(self) -> socket.socket:
        """Open a TCP connection to the next address that works. Raises OSError of the last address."""
        self.look_up()
        failure = OSError(f"no address of {self.target.host}")
        for address in self._in_turn():
            sock = socket.socket(address[0], socket.SOCK_STREAM)
            if address in self._failed_s:
                self._failed_s[address] = time.monotonic()  # then one user tries it again, not all at once
            try:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.connect(address[1])
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                self._failed_s[address] = time.monotonic()
                failure = error
            else:
                self._failed_s.pop(address, None)
                return sock
        self._found_s = -math.inf  # it may have moved
        raise failure

    def _resolve(self) -> OSError | None:
        target = self.target
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            return OSError(f"not a host name ({error})")
        except OSError as error:
            return error
        finally:
            self._looking = None
        self._preferred = found[0][0]
        self._found = sorted({(one[0], one[4]) for one in found})  # name servers change the order
        self._failed_s = {one: self._failed_s[one] for one in self._found if one in self._failed_s}
        self._found_s = time.monotonic()
        return None

    def _in_turn(self) -> list[_Address]:
        """Return all addresses: first those of the preferred family that have not failed."""
        if len(self._found) == 1:
            return self._found
        self._turn += 1
        failed_after_s = time.monotonic() - _FAILED_S

        def rank(address: _Address) -> tuple[bool, bool]:
            failed = self._failed_s.get(address, -math.inf) > failed_after_s
            return failed, address[0] != self._preferred

        ordered: list[_Address] = []
        for _, group in itertools.groupby(sorted(self._found, key=rank), rank):
            alike = list(group)
            first = self._turn % len(alike)
            ordered += alike[first:] + alike[:first]
        return ordered


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tls_context() -> ssl.SSLContext:
    """As ssl.create_default_context, whose sockets block the whole process where gevent has not patched it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags = ssl.create_default_context().verify_flags
    context.load_default_certs()  # CAs from SSL_CERT_FILE, else the system's
    return context


_DONE_GRACE_S = 0.02  # for the end of the body after [DONE], which some proxies leave open
# Wait before closing a connection that the server closes: the side that closes first keeps its port for a minute.
_LEAVING_S = 0.1
_ESTABLISHED = 1  # tcpi_state
_TOTAL_RETRANS = slice(100, 104)  # tcpi_total_retrans
_TLS_RECORD_BYTES = 16_384  # fit an idle connection's buffer
_UPLOAD_BYTES = 1 << 18  # of a request at a time
_IDLE_SHARE = 0.8  # of the server's idle limit, so that it never closes first
_IDLE_LIMIT_S = 5.0  # where the server states none: the default of uvicorn (vLLM, SGLang) and of Node.js

# Of Keep-Alive: whole seconds, whole requests. Anything else is ignored.
_LIMIT = re.compile(r"(?<![^,\s])(timeout|max)\s*=\s*([0-9]{1,6})\s*(?=,|$)")

Body = Callable[[], bytes]  # makes it


class Client:
    """One kept connection to one server, for one request at a time."""

    __slots__ = (
        "_after_stream", "_dialer", "_headers", "_idle_until_ns", "_kept_ns", "_reader", "_requests_left", "_socket",
        "_stamped", "_timeout_s"
    )  # fmt: skip

    def __init__(
        self,
        dialer: Dialer,
        reader: Reader,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._dialer = dialer
        self._reader = reader
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._socket: socket.socket | None = None
        self._stamped = False
        self._requests_left: int | None = None  # on this connection, if the server limits them
        self._idle_until_ns = self._kept_ns = 0  # the latter: end of the previous response
        self._after_stream = False  # whether that was a stream

    def send(self, path: str, body: Body | None, exchange: Exchange) -> None:
        """Send a POST of `body`, or a GET, to the API's `path` and collect the response in `exchange`, failures too.

        `body` makes the JSON text when it is sent, and again if it is sent again: prompts may be long, and are not kept
        for as long as the answer takes.

        A greenlet that is cut meanwhile (GreenletExit, gevent.Timeout) sees that raised, with the connection closed.
        """
        try:
            if not self._attempt(path, body, exchange):
                self._attempt(path, body, exchange)
        except Failure as failure:
            exchange.failure = failure
        finally:
            exchange.ended_ns = time.monotonic_ns()
            if not exchange.complete:
                self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _request(self, path: str, body: Body | None, exchange: Exchange) -> bytes:
        content = b"" if body is None else body()
        exchange.request_bytes = len(content)
        method = "GET" if body is None else "POST"
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head = (
            f"{method} {self._dialer.target.prefix}{path} HTTP/1.1\r\nHost: {self._dialer.target.authority}\r\n"
            f"Accept: text/event-stream, application/json\r\nAccept-Encoding: identity\r\n"
            f"X-Request-Id: {exchange.id}\r\n{self._headers}{length}\r\n"
        )
        return head.encode("latin-1") + content  # in one packet where it fits

    def _attempt(self, path: str, body: Body | None, exchange: Exchange) -> bool:
        """Send once. Return False if the server was already closing the kept connection: send on a new one."""
        self._drop_if_stale()
        reused = self._socket is not None
        sock = self._socket or self._connect(exchange)
        sock.settimeout(self._timeout_s)
        request = self._request(path, body, exchange)
        sent_ns = time.monotonic_ns()
        if exchange.sent_ns is None:
            exchange.sent_ns = sent_ns
        upload = self._send(sock, request)
        del request
        try:
            self._receive(sock, exchange, upload)
        except TimeoutError:
            raise Failure("timeout", f"no data arrived for {self._timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            was_closing = reused and time.monotonic_ns() - self._kept_ns < CLOSING_S * 1e9
            if was_closing and not exchange.arrivals:
                self._dialer.keeps[self._after_stream] = False
                self.close()
                exchange.resent = True
                return False
            how = "the server closed the connection" if isinstance(error, EOFError) else _words(error)
            when = "it answered" if exchange.status is None else "the response was complete"
            raise Failure("disconnect", f"{how} before {when}") from None
        except httptools.HttpParserError as error:
            raise Failure("not_api", f"the answer is not HTTP/1.1: {error}") from None
        finally:
            if upload is not None:
                upload.stop()
        return True

    def _send(self, sock: socket.socket, request: bytes) -> "Upload | None":
        """Send what the socket's buffer accepts now; send the rest while the response is read.

        What is wrong with the connection is found by the reader, after a response that may have come.
        """
        sent = 0
        if self._dialer.tls is None or len(request) <= _TLS_RECORD_BYTES:
            with contextlib.suppress(OSError):
                sent = sock.send(request)
        return None if sent == len(request) else Upload(sock, memoryview(request)[sent:])

    def _receive(self, sock: socket.socket, exchange: Exchange, upload: "Upload | None") -> None:
        """Read until the response is complete. Raises EOFError when the connection ends before that."""
        collector = Collector(exchange)
        try:
            self._collect(sock, collector, upload)
        except (OSError, EOFError, httptools.HttpParserError):
            if not (exchange.answer.done or exchange.complete):
                raise
            exchange.complete = True  # complete; only the connection cannot be reused
            self.close()
        finally:
            collector.close()
        if upload is not None and upload.left:
            collector.keep_alive = False  # the server may still expect the rest of the request
        self._keep(collector)

    def _collect(self, sock: socket.socket, collector: Collector, upload: "Upload | None") -> None:
        exchange = collector.exchange
        began_ns = time.monotonic_ns()
        inbox: AnyInbox
        if self._stamped:
            inbox = self._reader.open(sock, exchange.arrivals)
        else:
            inbox = Direct(sock, self._reader.clock, exchange.arrivals)
        try:
            while not exchange.complete:
                # Pings keep the connection open, but do not extend the wait.
                said_ns = began_ns if exchange.data_read is None else exchange.arrivals[exchange.data_read][0]
                if upload is not None:
                    said_ns = max(said_ns, upload.moved_ns)
                patience_s = _DONE_GRACE_S if exchange.answer.done else self._timeout_s
                left_s = patience_s - (time.monotonic_ns() - said_ns) / 1e9
                if left_s <= 0:
                    raise TimeoutError
                inbox.wait(left_s)
                collector.take_in(inbox)
                if collector.is_open_ended and exchange.leaves_after is None:
                    inbox.template, inbox.while_asleep = collector.template, collector.take_asleep
        except (gevent.GreenletExit, gevent.Timeout):
            # Cut: keep what has arrived. An error raised here, such as the connection's end, would replace the cut, and
            # the greenlet would go on.
            with contextlib.suppress(OSError, EOFError, httptools.HttpParserError, Failure):
                collector.catch_up()
                for data in inbox.rest():
                    collector.take(data)
            raise
        finally:
            inbox.close()

    def _connect(self, exchange: Exchange) -> socket.socket:
        began_ns = time.monotonic_ns()
        sock = None
        try:
            sock = self._dialer.connect()
            exchange.connect_retries = _retries(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stamped = self._dialer.tls is None and ask_for_stamps(sock)
            if self._dialer.tls is not None:
                sock = self._dialer.tls.wrap_socket(sock, server_hostname=self._dialer.target.host)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise Failure("client", _no_more_files(error)) from None
            if isinstance(error, OSError):
                raise Failure("connect", f"{self._dialer.target.authority}: {_words(error)}{_proxy_remark()}") from None
            raise
        self._socket = sock
        self._requests_left = None
        exchange.connect_ns = time.monotonic_ns() - began_ns
        return sock

    def _keep(self, collector: Collector) -> None:
        """Keep the connection for the next request, unless the server closes it."""
        sock, keeps = self._socket, self._dialer.keeps
        if sock is None:
            return
        self._after_stream = collector.is_open_ended
        kept = keeps.get(self._after_stream)
        if not collector.keep_alive or kept is False:
            gevent.spawn_later(_LEAVING_S, sock.close)
            self._socket = None
        elif kept is None and self._after_stream:
            # Reuse such a connection only once the server's behaviour is known: a request might be lost or processed
            # twice.
            gevent.spawn_later(CLOSING_S, self._learn, sock)
            self._socket = None
        else:
            self._kept_ns = time.monotonic_ns()
            self._note_limits(collector.exchange.headers.get("keep-alive", ""))

    def _learn(self, sock: socket.socket) -> None:
        """Note whether the server has closed a connection after its stream."""
        self._dialer.keeps.setdefault(True, not self._has_ended(sock))
        sock.close()

    def _note_limits(self, keep_alive: str) -> None:
        limits = {name: int(number) for name, number in _LIMIT.findall(keep_alive.lower())}
        self._idle_until_ns = self._kept_ns + int(limits.get("timeout", _IDLE_LIMIT_S) * _IDLE_SHARE * 1e9)
        if self._requests_left is None:  # servers either count "max" down or repeat the same number
            self._requests_left = limits.get("max")
        if self._requests_left is not None:
            self._requests_left -= 1

    def _drop_if_stale(self) -> None:
        """Close a kept connection that the server has closed or will close."""
        sock = self._socket
        if sock is None:
            return
        worn = self._requests_left is not None and self._requests_left <= 0
        if worn or time.monotonic_ns() > self._idle_until_ns or self._has_ended(sock):
            self.close()

    def _has_ended(self, sock: socket.socket) -> bool:
        """Whether the server has closed an idle connection or sent unexpected bytes."""
        if hasattr(socket, "TCP_INFO") and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
            return True
        if self._dialer.tls is not None:  # unread bytes may be of TLS itself
            return False
        raw: Any = sock._sock  # type: ignore[attr-defined]  # without gevent's waiting
        try:
            raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


class Upload:
    """Send the rest of a request in its own greenlet, so that an early response is read."""

    def __init__(self, sock: socket.socket, rest: memoryview) -> None:
        self.left = len(rest)  # unsent bytes
        self.moved_ns = time.monotonic_ns()  # time of the last progress
        self._greenlet = gevent.spawn(self._run, sock, rest)

    def _run(self, sock: socket.socket, rest: memoryview) -> None:
        with contextlib.suppress(OSError, AttributeError):  # gevent's TLS socket raises this when just closed
            while self.left:
                # A TLS socket accepts a whole piece or nothing.
                self.left -= sock.send(rest[-self.left :][:_UPLOAD_BYTES])
                self.moved_ns = time.monotonic_ns()

    def stop(self) -> None:
        self._greenlet.kill(block=False)


def _retries(sock: socket.socket) -> int | None:
    """Return the SYN retransmissions of this new connection; None if the system does not report them."""
    if not hasattr(socket, "TCP_INFO"):  # not Linux
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS.stop)[_TOTAL_RETRANS]
    return int.from_bytes(info, sys.byteorder) if info else None


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no free local port (or no local address that it could be reached from)"
    return str(error.strerror or error or type(error).__name__).lower()


def _no_more_files(error: OSError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    whose = f"this load process may have {limit:,}" if error.errno == errno.EMFILE else "all processes together"
    return f"too many open files ({whose}): raise the limit, or use more 'processes' or fewer users"


def _proxy_remark() -> str:
    named = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    return f" ({named[0]} is set, but a load test never goes through a proxy)" if named else ""
