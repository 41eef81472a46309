"""The table of a run's requests: numpy columns with one row a request, and the only reader of requests.jsonl.

Blocks of the file are decoded, in several processes where the file is long, and their columns are concatenated. Chunk
times are not kept: the rows have what is derived from them, `Gaps` has the gaps between them, and `Rows.place` finds
a record again.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import astuple
from numpy.typing import NDArray

from harness.base.files import UNDECODABLE, open_file
from harness.failures.diagnosis import example_messages
from harness.records.arrivals import JOINED_S, JOINED_SHARE, SMALLEST_LIMIT_S, arrival_limit_s
from harness.records.clock import Clock
from harness.records.records import (
    CUT,
    MAX_TOKENS,
    SLACK_S,
    BadField,
    Block,
    Lines,
    Request,
    damaged_in_file,
    find_impossible_counts,
    reader,
    split_blocks,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
FINE_S = 0.1  # width of a bin of tokens over time
MAX_FINE = 4_000_000  # bins of a cell, over four days; later times count in the last bin
_MIN_GAP_S = 2.0**-30  # shorter gaps are in one bin, as those of chunks that shared a read
_JOINED_PARTS, _SMALL_PART = 16, 16_384  # so many parts, each of fewer rows than that, are joined
_PIECE = 2**15  # chunk times that are handled at once: their arrays stay in the cache
_GAP_SHIFT = 42  # a bin of gaps has the sign, the exponent and the first ten bits of the fraction of a float


class Words(Struct):
    """A column of words, most of which repeat: a code for each row, and the word of each code. Code 0 is None."""

    codes: NDArray[np.unsignedinteger[Any]]  # of the smallest type that can number the texts
    texts: list[str | None]

    @classmethod
    def of(cls, words: Sequence[str | None]) -> "Words":
        if words and words[0] is None and words.count(None) == len(words):
            return cls(np.zeros(len(words), dtype=np.uint8), [None])
        code_of = {word: code for code, word in enumerate(dict.fromkeys((None, *words)))}
        return cls(np.fromiter(map(code_of.__getitem__, words), _code_type(code_of), len(words)), list(code_of))

    @property
    def is_set(self) -> Bools:
        mask: Bools = self.codes != 0
        return mask

    def is_in(self, *words: str | None) -> Bools:
        mask: Bools = np.array([text in words for text in self.texts])[self.codes]
        return mask

    def counts(self) -> dict[str, int]:
        """The number of rows of each word, in the order in which the words appear."""
        codes, first, numbers = np.unique(self.codes, return_index=True, return_counts=True)
        ordered = sorted(zip(first.tolist(), codes.tolist(), numbers.tolist(), strict=True))
        return {text: number for _, code, number in ordered if (text := self.texts[code]) is not None}

    def where(self, chosen: Any) -> "Words":
        return Words(self.codes[chosen], self.texts)


class Rows:
    """Requests as columns, in the order of their records; a field of a record has its name there and its meaning.

    Times are in seconds, `sent_s` on the axis of the cell. A missing number is NaN. A column of chosen
    rows is made when it is first read: most numbers need few of them.
    """

    place: Integers  # of the record in its source
    index: Integers
    process: Integers
    user: Floats
    measured: Bools  # not of the warm-up
    sent_s: Floats
    ended_s: Floats
    read_clock: Bools  # chunk times are times of the read
    batch: Floats
    scheduled_s: Floats
    resent: Bools
    connect_s: Floats
    connect_retries: Floats
    headers_s: Floats
    chunks: Floats  # number of chunks, as of the following
    first_chunk_s: Floats
    last_chunk_s: Floats
    longest_gap_s: Floats  # between two chunks
    arrivals: Floats  # groups of chunks that came together
    first_arrival_chunks: Floats
    first_arrival_s: Floats  # the last chunk of the first arrival
    first_shared: Bools  # the first two chunks have the same time
    disordered: Bools  # a chunk is earlier than the one before
    textless: Floats
    first_visible_s: Floats
    first_text_s: Floats
    blank_gaps: Floats  # usual gaps between the first chunk, a blank, and the first text, see `_blank_gaps`
    unread: Floats
    coalesced: Floats
    coalesced_late: Floats
    text_chars: Floats
    first_arrival_chars: Floats
    first_words: Floats
    asked_tokens: Floats
    fixed_length: Bools
    refused: Bools
    asked_prompt_tokens: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    reasoning_tokens: Floats
    reasoning_chunks: Floats
    tool_chunks: Floats
    tool_calls: Floats
    tool_calls_valid: Floats
    vectors: Floats
    answer_valid: Floats  # 1 or 0
    answer_right: Floats
    item: Floats
    own_word: Floats  # 1 or 0
    foreign_user: Floats
    conversation: Floats
    turn: Floats
    step: Floats
    agent: Floats
    planned_cached_tokens: Floats
    continues: Floats
    retry_after_s: Floats
    load: Words
    error: Words
    finish: Words
    model: Words
    fingerprint: Words
    odd_text: Words
    via: Words
    answer_digest: Words
    foreign_load: Words
    message: Words  # of failed requests: one example of all that differ only in numbers

    def __init__(self, rows: "Rows | None" = None, chosen: Any = None, **columns: Any) -> None:
        self._all, self._chosen = rows, chosen
        self.derived: dict[str, Floats] = {}  # further columns, by the name of their formula
        self.__dict__.update(columns)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def good(self) -> Bools:
        """Whether the request succeeded."""
        return ~self.error.is_set

    def where(self, chosen: Any) -> "Rows":
        """The rows of a mask, a slice or an array of positions."""
        is_mask = isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_
        return self if is_mask and chosen.all() else Rows(self, chosen)

    def __getattr__(self, name: str) -> Any:
        if name not in COLUMNS or self._all is None:
            raise AttributeError(name)
        column = getattr(self._all, name)
        if isinstance(column, Words):
            values: Any = column.where(self._chosen)
        elif name != "index" and len(column) and column.strides == (0,) and not isinstance(self._chosen, slice):
            values = np.broadcast_to(column[:1].reshape(()), len(self))  # takes no memory; `index` has the length
        else:
            values = column[self._chosen]
        setattr(self, name, values)
        return values


COLUMNS = tuple(Rows.__annotations__)


class Gaps(Struct):
    """The gaps between the chunks of requests, counted in bins less than 0.1 % wide."""

    requests: int = 0  # that have gaps
    n: int = 0
    total_s: float = 0.0
    min_s: float = np.inf
    max_s: float = -np.inf
    first: int = 0  # number of the first bin in `counts`
    counts: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def middles_s(self) -> Floats:
        """The middle of each bin of `counts`, in seconds."""
        edges = (np.arange(self.first, self.first + len(self.counts) + 1) << _GAP_SHIFT).view(np.float64)
        middles: Floats = (edges[:-1] + edges[1:]) / 2
        return middles

    def percentile_s(self, permille: int) -> float:
        """The middle of the bin in which so many per mille are reached. Raises IndexError without gaps."""
        rank = max(1, -(-self.n * permille // 1000))
        place = self.first + int(np.searchsorted(np.cumsum(self.counts), rank))
        low, high = np.array([place << _GAP_SHIFT, (place + 1) << _GAP_SHIFT], dtype=np.int64).view(np.float64)
        if low <= _MIN_GAP_S:
            return self.min_s
        return min(max((float(low) + float(high)) / 2, self.min_s), self.max_s)


def join_gaps(parts: Iterable[Gaps]) -> Gaps:
    """The gaps of several sets of requests together."""
    nonempty = [part for part in parts if part.n]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else Gaps()
    first = min(part.first for part in nonempty)
    counts = np.zeros(max(part.first + len(part.counts) for part in nonempty) - first, dtype=np.int64)
    for part in nonempty:
        counts[part.first - first : part.first - first + len(part.counts)] += part.counts
    return Gaps(
        requests=sum(part.requests for part in nonempty),
        n=sum(part.n for part in nonempty),
        total_s=sum(part.total_s for part in nonempty),
        min_s=min(part.min_s for part in nonempty),
        max_s=max(part.max_s for part in nonempty),
        first=first,
        counts=counts,
    )


class Tokens(NamedTuple):
    """Output tokens over time: their number in each bin of FINE_S since the start of the cell's first load process."""

    first: int  # number of the first bin
    counts: Floats


