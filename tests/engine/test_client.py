"""The streaming client on real sockets: its connections, its times, and whom it talks to."""

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import gevent
import gevent.socket
import pytest

import harness.load.client as client_module
import harness.load.reader as reader_module
from harness.base.errors import HarnessError
from harness.load.client import ApiAddress
from harness.load.exchange import Exchange
from harness.load.reader import ReadTimes
from tests.support.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    TOKEN,
    Handler,
    Send,
    answering,
    chunk,
    exchanging,
    read_request,
    serving,
    whole,
)
from tests.support.faults import fault
from tests.support.tls import sign


def connections_used(handler: Handler, requests: int, pause_s: float = 0.0) -> list[bool]:
    """For each of several requests whether a new connection was opened for it; all must succeed."""
    opened = []
    with serving(handler) as url, exchanging(url) as send:
        for _ in range(requests):
            exchange, answer = send()
            assert (answer.error, answer.message) == (None, None)
            opened.append(exchange.connect_ns is not None)
            time.sleep(pause_s)
    return opened


def test_the_connection_is_kept_also_when_the_body_ends_soon_after_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections_used(answering(GOOD), 4) == [True, False, False, False]
    monkeypatch.setattr(client_module, "_DONE_GRACE_S", 1.0)  # this machine may be busy
    pieces = [GOOD.removesuffix(b"0\r\n\r\n"), b"0\r\n\r\n"]
    assert connections_used(answering(*pieces, pause_s=0.003), 3) == [True, False, False]


def test_an_idle_limit_is_heeded_before_the_server_enforces_it() -> None:
    limited = GOOD.replace(b"Transfer-Encoding", b"Keep-Alive: timeout=1\r\nTransfer-Encoding", 1)
    assert connections_used(answering(limited), 2, pause_s=0.9) == [True, True]
    assert connections_used(answering(limited), 2, pause_s=0.1) == [True, False]


def test_a_connection_that_closes_as_the_request_arrives_costs_no_request() -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(GOOD)
        read_request(connection)  # the second request meets the closing of an idle connection

    with serving(handler) as url, exchanging(url) as send:
        assert not send()[0].resent
        asked_ns = time.monotonic_ns()
        exchange, answer = send()
    assert (answer.error, exchange.resent, exchange.connect_ns is not None) == (None, True, True)
    assert exchange.sent_ns is not None
    assert exchange.sent_ns - asked_ns < 2_000_000  # the first time: what came between is part of the latency
    assert answer.headers_s is not None and exchange.connect_ns is not None
    assert answer.headers_s > exchange.connect_ns / 1e9


def test_a_failed_new_connection_is_not_tried_again() -> None:
    requests = []

    def handler(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))

    with serving(handler) as url, exchanging(url) as send:
        assert send()[1].error == "disconnect"
    assert len(requests) == 1


def test_a_delay_of_ours_does_not_reach_the_times() -> None:
    """The server sends at once; this process is busy for a while before it reads."""

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            time.sleep(0.1)
            connection.sendall(GOOD)

    with serving(handler) as url, exchanging(url) as send:
        send()
        gevent.spawn_later(0.05, time.sleep, 1.0)  # blocks the hub, as a burst of work would
        exchange, answer = send()
    read_s = (exchange.arrivals.reads_ns[0] - exchange.start_ns) / 1e9
    assert 0.1 <= answer.chunks_s[0] < read_s
    assert read_s > 1.0


def test_stamps_that_cannot_be_are_not_believed() -> None:
    ms = 1_000_000

    def plausible(*reads: tuple[int, int | None]) -> bool:
        arrivals = ReadTimes()
        for read_ns, stamp_ns in reads:
            arrivals.append(read_ns, stamp_ns)
        return arrivals.has_plausible_stamps(5 * ms)

    assert plausible((10 * ms, 9 * ms), (20 * ms, 19 * ms))
    assert not plausible((10 * ms, 9 * ms), (20 * ms, None))
    assert not plausible((10 * ms, 12 * ms))  # in the future
    assert not plausible((10 * ms, 3 * ms))  # before the request
    assert not plausible((10 * ms, 9 * ms), (20 * ms, 7 * ms))  # before what came earlier
    assert not plausible()


def test_a_clock_step_makes_the_record_fall_back_to_the_time_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_CLOCK_PAIR_NS", 10**9)  # this machine may be busy
    real = time.time_ns
    steps = iter([0, 0, 3_600_000_000_000])

    handler = answering(CHUNKED, chunk(TOKEN), chunk(FINISH) + chunk(DONE) + b"0\r\n\r\n", pause_s=0.05)
    with serving(handler) as url, exchanging(url) as send:
        monkeypatch.setattr(time, "time_ns", lambda: real() + next(steps, 3_600_000_000_000))
        exchange, answer = send()
    assert answer.error is None
    assert answer.clock == "read"
    assert answer.chunks_s[0] * 1e9 == pytest.approx(exchange.arrivals.reads_ns[1] - exchange.start_ns, abs=1)


def test_tls_is_verified_and_uses_the_time_of_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = sign(tmp_path, "DNS:localhost")
    with serving(answering(GOOD), signed.context()) as url:
        with exchanging(url) as send:
            answer = send()[1]
            assert answer.error == "connect"
            assert "certificate" in (answer.message or "").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(signed.ca))
        with exchanging(url) as send:
            assert [send()[1].error for _ in range(2)] == [None, None]
            assert send()[1].clock == "read"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:8000", ApiAddress("a", 8000, False, "/v1")),
        ("http://a:8000/v1/", ApiAddress("a", 8000, False, "/v1")),
        ("http://a/api", ApiAddress("a", 80, False, "/api/v1")),
        ("http://a/api/v1", ApiAddress("a", 80, False, "/api/v1")),
        ("https://a", ApiAddress("a", 443, True, "/v1")),
        ("a:81", ApiAddress("a", 81, False, "/v1")),
        ("http://[::1]:8000", ApiAddress("::1", 8000, False, "/v1")),
    ],
)
def test_base_urls(url: str, expected: ApiAddress) -> None:
    assert ApiAddress.parse(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(HarnessError):
        ApiAddress.parse(url)


@pytest.mark.parametrize(
    ("fault", "error", "chunks"),
    [
        ("delay:0.2", None, 8),
        ("429", "rejected", 0),
        ("503", "rejected", 0),
        ("500-html", "http", 0),
        ("html", "not_api", 0),
        ("cut", "disconnect", 3),
        ("hang", "timeout", 3),
        ("error-event", "stream_error", 3),
        ("lemonade-error", "stream_error", 0),
        ("malformed", "malformed", 7),
        ("coalesce", None, 8),
        ("no-usage", None, 8),
        ("reasoning", None, 8),
        ("empty", "empty", 0),
    ],
)
def test_the_embedded_engines_faults(engine: str, fault: str, error: str | None, chunks: int) -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":8,"ignore_eos":true,'
        b'"stream":true,"stream_options":{"include_usage":true}}'
    )
    with exchanging(engine, timeout_s=1.0, headers={"X-Simulate-Fault": fault}) as send:
        _, answer = send(body)
    assert (answer.error, len(answer.chunks_s)) == (error, chunks)
    if error is None:
        assert answer.output_tokens == (None if fault == "no-usage" else 8)
    if fault == "reasoning":
        assert answer.first_visible_s == answer.chunks_s[4]


# A response that arrives while the request is still being sent: it is read, recorded, and no reason to send again.


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
