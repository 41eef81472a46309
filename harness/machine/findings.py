"""A finding: a fact about this machine, its fix and its source."""

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from harness.machine.gpus import STANDING_LABELS, read_gfx_table, read_machine, support_columns
from harness.units import gib

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
    """findings.yaml, by id."""
    text = Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8")
    return {row.id: row for row in msgspec.convert(yaml.safe_load(text), list[FindingKind])}


def make_finding(id: str, level: Level, fact: str, case: str = "", **values: Any) -> Finding:
    """A finding of a known kind; `values` fill in its fix, that of the `case` where there are several."""
    row = finding_kinds()[id]
    if level != "ok" and level not in row.levels:
        raise ValueError(f"{id} cannot be a {level}")
    fix = None
    if level != "ok":
        fix = (row.fix if isinstance(row.fix, str) else row.fix[case]).format(**values)
    return Finding(id=id, topic=row.topic, level=level, fact=fact, fix=fix, source=row.source)


def find_worst_level(findings: list[Finding]) -> Level:
    """The worst level of all; ok when there is nothing."""
    levels = {one.level for one in findings}
    return "blocker" if "blocker" in levels else "warning" if "warning" in levels else "ok"


FORMAT_VERSION = 1
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "blocker": ("BLOCKER", "bold red"),
}
_INDENT = 11
_MAX_WIDTH = 110  # columns of readable text


def print_findings(findings: list[Finding], console: Console, root: Path = Path("/")) -> None:
    """Print findings by topic, then their result."""
    width = min(console.width, _MAX_WIDTH)
    _print_wrapped(console, Text(_describe_machine(root), "bold"), width)
    for topic, title in TOPICS.items():
        of_topic = [one for one in findings if one.topic == topic]
        if of_topic:
            console.print()
            console.print(Text(title, "bold"))
        for one in of_topic:
            word, style = _MARKS[one.level]
            _print_wrapped(console, Text(one.fact), width, Text(f"  {word}".ljust(_INDENT), style))
            if one.fix is not None:
                _print_wrapped(console, Text.assemble(("fix: ", "bold"), one.fix), width, Text(" " * _INDENT))
                _print_wrapped(console, Text(f"source: {one.source}", "dim"), width, Text(" " * _INDENT))
    console.print()
    _print_wrapped(console, _format_verdict(findings), width)


def _print_wrapped(console: Console, text: Text, width: int, mark: Text | None = None) -> None:
    """Print a text in lines of at most `width`, with the mark before the first and an indent before the others."""
    mark, place = mark or Text(""), 0
    # Never break an address: it could be neither clicked nor copied.
    room = max(width - len(mark), 20)
    for line in textwrap.wrap(text.plain, room, break_long_words=False, break_on_hyphens=False):
        place = text.plain.index(line, place)
        console.print(Text() + mark + text[place : place + len(line)], soft_wrap=True)
        mark, place = Text(" " * len(mark)), place + len(line)


def _describe_machine(root: Path) -> str:
    facts = read_machine(root)
    ram, kernel = facts.ram_bytes, facts.kernel
    parts = [facts.name, facts.cpu, f"{gib(ram)} RAM" if ram else None, f"Linux {kernel}" if kernel else None]
    return ", ".join(part for part in parts if part)


def _format_verdict(findings: list[Finding]) -> Text:
    counts = {level: sum(one.level == level for one in findings) for level in _MARKS}
    counted = ", ".join(f"{count} {_plural(level, count)}" for level, count in reversed(counts.items()) if count)
    style = "bold red" if counts["blocker"] else "bold yellow" if counts["warning"] else "bold green"
    blockers = {one.id for one in findings if one.level == "blocker"}
    return Text(f"{counted}. {_explain_blockers(blockers)}", style)


def _explain_blockers(blockers: set[str]) -> str:
    if not blockers:
        return "A run can start."
    if {"docker.reachable", "gpu.present"} <= blockers:
        return "Only the embedded engine (`container: false`) and servers given with --url can be measured here."
    if "docker.reachable" in blockers:
        return "Servers in containers cannot start; the embedded engine (`container: false`) can."
    if blockers == {"gpu.present"}:
        return "Servers on the GPU cannot run here; the embedded engine and the CPU templates can."
    return "Servers on the GPU cannot be relied on until the blockers are gone."


def _plural(level: str, count: int) -> str:
    return level if level == "ok" or count == 1 else f"{level}s"


def format_json(findings: list[Finding], root: Path = Path("/")) -> str:
    """Findings, the machine, and the day on which the table of targets was read."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "level": find_worst_level(findings),
        "machine": read_machine(root),
        "targets_checked": read_gfx_table().checked,
        "findings": findings,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def format_targets_table() -> str:
    """The support of each server for each target, with its source."""
    servers = support_columns()
    lines = [f"Read on {read_gfx_table().checked}.", ""]
    lines.append(_format_row(["target", "family", *(server.title for server in servers.values())]))
    lines.append("|---" * (2 + len(servers)) + "|")
    for row in read_gfx_table().targets:
        standings = [STANDING_LABELS[row.standing(server)] for server in servers]
        lines.append(_format_row([f"`{row.target}`", f"{row.family}; {row.architecture}", *standings]))
    lines += ["", *(f"- {server.title}: {server.source}" for server in servers.values())]
    return "\n".join(lines) + "\n"


def format_findings_tables() -> str:
    """Every finding with its levels, its fix and its source, by topic."""
    parts = []
    for topic, title in TOPICS.items():
        parts += [
            f"### {title}",
            "",
            _format_row(["finding", "looks at", "levels", "fix", "source"]),
            "|---|---|---|---|---|",
        ]
        for row in finding_kinds().values():
            if row.topic == topic:
                levels = ", ".join(["ok", *row.levels])
                fixes = [row.fix] if isinstance(row.fix, str) else list(row.fix.values())
                fix = re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), "<br>".join(fixes)) or "-"
                parts.append(_format_row([f"`{row.id}`", row.looks_at, levels, fix, row.source]))
        parts.append("")
    return "\n".join(parts)


def _format_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
