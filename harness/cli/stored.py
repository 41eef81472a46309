"""Commands that read and write files: exports, imports, lists, filed results."""

import datetime
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.base.command_line import command_line
from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.report.elements import Element

MAX_CHARS = 100  # of the reason why a run cannot be read


@cli.command(short_help="Write a run's records or numbers for other tools.")
def export(
    run_folder: cli.RunArg,
    to: Annotated[
        Path,
        cli.option(
            "FILE",
            "The records, where it ends in .parquet or .csv. The numbers, where it ends in .json: in the format with "
            "which its name begins.",
        ),
    ],
    form: Annotated[
        Literal["vllm-bench", "vllm-bench-sweep", "github-action-benchmark"] | None,
        cli.flag("--format", "The tool whose JSON is written (default: as the file's name begins)."),
    ] = None,
    detailed: Annotated[
        bool, cli.flag("--detailed", "vllm-bench: with an entry for each request, as its --save-detailed.")
    ] = False,
    row: Annotated[str | None, cli.option("SERVER/LOAD", "JSON: only this row.")] = None,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Write a run for other tools: its records as Parquet or CSV, one row for each request, or its numbers as JSON of
    vllm bench or github-action-benchmark.
    """
    from harness.base.units import count
    from harness.questions.compare.decide import refuse_invalid, refuse_search
    from harness.records.manifest import read_run
    from harness.report.export import RECORDS, choose_format, export_as
    from harness.report.export import export as export_records

    chosen = choose_format(to, form)
    if chosen in RECORDS and (detailed or row):
        raise HarnessError("--detailed and --row are for a file that ends in .json", next_step="Leave them out.")
    if detailed and not chosen.startswith("vllm-bench"):
        raise HarnessError(f"--detailed: {chosen} has no entries for requests", next_step="Leave it out.")
    folder = cli.find_run(run_folder, runs)
    if chosen not in RECORDS:
        refuse_invalid(folder, read_run(folder), None, "is exported as numbers")
        refuse_search(folder, read_run(folder), "is exported as numbers")
        say = partial(print, file=sys.stderr)
        for path in export_as(folder, to, chosen, detailed=detailed, row=row, say=say):
            print(path)
        return
    written = export_records(folder, to)
    print(f"{to}: {written.records:,} records")
    if written.damaged:
        print(f"{count(written.damaged, 'line')} of requests.jsonl left out: not readable", file=sys.stderr)


@cli.command("import", short_help="Import results of other tools.")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that another tool wrote; each a run.")],
    form: Annotated[
        str | None, cli.option("FORMAT", "The tool that wrote it (default: as the file shows).", "--format")
    ] = None,
    machine: Annotated[
        str | None, cli.option("NAME", "Name of the machine that was measured; files do not say it.")
    ] = None,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Import results of other tools as runs, marked with their origin, for report, runs and compare."""
    from harness.imports.write import import_file

    failed = False
    for file in files:
        try:
            print(import_file(file, runs, form, machine))
        except HarnessError as error:  # costs the other files nothing
            cli.print_error(error)
            failed = True
    if failed:
        raise typer.Exit(ExitCode.USAGE)


def _list_runs(runs: Path) -> list[dict[str, Any]]:
    """The runs in a folder for people and programs. `error`: why a run.json cannot be read; then there is no more.

    `status` is as in run.json, or `killed`: it says `running`, and its process is gone.
    """
    from harness.base.process import owner_is_gone
    from harness.numbers.summarize import read_summary
    from harness.records.directory import list_runs

    if runs.exists() and not runs.is_dir():
        raise HarnessError(f"--runs: {runs} is not a folder", next_step="Name the folder that holds the runs.")
    listed: list[dict[str, Any]] = []
    for folder, run in list_runs(runs):
        if isinstance(run, HarnessError):
            listed.append({"run": folder.name, "status": None, "error": run.what.removeprefix(f"{folder}/")})
            continue
        try:
            limited = any(row.client_limited for row in read_summary(folder).rows)
        except HarnessError:  # it has no summary yet
            limited = False
        killed = run.status == "running" and run.owner and owner_is_gone(run.owner)
        listed.append({
            "run": folder.name, "status": "killed" if killed else run.status, "started_wall_s": run.started_wall_s,
            "scenario": run.scenario_name, "cells": len(run.ran), "planned": len(run.order),
            "client_limited": limited, "simulated": run.simulated, "reasons": run.reasons,
        })  # fmt: skip
    return listed


def _runs_page(listed: list[dict[str, Any]], runs: Path) -> "list[Element]":
    """A table of the runs, or how to make one."""
    from harness.base.reason import sentence
    from harness.report.elements import Paragraph, plain_grid

    if not listed:
        return [Paragraph(f"no runs in {runs}; `harness run scenarios/first-look.yaml` makes one")]
    rows = []
    for run in listed:
        if "error" in run:
            rows.append([run["run"], "", "", f"unreadable: {run['error']}"[:MAX_CHARS]])
            continue
        limited, simulated = ", load generator late" * run["client_limited"], " (simulated)" * run["simulated"]
        reason = "".join(f": {sentence(reason)}" for reason in run["reasons"][:1])
        status = f"{run['status']}{limited}{simulated}{reason}"
        started = datetime.datetime.fromtimestamp(run["started_wall_s"]).strftime("%Y-%m-%d %H:%M")
        rows.append([run["run"], started, f"{run['cells']}/{run['planned']}", status])
    return [plain_grid(["Run", "Started", "Cells", "Status"], rows)]  # the run's id has the scenario's name


@cli.command("list", short_help="List the scenarios that ship and the runs.")
def list_(
    what: Annotated[
        Literal["scenarios", "runs"] | None, typer.Argument(metavar="WHAT", help="Only `scenarios`, or only `runs`.")
    ] = None,
    runs: cli.RunsDir = cli.RUNS,
    as_json: cli.JsonOpt = False,
) -> None:
    """List the scenarios that ship by question, with what each needs and how long it takes (without downloads), and the
    runs with their verdict, the newest last.
    """
    from harness.questions.shipped import scenarios_page, shipped_scenarios
    from harness.report.elements import Paragraph
    from harness.report.terminal import print_page

    lists: dict[str, Any] = {}
    if what != "runs":
        lists["scenarios"] = shipped_scenarios()
    if what != "scenarios":
        lists["runs"] = _list_runs(runs)
    if as_json:
        cli.print_json(lists if what is None else lists[what])
        return
    page: list[Element] = scenarios_page(lists["scenarios"]) if "scenarios" in lists else []
    if "runs" in lists:
        page += [*([Paragraph("Runs", "heading")] if page else []), *_runs_page(lists["runs"], runs)]
    print_page(page, cli.console())


@cli.command(short_help="Rank the results of machines, or file runs as results.")
def results(
    action: Annotated[
        Literal["add", "card"] | None,
        typer.Argument(
            metavar="ACTION", help="add: file the runs by machine and scenario. card: print one as Markdown to paste."
        ),
    ] = None,
    run_folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories or ids.", autocompletion=cli.complete_run),
    ] = None,
    records: Annotated[
        bool, cli.flag("--records", "With add: also the records of the runs, as requests.jsonl.gz.")
    ] = False,
    output: Annotated[
        Literal["terminal", "markdown", "json", "html"], cli.flag("--format", "What to print.")
    ] = "terminal",
    runs: cli.RunsDir = cli.RUNS,
    results: cli.ResultsDir = cli.RESULTS,
) -> None:
    """Rank the filed results, machines by scenarios. `harness results add RUN` files VALID runs, and `harness results
    card RUN` prints one as a short text in Markdown for a forum or an issue.

    A filed run is plain files that are small enough for git.
    """
    from harness.base.files import RESULTS as SHIPPED
    from harness.base.files import SCENARIOS
    from harness.questions import results as boards

    if action is not None and output not in ("terminal", *(["markdown"] if action == "card" else [])):
        raise HarnessError(
            f"--format: is of the leaderboard, not of `{action}`"
            + (", which prints Markdown" if action == "card" else ""),
            next_step="Leave it out.",
        )
    if action is not None and not run_folders:
        raise HarnessError(f"{action}: no run is given", next_step=command_line("harness", "results", action, "RUN"))
    if action == "card":
        shipped = [path.stem for path in SCENARIOS.glob("*.yaml")]
        print("\n".join(boards.result_card(cli.find_run(given, runs), shipped) for given in run_folders or []), end="")
        return
    if action == "add":
        for folder in [cli.find_run(given, runs) for given in run_folders or []]:
            where, names = boards.add_result(folder, results, records=records)
            print(f"{where}: {', '.join(names)}")
        return
    if results != cli.RESULTS and not results.is_dir():
        raise HarnessError(
            f"--results: there is no folder {results}", next_step="`harness results add RUN` files a run, and makes it."
        )
    board = boards.collect_board(results, SHIPPED)
    cli.print_page_as(output, board, boards.board_page(board), "Leaderboard")
