"""A run as files for other programs: its records as Parquet or CSV, its rows as CSV, its numbers as other tools write
them.
"""

import csv
import errno
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, reason_of
from harness.base.files import open_output, pretty_json, refuse_named_pipe, replace_file
from harness.base.metrics import LATENCIES, STATISTICS, VALUES
from harness.base.redact import csv_field
from harness.numbers import formulas
from harness.numbers.summarize import summary_of
from harness.numbers.summary import Summary
from harness.records.clock import Clock
from harness.records.columns import rows_of
from harness.records.directory import no_records_error
from harness.records.manifest import Run, read_run
from harness.records.records import ProcessMark, Request, read_marks, read_requests
from harness.records.run_data import load
from harness.report.action_benchmark import TOOLS, charted_rows
from harness.report.results_table import MACHINE_VALUES, TableLine, field_or_none, raw_schedule, table_lines
from harness.report.vllm_bench import bench_results, sweep_results
from harness.scenario.plan import concurrent_parts

BATCH = 10_000
EXTRA = "parquet"  # the optional dependencies of pyproject.toml that hold pyarrow
# Columns before and after the fields of a record; docs/method.md has the formulas.
RUN_COLUMNS = {"run": "string", "server": "string", "repeat": "int64"}
DERIVED = ("ttft", "tpot", "e2e")  # latencies by their names in harness.base.metrics; the others are fields of a record
DERIVED_COLUMNS = {
    "sent_wall_s": "double",  # Unix time
    **dict.fromkeys(DERIVED, "double"),
}
_TYPES = {str: "string", int: "int64", float: "double", bool: "bool"}


class Exported(NamedTuple):
    records: int  # that were written
    damaged: int  # lines that could not be read


RECORDS = (".parquet", ".csv")  # endings of files of records
TOOL_FORMATS = ("vllm-bench-sweep", "vllm-bench", "github-action-benchmark")  # JSON, as these tools write or read it


def choose_format(to: Path, given: str | None = None) -> str:
    """Return the format of a file: the ending of a file of records, or one of TOOL_FORMATS.

    A file of JSON has the format that its name begins with, unless one is given. Raises HarnessError for another name.
    """
    named = given or next((name for name in TOOL_FORMATS if to.name.startswith(name)), None)
    if given is None and to.suffix in RECORDS:
        return to.suffix
    if to.suffix != ".json":
        endings = ".json" if given else ".parquet, .csv or .json"
        advice = f"Give a name such as {given or 'records'}.{'json' if given else 'csv'}"
        advice += ", or leave --format out to write records." if to.suffix in RECORDS else "."
        raise HarnessError(f"--to: '{to}' does not end in {endings}", next_step=advice)
    if named is None:
        raise HarnessError(
            f"--to: the name '{to.name}' does not tell whose JSON it is to be",
            next_step=f"Name it with --format: {', '.join(TOOL_FORMATS)}.",
        )
    return named


