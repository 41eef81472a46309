"""Find runs, and list runs and scenarios."""

import datetime
import difflib
import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.analysis.summarize import read_summary
from harness.errors import HarnessError
from harness.paths import ROOT, SCENARIOS
from harness.process import owner_is_gone
from harness.reasons import sentence
from harness.rundir.manifest import read_run
from harness.scenario.file import load_scenario
from harness.summary import Reason

MAX_CHARS = 100  # of the reason why a run cannot be read


def find_run(given: Path, runs: Path) -> Path:
    """A run directory given by its path or by the id of a run below `runs`."""
    for folder in (given, runs / given):
        # `read_run` explains a run.json that is no regular file, or that this user may not read.
        if os.path.lexists(folder / "run.json"):
            return folder
    # Only a close one is named: a list of all runs would be long, and `harness runs` has it.
    close = difflib.get_close_matches(given.name, [path.parent.name for path in runs.glob("*/run.json")], n=1)
    raise HarnessError(
        f"{given}: neither a run directory nor the id of a run in {runs}"
        + (f"; did you mean '{close[0]}'?" if close else ""),
        next_step=f"`harness runs --runs {runs}` lists the runs.",
    )


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list. What an unreadable run.json does not say is None; `error` says why."""

    run: str
    error: str | None = None
    started_wall_s: float | None = None
    scenario: str | None = None
    cells: int | None = None
    planned: int | None = None
    status: str | None = None  # as in run.json; `killed`: it says `running`, and its process is gone
    client_limited: bool | None = None
    simulated: bool | None = None
    reasons: list[Reason] = []


def list_runs(runs: Path) -> list[RunLine]:
    """The runs below a folder, newest last. Raises HarnessError where it is no folder."""
    if runs.exists() and not runs.is_dir():
        raise HarnessError(f"--runs: {runs} is not a folder", next_step="Name the folder that holds the runs.")
    return [_line_of(path.parent) for path in sorted(runs.glob("*/run.json"))]


def _line_of(folder: Path) -> RunLine:
    try:
        run = read_run(folder)
    except HarnessError as error:
        return RunLine(run=folder.name, error=error.what.removeprefix(f"{folder}/"))
    killed = run.status == "running" and run.owner and owner_is_gone(run.owner)
    return RunLine(
        run=folder.name,
        started_wall_s=run.started_wall_s,
        scenario=run.scenario_name,
        cells=len(run.ran),
        planned=len(run.order),
        status="killed" if killed else run.status,
        client_limited=_client_limited(folder),
        simulated=run.simulated,
        reasons=run.reasons,
    )


def show_runs(runs: Path, console: Console) -> None:
    """One line a run, newest last."""
    table = Table(box=None, pad_edge=False)
    for column in ("run", "started", "scenario", "cells", "status"):
        table.add_column(column, no_wrap=column != "status")
    lines = list_runs(runs)
    for line in lines:
        if line.started_wall_s is None:
            table.add_row(line.run, "", "", "", Text(f"unreadable: {line.error}"[:MAX_CHARS]))
            continue
        started = datetime.datetime.fromtimestamp(line.started_wall_s).strftime("%Y-%m-%d %H:%M")
        reason = f": {sentence(line.reasons[0])}" if line.reasons else ""
        simulated = " (simulated)" if line.simulated else ""
        limited = ", CLIENT-LIMITED" if line.client_limited else ""
        status = Text(f"{line.status}{limited}{simulated}{reason}")
        table.add_row(line.run, started, line.scenario, f"{line.cells}/{line.planned}", status)
    if lines:
        console.print(table)
    else:
        console.print(f"no runs in {runs}; `harness run scenarios/first-look.yaml` makes one")


def _client_limited(folder: Path) -> bool:
    """Whether the load generator was the limit of some of its numbers, as far as its summary says."""
    try:
        return any(row.client_limited for row in read_summary(folder).rows)
    except HarnessError:
        return False


class ScenarioLine(msgspec.Struct, frozen=True):
    """A scenario that ships."""

    name: str
    path: str
    question: str


def list_scenarios() -> list[ScenarioLine]:
    """The scenarios that ship, each with its question."""
    return [
        ScenarioLine(path.stem, str(path.relative_to(ROOT)), " ".join(load_scenario(path).question.split()))
        for path in sorted(SCENARIOS.glob("*.yaml"))
    ]


def show_scenarios(console: Console) -> None:
    """The scenarios that ship, each with its question."""
    for line in list_scenarios():
        console.print(f"{line.path}\n  {line.question}")
