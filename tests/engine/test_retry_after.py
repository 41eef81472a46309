"""Retry-After of 429 and 503: users wait as long as the server asks, which no latency has and every report tells."""

import socket
from pathlib import Path

import pytest

from harness.numbers.cell_numbers import compute_numbers
from harness.records.clock import Clock
from harness.records.records import Request
from harness.records.run_data import cell_data
from harness.scenario import Arrivals, Load
from tests.support.fake_server import answering, exchanging, read_request, serving, whole
from tests.support.load_runs import driven
from tests.support.made_runs import both_marks, request

BUSY = b'{"error":{"message":"busy"}}'


def busy(retry_after: bytes) -> bytes:
    return whole(BUSY, status=b"429 Too Many Requests", more=b"Retry-After: %s\r\n" % retry_after)


VALUES: list[tuple[bytes, float | None]] = [
    (b"7", 7.0), (b" 7 ", 7.0), (b"0", 0.0), (b"1.5", 1.5), (b"1.3333333333333333", 4 / 3), (b"61", 60.0),
    (b"9" * 400, 60.0),
    (b"", None), (b"-1", None), (b"1e400", None), (b"nan", None), (b"1_0", None), (b"1,5", None),
    (b"\xb2", None),  # a digit, but not one of HTTP
    (b"10 s", None), (b"Mon, 23 Nov 2026 10:00:20 GMT", None),
]  # fmt: skip


def test_valid_waits() -> None:
    other = whole(BUSY, status=b"500 Oops", more=b"Retry-After: 7\r\n")
    responses = iter([*(busy(value) for value, _ in VALUES), other])

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            connection.sendall(next(responses))

    with serving(handler) as url, exchanging(url) as send:
        outcomes = [(answer.error, answer.retry_after_s) for _, answer in (send() for _ in range(len(VALUES) + 1))]
    assert outcomes == [*(("rejected", expected) for _, expected in VALUES), ("http", None)]


def records_with(folder: Path, load: Load, *pieces: bytes) -> list[Request]:
    with serving(answering(*pieces)) as url:
        return driven(folder, url, load)


def pauses_s(records: list[Request]) -> list[float]:
    """From the end of each request to the next one of the sequence."""
    ended = [record.sent_s + record.ended_s for record in records]
    return [record.sent_s - before for record, before in zip(records[1:], ended, strict=False)]


def test_users_wait_and_no_latency_has_it(tmp_path: Path) -> None:
    for value, wait_s in ((b"0.7", 0.7), (b"0", 0.5)):  # at least half a second
        load = Load(user="chat", users=1, requests=3, turns=3)
        records = records_with(tmp_path / str(wait_s), load, busy(value))
        assert [(record.error, record.retry_after_s) for record in records] == [("rejected", float(value))] * 3
        assert all(pause_s >= wait_s for pause_s in pauses_s(records))
        assert min(record.ended_s for record in records) < wait_s


@pytest.mark.parametrize("in_flight", [None, 2])
def test_a_long_wait_does_not_outlast_the_load(tmp_path: Path, in_flight: int | None) -> None:
    load = Load(user="batch", users=2, duration_s=0.5, drain_s=5.0, in_flight=in_flight)
    records = records_with(tmp_path, load, busy(b"86400"))
    assert [record.retry_after_s for record in records] == [60.0] * (2 * (in_flight or 1))


def test_a_schedule_does_not_wait_but_a_conversation_does(tmp_path: Path) -> None:
    """Two users take the four arrivals in turn, without delay; the second turn of each comes after the wait."""
    even = Arrivals(rate=10.0, spacing="even")
    load = Load(user="chat", users=4, requests=8, turns=2, think_s=[0.0, 0.0], arrivals=even)
    records = records_with(tmp_path, load, busy(b"0.7"))
    first, second = records[::2], records[1::2]
    assert [record.scheduled_s is not None for record in records] == [True, False] * 4
    assert all(b.sent_s - a.sent_s - a.ended_s >= 0.7 for a, b in zip(first, second, strict=True))


def test_a_summary_counts_them() -> None:
    marks = both_marks("c", 7, 0.0, 10.0, sent=4)
    turned_away = {"error": "rejected", "status": 429, "chunks_s": [], "output_tokens": None}
    records = [
        request(index=0),
        request(index=1, **turned_away, retry_after_s=2.5),
        request(index=2, **turned_away, retry_after_s=0.0),
        request(index=3, **turned_away),
        request(index=-1, phase="warmup", **turned_away, retry_after_s=9.0),
    ]
    numbers = compute_numbers([cell_data(records, Clock(marks))])
    assert (numbers.failed, numbers.retry_after, numbers.retry_after_s) == (3, 2, 2.5)
    numbers = compute_numbers([cell_data(records[:1], Clock(marks))])
    assert (numbers.retry_after, numbers.retry_after_s) == (0, None)
