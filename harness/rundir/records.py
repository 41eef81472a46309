"""The central record: one request as the client saw it, raw observations only.

Everything else (TTFT, TPOT, goodput ...) is derived from these fields by `harness.analysis.derive`, so a definition
can be corrected without a GPU. Formats are versioned; see docs/run-directory.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from harness.files import UNDECODABLE, read_bytes, read_lines, with_new_names

MAX_CPU = 0.90  # of one core: a load process is one thread, and above that it is the limit
SLACK_S = 0.001  # how far a kernel's stamp may lie outside what is possible before it is not believed
LATE_READ_S = 0.005  # after the kernel had the bytes: a busy load process looks at its sockets each 2 ms
MAX_TOKENS = 2**31 - 1  # of any count: engines count in 32 bits
TEMPLATE_TOKENS = 16_384  # a chat template adds fewer; a token of the prompt itself has at least one byte
# After a response, a server that does not keep the connection has closed it: Lemonade within 70 ms of [DONE].
CLOSING_S = 0.2

ErrorKind = Literal[
    "connect",  # no connection: refused, unreachable, name not resolved
    "timeout",  # no data arrived for longer than the scenario allows; pings are none
    "disconnect",  # the connection broke before the response was complete
    "rejected",  # 429 or 503: the server says that it is busy
    "http",  # any other status that is not 2xx
    "not_api",  # 200 with something that is not the API's answer, such as HTML
    "stream_error",  # an error object inside a 200 stream
    "malformed",  # an event that is not JSON
    "truncated",  # the stream ended without [DONE] or a finish reason
    "empty",  # a complete answer without any generated text
    "unfinished",  # cut by the end of the run
    "abandoned",  # the user left, as the load has it: neither a success nor a failure
    "client",  # the load generator could not send it, or has a defect; the message says which
    "unknown",  # imported, and the tool does not say which of these it was
]
# Bounds of what is read. Beyond them is no measurement, and arithmetic on it would overflow.
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # a duration, or a time on any clock
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
# A moment after `sent_s`. The kernel's stamp is on another clock, which is joined to SLACK_S: as far may it lie before.
After = Annotated[float, msgspec.Meta(ge=-SLACK_S, le=1e11)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
CUT = ("unfinished", "abandoned")  # not by the server: neither failed, and what came until then was of use


class BadField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A field of a server's answer whose value is not possible. It counts as missing."""

    field: str  # such as "usage.completion_tokens"
    code: Literal["type", "below", "above"]  # another JSON type; less or more than `limit`
    got: str  # the JSON type, else the number
    limit: int | None = None


class TokenCounts(Protocol):
    """The token counts that a server reports for one request."""

    @property
    def prompt_tokens(self) -> int | None: ...

    @property
    def output_tokens(self) -> int | None: ...

    @property
    def cached_tokens(self) -> int | None: ...

    @property
    def reasoning_tokens(self) -> int | None: ...


