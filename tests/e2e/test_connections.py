"""Connections: what opening them takes, servers that close them, and that they never run out."""

import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import msgspec
import psutil
import pytest

from harness.load.client import ApiAddress, Client, Dialer
from harness.records.records import Request
from harness.scenario import Load
from tests.support.command import PATIENCE_S, until
from tests.support.fake_server import (
    BODY,
    GOOD,
    LEMONADE,
    closing_after,
    exchanging,
    load_process,
    read_request,
    reset,
    serving,
    whole,
    work,
)
from tests.support.faults import fault
from tests.support.load_runs import ROOT, make_job, records_of
from tests.support.tls import sign
from tests.support.wording import Wording

REQUESTS = 3_000  # six for each port, which the kernel keeps for a minute after its connection is closed
PORTS = 500


def in_own_network(folder: Path, load: Load, ports: int) -> None:
    """A load on a server that closes each connection, where there are few local ports."""
    if "CI" not in os.environ and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a network namespace")
    job = msgspec.json.encode(make_job(folder, load)).decode()
    command = ["unshare", "--net", sys.executable, "-m", "tests.support.closing", str(folder), str(ports), job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr


def test_ports_do_not_run_out(tmp_path: Path) -> None:
    in_own_network(tmp_path, Load(user="batch", users=10, requests=REQUESTS, output_tokens=2), PORTS)
    records = records_of(tmp_path)
    assert len(records) == REQUESTS
    assert {record.message for record in records if record.error is not None} == set()
    assert all(record.connect_s is not None for record in records)


@fault("network", "no free local port is left", seen="no free local port", kept="one record for each request")
def test_when_ports_have_run_out_the_error_says_so(tmp_path: Path, wording: Wording) -> None:
    in_own_network(tmp_path, Load(user="batch", users=10, requests=50, output_tokens=2), ports=4)
    (message,) = {record.message for record in records_of(tmp_path) if record.error == "connect"}
    assert (message or "").startswith("127.0.0.1:8000: ")
    wording(message)


# What opening a connection takes is no part of TTFT.


@contextmanager
def listening(backlog: int = 10) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        yield listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


def answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        read_request(connection)
        connection.sendall(GOOD)


@contextmanager
def as_soon_as(condition: Callable[[], bool], what: Callable[[], None]) -> Iterator[None]:
    def wait() -> None:
        until(condition)
        what()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def bytes_in_listen_queue(listener: socket.socket) -> int:
    """Received on connections of a listener that the server has not accepted yet."""
    port = f":{listener.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(port) and row[3] == "01")


def test_a_server_that_is_slow_to_accept_is_slow_to_answer() -> None:
    """The kernel has opened the connection long before: that the server looks at it late is part of its TTFT."""
    times_s: list[float] = []  # the request was in the listen queue, the server accepted

    def accept_late() -> None:
        times_s.append(time.monotonic())
        time.sleep(0.1)
        times_s.append(time.monotonic())
        answer_once(listener)

    with listening() as listener, exchanging(url_of(listener)) as send:
        began_s = time.monotonic()
        with as_soon_as(lambda: bytes_in_listen_queue(listener) > 0, accept_late):
            exchange, answer = send()
    queued_s, accepted_s = times_s
    assert answer.error is None
    assert exchange.connect_ns is not None and exchange.connect_ns / 1e9 < queued_s - began_s
    assert exchange.connect_retries == 0
    assert answer.chunks_s[0] > accepted_s - queued_s


@fault("network", "the listen queue of the server overflows",
       seen="the server's listen queue overflowed: ... waited 1 s or more",
       kept="all records; the wait is in no latency")  # fmt: skip
def test_connections_that_waited_for_a_full_listen_queue_are_counted(tmp_path: Path) -> None:
    """Users who arrive at once at a server that takes none for a while: real SYNs are dropped."""
    users, queued = 8, 3  # a queue of 2 takes 3

    def is_full() -> bool:
        states = [one.status for one in psutil.Process().net_connections("tcp") if one.raddr == address]
        return states.count(psutil.CONN_SYN_SENT) == users - queued

    def serve() -> None:
        for _ in range(users):
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            read_request(connection)
            connection.sendall(GOOD)

    with listening(backlog=2) as listener, load_process(tmp_path, url_of(listener)) as process:
        address, began_s = listener.getsockname(), time.monotonic()
        with as_soon_as(is_full, serve):
            sending = [gevent.spawn(process.send, process.create_client(), work(number)) for number in range(users)]
            gevent.joinall(sending, raise_error=True)
    records = records_of(tmp_path)
    assert [record.error for record in records] == [None] * users
    waited = [record for record in records if record.connect_retries]
    assert len(waited) == users - queued
    assert min(record.connect_s or 0.0 for record in waited) > 0.9  # Linux sends the SYN again after a second
    assert min(record.sent_s for record in waited) - began_s > 0.9  # TTFT is counted from there


# Servers that keep a connection for some requests, or for some time without one.

USERS, EACH = 20, 50
LIMIT = 10  # requests of a connection


def keeping(idle_s: float) -> Callable[[socket.socket, int], None]:
    """Closes after LIMIT requests, or after so long without one."""

    def handler(connection: socket.socket, number: int) -> None:
        for _ in range(LIMIT):
            if not read_request(connection):
                return
            connection.sendall(GOOD)
            connection.settimeout(idle_s)

    return handler


def sent_by_users(folder: Path, url: str, pause_s: Callable[[random.Random], float]) -> list[Request]:
    """The records of several users that send one request after another, with pauses in between."""
    with load_process(folder, url) as process:

        def user(number: int) -> None:
            client, chance = process.create_client(), random.Random(number)
            for turn in range(EACH):
                process.send(client, work(number * EACH + turn))
                gevent.sleep(pause_s(chance))
            client.close()

        gevent.joinall([gevent.spawn(user, number) for number in range(USERS)], raise_error=True)
    return records_of(folder)


@pytest.mark.parametrize(
    ("idle_s", "pause_s"),
    [
        # Closed just as the next request comes: at once after the tenth, or by the clock after a pause.
        (5.0, lambda chance: 0.0),
        (0.05, lambda chance: chance.choice([0.0, chance.uniform(0.045, 0.055)])),
    ],
    ids=["after requests", "after a pause"],
)
def test_limits_of_kept_connections_cost_no_request(
    tmp_path: Path, idle_s: float, pause_s: Callable[[random.Random], float]
) -> None:
    with serving(keeping(idle_s)) as url:
        records = sent_by_users(tmp_path, url, pause_s)
    assert len(records) == USERS * EACH
    assert {(record.error, record.message) for record in records} == {(None, None)}
    opened = sum(record.connect_s is not None for record in records)
    print(f"{opened} connections, {sum(record.resent for record in records)} requests sent twice")
    assert opened >= USERS * EACH / LIMIT


# Servers that say keep-alive and close the connection after the response, as Lemonade does after each stream.

WHOLE = whole(
    b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1}}'
)


