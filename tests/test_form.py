import json
import time
from collections.abc import Iterator

import gevent
import httptools
import pytest

from harness.load.answer import read_answer
from harness.load.exchange import Collector, Exchange
from harness.load.form import Form
from harness.load.later import Later

TEXTS = [
    "one",
    "two",
    " ",
    "three\n",
    'a "quoted" one',
    "back\\slash",
    "ümlaut",
    "日本",
    "\u2028",
    "\x7f",
    "}]}",
    "data: ",
    "[DONE]",
]


def event(text: str, ascii_only: bool = False, **more: object) -> bytes:
    body = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(body, ensure_ascii=ascii_only).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_in(pieces: list[bytes]) -> Exchange:
    """An exchange that received these reads, the end of the connection not among them."""
    exchange = Exchange(id="x")
    collector = Collector(exchange)
    for piece in pieces:
        exchange.arrivals.append(time.monotonic_ns(), None)
        collector.take(piece)
    return exchange


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = [chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_form_says_what_json_says(ascii_only: bool) -> None:
    events = [event(text, ascii_only) for text in TEXTS * 2]
    answer = read_answer(read_in([HEAD, *(chunked(one) for one in events), *DONE]))
    assert (answer.text, answer.error) == ("".join(TEXTS * 2), None)
    assert len(answer.chunks_s) == len(events)


def test_what_is_learnt_is_used_for_plain_text_only() -> None:
    form = Form()
    assert form.text(event("one")) is None
    form.learn(event("one"))
    assert form.text(event("two")) == "two"
    for other in ('a "quoted" one', "back\\slash", "line\nend", ""):
        assert form.text(event(other)) is None
    assert form.text(event("two", created=5)) is None
    assert form.text(event("ümlaut").replace("ü".encode(), b"\xfc")) is None  # broken UTF-8 is for others to mend
    assert form.text(event("")[:-40]) is None


@pytest.mark.parametrize(
    "other",
    [
        event("x", error={"message": "no"}),
        event("x", usage={"completion_tokens": 1}),
        event("x").replace(b'"content": "x"', b'"content": "x", "reasoning_content": "y"'),
        event("x").replace(b'"index": 0', b'"index": 0, "finish_reason": "stop"'),
        event("x").replace(b"chat.completion.chunk", b"error"),
        event("x").replace(b'"index": 0', b'"message": {"content": "x"}, "index": 0'),
        b'data: {"choices": [{"delta": {"content": "x"}}\n\n',
    ],
)
def test_only_events_with_text_and_nothing_else_are_learnt_from(other: bytes) -> None:
    form = Form()
    form.learn(other)
    assert form.text(other) is None


def test_a_stream_whose_events_never_repeat_is_no_longer_learnt_from() -> None:
    form = Form()
    for created in range(20):
        form.learn(event("x", created=created))
    assert form.text(event("x", created=19)) is None
    assert form.text(event("x", created=7)) == "x"


def test_reads_are_told_apart_however_the_body_is_cut() -> None:
    """Whole chunks go past the HTTP parser, so it must be between two chunks whenever they do."""
    stream = b"".join([HEAD, *(chunked(event(text)) for text in TEXTS * 3), *DONE])
    whole = read_answer(read_in([HEAD, *(chunked(event(text)) for text in TEXTS * 3), *DONE]))
    for size in (1, 2, 3, 7, 50, 113, 131, 1000, len(stream)):
        exchange = read_in([stream[i : i + size] for i in range(0, len(stream), size)])
        answer = read_answer(exchange)
        assert (answer.text, answer.error, exchange.complete) == (whole.text, None, True)


@pytest.mark.parametrize(
    ("odd", "body"),
    [
        (chunked(b"data: {}\n\n")[:-2], b"data: {}\n\n"),  # the line end of the chunk comes later
        (b"5;name=value\r\nhello\r\n", b"hello"),
        (b"5\r\nhel", b"hel"),
        (b"5", None),
    ],
)
def test_what_is_not_one_whole_chunk_is_the_parsers(odd: bytes, body: bytes | None) -> None:
    known = [HEAD, chunked(event("one")), chunked(event("two"))]
    said = [data for _, data in read_in([*known, odd]).body]
    assert said == [event("one"), event("two"), *([] if body is None else [body])]


def test_a_chunk_longer_than_it_says_is_an_error_wherever_it_stands() -> None:
    for known in ([HEAD], [HEAD, chunked(event("one"))]):
        with pytest.raises(httptools.HttpParserError):
            read_in([*known, b"5\r\nhello!\r\n"])


@pytest.fixture
def later() -> Iterator[Later]:
    made = Later()
    yield made
    made.finish()


def test_later_is_when_nothing_is_ready_and_in_order(later: Later) -> None:
    done: list[int] = []
    for number in range(5):
        later.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    gevent.sleep(0.01)
    assert done == [0, 1, 2, 3, 4]


def test_work_that_never_finds_an_idle_moment_is_bounded(later: Later) -> None:
    done: list[int] = []
    for number in range(1500):
        later.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(500))
    later.finish()
    assert done == list(range(1500))


def test_a_defect_in_what_was_put_off_stops_nothing(later: Later, caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    later.do(lambda: 1 / 0)
    later.do(lambda: done.append("the next"))
    gevent.sleep(0.01)
    assert done == ["the next"]
    assert "ZeroDivisionError" in caplog.text
