"""What a terminal shows of a page, as lines."""

from collections.abc import Sequence

from rich.console import Console

from harness.report.elements import Element
from harness.report.terminal import print_page


def printed_lines(page: Sequence[Element], width: int = 200) -> list[str]:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        print_page(page, console)
    return capture.get().splitlines()
