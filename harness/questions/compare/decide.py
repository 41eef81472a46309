"""Compares groups of runs. The first group is the baseline."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, RunError
from harness.base.measured import Answers
from harness.base.reason import Reason, because, sentences
from harness.base.units import percent
from harness.base.versions import DEFINITIONS
from harness.numbers import comparable
from harness.numbers.checks import compared_metrics, evaluate
from harness.numbers.comparable import collect_facts, find_differences, refuse_unlike
from harness.numbers.comparison import CheckResult, Comparison, Verdict
from harness.numbers.gate import with_gate
from harness.numbers.power_settings import power_note
from harness.numbers.summary import Reference, Row, Summary
from harness.numbers.verdicts import (
    ComparedSides,
    Measured,
    comparison_metrics,
    decide_verdicts,
    definition_difference,
    pair_by_metric,
)
from harness.questions.compare.equal_runs import EqualRuns, RowKey, variation_source
from harness.questions.crossover.decide import Side, speculation_answers
from harness.records.manifest import Run, UnlikeError

_SHOWN_ROWS = 4  # of a side, in a message


class RunGroup(Side):
    """A group of runs."""

    def row_in_runs(self, row: RowKey) -> list[Row]:
        return [summary_row for summary in self.summaries for summary_row in summary.rows if summary_row.key == row]

    def measured(self, row: RowKey, name: str) -> Measured:
        return Measured(
            name=name,
            load=self.runs[0].scenario.loads[row[1]],
            rows=self.row_in_runs(row),
            cells=[{cell.id: cell for cell in summary.cells} for summary in self.summaries],
        )

    def answers(self, row: RowKey) -> list[Answers]:
        """The quality of a row's answers in each run that checked them."""
        return [
            summary_row.pooled.answers
            for summary_row in self.row_in_runs(row)
            if summary_row.pooled.answers is not None
        ]

    def common_rows(self) -> list[RowKey]:
        """Rows (server, load) that every run of the group has."""
        first, *others = [[row.key for row in summary.rows] for summary in self.summaries]
        return [row for row in first if all(row in other for other in others)]


class ComparedRow(NamedTuple):
    """A row of a side, and the same row of the baseline."""

    row: RowKey
    number: int  # of the side; the baseline has 0
    side: Measured
    base: Measured

    def pairs(self, equal: EqualRuns, metrics: Sequence[str] | None = None) -> Iterator[ComparedSides]:
        """The comparisons by each metric, by default those of verdicts."""
        earlier = equal.variation(self.row, [(0, self.base), (self.number, self.side)])
        return pair_by_metric(self.side, self.base, within_run=False, earlier=earlier, metrics=metrics)

    def refuse_other_definitions(self) -> None:
        """Raise UnlikeError if the two sides define a compared metric differently."""
        for metric in comparison_metrics(self.side, self.base):
            if (conflict := definition_difference(self.side, self.base, metric)) is not None:
                raise UnlikeError(conflict, next_step="Compare runs of one tool, or measure both with `harness run`.")


def comparable_rows(
    sides: Sequence[RunGroup], about: str | None, *, with_sides: bool
) -> tuple[list[RowKey], list[ComparedRow]]:
    """The rows that all sides have, and each of each other side with that of the first. `with_sides`: named with it.

    Raises HarnessError for runs that have none in common, that are given twice, or that differ in more than `about`.
    """
    rows = _common_rows(sides)
    all_runs = [run for side in sides for run in side.runs]
    refuse_repeated(all_runs)
    compared = _compared_rows(sides, rows, with_sides=with_sides)
    for compared_row in compared:
        compared_row.refuse_other_definitions()
    refuse_unlike(all_runs, rows, [number for number, side in enumerate(sides) for _ in side.runs], about)
    return rows, compared


def compare_sides(
    sides: Sequence[RunGroup],
    rows: Sequence[RowKey],
    compared: Sequence[ComparedRow],
    equal: EqualRuns,
    checks: Sequence[str],
    *,
    provisional: bool,
    tolerance: float,
) -> Comparison:
    """The comparison of sides by their `comparable_rows`, without that of their answers."""
    all_runs = [run for side in sides for run in side.runs]
    pairs = [pair for compared_row in compared for pair in compared_row.pairs(equal)]
    comparison = decide_verdicts(pairs, variation_source(pairs, equal, all_runs[0].server_machine.name))
    verdicts = [msgspec.structs.replace(verdict, baseline=sides[0].name) for verdict in comparison.verdicts]
    check_results = []
    for number, side in enumerate(sides[1:], 1):
        own = [compared_row for compared_row in compared if compared_row.number == number]
        results = _evaluate_checks(checks, (sides[0], side), own, comparison, equal, provisional=provisional)
        several = len(sides) > 2
        check_results += [_named_for_side(result, side) for result in results] if several else results
    return msgspec.structs.replace(
        comparison,
        verdicts=[with_gate(verdict, tolerance, provisional=provisional) for verdict in verdicts],
        simulated=any(run.simulated for run in all_runs),
        sides=[side.name for side in sides],
        answers=speculation_answers(sides[0], sides[1:]),
        differences=find_differences([collect_facts(side.runs[0], rows) for side in sides]),
        checks=check_results,
        notes=list(_notes(sides, rows)),
    )


