"""Read traces of OpenTelemetry's GenAI spans: one JSON document a session, each span a model call with its full text.

Spans have no edges: a call depends on the calls that had ended when it started. That is safe: no call is sent before
one that it may quote. (https://github.com/kubernetes-sigs/inference-perf, examples/otel)
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from harness.workload.agent_traces.conversation import (
    MAX_OPEN_STEPS,
    MAX_STEPS,
    ChatMessage,
    Conversation,
    MessagePart,
    RecordedCall,
    TraceAgent,
    TraceStep,
    count_notes,
    dependencies_by_time,
)
from harness.workload.agent_traces.trace_rows import (
    Id,
    Label,
    TokenCount,
    TracePiece,
    decode_part,
    parse_time,
    refuse,
)

_CHAT = ("chat", "text_completion", "generate_content")
_ERROR = 2  # status.code


class _SpanDocument(Struct, frozen=True):
    trace_id: Id
    spans: Annotated[list[msgspec.Raw], Meta(max_length=10 * MAX_STEPS)]


class _Status(Struct, frozen=True):
    code: int | str | None = None


class _Attributes(Struct, frozen=True):
    operation: Label | None = field(name="gen_ai.operation.name", default=None)
    model: Label | None = field(name="gen_ai.request.model", default=None)
    max_tokens: TokenCount | None = field(name="gen_ai.request.max_tokens", default=None)
    temperature: float | None = field(name="gen_ai.request.temperature", default=None)
    top_p: float | None = field(name="gen_ai.request.top_p", default=None)
    messages: str | list[Any] | None = field(name="gen_ai.input.messages", default=None)
    output_text: str | None = field(name="gen_ai.output.text", default=None)
    output_messages: str | list[Any] | None = field(name="gen_ai.output.messages", default=None)
    input_tokens: TokenCount | None = field(name="gen_ai.usage.input_tokens", default=None)
    output_tokens: TokenCount | None = field(name="gen_ai.usage.output_tokens", default=None)
    prompt_tokens: TokenCount | None = field(name="gen_ai.usage.prompt_tokens", default=None)
    completion_tokens: TokenCount | None = field(name="gen_ai.usage.completion_tokens", default=None)
    tools: str | list[Any] | None = field(name="gen_ai.tool.definitions", default=None)


class GenAiSpan(Struct, frozen=True, kw_only=True):
    """A span of a trace. Other keys are ignored."""

    start_time: Label
    end_time: Label
    attributes: _Attributes = _Attributes()
    status: _Status = _Status()


class _SpanFunction(Struct, frozen=True):
    name: Label
    arguments: str | dict[str, Any] = ""


class _SpanToolCall(Struct, frozen=True):
    function: _SpanFunction
    id: Label = ""


class _SpanMessagePart(Struct, frozen=True):
    """A part of a message in the newer form of the conventions."""

    type: Label
    content: Any = None
    text: Any = None
    id: Label | None = None
    name: Label = ""
    arguments: Any = None
    response: Any = None
    result: Any = None


class _SpanMessage(Struct, frozen=True):
    role: Label
    content: str | list[Any] | None = None
    parts: list[_SpanMessagePart] | None = None
    tool_calls: list[_SpanToolCall] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None


class _CallSpan(NamedTuple):
    span: GenAiSpan
    place: str
    raw: msgspec.Raw
    start: float
    end: float


_session_decoder = msgspec.json.Decoder(_SpanDocument)
_span_decoder = msgspec.json.Decoder(GenAiSpan)


def read_otel_session(pieces: Sequence[TracePiece]) -> Conversation:
    """Return the conversation of a document of spans. Raises HarnessError."""
    (piece,) = pieces
    session = decode_part(piece, _session_decoder)
    calls, dropped = _read_calls(piece, session)
    calls.sort(key=lambda call: call.start)
    if not calls:
        refuse(piece, "spans", "must have at least one model call with gen_ai.input.messages")
    if len(calls) > MAX_STEPS:
        refuse(piece, "spans", f"a session has at most {MAX_STEPS:,} model calls")
    needed = dependencies_by_time([(call.start, call.end) for call in calls])
    if needed is None:
        refuse(piece, "spans", f"more than {MAX_OPEN_STEPS:,} model calls are open at the same time")
    steps = tuple(_step(piece, calls, number, needed[number]) for number in range(len(calls)))
    return Conversation(
        id=session.trace_id,
        file=str(piece.path),
        format="otel",
        agents=(TraceAgent(id=session.trace_id),),
        steps=steps,
        notes=count_notes(
            ("overlap", sum(step.number - 1 not in step.depends_on for step in steps[1:])),
            *dropped.items(),
        ),
    )


def _read_calls(piece: TracePiece, session: _SpanDocument) -> tuple[list[_CallSpan], dict[str, int]]:
    """Return the model calls among the spans, and notes on what was dropped; those of tools and others are left out."""
    calls, without_messages, duplicates = list[_CallSpan](), 0, 0
    seen: set[bytes] = set()
    for number, raw in enumerate(session.spans):
        place = f"spans[{number}]"
        span = decode_part(piece, _span_decoder, raw, place)
        if span.attributes.messages is None or span.attributes.operation not in (None, *_CHAT):
            without_messages += span.attributes.messages is None and span.attributes.operation in _CHAT
            continue
        start = parse_time(piece, f"{place}.start_time", span.start_time)
        end = parse_time(piece, f"{place}.end_time", span.end_time)
        if end < start:
            refuse(piece, f"{place}.end_time", "must not be before start_time", span.end_time, raw)
        digest = hashlib.sha256(raw).digest()
        if digest in seen:  # with its times, and its id where it has one
            duplicates += 1
            continue
        seen.add(digest)
        calls.append(_CallSpan(span, place, raw, start, end))
    return calls, {"call_without_messages": without_messages, "duplicate": duplicates}


def _step(piece: TracePiece, calls: Sequence[_CallSpan], number: int, needed: tuple[int, ...]) -> TraceStep:
    call = calls[number]
    attributes = call.span.attributes
    messages = _read_list(piece, call, "gen_ai.input.messages", attributes.messages, list[_SpanMessage])
    if not messages:
        refuse(piece, f"{call.place}.attributes.gen_ai.input.messages", "must not be empty", None, call.raw)
    output = _output(piece, call)
    ready = max((calls[other].end for other in needed), default=calls[0].start)
    calls_of_tools = () if output is None else output.get("tool_calls", ())
    settings = {"temperature": attributes.temperature, "top_p": attributes.top_p}
    input_tokens, output_tokens = attributes.input_tokens, attributes.output_tokens
    return TraceStep(
        number=number,
        index=number,
        model=attributes.model,
        start_s=call.start - calls[0].start,
        duration_s=call.end - call.start,
        depends_on=needed,
        delay_s=max(0.0, call.start - ready),
        parts=tuple(MessagePart(message) for span_message in messages for message in _chat_messages(span_message)),
        prompt_tokens=attributes.prompt_tokens if input_tokens is None else input_tokens,
        output_tokens=attributes.completion_tokens if output_tokens is None else output_tokens,
        max_output_tokens=attributes.max_tokens,
        settings={key: value for key, value in settings.items() if value is not None},
        tools=_read_list(piece, call, "gen_ai.tool.definitions", attributes.tools, list[Any]) or None,
        output=output,
        calls=tuple(RecordedCall(**tool_call["function"]) for tool_call in calls_of_tools),
        outcome="error" if call.span.status.code in (_ERROR, "ERROR", "STATUS_CODE_ERROR") else "ok",
    )


def _output(piece: TracePiece, call: _CallSpan) -> ChatMessage | None:
    """Return the recorded answer; None if the span has none."""
    attributes = call.span.attributes
    messages = _read_list(piece, call, "gen_ai.output.messages", attributes.output_messages, list[_SpanMessage])
    if messages:
        return _chat_messages(messages[0])[0]
    return None if attributes.output_text is None else {"role": "assistant", "content": attributes.output_text}


def _read_list(piece: TracePiece, call: _CallSpan, name: str, value: str | list[Any] | None, kind: Any) -> Any:
    """Return the value of an attribute, which is a list or a list as JSON text; None without one."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind) if isinstance(value, str) else msgspec.convert(value, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
        refuse(piece, f"{call.place}.attributes.{name}", problem, value, call.raw)


