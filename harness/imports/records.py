"""The records of stock Locust (`--records FILE`), or of a Compose file's load, as a run that a report can show."""

from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.files import UNDECODABLE
from harness.imports import Imported, ImportedPart, Source, has
from harness.rundir.records import Request, read_marks

WRITTEN_BY = "locust -f locustfiles/chat.py --records FILE"
NAME = "records"


def is_it(value: Any) -> bool:
    lines = value if isinstance(value, list) else [value]  # a file of one line is that document
    return bool(lines) and has(lines[0], "cell", "user_class", "phase", "sent_s")


def read(source: Source) -> Imported:
    """One row for each load or user class. Raises HarnessError for a line that is no record."""
    records = []
    for number, line in enumerate(source.value if isinstance(source.value, list) else [source.value], start=1):
        try:
            records.append(msgspec.convert(line, Request))
        except UNDECODABLE as error:
            raise source.wrong(f"record {number}", str(error)) from None
    if all(one.phase == "warmup" for one in records):
        raise HarnessError(f"{source.path}: holds only warm-up requests", next_step="Record a longer load.")
    places = (Path(f"{source.path}.processes"), source.path.with_name("processes.jsonl"))
    marks = [mark for place in places for mark in read_marks(place)]
    if len({mark.host for mark in marks}) > 1:
        raise HarnessError(
            f"{source.path}: its records are from several machines, or from before and after a restart",
            next_step="Record to a file for each machine and each load.",
        )
    wall_s = marks[0].wall_s - marks[0].monotonic_s if marks else source.path.stat().st_mtime - _end_s(records)
    groups: dict[str, list[Request]] = {}
    for one in records:
        groups.setdefault(one.load or one.user_class, []).append(one)
    return Imported(
        tool="locust",
        version=None,
        model=None,
        parts=[_part(name, found, wall_s) for name, found in groups.items()],
        work=sorted(groups),
        definitions={},
        missing={},
    )


def _part(name: str, records: list[Request], wall_s: float) -> ImportedPart:
    began_s = min(one.sent_s for one in records)
    return ImportedPart(
        load=name,
        planned=sum(one.phase == "measured" for one in records),
        # All processes of one machine share its monotonic clock.
        records=[msgspec.structs.replace(one, sent_s=one.sent_s - began_s) for one in records],
        started_wall_s=wall_s + began_s,
        ended_wall_s=wall_s + _end_s(records),
    )


def _end_s(records: list[Request]) -> float:
    return max(one.sent_s + one.ended_s for one in records)
