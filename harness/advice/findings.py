"""Finds why a run is slower than it could be: the rules of the topics, ranked by what they cost."""

from msgspec.structs import replace

from harness.advice import cache, queue, setup, speed
from harness.advice.rules import AdviceRule, RowFacts
from harness.analysis.summarize import Summarized, summarize_data
from harness.base.summary import RunFinding, Summary
from harness.records.run_data import RunData

MAX_FINDINGS = 5
RULES: tuple[AdviceRule, ...] = (*speed.RULES, *cache.RULES, *queue.RULES, *setup.RULES)


def find(data: RunData, summary: Summary | None = None) -> list[RunFinding]:
    """Return at most MAX_FINDINGS findings about a run, the worst first. `summary`: of the run, where it is known.

    A finding of several rows is listed once, with the numbers of the row that it costs most.
    """
    summary = summary or summarize_data(data).summary
    found: dict[str, list[RunFinding]] = {}
    for row in summary.rows:
        facts = RowFacts(data, summary, row)
        of_row = [rule.finding(facts) for rule in RULES] if row.failed is None and row.pooled.succeeded else []
        for one in filter(None, of_row):
            found.setdefault(one.code, []).append(one)
    ranked = []
    for of_code in found.values():
        of_code.sort(key=lambda one: -one.cost)
        ranked.append(replace(of_code[0], rows=[name for one in of_code for name in one.rows]))
    return sorted(ranked, key=lambda one: -one.cost)[:MAX_FINDINGS]


def with_findings(made: Summarized) -> Summarized:
    """The same with the findings in the summary."""
    return made._replace(summary=replace(made.summary, findings=find(made.data, made.summary)))
