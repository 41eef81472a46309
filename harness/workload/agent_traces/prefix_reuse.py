"""How much of each prompt an earlier prompt of the conversation starts with: the hits of an ideal prefix cache."""

import hashlib
from collections.abc import Container, Iterable
from typing import Literal, NamedTuple

import msgspec

from harness.workload.agent_traces.conversation import (
    BlockPart,
    Conversation,
    MessagePart,
    Part,
    TraceStep,
    message_characters,
)


class PromptReuse(NamedTuple):
    """The size of a prompt, and of its start that an earlier prompt has, too. Characters of text, or else tokens."""

    size: int
    shared: int


class _PromptEnd(NamedTuple):
    """The size of a prompt, and a digest of its messages and fillers, which the next prompt may continue."""

    size: int
    digest: bytes


def leading_known(ids: Iterable[object], earlier: Container[object]) -> int:
    """Return how many ids at the start are among earlier ones."""
    count = 0
    for id_ in ids:
        if id_ not in earlier:
            break
        count += 1
    return count


def prompt_reuse(
    conversation: Conversation, order: Iterable[TraceStep] | None = None, *, of: Literal["any", "agent"] = "any"
) -> list[PromptReuse]:
    """Return the reuse of each step in `order`, default: that of the conversation's steps.

    of: `any` earlier step, or the previous one of the same `agent`. Tails without an id are not shared.
    """
    seen: set[object] = set()
    last: dict[int, tuple[int, set[object]]] = {}  # the previous step of each agent, and its keys
    ends: dict[int, _PromptEnd] = {}
    reuse = []
    for step in conversation.steps if order is None else order:
        start = _PromptEnd(0, b"") if step.continues is None else ends[step.continues]
        keys, sizes, ends[step.number] = _keys_of(step, start)
        number, previous = last.get(step.agent, (None, set[object]()))
        if of == "any":
            shared = start.size + sum(sizes[: leading_known(keys, seen)])
            seen.update(keys)
        elif step.continues is None:
            shared = sum(sizes[: leading_known(keys, previous)])
        else:
            shared = start.size if number == step.continues else 0
        last[step.agent] = (step.number, set(keys) if of == "agent" else previous)
        reuse.append(PromptReuse(ends[step.number].size, shared))
    return reuse


def _keys_of(step: TraceStep, start: _PromptEnd) -> tuple[list[object], list[int], _PromptEnd]:
    """Return keys and sizes of a step's own parts, and the end of its prompt.

    A key identifies its part and all before it. start: the end of the prompt that it continues.
    """
    keys: list[object] = []
    sizes: list[int] = []
    digest = start.digest
    for part in step.parts:
        if isinstance(part, BlockPart):
            keys += part.ids
            sizes += [part.tokens] * len(part.ids)
        else:
            digest = _digest(digest, part)
            keys.append(digest)
            sizes.append(message_characters(part.message) if isinstance(part, MessagePart) else part.tokens)
    return keys, sizes, _PromptEnd(start.size + sum(sizes), digest)


def _digest(before: bytes, part: Part) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(part, order="sorted"), digest_size=16).digest()
