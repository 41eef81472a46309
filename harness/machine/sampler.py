"""Takes samples while a cell runs, in one thread, and appends them to telemetry.jsonl."""

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from harness.machine.telemetry import Meter, Reading, find_files, local_readings
from harness.rundir.samples import append_sample
from harness.rundir.telemetry import TelemetrySample

ROOT_VARIABLE = "AMD_LLM_LOAD_TELEMETRY_ROOT"  # instead of /, for tests on trees of files
INTERVAL_S = 1.0
LONGEST_END_S = 3.0  # a driver that hangs must not hold up the run

Source = Callable[[threading.Event], Iterator[Reading]]  # readings until there is enough


def root() -> Path:
    """Below which /sys and /proc are."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/")


def local_source(container: list[str] | None = None, interval_s: float = INTERVAL_S) -> Source:
    """This machine's files; `container`: those of the control group of the server's container."""
    here = root()
    return partial(local_readings, here, find_files(here, container), interval_s)


class Sampler:
    """Samples from entering to leaving. Without a source it does nothing; what fails leaves a gap, nothing more."""

    def __init__(self, source: Source | None, cell: str, path: Path) -> None:
        self.samples = 0
        self.last_failure: str | None = None
        self._source = source
        self.cell = cell
        self._path = path
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, name=f"telemetry of {cell}", daemon=True)

    def __enter__(self) -> "Sampler":
        if self._source is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self._thread.is_alive():
            self._thread.join(LONGEST_END_S)

    def _keep_sampling(self) -> None:
        assert self._source is not None
        meter = Meter()
        try:
            for reading in self._source(self._enough):
                gpus, host, container = meter.sample(reading)
                took_s = None if reading.took_s is None else round(reading.took_s, 6)
                sample = TelemetrySample(
                    wall_s=reading.wall_s, cell=self.cell, took_s=took_s, gpus=gpus, host=host, container=container
                )
                append_sample(self._path, sample)
                self.samples += 1
        except Exception as failure:  # of an observer; the measurement goes on without it
            self.last_failure = f"{type(failure).__name__}: {failure}"
