"""Doubles of Ollama and LocalAI: their documented APIs for getting a model, and a chat that answers at once.

`pullers.py ollama|localai` as a program, on the port that the environment of the real one names; `serving` in tests.
Standard library alone, so that it runs in any image with Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIBRARY = ("qwen3:0.6b", "qwen3:latest")


class Puller(ThreadingHTTPServer):
    """State of a double."""

    daemon_threads = True

    def __init__(self, kind: str, address: tuple[str, int], *models: str) -> None:
        super().__init__(address, Ollama if kind == "ollama" else LocalAI)
        self.models = list(models)
        self.loaded: list[str] = []  # the least recently used first
        self.max_loaded, self.load_s = 1, 0.0  # OLLAMA_MAX_LOADED_MODELS; the time of a load
        self.used: list[tuple[str, bool]] = []  # the model of each chat, and whether it was loaded for it
        self._using = threading.Lock()
        self.asked: list[str] = []

    def use(self, name: str) -> bool:
        """Load a model if it is not loaded, in place of the least recently used ones. Return whether it was."""
        with self._using:
            if is_new := name not in self.loaded:
                del self.loaded[: max(0, len(self.loaded) + 1 - self.max_loaded)]
                time.sleep(self.load_s)
            self.loaded = [*(other for other in self.loaded if other != name), name]
            return is_new


class Answers(BaseHTTPRequestHandler):
    """What both have: the OpenAI part."""

    protocol_version = "HTTP/1.1"
    server: Puller

    def log_message(self, format: str, *args: Any) -> None:
        print(f"double: {format % args}", flush=True)

    def body(self) -> dict[str, Any]:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return dict(json.loads(raw)) if raw else {}

    def say(self, value: Any, status: int = 200) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, kind: str, parts: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())
            self.wfile.flush()
        self.close_connection = True

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        if self.path == "/v1/models":
            self.say({"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})
        else:
            self.own_get()

    def do_POST(self) -> None:
        body = self.body()
        self.server.asked.append(f"POST {self.path} {json.dumps(body, sort_keys=True)}"[:200])
        if self.path == "/v1/chat/completions":
            self.chat(body)
        else:
            self.own_post(body)

    def chat(self, body: dict[str, Any]) -> None:
        count = int(body.get("max_tokens") or 1)
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": 5 + words, "completion_tokens": count, "total_tokens": 5 + words + count}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "yes " * count}
            self.say({"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage})
            return
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": "yes "}}]} for _ in range(count)]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.stream("text/event-stream", iter([*lines, "data: [DONE]\n\n"]))

    def own_get(self) -> None:
        self.say({"error": "no such page"}, 404)

    def own_post(self, body: dict[str, Any]) -> None:
        self.say({"error": "no such page"}, 404)


class Ollama(Answers):
    """docs/api.md of ollama/ollama: tags, pull, generate without a prompt, ps, version."""

    def own_get(self) -> None:
        tagged = [{"name": name, "model": name} for name in self.server.models]
        details = {"quantization_level": "Q4_K_M"}
        running = [
            {"name": name, "size": 1000, "size_vram": 750, "digest": "2ae6", "details": details}
            for name in reversed(self.server.loaded)
        ]
        pages: dict[str, Any] = {
            "/": "Ollama is running", "/api/version": {"version": "0.12.6"},
            "/api/tags": {"models": tagged}, "/api/ps": {"models": running},
        }  # fmt: skip
        if self.path in pages:
            self.say(pages[self.path])
        else:
            self.say({"error": "no such page"}, 404)

    def name(self, body: dict[str, Any]) -> str:
        name = str(body.get("model", ""))
        return name if ":" in name else f"{name}:latest"

    def chat(self, body: dict[str, Any]) -> None:
        name = self.name(body)
        if name not in self.server.models:
            self.say({"error": {"message": f"model '{name}' not found", "type": "not_found_error"}}, 404)
            return
        self.server.used.append((name, self.server.use(name)))
        super().chat(body)

    def own_post(self, body: dict[str, Any]) -> None:
        name = self.name(body)
        if self.path == "/api/pull" and body.get("stream") is False and name not in LIBRARY:
            self.say({"error": "pull model manifest: file does not exist"}, 500)
        elif self.path == "/api/pull" and body.get("stream") is False:
            self.server.models.append(name)
            self.say({"status": "success"})
        elif self.path == "/api/generate" and name in self.server.models:
            self.server.use(name)
            self.say({"model": name, "response": "", "done": True, "done_reason": "load"})
        else:
            self.say({"error": f"model '{name}' not found"}, 404)


class LocalAI(Answers):
    """Of mudler/LocalAI: readyz, version."""

    def own_get(self) -> None:
        if self.path == "/readyz":
            self.say("OK")
        elif self.path == "/version":
            self.say({"version": "v3.10.0 (0123abcd)"})
        else:
            super().own_get()


@contextlib.contextmanager
def serving(kind: str) -> Iterator[tuple[str, Puller]]:
    """A double on a free port of this host, and its address."""
    double = Puller(kind, ("127.0.0.1", 0))
    thread = threading.Thread(target=double.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{double.server_address[1]}", double
    finally:
        double.shutdown()
        double.server_close()
        thread.join(5)


def main() -> None:
    kind = sys.argv[1]
    address = os.environ["OLLAMA_HOST" if kind == "ollama" else "LOCALAI_ADDRESS"]
    print(f"double of {kind}: {json.dumps(dict(sorted(os.environ.items())))}", flush=True)
    models = [word for word in sys.argv[2:] if word != "serve"]  # LocalAI installs what it is given
    Puller(kind, ("0.0.0.0", int(address.rpartition(":")[2])), *models).serve_forever()


if __name__ == "__main__":
    main()
