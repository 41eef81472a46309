"""The body of a request: what the API of each endpoint calls the things that a load says."""

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.scenario.scenario import Load
from harness.workload import Message

PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}


def body_of(load: Load, model: str, messages: Sequence[Message], max_tokens: int, more: dict[str, Any]) -> bytes:
    """The JSON text of a request. `more` is what a structured answer adds."""
    if load.endpoint == "embeddings":
        return msgspec.json.encode({"model": model, "input": as_text(messages)})
    body: dict[str, Any] = {"model": model}
    body |= {"messages": messages} if load.endpoint == "chat" else {"prompt": as_text(messages)}
    body |= {
        "max_tokens": max_tokens,
        "temperature": 0,  # the same choices on both sides of a comparison
        "stream": load.stream,
    }
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    if load.output == "fixed":
        body["ignore_eos"] = True
    return msgspec.json.encode(body | more)


def as_text(messages: Sequence[Message]) -> str:
    """Messages for an endpoint that takes a text: one after the other, without the roles that only a template knows."""
    return "\n\n".join(message["content"] for message in messages)
