"""Compares groups of run directories. The first group is the baseline."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, RunError
from harness.base.summary import (
    DEFINITIONS,
    TOLERANCE,
    Answers,
    CheckResult,
    Comparison,
    Reason,
    Reference,
    Row,
    Summary,
    Verdict,
    because,
    sentences,
)
from harness.base.units import percent
from harness.numbers import comparable
from harness.numbers.checks import compared_metrics, evaluate
from harness.numbers.comparable import collect_facts, find_differences, refuse_unlike
from harness.numbers.gate import with_gate
from harness.numbers.summarize import summary_of
from harness.numbers.verdicts import (
    ComparedSides,
    Measured,
    comparison_metrics,
    decide_verdicts,
    definition_difference,
    pair_by_metric,
)
from harness.questions.compare.equal_runs import EqualRuns, RowKey, find_equal_runs, variation_source
from harness.questions.crossover.decide import Side, speculation_answers
from harness.questions.same_answers.decide import same_answers_of_runs
from harness.records.manifest import Run, UnlikeError, read_run

_SHOWN_ROWS = 4  # of a side, in a message


class _Side(Side):
    """A group of runs."""

    def row_in_runs(self, row: RowKey) -> list[Row]:
        return [found for summary in self.summaries for found in summary.rows if found.key == row]

    def measured(self, row: RowKey, name: str) -> Measured:
        return Measured(
            name=name,
            load=self.runs[0].scenario.loads[row[1]],
            rows=self.row_in_runs(row),
            cells=[{cell.id: cell for cell in summary.cells} for summary in self.summaries],
        )

    def answers(self, row: RowKey) -> list[Answers]:
        """The quality of a row's answers in each run that checked them."""
        return [found.pooled.answers for found in self.row_in_runs(row) if found.pooled.answers is not None]

    def common_rows(self) -> list[RowKey]:
        """Rows (server, load) that every run of the group has."""
        first, *others = [[row.key for row in summary.rows] for summary in self.summaries]
        return [row for row in first if all(row in other for other in others)]


class _ComparedRow(NamedTuple):
    """A row of a side, and the same row of the baseline."""

    row: RowKey
    number: int  # of the side; the baseline has 0
    side: Measured
    base: Measured

    def pairs(self, equal: EqualRuns, metrics: Sequence[str] | None = None) -> Iterator[ComparedSides]:
        """The comparisons by each metric, by default those of verdicts."""
        known = equal.known(self.row, [(0, self.base), (self.number, self.side)])
        return pair_by_metric(self.side, self.base, within_run=False, known=known, metrics=metrics)

    def refuse_other_definitions(self) -> None:
        """Raise UnlikeError if the two sides define a compared metric differently."""
        for metric in comparison_metrics(self.side, self.base):
            if (conflict := definition_difference(self.side, self.base, metric)) is not None:
                raise UnlikeError(conflict, next_step="Compare runs of one tool, or measure both with `harness run`.")


