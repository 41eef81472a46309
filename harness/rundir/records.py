"""The central record: one request as the client saw it, raw observations only.

Everything else (TTFT, TPOT, goodput ...) is derived from these fields by `harness.summarize.derive`, so a definition
can be corrected without a GPU. Formats are versioned; see docs/run-directory.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from harness.rundir.files import read_lines

FORMAT_VERSION = 1
MOST_CPU = 0.90  # of one core: a load process is one thread, and above that it is the limit
LATE_READ_S = 0.005  # after the kernel had the bytes: a busy load process looks at its sockets each 2 ms
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
    "client",  # a defect of ours; the message says which
    "unknown",  # imported, and the tool does not say which of these it was
]
CUT = ("unfinished", "abandoned")  # not by the server: neither failed, and what came until then was of use


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One request that was sent. All times but `sent_s` are seconds after `sent_s`; missing is None."""

    id: str  # sent as X-Request-Id, so a server's log can be joined
    cell: str  # the cell of the plan that it belongs to
    load: str  # the load's name in the scenario
    user_class: str
    index: int  # place in the seeded request sequence of the cell
    user: int  # the simulated person or agent
    process: int  # pid of the load process, made unique among machines: its mark has machine and clock
    phase: Literal["warmup", "measured"]
    sent_s: float  # just before the first byte is written, the first time; monotonic clock of `process`
    ended_s: float  # end of the response, or the moment of the error
    clock: Literal["kernel", "read"] = "read"  # chunk times: kernel's receive stamps, or time of the read
    conversation: int | None = None
    turn: int | None = None
    batch: int | None = None
    again: bool = False  # the question before, asked once more: the user wants another answer
    scheduled_s: float | None = None  # when the plan wanted it sent (negative: sent late); None in a closed loop
    resent: bool = False  # the server was closing the kept connection: sent again on a new one, within this record
    connect_s: float | None = None  # duration of opening the connection, before sent_s (resent: after); None: reused
    connect_retries: int | None = None  # SYNs sent again until it was open, the first after 1 s; None: reused, unknown
    headers_s: float | None = None
    chunks_s: list[float] = []  # one per data event that carries generated tokens of any channel
    # Events that announce a token without text, such as the end token, before the first of chunks_s or after the last.
    # Role-only events, and a last event that reports the finish reason "length", are not counted.
    textless: int | None = None
    first_visible_s: float | None = None  # first event with visible content (not reasoning)
    coalesced: int = 0  # chunks that shared a read with a later one: their times are upper bounds
    # Of coalesced, those whose read came late, so that the client put them together and not the server; None: none are
    # coalesced, or the reads have no stamps that would tell.
    coalesced_late: int | None = None
    asked_tokens: int | None = None  # max_tokens of the request
    fixed_length: bool = False  # ignore_eos was asked, so output must equal asked_tokens
    asked_prompt_tokens: int | None = None  # planned length of the prompt, without a chat template; None: not planned
    prompt_tokens: int | None = None  # the following four as the server's usage reports them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    reasoning_chunks: int = 0  # of chunks_s, those with nothing but reasoning
    tool_chunks: int = 0  # and those with nothing but tool calls
    tool_calls: int | None = None  # in the answer; None: no tools were sent
    tool_calls_valid: int | None = None  # of these: a known tool, and arguments that it takes
    vectors: int | None = None  # of an answer to embeddings
    answer_valid: bool | None = None  # whether it has the form that was asked for; None: none was, or it failed
    answer_right: bool | None = None  # whether it is the label that is known to be right
    finish: str | None = None
    status: int | None = None
    # The wait before this user's next request that the server asked for (Retry-After of 429 and 503), at most 60 s; in
    # none of the times above. None: it asked for none, or for none that is valid.
    retry_after_s: float | None = None
    error: ErrorKind | None = None
    message: str | None = None  # what the error was, shortened; never the model's output


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of processes.jsonl: a load process says hello when it starts and goodbye when it ends.

    `wall_s` and `monotonic_s` are read back to back: the anchor that joins its records with other clocks.
    A process without an `end` mark was killed, and what it had sent is not known.
    """

    event: Literal["start", "end"]
    process: int
    host: str | None = None  # name and boot of the machine: processes of one share its monotonic clock
    cell: str
    wall_s: float
    wall_error_s: float | None = None  # of several machines: `wall_s` is the master's clock, known to so much
    monotonic_s: float
    # Whether the warm-up found the server steady before its bound (end only). None: it was not to find that out.
    steady: bool | None = None
    sent: int | None = None  # requests whose first byte was about to be written (end only)
    recorded: int | None = None  # records handed to the file (end only)
    cpu_s: float | None = None  # CPU time of the process since its start mark (end only)
    # Highest share of one core over any 5 s from the first measured request on; over the time from there to the end
    # where that is between 1 and 5 s (end only). A lifetime's mean would hide a few seconds of saturation.
    cpu_most: float | None = None
    read_lag_p99_s: float | None = None  # p99 of the wait of bytes in the socket before they were read (end only)
    # How late its event loop ran what fell due 20 times a second from the first measured request on.
    loop_lag_mean_s: float | None = None  # (end only, as the following) None: below 1 s
    loop_lag_p50_s: float | None = None
    loop_lag_p99_s: float | None = None  # None: below 5 s
    loop_lag_most_s: float | None = None
    core_wait: float | None = None  # share of that time in which it could have run, and others had the cores


def read_requests(path: Path, damaged: list[int] | None = None) -> Iterator[Request]:
    """The records of a requests.jsonl; see `read_lines`."""
    return read_lines(path, Request, damaged)


def read_marks(path: Path, damaged: list[int] | None = None) -> list[ProcessMark]:
    """The marks of a processes.jsonl. Lines that cannot be read go into `damaged`; a torn last line is skipped."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(ProcessMark)
    marks = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            marks.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            if damaged is not None and line.endswith(b"\n"):
                damaged.append(number)
    return marks
