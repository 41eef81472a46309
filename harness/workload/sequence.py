"""What each request says, and how long its answer is to be."""

from collections.abc import Sequence
from typing import TypedDict

from harness.scenario.lengths import Pairs, length_at
from harness.scenario.scenario import Load, Prompts
from harness.scenario.structured import Structured
from harness.workload.classification import item_at, labels_of, question
from harness.workload.rows import Row
from harness.workload.words import SALT_WORDS, text

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
    file_rows: Sequence[Row],
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


def output_tokens(load: Load, seed: int, index: int, file_rows: Sequence[Row] = (), pairs: Pairs = ()) -> int:
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
    prompts: Prompts, seed: int, index: int, file_rows: Sequence[Row], pairs: Pairs, words: Sequence[str]
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
