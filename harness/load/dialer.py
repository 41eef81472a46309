"""Where an API is, and new connections to it: its host name is resolved again and again, and all addresses are used."""

import ipaddress
import itertools
import math
import os
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zlib import crc32

import gevent
from gevent import socket, ssl

from harness.errors import HarnessError

CONNECT_TIMEOUT_S = 10.0
_FRESH_S = 1.0  # users who connect within this time of a look-up share its result
_FAILED_S = 30.0  # an address that failed is tried after all others for this time

_Address = tuple[int, tuple[Any, ...]]  # family, socket address


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


class Dialer:
    """Opens connections to one server, for all clients of a process. Made after the fork.

    Addresses take turns, so that a name with several (a Kubernetes headless service) gets load on each of them.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tls = _tls_context() if target.tls else None
        # What the server does with a connection that it says it keeps, by whether the response was a stream. Learned.
        self.keeps: dict[bool, bool] = {}
        self._fresh_s = math.inf if is_address(target.host) else _FRESH_S
        self._found: list[_Address] = []
        self._found_s = -math.inf
        self._preferred = 0  # family that the system puts first
        self._looking: gevent.Greenlet[[], OSError | None] | None = None
        self._failed_s: dict[_Address, float] = {}  # when each of `_found` failed last
        self._turn = os.getpid() + crc32(socket.gethostname().encode())  # load processes begin at different addresses

    def look_up(self) -> None:
        """Resolve the name, unless that was done within the last second. All who ask meanwhile share one look-up.

        Raises OSError.
        """
        if time.monotonic() - self._found_s < self._fresh_s:
            return
        if self._looking is None:
            self._looking = gevent.spawn(self._resolve)  # not cut with the user who asked first
        failure = self._looking.get()
        if failure is not None:
            raise failure.with_traceback(None)

    def connect(self) -> socket.socket:
        """A TCP connection to the address whose turn it is, else to the next one. Raises OSError of the last."""
        self.look_up()
        failure = OSError(f"no address of {self.target.host}")
        for address in self._in_turn():
            sock = socket.socket(address[0], socket.SOCK_STREAM)
            if address in self._failed_s:
                self._failed_s[address] = time.monotonic()  # one user tries it again, and not all at once
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
        self._found = sorted({(one[0], one[4]) for one in found})  # name servers shuffle them
        self._failed_s = {one: self._failed_s[one] for one in self._found if one in self._failed_s}
        self._found_s = time.monotonic()
        return None

    def _in_turn(self) -> list[_Address]:
        """All addresses: first those that have not failed and are of the system's preferred family."""
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
    """Whether a host is given by its IP address and not by a name."""
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
