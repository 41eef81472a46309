"""Read files of prompts: JSONL of the harness, conversations in the format of ShareGPT, and OpenAI's batch files.

The keys of a line show its format: `prompt` or `messages`, `conversations`, `body`.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec.structs import replace

from harness.base.errors import BadLines, HarnessError
from harness.base.files import read_bytes

_ADVICE = (
    'Each line is a JSON object: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}. Files of '
    "ShareGPT conversations and OpenAI batch files are known as well."
)


class Message(TypedDict):
    role: str
    content: str


class PromptRow(msgspec.Struct, frozen=True):
    """A prompt of a file: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None  # of the answer, if the file limits it
    answer: str | None = None  # the right one, if the file has it


class _ShareGptMessage(msgspec.Struct, frozen=True):
    by: str = msgspec.field(name="from")
    value: str


class _ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_ContentPart]


class _Body(msgspec.Struct, frozen=True):
    """The request in a line of a batch file, for any endpoint. Other keys are ignored: the load sets them."""

    messages: list[_Message] | None = None
    prompt: str | None = None
    input: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: list[_Message] | None = None
    conversations: list[_ShareGptMessage] | None = None
    body: _Body | None = None
    answer: str | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_rows(path: str | Path) -> list[PromptRow]:
    """Return the rows of a prompt file. Raises HarnessError with the file and the lines of the first few problems."""
    try:
        data = read_bytes(path).removeprefix(BOM_UTF8)
    except OSError as error:
        raise HarnessError(f"{path}: the prompts cannot be read ({error.strerror})") from None
    rows: list[PromptRow] = []
    bad = BadLines(path, _ADVICE)
    try:
        for number, line in _numbered_lines(data):
            try:
                decoded = _decoder.decode(line) if isinstance(line, bytes) else line
                row = _prompt_row(decoded)
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                bad.add(number, str(error))
                continue
            if row is not None:
                rows.append(row if decoded.answer is None else replace(row, answer=decoded.answer))
    except (msgspec.DecodeError, RecursionError) as error:
        raise HarnessError(f"{path}: {error}", next_step=_ADVICE) from None
    bad.raise_errors()
    if not rows:
        raise HarnessError(f"{path}: there are no prompts in it", next_step=_ADVICE)
    return rows


def _numbered_lines(data: bytes) -> Iterator[tuple[int, bytes | _Line]]:
    """Yield each line that is not blank; of a JSON array, each item. Numbers start at 1."""
    if data.lstrip().startswith(b"["):
        yield from enumerate(msgspec.json.decode(data, type=list[_Line]), start=1)
    else:
        yield from ((number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip())


def _prompt_row(line: _Line) -> PromptRow | None:
    """Return the prompt of a line; None for a conversation without a human, which some collections have.

    Raises ValueError with a message for the user.
    """
    if line.conversations is not None:
        return _first_question(line.conversations)
    if line.body is not None:
        return _batch_row(line.body)
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("exactly one of 'prompt' and 'messages' is expected")
    return _make_row(line.prompt, line.messages)


def _first_question(conversation: list[_ShareGptMessage]) -> PromptRow | None:
    """Return the first human message after system messages. Later turns depend on the answers of another model."""
    system: list[Message] = []
    for message in conversation:
        if message.by == "system" and message.value.strip():
            system.append({"role": "system", "content": message.value})
        elif message.by in ("human", "user") and message.value.strip():
            return PromptRow(messages=[*system, {"role": "user", "content": message.value}])
    return None


def _batch_row(body: _Body) -> PromptRow:
    if sum(prompt is not None for prompt in (body.messages, body.prompt, body.input)) != 1:
        raise ValueError("exactly one of 'messages', 'prompt' and 'input' is expected in the body")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _make_row(body.input if body.prompt is None else body.prompt, body.messages, max_tokens)


def _make_row(prompt: str | None, messages: list[_Message] | None, max_tokens: int | None = None) -> PromptRow:
    if not (prompt or messages):
        raise ValueError("the prompt is empty")
    return PromptRow(prompt, None if messages is None else list(map(_text_message, messages)), max_tokens)


def _text_message(message: _Message) -> Message:
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise ValueError("only parts of type 'text' can be sent")
        content = "\n".join(part.text for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": content}
