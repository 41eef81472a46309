"""A request that does not come to its own end, cut by somebody or by a defect of ours, leaves its one record."""

from pathlib import Path

import gevent
import pytest

from harness.load.client import Client
from harness.load.exchange import ResponseReader
from harness.load.openai_api import Answer
from harness.load.reader import Direct
from harness.rundir.records import read_requests
from tests.fake_server import (
    CHUNKED,
    GOOD,
    TOKEN,
    answering,
    chunk,
    load_process,
    once,
    one_record,
    place,
    serving,
    silence,
)


def test_a_request_that_is_cut_leaves_what_it_had(tmp_path: Path) -> None:
    handler = once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence)
    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.client()
        sending = gevent.spawn(process.send, client, [{"role": "user", "content": "hi"}], place())
        gevent.sleep(0.2)
        sending.kill()
        assert process.sequencer.take()[0].index == 0  # the place in this test took none
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by the end of the run")
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert record.chunks_s[-1] < record.ended_s


def test_a_cut_is_a_cut_when_the_connection_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that is found while cutting must not take the cut's place: the user would go on, and Locust never end."""
    monkeypatch.setattr(
        Client, "_inbox", lambda self, sock, exchange: EndsWhenCut(sock, self._clock, exchange.arrivals)
    )
    went_on: list[Answer] = []
    with serving(once(CHUNKED, chunk(TOKEN), then=silence)) as url, load_process(tmp_path, url) as process:

        def user() -> None:
            went_on.append(process.send(process.client(), [{"role": "user", "content": "hi"}], place()))

        sending = gevent.spawn(user)
        gevent.sleep(0.2)
        sending.kill()
    assert went_on == []
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by the end of the run")


class EndsWhenCut(Direct):
    def rest(self) -> list[bytes]:
        return super().rest() or [b""]


def test_a_timeout_of_the_locustfile_is_a_failed_request(tmp_path: Path) -> None:
    handler = once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence)
    told: list[str | None] = []
    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.client()
        with pytest.raises(gevent.Timeout), gevent.Timeout(0.2):
            process.send(client, [{"role": "user", "content": "hi"}], place(), lambda answer: told.append(answer.error))
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("timeout", "cut by a gevent.Timeout of 0.2 seconds in the locustfile")
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert record.ended_s > 0.15
    assert told == ["timeout"]


def test_whatever_else_cuts_a_request_fails_it(tmp_path: Path) -> None:
    class Gone(BaseException):
        pass

    with serving(once(then=silence)) as url, load_process(tmp_path, url) as process:
        sending = gevent.spawn(process.send, process.client(), [{"role": "user", "content": "hi"}], place())
        gevent.sleep(0.1)
        sending.kill(Gone)
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by Gone")


def test_an_answer_that_was_never_read_has_failed() -> None:
    assert (Answer().error, Answer().message) == ("client", "the answer was never read")


def test_messages_that_are_no_json_leave_a_record_too(tmp_path: Path) -> None:
    with serving(once(GOOD)) as url, load_process(tmp_path, url) as process:
        answer = process.send(process.client(), [{"role": "user", "content": object()}], place())  # type: ignore[typeddict-item]
    assert answer.error == "client"
    assert [record.error for record in read_requests(tmp_path / "requests.jsonl")] == ["client"]


def test_a_defect_of_ours_leaves_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reading: ResponseReader) -> Answer:
        raise ZeroDivisionError("we were careless")

    monkeypatch.setattr(ResponseReader, "finish", broken)
    record = one_record(tmp_path, answering(GOOD))
    assert (record.error, record.message, record.status) == ("client", "ZeroDivisionError: we were careless", 200)
