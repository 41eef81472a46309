"""Show the progress of a run: live numbers in a terminal, else plain lines.

A log gets one line for each cell, and one a minute while something takes long; each has less than 100 columns.
"""

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from harness.base.metrics import METRICS
from harness.base.reason import Reason, sentence
from harness.base.redact import masked
from harness.base.units import NO_BREAK, count, duration, gib, join_units, percent
from harness.numbers.summarize import Summarized, summarize_with_counts, write_summary
from harness.records.manifest import Run
from harness.run.drive import Monitor
from harness.scenario.plan import Cell

PLAIN_EVERY_S = 60.0  # between two lines of a log, while nothing else is printed
PLAIN_WIDTH = 99  # of these lines
LOOK_EVERY_S = 1.0  # between two reads of a cell's files
LATENCIES = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")
_TEXT_ROOM = 60  # of PLAIN_WIDTH, for what is not the head
PLAIN_NAMES = ("failed", "tok/s", "TTFT p95", "TPOT p95", "waiting", "KV")  # of numbers in a log, as far as they fit


OnEnd = Callable[[Path, Run, Summarized | None], None]  # a run's folder, its last manifest, and its results if known


def write_numbers(folder: Path, run: Run, results: Summarized | None) -> None:
    """Write the summary without the answers of questions: what a run without a caller for its end leaves."""
    write_summary(folder, (results or summarize_with_counts(folder)).summary)


class Progress:
    """What a caller sees of a run: rewritten lines in a terminal, else a line from time to time, and its end.

    `on_end` writes the results: which pages there are is known to the commands and not to a run.
    """

    def __init__(self, console: Console, on_end: OnEnd = write_numbers) -> None:
        self.console, self.on_end = console, on_end
        self.head = ""  # of each line: the current cell
        self._place = (0, 0)  # number of the cell, and of all cells
        self._last_plain_s = time.monotonic()
        self._live: Live | None = None
        self._spinner = Spinner("dots", "starting")
        self._monitor: Monitor | None = None
        self._numbers: dict[str, str] | None = None  # of the monitor, in words by name
        self._read_s = 0.0
        self._notes: set[tuple[str, str]] = set()  # servers and codes of the printed ones

    @contextmanager
    def live(self) -> Iterator["Progress"]:
        if not self.console.is_terminal:
            yield self
            return
        with Live(self._spinner, console=self.console, refresh_per_second=5, transient=True) as self._live:
            yield self
        self._live = None

    def line(self, text: str, *, whole: bool = False) -> None:
        """Print lines. A long one continues below, indented. `whole`: it has a command, which is pasted."""
        self._last_plain_s = time.monotonic()
        text = masked(text, "sure")
        width = self.console.width if self.console.is_terminal else PLAIN_WIDTH
        self.console.print(text if whole else wrapped(text, width), soft_wrap=True)

    def note(self, server: str, note: Reason) -> None:
        """Print a note on a server once, however many rows it concerns."""
        if (server, note.code) not in self._notes:
            self._notes.add((server, note.code))
            self.line(f"note: {server}: {sentence(note)}")

    def start_cell(self, number: int, cells: int, cell: Cell, remaining_s: float | None) -> None:
        """Show the next cell. `remaining_s`: the estimated time for it and all later cells."""
        self._place = number, cells
        remaining = "" if remaining_s is None else f", about {duration(remaining_s)} left"
        place = f"[{number}/{cells}] " if cells else ""  # a search has no plan
        before, self.head = self.head, f"{place}{cell.server} / {cell.load}, repeat {cell.repeat}{remaining}"
        self.stage("")
        if self._live is None and self.head != before:
            self.line(self.head)

    def stage(self, text: str) -> None:
        """Show a stage of the current cell before its load, such as the start of its server."""
        self._monitor = self._numbers = None
        text = masked(text, "sure")
        self._show(f": {text}" if text and self.head else text)

    def start_load(self, monitor: Monitor) -> None:
        """Show the load of the current cell at each `update`."""
        self._monitor, self._numbers, self._read_s = monitor, None, time.monotonic()

    def next_stage(self, cell: Cell, monitor: Monitor) -> None:
        """Show the next stage of a load."""
        number, cells = self._place
        self.start_cell(number + 1, cells, cell, None)
        self.start_load(monitor)

    def update(self) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        if monitor.missing_workers:
            self._show(f": {monitor.elapsed_s:.0f} s of {monitor.missing_workers}")
            return
        now_s = time.monotonic()
        is_shown = self._live is not None or now_s - self._last_plain_s >= PLAIN_EVERY_S
        if is_shown and now_s - self._read_s >= LOOK_EVERY_S:
            self._read_s = now_s
            self._numbers = describe_numbers(monitor)
        sent = count(monitor.recorded, "request")
        if monitor.total is not None:
            sent = f"{monitor.recorded} of {count(monitor.total, 'request')}"
        warmup = f" ({monitor.warmup} for warm-up)" if monitor.warmup else ""
        failed = f", {monitor.failed} FAILED" if monitor.failed else ""
        simulated = " (SIMULATED)" if monitor.job.simulated else ""
        text = f"{simulated}: {sent}{warmup}{failed}, {monitor.elapsed_s:.0f} s"
        if self._numbers is not None:
            if monitor.warmup_ended and not monitor.measured.ended and not warmup:  # its length is unknown
                text += f", warm-up until now: {count(monitor.warmup_ended, 'request')}"
            if (remaining_s := monitor.left_s()) is not None:
                text += f", {duration(remaining_s)} left"
        self._show(text, self._numbers)

    def _show(self, text: str, numbers: Mapping[str, str] | None = None) -> None:
        """Show a text after the head, and numbers by their names."""
        if self._live is not None:
            self._spinner.update(text=Text(self.head + text))  # names come from files: no markup in them
            shown = [f"{name} {number}" for name, number in (numbers or {}).items()]
            table = Padding(Columns(shown, padding=(0, 3)), (0, 0, 0, 2))
            self._live.update(Group(self._spinner, table) if numbers else self._spinner)
        elif time.monotonic() - self._last_plain_s >= PLAIN_EVERY_S:
            self.line(plain_line(self.head, text, numbers or {}))


