"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from harness.drive import Count
from harness.plan import Cell

PLAIN_EVERY_S = 10.0


class Progress:
    """Shows where a run is. In a terminal one line is rewritten; else a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status: Status | None = None
        self.head = ""
        self.begin = time.monotonic()
        self.last_plain = 0.0

    @contextmanager
    def live(self) -> Iterator["Progress"]:
        if self.console.is_terminal:
            with self.console.status("starting") as self.status:
                yield self
            self.status = None
        else:
            yield self

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def cell(self, number: int, cells: int, cell: Cell, left_s: float | None) -> None:
        """The next cell begins; `left_s` is the estimate of the time for it and all that follow."""
        left = "" if left_s is None else f", about {duration(left_s)} left"
        self.head = f"[{number}/{cells}] {cell.server} / {cell.load}, repeat {cell.repeat}{left}"
        self.stage("")

    def stage(self, text: str) -> None:
        """What is being done for the current cell, such as pulling an image."""
        self._show(": ".join(part for part in (self.head, text) if part))

    def count(self, count: Count) -> None:
        of = "" if count.total is None else f" of {count.total}"
        failed = f", {count.failed} FAILED" if count.failed else ""
        self._show(f"{self.head}: {count.recorded}{of} requests{failed}, {count.elapsed_s:.0f} s")

    def _show(self, text: str) -> None:
        if self.status is not None:
            # Escaped: names come from files, and brackets would be read as styles.
            self.status.update(text.replace("[", r"\["))
        elif time.monotonic() - self.last_plain >= PLAIN_EVERY_S:
            self.last_plain = time.monotonic()
            self.line(text)


def duration(seconds: float) -> str:
    """Seconds in words for people: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
