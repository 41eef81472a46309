"""The JSON of the OpenAI API: the body of a request, the tools of an agent, and the contents of a response.

Supports chat completions, completions and embeddings, streamed or not, as vLLM, llama.cpp and Lemonade send them. No
record has the content of a tool call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from harness.base.redact import masked
from harness.failures.unexpected_response import (
    JSON_TYPES,
    decode_json,
    describe_unknown,
    error_event_words,
    find_error,
    has_empty_error,
    is_error_name,
    is_error_text,
    is_failed_finish,
    is_harmless_name,
    to_text,
)
from harness.load.anthropic_api import encode_messages
from harness.load.channels import CHANNELS, GeneratedOutput, is_blank, read_output
from harness.load.sse import CLASSIFIED_CHARS, Event
from harness.records.arrivals import split_arrivals
from harness.records.records import (
    KNOWN_FINISHES,
    TEMPLATE_TOKENS,
    BadField,
    ErrorKind,
    OddText,
    Request,
    find_impossible_counts,
)
from harness.scenario import Load
from harness.workload import Message

PATHS = {
    "chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings", "messages": "/messages",
}  # fmt: skip


def encode_request(load: Load, model: str, messages: Sequence[Message], max_tokens: int, more: dict[str, Any]) -> bytes:
    """Return the JSON text of a request. `more` has the fields of a structured answer and of tools."""
    if load.endpoint == "embeddings":
        return msgspec.json.encode({"model": model, "input": join_messages(messages)})
    body: dict[str, Any] = {
        "model": model,
        **({"prompt": join_messages(messages)} if load.endpoint == "completions" else {"messages": messages}),
        "max_tokens": max_tokens,
        "temperature": 0,  # the same choices on both sides of a comparison
        "stream": load.stream,
    }
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    if load.output == "fixed":
        body["ignore_eos"] = True
    body |= more | load.extra_body
    for name in load.omit:
        body.pop(name, None)
    return msgspec.json.encode(encode_messages(body) if load.endpoint == "messages" else body)


def join_messages(messages: Sequence[Message]) -> str:
    """Join the contents of messages, for an endpoint that takes a text."""
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
    """A tool call of an answer. `arguments` is JSON; `index` is the server's number of the call."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    index: int = 0


class ToolMessage(Message, total=False):
    """A message of a model that calls tools, or of a tool that was called."""

    tool_calls: list[dict[str, Any]]
    tool_call_id: str


class Tools(NamedTuple):
    definitions: list[dict[str, Any]]
    choice: str  # auto, required or none

    @classmethod
    def first(cls, count: int, choice: str) -> "Tools":
        """Return the first `count` tools. If that is more than there are, numbered copies follow."""
        definitions = []
        for index in range(count):
            name, description, parameters = _TOOLS[index % len(_TOOLS)]
            copy = index // len(_TOOLS)
            definitions.append(_tool_definition(f"{name}_{copy + 1}" if copy else name, description, parameters))
        return cls(definitions, choice)

    def fields(self) -> dict[str, Any]:
        return {"tools": self.definitions, "tool_choice": self.choice}

    def planned_call(self, index: int) -> Call:
        """Return the call that the plan has after request `index`, whatever the server answered."""
        function = self.definitions[abs(index) % len(self.definitions)]["function"]
        parameters = function["parameters"]["properties"]
        values = {name: 1 if kind["type"] == "integer" else "work" for name, kind in parameters.items()}
        return Call(f"call_{abs(index)}", function["name"], msgspec.json.encode(values).decode())

    def is_valid(self, call: Call) -> bool:
        """Whether the call names an existing tool, and its arguments are a JSON object with the required fields."""
        function = next((item for item in map(_function_of, self.definitions) if item.get("name") == call.name), None)
        if function is None or not call.name:
            return False
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except (ValueError, RecursionError):
            return False
        parameters = function.get("parameters")
        required = parameters.get("required") if isinstance(parameters, dict) else None
        needed = required if isinstance(required, list) else []
        return isinstance(arguments, dict) and all(isinstance(key, str) and key in arguments for key in needed)

    def first_valid(self, calls: Sequence[Call]) -> Call | None:
        """Return the first call that can be continued: a valid one with an id."""
        return next((call for call in calls if call.id and self.is_valid(call)), None)


