"""Commands without a run of their own: explain a log, run load workers, sample this machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from harness.base.errors import ExitCode, HarnessError
from harness.base.files import open_file
from harness.cli import common as cli


@cli.command(short_help="Say what failed in a log, and what to do.")
def explain(
    log: Annotated[
        str, typer.Argument(metavar="LOGFILE", help="A log of a server, of Docker or of the kernel; - reads a pipe.")
    ],
    as_json: cli.JsonOpt = False,
) -> None:
    """Say what failed in a log, from wherever it comes: cause, the line that shows it, fix and source.

    Exit code 0 when the log is explained: a failure was recognised, or the server started well and the log names none
    (`started` in `--json`), or it stopped normally (`stopped`). 4 when it is not; warnings do not count, since good
    starts have them as well.
    """
    from harness.failures.diagnosis import scan
    from harness.questions.explain import explanation_data, explanation_page, has_started, is_recognised, was_stopped
    from harness.report.terminal import print_page

    with _open_log(log) as file:
        scanned = scan(file)
    if as_json:
        cli.print_json(explanation_data(log, scanned))
    else:
        print_page(explanation_page(log, scanned), cli.console())
    if not (is_recognised(scanned) or has_started(scanned) or was_stopped(scanned)):
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _open_log(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        yield sys.stdin.buffer
        return
    path = Path(log)
    if path.is_dir():
        logs = sorted(path.glob("logs/*.server.log"))
        shown = "; it holds " + ", ".join(map(str, logs[:3])) + (" ..." if len(logs) > 3 else "") if logs else ""
        raise HarnessError(f"{path} is a directory{shown}", next_step="Give the log itself.")
    # A pipe that the shell opened, as in `harness explain <(docker logs vllm 2>&1)`, has a writer.
    opened_by_shell = str(path).startswith("/dev/fd/")
    try:
        file = path.open("rb") if opened_by_shell else open_file(path)
    except FileNotFoundError:
        raise HarnessError(f"{path}: there is no such file", next_step="Give a log, or - to read a pipe.") from None
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read ({error.strerror})", next_step="To read a pipe, give -.") from None
    with file:
        yield file


@cli.command(short_help="Run load workers for a remote master.")
def worker(
    master: Annotated[str, cli.option("ADDRESS", "Where `harness run --workers` was started (port 5557).")],
    processes: Annotated[int, cli.option("N", "Load processes on this machine.", min=1, max=1024)] = 1,
    once: Annotated[bool, cli.flag("--once", "End after one load instead of waiting for the next.")] = False,
) -> None:
    """Run load workers for a remote master, one load after the other, until Ctrl-C.

    It is a stock Locust worker. User class and job come from the master, so trust it; an API key does not: set its
    variable here.
    """
    from harness.run.worker_machine import run_worker

    run_worker(master, processes, once=once)


@cli.command(short_help="Sample this machine's GPUs, for a harness elsewhere.")
def telemetry(
    jsonl: Annotated[bool, cli.flag("--jsonl", "A line of JSON each second, until the standard input ends.")] = False,
    kernel_after: Annotated[
        int | None, cli.option("NUMBER", "Of --jsonl: the kernel's lines after this record.", min=0, hidden=True)
    ] = None,
) -> None:
    """Print the GPUs, the memory and the kernel log of this machine as `harness run --telemetry ssh://HOST` reads them.

    It only reads files of /proc, /sys and /dev/kmsg, opens no port and needs no root. Without --jsonl it prints one
    sample for people.
    """
    from harness import __version__
    from harness.machine.telemetry_stream import read_now, send_telemetry
    from harness.report.elements import plain_grid
    from harness.report.terminal import print_page

    if jsonl:
        send_telemetry(__version__, kernel_after)
        return
    print_page([plain_grid(("GPU", "What", "Value"), read_now())], cli.console())
