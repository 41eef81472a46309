"""A file that another tool wrote, and strict access to what is in it: a number is read or refused, never guessed."""

import hashlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from harness.errors import HarnessError
from harness.files import UNDECODABLE, in_words, read_bytes
from harness.rundir.records import Request
from harness.summary import Numbers

_CUT = (
    "Copy the file again when its tool has ended; if that is all there is, the last request is lost, and removing its "
    "line makes a file of the others."
)
_DAMAGED = "The file was damaged or edited; take it again from where its tool wrote it."


class Source(Struct, frozen=True):
    """A file as read. `value`: its JSON document, or one of each line when it is JSON Lines."""

    path: Path
    sha256: str
    value: Any


class ImportedPart(Struct, frozen=True, kw_only=True):
    """One server under one load, once, as a tool's file has it: either its records or its finished numbers."""

    server: str = "running"
    load: str
    at_once: int | None = None  # most requests in flight, as asked for; None: the file does not say
    planned: int  # measured requests that should have been sent
    records: list[Request] = []
    numbers: Numbers | None = None
    started_wall_s: float
    ended_wall_s: float
    definitions: dict[str, str] = {}  # by field of Numbers, where this part's is not that of the others
    missing: dict[str, str] = {}  # likewise: why it is not known


class Imported(Struct, frozen=True, kw_only=True):
    """What a tool's file says. Times of records count from the start of their part."""

    tool: str
    version: str | None
    model: str | None
    url: str | None = None
    arguments: dict[str, list[str]] = {}  # of each part's server, as far as known
    versions: dict[str, str] = {}  # likewise
    parts: list[ImportedPart]
    work: Any  # what names the work: equal for two files, the work was the same as far as they can show
    definitions: dict[str, str]  # by field of Numbers, where it is not ours
    missing: dict[str, str]  # by field of Numbers: why it is not known
    notes: list[str] = []
    beside: list[Source] = []  # other files that were read


def read_source(path: Path) -> Source:
    """Read a file of JSON or JSON Lines. Raises HarnessError when it is neither."""
    try:
        raw = read_bytes(path)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read ({error.strerror or error})") from None
    digest = hashlib.sha256(raw).hexdigest()
    try:
        return Source(path, digest, msgspec.json.decode(raw))
    except UNDECODABLE as error:
        return Source(path, digest, _lines(path, raw, error))


def _lines(path: Path, raw: bytes, as_json: Exception) -> list[Any]:
    """The documents of JSON Lines. Raises HarnessError that says which line is none, or that none is."""
    lines = [(number, line) for number, line in enumerate(raw.splitlines(), start=1) if line.strip()]
    if not lines:
        raise HarnessError(f"{path}: the file is empty")
    found: list[Any] = []
    for number, line in lines:
        try:
            found.append(msgspec.json.decode(line))
        except UNDECODABLE as error:
            if not found or not isinstance(found[0], dict):
                raise HarnessError(
                    f"{path}: neither JSON nor JSON Lines ({in_words(as_json)})",
                    next_step="The file was cut or is something else.",
                ) from None
            cut = number == lines[-1][0] and "truncated" in str(error)
            raise HarnessError(
                f"{path}: line {number} of {lines[-1][0]} "
                + (f"is cut off: the {len(found)} before it are whole" if cut else f"is not JSON ({in_words(error)})"),
                next_step=f"Nothing was written. {_CUT if cut else _DAMAGED}",
            ) from None
    return found


class Node:
    """A place in a document; every access says where it is when something is not as it should be."""

    def __init__(self, source: Source, value: Any = ..., where: str = "$") -> None:
        self.source = source
        self.value = source.value if value is ... else value
        self.where = where

    def at(self, *steps: str | int) -> "Node":
        """The node below; raises HarnessError when it is not there."""
        node = self
        for step in steps:
            if not node._has(step):
                raise node.wrong(f"there is no {step!r}")
            node = node._down(step)
        return node

    def get(self, *steps: str | int) -> "Node | None":
        """The node below, or None when it, or one on the way, is not there or null."""
        node = self
        for step in steps:
            if not node._has(step):
                return None
            node = node._down(step)
        return None if node.value is None else node

    def items(self) -> "list[Node]":
        if not isinstance(self.value, list):
            raise self.wrong("a list is expected")
        return [self._down(index) for index in range(len(self.value))]

    def number(self) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong("a number is expected")
        return float(value)

    def duration(self) -> float:
        """A number that is not negative."""
        value = self.number()
        if value < 0:
            raise self.wrong("a duration is not negative")
        return value

    def count(self) -> int:
        value = self.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong("a count is expected")
        return value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text is expected")
        return self.value

    def must_be(self, counted: float, what: str, rounded: float = 0.0) -> None:
        """Raise HarnessError, naming both, unless this number is what the file's own records come to."""
        if not math.isclose(self.number(), counted, rel_tol=rounded):
            raise HarnessError(
                f"{self.source.path}: {self.where} says {self.value}, and {what} {counted:.12g}: one of them is wrong",
                next_step="A file that contradicts itself was changed or damaged; nothing was written.",
            )

    def wrong(self, what: str) -> HarnessError:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return HarnessError(
            f"{self.source.path}: {self.where}: {what}, got {shown}",
            next_step="docs/imports.md says which versions of which tool are read; nothing was written.",
        )

    def _has(self, step: str | int) -> bool:
        if isinstance(step, str):
            return isinstance(self.value, dict) and step in self.value
        return isinstance(self.value, list) and 0 <= step < len(self.value)

    def _down(self, step: str | int) -> "Node":
        name = f".{step}" if isinstance(step, str) else f"[{step}]"
        return Node(self.source, self.value[step], f"{self.where}{name}")


def text_at(node: Node | None, *steps: str | int) -> str | None:
    """The text below, or None when it, or one on the way, is not there or null."""
    found = node.get(*steps) if node else None
    return found.text() if found else None


def count_at(node: Node | None, *steps: str | int) -> int | None:
    """The count below, likewise."""
    found = node.get(*steps) if node else None
    return found.count() if found else None


def last_line(text: str) -> str:
    """The last line of an error text (of a traceback the one that says what it was), shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def has(value: Any, *keys: str) -> bool:
    """Whether a document is a mapping with all of these keys."""
    return isinstance(value, dict) and all(key in value for key in keys)


# A record of another tool; `write` puts its cell and its load's name in.
imported_request = partial(Request, cell="", load="", user_class="imported", user=0, process=0)

NO_GAPS = "the file keeps the first and the last token's time of a request, not those between"
NO_RECORDS = "the file has no line for each request"
EMPTY = {"chunk_gap_s": NO_GAPS, "tokens_per_chunk": NO_GAPS}
