"""What the requests of a trace say: texts of its lengths, in which what it shared is shared again."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from harness.scenario.scenario import Trace
from harness.traces.replay import Replay, replay_of, sha256_of
from harness.workload.sequence import Message
from harness.workload.words import text

_HASHED = 100  # requests of a trace that go into the hash, beside that of its file
_KEPT_TEXTS = 4096  # a block of a trace's prompts comes again and again
_KEPT_LENGTH = 1024  # tokens; longer ones are made anew, since so many of them would fill the memory


def trace_messages(replay: Replay, seed: int, index: int, salt: str | None, words: Sequence[str] = ()) -> list[Message]:
    """The messages of a trace's row: a prompt of its length, after the salt; `words`: out of these alone."""
    prompt = _prompt(replay, seed, index, tuple(words))
    return [{"role": "user", "content": f"{salt} {prompt}" if salt else prompt}]


def trace_digest(trace: Trace, seed: int, folder: Path) -> bytes:
    """What a trace makes of the work: its file's content, what is taken of it, and how prompts are made of that.

    Raises HarnessError.
    """
    replay = replay_of(folder / trace.file, trace)
    taken = msgspec.structs.asdict(trace) | {"file": sha256_of(replay.path), "format": replay.format}
    first = [trace_messages(replay, seed, index, None) for index in range(min(len(replay), _HASHED))]
    return msgspec.json.encode([taken, first])


def _prompt(replay: Replay, seed: int, index: int, words: tuple[str, ...]) -> str:
    """The prompt of a row.

    With hash_ids, each id is a block of its own text, so equal prefixes are equal again and the server's prefix cache
    sees the reuse that the trace had. Of a conversation, each prompt is the start of one text: the later, the longer.
    """
    tokens = replay.prompt_tokens[index]
    conversation = replay.conversation(index)
    if conversation is not None:
        return text(tokens, seed, f"conversation {conversation}", words)
    parts = []
    for block in replay.hash_ids(index):
        length = min(tokens, replay.trace.block_tokens)
        if length:
            parts.append(_block(length, seed, f"block {block}", words))
        tokens -= length
    if tokens:
        parts.append(text(tokens, seed, f"row {index}", words))
    return " ".join(parts)


def _block(tokens: int, seed: int, place: str, words: tuple[str, ...]) -> str:
    return (_kept if tokens <= _KEPT_LENGTH else text)(tokens, seed, place, words)


@lru_cache(_KEPT_TEXTS)
def _kept(tokens: int, seed: int, place: str, words: tuple[str, ...]) -> str:
    return text(tokens, seed, place, words)
