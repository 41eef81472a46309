"""The command line. Each command is a few lines; the work is done by the module that it names."""

import io
import os
import sys
import traceback
from typing import Annotated

import typer

from harness import __version__
from harness.base.errors import ExitCode, HarnessError, reason_of
from harness.base.process import say_interrupted
from harness.base.redact import masked
from harness.cli import actions, stored, tools
from harness.cli.common import (
    Output,
    mute_stdout,
    print_error,
    protect_terminal,
    refuse_undecodable,
    undecodable_name,
    usage_error,
)
from harness.cli.common import app as app
from harness.questions.bisect import command as bisect
from harness.questions.capacity import command as capacity
from harness.questions.compare import command as compare
from harness.questions.expect import command as expect
from harness.questions.plan import command as plan
from harness.questions.quick import command as quick
from harness.questions.report import command as report
from harness.questions.tune import command as tune

# Importing them registers their commands.
COMMAND_MODULES = (quick, actions, capacity, tune, bisect, expect, compare, plan, tools, report, stored)


def version(value: bool) -> None:
    if value:
        print(f"amd-llm-load {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _lacks_memory(error: Exception) -> bool:
    """Return whether a failure is a limit of memory or threads, not a defect."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_mapping = isinstance(error, ImportError) and "failed to map segment" in str(error)  # of the dynamic linker
    return isinstance(error, MemoryError) or no_thread or no_mapping


def main() -> None:
    """Run a command; every way it can end has its exit code (see `ExitCode`)."""
    # Invoked without Typer's own `main`, which has other exit codes and other words for some of these ends.
    command = typer.main.get_command(app)
    if "_HARNESS_COMPLETE" in os.environ:  # the shell asks for completions
        command.main(prog_name="harness")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not in UTF-8 must not cost a run its table
        sys.stdout.reconfigure(errors="backslashreplace")
    protect_terminal()
    code: int = ExitCode.OK
    try:
        refuse_undecodable(sys.argv[1:])
        with command.make_context("harness", sys.argv[1:]) as context:
            command.invoke(context)
            sys.stdout.flush()
    except typer.Exit as end:
        code = end.exit_code
    except HarnessError as error:
        print_error(error)
        code = error.exit_code
    except typer.TyperException as error:
        if error.format_message().startswith("Usage:"):  # no command at all: the message is the help
            print(error.format_message(), file=sys.stderr)
        else:
            print_error(usage_error(error, getattr(error, "ctx", None)))
        code = ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        say_interrupted()
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        mute_stdout()
    except OSError as error:
        if error.filename is None:
            mute_stdout()  # what is left in its buffer would fail again
        print_error(HarnessError(f"{error.filename or 'the output'}: {reason_of(error)}"))
        code = ExitCode.USAGE
    except UnicodeEncodeError as error:  # a name that a folder, a file or the environment gave
        print_error(undecodable_name(error))
        code = ExitCode.USAGE
    except Exception as error:
        if _lacks_memory(error):
            print_error(HarnessError(f"this machine or shell has no memory or thread left ({reason_of(error)})",
                next_step="Give it more: `ulimit -v` and `ulimit -u` show the limits of this shell."))  # fmt: skip
            sys.exit(ExitCode.USAGE)
        if os.environ.get("HARNESS_DEBUG"):
            print(masked(traceback.format_exc(), "known"), file=sys.stderr)
        print(
            f"error: a defect of the harness itself: {type(error).__name__}: {masked(str(error), 'sure')}\n"
            "next: please report it, with what HARNESS_DEBUG=1 prints in addition.",
            file=sys.stderr,
        )
        code = ExitCode.USAGE
    try:
        sys.stdout.flush()
    except OSError:  # what had been printed before it ended otherwise than well
        mute_stdout()
    if Output.is_lost and code == ExitCode.OK:
        code = ExitCode.USAGE
    sys.exit(code)
