"""The messages and the answer length of each request."""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from harness.errors import HarnessError
from harness.files import read_text
from harness.scenario import SERVER_TOKENIZER, Load, Prompts, Scenario, Trace, requests_per_task
from harness.scenario.behaviour import Lengths, Pairs, length_at, read_length_file
from harness.workload.prompt_file import PromptRow, read_rows
from harness.workload.traces import Replay, replay_of, sha256_of

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
    return _labels()[item.kind]


@cache
def _items() -> tuple[Item, ...]:
    decoder = msgspec.json.Decoder(Item)
    lines = files("harness").joinpath("data", "classification.jsonl").read_bytes().splitlines()
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
    role: str
    content: str


class Workload(NamedTuple):
    """What each request of a load is, by its index in the sequence. The indices of the warm-up are below 0."""

    prompts: Prompts
    load: Load
    seed: int
    salt: str | None = None
    rows: Sequence[PromptRow] = ()  # of a file of prompts
    prompt_lengths: Pairs = ()  # lines of a file of lengths
    output_lengths: Pairs = ()
    words: Sequence[str] = ()  # those that are one token each, where tokens are counted
    replay: Replay | None = None  # of a trace, of which the warm-up is no part

    def messages(self, index: int) -> list[Message]:
        """The messages of a request.

        The salt comes first of all, in front of the system prompt where there is one, so that nothing of the prompt is
        found in a prefix cache that was filled with another salt. Each prompt of the warm-up has words of its own after
        the shared system prompt: a row of the file or of the set that comes again in the measurement is new to the
        cache.
        """
        prompts, seed, words = self.prompts, self.seed, self.words
        if self.replay is not None and index >= 0:
            result = _user(_trace_prompt(self.replay, seed, index, tuple(words)))
        else:
            result = self._prompt(index)
            if index < 0:
                result[0] = _behind(text(SALT_WORDS, seed, f"warm-up{index}", words), result[0])
            if prompts.system_tokens:
                result.insert(0, {"role": "system", "content": text(prompts.system_tokens, seed, _SYSTEM, words)})
        if self.salt:
            result[0] = _behind(self.salt, result[0])
        return result

    def _prompt(self, index: int) -> list[Message]:
        prompts, seed = self.prompts, self.seed
        if prompts.kind == "synthetic":
            tokens = length_at(prompts.tokens, "prompt", seed, index, self.prompt_lengths)
            return _user(text(tokens, seed, index, self.words))
        if prompts.kind == "classification":
            return _user(question(item_at(seed, index)))
        row = self.rows[index % len(self.rows)]
        if row.prompt is not None:
            return _user(row.prompt)
        return [{"role": message.role, "content": message.content} for message in row.messages or []]

    def prompt_tokens(self, index: int) -> int | None:
        """How many tokens `messages` have by plan, without what a chat template adds. None: not planned."""
        salt = SALT_WORDS if self.salt else 0
        if self.replay is not None and index >= 0:
            return self.replay.prompt_tokens[index] + salt
        if self.prompts.kind != "synthetic":
            return None
        added = self.prompts.system_tokens + (SALT_WORDS if index < 0 else 0) + salt
        return length_at(self.prompts.tokens, "prompt", self.seed, index, self.prompt_lengths) + added

    def output_tokens(self, index: int) -> int:
        """The most tokens of the answer: as the row of a trace or a batch file says, else as the load does."""
        if self.replay is not None and index >= 0:
            return self.replay.output_tokens[index]
        row = self.rows[index % len(self.rows)] if self.rows else None
        if row is not None and row.max_tokens is not None:
            return row.max_tokens
        return length_at(self.load.output_tokens, "output", self.seed, index, self.output_lengths)

    def choices(self, index: int) -> list[str]:
        """What a request leaves to choose from."""
        form = self.load.answer
        if form is not None and form.choice == "auto":
            return labels_of(item_at(self.seed, index))
        return [] if form is None else list(form.choice or [])

    def label(self, index: int) -> str | None:
        """The right label; None where it is unknown."""
        return item_at(self.seed, index).label if self.prompts.kind == "classification" else None


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _behind(words: str, message: Message) -> Message:
    return {"role": message["role"], "content": f"{words} {message['content']}"}


