"""HTTP/1.1 over an asyncio transport, and the bodies of requests and responses as vLLM 0.32 has them.

Each piece is one socket write. Connections are kept alive. Each word between spaces is one token, also for `/tokenize`.
"""

import asyncio
import json
import random
import re
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import httptools
import msgspec

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class HttpRequest:
    """One request, with methods to answer it. Header names are in lower case."""

    def __init__(self, connection: "Connection", received_s: float) -> None:
        self.method = ""
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.received_s = received_s
        self.on_disconnect: Callable[[], None] | None = None
        self._connection = connection
        self._keep_alive = True

    @property
    def closed(self) -> bool:
        return self._connection.transport.is_closing()

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """Send the whole response in one write."""
        self.raw(_head(status, kind, {"content-length": str(len(body)), **headers}, self._keep_alive) + body)
        self.done()

    def start_stream(self, **headers: str) -> None:
        kind = "text/event-stream; charset=utf-8"
        self.raw(_head(200, kind, {"transfer-encoding": "chunked", **headers}, self._keep_alive))

    def piece(self, data: bytes) -> None:
        if not data:
            return  # an empty chunk would end the body
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.raw(b"0\r\n\r\n")
        self.done()

    def raw(self, data: bytes) -> None:
        if not self.closed:
            self._connection.transport.write(data)

    def done(self) -> None:
        self.on_disconnect = None
        self._connection.finished(self._keep_alive)

    def drop(self) -> None:
        """Close the connection in the middle of the response, as a dying server or proxy does."""
        self.on_disconnect = None
        self._connection.transport.close()


def _head(status: int, kind: str, headers: dict[str, str], keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", "server: harness-simulated", f"content-type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.Protocol):
    """Parses the requests of one connection. A pipelined request waits until the previous one is answered."""

    def __init__(self, handle: Callable[[HttpRequest], None], connections: set["Connection"]) -> None:
        self._handle = handle
        self._connections = connections
        self._queue: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._body: list[bytes] = []
        self._next: HttpRequest | None = None
        self.transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._current and self._current.on_disconnect:
            self._current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.write(_head(400, "text/plain", {"content-length": "0"}, keep_alive=False))
            self.transport.close()

    def on_message_begin(self) -> None:
        self._next = HttpRequest(self, asyncio.get_running_loop().time())
        self._body = []

    def on_url(self, url: bytes) -> None:
        assert self._next
        self._next.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._next
        self._next.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._next
        assert request
        request.method = self._parser.get_method().decode("latin-1")
        request.path = request.path.partition("?")[0]
        request.body = b"".join(self._body)
        request._keep_alive = self._parser.should_keep_alive()
        self._queue.append(request)
        self._serve_next()

    def _serve_next(self) -> None:
        if self._current is None and self._queue and not self.transport.is_closing():
            self._current = self._queue.popleft()
            self._handle(self._current)

    def finished(self, keep_alive: bool) -> None:
        self._current = None
        if keep_alive:
            self._serve_next()
        else:
            self.transport.close()


FINGERPRINT = "simulated"