def impossible(
    counts: TokenCounts, asked_tokens: int | None, *, prompt_max: int = MAX_TOKENS, output_min: int = 0
) -> dict[str, BadField]:
    """Return the counts that are out of bounds, by their names in a record.

    `asked_tokens` is the request's max_tokens. Cached tokens are part of the prompt, reasoning is part of the output.
    """
    output_max = MAX_TOKENS if asked_tokens is None else asked_tokens
    prompt, output = counts.prompt_tokens, counts.output_tokens
    bad: dict[str, BadField] = {}

    def check(name: str, field: str, value: int | None, minimum: int, maximum: int) -> bool:
        if value is None or minimum <= value <= maximum:
            return value is not None
        got = str(value) if value.bit_length() <= 64 else "more than 64 bits"
        code, limit = ("below", minimum) if value < minimum else ("above", maximum)
        bad[name] = BadField(f"usage.{field}", code, got, limit)  # type: ignore[arg-type]  # a tuple of two literals
        return False

    if check("prompt_tokens", "prompt_tokens", prompt, 0, prompt_max):
        prompt_max = prompt or 0
    if check("output_tokens", "completion_tokens", output, output_min, output_max):
        output_max = output or 0
    check("cached_tokens", "prompt_tokens_details.cached_tokens", counts.cached_tokens, 0, prompt_max)
    check("reasoning_tokens", "completion_tokens_details.reasoning_tokens", counts.reasoning_tokens, 0, output_max)
    return bad


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One request that was sent. All times but `sent_s` are seconds after `sent_s`; missing is None."""

    id: str  # sent as X-Request-Id, so a server's log can be joined
    cell: str  # the cell of the plan that it belongs to
    load: str  # the load's name in the scenario
    user_class: str
    index: Whole  # place in the seeded request sequence of the cell
    user: Count  # the simulated person or agent
    process: Whole  # pid of the load process, made unique among machines: its mark has machine and clock
    phase: Literal["warmup", "measured"]
    sent_s: Duration  # just before the first byte is written, the first time; monotonic clock of `process`
    ended_s: After  # end of the response, or the moment of the error
    clock: Literal["kernel", "read"] = "read"  # chunk times: kernel's receive stamps, or time of the read
    conversation: Whole | None = None
    turn: Count | None = None
    batch: Whole | None = None
    again: bool = False  # the question before, asked once more: the user wants another answer
    scheduled_s: Seconds | None = None  # when the plan wanted it sent (negative: sent late); None in a closed loop
    resent: bool = False  # the server was closing the kept connection: sent again on a new one, within this record
    connect_s: Duration | None = None  # duration of opening the connection, before sent_s (resent: after); None: reused
    # SYNs sent again until it was open, the first after 1 s; None: reused, unknown
    connect_retries: Count | None = None
    headers_s: After | None = None
    chunks_s: list[After] = []  # one per data event that carries generated tokens of any channel
    # Events that announce a token without text, such as the end token, before the first of chunks_s or after the last.
    # Role-only events, and a last event that reports the finish reason "length", are not counted.
    textless: Count | None = None
    first_visible_s: After | None = None  # first event with visible content (not reasoning)
    coalesced: Count = 0  # chunks that shared a read with a later one: their times are upper bounds
    # Of coalesced, those whose read came late, so that the client put them together and not the server; None: none are
    # coalesced, or the reads have no stamps that would tell.
    coalesced_late: Count | None = None
    asked_tokens: Count | None = None  # max_tokens of the request
    fixed_length: bool = False  # ignore_eos was asked, so output must equal asked_tokens
    asked_prompt_tokens: Count | None = None  # planned length of the prompt, without a chat template; None: not planned
    prompt_tokens: int | None = None  # the following four as the server's usage reports them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    reasoning_chunks: Count = 0  # of chunks_s, those with nothing but reasoning
    tool_chunks: Count = 0  # and those with nothing but tool calls
    tool_calls: Count | None = None  # in the answer; None: no tools were sent
    tool_calls_valid: Count | None = None  # of these: a known tool, and arguments that it takes
    bad_fields: list[BadField] = []  # of the answer: their values were not possible, and are missing above
    vectors: Count | None = None  # of an answer to embeddings
    answer_valid: bool | None = None  # whether it has the form that was asked for; None: none was, or it failed
    answer_right: bool | None = None  # whether it is the label that is known to be right
    finish: str | None = None
    status: Annotated[int, msgspec.Meta(ge=0, le=999)] | None = None  # three digits, whatever they are
    # The wait before this user's next request that the server asked for (Retry-After of 429 and 503), at most 60 s; in
    # none of the times above. None: it asked for none, or for none that is valid.
    retry_after_s: Duration | None = None
    error: ErrorKind | None = None
    message: str | None = None  # what the error was, shortened; never the model's output


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of processes.jsonl: a load process says hello when it starts and goodbye when it ends.

    `wall_s` and `monotonic_s` are read back to back: the anchor that joins its records with other clocks.
    A process without an `end` mark was killed, and what it had sent is not known.
    """

    event: Literal["start", "end"]
    process: Whole
    host: str | None = None  # name and boot of the machine: processes of one share its monotonic clock
    cell: str
    wall_s: Seconds
    wall_error_s: Seconds | None = None  # of several machines: `wall_s` is the master's clock, known to so much
    monotonic_s: Duration
    # Whether the warm-up found the server steady before its bound (end only). None: it was not to find that out.
    steady: bool | None = None
    sent: Count | None = None  # requests whose first byte was about to be written (end only)
    recorded: Count | None = None  # records handed to the file (end only)
    left_s: Duration | None = None  # measured time left when it was asked to stop (end only); None: no time is set
    users: Count | None = None  # that it had, all in all (end only); None: their number changes with the stages
    users_gone: Count | None = None  # of them, those that ended before they were asked to (end only)
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
    """The records of a requests.jsonl; see `read_lines`."""
    return read_lines(path, Request, damaged)


def read_marks(path: Path, damaged: list[int] | None = None) -> list[ProcessMark]:
    """The marks of a processes.jsonl. Lines that cannot be read go into `damaged`; a torn last line is skipped."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(ProcessMark)
    marks = []
    for number, line in enumerate(read_bytes(path).splitlines(keepends=True), start=1):
        try:
            marks.append(_mark(decoder, line))
        except UNDECODABLE:
            if damaged is not None and line.endswith(b"\n"):
                damaged.append(number)
    return marks


def _mark(decoder: msgspec.json.Decoder[ProcessMark], line: bytes) -> ProcessMark:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError:  # with the names of fields until 0.2.0
        return msgspec.convert(with_new_names(msgspec.json.decode(line)), ProcessMark)