_HASHED = 100  # requests of a trace that go into the hash, next to that of its file
_KEPT_TEXTS = 4096  # a block of a trace's prompts comes again and again
_KEPT_LENGTH = 1024  # tokens; longer ones are made anew, since so many of them would fill the memory


def trace_digest(trace: Trace, seed: int, folder: Path) -> bytes:
    """What a trace makes of the work: its file's content, what is taken of it, and how prompts are made of that.

    Raises HarnessError.
    """
    replay = replay_of(folder / trace.file, trace)
    taken = msgspec.structs.asdict(trace) | {"file": sha256_of(replay.path), "format": replay.format}
    taken = {"most" if key == "max_requests" else key: value for key, value in taken.items()}
    first = [_user(_trace_prompt(replay, seed, index, ())) for index in range(min(len(replay), _HASHED))]
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


SALT_WORDS = 4


def text(tokens: int, seed: int, place: int | str, words: Sequence[str] = ()) -> str:
    """`tokens` common words, each of which is one token in the usual vocabularies; `words`: out of these alone."""
    words = words or common()
    number = len(words)
    draw = random.Random(f"{seed}:{place}").random  # the one method whose results Python promises to keep
    return " ".join([words[int(draw() * number)] for _ in range(tokens)])


def salt_words(run_id: str, cell_id: str, words: Sequence[str] = ()) -> str:
    """Four words that belong to this cell of this run alone: one in about 10^11 others has the same."""
    return text(SALT_WORDS, 0, f"{run_id}/{cell_id}", words)


@cache
def common() -> tuple[str, ...]:
    return tuple(files("harness").joinpath("data", "words.txt").read_text(encoding="ascii").split())


ENOUGH = 100  # with fewer words, texts repeat themselves so much that a prefix cache or a draft model has an easy time
EXTRA = "tokenizer"  # the optional dependencies of pyproject.toml that hold `tokenizers`
_GROUP = 64  # words that are counted together; only where the sum is not theirs, smaller groups are
_TRIED = (1, 2, 17, 64, 256)  # lengths of the texts that are counted to see whether it holds

Count = Callable[[str], int]
"""The number of tokens of a text, without any that mark its beginning or end."""


def words_of(count: Count, whose: str) -> tuple[str, ...]:
    """The common words of which each adds exactly one token to a text. Raises HarnessError where that cannot be had."""
    found = _single(common(), count)
    if len(found) < ENOUGH:
        raise HarnessError(
            f"{whose}: only {len(found)} of {len(common())} common words are one token each, too few for varied texts",
            next_step="Remove prompts.tokenizer: a word is then taken for a token, and the server's count is recorded.",
        )
    for tokens in _TRIED:
        for place in range(3):
            got = count(text(tokens, 0, f"counted-{place}", found))
            if got != tokens:
                raise HarnessError(
                    f"{whose}: a text of {tokens} words that are one token each has {got} tokens: "
                    "exact lengths cannot be had by choosing words",
                    next_step="Remove prompts.tokenizer: a word is then taken for a token.",
                )
    return found


