"""The device nodes: are they there, may this user open them, which groups must containers have."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from harness.machine.doctor.finding import Finding, Level, finding
from harness.machine.facts import device_groups, gpus
from harness.machine.files import text


class User(Struct, frozen=True, forbid_unknown_fields=True):
    """Who wants to open the device nodes."""

    uid: int
    groups: frozenset[int]


def check(root: Path, user: User | None = None, *, rootless: bool = False) -> Iterator[Finding]:
    """Findings about device nodes; none without a GPU.

    Containers of an engine that runs as root open them whoever the user is; those of a rootless engine open them as
    the user. `user` None is this one, access lists of the file system included.
    """
    nodes = [str(gpu["render_node"]) for gpu in gpus(root) if gpu["render_node"]]
    if not any(True for _ in gpus(root)):
        return
    yield from _node(root, "access.kfd", "/dev/kfd", user, rootless)
    yield from _render(root, nodes, user, rootless)
    if groups := device_groups(root):
        names = _names(root)
        told = ", ".join(f"{group} ({names[group]})" if group in names else str(group) for group in groups)
        yield finding("access.groups", "ok", f"containers get the groups {told}, by number")
    elif (root / "dev/kfd").exists() and not _mode(root / "dev/kfd") & stat.S_IWOTH:
        yield finding("access.groups", "warning", "the device nodes belong to the group root")


def no_render_node(root: Path) -> Iterator[Finding]:
    """A blocker when there is no render node at all, whatever the compute driver knows: Vulkan needs no more."""
    if not any((root / "dev/dri").glob("renderD*")):
        what = "there is no render node in /dev/dri"
        yield finding("access.render", "blocker", what, "missing")


def missing(root: Path, nodes: Iterable[str]) -> Iterator[Finding]:
    """A blocker for each node of /dev/dri that is named and not there."""
    for node in nodes:
        if not (root / node.lstrip("/")).exists():
            there = ", ".join(sorted(path.name for path in (root / "dev/dri").glob("renderD*"))) or "none"
            what = f"there is no {node} (render nodes: {there})"
            yield finding("access.render", "blocker", what, "missing")


def _node(root: Path, id: str, name: str, user: User | None, rootless: bool) -> Iterator[Finding]:
    path = root / name.lstrip("/")
    if not path.exists():
        yield finding(id, "blocker", f"there is no {name}", "missing")
        return
    owner = f"{name}: mode {_mode(path) & 0o777:04o}, group {_group(root, path)}"
    if may_open(path, user):
        yield finding(id, "ok", owner)
    else:
        yield _denied(root, id, owner, path, rootless)


def _render(root: Path, nodes: list[str], user: User | None, rootless: bool) -> Iterator[Finding]:
    gone = [node for node in nodes if not (root / node.lstrip("/")).exists()]
    if gone or not nodes:
        what = f"there is no {', '.join(gone)}" if gone else "no GPU has a render node"
        yield finding("access.render", "blocker", what, "missing")
        return
    closed = [node for node in nodes if not may_open(root / node.lstrip("/"), user)]
    if len(nodes) == 1 or closed:
        yield from _node(root, "access.render", closed[0] if closed else nodes[0], user, rootless)
    else:
        group = _group(root, root / nodes[0].lstrip("/"))
        yield finding("access.render", "ok", f"{len(nodes)} render nodes from {nodes[0]} on, group {group}")


def _denied(root: Path, id: str, owner: str, path: Path, rootless: bool) -> Finding:
    level: Level = "blocker" if rootless else "warning"
    who = "the rootless engine, which runs as this user," if rootless else "this user"
    rest = (
        "" if rootless else "; containers of an engine that runs as root may, servers that you start yourself may not"
    )
    group = _names(root).get(path.stat().st_gid, str(path.stat().st_gid))
    return finding(id, level, f"{who} may not open {owner}{rest}", "denied", groups=group)


def may_open(path: Path, user: User | None) -> bool:
    """Whether the user may read and write it."""
    if user is None:
        return os.access(path, os.R_OK | os.W_OK)
    if user.uid == 0:
        return True
    facts = path.stat()
    shift = 6 if facts.st_uid == user.uid else 3 if facts.st_gid in user.groups else 0
    return (facts.st_mode >> shift) & 0o6 == 0o6


def _mode(path: Path) -> int:
    return path.stat().st_mode


def _group(root: Path, path: Path) -> str:
    gid = path.stat().st_gid
    name = _names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _names(root: Path) -> dict[int, str]:
    """Names of groups by number; they differ between host and image, so they are for reading only."""
    found = re.findall(r"^([^:\n]+):[^:\n]*:(\d+):", text(root / "etc/group") or "", re.MULTILINE)
    return {int(number): name for name, number in found}
