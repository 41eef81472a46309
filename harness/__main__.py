"""The command `harness`, also as `python -m harness`.

It imports the rest after it has set the signal handlers: the imports take up to a second.
"""

import sys

from harness.base.errors import INTERRUPTED, ExitCode
from harness.base.process import signals_interrupt


def main() -> None:
    """Run a command. A stop signal ends it with one line and its exit code, during the imports as well."""
    try:
        with signals_interrupt():
            from harness.cli import main as run_command

            run_command()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
