"""The model of a recorded conversation, the same for all formats: steps with dependencies, delays, prompts, answers."""

import json
from array import array
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

ChatMessage = dict[str, Any]  # as in the API of OpenAI: role, content, tool_calls, tool_call_id, reasoning_content

MAX_STEPS = 20_000  # of a conversation; the longest of the public ones has 561
MAX_AGENTS = 1_000  # of a conversation
MAX_OPEN_STEPS = 1_000  # of an agent, at the same time
MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a mistake
MAX_BLOCKS = 20_000_000  # ids of a conversation, in all its prompts: 160 MB
MAX_SECONDS = 1e9


class MessagePart(Struct, frozen=True):
    """A message of the prompt, with its text."""

    message: ChatMessage


class BlockPart(Struct, frozen=True):
    """Blocks of a prompt, of which only the ids are recorded. An id identifies its block and all that is before it.

    Equal ids (of equal scope) are equal tokens.
    """

    ids: "array[int]"
    tokens: int  # of each block


class FillerPart(Struct, frozen=True):
    """Tokens of which only the number is recorded. Equal seeds after equal parts are equal tokens."""

    seed: str
    tokens: int


Part = MessagePart | BlockPart | FillerPart


class RecordedCall(Struct, frozen=True, kw_only=True):
    """A tool call of a recorded answer."""

    name: str
    arguments: str | None = None  # JSON
    duration_s: float | None = None  # of the tool
    failed: bool | None = None


class TraceAgent(Struct, frozen=True, kw_only=True):
    """An agent of a conversation: the root, which has the number 0, or a sub-agent. Each has a context of its own."""

    id: str
    kind: str = ""  # of a sub-agent
    parent: int | None = None  # number of the agent that started it
    is_joined: bool = True  # the parent waits for its end


class TraceStep(Struct, frozen=True, kw_only=True):
    """A request of a conversation."""

    number: int  # place in `Conversation.steps`, from 0
    agent: int = 0  # place in `Conversation.agents`
    index: int  # among the steps of its agent, from 0
    model: str | None = None  # label of the recording
    start_s: float | None = None  # after the start of the conversation
    duration_s: float | None = None  # until the end of the answer
    depends_on: tuple[int, ...] = ()  # numbers of the steps that must have ended
    delay_s: float = 0.0  # between the end of the last of them, or the start of the conversation, and this request
    delay_is_uncertain: bool = False
    continues: int | None = None  # number of the step whose whole prompt this prompt starts with
    parts: tuple[Part, ...] = ()  # the prompt, or what follows the prompt of the step that it continues
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # as the recorded server reported
    max_output_tokens: int | None = None
    settings: dict[str, Any] = {}  # of the request: temperature, top_p, ...
    tools: list[Any] | None = None  # definitions
    output: ChatMessage | None = None  # the recorded answer
    calls: tuple[RecordedCall, ...] = ()  # of the recorded answer
    outcome: Literal["ok", "error", "cancelled", "unknown"] = "unknown"


class Conversation(Struct, frozen=True, kw_only=True):
    """A recorded conversation, of one agent or of an agent and its sub-agents."""

    id: str
    file: str
    format: str
    scope: Literal["conversation", "global"] = "conversation"  # in which equal block ids are equal tokens
    block_tokens: int | None = None
    agents: tuple[TraceAgent, ...]
    steps: tuple[TraceStep, ...]  # of the root, then of each sub-agent; each in the order of the recorded start
    # How many steps have something that a reader must know, by code: see NOTES.
    notes: dict[str, int] = {}


# The codes of `Conversation.notes`, and their meaning.
NOTES = {
    "uncertain_delay": "the recording lacks a time, so the delay is an upper bound or 0",
    "overlap": "the request started before the answer to the previous request of its agent had ended",
    "better_prefix": "an earlier request than the previous one shares more of the prompt: agents may be interleaved",
    "empty_output": "the recorded answer has no tokens; the replay asks for 1",
    "uncertain_sub_agent": "the recorded times of the sub-agent contradict those of its parent",
    "started_at_t": "`t` of the sub-agent's entry is its start, not its end",
    "background_agent": "the parent did not wait for the sub-agent",
    "duplicate": "the same request was recorded twice; one was dropped",
    "settings_not_sent": "sampling settings such as a temperature were recorded, and are not sent",
    "call_without_messages": "a model call was recorded without its messages, so it is not sent",
    "cut_segments": "the recorded segments have more tokens than the prompt",
}


def prompt_parts(conversation: Conversation, step: TraceStep) -> list[Part]:
    """Return all parts of a step's prompt: those of the steps that it continues, then its own."""
    chain = [step]
    while chain[-1].continues is not None:
        chain.append(conversation.steps[chain[-1].continues])
    return [part for step in reversed(chain) for part in step.parts]


def part_tokens(part: Part) -> int | None:
    """Return the tokens of a part; None for a text, because they depend on the tokenizer."""
    if isinstance(part, BlockPart):
        return len(part.ids) * part.tokens
    return part.tokens if isinstance(part, FillerPart) else None


def message_characters(message: ChatMessage) -> int:
    """Return the characters of a message: content, reasoning, names and arguments of its calls; no ids and no role."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    return len(content_text(message)) + len(message.get("reasoning_content") or "") + called


def content_text(message: ChatMessage) -> str:
    """Return the text of a message, also of one with content parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


def dependencies_by_time(
    spans: Sequence[tuple[float, float]], tolerance_s: float = 0.0
) -> list[tuple[int, ...]] | None:
    """Return for each request the requests that had ended when it started, without those that others imply.

    spans: start and end of each, in the order of the starts. tolerance_s: of the clock; a request that ends so long
    after another has started counts as ended. None if more than MAX_OPEN_STEPS are open at the same time.
    """
    dependencies: list[tuple[int, ...]] = []
    open_steps: list[int] = []  # running, or ended without a successor
    for number, (start, _) in enumerate(spans):
        kept, needed, last_start = [number], list[int](), float("-inf")
        for other in reversed(open_steps):
            other_start, end = spans[other]
            if end > start + tolerance_s:
                kept.append(other)
            elif end > last_start + tolerance_s:
                kept.append(other)
                needed.append(other)
                last_start = max(last_start, other_start)
        if len(kept) > MAX_OPEN_STEPS:
            return None
        open_steps = kept[::-1]
        dependencies.append(tuple(reversed(needed)))
    return dependencies


def count_notes(*counts: tuple[str, int]) -> dict[str, int]:
    """Return the notes whose count is not 0."""
    return {code: count for code, count in counts if count}
