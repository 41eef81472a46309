"""Finds why a run is slower than it could be: the rules of the topics, ranked by what they cost."""

from msgspec.structs import replace

from harness.advice import cache, queue, setup, speed
from harness.advice.expect import Share, Word, share
from harness.advice.rules import AdviceRule, RowFacts
from harness.analysis.summarize import Summarized, summarize_data
from harness.base.summary import Reason, Row, RunFinding, Summary, because
from harness.records.run_data import RunData

MAX_FINDINGS = 5
WORDS: dict[Word, str] = {"at-limit": "at the limit", "normal": "normal", "slow": "slow"}
RULES: tuple[AdviceRule, ...] = (*speed.RULES, *cache.RULES, *queue.RULES, *setup.RULES)


def find(data: RunData, summary: Summary | None = None) -> list[RunFinding]:
    """Return at most MAX_FINDINGS findings about a run, the worst first, then those whose cost no number of it shows.

    `summary`: of the run, where it is known.
    A finding of several rows is listed once, with the numbers of the row that it costs most.
    """
    summary = summary or summarize_data(data).summary
    found: dict[str, list[RunFinding]] = {}
    rows: list[RowFacts] = []
    rows += [RowFacts(data, summary, row, rows) for row in summary.rows if not row.failed and row.pooled.succeeded]
    for one in filter(None, (rule.finding(row) for row in rows for rule in RULES)):
        found.setdefault(one.code, []).append(one)
    ranked = []
    for of_code in found.values():
        of_code.sort(key=_rank)
        ranked.append(replace(of_code[0], rows=[name for one in of_code for name in one.rows]))
    return sorted(ranked, key=_rank)[:MAX_FINDINGS]


def _rank(finding: RunFinding) -> float:
    return 1.0 if finding.cost is None else -finding.cost


def find_of_server(data: RunData, summary: Summary, server: str) -> list[RunFinding]:
    """Return the findings about the rows of one server, the worst first."""
    rows: list[RowFacts] = []
    rows += [RowFacts(data, summary, row, rows) for row in summary.rows if not row.failed and row.pooled.succeeded]
    of_server = [row for row in rows if row.row.server == server]
    return sorted(filter(None, (rule.finding(row) for row in of_server for rule in RULES)), key=_rank)


def with_findings(made: Summarized) -> Summarized:
    """The same with the findings, and the shares of what the hardware allows, in the summary. Without an answer of a
    server nothing was searched.
    """
    shares, findings = hardware_shares(made.data, made.summary), find(made.data, made.summary)
    searched = findings if any(row.pooled.succeeded for row in made.summary.rows) else None
    return made._replace(summary=replace(made.summary, hardware_shares=shares, findings=searched))


def hardware_shares(data: RunData, summary: Summary) -> list[Reason]:
    """Return how near each server came to what its GPUs allow, in its row with the fewest users, where it is known."""
    lowest: dict[str, tuple[Share, Row]] = {}
    for row in summary.rows:
        cells = (data.cells[name] for name in row.cells if name in data.cells)
        known = sorted((one for cell in cells if (one := share(data, cell)) is not None), key=lambda one: one.share)
        if known:
            found = (known[len(known) // 2], row)
            lowest[row.server] = min(lowest.get(row.server, found), found, key=lambda one: one[0].bound_tok_s)
    reasons = []
    for one, row in lowest.values():
        text = f"{row.name}: {one.sentence}{f': {WORDS[one.word]}' if one.word else ''}"
        values = {"row": row.name, "share": one.share, "word": one.word, "of_tok_s": one.of_tok_s}
        speeds = {"bound_tok_s": one.bound_tok_s, "measured_tok_s": one.measured_tok_s}
        reasons.append(because("hardware_share", text, **values, **speeds))
    return reasons
