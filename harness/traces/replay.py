"""A trace as a load: the rows of its window, when each is due, how long its prompt and its answer are.

A row takes 28 bytes here, so a million of them are no burden; a file is read no further than its window needs.
"""

import hashlib
import math
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from harness.errors import BadLines, HarnessError
from harness.files import open_file
from harness.scenario.scenario import Trace
from harness.traces import formats, requests
from harness.traces.formats import BadLine, TraceRow


class TraceFormat(NamedTuple):
    """How a format is recognised by its first line, and the rows of a file."""

    matches: Callable[[bytes], bool]
    rows: Callable[[BinaryIO, Trace, BadLines], Iterator[TraceRow]]


FORMATS = {
    "burstgpt": TraceFormat(formats.is_burstgpt, formats.burstgpt_rows),
    "mooncake": TraceFormat(formats.is_mooncake, formats.mooncake_rows),
    "azure": TraceFormat(formats.is_azure, formats.azure_rows),
    "requests": TraceFormat(requests.matches, requests.rows),
}
MOST_TOKENS = 10_000_000  # of one prompt or answer; beyond it is a slip
_GZIP = b"\x1f\x8b"


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
        bad.refuse()
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
        return formats.mooncake_hash_ids(self.path, self.more[number])

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
                bad.add(line, f"its time lies {last - at_s:g} s before that of the row before; sort the file by time")
            last = at_s
            if zero is None:
                zero = at_s
            since_s = at_s - zero - trace.from_s
            if since_s < 0:
                continue
            if trace.to_s is not None and at_s - zero >= trace.to_s:
                break
            if not (0 < prompt_tokens <= MOST_TOKENS and 0 < output_tokens <= MOST_TOKENS):
                if (problem := _impossible(prompt_tokens, output_tokens)) is not None:
                    bad.add(line, problem)
                self.without_tokens += 1
                continue
            self.at_s.append(since_s / trace.speed)
            self.prompt_tokens.append(prompt_tokens)
            self.output_tokens.append(output_tokens)
            self.more.append(more)
            if len(self.at_s) == trace.most:
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
            f"{self.path}: no row lies in the window from {trace.from_s:g} s{until} after the first",
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
        if tokens > MOST_TOKENS:
            return f"{name} of {tokens:,} tokens; at most {MOST_TOKENS:,} are taken"
    return None
