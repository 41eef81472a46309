"""Read edge-agentic traces of MLPerf Endpoints: JSON Lines, one message a row, with the full text.

Each row of a user or a tool is one request: its prompt is the system prompt, all recorded rows before it, and the row.
(https://github.com/mlcommons/endpoints)
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from harness.workload.agent_traces.conversation import (
    MAX_STEPS,
    ChatMessage,
    Conversation,
    MessagePart,
    RecordedCall,
    TraceAgent,
    TraceStep,
)
from harness.workload.agent_traces.trace_rows import Label, Seconds, TokenCount, TracePiece, decode_part, refuse

_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stream")


class _EdgeFunction(Struct, frozen=True):
    name: Label
    arguments: str | dict[str, Any]  # JSON


class _EdgeCall(Struct, frozen=True):
    id: Label
    function: _EdgeFunction
    type: Literal["function"] = "function"


class _EdgeResult(Struct, frozen=True):
    tool_call_id: Label
    content: str


class EdgeRow(Struct, frozen=True, kw_only=True):
    """A row of an edge-agentic trace. Other keys are ignored."""

    conversation_id: Annotated[str, Meta(pattern="^[ -~]{1,500}$")]
    turn: Annotated[int, Meta(ge=1)]
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    system: str | None = None
    tools: list[Any] | None = None
    tool_calls: list[_EdgeCall] | None = None
    tool_results: list[_EdgeResult] | None = None
    reasoning_content: str | None = None
    delay_seconds: Seconds | None = None
    model: Label | None = None
    max_new_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(EdgeRow)


class _EdgeRowId(Struct, frozen=True):
    conversation_id: str


_id_decoder = msgspec.json.Decoder(_EdgeRowId)


def edge_conversation_id(piece: TracePiece) -> str:
    """Return the conversation of a row."""
    return decode_part(piece, _id_decoder).conversation_id


def read_edge_conversation(pieces: Sequence[TracePiece]) -> Conversation:
    """Return the conversation of these rows, one row a piece. Raises HarnessError."""
    steps: list[TraceStep] = []
    answer: tuple[ChatMessage, ...] = ()  # to the last step
    tools: list[Any] | None = None
    previous: EdgeRow | None = None
    row = None
    for piece in pieces:
        row = decode_part(piece, _decoder)
        _check_order(piece, row, previous)
        if row.role == "assistant":
            answer = (_assistant_message(piece, row),)
            steps[-1] = _with_answer(steps[-1], answer[0])
        else:
            tools = tools if row.tools is None else row.tools
            steps.append(_step(piece, row, steps, answer, tools))
        previous = row
    if row is None:
        raise ValueError("a conversation has rows")
    root = (TraceAgent(id=row.conversation_id),)
    path = str(pieces[0].path)
    return Conversation(id=row.conversation_id, file=path, format="edge-agentic", agents=root, steps=tuple(steps))


def _check_order(piece: TracePiece, row: EdgeRow, previous: EdgeRow | None) -> None:
    """Refuse a row whose number, role or content cannot follow the row before."""
    turn = 1 if previous is None else previous.turn + 1
    if row.turn != turn:
        refuse(piece, "turn", f"must be {turn}: the rows of a conversation are numbered from 1 without gaps", row.turn)
    allowed = ("user",) if previous is None else ("user", "tool") if previous.role == "assistant" else ("assistant",)
    if row.role not in allowed:
        before = "at the start" if previous is None else f"after a row of role {previous.role}"
        refuse(piece, "role", f"must be {' or '.join(allowed)} {before}", row.role)
    if row.role == "user" and row.content is None:
        refuse(piece, "content", "a row of role user must have a text")
    if row.role == "assistant" and row.content is None and row.reasoning_content is None and not row.tool_calls:
        refuse(piece, "content", "a row of role assistant must have content, reasoning_content or tool_calls")
    if row.role == "tool":
        if not row.tool_results:
            refuse(piece, "tool_results", "a row of role tool must have at least one result")
        call_ids = {call.id for call in (previous.tool_calls if previous else None) or ()}
        for place, result in enumerate(row.tool_results):
            if result.tool_call_id not in call_ids:
                field = f"tool_results[{place}].tool_call_id"
                refuse(piece, field, "must be the id of a call in the row before", result.tool_call_id)
    if previous is not None and row.system is not None:
        refuse(piece, "system", "only the first row of a conversation has a system prompt", row.system)


def _assistant_message(piece: TracePiece, row: EdgeRow) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": row.content}
    if row.reasoning_content is not None:
        message["reasoning_content"] = row.reasoning_content
    calls = []
    for place, call in enumerate(row.tool_calls or ()):
        arguments = call.function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        if not call.function.name:
            refuse(piece, f"tool_calls[{place}].function.name", "must not be empty")
        calls.append(
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
        )
    if calls:
        message["tool_calls"] = calls
    return message


def _new_messages(row: EdgeRow) -> list[ChatMessage]:
    """Return the messages that a row of a user or a tool adds to the prompt."""
    if row.role == "tool":
        return [{"role": "tool", "tool_call_id": r.tool_call_id, "content": r.content} for r in row.tool_results or ()]
    system: list[ChatMessage] = [] if row.system is None else [{"role": "system", "content": row.system}]
    return [*system, {"role": "user", "content": row.content}]


def _step(
    piece: TracePiece, row: EdgeRow, steps: list[TraceStep], answer: tuple[ChatMessage, ...], tools: list[Any] | None
) -> TraceStep:
    number = len(steps)
    if number == MAX_STEPS:
        refuse(piece, "turn", f"a conversation has at most {MAX_STEPS:,} requests", row.turn)
    max_tokens = row.max_new_tokens if row.max_completion_tokens is None else row.max_completion_tokens
    return TraceStep(
        number=number,
        index=number,
        model=row.model,
        depends_on=(number - 1,) if number else (),
        delay_s=row.delay_seconds or 0.0,
        continues=number - 1 if number else None,
        parts=tuple(MessagePart(message) for message in (*answer, *_new_messages(row))),
        max_output_tokens=max_tokens,
        settings={key: value for key in _SETTINGS if (value := getattr(row, key)) is not None},
        tools=tools,
    )


def _with_answer(step: TraceStep, message: ChatMessage) -> TraceStep:
    calls = tuple(
        RecordedCall(name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return msgspec.structs.replace(step, output=message, calls=calls)
