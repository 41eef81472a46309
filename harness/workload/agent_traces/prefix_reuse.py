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
    prompt_parts,
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


class PrefixCache:
    """What a cache without bounds has of the prompts of one conversation. Tails without an id are not shared.

    seen: keys of earlier conversations, whose prompts it has, too; those of this one are added. Default: none.
    """

    def __init__(self, conversation: Conversation, seen: set[object] | None = None) -> None:
        self.prompts = 0  # that were put into it
        self._steps = conversation.steps
        self._seen: set[object] = set() if seen is None else seen
        self._ends: dict[int, _PromptEnd] = {}  # of the prompts that it has whole, by the number of their step

    def add(self, step: TraceStep) -> PromptReuse:
        """Return what the cache has of a step's prompt, and put the whole prompt into it."""
        self.prompts += 1
        chain, number = [step], step.continues
        while number is not None and number not in self._ends:
            chain.append(self._steps[number])
            number = chain[-1].continues
        start = end = _PromptEnd(0, b"") if number is None else self._ends[number]
        keys: list[object] = []
        sizes: list[int] = []
        for part in reversed(chain):
            own_keys, own_sizes, end = _keys_of(part, end)
            keys, sizes = keys + own_keys, sizes + own_sizes
            self._ends[part.number] = end
        shared = start.size + sum(sizes[: leading_known(keys, self._seen)])
        self._seen.update(keys)
        return PromptReuse(end.size, shared)

    def __contains__(self, number: object) -> bool:
        """Return whether the whole prompt of the step of this number is in the cache."""
        return number in self._ends


class PlannedTokens(NamedTuple):
    """The tokens of a prompt without a chat template, and of what a cache without bounds has of it; None: unknown."""

    prompt: int | None
    cached: int | None


def planned_tokens(conversation: Conversation, step: TraceStep, reuse: PromptReuse) -> PlannedTokens:
    """Return the planned tokens of a step, with the reuse of its prompt by the conversation's earlier ones.

    Tokens of recorded text are unknown: what such a prompt shares is known if it is nothing. Equal ids of the global
    scope may be in other conversations' prompts, so their reuse is unknown.
    """
    is_text = any(isinstance(part, MessagePart) for part in prompt_parts(conversation, step))
    cached = None if conversation.scope == "global" or (is_text and reuse.shared) else reuse.shared
    return PlannedTokens(None if is_text else reuse.size, cached)


def prompt_reuse(
    conversation: Conversation, order: Iterable[TraceStep] | None = None, *, of: Literal["any", "agent"] = "any"
) -> list[PromptReuse]:
    """Return the reuse of each step in `order`, default: that of the conversation's steps.

    of: `any` earlier step, or the previous one of the same `agent`.
    """
    steps = conversation.steps if order is None else order
    if of == "any":
        cache = PrefixCache(conversation)
        return [cache.add(step) for step in steps]
    return _agent_reuse(steps)


def _agent_reuse(steps: Iterable[TraceStep]) -> list[PromptReuse]:
    last: dict[int, tuple[int, set[object]]] = {}  # the previous step of each agent, and its keys
    ends: dict[int, _PromptEnd] = {}
    reuse = []
    for step in steps:
        start = _PromptEnd(0, b"") if step.continues is None else ends[step.continues]
        keys, sizes, ends[step.number] = _keys_of(step, start)
        number, previous = last.get(step.agent, (None, set[object]()))
        if step.continues is None:
            shared = sum(sizes[: leading_known(keys, previous)])
        else:
            shared = start.size if number == step.continues else 0
        last[step.agent] = (step.number, set(keys))
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
