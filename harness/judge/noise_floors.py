"""How far equal runs differ on a machine: measured A/A by `harness noise`, stored as noise.json."""

import datetime
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.columns import WORK
from harness.errors import HarnessError
from harness.files import pretty_json, read_json, replace_file
from harness.judge import stats
from harness.judge.stats import Variation
from harness.judge.verdicts import Measured, Noise, comparison_metrics, to_speeds
from harness.rundir.manifest import Run
from harness.summary import NEEDED, Reason, Summary, because

FORMAT_VERSION = 2
A, AGAIN = "a", "a-again"  # the two names of the one server
RESERVED = ("reference",)  # folders of the results that are no machine's


class RowNoise(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values of one load by one metric: a list for each run, in it a value for each repeat."""

    load: str
    metric: str
    a: list[list[float]]
    again: list[list[float]]

    def speeds(self) -> list[list[float]]:
        """Of each run the values of both sides, as speeds."""
        return [to_speeds(self.metric, [*a, *again]) for a, again in zip(self.a, self.again, strict=True)]

    def variation(self) -> Variation | None:
        """How far these equal runs differ. None for fewer than two runs."""
        return stats.estimate_variation(self.speeds())

    def between_repeats(self) -> float | None:
        """Variance of the logarithm of a repeat's value within its run; None for single repeats."""
        runs = [run for run in self.speeds() if len(run) > 1]
        freedom = sum(len(run) - 1 for run in runs)
        return sum(stats.var_log(run) * (len(run) - 1) for run in runs) / freedom if freedom else None


class NoiseRun(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An A/A run that the stored noise is made of."""

    id: str
    started_wall_s: float


class StoredNoise(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """noise.json."""

    format_version: int = FORMAT_VERSION
    machine: str
    scenario: str
    model: str
    workload_sha256: str
    server: str  # as the scenario calls it
    image: str | None = None
    image_digest: str | None = None
    version: str | None = None
    simulated: bool
    repeats: int
    runs: list[NoiseRun]
    rows: list[RowNoise]


class _VersionHead(Struct, frozen=True):
    format_version: int


def is_noise_run(run: Run) -> bool:
    """Whether a run is an A/A run of `harness noise`."""
    servers = run.scenario.servers
    return set(servers) == {A, AGAIN} and servers[A] == servers[AGAIN]


def measure_noise(run: Run, summary: Summary, server: str) -> StoredNoise:
    """The noise that one A/A run shows: of each load the metrics that it is compared by."""
    cells = {cell.id: cell for cell in summary.cells}
    rows = {row.key: row for row in summary.rows}
    found = []
    for name, load in run.scenario.loads.items():
        if (A, name) not in rows or (AGAIN, name) not in rows:
            continue
        a, again = (
            Measured(name=side, load_name=name, load=load, rows=[rows[side, name]], cells=[cells])
            for side in (A, AGAIN)
        )
        compared = comparison_metrics(a, again)
        names = dict.fromkeys(metric.rpartition("_")[0] for metric in compared if metric not in WORK)
        # Which percentile of a latency is compared depends on both runs.
        for metric in [f"{name}_{at}" for name in names for at in NEEDED] or compared:
            values = [[value for value in side.values(metric)[0] if value] for side in (a, again)]
            if all(values):
                found.append(RowNoise(load=name, metric=metric, a=[values[0]], again=[values[1]]))
    served = next(cell.served_by for cell in run.cells)
    return StoredNoise(
        machine=run.machine.name,
        scenario=run.scenario_name,
        model=run.scenario.model,
        workload_sha256=run.workload_sha256,
        server=server,
        image=served.image,
        image_digest=served.image_digest,
        version=served.version,
        simulated=run.simulated,
        repeats=run.scenario.repeats,
        runs=[NoiseRun(id=run.id, started_wall_s=run.started_wall_s)],
        rows=found,
    )


def join_noise(one: StoredNoise, other: StoredNoise) -> StoredNoise:
    """The noise of the runs of both. Raises HarnessError, naming the difference, for runs of something else."""
    for field in ("machine", "scenario", "model", "workload_sha256", "server", "image", "image_digest", "version"):
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            raise HarnessError(
                f"noise: '{field}' of the stored runs is {mine} and {theirs} now; they are not joined",
                next_step="Leave out --add: the noise is then measured anew.",
            )
    rows = {(row.metric, row.load): row for row in other.rows}
    both = [
        msgspec.structs.replace(row, a=row.a + same.a, again=row.again + same.again)
        for row in one.rows
        if (same := rows.get((row.metric, row.load))) is not None
    ]
    return msgspec.structs.replace(other, runs=one.runs + other.runs, rows=both)


def write_noise(path: Path, noise: StoredNoise) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pretty_json(noise))


def read_noise(path: Path) -> StoredNoise | None:
    """A noise.json; None where it is missing. Raises HarnessError for a damaged one or one of a newer format."""
    try:
        if read_json(path, _VersionHead).format_version < FORMAT_VERSION:
            return None  # format 1 has one run, which does not show how far runs differ
        return read_json(path, StoredNoise, FORMAT_VERSION, advice="; measure it anew")
    except FileNotFoundError:
        return None


def noise_path(results: Path, run: Run) -> Path:
    """Where the noise of a run's machine and scenario is stored."""
    return results / folder_name(run.machine.name) / folder_name(run.scenario_name) / "noise.json"


def known_noise(runs: Sequence[Run], results: Path) -> Noise:
    """What is known of the variation between runs, for a comparison of these. Of several machines the wider counts."""
    stored = {noise_path(results, run): run for run in runs}
    found = []
    for path, run in stored.items():
        noise = read_noise(path)
        why = None if noise is None else noise_mismatch(noise, run)
        if noise is None or why is not None:
            names = {"scenario": run.scenario_name, "machine": run.machine.name}
            return Noise(source=[because("noise_unknown", **names, other=why)])
        found.append(noise)
    rows: dict[tuple[str, str], Variation] = {}
    for noise in found:
        for row in noise.rows:
            seen, key = row.variation(), (row.metric, row.load)
            if seen is not None and (
                key not in rows or rows[key].run_variance(noise.repeats) < seen.run_variance(noise.repeats)
            ):
                rows[key] = seen
    return Noise(rows, list(map(noise_source, found)))


def noise_source(noise: StoredNoise) -> Reason:
    """Where stored noise is from."""
    days = sorted({format_date(run.started_wall_s) for run in noise.runs})
    of = {"machine": noise.machine, "runs": len(noise.runs), "server": noise.server}
    return because("noise_measured", **of, first_day=days[0], last_day=days[-1] if len(days) > 1 else None)


def noise_mismatch(noise: StoredNoise, run: Run) -> str | None:
    """In what stored noise is not of this run's work; None when it is."""
    for what, one, other in (
        ("machine", noise.machine, run.machine.name),
        ("scenario", noise.scenario, run.scenario_name),
        ("workload", noise.workload_sha256, run.workload_sha256),
        ("model", noise.model, run.scenario.model),
    ):
        if one != other:
            return what
    return "kind of engine" if noise.simulated != run.simulated else None


def format_date(wall_s: float) -> str:
    """The day of a moment, in UTC."""
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC).strftime("%Y-%m-%d")


def folder_name(text: str) -> str:
    """`text` as the name of one folder on any system. A name that had to be changed gets a sum of the original."""
    kept = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:60].rstrip("-._")
    if kept == text and kept not in RESERVED and kept.split(".")[0] not in _WINDOWS_DEVICES:
        return kept
    return f"{kept or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


_WINDOWS_DEVICES = ("con", "prn", "aux", "nul", *(f"{name}{i}" for name in ("com", "lpt") for i in range(1, 10)))
