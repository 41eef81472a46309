"""The JSON of the OpenAI API: the body of a request, the tools of an agent, and what a response says.

Knows chat completions, completions and embeddings, streamed or not, as vLLM, llama.cpp and Lemonade send them. No
record has the content of a tool call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from harness.failures.unexpected_response import decode_json
from harness.load.sse import Event
from harness.redact import masked
from harness.rundir.records import TEMPLATE_TOKENS, BadField, ErrorKind, find_impossible_counts
from harness.scenario import Load
from harness.workload import Message

PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}


def body_of(load: Load, model: str, messages: Sequence[Message], max_tokens: int, more: dict[str, Any]) -> bytes:
    """The JSON text of a request. `more` is what a structured answer adds."""
    if load.endpoint == "embeddings":
        return msgspec.json.encode({"model": model, "input": as_text(messages)})
    body: dict[str, Any] = {
        "model": model,
        **({"messages": messages} if load.endpoint == "chat" else {"prompt": as_text(messages)}),
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
    """Join messages for an endpoint that takes a text, without the roles."""
    return "\n\n".join(message["content"] for message in messages)


_TOOLS = (
    ("read_file", "Read a file of the workspace, from a line on.", {"path": "string", "first_line": "integer"}),
    ("search", "Find the lines of the workspace that match a regular expression.", {"pattern": "string"}),
    ("run_command", "Run a shell command in the workspace and return its output.", {"command": "string"}),
    ("edit_file", "Replace a text that occurs once in a file.", {"path": "string", "old": "string", "new": "string"}),
    ("list_files", "List the files of a folder of the workspace.", {"path": "string"}),
    ("web_search", "Search the web and return titles and addresses.", {"query": "string"}),
    ("fetch_page", "Fetch a web page and return its text.", {"url": "string"}),
    ("delegate", "Give a part of the task to another agent and wait for its report.", {"task": "string"}),
)


class Call(msgspec.Struct):
    id: str = ""
    name: str = ""
    arguments: str = ""
    index: int = 0  # the server's number of the call


class ToolMessage(Message, total=False):
    """A message of a model that calls tools, or of a tool that was called."""

    tool_calls: list[dict[str, Any]]
    tool_call_id: str


class Tools(NamedTuple):
    definitions: list[dict[str, Any]]
    choice: str  # auto, required or none

    @classmethod
    def of(cls, number: int, choice: str) -> "Tools":
        """The first `number` tools; generated ones of the same kind if that is not enough."""
        definitions = []
        for place in range(number):
            name, description, parameters = _TOOLS[place % len(_TOOLS)]
            again = place // len(_TOOLS)
            definitions.append(_definition(f"{name}_{again + 1}" if again else name, description, parameters))
        return cls(definitions, choice)

    def fields(self) -> dict[str, Any]:
        return {"tools": self.definitions, "tool_choice": self.choice}

    def planned(self, index: int) -> Call:
        """The planned call after request `index`, for any answer of the server."""
        function = self.definitions[abs(index) % len(self.definitions)]["function"]
        parameters = function["parameters"]["properties"]
        values = {name: 1 if kind["type"] == "integer" else "work" for name, kind in parameters.items()}
        return Call(f"call_{abs(index)}", function["name"], msgspec.json.encode(values).decode())

    def is_valid(self, call: Call) -> bool:
        """Whether it names an existing tool, with a JSON object of the required fields."""
        known = {one["function"]["name"]: one["function"] for one in self.definitions}
        if call.name not in known:
            return False
        try:
            given = msgspec.json.decode(call.arguments or "{}")
        except (ValueError, RecursionError):
            return False
        return isinstance(given, dict) and set(known[call.name]["parameters"]["required"]) <= given.keys()


def _definition(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": key.replace("_", " ")} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def called(text: str, call: Call) -> ToolMessage:
    function = {"name": call.name, "arguments": call.arguments}
    one = {"id": call.id, "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [one]}


def returned(call: Call, result: str) -> ToolMessage:
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def gather(calls: list[Call], deltas: list[Any]) -> bool:
    """Add the `tool_calls` of a delta, or of a whole message, to the calls of an answer.

    Return False if one of them is not a call.
    """
    good = True
    for place, delta in enumerate(deltas):
        index = delta.get("index", place) if isinstance(delta, dict) else None
        if type(index) is not int:
            good = False
            continue
        function = delta.get("function")
        if not isinstance(function, dict):
            function = {}
        id, name = _text(delta.get("id")), _text(function.get("name"))
        call = next((one for one in reversed(calls) if one.index == index), None)
        # Some servers give all calls one index: another name with another id is another call.
        if call is None or (name and id and call.id and id != call.id):
            call = Call(index=index)
            calls.append(call)
        call.id, call.name = call.id or id, call.name or name
        call.arguments += _arguments(function.get("arguments"))
    return good


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(value: Any) -> str:
    if isinstance(value, dict):  # some servers send an object instead of its text
        with suppress(ValueError, RecursionError, OverflowError):
            return msgspec.json.encode(value).decode()
    return _text(value)


def valid_call(tools: Tools | None, calls: Sequence[Call]) -> Call | None:
    return next((call for call in calls if tools is not None and call.id and tools.is_valid(call)), None)


T = TypeVar("T")
Clock = Literal["kernel", "read"]

_MESSAGE_CHARS = 300
_MASKED_CHARS = 4096  # of a message that are checked for secrets before it is shortened
_FINISHES = {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error"}  # no secrets
_MAX_FINISH = 64  # characters of a finish reason
_CHANNELS: dict[str, type] = {  # of generated tokens, with their JSON types
    "content": str, "reasoning_content": str, "reasoning": str, "refusal": str, "tool_calls": list,
    "function_call": dict, "text": str,
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning")
_VISIBLE = ("content", "text", "refusal")
_COUNTS = {  # names in a record, and paths in a response
    "prompt_tokens": "usage.prompt_tokens",
    "output_tokens": "usage.completion_tokens",
    "cached_tokens": "usage.prompt_tokens_details.cached_tokens",
    "reasoning_tokens": "usage.completion_tokens_details.reasoning_tokens",
}
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}  # others are numbers


@dataclass(slots=True, eq=False)
class Answer:
    """Observations of one response. Times are seconds after the request was sent, on `clock`, and known when its record
    is made.

    It counts as failed until it was read.
    """

    error: ErrorKind | None = "client"
    message: str | None = "the answer was never read"
    status: int | None = None  # None: no response has started
    retry_after_s: float | None = None  # see `_retry_after_s`
    clock: Clock = "read"
    headers_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)
    textless: int | None = None  # events that announce a token without text, before the first chunk or after the last
    first_visible_s: float | None = None
    ended_s: float = 0.0
    coalesced: int = 0
    coalesced_late: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    replaced: dict[str, int] = field(default_factory=dict)  # counts that a later event corrected: the least possible
    bad: dict[str, BadField] = field(default_factory=dict)  # fields whose values are not possible, by their names
    vectors: int | None = None  # of embeddings
    reasoning_chunks: int = 0  # of the chunks, those with nothing but reasoning
    tool_chunks: int = 0  # and those with nothing but a tool call
    calls: list[Call] = field(default_factory=list)  # of tools
    finish: str | None = None
    texts: list[str] = field(default_factory=list)  # visible content: no record holds it, but the next turn needs it
    done: bool = False  # [DONE] was seen
    generated: bool = False  # at least one token of any channel

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def bad_fields(self) -> list[BadField]:
        return list(self.bad.values())

    def bound(self, asked_tokens: int | None, request_bytes: int) -> None:
        """Treat impossible counts as missing, and note them.

        `asked_tokens` is the max_tokens of the request; `request_bytes` is the size of its body.
        """
        prompt_max, output_min = request_bytes + TEMPLATE_TOKENS, int(self.generated and self.vectors is None)
        found = find_impossible_counts(self, asked_tokens, prompt_max=prompt_max, output_min=output_min)
        if self.replaced:  # 0 tokens are possible while a stream goes on
            earlier = Answer(**({name: getattr(self, name) for name in _COUNTS} | self.replaced))
            found |= find_impossible_counts(earlier, asked_tokens, prompt_max=prompt_max)
        for name, path in _COUNTS.items():
            if name in found:
                self.bad[found[name].field] = found[name]
            if path in self.bad:  # also if another event had a number
                setattr(self, name, None)

    def value(self, source: dict[str, Any], key: str, kind: type[T], name: str | None = None) -> T | None:
        """Return the value of a field. One of another JSON type is noted under `name` and counts as missing."""
        value = source.get(key)
        if value is None or type(value) is kind:  # a boolean is no number
            return value
        self.note(name or key, value)
        return None

    def note(self, name: str, value: Any) -> None:
        self.bad[name] = BadField(name, "type", _TYPES.get(type(value), "number"))

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error. Only the first one counts."""
        if self.error is None:
            self.error = kind
            message = masked(message[:_MASKED_CHARS])  # first: shortening could leave half of a secret
            self.message = message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 3] + "..."


