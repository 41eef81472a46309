"""Whatever a server sends: one record that can be read, with counts that are possible, and no exception."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httptools
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from requests import RequestException

from harness.base.errors import HarnessError
from harness.base.files import read_lines
from harness.base.https import open_session
from harness.load import openai_api, sse
from harness.load.client import ApiAddress
from harness.load.exchange import Collector, Exchange, Failure
from harness.load.load_process import LoadProcess, first_model
from harness.load.openai_api import Answer, Call, Tools
from harness.records.manifest import ServedBy
from harness.records.records import TEMPLATE_TOKENS, BadField, Request
from harness.records.samples import MetricsSample, Scraper
from harness.scenario import Load
from harness.scenario.behaviour import AnswerCheck, Structured, check_answer
from harness.serve import lemonade, probe
from harness.serve.facts import record_facts
from harness.serve.lemonade import Api, LemonadeMonitor, download, find_running_model
from tests.support.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    TOKEN,
    UNTIL_CLOSED,
    answering,
    chunk,
    exchanging,
    load_process,
    once,
    one_record,
    read_request,
    serving,
    whole,
    work,
)
from tests.support.faults import fault
from tests.support.load_runs import make_job
from tests.support.made_runs import served_by
from tests.support.wording import Wording

ASKED = 4  # max_tokens
BODY_BYTES = 100  # of the request
fuzzed = settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


class Pieces:
    """An inbox that holds these reads."""

    def __init__(self, reads: Sequence[bytes]) -> None:
        self._reads = list(reads)

    def take_pieces(self) -> list[bytes]:
        reads, self._reads = self._reads, []
        return reads


def received(*reads: bytes) -> tuple[Exchange, Answer]:
    """What the client makes of these reads, the last of which ends the connection. Only declared exceptions pass."""
    exchange = Exchange("x", sent_ns=0, request_bytes=BODY_BYTES)
    for number in range(len(reads) + 1):
        exchange.arrivals.append(number, None)
    collector = Collector(exchange)
    try:
        collector.parse_inbox(Pieces([*(one for one in reads if one), b""]))  # type: ignore[arg-type]  # all it needs
    except (EOFError, httptools.HttpParserError) as error:
        if not (exchange.answer.done or exchange.complete):
            exchange.failure = Failure("disconnect" if isinstance(error, EOFError) else "not_api", str(error))
    except Failure as failure:
        exchange.failure = failure
    exchange.complete = exchange.complete or exchange.answer.done
    exchange.finish_answer().drop_impossible_counts(ASKED, exchange.request_bytes)
    exchange.add_times()
    return exchange, exchange.answer


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(**counts: Any) -> bytes:
    return event(choices=[], usage=counts)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadProcess]:
    with load_process(tmp_path_factory.mktemp("process"), "http://127.0.0.1:9") as made:
        yield made


def check_record(process: LoadProcess, exchange: Exchange, answer: Answer) -> Request:
    """The record as it is read back; its counts are possible."""
    tools = Tools.first(3, "auto")
    raw = msgspec.json.encode(process._create_record(exchange, answer, msgspec.structs.replace(work(), tools=tools)))
    record = msgspec.json.decode(raw, type=Request)
    prompt_max = BODY_BYTES + TEMPLATE_TOKENS
    for count, maximum in (
        (record.prompt_tokens, prompt_max),
        (record.output_tokens, ASKED),
        (record.cached_tokens, prompt_max if record.prompt_tokens is None else record.prompt_tokens),
        (record.reasoning_tokens, ASKED if record.output_tokens is None else record.output_tokens),
    ):
        assert count is None or 0 <= count <= maximum
    assert len(raw) < 4000
    assert record.finish is None or len(record.finish) <= 64
    return record


@pytest.mark.parametrize(
    ("kind", "value"), [("boolean", True), ("string", "12"), ("number", 1.5), ("array", []), ("object", {})]
)
def test_a_count_of_another_type_is_a_note_and_the_record_is_readable(
    process: LoadProcess, kind: str, value: object
) -> None:
    counts = {"prompt_tokens": 3, "completion_tokens": value}
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": counts}
    stream = UNTIL_CLOSED + TOKEN + usage(completion_tokens=2) + usage(**counts) + DONE
    for raw in (stream, whole(json.dumps(body).encode())):
        record = check_record(process, *received(raw))
        assert (record.error, record.prompt_tokens, record.output_tokens) == (None, 3, None)
        assert record.bad_fields == [BadField("usage.completion_tokens", "type", kind)]


@pytest.mark.parametrize(
    ("counts", "bad"),
    [
        ({"completion_tokens": -5}, ("usage.completion_tokens", "below", "-5", 1)),
        ({"completion_tokens": 5}, ("usage.completion_tokens", "above", "5", ASKED)),
        ({"completion_tokens": 10**30}, ("usage.completion_tokens", "above", "more than 64 bits", ASKED)),
        ({"prompt_tokens": -1}, ("usage.prompt_tokens", "below", "-1", 1)),
        ({"prompt_tokens": 16_485}, ("usage.prompt_tokens", "above", "16485", 16_484)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 10}},
         ("usage.prompt_tokens_details.cached_tokens", "above", "10", 9)),
        ({"completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 3}},
         ("usage.completion_tokens_details.reasoning_tokens", "above", "3", 2)),
    ],
)  # fmt: skip
def test_a_count_out_of_bounds_is_a_note_with_its_bound(
    process: LoadProcess, counts: dict[str, Any], bad: tuple[Any, ...]
) -> None:
    record = check_record(process, *received(UNTIL_CLOSED + TOKEN + FINISH + usage(**counts) + DONE))
    assert (record.error, record.bad_fields) == (None, [BadField(*bad)])


def test_counts_that_grow_or_are_corrected_are_possible_and_bounds_are_inclusive(process: LoadProcess) -> None:
    stream = b"".join(usage(completion_tokens=number) for number in (0, 1, 3, 2))
    record = check_record(process, *received(UNTIL_CLOSED + TOKEN + FINISH + stream + DONE))
    assert (record.bad_fields, record.output_tokens) == ([], 2)
    counts = {
        "prompt_tokens": BODY_BYTES + TEMPLATE_TOKENS, "prompt_tokens_details": {"cached_tokens": 100},
        "completion_tokens": ASKED, "completion_tokens_details": {"reasoning_tokens": ASKED},
    }  # fmt: skip
    record = check_record(process, *received(UNTIL_CLOSED + TOKEN + FINISH + usage(**counts) + DONE))
    assert (record.output_tokens, record.reasoning_tokens, record.bad_fields) == (ASKED, ASKED, [])


@fault("server", "counts of tokens that cannot be (true, -5, 10^18)",
       seen="a note in the record; out of bounds the row is INVALID")  # fmt: skip
def test_a_server_with_impossible_counts_on_a_socket(tmp_path: Path) -> None:
    stream = TOKEN + FINISH + usage(prompt_tokens=True, completion_tokens=-5) + DONE
    record = one_record(tmp_path, once(UNTIL_CLOSED, stream), output_tokens=8, output="natural")
    assert (record.error, record.prompt_tokens, record.output_tokens) == (None, None, None)
    assert record.bad_fields == [
        BadField("usage.prompt_tokens", "type", "boolean"),
        BadField("usage.completion_tokens", "below", "-5", 1),
    ]


def test_text_of_another_type_is_no_token() -> None:
    wrong = [event(choices=[{"delta": {"content": value}}]) for value in (5, {"a": 1}, [5], True)]
    _, answer = received(UNTIL_CLOSED + TOKEN + b"".join(wrong) + FINISH + DONE)
    assert (answer.error, answer.text, len(answer.chunks_s)) == (None, "hi ", 1)
    assert list(answer.bad.values()) == [BadField("content", "type", "boolean")]
    _, answer = received(UNTIL_CLOSED + b"".join(wrong) + FINISH + DONE)
    assert answer.error == "empty"


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize("levels", [900, 20_000])
def test_json_that_is_nested_deeply_is_no_defect_of_ours(process: LoadProcess, levels: int) -> None:
    error = {900: None, 20_000: "malformed"}[levels]
    for key in (b"usage", b"choices", b"other"):
        stream = UNTIL_CLOSED + TOKEN + b'data: {"%s":%s}\n\n' % (key, deep(levels)) + FINISH + DONE
        exchange, answer = received(stream)
        assert answer.error == error
        check_record(process, exchange, answer)
    for body, status, kind in (
        (deep(levels), b"200 OK", "not_api"),
        (b'{"error":%s}' % deep(levels), b"200 OK", "not_api" if error else "stream_error"),
        (b'{"detail":%s}' % deep(levels), b"500 Oops", "http"),
    ):
        exchange, answer = received(whole(body, status=status))
        assert answer.error == kind
        check_record(process, exchange, answer)
    call = Call("a", "read_file", deep(levels).decode())
    assert not Tools.first(1, "auto").is_valid(call)
    form = Structured(json_schema={"type": "object"})
    assert check_answer(form, [], "a", deep(levels).decode()) == AnswerCheck(False, False)


def test_a_comment_with_data_in_it_ends_nothing_and_does_not_keep_us(tmp_path: Path, wording: Wording) -> None:
    for comment in (b": data: [DONE]\n\n", b"x: [DONE]\n\n"):
        _, answer = received(UNTIL_CLOSED, TOKEN, comment, TOKEN, FINISH, DONE)
        assert (answer.error, answer.text, answer.finish) == (None, "hi hi ", "length")

    def pings(connection: Any) -> None:
        connection.settimeout(0.05)
        for _ in range(100):
            connection.sendall(b": data: ping\n\n")
            with suppress(TimeoutError):
                connection.recv(1)
                return

    record = one_record(tmp_path, once(UNTIL_CLOSED, TOKEN, then=pings), timeout_s=1.5)
    assert record.error == "timeout" and (record.message or "").endswith(" 1.5 s")
    wording(record.message)


def test_limits_of_a_connection_that_are_no_numbers_are_not_said() -> None:
    for said in (
        "timeout=1e400", "timeout=nan", "timeout=-1", "timeout=1_0", "timeout=" + "9" * 5000, "timeout=0x10", "max=-1",
        "max=" + "9" * 5000, "timeout", "=", "xtimeout=0", "max=0.5",
    ):  # fmt: skip
        answer = GOOD.replace(b"Content-Type", f"Keep-Alive: {said}\r\nContent-Type".encode(), 1)
        with serving(answering(answer)) as url, exchanging(url) as send:
            assert [send()[0].connect_ns is not None for _ in range(3)] == [True, False, False], said


@fault("server", "an answer without end", seen="the request fails when the answer is longer than the bound")
def test_a_server_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.load.sse.MAX_EVENT_BYTES", 1 << 20)
    monkeypatch.setattr("harness.load.exchange._MAX_RESPONSE_BYTES", 1 << 20)
    assert sse.MAX_EVENT_BYTES == 1 << 20
    for number, (begin, more, error) in enumerate(
        (
            (UNTIL_CLOSED, b"data: " + b"a" * 65_536, "malformed"),
            (UNTIL_CLOSED, b"data: aaaaaaaa\n" * 4096, "malformed"),
            (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65_536, "not_api"),
            (b"HTTP/1.1 200 OK\r\n", b"x: " + b"a" * 60_000 + b"\r\n", "not_api"),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 3000, "not_api"),
        )
    ):

        def endless(connection: Any, _: int, begin: bytes = begin, more: bytes = more) -> None:
            read_request(connection)
            connection.sendall(begin)
            for _ in range(1000):
                connection.sendall(more)

        folder = tmp_path / str(number)
        folder.mkdir()
        record = one_record(folder, endless, timeout_s=5)
        assert (record.error, " MiB" in (record.message or "")) == (error, True)


LONG = 400_000
LONG_TEXTS = {
    "backslashes": "\\" * LONG,
    "quotes": '\\"' * LONG,
    "percent signs": "%25" * LONG,
    "tags": "<" * LONG,
    "flags": "--a." * LONG,
    "colours": "\x1b]" * LONG,
    "blanks": " " * LONG,
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_long_text_takes_linear_time_wherever_it_is(tmp_path: Path, name: str) -> None:
    """With a quadratic step, each of these takes hours."""
    text = LONG_TEXTS[name]
    finish = b"data: %s\n\n" % json.dumps({"choices": [{"delta": {}, "finish_reason": text}]}).encode()
    error = json.dumps({"error": {"message": text, "type": text, "code": text}}).encode()
    answers = [
        UNTIL_CLOSED + TOKEN + finish + DONE,
        UNTIL_CLOSED + b"data: " + error + b"\n\n",
        UNTIL_CLOSED + b"event: error\ndata: " + text.encode() + b"\n\n",
        whole(error, status=b"500 x"),
        whole(text.encode(), b"text/html", b"500 x"),
        whole(b"{}", status=b"429 x", more=b"Retry-After: " + b"9" * LONG + b"\r\n"),
        whole(b"<x>", b"text/" + text.replace("\x1b", "x").encode(), b"500 x"),
    ]
    for number, answer in enumerate(answers):
        folder = tmp_path / str(number)
        folder.mkdir()
        record = one_record(folder, once(answer), timeout_s=60)
        assert len(record.message or "") <= 300 and len(record.finish or "") <= 64, number


def test_many_tool_calls_take_linear_time() -> None:
    calls: list[Call] = []
    few = [{"index": 0, "id": "c", "function": {"name": "n", "arguments": "xxxx"}}]
    for _ in range(100_000):
        assert openai_api.add_tool_calls(calls, few)
    assert len(calls) == 1 and len(calls[0].arguments) == openai_api._MAX_ARGUMENTS
    assert not openai_api.add_tool_calls(calls, [{"index": n, "id": str(n), "function": {}} for n in range(100_000)])
    assert len(calls) == openai_api._MAX_CALLS


def test_a_trailer_changes_no_header() -> None:
    exchange, answer = received(GOOD.removesuffix(b"\r\n") + b"Content-Type: text/html\r\nx: y\r\n\r\n")
    headers = exchange.headers
    assert (answer.error, headers["content-type"], "x" in headers) == (None, "text/event-stream", False)


def outcome(reads: Sequence[bytes]) -> tuple[Any, ...]:
    exchange, answer = received(*reads)
    counts = answer.prompt_tokens, answer.output_tokens, answer.cached_tokens, answer.reasoning_tokens
    return (
        answer.error, exchange.status, answer.text, answer.finish, counts, answer.bad, answer.done, answer.generated,
        len(answer.chunks_s), answer.textless, [(call.name, call.arguments) for call in answer.calls],
    )  # fmt: skip


LINES = st.sampled_from([
    TOKEN[:-2], FINISH[:-2], DONE[:-2], usage(completion_tokens=3)[:-2], usage(completion_tokens=True)[:-2],
    b": data: [DONE]", b": ping", b"event: error", b"id: 1", b"retry: 9", b"data", b"", b"", b"", b"{",
    b'{"error":"x"}', b"data: [DONE] ", b"data: {", b"data: [[[[", b"\xef\xbb\xbf", b"data: \xff\x00", b"a" * 9000,
])  # fmt: skip
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n"])
STREAM = st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=12)


def framed(pieces: Sequence[bytes], chunked: bool) -> bytes:
    if not chunked:
        return UNTIL_CLOSED + b"".join(pieces)
    return CHUNKED + b"".join(chunk(piece) for piece in pieces) + b"0\r\n\r\n"


@fuzzed
@given(STREAM, st.booleans(), st.booleans(), st.lists(st.integers(0, 400), max_size=8))
@example([TOKEN, b": data: [DONE]\n\n", TOKEN, FINISH, DONE], True, False, [])
def test_a_stream_says_the_same_however_it_is_cut(
    pieces: list[bytes], chunked: bool, bom: bool, cuts: list[int]
) -> None:
    raw = framed([b"\xef\xbb\xbf", *pieces] if bom else pieces, chunked)
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    expected = outcome([raw])
    assert outcome([raw[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == expected
    if len(raw) < 1500:
        assert outcome([raw[i : i + 1] for i in range(len(raw))]) == expected


HEADS = st.sampled_from([
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 999 X\r\n", b"HTTP/1.0 200\r\n",
    b"HTTP/1.1 503 Busy\r\nRetry-After: 1e400\r\n", b"HTTP/2 200\r\n", b"ICY 200 OK\r\n", b"\r\n", b"\x16\x03\x01\x00",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked, gzip\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Type: text/event-stream\r\n",
    b"Content-Encoding: br\r\n", b"Keep-Alive: timeout=1e400, max=-1\r\n", b"X" * 500, b"\x00: \xff\r\n", b"\r\n",
    b"5\r\nhello\r\n", b"FFFFFFFFFFFFFFFFFF\r\n", b"0\r\n\r\n", b"-1\r\n", b'{"choices":[{"text":"a"}]}',
    b"3;x=y\r\n{}\n\r\n", TOKEN, DONE, chunk(TOKEN), chunk(DONE),
])  # fmt: skip


@fuzzed
@given(st.lists(st.one_of(HEADS, st.binary(max_size=20)), max_size=12), st.integers(0, 300))
def test_whatever_comes_as_http_is_one_record(process: LoadProcess, pieces: list[bytes], cut: int) -> None:
    raw = b"".join(pieces)
    for reads in ([raw], [raw[:cut], raw[cut:]], pieces):
        check_record(process, *received(*reads))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.text(max_size=8), st.floats(),
    st.sampled_from([0, 1, 3, -5, 10**18, 10**30, -(10**30), 2**63, "", "stop", "abort", "length", "\ud83d"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these fields, each as it should be or with any value; or any value in its place."""
    some = st.fixed_dictionaries({}, optional={name: st.one_of(kind, VALUES) for name, kind in fields.items()})
    return st.one_of(some, some, some, VALUES)


