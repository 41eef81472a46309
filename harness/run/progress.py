"""Show the progress of a run: a live table, or plain lines where the output is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from harness.redact import masked
from harness.run.drive import Glance, Monitor
from harness.scenario.plan import Cell
from harness.units import NOTHING, duration, gib
from harness.units import count as counted

PLAIN_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
NARROW = 104  # columns; below, there are two rows
NARROWEST = 80  # below, a table would be cut


class Progress:
    """Show the progress of a run: rewritten lines in a terminal, else a line from time to time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.head = ""
        self._place = (0, 0)  # number of the cell, and of all cells
        self.last_plain = 0.0
        self._live: Live | None = None
        self._spinner = Spinner("dots", "starting")
        self._monitor: Monitor | None = None
        self._glance: Glance | None = None
        self._looked = 0.0

    @contextmanager
    def live(self) -> Iterator["Progress"]:
        if not self.console.is_terminal:
            yield self
            return
        with Live(self._spinner, console=self.console, refresh_per_second=5, transient=True) as self._live:
            yield self
        self._live = None

    def line(self, text: str) -> None:
        self.console.print(masked(text, "sure"), soft_wrap=True)

    def cell(self, number: int, cells: int, cell: Cell, left_s: float | None) -> None:
        """Start the next cell; `left_s` is the estimated time for it and all later cells."""
        self._place = number, cells
        left = "" if left_s is None else f", about {duration(left_s)} left"
        self.head = f"[{number}/{cells}] {cell.server} / {cell.load}, repeat {cell.repeat}{left}"
        self.stage("")

    def stage(self, text: str) -> None:
        self._monitor = self._glance = None
        self._show(": ".join(part for part in (self.head, masked(text, "sure")) if part))

    def load(self, monitor: Monitor) -> None:
        """The load of the current cell starts: from now on `count` shows what its files contain."""
        self._monitor, self._glance, self._looked = monitor, None, time.monotonic()

    def next_stage(self, cell: Cell, monitor: Monitor) -> None:
        number, cells = self._place
        self.cell(number + 1, cells, cell, None)
        self.load(monitor)

    def count(self) -> None:
        count = self._monitor
        if count is None:
            return
        if count.awaited:
            self._show(f"{self.head}: {count.elapsed_s:.0f} s of {count.awaited}")
            return
        now = time.monotonic()
        due = self._live is not None or now - self.last_plain >= PLAIN_EVERY_S
        if due and now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._glance = count.look()
        of = "" if count.total is None else f" of {count.total}"
        warmup = f", {count.warmup} of them warm-up" if count.warmup else ""
        failed = f", {count.failed} FAILED" if count.failed else ""
        simulated = " (SIMULATED)" if count.job.simulated else ""
        words = f"{self.head}{simulated}: {count.recorded}{of} requests{warmup}{failed}, {count.elapsed_s:.0f} s"
        glance = self._glance
        if glance is not None and glance.warmup and not glance.done and not warmup:  # of a timed one it is unknown
            words += f", warm-up until now: {counted(glance.warmup, 'request')}"
        if glance is not None and self._live is None:
            words = ", ".join([words, *describe_glance(glance)])
        elif glance is not None and glance.left_s is not None:
            words += f", {duration(glance.left_s)} left"
        self._show(words, glance)

    def _show(self, text: str, glance: Glance | None = None) -> None:
        if self._live is not None:
            self._spinner.update(text=Text(text))  # names come from files: no markup in them
            parts: list[RenderableType] = [self._spinner]
            if glance is not None:
                parts.append(Padding(table(glance, self.console.width), (0, 0, 0, 2)))
            self._live.update(Group(*parts))
        elif time.monotonic() - self.last_plain >= PLAIN_EVERY_S:
            self.last_plain = time.monotonic()
            self.line(text)


def table(glance: Glance, width: int) -> Group:
    """The known numbers of the cell, for a terminal of this width: load, server and GPUs."""
    lines: list[RenderableType] = []
    if width < NARROWEST:
        lines.append(Columns(describe_glance(msgspec.structs.replace(glance, left_s=None)), padding=(0, 3)))
    else:
        load, server = named_numbers(glance)
        grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False, show_edge=False)
        for row in [load | server] if width >= NARROW else [load, server]:
            for _ in range(len(row) - len(grid.columns)):
                grid.add_column(justify="right", no_wrap=True)
            grid.add_row(*row, style="dim")
            grid.add_row(*(text or NOTHING for text in row.values()), style="bold")
        lines.append(grid)
    if glance.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in glance.failed.items())
        lines.append(Text(f"failed: {kinds}", style="red"))
    if glance.gpus and width >= NARROWEST:
        lines.append(Columns(_describe_gpus(glance), padding=(0, 3)))
    return Group(*lines)


def named_numbers(glance: Glance) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The numbers of the load and of the server by their names; None: not known."""
    ttft, tpot = glance.ttft_s or (None, None), glance.tpot_s or (None, None)
    load = {
        "in flight": _format_number(glance.in_flight),
        "TTFT p50": _format_latency(ttft[0]),
        "TTFT p95": _format_latency(ttft[1]),
        "TPOT p50": _format_latency(tpot[0]),
        "TPOT p95": _format_latency(tpot[1]),
        "tok/s": _format_number(glance.tok_s),
        "req/s": _format_number(glance.req_s),
    }
    kv = None if glance.kv_usage is None else f"{glance.kv_usage:.0%}"
    return load, {"running": _format_number(glance.running), "waiting": _format_number(glance.waiting), "KV": kv}


def describe_glance(glance: Glance) -> list[str]:
    """The same as a line of a log."""
    load, server = named_numbers(glance)
    words = [f"{name} {text}" for name, text in (load | server).items() if text is not None]
    left = [] if glance.left_s is None else [f"{duration(glance.left_s)} left"]
    return words + _describe_gpus(glance) + left


def _describe_gpus(glance: Glance) -> list[str]:
    found = []
    for name, gpu in sorted(glance.gpus.items()):
        memory = gpu.vram_used_bytes
        if gpu.package and gpu.gtt_used_bytes is not None:  # of an APU, where most of its memory is
            memory = (memory or 0) + gpu.gtt_used_bytes
        words = [name] if gpu.busy_percent is None else [name, f"{gpu.busy_percent:.0f} %"]
        words += [] if memory is None else [gib(memory)]
        words += [] if gpu.power_w is None else [f"{gpu.power_w:.0f} W"]
        found.append(" ".join(words))
    return found


def _format_latency(value_s: float | None) -> str | None:
    if value_s is None:
        return None
    return f"{_format_number(value_s)} s" if value_s >= 10 else f"{_format_number(value_s * 1000)} ms"


def _format_number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
