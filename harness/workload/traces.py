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
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from harness.base.errors import BadLines, HarnessError
from harness.base.files import DOCS, open_file
from harness.records.clock import Clock
from harness.records.columns import read_block
from harness.records.records import Lines, read_marks, split_blocks
from harness.scenario import Trace

MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a mistake


class TraceRow(NamedTuple):
    line: int  # of the file, from 1
    at_s: float  # since a time that depends on the format
    prompt_tokens: int
    output_tokens: int
    extra: int = -1  # mooncake: the offset of the line with its hash_ids; requests: its conversation; -1: none


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
    """Yield the rows in the order of the file. Lines that cannot be used go to `bad`."""
    header = [name.decode(errors="replace") for name in _split_cells(file.readline())]
    if missing := [name for name in csv.columns if name not in header]:
        bad.add(1, f"the columns {', '.join(missing)} are missing; there are {', '.join(header)[:200]}")
        return
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


def _record_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """Yield the measured requests of one cell in the order of sending; the file has them in the order of their ends.

    Requests without a prompt length or an answer, such as failed ones, become rows without tokens. Lines that cannot be
    used go to `bad`, and so does a file with several cells of which none, or an unknown one, is chosen.
    """
    path = Path(file.name)
    marks, clocks, lines = read_marks(path.resolve().with_name("processes.jsonl")), dict[str, Clock](), Lines()
    rows = list[TraceRow]()
    for _, request in chain.from_iterable(read_block(block, lines) for block in split_blocks(path)):
        cell = request.cell
        if cell not in clocks:
            clocks[cell] = Clock(mark for mark in marks if mark.cell == cell)
        if request.phase == "measured" and trace.cell in (None, cell):
            lengths = (request.asked_tokens, request.output_tokens)
            output = next(filter(None, lengths if request.fixed_length else lengths[::-1]), 0)
            conversation = -1 if request.conversation is None else request.conversation
            at_s = request.sent_s + clocks[cell].offset_s(request.process)
            rows.append(TraceRow(lines.count, at_s, request.prompt_tokens or 0, output, conversation))
    for number in lines.damaged:
        bad.add(number, "not a record of a request")
    if trace.cell not in clocks and (trace.cell is not None or len(clocks) > 1):
        bad.add(1, f"set trace.cell to one of {', '.join(sorted(clocks)[:8])} (got {trace.cell})")
        return
    yield from sorted(rows, key=lambda row: row.at_s)


def _is_json_with(keys: Sequence[bytes], first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and all(b'"%b"' % key in first for key in keys)


_Matches = Callable[[bytes], bool]  # whether a first line is of the format
_Rows = Callable[[BinaryIO, Trace, BadLines], Iterator[TraceRow]]
FORMATS: dict[str, tuple[_Matches, _Rows]] = {
    "burstgpt": (partial(_has_columns, _BURSTGPT), partial(_csv_rows, _BURSTGPT)),
    "mooncake": (partial(_is_json_with, (b"input_length", b"timestamp")), _mooncake_rows),
    "azure": (partial(_has_columns, _AZURE), partial(_csv_rows, _AZURE)),
    "requests": (partial(_is_json_with, (b"sent_s", b"cell")), _record_rows),
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
        with open_file(path) as file:
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            self.format = trace.format or _detect_format(path, file)
            self._read_rows(file, bad)
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
        for line, at_s, prompt_tokens, output_tokens, extra in FORMATS[self.format][1](file, trace, bad):
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
    for name, (matches, _) in FORMATS.items():
        if matches(first):
            return name
    shown = first[:100].decode("utf-8", errors="replace").strip()
    raise HarnessError(
        f"{path}:1: the format of the trace is not known: {shown!r}",
        next_step=f"Known: {', '.join(FORMATS)}. {DOCS}/traces.md says what each holds.",
    )
