"""Traces of real traffic as loads: for each row of a window its due time, and the lengths of its prompt and answer.

A row takes 28 bytes, so a million rows fit easily. A file is read to the end of its window only.
"""

import hashlib
import math
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from harness.base.errors import BadLines, HarnessError
from harness.base.files import DOCS, UNDECODABLE, open_file
from harness.records.records import read_marks
from harness.scenario import Trace

MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a mistake
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # the range of an array's item


class TraceRow(NamedTuple):
    line: int  # of the file, from 1
    at_s: float  # since a time that depends on the format
    prompt_tokens: int
    output_tokens: int
    extra: int = -1  # mooncake: the offset of the line with its hash_ids; requests: its conversation; -1: none


class BadLine(Exception):
    """A line that cannot be used: its number, and what is wrong."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


class CsvFormat(NamedTuple):
    """A CSV format: its columns of time, prompt tokens and output tokens, and the parser of its times."""

    columns: tuple[str, str, str]
    parse_time: Callable[[bytes], float]  # to seconds; raises ValueError
    expected: str  # of a time, for the error message


def _parse_azure_time(text: bytes) -> float:
    """Parse `2023-11-16 18:15:46.68`. A time zone is ignored: it is the same in all rows."""
    return datetime.fromisoformat(text.decode("ascii")).replace(tzinfo=UTC).timestamp()


# BurstGPT (https://github.com/HPMLL/BurstGPT): times in seconds since the collection began; a failed request has 0
# response tokens. Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; later releases have more.
_BURSTGPT = CsvFormat(("Timestamp", "Request tokens", "Response tokens"), float, "seconds")
# Azure LLM inference traces of 2023 and 2024 (https://github.com/Azure/AzurePublicDataset): the wall clock of each
# request. TIMESTAMP,ContextTokens,GeneratedTokens, such as 2023-11-16 18:15:46.6805900,374,44
_AZURE = CsvFormat(
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _parse_azure_time, "a time like 2023-11-16 18:15:46.68"
)


def _split_cells(line: bytes) -> list[bytes]:
    """Return the cells of a line, without quotes."""
    return [cell.strip(b' "\r\n') for cell in line.split(b",")]


def _has_columns(csv: CsvFormat, first: bytes) -> bool:
    return {name.encode() for name in csv.columns} <= set(_split_cells(first))


def _csv_rows(csv: CsvFormat, file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """Yield the rows in the order of the file. Lines that cannot be used go to `bad`. Raises BadLine for the header."""
    header = [name.decode(errors="replace") for name in _split_cells(file.readline())]
    if missing := [name for name in csv.columns if name not in header]:
        raise BadLine(1, f"the columns {', '.join(missing)} are missing; there are {', '.join(header)[:200]}")
    time_at, prompt_at, output_at = [header.index(name) for name in csv.columns]
    parse_time, columns = csv.parse_time, ", ".join(csv.columns)
    for number, line in enumerate(file, start=2):
        cells = _split_cells(line)
        try:
            yield TraceRow(number, parse_time(cells[time_at]), int(cells[prompt_at]), int(cells[output_at]))
        except (ValueError, IndexError):
            if line.strip():
                text = line.decode(errors="replace").strip()[:100]
                bad.add(number, f"{csv.expected} and two whole numbers are expected as {columns}, got {text!r}")


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace; other keys are ignored. Requests whose first ids are equal share a prefix.

    Times are in milliseconds, blocks have 512 tokens (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """Yield the rows in the order of the file. Lines that cannot be used (also by their ids) go to `bad`."""
    decode = msgspec.json.Decoder(MooncakeLine).decode
    offset = file.tell()
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            try:
                line = decode(raw)
                ids, needed = len(line.hash_ids), -(-line.input_length // trace.block_tokens)
                if ids and abs(ids - needed) > 1:
                    raise ValueError(
                        f"{line.input_length:,} tokens in blocks of {trace.block_tokens} need {needed} hash_ids, and "
                        f"there are {ids}; say with trace.block_tokens how large the blocks are"
                    )
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                bad.add(number, str(error))
            else:
                ids_offset = offset if ids else -1
                yield TraceRow(number, line.timestamp / 1000, line.input_length, line.output_length, ids_offset)
        offset += len(raw)


class RecordLine(msgspec.Struct, frozen=True):
    """The fields of a line of requests.jsonl that are needed to send a request again."""

    cell: str
    phase: str
    process: int
    sent_s: float
    prompt_tokens: _Number | None = None
    output_tokens: _Number | None = None
    asked_tokens: _Number | None = None
    fixed_length: bool = False
    conversation: _Number | None = None

    @property
    def length(self) -> int:
        """The length of the answer: as requested if it was fixed, else the actual one; 0: unknown."""
        lengths = (self.asked_tokens, self.output_tokens)
        return next(filter(None, lengths if self.fixed_length else lengths[::-1]), 0)


def _record_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """Yield the measured requests of one cell in the order of sending; the file has them in the order of their ends.

    Requests whose prompt length is unknown, such as failed ones, become rows without tokens. Lines that cannot be used
    go to `bad`. Raises BadLine if the file has several cells and none is chosen, or not the chosen one.
    """
    offsets_s = _clock_offsets_s(Path(file.name).resolve().with_name("processes.jsonl"))
    decode = msgspec.json.Decoder(RecordLine).decode
    rows, cells = list[TraceRow](), set[str]()
    for number, raw in enumerate(file, start=1):
        try:
            line = decode(raw)
        except UNDECODABLE as error:
            if raw.strip():
                bad.add(number, str(error))
            continue
        cells.add(line.cell)
        if line.phase == "measured" and trace.cell in (None, line.cell):
            at_s = line.sent_s + offsets_s.get((line.cell, line.process), 0.0)
            conversation = -1 if line.conversation is None else line.conversation
            rows.append(TraceRow(number, at_s, line.prompt_tokens or 0, line.length, conversation))
    if trace.cell not in cells and (trace.cell is not None or len(cells) > 1):
        raise BadLine(1, f"set trace.cell to one of {', '.join(sorted(cells)[:8])} (got {trace.cell})")
    yield from sorted(rows, key=lambda row: row.at_s)


def _clock_offsets_s(marks: Path) -> dict[tuple[str, int], float]:
    """Return Unix time minus the clock of each (cell, load process); nothing if all ran on one machine."""
    starts = [mark for mark in read_marks(marks) if mark.event == "start"]
    if len({mark.host for mark in starts}) < 2:
        return {}
    return {(mark.cell, mark.process): mark.wall_s - mark.monotonic_s for mark in starts}


def _is_json_with(keys: Sequence[bytes], first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and all(b'"%b"' % key in first for key in keys)


class TraceFormat(NamedTuple):
    """A test of the first line of a file, and the reader of its rows."""

    matches: Callable[[bytes], bool]
    rows: Callable[[BinaryIO, Trace, BadLines], Iterator[TraceRow]]


FORMATS = {
    "burstgpt": TraceFormat(partial(_has_columns, _BURSTGPT), partial(_csv_rows, _BURSTGPT)),
    "mooncake": TraceFormat(partial(_is_json_with, (b"input_length", b"timestamp")), _mooncake_rows),
    "azure": TraceFormat(partial(_has_columns, _AZURE), partial(_csv_rows, _AZURE)),
    "requests": TraceFormat(partial(_is_json_with, (b"sent_s", b"cell")), _record_rows),
}


class Replay:
    """The rows of a trace within its window, by their number from 0."""

    def __init__(self, path: Path, trace: Trace) -> None:
        """Raises OSError; HarnessError with the first lines that cannot be used, and what is wrong with them."""
        self.path = path
        self.trace = trace
        self.at_s = array("d")  # after the start of the load; window and speed are applied
        self.prompt_tokens = array("I")
        self.output_tokens = array("I")
        self._extra = array("q")  # see TraceRow
        self.without_tokens = 0  # rows left out, because they have no prompt or no answer
        bad = BadLines(path, f"{DOCS}/traces.md says what each format holds.")
        try:
            with open_file(path) as file:
                if file.read(len(BOM_UTF8)) != BOM_UTF8:
                    file.seek(0)
                self.format = trace.format or _detect_format(path, file)
                self._read_rows(file, bad)
        except BadLine as error:
            bad.add(error.line, error.problem)
        bad.raise_errors()
        if not self.at_s:
            raise self._empty_error()

    def __len__(self) -> int:
        return len(self.at_s)

    def at(self, number: int) -> float | None:
        """Return when a row is due, in seconds after the start; None if there are fewer rows."""
        return self.at_s[number] if number < len(self.at_s) else None

    def hash_ids(self, number: int) -> list[int]:
        """Return the blocks of a row's prompt; none if the format has none. They stay in the file, to save memory."""
        if self.format != "mooncake" or self._extra[number] < 0:
            return []
        with open_file(self.path) as file:
            file.seek(self._extra[number])
            return msgspec.json.decode(file.readline(), type=MooncakeLine).hash_ids

    def conversation(self, number: int) -> int | None:
        """Return the conversation of a row; None if the format has none."""
        return self._extra[number] if self.format == "requests" and self._extra[number] >= 0 else None

    def _read_rows(self, file: BinaryIO, bad: BadLines) -> None:
        trace = self.trace
        first_s: float | None = None
        previous_s = -math.inf
        for line, at_s, prompt_tokens, output_tokens, extra in FORMATS[self.format].rows(file, trace, bad):
            if not math.isfinite(at_s):
                bad.add(line, f"{at_s} is not a time")
                continue
            if at_s < previous_s:
                ahead_s = previous_s - at_s
                bad.add(line, f"its time is {ahead_s:g} s before that of the row before; sort the file by time")
            previous_s = at_s
            if first_s is None:
                first_s = at_s
            since_s = at_s - first_s - trace.from_s
            if since_s < 0:
                continue
            if trace.to_s is not None and at_s - first_s >= trace.to_s:
                break
            if not (0 <= prompt_tokens <= MAX_TOKENS and 0 <= output_tokens <= MAX_TOKENS):
                lengths = f"{prompt_tokens:,} and {output_tokens:,} tokens"
                bad.add(line, f"a prompt and an answer of 0 to {MAX_TOKENS:,} tokens are expected, got {lengths}")
                continue
            if prompt_tokens <= 0 or output_tokens <= 0:
                self.without_tokens += 1
                continue
            self.at_s.append(since_s / trace.speed)
            self.prompt_tokens.append(prompt_tokens)
            self.output_tokens.append(output_tokens)
            self._extra.append(extra)
            if len(self.at_s) == trace.max_requests:
                break
        self._read_span_s = 0.0 if first_s is None else previous_s - first_s

    def _empty_error(self) -> HarnessError:
        trace, until = self.trace, "the end" if self.trace.to_s is None else f"{self.trace.to_s:g} s"
        return HarnessError(
            f"{self.path}: no request with tokens is in the window from {trace.from_s:g} s to {until} ({self.format})",
            next_step=f"As far as it was read the trace lasts {self._read_span_s:,.3f} s and has "
            f"{self.without_tokens:,} rows without tokens there; change from_s and to_s.",
        )


def cached_replay(path: str | Path, trace: Trace) -> Replay:
    """Return the rows of a trace. A process reads an unchanged file once. Raises HarnessError."""
    try:
        stat = Path(path).stat()
        return _read_replay(Path(path), trace, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise HarnessError(f"{path}: the trace cannot be read ({error.strerror})") from None


@lru_cache(maxsize=4)
def _read_replay(path: Path, trace: Trace, _size: int, _changed_ns: int) -> Replay:
    return Replay(path, trace)


def sha256_of(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _detect_format(path: Path, file: BinaryIO) -> str:
    """Return the format that matches the first line. The file stays at its start."""
    start = file.tell()
    first = file.readline(1_000_000)
    file.seek(start)
    for name, format_ in FORMATS.items():
        if format_.matches(first):
            return name
    shown = first[:100].decode("utf-8", errors="replace").strip()
    raise HarnessError(
        f"{path}:1: the format of the trace is not known: {shown!r}",
        next_step=f"Known: {', '.join(FORMATS)}. {DOCS}/traces.md says what each holds.",
    )
