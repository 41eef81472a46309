"""The measuring HTTP client: one keep-alive connection, and the time at which each piece of an answer arrived.

The bytes are read by `harness.load.reader`, one place for all connections; what they mean is worked out afterwards
(`harness.load.exchange`, `harness.load.answer`), so that parsing never delays a stamp.
"""

import contextlib
import errno
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import gevent
import httptools
from gevent import socket

from harness.load.clock import KernelClock, ask_for_stamps
from harness.load.dialer import CONNECT_TIMEOUT_S, Dialer
from harness.load.exchange import Collector, Exchange, Failure
from harness.load.reader import Direct, Inbox, Reader
from harness.rundir.records import CLOSING_S

_DONE_GRACE_S = 0.02  # for the end of the body after [DONE], which some proxies leave open
# Wait before closing a connection that the server closes: who closes first keeps the local port for a minute.
_LEAVING_S = 0.1
_ESTABLISHED = 1  # tcpi_state
_TOTAL_RETRANS = slice(100, 104)  # tcpi_total_retrans
_TLS_RECORD_BYTES = 16_384  # fit an idle connection's buffer
_UPLOAD_BYTES = 1 << 18  # of a request at a time
_IDLE_SHARE = 0.8  # of the server's idle limit, so that it never closes first
_IDLE_LIMIT_S = 5.0  # where the server states none: the default of uvicorn (vLLM, SGLang) and of Node.js

# Of Keep-Alive: whole seconds, whole requests. What is anything else is not said.
_LIMIT = re.compile(r"(?<![^,\s])(timeout|max)\s*=\s*([0-9]{1,6})\s*(?=,|$)")

Body = Callable[[], bytes]  # makes it


class Client:
    """One connection to one server, opened when needed and kept; for one request at a time."""

    __slots__ = (
        "_after_stream", "_clock", "_dialer", "_headers", "_idle_until_ns", "_kept_ns", "_reader", "_requests_left",
        "_socket", "_stamped", "_timeout_s"
    )  # fmt: skip

    def __init__(
        self,
        dialer: Dialer,
        clock: KernelClock,
        reader: Reader,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._dialer = dialer
        self._clock = clock
        self._reader = reader
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._socket: socket.socket | None = None
        self._stamped = False
        self._requests_left: int | None = None  # on this connection, where the server limits them
        self._idle_until_ns = self._kept_ns = 0  # the latter: end of the previous response on this connection
        self._after_stream = False  # whether that was a stream

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

    def _request(self, method: str, path: str, body: Body | None, exchange: Exchange) -> bytes:
        content = b"" if body is None else body()
        exchange.request_bytes = len(content)
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head = (
            f"{method} {self._dialer.target.prefix}{path} HTTP/1.1\r\nHost: {self._dialer.target.authority}\r\n"
            f"Accept: text/event-stream, application/json\r\nAccept-Encoding: identity\r\n"
            f"X-Request-Id: {exchange.id}\r\n{self._headers}{length}\r\n"
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
        """Send once. Return False if the server was already closing the kept connection: send on a new one."""
        self._drop_if_stale()
        reused = self._socket is not None
        sock = self._socket or self._connect(exchange)
        sock.settimeout(self._timeout_s)
        request = self._request(method, path, body, exchange)
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
        """Send what the socket's buffer takes at once; the rest is sent while the response is read.

        What is wrong with the connection is for the reader to find, behind the response that may be there.
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
            if not (exchange.done or exchange.complete):
                raise
            exchange.complete = True  # all was said; only the connection is of no more use
            self.close()
        finally:
            collector.close()
        if upload is not None and upload.left:
            collector.keep_alive = False  # the server may still expect the rest, which would be sent in vain
        self._keep(collector)

    def _collect(self, sock: socket.socket, collector: Collector, upload: "Upload | None") -> None:
        exchange = collector.exchange
        began_ns = time.monotonic_ns()
        inbox = self._inbox(sock, exchange)
        try:
            while not exchange.complete:
                # Pings keep a connection open, but they do not keep us waiting.
                said_ns = began_ns if exchange.said_read is None else exchange.arrivals[exchange.said_read][0]
                if upload is not None:
                    said_ns = max(said_ns, upload.moved_ns)
                patience_s = _DONE_GRACE_S if exchange.done else self._timeout_s
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
            with contextlib.suppress(OSError, EOFError, httptools.HttpParserError, Failure):
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
        self._after_stream = collector.waits_for_end
        kept = keeps.get(self._after_stream)
        if not collector.keep_alive or kept is False:
            gevent.spawn_later(_LEAVING_S, sock.close)
            self._socket = None
        elif kept is None and self._after_stream:
            # Until it is known what the server does after a stream, no request is sent on such a connection: it might
            # be lost, or be processed twice.
            gevent.spawn_later(CLOSING_S, self._learn, sock)
            self._socket = None
        else:
            self._kept_ns = time.monotonic_ns()
            self._note_limits(collector.exchange.headers.get("keep-alive", ""))

    def _learn(self, sock: socket.socket) -> None:
        """Note whether the server has closed a connection after its stream."""
        self._dialer.keeps.setdefault(True, not self._has_ended(sock))
        sock.close()

    def _note_limits(self, said: str) -> None:
        limits = {name: int(number) for name, number in _LIMIT.findall(said.lower())}
        self._idle_until_ns = self._kept_ns + int(limits.get("timeout", _IDLE_LIMIT_S) * _IDLE_SHARE * 1e9)
        if self._requests_left is None:  # servers either count "max" down or repeat the same number
            self._requests_left = limits.get("max")
        if self._requests_left is not None:
            self._requests_left -= 1

    def _drop_if_stale(self) -> None:
        """Close a kept connection that the server has closed, or is about to."""
        sock = self._socket
        if sock is None:
            return
        worn = self._requests_left is not None and self._requests_left <= 0
        if worn or time.monotonic_ns() > self._idle_until_ns or self._has_ended(sock):
            self.close()

    def _has_ended(self, sock: socket.socket) -> bool:
        """Whether the server has closed an idle connection, or sent anything that no request asked for."""
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
    """Sends the rest of a request in a greenlet of its own, so that a response which comes before its end is read."""

    def __init__(self, sock: socket.socket, rest: memoryview) -> None:
        self.left = len(rest)  # bytes that the socket has not taken
        self.moved_ns = time.monotonic_ns()  # when it last took some
        self._greenlet = gevent.spawn(self._run, sock, rest)

    def _run(self, sock: socket.socket, rest: memoryview) -> None:
        with contextlib.suppress(OSError, AttributeError):  # gevent's TLS socket raises this where it was just closed
            while self.left:
                # A TLS socket takes a piece as a whole or not at all.
                self.left -= sock.send(rest[-self.left :][:_UPLOAD_BYTES])
                self.moved_ns = time.monotonic_ns()

    def stop(self) -> None:
        self._greenlet.kill(block=False)


def _retries(sock: socket.socket) -> int | None:
    """Return how many SYNs were sent again until this new connection was open; None where the system does not say."""
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
