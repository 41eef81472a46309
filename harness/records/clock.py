"""The clock of a cell, which joins those of its load processes."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from harness.records.records import ProcessMark


class Clock:
    """Joins the clocks of a cell's processes: a process's time plus `offset_s(process)` is a time on the cell's axis.

    The axis is the monotonic clock of the process that started first. All processes of one boot of a machine share that
    clock, containers included. Times of other machines are moved by the difference of the anchors.
    """

    def __init__(self, marks: Iterable[ProcessMark]) -> None:
        starts = [mark for mark in marks if mark.event == "start"]
        self._anchors = {mark.process: mark.wall_s - mark.monotonic_s for mark in starts}
        self._boots = {mark.process: _boot(mark) for mark in starts}
        self._boot = _boot(starts[0]) if starts else None
        self.anchor_s = starts[0].wall_s - starts[0].monotonic_s if starts else None  # Unix time - time on the axis
        self.start_s = starts[0].monotonic_s if starts else 0.0  # of the first process, on the axis

    def knows(self, process: int) -> bool:
        """Whether the process has a start record. Without one its times cannot be moved to the axis."""
        return process in self._anchors

    def offset_s(self, process: int) -> float:
        anchor = self._anchors.get(process)
        if anchor is None or self.anchor_s is None or self._boots[process] == self._boot:
            return 0.0
        return anchor - self.anchor_s

    def offsets_s(self, processes: NDArray[np.int64]) -> NDArray[np.float64]:
        """The offset of each of these processes."""
        offsets = np.zeros(len(processes))
        for process in np.unique(processes).tolist():
            if (offset_s := self.offset_s(process)) != 0.0:
                offsets[processes == process] = offset_s
        return offsets

    def wall_s(self, axis_s: float | None) -> float | None:
        return None if axis_s is None or self.anchor_s is None else axis_s + self.anchor_s


def _boot(mark: ProcessMark) -> str | None:
    """The id of the machine's boot in which a process ran: the last part of its host."""
    return mark.host.rpartition("-")[2] if mark.host else None
