"""The event stream parser against the standard's own rules."""

import itertools
import json
import time
from collections.abc import Iterator

import gevent
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.exchange import Collector, Exchange
from harness.load.openai_api import Answer
from harness.load.reader import IdleQueue
from harness.load.sse import Event, EventTemplate, Parser


def parse(*pieces: bytes) -> list[Event]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [("message", b"a")]),
        (b"data:  a\n\n", [("message", b" a")]),
        (b"data: a\r\n\r\n", [("message", b"a")]),
        (b"data: a\r\ndata: b\r\n\r\n", [("message", b"a\nb")]),
        (b"data: a\r\r", [("message", b"a")]),
        (b"data: a\r\n\n", [("message", b"a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("message", b"a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\ndata: b\n\n", [("message", b"a\nb")]),
        (b"data\n\n", [("message", b"")]),
        (b": ping\n\ndata: a\n\n", [("message", b"a")]),
        (b": ping\ndata: a\n: pong\n\n", [("message", b"a")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [("error", b"a"), ("message", b"b")]),
        # Two deviations: errors that servers report so.
        (b"event: error\n\ndata: b\n\n", [("error", b""), ("message", b"b")]),
        (
            b'data: a\n\nerror: {"code":500}\n\ndata: b\n\n',
            [("message", b"a"), ("error", b'{"code":500}'), ("message", b"b")],
        ),
        (b"id: 1\nretry: 5\nnonsense\ndata: a\n\n", [("message", b"a")]),
        (b"data: a\n\ndata: b\n\ndata: c\n\n", [("message", b"a"), ("message", b"b"), ("message", b"c")]),
        (b"data: a\n\ndata: cut", [("message", b"a")]),
        (b"", []),
    ],
)
def test_the_standard(stream: bytes, expected: list[tuple[str, bytes]]) -> None:
    assert parse(stream) == expected
    assert parse(*[stream[i : i + 1] for i in range(len(stream))]) == expected


def test_an_event_comes_with_the_byte_that_completes_it() -> None:
    parser = Parser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r") == [("message", b"a")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: b\n\n") == [("message", b"b")]


@pytest.mark.parametrize(
    ("stream", "stray"),
    [
        (b'data: a\n\n{"error": 1}', b'{"error": 1}'),
        (b'{"error":\n 1}\n\ndata: a\n\n', b'{"error":\n 1}'),
        (b"data: a\n\n: ping\nid: 3\nretry: 1\nevent: x\ndata: cut", b""),
        (b"x" * 9000, b"x" * 4000),
    ],
)
def test_what_is_no_field_is_kept_for_an_error(stream: bytes, stray: bytes) -> None:
    parser = Parser()
    for i in range(0, len(stream), 3):
        parser.feed(stream[i : i + 3])
    assert parser.stray_text() == stray


LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data", b": ping", b"event: error", b"id: 1", b"", b"", "data: é🙂".encode()]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.data())
def test_any_split_of_the_bytes_gives_the_same_events(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(LINES, ENDS), max_size=30))
    stream = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + b"".join(line + end for line, end in pairs)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    edges = [0, *cuts, len(stream)]
    assert parse(*[stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == parse(stream)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_at_all(stream: bytes, cut: int) -> None:
    assert parse(stream[:cut], stream[cut:]) == parse(stream)


# The event template, which recognizes stream events without decoding them, and the queue of idle work.


TEXTS = [
    "one", "two", " ", "three\n", 'a "quoted" one', "back\\slash", "ümlaut", "日本", "\u2028", "\x7f", "}]}", "data: ",
    "[DONE]",
]  # fmt: skip


def event(text: str, ascii_only: bool = False, **more: object) -> bytes:
    body = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(body, ensure_ascii=ascii_only).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_in(reads: list[bytes], together: int = 5, known: bool = True) -> tuple[Exchange, Answer, int]:
    """An exchange that got these reads, some at a time, what they say, and how many were taken at a glance."""
    exchange = Exchange(id="x")
    collector = Collector(exchange)
    for number, data in enumerate(reads):
        exchange.arrivals.append(time.monotonic_ns(), None)
        if not known:
            exchange.template.ready = False
        collector.parse(data)
        if number % together == 0:
            exchange.process()
    answer = exchange.finish_answer()
    exchange.add_times()
    return exchange, answer, exchange.read_count - len(exchange.parsed)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = [chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


def summary_of(answer: Answer) -> tuple[object, ...]:
    return answer.text, answer.error, answer.message, answer.done, len(answer.chunks_s), answer.reasoning_chunks


@pytest.mark.parametrize("channel", ["content", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("together", [1, 2, 7])
def test_a_glance_sees_what_json_says(ascii_only: bool, channel: str, together: int) -> None:
    texts = ["plain"] * 3 + TEXTS * 2 + ["plain"] * 3
    events = [event(text, ascii_only).replace(b'"content"', b'"%s"' % channel.encode()) for text in texts]
    reads = [HEAD, *(chunked(one) for one in events), *DONE]
    exchange, answer, taken = read_in(reads, together)
    assert summary_of(answer) == summary_of(read_in(reads, together, known=False)[1])
    assert len(answer.chunks_s) == len(set(answer.chunks_s)) == len(events)
    assert answer.text == ("".join(texts) if channel == "content" else "")
    assert answer.reasoning_chunks == (0 if channel == "content" else len(events))
    assert exchange.complete and taken >= {1: 15, 2: 5, 7: 0}[together]


def taken(template: EventTemplate, *events: bytes) -> str:
    """The text of those of the events that it takes."""
    for one in events:
        template.try_take(chunked(one), len(chunked(one)))
    text = template.text.decode()
    template.text.clear()
    return text


def test_what_is_learnt_is_used_for_plain_text_only() -> None:
    template = EventTemplate()
    assert taken(template, event("one")) == ""
    template.learn(event("one"))
    assert taken(template, event("two"), event(" three")) == "two three"
    for other in ('a "quoted" one', "back\\slash", "line\nend", ""):
        assert taken(template, event("two"), event(other), event(" three")) == "two three"
    assert taken(template, event("two", created=5)) == ""
    assert taken(template, event("")[:-40]) == ""
    assert (template.events, template.reasoning_events) == (10, 0)


@pytest.mark.parametrize("channel", ["content", "reasoning"])
def test_chunks_that_share_a_read_are_taken_together(channel: str) -> None:
    """A client that is late must not become later by it."""
    events = [chunked(event(f"{number} ").replace(b"content", channel.encode())) for number in range(20)]
    reads = [HEAD, *events[:3], events[3] + events[4], events[5], b"".join(events[6:16]), *events[16:], *DONE]
    exchange, answer, taken = read_in(reads, 1)
    other = read_in(reads, 1, known=False)[1]
    assert summary_of(answer) == summary_of(other)
    text = "".join(f"{number} " for number in range(20))
    assert answer.text_chars == other.text_chars == len(text)
    assert answer.text == ("".join(f"{number} " for number in range(20)) if channel == "content" else "")
    assert taken == len(reads) - len(exchange.parsed) == len(reads) - 4
    shared = [len(list(same)) for _, same in itertools.groupby(answer.chunks_s)]
    assert shared == [1, 1, 1, 2, 1, 10, 1, 1, 1, 1]
    assert (answer.coalesced, other.coalesced) == (10, 10)


@pytest.mark.parametrize("odd", [event("\n"), event("x", created=1), b": ping\n\n", b"data: [DONE]\n\n"])
def test_of_chunks_that_share_a_read_all_must_be_like_those_before(odd: bytes) -> None:
    plain = chunked(event("x"))
    for together in (plain + chunked(odd), chunked(odd) + plain, plain + plain[:20], plain + b"0\r\n\r\n"):
        template = EventTemplate()
        template.learn(event("x"))
        assert (template.try_take(together, len(together)), template.events, bytes(template.text)) == (False, 0, b"")
        assert template.try_take(plain + plain, 2 * len(plain)) and template.events == 2


@pytest.mark.parametrize(
    "other",
    [
        event("x", error={"message": "no"}),
        event("x", usage={"completion_tokens": 1}),
        event("x").replace(b'"content": "x"', b'"content": "x", "reasoning_content": "y"'),
        event("x").replace(b'"index": 0', b'"index": 0, "finish_reason": "stop"'),
        event("x").replace(b"chat.completion.chunk", b"error"),
        event("x").replace(b'"index": 0', b'"message": {"content": "x"}, "index": 0'),
        event("x")
        .replace(b'"delta"', b'"other": {"content": "x"}, "delta"')
        .replace(b'"content": "x"}}', b'"role": "a"}}'),
        b'data: {"choices": [{"delta": {"content": "x"}}\n\n',
    ],
)
def test_only_events_with_text_and_nothing_else_are_learnt_from(other: bytes) -> None:
    template = EventTemplate()
    template.learn(other)
    assert taken(template, other) == ""


@pytest.mark.parametrize("together", [1, 3])
def test_reads_are_told_apart_however_the_body_is_cut(together: int) -> None:
    """Whole chunks go past the HTTP parser, so it must be between two chunks whenever they do."""
    stream = b"".join([HEAD, *(chunked(event(text)) for text in TEXTS * 3), *DONE])
    for size in (1, 2, 3, 7, 50, 113, 131, 1000, len(stream)):
        exchange, answer, _ = read_in([stream[i : i + size] for i in range(0, len(stream), size)], together)
        assert (answer.text, answer.error, exchange.complete) == ("".join(TEXTS * 3), None, True)


KNOWN = [HEAD, *(chunked(event(text)) for text in ("one ", "two ", "three "))]


@pytest.mark.parametrize(
    ("odd", "rest"),
    [
        (chunked(event("four"))[:-2], b"\r\n"),
        (chunked(event("four"))[:-1], b"\n"),
        (chunked(event("four"))[:50], chunked(event("four"))[50:]),
        (chunked(event("four"))[:1], chunked(event("four"))[1:]),
        (chunked(event("four")).replace(b"\r\n", b";name=value\r\n", 1), b""),
        (b"0" + chunked(event("four")), b""),
        (chunked(event("four")[:30]) + chunked(event("four")[30:]), b""),
    ],
)
def test_what_is_not_one_whole_chunk_is_the_parsers(odd: bytes, rest: bytes) -> None:
    reads = [*KNOWN, odd, *([rest] if rest else []), chunked(event("five")), *DONE]
    exchange, answer, taken = read_in(reads, 1)
    assert (answer.text, answer.error, exchange.complete) == ("one two three fourfive", None, True)
    assert taken == 3, "one is learnt from, and the odd one is the parser's"


@pytest.fixture
def later() -> Iterator[IdleQueue]:
    made = IdleQueue()
    yield made
    made.finish()


def test_work_that_never_finds_an_idle_moment_is_bounded(later: IdleQueue) -> None:
    done: list[int] = []
    for number in range(1500):
        later.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(500))
    later.finish()
    assert done == list(range(1500))


def test_a_defect_in_what_was_put_off_stops_nothing(later: IdleQueue, caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    later.add(lambda: 1 / 0)
    later.add(lambda: done.append("the next"))
    gevent.sleep(0.2)
    assert done == ["the next"]
    assert "ZeroDivisionError" in caplog.text
