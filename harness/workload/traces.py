"""Traces of real traffic as loads: the rows of a window, when each is due, how long its prompt and its answer are.

A row takes 28 bytes here, so a million of them are no burden; a file is read no further than its window needs.
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

from harness.errors import BadLines, HarnessError
from harness.files import UNDECODABLE, open_file
from harness.rundir.records import read_marks
from harness.scenario import Trace

MAX_TOKENS = 10_000_000  # of one prompt or answer; beyond it is a slip
_GZIP = b"\x1f\x8b"
_MINUTE = len("2023-11-16 18:15")
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # that an array takes


class TraceRow(NamedTuple):
    line: int  # of the file, from 1 on
    at_s: float  # seconds; the zero is the format's own
    prompt_tokens: int
    output_tokens: int
    more: int = -1  # mooncake: the offset of the line; requests: its conversation


class BadLine(Exception):
    """A line that cannot be used; its number and what is wrong with it."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


class CsvFormat(NamedTuple):
    """A format of CSV: its columns of time, prompt and output, and how the time is written."""

    columns: tuple[str, str, str]
    seconds: Callable[[bytes], float]  # raises ValueError
    wanted: str


def _azure_seconds(at: bytes) -> float:
    """`2023-11-16 18:15:46.68`, with or without a time zone, which is the same in all rows and so changes nothing."""
    rest = at[_MINUTE:]
    if not rest.startswith(b":"):
        raise ValueError
    zone = max(rest.rfind(b"+"), rest.rfind(b"-"), rest.rfind(b"Z"))
    seconds = float(rest[1:] if zone < 0 else rest[1:zone])
    if not 0 <= seconds < 61:
        raise ValueError
    return _minute_s(at[:_MINUTE]) + seconds


@lru_cache(2)  # most rows are of the minute of the row before
def _minute_s(minute: bytes) -> float:
    return datetime.fromisoformat(minute.decode("ascii")).replace(tzinfo=UTC).timestamp()


# BurstGPT (https://github.com/HPMLL/BurstGPT): times in seconds since the collection began; a failed request has 0
# response tokens. Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; later releases have more.
_BURSTGPT = CsvFormat(("Timestamp", "Request tokens", "Response tokens"), float, "seconds are")
# Azure LLM inference traces of 2023 and 2024 (https://github.com/Azure/AzurePublicDataset): the wall clock of each
# request. TIMESTAMP,ContextTokens,GeneratedTokens, such as 2023-11-16 18:15:46.6805900,374,44
_AZURE = CsvFormat(
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_seconds, "a time like 2023-11-16 18:15:46.68 is"
)


def _cells(line: bytes) -> list[bytes]:
    """The cells of a line, which may be in quotes."""
    return [cell.strip(b' "\r\n') for cell in line.split(b",")]


def _is_csv(csv: CsvFormat, first: bytes) -> bool:
    return {name.encode() for name in csv.columns} <= set(_cells(first))


