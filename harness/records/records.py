"""The central record, one request as the client observed it, and the readers of files with one record in a line.

Records are raw observations. `numbers/formulas.py` computes everything else (TTFT, TPOT, goodput ...) from them, so
a definition can be corrected without a new measurement. Formats: docs/run-directory.md.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from harness.base.errors import HarnessError
from harness.base.files import UNDECODABLE, open_file, read_bytes, read_lines

MAX_CPU = 0.90  # of one core: a load process is one thread, so above this it limits the load
SLACK_S = 0.001  # a kernel's stamp that is impossible by more than this is ignored
LATE_READ_S = 0.005  # after the kernel had the bytes: a busy load process checks its sockets every 2 ms
MAX_TOKENS = 2**31 - 1  # of any count: engines count in 32 bits
TEMPLATE_TOKENS = 16_384  # a chat template adds fewer; a token of the prompt itself has at least one byte
MAX_PIECES = 2  # arrivals of an answer that was buffered: ...
MIN_BUFFERED = 16  # ... it has so many tokens or more
CLOSING_S = 0.2  # after a response: a server that closes the connection has done so (Lemonade: 70 ms after [DONE])

ErrorKind = Literal[
    "connect",  # no connection: refused, unreachable, name not resolved
    "timeout",  # no event or body was complete for longer than the scenario allows; pings do not count
    "disconnect",  # the connection broke before the response was complete
    "rejected",  # 429 or 503: the server is busy
    "http",  # any other status that is not 2xx
    "not_api",  # 200 with something that is not the API's answer, such as HTML
    "stream_error",  # an error object inside a 200 stream
    "malformed",  # an event that is not JSON, or a stream without end
    "truncated",  # the stream ended without [DONE] or a finish reason
    "empty",  # a complete answer without any generated text
    "unfinished",  # cut by the end of the run
    "abandoned",  # the user left, as the load asks for: neither a success nor a failure
    "client",  # the load generator could not send it, or has a defect; see the message
    "unknown",  # imported, and the tool does not say which of these it was
]
KNOWN_FINISHES = ("stop", "length", "tool_calls", "function_call", "content_filter")  # the reasons of the OpenAI API
# Bounds of the values that are read: no measurement is beyond them, and arithmetic on larger values would overflow.
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # a duration, or a time on any clock
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
# A moment after `sent_s`. The kernel's stamp is on another clock, joined to SLACK_S, so it may be that much earlier.
After = Annotated[float, msgspec.Meta(ge=-SLACK_S, le=1e11)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
OddText = Literal["blank", "repeated", "reserved"]
CUT = ("unfinished", "abandoned")  # not ended by the server: no failures, and their tokens count
# What is known of a latency of a request; harness.numbers.share_test has the meanings.
OBSERVED, AT_LEAST, AT_MOST, UNKNOWN, FAILED = range(5)


class BadField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    field: str  # such as "usage.completion_tokens"
    # another JSON type; 0 where something was counted, so the server does not count it; less or more than `limit`; text
    # in a field that is no known channel
    code: Literal["type", "zero", "below", "above", "unknown"]
    got: str  # the JSON type, else the number
    limit: int | None = None


def find_impossible_counts(
    prompt: int | None,
    output: int | None,
    cached: int | None,
    reasoning: int | None,
    asked_tokens: int | None,
    *,
    prompt_max: int = MAX_TOKENS,
    output_min: int = 0,
) -> dict[str, BadField]:
    """Return the token counts that are out of bounds, by their names in a record.

    `asked_tokens` is the request's max_tokens. Cached tokens are part of the prompt, reasoning is part of the output.
    """
    output_max = MAX_TOKENS if asked_tokens is None else asked_tokens
    bad: dict[str, BadField] = {}

    def is_possible(name: str, field: str, value: int | None, minimum: int, maximum: int) -> bool:
        if value is None or minimum <= value <= maximum:
            return value is not None
        text = str(value) if value.bit_length() <= 64 else "more than 64 bits"
        if value == 0:
            bad[name] = BadField(f"usage.{field}", "zero", text)
        elif value < minimum:
            bad[name] = BadField(f"usage.{field}", "below", text, minimum)
        else:
            bad[name] = BadField(f"usage.{field}", "above", text, maximum)
        return False

    if is_possible("prompt_tokens", "prompt_tokens", prompt, 1, prompt_max):
        prompt_max = prompt or 0
    if is_possible("output_tokens", "completion_tokens", output, output_min, output_max):
        output_max = output or 0
    is_possible("cached_tokens", "prompt_tokens_details.cached_tokens", cached, 0, prompt_max)
    is_possible("reasoning_tokens", "completion_tokens_details.reasoning_tokens", reasoning, 0, output_max)
    return bad


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False, kw_only=True):
    """One request that was sent. All times but `sent_s` are seconds after `sent_s`; missing is None."""

    id: str  # sent as X-Request-Id, so a server's log can be joined
    cell: str  # the cell of the plan that it belongs to
    load: str  # the load's name in the scenario
    user_class: str
    index: Whole  # place in the seeded request sequence of the cell
    user: Count  # the virtual user
    process: Whole  # pid of the load process, made unique among machines: its mark has machine and clock
    phase: Literal["warmup", "measured"]
    sent_s: Duration  # just before the first byte is written, the first time; monotonic clock of `process`
    ended_s: After  # end of the response, or the moment of the error
    clock: Literal["kernel", "read"] = "read"  # chunk times: kernel's receive stamps, or time of the read
    conversation: Whole | None = None  # index of its first request: those of one conversation follow each other
    turn: Count | None = None  # place in the conversation
    batch: Whole | None = None  # index of the first request of its burst
    step: Count | None = None  # of a replayed trace: number in the conversation
    agent: Count | None = None  # of a replayed trace: 0 is the root
    # Of a replayed trace: tokens of the prompt, without a chat template, that a cache without bounds could have. None:
    # not known.
    planned_cached_tokens: Count | None = None
    continues: Count | None = None  # number of an earlier step that was sent: this prompt starts with its whole prompt
    again: bool = False  # the question before, asked once more: the user wants another answer
    scheduled_s: Seconds | None = None  # when the plan wanted it sent (negative: sent late); None in a closed loop
    resent: bool = False  # the server was closing the kept connection: sent again on a new one, within this record
    connect_s: Duration | None = None  # duration of opening the connection, before sent_s (resent: after); None: reused
    # SYNs sent again until it was open, the first after 1 s; None: reused, unknown
    connect_retries: Count | None = None
    headers_s: After | None = None  # the response headers were read
    chunks_s: list[After] = []  # one per data event that carries generated tokens of any channel
    # Events that announce a token without text, such as the end token, before the first of chunks_s or after the last.
    # Role-only events, and a last event that reports the finish reason "length", are not counted.
    textless: Count | None = None
    first_visible_s: After | None = None  # first event with visible content (not reasoning)
    # First event with text of any channel that is not blank, or a tool call; None: the first of chunks_s, or there is
    # none. A blank may be sent before the prompt is computed.
    first_text_s: After | None = None
    # Events whose text could not be read: a channel of no known form, or text in an unknown field. The first of
    # chunks_s is not the first token then.
    unread: Count | None = None
    coalesced: Count = 0  # chunks that shared a read with a later one: their times are upper bounds
    # Of coalesced, those whose read came late, so that the client put them together and not the server; None: none are
    # coalesced, or the reads have no stamps that would tell.
    coalesced_late: Count | None = None
    # Characters of the generated text, of all channels, and of its first arrival (harness.records.arrivals); words of
    # its first chunk. They tell how many tokens came before TPOT starts. None: not streamed, or by another tool.
    text_chars: Count | None = None
    first_arrival_chars: Count | None = None
    first_words: Count | None = None
    via: str | None = None  # headers `server` and `via`, of an answer that came in few pieces
    asked_tokens: Count | None = None  # max_tokens of the request
    fixed_length: bool = False  # ignore_eos was asked, so output must equal asked_tokens
    asked_prompt_tokens: Count | None = None  # planned length of the prompt, without a chat template; None: not planned
    prompt_tokens: int | None = None  # as the server's usage reports it
    output_tokens: int | None = None  # likewise
    cached_tokens: int | None = None  # likewise, of the prompt
    reasoning_tokens: int | None = None  # likewise, of the output
    reasoning_chunks: Count = 0  # of chunks_s, those with nothing but reasoning
    tool_chunks: Count = 0  # and those with nothing but tool calls
    tool_calls: Count | None = None  # in the answer; None: no tools were sent
    tool_calls_valid: Count | None = None  # of these: a known tool, and arguments that it takes
    bad_fields: list[BadField] = []  # of the answer: their values were not possible, and are missing above
    vectors: Count | None = None  # of an answer to embeddings
    answer_valid: bool | None = None  # whether it has the form that was asked for; None: none was, or it failed
    answer_right: bool | None = None  # whether it is the label, or the answer, that is known to be right
    item: Count | None = None  # number of the question, where the right answers are known: it may be asked again
    answer_digest: str | None = None  # of the answer in one spelling, where the right answers are known
    # Whether the answer has the word of its user, which the prompts ask to repeat; None: they do not, or it has no text
    own_word: bool | None = None
    foreign_user: Count | None = None  # whose word the answer has, although it is of this user; None: of none
    foreign_load: str | None = None  # of the load of that user, where it is another one
    # How alike its shell commands and those of the recorded answer are, 0 to 1; None: not compared, or none recorded
    action_iou: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    finish: str | None = None  # finish reason
    model: str | None = None  # that the text of the answer is of, as the server says; "A then B" if it changed
    fingerprint: str | None = None  # `system_fingerprint` of the text, likewise
    refused: bool = False  # the answer has a refusal; another one is the finish reason "content_filter"
    # The whole text is white space (blank), one token again and again (repeated), or tokens that no text has (reserved,
    # such as <unused49>). None: any other text, or not checked (failed requests, tool calls, embeddings).
    odd_text: OddText | None = None
    status: Annotated[int, msgspec.Meta(ge=0, le=999)] | None = None  # three digits, whatever they are
    # The wait before this user's next request that the server asked for (Retry-After of 429 and 503), at most 60 s; in
    # none of the times above. None: it asked for none, or for none that is valid.
    retry_after_s: Duration | None = None
    error: ErrorKind | None = None  # the kind of failure
    message: str | None = None  # what the error was, shortened; never the model's output


class ReplayedConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What became of the steps of a conversation that a load replayed. Each step is in exactly one of the counts."""

    conversation: Whole  # that of its requests, without the number of the agent
    place: Count  # in the trace
    repetition: Count = 0  # 0: it was replayed for the first time
    before_start: Count = 0  # recorded before the start inside the conversation: not sent
    too_long: Count = 0  # left out for the context, with those that depend on them
    ended: Count = 0
    failed: Count = 0
    open: Count = 0  # not ended, or not sent, because the load ended
    not_sent: Count = 0  # they depend on a step that failed
    delays_s: Number = 0.0  # as recorded, of steps that were due
    removed_s: Number = 0.0  # of these delays, by the load's limits

    @property
    def is_whole(self) -> bool:
        return self.ended > 0 and not (self.before_start or self.too_long or self.failed or self.open or self.not_sent)


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of processes.jsonl: the start or the end of a load process.

    `wall_s` and `monotonic_s` are read one right after the other: they join its records with other clocks. A process
    without an `end` mark was killed, and the number of requests that it had sent is not known.
    """

    event: Literal["start", "end"]
    process: Whole
    host: str | None = None  # name and boot of the machine, whose processes share a monotonic clock
    cell: str
    wall_s: Seconds
    wall_error_s: Seconds | None = None  # of several machines: `wall_s` is the master's clock, known to so much
    monotonic_s: Duration
    # Whether the warm-up found the server steady before its bound (end only). None: it did not check that.
    steady: bool | None = None
    sent: Count | None = None  # requests whose first byte was about to be written (end only)
    recorded: Count | None = None  # records handed to the file (end only)
    left_s: Duration | None = None  # measured time left when it was asked to stop (end only); None: no time is set
    users: Count | None = None  # that it had in total (end only); None: their number changes with the stages
    users_gone: Count | None = None  # that ended before they were asked to (end only)
    replays: list[ReplayedConversation] | None = None  # (end only); None: the load replays no conversations
    cpu_s: Duration | None = None  # CPU time of the process since its start mark (end only)
    # Highest share of one core over any 5 s from the first measured request on; over the time from there to the end
    # where that is between 1 and 5 s (end only). A lifetime's mean would hide a few seconds of saturation.
    cpu_max: Seconds | None = None
    read_lag_p99_s: Seconds | None = None  # p99 of the wait of bytes in the socket before they were read (end only)
    # How late its event loop ran what fell due 20 times a second from the first measured request on.
    loop_lag_mean_s: Seconds | None = None  # (end only, as the following) None: below 1 s
    loop_lag_p50_s: Seconds | None = None
    loop_lag_p99_s: Seconds | None = None  # None: below 5 s
    loop_lag_max_s: Seconds | None = None
    core_wait: Seconds | None = None  # share of that time in which it could have run, and others had the cores


def read_requests(path: Path, damaged: list[int] | None = None) -> Iterator[Request]:
    return read_lines(path, Request, damaged)


def read_marks(path: Path, damaged: list[int] | None = None) -> list[ProcessMark]:
    """The marks of a processes.jsonl. `damaged` gets the numbers of unreadable lines; a torn last line is skipped."""
    marks = []
    for number, line in enumerate(read_bytes(path).splitlines(keepends=True) if path.exists() else (), start=1):
        try:
            marks.append(msgspec.json.decode(line, type=ProcessMark))
        except UNDECODABLE:
            if damaged is not None and line.endswith(b"\n"):
                damaged.append(number)
    return marks


# Several processes read the blocks of a long file. The blocks depend on the file alone and the results come in the
# order of the file, so the number of processes changes no result.
BLOCK_BYTES = 4 * 2**20
PARALLEL_BYTES = 64 * 2**20  # below that, starting processes takes longer than they save
MAX_PROCESSES = 4

T = TypeVar("T")
Reading = Callable[[Callable[["Block"], T]], Iterable[T]]


class Block(msgspec.Struct, frozen=True):
    path: str
    start: int
    end: int

    def lines(self) -> Iterator[memoryview]:
        """Yield the lines of the block, with their ends, as parts of what was read at once: nothing is copied."""
        with open_file(self.path) as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        view, start = memoryview(data), 0
        while start < len(data):
            end = data.find(b"\n", start) + 1 or len(data)
            yield view[start:end]
            start = end


class Lines(msgspec.Struct):
    """The lines of a block."""

    count: int = 0
    damaged: list[int] = []  # numbers, from 1, of those that could not be decoded


def split_blocks(path: Path, block_bytes: int | None = None) -> list[Block]:
    """Divide a file into blocks of whole lines with about that many bytes; no blocks for an empty or missing file."""
    if not path.exists():
        return []
    size = path.stat().st_size
    starts = [0]
    with open_file(path) as file:
        for place in range(block_bytes or BLOCK_BYTES, size, block_bytes or BLOCK_BYTES):
            file.seek(place - 1)  # the line may end right before `place`
            file.readline()
            if starts[-1] < file.tell() < size:
                starts.append(file.tell())
    return [Block(str(path), start, end) for start, end in pairwise([*starts, size]) if end > start]


def damaged_in_file(blocks: Iterable[Lines]) -> list[int]:
    """The numbers of damaged lines, counted from the start of the file."""
    damaged: list[int] = []
    before = 0
    for block in blocks:
        damaged += [before + number for number in block.damaged]
        before += block.count
    return damaged


def max_processes() -> int:
    """The number of processes that may read at once: one for each core of this process, up to a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_PROCESSES, cores)


