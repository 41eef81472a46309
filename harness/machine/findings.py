"""The findings of the doctor: facts about this machine, each with its fix and its source."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from harness.base.files import read_table
from harness.machine.gpus import read_gfx_table, read_machine

Level = Literal["ok", "warning", "blocker"]
Topic = Literal["gpu", "memory", "kernel", "access", "docker", "processes"]
TOPICS: dict[Topic, str] = {
    "gpu": "GPU",
    "memory": "Memory",
    "kernel": "Kernel and power",
    "access": "Access to the GPU",
    "docker": "Docker",
    "processes": "Processes",
}


class Finding(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One finding about this machine, with a fix for a problem."""

    id: str
    topic: Topic
    level: Level
    fact: str
    fix: str | None = None
    source: str


class FindingKind(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of findings.yaml: a kind of finding."""

    id: str
    topic: Topic
    looks_at: str
    levels: list[Level]  # possible levels without ok
    fix: str | dict[str, str]  # one for each case; {names} are filled in
    source: str


@cache
def finding_kinds() -> dict[str, FindingKind]:
    """Return findings.yaml, by id."""
    return {row.id: row for row in read_table(Path(__file__).with_name("findings.yaml"), list[FindingKind])}


def make_finding(id: str, level: Level, fact: str, case: str = "", **values: Any) -> Finding:
    """Return a finding of a known kind. `values` fill in its fix; `case` selects one of several fixes."""
    kind = finding_kinds()[id]
    if level != "ok" and level not in kind.levels:
        raise ValueError(f"{id} cannot be a {level}")
    fix = None
    if level != "ok":
        fix = (kind.fix if isinstance(kind.fix, str) else kind.fix[case]).format(**values)
    return Finding(id=id, topic=kind.topic, level=level, fact=fact, fix=fix, source=kind.source)


FORMAT_VERSION = 1
LEVELS: tuple[Level, ...] = ("blocker", "warning", "ok")  # the worst first


def find_worst_level(findings: list[Finding]) -> Level:
    """Return the worst level; ok without findings."""
    levels = {finding.level for finding in findings}
    return next((level for level in LEVELS if level in levels), "ok")


def format_json(findings: list[Finding], root: Path = Path("/")) -> str:
    """Return the findings, the machine, and the day on which the table of GPU targets was read, as JSON."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "level": find_worst_level(findings),
        "machine": read_machine(root),
        "targets_checked": read_gfx_table().checked,
        "findings": findings,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
