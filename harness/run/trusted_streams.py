"""What `harness calibrate` found of this machine: kept, and held against the loads of a run before it begins."""

import datetime
import socket
from pathlib import Path

import msgspec
from msgspec import Struct

from harness import __version__, paths
from harness.files import UNDECODABLE, read_bytes
from harness.scenario.scenario import Scenario, at_once
from harness.units import count


class Trusted(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many streams so many load processes of a machine can be trusted for."""

    host: str
    version: str  # of the harness
    date: str
    streams: int
    chunks_per_s: float


def store(processes: int, streams: int, chunks_per_s: float) -> Path | None:
    """Keep what was found for so many load processes; None where that is not possible."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = Trusted(
        host=socket.gethostname(), version=__version__, date=today, streams=streams, chunks_per_s=chunks_per_s
    )
    path = _path(processes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(found))
    except OSError:
        return None
    return path


def notes(scenario: Scenario) -> list[str]:
    """For each load that has more streams in flight than this machine's load generator was found to be good for."""
    found = []
    for name, load in scenario.loads.items():
        known, most = _read(load.processes), at_once(load)
        if known is not None and load.stream and most > known.streams:
            one = count(load.processes, "load process", "load processes")
            found.append(
                f"note: load '{name}' has up to {most:,} streams at once, and {one} of this machine can be trusted for "
                f"{known.streams:,} (`harness calibrate`, {known.date}); use more 'processes' or machines (--workers)"
            )
    return found


def _read(processes: int) -> Trusted | None:
    """None: never calibrated, or on another machine or with another version."""
    try:
        found = msgspec.json.decode(read_bytes(_path(processes)), type=Trusted)
    except (OSError, *UNDECODABLE):
        return None
    return found if (found.host, found.version) == (socket.gethostname(), __version__) else None


def _path(processes: int) -> Path:
    return paths.cache() / "calibration" / f"{processes}.json"