def _function_of(definition: Any) -> dict[str, Any]:
    """Return the function of a tool; that of a recorded trace may have any form."""
    function = definition.get("function") if isinstance(definition, dict) else None
    return function if isinstance(function, dict) else {}


def _tool_definition(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": key.replace("_", " ")} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def tool_call_message(text: str, call: Call) -> ToolMessage:
    function = {"name": call.name, "arguments": call.arguments}
    tool_call = {"id": call.id, "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [tool_call]}


def tool_result_message(call: Call, result: str) -> ToolMessage:
    return {"role": "tool", "tool_call_id": call.id, "content": result}


_MAX_CALLS = 128  # of one response
_MAX_ARGUMENTS = 262_144  # characters of the arguments of one call


def add_tool_calls(calls: list[Call], deltas: list[Any]) -> bool:
    """Add the `tool_calls` of a delta, or of a whole message, to `calls`. Return whether all of them are calls.

    What exceeds _MAX_CALLS or _MAX_ARGUMENTS is left out, so the time is linear in the length of the response.
    """
    all_are_calls = True
    for place, delta in enumerate(deltas):
        index = delta.get("index", place) if isinstance(delta, dict) else None
        if type(index) is not int:
            all_are_calls = False
            continue
        function = delta.get("function")
        if not isinstance(function, dict):
            function = {}
        id, name = _text_or_empty(delta.get("id")), _text_or_empty(function.get("name"))
        call = next((call for call in reversed(calls) if call.index == index), None)
        # Some servers give all calls the same index: another id with a name starts another call.
        if call is None or (name and id and call.id and id != call.id):
            if len(calls) == _MAX_CALLS:
                return False
            call = Call(index=index)
            calls.append(call)
        call.id, call.name = call.id or id, call.name or name
        arguments = function.get("arguments")
        if isinstance(arguments, dict):  # some servers send an object instead of its text
            with suppress(ValueError, RecursionError, OverflowError):
                arguments = msgspec.json.encode(arguments).decode()
        if len(call.arguments) < _MAX_ARGUMENTS:
            call.arguments += _text_or_empty(arguments)
    return all_are_calls


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


class UnknownText(msgspec.Struct):
    """Text in a field that is no known channel, of events without other text."""

    first: str
    events: int = 0
    varies: bool = False  # it is generated: a state has the same text again and again


T = TypeVar("T")
Clock = Literal["kernel", "read"]

_MESSAGE_CHARS = 300
_MASKED_CHARS = 4096  # of a text of a server, masked before it is shortened
_MAX_FINISH_CHARS = 64
_MAX_MODEL_CHARS = 300
_NAME_JOINT = " then "
_MAX_UNKNOWN = 8  # fields of an answer that are no known channel and have text
_TOKEN_COUNTS = {  # names in a record, and paths in a response
    "prompt_tokens": "usage.prompt_tokens",
    "output_tokens": "usage.completion_tokens",
    "cached_tokens": "usage.prompt_tokens_details.cached_tokens",
    "reasoning_tokens": "usage.completion_tokens_details.reasoning_tokens",
}
_NOT_JSON = object()


@dataclass(slots=True, eq=False)
class Answer:
    """Observations of one response. It counts as failed until it was read.

    Times are in seconds after the request was sent, on `clock`; they are added when the record is made.
    """

    error: ErrorKind | None = "client"
    message: str | None = "the answer was never read"
    status: int | None = None  # None: no response has started
    retry_after_s: float | None = None  # the wait that a server which rejects requests asks for
    clock: Clock = "read"
    headers_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)
    textless: int | None = None  # events with a token but no text, before the first chunk or after the last
    first_visible_s: float | None = None
    first_text_s: float | None = None
    ended_s: float = 0.0
    coalesced: int = 0
    coalesced_late: int | None = None
    chunk_chars: list[int] = field(default_factory=list)  # characters of each decoded chunk
    text_chars: int | None = None
    first_arrival_chars: int | None = None
    first_words: int | None = None
    via: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    bad: dict[str, BadField] = field(default_factory=dict)  # impossible fields, by name
    vectors: int | None = None  # number of embeddings
    reasoning_chunks: int = 0  # chunks with reasoning only
    tool_chunks: int = 0  # chunks with a tool call only
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    refused: bool = False
    odd_text: OddText | None = None
    has_sound: bool = False  # there is output without text
    texts: list[str] = field(default_factory=list)  # visible content, for the next turn; in no record
    reasoning_texts: list[str] = field(default_factory=list)  # the start of the reasoning; in no record
    done: bool = False  # [DONE] was seen, or the response is complete in one piece
    generated: bool = False  # there was at least one token, in any channel
    unread: int | None = None  # events whose text could not be read; None: none
    unknown_texts: dict[str, "UnknownText"] = field(default_factory=dict)  # by the name of the field
    # The first event of no known form, or with an empty error; an error, unless a finish reason comes.
    unknown_event: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def drop_impossible_counts(self, asked_tokens: int | None, request_bytes: int) -> None:
        """Treat impossible token counts as missing, and note them.

        `asked_tokens` is the max_tokens of the request; `request_bytes` is the size of its body.
        """
        prompt_max, output_min = request_bytes + TEMPLATE_TOKENS, int(self.generated and self.vectors is None)
        counts = (self.prompt_tokens, self.output_tokens, self.cached_tokens, self.reasoning_tokens)
        bad = find_impossible_counts(*counts, asked_tokens, prompt_max=prompt_max, output_min=output_min)
        for name, path in _TOKEN_COUNTS.items():
            if name in bad:
                self.bad[bad[name].field] = bad[name]
            if path in self.bad:  # also if another event had a number
                setattr(self, name, None)

    def note_first_arrival(self, chars: Sequence[int]) -> tuple[int, int]:
        """Note how much of the text came first, by the characters of each chunk. Return the chunks of the first
        arrival, and the number of arrivals.
        """
        starts = split_arrivals(self.chunks_s)
        first = starts[1] if len(starts) > 1 else len(chars)
        self.text_chars, self.first_arrival_chars = sum(chars), sum(chars[:first])
        return first, len(starts)

    def recorded(self) -> dict[str, Any]:
        """Return the fields that a record has of it."""
        return {name: getattr(self, name) for name in _RECORDED}

    def get_field(self, source: dict[str, Any], key: str, kind: type[T], name: str | None = None) -> T | None:
        """Return the value of a field. A value of another JSON type is noted under `name` and counts as missing."""
        value = source.get(key)
        if value is None or type(value) is kind:  # `type`: a boolean is not a number
            return value
        self.note_wrong_type(name or key, value)
        return None

    def note_wrong_type(self, name: str, value: Any) -> None:
        self.bad[name] = BadField(name, "type", JSON_TYPES.get(type(value), "number"))

    def note_unknown(self, event_type: str, description: str | None) -> None:
        """Note an event of no known form; None for one that carries nothing."""
        if description is not None and self.unknown_event is None and not is_harmless_name(event_type):
            self.unknown_event = description if event_type == "message" else f"{event_type!r}, {description}"

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error. Only the first one counts."""
        if self.error is None:
            self.error = kind
            message = masked(message[:_MASKED_CHARS])  # before shortening, which could leave half of a secret
            self.message = message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 3] + "..."


_RECORDED = [name for name in Request.__struct_fields__ if name in Answer.__slots__ and name != "status"]


def note_stray_text(raw: bytes, answer: Answer) -> None:
    """Note an error outside of events: Lemonade before 11.6 sends its errors without `data:`, Python its tracebacks."""
    if not raw:
        return
    lines = [line for line in raw.splitlines() if line.startswith(b"{")]
    texts = [text for line in (*lines, raw) if (text := _error_text(line)) is not None]
    if texts:
        answer.fail("stream_error", f"{texts[0]} (sent outside of an event)")
    else:
        answer.unknown_event = answer.unknown_event or "text outside of events"


def note_error(event: Event, answer: Answer) -> bool:
    """Note the error that an event reports, whatever its form. Return whether it reports one."""
    if is_error_name(event.type):
        body = _decoded(event.data)
        text = (error_event_words(body) if isinstance(body, dict) else None) or _plain_text(body, event.data)
        answer.fail("stream_error", text or "an error event without a message")
        return True
    words = _error_text(event.data)
    if words is not None:
        answer.fail("stream_error", words)
    return words is not None


def _error_text(raw: bytes) -> str | None:
    """Return the words of the error that an event's data, or a text outside of events, reports; None for no error."""
    body = _decoded(raw)
    if body is not _NOT_JSON:
        return find_error(body)
    text = raw[:_MASKED_CHARS].decode("utf-8", "replace").strip()
    return text if is_error_text(text) else None


def _plain_text(body: Any, raw: bytes) -> str:
    if body is _NOT_JSON:
        return raw[:_MASKED_CHARS].decode("utf-8", "replace").strip()
    return "" if isinstance(body, dict) else to_text(body or "")


def _decoded(raw: bytes) -> Any:
    try:
        return decode_lenient(raw)
    except ValueError:
        return _NOT_JSON


def note_event(event: Event, number: int, answer: Answer) -> Literal["text", "blank", "no text"] | None:
    """Note one event. Return whether its token has text, and any that is not blank; None: it has no token."""
    if not event.data.strip() or (event.type != "message" and is_error_name(event.type)):
        note_error(event, answer)
        return None
    try:
        body = decode_lenient(event.data)
    except ValueError as error:
        if not note_error(event, answer):
            _note_text_event(event, f"event {number} is not JSON: {error}", answer)
        return None
    error_text = find_error(body)
    if error_text is not None:
        answer.fail("stream_error", error_text)
        return None
    if not isinstance(body, dict) or "choices" not in body:
        answer.note_unknown(event.type, describe_unknown(body))
    if b'"error"' in event.data and isinstance(body, dict) and has_empty_error(body):
        answer.note_unknown(event.type, "its error is empty")
    if not isinstance(body, dict):
        return None
    _note_usage(body, answer)
    choice = _first_choice(body, answer)
    if choice is None:
        _note_stray_output(body, answer)
        return None
    finish = _note_finish(choice, answer)
    output, part = _output_of(choice, answer)
    if output.has_any:
        note_model(body, answer)
        _note_length(output, answer)
        _add_output(output, answer)
        if not output.is_visible:
            answer.reasoning_chunks += bool(output.reasoning)
            answer.tool_chunks += not output.reasoning
        return "blank" if output.is_blank else "text"
    _note_unread(output, answer)
    if output.unread:
        return None
    # Without text there is a token if its text is held back or hidden, or if it is the end token.
    held_back = "role" not in part and output.empty
    return "no text" if (finish != "length" if finish else held_back) else None


def _output_of(choice: dict[str, Any], answer: Answer) -> tuple[GeneratedOutput, dict[str, Any]]:
    """Return the output of a choice, and the part that has it: the delta, the message, or the choice of completions."""
    parts = [part for key in ("delta", "message") if (part := answer.get_field(choice, key, dict)) is not None]
    part = parts[0] if parts else choice
    output = read_output(part)
    for other in (*parts[1:], choice) if parts and not output.has_any else ():
        if (second := read_output(other)).has_any:
            return second, other
    for key in ("delta", "message"):
        if choice.get(key) and not isinstance(choice[key], dict):
            output.unread[key] = choice[key]
    return output, part


def _note_unread(output: GeneratedOutput, answer: Answer) -> None:
    """Note what an event without readable text has: channels of no known form, and fields that may be channels."""
    for name, value in output.unread.items():
        answer.note_wrong_type(name, value)
    if output.unread:
        answer.unread = (answer.unread or 0) + 1
    for name, text in output.unknown.items():
        name = masked(name[:_MASKED_CHARS], "known")[:_MAX_FINISH_CHARS]
        if name in answer.unknown_texts or len(answer.unknown_texts) < _MAX_UNKNOWN:
            entry = answer.unknown_texts.setdefault(name, UnknownText(text))
            entry.events += 1
            entry.varies |= entry.first != text


def _note_stray_output(body: dict[str, Any], answer: Answer) -> None:
    """Note text of an event without choices, in a field that would be a channel in a delta."""
    names = [name for name in (*CHANNELS, "delta", "token", "response") if body.get(name)]
    for name in names:
        output = read_output({name: body[name]} if name in CHANNELS else {"text": body[name]})
        text = output.visible + output.reasoning
        if not is_blank(text):
            _note_unread(GeneratedOutput(unknown={name: text}), answer)


def finish_unread(answer: Answer) -> None:
    """Count the events whose text is in fields that are no known channel. Call it when the answer is complete."""
    for name, text in answer.unknown_texts.items():
        if text.varies or not answer.generated:
            answer.unread = (answer.unread or 0) + text.events
            answer.bad[name] = BadField(name, "unknown", "text")


def _note_text_event(event: Event, problem: str, answer: Answer) -> None:
    """Note an event that is neither JSON nor an error."""
    if event.type != "message":
        answer.note_unknown(event.type, "its data is not JSON")
    elif not is_harmless_name(event.data[:_MASKED_CHARS].decode("utf-8", "replace")):
        answer.fail("malformed", problem)


def _add_output(output: GeneratedOutput, answer: Answer) -> None:
    """Keep the visible text and the tool calls."""
    answer.generated = True
    answer.refused |= output.refused
    answer.has_sound |= output.other
    if output.is_visible:
        answer.texts.append(output.visible)
    elif output.reasoning and not answer.texts and len(answer.reasoning_texts) < CLASSIFIED_CHARS:
        answer.reasoning_texts.append(output.reasoning)
    if output.calls and not add_tool_calls(answer.calls, output.calls):
        answer.note_wrong_type("tool_calls", output.calls)


def _note_length(output: GeneratedOutput, answer: Answer) -> None:
    """Note how much text a chunk has, with the names and arguments of calls."""
    functions = [call.get("function") for call in output.calls if isinstance(call, dict)]
    dicts = [function for function in functions if isinstance(function, dict)]
    calls = [_text_or_empty(function.get(key)) for function in dicts for key in ("name", "arguments")]
    texts = [output.visible, output.reasoning, *calls]
    if not answer.chunk_chars:
        answer.first_words = sum(map(count_words, texts))
    answer.chunk_chars.append(sum(map(len, texts)))


def count_words(text: str) -> int:
    """Return the number of words. Signs of scripts without spaces, and emoji, count as words in addition."""
    return len(text.split()) + sum(char >= "\u2e80" for char in text)


def note_whole_response(raw: bytes, headers: Mapping[str, str], answer: Answer, *, embeddings: bool) -> None:
    """Note a response that is not a stream. The time of its first token is not known."""
    try:
        body = decode_lenient(raw)
    except ValueError:
        answer.fail("not_api", f"status {answer.status} with {describe_body(headers, raw)} in place of an API answer")
        return
    error_text = find_error(body)
    if error_text is not None:
        answer.fail("stream_error", error_text)
        return
    if embeddings:
        _note_vectors(body, answer)
        return
    choice = _first_choice(body, answer) if isinstance(body, dict) else None
    if choice is None:
        answer.fail("not_api", f"status {answer.status} with JSON that has no choices")
        return
    _note_usage(body, answer)
    note_model(body, answer)
    answer.done = True
    if _note_finish(choice, answer) is None and has_empty_error(body):
        answer.fail("stream_error", "no finish reason, and its error is empty")
    output, _ = _output_of(choice, answer)
    if output.has_any:
        _add_output(output, answer)
    else:
        _note_unread(output, answer)
        finish_unread(answer)
        answer.fail("empty", f"a complete answer without any generated text; {unread_text(answer)}")


def _note_vectors(body: Any, answer: Answer) -> None:
    """Note the vectors of an embeddings response. Its output tokens in `usage` are ignored: it generates none."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        answer.fail("not_api", f"status {answer.status} with JSON that has no data")
        return
    _note_usage(body, answer)
    note_model(body, answer)
    answer.done, answer.output_tokens, answer.reasoning_tokens = True, None, None
    vectors = [item.get("embedding") if isinstance(item, dict) else None for item in data]
    answer.vectors = len(vectors)
    empty = sum(not (isinstance(vector, list | str) and vector) for vector in vectors)  # a string: base64
    answer.generated = bool(vectors) and not empty
    if not answer.generated:
        problem = f"{empty} of {len(vectors)} vectors are empty" if vectors else "no vector"
        answer.fail("empty", f"a complete answer with nothing in it: {problem}")


def decode_lenient(raw: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError.

    Accepts what some servers send although it is not JSON: NaN, half a surrogate pair, broken UTF-8.
    """
    try:
        return decode_json(raw)
    except ValueError:
        with suppress(ValueError, RecursionError):
            value = json.loads(raw.decode("utf-8", "replace"))
            # Replace what cannot be encoded again, such as half a surrogate pair.
            return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        raise


def _note_finish(choice: dict[str, Any], answer: Answer) -> str | None:
    """Note the finish reason, and return it as the server sent it."""
    reason = choice.get("finish_reason")
    if isinstance(reason, dict):  # of some versions of SGLang
        choice = {"finish_reason": reason.get("type")}
    finish = answer.get_field(choice, "finish_reason", str)
    if not finish:
        return None
    is_known = finish in KNOWN_FINISHES
    answer.finish = finish if is_known else masked(finish[:_MASKED_CHARS], "known")[:_MAX_FINISH_CHARS]
    if is_failed_finish(answer.finish):
        answer.fail("stream_error", f"the server ended the answer with finish reason {answer.finish!r}")
    return finish


def _first_choice(body: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
    choices = answer.get_field(body, "choices", list)
    if choices and isinstance(choices[0], dict):
        return choices[0]
    if choices:
        answer.note_wrong_type("choices[0]", choices[0])
    if choices or body.get("choices"):
        answer.unread = (answer.unread or 0) + 1
    return None


def _note_usage(body: dict[str, Any], answer: Answer) -> None:
    """Note the token counts. Some servers spread them over several events, so counts of earlier events remain."""
    usage = answer.get_field(body, "usage", dict)
    if not usage:
        return
    for name, path in _TOKEN_COUNTS.items():
        _, *details, key = path.split(".")
        counts = answer.get_field(usage, details[0], dict, f"usage.{details[0]}") or {} if details else usage
        value = answer.get_field(counts, key, int, path)
        if value is not None:
            setattr(answer, name, value)


def note_model(body: dict[str, Any], answer: Answer) -> None:
    """Note the model of a text, and the fingerprint of what computed it. Other events of routers name the model that
    was asked for, and none.
    """
    answer.model = _joined(answer.model, body.get("model"))
    answer.fingerprint = _joined(answer.fingerprint, body.get("system_fingerprint"))


def _joined(before: str | None, value: Any) -> str | None:
    """Return the name so far, with the first other one that follows it."""
    if not value or not isinstance(value, str):
        return before
    name = _recorded_name(value[:_MASKED_CHARS])
    if before is None or before == name:
        return name
    return before if _NAME_JOINT in before else before + _NAME_JOINT + name


@lru_cache(100)
def _recorded_name(name: str) -> str:
    return masked(name, "known")[:_MAX_MODEL_CHARS]


def header_text(value: str) -> str:
    """Return a header for the record: printable, masked and short."""
    text = "".join(char for char in value[:_MASKED_CHARS] if " " <= char <= "~")
    return masked(text, "known")[:_MAX_FINISH_CHARS]


def usage_text(answer: Answer) -> str:
    return "no usage reported" if answer.output_tokens is None else f"usage reports {answer.output_tokens} tokens"


def unread_text(answer: Answer) -> str:
    """Describe what an answer has instead of text."""
    names = [bad.field for bad in answer.bad.values() if bad.code == "unknown" or bad.field in CHANNELS]
    return "; ".join([usage_text(answer), *([f"{', '.join(names)} has text of no known form"] if names else [])])


def describe_body(headers: Mapping[str, str], raw: bytes) -> str:
    if not raw:
        return "an empty body"
    if encoding := describe_encoding(headers):
        return encoding
    kind = headers.get("content-type", "no content type").split(";")[0]
    page = masked(raw[:_MASKED_CHARS].decode("utf-8", "replace"))
    text = masked(" ".join(re.sub(r"<[^<>]*>", " ", page).split()), "known")  # again: without the tags inside it
    return f"{kind} ({text[:120]!r})"


def describe_encoding(headers: Mapping[str, str]) -> str | None:
    """Describe a body that cannot be read because it is compressed; None for any other body."""
    coding = headers.get("content-encoding", "identity").lower()
    kind = headers.get("content-type", "a body").split(";")[0]
    return None if coding == "identity" else f"{kind} in {coding} (which was not asked for)"
