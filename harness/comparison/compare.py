"""Runs against runs: groups of run directories, the first of which is the baseline."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.analysis.summarize import summary_of
from harness.analysis.validity import answer_difference
from harness.errors import HarnessError, RunError
from harness.files import pretty_json, replace_file
from harness.judge import comparable
from harness.judge.checks import evaluate
from harness.judge.comparable import collect_facts, find_differences, refuse_unlike
from harness.judge.noise_floors import known_noise
from harness.judge.verdicts import Measured, Noise, comparison_metrics, decide_verdicts, number_fields, pair_by_metric
from harness.reasons import sentences
from harness.rundir.manifest import DEFINITIONS, Run, UnlikeError, read_run, refuse_other_definitions
from harness.scenario.check_syntax import parse_check
from harness.summary import Answers, CheckResult, Comparison, Reason, Reference, Row, Summary, because


class _Side(Struct, frozen=True):
    name: str
    runs: list[Run]
    summaries: list[Summary]

    def of(self, row: tuple[str, str]) -> list[Row]:
        """A row in each run of the group."""
        return [found for summary in self.summaries for found in summary.rows if found.key == row]

    def measured(self, row: tuple[str, str], name: str) -> Measured:
        """A row as each run of the group measured it."""
        return Measured(
            name=name,
            load_name=row[1],
            load=self.runs[0].scenario.loads[row[1]],
            rows=self.of(row),
            cells=[{cell.id: cell for cell in summary.cells} for summary in self.summaries],
        )

    def answers(self, row: tuple[str, str]) -> list[Answers | None]:
        """What the answers of a row were worth, run by run."""
        return [found.pooled.answers for found in self.of(row)]

    def rows(self) -> list[tuple[str, str]]:
        """Rows that every run of the group has."""
        first, *others = [[row.key for row in summary.rows] for summary in self.summaries]
        return [row for row in first if all(row in other for other in others)]


def compare_runs(
    groups: Sequence[Sequence[Path]],
    *,
    about: str | None = None,
    noise: Noise | None = None,
    results: Path | None = None,
    checks: Sequence[str] = (),
) -> Comparison:
    """Each group of run directories against the first, row by row of the same server and load.

    `about` is the one manifest key in which the groups may differ. Raises HarnessError for runs that are not alike
    or have no row in common, RunError for a run that is not VALID.

    The sample is the run: how far equal runs differ is known from several runs a side, from `noise`, or from what
    `harness noise` stored below `results`; else the verdict is inconclusive.
    `checks` are held against the rows of every side but the first, which is their baseline.
    """
    if len(groups) < 2 or not all(groups):
        raise HarnessError(
            "a comparison needs a baseline and at least one other run", next_step="harness compare BASELINE OTHER"
        )
    _refuse_checks(groups, checks)
    sides = [_side(group, checks) for group in groups]
    rows = [row for row in sides[0].rows() if all(row in side.rows() for side in sides[1:])]
    if not rows:
        raise HarnessError(
            "the runs have no row in common: none of their servers and loads have the same names",
            next_step="Give servers and loads that are to be compared the same names in both scenarios.",
        )
    runs = [run for side in sides for run in side.runs]
    _refuse_repeated(runs)
    several = len(sides) > 2
    compared = [
        (
            side.measured(row, f"{' / '.join(row)} ({side.name})" if several else " / ".join(row)),
            sides[0].measured(row, f"{' / '.join(row)} ({sides[0].name})"),
        )
        for side in sides[1:]
        for row in rows
    ]
    for side, base in compared:
        for field in dict.fromkeys(
            field for metric in comparison_metrics(side, base) for field in number_fields(metric)
        ):
            refuse_other_definitions(runs, field, [side.rows[0].key])
    refuse_unlike(runs, rows, [number for number, side in enumerate(sides) for _ in side.runs], about)
    if noise is None and results is not None:
        noise = known_noise(runs, results)
    pairs = [pair for side, base in compared for pair in pair_by_metric(side, base, within_run=False)]
    return msgspec.structs.replace(
        decide_verdicts(pairs, noise),
        simulated=any(run.simulated for run in runs),
        sides=[side.name for side in sides],
        differences=find_differences([collect_facts(side.runs[0], rows) for side in sides]),
        checks=[result for side in sides[1:] for result in _checked(checks, side, sides[0], rows, several)],
        notes=list(_notes(sides, rows)),
    )


def _notes(sides: Sequence[_Side], rows: Sequence[tuple[str, str]]) -> Iterator[Reason]:
    """What to know of the sides: imports, KV caches of different sizes, answers of different quality."""
    if unchecked := [run.id for side in sides for run in side.runs if run.status == "unchecked"]:
        yield because("runs_unchecked", runs=unchecked)
    for server in dict.fromkeys(server for server, _ in rows):
        sizes = {}
        for side in sides:
            cells = [cell.served_by for run in side.runs for cell in run.served if cell.server == server]
            sizes[side.name] = comparable.median_measurements(cells).get("startup.kv_cache_tokens")
        if (note := comparable.kv_cache_note(sizes, server=server)) is not None:
            yield note
    base = sides[0]
    for side, row in itertools.product(sides[1:], rows):
        mine, other = (f"{' / '.join(row)} ({one.name})" for one in (side, base))
        if (note := answer_difference(mine, side.answers(row), other, base.answers(row))) is not None:
            yield note


def by_machine(folders: Sequence[Path]) -> list[list[Path]]:
    """Run directories grouped by the machine that they ran on, in the order given. Raises HarnessError for one."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        groups.setdefault(read_run(folder).machine.name, []).append(folder)
    if len(groups) < 2:
        raise HarnessError(
            f"all runs are of one machine, {next(iter(groups), 'none')}",
            next_step="Give runs of another one, too; `harness publish` files them so that they can be carried over.",
        )
    return list(groups.values())


