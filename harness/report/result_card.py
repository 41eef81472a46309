"""A result as a card in Markdown, to paste into a forum or an issue: at most MAX_LINES lines.

Every text from outside is a code span: GitHub and forums make no mention, link, issue number, HTML or table of it.
"""

import re
from collections.abc import Mapping, Sequence

from harness.base.metrics import METRICS
from harness.base.units import format_date, milliseconds, significant
from harness.numbers.power_settings import power_text
from harness.numbers.row_estimate import estimate_row
from harness.numbers.stats import Estimate
from harness.numbers.summary import CellSummary, Row, Summary
from harness.records.manifest import Run
from harness.report.elements import LIMITED
from harness.report.manifest_facts import UNKNOWN, describe_machine, machine_facts, server_facts
from harness.report.sentences import DOUBTS, group_reasons, largest_error, late_numbers_text
from harness.report.words import one_line

MAX_LINES = 25
_MAX_ROWS, _MAX_CHARS = 8, 160
_MAX_DOUBTS, _MAX_DOUBT = 2, 400  # notes, and the characters of each
_NONE = "–"
_COLUMNS = {"output_tok_s": "tok/s", "ttft_p50": "TTFT p50, ms", "tpot_p50": "TPOT p50, ms"}


def render_card(run: Run, summary: Summary, command: str, answers: Sequence[str] = ()) -> str:
    """Return the card of a VALID or imported run.

    `command`: what repeats it; of an imported run it is not shown. `answers`: what its numbers do not have.
    """
    cells = {cell.id: cell for cell in summary.cells}
    shown, more = summary.rows[:_MAX_ROWS], len(summary.rows) - _MAX_ROWS
    head = ["server / load", *(f"{title} (95 %)" for title in _COLUMNS.values()), "failed", "repeats"]
    lines = [
        f"**{code(run.scenario.model)} on {code(describe_machine(run.server_machine) or run.server_machine.name)}**",
        "",
        *(line for answer in answers for line in (answer, "")),
        f"| {' | '.join(head)} |",
        f"|:---|{'---:|' * (len(head) - 1)}",
        *(_table_row(row, cells) for row in shown),
        "",
        *([f"- {more} more rows in the run"] if more > 0 else []),
        *_facts(run),
    ]
    word = {True: "VALID", False: "INVALID", None: "UNCHECKED"}[summary.valid]
    simulated = "; SIMULATED: these numbers come from a model, not from hardware" if run.simulated else ""
    if any(LIMITED in line for line in lines):
        error = max(largest_error(row) for row in summary.rows if row.client_limited)
        lines.append(f"- the load generator was late: {late_numbers_text(error, LIMITED)}")
    doubts = group_reasons([note for note in summary.notes if note.code in DOUBTS])[:_MAX_DOUBTS]
    lines += [f"- {code(text, max_chars=_MAX_DOUBT)}" for text in doubts]
    lines.append(f"- {word}{simulated}; measured {format_date(run.started_wall_s)}, run {code(run.id)}")
    source = None if run.origin is None else f"imported from {code(run.origin.tool)}"
    lines.append(f"- {source or f'repeat it: {code(command)}'}")
    return "\n".join(lines) + "\n"


def code(text: str, *, in_cell: bool = False, max_chars: int = _MAX_CHARS) -> str:
    """Return a text as a code span that ends where it ends. `in_cell`: of a table."""
    plain = one_line(text)
    plain = plain if len(plain) <= max_chars else f"{plain[: max_chars - 3]}..."
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") or not plain else ""
    shown = plain.replace("|", "¦") if in_cell else plain  # a bar would end the cell
    return f"{fence}{space}{shown}{space}{fence}"


def _table_row(row: Row, cells: Mapping[str, CellSummary]) -> str:
    numbers = [
        _estimate(estimate_row(row, cells, metric), metric) + LIMITED * (METRICS[metric].field in row.client_limited)
        for metric in _COLUMNS
    ]
    return f"| {' | '.join([code(row.name, in_cell=True), *numbers, str(row.pooled.failed), str(len(row.cells))])} |"


def _estimate(estimate: Estimate | None, metric: str) -> str:
    if estimate is None:
        return _NONE
    form = significant if metric == "output_tok_s" else milliseconds
    interval = "" if estimate.low is None else f" ({form(estimate.low)} to {form(estimate.high)})"
    return f"{form(estimate.value)}{interval}"


def _facts(run: Run) -> list[str]:
    """What decides the numbers, in at most ten lines."""
    facts = machine_facts(run)
    memory = ", ".join(filter(None, (facts["GPU memory"], facts["RAM"] and f"{facts['RAM']} RAM"))) or UNKNOWN
    software = [f"Linux {facts['Kernel']}" if facts["Kernel"] else None]
    software += [f"amdgpu {facts['amdgpu driver']}" if facts["amdgpu driver"] else None]
    software += [f"ROCm {facts['ROCm of the host']}" if facts["ROCm of the host"] else None]
    lines = [
        f"- memory: {code(memory)}; power: {code(power_text(run.server_machine) or UNKNOWN)}",
        f"- host: {code(', '.join(filter(None, software)) or UNKNOWN)}; kernel parameters: "
        f"{code(facts['Kernel parameters'] or UNKNOWN)}",
    ]
    by_server = {cell.server: cell.served_by for cell in reversed(run.served)}
    for server in list(run.scenario.servers)[:4]:
        if server not in by_server:
            continue
        served = server_facts(by_server[server])
        engine = [served["Engine"], served["Image digest"] or served["Image"]]
        settings = served["Arguments"] or UNKNOWN
        lines.append(f"- {code(server)}: {code(', '.join(filter(None, engine)) or UNKNOWN)}; {code(settings)}")
    return lines
