"""A host name with several addresses, as that of a Kubernetes headless service: all get load, dead ones cost little."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest

from harness.load.client import ApiAddress, Client, Dialer
from tests.fake_server import GOOD, load_process, read_request, serving, work
from tests.load_runs import records_of

NAME = "pods.example"
PODS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


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
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
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


USERS = 2000


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
    everybody = [gevent.spawn(user) for _ in range(USERS)]
    gevent.joinall(everybody)
    ticking.kill()
    assert {one.get() for one in everybody} == {None if known else "Name or service not known"}
    assert names.asked == 1
    assert len(ticks) > 3  # the event loop goes on meanwhile; it would tick once before and after


def test_a_user_who_is_cut_takes_no_look_up_along(resolver: Callable[[Names], Names]) -> None:
    names = resolver(Names(PODS[0], takes_s=0.2))
    dialer = Dialer(ApiAddress.parse(f"http://{NAME}:1"))
    first, second = gevent.spawn(dialer.look_up), gevent.spawn(dialer.look_up)
    gevent.sleep(0.1)
    first.kill()
    second.get(timeout=1)
    assert names.asked == 1


def test_what_cannot_be_a_name_fails_as_one_that_is_unknown(tmp_path: Path) -> None:
    host = "a..b"
    with load_process(tmp_path, f"http://{host}:8000") as process:
        answer = process.send(process.create_client(), work())
    assert answer.error == "connect"
    (record,) = records_of(tmp_path)
    assert (record.message or "").startswith(f"{host}:8000: not a host name (")
