"""The work: every request's messages, as a function of the seed and the request's place in the sequence."""

import hashlib
import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from harness.errors import HarnessError
from harness.scenario import Load, Prompts, Scenario, taken_together

_TIMED_REQUESTS = 1000  # of a load that has no fixed number, so many go into the hash
_SALT_WORDS = 4
_KINDS = {"ticket": "customer message", "product": "product description", "log": "log excerpt"}
_SYSTEM = "system"  # place of the shared system prompt in the seeded sequence


class Message(TypedDict):
    """A chat message, as the API takes it."""

    role: str
    content: str


class Row(msgspec.Struct, frozen=True):
    """A line of a prompt file: one of the two. Other keys are ignored."""

    prompt: str | None = None
    messages: list["RowMessage"] | None = None


class RowMessage(msgspec.Struct, frozen=True):
    """A message in a prompt file."""

    role: Literal["system", "user", "assistant"]
    content: str


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of harness/data/classification.jsonl, and its right label out of those of its kind."""

    kind: str
    label: str
    text: str


def messages(prompts: Prompts, seed: int, index: int, salt: str | None, file_rows: Sequence[Row]) -> list[Message]:
    """The messages of request `index` (warm-up: below 0). `file_rows` are needed by `kind: file` only.

    The salt comes first of all, in front of the system prompt where there is one, so that nothing of the prompt
    is found in a prefix cache that was filled with another salt. Each prompt of the warm-up has words of its own after
    the shared system prompt: a row of the file or of the set that comes again in the measurement is new to the cache.
    """
    result = _prompt(prompts, seed, index, file_rows)
    if index < 0:
        result[0] = _behind(text(_SALT_WORDS, seed, f"warm-up{index}"), result[0])
    if prompts.system_tokens:
        result.insert(0, {"role": "system", "content": text(prompts.system_tokens, seed, _SYSTEM)})
    if salt:
        result[0] = _behind(salt, result[0])
    return result


def _prompt(prompts: Prompts, seed: int, index: int, file_rows: Sequence[Row]) -> list[Message]:
    if prompts.kind == "synthetic":
        return [{"role": "user", "content": text(prompts.tokens, seed, index)}]
    if prompts.kind == "classification":
        return [{"role": "user", "content": _question(_shuffled(seed)[index % len(_items())])}]
    row = file_rows[index % len(file_rows)]
    if row.prompt is not None:
        return [{"role": "user", "content": row.prompt}]
    return [{"role": message.role, "content": message.content} for message in row.messages or []]


def _behind(words: str, message: Message) -> Message:
    return {"role": message["role"], "content": f"{words} {message['content']}"}


def text(tokens: int, seed: int, place: int | str) -> str:
    """`tokens` common words, each of which is one token in the usual vocabularies."""
    words = _words()
    number = len(words)
    draw = random.Random(f"{seed}:{place}").random  # the one method whose results Python promises to keep
    return " ".join([words[int(draw() * number)] for _ in range(tokens)])


def salt_words(run_id: str, cell_id: str) -> str:
    """Four words that belong to this cell of this run alone: one in about 10^11 others has the same."""
    return text(_SALT_WORDS, 0, f"{run_id}/{cell_id}")


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a prompt file. Raises HarnessError that names the file and the line."""
    decoder = msgspec.json.Decoder(Row)
    rows: list[Row] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise HarnessError(f"{path}: the prompts cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _bad_row(path, number, str(error)) from None
        if (row.prompt is None) == (row.messages is None):
            raise _bad_row(path, number, "exactly one of 'prompt' and 'messages' is expected")
        if row.prompt == "" or row.messages == []:
            raise _bad_row(path, number, "the prompt is empty")
        rows.append(row)
    if not rows:
        raise HarnessError(f"{path}: there are no prompts in it", next_step=_ROW_ADVICE)
    return rows


def workload_sha256(scenario: Scenario, folder: Path) -> str:
    """The hash of all that is asked of a server in this scenario, without the salt, whose words differ by cell.

    Per load: the parameters that shape it, and its measured requests (the first 1000 where time limits them) in the
    groups that are sent together: bursts or conversations.
    """
    rows = read_rows(folder / scenario.prompts.file) if scenario.prompts.file else []
    digest = hashlib.sha256()
    for name, load in sorted(scenario.loads.items()):
        digest.update(msgspec.json.encode([name, scenario.seed, _shape(load)]))
        number, group = load.requests or _TIMED_REQUESTS, taken_together(load)
        for first in range(0, number, group):
            indices = range(first, min(first + group, number))
            together = [messages(scenario.prompts, scenario.seed, index, None, rows) for index in indices]
            digest.update(msgspec.json.encode(together))
    return digest.hexdigest()


def _shape(load: Load) -> dict[str, object]:
    keys = ("user", "users", "requests", "duration_s", "batch_size", "turns", "think_s", "output_tokens", "output")
    shape = {key: getattr(load, key) for key in keys}
    return shape if load.arrivals is None else shape | {"arrivals": load.arrivals}


_ROW_ADVICE = 'Each line is a JSON object: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'


def _bad_row(path: str | Path, number: int, problem: str) -> HarnessError:
    return HarnessError(f"{path}:{number}: {problem}", next_step=_ROW_ADVICE)


def _question(item: Item) -> str:
    return (
        f"Which label fits this {_KINDS[item.kind]} best? Answer with the label alone.\n"
        f"Labels: {', '.join(_labels()[item.kind])}\n\n{item.text}\n\nLabel:"
    )


@cache
def _words() -> tuple[str, ...]:
    return tuple(files("harness.data").joinpath("words.txt").read_text(encoding="ascii").split())


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