class CellRecords(Struct):
    """What a part of the file has of a cell."""

    rows: Rows
    gaps: Gaps  # of the measured requests that succeeded
    bad: dict[tuple[str, str], tuple[int, BadField]]  # by field and code: requests, and the first of them
    tokens: list[Tokens]  # only for charts


class FileRecords(NamedTuple):
    """The content of a requests.jsonl."""

    cells: dict[str, CellRecords]
    damaged: list[int]  # numbers of unreadable lines
    unknown: dict[str, int]  # records by cells that are not known


def read_cells(path: Path, clocks: Mapping[str, Clock], *, charted: bool = False) -> FileRecords:
    """Read the records of the cells whose clocks are given; `charted`: with the tokens over time.

    Raises HarnessError when a process that read a part of a long file was killed.
    """
    parts: dict[str, list[CellRecords]] = {}
    unknown: dict[str, int] = {}
    lines = []
    with reader(split_blocks(path)) as run:
        for cells, others, block_lines in run(partial(_read_block, clocks=clocks, charted=charted)):
            lines.append(block_lines)
            for name, count in others.items():
                unknown[name] = unknown.get(name, 0) + count
            for name, part in cells.items():
                cell_parts = parts.setdefault(name, [])
                cell_parts.append(part)
                if part is not cell_parts[0]:  # the bins of all parts would take more memory than their rows
                    cell_parts[0].gaps, part.gaps = join_gaps([cell_parts[0].gaps, part.gaps]), Gaps()
                _join_last(cell_parts)
    return FileRecords({name: join_records(parts.pop(name)) for name in list(parts)}, damaged_in_file(lines), unknown)


