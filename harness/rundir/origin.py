"""A run that another tool measured: numbers that it gave ready-made, what is not known, what is defined otherwise."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness import columns
from harness.errors import HarnessError
from harness.files import read_json
from harness.reasons import sentence
from harness.rundir.manifest import Origin, RowOrigin, Run
from harness.summary import FORMAT_VERSION, NO_SAMPLE, Distribution, Numbers, Reason, Row, because

NUMBERS_FILE = "numbers.json"  # numbers of cells that have no records

# What a field of Numbers means in a run of our own; docs/method.md. `percentiles` concerns all latencies.
DEFINITIONS = {
    **columns.DEFINITIONS,
    "tokens_per_chunk": "output tokens that chunks carry / chunks with generated tokens",
    "prompt_tokens": "as the server's usage says",
    "output_tokens": "as the server's usage says",
    "percentiles": "the least value that so many per cent do not exceed",
}
FORMULAS = 2  # version of DEFINITIONS; rows of a summary carry it
_FORMER = {  # in version 1, where it was something else
    "tpot_s": "(last - first chunk with a generated token) / (output tokens - 1)",
    "tokens_per_chunk": "output tokens / chunks with generated tokens",
}


class UnlikeError(HarnessError):
    """Runs that are not compared. `about`: the one thing that a comparison of them can be about, if there is one."""

    about: str | None = None

    def __init__(self, reason: Reason, *, next_step: str = "", detail: str = "") -> None:
        super().__init__(sentence(reason), next_step=next_step, detail=detail)
        self.reason = reason


def definition(run: Run, metric: str, row: tuple[str, str] | None = None) -> str:
    """What a metric (a field of Numbers, or `percentiles`) means in this run, or in one row (server, load) of it."""
    own = DEFINITIONS[metric]
    if run.origin is None:
        return own
    return (run.origin if row is None else run.origin.of_row(*row)).definitions.get(metric, own)


def refuse_other_definitions(runs: Sequence[Run], metric: str, rows: Sequence[tuple[str, str]] = ()) -> None:
    """Raise UnlikeError, naming the metric and both definitions, unless it means the same in all runs.

    `rows` (server, load) are those that are compared; each must mean the same.
    """
    first, *others = runs
    for other in others:
        for row in (None, *rows):
            one, two = definition(first, metric, row), definition(other, metric, row)
            if one != two:
                where = {} if row is None else {"row": " / ".join(row)}
                raise UnlikeError(
                    because("definitions_of_runs", field=metric, run=first.id, other=other.id, **where),
                    next_step="Compare runs of one tool, or measure both sides with `harness run`.",
                    detail=f"{first.id} ({_tool(first)}): {one}\n{other.id} ({_tool(other)}): {two}",
                )


def unlike_rows(row: Row, other: Row, fields: Sequence[str]) -> Reason | None:
    """Why two rows have no ratio by numbers of these fields: they mean different things. None: they do not."""
    for field in fields:
        one, two = (_meant(found, field) for found in (row, other))
        if one != two:
            return because(
                "definitions_differ", field=field, row=row.name, meaning=one, other=other.name, other_meaning=two
            )
    return None


def _meant(row: Row, field: str) -> str:
    own = DEFINITIONS if row.formulas == FORMULAS else DEFINITIONS | _FORMER
    return row.definitions.get(field, own[field])


def given_numbers(folder: Path, run: Run) -> dict[str, Numbers]:
    """The numbers of cells whose tool gave no records. Raises HarnessError for a damaged file."""
    path = folder / NUMBERS_FILE
    if run.origin is None or not path.exists():
        return {}
    return read_json(path, dict[str, Numbers], FORMAT_VERSION, upgrade=lambda _: None)  # it has no version of its own


def known(numbers: Numbers, origin: Origin | None) -> Numbers:
    """`numbers` without what the tool's records cannot show."""
    if origin is None:
        return numbers
    blank: dict[str, Distribution | None] = {
        field: NO_SAMPLE if isinstance(getattr(numbers, field), Distribution) else None for field in origin.missing
    }
    return msgspec.structs.replace(numbers, **blank)


def notes(origin: Origin | None) -> list[Reason]:
    """What a reader must know of an imported run: where it is from, what is missing, what is defined otherwise."""
    if origin is None:
        return []
    found = [because("imported", tool=origin.tool, version=origin.version, files=origin.files), *origin.notes]
    by_reason: dict[str, list[str]] = {}
    for field, why in origin.missing.items():
        by_reason.setdefault(why, []).append(field)
    found += [because("import_unknown", why=why, fields=fields) for why, fields in by_reason.items()]
    found += [because("import_defined", field=field, meaning=text) for field, text in origin.definitions.items()]
    return found + _notes_of_rows(origin.rows)


def _notes_of_rows(rows: Sequence[RowOrigin]) -> list[Reason]:
    """What differs from row to row, rows of the same together."""
    defined: dict[tuple[str, str], list[str]] = {}
    unknown: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for into, texts in ((defined, row.definitions), (unknown, row.missing)):
            for field, text in texts.items():
                into.setdefault((field, text), []).append(f"{row.server} / {row.load}")
    first: dict[str, str] = {}
    found = []
    for (field, text), names in defined.items():
        other = first.setdefault(field, text) != text
        found.append(because("import_defined", field=field, meaning=text, rows=names, other=other))
    return found + [
        because("import_unknown", why=why, fields=[field], rows=names) for (field, why), names in unknown.items()
    ]


def _tool(run: Run) -> str:
    return "harness run" if run.origin is None else run.origin.tool
