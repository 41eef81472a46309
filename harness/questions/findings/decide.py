"""Finds why a run is slower than it could be: the rules of the topics, ranked by what they cost."""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.reason import Reason, because
from harness.base.units import figures
from harness.hardware.bounds import Share, Word, prefill_bound, share
from harness.numbers.summarize import Summarized, summarize_data
from harness.numbers.summary import Row, RunFinding, Summary
from harness.numbers.validity import DEATHS, RESTARTS
from harness.questions.findings import bad_answers, cache, limits, queue, setup, speed, stream
from harness.questions.findings.rules import AdviceRule, RowFacts
from harness.records.run_data import RunData

MAX_FINDINGS = 5
WORDS: dict[Word, str] = {"at-limit": "at the limit", "normal": "normal", "slow": "slow"}
RULES: tuple[AdviceRule, ...] = (
    *bad_answers.RULES, *stream.RULES, *speed.RULES, *cache.RULES, *queue.RULES, *setup.RULES,
    *limits.RULES,
)  # fmt: skip


def find(data: RunData, summary: Summary | None = None) -> list[RunFinding]:
    """Return at most MAX_FINDINGS findings about a run: those that doubt its numbers, then those that cost most, then
    those whose cost no number of it shows.

    `summary`: of the run, where it is known.
    A finding of several rows is listed once, with the numbers of the row that it costs most.
    """
    summary = summary or summarize_data(data).summary
    by_code: dict[str, list[RunFinding]] = {}
    rows = _row_facts(data, summary)
    silent = [RowFacts(data, summary, row, rows) for row in _living(summary) if not row.pooled.succeeded]
    for finding in [*filter(None, map(bad_answers.users_unserved.finding, silent)), *_rule_findings(rows)]:
        by_code.setdefault(finding.code, []).append(finding)
    ranked = [replace(alike[0], rows=[finding.rows[0] for finding in alike]) for alike in by_code.values()]
    return _with_trials(_with_same_costs(ranked[:MAX_FINDINGS]), {row.name: row for row in rows})


def _with_trials(findings: list[RunFinding], rows: Mapping[str, RowFacts]) -> list[RunFinding]:
    """Return the findings, where the first settings that each advises are verified by `harness tune RUN`.

    It tries the worst finding's, another one's by its code.
    """
    tried = list[RunFinding]()
    for finding in findings:
        row = rows.get(finding.rows[0])
        place = next((place for place, action in enumerate(finding.actions) if action.changes), None)
        if row is not None and place is not None and row.can_try(finding.actions[place].changes):
            is_worst = not any(action.changes for earlier in tried for action in earlier.actions)
            code = [] if is_worst else ["--finding", finding.code]
            command = command_line("harness", "tune", row.data.run.id, *code, *row.where)
            actions = [*finding.actions]
            actions[place] = replace(actions[place], verify=command)
            finding = replace(finding, actions=actions)
        tried.append(finding)
    return tried


def _row_facts(data: RunData, summary: Summary) -> list[RowFacts]:
    rows: list[RowFacts] = []
    rows += [RowFacts(data, summary, row, rows) for row in _living(summary) if row.pooled.succeeded]
    return rows


def _living(summary: Summary) -> list[Row]:
    """The rows whose server did not fail: of one that died, its death is the only finding."""
    codes = (*DEATHS, *RESTARTS)
    dead = {cell.id for cell in summary.cells if any(problem.code in codes for problem in cell.problems)}
    return [row for row in summary.rows if row.failed is None and dead.isdisjoint(row.cells)]


def _rule_findings(rows: Iterable[RowFacts]) -> list[RunFinding]:
    """Return the findings about rows, each of its row alone, the worst first."""
    return sorted(filter(None, (rule.finding(row) for row in rows for rule in RULES)), key=_rank)


def _rank(finding: RunFinding) -> float:
    if any(rule.misleads for rule in RULES if rule.code == finding.code):
        return -2.0
    return 1.0 if finding.cost is None else -finding.cost


