"""The command `harness`, also as `python -m harness`.

It imports the rest after it has set the signal handlers: the imports take up to a second.
"""

import os
import sys

from harness.base.errors import ExitCode, HarnessError
from harness.base.process import (
    end_when_deaf,
    open_closed_streams,
    refuse_too_little_memory,
    say_interrupted,
    signals_interrupt,
)


def main() -> None:
    """Run a command. A stop signal ends it with one line and its exit code, during the imports as well."""
    open_closed_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread reserves memory, and nothing here needs them
    try:
        refuse_too_little_memory()
    except HarnessError as error:  # what prints errors otherwise is among what there is no memory for
        print(f"error: {error.what}\nnext: {error.next_step}", file=sys.stderr)
        sys.exit(error.exit_code)
    end_when_deaf()
    try:
        with signals_interrupt():
            from harness.cli import main as run_command

            run_command()
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
