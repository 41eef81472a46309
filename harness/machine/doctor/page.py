"""The tables of docs/doctor.md, made of findings.yaml and the targets."""

import re

from harness.machine.doctor.finding import TOPICS, known
from harness.machine.targets import WORDS, columns, table


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
