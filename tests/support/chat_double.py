"""A double of a server that lists models and answers chat requests."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.http_double import Handler

KEY = "a-key-of-the-test"
LISTED = ["bge-m3", "Qwen3-Embedding-0.6B", "Qwen3-8B", "gpt-oss-20b"]


def event(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"


def double(
    models: Sequence[str] = LISTED,
    *,
    busy: int = 0,
    key: str | None = None,
    asked: list[str] | None = None,
    per_word: Any = None,
    context: int | None = None,
) -> type[Handler]:
    """A server that is busy for so many requests. `per_word`: tokens of a word, if it counts them."""
    left = [busy]

    class Double(Handler):
        def refused(self) -> bool:
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer(401, '{"error": "no key"}')
                return True
            if left[0]:
                left[0] -= 1
                self.answer(503, '{"error": {"message": "Loading model"}}')
                return True
            return False

        def do_GET(self) -> None:
            if self.path != "/v1/models":
                self.answer(404)
            elif not self.refused():
                listed = [{"id": name, "max_model_len": context} for name in models]
                self.answer(200, json.dumps({"data": listed}))

        def do_POST(self) -> None:
            body = json.loads(self.body())
            if not self.refused():
                if asked is not None:
                    asked.append(body["model"])
                events = [event(role="assistant"), event(reasoning_content="a"), event(content="b"), "data: [DONE]\n\n"]
                if per_word is not None and body["stream_options"] == {"include_usage": True}:
                    words = len(body["messages"][0]["content"].split())
                    usage = {"choices": [], "usage": {"prompt_tokens": per_word * words}}
                    events.insert(-1, f"data: {json.dumps(usage)}\n\n")
                message = {"choices": [{"message": {"content": "b"}}]}
                if body["stream"]:
                    self.answer(200, "".join(events), "text/event-stream")
                else:
                    self.answer(200, json.dumps(message))

    return Double
