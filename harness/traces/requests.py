"""Our own requests.jsonl: the measured requests of one cell, sent again as they were sent then.

Records are written as requests end, so they are put in order here. Those of which nobody knows how long their prompt
was, such as failed ones, come as rows without tokens.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from harness.errors import BadLines
from harness.files import UNDECODABLE
from harness.rundir.records import read_marks
from harness.scenario.scenario import Trace
from harness.traces.formats import BadLine, TraceRow

_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # that an array takes


class RecordLine(msgspec.Struct, frozen=True):
    """What is needed of a record."""

    cell: str
    phase: str
    process: int
    sent_s: float
    prompt_tokens: _Number | None = None
    output_tokens: _Number | None = None
    asked_tokens: _Number | None = None
    fixed_length: bool = False
    conversation: _Number | None = None


def matches(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"sent_s"' in first and b'"cell"' in first


def rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of sending. Lines that cannot be used go to `bad`.

    Raises BadLine for a file of several cells where none is chosen.
    """
    offsets = _offsets(Path(file.name).resolve().with_name("processes.jsonl"))
    decode = msgspec.json.Decoder(RecordLine).decode
    chosen, others = trace.cell, set[str]()
    numbers, at_s = array("q"), array("d")
    prompts, outputs, conversations = array("q"), array("q"), array("q")
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
            outputs.append(_output(line))
            conversations.append(-1 if line.conversation is None else line.conversation)
    if others and (trace.cell is None or not numbers):
        known = sorted(others | ({chosen} if trace.cell is None and chosen is not None else set()))
        names = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
        problem = "which of its cells is meant?" if trace.cell is None else f"there is no cell '{trace.cell}'."
        raise BadLine(1, f"{problem} Say it with trace.cell: {names}")
    for place in sorted(range(len(at_s)), key=at_s.__getitem__):  # without numpy, which the image does not have
        yield TraceRow(numbers[place], at_s[place], prompts[place], outputs[place], conversations[place])


def _output(line: RecordLine) -> int:
    """What was asked for where exactly that was, else what came."""
    known = (line.asked_tokens, line.output_tokens) if line.fixed_length else (line.output_tokens, line.asked_tokens)
    return known[0] or known[1] or 0


def _offsets(marks: Path) -> dict[tuple[str, int], float]:
    """What takes the clocks of load processes to Unix time, where they ran on several machines; else nothing."""
    starts = [mark for mark in read_marks(marks) if mark.event == "start"]
    if len({mark.host for mark in starts}) < 2:
        return {}
    return {(mark.cell, mark.process): mark.wall_s - mark.monotonic_s for mark in starts}
