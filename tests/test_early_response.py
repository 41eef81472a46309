"""A response that arrives while the request is still being sent: it is read, recorded, and no reason to send again."""

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from harness.load.exchange import Exchange
from harness.workload import Message
from tests.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    TOKEN,
    Handler,
    Send,
    chunk,
    exchanging,
    load_process,
    read_request,
    serving,
    whole,
    work,
)
from tests.faults import fault
from tests.load_runs import records_of
from tests.tls import sign

LONG = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"' + b"a " * 6_000_000 + b'"}]}'
TOO_LONG = b'{"error":{"message":"the prompt is too long","type":"BadRequestError"}}'


def too_large(connection: bytes = b"") -> bytes:
    return whole(TOO_LONG, status=b"413 Content Too Large", more=connection)


def read_head(connection: socket.socket) -> bytes:
    """The head of a request, and as little of its body as comes with it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as servers do: a reset overtakes no answer
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1000)
        if not piece:
            break
        data += piece
    return data


def is_long(head: bytes) -> bool:
    return b"Content-Length: %d\r\n" % len(LONG) in head


@pytest.fixture(params=["plain", "TLS"])
def tls(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ssl.SSLContext | None]:
    if request.param == "plain":
        yield None
        return
    signed = sign(tmp_path / "signed", "DNS:localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(signed.ca))
    yield signed.context()


def refused(send: Send) -> Exchange:
    """A long request that is refused: once, and with the words of the server."""
    exchange, answer = send(LONG)
    assert (answer.error, answer.status) == ("http", 413)
    assert answer.message == "status 413: BadRequestError: the prompt is too long"
    assert answer.headers_s is not None and 0 < answer.headers_s <= answer.ended_s
    assert not exchange.resent
    return exchange


@pytest.mark.parametrize("kept", [False, True], ids=["new connection", "kept connection"])
@fault("network", "the server refuses a long prompt before it has read it (413), and closes",
       seen="the status and its message, not a broken connection")  # fmt: skip
def test_a_server_that_refuses_and_closes_with_the_request_unread(tls: ssl.SSLContext | None, kept: bool) -> None:
    seen = []

    def handler(connection: socket.socket, number: int) -> None:
        while not is_long(head := read_head(connection)):
            if not head:
                return
            connection.sendall(GOOD)
        seen.append(number)
        connection.sendall(too_large(b"Connection: close\r\n"))  # and what was not read makes the kernel send a reset

    with serving(handler, tls) as url, exchanging(url) as send:
        if kept:
            assert send()[1].error is None
        assert (refused(send).connect_ns is None) == kept
        assert seen == [0]
        assert send()[1].error is None


@pytest.mark.parametrize("reads_on", [False, True], ids=["reads no more", "reads the rest"])
def test_a_server_that_refuses_and_keeps_the_connection(tls: ssl.SSLContext | None, reads_on: bool) -> None:
    """The rest of the request is not sent for nothing: the next one has a connection of its own, unless the server read
    the rest before its answer was there."""

    def handler(connection: socket.socket, number: int) -> None:
        head = read_head(connection)
        if not is_long(head):
            connection.sendall(GOOD)
        else:
            connection.sendall(too_large())
        if not reads_on:
            time.sleep(0.5)
            return
        left = len(LONG) - len(head.partition(b"\r\n\r\n")[2])
        while left and (data := connection.recv(min(65536, left))):
            left -= len(data)
        if not left and read_head(connection):
            connection.sendall(GOOD)

    with serving(handler, tls) as url, exchanging(url) as send:
        refused(send)
        exchange, answer = send()
    assert (answer.error, exchange.resent) == (None, False)
    assert reads_on or exchange.connect_ns is not None


def slow(*early: bytes, then: tuple[bytes, ...], pause_s: float = 0.12, pauses: int = 10) -> Handler:
    """Says something early, reads the request with pauses, and says the rest."""

    def handler(connection: socket.socket, number: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # so that the client notices the pauses
        head = read_head(connection)
        for piece in early:
            connection.sendall(piece)
        left = len(LONG) - len(head.partition(b"\r\n\r\n")[2])
        size = left // pauses
        while left:
            time.sleep(pause_s)
            until = max(0, left - size)
            while left > until:
                left -= len(connection.recv(min(65536, left - until)))
        for piece in then:
            connection.sendall(piece)
        read_request(connection)
        connection.sendall(GOOD)

    return handler


STREAM = (chunk(TOKEN), chunk(FINISH), chunk(DONE), b"0\r\n\r\n")


@pytest.mark.parametrize(
    "handler",
    [slow(b"HTTP/1.1 100 Continue\r\n\r\n", then=(GOOD,)), slow(CHUNKED, chunk(TOKEN), then=STREAM)],
    ids=["100 Continue", "a token first"],
)
def test_what_does_not_refuse_gets_the_whole_request(tls: ssl.SSLContext | None, handler: Handler) -> None:
    """For as long as the server takes data, it is waited for: 1.2 s in all, and never 1 s without."""
    with serving(handler, tls) as url, exchanging(url, timeout_s=1.0) as send:
        exchange, answer = send(LONG)
        assert (answer.error, answer.message, exchange.resent) == (None, None, False)
        assert answer.ended_s > 1.1
        exchange, answer = send()
        assert (answer.error, exchange.connect_ns) == (None, None)  # the connection was kept


@fault("network", "the server stops reading in the middle of a request", seen="error kind timeout")
def test_a_server_that_takes_no_more_data_times_out(tls: ssl.SSLContext | None) -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_head(connection)
        time.sleep(1.5)

    with serving(handler, tls) as url, exchanging(url, timeout_s=0.5) as send:
        exchange, answer = send(LONG)
    assert (answer.error, answer.message) == ("timeout", "no data arrived for 0.5 s")
    assert answer.ended_s > 0.45


def test_one_record_and_nothing_is_left_of_a_request_that_is_cut_as_it_is_sent(tmp_path: Path) -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_head(connection)
        time.sleep(1.0)

    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.create_client()
        messages: list[Message] = [{"role": "user", "content": "a " * 6_000_000}]
        user = gevent.spawn(process.send, client, work().with_messages(messages))
        gevent.sleep(0.4)
        user.kill()
        client.close()
    assert [(record.error, record.resent) for record in records_of(tmp_path)] == [("unfinished", False)]
