"""Inference engines that run already, and those whose server is gone."""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from harness.engines import any_of, engines
from harness.machine.doctor.finding import Finding, finding
from harness.machine.files import text
from harness.machine.holders import holders, pids
from harness.units import gib

# Names as the kernel keeps them, cut to 15 characters.
_CHILDREN = any_of([name for engine in engines() for name in engine.children])
_ENGINES = any_of([name for engine in engines() for name in engine.processes])
# Who takes over a process whose parent has ended: the first process, a user's systemd, the first one of a container.
_ADOPTERS = {"systemd", "init", "docker-init", "tini", "dumb-init", "catatonit", "lemond", "bash", "sh"}


class Process(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process: who it is and whose child."""

    pid: int
    name: str
    parent: int


def check(root: Path) -> Iterator[Finding]:
    """Findings about engines that run on this machine."""
    running = {process.pid: process for process in _processes(root)}
    engines = [process for process in running.values() if _ENGINES.match(process.name)]
    left_behind = [process for process in engines if _is_orphan(process, running)]
    held = {holder.pid: holder.bytes for holder in holders(root).found} if left_behind else {}
    if left_behind:
        told = [
            f"{one.name} (pid {one.pid}{f', holds {gib(held[one.pid])}' if one.pid in held else ''})"
            for one in left_behind
        ]
        listed = " ".join(str(process.pid) for process in left_behind)
        yield finding(
            "processes.orphans", "warning", f"left behind by a server that is gone: {', '.join(told)}", pids=listed
        )
    else:
        yield finding("processes.orphans", "ok", "no engine was left behind by a server that is gone")
    others = [process for process in engines if process not in left_behind]
    if others:
        told = [f"{process.name} (pid {process.pid})" for process in others]
        more = f" and {len(told) - 4} more" if len(told) > 4 else ""
        yield finding("processes.engines", "warning", f"run already: {', '.join(told[:4])}{more}")


def orphans(root: Path) -> set[int]:
    """Pids of engine processes whose server is gone."""
    running = {process.pid: process for process in _processes(root)}
    return {process.pid for process in running.values() if _is_orphan(process, running)}


def _is_orphan(process: Process, running: dict[int, Process]) -> bool:
    if not _CHILDREN.match(process.name):
        return False
    parent = running.get(process.parent)
    return process.parent <= 1 or parent is None or parent.name in _ADOPTERS


def _processes(root: Path) -> Iterator[Process]:
    for pid in pids(root):
        # The name stands in parentheses and may hold some itself; after it come the state and the parent.
        match = re.match(r"\d+ \((.*)\) (\S) (\d+)", text(root / f"proc/{pid}/stat") or "", re.DOTALL)
        if match and match[2] != "Z":
            yield Process(pid=pid, name=match[1], parent=int(match[3]))
