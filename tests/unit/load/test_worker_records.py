"""Workers without a process: their addresses and parts, and the records that they hand over."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from harness.base.errors import HarnessError
from harness.base.process import free_port
from harness.base.redact import register_secrets
from harness.load import recorder as recorder_module
from harness.load.recorder import RecordReceiver, RecordSender
from harness.records.records import Request, read_requests
from harness.scenario import Load
from harness.scenario.workers import Workers, parse_workers
from harness.workload.job import SECRETS_ENV, read_api_key, secrets_of_server
from tests.support.faults import fault
from tests.support.made_runs import request
from tests.support.wording import Wording

CHAT = Load(user="chat", users=4, requests=8)


def test_machines_are_named_or_counted() -> None:
    named = parse_workers("gen1, gen2", "10.0.0.1", {"a": CHAT})
    assert named == Workers(names=["gen1", "gen2"], machines=2, bind="10.0.0.1", port=5557)
    assert named.command == "harness worker --master 10.0.0.1:5557"
    counted = parse_workers("2", "10.0.0.1:6000", {"a": Load(user="chat", users=4, requests=8, processes=2)})
    assert counted == Workers(machines=2, processes=2, bind="10.0.0.1", port=6000)
    assert (counted.total, counted.command) == (4, "harness worker --master 10.0.0.1:6000 --processes 2")


@pytest.mark.parametrize(
    ("given", "bind", "loads", "error"),
    [
        ("gen1", None, {"a": CHAT},
         "--bind"),
        ("a,b,a", "h", {"a": CHAT}, "'a,b,a'"),
        ("2", "h:0", {"a": CHAT}, "--bind: 'h:0' "),
        ("3", "h", {"a": CHAT}, "$.loads.a: 4 "),
        ("2", "h", {"a": CHAT, "b": Load(user="chat", users=4, requests=8, processes=2)},
         "'processes'"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(
    given: str, bind: str | None, loads: dict[str, Load], error: str, wording: Wording
) -> None:
    with pytest.raises(HarnessError) as caught:
        parse_workers(given, bind, loads)
    assert error in caught.value.what
    wording(caught.value)


def test_a_port_that_cannot_be_listened_at_is_refused(wording: Wording) -> None:
    workers = parse_workers("2", "127.0.0.1:65535", {"a": CHAT, "mix.a": CHAT, "mix.b": CHAT})
    assert workers.command == "harness worker --master 127.0.0.1:65535"
    with pytest.raises(HarnessError) as caught:
        msgspec.structs.replace(workers, port=65536).check_port()
    assert "65536" in str(caught.value) and "65535" in str(caught.value)
    wording(caught.value)


def test_missing_workers_are_listed(wording: Wording) -> None:
    named = Workers(names=["b", "a"], machines=2, bind="h", processes=2)
    wording(named.missing_text([]))
    wording(named.missing_text(["b", "b", "a"]))
    wording(named.missing_text(["a", "b"] * 2))
    wording(Workers(machines=3, bind="h").missing_text(["x"]))


def test_a_port_in_use_is_refused(wording: Wording) -> None:
    Workers(machines=2, bind="127.0.0.1", port=free_port()).check_port()
    with socket.create_server(("127.0.0.1", 0)) as another_master:
        port = another_master.getsockname()[1]
        with pytest.raises(HarnessError) as caught:
            Workers(machines=2, bind="127.0.0.1", port=port).check_port()
    assert "--bind" in caught.value.what and str(port) in caught.value.what
    wording(caught.value)
    assert Workers(machines=2, bind="0.0.0.0").command == "harness worker --master ADDRESS:5557"


def test_pieces_are_taken_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_PIECE_BYTES", 8)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"123\n456\n12345\n12345678901\n789")
    sender, receiver = RecordSender(source), RecordReceiver(target, int)
    pieces = []
    while piece := sender.next_piece():
        pieces.append(piece)
        assert receiver.append(sender.received, piece) == receiver.append(sender.received, piece)  # it came twice
        assert receiver.append(sender.received + len(piece) + 1, b"1234\n") == receiver.received
        sender.received = receiver.received
    assert pieces == [b"123\n456\n", b"12345\n", b"12345678901\n"]
    assert target.read_bytes() == b"123\n456\n12345\n12345678901\n"
    assert sender.unconfirmed() == 3


@fault("worker", "a worker delivers records that cannot be read",
       seen="they are left out and named; the counts differ, so the row is INVALID", kept="all readable records"
)  # fmt: skip
def test_unreadable_lines_are_counted(tmp_path: Path) -> None:
    whole = msgspec.json.encode(request()) + b"\n"
    receiver = RecordReceiver(tmp_path / "requests.jsonl", Request)
    data = whole + b'{"id": 7}\n' + b"\xff\n" + b"[" * 20_000 + b"\n" + whole
    assert receiver.append(0, data) == len(data)
    assert receiver.unreadable == 3
    assert (tmp_path / "requests.jsonl").read_bytes() == whole * 2


def test_secrets_of_the_master_are_masked_in_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the master's machine quotes in its errors what it was started with; no worker knows that."""
    password = 'the-"database\\-password'
    monkeypatch.setenv(SECRETS_ENV, json.dumps({password: True}))
    monkeypatch.setenv("KEY_OF_THIS_TEST", " sk-of-the-api\n")
    assert secrets_of_server() == {password: True}
    register_secrets(secrets_of_server())
    assert read_api_key("KEY_OF_THIS_TEST") == "sk-of-the-api"
    messages = [
        "nothing of it",
        f"status 500: {password}, or {password}",
        f"key sk-of-the-api, {password[:9]}...",
        "sk-...",
    ]
    records = [request(index=index, error="http", message=one) for index, one in enumerate(messages)]
    sent = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    source = tmp_path / "source"
    source.write_bytes(sent)
    sender, receiver = RecordSender(source), RecordReceiver(tmp_path / "requests.jsonl", Request)
    assert receiver.append(0, sender.next_piece()) == len(sent)  # as the sender counts it
    # What all keys begin with tells nothing.
    assert [one.message for one in read_requests(tmp_path / "requests.jsonl")] == [
        "nothing of it", "status 500: ***, or ***", "key ***, ***...", "sk-...",
    ]  # fmt: skip
    assert (tmp_path / "requests.jsonl").read_bytes().splitlines()[0] == sent.splitlines()[0]
