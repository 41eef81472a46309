"""Results of other tools become runs. docs/imports.md has the meaning of their fields and the definitions that differ.

This module reads a file and gives strict access to its values: a number is read or refused, never guessed.
"""

import datetime
import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from harness.base.errors import HarnessError, reason_of
from harness.base.files import DOCS, UNDECODABLE, read_bytes
from harness.base.measured import NEEDED, PERCENTILES, Distribution, Numbers
from harness.base.plausible import why_no_latency
from harness.base.reason import Reason, because
from harness.base.redact import printable
from harness.base.units import count
from harness.imports.documents import decode, read_documents, to_utf8
from harness.records.records import Request

T = TypeVar("T", bound=Struct)
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of tokens, or nanoseconds since 1970
Duration = Annotated[float, Meta(ge=0)]  # in the unit of the file


# Notes of several formats.
ONE_USER = Reason("import_one_user", "one request at a time: says nothing of several users")
_MAX_SHOWN = 200  # characters of a line that a note shows
_FILE_TIME = "the file has no time of day that can be read; its writing time is used as the end of the run"
FILE_TIME = Reason("import_file_time", _FILE_TIME)


class Source(Struct, frozen=True):
    """A file that was read. `value`: its JSON document, or the list of the documents of JSON Lines."""

    path: Path
    sha256: str
    value: Any
    noise: list[str] = []  # lines of the file that are of other programs

    def read(self, kind: type[T], value: Any = ..., place: str = "$") -> T:
        """Return the document, or a value of it, as a Struct. A null counts as missing.

        Raises HarnessError with the place of a mistake.
        """
        document = self.value if value is ... else value
        if isinstance(document, dict):
            document = {name: field for name, field in document.items() if field is not None}
        try:
            return msgspec.convert(document, kind)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$")
            raise self.error_at(place + path.rstrip("`"), what) from None

    def error_at(self, place: str, what: str) -> HarnessError:
        return HarnessError(
            f"{self.path}: {place}: {what}",
            next_step=f"{DOCS}/imports.md says which versions of which tool are read; nothing was written.",
        )

    def noise_notes(self) -> list[Reason]:
        """A note on the lines that were left out."""
        if not self.noise:
            return []
        first = " ".join(printable(self.noise[0]).split())[:_MAX_SHOWN]
        text = f"{count(len(self.noise), 'line')} of other programs in the file left out, such as: {first}"
        return [because("import_noise", text, lines=len(self.noise), first=first)]

    def written_s(self) -> float:
        """Return when the file was written, as Unix time."""
        return self.path.stat().st_mtime


def unix_time(text: str | None, form: str) -> float | None:
    """A time in UTC as Unix time; None: it is absent, or has another form (as strptime has it)."""
    try:
        return None if text is None else datetime.datetime.strptime(text, form).replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        return None


class ImportedPart(Struct, frozen=True, kw_only=True):
    """One server under one load, once: the records of a tool's file, or its numbers."""

    server: str = "running"
    load: str
    repeat: int = 1
    endpoint: Literal["chat", "embeddings"] = "chat"  # embeddings: only prompts are processed
    at_once: int | None = None  # requested maximum in flight; None: the file does not say
    planned: int  # measured requests that were to be sent
    records: list[Request] = []
    numbers: Numbers | None = None
    started_wall_s: float
    ended_wall_s: float
    definitions: dict[str, str] = {}  # by field of Numbers, if it differs from that of the other parts
    missing: dict[str, str] = {}  # by field of Numbers, or percentile such as "ttft_p95": why it is not known


class Imported(Struct, frozen=True, kw_only=True):
    """The content of a tool's file. Times of records count from the start of their part."""

    tool: str
    version: str | None
    model: str | None
    arguments: dict[str, list[str]] = {}  # by server, if known
    versions: dict[str, str] = {}  # by server, if known
    models: dict[str, str] = {}  # by server, if they differ
    parts: list[ImportedPart]
    work: Any  # identifies the work: equal values in two files mean the same work, as far as they can show
    definitions: dict[str, str] = {}  # by field of Numbers, if it differs from the definition of this suite
    missing: dict[str, str] = {}  # by field of Numbers: why it is not known
    notes: list[Reason] = []
    simulated: bool = False  # the numbers come from a model, not from hardware


