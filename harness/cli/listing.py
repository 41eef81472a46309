"""Find runs, and list runs and scenarios."""

import datetime
import difflib
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.errors import HarnessError, Mistakes
from harness.paths import ROOT, SCENARIOS
from harness.rundir.manifest import read_run
from harness.scenario.file import load_scenario
from harness.serve.docker.labels import owner_is_gone
from harness.summarize.summarize import read_summary

MOST_CHARS = 100  # of the reason why a run cannot be read


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


def find_runs(*groups: list[Path], runs: Path) -> list[list[Path]]:
    """As `find_run`, for groups of runs; what is not found is told together."""
    wrong = Mistakes()
    found: list[list[Path]] = []
    for group in groups:
        found.append([])
        for given in group:
            with wrong.noted():
                found[-1].append(find_run(given, runs))
    wrong.refuse()
    return found


def show_runs(runs: Path, console: Console) -> None:
    """One line a run, newest last."""
    if runs.exists() and not runs.is_dir():
        raise HarnessError(f"--runs: {runs} is not a folder", next_step="Name the folder that holds the runs.")
    table = Table(box=None, pad_edge=False)
    for column in ("run", "started", "scenario", "cells", "status"):
        table.add_column(column, no_wrap=column != "status")
    paths = sorted(runs.glob("*/run.json"))
    for path in paths:
        try:
            run = read_run(path.parent)
        except HarnessError as error:
            table.add_row(
                path.parent.name,
                "",
                "",
                "",
                Text(f"unreadable: {error.what.removeprefix(f'{path.parent}/')}"[:MOST_CHARS]),
            )
            continue
        started = datetime.datetime.fromtimestamp(run.started_wall_s).strftime("%Y-%m-%d %H:%M")
        reason = f": {run.reasons[0]}" if run.reasons else ""
        simulated = " (simulated)" if run.simulated else ""
        cells = f"{len(run.ran)}/{len(run.order)}"
        status = "killed" if run.status == "running" and run.owner and owner_is_gone(run.owner) else run.status
        limited = ", CLIENT-LIMITED" if _client_limited(path.parent) else ""
        table.add_row(
            path.parent.name, started, run.scenario_name, cells, Text(f"{status}{limited}{simulated}{reason}")
        )
    if paths:
        console.print(table)
    else:
        console.print(f"no runs in {runs}; `harness run scenarios/first-look.yaml` makes one")


def _client_limited(folder: Path) -> bool:
    """Whether the load generator was the limit of some of its numbers, as far as its summary says."""
    try:
        return any(row.client_limited for row in read_summary(folder).rows)
    except HarnessError:
        return False


def show_scenarios(console: Console) -> None:
    """The scenarios that ship, each with its question."""
    for path in sorted(SCENARIOS.glob("*.yaml")):
        scenario = load_scenario(path)
        shown = path.relative_to(ROOT)
        console.print(f"{shown}\n  {' '.join(scenario.question.split())}")
