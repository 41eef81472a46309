"""The command that lends this machine to a run of another one."""

from typing import Annotated

import typer

from harness.cli.common import command, listening_address


@command(short_help="Send load for a run of another machine.")
def worker(
    master: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where `harness run --workers` was started (port 5557).",
            callback=listening_address,
        ),
    ],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Load processes on this machine.")] = 1,
    once: Annotated[bool, typer.Option("--once", help="End after one load instead of waiting for the next.")] = False,
) -> None:
    """Send load for a run of another machine, one load after the other, until Ctrl-C.

    It is a stock Locust worker. User class and job come from the master, so trust it; an API key does not: set its
    variable here.
    """
    from harness.process import signals_interrupt
    from harness.run.worker import lend

    with signals_interrupt():
        lend(master, processes, once=once)
