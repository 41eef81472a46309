"""What all questions do together: they add their answers to the numbers of a run.

Only the commands, the public API, and the rooms of a run's page and of filed results import this module.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from harness.numbers import validity
from harness.numbers.summarize import Summarized, has_only_summary, read_summary, summarize_with_counts
from harness.numbers.summary import Summary
from harness.questions import soak, startup, switching
from harness.questions.agents.agent_turns import turn_answers
from harness.questions.agents.replay import replay_answers
from harness.questions.crossover.decide import setting_answers
from harness.questions.findings.decide import with_findings
from harness.questions.mlperf_edge import edge_answers
from harness.questions.same_answers.decide import same_answers


def with_answers(analysis: Summarized) -> Summarized:
    """The summary with the answers of the questions that its run asks."""
    summary, data = analysis
    run = data.run
    is_valid = not validity.run_reasons(run, data.damaged, data.unknown_cells)
    answers, starts = [], []
    if is_valid and run.kind != "search":
        working = [row for row in summary.rows if row.failed is None]
        starts = startup.start_times(data, summary.cells)
        answers = startup.startup_answers(starts) or setting_answers(run, working, summary.cells)
        answers = [*answers, *switching.switching_answers(data, summary.cells)]
    added = replace(
        summary,
        answers=[*edge_answers(data), *answers]
        or [
            *turn_answers(summary.rows, run.scenario.loads),
            *replay_answers(summary.rows, run.scenario.loads),
        ],
        starts=starts,
        soaks=soak.soak_results(data),
        same_answers=same_answers(analysis) if is_valid else [],
    )
    return analysis._replace(summary=added)


def analyse(folder: Path, extra_checks: Sequence[str] = (), *, charted: bool = False) -> Summarized:
    """All that the records of a run say, without its findings: numbers, checks, verdicts and answers.

    Raises HarnessError when there is no readable manifest.
    """
    return with_answers(summarize_with_counts(folder, extra_checks, charted=charted))


def analyse_with_findings(folder: Path, extra_checks: Sequence[str] = ()) -> Summary:
    """The same with the findings, as a summary."""
    return with_findings(analyse(folder, extra_checks)).summary


def summary_of(folder: Path, checks: Sequence[str] = ()) -> Summary:
    """The summary by the formulas of this version; of a filed run without records, the stored summary."""
    return read_summary(folder) if has_only_summary(folder) else analyse(folder, checks).summary
