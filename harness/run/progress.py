"""Show the progress of a run: live numbers in a terminal, else plain lines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from harness.redact import masked
from harness.run.drive import Glance, Monitor
from harness.scenario.plan import Cell
from harness.units import count, duration, gib

PLAIN_EVERY_S = 5.0
LOOK_EVERY_S = 1.0  # between two reads of a cell's files


class Progress:
    """Show the progress of a run: rewritten lines in a terminal, else a line from time to time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.head = ""  # of each line: the current cell
        self._place = (0, 0)  # number of the cell, and of all cells
        self.last_plain = 0.0
        self._live: Live | None = None
        self._spinner = Spinner("dots", "starting")
        self._monitor: Monitor | None = None
        self._glance: Glance | None = None
        self._glanced_s = 0.0

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

    def start_cell(self, number: int, cells: int, cell: Cell, left_s: float | None) -> None:
        """Show the next cell. `left_s`: the estimated time for it and all later cells."""
        self._place = number, cells
        left = "" if left_s is None else f", about {duration(left_s)} left"
        self.head = f"[{number}/{cells}] {cell.server} / {cell.load}, repeat {cell.repeat}{left}"
        self.stage("")

    def stage(self, text: str) -> None:
        """Show a stage of the current cell before its load, such as the start of its server."""
        self._monitor = self._glance = None
        self._show(": ".join(part for part in (self.head, masked(text, "sure")) if part))

    def start_load(self, monitor: Monitor) -> None:
        """Show the load of the current cell at each `update`."""
        self._monitor, self._glance, self._glanced_s = monitor, None, time.monotonic()

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
            self._show(f"{self.head}: {monitor.elapsed_s:.0f} s of {monitor.missing_workers}")
            return
        now_s = time.monotonic()
        is_shown = self._live is not None or now_s - self.last_plain >= PLAIN_EVERY_S
        if is_shown and now_s - self._glanced_s >= LOOK_EVERY_S:
            self._glanced_s = now_s
            self._glance = monitor.glance()
        total = "" if monitor.total is None else f" of {monitor.total}"
        warmup = f", {monitor.warmup} of them warm-up" if monitor.warmup else ""
        failed = f", {monitor.failed} FAILED" if monitor.failed else ""
        simulated = " (SIMULATED)" if monitor.job.simulated else ""
        text = f"{self.head}{simulated}: {monitor.recorded}{total} requests{warmup}{failed}, {monitor.elapsed_s:.0f} s"
        glance = self._glance
        if glance is not None:
            if glance.warmup and not glance.done and not warmup:  # the length of a timed warm-up is unknown
                text += f", warm-up until now: {count(glance.warmup, 'request')}"
            if glance.left_s is not None:
                text += f", {duration(glance.left_s)} left"
            if self._live is None:
                text = ", ".join([text, *describe_glance(glance)])
        self._show(text, glance)

    def _show(self, text: str, glance: Glance | None = None) -> None:
        if self._live is not None:
            self._spinner.update(text=Text(text))  # names come from files: no markup in them
            parts: list[RenderableType] = [self._spinner]
            if glance is not None:
                parts.append(Padding(glance_view(glance), (0, 0, 0, 2)))
            self._live.update(Group(*parts))
        elif time.monotonic() - self.last_plain >= PLAIN_EVERY_S:
            self.last_plain = time.monotonic()
            self.line(text)


def glance_view(glance: Glance) -> Group:
    """Return the numbers of a cell for a terminal of any width."""
    lines: list[RenderableType] = [Columns(describe_glance(glance), padding=(0, 3))]
    if glance.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in glance.failed.items())
        lines.append(Text(f"failed: {kinds}", style="red"))
    return Group(*lines)


def describe_glance(glance: Glance) -> list[str]:
    """Return the known numbers of a cell in words: of the load, the server and the GPUs."""
    ttft, tpot = glance.ttft_s or (None, None), glance.tpot_s or (None, None)
    numbers = {
        "TTFT p50": _format_latency(ttft[0]),
        "TTFT p95": _format_latency(ttft[1]),
        "TPOT p50": _format_latency(tpot[0]),
        "TPOT p95": _format_latency(tpot[1]),
        "tok/s": _format_number(glance.tok_s),
        "req/s": _format_number(glance.req_s),
        "running": _format_number(glance.running),
        "waiting": _format_number(glance.waiting),
        "KV": None if glance.kv_usage is None else f"{glance.kv_usage:.0%}",
    }
    return [f"{name} {text}" for name, text in numbers.items() if text is not None] + _describe_gpus(glance)


def _describe_gpus(glance: Glance) -> list[str]:
    texts = []
    for name, gpu in sorted(glance.gpus.items()):
        memory = gpu.vram_used_bytes
        if gpu.package and gpu.gtt_used_bytes is not None:  # an APU has most of its memory there
            memory = (memory or 0) + gpu.gtt_used_bytes
        words = [name] if gpu.busy_percent is None else [name, f"{gpu.busy_percent:.0f} %"]
        words += [] if memory is None else [gib(memory)]
        words += [] if gpu.power_w is None else [f"{gpu.power_w:.0f} W"]
        texts.append(" ".join(words))
    return texts


def _format_latency(value_s: float | None) -> str | None:
    if value_s is None:
        return None
    return f"{_format_number(value_s)} s" if value_s >= 10 else f"{_format_number(value_s * 1000)} ms"


def _format_number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
