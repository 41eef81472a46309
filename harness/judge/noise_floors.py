"""The noise floor of a machine: measured A/A, stored as noise.json, found for runs of the same machine and work."""

import datetime
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from harness.errors import HarnessError
from harness.judge import stats
from harness.judge.beside import latencies
from harness.judge.verdicts import METRIC_WORDS, NoiseFloor, speeds, values_of
from harness.rundir.files import pretty_json, read_json, replace_file
from harness.rundir.manifest import Run
from harness.scenario.mixes import alone, mix_of
from harness.summary import Summary

FORMAT_VERSION = 1
LEAST = 0.01  # what no manifest records moves results by so much, however quiet one measurement was
A, AGAIN = "a", "a-again"  # the two names of the one server
RESERVED = ("reference",)  # folders of the results that are no machine's


class RowFloor(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an A/A difference reached for one load, by one metric."""

    load: str
    metric: str
    floor: float  # relative; the farthest bound of the interval, before LEAST is applied
    ratio: float  # of speed: a-again / a
    low: float  # 95 % interval of the ratio
    high: float
    n: tuple[int, int]  # run-level values


class Floor(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """noise.json."""

    format_version: int = FORMAT_VERSION
    run: str
    date: str
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
    rows: list[RowFloor]


def is_noise_run(run: Run) -> bool:
    """Whether a run is an A/A run of `harness noise`."""
    servers = run.scenario.servers
    return set(servers) == {A, AGAIN} and servers[A] == servers[AGAIN]


def floor_of(run: Run, summary: Summary, server: str) -> Floor:
    """The floor that an A/A run shows. Raises HarnessError where a load has fewer than two values a side."""
    rows, cells = {row.key: row for row in summary.rows}, {cell.id: cell for cell in summary.cells}
    found = []
    for load in run.scenario.loads:
        if (AGAIN, load) not in rows or (A, load) not in rows:
            continue
        again, a = rows[AGAIN, load], rows[A, load]
        tokens = "input_tok_s" if run.scenario.loads[load].endpoint == "embeddings" else "output_tok_s"
        pairs = [
            (metric, speeds(metric, values_of(again, metric)), speeds(metric, values_of(a, metric)))
            for metric in ("wall_s", tokens)
        ]
        # A part of a mix, and the same load alone, are compared by their latencies.
        if mix_of(load) is not None or any(load == alone(other) for other in run.scenario.loads):
            asked = latencies(again, a, cells, run.scenario)
            pairs += [(pair.metric, pair.side_speeds, pair.baseline_speeds) for pair in asked if pair.refused is None]
        for metric, *sides in pairs:
            interval = stats.ratio_interval(*sides)
            if interval is None:
                continue  # fewer than two values a side, such as the wall time of a timed load
            found.append(
                RowFloor(
                    load=load,
                    metric=metric,
                    floor=stats.noise_floor(sides),
                    ratio=interval.ratio,
                    low=interval.low,
                    high=interval.high,
                    n=(len(sides[0]), len(sides[1])),
                )
            )
    missing = [load for load in run.scenario.loads if load not in {row.load for row in found}]
    if missing:
        raise HarnessError(f"{run.id}: a noise floor needs two values a side, and '{missing[0]}' has not that many")
    served = next(cell.served_by for cell in run.cells)
    return Floor(
        run=run.id,
        date=date_of(run),
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
        rows=found,
    )


def write_floor(path: Path, floor: Floor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pretty_json(floor))


def read_floor(path: Path) -> Floor | None:
    """A noise.json; None where there is none. Raises HarnessError for a damaged or a newer one."""
    try:
        return read_json(path, Floor, FORMAT_VERSION, advice="; measure it anew")
    except FileNotFoundError:
        return None


def floor_path(results: Path, run: Run) -> Path:
    """Where the floor of a run's machine and scenario is stored."""
    return results / folder_name(run.machine.name) / folder_name(run.scenario_name) / "noise.json"


def adopt_floor(folder: Path, run: Run, results: Path) -> None:
    """Copy the stored floor into a run directory, whose summary then is a function of its files alone."""
    floor = read_floor(floor_path(results, run))
    if floor is not None and unfit(floor, run) is None:
        write_floor(folder / "noise.json", floor)


def floor_in(folder: Path, run: Run) -> NoiseFloor:
    """The floor that a run directory carries, else the assumed one."""
    return _usable([(run, read_floor(folder / "noise.json"))])


def floor_for(runs: Sequence[tuple[Path, Run]], results: Path) -> NoiseFloor:
    """The floor for a comparison: of each machine and scenario the stored one, else the one that a run carries.

    Of several machines the wider one counts, row by row.
    """
    found: dict[Path, tuple[Run, Floor | None]] = {}
    for folder, run in runs:
        path = floor_path(results, run)
        known = found.get(path, (run, None))[1] or read_floor(path)
        if known is None or unfit(known, run):
            known = read_floor(folder / "noise.json") or known
        found[path] = (run, known)
    return _usable(list(found.values()))


def unfit(floor: Floor, run: Run) -> str | None:
    """Why a floor is not one for this run; None when it is."""
    for what, one, other in (
        ("machine", floor.machine, run.machine.name),
        ("scenario", floor.scenario, run.scenario_name),
        ("workload", floor.workload_sha256, run.workload_sha256),
        ("model", floor.model, run.scenario.model),
    ):
        if one != other:
            return f"another {what}"
    return "another kind of engine" if floor.simulated != run.simulated else None


def _usable(found: Sequence[tuple[Run, Floor | None]]) -> NoiseFloor:
    rows: dict[tuple[str, str], float] = {}
    sources: dict[str, list[str]] = {}  # and whose it is
    for run, floor in found:
        why = None if floor is None else unfit(floor, run)
        if floor is None or why is not None:
            source = "assumed" if why is None else f"assumed; the one measured is of {why}"
            of_run = {(metric, load): NoiseFloor().relative for metric in METRIC_WORDS for load in run.scenario.loads}
        else:
            source = (
                f"measured A/A on {floor.machine}, {floor.date}, {floor.repeats} repeats of '{floor.server}', "
                f"run {floor.run}; of several rows the widest, at least {100 * LEAST:g} %"
            )
            of_run = {(row.metric, row.load): max(LEAST, row.floor) for row in floor.rows}
        sources.setdefault(source, []).append(run.machine.name)
        for key, value in of_run.items():
            rows[key] = max(value, rows.get(key, 0.0))
    source = _in_words(sources)
    return NoiseFloor(source=source, rows={} if source == "assumed" else rows)


def _in_words(sources: Mapping[str, Sequence[str]]) -> str:
    """Where the floors are from; of several, which is of which machine."""
    if len(sources) < 2:
        return next(iter(sources), "assumed")
    told = []
    for source, machines in sources.items():
        names = " and ".join(dict.fromkeys(machines))
        if source.startswith("assumed"):
            rest = source.removeprefix("assumed")
            told.append(f"for {names} assumed to be {100 * NoiseFloor().relative:g} %{rest}")
        else:
            told.append(f"for {names} {source}")
    return f"the wider of: {'; '.join(told)}"


def date_of(run: Run) -> str:
    """The day on which a run began, in UTC."""
    return datetime.datetime.fromtimestamp(run.started_wall_s, datetime.UTC).strftime("%Y-%m-%d")


def folder_name(text: str) -> str:
    """`text` as the name of one folder on any system. A name that had to be changed gets a sum of the original."""
    kept = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:60].rstrip("-._")
    if kept == text and kept not in RESERVED and kept.split(".")[0] not in _DEVICES:
        return kept
    return f"{kept or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


_DEVICES = ("con", "prn", "aux", "nul", *(f"{name}{i}" for name in ("com", "lpt") for i in range(1, 10)))
