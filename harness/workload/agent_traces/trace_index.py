"""Find the conversations of a file or folder. Only their places are kept; each is read when it is needed."""

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from harness.base.errors import HarnessError
from harness.base.files import DOCS, open_file
from harness.workload.agent_traces.conversation import MAX_STEPS, Conversation
from harness.workload.agent_traces.copilot import read_copilot_session
from harness.workload.agent_traces.edge_agentic import edge_conversation_id, read_edge_conversation
from harness.workload.agent_traces.otel import read_otel_session
from harness.workload.agent_traces.trace_rows import TracePiece, refuse, shown_value
from harness.workload.agent_traces.tracelab import read_tracelab_session, tracelab_session_id
from harness.workload.agent_traces.weka import read_weka_trace

MAX_PIECE_BYTES = 256 * 1024**2  # of a line, or of a document
MAX_FILES = 100_000
MAX_CONVERSATIONS = 1_000_000
MAX_ROWS = 2 * MAX_STEPS  # of a conversation: a request and an answer each
_SUFFIXES = (".json", ".jsonl", ".ndjson")
_HEAD_BYTES = (65_536, 4 * 1024**2)  # of a file whose keys show its format; more if the first are not enough
_BOM = b"\xef\xbb\xbf"
_SPLIT = "Remove this conversation from the trace, or split it."
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*(:?)|[{}\[\]]')


class AgentTraceFormat(NamedTuple):
    """A format: the keys that show it, the id of the conversation of a row, and its reader."""

    keys: frozenset[bytes]
    read: Callable[[Sequence[TracePiece]], Conversation]
    # None: each line or document is a conversation
    conversation_id: Callable[[TracePiece], str] | None = None
    is_consecutive: bool = False  # the rows of a conversation follow each other


AGENT_TRACE_FORMATS = {
    "edge-agentic": AgentTraceFormat(
        frozenset((b"conversation_id", b"turn", b"role")), read_edge_conversation, edge_conversation_id, True
    ),
    "weka": AgentTraceFormat(frozenset((b"block_size", b"requests")), read_weka_trace),
    "otel": AgentTraceFormat(frozenset((b"trace_id", b"spans")), read_otel_session),
    "tracelab": AgentTraceFormat(
        frozenset((b"session_id", b"round_index")), read_tracelab_session, tracelab_session_id
    ),
    "copilot": AgentTraceFormat(frozenset((b"session_id", b"turns")), read_copilot_session),
}


class ConversationPlace(NamedTuple):
    """Where a conversation is in a file."""

    path: Path
    format: str
    places: "array[int]"  # of each piece: offset, bytes and line


def find_conversations(path: Path, format: str | None = None) -> list[ConversationPlace]:
    """Return the places of the conversations of a file, or of the JSON files below a folder in the order of names.

    Raises HarnessError for a file that cannot be read or has no known format.
    """
    places: list[ConversationPlace] = []
    for file in _trace_files(path):
        try:
            places += _index_file(file, format)
        except OSError as error:
            raise _unreadable(file, error) from None
        if len(places) > MAX_CONVERSATIONS:
            raise HarnessError(f"{path}: more than {MAX_CONVERSATIONS:,} conversations", next_step="Use fewer files.")
    return places


def read_conversation(place: ConversationPlace) -> Conversation:
    """Return a conversation. Raises HarnessError for a damaged one, with its file, line, field and value."""
    pieces = []
    size = sum(place.places[1::3])
    if size > MAX_PIECE_BYTES:
        problem = f"the conversation has {size:,} bytes, and at most {MAX_PIECE_BYTES:,} are read"
        raise HarnessError(f"{place.path}:{place.places[2]}: {problem}", next_step=_SPLIT)
    try:
        with open_file(place.path) as file:
            for at in range(0, len(place.places), 3):
                offset, size, line = place.places[at : at + 3]
                file.seek(offset)
                pieces.append(TracePiece(place.path, line, file.read(size)))
    except OSError as error:
        raise _unreadable(place.path, error) from None
    return AGENT_TRACE_FORMATS[place.format].read(pieces)


def _unreadable(path: Path, error: OSError) -> HarnessError:
    return HarnessError(f"{path}: the trace cannot be read ({error.strerror})", next_step="Check the path.")


def _trace_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = []
    for file in path.rglob("*"):
        if file.suffix.lower() in _SUFFIXES and file.is_file():
            files.append(file)
        if len(files) > MAX_FILES:
            raise HarnessError(f"{path}: more than {MAX_FILES:,} files", next_step="Use a smaller folder.")
    if not files:
        names = ", ".join(_SUFFIXES)
        raise HarnessError(f"{path}: no file of the folder ends with {names}", next_step="Check the path.")
    return sorted(files)


