"""A server that answers with a byte each half a second: each probe has an end, and no run waits for it."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from harness.base import https
from harness.base.errors import HarnessError, ServerError
from harness.base.https import CA_VARIABLE, open_session
from harness.load.client import ApiAddress
from harness.load.load_process import first_model
from harness.records.manifest import read_run
from harness.records.records import read_requests
from harness.records.samples import Scraper
from harness.scenario import Load
from harness.serve import probe
from harness.serve.lemonade import Api
from harness.serve.lifecycle import attach_to_server
from tests.support.command import harness, only_run, write
from tests.support.fake_server import DONE, FINISH, TOKEN, UNTIL_CLOSED, read_request, serving, whole
from tests.support.faults import fault
from tests.support.load_runs import make_job
from tests.support.tls import sign

MODELS = whole(b'{"data": [{"id": "m"}]}')
STARTS = {
    "status line": (b"", b"H"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "error": (b"HTTP/1.1 500 x\r\nContent-Length: 100000\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n#\r\n"),
    "open end": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"#"),
}


def drip(connection: socket.socket, start: bytes, more: bytes) -> None:
    connection.sendall(start)
    for _ in range(7200):  # an hour
        connection.sendall(more)
        time.sleep(0.5)


def dripping(start: bytes, more: bytes) -> Callable[[socket.socket, int], None]:
    def handler(connection: socket.socket, _: int) -> None:
        read_request(connection)
        drip(connection, start, more)

    return handler


@pytest.mark.parametrize("name", STARTS)
def test_a_probe_has_a_total_deadline(name: str) -> None:
    with serving(dripping(*STARTS[name])) as url, open_session(None) as session:
        with pytest.raises(requests.ReadTimeout):
            session.get(url, timeout=1.2)
        with pytest.raises(requests.ReadTimeout):
            session.post(url, json={}, timeout=1.2)


@pytest.mark.parametrize("name", STARTS)
def test_an_answer_that_has_begun_has_a_shorter_deadline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A model that loads may take minutes until the first byte, but no answer drips for as long."""
    monkeypatch.setattr(https, "MAX_REST_S", 1.2)
    with (
        serving(dripping(*STARTS[name])) as url,
        open_session(None) as session,
        pytest.raises(requests.ReadTimeout, match=r"1\.2 s"),
    ):
        session.post(url, json={}, timeout=300)


def test_an_answer_that_begins_late_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https, "MAX_REST_S", 0.5)

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):  # also on a connection that is used again
            time.sleep(1.0)
            connection.sendall(whole(b"{}"))

    with serving(handler) as url, open_session(None) as session:
        for _ in range(2):
            assert session.post(url, json={}, timeout=60).content == b"{}"


def test_the_end_of_one_probe_does_not_cut_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = socket.socket.shutdown

    def shut_down_and_linger(connection: socket.socket, how: int) -> None:
        shutdown(connection, how)
        time.sleep(0.3)  # the probe goes on meanwhile

    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number == 0:
            drip(connection, *STARTS["open end"])
        time.sleep(1.0)
        connection.sendall(whole(b"{}"))

    with serving(handler) as url, open_session(None) as session:
        with monkeypatch.context() as patch, pytest.raises(requests.ReadTimeout):
            patch.setattr(socket.socket, "shutdown", shut_down_and_linger)
            session.get(url, timeout=1.2)
        assert session.post(url, json={}, timeout=60).content == b"{}"


@pytest.mark.parametrize("name", ["headers", "body", "open end"])
def test_a_probe_through_tls_has_a_total_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    signed = sign(tmp_path, "DNS:localhost")
    monkeypatch.setenv(CA_VARIABLE, str(signed.ca))
    with (
        serving(dripping(*STARTS[name]), signed.context()) as url,
        open_session(None) as session,
        pytest.raises(requests.ReadTimeout),
    ):
        session.get(url, timeout=1.2)


def test_an_answer_in_time_and_a_stream_are_not_cut() -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(8):
            time.sleep(0.5)
            connection.sendall(b"data: x\n\n")

    with serving(handler) as url, open_session(None) as session:
        assert session.get(url, timeout=60).content == b"data: x\n\n" * 8
        with session.get(url, timeout=3, stream=True) as response:  # of silence, not of the whole
            assert [event.data for event in probe.read_events(response)] == [b"x"] * 8


