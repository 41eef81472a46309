"""Make a run directory from another tool's file: run.json, requests.jsonl or numbers.json, and the summary."""

import datetime
import hashlib
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness import __version__
from harness.base.command_line import command_line
from harness.base.errors import HarnessError, did_you_mean
from harness.base.files import DOCS, UNDECODABLE, pretty_json
from harness.base.redact import printable
from harness.base.versions import DEFINITIONS
from harness.imports import Format, Imported, ImportedPart, Source, lemonade_bench, llama_bench, read_source, vllm
from harness.numbers.summarize import summarize, write_summary
from harness.records.directory import slug
from harness.records.manifest import NUMBERS_FILE, CellRun, Machine, Origin, RowOrigin, Run, ServedBy, Status, write_run
from harness.records.records import Request, read_marks
from harness.scenario import Load, Scenario, Server, Warmup

UNKNOWN = "unknown"  # a name that the file does not have


def _last_end_s(records: list[Request]) -> float:
    return max(record.sent_s + record.ended_s for record in records)


def _read_records(source: Source) -> Imported:
    """Records of stock Locust (`--records FILE`), or of a Compose file's load: one row for each load or user class.

    Raises HarnessError for a line that is no record.
    """
    records = []
    for number, line in enumerate(source.value if isinstance(source.value, list) else [source.value], start=1):
        try:
            records.append(msgspec.convert(line, Request))
        except UNDECODABLE as error:
            raise source.error_at(f"record {number}", str(error)) from None
    if all(record.phase == "warmup" for record in records):
        raise HarnessError(f"{source.path}: holds only warm-up requests", next_step="Record a longer load.")
    places = (Path(f"{source.path}.processes"), source.path.with_name("processes.jsonl"))
    marks = [mark for place in places for mark in read_marks(place)]
    if len({mark.host for mark in marks}) > 1:
        raise HarnessError(
            f"{source.path}: its records are from several machines, or from before and after a restart",
            next_step="Record to a file for each machine and each load.",
        )
    wall_s = marks[0].wall_s - marks[0].monotonic_s if marks else source.path.stat().st_mtime - _last_end_s(records)
    loads: dict[str, list[Request]] = {}
    for record in records:
        loads.setdefault(record.load or record.user_class, []).append(record)
    parts = []
    for name, group in loads.items():
        start_s = min(record.sent_s for record in group)  # all processes of one machine share its monotonic clock
        part = ImportedPart(
            load=name,
            planned=sum(record.phase == "measured" for record in group),
            records=[replace(record, sent_s=record.sent_s - start_s) for record in group],
            started_wall_s=wall_s + start_s,
            ended_wall_s=wall_s + _last_end_s(group),
        )
        parts.append(part)
    return Imported(tool="locust", version=None, model=None, parts=parts, work=sorted(loads))


FORMATS = {
    "vllm": vllm.FORMAT,
    "lemonade": lemonade_bench.FORMAT,
    "llama-bench": llama_bench.FORMAT,
    "records": Format(
        "locust -f locustfiles/chat.py --records FILE", ("cell", "user_class", "phase", "sent_s"), _read_records
    ),
}


def read_file(path: Path, given: str | None = None) -> tuple[Source, Imported]:
    """Read a file of another tool. `given`: the name of its format; None: the file itself shows it.

    Raises HarnessError for a file that has none of the formats, or not the given one.
    """
    if given is not None and given not in FORMATS:
        raise HarnessError(f"--format: there is no format '{given}'; {did_you_mean(given, FORMATS)}")
    source = read_source(path, llama_bench.read_tables)
    sources = {name: form.without_noise(source) for name, form in FORMATS.items()}
    matching = [name for name, form in FORMATS.items() if form.matches(sources[name].value)]
    if given is not None and given not in matching:
        hint = f"; it looks like {matching[0]}" if matching else ""
        raise HarnessError(
            f"{path}: not what {given} writes{hint}", next_step=f"{given} is read from: {FORMATS[given].written_by}"
        )
    if not matching:
        keys = ", ".join(list(source.value)[:6]) if isinstance(source.value, dict) else ""
        raise HarnessError(
            f"{path}: not a file of any tool that is known" + (f" (its keys: {keys})" if keys else ""),
            next_step=f"Known are the files below; {DOCS}/imports.md says more.",
            detail="\n".join(f"{name}: {form.written_by}" for name, form in FORMATS.items()),
        )
    name = given or matching[0]
    source = sources[name]
    imported = FORMATS[name].read(source)
    return source, replace(imported, notes=[*imported.notes, *source.noise_notes()])