COUNT = st.integers(-1, 6)
CALL = objects(
    index=st.integers(0, 2), id=st.just("a"), function=objects(name=st.just("search"), arguments=st.just("{}"))
)
PART = objects(
    role=st.just("assistant"), content=st.just("hi"), reasoning_content=st.just("hm"), reasoning=st.just("hm"),
    refusal=st.just("no"), tool_calls=st.lists(CALL, max_size=2), function_call=VALUES,
)  # fmt: skip
CHOICE = objects(
    index=st.just(0), delta=PART, message=PART, text=st.just("a"),
    finish_reason=st.sampled_from(["stop", "length", "x" * 5000]), logprobs=VALUES,
)  # fmt: skip
BODY = objects(
    id=st.just("x"), object=st.sampled_from(["chat.completion.chunk", "error"]), model=st.just("m"), created=COUNT,
    choices=st.lists(CHOICE, max_size=2), error=objects(message=st.just("gone"), code=COUNT, type=st.just("t")),
    message=VALUES, detail=VALUES, data=st.lists(objects(embedding=st.lists(COUNT, max_size=2)), max_size=2),
    usage=objects(
        prompt_tokens=COUNT, completion_tokens=COUNT, prompt_tokens_details=objects(cached_tokens=COUNT),
        completion_tokens_details=objects(reasoning_tokens=COUNT),
    ),
)  # fmt: skip


