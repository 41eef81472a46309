"""LLM metrics in the outputs of stock Locust: its log, the files of --csv and the report of --html."""

import csv
import logging
import os
from argparse import Namespace
from pathlib import Path

from harness.files import read_text
from harness.load.live_metrics import LiveNumbers
from harness.load.live_tables import history_heads, history_lines, html_section, text_table, whole_csv

PRINT_S = 6  # Locust prints its own table every 2 s
_ROOT = '<div id="root">'  # of Locust's report, which a script fills in

logger = logging.getLogger(__name__)
_table = logging.getLogger("locust.stats_logger")  # lines without time and level


class StockOutput:
    """The outputs of one process with the live numbers: a local runner or a master."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._prints = bool(options.headless or options.print_stats) and not options.only_summary
        self._seconds = 0
        self._numbers: LiveNumbers | None = None  # whose points were written
        self._written_t = -1.0
        prefix = options.csv_prefix
        self._whole_path = Path(f"{prefix}_llm.csv") if prefix else None
        self._history_path = Path(f"{prefix}_llm_history.csv") if prefix else None
        if self._history_path is not None:
            self._history_path.parent.mkdir(parents=True, exist_ok=True)
            self._append([history_heads()], mode="w")

    def update(self, numbers: LiveNumbers) -> None:
        """Print and write what is due. Call it each second of a load."""
        self._seconds += 1
        if self._prints and self._seconds % PRINT_S == 0:
            self._print(numbers)
        self._write(numbers)

    def finish(self, numbers: LiveNumbers) -> None:
        """Print and write the whole test. Call it when Locust has printed its tables and written its report."""
        self._write(numbers, final=True)
        if numbers.total or numbers.warmup or self._options.headless:
            self._print(numbers, final=True)
        if self._options.html_file:
            add_to_report(Path(self._options.html_file), numbers)

    def _print(self, numbers: LiveNumbers, *, final: bool = False) -> None:
        for line in [*text_table(numbers, final=final), ""]:
            _table.info(line)

    def _write(self, numbers: LiveNumbers, *, final: bool = False) -> None:
        if self._whole_path is None:
            return
        if numbers is not self._numbers:
            self._numbers, self._written_t = numbers, -1.0
        points = [point for point in numbers.points if point.t > self._written_t]
        if points:
            self._written_t = points[-1].t
            self._append([line for point in points for line in history_lines(point)])
        if points or final:
            new = self._whole_path.with_name(self._whole_path.name + ".new")
            new.write_text(whole_csv(numbers))
            os.replace(new, self._whole_path)  # a reader never sees half of it

    def _append(self, lines: list[list[object]] | list[list[str]], mode: str = "a") -> None:
        assert self._history_path is not None
        with self._history_path.open(mode, newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


def with_section(report: str, numbers: LiveNumbers) -> str:
    """Locust's HTML report with the LLM metrics at its top."""
    before, found, after = report.rpartition(_ROOT)
    return before + html_section(numbers) + found + after if found else report + html_section(numbers)


def add_to_report(path: Path, numbers: LiveNumbers) -> None:
    """Add the LLM metrics to the report that Locust has written; nothing if it has written none."""
    try:
        report = read_text(path)
        path.write_text(with_section(report, numbers), encoding="utf-8")
    except FileNotFoundError:  # the start failed
        pass
    except OSError as error:
        logger.error("--html: the LLM metrics cannot be added to %s (%s)", path, error.strerror)