def _csv_rows(csv: CsvFormat, file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`. Raises BadLine for the header."""
    header = [name.decode(errors="replace") for name in _cells(file.readline())]
    if missing := [name for name in csv.columns if name not in header]:
        raise BadLine(1, f"the columns {', '.join(missing)} are missing; there are {', '.join(header)[:200]}")
    at, prompt, output = places = [header.index(name) for name in csv.columns]
    seconds = csv.seconds
    for number, line in enumerate(file, start=2):
        cells = _cells(line)
        try:
            yield TraceRow(number, seconds(cells[at]), int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                bad.add(number, _csv_problem(csv, cells, places))


def _csv_problem(csv: CsvFormat, cells: Sequence[bytes], places: list[int]) -> str:
    """What is wrong with the first cell that cannot be read."""
    readers: list[tuple[Callable[[bytes], float], str]] = [(csv.seconds, csv.wanted), *[(int, "a whole number is")] * 2]
    for name, place, (read, wanted) in zip(csv.columns, places, readers, strict=True):
        if place >= len(cells):
            return f"there are {len(cells)} columns, and {name} would be number {place + 1}"
        try:
            read(cells[place])
        except ValueError:
            return f"{name} is {cells[place].decode(errors='replace')!r}, and {wanted} expected"
    raise AssertionError("one of its cells was refused")


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace; other keys are ignored. Requests with the same ids at the start share a prefix.

    Times are in milliseconds, blocks have 512 tokens (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`, also where their ids fit no block."""
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
            except (ValueError, RecursionError) as error:  # msgspec's are such
                bad.add(number, str(error))
            else:
                more = offset if ids else -1
                yield TraceRow(number, line.timestamp / 1000, line.input_length, line.output_length, more)
        offset += len(raw)


class RecordLine(msgspec.Struct, frozen=True):
    """What is needed of a line of our own requests.jsonl: the measured requests of one cell, sent again."""

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
        """The length that was asked for where it was fixed, else the one that came."""
        known = (self.asked_tokens, self.output_tokens)
        return next(filter(None, known if self.fixed_length else known[::-1]), 0)


def _record_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of sending; records are written as requests end. Lines that cannot be used go to `bad`.

    Requests whose prompt length is unknown, such as failed ones, come as rows without tokens. Raises BadLine for a file
    of several cells where none is chosen.
    """
    offsets = _offsets(Path(file.name).resolve().with_name("processes.jsonl"))
    decode = msgspec.json.Decoder(RecordLine).decode
    chosen, others = trace.cell, set[str]()
    at_s = array("d")
    numbers, prompts, outputs, conversations = array("q"), array("q"), array("q"), array("q")
    for number, raw in enumerate(file, start=1):
        if not raw.strip():
            continue
        try:
            line = decode(raw)
        except UNDECODABLE as error:
            bad.add(number, str(error))
            continue
        if chosen is None:
            chosen = line.cell
        if line.cell != chosen:
            others.add(line.cell)
        elif line.phase == "measured":
            numbers.append(number)
            at_s.append(line.sent_s + offsets.get((line.cell, line.process), 0.0))
            prompts.append(line.prompt_tokens or 0)
            outputs.append(line.length)
            conversations.append(-1 if line.conversation is None else line.conversation)
    if others and (trace.cell is None or not numbers):
        known = sorted(others | ({chosen} if trace.cell is None and chosen is not None else set()))
        names = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
        problem = "several cells have requests." if trace.cell is None else f"there is no cell '{trace.cell}'."
        raise BadLine(1, f"{problem} Set trace.cell to one of: {names}")
    for place in sorted(range(len(at_s)), key=at_s.__getitem__):  # without numpy, which the image does not have
        yield TraceRow(numbers[place], at_s[place], prompts[place], outputs[place], conversations[place])


def _offsets(marks: Path) -> dict[tuple[str, int], float]:
    """What takes the clocks of load processes to Unix time, where they ran on several machines; else nothing."""
    starts = [mark for mark in read_marks(marks) if mark.event == "start"]
    if len({mark.host for mark in starts}) < 2:
        return {}
    return {(mark.cell, mark.process): mark.wall_s - mark.monotonic_s for mark in starts}


def _is_json_with(keys: Sequence[bytes], first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and all(b'"%b"' % key in first for key in keys)


class TraceFormat(NamedTuple):
    """How a format is recognised by its first line, and the rows of a file."""

    matches: Callable[[bytes], bool]
    rows: Callable[[BinaryIO, Trace, BadLines], Iterator[TraceRow]]


FORMATS = {
    "burstgpt": TraceFormat(partial(_is_csv, _BURSTGPT), partial(_csv_rows, _BURSTGPT)),
    "mooncake": TraceFormat(partial(_is_json_with, (b"input_length", b"timestamp")), _mooncake_rows),
    "azure": TraceFormat(partial(_is_csv, _AZURE), partial(_csv_rows, _AZURE)),
    "requests": TraceFormat(partial(_is_json_with, (b"sent_s", b"cell")), _record_rows),
}


class Replay:
    """The rows of a trace within its window, by their number from 0."""

    def __init__(self, path: Path, trace: Trace) -> None:
        """Raises HarnessError that names the file, the first lines that cannot be used and what is wrong with them."""
        self.path = path
        self.trace = trace
        self.at_s = array("d")  # after the start of the load, speed and window applied
        self.prompt_tokens = array("I")
        self.output_tokens = array("I")
        self.more = array("q")  # see Row
        self.without_tokens = 0  # rows left out, because they have no prompt or no answer
        bad = BadLines(path, "docs/traces.md says what each format holds.")
        try:
            with open_file(path) as file:
                if file.read(len(BOM_UTF8)) != BOM_UTF8:
                    file.seek(0)
                self.format = trace.format or _detect(path, file)
                self._read(file, bad)
        except OSError as error:
            raise HarnessError(f"{path}: the trace cannot be read ({error.strerror})") from None
        except BadLine as error:
            bad.add(error.line, error.problem)
        bad.raise_errors()
        if not self.at_s:
            raise self._empty()

    def __len__(self) -> int:
        return len(self.at_s)

    def at(self, number: int) -> float | None:
        """Seconds after the start at which a row is due; None when there are not that many."""
        return self.at_s[number] if number < len(self.at_s) else None

    def hash_ids(self, number: int) -> list[int]:
        """The blocks of a row's prompt, where its format has such."""
        if self.format != "mooncake" or self.more[number] < 0:
            return []
        with open_file(self.path) as file:  # they stay in the file, however long that is
            file.seek(self.more[number])
            return msgspec.json.decode(file.readline(), type=MooncakeLine).hash_ids

    def conversation(self, number: int) -> int | None:
        """What belongs together, where its format says so."""
        return self.more[number] if self.format == "requests" and self.more[number] >= 0 else None

    def _read(self, file: BinaryIO, bad: BadLines) -> None:
        trace = self.trace
        zero: float | None = None
        last = -math.inf
        for line, at_s, prompt_tokens, output_tokens, more in FORMATS[self.format].rows(file, trace, bad):
            if not last <= at_s < math.inf:
                if not math.isfinite(at_s):
                    bad.add(line, f"{at_s} is not a time")
                    continue
                bad.add(line, f"its time is {last - at_s:g} s before that of the row before; sort the file by time")
            last = at_s
            if zero is None:
                zero = at_s
            since_s = at_s - zero - trace.from_s
            if since_s < 0:
                continue
            if trace.to_s is not None and at_s - zero >= trace.to_s:
                break
            if not (0 < prompt_tokens <= MAX_TOKENS and 0 < output_tokens <= MAX_TOKENS):
                if (problem := _impossible(prompt_tokens, output_tokens)) is not None:
                    bad.add(line, problem)
                self.without_tokens += 1
                continue
            self.at_s.append(since_s / trace.speed)
            self.prompt_tokens.append(prompt_tokens)
            self.output_tokens.append(output_tokens)
            self.more.append(more)
            if len(self.at_s) == trace.max_requests:
                break
        self._lasts_s = None if zero is None else last - zero

    def _empty(self) -> HarnessError:
        trace = self.trace
        if self._lasts_s is None:
            return HarnessError(f"{self.path}: there is no request in this trace ({self.format})")
        if self.without_tokens:
            return HarnessError(f"{self.path}: none of the {self.without_tokens:,} rows of the window has tokens")
        until = "" if trace.to_s is None else f" to {trace.to_s:g} s"
        return HarnessError(
            f"{self.path}: no row is in the window from {trace.from_s:g} s{until} after the first",
            next_step=f"As far as it was read the trace lasts {self._lasts_s:,.3f} s; change from_s and to_s.",
        )


class Beginning:
    """When requests before a trace are due: as its rows begin, and no later than they come on the mean."""

    def __init__(self, replay: Replay) -> None:
        self._at_s = replay.at_s
        self._mean_s = (replay.at_s[-1] - replay.at_s[0]) / len(replay)

    def at(self, number: int) -> float:
        """Seconds after the start."""
        mean_s = number * self._mean_s
        return min(self._at_s[number] - self._at_s[0], mean_s) if number < len(self._at_s) else mean_s


def replay_of(path: str | Path, trace: Trace) -> Replay:
    """The rows of a trace, read once per process. Raises HarnessError."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise HarnessError(f"{path}: the trace cannot be read ({error.strerror})") from None
    return _kept(Path(path), trace, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _kept(path: Path, trace: Trace, _size: int, _changed_ns: int) -> Replay:
    return Replay(path, trace)


def sha256_of(path: Path) -> str:
    """The hash of a file's content, however large it is. Raises HarnessError."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HarnessError(f"{path}: the trace cannot be read ({error.strerror})") from None


def _detect(path: Path, file: BinaryIO) -> str:
    """The format by the first line; leaves the file where it begins."""
    first, begins = b"", file.tell()
    while not first.strip():
        first = file.readline(1_000_000)
        if not first:
            raise HarnessError(f"{path}: the trace is empty")
    file.seek(begins)
    if first.startswith(_GZIP):
        raise HarnessError(f"{path}: the trace is packed", next_step=f"gunzip {path} (and name the file it leaves)")
    for name, format_ in FORMATS.items():
        if format_.matches(first):
            return name
    shown = first[:100].decode("utf-8", errors="replace").strip()
    raise HarnessError(
        f"{path}:1: the format of the trace is not known: {shown!r}",
        next_step=f"Known: {', '.join(FORMATS)}. docs/traces.md says what each holds.",
    )


def _impossible(prompt_tokens: int, output_tokens: int) -> str | None:
    """Why no request has these lengths; None: one may have, also one without tokens."""
    for name, tokens in (("prompt", prompt_tokens), ("answer", output_tokens)):
        if tokens < 0:
            return f"a negative length: {name} of {tokens} tokens"
        if tokens > MAX_TOKENS:
            return f"{name} of {tokens:,} tokens; at most {MAX_TOKENS:,} are taken"
    return None
