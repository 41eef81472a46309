"""The command that explains a log."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import typer

from harness.cli.common import command, console
from harness.errors import ExitCode, HarnessError
from harness.files import open_file


@command(short_help="Say what failed in a log, and what to do.")
def explain(
    log: Annotated[
        str, typer.Argument(metavar="LOGFILE", help="A log of a server, of Docker or of the kernel; - reads a pipe.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what failed in a log, from wherever it comes: cause, the line that shows it, fix and source.

    Exit code 0 when the log is explained: a failure was recognised, or the server started well and the log names none
    (`started` in `--json`), or it stopped normally (`stopped`). 4 when it is not; warnings do not count, since good
    starts have them as well.
    """
    from harness.failures.scan import scan
    from harness.report.explained import as_data, print_explained, recognised, started_well, stopped

    with _opened(log) as file:
        scanned = scan(file)
    if as_json:
        from harness.files import pretty_json

        print(pretty_json(as_data(log, scanned)).decode(), end="")
    else:
        print_explained(log, scanned, console())
    if not (recognised(scanned) or started_well(scanned) or stopped(scanned)):
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    """The log, unpacked where it was packed when it was put away."""
    if log == "-":
        yield sys.stdin.buffer
        return
    path = Path(log)
    if path.is_dir():
        logs = sorted(path.glob("logs/*.server.log"))
        found = "; it holds " + ", ".join(map(str, logs[:3])) + (" ..." if len(logs) > 3 else "") if logs else ""
        raise HarnessError(f"{path} is a directory{found}", next_step="Give the log itself.")
    # What a shell has opened for us, as in `harness explain <(docker logs vllm 2>&1)`, is no pipe without a writer.
    opened_by_shell = str(path).startswith("/dev/fd/")
    try:
        file = path.open("rb") if opened_by_shell else open_file(path)
    except FileNotFoundError:
        raise HarnessError(f"{path}: there is no such file", next_step="Give a log, or - to read a pipe.") from None
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read ({error.strerror})", next_step="To read a pipe, give -.") from None
    with file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise HarnessError(f"{path}: cannot be unpacked ({error})", next_step="Pack the log again.") from None
