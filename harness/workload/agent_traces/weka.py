"""Read WEKA traces: one JSON document a conversation, with lengths, times, ids of blocks and sub-agents, without text.

The prompt of a request is its full blocks by their ids, then a tail without an id. An id identifies its block and all
that is before it. (https://github.com/callanjfox/kv-cache-tester, traces/)
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from harness.workload.agent_traces.conversation import (
    MAX_AGENTS,
    MAX_BLOCKS,
    MAX_OPEN_STEPS,
    MAX_SECONDS,
    MAX_STEPS,
    BlockPart,
    Conversation,
    FillerPart,
    Part,
    TraceAgent,
    TraceStep,
    count_notes,
    dependencies_by_time,
)
from harness.workload.agent_traces.prefix_reuse import leading_known
from harness.workload.agent_traces.trace_rows import (
    Id,
    Label,
    Seconds,
    TokenCount,
    TracePiece,
    decode_part,
    refuse,
)

_CLOCK_S = 1.0  # `t` has whole seconds
_BETTER_BLOCKS = 16  # by which the prefix of an earlier request must be longer to be reported
_MAX_DEPTH = 8  # of sub-agents of sub-agents

_RawList = Annotated[list[msgspec.Raw], Meta(max_length=MAX_STEPS)]


class _File(Struct, frozen=True):
    requests: _RawList
    block_size: Annotated[int, Meta(ge=1, le=1_000_000)]
    id: Id
    hash_id_scope: Literal["local", "global"] = "local"


class _Request(Struct, frozen=True, tag_field="type", tag="n"):
    t: Seconds
    tokens: TokenCount = field(name="in")
    out: TokenCount
    hash_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(max_length=MAX_BLOCKS)]
    model: Label | None = None
    api_time: Seconds | None = None
    think_time: Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None


class _StreamedRequest(_Request, frozen=True, tag="s"):
    pass


class _SubAgent(Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: _RawList
    agent_id: Label = ""
    subagent_type: Label = ""
    duration_ms: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1000)] | None = None
    status: Label | None = None


_file_decoder = msgspec.json.Decoder(_File)
_entry_decoder: "msgspec.json.Decoder[_Request | _StreamedRequest | _SubAgent]" = msgspec.json.Decoder(
    _Request | _StreamedRequest | _SubAgent
)


class _Cause(NamedTuple):
    """What an agent starts after: the steps that must have ended, and the delay after them."""

    steps: tuple[int, ...]
    delay_s: float


class _Started(NamedTuple):
    """A sub-agent that was started and not yet waited for."""

    launcher: int | None  # step of the parent
    last_steps: tuple[int, ...]
    end_s: float


class _Entry(NamedTuple):
    """A request or a sub-agent of a list of requests, with its bytes and its path."""

    value: _Request | _SubAgent
    raw: msgspec.Raw
    place: str


class _Builder:
    """The steps of a file as they are read: each sub-agent has numbers after those of its parent."""

    def __init__(self, piece: TracePiece, file: _File) -> None:
        self.piece = piece
        self.block_size = file.block_size
        self.agents = [TraceAgent(id=file.id)]
        self.steps: list[TraceStep] = []
        self.blocks = 0
        self.notes: dict[str, int] = {}

    def note(self, code: str) -> None:
        self.notes[code] = self.notes.get(code, 0) + 1

    def add_agent(
        self, agent: int, raws: Sequence[msgspec.Raw], place: str, start_s: float, cause: _Cause
    ) -> tuple[int, ...]:
        """Add the steps of an agent and its sub-agents. Return the numbers of the steps that end it.

        start_s: of the agent, after the start of the conversation.
        """
        if place.count("requests") > _MAX_DEPTH:
            refuse(self.piece, place, f"sub-agents are nested more than {_MAX_DEPTH} deep")
        entries = [self._decode(raw, f"{place}[{number}]") for number, raw in enumerate(raws)]
        requests = [entry for entry in entries if isinstance(entry.value, _Request)]
        dependencies = self._time_dependencies(requests)
        first = len(self.steps)
        for index, entry in enumerate(requests):
            before = requests[index - 1].value if index else None
            self._add_step(agent, index, entry, before, dependencies[index], first, start_s, cause)
        self._note_better_prefixes(first)
        last = {first + index for index in range(len(requests))}
        for needed in dependencies:
            last -= {first + other for other in needed}
        waiting = self._add_sub_agents(agent, entries, first, start_s, cause)
        last -= {started.launcher for started in waiting if started.launcher is not None}
        return (*sorted(last), *(step for started in waiting for step in started.last_steps))

    def _decode(self, raw: msgspec.Raw, place: str) -> _Entry:
        entry = decode_part(self.piece, _entry_decoder, raw, place)
        if isinstance(entry, _Request):
            full = entry.tokens // self.block_size
            if len(entry.hash_ids) != full:
                problem = f"there must be an id for each of the {full:,} full blocks of `in` ({entry.tokens:,} tokens)"
                refuse(self.piece, f"{place}.hash_ids", problem, len(entry.hash_ids), raw)
            self.blocks += full
            if self.blocks > MAX_BLOCKS:
                refuse(self.piece, f"{place}.hash_ids", f"a conversation has at most {MAX_BLOCKS:,} ids", None, raw)
            # Compact: a list of numbers takes five times the memory.
            entry = msgspec.structs.replace(entry, hash_ids=array("q", entry.hash_ids))
        return _Entry(entry, raw, place)

    def _time_dependencies(self, requests: Sequence[_Entry]) -> list[tuple[int, ...]]:
        previous = 0.0
        spans = []
        for entry in requests:
            request = _request(entry)
            if request.t < previous:
                refuse(self.piece, f"{entry.place}.t", f"must not be before {previous:g}", request.t, entry.raw)
            previous = request.t
            spans.append((request.t, request.t + (request.api_time or 0.0)))
        dependencies = dependencies_by_time(spans, _CLOCK_S)
        if dependencies is None:
            refuse(self.piece, requests[0].place, f"more than {MAX_OPEN_STEPS:,} requests are open at the same time")
        return dependencies

    def _add_step(
        self,
        agent: int,
        index: int,
        entry: _Entry,
        before: _Request | _SubAgent | None,
        needed: tuple[int, ...],
        first: int,
        start_s: float,
        cause: _Cause,
    ) -> None:
        request = _request(entry)
        if len(self.steps) == MAX_STEPS:
            refuse(self.piece, entry.place, f"a conversation has at most {MAX_STEPS:,} requests", None, entry.raw)
        delay_s, is_uncertain, depends_on = request.t, False, tuple(first + other for other in needed)
        if not needed:  # a first request, or one that overlaps with all before
            depends_on, delay_s = cause.steps, cause.delay_s + request.t
        elif needed == (index - 1,) and isinstance(before, _Request):
            delay_s, is_uncertain = _delay(request, before)
        else:
            ends = [self.steps[first + other] for other in needed]
            delay_s = request.t + start_s - max((step.start_s or 0.0) + (step.duration_s or 0.0) for step in ends)
            is_uncertain = any(step.duration_s is None for step in ends)
        if index and index - 1 not in needed:
            self.note("overlap")
        if is_uncertain:
            self.note("uncertain_delay")
        if request.out == 0:
            self.note("empty_output")
        number = len(self.steps)
        self.steps.append(
            TraceStep(
                number=number,
                agent=agent,
                index=index,
                model=request.model,
                start_s=start_s + request.t,
                duration_s=request.api_time,
                depends_on=depends_on,
                delay_s=max(0.0, delay_s),
                delay_is_uncertain=is_uncertain,
                parts=_parts(request, self.block_size, number),
                prompt_tokens=request.tokens,
                output_tokens=request.out,
            )
        )

    def _note_better_prefixes(self, first: int) -> None:
        """Count the requests that share clearly more with an earlier request of the agent than with the one before."""
        seen: set[int] = set()
        previous: set[int] = set()
        for step in self.steps[first:]:
            ids = _ids(step)
            if leading_known(ids, seen) - leading_known(ids, previous) > _BETTER_BLOCKS:
                self.note("better_prefix")
            seen.update(previous := set(ids))

    def _add_sub_agents(
        self,
        agent: int,
        entries: Sequence[_Entry],
        first: int,
        start_s: float,
        cause: _Cause,
    ) -> list[_Started]:
        """Add the sub-agents of an agent, whose next request waits for them. Return those without a next request."""
        place, waiting = -1, list[_Started]()  # place: of the last request, in the agent's steps
        for at, entry in enumerate(entries):
            if isinstance(entry.value, _Request):
                place += 1
                if waiting:
                    self._join(first + place, start_s + entry.value.t, waiting)
                    waiting = []
                continue
            following = next((e.value.t for e in entries[at + 1 :] if isinstance(e.value, _Request)), None)
            launcher = self.steps[first + place] if place >= 0 else None
            started = self._add_sub_agent(agent, entry, launcher, following, start_s, cause)
            waiting += [] if started is None else [started]
        return waiting

    def _add_sub_agent(
        self,
        parent: int,
        entry: _Entry,
        launcher: TraceStep | None,
        following: float | None,
        start_s: float,
        cause: _Cause,
    ) -> _Started | None:
        """Add a sub-agent; return None if the parent does not wait for it."""
        value = entry.value
        assert isinstance(value, _SubAgent)
        if len(self.agents) == MAX_AGENTS:
            refuse(self.piece, entry.place, f"a conversation has at most {MAX_AGENTS:,} agents", None, entry.raw)
        ready = 0.0 if launcher is None else (launcher.start_s or 0.0) + (launcher.duration_s or 0.0) - start_s
        begin, end = self._sub_agent_span(value, ready, following)
        is_joined = end is not None
        self.agents.append(TraceAgent(id=value.agent_id, kind=value.subagent_type, parent=parent, is_joined=is_joined))
        if not is_joined:
            self.note("background_agent")
        delay_s = max(0.0, begin - ready)
        number = None if launcher is None else launcher.number
        after = _Cause(cause.steps, cause.delay_s + begin) if number is None else _Cause((number,), delay_s)
        agent = len(self.agents) - 1
        last = self.add_agent(agent, value.requests, f"{entry.place}.requests", start_s + begin, after)
        return _Started(number, last, start_s + end) if end is not None and last else None

    def _sub_agent_span(self, value: _SubAgent, ready: float, following: float | None) -> tuple[float, float | None]:
        """Return start and end of a sub-agent, in seconds of its parent; no end if the parent does not wait for it.

        ready: the end of the parent's answer before it. The `t` of an entry with a duration is its end, also where the
        format's description says otherwise; it is the start only where the end would be before `ready`.
        """
        if value.duration_ms is None:
            return value.t, None
        duration_s = value.duration_ms / 1000
        if value.t - duration_s >= ready - _CLOCK_S:
            return value.t - duration_s, value.t
        if value.t < ready - _CLOCK_S:
            self.note("uncertain_sub_agent")
            return ready, value.t
        if following is not None and value.t + duration_s > following + _CLOCK_S:
            self.note("uncertain_sub_agent")
        self.note("started_at_t")
        return value.t, value.t + duration_s

    def _join(self, number: int, at_s: float, waiting: Sequence[_Started]) -> None:
        """Let a step wait for sub-agents: its delay is what passes after the last of them has ended."""
        step = self.steps[number]
        joined = tuple(last for started in waiting for last in started.last_steps)
        launchers = {started.launcher for started in waiting}  # their ends are implied
        self.steps[number] = msgspec.structs.replace(
            step,
            depends_on=(*(other for other in step.depends_on if other not in launchers), *joined),
            delay_s=max(0.0, at_s - max(started.end_s for started in waiting)),
            delay_is_uncertain=False,
        )
        if step.delay_is_uncertain:
            self.notes["uncertain_delay"] -= 1


def read_weka_trace(pieces: Sequence[TracePiece]) -> Conversation:
    """Return the conversation of a file. Raises HarnessError."""
    (piece,) = pieces
    file = decode_part(piece, _file_decoder)
    builder = _Builder(piece, file)
    builder.add_agent(0, file.requests, "requests", 0.0, _Cause((), 0.0))
    if not builder.steps:
        refuse(piece, "requests", "must have at least one request")
    return Conversation(
        id=file.id,
        file=str(piece.path),
        format="weka",
        scope="global" if file.hash_id_scope == "global" else "conversation",
        block_tokens=file.block_size,
        agents=tuple(builder.agents),
        steps=tuple(builder.steps),
        notes=count_notes(*builder.notes.items()),
    )


def _request(entry: _Entry) -> _Request:
    assert isinstance(entry.value, _Request)
    return entry.value


def _delay(request: _Request, before: _Request) -> tuple[float, bool]:
    """Return the delay after the request before, and whether it is uncertain.

    After a request without `api_time`, `think_time` counts from an earlier answer: it is never more than the gap.
    """
    gap = request.t - before.t
    if request.think_time is None:
        return gap - (before.api_time or 0.0), before.api_time is None
    return min(max(0.0, request.think_time), gap), before.api_time is None or request.think_time < 0


def _ids(step: TraceStep) -> Sequence[int]:
    return next((part.ids for part in step.parts if isinstance(part, BlockPart)), ())


def _parts(request: _Request, block_size: int, number: int) -> tuple[Part, ...]:
    blocks: Any = request.hash_ids
    tail = request.tokens - len(blocks) * block_size
    parts: list[Part] = [BlockPart(blocks, block_size)] if len(blocks) else []
    return (*parts, FillerPart(f"tail {number}", tail)) if tail else tuple(parts)