def note_unframed(raw: bytes, answer: Answer) -> None:
    """Note an error object between the events: Lemonade before 11.6 sends its errors without `data:`."""
    if not raw.startswith(b"{"):
        return
    try:
        body = decode_lenient(raw)
    except ValueError:
        return
    words = error_words(body) if isinstance(body, dict) and not first_choice(body, answer) else None
    if words:
        answer.fail("stream_error", f"{words} (sent outside of an event)")


def note_event(event: Event, number: int, answer: Answer) -> Literal["text", "no text"] | None:
    """Note one event. Return how it carries generated tokens; None: it has none."""
    if event.type == "error":
        answer.fail("stream_error", _words_of(event.data) or "an error event without a message")
        return None
    try:
        body = decode_lenient(event.data)
    except ValueError as error:
        answer.fail("malformed", f"event {number} is not JSON: {error}")
        return None
    if not isinstance(body, dict):
        answer.fail("malformed", f"event {number} is not a JSON object")
        return None
    problem = _error_in(body)
    if problem is not None:
        answer.fail("stream_error", problem)
        return None
    _usage(body, answer)
    choice = first_choice(body, answer)
    if choice is None:
        return None
    finish = _finish(choice, answer)
    delta = answer.value(choice, "delta", dict)
    part = choice if delta is None else delta  # completions have `text` next to the finish reason
    channels = _channels(part, answer)
    if not channels:
        return "no text" if _is_token(finish, part) else None
    if not _take_part(part, channels, answer):
        reasoning = any(channel in channels for channel in _REASONING)
        answer.reasoning_chunks += reasoning
        answer.tool_chunks += not reasoning
    return "text"


