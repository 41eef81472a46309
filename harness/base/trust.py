"""The certificates that are trusted for https servers: the same for probes, metrics and load. Nothing turns this off.

The load processes use OpenSSL, which reads SSL_CERT_FILE; this module sets the same for `requests`.
"""

import contextlib
import os
import socket
import ssl
import threading
import weakref
from pathlib import Path
from typing import Any

import requests
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

from harness.base.errors import HarnessError, reason_of
from harness.base.files import open_file
from harness.base.redact import register_secrets

MAX_ANSWER_BYTES = 16 << 20
CA_VARIABLE = "SSL_CERT_FILE"


def find_authorities() -> str | bool:
    """Return `verify` for `requests`: the file of SSL_CERT_FILE, else the system's; True: those of `requests`."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or True


def _note_sockets(pool: Any, sockets: "list[weakref.ref[socket.socket]]") -> Any:
    """Return a class of pools whose connections add their sockets to `sockets`."""
    base = pool.ConnectionCls

    def connect(connection: Any) -> None:
        base.connect(connection)
        sockets.append(weakref.ref(connection.sock))

    return type(pool.__name__, (pool,), {"ConnectionCls": type(base.__name__, (base,), {"connect": connect})})


class _Adapter(requests.adapters.HTTPAdapter):
    """Keeps the sockets that it opens."""

    def __init__(self) -> None:
        self._sockets: list[weakref.ref[socket.socket]] = []
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _note_sockets(HTTPConnectionPool, self._sockets),
            "https": _note_sockets(HTTPSConnectionPool, self._sockets),
        }

    def shut_down(self) -> None:
        """End what is read from the sockets, in any thread."""
        for reference in self._sockets:
            if (one := reference()) is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # not of SSLSocket, which another thread may read
        self._sockets.clear()


class _Session(requests.Session):
    """Follows no redirect, reads no whole answer of more than MAX_ANSWER_BYTES, and takes a timeout as the total time.

    That of a streamed answer is the total time until its headers, and then the time until the next bytes.
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
        state = {"ended": False, "expired": False}
        lock = threading.Lock()  # held while sockets are shut down: the next request opens its own only afterwards

        def expire() -> None:
            with lock:
                if not state["ended"]:
                    state["expired"] = True
                    self._adapter.shut_down()

        timer = threading.Timer(how["timeout"], expire)
        timer.daemon = True
        timer.start()
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
            if not state["expired"]:
                raise
        finally:
            timer.cancel()
            with lock:
                state["ended"] = True
        if state["expired"]:
            raise requests.ReadTimeout(f"no complete answer within {how['timeout']:g} s")
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
