"""What would stop or slow a run on this machine? The page of `harness doctor`."""

from pathlib import Path

from harness.base.units import count, gib
from harness.machine.findings import LEVELS, TOPICS, Finding, Level, find_worst_level
from harness.machine.gpus import read_machine
from harness.report.elements import Element, Fact, Facts, Paragraph

_STYLES: dict[Level, str] = {"ok": "good", "warning": "unsure", "blocker": "bad"}


def doctor_page(findings: list[Finding], root: Path = Path("/")) -> list[Element]:
    """The machine, the findings by topic, and whether a run can start."""
    machine = read_machine(root)
    ram = f"{gib(machine.ram_bytes)} RAM" if machine.ram_bytes else None
    parts = [machine.name, machine.cpu, ram, f"Linux {machine.kernel}" if machine.kernel else None]
    page: list[Element] = [Paragraph(", ".join(part for part in parts if part), "lead")]
    for topic, title in TOPICS.items():
        facts = [fact for finding in findings if finding.topic == topic for fact in _facts(finding)]
        page += [Paragraph(title, "heading"), Facts(facts)] if facts else []
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    counted = ", ".join(
        count(number, level, level if level == "ok" else "") for level, number in counts.items() if number
    )
    verdict = "A run can start."
    if counts["blocker"]:
        verdict = "What is blocked cannot run; the embedded engine and a server given by --url can."
    return [*page, Paragraph(f"{counted}. {verdict}", _STYLES[find_worst_level(findings)])]


def _facts(finding: Finding) -> list[Fact]:
    label = finding.level.upper() if finding.level == "blocker" else finding.level
    facts = [Fact(label, finding.fact, _STYLES[finding.level])]
    if finding.fix is not None:
        facts += [Fact("fix", finding.fix), Fact("source", finding.source, "fine")]
    return facts
