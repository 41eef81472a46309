"""Files of prompts: our own JSONL, conversations as ShareGPT keeps them, and OpenAI's batch files.

Which of them a line is, its keys tell: `prompt` or `messages`, `conversations`, `body`.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.errors import BadLines, HarnessError
from harness.files import read_bytes

_ADVICE = (
    'Each line is a JSON object: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}. Files of '
    "ShareGPT conversations and OpenAI batch files are known as well."
)


class PromptMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class PromptRow(msgspec.Struct, frozen=True):
    """A prompt of a file: one of the first two."""

    prompt: str | None = None
    messages: list[PromptMessage] | None = None
    max_tokens: int | None = None  # of its answer, where the file says so


class _ShareGptMessage(msgspec.Struct, frozen=True):
    by: str = msgspec.field(name="from")
    value: str


class _ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _BodyMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_ContentPart]


class _Body(msgspec.Struct, frozen=True):
    """The request in a line of a batch file, of each endpoint. Other keys are not taken: the load says them."""

    messages: list[_BodyMessage] | None = None
    prompt: str | None = None
    input: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: list[PromptMessage] | None = None
    conversations: list[_ShareGptMessage] | None = None
    body: _Body | None = None


def read_rows(path: str | Path) -> list[PromptRow]:
    """The rows of a prompt file. Raises HarnessError that names the file and the line of the first few problems."""
    try:
        data = read_bytes(path).removeprefix(BOM_UTF8)
    except OSError as error:
        raise HarnessError(f"{path}: the prompts cannot be read ({error.strerror})") from None
    decoder = msgspec.json.Decoder(_Line)
    rows: list[PromptRow] = []
    bad = BadLines(path, _ADVICE)
    try:
        for number, raw in _objects(data):
            try:
                row = _row(decoder.decode(raw))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                bad.add(number, str(error))
                continue
            rows += [] if row is None else [row]
    except (msgspec.DecodeError, RecursionError) as error:
        raise HarnessError(f"{path}: {error}", next_step=_ADVICE) from None
    bad.raise_errors()
    if not rows:
        raise HarnessError(f"{path}: there are no prompts in it", next_step=_ADVICE)
    return rows


def _objects(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The objects of a file and the line in which each begins: one a line, or all of them in one JSON array."""
    if not data.lstrip().startswith(b"["):
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield number, line
        return
    at, number = 0, 1
    for item in msgspec.json.decode(data, type=list[msgspec.Raw]):
        raw = bytes(item)
        begin = data.index(raw, at)
        number += data.count(b"\n", at, begin)
        yield number, raw
        at = begin + len(raw)
        number += raw.count(b"\n")


def _row(line: _Line) -> PromptRow | None:
    """The prompt of a line; None for a conversation in which no human says anything, as some collections have.

    Raises ValueError in words.
    """
    if line.conversations is not None:
        return _first_question(line.conversations)
    if line.body is not None:
        return _request(line.body)
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("exactly one of 'prompt' and 'messages' is expected")
    if line.prompt == "" or line.messages == []:
        raise ValueError("the prompt is empty")
    return PromptRow(line.prompt, line.messages)


def _first_question(said: list[_ShareGptMessage]) -> PromptRow | None:
    """What the human says first, and what the system says before: later turns depend on answers of another model."""
    before: list[PromptMessage] = []
    for one in said:
        if one.by == "system" and one.value.strip():
            before.append(PromptMessage("system", one.value))
        elif one.by in ("human", "user") and one.value.strip():
            return PromptRow(messages=[*before, PromptMessage("user", one.value)])
    return None


def _request(body: _Body) -> PromptRow:
    given = [name for name in ("messages", "prompt", "input") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ValueError("exactly one of 'messages', 'prompt' and 'input' is expected in the body")
    if not getattr(body, given[0]):
        raise ValueError("the prompt is empty")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.messages is None:
        return PromptRow(prompt=body.prompt or body.input, max_tokens=max_tokens)
    return PromptRow(messages=[_plain(message) for message in body.messages], max_tokens=max_tokens)


def _plain(message: _BodyMessage) -> PromptMessage:
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise ValueError("only parts of type 'text' can be sent")
        content = "\n".join(part.text for part in content)
    return PromptMessage("system" if message.role == "developer" else message.role, content)
