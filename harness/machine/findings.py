"""The findings of the doctor: facts about this machine, each with its fix and its source."""

import textwrap
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from harness.base.files import read_table
from harness.base.units import count, gib
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
_LEVELS: tuple[Level, ...] = ("blocker", "warning", "ok")  # the worst first
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "blocker": "bold red"}
_INDENT = 11
_MAX_WIDTH = 110  # columns of readable text


def find_worst_level(findings: list[Finding]) -> Level:
    """Return the worst level; ok without findings."""
    levels = {finding.level for finding in findings}
    return next((level for level in _LEVELS if level in levels), "ok")


def print_findings(findings: list[Finding], console: Console, root: Path = Path("/")) -> None:
    """Print the machine, the findings by topic, and the verdict."""
    machine = read_machine(root)
    ram = f"{gib(machine.ram_bytes)} RAM" if machine.ram_bytes else None
    parts = [machine.name, machine.cpu, ram, f"Linux {machine.kernel}" if machine.kernel else None]
    _print_wrapped(console, ", ".join(part for part in parts if part), "bold")
    for topic, title in TOPICS.items():
        topic_findings = [finding for finding in findings if finding.topic == topic]
        if topic_findings:
            console.print()
            _print_wrapped(console, title, "bold")
        for finding in topic_findings:
            mark = f"  {finding.level.upper() if finding.level == 'blocker' else finding.level}".ljust(_INDENT)
            _print_wrapped(console, finding.fact, _STYLES[finding.level], mark)
            if finding.fix is not None:
                _print_wrapped(console, f"fix: {finding.fix}", mark=" " * _INDENT)
                _print_wrapped(console, f"source: {finding.source}", mark=" " * _INDENT)
    counts = {level: sum(finding.level == level for finding in findings) for level in _LEVELS}
    counted = ", ".join(
        count(number, level, level if level == "ok" else "") for level, number in counts.items() if number
    )
    verdict = "A run can start."
    if counts["blocker"]:
        verdict = "What is blocked cannot run; the embedded engine and a server given by --url can."
    console.print()
    _print_wrapped(console, f"{counted}. {verdict}", _STYLES[find_worst_level(findings)])


def _print_wrapped(console: Console, text: str, style: str = "", mark: str = "") -> None:
    """Print a text in lines of a readable width, with the mark before the first and an indent before the others."""
    # Never break an address: it could be neither clicked nor copied.
    width = max(min(console.width, _MAX_WIDTH) - len(mark), 20)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    styled = Text(f"\n{' ' * len(mark)}".join([mark + lines[0], *lines[1:]]))
    styled.stylize(style, 0, len(mark) or None)
    console.print(styled, soft_wrap=True)


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
