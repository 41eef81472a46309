"""The tokens of each turn of a trace, and what a prefix cache could have of them: the work of a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.workload.agent_traces.context_fit import recorded_tokens
from harness.workload.agent_traces.conversation import Conversation, MessagePart
from harness.workload.agent_traces.prefix_reuse import PrefixCache
from harness.workload.agent_traces.trace_index import read_conversation
from harness.workload.agent_traces.trace_totals import conversation_places

MAX_ESTIMATED_OUTPUT = 1024  # tokens of an answer of which only the text is recorded, as edge-agentic allows


class TurnTokens(NamedTuple):
    """The tokens of a turn. None: not known."""

    prompt: int | None
    cached: int  # that an earlier prompt has, too; of an unknown prompt 0
    output: int | None
    is_estimated: bool  # from characters


def trace_turns(path: Path, conversations: int | None, characters_per_token: float) -> Iterator[list[TurnTokens]]:
    """Yield the turns of each conversation, or of the first so many. Raises HarnessError for a trace with a mistake."""
    text_seen: set[object] = set()  # one server gets all prompts, so its cache has those of earlier conversations
    global_seen: set[object] = set()
    for place in conversation_places(path, None)[:conversations]:
        conversation = read_conversation(place)
        is_text = _is_text(conversation)
        seen = text_seen if is_text else global_seen if conversation.scope == "global" else set[object]()
        yield list(_turns(conversation, seen, characters_per_token, is_text))


def _is_text(conversation: Conversation) -> bool:
    return any(isinstance(part, MessagePart) for step in conversation.steps for part in step.parts)


def _turns(
    conversation: Conversation, seen: set[object], characters_per_token: float, is_text: bool
) -> Iterator[TurnTokens]:
    cache = PrefixCache(conversation, seen)
    sizes = recorded_tokens(characters_per_token)(conversation)
    for step, size in zip(conversation.steps, sizes, strict=True):
        reuse = cache.add(step)
        cached, output = 0, size.output
        if size.prompt is not None and is_text and reuse.shared:
            # Definitions of tools come with the system prompt, so a known start has them.
            tools = 0 if step.tools is None else len(msgspec.json.encode(step.tools))
            cached = int(size.prompt * (reuse.shared + tools) / (reuse.size + tools))
        elif size.prompt is not None:
            cached = min(size.prompt, 0 if is_text else reuse.shared)
        if output is not None and step.output_tokens is None:
            output = min(output, step.max_output_tokens or MAX_ESTIMATED_OUTPUT)
        is_estimated = is_text and (step.prompt_tokens is None or (step.output_tokens is None and output is not None))
        yield TurnTokens(size.prompt, cached, output, is_estimated)