class BadRequest(Exception):
    """An invalid request: the status of the answer, vLLM's error type, and the invalid parameter."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"):
        super().__init__(message)
        self.message, self.param, self.status, self.kind = message, param, status, kind


_ASKED_WORD = re.compile(r"Begin each answer with the word ([a-z-]{1,100})\.")


def asked_word(prompt: str) -> str | None:
    """The word with which a prompt asks to begin each answer; the last one, if there are several."""
    words = _ASKED_WORD.findall(prompt)
    return words[-1] if words else None


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request, understood, and the bodies of its answer.

    `max_tokens` is what the context leaves when the request names none.
    """

    id: str
    model: str
    created: int
    chat: bool
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    tool: tuple[str, str] | None = None  # the first tool that was offered, and its first parameter
    may_call: bool = True  # a tool
    messages: bool = False  # answered as Anthropic's Messages API does

    def event(self, chunk: bytes) -> bytes:
        """A chunk as what is sent: one event; of the Messages API the events that have the same content."""
        if not self.messages:
            return b"data: " + chunk + b"\n\n"
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body))
            for body in _message_events(msgspec.json.decode(chunk), self)
        )

    def end(self, finish: str, usage: dict[str, Any]) -> bytes:
        """The last events of a stream of the Messages API."""
        reason = {"stop_reason": STOP_REASONS[finish]}
        delta = {"type": "message_delta", "delta": reason, "usage": input_usage(usage)}
        bodies: tuple[dict[str, Any], ...] = (
            {"type": "content_block_stop", "index": 0},
            delta,
            {"type": "message_stop"},
        )
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body)) for body in bodies
        )

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        """One streamed event; for a text completion `delta` is {"content": text}."""
        text = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = None
        return self._body(".chunk", choices=[{**choice, "token_ids": None}])

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._body(".chunk", choices=[], usage=usage, system_fingerprint=FINGERPRINT)

    def whole(self, message: dict[str, Any], finish: str, usage: dict[str, Any] | None) -> bytes:
        """The answer to a request that did not stream."""
        if self.messages:
            return msgspec.json.encode({
                "id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": [{"type": "text", "text": message.get("content", "")}],
                "stop_reason": STOP_REASONS[finish], "usage": input_usage(usage or {}),
            })  # fmt: skip
        answer = {"role": "assistant", "content": None, **message}
        text = {"message": answer} if self.chat else {"text": message.get("content") or ""}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        return self._body(choices=[choice], system_fingerprint=FINGERPRINT, usage=usage)

    def embeddings(self, vectors: list[list[float]], prompt: int) -> bytes:
        data = [{"index": index, "object": "embedding", "embedding": vector} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": None}
        return self._body(object="list", data=data, usage=usage)

    def _body(self, part: str = "", **more: Any) -> bytes:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        return msgspec.json.encode(
            {"id": self.id, "object": kind, "created": self.created, "model": self.model, **more}
        )


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def input_usage(usage: dict[str, Any]) -> dict[str, int]:
    """Token counts as Anthropic names them: the input tokens do not include cached ones."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {"input_tokens": usage.get("prompt_tokens", 0) - cached, "cache_read_input_tokens": cached,
            "output_tokens": usage.get("completion_tokens", 0)}  # fmt: skip


def _message_events(chunk: dict[str, Any], request: CompletionRequest) -> Iterator[dict[str, Any]]:
    if "error" in chunk:
        yield {"type": "error", "error": chunk["error"]}
    for choice in chunk.get("choices", []):
        delta = choice["delta"]
        if "role" in delta:
            usage = {"input_tokens": len(request.prompt), "output_tokens": 0}
            message = {"id": request.id, "type": "message", "role": "assistant", "content": [], "model": request.model}
            yield {"type": "message_start", "message": message | {"usage": usage}}
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for call in delta.get("tool_calls", []):
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                yield {"type": "content_block_start", "index": 1, "content_block": block}
            part = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            yield {"type": "content_block_delta", "index": 1, "delta": part}
        for key, kind, name in (("content", "text_delta", "text"), ("reasoning", "thinking_delta", "thinking")):
            if delta.get(key):
                yield {"type": "content_block_delta", "index": 0, "delta": {"type": kind, name: delta[key]}}


def messages_as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request to the Messages API as one for a chat completion."""
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body.get("messages") or []:
        blocks = message.get("content") if isinstance(message, dict) else None
        texts = [json.dumps(block["input"]) if "input" in block else block.get("content", block.get("text", ""))
                 for block in blocks] if isinstance(blocks, list) else [blocks]  # fmt: skip
        messages.append({"role": message.get("role"), "content": " ".join(map(str, texts))})
    chat = {key: body[key] for key in ("model", "max_tokens", "stream") if key in body} | {"messages": messages}
    tools = [
        {"function": {"name": tool.get("name"), "parameters": tool.get("input_schema")}}
        for tool in body.get("tools", [])
    ]
    return chat | ({"tools": tools, "tool_choice": body.get("tool_choice", {}).get("type")} if tools else {})


def encode_error(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"JSON decode error: {error}", "body", kind="Bad Request") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object", "body")
    return value


def embeddings_as_completion(body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a request for one token in place of a request for embeddings, and the number of vectors."""
    given = body.get("input")
    texts = given if isinstance(given, list) and given and all(isinstance(text, str) for text in given) else [given]
    prompt = " ".join(text for text in texts if isinstance(text, str))
    return {"model": body.get("model"), "prompt": prompt, "max_tokens": 1, "ignore_eos": True}, len(texts)


def parse_completion(
    body: dict[str, Any], chat: bool, models: Sequence[str], max_model_len: int, id: str
) -> CompletionRequest:
    """Parse a completion request. Raises BadRequest with vLLM's texts, also if it does not fit the model's context."""
    name = body.get("model")
    if name is not None and name not in models:
        valid = ", ".join(models)
        raise BadRequest(f"The model `{name}` does not exist. Valid aliases: {valid}", "model", 404, "NotFoundError")
    prompt = prompt_ids(body, chat)
    max_tokens = body.get("max_completion_tokens") if chat else None
    if max_tokens is None:
        max_tokens = body.get("max_tokens", None if chat else 16)
    options = body.get("stream_options") or {}
    return CompletionRequest(
        id=id,
        model=name or models[0],
        created=int(time.time()),
        chat=chat,
        prompt=prompt,
        max_tokens=_check_max_tokens(max_tokens, len(prompt), max_model_len),
        min_tokens=int(body.get("min_tokens") or 0),
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        tool=_first_tool(body),
        may_call=body.get("tool_choice") != "none",
    )


def _check_max_tokens(asked: object, prompt: int, max_model_len: int) -> int:
    """Return the maximum tokens of an answer: as asked, or what the context has left. Raises BadRequest."""
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise BadRequest(f"max_tokens must be an integer of at least 1, got {asked}.", "max_tokens")
    output = max(1, max_model_len - prompt) if asked is None else asked
    if prompt + output > max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {output} output "
            f"tokens and your prompt contains {prompt} input tokens, for a total of {prompt + output} tokens.",
            "input_tokens",
        )
    return output


def prompt_ids(body: dict[str, Any], chat: bool) -> list[int]:
    """Return the token ids of `messages` or of `prompt` (a text or a list of ids)."""
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list of at least one message", "messages")
        tools = body.get("tools")
        return chat_tokens([*([("tools", json.dumps(tools))] if tools else []), *map(_role_and_text, messages)])
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    if isinstance(prompt, str) and prompt.split():
        return text_tokens(prompt)
    raise BadRequest("prompt must be a non-empty text or a list of token ids", "prompt")


def prompt_text(body: dict[str, Any], chat: bool) -> str:
    if chat:
        return "\n\n".join(text for _, text in map(_role_and_text, body["messages"]))
    return body["prompt"] if isinstance(body["prompt"], str) else ""


TEXT_KINDS = ("code", "chat", "structured")


def text_kind(prompt: str) -> str:
    """Return the kind of a prompt that the harness made: code, structured, or chat for any other text."""
    if "Answer with code alone." in prompt:
        return "code"
    return "structured" if "Answer with JSON alone." in prompt else "chat"


def _role_and_text(message: object) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("each message needs a role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return message["role"], " ".join(filter(None, [content if isinstance(content, str) else "", calls]))


def _first_tool(body: dict[str, Any]) -> tuple[str, str] | None:
    try:
        function = body["tools"][0]["function"]
        parameters = function.get("parameters", {}).get("properties", {})
    except (LookupError, TypeError, AttributeError):
        return None
    return (str(function.get("name")), next(iter(parameters), "text"))


def usage_of(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def encode_models(models: Sequence[str], max_model_len: int, created: int) -> bytes:
    cards = [{"id": model, "object": "model", "created": created, "owned_by": "simulated", "root": model,
              "parent": None, "max_model_len": max_model_len} for model in models]  # fmt: skip
    return msgspec.json.encode({"object": "list", "data": cards})


START, END = "<|im_start|>", "<|im_end|>"
_TEXT = """
the of a to and in is that it was for on as with by at from are this be or an have not which one all
their there can more time about into some other than then its only new these two may first any my now
such like our over even most me after also did many before must through back years where much your way
well down should because each just those people how too little state good very make world still own see
work long get here between both life being under never day same another know while last might us great
"""
WORDS = tuple(_TEXT.split())


def token_id(word: str) -> int:
    """Return the id of a word, which is the same in every process (unlike `hash`)."""
    return zlib.crc32(word.encode())


def text_tokens(text: str) -> list[int]:
    return [token_id(word) for word in text.split()]


def chat_tokens(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Return the token ids of a conversation of (role, text), with the generation prompt.

    As in a real chat template, a message adds a start marker, the role and an end marker, and two tokens at the end
    open the assistant's answer. So a single user message of W words has W + 5 tokens, and the next turn of a
    conversation starts with exactly the tokens of the turn before, which a prefix cache can reuse.
    """
    ids: list[int] = []
    for role, text in messages:
        ids += [token_id(START), token_id(role), *text_tokens(text), token_id(END)]
    return [*ids, token_id(START), token_id("assistant")]


def prompt_hash(prompt: Sequence[int], seed: int) -> int:
    """Return a number that depends only on prompt and seed. It selects the words and the natural length."""
    return zlib.crc32(b"".join(i.to_bytes(8, "little") for i in prompt), seed & 0xFFFFFFFF)


def output_word(number: int, index: int) -> int:
    """Return the index in `WORDS` of output token `index`, for the `prompt_hash` of a request."""
    return (number + index * (2 * (number >> 7) % len(WORDS) + 1)) % len(WORDS)


def natural_length(number: int, mean: int) -> int:
    """Return an answer length of at least 1 token, uniform from half to one and a half times `mean`."""
    return max(1, mean // 2 + (number * 2654435761 >> 7) % (mean + 1))


def answer_form(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the form of a structured answer, {"schema": ...} or {"choice": [...]}; None for a free answer."""
    outputs, response = body.get("structured_outputs"), body.get("response_format")
    if isinstance(outputs, dict) and isinstance(outputs.get("choice"), list) and outputs["choice"]:
        return {"choice": outputs["choice"]}
    if isinstance(outputs, dict) and isinstance(outputs.get("json"), dict):
        return {"schema": outputs["json"]}
    if isinstance(response, dict) and response.get("type") == "json_schema":
        inner = response.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise BadRequest("response_format.json_schema.schema must be a mapping", "response_format")
        return {"schema": inner["schema"]}
    grammar = body.get("grammar")
    if isinstance(grammar, str) and grammar.startswith("root ::= "):
        return {"choice": [json.loads(part) for part in grammar.removeprefix("root ::= ").split(" | ")]}
    return None


def form_words(form: dict[str, Any], text: str, number: int, *, wrong: bool, invalid: bool) -> list[str]:
    """Return the words of a structured answer to the prompt `text`, whose hash is `number`.

    If the prompt has a text of the shipped classification set and the choices have its label, the answer is right
    (except for the faults `wrong` and `invalid`). Any other answer follows from the prompt.
    """
    if invalid:
        return ["none", "of", "these"]
    label = _find_label(text)
    if "choice" in form:
        return str(_choose(form["choice"], label, number, wrong)).split()
    return json.dumps(_schema_example(form["schema"], label, number, wrong)).split(" ")


def _choose(choices: list[Any], label: str | None, number: int, wrong: bool) -> Any:
    right = choices.index(label) if label in choices else number % len(choices)
    return choices[(right + wrong) % len(choices)]


def _schema_example(schema: dict[str, Any], label: str | None, number: int, wrong: bool) -> Any:
    """Return a small value that is valid for a schema. Only its types, enums and minimums are respected."""
    if schema.get("enum"):
        return _choose(schema["enum"], label, number, wrong)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        inner = schema.get("properties", {})
        return {name: _schema_example(value, label, number, wrong) for name, value in inner.items()}
    if kind == "array":
        return [_schema_example(schema.get("items", {}), label, number, wrong)]
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(kind, label or "text")


def _find_label(text: str) -> str | None:
    """Return the label of the last text of the classification set in a prompt: earlier texts are of earlier turns."""
    # In a question the text is a paragraph of its own.
    return next((_labels()[part] for part in reversed(text.split("\n\n")) if part in _labels()), None)


def known_words(question: str, seed: int, place: int, mistakes: float, flips: float) -> list[str] | None:
    """Return the words of the answer to a question that ships: the right one, but for shares of `mistakes`, which
    depend on question and seed, and of `flips`, which depend on the `place` of the request. None: another question.
    """
    right = _read_pairs("questions.jsonl", "prompt", "answer").get(question)
    if right is None:
        return None
    draw = random.Random(f"{seed}:{question}").random
    is_right = (draw() >= mistakes) != (random.Random(f"{seed}:{place}").random() < flips)
    return right.split(" ") if is_right else [WORDS[int(draw() * len(WORDS))]]


def _labels() -> dict[str, str]:
    return _read_pairs("classification.jsonl", "text", "label")


@cache
def _read_pairs(name: str, key: str, value: str) -> dict[str, str]:
    items = map(msgspec.json.decode, files("harness").joinpath("data", name).read_bytes().splitlines())
    return {item[key]: item[value] for item in items}