@fault("network", "the server closes each connection after a stream, though it says keep-alive",
       seen="no request is lost or sent twice")  # fmt: skip
def test_a_server_that_closes_after_each_stream_gets_each_request_once(tmp_path: Path) -> None:
    requests: list[bytes] = []
    with serving(closing_after(LEMONADE, lambda number: 0.07 * (number % 8) / 7, requests), backlog=5) as url:
        records = sent_by_users(tmp_path, url, lambda chance: chance.choice([0.0, 0.0, 0.01, 0.05]))
    assert len(records) == len(requests) == USERS * EACH
    assert {(record.error, record.message, record.resent) for record in records} == {(None, None, False)}
    assert all(record.connect_s is not None for record in records)


@pytest.mark.parametrize(
    ("response", "body"),
    [(LEMONADE, BODY), (WHOLE, BODY.replace(b'"stream":true', b'"stream":false'))],
    ids=["stream", "whole"],
)
def test_a_request_to_a_closing_connection_is_sent_again_once_and_the_server_remembered(
    response: bytes, body: bytes
) -> None:
    requests: list[bytes] = []

    def closing_on_the_next(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))
        connection.sendall(response)
        select.select([connection], [], [], PATIENCE_S)  # the next request, which is not read, or the end

    with serving(closing_on_the_next) as url, exchanging(url) as send:
        found = [send(body) for _ in range(4)]
    assert [(answer.error, exchange.status) for exchange, answer in found] == [(None, 200)] * 4
    assert [exchange.resent for exchange, _ in found] == [False, True, False, False]
    assert len(requests) == 4


