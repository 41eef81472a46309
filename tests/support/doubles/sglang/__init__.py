"""A double of SGLang: the answers that a real one (0.5.23 on a processor, without kernels of its own) gave, recorded.

As a program it takes SGLang's arguments and prints the log of that server's start. Standard library alone, so that it
runs in any image with Python. The recorded chunks are sent whatever is asked; its metrics count the requests that came.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
TOKENS, PROMPT_TOKENS = 5, 10  # of the recorded answer


class SGLang(ThreadingHTTPServer):
    """State of a double. `deprecated`: an older one, which has only /get_server_info."""

    daemon_threads = True

    def __init__(self, deprecated: bool = False, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Answers)
        self.info = "/get_server_info" if deprecated else "/server_info"
        self.answered = 0


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SGLang

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        files = {self.server.info: "server_info.json", "/v1/models": "models.json"}
        if self.path in files:
            self.say(text(files[self.path]))
        elif self.path == "/metrics":
            self.say(metrics(self.server.answered), kind="text/plain; version=0.0.4")
        elif self.path in ("/", "/health"):
            self.say('"SGLang is running"' if self.path == "/" else "")
        else:
            self.say('{"detail":"Not Found"}', 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            count = len(asked["prompt"].split())
            self.say(json.dumps({"tokens": list(range(count)), "count": count, "max_model_len": 2048}))
            return
        self.server.answered += 1
        if asked.get("stream"):
            self.say(text("stream.txt"), kind="text/event-stream")
            return
        message = {"role": "assistant", "content": "yes", "reasoning_content": None}
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "total_tokens": PROMPT_TOKENS + 1}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        self.say(json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}))

    def say(self, body: str, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


def text(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def metrics(answered: int) -> str:
    """The recorded metrics with counters of this double's requests."""
    lines = []
    for line in text("metrics.txt").splitlines():
        name = line.partition("{")[0]
        streaming = 'is_streaming="true"' in line
        if name in ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"):
            each = PROMPT_TOKENS if name.startswith("sglang:prompt") else TOKENS
            line = f"{line.rpartition(' ')[0]} {answered * each if streaming else 0.0}"
        lines.append(line)
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def serving(deprecated: bool = False) -> Iterator[str]:
    """The address of a double that runs until the end."""
    double = SGLang(deprecated)
    thread = threading.Thread(target=double.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{double.server_address[1]}"
    finally:
        double.shutdown()
        double.server_close()
        thread.join()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print(Path("/startup/sglang-cpu.txt").read_text(encoding="utf-8"), flush=True)
    SGLang(address=("0.0.0.0", int(arguments[arguments.index("--port") + 1]))).serve_forever()