@fuzzed
@given(st.lists(BODY, max_size=4))
def test_any_json_in_a_chunk_is_one_record(process: LoadProcess, bodies: list[Any]) -> None:
    chunks = [b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies]
    check_record(process, *received(CHUNKED + b"".join(chunk(one) for one in [TOKEN, *chunks, DONE]) + b"0\r\n\r\n"))
    check_record(process, *received(UNTIL_CLOSED, *chunks))


@fuzzed
@given(BODY, st.sampled_from([b"200 OK", b"201 Made", b"429 Busy", b"500 Oops", b"302 Found"]))
def test_any_json_as_an_answer_is_one_record(process: LoadProcess, body: Any, status: bytes) -> None:
    raw = json.dumps(body).encode()
    check_record(process, *received(whole(raw, status=status)))


HUGE = b"1" + b"0" * 400
NASTY = [
    b"", b"null", b"true", b"5", b"[]", b"{}", b"[5]", b'"x"', b"\xff", b"<p>", b"{", HUGE, deep(900), deep(20_000),
    b'{"data":5}', b'{"data":[5]}', b'{"data":[{"id":5}]}', b'{"data":[{"id":""}]}', b'{"data":[{}]}', b'{"data":{}}',
    b'{"error":"\xff"}', b'{"error":%s}' % deep(900), b'{"error":{"message":{}}}', b'{"message":%s}' % deep(20_000),
    b'{"models":5}', b'{"models":[5]}', b'{"models":[{"name":"m:latest","size":true,"size_vram":-1,"details":5}]}',
    b'{"models":[{"name":"m:latest","size":%s,"size_vram":%s,"details":[]}]}' % (HUGE, HUGE),
    b'{"models":[{"name":{}}]}',
    b'{"all_models_loaded":[5,{"pid":true,"backend_url":"http://[::1","model_name":"m","recipe":{},"device":%s}]}'
    % HUGE,
    b'{"all_models_loaded":[{"model_name":"m","backend_url":"x:99999999","recipe_options":%s}]}' % deep(900),
    b'{"recipes":[1],"devices":5}', b'{"recipes":{"a":5},"devices":{"cpu":{"threads":true}}}',
    b'{"recipes":{"a":{"backends":[5],"default_backend":[1]},"b":{"backends":{"c":5}}},"devices":{"cpu":[]}}',
    b'{"recipe":{},"downloaded":"yes"}', b'{"global_timeout":1e400}', b'{"global_timeout":%s}' % HUGE,
    b'{"global_timeout":true}', b'{"version":{}}', b'{"version":"%s"}' % (b"9" * 5000), b'{"action":[1]}',
    b'{"count":true}', b'{"count":-1}', b'{"count":%s}' % HUGE, b'{"count":1000000}', b'{"tokens":5}', b'{"tokens":[]}',
    b'{"status":5,"digest":[],"total":"x"}', b'{"status":"success","digest":"d","total":-1,"completed":[]}',
    b'{"uuid":[]}', b'{"uuid":"../x","processed":{},"progress":"x"}', b'{"uuid":"a","progress":[],"error":{}}',
    b'{"default_generation_settings":{"n_ctx":%s},"total_slots":%s,"model_path":[],"build_info":5}' % (HUGE, deep(900)),
    b'{"default_generation_settings":5}', b'{"choices":5}', b'{"choices":[]}', b'{"choices":[{"message":5}]}',
    b'{"choices":[{"message":null}]}',
    b'vllm:cache_config_info{block_size="%s",num_gpu_blocks="nan",cache_dtype="x"} 1\n' % (b"9" * 400),
    b"vllm:num_requests_running 1e400\nvllm:generation_tokens_total -5\nprocess_start_time_seconds NaN\n",
    b"event: error\ndata: %s\n\n" % deep(20_000), b"data: \xff\n\n", b"event: error\ndata: [\xff\n\n", b"a" * 70_000,
]  # fmt: skip