def _join_last(parts: list[CellRecords]) -> None:
    """Join the last parts when there are many: the small arrays of all parts would leave holes in the memory."""
    sizes = [len(part.rows.place) for part in parts[-_JOINED_PARTS:]]
    # A part much larger than the others would be copied again and again.
    if len(sizes) == _JOINED_PARTS and max(sizes) < min(_SMALL_PART, sum(sizes) / 2):
        joined = join_records(parts[-_JOINED_PARTS:])
        joined.rows = _packed(joined.rows)
        parts[-_JOINED_PARTS:] = [joined]


def _read_block(
    block: Block, clocks: Mapping[str, Clock], charted: bool
) -> tuple[dict[str, CellRecords], dict[str, int], Lines]:
    by_cell: dict[str, tuple[list[int], list[Request], list[bytes]]] = {}
    unknown: dict[str, int] = {}
    lines = Lines()
    for place, request in read_block(block, lines):
        if request.cell not in clocks:
            unknown[request.cell] = unknown.get(request.cell, 0) + 1
            continue
        places, requests, times = by_cell.setdefault(request.cell, ([], [], []))
        places.append(place)
        requests.append(request)
        times.append(_chunk_times(request))
        request.chunks_s.clear()  # at once: the next request has its numbers in the same memory, which is in the cache
    cells = {}
    for name, (places, requests, times) in by_cell.items():
        cells[name] = _records_of(requests, times, clocks[name], places, charted=charted)
        cells[name].rows = _packed(cells[name].rows)
        requests.clear()
    return cells, unknown, lines


def read_block(block: Block, lines: Lines) -> Iterator[tuple[int, Request]]:
    """Yield the records of a block with their places in the file, and count its lines. Damaged lines are skipped."""
    decode, place = msgspec.json.Decoder(Request).decode, block.start
    for line in block.lines():
        lines.count += 1
        try:
            yield place, decode(line)
        except UNDECODABLE:
            lines.damaged.append(lines.count)
        place += len(line)


def records_at(path: Path, places: Iterable[int]) -> Iterator[Request]:
    """Read the records at some places of a file again."""
    with open_file(path) as file:
        for place in places:
            file.seek(place)
            yield msgspec.json.decode(file.readline(), type=Request)


