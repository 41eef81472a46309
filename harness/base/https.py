"""The certificates that are trusted for https servers: the same for probes, metrics and load. Nothing turns this off.

The load processes use OpenSSL, which reads SSL_CERT_FILE; this module sets the same for `requests`.
"""

import contextlib
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import wait_for_read

from harness.base.errors import HarnessError, reason_of
from harness.base.files import open_file
from harness.base.redact import register_secrets

MAX_ANSWER_BYTES = 16 << 20
MAX_ANSWER_S = 300.0  # of an answer, if no other time is given: the server may still load its model
MAX_REST_S = 30.0  # of an answer after its first byte: a server that loads its model sends nothing until then
CA_VARIABLE = "SSL_CERT_FILE"


def find_authorities() -> str | bool:
    """Return `verify` for `requests`: the file of SSL_CERT_FILE, else the system's; True: those of `requests`."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or True


def _note_sockets(pool: Any, adapter: "_Adapter") -> Any:
    """Return a class of pools whose connections add their sockets to the adapter's, and report the first byte."""
    base = pool.ConnectionCls

    def connect(connection: Any) -> None:
        base.connect(connection)
        adapter.sockets.append(weakref.ref(connection.sock))

    def getresponse(connection: Any) -> Any:
        # TLS: bytes of its own may come before the answer, so only the total time limits it.
        if adapter.on_first_byte is not None and not isinstance(connection.sock, ssl.SSLSocket):
            wait_for_read(connection.sock, connection.timeout)
            adapter.on_first_byte()
        return base.getresponse(connection)

    methods = {"connect": connect, "getresponse": getresponse}
    return type(pool.__name__, (pool,), {"ConnectionCls": type(base.__name__, (base,), methods)})


class _Adapter(requests.adapters.HTTPAdapter):
    """Keeps the sockets that it opens."""

    def __init__(self) -> None:
        self.sockets: list[weakref.ref[socket.socket]] = []
        self.on_first_byte: Callable[[], None] | None = None
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _note_sockets(HTTPConnectionPool, self),
            "https": _note_sockets(HTTPSConnectionPool, self),
        }

    def shut_down(self) -> None:
        """End what is read from the sockets, in any thread."""
        for reference in self.sockets:
            if (sock := reference()) is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not of SSLSocket, which another thread may read
        self.sockets.clear()


class _Session(requests.Session):
    """Follows no redirect, reads no whole answer of more than MAX_ANSWER_BYTES, and takes a timeout as the total time.

    That of a streamed answer is the total time until its headers, and then the time until the next bytes. After its
    first byte an answer, and the headers of a streamed one, take at most MAX_REST_S.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adapter = _Adapter()
        for scheme in ("http://", "https://"):
            self.mount(scheme, self._adapter)

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None: requests raises ValueError for an invalid address, even of a redirect that is not followed."""

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        """Raises requests.RequestException, also for an answer that is too long and was not to be streamed."""
        limit_s = MAX_ANSWER_S if how["timeout"] is None else how["timeout"]
        deadline_s = time.monotonic() + limit_s
        ended, expired = threading.Event(), threading.Event()
        lock = threading.Lock()  # held while sockets are shut down: the next request opens its own only afterwards

        def expire() -> None:
            with lock:
                if not ended.is_set():
                    expired.set()
                    self._adapter.shut_down()

        def start_timer() -> threading.Timer:
            timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), expire)
            timer.daemon = True
            timer.start()
            return timer

        def shorten() -> None:
            nonlocal deadline_s, limit_s
            if (rest_s := time.monotonic() + MAX_REST_S) < deadline_s:
                deadline_s, limit_s = rest_s, MAX_REST_S
                timers.append(start_timer())

        timers = [start_timer()]
        self._adapter.on_first_byte = shorten
        try:
            response = super().send(request, **how | {"stream": True})
            if not how.get("stream") or response.status_code != 200:
                content = bytearray()
                for piece in response.iter_content(65_536):
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        response.close()
                        raise requests.RequestException(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
                response._content = bytes(content)
        except requests.RequestException:
            if not expired.is_set():
                raise
        finally:
            self._adapter.on_first_byte = None
            for timer in timers:
                timer.cancel()
            with lock:
                ended.set()
        if expired.is_set():
            raise requests.ReadTimeout(f"no complete answer within {limit_s:g} s")
        return response


def open_session(api_key: str | None) -> requests.Session:
    """Return a session for all requests to a server except load."""
    session = _Session()
    session.trust_env = False  # no proxy of the environment between the harness and the server
    session.verify = find_authorities()
    if api_key:
        register_secrets({api_key: True})
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session


def trust_authority(ca: Path) -> None:
    """Trust only this certificate authority, in this process and in every process that it starts.

    Raises HarnessError for a file without a certificate.
    """
    try:
        open_file(ca).close()
        ssl.create_default_context(cafile=str(ca))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise HarnessError(
            f"--ca: {ca} holds no certificate in PEM form ({reason_of(error)})",
            next_step="Give the certificate of the authority that signed the server's, in PEM form.",
        ) from None
    os.environ[CA_VARIABLE] = str(ca.resolve())