@cache
def one_token_words(path: Path) -> tuple[str, ...]:
    """The same by a tokenizer.json on this machine. Raises HarnessError. Nothing is fetched."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise HarnessError(
            "prompts.tokenizer: a local tokenizer needs the package tokenizers, which is not installed",
            next_step=f"pip install 'amd-llm-load[{EXTRA}]', or write `tokenizer: server`.",
        ) from None
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as error:  # the package raises nothing narrower
        raise HarnessError(
            f"{path}: not a tokenizer ({str(error)[:200]})", next_step="Give the tokenizer.json of the model."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return words_of(lambda words: len(tokenizer.encode(words, add_special_tokens=False).ids), str(path))


def _single(words: Sequence[str], count: Count, group: int = _GROUP) -> tuple[str, ...]:
    """Those of `words` that are one token, at the beginning of a text as well as within it.

    Each word is at least one token, so a group that has as many tokens as words holds no other.
    """
    found: list[str] = []
    for first in range(0, len(words), group):
        part = words[first : first + group]
        if _exact(part, count):
            found += part
        elif len(part) > 1:
            found += _single(part, count, max(1, len(part) // 4))
    return tuple(word for word in found if group != _GROUP or count(word) == 1)


def _exact(words: Sequence[str], count: Count) -> bool:
    return count(" ".join(f"{word} {word}" for word in words)) == 2 * len(words)


_OLD_KEYS = {"max_s": "most_s", "max": "most", "min": "least"}
_TIMED_REQUESTS = 1000  # of a load that has no fixed number, so many go into the hash


def workload_sha256(scenario: Scenario, folder: Path) -> str:
    """The hash of all that is asked of a server in this scenario, without the salt, whose words differ by cell.

    Per load: the parameters that shape it, and its measured requests (the first 1000 where time limits them) in the
    groups that are sent together: bursts or conversations. Words that a server's own tokenizer chooses are not known
    yet; that they are chosen is part of the sum.
    """
    prompts = scenario.prompts
    rows = read_rows(folder / prompts.file) if prompts.file else []
    pairs = pairs_of(prompts.tokens, folder)
    words = local_words(prompts, folder)
    by_row = any(row.max_tokens is not None for row in rows)
    digest = hashlib.sha256()
    if prompts.tokenizer is not None:
        digest.update(b"tokens counted by the server" if prompts.tokenizer == SERVER_TOKENIZER else b"tokens counted")
    for name, load in sorted(scenario.loads.items()):
        digest.update(msgspec.json.encode([name, scenario.seed, _shape(load)]))
        if load.trace is not None:
            digest.update(trace_digest(load.trace, scenario.seed, folder))
            continue
        lengths = pairs_of(load.output_tokens, folder)
        work = Workload(prompts, load, scenario.seed, None, rows, pairs, lengths, words)
        number, group = load.requests or _TIMED_REQUESTS, requests_per_task(load)
        for first in range(0, number, group):
            together = [work.messages(index) for index in range(first, min(first + group, number))]
            digest.update(msgspec.json.encode(together))
        if by_row or not isinstance(load.output_tokens, int):
            digest.update(msgspec.json.encode([work.output_tokens(index) for index in range(number)]))
    return digest.hexdigest()


def pairs_of(lengths: int | Lengths, folder: Path) -> Pairs:
    """The lines of the file that lengths come from, if they come from one. Raises HarnessError."""
    return read_length_file(folder / lengths.file) if isinstance(lengths, Lengths) and lengths.file else ()


def local_words(prompts: Prompts, folder: Path) -> tuple[str, ...]:
    """The words that a local tokenizer takes for one token each; none where there is no such. Raises HarnessError."""
    if prompts.tokenizer is None or prompts.tokenizer == SERVER_TOKENIZER:
        return ()
    return one_token_words(folder / prompts.tokenizer)


def _shape(load: Load) -> Any:
    keys = ("user", "users", "requests", "duration_s", "batch_size", "turns", "think_s", "output_tokens", "output")
    shape = {key: getattr(load, key) for key in keys}
    shape |= {} if load.endpoint == "chat" else {"endpoint": load.endpoint}
    shape |= {} if load.answer is None else {"answer": load.answer}
    behaviour = ("think", "abandon", "regenerate", "in_flight", "agent", "rag", "stages")
    shape |= {key: value for key in behaviour if (value := getattr(load, key))}
    shape |= {} if load.arrivals is None else {"arrivals": load.arrivals}
    return _with_old_keys(msgspec.to_builtins(shape))


def _with_old_keys(value: Any) -> Any:
    """The parameters with the keys of 0.2.0, so that the hash of a workload is the same as in older runs."""
    if isinstance(value, list):
        return [_with_old_keys(one) for one in value]
    if isinstance(value, dict):
        return {_OLD_KEYS.get(key, key): one if key == "answer" else _with_old_keys(one) for key, one in value.items()}
    return value