_TOKEN_COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
_FLAGS = ("resent", "fixed_length", "refused")
_WORDS = ("load", "error", "finish", "model", "fingerprint", "odd_text", "via", "answer_digest", "foreign_load")
_NUMBERS = (
    "user", "sent_s", "ended_s", "batch", "scheduled_s", "connect_s", "connect_retries", "headers_s", "textless",
    "first_visible_s", "coalesced", "coalesced_late", "text_chars", "first_arrival_chars", "first_words",
    "asked_tokens", "asked_prompt_tokens", "reasoning_chunks", "tool_chunks", "tool_calls", "tool_calls_valid",
    "vectors", "answer_valid", "answer_right", "item", "own_word", "foreign_user", "turn", "retry_after_s",
    "first_text_s", "unread",
    "conversation", "step", "agent", "planned_cached_tokens", "continues",
)  # fmt: skip


def drop_impossible_counts(request: Request) -> Request:
    """Replace impossible counts by None and list them in `bad_fields`. Other tools store them."""
    counts = (request.prompt_tokens, request.output_tokens, request.cached_tokens, request.reasoning_tokens)
    bad = find_impossible_counts(*counts, request.asked_tokens)
    if not bad:
        return request
    unknown: dict[str, None] = dict.fromkeys(bad)
    return msgspec.structs.replace(request, **unknown, bad_fields=[*request.bad_fields, *bad.values()])


def _without_times(request: Request) -> Request:
    """A request whose text was not all read, as if it was not streamed: when its first token came is not known."""
    return msgspec.structs.replace(
        request, textless=None, first_visible_s=None, first_text_s=None, reasoning_chunks=0, tool_chunks=0,
        coalesced=0, coalesced_late=None, text_chars=None, first_arrival_chars=None, first_words=None,
    )  # fmt: skip


def records_of(
    requests: Sequence[Request], clock: Clock, *, places: Sequence[int] | None = None, charted: bool = False
) -> CellRecords:
    """The table of some requests of one cell. `places`: of their records, by default their positions."""
    times = [_chunk_times(request) for request in requests]
    return _records_of(requests, times, clock, range(len(requests)) if places is None else places, charted=charted)


def _chunk_times(request: Request) -> bytes:
    """The chunk times of a request as an array of doubles; none where chunks are not all of its text."""
    if request.unread:
        return b""
    return _packer(len(request.chunks_s))(*request.chunks_s)


@lru_cache(maxsize=1024)
def _packer(number: int) -> Callable[..., bytes]:
    return struct.Struct(f"{number}d").pack


def _records_of(
    requests: Sequence[Request], times: Sequence[bytes], clock: Clock, places: Sequence[int], *, charted: bool
) -> CellRecords:
    possible = [request if _is_possible(request) else drop_impossible_counts(request) for request in requests]
    possible = [_without_times(request) if request.unread else request for request in possible]
    bad: dict[tuple[str, str], tuple[int, BadField]] = {}
    for wrong in (wrong for request in possible for wrong in request.bad_fields):
        number, first = bad.get((wrong.field, wrong.code), (0, wrong))
        bad[wrong.field, wrong.code] = (number + 1, first)

    columns: dict[str, tuple[Any, ...]] = dict.fromkeys(Request.__struct_fields__, ())
    columns |= dict(zip(columns, zip(*map(astuple, possible), strict=True), strict=False))

    def column(name: str, kind: Any = np.float64) -> Any:
        entries = columns[name]
        if entries and entries[0] is None and entries.count(None) == len(entries):
            return np.full(len(entries), np.nan)  # numpy takes long for each None
        return np.array(entries, dtype=kind)

    values: dict[str, Any] = {name: column(name) for name in (*_NUMBERS, *_TOKEN_COUNTS)}
    values |= {name: column(name, np.bool_) for name in _FLAGS}
    values |= {name: column(name, np.int64) for name in ("index", "process")}
    values |= {name: Words.of(columns[name]) for name in _WORDS}
    failures = [None if error in CUT else error for error in columns["error"]]
    values["sent_s"] += clock.offsets_s(values["process"])
    chunks = _Chunks(times)
    rows = Rows(
        **values,
        blank_gaps=chunks.blank_gaps(values["first_text_s"]),
        **chunks.columns,
        place=np.array(places, dtype=np.int64),
        measured=Words.of(columns["phase"]).is_in("measured"),
        read_clock=Words.of(columns["clock"]).is_in("read"),
        message=Words.of(list(example_messages(zip(failures, columns["message"], strict=True)))),
    )
    in_one_read = (rows.chunks > 1) & (rows.chunks - 1 <= rows.coalesced)
    gaps = chunks.gaps(rows.measured & rows.good & ~in_one_read)
    tokens = [over] if charted and (over := chunks.tokens(rows, clock)) is not None else []
    return CellRecords(rows, gaps, bad, tokens)