class Format(Struct, frozen=True):
    written_by: str  # the command that writes it
    keys: tuple[str, ...]  # that the document, or the first line, must have
    read: Callable[[Source], Imported]

    def without_noise(self, source: Source) -> Source:
        """The source without leading documents that have none of the keys: JSON logs of other programs."""
        values = source.value if isinstance(source.value, list) else []
        first = next((at for at, value in enumerate(values) if self.matches(value)), 0)
        others = values[:first]
        if not first or any(not isinstance(document, dict) or set(self.keys) & set(document) for document in others):
            return source
        lines = [json.dumps(document) for document in others]
        kept = values[first] if len(values) == first + 1 else values[first:]
        return msgspec.structs.replace(source, value=kept, noise=[*source.noise, *lines])

    def matches(self, value: Any) -> bool:
        first = value[0] if isinstance(value, list) and value else value
        return isinstance(first, dict) and all(first.get(key) is not None for key in self.keys)


def read_source(path: Path, read_text: Callable[[str], list[Any]] = lambda _: []) -> Source:
    """Read JSON or JSON Lines. `read_text` returns the documents of a file that is neither, or none.

    Raises HarnessError for a file that cannot be read or decoded.
    """
    try:
        raw = read_bytes(path)
    except OSError as error:
        what = f"{path}: cannot be read ({reason_of(error)})"
        raise HarnessError(what, next_step="Give the file of results that the tool wrote.") from None
    digest, raw = hashlib.sha256(raw).hexdigest(), to_utf8(raw)
    if not raw.strip():
        raise HarnessError(f"{path}: the file is empty")
    try:
        return Source(path, digest, decode(raw))
    except UNDECODABLE as error:
        text = raw.decode(errors="replace")
        try:
            tests = read_text(printable(text))
        except HarnessError as refusal:
            raise HarnessError(f"{path}: {refusal.what}", next_step=refusal.next_step) from None
        if tests:
            return Source(path, digest, tests)
        documents = read_documents(path, text, error)
        return Source(path, digest, documents.values, documents.noise)


class LatencyStats(Struct, frozen=True, kw_only=True):
    """Statistics that a tool computed, of latencies in milliseconds."""

    mean: Duration
    min: Duration | None = None
    max: Duration | None = None
    p50: Duration | None = None
    p90: Duration | None = None
    p95: Duration | None = None
    p99: Duration | None = None

    def zeros(self) -> list[str]:
        """Return the names of the statistics that are 0, which no latency can be."""
        return [name for name, ms in msgspec.structs.asdict(self).items() if ms == 0]

    def why_no_latency(self, run_s: float | None = None) -> str | None:
        """Return which statistic no request of a run of that duration can have, and why; None: none."""
        for name, ms in msgspec.structs.asdict(self).items():
            if ms and (why := why_no_latency(ms / 1000, run_s)) is not None:
                return f"{name}: {why}"
        return None

    def falling(self) -> tuple[str, str] | None:
        """Return the names of two statistics of which the smaller one by definition is the larger one; else None."""
        times_ms = [(name, ms) for name in ("min", *PERCENTILES, "max") if (ms := getattr(self, name)) is not None]
        return next(((low, high) for (low, a), (high, b) in pairwise(times_ms) if a > b), None)

    def absent(self, n: int) -> list[str]:
        """Return the names of the percentiles that `n` requests can carry and the file does not have."""
        return [name for name, needed in NEEDED.items() if n >= needed and getattr(self, name) is None]

    def distribution(self, n: int) -> Distribution:
        """Return the statistics in seconds, without percentiles that `n` requests cannot carry."""
        times_s = {name: ms / 1000 for name, ms in msgspec.structs.asdict(self).items() if ms is not None}
        return Distribution(n=n, **{name: value for name, value in times_s.items() if n >= NEEDED.get(name, 0)})
