"""Read TraceLab traces: JSON Lines, one model call a row, with lengths, times and tools, but without text or ids.

The ids of blocks are made: a call keeps as many blocks of the call before as its server reported as cached.
(https://github.com/uw-syfi/TraceLab)
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from harness.workload.agent_traces.conversation import (
    MAX_BLOCKS,
    MAX_STEPS,
    BlockPart,
    Conversation,
    FillerPart,
    Part,
    RecordedCall,
    TraceAgent,
    TraceStep,
    count_notes,
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

_BLOCK_TOKENS = 64
_INPUTS = ("user_message", "tool_result")
_OUTPUTS = ("reasoning", "text", "tool_call")


class _TraceLabEvent(Struct, frozen=True):
    event_type: Label
    timestamp: Label


class _TraceLabTool(Struct, frozen=True):
    tool_name: Label
    tool_wall_latency_ms: Milliseconds | None = None
    is_error: bool | None = None


class TraceLabRow(Struct, frozen=True, kw_only=True):
    """A row of a TraceLab trace. Other keys are ignored."""

    provider: Label
    session_id: Id
    round_index: Annotated[int, Meta(ge=0)]
    round_id: Label | None = None
    model: Label | None = None
    input_tokens_total: TokenCount
    prefix_tokens: TokenCount
    newly_append_tokens: TokenCount
    output_tokens: TokenCount
    timing_events: Annotated[list[_TraceLabEvent], Meta(max_length=100_000)] = []
    tools: Annotated[list[_TraceLabTool], Meta(max_length=10_000)] = []


_decoder = msgspec.json.Decoder(TraceLabRow)


class _TraceLabRowId(Struct, frozen=True):
    session_id: Id


_id_decoder = msgspec.json.Decoder(_TraceLabRowId)


class _Round(NamedTuple):
    """A row with its times, in seconds; None: the row has no such event."""

    row: TraceLabRow
    sent: float | None
    ended: float | None


def tracelab_session_id(piece: TracePiece) -> str:
    """Return the session of a row."""
    return decode_part(piece, _id_decoder).session_id


def read_tracelab_session(pieces: Sequence[TracePiece]) -> Conversation:
    """Return the conversation of the rows of a session. Raises HarnessError."""
    if len(pieces) > MAX_STEPS:
        refuse(pieces[MAX_STEPS], "session_id", f"a session has at most {MAX_STEPS:,} rows")
    rounds, duplicates = _distinct([_read_round(piece) for piece in pieces])
    session = rounds[0].row.session_id
    first = next((round_.sent for round_ in rounds if round_.sent is not None), 0.0)
    steps: list[TraceStep] = []
    ids: list[int] = []  # of the round before
    minted, uncertain = 0, 0
    _refuse_many_blocks(pieces[0], rounds)
    for number, round_ in enumerate(rounds):
        row = round_.row
        kept = min(row.prefix_tokens // _BLOCK_TOKENS, len(ids))
        total = row.input_tokens_total // _BLOCK_TOKENS
        ids = [*ids[:kept], *range(minted, minted + total - kept)]
        minted += total - kept
        before = rounds[number - 1].ended if number else first
        is_known = round_.sent is not None and before is not None
        uncertain += not is_known
        steps.append(
            TraceStep(
                number=number,
                index=number,
                model=row.model,
                start_s=None if round_.sent is None else round_.sent - first,
                duration_s=_duration_s(round_),
                depends_on=(number - 1,) if number else (),
                delay_s=max(0.0, (round_.sent or 0.0) - (before or 0.0)) if is_known else 0.0,
                delay_is_uncertain=not is_known,
                parts=_parts(ids, row.input_tokens_total, number),
                prompt_tokens=row.input_tokens_total,
                output_tokens=row.output_tokens,
                cached_tokens=row.prefix_tokens,
                calls=tuple(map(_call, row.tools)),
                outcome="ok",
            )
        )
    return Conversation(
        id=session,
        file=str(pieces[0].path),
        format="tracelab",
        block_tokens=_BLOCK_TOKENS,
        agents=(TraceAgent(id=session),),
        steps=tuple(steps),
        notes=count_notes(
            ("duplicate", duplicates),
            ("uncertain_delay", uncertain),
            ("empty_output", sum(step.output_tokens == 0 for step in steps)),
        ),
    )


def _duration_s(round_: _Round) -> float | None:
    return None if round_.sent is None or round_.ended is None else max(0.0, round_.ended - round_.sent)


def _refuse_many_blocks(piece: TracePiece, rounds: Sequence[_Round]) -> None:
    blocks = sum(round_.row.input_tokens_total // _BLOCK_TOKENS for round_ in rounds)
    if blocks > MAX_BLOCKS:
        most = MAX_BLOCKS * _BLOCK_TOKENS
        refuse(piece, "input_tokens_total", f"a session has at most {most:,} prompt tokens in all its rows")


def _read_round(piece: TracePiece) -> _Round:
    row = decode_part(piece, _decoder)
    if row.prefix_tokens + row.newly_append_tokens != row.input_tokens_total:
        parts = f"prefix_tokens ({row.prefix_tokens:,}) + newly_append_tokens ({row.newly_append_tokens:,})"
        refuse(piece, "input_tokens_total", f"must be {parts}", row.input_tokens_total)
    sent, ended = list[float](), list[float]()
    for place, event in enumerate(row.timing_events):
        if event.event_type in (*_INPUTS, *_OUTPUTS):
            times = sent if event.event_type in _INPUTS else ended
            times.append(parse_time(piece, f"timing_events[{place}].timestamp", event.timestamp))
    return _Round(row, max(sent, default=None), max(ended, default=None))


def _distinct(rounds: Sequence[_Round]) -> tuple[list[_Round], int]:
    """Return the rounds in the order of their time, and how many were dropped because they were recorded twice.

    Rounds of one index are not always the same: only those with equal times and tokens are.
    """
    distinct: dict[tuple[object, ...], _Round] = {}
    for round_ in rounds:
        row = round_.row
        tokens = (row.input_tokens_total, row.prefix_tokens, row.output_tokens)
        distinct.setdefault((row.round_index, row.round_id, round_.sent, round_.ended, *tokens), round_)
    kept = list(distinct.values())
    if all(round_.sent is not None for round_ in kept):
        kept.sort(key=lambda round_: (round_.sent or 0.0, round_.row.round_index))
    else:
        kept.sort(key=lambda round_: round_.row.round_index)
    return kept, len(rounds) - len(kept)


def _parts(ids: Sequence[int], tokens: int, number: int) -> tuple[Part, ...]:
    blocks = BlockPart(array("q", ids), _BLOCK_TOKENS)
    tail = tokens - len(ids) * _BLOCK_TOKENS
    return (blocks, FillerPart(f"tail {number}", tail)) if tail else (blocks,)


def _call(tool: _TraceLabTool) -> RecordedCall:
    duration_s = None if tool.tool_wall_latency_ms is None else tool.tool_wall_latency_ms / 1000
    return RecordedCall(name=tool.tool_name, duration_s=duration_s, failed=tool.is_error)
