"""The records of a run for other tools: one line or row a request, as Parquet or CSV, written batch by batch."""

import csv
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from harness.errors import HarnessError
from harness.redact import csv_field
from harness.rundir.manifest import Run, read_run
from harness.rundir.records import ProcessMark, Request, read_marks, read_requests
from harness.summarize import derive
from harness.summarize.summarize import is_published
from harness.summarize.tally import Clock

BATCH = 10_000
PACKED = "requests.jsonl.gz"  # as `harness publish --records` files them
EXTRA = "parquet"  # the optional dependencies of pyproject.toml that hold pyarrow
# Columns before and after the fields of a record; each number that is derived has its formula in docs/method.md.
BEFORE = {"run": "string", "server": "string", "repeat": "int64"}
AFTER = {
    "sent_wall_s": "double",  # Unix time
    "ttft_s": "double",
    "tpot_s": "double",
    "e2e_s": "double",
}
_TYPES = {str: "string", int: "int64", float: "double", bool: "bool"}


class Exported(NamedTuple):
    """What was written, and how many lines of the records could not be read."""

    records: int
    damaged: int


def refuse_ending(to: Path) -> None:
    """Raise HarnessError for a file of neither format."""
    if to.suffix not in (".parquet", ".csv"):
        raise HarnessError(
            f"--to: '{to}' ends in neither .parquet nor .csv", next_step="Give a name such as records.csv."
        )


def export(folder: Path, to: Path) -> Exported:
    """Write the records of a run directory to a file that ends in .parquet or .csv.

    The file appears when it is whole. Raises HarnessError for another ending, for a run without records, for Parquet
    without pyarrow, and when it cannot be written.
    """
    writers = {".parquet": _write_parquet, ".csv": _write_csv}
    refuse_ending(to)
    run = read_run(folder)
    path = folder / "requests.jsonl"
    if not path.exists():
        raise _without_records(folder)
    damaged: list[int] = []
    rows = _rows(run, read_requests(path, damaged), read_marks(folder / "processes.jsonl"))
    temporary = to.with_name(f"{to.name}.new")
    try:
        written = writers[to.suffix](temporary, rows)
        os.replace(temporary, to)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HarnessError(f"{to}: cannot be written ({error.strerror or error})") from None
    return Exported(written, len(damaged))


def _without_records(folder: Path) -> HarnessError:
    if (folder / PACKED).exists():
        return HarnessError(
            f"{folder}: the records are packed, in {PACKED}", next_step=f"gunzip --keep {folder / PACKED}"
        )
    if is_published(folder):
        return HarnessError(
            f"{folder}: only what was published of the run is here, and no records",
            next_step="Export the run's own directory; `harness publish --records` files its records, too.",
        )
    return HarnessError(
        f"{folder}: requests.jsonl is missing: the run's directory is not whole",
        next_step="Take it from a copy of the directory, such as a CI artifact; no other file holds the records.",
    )


def columns() -> dict[str, str]:
    """The columns and their types, as Arrow names them; all but those of a record's own required fields may be null."""
    fields = {name: _type(hint) for name, hint in get_type_hints(Request).items()}
    return BEFORE | fields | AFTER


def _type(annotation: Any) -> str:
    arms = [arm for arm in getattr(annotation, "__args__", (annotation,)) if arm is not type(None)]
    if annotation == list[float]:
        return "list<double>"
    return next((_TYPES[arm] for arm in arms if arm in _TYPES), "string")  # a Literal of words


def _rows(run: Run, requests: Iterator[Request], marks: list[ProcessMark]) -> Iterator[dict[str, Any]]:
    cells = {cell.id: cell for cell in run.cells}
    clocks: dict[str, Clock] = {}
    for request in requests:
        cell = cells.get(request.cell)
        if request.cell not in clocks:
            clocks[request.cell] = Clock([mark for mark in marks if mark.cell == request.cell])
        clock = clocks[request.cell]
        row: dict[str, Any] = {
            "run": run.id,
            "server": None if cell is None else cell.server,
            "repeat": None if cell is None else cell.repeat,
        }
        row |= {name: getattr(request, name) for name in request.__struct_fields__}
        row["bad_fields"] = msgspec.json.encode(request.bad_fields).decode() if request.bad_fields else None
        succeeded = request.error is None
        row["sent_wall_s"] = clock.wall_s(request.sent_s + clock.offset_s(request.process))
        row["ttft_s"] = derive.ttft_s(request) if succeeded else None
        row["tpot_s"] = derive.tpot_s(request) if succeeded else None
        row["e2e_s"] = derive.e2e_s(request)
        yield row


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise HarnessError(
            f"{path.stem}: Parquet needs the package pyarrow, which is not installed",
            next_step=f"pip install 'amd-llm-load[{EXTRA}]', or export to a .csv.",
        ) from None
    types = {name: getattr(pyarrow, {"double": "float64", "bool": "bool_"}.get(kind, kind))()
             for name, kind in columns().items() if kind != "list<double>"}  # fmt: skip
    types["chunks_s"] = pyarrow.list_(pyarrow.float64())
    schema = pyarrow.schema([(name, types[name]) for name in columns()])
    written = 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, BATCH)):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
            written += len(batch)
    return written


def _write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """An empty field is a number that is not known; chunk times are a JSON list in one field."""
    written = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns()), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            plain = {name: int(value) if isinstance(value, bool) else csv_field(value) for name, value in row.items()}
            writer.writerow(plain | {"chunks_s": msgspec.json.encode(row["chunks_s"]).decode()})
            written += 1
    return written