def _channels(part: dict[str, Any], answer: Answer) -> list[str]:
    """Return the non-empty channels of a delta, or of a whole message."""
    channels = []
    for key, value in part.items():
        kind = _CHANNELS.get(key) if value else None
        if kind is not None and answer.value(part, key, kind) is not None:
            channels.append(key)
    return channels


def _take_part(part: dict[str, Any], channels: list[str], answer: Answer) -> bool:
    """Keep the text and the tool calls. Return whether there is visible text."""
    answer.generated = True
    visible = [channel for channel in _VISIBLE if channel in channels]
    answer.texts += [part[channel] for channel in visible]
    if "tool_calls" in channels and not gather(answer.calls, part["tool_calls"]):
        answer.note("tool_calls", part["tool_calls"])
    return bool(visible)


def _is_token(finish: str | None, part: dict[str, Any]) -> bool:
    """Whether an event without text announces a token: one whose text is held back or hidden, or the end token."""
    if finish:
        return finish != "length"
    return "role" not in part and any(part.get(channel) == "" for channel in _CHANNELS)


def note_whole(raw: bytes, headers: Mapping[str, str], answer: Answer, *, embeddings: bool) -> None:
    """Read a response in one piece. The time of its first token is not known."""
    try:
        body = decode_lenient(raw)
    except ValueError:
        answer.fail("not_api", f"status {answer.status} with {described(headers, raw)} in place of an API answer")
        return
    problem = _error_in(body) if isinstance(body, dict) else None
    if problem is not None:
        answer.fail("stream_error", problem)
        return
    if embeddings:
        _vectors(body, answer)
        return
    choice = first_choice(body, answer) if isinstance(body, dict) else None
    if choice is None:
        answer.fail("not_api", f"status {answer.status} with JSON that has no choices")
        return
    _usage(body, answer)
    answer.done = True
    _finish(choice, answer)
    message = answer.value(choice, "message", dict)
    part = choice if message is None else message
    if channels := _channels(part, answer):
        _take_part(part, channels, answer)
    else:
        answer.fail("empty", f"a complete answer without any generated text; {usage_words(answer)}")