def export_as(
    folder: Path,
    to: Path,
    name: str,
    *,
    detailed: bool = False,
    row: str | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Write the numbers of a run as one of TOOL_FORMATS, and return the files.

    A run of several cells gives a file of `vllm-bench` for each, with the cell before the ending. The action reads
    one direction a file, `bigger` or `smaller`. `row`: only SERVER/LOAD. `say` receives each row that is left out,
    with the reason. Raises HarnessError where nothing is written.
    """
    contents: dict[Path, Any] = {}
    left_out: dict[str, str] = {}
    notes: dict[str, str] = {}
    if name == "github-action-benchmark":
        summary, run = summary_of(folder), read_run(folder)
        for direction in TOOLS:
            entries = [
                entry
                for entry in charted_rows(summary, run, direction)
                if row is None or entry.name.startswith(f"{row.replace('/', ' / ')}: ")
            ]
            if entries:
                contents[_with_part(to, direction)] = entries
    else:
        results, left_out, notes = bench_results(load(folder), detailed=detailed, row=row)
        if name == "vllm-bench-sweep":
            contents = {to: sweep_results(results)} if results else {}
        else:
            contents = {to if len(results) == 1 else _with_part(to, cell): content for cell, content in results}
    if not contents:
        raise _no_results_error(folder, left_out) if left_out else _no_numbers_error(folder, name, row)
    for path, content in contents.items():
        is_short = name == "github-action-benchmark"  # the lists of the others have an entry for each request
        with _output(path):
            replace_file(path, pretty_json(content) if is_short else msgspec.json.encode(content) + b"\n")
    for label, why in left_out.items():
        say(f"left out: {label} {why}")
    for label, note in notes.items():
        say(f"note: {label} {note}")
    return list(contents)


def _no_results_error(folder: Path, left_out: Mapping[str, str]) -> HarnessError:
    """Return the error for rows that are no load alone."""
    whys = [f"{label} {why}" for label, why in left_out.items()]
    return HarnessError(
        f"{folder.name}: no row has a result of vllm bench" + (f": {whys[0]}" if len(whys) == 1 else ""),
        detail="\n".join(whys) if len(whys) > 1 else "",
        next_step="Export the report's numbers (`--to github-action-benchmark.json`) or the requests (`--to "
        "records.csv`). For vllm bench, measure each load alone.",
    )


def _no_numbers_error(folder: Path, name: str, row: str | None) -> HarnessError:
    """Return the error for a run, or a row of it, that gives no file of a tool."""
    run = read_run(folder)
    loads = {f"{cell.server}/{cell.load}": cell.load for cell in run.cells}
    advice = f"Its rows: {', '.join(loads)}."
    if row and row not in loads:
        return HarnessError(f"{folder.name}: has no row '{row}'", next_step=advice)
    chosen = [load for label, load in loads.items() if row in (None, label)]
    if name != "github-action-benchmark" and any(
        load in run.scenario.loads and run.scenario.loads[load].endpoint == "embeddings" for load in chosen
    ):
        advice += " Loads of embeddings have no result of this kind."
    return HarnessError(
        f"{folder.name}: has no such numbers" + (f" of the row '{row}'" if row else ""), next_step=advice
    )


@contextmanager
def _output(to: Path) -> Iterator[Path]:
    """Check that a file can be written, and yield the temporary file that becomes it; it is removed at the end.

    Raises HarnessError with the name that the user gave, for any OSError that is not of another file.
    """
    temporary = to.with_name(f"{to.name}.new")
    try:
        for path in (to, temporary):
            refuse_named_pipe(path)
        if to.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(to))
        open_output(temporary, "wb").close()
        yield temporary
    except OSError as error:
        if error.filename not in (None, str(to), str(temporary)):
            raise
        has_folder = to.parent.exists()
        advice = (
            "Name another file."
            if has_folder
            else f"Make its folder first: `{command_line('mkdir', '-p', to.parent)}`."
        )
        raise HarnessError(f"{to}: cannot be written ({reason_of(error)})", next_step=advice) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _with_part(to: Path, part: str) -> Path:
    return to.with_name(f"{to.stem}.{part}{to.suffix}")


def export(folder: Path, to: Path) -> Exported:
    """Write the records of a run directory to a file that ends in .parquet or .csv.

    The file appears when it is whole. Raises HarnessError for another ending, for a run without records, and for
    Parquet without pyarrow.
    """
    if (kind := choose_format(to)) not in RECORDS:
        raise HarnessError(f"--to: '{to}' is a file of {kind}, not of records")
    write = _write_parquet if to.suffix == ".parquet" else _write_csv
    damaged: list[int] = []
    rows = _record_rows(*_dated_records(folder, damaged))
    with _output(to) as temporary:
        written = write(temporary, rows)
        os.replace(temporary, to)
    return Exported(written, len(damaged))


def arrow_table(folder: Path) -> Any:
    """The records of a run directory as a `pyarrow.Table` with the columns of an export. Torn lines give a warning.

    Raises HarnessError for a run without records, and without pyarrow.
    """
    pyarrow = _import_pyarrow("records as a table")
    damaged: list[int] = []
    rows = _record_rows(*_dated_records(folder, damaged))
    schema = _arrow_schema(pyarrow)
    table = pyarrow.Table.from_batches(_arrow_batches(pyarrow, schema, rows), schema=schema)
    if damaged:
        warnings.warn(f"{folder / 'requests.jsonl'}: {len(damaged)} lines left out: not readable", stacklevel=3)
    return table


def _dated_records(folder: Path, damaged: list[int]) -> tuple[Run, Iterator[tuple[Request, float | None]]]:
    """Return the manifest and the records of a run directory, each with the Unix time of sending; None: not known.

    Raises HarnessError for a run without records.
    """
    run, path = read_run(folder), folder / "requests.jsonl"
    if not path.exists():
        raise no_records_error(folder)
    requests = read_requests(path, damaged)
    if run.origin is not None and run.origin.tool == "locust":  # their times count from the start of their cell
        started = {cell.id: cell.started_wall_s for cell in run.cells}
        return run, ((r, started[r.cell] + r.sent_s) for r in requests if r.cell in started)
    return run, _with_send_times(requests, read_marks(folder / "processes.jsonl"))


def _with_send_times(requests: Iterator[Request], marks: list[ProcessMark]) -> Iterator[tuple[Request, float | None]]:
    clocks: dict[str, Clock] = {}
    for request in requests:
        if request.cell not in clocks:
            clocks[request.cell] = Clock([mark for mark in marks if mark.cell == request.cell])
        clock = clocks[request.cell]
        yield request, clock.wall_s(request.sent_s + clock.offset_s(request.process))


def record_columns() -> dict[str, str]:
    """The columns and their types, as Arrow names them. Only a record's required fields are never null."""
    fields = {name: _arrow_type(hint) for name, hint in get_type_hints(Request).items()}
    return RUN_COLUMNS | fields | DERIVED_COLUMNS


def _arrow_type(annotation: Any) -> str:
    if annotation == list[float]:
        return "list<double>"
    arms = getattr(annotation, "__args__", (annotation,))
    return next((_TYPES[arm] for arm in arms if arm in _TYPES), "string")  # a Literal of words


def _record_rows(run: Run, requests: Iterator[tuple[Request, float | None]]) -> Iterator[dict[str, Any]]:
    while batch := list(islice(requests, BATCH)):
        yield from _batch_rows(run, batch)


def _batch_rows(run: Run, batch: Sequence[tuple[Request, float | None]]) -> Iterator[dict[str, Any]]:
    cells = {cell.id: cell for cell in run.cells}
    rows = rows_of([request for request, _ in batch])
    derived = np.array([np.where(rows.good, formulas.FORMULAS[name](rows), np.nan) for name in DERIVED])
    for (request, wall_s), values in zip(batch, derived.T.tolist(), strict=True):
        cell = cells.get(request.cell)
        yield {
            "run": run.id,
            "server": field_or_none(cell, "server"),
            "repeat": field_or_none(cell, "repeat"),
            **{name: getattr(request, name) for name in request.__struct_fields__},
            "bad_fields": msgspec.json.encode(request.bad_fields).decode() if request.bad_fields else None,
            "sent_wall_s": wall_s,
            **{name: None if math.isnan(value) else value for name, value in zip(DERIVED, values, strict=True)},
        }


def _import_pyarrow(what: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise HarnessError(
            f"{what} needs the package pyarrow, which is not installed",
            next_step=f"pip install 'amd-llm-load[{EXTRA}]', or export to a .csv.",
        ) from None
    return pyarrow


def _arrow_schema(pyarrow: Any) -> Any:
    types = {kind: pyarrow.type_for_alias(kind) for kind in (*_TYPES.values(), "double")}
    types["list<double>"] = pyarrow.list_(pyarrow.float64())
    return pyarrow.schema([(name, types[kind]) for name, kind in record_columns().items()])


def _arrow_batches(pyarrow: Any, schema: Any, rows: Iterator[dict[str, Any]]) -> Iterator[Any]:
    while batch := list(islice(rows, BATCH)):
        yield pyarrow.RecordBatch.from_pylist(batch, schema=schema)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    pyarrow = _import_pyarrow(f"{path.stem}: Parquet")
    schema = _arrow_schema(pyarrow)
    written = 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _arrow_batches(pyarrow, schema, rows):
            writer.write_batch(batch)
            written += len(batch)
    return written


def _write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """An empty field is a number that is not known; chunk times are a JSON list in one field."""
    written = 0
    with open_output(path) as file:
        writer = csv.DictWriter(file, fieldnames=list(record_columns()), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            plain = {name: int(value) if isinstance(value, bool) else csv_field(value) for name, value in row.items()}
            writer.writerow(plain | {"chunks_s": msgspec.json.encode(row["chunks_s"]).decode()})
            written += 1
    return written


_CSV_STAGES = ("api", "queue", "prefill", "decode")  # fields of TimeSplit
_CSV_ANSWERS = ("checked", "valid", "labelled", "right")
_CSV_VERDICT = {  # field of a Verdict, by column
    "speedup_against": "baseline", "speedup_by": "metric", "speedup": "ratio", "speedup_low": "low",
    "speedup_high": "high", "p": "p", "verdict": "word",
}  # fmt: skip


def csv_table(summary: Summary, run: Run) -> str:
    """The rows of a run as CSV: raw numbers, times in seconds. An empty field: the number is not known."""
    rows = [_csv_row(line, concurrent_parts(line.row.load, run.scenario.mixes)) for line in table_lines(summary, run)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["server", "load"], lineterminator="\n")
    writer.writerow({name: csv_field(name) for name in writer.fieldnames})
    writer.writerows({name: csv_field(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _csv_row(line: TableLine, concurrent_loads: list[str]) -> dict[str, str | int | float | None]:
    row, numbers = line.row, line.row.pooled
    record: dict[str, str | int | float | None] = {
        "server": row.server,
        "load": row.load,
        "concurrent_loads": " ".join(concurrent_loads),
        "runs": len(row.cells),
        **{name: getattr(numbers, name) for name in ("sent", "succeeded", "failed", "unfinished", "abandoned")},
        **{metric.name: metric.of(numbers) for metric in VALUES},
        "completion_tokens_per_run": line.tokens,
        "vectors": numbers.vectors,
        "client_limited": " ".join(row.client_limited),
        **{f"answers_{name}": field_or_none(numbers.answers, name) for name in _CSV_ANSWERS},
        **{f"prompt_tokens_{name}": field_or_none(numbers.prompts, name) for name in ("asked", "got")},
    }
    for latency in LATENCIES:
        if latency.csv:
            sample = latency.sample(numbers)
            record |= {f"{latency.name}_{statistic}": getattr(sample, statistic) for statistic in STATISTICS}
            if latency.slo:
                censored = {"censored": sample.censored, "unknown": sample.unknown, "above": sample.above}
                record |= {f"{latency.name}_{name}": value for name, value in censored.items()}
    record |= raw_schedule(row)
    record |= {name: field_or_none(row.machine_load, field) for name, field in MACHINE_VALUES.items()}
    record |= {f"{stage}_mean_s": field_or_none(row.time, f"{stage}_s") for stage in _CSV_STAGES}
    record["limited_by"] = row.limited_by
    for slos, attained in numbers.slos.items():
        record |= {
            f"attainment({slos})": attained.attainment,
            f"attainment_unknown({slos})": attained.unknown,
            f"goodput({slos})": attained.goodput,
        }
    record["baseline"] = int(line.baseline)
    record |= {name: field_or_none(line.verdict, field) for name, field in _CSV_VERDICT.items()}
    return record | {"verdict": line.words}
