"""Why a server did not start or died: the table against what Docker, the exit code and the server's log say."""

import io
from pathlib import Path

from msgspec import Struct, structs

from harness.failures.scan import SHOWN_CHARS, Failure, Scanned, most_telling, scan
from harness.files import open_file

_TAIL_BYTES = 1 << 16


class State(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server ended, as its supervisor tells."""

    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""  # what the Docker Engine said when it could not start the container, or an API's error


def explain(log: str | Path, state: State = State()) -> Failure | None:  # noqa: B008 - a frozen value
    """The most telling known cause, or None. `log`: its text, or its file.

    A kill for memory comes first, then a cause in `state.error`, then the log: its first known cause, whatever wrappers
    such as "Engine core initialization failed" say around it. An exit code is asked where the log says nothing better.
    """
    ended = _ended(state, log)
    if state.oom_killed and ended is not None:
        return ended
    said = [structs.replace(failure, number=None) for failure in scan_text(state.error).findings]
    if any(failure.severity == "cause" for failure in said):
        return most_telling(said)
    found = scan_text(log).findings
    if state.exit_code is not None:  # a server does not end because it refused a request
        found = [failure for failure in found if failure.severity != "request"]
    return most_telling([*found, *said, *([ended] if ended is not None else [])])


def scan_text(log: str | Path) -> Scanned:
    """What a log says, given as its text or its file. Raises OSError."""
    if isinstance(log, Path):
        with open_file(log) as file:
            return scan(file)
    return scan(io.BytesIO(log.encode("utf-8", "replace")))


def _ended(state: State, log: str | Path) -> Failure | None:
    """What an exit code alone says, with the last line of the log."""
    code = state.exit_code
    if code is None and not state.oom_killed:
        return None
    code = 137 if code is None else 128 - code if code < 0 else code  # a process that a signal ended: a negative code
    failure = scan_text(f"ExitCode={code} OOMKilled={state.oom_killed}").cause()
    return None if failure is None else structs.replace(failure, line=_last_line(log), number=None)


def _last_line(log: str | Path) -> str:
    if isinstance(log, Path):
        with open_file(log) as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            log = file.read().decode("utf-8", "replace")
    return next((line.strip()[-SHOWN_CHARS:] for line in reversed(log.splitlines()) if line.strip()), "")
