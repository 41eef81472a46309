"""The public API: load a run, summarize it, compare runs, and get its records as a table."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from harness.base.errors import HarnessError
from harness.base.errors import RunError as RunError  # a public name
from harness.numbers.comparison import TOLERANCE, Comparison
from harness.numbers.summarize import has_only_summary, read_summary, with_checks
from harness.numbers.summary import Summary
from harness.questions.capacity import what_if
from harness.questions.capacity.record import read_capacity
from harness.questions.compare.sides import compare_runs, make_reference
from harness.questions.findings.decide import with_findings
from harness.questions.joint import analyse
from harness.questions.plan.decide import Forecast, forecast
from harness.records import run_data
from harness.records.manifest import Run, read_run
from harness.records.records import Request, read_requests
from harness.report.export import arrow_table
from harness.report.prompt import notebook_html, prompt_text
from harness.scenario.check_syntax import check_problem

if TYPE_CHECKING:
    import pandas
    import pyarrow

# The type of a summary knows no pages: it is one for those who use the API.
Summary.__repr__ = prompt_text  # type: ignore[assignment, method-assign]
Summary._repr_html_ = notebook_html  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LoadedRun:
    """A run directory and its manifest."""

    path: Path
    manifest: Run  # run.json

    @property
    def id(self) -> str:
        return self.manifest.id

    def requests(self) -> Iterator[Request]:
        """Read the records one by one, in the order of requests.jsonl, warm-up included. Torn lines are skipped."""
        return read_requests(self.path / "requests.jsonl")

    def to_arrow(self) -> "pyarrow.Table":
        """Return the records as a table: one row per request, the columns of `harness export`.

        Raises HarnessError for a run without records, and where the extra `notebook` is not installed.
        """
        return arrow_table(self.path)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the records as a data frame; see `to_arrow`."""
        table = self.to_arrow()
        try:
            return table.to_pandas()
        except ImportError:
            raise HarnessError(
                "a data frame needs the package pandas, which is not installed",
                next_step="pip install 'amd-llm-load[notebook]'",
            ) from None


AnyRun: TypeAlias = LoadedRun | str | os.PathLike[str]


def load_run(path: str | os.PathLike[str]) -> LoadedRun:
    """Read the manifest of a run directory. Raises HarnessError that says what is wrong with it."""
    folder = Path(path)
    return LoadedRun(folder, read_run(folder))


def summarize(run: AnyRun, *, checks: Sequence[str] = (), baseline: AnyRun | None = None) -> Summary:
    """Compute all numbers, verdicts and checks of a run from its records. Nothing is written.

    Of a filed run without its records it is the stored summary. `checks`, such as "ttft_p95 <= 2s", are added to
    the scenario's; of a capacity search they are other SLOs, for which `what_if` answers. `baseline`: the run to which
    checks refer with `baseline`. Raises HarnessError for a run that cannot be read, a check that is wrong, and checks
    of a run without records; RunError for a baseline that is not VALID.
    """
    loaded = _loaded(run)
    if not checks and baseline is None and has_only_summary(loaded.path):
        return read_summary(loaded.path)
    capacity = read_capacity(loaded.path)
    _refuse_text(checks)
    own = checks if capacity is None else []
    _refuse_wrong(own, loaded.manifest)
    other_slos = [] if capacity is None else what_if.parse(checks, capacity)
    analysis = analyse(loaded.path, own)
    if baseline is not None:
        reference = make_reference(_loaded(baseline).path, loaded.manifest, analysis.summary, checks=own)
        analysis = with_checks(analysis, loaded.manifest, reference, own)
    analysis = with_findings(analysis)
    return analysis.summary if capacity is None else what_if.with_answers(analysis, capacity, other_slos)[0].summary


def compare(
    baseline: AnyRun | Sequence[AnyRun],
    *others: AnyRun | Sequence[AnyRun],
    about: str | None = None,
    runs: str | os.PathLike[str] | None = None,
    results: str | os.PathLike[str] | None = None,
    checks: Sequence[str] = (),
    provisional: bool = False,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare runs of the same work with a baseline: a ratio with its interval and a verdict for each row.

    Each side is a run or several equal runs. `about`: the only manifest key in which the sides may differ. `runs`,
    `results`: folders whose equal runs show how far equal runs differ. `tolerance`: the slowdown of the gate, 0.1 for
    10 %. `provisional`: whether a provisional one fails.

    Raises HarnessError for sides that are not comparable, and RunError for a run that is not VALID.
    """
    groups = [[side] if isinstance(side, LoadedRun | str | os.PathLike) else side for side in (baseline, *others)]
    loaded = [[_loaded(run) for run in group] for group in groups]
    for run in (run for group in loaded[1:] for run in group):  # the checks are for their rows
        _refuse_wrong(checks, run.manifest)
    return compare_runs(
        [[run.path for run in group] for group in loaded],
        about=about,
        runs=None if runs is None else Path(runs),
        results=None if results is None else Path(results),
        checks=checks,
        provisional=provisional,
        tolerance=tolerance,
    )


def plan(
    run: AnyRun,
    items: int,
    *,
    deadline_s: float | None = None,
    price_per_kwh: float | None = None,
) -> Forecast:
    """Predict time, energy and cost of `items` on the machine of a finished run, each with a 90 % interval.

    Raises HarnessError for a run that cannot be read, and RunError for one that allows no prediction.
    """
    return forecast(run_data.load(_loaded(run).path), items, deadline_s=deadline_s, price_per_kwh=price_per_kwh)


def _refuse_wrong(checks: Sequence[str], manifest: Run) -> None:
    _refuse_text(checks)
    for text in checks:
        if (problem := check_problem(text, manifest.scenario.servers, manifest.scenario.loads)) is not None:
            raise HarnessError(problem)


def _refuse_text(checks: Sequence[str]) -> None:
    if isinstance(checks, str):
        raise HarnessError(f"checks: a list is expected, got '{checks}'", next_step=f"Write checks=['{checks}'].")


def _loaded(run: AnyRun) -> LoadedRun:
    return run if isinstance(run, LoadedRun) else load_run(run)
