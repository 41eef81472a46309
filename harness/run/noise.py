"""The A/A run: one server under two names, interleaved, which shows how far equal things differ on this machine."""

from pathlib import Path

import msgspec

from harness.errors import HarnessError, RunError
from harness.judge.noise_floors import AGAIN, LEAST, A, Floor, floor_of, floor_path, write_floor
from harness.judge.verdicts import METRIC_WORDS
from harness.prepare.experiment import Experiment, server_name
from harness.run.progress import Progress
from harness.run.run import run
from harness.rundir.manifest import read_run
from harness.scenario.scenario import Baseline
from harness.summarize.summarize import summarize
from harness.units import figures


def noise(
    experiment: Experiment, server: str | None, runs: Path, results: Path, progress: Progress
) -> tuple[Path, Path]:
    """Measure the floor of this machine for a scenario and store it. Returns the run directory and noise.json.

    Raises RunError when the run is not VALID; the floor that was stored before then stays.
    """
    if experiment.scenario.repeats < 2:
        raise HarnessError(
            f"a noise floor needs at least 2 repeats, and {experiment.path} has {experiment.scenario.repeats}",
            next_step="--repeats 5",
        )
    name = server_name(experiment, server)
    folder = run(a_against_a(experiment, name), runs, progress)
    manifest, summary = read_run(folder), summarize(folder)
    if not summary.valid:
        raise RunError(
            f"{manifest.id}: an INVALID run gives no noise floor: {summary.reasons[0]}",
            next_step=f"harness report {folder} shows all reasons.",
        )
    path = floor_path(results, manifest)
    try:
        write_floor(path, floor_of(manifest, summary, name))
    except OSError as error:
        raise HarnessError(
            f"{path}: the noise floor cannot be stored ({error.strerror})", next_step="--results DIR chooses a folder."
        ) from None
    return folder, path


def a_against_a(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one of its servers under two names, and without checks: it asks one thing only."""
    scenario = experiment.scenario
    server = scenario.servers[name]
    twice = msgspec.structs.replace(
        scenario,
        question=f"How far do two equal servers differ on this machine? (A/A of '{name}')",
        servers={A: server, AGAIN: server},
        baseline=Baseline(server=A, load=next(iter(scenario.loads))),
        checks=[],
    )
    return msgspec.structs.replace(experiment, scenario=twice)


def in_words(floor: Floor) -> list[str]:
    """A line for each load and metric."""
    return [
        f"{row.load}, {METRIC_WORDS[row.metric]}: ±{figures(100 * max(LEAST, row.floor))} %"
        + (f" (measured {100 * row.floor:.2g} %; no floor is below {100 * LEAST:.2g} %)" if row.floor < LEAST else "")
        + f"; a-again was {row.ratio:.4f} times as fast, 95 % interval {row.low:.4f} to {row.high:.4f}, "
        f"{row.n[0]} against {row.n[1]} runs"
        for row in floor.rows
    ]