def test_an_event_that_drips_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https, "MAX_REST_S", 1.2)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        serving(dripping(head, b"1\r\nd\r\n")) as url,
        open_session(None) as session,
        session.get(url, timeout=60, stream=True) as response,
        pytest.raises(requests.ReadTimeout),
    ):
        list(probe.read_events(response))


def test_versions_models_and_tokenizers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.6)
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    monkeypatch.setattr(probe, "TOKENIZE_TIMEOUT_S", 0.6)
    with serving(dripping(*STARTS["body"])) as url, open_session(None) as session:
        assert probe.get_version(url, session) is None
        assert probe.find_metrics_url(url) is None
        assert Api(url).read("/health", dict, 0.6) is None
        with pytest.raises(ServerError):
            attach_to_server(url, None)
        with pytest.raises(ServerError):
            probe.make_token_counter(url, "m")("a b")
        with pytest.raises(HarnessError, match=r"\b1 s\b"):
            first_model(make_job(tmp_path, Load(user="batch", timeout_s=1.0)), ApiAddress.parse(url))
        with Scraper(f"{url}/metrics", "c", tmp_path / "metrics.jsonl", 1.0) as scraper:
            pass
        assert scraper.last_failure is not None and "ReadTimeout" in scraper.last_failure


def byte_by_byte(answer: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        for byte in answer:
            connection.sendall(bytes([byte]))
            time.sleep(0.5)

    return send


@fault("network", "answers come as a byte each half a second", seen="timeout", code=3, kept="all records")
@pytest.mark.parametrize("streams", [True, False])
def test_a_run_ends_although_its_answers_drip(tmp_path: Path, streams: bool) -> None:
    one = whole(b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}')
    posts = 0

    def handler(connection: socket.socket, _: int) -> None:
        nonlocal posts
        head = read_request(connection)
        posts += head.startswith(b"POST")
        if not head.startswith(b"POST") or posts == 1:  # what is asked before the load
            connection.sendall(MODELS if head.startswith(b"GET /v1/models") else one)
        else:
            byte_by_byte(UNTIL_CLOSED + TOKEN + FINISH + DONE if streams else one)(connection)

    load = {"user": "batch", "batch_size": 4, "requests": 8, "output_tokens": 1, "timeout_s": 1, "stream": streams}
    path = write(tmp_path, loads={"one": load}, model="m", warmup={"requests": 0})
    with serving(handler) as url:
        done = harness("run", path.name, "--url", url, "--runs", "runs", cwd=tmp_path)
    assert done.code == 3, done
    records = list(read_requests(only_run(tmp_path / "runs") / "requests.jsonl"))
    assert {(record.error, record.headers_s) for record in records} == {("timeout", None)} and len(records) == 8


@fault("network", "/metrics, /version and other paths of the server send a byte each half a second, for ever",
       seen="Report: runs/", kept="all records")  # fmt: skip
def test_a_run_ends_although_metrics_never_do(tmp_path: Path) -> None:
    scrapes = 0

    def handler(connection: socket.socket, _: int) -> None:
        nonlocal scrapes
        head = read_request(connection)
        if head.startswith(b"POST"):
            one = b'{"choices": [{"message": {"content": "yes"}}]}'
            is_stream = b'"stream":true' in head
            connection.sendall(UNTIL_CLOSED + TOKEN + FINISH + DONE if is_stream else whole(one))
        elif head.startswith(b"GET /v1/models"):
            connection.sendall(MODELS)
        elif head.startswith(b"GET /metrics"):
            scrapes += 1
            if scrapes > 2:
                drip(connection, *STARTS["body"])
            connection.sendall(whole(b"vllm:num_requests_running 1.0\n", b"text/plain"))
        else:
            drip(connection, *STARTS["body"])

    load = {"user": "batch", "batch_size": 1, "requests": 8, "output_tokens": 2}
    path = write(tmp_path, loads={"one": load}, model="m", warmup={"requests": 0})
    with serving(handler) as url:
        done = harness("run", path.name, "--url", url, "--runs", "runs", cwd=tmp_path)
    assert done.code in (0, 3), done
    run = only_run(tmp_path / "runs")
    assert len(list(read_requests(run / "requests.jsonl"))) == 8
    assert read_run(run).status in ("valid", "invalid") and (run / "summary.json").is_file()
