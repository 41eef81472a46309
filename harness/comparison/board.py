"""What is filed below results/: the rows of every machine and scenario, ranked; third-party figures apart."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import yaml
from msgspec import Struct

from harness.analysis.summarize import read_summary
from harness.columns import RATES
from harness.errors import HarnessError
from harness.files import read_text
from harness.judge.noise_floors import RESERVED, date_of
from harness.judge.verdicts import fields_of, is_paced, metric_of, values_of
from harness.rundir.manifest import Run, ServedBy, read_run
from harness.summary import Row, Summary

THIRD_PARTY = Path("reference") / "third-party.yaml"


class Figure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure that somebody else published, in reference/third-party.yaml."""

    hardware: str
    model: str
    setup: str
    load: str
    result: str
    claim: str  # who says so: vendor, community, paper
    source: str
    date: str  # of the source; "undated" where none was recorded
    url: str | None = None


class Entry(Struct, frozen=True, kw_only=True):
    """A row of a published run."""

    machine: str
    server: str
    load: str
    value: float | None  # median of the run-level values of the group's metric
    min: float | None = None
    max: float | None = None
    repeats: int
    output_tok_s: float | None
    ttft_p50_s: float | None
    errors: int
    date: str
    run: str
    folder: str  # below results/
    image: str | None
    image_digest: str | None
    version: str | None
    valid: bool
    client_limited: list[str]  # fields of Numbers
    ranked: bool  # a value of the server, of a valid run
    best: bool = False  # of its machine


class Group(Struct, frozen=True, kw_only=True):
    """Rows of the same work: one scenario, one model, one workload, one kind of engine. Best first."""

    scenario: str
    question: str
    model: str
    workload_sha256: str
    simulated: bool
    metric: str
    entries: list[Entry]

    def best_of(self, machine: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.machine == machine and entry.best), None)


class Board(Struct, frozen=True, kw_only=True):
    """The leaderboard."""

    machines: dict[str, str]  # name: what it is, in short
    groups: list[Group]
    figures: list[Figure]
    unreadable: list[str]


def collect(results: Path, shipped: Path) -> Board:
    """Everything below `results`; the third-party figures from there, else from `shipped`. Never raises for one run."""
    runs: list[tuple[Path, Run, Summary]] = []
    unreadable = []
    for path in sorted(results.glob("*/*/*/run.json")):
        if path.relative_to(results).parts[0] in RESERVED:
            continue
        try:
            runs.append((path.parent, read_run(path.parent), read_summary(path.parent)))
        except HarnessError as error:
            unreadable.append(error.what)
    alike: dict[tuple[str, str, str, bool], list[tuple[Path, Run, Summary]]] = {}
    for found in runs:
        run = found[1]
        key = (run.scenario_name, run.scenario.model, run.workload_sha256, run.simulated)
        alike.setdefault(key, []).append(found)
    groups = [_group(results, members) for _, members in sorted(alike.items())]
    own = results / THIRD_PARTY
    return Board(
        machines=dict(sorted({run.machine.name: _what(run) for _, run, _ in runs}.items())),
        groups=sorted(groups, key=lambda group: (group.simulated, group.scenario, group.model)),
        figures=read_figures(own if own.exists() else shipped / THIRD_PARTY),
        unreadable=unreadable,
    )


def read_figures(path: Path) -> list[Figure]:
    """The third-party figures in a file; none without one. Raises HarnessError for a damaged one."""
    try:
        raw = yaml.safe_load(read_text(path))
        return msgspec.convert(raw["figures"], list[Figure])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise HarnessError(f"{path}: cannot be read ({error})", next_step="The file was changed or damaged.") from None


def _group(results: Path, members: Sequence[tuple[Path, Run, Summary]]) -> Group:
    newest = max((run for _, run, _ in members), key=lambda run: run.started_wall_s)
    used = [run.scenario.loads[row.load] for _, run, summary in members for row in summary.rows]
    metric = "ttft_p50" if any(map(is_paced, used)) else metric_of(used)
    entries = [
        _entry(results, folder, run, summary, row, metric) for folder, run, summary in members for row in summary.rows
    ]
    entries.sort(key=lambda entry: _rank(entry, metric))
    best: dict[str, Entry] = {}
    for entry in entries:
        if entry.ranked:
            best.setdefault(entry.machine, entry)
    marked = [msgspec.structs.replace(entry, best=best.get(entry.machine) is entry) for entry in entries]
    return Group(
        scenario=newest.scenario_name,
        question=newest.scenario.question,
        model=newest.scenario.model,
        workload_sha256=newest.workload_sha256,
        simulated=newest.simulated,
        metric=metric,
        entries=marked,
    )


def _rank(entry: Entry, metric: str) -> tuple[bool, float, str, str, str, str]:
    """Best first; what is not ranked comes last."""
    value = entry.value or 0.0
    return not entry.ranked, -value if metric in RATES else value, entry.machine, entry.server, entry.load, entry.run


def _entry(results: Path, folder: Path, run: Run, summary: Summary, row: Row, metric: str) -> Entry:
    cells = {cell.id: cell for cell in summary.cells}
    values = [value for value in values_of(row, cells, metric) if value]
    served: ServedBy | None = next((cell.served_by for cell in run.served if cell.server == row.server), None)
    numbers = row.pooled
    valid = summary.valid is True and run.status == "valid"
    return Entry(
        machine=run.machine.name,
        server=row.server,
        load=row.load,
        value=median(values) if values else None,
        min=min(values, default=None),
        max=max(values, default=None),
        repeats=len(values),
        output_tok_s=median(row.output_tok_s) if row.output_tok_s else None,
        ttft_p50_s=numbers.ttft_s.p50,
        errors=numbers.failed + numbers.unfinished,
        date=date_of(run.started_wall_s),
        run=run.id,
        folder=folder.relative_to(results).as_posix(),
        image=served.image if served else None,
        image_digest=served.image_digest if served else None,
        version=served.version if served else None,
        valid=valid,
        client_limited=row.client_limited,
        ranked=valid and bool(values) and fields_of(metric)[0] not in row.client_limited,
    )


def _what(run: Run) -> str:
    """What a machine is, in short: its GPUs, else its CPU."""
    gpus = Counter(str(gpu.get("name") or gpu.get("target")) for gpu in run.machine.gpus)
    return ", ".join(name if n == 1 else f"{n}x {name}" for name, n in gpus.items()) or run.machine.cpu or ""
