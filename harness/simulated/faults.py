"""Faults on demand: what a server, a proxy or a network can do wrong, one name each.

A fault is written `KIND` or `KIND:PARAMETER`, several are joined by commas. On the command line
`--fault KIND[:PARAMETER][@N]` (repeatable) strikes every Nth completion request, or every one without `@N`. The
request header `X-Simulate-Fault: KIND[:PARAMETER][,KIND...]` strikes that request alone, in addition.

| kind | parameter (default) | what happens |
|---|---|---|
| delay | seconds (1) | nothing is sent, and nothing computed, for that long |
| 429, 503 | Retry-After in seconds (1) | that status with a JSON error |
| 500-html | | status 500 with an HTML page, as a proxy answers |
| html | | status 200 with an HTML page |
| cut | content events (3) | the connection is closed after that many, without `[DONE]` |
| close | seconds (0.03) | the connection is closed so long after a whole stream, without notice: as Lemonade does |
| hang | content events (3) | after that many the stream stays open and silent for ever |
| error-event | content events (3) | then an error object in the 200 stream, `[DONE]`, end: as vLLM does |
| lemonade-error | content events (0) | then an error object with `status_code`, no `[DONE]`: as Lemonade does |
| malformed | content events (3) | the event after that many is cut in the middle of its JSON; the stream goes on |
| split | bytes (7) | every event goes out in pieces of that size, 0.2 ms apart |
| coalesce | events (3) | that many events per write |
| crlf | | lines end in CR LF |
| multiline | | each event's JSON is spread over several `data:` lines |
| ping | seconds (0.02) | `: ping` comments, at once and at that interval, until the first token |
| no-usage | | no usage in the answer, though asked for |
| reasoning | tokens (4) | the first tokens arrive as `reasoning`, as vLLM does today |
| reasoning-content | tokens (4) | the same in the older field `reasoning_content` |
| tool-call | | the answer is one call of the first tool that is offered, its arguments in pieces |
| stop-string | tokens (2) | a natural answer ends with a stop string of that many tokens: counted, and without text |
| no-role | | no role-only first event |
| empty | | a completion without any content: one token, end of sequence; of embeddings an empty vector |
| wrong | | where a form of the answer is asked for: another choice than the right one |
| invalid | | where a form of the answer is asked for: a text that does not have it |
| exit | requests (10) | command line only: the process ends with status 1 when one more request arrives |
| never-ready | | command line only: `/health` answers 503 for ever |

"Content events" are events with generated text of any channel. On a request that does not stream, `cut` sends half the
body, `malformed` a body that ends half way, `hang` nothing, and the two error events become a status 500.
Under `split` and `coalesce` the send log has the time at which an event was ready, not that of its last byte.
"""

import math

import msgspec

_DEFAULTS: dict[str, float | None] = {
    "delay": 1, "429": 1, "503": 1, "500-html": None, "html": None, "cut": 3, "close": 0.03, "hang": 3,
    "error-event": 3, "lemonade-error": 0, "malformed": 3, "split": 7, "coalesce": 3, "crlf": None, "multiline": None,
    "ping": 0.02, "no-usage": None, "reasoning": 4, "reasoning-content": 4, "tool-call": None, "stop-string": 2,
    "no-role": None, "empty": None, "wrong": None, "invalid": None, "exit": 10, "never-ready": None,
}  # fmt: skip
KINDS = tuple(_DEFAULTS)
PROCESS_KINDS = ("exit", "never-ready")

Active = dict[str, float]
"""The faults of one request: kind and parameter (0 where a kind has none)."""


class InjectedFault(msgspec.Struct, frozen=True):
    kind: str
    parameter: float
    every: int = 1


def parse_fault(text: str) -> InjectedFault:
    """Read `kind[:parameter][@every_nth]`; ValueError says what is wrong with it."""
    rest, _, every = text.strip().partition("@")
    kind, colon, parameter = rest.partition(":")
    if kind not in _DEFAULTS:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(KINDS)}")
    default = _DEFAULTS[kind]
    if colon and default is None:
        raise ValueError(f"fault {kind!r} takes no parameter, got {parameter!r}")
    try:
        value = float(parameter) if colon else float(default or 0)
        nth = int(every) if every else 1
    except ValueError:
        raise ValueError(f"fault {text!r} is not KIND[:NUMBER][@N]") from None
    if not 0 <= value < math.inf or nth < 1 or (kind in ("split", "coalesce") and value < 1):
        raise ValueError(f"fault {text!r}: the number is out of range")
    return InjectedFault(kind, value, nth)


def active_faults(configured: list[InjectedFault], number: int, header: str) -> Active:
    """The faults that strike completion request `number` (from 1), the header's included."""
    active = {f.kind: f.parameter for f in configured if number % f.every == 0 and f.kind not in PROCESS_KINDS}
    for text in filter(None, (part.strip() for part in header.split(","))):
        fault = parse_fault(text)
        if fault.kind in PROCESS_KINDS:
            raise ValueError(f"fault {fault.kind!r} can only be set on the command line")
        active[fault.kind] = fault.parameter
    return active
