"""A finding: what was seen of this machine, what to do about it, and who says so."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

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
    """One finding about this machine. The fix is given where something is to be fixed."""

    id: str
    topic: Topic
    level: Level
    fact: str
    fix: str | None = None
    source: str


class FindingKind(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of findings.yaml: what can be found."""

    id: str
    topic: Topic
    looks_at: str
    levels: list[Level]  # that it can have, ok left out
    fix: str | dict[str, str]  # one for each case; {names} are filled in
    source: str


@cache
def known() -> dict[str, FindingKind]:
    """findings.yaml, by id."""
    text = Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8")
    return {row.id: row for row in msgspec.convert(yaml.safe_load(text), list[FindingKind])}


def finding(id: str, level: Level, fact: str, case: str = "", **values: Any) -> Finding:
    """A finding of a known kind; `values` fill in its fix, that of the `case` where there are several."""
    row = known()[id]
    if level != "ok" and level not in row.levels:
        raise ValueError(f"{id} cannot be a {level}")
    fix = None
    if level != "ok":
        fix = (row.fix if isinstance(row.fix, str) else row.fix[case]).format(**values)
    return Finding(id=id, topic=row.topic, level=level, fact=fact, fix=fix, source=row.source)


def worst(findings: list[Finding]) -> Level:
    """The worst level of all; ok when there is nothing."""
    levels = {one.level for one in findings}
    return "blocker" if "blocker" in levels else "warning" if "warning" in levels else "ok"