def _row_names(side: RunGroup) -> str:
    """The rows of a side, or that its own runs have none in common."""
    names = [" / ".join(row) for row in side.common_rows()]
    more = f" and {len(names) - _SHOWN_ROWS} more" if len(names) > _SHOWN_ROWS else ""
    return f"{', '.join(names[:_SHOWN_ROWS])}{more}" if names else "none that all of them have"


def _common_rows(sides: Sequence[RunGroup]) -> list[RowKey]:
    """The rows that all sides have. Raises HarnessError without any."""
    first, *others = [side.common_rows() for side in sides]
    rows = [row for row in first if all(row in other for other in others)]
    if not rows:
        shown = "; ".join(f"{', '.join(run.id for run in side.runs)} has {_row_names(side)}" for side in sides)
        raise HarnessError(
            f"the runs have no row in common, as SERVER / LOAD: {shown}",
            next_step="Give servers and loads that are to be compared the same names in both scenarios.",
        )
    return rows


def _compared_rows(sides: Sequence[RunGroup], rows: Sequence[RowKey], *, with_sides: bool) -> list[ComparedRow]:
    """Each row of each other side with that of the baseline. `with_sides`: its name has the side."""
    base, *others = sides
    compared = []
    for number, side in enumerate(others, 1):
        for row in rows:
            name = " / ".join(row)
            own = side.measured(row, f"{name} ({side.name})" if with_sides else name)
            compared.append(ComparedRow(row, number, own, base.measured(row, f"{name} ({base.name})")))
    return compared


def check_ratios(
    checks: Sequence[str], sides: tuple[RunGroup, RunGroup], rows: Sequence[RowKey], equal: EqualRuns, number: int = 1
) -> list[Verdict]:
    """The verdicts on a side, the second, by each metric that a check compares. `number`: of this side in `equal`."""
    base, side = sides
    metrics = compared_metrics(checks)
    compared = [
        ComparedRow(row, number, side.measured(row, " / ".join(row)), base.measured(row, base.name)) for row in rows
    ]
    return decide_verdicts([pair for compared_row in compared for pair in compared_row.pairs(equal, metrics)]).verdicts


def _notes(sides: Sequence[RunGroup], rows: Sequence[RowKey]) -> Iterator[Reason]:
    """Notes on imported runs, power settings, versions of an engine, sizes of KV caches, and the quality of answers."""
    if unchecked := [run.id for side in sides for run in side.runs if run.status == "unchecked"]:
        text = "NOT CHECKED: nothing shows whether the load generator kept up and the server stayed up in the imported "
        yield because("runs_unchecked", f"{text}{', '.join(unchecked)}", runs=unchecked)
    if (power := power_note([run for side in sides for run in side.runs])) is not None:
        yield power
    for server in dict.fromkeys(server for server, _ in rows):
        sizes, versions = {}, defaultdict[str, dict[str, str]](dict)
        for side in sides:
            for run in side.runs:
                for name, version in comparable.server_versions(run, server).items():
                    versions[name][side.name] = version
            cells = [cell.served_by for run in side.runs for cell in run.served if cell.server == server]
            sizes[side.name] = comparable.median_measurements(cells).get("startup.kv_cache_tokens")
        if (note := comparable.kv_cache_note(sizes, server=server)) is not None:
            yield note
        for engine, by_side in versions.items():
            if len(set(by_side.values())) > 1:
                named = ", ".join(f"{side} {version}" for side, version in by_side.items())
                text = f"{server}: different versions of {engine} ({named}), so the comparison includes what changed "
                yield because("engine_versions", f"{text}between them", server=server, engine=engine, versions=by_side)
    base, *others = sides
    for side, row in itertools.product(others, rows):
        names = [f"{' / '.join(row)} ({named.name})" for named in (side, base)]
        if (note := answer_difference(names[0], side.answers(row), names[1], base.answers(row))) is not None:
            yield note


