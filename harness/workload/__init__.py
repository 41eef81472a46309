"""The messages and the answer length of each request, by its index in the seeded sequence."""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.base.errors import HarnessError
from harness.base.files import read_text
from harness.scenario import (
    MADE_KINDS,
    SERVER_TOKENIZER,
    Load,
    Prompts,
    Scenario,
    Trace,
    asks_own_words,
    prompts_of,
    requests_per_task,
)
from harness.scenario.behaviour import Lengths, Pairs, length_at, read_length_file
from harness.workload.agent_traces.trace_totals import TraceTotals, trace_totals
from harness.workload.made_texts import made_context, made_prompt
from harness.workload.prompt_file import Message as Message
from harness.workload.prompt_file import PromptRow, read_rows
from harness.workload.traces import Replay, cached_replay, sha256_of

_KINDS = {"ticket": "customer message", "product": "product description", "log": "log excerpt"}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of harness/data/classification.jsonl, with its right label, one of the labels of its kind."""

    kind: str
    label: str
    text: str


def _item_at(seed: int, index: int) -> Item:
    """Return the item of a request. Each item comes once before any comes again."""
    return _shuffled(seed)[index % len(_items())]


def _question(item: Item) -> str:
    return (
        f"Which label fits this {_KINDS[item.kind]} best? Answer with the label alone.\n"
        f"Labels: {', '.join(_labels()[item.kind])}\n\n{item.text}\n\nLabel:"
    )


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


@cache
def questions() -> list[PromptRow]:
    """The questions with a known answer that ship; tests/support/made_questions.py makes them."""
    return read_rows(Path(str(files("harness").joinpath("data", "questions.jsonl"))))


_SYSTEM_PLACE = "system"  # place of the shared system prompt in the seeded sequence


class Workload(NamedTuple):
    """Defines each request of a load by its index in the sequence. The indices of the warm-up are below 0."""

    prompts: Prompts
    load: Load
    seed: int
    salt: str | None = None
    rows: Sequence[PromptRow] = ()  # of a file of prompts
    prompt_lengths: Pairs = ()  # lines of a file of lengths
    output_lengths: Pairs = ()
    words: Sequence[str] = ()  # words of one token each, if tokens are counted
    replay: Replay | None = None  # of a trace; the warm-up does not use it

    def messages(self, index: int) -> list[Message]:
        """Return the messages of a request.

        The salt comes first, before a system prompt: no part of the prompt is in a prefix cache that was filled with
        another salt. Each prompt of the warm-up has its own words after the shared system prompt: if the measurement
        uses the same row or item, it is new to the cache.
        """
        prompts, seed, words = self.prompts, self.seed, self.words
        if self.replay is not None and index >= 0:
            messages = _user_message(_trace_prompt(self.replay, seed, index, tuple(words)))
        else:
            messages = self._prompt(index)
            if index < 0:
                messages[0] = _with_prefix(text(SALT_WORDS, seed, f"warm-up{index}", words), messages[0])
            if prompts.system_tokens and self.answer_source != "computed":
                messages.insert(0, {"role": "system", "content": self._system_prompt()})
        if self.salt and self.answer_source is None:  # the same question is asked in every cell
            messages[0] = _with_prefix(self.salt, messages[0])
        return messages

    def _system_prompt(self) -> str:
        prompts = self.prompts
        if prompts.kind in MADE_KINDS:
            return made_context(prompts.kind, prompts.system_tokens, self.seed, _SYSTEM_PLACE)
        return text(prompts.system_tokens, self.seed, _SYSTEM_PLACE, self.words)

    def _prompt(self, index: int) -> list[Message]:
        prompts, seed = self.prompts, self.seed
        if prompts.kind in MADE_KINDS and self.answer_source is None:
            tokens = length_at(prompts.tokens, "prompt", seed, index, self.prompt_lengths)
            return _user_message(made_prompt(prompts.kind, tokens, seed, index))
        if prompts.kind == "synthetic" and self.answer_source is None:
            tokens = length_at(prompts.tokens, "prompt", seed, index, self.prompt_lengths)
            return _user_message(text(tokens, seed, index, self.words))
        if prompts.kind == "classification" and self.answer_source is None:
            return _user_message(_question(_item_at(seed, index)))
        row = self._rows[index % len(self._rows)]
        if row.prompt is not None:
            return _user_message(row.prompt)
        return list(row.messages or [])

    def prompt_tokens(self, index: int) -> int | None:
        """Return the planned tokens of `messages`, without those of a chat template; None: not planned."""
        salt = SALT_WORDS if self.salt else 0
        if self.replay is not None and index >= 0:
            return self.replay.prompt_tokens[index] + salt
        if self.prompts.kind != "synthetic" or self.answer_source is not None:
            return None
        added = self.prompts.system_tokens + (SALT_WORDS if index < 0 else 0) + salt
        return length_at(self.prompts.tokens, "prompt", self.seed, index, self.prompt_lengths) + added

    def output_tokens(self, index: int) -> int:
        """Return the maximum tokens of the answer: of its row in a trace or batch file, else of the load."""
        if self.replay is not None and index >= 0:
            return self.replay.output_tokens[index]
        row = self._rows[index % len(self._rows)] if self._rows else None
        if row is not None and row.max_tokens is not None:
            return row.max_tokens
        return length_at(self.load.output_tokens, "output", self.seed, index, self.output_lengths)

    def choices(self, index: int) -> list[str]:
        """Return the labels that the answer to a request may have; none if it is free."""
        answer = self.load.answer
        if answer is not None and answer.choice == "auto":
            return _labels()[_item_at(self.seed, index).kind]
        return [] if answer is None else list(answer.choice or [])

    @property
    def answer_source(self) -> str | None:
        """Whose right answers are known; None: those of no request."""
        return None if self.load.answer is None else self.load.answer.known

    @property
    def _rows(self) -> Sequence[PromptRow]:
        return questions() if self.answer_source == "computed" else self.rows

    def item(self, index: int) -> int | None:
        """Return the number of the question of a measured request, where the right answers are known."""
        if self.answer_source is None or index < 0:
            return None
        return index % len(self._rows)

    def label(self, index: int) -> str | None:
        """Return the right label or answer; None if it is unknown."""
        if self.answer_source is not None:
            return self._rows[index % len(self._rows)].answer
        return _item_at(self.seed, index).label if self.prompts.kind == "classification" else None


def _user_message(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _with_prefix(words: str, message: Message) -> Message:
    return {"role": message["role"], "content": f"{words} {message['content']}"}


_HASHED_ROWS = 100  # rows of a trace whose prompts are in the workload hash, next to the hash of the file
_CACHED_BLOCKS = 4096  # prompts of a trace share blocks
_MAX_CACHED_TOKENS = 1024  # so many longer blocks would fill the memory


def _trace_parameters(trace: Trace, seed: int, folder: Path) -> list[Any]:
    """Return the part of the workload that a trace defines: its file, its selection, and prompts made of it.

    Raises HarnessError.
    """
    replay = cached_replay(folder / trace.file, trace)
    selection = msgspec.structs.asdict(trace) | {"file": sha256_of(replay.path), "format": replay.format}
    rows = range(min(len(replay), _HASHED_ROWS))
    return [selection, [_user_message(_trace_prompt(replay, seed, index, ())) for index in rows]]


def _trace_prompt(replay: Replay, seed: int, index: int, words: tuple[str, ...]) -> str:
    """Return the prompt of a row.

    Each of its hash_ids is a block of text, so rows with equal ids share a prefix and the server's prefix cache has the
    reuse of the trace. The prompts of a conversation are starts of one text, each longer than the one before.
    """
    tokens = replay.prompt_tokens[index]
    conversation = replay.conversation(index)
    if conversation is not None:
        return text(tokens, seed, f"conversation {conversation}", words)
    parts = []
    for block in replay.hash_ids(index):
        length = min(tokens, replay.trace.block_tokens)
        if length:
            block_text = _cached_text if length <= _MAX_CACHED_TOKENS else text
            parts.append(block_text(length, seed, f"block {block}", words))
        tokens -= length
    if tokens:
        parts.append(text(tokens, seed, f"row {index}", words))
    return " ".join(parts)


SALT_WORDS = 4


def text(tokens: int, seed: int, place: int | str, words: Sequence[str] = ()) -> str:
    """Return a text of `tokens` words, each of which is one token in the usual vocabularies.

    `words` are the words to choose from, instead of the common ones. Texts differ by `seed` and `place`.
    """
    words = words or common_words()
    count = len(words)
    draw = random.Random(f"{seed}:{place}").random  # the only method whose results Python promises to keep
    return " ".join([words[int(draw() * count)] for _ in range(tokens)])


_cached_text = lru_cache(_CACHED_BLOCKS)(text)


def salt_words(run_id: str, cell_id: str, words: Sequence[str] = ()) -> str:
    """Return four words for this cell of this run: one in about 10^11 other cells has the same."""
    return text(SALT_WORDS, 0, f"{run_id}/{cell_id}", words)


@cache
def common_words() -> tuple[str, ...]:
    return tuple(files("harness").joinpath("data", "words.txt").read_text(encoding="ascii").split())


MIN_WORDS = 100  # texts of fewer words would repeat so much that a prefix cache or a draft model has an easy time
EXTRA = "tokenizer"  # the optional dependencies of pyproject.toml with the package `tokenizers`
_GROUP_WORDS = 64  # words that are counted together
_TESTED_LENGTHS = (1, 2, 17, 64, 256)  # lengths of the texts whose tokens are counted as a test

Count = Callable[[str], int]
"""Counts the tokens of a text, without those that mark its start or end."""


def one_token_words(count: Count, tokenizer: str) -> tuple[str, ...]:
    """Return the common words that each add exactly one token to a text.

    Raises HarnessError, which names the `tokenizer`, if there are too few, or if texts of them have other lengths.
    """
    single = _single_token_words(common_words(), count)
    words = tuple(word for word in single if count(word) == 1)  # also at the start of a text
    tests = [(tokens, f"counted-{number}") for tokens in _TESTED_LENGTHS for number in range(3)]
    if len(words) < MIN_WORDS or any(count(text(tokens, 0, place, words)) != tokens for tokens, place in tests):
        raise HarnessError(
            f"{tokenizer}: {len(words)} of {len(common_words())} common words are one token each, too few for varied "
            "texts, or texts of them have other lengths",
            next_step="Remove prompts.tokenizer: a word is then taken for a token, and the server's count is recorded.",
        )
    return words


@cache
def words_of_tokenizer(path: Path) -> tuple[str, ...]:
    """Return the one-token words of a tokenizer.json on this machine. Raises HarnessError. Nothing is fetched."""
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
    return one_token_words(lambda words: len(tokenizer.encode(words, add_special_tokens=False).ids), str(path))


def _single_token_words(words: Sequence[str], count: Count, group: int = _GROUP_WORDS) -> list[str]:
    """Return those of `words` that are one token within a text.

    Each word has at least one token. So if a group has as many tokens as words, all are single; otherwise it is split.
    """
    single: list[str] = []
    for first in range(0, len(words), group):
        part = words[first : first + group]
        if count(" ".join(f"{word} {word}" for word in part)) == 2 * len(part):
            single += part
        elif len(part) > 1:
            single += _single_token_words(part, count, max(1, len(part) // 4))
    return single


_TIMED_REQUESTS = 1000  # requests in the hash of a load without a fixed number


def workload_sha256(scenario: Scenario, folder: Path) -> str:
    """Return the hash of all requests of this scenario, without the salt, which differs by cell. Raises HarnessError.

    It has for each load the parameters, and the measured requests (the first 1000 of a timed load) in the groups that
    are sent together: bursts or conversations. If the server's tokenizer chooses the words, which are unknown here, it
    has this fact.
    """
    words, tokenizer = local_words(scenario.prompts, folder), scenario.prompts.tokenizer
    digest = hashlib.sha256()
    if tokenizer is not None:
        digest.update(b"tokens counted by the server" if tokenizer == SERVER_TOKENIZER else b"tokens counted")
    files = {prompts_of(scenario, load).file for load in scenario.loads.values()}
    rows_of = {file: read_rows(folder / file) if file else [] for file in files}
    traces = totals_of_traces(scenario, folder)
    for name, load in sorted(scenario.loads.items()):
        digest.update(msgspec.json.encode([name, scenario.seed, _load_parameters(load, scenario.prompts)]))
        if load.trace is not None:
            digest.update(msgspec.json.encode(_trace_parameters(load.trace, scenario.seed, folder)))
            continue
        if name in traces:
            digest.update(msgspec.json.encode([traces[name].sha256, traces[name].fit.kept_sha256]))
            continue
        prompts, lengths = prompts_of(scenario, load), pairs_of(load.output_tokens, folder)
        rows, pairs = rows_of[prompts.file], pairs_of(prompts.tokens, folder)
        workload = Workload(prompts, load, scenario.seed, None, rows, pairs, lengths, words)
        count, group = load.requests or _TIMED_REQUESTS, requests_per_task(load)
        for first in range(0, count, group):
            requests = [workload.messages(index) for index in range(first, min(first + group, count))]
            digest.update(msgspec.json.encode(requests))
        if any(row.max_tokens is not None for row in rows) or not isinstance(load.output_tokens, int):
            digest.update(msgspec.json.encode([workload.output_tokens(index) for index in range(count)]))
    return digest.hexdigest()


def totals_of_traces(scenario: Scenario, folder: Path) -> dict[str, TraceTotals]:
    """Return the sums of the trace of each load that replays one. Raises HarnessError."""
    return {
        name: trace_totals(folder.resolve() / load.agent_trace.file, load.agent_trace)
        for name, load in scenario.loads.items()
        if load.agent_trace is not None
    }


def pairs_of(lengths: int | Lengths, folder: Path) -> Pairs:
    """Return the lines of the file of lengths; none if the lengths are not in a file. Raises HarnessError."""
    return read_length_file(folder / lengths.file) if isinstance(lengths, Lengths) and lengths.file else ()


def local_words(prompts: Prompts, folder: Path) -> tuple[str, ...]:
    """Return the words that are one token each for a local tokenizer; none without one. Raises HarnessError."""
    if prompts.tokenizer is None or prompts.tokenizer == SERVER_TOKENIZER:
        return ()
    return words_of_tokenizer(folder / prompts.tokenizer)


def _load_parameters(load: Load, prompts: Prompts) -> Any:
    keys = ("user", "users", "requests", "duration_s", "batch_size", "turns", "think_s", "output_tokens", "output")
    shape = {key: getattr(load, key) for key in keys}
    shape |= {} if load.endpoint == "chat" else {"endpoint": load.endpoint}
    shape |= {} if load.answer is None else {"answer": load.answer}
    behaviour = (
        "think",
        "abandon",
        "regenerate",
        "in_flight",
        "agent",
        "rag",
        "stages",
        "omit",
        "extra_body",
        "model",
    )
    shape |= {key: value for key in behaviour if (value := getattr(load, key))}
    shape |= {} if load.arrivals is None else {"arrivals": load.arrivals}
    shape |= {"own_words": True} if asks_own_words(load, prompts) else {}
    if load.agent_trace is not None:  # what is in its file, and which steps fit, is in the hash by itself
        plain = {"file": "", "context_tokens": None, "characters_per_token": None}
        shape["agent_trace"] = msgspec.structs.replace(load.agent_trace, **plain)
    return msgspec.to_builtins(shape)