def wrapped(text: str, width: int) -> str:
    """Break lines between words, with the further ones indented. A longer word, such as a path, stays whole, and a
    number with its unit, too.
    """
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            join_units(line), width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines).replace(NO_BREAK, " ")


def plain_line(head: str, text: str, numbers: Mapping[str, str]) -> str:
    """A line of a log: a long head is cut, then a long text; numbers with their names follow as far as they fit."""
    head = _cut(head, PLAIN_WIDTH - min(len(text), _TEXT_ROOM))
    line = head + _cut(text, PLAIN_WIDTH - len(head))
    for name in PLAIN_NAMES:
        number = f", {name} {numbers[name]}" if name in numbers else ""
        line += number if len(line) + len(number) <= PLAIN_WIDTH else ""
    return line


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4].rstrip()} ..."


def describe_numbers(monitor: Monitor) -> dict[str, str]:
    """Read what is new of a cell; return its known numbers in words by name: of the load, the server and the GPUs."""
    numbers, observed = monitor.numbers(), monitor.observed.values
    server = observed["server"] or {}
    texts = {METRICS[name].title: _format_latency(numbers[name]) for name in LATENCIES}
    texts |= {"tok/s": _format_number(numbers["output_tok_s"]), "req/s": _format_number(numbers["requests_per_s"])}
    texts |= {name: _format_number(server.get(name)) for name in ("running", "waiting")}
    texts["KV"] = percent(server["kv_usage"], 0) if server.get("kv_usage") is not None else None
    words = {name: text for name, text in texts.items() if text is not None}
    words |= _describe_gpus(observed["gpus"] or {})
    failures = ", ".join(f"{number} {kind}" for kind, number in monitor.measured.failures.items())
    return words | ({"failed": failures} if failures else {})


def _describe_gpus(gpus: dict[str, dict[str, Any]]) -> dict[str, str]:
    texts = {}
    for name, gpu in sorted(gpus.items()):
        memory, busy, power_w = gpu.get("vram_used_bytes"), gpu.get("busy_percent"), gpu.get("power_w")
        if gpu.get("package") and gpu.get("gtt_used_bytes") is not None:  # an APU has most of its memory there
            memory = (memory or 0) + gpu["gtt_used_bytes"]
        words = [] if busy is None else [f"{busy:.0f} %"]
        words += [] if memory is None else [gib(memory)]
        words += [] if power_w is None else [f"{power_w:.0f} W"]
        texts[name] = " ".join(words)
    return texts


def _format_latency(value_s: float | None) -> str | None:
    if value_s is None:
        return None
    return f"{_format_number(value_s)} s" if value_s >= 10 else f"{_format_number(value_s * 1000)} ms"


def _format_number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