def test_what_one_stream_shows_is_remembered_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stream's connection is checked 0.2 s later; before that none is reused."""
    signed = sign(tmp_path, "DNS:localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(signed.ca))

    def keeping_on(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            connection.sendall(LEMONADE)

    for handler, reused in [(closing_after(LEMONADE, lambda number: 0.03, []), False), (keeping_on, True)]:
        with serving(handler, signed.context()) as url, exchanging(url, known=False) as send:
            found = [send(), send()]
            gevent.sleep(0.5)
            found += [send(), send()]
        assert [answer.error for _, answer in found] == [None] * 4
        assert [exchange.connect_ns is None for exchange, _ in found] == [False, False, False, reused]
        assert not any(exchange.resent for exchange, _ in found)


@fault("network", "the server reads a request and resets the connection later",
       seen="error kind disconnect; it is not sent again")  # fmt: skip
def test_a_server_that_reads_requests_and_resets_them_later_has_failed_them(tmp_path: Path) -> None:
    """Each second request of a connection is read and reset after a second: it is not sent again."""
    requests: list[bytes] = []

    def handler(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))
        connection.sendall(GOOD)
        if request := read_request(connection):
            requests.append(request)
            time.sleep(1.0)
            reset(connection)

    with serving(handler) as url, exchanging(url) as send:
        found = [send() for _ in range(6)]
    assert [answer.error for _, answer in found] == [None, "disconnect"] * 3
    assert not any(exchange.resent for exchange, _ in found)
    assert len(requests) == 6


# A host name with several addresses, as that of a Kubernetes headless service: all get load, dead ones cost little.


NAME = "pods.example"
PODS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
UNKNOWN = "no such name"


class Names:
    """Stands in for the system's resolver, below gevent's sockets: knows one name."""

    def __init__(self, *addresses: str, takes_s: float = 0.0) -> None:
        self.addresses = list(addresses)
        self.takes_s = takes_s
        self.asked = 0

    def getaddrinfo(self, host: Any, port: Any, *_: Any) -> list[tuple[Any, ...]]:
        self.asked += 1
        gevent.sleep(self.takes_s)
        if not self.addresses or host not in (NAME, NAME.encode()):
            raise socket.gaierror(socket.EAI_NONAME, UNKNOWN)
        self.addresses.append(self.addresses.pop(0))  # name servers turn them round
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]

    def close(self) -> None:
        """As the resolver's."""


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Names], Names]:
    def use(names: Names) -> Names:
        monkeypatch.setattr(gevent.get_hub(), "resolver", names)
        return names

    return use


@contextmanager
def pods(*addresses: str) -> Iterator[tuple[int, Counter[str]]]:
    """A server on one port of each address, and how many connections each has got."""
    opened: Counter[str] = Counter()

    def handler(address: str, connection: socket.socket, number: int) -> None:
        opened[address] += 1
        while read_request(connection):
            connection.sendall(GOOD)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ExitStack() as servers:
        for address in addresses:
            servers.enter_context(serving(partial(handler, address), address=(address, port)))
        yield port, opened


@contextmanager
def loading(folder: Path, port: int, users: int = 1) -> Iterator[list[Callable[[], None]]]:
    """For each user a function that sends a request, which must succeed."""
    with load_process(folder, f"http://{NAME}:{port}") as process:
        process._dialer.keeps_connections[True] = True  # as after a first stream
        clients = [process.create_client() for _ in range(users)]

        def send(client: Client) -> None:
            answer = process.send(client, work())
            assert (answer.error, answer.message) == (None, None)

        try:
            yield [partial(send, client) for client in clients]
        finally:
            for client in clients:
                client.close()


