"""Whether a stream of Anthropic's API counts the tokens of its prompt."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.serve.probe import streams_prompt_counts

START = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":0}}}\n\n'
CACHED = b'data: {"type":"message_start","message":{"usage":{"cache_read_input_tokens":9}}}\n\n'
COUNT = b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":9,"output_tokens":1}}\n\n'


@contextmanager
def answering(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers one after the other, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answers", "counts", "requests"),
    [
        ([(200, START + COUNT)], True, 1),
        ([(200, CACHED)], True, 1),
        ([(200, START)], False, 3),
        ([(200, b'data: {"choices":[],"usage":{"prompt_tokens":9}}\n\n')], None, 3),  # not of this API
        ([(404, b"")], None, 1),
        ([(200, b""), (200, START + COUNT)], True, 2),  # the model ended its first answer at once
        ([(200, START), (200, START + COUNT)], True, 2),
        ([(200, b"")], None, 3),
    ],
)
def test_an_answer_without_counts_is_asked_for_again(
    answers: list[tuple[int, bytes]], counts: bool | None, requests: int
) -> None:
    with answering(*answers) as (url, asked):
        assert streams_prompt_counts(url, "m", None) is counts
    assert asked == ["/v1/messages"] * requests
