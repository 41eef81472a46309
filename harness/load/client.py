"""The measuring HTTP client: one keep-alive connection, and the time at which each piece of a response arrived.

`harness.load.reader` reads the bytes of all connections; `harness.load.exchange` parses them afterwards, so that
parsing never delays a time stamp.
"""

import contextlib
import errno
import ipaddress
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zlib import crc32

import gevent
import httptools
from gevent import socket, ssl

from harness.base.errors import HarnessError, reason_of
from harness.load.exchange import Collector, Exchange, Failure
from harness.load.reader import AnyInbox, Reader, UnstampedInbox, enable_stamps
from harness.records.records import CLOSING_S

CONNECT_TIMEOUT_S = 10.0
_LOOKUP_LIFETIME_S = 1.0  # connections within this time after a look-up use its result
_FAILED_ADDRESS_S = 30.0  # for this time an address that failed is tried last

_Address = tuple[int, tuple[Any, ...]]  # family, socket address


def header_line(name: str, value: str) -> str:
    """Return a line of a request's head; what a header cannot carry is "?"."""
    return f"{name}: {re.sub('[^ -~]', '?', value)[:500].strip()}\r\n"


class ApiAddress(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str  # path, including /v1

    @classmethod
    def parse(cls, url: str) -> "ApiAddress":
        """Return the address of the API at a base URL, with or without /v1. Raises HarnessError for a wrong URL."""
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            raise HarnessError(f"host: {url!r} has a port that is not a number") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HarnessError(f"host: {url!r} is not a URL", next_step="Give one such as http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Dialer:
    """Opens connections to one server, for all clients of a process. Create it after the fork.

    It resolves the host name again and again and uses its addresses in turn: the servers behind one name (a Kubernetes
    headless service) share the load.
    """

    def __init__(self, target: ApiAddress) -> None:
        self.target = target
        self.tls = _tls_context() if target.tls else None
        # Whether the server really keeps the connections that it promises to keep, after streams (True) and others.
        self.keeps_connections: dict[bool, bool] = {}
        self._addresses: list[_Address] = []
        self._resolved_s = -math.inf
        self._preferred_family = 0
        self._lookup: gevent.Greenlet[[], OSError | None] | None = None  # while it runs
        self._failed_s: dict[_Address, float] = {}  # time of the last failure of an address
        self._turn = os.getpid() + crc32(socket.gethostname().encode())  # load processes start at different addresses

    def look_up(self) -> None:
        """Resolve the name, at most once a second. Concurrent callers share one look-up. Raises OSError."""
        if time.monotonic() - self._resolved_s < _LOOKUP_LIFETIME_S:
            return
        if self._lookup is None:
            self._lookup = gevent.spawn(self._resolve)  # a greenlet of its own: the user who needs it may be cut
        failure = self._lookup.get()
        if failure is not None:
            raise failure.with_traceback(None)

    def connect(self) -> socket.socket:
        """Open a TCP connection to the next address that works. Raises OSError of the last address."""
        self.look_up()
        failure = OSError(f"no address of {self.target.host}")
        for address in self._ordered_addresses():
            sock = socket.socket(address[0], socket.SOCK_STREAM)
            if address in self._failed_s:
                self._failed_s[address] = time.monotonic()  # so that only this user tries it again
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
        self._resolved_s = -math.inf  # the server may have moved: resolve again
        raise failure

    def _resolve(self) -> OSError | None:
        """Resolve the name and return the error, if any."""
        try:
            results = socket.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            return OSError(f"not a host name ({reason_of(error)})")
        except OSError as error:
            return error
        finally:
            self._lookup = None
        self._preferred_family = results[0][0]
        self._addresses = sorted({(family, address) for family, _, _, _, address in results})  # DNS changes the order
        self._failed_s = {address: self._failed_s[address] for address in self._addresses if address in self._failed_s}
        self._resolved_s = time.monotonic()
        return None

    def _ordered_addresses(self) -> list[_Address]:
        """Return all addresses: first those of the preferred family that have not failed, equal ones in turn."""
        self._turn += 1
        failed_after_s = time.monotonic() - _FAILED_ADDRESS_S

        def rank(address: _Address) -> tuple[bool, bool]:
            failed = self._failed_s.get(address, -math.inf) > failed_after_s
            return failed, address[0] != self._preferred_family

        ordered = sorted(self._addresses, key=rank)
        best = [address for address in ordered if rank(address) == rank(ordered[0])]
        first = self._turn % len(best)
        return best[first:] + best[:first] + ordered[len(best) :]


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tls_context() -> ssl.SSLContext:
    """Return a context like that of ssl.create_default_context, whose own sockets block the process under gevent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags = ssl.create_default_context().verify_flags
    context.load_default_certs()  # CAs from SSL_CERT_FILE, else the system's
    return context


_DONE_GRACE_S = 0.02  # wait for the end of the body after [DONE]: some proxies never send it
# Wait so long for the server to close first: the side that closes first keeps its port for a minute.
_CLOSE_DELAY_S = 0.1
_ESTABLISHED = 1  # tcpi_state
_TOTAL_RETRANS = slice(100, 104)  # tcpi_total_retrans
_UPLOAD_BYTES = 1 << 18  # sent at a time: the timeout is that of one such piece
_IDLE_SHARE = 0.8  # reuse a connection for this share of the server's idle limit, so that the server never closes first
_IDLE_LIMIT_S = 5.0  # if the server states no limit: the default of uvicorn (vLLM, SGLang) and of Node.js

_IDLE_LIMIT = re.compile(r"(?<![^,\s])timeout\s*=\s*([0-9]{1,6})\s*(?=,|$)")  # of the Keep-Alive header, in s

Body = Callable[[], bytes]  # makes the JSON text of a request


class Client:
    """One keep-alive connection to one server, for one request at a time."""

    def __init__(self, dialer: Dialer, reader: Reader, *, timeout_s: float, headers: Mapping[str, str] | None = None):
        self._dialer = dialer
        self._reader = reader
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._socket: socket.socket | None = None
        self._stamped = False  # the kernel stamps what this socket receives
        self._idle_until_ns = 0  # latest time to reuse the connection
        self._last_ended_ns = 0  # end of the previous response ...
        self._after_stream = False  # ... and whether it was a stream

    def send(self, path: str, body: Body | None, exchange: Exchange) -> None:
        """Send a POST of `body`, or a GET without one, to the API's `path`. Collect response or failure in `exchange`.

        `body` is called each time the request is sent: a long prompt is not kept in memory during the answer.
        If the greenlet is cut meanwhile, GreenletExit or gevent.Timeout is raised and the connection is closed.
        """
        try:
            if not self._send_once(path, body, exchange):
                self._send_once(path, body, exchange)  # on a new connection
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

    def _encode_request(self, path: str, body: Body | None, exchange: Exchange) -> bytes:
        content = b"" if body is None else body()
        exchange.request_bytes = len(content)
        method = "GET" if body is None else "POST"
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head = (
            f"{method} {self._dialer.target.prefix}{path} HTTP/1.1\r\nHost: {self._dialer.target.authority}\r\n"
            f"Accept: text/event-stream, application/json\r\nAccept-Encoding: identity\r\n"
            f"X-Request-Id: {exchange.id}\r\n{exchange.header}{self._headers}{length}\r\n"
        )
        return head.encode("latin-1") + content  # in one packet where it fits

    def _send_once(self, path: str, body: Body | None, exchange: Exchange) -> bool:
        """Send the request and read its response. Return False if the server was already closing the connection."""
        self._drop_if_stale()
        reused = self._socket is not None
        sock = self._socket or self._connect(exchange)
        sock.settimeout(self._timeout_s)
        request = self._encode_request(path, body, exchange)
        sent_ns = time.monotonic_ns()
        if exchange.sent_ns is None:
            exchange.sent_ns = sent_ns
        try:
            self._upload(sock, request)
            del request
            self._receive(sock, exchange)
        except TimeoutError:
            raise Failure("timeout", exchange.describe_timeout(self._timeout_s)) from None
        except (OSError, EOFError) as error:
            was_closing = reused and time.monotonic_ns() - self._last_ended_ns < CLOSING_S * 1e9
            if was_closing and not exchange.arrivals.reads_ns:
                self._dialer.keeps_connections[self._after_stream] = False
                self.close()
                exchange.resent = True
                return False
            cause = "the server closed the connection" if isinstance(error, EOFError) else _error_text(error)
            when = "it answered" if exchange.status is None else "the response was complete"
            raise Failure("disconnect", f"{cause} before {when}") from None
        except httptools.HttpParserError as error:
            raise Failure("not_api", f"the answer is not HTTP/1.1: {error}") from None
        return True

    def _upload(self, sock: socket.socket, request: bytes) -> None:
        """Send a request. Raises TimeoutError if the server reads nothing of it for too long.

        Other errors are ignored: reading reports them, after a response (such as 413) that may have arrived.
        """
        rest = memoryview(request)
        try:
            while rest:
                rest = rest[sock.send(rest[:_UPLOAD_BYTES]) :]
        except TimeoutError:
            raise
        except OSError:
            pass

    def _receive(self, sock: socket.socket, exchange: Exchange) -> None:
        """Read until the response is complete. Raises EOFError when the connection ends before that."""
        collector = Collector(exchange)
        try:
            self._read_response(sock, collector)
        except (OSError, EOFError, httptools.HttpParserError):
            if not (exchange.answer.done or exchange.complete):
                raise
            exchange.complete = True  # only the connection cannot be reused
            self.close()
        finally:
            collector.close()
        self._keep_or_close(collector)

    def _read_response(self, sock: socket.socket, collector: Collector) -> None:
        exchange = collector.exchange
        began_ns = time.monotonic_ns()
        inbox: AnyInbox = (
            self._reader.open(sock, exchange.arrivals)
            if self._stamped
            else UnstampedInbox(sock, self._reader.clock, exchange.arrivals)
        )
        try:
            while not exchange.complete:
                timeout_s = _DONE_GRACE_S if exchange.answer.done else self._timeout_s
                remaining_s = exchange.remaining_s(began_ns, timeout_s)
                if remaining_s <= 0:
                    raise TimeoutError
                inbox.wait(remaining_s)
                collector.parse_inbox(inbox)
                if collector.is_open_ended and exchange.abandon_after_chunks is None:
                    inbox.template, inbox.parse_asleep = collector.template, collector.parse_asleep
        except (gevent.GreenletExit, gevent.Timeout):
            # Cut: keep what has arrived. An error raised here would replace the cut, and the greenlet would continue.
            with contextlib.suppress(OSError, EOFError, httptools.HttpParserError, Failure):
                collector.note_template_reads()
                for data in inbox.take_pieces():
                    collector.parse(data)
            raise
        finally:
            inbox.close()

    def _connect(self, exchange: Exchange) -> socket.socket:
        began_ns = time.monotonic_ns()
        sock = None
        try:
            sock = self._dialer.connect()
            exchange.connect_retries = _syn_retries(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stamped = self._dialer.tls is None and enable_stamps(sock)
            if self._dialer.tls is not None:
                sock = self._dialer.tls.wrap_socket(sock, server_hostname=self._dialer.target.host)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.EMFILE, errno.ENFILE):
                message = "too many open files: raise the limit, or use more 'processes' or fewer users"
                raise Failure("client", message) from None
            raise Failure("connect", f"{self._dialer.target.authority}: {_error_text(error)}") from None
        self._socket = sock
        exchange.connect_ns = time.monotonic_ns() - began_ns
        return sock

    def _keep_or_close(self, collector: Collector) -> None:
        """Keep the connection for the next request, unless the server closes it."""
        sock, keeps_connections = self._socket, self._dialer.keeps_connections
        if sock is None:
            return
        self._after_stream = collector.is_open_ended
        kept = keeps_connections.get(self._after_stream)
        if not collector.keep_alive or kept is False:
            gevent.spawn_later(_CLOSE_DELAY_S, sock.close)
            self._socket = None
        elif kept is None and self._after_stream:
            # Not known yet: on a connection that the server closes, a request might be lost or processed twice.
            gevent.spawn_later(CLOSING_S, self._note_stream_reuse, sock)
            self._socket = None
        else:
            self._last_ended_ns = time.monotonic_ns()
            stated = _IDLE_LIMIT.search(collector.exchange.headers.get("keep-alive", "").lower())
            limit_s = float(stated[1]) if stated else _IDLE_LIMIT_S
            self._idle_until_ns = self._last_ended_ns + int(limit_s * _IDLE_SHARE * 1e9)

    def _note_stream_reuse(self, sock: socket.socket) -> None:
        """Note whether the server keeps a connection open after a stream, and close it."""
        self._dialer.keeps_connections.setdefault(True, not self._is_closed_by_server(sock))
        sock.close()

    def _drop_if_stale(self) -> None:
        """Close a kept connection that the server has closed or will close."""
        sock = self._socket
        if sock is not None and (time.monotonic_ns() > self._idle_until_ns or self._is_closed_by_server(sock)):
            self.close()

    def _is_closed_by_server(self, sock: socket.socket) -> bool:
        """Whether the server has closed this idle connection, or sent unexpected bytes on it."""
        if hasattr(socket, "TCP_INFO") and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
            return True
        if self._dialer.tls is not None:  # unread bytes may be of TLS itself
            return False
        raw: Any = sock._sock  # type: ignore[attr-defined]  # gevent's socket would wait
        try:
            raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def _syn_retries(sock: socket.socket) -> int | None:
    """Return the SYN retransmissions of a new connection; None if the system (not Linux) does not report them."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS.stop)[_TOTAL_RETRANS]
    return int.from_bytes(info, sys.byteorder) if info else None


def _error_text(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no free local port (or no local address that it could be reached from)"
    return reason_of(error).lower()