def answer_difference(
    side: str, side_answers: Sequence[Answers], baseline: str, baseline_answers: Sequence[Answers]
) -> Reason | None:
    """A note that the answers of two sides, each of one or more runs, differ in quality; None where they do not."""
    differing: dict[str, list[list[int]]] = {}
    for part, whole in (("valid", "checked"), ("right", "labelled")):
        (count, total), (base_count, base_total) = counts = [
            [sum(getattr(answers, name) or 0 for answers in runs) for name in (part, whole)]
            for runs in (side_answers, baseline_answers)
        ]
        if total and base_total and count * base_total != base_count * total:
            differing[part] = counts
    if not differing:
        return None
    parts = []
    for part, counts in differing.items():
        shares = " and ".join(f"{number:,} of {total:,} ({percent(number / total, 1)})" for number, total in counts)
        parts.append(f"{part} are {shares}")
    text = (
        f"the answers of {side} and {baseline} are not of equal quality: {'; '.join(parts)}; speed alone does not say "
    )
    text += "which of the two is better"
    return because("answers_differ", text, side=side, baseline=baseline, **differing)


def refuse_repeated(runs: Sequence[Run]) -> None:
    seen: set[tuple[str, float]] = set()
    for run in runs:
        if (run.id, run.started_wall_s) in seen:
            raise HarnessError(
                f"{run.id}: this run is given twice; a run is not compared with itself or with its copy",
                next_step="Give another run; `harness list runs` lists them.",
            )
        seen.add((run.id, run.started_wall_s))


def _evaluate_checks(
    checks: Sequence[str],
    sides: tuple[RunGroup, RunGroup],
    compared: Sequence[ComparedRow],
    comparison: Comparison,
    equal: EqualRuns,
    *,
    provisional: bool,
) -> list[CheckResult]:
    """The checks of a side, the second, whose rows are `compared`, against the first. In checks a row has no side."""
    base, side = sides
    names = {compared_row.side.name: " / ".join(compared_row.row) for compared_row in compared}
    rows = [compared_row.row for compared_row in compared]
    own = [
        msgspec.structs.replace(verdict, side=names[verdict.side])
        for verdict in comparison.verdicts
        if verdict.side in names
    ]
    verdicts, ratios = (
        [msgspec.structs.replace(verdict, provisional=verdict.provisional and not provisional) for verdict in decided]
        for decided in (own, check_ratios(checks, sides, rows, equal, compared[0].number))
    )
    side_rows, base_rows = ([row for row in group.summaries[0].rows if row.key in rows] for group in (side, base))
    reference = Reference(definitions=DEFINITIONS, run=base.runs[0].id, rows=base_rows, ratios=ratios)
    return evaluate(checks, side_rows, msgspec.structs.replace(comparison, verdicts=verdicts), reference)


def _named_for_side(result: CheckResult, side: RunGroup) -> CheckResult:
    return msgspec.structs.replace(result, check=f"{result.check} ({side.name})")


def refuse_invalid(folder: PurePath, run: Run, summary: Summary | None, purpose: str) -> None:
    """Raise RunError unless the run in `folder` is VALID, or an import without problems. `purpose`: "is compared".

    Without a summary the manifest decides.
    """
    if run.status in ("valid", "unchecked") and (summary is None or summary.valid is not False):
        return
    reasons = (summary.reasons if summary is not None else []) or run.reasons
    lines = sentences(reasons or [because("run_status", f"it is {run.status}", status=run.status)])
    raise RunError(
        f"{run.id}: only a VALID run {purpose}: {lines[0]}",
        next_step=f"`{command_line('harness', 'report', folder)}` shows all reasons.",
        detail="\n".join(lines) if len(lines) > 1 else "",
    )


def refuse_search(folder: PurePath, run: Run, purpose: str) -> None:
    """Raise HarnessError for a search: its rows are short probes and no results. `purpose`: such as "has a card"."""
    if run.kind == "search":
        raise HarnessError(
            f"{run.id}: its rows are probes of a search, and only a measurement {purpose}",
            next_step=f"`{command_line('harness', 'report', folder)}` shows its answer.",
        )


def comparison_refusal(base: Run, run: Run, rows: Sequence[RowKey], about: str | None) -> Reason | None:
    """Why the two are not compared. Equal runs are compared even if they do not differ in `about`."""
    reason = None
    for allowed in dict.fromkeys([None, about]):
        try:
            refuse_unlike([base, run], rows, [0, 1], allowed)
            return None
        except UnlikeError as error:
            reason = error.reason
    return reason
