"""The answer to one completion request: what is written when, and what a fault makes of it; and the send log.

docs/simulated.md lists the faults. The send log is the engine's own record of when each chunk was sent: a client's
timing is checked against it. JSON lines: the first is the clock, {"format", "clock", "anchor_monotonic_s",
"anchor_realtime_s"}, then one per completion request, written right after its last byte (so read the file when the
server has ended, or wait for the line).
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from harness.simulated import wire
from harness.simulated.wire import HttpRequest

_DEFAULTS: dict[str, float | None] = {
    "delay": 1, "429": 1, "503": 1, "500-html": None, "html": None, "cut": 3, "close": 0.03, "hang": 3,
    "error-event": 3, "lemonade-error": 0, "malformed": 3, "split": 7, "coalesce": 3,
    "ping": 0.02, "no-usage": None, "reasoning": 4, "reasoning-content": 4, "tool-call": None, "stop-string": 2,
    "empty": None, "wrong": None, "invalid": None, "exit": 10, "never-ready": None,
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


class Sent(msgspec.Struct):
    """What the engine did with one request. `finish` is stop, length, abort, or the fault that ended it."""

    request_id: str
    received_s: float
    prompt_tokens: int
    scheduled_s: float | None = None
    role_s: float | None = None
    chunks_s: list[float] = []
    finish_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish: str | None = None


class SendLog:
    """Appends lines to a file, or discards them without one. A line is on disk as soon as it is written."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None if path is None else path.open("ab", buffering=0)
        if self._file:
            anchor = {"format": 1, "clock": "CLOCK_MONOTONIC", "anchor_monotonic_s": time.monotonic(),
                      "anchor_realtime_s": time.time()}  # fmt: skip
            self._file.write(msgspec.json.encode(anchor) + b"\n")

    def write(self, sent: Sent) -> None:
        if self._file:
            self._file.write(msgspec.json.encode(sent) + b"\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


_SPLIT_PAUSE_S = 0.0002
_ENGINE_ERROR = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_TOOL = {"name": "classify", "id": "call_simulated"}


class CompletionAnswer:
    """Turns tokens into events on the wire and notes when each was sent.

    `token` is called for every output token, `finish` belongs to the last one. Times are CLOCK_MONOTONIC.
    """

    def __init__(self, http: HttpRequest, asked: wire.Asked, sent: Sent, faults: Active,
                 number: int, words: list[str] | None = None, vectors: int = 0) -> None:  # fmt: skip
        self.http, self.asked, self.sent, self.faults = http, asked, sent, faults
        self.number = number
        self.words = words  # where the answer has to have a form
        self.vectors = vectors  # how many are the answer, in place of text
        self.stopped_at: int | None = None  # index of the first token of a stop string
        self.last_s: float | None = None
        self.broken = False
        self._texts: list[tuple[str, str]] = []
        self._events = 0
        self._held: list[bytes] = []
        self._pieces: deque[bytes | None] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._called = self._argued = False  # whether the tool call has begun

    def open(self) -> None:
        """Send the headers of a stream; they go out before any token exists, as vLLM does."""
        if self.asked.stream:
            self.http.closes_after_s = self.faults.get("close")
            self.http.start_stream(**{"x-request-id": self.sent.request_id})

    def ping(self) -> None:
        self._out(b": ping\n\n")

    def token(self, index: int, finish: str | None) -> None:
        """Output token `index` (from 0). The last token of a natural end is the end mark and has no text."""
        if self.broken:
            return
        word = "" if finish == "stop" else self.word(index)
        text = word if index == 0 or not word else " " + word
        channel = self._channel(index)
        if channel == "tool_calls" and self.asked.tool is not None:
            text = self._argument(text, finish)
        if not self.asked.stream:
            self._texts.append((channel, text))
            return
        if self._breaks():
            return
        if index == 0 and self.asked.chat:
            self.sent.role_s = self._event(self.asked.chunk({"role": "assistant", "content": ""}))
        delta = self._delta(channel, text)
        self._event(self.asked.chunk(delta, self._finish_name(finish)), text != "", finish is not None)

    def word(self, index: int) -> str:
        """Output token `index`: of an answer of a form the words of that, then nothing. A stop string has no text."""
        if self.stopped_at is not None and index >= self.stopped_at:
            return ""
        if self.words is not None:
            return self.words[index] if index < len(self.words) else ""
        return wire.WORDS[wire.output_word(self.number, index)]

    def close(self, finish: str, usage: dict[str, Any]) -> None:
        """The end of the answer: usage and `[DONE]`, or the whole body."""
        if self.broken:
            return
        if "no-usage" in self.faults:
            usage = {}
        if not self.asked.stream:
            self._whole(finish, usage)
            return
        if self._breaks():
            return
        if usage and self.asked.include_usage:
            self._event(self.asked.usage_chunk(usage))
        self._done()

    def _channel(self, index: int) -> str:
        if not self.asked.chat:
            return "content"
        for kind, name in (("reasoning", "reasoning"), ("reasoning-content", "reasoning_content")):
            if index < self.faults.get(kind, 0):
                return name
        return "tool_calls" if self._calls else "content"

    def _delta(self, channel: str, text: str) -> dict[str, Any]:
        if channel != "tool_calls" or not text:
            return {channel if text else "content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if not self._called:
            self._called = True
            call |= {"id": _TOOL["id"], "type": "function"}
            call["function"]["name"] = self._tool_name()
        return {"tool_calls": [call]}

    def _tool_name(self) -> str:
        return self.asked.tool[0] if self.asked.tool else _TOOL["name"]

    def _argument(self, text: str, finish: str | None) -> str:
        """The words as the one argument of the tool that was offered: complete JSON only with the last word."""
        assert self.asked.tool is not None
        begin = "" if self._argued else f'{{"{self.asked.tool[1]}": "'
        self._argued = True
        return begin + text + ('"}' if finish is not None else "")

    def _finish_name(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self._calls else finish

    @property
    def _calls(self) -> bool:
        return "tool-call" in self.faults and self.asked.may_call

    def _breaks(self) -> bool:
        """Carry out a fault that is due and ends the answer. Return whether there was one."""
        for kind, act in _BREAKS.items():
            if kind in self.faults and len(self.sent.chunks_s) >= self.faults[kind]:
                self.broken = True
                self.sent.finish = kind
                act(self)
                break
        return self.broken

    def _event(self, data: bytes, text: bool = False, last: bool = False) -> float:
        """One event on the wire; returns the time just before its write."""
        if "malformed" in self.faults and self._events == self.faults["malformed"]:
            data = data[: len(data) // 2]
        self._events += 1
        now = self._out(b"data: " + data + b"\n\n")
        if text:
            self.sent.chunks_s.append(now)
        elif last:
            self.sent.finish_s = now
        return now

    def _done(self) -> None:
        self._out(b"data: [DONE]\n\n")
        self._end()

    def _end(self) -> None:
        self._flush()
        if self._draining:
            self._pieces.append(None)
        else:
            self.http.end_stream()
        self.sent.ended_s = time.monotonic()

    def _out(self, data: bytes) -> float:
        now = time.monotonic()
        if "split" in self.faults:
            size = int(self.faults["split"])
            self._pieces.extend(data[i : i + size] for i in range(0, len(data), size))
            if self._draining is None:
                self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif "coalesce" in self.faults:
            self._held.append(data)
            if len(self._held) >= self.faults["coalesce"]:
                self._flush()
        else:
            self.http.piece(data)
        return now

    def _flush(self) -> None:
        if self._held:
            self.http.piece(b"".join(self._held))
            self._held.clear()

    async def _drain(self) -> None:
        while not self.http.closed:
            await asyncio.sleep(_SPLIT_PAUSE_S)
            while self._pieces:
                piece = self._pieces.popleft()
                if piece is None:
                    self.http.end_stream()
                    return
                self.http.piece(piece)
                await asyncio.sleep(_SPLIT_PAUSE_S)

    def _whole(self, finish: str, usage: dict[str, Any]) -> None:
        if self.vectors:
            vector = [] if "empty" in self.faults else [(self.number * (i + 1) % 2001 - 1000) / 1000 for i in range(16)]
            self._send_whole(self.asked.embeddings([vector] * self.vectors, usage.get("prompt_tokens", 0)))
            return
        message: dict[str, Any] = {}
        for channel, text in self._texts:
            if channel == "tool_calls":
                arguments = message.setdefault("tool_calls", [{"id": _TOOL["id"], "type": "function", "function": {
                    "name": self._tool_name(), "arguments": ""}}])  # fmt: skip
                arguments[0]["function"]["arguments"] += text
            else:
                message[channel] = message.get(channel, "") + text
        self._send_whole(self.asked.whole(message, self._finish_name(finish) or finish, usage or None))

    def _send_whole(self, body: bytes) -> None:
        struck = next((kind for kind in _BREAKS if kind in self.faults), None)
        if struck:
            self.broken = True
            self.sent.finish = struck
        if struck == "hang":
            return
        if struck == "cut":
            self.http.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                          % (len(body), body[: len(body) // 2]))  # fmt: skip
            self.http.drop()
        elif struck:
            self.http.answer(500, wire.error_body(_ENGINE_ERROR, "InternalServerError", 500))
        else:
            if "malformed" in self.faults:
                body = body[: len(body) // 2]
            self.sent.chunks_s.append(time.monotonic())
            self.http.answer(200, body, **{"x-request-id": self.sent.request_id})
        self.sent.ended_s = time.monotonic()


def _cut(answer: CompletionAnswer) -> None:
    answer._flush()
    answer.http.drop()
    answer.sent.ended_s = time.monotonic()


def _error_event(answer: CompletionAnswer) -> None:
    answer._event(wire.error_body(_ENGINE_ERROR, "InternalServerError", 500))
    answer._done()


def _lemonade_error(answer: CompletionAnswer) -> None:
    error = {"code": 500, "message": "vllm-server request failed: connection closed", "status_code": 500,
             "type": "backend_error"}  # fmt: skip
    answer._event(msgspec.json.encode({"error": error}))
    answer._end()


_BREAKS: dict[str, Callable[[CompletionAnswer], None]] = {
    "cut": _cut, "hang": CompletionAnswer._flush, "error-event": _error_event, "lemonade-error": _lemonade_error
}  # fmt: skip