def _index_file(path: Path, format: str | None) -> list[ConversationPlace]:
    with open_file(path) as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)
        name = _detect_format(path, file, start) if format is None else _declared(path, file, start, format)
        kind = AGENT_TRACE_FORMATS[name]
        if kind.conversation_id is not None:
            return _index_rows(path, file, name, kind)
        lines = array("q")
        is_complete = True
        for number, (offset, line, data) in enumerate(_lines(path, file, start)):
            if number == 0:
                is_complete = data.startswith(b"{") and data.rstrip().endswith(b"}")
            elif not is_complete or (number == 1 and not data.lstrip().startswith(b"{")):
                return [_whole_file(path, file, name, start)]
            lines.extend((offset, len(data), line))
        return [ConversationPlace(path, name, lines[at : at + 3]) for at in range(0, len(lines), 3)]


def _declared(path: Path, file: BinaryIO, start: int, format: str) -> str:
    """Return the format that the load names. Raises HarnessError for a file that has another one."""
    try:
        detected = _detect_format(path, file, start)
    except HarnessError:  # its reader says what is wrong
        file.seek(start)
        return format
    if detected != format:
        raise HarnessError(
            f"{path}: it has the form of {detected}, and agent_trace.format is {format}",
            next_step=f"Remove `format`, or give a file of {format}.",
        )
    return format


def _index_rows(path: Path, file: BinaryIO, name: str, kind: AgentTraceFormat) -> list[ConversationPlace]:
    """Return the places of conversations with several rows, in the order of their first rows."""
    assert kind.conversation_id is not None
    places_of: dict[str, array[int]] = {}
    previous = None
    for offset, line, data in _lines(path, file, file.tell()):
        piece = TracePiece(path, line, data)
        id_ = kind.conversation_id(piece)
        if kind.is_consecutive and id_ != previous and id_ in places_of:
            refuse(piece, "conversation_id", "the rows of a conversation must follow each other", id_)
        places = places_of.setdefault(id_, array("q"))
        places.extend((offset, len(data), line))
        if len(places) > 3 * MAX_ROWS:
            refuse(piece, "", f"a conversation has at most {MAX_ROWS:,} rows")
        previous = id_
    return [ConversationPlace(path, name, places) for places in places_of.values()]


def _whole_file(path: Path, file: BinaryIO, name: str, start: int) -> ConversationPlace:
    size = file.seek(0, 2) - start
    if size > MAX_PIECE_BYTES:
        raise HarnessError(
            f"{path}: the document has {size:,} bytes, and at most {MAX_PIECE_BYTES:,} are read", next_step=_SPLIT
        )
    return ConversationPlace(path, name, array("q", (start, size, 1)))


def _lines(path: Path, file: BinaryIO, start: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, number and bytes of each line that is not blank."""
    offset, number = start, 0
    while data := file.readline(MAX_PIECE_BYTES + 1):
        number += 1
        if len(data) > MAX_PIECE_BYTES:
            raise HarnessError(f"{path}:{number}: the line has more than {MAX_PIECE_BYTES:,} bytes", next_step=_SPLIT)
        if data.strip():
            yield offset, number, data
        offset += len(data)


def _detect_format(path: Path, file: BinaryIO, start: int) -> str:
    """Return the format whose keys the first object has. The file stays at `start`."""
    for size in _HEAD_BYTES:
        head = file.read(size)
        file.seek(start)
        keys: set[bytes] = set()
        for key in _top_keys(head):
            keys.add(key)
            for name, kind in AGENT_TRACE_FORMATS.items():
                if kind.keys <= keys:
                    return name
        if len(head) < size:
            break
    names = ", ".join(sorted(key.decode("utf-8", "replace") for key in keys))[:200]
    shown = f"its first object has the keys {shown_value(names)}" if keys else "it does not start with a JSON object"
    raise HarnessError(
        f"{path}:1: the format of the trace is not known: {shown}",
        next_step=f"Known: {', '.join(AGENT_TRACE_FORMATS)}. {DOCS}/agent-traces.md says what each holds.",
    )


def _top_keys(head: bytes) -> Iterator[bytes]:
    """Yield the keys of the object that a text starts with. The text may be cut."""
    if not head.lstrip().startswith(b"{"):
        return
    depth = 0
    for match in _TOKEN.finditer(head):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return
        elif depth == 1 and match[2]:
            yield match[1]
