"""Which steps of a trace fit into the context of a server. Nothing vanishes: each step is kept, too long, or after one.

A step fits if its prompt and its recorded answer together fit. Where one does not, all steps that depend on it are left
out as well: the conversation ends there.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from harness.workload.agent_traces.conversation import (
    Conversation,
    MessagePart,
    TraceStep,
    message_characters,
    part_tokens,
)


class StepTokens(NamedTuple):
    """The tokens of a step; None: unknown."""

    prompt: int | None
    output: int | None


class ConversationFit(Struct, frozen=True, kw_only=True):
    """The steps of a conversation that are kept and left out for a context."""

    id: str
    file: str
    kept: tuple[int, ...]  # numbers of steps
    too_long: tuple[int, ...]
    after: tuple[int, ...]  # they would fit, but depend on a step that is too long
    kept_tokens: StepTokens  # sums of the steps whose tokens are known
    left_out_tokens: StepTokens
    unknown_steps: int  # kept, because their tokens are unknown
    peak_tokens: int | None  # of the largest step, with its answer; None: all are unknown

    @property
    def state(self) -> Literal["fits", "ends_early", "left_out"]:
        if not self.too_long:
            return "fits"
        return "ends_early" if self.kept else "left_out"


class TraceFit(Struct, frozen=True, kw_only=True):
    """The sums of all conversations of a trace."""

    context_tokens: int
    fits: int  # conversations
    ends_early: int
    left_out: int
    kept_steps: int
    too_long_steps: int
    after_steps: int
    unknown_steps: int
    kept_tokens: StepTokens
    left_out_tokens: StepTokens
    kept_sha256: str  # of the kept steps: runs with different ones are not compared


CHARACTERS_PER_TOKEN = 4.0  # of English and code, for estimates; the edge-agentic data has about 4.1


def recorded_tokens(characters_per_token: float | None = None) -> Callable[[Conversation], list[StepTokens]]:
    """Return a function that returns the tokens of each step of a conversation, as recorded.

    characters_per_token: of an estimate where only the text is recorded; without it such tokens are unknown.
    """

    def tokens(conversation: Conversation) -> list[StepTokens]:
        prompts: list[int | None] = []  # in characters, where there is text
        counts = []
        for step in conversation.steps:
            before = 0 if step.continues is None else prompts[step.continues]
            own = _characters(step)
            prompts.append(None if before is None or own is None else before + own)
            prompt, output = step.prompt_tokens, step.output_tokens
            if prompt is None:
                prompt = _estimate(prompts[-1], characters_per_token, step)
            if output is None and step.output is not None:
                output = _estimate(message_characters(step.output), characters_per_token)
            counts.append(StepTokens(prompt, output))
        return counts

    return tokens


def fit_conversation(
    conversation: Conversation,
    context_tokens: int,
    tokens: Callable[[Conversation], list[StepTokens]] | None = None,
) -> ConversationFit:
    """Return which steps of a conversation fit into a context.

    tokens: returns the tokens of each step; default: the recorded ones. A step without known prompt tokens is kept.
    """
    by_step = (tokens or recorded_tokens())(conversation)
    needed = [None if size.prompt is None else size.prompt + max(1, size.output or 0) for size in by_step]
    too_long = {number for number, total in enumerate(needed) if total is not None and total > context_tokens}
    left_out = with_dependents(conversation, too_long)
    numbers = range(len(conversation.steps))
    kept = tuple(number for number in numbers if number not in left_out)
    return ConversationFit(
        id=conversation.id,
        file=conversation.file,
        kept=kept,
        too_long=tuple(sorted(too_long)),
        after=tuple(sorted(left_out - too_long)),
        kept_tokens=_sum_tokens(by_step[number] for number in kept),
        left_out_tokens=_sum_tokens(by_step[number] for number in left_out),
        unknown_steps=sum(needed[number] is None for number in kept),
        peak_tokens=max((size for size in needed if size is not None), default=None),
    )


def sum_fits(context_tokens: int, fits: Iterable[ConversationFit]) -> TraceFit:
    """Return the sums of conversations, which are read one at a time."""
    states = {"fits": 0, "ends_early": 0, "left_out": 0}
    steps = [0, 0, 0, 0]
    kept, left_out = StepTokens(None, None), StepTokens(None, None)
    digest = hashlib.sha256()
    for fit in fits:
        states[fit.state] += 1
        counts = (len(fit.kept), len(fit.too_long), len(fit.after), fit.unknown_steps)
        steps = [total + count for total, count in zip(steps, counts, strict=True)]
        kept = _sum_tokens((kept, fit.kept_tokens))
        left_out = _sum_tokens((left_out, fit.left_out_tokens))
        digest.update(msgspec.json.encode((fit.id, fit.kept)))
    return TraceFit(
        context_tokens=context_tokens,
        **states,
        kept_steps=steps[0],
        too_long_steps=steps[1],
        after_steps=steps[2],
        unknown_steps=steps[3],
        kept_tokens=kept,
        left_out_tokens=left_out,
        kept_sha256=digest.hexdigest(),
    )


def dependents(conversation: Conversation) -> dict[int, list[int]]:
    """Return for each step the steps that depend on it directly."""
    following: dict[int, list[int]] = defaultdict(list)
    for step in conversation.steps:
        for other in step.depends_on:
            following[other].append(step.number)
    return following


def with_dependents(conversation: Conversation, numbers: set[int]) -> set[int]:
    """Return the steps and all that depend on them, directly or not."""
    following = dependents(conversation)
    steps, todo = set(numbers), list(numbers)
    while todo:
        new = [number for number in following.get(todo.pop(), ()) if number not in steps]
        steps.update(new)
        todo += new
    return steps


def _characters(step: TraceStep) -> int | None:
    """Return the characters that a step's own parts add to its prompt; None where a part has no text."""
    if not all(isinstance(part, MessagePart) for part in step.parts):
        return None
    return sum(message_characters(part.message) for part in step.parts if isinstance(part, MessagePart))


def _estimate(characters: int | None, characters_per_token: float | None, step: TraceStep | None = None) -> int | None:
    """Return the estimated tokens of a text. `step`: its definitions of tools are part of the prompt."""
    if step is not None and characters is None:
        counts = [part_tokens(part) for part in step.parts]
        sizes = [count for count in counts if count is not None]
        return sum(sizes) if step.continues is None and len(sizes) == len(counts) else None
    if characters is None or characters_per_token is None:
        return None
    tools = 0 if step is None or step.tools is None else len(msgspec.json.encode(step.tools))
    return math.ceil((characters + tools) / characters_per_token)


def _sum_tokens(counts: Iterable[StepTokens]) -> StepTokens:
    """Return the sums of the known counts; None where none is known."""
    prompts, outputs = list[int](), list[int]()
    for count in counts:
        prompts += [] if count.prompt is None else [count.prompt]
        outputs += [] if count.output is None else [count.output]
    return StepTokens(sum(prompts) if prompts else None, sum(outputs) if outputs else None)
