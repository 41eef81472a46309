"""The findings of the doctor: facts about this machine, each with its fix and its source."""

import textwrap
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from harness.machine.gpus import read_gfx_table, read_machine
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
    """Return findings.yaml, by id."""
    text = Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8")
    return {row.id: row for row in msgspec.convert(yaml.safe_load(text), list[FindingKind])}


def make_finding(id: str, level: Level, fact: str, case: str = "", **values: Any) -> Finding:
    """Return a finding of a known kind. `values` fill in its fix; `case` selects one of several fixes."""
    kind = finding_kinds()[id]
    if level != "ok" and level not in kind.levels:
        raise ValueError(f"{id} cannot be a {level}")
    fix = None
    if level != "ok":
        fix = (kind.fix if isinstance(kind.fix, str) else kind.fix[case]).format(**values)
    return Finding(id=id, topic=kind.topic, level=level, fact=fact, fix=fix, source=kind.source)


def find_worst_level(findings: list[Finding]) -> Level:
    """Return the worst level; ok without findings."""
    levels = {finding.level for finding in findings}
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
    """Print the machine, the findings by topic, and the verdict."""
    width = min(console.width, _MAX_WIDTH)
    machine, indent = read_machine(root), Text(" " * _INDENT)
    ram = f"{gib(machine.ram_bytes)} RAM" if machine.ram_bytes else None
    parts = [machine.name, machine.cpu, ram, f"Linux {machine.kernel}" if machine.kernel else None]
    _print_wrapped(console, Text(", ".join(part for part in parts if part), "bold"), width)
    for topic, title in TOPICS.items():
        topic_findings = [finding for finding in findings if finding.topic == topic]
        if topic_findings:
            console.print()
            console.print(Text(title, "bold"))
        for finding in topic_findings:
            word, style = _MARKS[finding.level]
            _print_wrapped(console, Text(finding.fact), width, Text(f"  {word}".ljust(_INDENT), style))
            if finding.fix is not None:
                _print_wrapped(console, Text.assemble(("fix: ", "bold"), finding.fix), width, indent)
                _print_wrapped(console, Text(f"source: {finding.source}", "dim"), width, indent)
    console.print()
    _print_wrapped(console, _format_verdict(findings), width)


def _print_wrapped(console: Console, text: Text, width: int, mark: Text | None = None) -> None:
    """Print a text in lines of at most `width`, with the mark before the first and an indent before the others."""
    mark, position = mark or Text(""), 0
    # Never break an address: it could be neither clicked nor copied.
    text_width = max(width - len(mark), 20)
    for line in textwrap.wrap(text.plain, text_width, break_long_words=False, break_on_hyphens=False):
        position = text.plain.index(line, position)
        console.print(Text() + mark + text[position : position + len(line)], soft_wrap=True)
        mark, position = Text(" " * len(mark)), position + len(line)


def _format_verdict(findings: list[Finding]) -> Text:
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    counted = ", ".join(
        f"{count} {level}{'s' if count > 1 and level != 'ok' else ''}"
        for level, count in reversed(counts.items())
        if count
    )
    style = "bold red" if counts["blocker"] else "bold yellow" if counts["warning"] else "bold green"
    blockers = {finding.id for finding in findings if finding.level == "blocker"}
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