def probes(url: str, folder: Path) -> Iterator[Callable[[], object]]:
    """What asks a server anything before, during and after the load."""
    session, api = open_session(None), Api(url)
    yield lambda: probe.find_model(url, "m", session)
    yield lambda: probe.find_model(url, None, session)
    yield lambda: probe.probe_running_server(url, "m")
    yield lambda: probe.get_version(url, session)
    yield lambda: probe.find_metrics_url(url)
    yield lambda: probe.make_token_counter(url, "m")("text")
    yield lambda: probe.make_token_counter(url, "m", ask_engine=lambda path, body: probe.fetch_text(session, url))(
        "text"
    )
    yield lambda: lemonade.get_health(api)
    yield lambda: lemonade.get_system_info(api)
    yield lambda: lemonade.find_model(api, "m")
    yield lambda: lemonade.find_canonical_name(api, "m")
    yield lambda: find_running_model(url, "m", None)
    yield lambda: download(api, {"model_name": "m"}, ["x"], time.monotonic() + 1)
    yield lambda: LemonadeMonitor(api, "m", None).effective()
    yield lambda: LemonadeMonitor(api, "m", None).fetch("/props")
    yield lambda: LemonadeMonitor(api, "m", None).state()
    yield lambda: first_model(make_job(folder, Load(user="batch")), ApiAddress.parse(url))
    yield lambda: assert_facts_can_be_stored(url, "ollama", None)
    yield lambda: assert_facts_can_be_stored(url, "llama-cpp", LemonadeMonitor(api, "m", None))
    yield Scraper(url + "/metrics", "c", folder / "metrics.jsonl").scrape_now


