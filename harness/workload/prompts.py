"""The messages and the answer length of each request."""

import random
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

import msgspec

from harness.scenario.lengths import Pairs, length_at
from harness.scenario.scenario import Load, Prompts, Trace
from harness.scenario.structured import Structured
from harness.traces.replay import Replay, replay_of, sha256_of
from harness.workload.prompt_file import PromptRow
from harness.workload.vocabulary import SALT_WORDS, text

_KINDS = {"ticket": "customer message", "product": "product description", "log": "log excerpt"}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of harness/data/classification.jsonl, and its right label out of those of its kind."""

    kind: str
    label: str
    text: str


def item_at(seed: int, index: int) -> Item:
    """The item of a request: each comes once before any comes again."""
    return _shuffled(seed)[index % len(_items())]


def question(item: Item) -> str:
    return (
        f"Which label fits this {_KINDS[item.kind]} best? Answer with the label alone.\n"
        f"Labels: {', '.join(labels_of(item))}\n\n{item.text}\n\nLabel:"
    )


def labels_of(item: Item) -> list[str]:
    """The labels that an item may have."""
    return _labels()[item.kind]


@cache
def _items() -> tuple[Item, ...]:
    decoder = msgspec.json.Decoder(Item)
    lines = files("harness.data").joinpath("classification.jsonl").read_bytes().splitlines()
    return tuple(decoder.decode(line) for line in lines)


@cache
def _labels() -> dict[str, list[str]]:
    return {kind: sorted({item.label for item in _items() if item.kind == kind}) for kind in _KINDS}


@cache
def _shuffled(seed: int) -> tuple[Item, ...]:
    draw = random.Random(f"{seed}:classification").random
    return tuple(sorted(_items(), key=lambda item: draw()))


_SYSTEM = "system"  # place of the shared system prompt in the seeded sequence


class Message(TypedDict):
    """A chat message, as the API takes it."""

    role: str
    content: str


def messages(
    prompts: Prompts,
    seed: int,
    index: int,
    salt: str | None,
    file_rows: Sequence[PromptRow],
    pairs: Pairs = (),
    words: Sequence[str] = (),
) -> list[Message]:
    """The messages of request `index` (warm-up: below 0). `file_rows` are needed by `kind: file` only.

    The salt comes first of all, in front of the system prompt where there is one, so that nothing of the prompt
    is found in a prefix cache that was filled with another salt. Each prompt of the warm-up has words of its own after
    the shared system prompt: a row of the file or of the set that comes again in the measurement is new to the cache.
    `pairs` are the lines of a file of lengths, `words` those that are one token each, where tokens are counted.
    """
    result = _prompt(prompts, seed, index, file_rows, pairs, words)
    if index < 0:
        result[0] = _behind(text(SALT_WORDS, seed, f"warm-up{index}", words), result[0])
    if prompts.system_tokens:
        result.insert(0, {"role": "system", "content": text(prompts.system_tokens, seed, _SYSTEM, words)})
    if salt:
        result[0] = _behind(salt, result[0])
    return result


def asked_prompt_tokens(prompts: Prompts, seed: int, index: int, salt: str | None, pairs: Pairs = ()) -> int | None:
    """How many tokens `messages` have by plan, without what a chat template adds. None: nobody planned it."""
    if prompts.kind != "synthetic":
        return None
    added = prompts.system_tokens + (SALT_WORDS if index < 0 else 0) + (SALT_WORDS if salt else 0)
    return length_at(prompts.tokens, "prompt", seed, index, pairs) + added


def output_tokens(load: Load, seed: int, index: int, file_rows: Sequence[PromptRow] = (), pairs: Pairs = ()) -> int:
    """The most tokens of the answer to request `index`: as its row of a batch file says, else as the load does."""
    row = file_rows[index % len(file_rows)] if file_rows else None
    if row is not None and row.max_tokens is not None:
        return row.max_tokens
    return length_at(load.output_tokens, "output", seed, index, pairs)


def choices_at(form: Structured, seed: int, index: int) -> list[str]:
    """What request `index` leaves to choose from."""
    if form.choice == "auto":
        return labels_of(item_at(seed, index))
    return list(form.choice or [])


def label_at(prompts: Prompts, seed: int, index: int) -> str | None:
    """The right label of request `index`; None where nobody knows one."""
    return item_at(seed, index).label if prompts.kind == "classification" else None


def _prompt(
    prompts: Prompts, seed: int, index: int, file_rows: Sequence[PromptRow], pairs: Pairs, words: Sequence[str]
) -> list[Message]:
    if prompts.kind == "synthetic":
        tokens = length_at(prompts.tokens, "prompt", seed, index, pairs)
        return [{"role": "user", "content": text(tokens, seed, index, words)}]
    if prompts.kind == "classification":
        return [{"role": "user", "content": question(item_at(seed, index))}]
    row = file_rows[index % len(file_rows)]
    if row.prompt is not None:
        return [{"role": "user", "content": row.prompt}]
    return [{"role": message.role, "content": message.content} for message in row.messages or []]


def _behind(words: str, message: Message) -> Message:
    return {"role": message["role"], "content": f"{words} {message['content']}"}


_HASHED = 100  # requests of a trace that go into the hash, beside that of its file
_KEPT_TEXTS = 4096  # a block of a trace's prompts comes again and again
_KEPT_LENGTH = 1024  # tokens; longer ones are made anew, since so many of them would fill the memory


def trace_messages(replay: Replay, seed: int, index: int, salt: str | None, words: Sequence[str] = ()) -> list[Message]:
    """The messages of a trace's row: a prompt of its length, after the salt; `words`: out of these alone."""
    prompt = _trace_prompt(replay, seed, index, tuple(words))
    return [{"role": "user", "content": f"{salt} {prompt}" if salt else prompt}]


def trace_digest(trace: Trace, seed: int, folder: Path) -> bytes:
    """What a trace makes of the work: its file's content, what is taken of it, and how prompts are made of that.

    Raises HarnessError.
    """
    replay = replay_of(folder / trace.file, trace)
    taken = msgspec.structs.asdict(trace) | {"file": sha256_of(replay.path), "format": replay.format}
    first = [trace_messages(replay, seed, index, None) for index in range(min(len(replay), _HASHED))]
    return msgspec.json.encode([taken, first])


def _trace_prompt(replay: Replay, seed: int, index: int, words: tuple[str, ...]) -> str:
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