def rows_of(requests: Sequence[Request]) -> Rows:
    """The requests of one clock as columns, in their order."""
    return records_of(requests, Clock([])).rows


def _is_possible(request: Request) -> bool:
    """Whether the counts of most answers are possible; False: not known."""
    prompt, output, cached = request.prompt_tokens, request.output_tokens, request.cached_tokens
    return (
        request.reasoning_tokens is None
        and (prompt is None or 1 <= prompt <= MAX_TOKENS)
        and (output is None or 0 <= output <= (MAX_TOKENS if request.asked_tokens is None else request.asked_tokens))
        and (cached is None or 0 <= cached <= (prompt or MAX_TOKENS))
    )


class _Chunks:
    """The chunk times of some requests, all in a row."""

    def __init__(self, times: Sequence[bytes]) -> None:
        self.times_s = np.frombuffer(b"".join(times), dtype=np.float64)
        self._n = np.array(list(map(len, times)), dtype=np.int64) // self.times_s.itemsize
        self._streams = np.flatnonzero(self._n)
        ends = np.cumsum(self._n)[self._streams]
        starts = ends - self._n[self._streams]
        self._ends = ends
        self._gaps_s = np.empty_like(self.times_s)
        np.subtract(self.times_s[1:], self.times_s[:-1], out=self._gaps_s[:-1])
        none = np.full(len(self._n), np.nan)
        self.columns: dict[str, Any] = {
            "chunks": self._n.astype(np.float64),
            "first_chunk_s": none.copy(),
            "last_chunk_s": none.copy(),
            "longest_gap_s": none,
            "arrivals": self._n.astype(np.float64),
            "first_arrival_chunks": np.minimum(self._n, 1).astype(np.float64),
            "first_arrival_s": none.copy(),
            "first_shared": np.zeros(len(self._n), dtype=np.bool_),
            "disordered": np.zeros(len(self._n), dtype=np.bool_),
        }
        if not len(starts):
            return
        self._gaps_s[ends - 1] = -np.inf  # the last one of each request is no gap
        longest_s = np.maximum.reduceat(self._gaps_s, starts)
        self._gaps_s[ends - 1] = np.inf
        self.columns["first_chunk_s"][self._streams] = self.times_s[starts]
        self.columns["last_chunk_s"][self._streams] = self.times_s[ends - 1]
        self.columns["longest_gap_s"][self._streams] = np.where(np.isfinite(longest_s), longest_s, np.nan)
        self.columns["first_shared"][self._streams] = self._gaps_s[starts] == 0.0
        self.columns["disordered"][self._streams] = np.logical_or.reduceat(self._gaps_s < -SLACK_S, starts)
        self._count_arrivals(starts, ends)

    def _count_arrivals(self, starts: Integers, ends: Integers) -> None:
        arrivals, firsts = np.empty_like(starts), np.empty_like(starts)
        ahead = np.searchsorted(ends, np.arange(_PIECE, ends[-1] + _PIECE, _PIECE), side="left") + 1
        for first, last in pairwise(np.unique([0, *np.minimum(ahead, len(ends))]).tolist()):
            piece = slice(first, last)
            arrivals[piece], firsts[piece] = self._arrivals(starts[piece], ends[piece])
        self.columns["arrivals"][self._streams] = arrivals
        self.columns["first_arrival_chunks"][self._streams] = firsts
        self.columns["first_arrival_s"][self._streams] = self.times_s[starts + firsts - 1]

    def _arrivals(self, starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
        """The arrivals of streams that follow each other, and the chunks of the first arrival of each.

        Those of most streams need no median. The limit of a stream of ordered chunks with a mean gap of JOINED_S or
        more is at least SMALLEST_LIMIT_S. It is at most JOINED_SHARE of the longest usual gap, or JOINED_S: the lower
        median of m gaps is at most twice their sum over m + 1. Where no gap is between the two, the limit is.
        """
        gaps_s = self._gaps_s[starts[0] : ends[-1]]
        own = starts - starts[0]  # as positions in gaps_s
        spans_s = self.times_s[ends - 1] - self.times_s[starts]
        mean_s = spans_s / np.maximum(ends - starts - 1, 1)
        closest_s = np.minimum.reduceat(gaps_s, own)
        apart = gaps_s >= SMALLEST_LIMIT_S  # and the end of each stream
        arrivals = np.add.reduceat(apart, own, dtype=np.int64)
        places = np.flatnonzero(apart)
        firsts = places[np.searchsorted(places, own)] + 1 - own
        closest_apart_s = np.minimum.reduceat(np.where(apart, gaps_s, np.inf), own)
        is_clear = closest_apart_s >= np.maximum(JOINED_S, JOINED_SHARE * 2 * spans_s / arrivals)
        is_clear &= (arrivals > 1) & (closest_s >= 0) & (mean_s >= JOINED_S)
        is_apart = closest_s >= np.maximum(JOINED_S, 2 * JOINED_SHARE * mean_s)  # each chunk
        for place in np.flatnonzero(~is_clear & ~is_apart).tolist():
            start, end = int(starts[place]), int(ends[place])
            ordered = np.sort(self._gaps_s[start : end - 1]).data
            limit_s = arrival_limit_s(ordered, float(self.times_s[start]), float(self.times_s[end - 1]))
            arrivals[place] = end - start - bisect_left(ordered, limit_s)
            firsts[place] = (self._gaps_s[start:end] >= limit_s).argmax() + 1
        return arrivals, firsts

    def blank_gaps(self, first_text_s: Floats) -> Floats:
        """How many usual gaps came between the first chunk, a blank, and the first text; infinite without a usual gap.

        The usual gap is the median of those after the first text, without chunks that came together. One gap for each
        further blank is left out: such blanks are tokens. None where the first chunk is text.
        """
        gaps = np.full(len(self._n), np.nan)
        ends = np.cumsum(self._n)
        for row in np.flatnonzero(~np.isnan(first_text_s) & (self._n > 0)).tolist():
            times_s = self.times_s[ends[row] - self._n[row] : ends[row]]
            blanks = int((times_s < first_text_s[row]).sum())
            gaps_s = np.diff(times_s[blanks:])
            gaps_s = gaps_s[gaps_s >= JOINED_S] if (gaps_s >= JOINED_S).any() else np.full(len(gaps_s), JOINED_S)
            usual_s = float(np.median(gaps_s)) if len(gaps_s) else np.nan
            pause_s = first_text_s[row] - times_s[0]
            gaps[row] = pause_s / usual_s - (blanks - 1) if usual_s > 0 else np.inf
        return gaps

    def gaps(self, chosen: Bools) -> Gaps:
        """The gaps of the chosen requests."""
        chosen = chosen & (self._n > 1)
        if not chosen.any():
            return Gaps()
        is_chosen = np.repeat(chosen, self._n)
        is_chosen[self._ends - 1] = False
        gaps_s = self._gaps_s[is_chosen]
        min_s, max_s = float(gaps_s.min()), float(gaps_s.max())
        bins = np.maximum(gaps_s, _MIN_GAP_S, out=gaps_s).view(np.int64)  # in place: new memory takes longer
        bins >>= _GAP_SHIFT
        first = int(bins.min())
        bins -= first
        total_s = self.columns["last_chunk_s"][chosen] - self.columns["first_chunk_s"][chosen]
        return Gaps(
            requests=int(chosen.sum()),
            n=len(gaps_s),
            total_s=float(total_s.sum()),
            min_s=min_s,
            max_s=max_s,
            first=first,
            counts=np.bincount(bins),
        )

    def tokens(self, rows: Rows, clock: Clock) -> Tokens | None:
        """The tokens over time, without those of unknown processes. Without streaming all arrive at the end; those of
        a failed request are known by its chunks only.
        """
        has_tokens = np.isin(
            rows.process, [process for process in np.unique(rows.process).tolist() if clock.knows(process)]
        )
        has_tokens &= rows.output_tokens > 0
        sent_s = np.maximum(0.0, rows.sent_s - clock.start_s)
        chunk_tokens = np.where(has_tokens, rows.output_tokens / np.maximum(rows.chunks, 1), 0.0)
        whole = has_tokens & (self._n == 0) & rows.good
        arrivals = np.append(self._n, np.ones(whole.sum(), dtype=np.int64))
        weights = np.append(chunk_tokens, chunk_tokens[whole]).repeat(arrivals)
        at_s = np.append(sent_s, (sent_s + rows.ended_s)[whole]).repeat(arrivals)
        if not len(at_s):
            return None
        at_s[: len(self.times_s)] += self.times_s  # in place, as the following
        at_s /= FINE_S
        bins = at_s.astype(np.int64)
        np.clip(bins, 0, MAX_FINE - 1, out=bins)
        first = int(bins.min())
        bins -= first
        return Tokens(first, np.bincount(bins, weights=weights).astype(np.float64))


def join_records(parts: Sequence[CellRecords]) -> CellRecords:
    """The records of a cell from the parts of its file, in their order, except that the warm-up comes first."""
    bad: dict[tuple[str, str], tuple[int, BadField]] = {}
    for part in parts:
        for key, (number, first) in part.bad.items():
            bad[key] = (number + bad[key][0], bad[key][1]) if key in bad else (number, first)
    gaps = join_gaps(part.gaps for part in parts)
    tokens = [part_tokens for part in parts for part_tokens in part.tokens]
    return CellRecords(_joined([part.rows for part in parts]), gaps, bad, tokens)


def _packed(rows: Rows) -> Rows:
    """The rows with a single value for each column that has only one."""
    for name in COLUMNS:
        column = getattr(rows, name)
        if name != "place" and not isinstance(column, Words) and _is_constant(column):
            setattr(rows, name, column[:1].reshape(()).copy())
    return rows


def _is_constant(column: Any) -> bool:
    if not len(column):
        return False
    return bool((column == column[0]).all() or (column.dtype.kind == "f" and np.isnan(column).all()))


def _joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, those of the warm-up first. A column with one value takes no memory."""
    sizes = [len(part.place) for part in parts]
    measured = np.concatenate([np.broadcast_to(part.measured, size) for part, size in zip(parts, sizes, strict=True)])
    warmup = int((~measured).sum())
    order = slice(None) if not measured[:warmup].any() else np.argsort(measured, kind="stable")
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], Words):
            columns[name] = _joined_words(values).where(order)
        elif len(set(map(_constant_of, values))) == 1 and _constant_of(values[0]) is not None:
            columns[name] = np.broadcast_to(values[0], sum(sizes))
        else:
            whole = np.concatenate([np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)])
            columns[name] = whole[order]
        for part in parts:
            setattr(part, name, None)
    return Rows(**columns)


def _constant_of(column: Any) -> bytes | None:
    return column.tobytes() if column.ndim == 0 else None


def _joined_words(parts: Sequence[Words]) -> Words:
    text_codes: dict[str | None, int] = {None: 0}
    new_codes = [[text_codes.setdefault(text, len(text_codes)) for text in part.texts] for part in parts]
    kind = _code_type(text_codes)
    codes = [np.array(new, dtype=kind)[part.codes] for new, part in zip(new_codes, parts, strict=True)]
    return Words(np.concatenate(codes), list(text_codes))


def _code_type(texts: Collection[str | None]) -> Any:
    return np.min_scalar_type(len(texts))