def assert_facts_can_be_stored(url: str, template: str, behind: LemonadeMonitor | None) -> None:
    """What is found out of a server is in a manifest that can be read."""
    served = served_by(url=url, template=template, version=None, model="m")
    found = record_facts(served, metrics_url=url + "/metrics", monitor=behind)
    assert msgspec.json.decode(msgspec.json.encode(found), type=ServedBy) == found


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops", b"302 Found\r\nLocation: http://[x"])
def test_whatever_a_probe_is_reported_is_an_error_of_ours_at_most(
    tmp_path: Path, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    told = [b""]

    def handler(connection: Any, number: int) -> None:
        read_request(connection)
        connection.sendall(whole(told[0], status=status, more=b"Connection: close\r\n"))

    with serving(handler) as url:
        url = url.replace("localhost", "127.0.0.1")
        for told[0] in NASTY if status == b"200 OK" else NASTY[::4]:
            for attempt in probes(url, tmp_path):
                with suppress(HarnessError):
                    attempt()
    damaged: list[int] = []
    samples = list(read_lines(tmp_path / "metrics.jsonl", MetricsSample, damaged))
    assert damaged == []
    assert all(0 <= value < 2**54 for sample in samples for value in sample.values.values())


def test_no_answer_is_longer_than_memory_and_no_redirect_is_followed(wording: Wording) -> None:
    requests: list[bytes] = []

    def handler(connection: Any, number: int) -> None:
        requests.append(read_request(connection))
        if b"/moved" in requests[-1]:
            connection.sendall(whole(b"", status=b"302 Found", more=b"Location: /endless\r\nConnection: close\r\n"))
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"a" * 65_536)

    with serving(handler) as url, open_session("key") as session:
        assert session.get(url + "/moved").status_code == 302
        assert len(requests) == 1
        for path in ("/endless", "/metrics"):
            with pytest.raises(RequestException) as caught:
                session.get(url + path)
            wording(caught.value)
        assert probe.find_metrics_url(url) is None
        with (
            session.get(url, stream=True) as response,
            pytest.raises(RequestException) as caught,
        ):
            list(probe.read_events(response))
        wording(caught.value)
