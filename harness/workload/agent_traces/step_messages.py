"""The messages of a step: the recorded ones, or made texts, whose equal parts are equal."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.workload import text
from harness.workload.agent_traces.conversation import (
    BlockPart,
    ChatMessage,
    Conversation,
    FillerPart,
    MessagePart,
    TraceStep,
    prompt_parts,
)


class StepMessages:
    """Makes the messages of the steps of one conversation. It keeps the texts of blocks, so use one for each.

    salt: words of the cell and the repetition. Recorded texts start with them; made texts depend on them, and have no
    more tokens for that. So no cache has a prompt of another cell or repetition.
    """

    def __init__(self, conversation: Conversation, seed: int, salt: str = "", words: Sequence[str] = ()) -> None:
        self._conversation = conversation
        self._seed = seed
        self._salt = salt
        self._words = words
        # Equal ids of several conversations are equal tokens only in the global scope.
        is_global = conversation.scope == "global"
        self._scope = "global" if is_global else f"{Path(conversation.file).name} {conversation.id}"
        self._blocks: dict[tuple[int, int], str] = {}

    def of(self, step: TraceStep) -> list[ChatMessage]:
        parts = prompt_parts(self._conversation, step)
        if all(isinstance(part, MessagePart) for part in parts):
            return self._salted([part.message for part in parts if isinstance(part, MessagePart)])
        return [{"role": "user", "content": self._made_text(parts)}]

    def _salted(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        if not self._salt or not messages:
            return messages
        content: Any = messages[0].get("content")
        if isinstance(content, list):
            content = [{"type": "text", "text": self._salt}, *content]
        else:
            content = f"{self._salt}\n{content}" if content else self._salt
        return [{**messages[0], "content": content}, *messages[1:]]

    def _made_text(self, parts: Sequence[object]) -> str:
        pieces: list[str] = []
        before = hashlib.blake2b(digest_size=8)  # of all parts so far: a filler is equal only after equal parts
        for part in parts:
            if isinstance(part, BlockPart):
                pieces += [self._block(block, part.tokens) for block in part.ids]
                before.update(repr(part.ids[-1:]).encode())
            elif isinstance(part, FillerPart):
                before.update(f"{part.seed} {part.tokens}".encode())
                pieces.append(self._text(part.tokens, f"filler {before.hexdigest()}"))
            elif isinstance(part, MessagePart):
                raise TypeError("a prompt has either messages or made texts")
        return " ".join(pieces)

    def _block(self, id: int, tokens: int) -> str:
        block = self._blocks.get((id, tokens))
        if block is None:
            block = self._blocks[id, tokens] = self._text(tokens, f"block {id}")
        return block

    def _text(self, tokens: int, place: str) -> str:
        return text(tokens, self._seed, f"{self._salt} {self._scope} {place}", self._words)


def answer_tokens(step: TraceStep) -> tuple[int | None, bool]:
    """Return `max_tokens` of a step's answer, and whether the answer has exactly that length; None: as the load says.

    Where only lengths are recorded, the length is exact; 1 for an empty answer, because servers refuse 0. A recorded
    text is no length for another model: its answer stops by itself, at most at the step's own limit or the load's.
    """
    if step.output is None and step.output_tokens is not None:
        return max(1, step.output_tokens), True
    return step.max_output_tokens or None, False
