"""Anthropic's Messages API, which coding agents use: bodies of requests, and responses in the form of the OpenAI API.

A response is translated event by event, after its times were taken, so all that is noted of it is the same as of a chat
completion. The format: https://docs.anthropic.com/en/api/messages-streaming; llama.cpp, vLLM and Lemonade serve it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from harness.failures.unexpected_response import decode_json
from harness.load.sse import Event

HEADERS = {"anthropic-version": "2023-06-01"}
_FINISHES = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
    "refusal": "content_filter",
}  # fmt: skip
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_NO_TEXT = ("type", "id", "name", "signature", "data", "index")  # fields of a part
_NOTHING = b'{"choices":[]}'


def encode_messages(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for messages, made of the fields of one for a chat completion."""
    body: dict[str, Any] = {
        key: fields[key] for key in ("model", "max_tokens", "temperature", "stream") if key in fields
    }
    system = [message["content"] for message in fields["messages"] if message["role"] == "system"]
    if system:
        body["system"] = "\n\n".join(system)
    body["messages"] = _merge([_as_blocks(message) for message in fields["messages"] if message["role"] != "system"])
    if tools := fields.get("tools"):
        functions = [tool["function"] for tool in tools]
        body["tools"] = [
            {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
            for function in functions
        ]
        body["tool_choice"] = {"type": _CHOICES[fields.get("tool_choice", "auto")]}
    return body


def _as_blocks(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the role of a message and its content as blocks."""
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return "user", [result]
    calls = []
    for call in message.get("tool_calls", ()):
        given = _decoded(call["function"]["arguments"])
        calls.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return message["role"], [*text, *calls]


def _decoded(arguments: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(arguments)
        return value if isinstance(value, dict) else {}
    return {}


def _merge(messages: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the messages, neighbours of one role as one: roles must alternate. Empty ones are left out."""
    merged: list[dict[str, Any]] = []
    for role, blocks in messages:
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        elif blocks:
            merged.append({"role": role, "content": list(blocks)})
    return merged


def as_chat_event(event: Event) -> Event:
    """Return the event of a chat completion that has the same content. What is not known stays, and so do errors.

    The model is left out: only the start of a message has it, see `started_message`.
    """
    try:
        body = decode_json(event.data)
    except ValueError:
        return event
    kind = body.get("type") if isinstance(body, dict) else None
    if kind == "message_stop":
        return Event("message", b"[DONE]")
    if kind not in ("message_start", "content_block_start", "content_block_delta", "message_delta"):
        harmless = kind in ("ping", "content_block_stop")
        return Event("message", _NOTHING) if harmless else event
    chunk: dict[str, Any] = {"choices": []}
    if kind == "message_start":
        chunk["usage"] = _usage(_mapping(body.get("message")))
    elif kind == "message_delta":
        chunk["usage"] = _usage(body)
        if finish := _mapping(body.get("delta")).get("stop_reason"):
            chunk["choices"] = [{"delta": {}, "finish_reason": _finish(finish)}]
    elif delta := _delta(body):
        chunk["choices"] = [{"delta": delta, "finish_reason": None}]
    return Event("message", msgspec.json.encode(chunk))


def started_message(event: Event) -> dict[str, Any]:
    """Return the message whose start an event reports, with the name of its model; {} for any other event."""
    with suppress(ValueError):
        body = decode_json(event.data)
        if isinstance(body, dict) and body.get("type") == "message_start":
            return _mapping(body.get("message"))
    return {}


def _delta(body: dict[str, Any]) -> dict[str, Any]:
    """Return the delta of a block's start or of its next part; {} without any output."""
    part = _mapping(body.get("content_block") or body.get("delta"))
    match part.get("type"):
        case "text" | "text_delta":
            return {"content": part.get("text")} if part.get("text") else {}
        case "thinking" | "thinking_delta":
            return {"reasoning_content": part.get("thinking")} if part.get("thinking") else {}
        case "redacted_thinking":
            return {"reasoning_details": [part]}
        case "signature_delta" | "citations_delta":
            return {}
        case kind if kind in _CALLS:
            function = {"name": part.get("name"), "arguments": ""}
            return {"tool_calls": [{"index": body.get("index"), "id": part.get("id"), "function": function}]}
        case "input_json_delta":
            arguments = {"arguments": part.get("partial_json")}
            has_some = part.get("partial_json")
            return {"tool_calls": [{"index": body.get("index"), "function": arguments}]} if has_some else {}
    return _unknown_part(part)


def _unknown_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a part of no known type, in a field with the name of its type."""
    kind = part.get("type")
    if kind is None:
        return {"content": [part]} if part else {}
    texts = [value for key, value in part.items() if isinstance(value, str) and key not in _NO_TEXT]
    is_result = isinstance(kind, str) and kind.endswith("_result")  # of a tool that the server ran
    return {kind: "".join(texts)} if isinstance(kind, str) and kind and texts and not is_result else {}


def as_chat_completion(raw: bytes) -> bytes:
    """Return the body of a chat completion that has the same content as a whole message; errors stay."""
    with suppress(ValueError):
        body = decode_json(raw)
        if isinstance(body, dict) and isinstance(body.get("content"), list):
            blocks = [_mapping(block) for block in body["content"]]
            message: dict[str, Any] = {"content": "".join(_texts(blocks, "text"))}
            message["reasoning_content"] = "".join(_texts(blocks, "thinking"))
            calls = [
                {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
                for block in blocks
                if block.get("type") in _CALLS
            ]
            choice = {"message": message | {"tool_calls": calls}, "finish_reason": _finish(body.get("stop_reason"))}
            return msgspec.json.encode({"choices": [choice], "usage": _usage(body), "model": body.get("model")})
    return raw


def _texts(blocks: Sequence[dict[str, Any]], kind: str) -> list[str]:
    return [text for block in blocks if block.get("type") == kind and isinstance(text := block.get(kind), str)]


def _finish(reason: Any) -> Any:
    return _FINISHES.get(reason, reason) if isinstance(reason, str) else reason


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts as OpenAI names them. Anthropic's input tokens do not include cached ones."""
    usage = _mapping(body.get("usage"))
    cached, inputs = (
        usage.get("cache_read_input_tokens"),
        [usage.get(name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")],
    )
    counts = [count for count in inputs if type(count) is int]
    converted: dict[str, Any] = {"prompt_tokens": sum(counts)} if any(counts) else {}
    if converted and cached is not None:
        converted["prompt_tokens_details"] = {"cached_tokens": cached}
    if usage.get("output_tokens"):
        converted["completion_tokens"] = usage["output_tokens"]
    return converted


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
