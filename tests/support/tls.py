"""A self-made authority, certificates that it signed, and TLS in front of a plain server."""

import contextlib
import selectors
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Signed(NamedTuple):
    """An authority's certificate, and a server's certificate with its key; paths of PEM files."""

    ca: Path
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Of the server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def sign(folder: Path, name: str = "IP:127.0.0.1") -> Signed:
    """An authority of our own and a certificate for `name`, made by openssl."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Signed(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    quiet: list[str | Path] = ["openssl", "req", *curve, "-nodes", "-days", "2"]
    ca_key, request, extra = folder / "ca.key", folder / "server.csr", folder / "extra"
    authority: list[str | Path] = ["-x509", "-subj", "/CN=authority of a test", "-keyout", ca_key, "-out", made.ca]
    _run(*quiet, *authority, "-addext", "keyUsage=critical,keyCertSign")
    _run(*quiet[:-2], "-subj", "/CN=server of a test", "-keyout", made.key, "-out", request)
    extra.write_text(f"subjectAltName={name}\n")
    _run("openssl", "x509", "-req", "-in", request, "-CA", made.ca, "-CAkey", ca_key, "-CAcreateserial",
         "-days", "2", "-extfile", extra, "-out", made.certificate)  # fmt: skip
    return made


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def wrapped(port: int, signed: Signed, seen: list[bytes] | None = None) -> Iterator[str]:
    """https://127.0.0.1:PORT in front of the plain server at `port`; what clients send goes to `seen`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        open_ones: list[socket.socket] = []
        thread = threading.Thread(
            target=_accept, args=(listening, signed.context(), port, open_ones, seen), daemon=True
        )
        thread.start()
        try:
            yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for sock in open_ones:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _accept(
    listening: socket.socket,
    context: ssl.SSLContext,
    port: int,
    open_ones: list[socket.socket],
    seen: list[bytes] | None,
) -> None:
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return
        open_ones.append(client)
        threading.Thread(target=_serve, args=(client, context, port, seen), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int, seen: list[bytes] | None) -> None:
    try:
        with (
            context.wrap_socket(client, server_side=True) as outside,
            socket.create_connection(("127.0.0.1", port)) as inside,
        ):
            _pass_on(outside, inside, seen)
    except OSError:
        client.close()  # such as a client that does not believe the certificate


def _pass_on(outside: ssl.SSLSocket, inside: socket.socket, seen: list[bytes] | None) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(outside, selectors.EVENT_READ, inside)
        selector.register(inside, selectors.EVENT_READ, outside)
        while True:
            for key, _ in selector.select():
                source, target = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(65_536)
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(65_536)
                if not data:
                    return
                if seen is not None and source is outside:
                    seen.append(data)
                target.sendall(data)
