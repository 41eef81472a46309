"""Findings as text, JSON and as the tables of docs/doctor.md."""

import re
import textwrap
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from harness.machine.doctor.finding import TOPICS, Finding, Level, known, worst
from harness.machine.gfx_support import WORDS, columns, table
from harness.machine.gpus import machine
from harness.units import gib

FORMAT_VERSION = 1
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "blocker": ("BLOCKER", "bold red"),
}
_INDENT = 11
_WIDEST = 110  # columns that are pleasant to read


def show(findings: list[Finding], console: Console, root: Path = Path("/")) -> None:
    """Print findings by topic, then what they come to."""
    width = min(console.width, _WIDEST)
    _print(console, Text(_machine(root), "bold"), width)
    for topic, title in TOPICS.items():
        of_topic = [one for one in findings if one.topic == topic]
        if of_topic:
            console.print()
            console.print(Text(title, "bold"))
        for one in of_topic:
            word, style = _MARKS[one.level]
            _print(console, Text(one.fact), width, Text(f"  {word}".ljust(_INDENT), style))
            if one.fix is not None:
                _print(console, Text.assemble(("fix: ", "bold"), one.fix), width, Text(" " * _INDENT))
                _print(console, Text(f"source: {one.source}", "dim"), width, Text(" " * _INDENT))
    console.print()
    _print(console, _verdict(findings), width)


def _print(console: Console, text: Text, width: int, mark: Text | None = None) -> None:
    """Print a text in lines of at most `width`, the mark before the first and as much room before the others."""
    mark, place = mark or Text(""), 0
    # An address stays whole, however long: one with a break in it can be neither clicked nor copied.
    room = max(width - len(mark), 20)
    for line in textwrap.wrap(text.plain, room, break_long_words=False, break_on_hyphens=False):
        place = text.plain.index(line, place)
        console.print(Text() + mark + text[place : place + len(line)], soft_wrap=True)
        mark, place = Text(" " * len(mark)), place + len(line)


def _machine(root: Path) -> str:
    facts = machine(root)
    parts = [facts.name, facts.cpu, f"{gib(facts.ram_bytes)} RAM" if facts.ram_bytes else None]
    return ", ".join(part for part in parts if part)


def _verdict(findings: list[Finding]) -> Text:
    counts = {level: sum(one.level == level for one in findings) for level in _MARKS}
    told = ", ".join(f"{count} {_plural(level, count)}" for level, count in reversed(counts.items()) if count)
    style = "bold red" if counts["blocker"] else "bold yellow" if counts["warning"] else "bold green"
    blockers = {one.id for one in findings if one.level == "blocker"}
    return Text(f"{told}. {_meaning(blockers)}", style)


def _meaning(blockers: set[str]) -> str:
    if not blockers:
        return "Nothing stands in the way of a run."
    if {"docker.reachable", "gpu.present"} <= blockers:
        return "Only the embedded engine (`container: false`) and servers given with --url can be measured here."
    if "docker.reachable" in blockers:
        return "Servers in containers cannot start; the embedded engine (`container: false`) can."
    if blockers == {"gpu.present"}:
        return "Servers on the GPU cannot run here; the embedded engine and the CPU templates can."
    return "Servers on the GPU cannot be relied on until the blockers are gone."


def _plural(level: str, count: int) -> str:
    return level if level == "ok" or count == 1 else f"{level}s"


def as_json(findings: list[Finding], root: Path = Path("/")) -> str:
    """Findings, the machine, and the day on which the table of targets was read."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "level": worst(findings),
        "machine": machine(root),
        "targets_checked": table().checked,
        "findings": findings,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def filled(page: str) -> str:
    """The page with its tables written anew between their marks; `python -m harness.docs` does it."""
    for name, made in (("targets", targets_table()), ("findings", findings_tables())):
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        page = f"{before}{opening}\n{made}\n{closing}{after}"
    return page


def targets_table() -> str:
    """Where each target stands with each server, and where that was read."""
    servers = columns()
    lines = [f"Read on {table().checked}.", ""]
    lines.append(_row(["target", "family", *(server.title for server in servers.values())]))
    lines.append("|---" * (2 + len(servers)) + "|")
    for row in table().targets:
        standings = [WORDS[row.standing(server)] for server in servers]
        lines.append(_row([f"`{row.target}`", f"{row.family}; {row.architecture}", *standings]))
    lines += ["", *(f"- {server.title}: {server.source}" for server in servers.values())]
    return "\n".join(lines) + "\n"


def findings_tables() -> str:
    """Every finding with its levels, its fix and its source, by topic."""
    parts = []
    for topic, title in TOPICS.items():
        parts += [f"### {title}", "", _row(["finding", "looks at", "levels", "fix", "source"]), "|---|---|---|---|---|"]
        for row in known().values():
            if row.topic == topic:
                levels = ", ".join(["ok", *row.levels])
                fixes = [row.fix] if isinstance(row.fix, str) else list(row.fix.values())
                fix = re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), "<br>".join(fixes)) or "-"
                parts.append(_row([f"`{row.id}`", row.looks_at, levels, fix, row.source]))
        parts.append("")
    return "\n".join(parts)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