def _chat_messages(message: _SpanMessage) -> list[ChatMessage]:
    """Return a message as the API of OpenAI has it: several where its parts have the results of several tools."""
    if message.parts is not None:
        return _messages_of_parts(message.role, message.parts)
    chat: ChatMessage = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        chat["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        chat["tool_calls"] = [
            _tool_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    return [chat]


def _messages_of_parts(role: str, parts: Sequence[_SpanMessagePart]) -> list[ChatMessage]:
    results: list[ChatMessage] = []
    texts, reasoning, calls = list[str](), list[str](), list[ChatMessage]()
    for part in parts:
        if part.type == "tool_call":
            calls.append(_tool_call(part.id or "", part.name, part.arguments))
        elif part.type == "tool_call_response":
            content = _as_text(part.result if part.response is None else part.response)
            results.append({"role": "tool", "tool_call_id": part.id or "", "content": content})
        else:
            text = _as_text(part.text if part.content is None else part.content)
            (reasoning if part.type == "reasoning" else texts).append(text)
    if results and not (texts or calls or reasoning):
        return results
    chat: ChatMessage = {"role": role, "content": "\n".join(texts) if texts else None}
    if reasoning:
        chat["reasoning_content"] = "\n".join(reasoning)
    if calls:
        chat["tool_calls"] = calls
    return [*results, chat]


def _tool_call(id: str, name: str, arguments: Any) -> ChatMessage:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": _as_text(arguments)}}


def _as_text(value: Any) -> str:
    """Return a value as text: JSON, unless it is a text already."""
    return "" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
