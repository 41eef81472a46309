"""Read traces of GitHub Copilot's agents: JSON Lines, one session a row, with lengths and times only.

A prompt is a list of segments. Prompts share their leading segments of equal type, role and length: an estimate,
because there is no text. (https://github.com/Azure/AzurePublicDataset, analysis/GitHubCopilotCodingAgents)
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from harness.workload.agent_traces.conversation import (
    MAX_OPEN_STEPS,
    MAX_STEPS,
    Conversation,
    FillerPart,
    Part,
    RecordedCall,
    TraceAgent,
    TraceStep,
    count_notes,
    dependencies_by_time,
)
from harness.workload.agent_traces.trace_rows import (
    Id,
    Label,
    Milliseconds,
    TokenCount,
    TracePiece,
    decode_part,
    parse_time,
    refuse,
)


class _CallTokens(Struct, frozen=True):
    prompt: TokenCount | None = None
    completion: TokenCount | None = None
    cached: TokenCount | None = None


class _Segment(Struct, frozen=True):
    token_len: TokenCount
    sequenceId: int = 0
    type: Label = ""
    role: Label = ""


class _LlmCall(Struct, frozen=True, kw_only=True):
    timestamp: Label
    message_id: Label = ""
    duration_ms: Milliseconds | None = None
    model: Label | None = None
    result: Label | None = None
    status_code: Label | None = None
    tokens: _CallTokens = _CallTokens()
    message_metadata: Annotated[list[_Segment], Meta(max_length=100_000)] = []


class _FunctionCall(Struct, frozen=True):
    name: Label
    status: int | None = None  # 1: ok, 2: failed
    duration_ms: Milliseconds | None = None


class _ToolBatch(Struct, frozen=True):
    request_id: Label = ""
    function_calls: Annotated[list[_FunctionCall], Meta(max_length=10_000)] = []


class _Turn(Struct, frozen=True):
    llm_calls: Annotated[list[_LlmCall], Meta(max_length=MAX_STEPS)] = []
    tool_batches: Annotated[list[_ToolBatch], Meta(max_length=MAX_STEPS)] = []


class CopilotSession(Struct, frozen=True):
    """A row of a trace of Copilot. Other keys are ignored."""

    session_id: Id
    turns: Annotated[list[_Turn], Meta(max_length=MAX_STEPS)]


class _TimedCall(NamedTuple):
    call: _LlmCall
    start: float
    end: float


_decoder = msgspec.json.Decoder(CopilotSession)


def read_copilot_session(pieces: Sequence[TracePiece]) -> Conversation:
    """Return the conversation of a row. Raises HarnessError."""
    (piece,) = pieces
    session = decode_part(piece, _decoder)
    tools: dict[str, list[RecordedCall]] = {}
    for batch in (batch for turn in session.turns for batch in turn.tool_batches):
        tools.setdefault(batch.request_id, []).extend(map(_recorded_call, batch.function_calls))
    calls = []
    for number, turn in enumerate(session.turns):
        for place, call in enumerate(turn.llm_calls):
            field = f"turns[{number}].llm_calls[{place}].timestamp"
            start = parse_time(piece, field, call.timestamp)
            calls.append(_TimedCall(call, start, start + (call.duration_ms or 0.0) / 1000))
    if not 0 < len(calls) <= MAX_STEPS:
        refuse(piece, "turns", f"must have 1 to {MAX_STEPS:,} model calls", len(calls))
    calls.sort(key=lambda timed: timed.start)
    needed = dependencies_by_time([(timed.start, timed.end) for timed in calls])
    if needed is None:
        refuse(piece, "turns", f"more than {MAX_OPEN_STEPS:,} model calls are open at the same time")
    steps = tuple(_step(calls, number, needed[number], tools) for number in range(len(calls)))
    return Conversation(
        id=session.session_id,
        file=str(piece.path),
        format="copilot",
        agents=(TraceAgent(id=session.session_id),),
        steps=steps,
        notes=count_notes(
            ("overlap", sum(step.number - 1 not in step.depends_on for step in steps[1:])),
            ("uncertain_delay", sum(step.delay_is_uncertain for step in steps)),
            ("empty_output", sum(step.output_tokens == 0 for step in steps)),
            ("cut_segments", sum(_segment_tokens(timed.call) > (timed.call.tokens.prompt or 0) for timed in calls
                                 if timed.call.tokens.prompt is not None)),
        ),
    )  # fmt: skip


def _step(
    calls: Sequence[_TimedCall], number: int, needed: tuple[int, ...], tools: dict[str, list[RecordedCall]]
) -> TraceStep:
    call, start, _ = calls[number]
    ready = max((calls[other].end for other in needed), default=calls[0].start)
    return TraceStep(
        number=number,
        index=number,
        model=call.model,
        start_s=start - calls[0].start,
        duration_s=None if call.duration_ms is None else call.duration_ms / 1000,
        depends_on=needed,
        delay_s=max(0.0, start - ready),
        delay_is_uncertain=any(calls[other].call.duration_ms is None for other in needed),
        parts=_parts(call, number),
        prompt_tokens=call.tokens.prompt,
        output_tokens=call.tokens.completion,
        cached_tokens=call.tokens.cached,
        calls=tuple(tools.get(call.message_id, ())),
        outcome=_outcome(call),
    )


def _segment_tokens(call: _LlmCall) -> int:
    return sum(segment.token_len for segment in call.message_metadata)


def _parts(call: _LlmCall, number: int) -> tuple[Part, ...]:
    """Return the segments of a prompt, cut to its tokens, and a tail for tokens that no segment has."""
    left = _segment_tokens(call) if call.tokens.prompt is None else call.tokens.prompt
    parts: list[Part] = []
    for segment in sorted(call.message_metadata, key=lambda segment: segment.sequenceId):
        tokens = min(segment.token_len, left)
        if tokens:
            parts.append(FillerPart(f"{segment.type} {segment.role}", tokens))
        left -= tokens
    return (*parts, FillerPart(f"tail {number}", left)) if left else tuple(parts)


def _outcome(call: _LlmCall) -> Literal["ok", "error", "cancelled", "unknown"]:
    words = [word.lower() for word in (call.result, call.status_code) if word is not None]
    if any("cancel" in word for word in words):
        return "cancelled"
    if not words:
        return "unknown"
    return "ok" if all(word in ("success", "ok", "200") for word in words) else "error"


def _recorded_call(call: _FunctionCall) -> RecordedCall:
    duration_s = None if call.duration_ms is None else call.duration_ms / 1000
    failed = None if call.status is None else call.status != 1
    return RecordedCall(name=call.name, duration_s=duration_s, failed=failed)
