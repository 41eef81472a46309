"""The event stream parser against the standard's own rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.sse import Event, Parser


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
        (b"event: error\n\ndata: b\n\n", [("message", b"b")]),
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