def import_file(
    path: Path, runs: Path, given: str | None = None, machine: str | None = None, *, reuse: bool = False
) -> Path:
    """Make a run directory from a tool's file and return it. Its name ends with the file's checksum.

    `machine`: the name of the machine that was measured; tools do not write it. `reuse`: return the run directory of a
    file that was imported before. Raises HarnessError for such a file otherwise, and for one that cannot be read.
    """
    source, imported = read_file(path, given)
    started = min(part.started_wall_s for part in imported.parts)
    moment = datetime.datetime.fromtimestamp(started, datetime.UTC)
    name = _valid_name(f"{imported.tool}-{path.stem}")
    run_id = f"{moment:%Y%m%d-%H%M%S}-{name}-{source.sha256[:4]}"
    folder = runs / run_id
    if reuse and (folder / "run.json").exists():
        return folder
    if folder.exists():
        raise HarnessError(
            f"{path}: was imported before, as {run_id}",
            next_step=f"`{command_line('harness', 'report', folder)}` shows it; remove it first.",
        )
    by_server = {
        field: {_valid_name(server): value for server, value in getattr(imported, field).items()}
        for field in ("arguments", "versions", "models")
    }
    imported = replace(imported, **by_server)
    cells: dict[str, ImportedPart] = {}
    for part in imported.parts:
        part = replace(part, server=_valid_name(part.server), load=_valid_name(part.load))
        cell = f"r{part.repeat}-{part.server}-{part.load}"
        if cell in cells:  # two names that are equal in their first 40 characters
            part = replace(part, load=f"{part.load[:36].strip('-')}-{len(cells)}")
            cell = f"r{part.repeat}-{part.server}-{part.load}"
        cells[cell] = part
    run = _make_run(run_id, name, source, imported, cells, machine)
    folder.mkdir(parents=True)
    with (folder / "requests.jsonl").open("wb") as file:
        for cell, part in cells.items():
            for record in part.records:
                file.write(msgspec.json.encode(replace(record, cell=cell, load=part.load)) + b"\n")
    numbers = {cell: part.numbers for cell, part in cells.items() if part.numbers is not None}
    if numbers:
        (folder / NUMBERS_FILE).write_bytes(pretty_json(numbers))
    write_run(folder, run)
    summary = summarize(folder)
    status: Status = "unchecked" if summary.valid is None else "invalid"
    write_run(folder, replace(run, status=status, reasons=summary.reasons))
    write_summary(folder, summary)
    return folder


def _make_run(
    run_id: str, name: str, source: Source, imported: Imported, cells: dict[str, ImportedPart], machine: str | None
) -> Run:
    rows: dict[tuple[str, str], ImportedPart] = {}
    for part in cells.values():
        first = rows.setdefault((part.server, part.load), part)
        rows[part.server, part.load] = replace(first, missing=first.missing | part.missing)
    return Run(
        definitions=DEFINITIONS,
        id=run_id,
        kind="import",
        status="running",
        started_wall_s=min(part.started_wall_s for part in cells.values()),
        ended_wall_s=max(part.ended_wall_s for part in cells.values()),
        scenario_name=name,
        scenario=_make_scenario(imported, list(cells.values())),
        workload_sha256=hashlib.sha256(msgspec.json.encode([imported.tool, imported.work], order="sorted")).hexdigest(),
        order=list(cells),
        cells=[_make_cell(cell, part, imported) for cell, part in cells.items()],
        machine=Machine(name=machine or UNKNOWN),
        versions={imported.tool: imported.version or UNKNOWN},
        origin=Origin(
            tool=imported.tool,
            version=imported.version,
            files={source.path.name: source.sha256},
            imported_wall_s=time.time(),
            importer=__version__,
            definitions=imported.definitions,
            missing=imported.missing,
            notes=imported.notes,
            rows=[
                RowOrigin(server=part.server, load=part.load, definitions=part.definitions, missing=part.missing)
                for part in rows.values()
                if part.definitions or part.missing
            ],
        ),
    )


def _make_scenario(imported: Imported, parts: list[ImportedPart]) -> Scenario:
    tool = f"{imported.tool} {imported.version}" if imported.version else imported.tool
    return Scenario(
        version=1,
        question=f"What did {tool} measure?",
        model=" ".join(printable(imported.model or UNKNOWN).split())[:1000],
        servers={part.server: Server(template="running") for part in parts},
        loads={
            # Never fixed: no file says that every answer had to have a certain length.
            part.load: Load(
                user="imported",
                users=_max_in_flight(part),
                requests=max(part.planned, 1),
                output="natural",
                endpoint=part.endpoint,
            )
            for part in parts
        },
        repeats=max(part.repeat for part in parts),
        warmup=Warmup(requests=0),
    )


def _make_cell(cell: str, part: ImportedPart, imported: Imported) -> CellRun:
    return CellRun(
        id=cell,
        server=part.server,
        load=part.load,
        repeat=part.repeat,
        started_wall_s=part.started_wall_s,
        ended_wall_s=part.ended_wall_s,
        served_by=ServedBy(
            url=UNKNOWN,
            model=imported.models.get(part.server, imported.model),
            version=imported.versions.get(part.server),
            arguments=imported.arguments.get(part.server, []),
            simulated=imported.simulated,
        ),
    )


def _max_in_flight(part: ImportedPart) -> int:
    """The maximum number of requests in flight: as requested, else by the records; 1 if neither is known."""
    if part.at_once is not None:
        return max(part.at_once, 1)
    events = [(r.sent_s, 1) for r in part.records] + [(r.sent_s + r.ended_s, -1) for r in part.records]
    peak = now = 0
    for _, step in sorted(events):
        now += step
        peak = max(peak, now)
    return max(peak, 1)


def _valid_name(text: str) -> str:
    """Make a valid name for a scenario, which is that in the id of the run."""
    return slug(text, UNKNOWN)