@contextmanager
def reader(blocks: list[Block]) -> Iterator[Reading[Any]]:
    """Provide a `map`: it calls a function for each block and yields the results in order.

    Several processes read a long file, so function and results must be picklable. The processes are spawned and not
    forked, because this process may have threads; a script that calls this needs the usual
    `if __name__ == "__main__":`. Raises HarnessError when a process dies.
    """
    size = blocks[-1].end if blocks else 0
    count = min(max_processes(), len(blocks))
    if size < PARALLEL_BYTES or count < 2:
        yield lambda function: map(function, blocks)
        return
    import gc
    import multiprocessing  # here, because load processes do not need it
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    spawning = multiprocessing.get_context("spawn")
    # Records have no cycles, and the collector would scan them all again and again.
    with ProcessPoolExecutor(count, mp_context=spawning, initializer=gc.disable) as pool:
        try:
            yield lambda function: pool.map(function, blocks)
        except BrokenProcessPool:
            raise HarnessError(
                f"{blocks[0].path}: a process that read it was killed",
                next_step="Was memory short? `dmesg` says so. It needs about 52 MB for each of its processes.",
            ) from None


_FRESH_S = 6.0  # an older sample does not describe the present


_MAX_TORN_BYTES = 16 << 20  # of an incomplete line; the rest of it is ignored


class Tail:
    """Reads the whole lines that were appended to a file since the last call. A missing file has no lines."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._torn = b""

    def lines(self) -> list[bytes]:
        try:
            with open_file(self.path) as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        self._offset += len(new)
        *whole, torn = (self._torn + new).split(b"\n")
        self._torn = torn[:_MAX_TORN_BYTES]
        return whole


class Samples:
    """Reads the samples that are appended to metrics.jsonl or telemetry.jsonl from now on."""

    def __init__(self, path: Path) -> None:
        self.newest: dict[str, Any] | None = None  # None: there is no recent one
        self._tail = Tail(path)

    def read_new(self) -> list[dict[str, Any]]:
        """Return the samples since the last call. This takes well below a millisecond."""
        new: list[dict[str, Any]] = []
        for line in self._tail.lines():
            with suppress(*UNDECODABLE):
                sample = msgspec.json.decode(line)
                if isinstance(sample, dict) and isinstance(sample.get("wall_s"), float):
                    new.append(sample)
        self.newest = new[-1] if new else self.newest
        if self.newest is not None and time.time() - self.newest["wall_s"] > _FRESH_S:
            self.newest = None
        return new