def _vectors(body: Any, answer: Answer) -> None:
    """Read the vectors of an embeddings response. It has no generated tokens, whatever its usage has."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        answer.fail("not_api", f"status {answer.status} with JSON that has no data")
        return
    _usage(body, answer)
    answer.done, answer.output_tokens, answer.reasoning_tokens = True, None, None
    vectors = [one.get("embedding") if isinstance(one, dict) else None for one in data]
    answer.vectors = len(vectors)
    empty = sum(not (isinstance(vector, list | str) and vector) for vector in vectors)  # a string: base64
    answer.generated = bool(vectors) and not empty
    if not answer.generated:
        what = f"{empty} of {len(vectors)} vectors are empty" if vectors else "no vector"
        answer.fail("empty", f"a complete answer with nothing in it: {what}")


def decode_lenient(raw: bytes) -> Any:
    """The JSON in `raw`. Raises ValueError.

    What some servers send although it is no JSON is taken as Python takes it: NaN, half a surrogate pair, broken UTF-8.
    """
    try:
        return decode_json(raw)
    except ValueError:
        with suppress(ValueError, RecursionError):
            loaded = json.loads(raw.decode("utf-8", "replace"))
            # Once more, for strings that can be encoded again.
            return json.loads(json.dumps(loaded, ensure_ascii=False).encode("utf-8", "replace"))
        raise


def _finish(choice: dict[str, Any], answer: Answer) -> str | None:
    finish = answer.value(choice, "finish_reason", str)
    if not finish:
        return None
    answer.finish = finish if finish in _FINISHES else masked(finish, "sure")[:_MAX_FINISH]
    if finish in ("abort", "error"):
        answer.fail("stream_error", f"the server ended the answer with finish reason {finish!r}")
    return finish


def error_words(body: dict[str, Any]) -> str | None:
    """Return the message of an error body, wherever servers put it. Never a mapping, which may hold model output."""
    words = _error_in(body) or body.get("detail") or body.get("message")
    return shown(words) if words and not isinstance(words, dict) else None


def _error_in(body: dict[str, Any]) -> str | None:
    """Message of an error object: {"error": {...}} or {"error": "..."}, or vLLM's older {"object": "error", ...}."""
    error = body.get("error") or (body if body.get("object") == "error" else None)
    if not error:
        return None
    if not isinstance(error, dict):
        return shown(error)
    kinds = [shown(error[key]) for key in ("type", "code") if error.get(key)]
    return f"{' '.join(kinds) or 'error'}: {shown(error.get('message') or 'no message')}"


def shown(value: Any) -> str:
    try:
        return str(value)
    except (RecursionError, ValueError):  # nested too deeply; a number of more than 4,300 digits
        return _TYPES.get(type(value), "number")


def _words_of(raw: bytes) -> str | None:
    try:
        body = decode_lenient(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")
    return error_words(body) if isinstance(body, dict) else shown(body or "")


def first_choice(body: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
    choices = answer.value(body, "choices", list)
    if not choices or isinstance(choices[0], dict):
        return choices[0] if choices else None
    answer.note("choices[0]", choices[0])
    return None


def _usage(body: dict[str, Any], answer: Answer) -> None:
    """Note the token counts. Some servers spread them over several events, so earlier ones stay."""
    usage = answer.value(body, "usage", dict)
    if not usage:
        return
    for name, path in _COUNTS.items():
        _, *details, key = path.split(".")
        counts = answer.value(usage, details[0], dict, f"usage.{details[0]}") or {} if details else usage
        value = answer.value(counts, key, int, path)
        if value is not None:
            earlier, worst = getattr(answer, name), answer.replaced.get(name, 0)
            if earlier is not None and not 0 <= earlier <= value and worst >= 0 and not 0 <= earlier <= worst:
                answer.replaced[name] = earlier  # counts grow with the answer
            setattr(answer, name, value)


def usage_words(answer: Answer) -> str:
    return "no usage reported" if answer.output_tokens is None else f"usage reports {answer.output_tokens} tokens"


def described(headers: Mapping[str, str], raw: bytes) -> str:
    if not raw:
        return "an empty body"
    if encoded := coded(headers):
        return encoded
    kind = headers.get("content-type", "no content type").split(";")[0]
    page = masked(raw[:_MASKED_CHARS].decode("utf-8", "replace"))
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    return f"{kind} ({text[:120]!r})"


def coded(headers: Mapping[str, str]) -> str | None:
    """A description of a body that cannot be read because it is compressed; None for others."""
    coding = headers.get("content-encoding", "identity").lower()
    kind = headers.get("content-type", "a body").split(";")[0]
    return None if coding == "identity" else f"{kind} in {coding} (which was not asked for)"
