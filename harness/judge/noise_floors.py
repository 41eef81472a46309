"""The variation of equal runs on a machine (noise): measured A/A by `harness noise`, stored as noise.json."""

import datetime
import hashlib
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.columns import WORK
from harness.errors import HarnessError
from harness.files import pretty_json, read_json, replace_file
from harness.judge import stats
from harness.judge.stats import Variation
from harness.judge.verdicts import Measured, comparison_metrics, to_speeds
from harness.rundir.manifest import Run
from harness.summary import NEEDED, Reason, Summary, because

FORMAT_VERSION = 2
A, AGAIN = "a", "a-again"  # the two names of the one server
RESERVED = ("reference",)  # folders of the results that do not belong to a machine


class RowNoise(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values of one load by one metric: a list of repeats for each run and side."""

    load: str
    metric: str
    a: list[list[float]]
    again: list[list[float]]

    def speeds(self) -> list[list[float]]:
        """The values of both sides as speeds, a list for each run."""
        return [to_speeds(self.metric, [*a, *again]) for a, again in zip(self.a, self.again, strict=True)]

    def variation(self) -> Variation | None:
        """None for fewer than two runs."""
        return stats.estimate_variation(self.speeds())

    def repeat_variance(self) -> float | None:
        """Variance of the logarithm of a repeat's value within its run; None for single repeats."""
        return stats.repeat_variance(self.speeds())


class NoiseRun(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An A/A run that the stored noise comes from."""

    id: str
    started_wall_s: float


class StoredNoise(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """noise.json."""

    format_version: int = FORMAT_VERSION
    machine: str
    scenario: str
    model: str
    workload_sha256: str
    server: str  # its name in the scenario
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
    """The noise of one A/A run, by load and metric."""
    cells = {cell.id: cell for cell in summary.cells}
    rows = {row.key: row for row in summary.rows}
    row_noise = []
    for name, load in run.scenario.loads.items():
        if (A, name) not in rows or (AGAIN, name) not in rows:
            continue
        a, again = (
            Measured(name=side, load_name=name, load=load, rows=[rows[side, name]], cells=[cells])
            for side in (A, AGAIN)
        )
        metrics = comparison_metrics(a, again)
        latencies = dict.fromkeys(metric.rpartition("_")[0] for metric in metrics if metric not in WORK)
        # Store all percentiles of a latency: later comparisons choose one by the requests of both their runs.
        for metric in [f"{latency}_{percentile}" for latency in latencies for percentile in NEEDED] or metrics:
            values = [[value for value in side.values(metric)[0] if value] for side in (a, again)]
            if all(values):
                row_noise.append(RowNoise(load=name, metric=metric, a=[values[0]], again=[values[1]]))
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
        rows=row_noise,
    )


def join_noise(stored: StoredNoise, new: StoredNoise) -> StoredNoise:
    """The noise of the runs of both. Raises HarnessError, naming the difference, for runs of another kind."""
    for field in ("machine", "scenario", "model", "workload_sha256", "server", "image", "image_digest", "version"):
        stored_value, new_value = getattr(stored, field), getattr(new, field)
        if stored_value != new_value:
            raise HarnessError(
                f"noise: '{field}' of the stored runs is {stored_value} and {new_value} now; they are not joined",
                next_step="Leave out --add: the noise is then measured anew.",
            )
    new_rows = {(row.metric, row.load): row for row in new.rows}
    rows = [
        msgspec.structs.replace(row, a=row.a + new_row.a, again=row.again + new_row.again)
        for row in stored.rows
        if (new_row := new_rows.get((row.metric, row.load))) is not None
    ]
    return msgspec.structs.replace(new, runs=stored.runs + new.runs, rows=rows)


def write_noise(path: Path, noise: StoredNoise) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pretty_json(noise))


def read_noise(path: Path) -> StoredNoise | None:
    """Read a noise.json; None where it is missing. Raises HarnessError for a damaged file or a newer format."""
    try:
        if read_json(path, _VersionHead).format_version < FORMAT_VERSION:
            return None  # format 1 has a single run, so no variation between runs
        return read_json(path, StoredNoise, FORMAT_VERSION, advice="; measure it anew")
    except FileNotFoundError:
        return None


def noise_path(results: Path, run: Run) -> Path:
    """Where the noise of a run's machine and scenario is stored."""
    return results / folder_name(run.machine.name) / folder_name(run.scenario_name) / "noise.json"


def usable_noise(run: Run, results: Path) -> tuple[StoredNoise | None, Reason | None]:
    """The stored noise of a run's machine and scenario; where it is of other work None, and in what it differs."""
    noise = read_noise(noise_path(results, run))
    if noise is None:
        return None, None
    if (mismatch := noise_mismatch(noise, run)) is None:
        return noise, None
    return None, because("noise_of_other_work", scenario=run.scenario_name, machine=run.machine.name, other=mismatch)


def known_variations(run: Run, results: Path) -> dict[tuple[str, str], Variation]:
    """The stored variation between runs of a run's machine and scenario, by (metric, load)."""
    noise, _ = usable_noise(run, results)
    rows = [] if noise is None else noise.rows
    return {(row.metric, row.load): variation for row in rows if (variation := row.variation()) is not None}


def noise_source(noise: StoredNoise) -> Reason:
    """The machine, server and days that stored noise was measured on."""
    days = sorted({format_date(run.started_wall_s) for run in noise.runs})
    values = {"machine": noise.machine, "runs": len(noise.runs), "server": noise.server}
    return because("noise_measured", **values, first_day=days[0], last_day=days[-1] if len(days) > 1 else None)


def noise_mismatch(noise: StoredNoise, run: Run) -> str | None:
    """In what the stored noise differs from the work of this run; None where it fits."""
    for name, stored, current in (
        ("machine", noise.machine, run.machine.name),
        ("scenario", noise.scenario, run.scenario_name),
        ("workload", noise.workload_sha256, run.workload_sha256),
        ("model", noise.model, run.scenario.model),
        ("kind of engine", noise.simulated, run.simulated),
    ):
        if stored != current:
            return name
    return None


def format_date(wall_s: float) -> str:
    """The date of a Unix time, in UTC."""
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC).strftime("%Y-%m-%d")


def folder_name(text: str) -> str:
    """`text` as a folder name. A changed name gets a checksum of the original."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:60].rstrip("-._")
    if name == text and name not in RESERVED:
        return name
    return f"{name or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"
