"""The entries of a bisection: images of a file or values of a variable, which of them are good and bad, their names."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from harness.base.errors import HarnessError, did_you_mean, reason_of
from harness.base.files import DOCS, read_stream
from harness.scenario.sweep import FLAG

IMAGE = "image"  # the variable of every template that has its image
MAX_ENTRIES = 1000
MAX_LINE = 500  # characters of an entry
MAX_SHORT = 40  # characters of an entry in a sentence
MAX_BYTES = 2**20  # of a file with images
_WORD = "Write one image a line, the oldest first; lines that begin with # are comments."
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")  # all characters of a reference of an image


class EntryList(Struct, frozen=True, kw_only=True):
    """What is bisected: the good entry first, the bad one last, in between those of the list, in its order."""

    variable: str
    values: list[Any]  # as they were typed


def read_images(path: Path) -> list[str]:
    """Read a file, or a pipe such as `<(command)`, with one image a line. Raises HarnessError."""
    try:
        text = read_stream(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HarnessError(f"--images: {path} is not text in UTF-8", next_step=_WORD) from None
    except OSError as error:
        raise HarnessError(f"--images: {path}: {reason_of(error)}", next_step=_WORD) from None
    images = []
    for number, line in enumerate(text.splitlines(), 1):
        image = re.sub(r"(?:^|\s)#.*", "", line).strip()
        if not image:
            continue
        if not _IMAGE.fullmatch(image) or len(image) > MAX_LINE:
            shown = image[:80].encode("unicode_escape").decode()
            raise HarnessError(f"--images: {path}, line {number}: '{shown}' is no image", next_step=_WORD)
        images.append(image)
    return images


def read_values(text: str) -> tuple[str, list[Any]]:
    """Read `variable=a,b,c`; each value stays as it is typed, as it is the name of an entry. Raises HarnessError."""
    name, equals, listed = text.partition("=")
    name = name.strip()
    if not equals or not re.fullmatch(r"(?:--)?[A-Za-z][\w.-]*", name):
        raise HarnessError(
            f"--values: a variable with its values is expected (got '{text[:80]}')",
            next_step=f"Write --values ctx_size=8192,16384,32768; {DOCS}/servers.md lists the variables.",
        )
    words = [word.strip() for word in listed.split(",")]
    if wrong := [word for word in words if not word or len(word) > MAX_LINE or not word.isprintable()]:
        raise HarnessError(
            f"--values: {name} has a value that is empty or cannot be read ('{wrong[0][:80]}')",
            next_step="Separate the values by single commas.",
        )
    return name, list[Any](words)


def scalar(word: str) -> str | int | float | bool:
    """A number, true or false, else the text. "on" and "off" stay texts, as engines have them."""
    if word in ("true", "false"):
        return word == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", word):
        return int(word)
    if re.fullmatch(r"[+-]?(?:\d{1,18}\.\d{0,18}|\d{1,18}(?=e)|\.\d{1,18})(?:e[+-]?\d{1,2})?", word, re.IGNORECASE):
        return float(word)
    return word


def order_entries(variable: str, values: Sequence[Any], good: str | None, bad: str | None) -> EntryList:
    """Return the entries from the good one to the bad one. Raises HarnessError for ends that are not in the list."""
    texts = [entry_text(value) for value in values]
    if len(values) > MAX_ENTRIES:
        raise HarnessError(f"the list has {len(values):,} entries", next_step=f"Give at most {MAX_ENTRIES:,}.")
    if doubled := next((text for text in texts if texts.count(text) > 1), None):
        raise HarnessError(f"the list has '{doubled}' more than once", next_step="Write each entry once.")
    if len(values) < 2:
        raise HarnessError(f"the list has {len(values)} of the 2 entries that are needed", next_step="Add more.")
    first, last = _place("--good", good, texts, 0), _place("--bad", bad, texts, len(texts) - 1)
    if first == last:
        raise HarnessError(f"--good and --bad are the same entry ('{texts[first]}')", next_step="Give two of them.")
    chosen = list(values[first : last + 1]) if first < last else list(values[last : first + 1])[::-1]
    return EntryList(variable=variable, values=chosen)


def _place(option: str, given: str | None, texts: Sequence[str], default: int) -> int:
    if given is None:
        return default
    if given not in texts:
        near = did_you_mean(given, texts)
        raise HarnessError(f"{option}: '{given}' is not in the list; {near}", next_step="Give an entry of the list.")
    return texts.index(given)


def entry_setting(variable: str, value: Any, *, is_text: bool = False) -> Any:
    """Return the setting of an entry: of a flag, and of a variable that takes text (`is_text`), as it is typed.

    `true` and `false` of a flag are switches. What a Compose file would replace from the environment stays as it is.
    """
    if isinstance(value, str) and not is_text:
        read = scalar(value)
        value = value if is_flag(variable) and not isinstance(read, bool) else read
    return value.replace("$", "$$") if isinstance(value, str) else value


def entry_text(value: Any) -> str:
    """An entry as it is written on the command line and in a file."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def short_names(values: Sequence[Any]) -> list[str]:
    """The ends of the entries that tell them apart: "llama.cpp:b6123" of "ghcr.io/ggml-org/llama.cpp:b6123"."""
    texts = [entry_text(value) for value in values]
    parts = [re.sub(r"(@sha256:[0-9a-f]{12})[0-9a-f]+$", r"\1", text).split("/") for text in texts]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        short = [cut_middle(name, MAX_SHORT) for name in names]
        if all(names) and len(set(names)) == len(names):
            return short if len(set(short)) == len(short) else names
    return texts


def cut_middle(text: str, max_chars: int) -> str:
    """A text with an ellipsis for its middle, if it is longer than that. Most of it is the end, which differs."""
    first = max_chars // 3
    return text if len(text) <= max_chars else f"{text[:first]}…{text[first + 1 - max_chars :]}"


def server_names(values: Sequence[Any]) -> list[str]:
    """A name of a server for each entry, in their order: "03-llama-cpp-b6123"."""
    digits = len(str(len(values)))
    plain = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in short_names(values)]
    return [f"{place:0{digits}d}-{name[-24:].strip('-') or 'entry'}" for place, name in enumerate(plain, 1)]


def is_flag(variable: str) -> bool:
    """Whether it is an argument of the engine, not a variable of the template."""
    return variable.startswith(FLAG)
