"""A run that another tool measured: numbers that it gave ready-made, what is not known, what is defined otherwise."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.files import read_json
from harness.rundir.manifest import Origin, RowOrigin, Run
from harness.summary import NO_SAMPLE, Distribution, Numbers, Row

NUMBERS_FILE = "numbers.json"  # numbers of cells that have no records
OTHERWISE = "†"  # beside a number of a row that means something else than in the first row; a note says what

# What a field of Numbers means in a run of our own; docs/method.md. `percentiles` concerns all latencies.
DEFINITIONS = {
    "ttft_s": "first chunk with a generated token of any channel - sent, the connection already open",
    "ttfo_s": "first chunk with visible content - sent, the connection already open",
    "e2e_s": "last chunk with a generated token - sent, the connection already open",
    "tpot_s": "(last - first chunk with a generated token) / (output tokens that chunks carry - 1)",
    "chunk_gap_s": "difference of neighbouring chunks with generated tokens",
    "tokens_per_chunk": "output tokens that chunks carry / chunks with generated tokens",
    "prompt_tokens": "as the server's usage says",
    "output_tokens": "as the server's usage says",
    "output_tok_s": "output tokens as the server's usage says, generated inside the window / window",
    "input_tok_s": "prompt tokens as the server's usage says, of requests that ended inside the window / window",
    "requests_per_s": "successful requests that ended inside the window / window",
    "wall_s": "first sent to last ended",
    "send_lag_s": "sent - scheduled",
    "ttft_sched_s": "first chunk with a generated token of any channel - scheduled",
    "e2e_sched_s": "last chunk with a generated token - scheduled",
    "percentiles": "the least value that so many per cent do not exceed",
}
FORMULAS = 2  # version of DEFINITIONS; rows of a summary carry it
_FORMER = {  # in version 1, where it was something else
    "tpot_s": "(last - first chunk with a generated token) / (output tokens - 1)",
    "tokens_per_chunk": "output tokens / chunks with generated tokens",
}


def definition(run: Run, metric: str, row: tuple[str, str] | None = None) -> str:
    """What a metric (a field of Numbers, or `percentiles`) means in this run, or in one row (server, load) of it."""
    own = DEFINITIONS[metric]
    if run.origin is None:
        return own
    return (run.origin if row is None else run.origin.of_row(*row)).definitions.get(metric, own)


def refuse_other_definitions(runs: Sequence[Run], metric: str, rows: Sequence[tuple[str, str]] = ()) -> None:
    """Raise HarnessError, naming the metric and both definitions, unless it means the same in all runs.

    `rows` (server, load) are those that are compared; each must mean the same.
    """
    first, *others = runs
    for other in others:
        for row in (None, *rows):
            one, two = definition(first, metric, row), definition(other, metric, row)
            if one != two:
                where = "" if row is None else f" in the row {' / '.join(row)}"
                raise HarnessError(
                    f"runs whose definitions of '{metric}' differ{where} are not compared: {first.id} and {other.id}",
                    next_step="Compare runs of one tool, or measure both sides with `harness run`.",
                    detail=f"{first.id} ({_tool(first)}): {one}\n{other.id} ({_tool(other)}): {two}",
                )


def unlike_rows(row: Row, other: Row, fields: Sequence[str]) -> str | None:
    """Why two rows have no ratio by numbers of these fields: they mean different things. None: they do not."""
    for field in fields:
        one, two = (_meant(found, field) for found in (row, other))
        if one != two:
            return f"the definitions of '{field}' differ, so there is no ratio. {row.name}: {one}. {other.name}: {two}"
    return None


def _meant(row: Row, field: str) -> str:
    own = DEFINITIONS if row.formulas == FORMULAS else DEFINITIONS | _FORMER
    return row.definitions.get(field, own[field])


def given_numbers(folder: Path, run: Run) -> dict[str, Numbers]:
    """The numbers of cells whose tool gave no records. Raises HarnessError for a damaged file."""
    path = folder / NUMBERS_FILE
    return {} if run.origin is None or not path.exists() else read_json(path, dict[str, Numbers])


def known(numbers: Numbers, origin: Origin | None) -> Numbers:
    """`numbers` without what the tool's records cannot show."""
    if origin is None:
        return numbers
    blank: dict[str, Distribution | None] = {
        field: NO_SAMPLE if isinstance(getattr(numbers, field), Distribution) else None for field in origin.missing
    }
    return msgspec.structs.replace(numbers, **blank)


def notes(origin: Origin | None) -> list[str]:
    """What a reader must know of an imported run: where it is from, what is missing, what is defined otherwise."""
    if origin is None:
        return []
    names = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in origin.files.items())
    version = origin.version or "of unknown version"
    found = [
        f"imported from {origin.tool} {version}: {names}; nothing is known of the load generator's own health "
        "or of what served, beyond that file"
    ]
    found += origin.notes
    by_reason: dict[str, list[str]] = {}
    for field, why in origin.missing.items():
        by_reason.setdefault(why, []).append(field)
    found += [f"not known: {', '.join(fields)}: {why}" for why, fields in by_reason.items()]
    found += [f"defined otherwise: {field}: {text}" for field, text in origin.definitions.items()]
    return found + _notes_of_rows(origin.rows)


def _notes_of_rows(rows: Sequence[RowOrigin]) -> list[str]:
    """What differs from row to row, rows of the same together; the mark is that of the tables."""
    meant: dict[tuple[str, str], list[str]] = {}
    unknown: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for into, texts in ((meant, row.definitions), (unknown, row.missing)):
            for field, text in texts.items():
                into.setdefault((field, text), []).append(f"{row.server} / {row.load}")
    first: dict[str, str] = {}
    found = []
    for (field, text), names in meant.items():
        mark = "" if first.setdefault(field, text) == text else f"{OTHERWISE} "
        found.append(f"{mark}defined otherwise: {field} of {', '.join(names)}: {text}")
    return found + [f"not known: {field} of {', '.join(names)}: {why}" for (field, why), names in unknown.items()]


def _tool(run: Run) -> str:
    return "harness run" if run.origin is None else run.origin.tool
