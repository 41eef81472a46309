"""The streaming client on real sockets: its connections, its times, and whom it talks to."""

import socket
import time
from pathlib import Path

import gevent
import gevent.socket
import pytest

import harness.load.client as client_module
from harness.errors import HarnessError
from harness.load.client import ApiAddress
from harness.load.reader import ReadTimes
from tests.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    TOKEN,
    Handler,
    answering,
    chunk,
    exchanging,
    read_request,
    serving,
)
from tests.tls import sign


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
