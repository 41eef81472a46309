"""A server in a thread that answers as a test says, and the client and load process to ask it."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from harness.load.client import ApiAddress, Client, Dialer
from harness.load.exchange import Exchange
from harness.load.load_process import LoadProcess
from harness.load.openai_api import Answer
from harness.load.reader import IdleQueue, Reader
from harness.load.recorder import Recorder
from harness.load.sequencer import Work
from harness.records.records import Request, read_requests
from harness.scenario import Load, Prompts
from tests.support.load_runs import make_job

Handler = Callable[[socket.socket, int], None]  # gets each connection and its number, from 0


class Send(Protocol):
    """Sends one request; what came back."""

    def __call__(self, body: bytes = ...) -> tuple[Exchange, Answer]: ...


BODY = b'{"model":"m","stream":true,"max_tokens":4,"messages":[]}'

OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"Content-Type: text/event-stream\r\n"
CHUNKED = SSE + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = SSE + b"Connection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi "},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
LEMONADE_LIMITS = b"Connection: keep-alive\r\nKeep-Alive: timeout=5, max=100\r\n"  # of every response of Lemonade


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n"
    return head % (status, kind, len(body), more) + body


GOOD = CHUNKED + chunk(TOKEN) + chunk(TOKEN) + chunk(FINISH) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n"
LEMONADE = GOOD.replace(b"Transfer-Encoding", LEMONADE_LIMITS + b"Transfer-Encoding", 1)


def read_request(connection: socket.socket) -> bytes:
    """One request, head and body; what there was of it when the peer closes."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def serving(
    handler: Handler,
    tls: ssl.SSLContext | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
    backlog: int | None = None,
) -> Iterator[str]:
    """A server in a thread; `handler` has a connection to itself, which is closed after it."""
    listener = socket.create_server(address, backlog=backlog)
    threads: list[threading.Thread] = []
    open_ones: list[socket.socket] = []

    def run(connection: socket.socket, number: int) -> None:
        try:
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            open_ones.append(connection)
            with connection:
                handler(connection, number)
        except OSError:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=run, args=(connection, len(threads)), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"{'https' if tls else 'http'}://localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        ends_s = time.monotonic() + 0.2
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        for connection in open_ones:  # which a client keeps, and a handler waits at for its next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)


def answering(*pieces: bytes, pause_s: float = 0.0) -> Handler:
    """Answers every request on every connection with these pieces."""

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
            if b"Connection: close" in pieces[0]:
                return

    return handler


def once(*pieces: bytes, then: Callable[[socket.socket], None] = lambda connection: None) -> Handler:
    """Answers one request per connection, does `then`, and closes."""

    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        for piece in pieces:
            connection.sendall(piece)
        then(connection)

    return handler


def closing_after(response: bytes, wait_s: Callable[[int], float], requests: list[bytes]) -> Handler:
    """Closes each connection `wait_s(its number)` after one response, as Lemonade does after a stream.

    It reads no second request. `requests` gets those that it has read.
    """

    def handler(connection: socket.socket, number: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = read_request(connection)
        if request:
            requests.append(request)
            connection.sendall(response)
            time.sleep(wait_s(number))
            connection.shutdown(socket.SHUT_RDWR)

    return handler


@contextmanager
def load_process(folder: Path, url: str, api_key_env: str | None = None, **load: Any) -> Iterator[LoadProcess]:
    more: dict[str, Any] = {"run": "4f1c", "prompts": Prompts(), "salt": None, "api_key_env": api_key_env}
    job = make_job(folder, Load(user="batch", requests=100, **load), **more)
    recorder = Recorder(job)
    try:
        process = LoadProcess(job, url, recorder)
        yield process
        process.close()
    finally:
        recorder.close()
        assert recorder.sent == recorder.recorded


def work(index: int = 0) -> Work:
    return Work("measured", index, messages=[{"role": "user", "content": "hi"}], user_class="Tester")


def one_record(folder: Path, handler: Handler, **load: Any) -> Request:
    """Sends one request and reads back its one record."""
    with serving(handler) as url, load_process(folder, url, **load) as process:
        client = process.create_client()
        process.send(client, work())
        client.close()
    records = list(read_requests(folder / "requests.jsonl"))
    assert len(records) == 1
    return records[0]


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def silence(connection: socket.socket) -> None:
    connection.settimeout(5)
    connection.recv(1)  # until the client gives up


@contextmanager
def exchanging(
    url: str, timeout_s: float = 5.0, known: bool = True, headers: dict[str, str] | None = None
) -> Iterator[Send]:
    """A client, to send requests one after another on its connection.

    `known`: it takes the server for one that keeps connections after streams.
    """
    reader = Reader(IdleQueue())
    dialer = Dialer(ApiAddress.parse(url))
    if known:
        dialer.keeps_connections[True] = True
    client = Client(dialer, reader, timeout_s=timeout_s, headers=headers)

    def send(body: bytes = BODY) -> tuple[Exchange, Answer]:
        exchange = Exchange("x")
        client.send("/chat/completions", lambda: body, exchange)
        answer = exchange.finish_answer()
        exchange.add_times()
        return exchange, answer

    try:
        yield send
    finally:
        client.close()
        reader.close()
