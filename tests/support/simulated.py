"""The embedded engine as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Spawned(msgspec.Struct, frozen=True):
    url: str
    port: int
    process: subprocess.Popen[str]


@contextmanager
def spawned(*flags: str, quiet: bool = False) -> Iterator[Spawned]:
    """Start `python -m harness.simulated --port 0 FLAGS`, yield it when it is ready, and end it by SIGTERM.

    Its log goes to our stderr; with `quiet`, nowhere.
    """
    command = [sys.executable, "-m", "harness.simulated", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if quiet else None, text=True)
    assert process.stdout
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"{' '.join(command)} did not start: exit status {process.wait()}")
        url = line.removeprefix("listening on ").strip()
        yield Spawned(url, int(url.rpartition(":")[2]), process)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
