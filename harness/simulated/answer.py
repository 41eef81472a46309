"""Write the answer to a completion request, with its faults, and the send log.

The send log has the times at which the engine sent each chunk. Tests compare a client's times with it. It has JSON
lines: first the clock, {"format", "clock", "anchor_monotonic_s", "anchor_realtime_s"}, then one line per completion
request, written right after its last byte. So read the file when the server has ended, or wait for the line.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from harness.simulated import wire
from harness.simulated.wire import HttpRequest

FAULTS: dict[str, tuple[float | None, str]] = {  # kind: default parameter, and what happens
    "delay": (1, "seconds without an answer and without computing"),
    "429": (1, "that status; the parameter is Retry-After in seconds"),
    "503": (1, "that status; the parameter is Retry-After in seconds"),
    "500-html": (None, "status 500 with an HTML page, as a proxy answers"),
    "html": (None, "status 200 with an HTML page"),
    "cut": (3, "the connection is closed after so many events with text"),
    "hang": (3, "after so many events with text the stream stays open and silent"),
    "error-event": (3, "after so many events with text an error object, [DONE], end, as vLLM does"),
    "lemonade-error": (0, "after so many events with text an error object, no [DONE], as Lemonade does"),
    "deaf": (None, "a request whose user leaves is computed to its end"),
    "malformed": (3, "the event after so many is half of its JSON"),
    "coalesce": (3, "so many events per write"),
    "no-usage": (None, "no usage in the answer"),
    "reasoning": (4, "so many first tokens are reasoning"),
    "tool-call": (None, "the answer is a call of the first tool"),
    "stop-string": (2, "a natural answer ends with so many tokens without text"),
    "empty": (None, "one token without text; of embeddings an empty vector"),
    "wrong": (None, "a structured answer has another choice than the right one"),
    "invalid": (None, "a structured answer has not the form that was asked for"),
    "mistakes": (0.1, "so large a share of the questions that ship is answered wrong, always the same ones"),
    "flips": (0.02, "so large a share of the answers to them is another one than usual"),
    "leak": (None, "the answer has the word that another request asked to repeat"),
    "exit": (10, "command line only: the process ends with status 1 after so many requests"),
    "never-ready": (None, "command line only: /health answers 503 forever"),
}
PROCESS_KINDS = ("exit", "never-ready")

Active = dict[str, float]
"""The faults of one request: kind and parameter (0 where a kind has none)."""


class InjectedFault(msgspec.Struct, frozen=True):
    kind: str
    parameter: float
    every: int = 1


def parse_fault(text: str) -> InjectedFault:
    """Parse `kind[:parameter][@every_nth]`. Raises ValueError."""
    rest, _, every = text.strip().partition("@")
    kind, colon, parameter = rest.partition(":")
    if kind not in FAULTS:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(FAULTS)}")
    default = FAULTS[kind][0]
    if colon and default is None:
        raise ValueError(f"fault {kind!r} takes no parameter, got {parameter!r}")
    try:
        value = float(parameter) if colon else float(default or 0)
        nth = int(every) if every else 1
    except ValueError:
        raise ValueError(f"fault {text!r} is not KIND[:NUMBER][@N]") from None
    if not 0 <= value < math.inf or nth < 1 or (kind == "coalesce" and value < 1):
        raise ValueError(f"fault {text!r}: the number is out of range")
    return InjectedFault(kind, value, nth)


def active_faults(configured: list[InjectedFault], number: int, header: str) -> Active:
    """Return the faults of completion request `number` (from 1), configured ones and those of its header."""
    active = {f.kind: f.parameter for f in configured if number % f.every == 0 and f.kind not in PROCESS_KINDS}
    for text in filter(None, (part.strip() for part in header.split(","))):
        fault = parse_fault(text)
        if fault.kind in PROCESS_KINDS:
            raise ValueError(f"fault {fault.kind!r} can only be set on the command line")
        active[fault.kind] = fault.parameter
    return active


class Sent(msgspec.Struct):
    """A line of the send log: one request. `finish` is stop, length, abort, or the fault that ended it."""

    request_id: str
    received_s: float
    prompt_tokens: int
    chunks_s: list[float] = []
    ended_s: float | None = None
    output_tokens: int = 0
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


_ENGINE_ERROR = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_TOOL = {"name": "classify", "id": "call_simulated"}


class CompletionAnswer:
    """Sends tokens as events, or as one JSON body, and notes when each was sent (CLOCK_MONOTONIC)."""

    def __init__(self, http: HttpRequest, request: wire.CompletionRequest, sent: Sent, faults: Active,
                 number: int, words: list[str] | None = None, vectors: int = 0,
                 first_word: str | None = None) -> None:  # fmt: skip
        self.http, self.request, self.sent, self.faults = http, request, sent, faults
        self.number = number  # hash of the prompt
        self.words = words  # of an answer with a form; None: any words
        self.first_word = first_word  # that the prompt asks to begin with
        self.vectors = vectors  # number of embeddings to send instead of text
        self.acceptance_rate: float | None = None  # of its drafts; None: that of the engine
        self.stopped_at: int | None = None  # index of the first token of a stop string
        self.last_s: float | None = None  # time of the last token
        self.broken = False  # a fault has ended the answer
        self._texts: list[tuple[str, str]] = []  # channel and text of each token, if the answer is not a stream
        self._events = 0
        self._coalesced: list[bytes] = []  # events to be sent together
        self._call_started = self._arguments_started = False

    def open(self) -> None:
        """Send the headers of a stream before any token exists, as vLLM does."""
        if self.request.stream:
            self.http.start_stream(**{"x-request-id": self.sent.request_id})

    def token(self, index: int, finish: str | None) -> None:
        """Send output token `index` (from 0). With the last one comes `finish`: after "stop" it has no text."""
        if self.broken:
            return
        word = "" if finish == "stop" else self.word(index)
        text = word if index == 0 or not word else " " + word
        channel = self._channel(index)
        if channel == "tool_calls" and self.request.tool is not None:
            text = self._argument(text, finish)
        if not self.request.stream:
            self._texts.append((channel, text))
            return
        if self._breaks():
            return
        if index == 0 and self.request.chat:
            self._event(self.request.chunk({"role": "assistant", "content": ""}))
        delta = self._delta(channel, text)
        self._event(self.request.chunk(delta, self._finish_name(finish)), text != "")

    def word(self, index: int) -> str:
        """Return the text of output token `index`; empty for a stop string, and after the words of a form."""
        if self.stopped_at is not None and index >= self.stopped_at:
            return ""
        if self.words is not None:
            return self.words[index] if index < len(self.words) else ""
        if index == 0 and self.first_word is not None:
            return f"{self.first_word}:"
        return wire.WORDS[wire.output_word(self.number, index)]

    def close(self, finish: str, usage: dict[str, Any]) -> None:
        """End the answer: send usage and `[DONE]`, or the whole body."""
        if self.broken:
            return
        if "no-usage" in self.faults:
            usage = {}
        if not self.request.stream:
            self._whole(finish, usage)
            return
        if self._breaks():
            return
        if self.request.messages:
            self._out(self.request.end(self._finish_name(finish) or finish, usage))
            self._end()
            return
        if usage and self.request.include_usage:
            self._event(self.request.usage_chunk(usage))
        self._done()

    def _channel(self, index: int) -> str:
        if not self.request.chat:
            return "content"
        if index < self.faults.get("reasoning", 0):
            return "reasoning"
        return "tool_calls" if self._calls else "content"

    def _delta(self, channel: str, text: str) -> dict[str, Any]:
        if channel != "tool_calls" or not text:
            return {channel if text else "content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if not self._call_started:
            self._call_started = True
            call |= {"id": _TOOL["id"], "type": "function"}
            call["function"]["name"] = self._tool_name()
        return {"tool_calls": [call]}

    def _tool_name(self) -> str:
        return self.request.tool[0] if self.request.tool else _TOOL["name"]

    def _argument(self, text: str, finish: str | None) -> str:
        """Return the part of the JSON arguments for a word. All words together are one argument of the tool."""
        assert self.request.tool is not None
        start = "" if self._arguments_started else f'{{"{self.request.tool[1]}": "'
        self._arguments_started = True
        return start + text + ('"}' if finish is not None else "")

    def _finish_name(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self._calls else finish

    @property
    def _calls(self) -> bool:
        return "tool-call" in self.faults and self.request.may_call

    def _breaks(self) -> bool:
        """Carry out a fault that is due and ends the answer. Return whether there was one."""
        for kind, carry_out in _BREAKS.items():
            if kind in self.faults and len(self.sent.chunks_s) >= self.faults[kind]:
                self.broken = True
                self.sent.finish = kind
                carry_out(self)
                break
        return self.broken

    def _event(self, data: bytes, has_text: bool = False) -> None:
        """Send one event. Note the time just before its write if it has generated text."""
        if "malformed" in self.faults and self._events == self.faults["malformed"]:
            data = data[: len(data) // 2]
        self._events += 1
        if has_text:
            self.sent.chunks_s.append(time.monotonic())
        self._out(self.request.event(data))

    def _done(self) -> None:
        self._out(b"data: [DONE]\n\n")
        self._end()

    def _end(self) -> None:
        self._flush()
        self.http.end_stream()
        self.sent.ended_s = time.monotonic()

    def _out(self, data: bytes) -> None:
        self._coalesced.append(data)
        if len(self._coalesced) >= self.faults.get("coalesce", 1):
            self._flush()

    def _flush(self) -> None:
        if self._coalesced:
            self.http.piece(b"".join(self._coalesced))
            self._coalesced.clear()

    def _whole(self, finish: str, usage: dict[str, Any]) -> None:
        if self.vectors:
            vector = [] if "empty" in self.faults else [(self.number * (i + 1) % 2001 - 1000) / 1000 for i in range(16)]
            self._send_whole(self.request.embeddings([vector] * self.vectors, usage.get("prompt_tokens", 0)))
            return
        message: dict[str, Any] = {}
        for channel, text in self._texts:
            if channel == "tool_calls":
                arguments = message.setdefault("tool_calls", [{"id": _TOOL["id"], "type": "function", "function": {
                    "name": self._tool_name(), "arguments": ""}}])  # fmt: skip
                arguments[0]["function"]["arguments"] += text
            else:
                message[channel] = message.get(channel, "") + text
        self._send_whole(self.request.whole(message, self._finish_name(finish) or finish, usage or None))

    def _send_whole(self, body: bytes) -> None:
        fault = next((kind for kind in _BREAKS if kind in self.faults), None)
        if fault:
            self.broken = True
            self.sent.finish = fault
        if fault == "hang":
            return
        if fault == "cut":
            self.http.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                          % (len(body), body[: len(body) // 2]))  # fmt: skip
            self.http.drop()
        elif fault:
            self.http.answer(500, wire.encode_error(_ENGINE_ERROR, "InternalServerError", 500))
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
    answer._event(wire.encode_error(_ENGINE_ERROR, "InternalServerError", 500))
    answer._done()


def _lemonade_error(answer: CompletionAnswer) -> None:
    error = {"code": 500, "message": "vllm-server request failed: connection closed", "status_code": 500,
             "type": "backend_error"}  # fmt: skip
    answer._event(msgspec.json.encode({"error": error}))
    answer._end()


_BREAKS: dict[str, Callable[[CompletionAnswer], None]] = {
    "cut": _cut, "hang": CompletionAnswer._flush, "error-event": _error_event, "lemonade-error": _lemonade_error
}  # fmt: skip