def _refuse_repeated(runs: Sequence[Run]) -> None:
    seen: set[tuple[str, float]] = set()
    for run in runs:
        if (run.id, run.started_wall_s) in seen:
            raise HarnessError(
                f"{run.id}: this run is given twice; a run is not compared with itself or with its copy",
                next_step="Give another run; `harness runs` lists them.",
            )
        seen.add((run.id, run.started_wall_s))


def _refuse_checks(groups: Sequence[Sequence[Path]], checks: Sequence[str]) -> None:
    """Raise HarnessError for checks that have no meaning here: they are of one run's rows against another's."""
    several = next((group for group in groups if len(group) > 1), None)
    if checks and several is not None:
        raise HarnessError(
            f"--check: a check is of one run against another, and {several[0].name} is one of {len(several)} a side",
            next_step="Compare single runs with checks, groups of runs by their verdicts.",
        )
    for text in checks:
        with contextlib.suppress(ValueError):  # what cannot be read is a check that fails, and says why
            if parse_check(text).metric == "speedup":
                raise HarnessError(
                    f"--check '{text}': here the verdicts judge the speedup",
                    next_step="Write a margin: `output_tok_s >= 0.97 * baseline`, or `wall <= 1.03 * baseline`.",
                )


def _checked(
    checks: Sequence[str], side: _Side, base: _Side, rows: Sequence[tuple[str, str]], several: bool
) -> list[CheckResult]:
    mine, theirs = ([row for row in one.summaries[0].rows if row.key in rows] for one in (side, base))
    found = evaluate(checks, mine, None, Reference(run=base.runs[0].id, rows=theirs))
    return [msgspec.structs.replace(one, check=f"{one.check} ({side.name})") for one in found] if several else found


def _side(folders: Sequence[Path], checks: Sequence[str]) -> _Side:
    runs, summaries = [], []
    for folder in folders:
        run, summary = read_run(folder), summary_of(folder, checks)
        refuse_invalid(run, summary, "is compared")
        runs.append(run)
        summaries.append(summary)
    name = runs[0].id if len(runs) == 1 else f"{runs[0].id} and {len(runs) - 1} more"
    return _Side(name, runs, summaries)


def refuse_invalid(run: Run, summary: Summary | None, purpose: str) -> None:
    """Raise RunError unless a run is VALID, or an import without a fault. `purpose`: such as "is compared".

    Without a summary its manifest decides.
    """
    if run.status in ("valid", "unchecked") and (summary is None or summary.valid is not False):
        return
    found = (summary.reasons if summary is not None else []) or run.reasons
    reasons = sentences(found or [because("run_status", status=run.status)])
    raise RunError(
        f"{run.id}: only a VALID run {purpose}: {reasons[0]}",
        next_step=f"harness report {run.id} shows all reasons.",
        detail="\n".join(reasons) if len(reasons) > 1 else "",
    )


def usable_baseline(folder: Path) -> Run:
    """The manifest of a run that may be a baseline. Raises RunError for one that is INVALID or has not ended."""
    run = read_run(folder)
    refuse_invalid(run, None, "is a baseline")
    return run


def reference_to(folder: Path, run: Run, *, about: str | None = None, checks: Sequence[str] = ()) -> Reference:
    """The run in `folder` as the baseline of `run`, judged by the SLOs of both the scenario's and further checks.

    `about` is the one manifest key in which the two may differ. Where they differ in another the reference says so,
    and every check against it fails with that reason. Raises HarnessError for a folder that is no VALID run.
    """
    base = usable_baseline(folder)
    summary = summary_of(folder, [*run.scenario.checks, *checks])
    refuse_invalid(base, summary, "is a baseline")
    known = {row.key for row in summary.rows}
    rows = [(server, load) for server in run.scenario.servers for load in run.scenario.loads if (server, load) in known]
    refused = _refused(base, run, rows, about)
    return Reference(run=base.id, rows=[] if refused else summary.rows, refused=refused)


def _refused(base: Run, run: Run, rows: Sequence[tuple[str, str]], about: str | None) -> Reason | None:
    """Why the two are not compared. That they do not differ in what the comparison is about is no reason here."""
    try:
        for metric in DEFINITIONS:
            refuse_other_definitions([base, run], metric, rows)
        refuse_unlike([base, run], rows, [0, 1], None)
    except UnlikeError as unlike:
        if about is None:
            return unlike.reason
        try:
            refuse_unlike([base, run], rows, [0, 1], about)
        except UnlikeError as error:
            return error.reason
    return None


def write_reference(folder: Path, reference: Reference) -> None:
    """Keep what a run was compared with in its directory, so that its summary follows from its own files."""
    replace_file(folder / "baseline.json", pretty_json(reference))
