"""Measure the difference of equal runs on this machine: one server under two names, once or several times."""

import math
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from harness.analysis.summarize import summarize
from harness.columns import METRIC_WORDS
from harness.errors import HarnessError, RunError
from harness.judge import stats
from harness.judge.noise_floors import (
    AGAIN,
    A,
    RowNoise,
    StoredNoise,
    joined,
    noise_of,
    noise_path,
    read_noise,
    write_noise,
)
from harness.prepare.experiment import Experiment, server_name
from harness.reasons import sentence
from harness.run.progress import Progress
from harness.run.run import run
from harness.rundir.manifest import read_run
from harness.scenario.scenario import Baseline
from harness.summary import MARGIN, MAX_REPEATS
from harness.units import NOTHING, duration, figures
from harness.units import count as counted

_SHORT_S = 3600.0  # runs that are closer share temperature and other programs


def noise(
    experiment: Experiment,
    server: str | None,
    runs: Path,
    results: Path,
    progress: Progress,
    *,
    count: int = 1,
    pause_s: float = 0.0,
    add: bool = False,
) -> tuple[Path, StoredNoise]:
    """Measure and store the difference of equal runs, `count` times with pauses; return the path and the result.

    Results are stored after each run, so that an interruption loses one run. With `add` the runs that were stored
    before stay. Raises RunError when a run is not VALID.
    """
    name = server_name(experiment, server)
    known: StoredNoise | None = None
    for number in range(count):
        if number:
            time.sleep(pause_s)
        folder = run(a_against_a(experiment, name), runs, progress)
        manifest, summary = read_run(folder), summarize(folder)
        if not summary.valid:
            raise RunError(
                f"{manifest.id}: an INVALID run shows no noise: {sentence(summary.reasons[0])}",
                next_step=f"harness report {folder} shows all reasons. {number} of {count} runs are stored.",
            )
        path = noise_path(results, manifest)
        found = noise_of(manifest, summary, name)
        if known is None and add:
            known = read_noise(path)
        known = found if known is None else joined(known, found)
        try:
            write_noise(path, known)
        except OSError as error:
            raise HarnessError(
                f"{path}: the noise cannot be stored ({error.strerror})", next_step="--results DIR chooses a folder."
            ) from None
    assert known is not None
    return path, known


def a_against_a(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one of its servers under two names, without checks."""
    scenario = experiment.scenario
    server = scenario.servers[name]
    twice = msgspec.structs.replace(
        scenario,
        question=f"How far do two equal servers differ on this machine? (A/A of '{name}')",
        servers={A: server, AGAIN: server},
        swept=None,  # nothing differs between the two
        baseline=Baseline(server=A, load=next(iter(scenario.loads))),
        checks=[],
    )
    return msgspec.structs.replace(experiment, scenario=twice)


def show(noise: StoredNoise, console: Console) -> None:
    """A table of the variation of repeats and runs, and of the detectable differences."""
    span_s = noise.runs[-1].started_wall_s - noise.runs[0].started_wall_s
    over = f" over {duration(span_s)}" if span_s else ""
    repeats = counted(noise.repeats, "repeat")
    console.print(f"{noise.machine}: {counted(len(noise.runs), 'A/A run')} of '{noise.server}'{over}, {repeats} each")
    margin = f"±{100 * MARGIN:g} %"
    table = Table(box=None, pad_edge=False)
    for heading in (
        "load", "by", "sd of repeats", f"repeats for 'same' within {margin}", "sd of runs", "one run finds",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("load", "by") else "right")
    for row in noise.rows:
        table.add_row(row.load, METRIC_WORDS[row.metric], *_of_row(row, noise.repeats))
    console.print(table)
    if len(noise.runs) < 2:
        console.print("One run does not show how far runs differ: add runs of other hours and days with --add.")
    elif span_s < _SHORT_S:
        console.print(
            f"Warning: these runs are from {duration(span_s)}. Runs of other hours and days differ more, and a verdict "
            "that rests on this can be false. Spread runs with --every 60, or add some with --add."
        )


def _of_row(row: RowNoise, repeats: int) -> list[str]:
    """Spread of repeats, repeats a side for "same", spread of runs, and the difference that one run finds."""
    cells = [NOTHING] * 4
    between = row.between_repeats()
    if between is not None:
        needed = stats.needed_to_settle(0.0, (between, between), 1, 1, MARGIN)
        cells[:2] = [_percent(math.sqrt(between)), f"over {MAX_REPEATS}" if needed is None else str(needed)]
    seen = row.variation()
    if seen is not None:
        variance = seen.of_run(repeats)
        smallest = max(math.expm1(stats.detectable(variance, seen.freedom)), MARGIN)
        cells[2:] = [_percent(math.sqrt(variance)), f"{_percent(smallest)} or more"]
    return cells


def _percent(value: float) -> str:
    return f"{figures(100 * value, 2)} %"