def _with_same_costs(findings: list[RunFinding]) -> list[RunFinding]:
    """Return the findings, where a later one of the same loss refers to the first of its row."""
    losses, first = {rule.code: rule.loss for rule in RULES if rule.loss}, dict[tuple[str, str], str]()
    named = []
    for finding in findings:
        if finding.cost is not None and finding.code in losses:
            earlier = [first.setdefault((losses[finding.code], row), finding.code) for row in finding.rows]
            finding = replace(finding, same_cost_as="" if earlier[0] == finding.code else earlier[0])
        named.append(finding)
    return named


def find_of_server(data: RunData, summary: Summary, server: str) -> list[RunFinding]:
    """Return the findings about the rows of one server, the worst first."""
    return _rule_findings(row for row in _row_facts(data, summary) if row.row.server == server)


def with_findings(analysis: Summarized) -> Summarized:
    """The same with the findings, and the shares of what the hardware allows, in the summary. Without an answer of a
    server nothing was searched.
    """
    analysis = analysis._replace(summary=without_impossible_prefill(analysis.data, analysis.summary))
    shares, findings = hardware_shares(analysis.data, analysis.summary), find(analysis.data, analysis.summary)
    searched = findings if any(row.pooled.succeeded for row in _living(analysis.summary)) else None
    return analysis._replace(summary=replace(analysis.summary, hardware_shares=shares, findings=searched))


def without_impossible_prefill(data: RunData, summary: Summary) -> Summary:
    """The summary without prefill speeds above what the hardware allows, and a note on each."""
    rows, notes = [], []
    for row in summary.rows:
        cells = [data.cells[name] for name in row.cells if name in data.cells]
        bounds = [cell_bound for cell in cells if (cell_bound := prefill_bound(data, cell)) is not None]
        above = max(bounds, default=None)
        if above is not None and above[0] > above[1] and row.prefill_tok_s is not None:
            tok_s, bound, gpu = above
            row = replace(row, prefill_tok_s=None)
            text = f"{row.name}: a prefill speed of {figures(tok_s)} tok/s is not given: it is above what this GPU "
            text += f"allows ({figures(bound)} tok/s; {gpu}). The server has a part of the prompts in a cache that it "
            text += "does not report, or sends a first token before the prompt is computed"
            notes.append(because("prefill_above_hardware", text, row=row.name, tok_s=tok_s, bound_tok_s=bound))
        rows.append(row)
    return replace(summary, rows=rows, notes=[*summary.notes, *notes]) if notes else summary


def hardware_shares(data: RunData, summary: Summary) -> list[Reason]:
    """Return how near each server came to what its GPUs allow, in its row with the fewest users, where it is known."""
    lowest: dict[str, tuple[Share, Row]] = {}
    for row in summary.rows:
        cells = (data.cells[name] for name in row.cells if name in data.cells)
        shares = sorted(
            (cell_share for cell in cells if (cell_share := share(data, cell)) is not None),
            key=lambda cell_share: cell_share.share,
        )
        if shares:
            middle = (shares[len(shares) // 2], row)
            lowest[row.server] = min(lowest.get(row.server, middle), middle, key=lambda pair: pair[0].bound_tok_s)
    reasons = []
    for cell_share, row in lowest.values():
        text = f"{row.name}: {cell_share.sentence}{f': {WORDS[cell_share.word]}' if cell_share.word else ''}"
        if cell_share.awq_tok_s is not None and cell_share.word in ("normal", "at-limit"):
            text += f". 4-bit weights (AWQ) allow {figures(cell_share.awq_tok_s)} tok/s"
        values = {"row": row.name, "share": cell_share.share, "word": cell_share.word, "of_tok_s": cell_share.of_tok_s}
        speeds = {"bound_tok_s": cell_share.bound_tok_s, "measured_tok_s": cell_share.measured_tok_s}
        reasons.append(because("hardware_share", text, **values, **speeds))
    return reasons