def test_connections_are_spread_over_all_addresses(tmp_path: Path, resolver: Callable[[Names], Names]) -> None:
    names = resolver(Names(*PODS))
    with pods(*PODS) as (port, opened), loading(tmp_path, port, users=30) as users:
        for _ in range(2):
            gevent.joinall([gevent.spawn(send) for send in users], raise_error=True)
    assert opened == {address: 10 for address in PODS}  # the second request of each user takes the kept connection
    assert names.asked == 1


def test_addresses_that_change_are_followed_by_new_connections(
    tmp_path: Path, resolver: Callable[[Names], Names]
) -> None:
    names = resolver(Names(*PODS[:2]))
    with pods(*PODS) as (port, opened), loading(tmp_path, port, users=8) as users:
        for send in users[:4]:
            send()
        assert opened == {PODS[0]: 2, PODS[1]: 2}
        names.addresses = [PODS[2]]  # the others are about to end: they get no new connection
        gevent.sleep(1.05)
        for send in users:
            send()
    assert opened == {PODS[0]: 2, PODS[1]: 2, PODS[2]: 4}
    assert names.asked == 2


def test_an_address_that_refuses_costs_no_request(tmp_path: Path, resolver: Callable[[Names], Names]) -> None:
    resolver(Names(*PODS))
    with pods(PODS[0], PODS[2]) as (port, opened), loading(tmp_path, port, users=20) as users:
        for send in users:
            send()
    assert sorted(opened.values()) == [10, 10] or sorted(opened.values()) == [9, 11]  # no neighbour gets its share
    assert all(record.connect_s is not None for record in records_of(tmp_path))


def test_when_all_addresses_refuse_the_request_fails_once(tmp_path: Path, resolver: Callable[[Names], Names]) -> None:
    names = resolver(Names(*PODS))
    with pods() as (port, _), load_process(tmp_path, f"http://{NAME}:{port}") as process:
        answers = [process.send(process.create_client(), work(i)) for i in range(2)]
    assert [(answer.error, answer.message) for answer in answers] == [
        ("connect", f"{NAME}:{port}: connection refused")
    ] * 2
    assert names.asked == 2  # it may have moved: the name is looked up again


WAITING_USERS = 2000


@pytest.mark.parametrize("known", [True, False], ids=["a name", "an unknown name"])
def test_many_users_share_one_slow_look_up(known: bool, resolver: Callable[[Names], Names]) -> None:
    names = resolver(Names(*PODS[:known], takes_s=1.5))
    dialer = Dialer(ApiAddress.parse(f"http://{NAME}:1"))
    ticks = []

    def tick() -> None:
        while True:
            ticks.append(names.asked)
            gevent.sleep(0.02)

    def user() -> str | None:
        try:
            dialer.look_up()
        except OSError as error:
            return str(error.strerror)
        return None

    ticking = gevent.spawn(tick)
    everybody = [gevent.spawn(user) for _ in range(WAITING_USERS)]
    gevent.joinall(everybody)
    ticking.kill()
    assert {one.get() for one in everybody} == {None if known else UNKNOWN}
    assert names.asked == 1
    assert len(ticks) > 3  # the event loop goes on meanwhile; it would tick once before and after


def test_a_user_who_is_cut_takes_no_look_up_along(resolver: Callable[[Names], Names]) -> None:
    names = resolver(Names(PODS[0], takes_s=0.2))
    dialer = Dialer(ApiAddress.parse(f"http://{NAME}:1"))
    first, second = gevent.spawn(dialer.look_up), gevent.spawn(dialer.look_up)
    gevent.sleep(0.1)
    first.kill()
    second.get(timeout=PATIENCE_S)
    assert names.asked == 1


def test_what_cannot_be_a_name_fails_as_one_that_is_unknown(tmp_path: Path) -> None:
    host = "a..b"
    with load_process(tmp_path, f"http://{host}:8000") as process:
        answer = process.send(process.create_client(), work())
    assert answer.error == "connect"
    (record,) = records_of(tmp_path)
    assert (record.message or "").startswith(f"{host}:8000: ")