def compare_runs(
    groups: Sequence[Sequence[Path]],
    *,
    about: str | None = None,
    runs: Path | None = None,
    results: Path | None = None,
    checks: Sequence[str] = (),
    provisional: bool = False,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare each group of run directories with the first, row by row of the same server and load.

    The sample is the run. The variation between equal runs is assumed until it is known: from several runs a side, from
    earlier equal runs in the folders `runs` and `results`.
    `tolerance`: the slowdown that fails, 0.1 for 10 %; `provisional`: whether a provisional one does, see `with_gate`.
    `about` is the one manifest key in which the groups may differ. `checks` are evaluated for the rows of every other
    group, with the first group as their baseline.

    Raises HarnessError for runs that differ in more or have no row in common, and RunError for a run that is not VALID.
    """
    if len(groups) < 2 or not all(groups):
        raise HarnessError(
            "a comparison needs a baseline and at least one other run", next_step="harness compare BASELINE OTHER"
        )
    _refuse_checks(groups, checks)
    sides = [_read_side(group, checks) for group in groups]
    if is_across := about == "machine" and len({side.runs[0].machine.name for side in sides}) == len(sides):
        sides = [side._replace(name=side.runs[0].machine.name) for side in sides]
    rows = _common_rows(sides)
    all_runs = [run for side in sides for run in side.runs]
    _refuse_repeated(all_runs)
    compared = _compared_rows(sides, rows, with_sides=is_across or len(sides) > 2)
    for each in compared:
        each.refuse_other_definitions()
    refuse_unlike(all_runs, rows, [number for number, side in enumerate(sides) for _ in side.runs], about)
    equal = find_equal_runs([side.runs for side in sides], rows, runs, results)
    pairs = [pair for each in compared for pair in each.pairs(equal)]
    comparison = decide_verdicts(pairs, variation_source(pairs, equal, all_runs[0].machine.name))
    verdicts = [msgspec.structs.replace(each, baseline=sides[0].name) for each in comparison.verdicts]
    results_of_checks = []
    for number, side in enumerate(sides[1:], 1):
        own = [each for each in compared if each.number == number]
        found = _evaluate_checks(checks, (sides[0], side), own, comparison, equal, provisional=provisional)
        several = len(sides) > 2
        results_of_checks += [_of_side(result, side) for result in found] if several else found
    return msgspec.structs.replace(
        comparison,
        verdicts=[with_gate(verdict, tolerance, provisional=provisional) for verdict in verdicts],
        simulated=any(run.simulated for run in all_runs),
        sides=[side.name for side in sides],
        answers=speculation_answers(sides[0], sides[1:]),
        differences=find_differences([collect_facts(side.runs[0], rows) for side in sides]),
        same_answers=list(
            same_answers_of_runs([(side.name, group) for side, group in zip(sides, groups, strict=True)])
        ),
        checks=results_of_checks,
        notes=list(_notes(sides, rows)),
    )


def _row_names(side: _Side) -> str:
    """The rows of a side, or that its own runs have none in common."""
    names = [" / ".join(row) for row in side.common_rows()]
    more = f" and {len(names) - _SHOWN_ROWS} more" if len(names) > _SHOWN_ROWS else ""
    return f"{', '.join(names[:_SHOWN_ROWS])}{more}" if names else "none that all of them have"


def _common_rows(sides: Sequence[_Side]) -> list[RowKey]:
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


def _compared_rows(sides: Sequence[_Side], rows: Sequence[RowKey], *, with_sides: bool) -> list[_ComparedRow]:
    """Each row of each other side with that of the baseline. `with_sides`: its name has the side."""
    base, *others = sides
    compared = []
    for number, side in enumerate(others, 1):
        for row in rows:
            name = " / ".join(row)
            own = side.measured(row, f"{name} ({side.name})" if with_sides else name)
            compared.append(_ComparedRow(row, number, own, base.measured(row, f"{name} ({base.name})")))
    return compared


def _check_ratios(
    checks: Sequence[str], sides: tuple[_Side, _Side], rows: Sequence[RowKey], equal: EqualRuns, number: int = 1
) -> list[Verdict]:
    """The verdicts on a side, the second, by each metric that a check compares. `number`: of this side in `equal`."""
    base, side = sides
    metrics = compared_metrics(checks)
    compared = [
        _ComparedRow(row, number, side.measured(row, " / ".join(row)), base.measured(row, base.name)) for row in rows
    ]
    return decide_verdicts([pair for each in compared for pair in each.pairs(equal, metrics)]).verdicts


def _notes(sides: Sequence[_Side], rows: Sequence[RowKey]) -> Iterator[Reason]:
    """Notes on imported runs, versions of an engine, sizes of KV caches, and the quality of answers."""
    if unchecked := [run.id for side in sides for run in side.runs if run.status == "unchecked"]:
        text = "NOT CHECKED: nothing shows whether the load generator kept up and the server stayed up in the imported "
        yield because("runs_unchecked", f"{text}{', '.join(unchecked)}", runs=unchecked)
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
        for engine, known in versions.items():
            if len(set(known.values())) > 1:
                named = ", ".join(f"{side} {version}" for side, version in known.items())
                text = f"{server}: different versions of {engine} ({named}), so the comparison includes what changed "
                yield because("engine_versions", f"{text}between them", server=server, engine=engine, versions=known)
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


def group_by_machine(folders: Sequence[Path]) -> list[list[Path]]:
    """Run directories grouped by machine, in the given order. Raises HarnessError for a single machine."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        groups.setdefault(read_run(folder).machine.name, []).append(folder)
    if len(groups) < 2:
        raise HarnessError(
            f"all runs are of one machine, {next(iter(groups), 'none')}",
            next_step="Give runs of another one, too; `harness results add` files runs to carry them over.",
        )
    return list(groups.values())


def _refuse_repeated(runs: Sequence[Run]) -> None:
    seen: set[tuple[str, float]] = set()
    for run in runs:
        if (run.id, run.started_wall_s) in seen:
            raise HarnessError(
                f"{run.id}: this run is given twice; a run is not compared with itself or with its copy",
                next_step="Give another run; `harness list runs` lists them.",
            )
        seen.add((run.id, run.started_wall_s))


def _refuse_checks(groups: Sequence[Sequence[Path]], checks: Sequence[str]) -> None:
    """Raise HarnessError for checks of several runs a side."""
    several = next((group for group in groups if len(group) > 1), None)
    if checks and several is not None:
        raise HarnessError(
            f"--check: a check is of one run against another, and {several[0].name} is one of {len(several)} a side",
            next_step="Compare single runs with checks, groups of runs by their verdicts.",
        )


def _evaluate_checks(
    checks: Sequence[str],
    sides: tuple[_Side, _Side],
    compared: Sequence[_ComparedRow],
    comparison: Comparison,
    equal: EqualRuns,
    *,
    provisional: bool,
) -> list[CheckResult]:
    """The checks of a side, the second, whose rows are `compared`, against the first. In checks a row has no side."""
    base, side = sides
    names = {each.side.name: " / ".join(each.row) for each in compared}
    rows = [each.row for each in compared]
    own = [msgspec.structs.replace(each, side=names[each.side]) for each in comparison.verdicts if each.side in names]
    verdicts, ratios = (
        [msgspec.structs.replace(each, provisional=each.provisional and not provisional) for each in found]
        for found in (own, _check_ratios(checks, sides, rows, equal, compared[0].number))
    )
    side_rows, base_rows = ([row for row in group.summaries[0].rows if row.key in rows] for group in (side, base))
    reference = Reference(definitions=DEFINITIONS, run=base.runs[0].id, rows=base_rows, ratios=ratios)
    return evaluate(checks, side_rows, msgspec.structs.replace(comparison, verdicts=verdicts), reference)


def _of_side(result: CheckResult, side: _Side) -> CheckResult:
    return msgspec.structs.replace(result, check=f"{result.check} ({side.name})")


def _read_side(folders: Sequence[Path], checks: Sequence[str]) -> _Side:
    runs, summaries = [], []
    for folder in folders:
        run, summary = read_run(folder), summary_of(folder, checks)
        refuse_invalid(run, summary, "is compared")
        runs.append(run)
        summaries.append(summary)
    name = runs[0].id if len(runs) == 1 else f"{runs[0].id} and {len(runs) - 1} more"
    return _Side(name, runs, summaries)


def refuse_invalid(run: Run, summary: Summary | None, purpose: str) -> None:
    """Raise RunError unless a run is VALID, or an import without problems. `purpose`: such as "is compared".

    Without a summary the manifest decides.
    """
    if run.status in ("valid", "unchecked") and (summary is None or summary.valid is not False):
        return
    reasons = (summary.reasons if summary is not None else []) or run.reasons
    lines = sentences(reasons or [because("run_status", f"it is {run.status}", status=run.status)])
    raise RunError(
        f"{run.id}: only a VALID run {purpose}: {lines[0]}",
        next_step=f"`{command_line('harness', 'report', run.id)}` shows all reasons.",
        detail="\n".join(lines) if len(lines) > 1 else "",
    )


def read_baseline(folder: Path) -> Run:
    """The manifest of a baseline run. Raises RunError for one that is INVALID or has not ended."""
    run = read_run(folder)
    refuse_invalid(run, None, "is a baseline")
    return run


def make_reference(
    folder: Path,
    run: Run,
    run_summary: Summary,
    *,
    about: str | None = None,
    checks: Sequence[str] = (),
    runs: Path | None = None,
    results: Path | None = None,
) -> Reference:
    """Make the run in `folder` the baseline of `run`, for its scenario's checks and further `checks`.

    `about` is the one manifest key in which the two may differ. If they differ in another one, the reference has the
    reason, and every check against it fails with that reason. The ratios are those of `compare_runs` with the same
    `runs` and `results`. Raises HarnessError for a folder without a VALID run.
    """
    base = read_baseline(folder)
    _refuse_repeated([base, run])
    texts = list(dict.fromkeys([*run.scenario.checks, *checks]))
    summary = summary_of(folder, texts)
    refuse_invalid(base, summary, "is a baseline")
    known = {row.key for row in summary.rows}
    rows = [(server, load) for server in run.scenario.servers for load in run.scenario.loads if (server, load) in known]
    refused = _comparison_refusal(base, run, rows, about)
    if refused is not None:
        return Reference(run=base.id, refused=refused)
    reference = Reference(definitions=DEFINITIONS, run=base.id, rows=summary.rows)
    if not compared_metrics(texts):
        return reference
    sides = _Side(base.id, [base], [summary]), _Side(run.id, [run], [run_summary])
    rows = [row for row in rows if all(row in side.common_rows() for side in sides)]
    equal = find_equal_runs([side.runs for side in sides], rows, runs, results)
    return msgspec.structs.replace(reference, ratios=_check_ratios(texts, sides, rows, equal))


def _comparison_refusal(base: Run, run: Run, rows: Sequence[RowKey], about: str | None) -> Reason | None:
    """Why the two are not compared. Equal runs are compared even if they do not differ in `about`."""
    reason = None
    for allowed in dict.fromkeys([None, about]):
        try:
            refuse_unlike([base, run], rows, [0, 1], allowed)
            return None
        except UnlikeError as error:
            reason = error.reason
    return reason
