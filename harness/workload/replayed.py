"""What the requests of a trace say: texts of its lengths, in which what it shared is shared again."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from harness.scenario.scenario import Trace
from harness.traces.prompts import prompt_of
from harness.traces.replay import Replay, replay_of, sha256_of
from harness.workload.sequence import Message
from harness.workload.words import text

_HASHED = 100  # requests of a trace that go into the hash, beside that of its file
_KEPT_TEXTS = 4096  # a block of a trace's prompts comes again and again
_KEPT_LENGTH = 1024  # tokens; longer ones are made anew, since so many of them would fill the memory


def trace_messages(replay: Replay, seed: int, index: int, salt: str | None, words: Sequence[str] = ()) -> list[Message]:
    """The messages of a trace's row: a prompt of its length, after the salt; `words`: out of these alone."""
    chosen = tuple(words)
    prompt = prompt_of(replay, index, lambda tokens, place: _text(seed, tokens, place, chosen))
    return [{"role": "user", "content": f"{salt} {prompt}" if salt else prompt}]


def trace_digest(trace: Trace, seed: int, folder: Path) -> bytes:
    """What a trace makes of the work: its file's content, what is taken of it, and how prompts are made of that.

    Raises HarnessError.
    """
    replay = replay_of(folder / trace.file, trace)
    taken = msgspec.structs.asdict(trace) | {"file": sha256_of(replay.path), "format": replay.format}
    first = [trace_messages(replay, seed, index, None) for index in range(min(len(replay), _HASHED))]
    return msgspec.json.encode([taken, first])


def _text(seed: int, tokens: int, place: str, words: tuple[str, ...]) -> str:
    if place.startswith("block") and tokens <= _KEPT_LENGTH:
        return _kept(tokens, seed, place, words)
    return text(tokens, seed, place, words)


@lru_cache(_KEPT_TEXTS)
def _kept(tokens: int, seed: int, place: str, words: tuple[str, ...]) -> str:
    return text(tokens, seed, place, words)
