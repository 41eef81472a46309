"""`harness telemetry --jsonl`: samples of this machine as lines of JSON, for a harness on another machine.

The first line is a StartRecord. Then follows a StreamSample each interval, and a ClockReading for each line `ping N` of
the standard input. It ends when the input ends, when its output is closed, and after MAX_SILENCE_S without a ping:
then the connection is lost.
"""

import os
import select
import sys
import threading
import time
from typing import Any

import msgspec
from msgspec import Struct

from harness.machine.gpus import read_machine, read_sysfs
from harness.machine.telemetry import INTERVAL_S, KernelLog, Meter, find_files, read_files, telemetry_root
from harness.records.records import Number, Seconds, Whole
from harness.records.samples import GpuSample, HostSample, KernelLine

STREAM_VERSION = 1
PING_EVERY_S = 10.0
MAX_SILENCE_S = 60.0
_MAX_INPUT = 1000  # bytes of a line
_POLL_S = 0.5


class StartRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """What sends the samples, and a pair of readings of its clocks."""

    version: int = STREAM_VERSION
    harness: str
    wall_s: Seconds
    monotonic_s: Seconds
    interval_s: Number
    machine: dict[str, Any]  # a Machine; its receiver checks each fact
    boot: str | None = None  # the id of this start of the machine
    kernel_sequence: Whole | None = None  # of the newest record of the kernel log; None: it cannot be read
    kernel_complete: bool = False  # the lines that follow have all since the record that the receiver named


class StreamSample(Struct, frozen=True, kw_only=True, tag_field="kind", tag="sample", omit_defaults=True):
    """A sample; see TelemetrySample."""

    wall_s: Seconds  # by this machine's clock, as the times of the kernel's lines
    monotonic_s: Seconds
    took_s: Number | None = None
    gpus: dict[str, GpuSample] = {}
    host: HostSample | None = None
    kernel: list[KernelLine] | None = None
    kernel_sequence: Whole | None = None  # of the newest record that was read


class ClockReading(Struct, frozen=True, kw_only=True, tag_field="kind", tag="pong"):
    """The answer to `ping N`."""

    number: Whole
    wall_s: Seconds
    monotonic_s: Seconds


StreamRecord = StartRecord | StreamSample | ClockReading


class _Output:
    """The standard output, which several threads write to, one line at a time."""

    def __init__(self) -> None:
        self.is_lost = threading.Event()
        self._lock = threading.Lock()

    def write(self, record: StreamRecord) -> None:
        try:
            with self._lock:
                sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
                sys.stdout.buffer.flush()
        except (OSError, ValueError):  # its reader has ended
            self.is_lost.set()


def send_telemetry(version: str, kernel_after: int | None = None, interval_s: float = INTERVAL_S) -> None:
    """Write samples to the standard output until the standard input ends; see the module. `version`: the harness'.

    `kernel_after`: the last record of the kernel log that the receiver has, whose connection was lost.
    """
    root, output = telemetry_root(), _Output()
    kernel_log = KernelLog(root, numbered=True, after=kernel_after)
    output.write(
        StartRecord(
            harness=version,
            wall_s=time.time(),
            monotonic_s=time.monotonic(),
            interval_s=interval_s,
            machine=msgspec.to_builtins(read_machine(root)),
            boot=read_sysfs(root / "proc/sys/kernel/random/boot_id"),
            kernel_sequence=kernel_log.sequence,
            kernel_complete=kernel_log.is_complete,
        )
    )
    # Reading a file of a driver that hangs must not keep the process alive.
    threading.Thread(
        target=_keep_sampling, args=(output, kernel_log, interval_s), name="telemetry", daemon=True
    ).start()
    _answer_pings(output)
    # Without a flush: the reader has ended.
    os._exit(0)


def _keep_sampling(output: _Output, kernel_log: KernelLog, interval_s: float) -> None:
    root, meter = telemetry_root(), Meter()
    files = find_files(root)
    due_s = time.monotonic()
    while not output.is_lost.is_set():
        wall_s, clock_s = time.time(), time.monotonic()
        contents = read_files(root, files)
        took_s = round(time.monotonic() - clock_s, 6)
        gpus, host, _ = meter.sample(contents, clock_s)
        lines = kernel_log.read()
        output.write(
            StreamSample(
                wall_s=wall_s,
                monotonic_s=clock_s,
                took_s=took_s,
                gpus=gpus,
                host=host,
                kernel=lines,
                kernel_sequence=kernel_log.sequence,
            )
        )
        due_s = max(due_s + interval_s, time.monotonic())  # do not catch up after a slow reading
        output.is_lost.wait(max(0.0, due_s - time.monotonic()))


def _answer_pings(output: _Output) -> None:
    """Answer each `ping N` until the input ends, the output is lost, or no ping has come for MAX_SILENCE_S."""
    rest, heard_s = b"", time.monotonic()
    while not output.is_lost.is_set() and time.monotonic() - heard_s < MAX_SILENCE_S:
        ready, _, _ = select.select([0], [], [], _POLL_S)
        if not ready:
            continue
        block = os.read(0, 4096)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        rest = rest[:_MAX_INPUT]
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"ping" and number.isdigit() and len(number) < 10:
                heard_s = time.monotonic()
                output.write(ClockReading(number=int(number), wall_s=time.time(), monotonic_s=heard_s))


def read_now() -> list[tuple[str, str, str]]:
    """Return one sample of this machine for people: GPU or host, what, value."""
    root = telemetry_root()
    gpus, host, _ = Meter().sample(read_files(root, find_files(root)), time.monotonic())
    parts = {**gpus, **({} if host is None else {"host": host})}
    return [
        (name, what.replace("_", " "), str(value))
        for name, part in parts.items()
        for what, value in msgspec.to_builtins(part).items()
    ]
