"""What the files of a run hold: the records of each cell, and whether each line can be read."""

from pathlib import Path

import msgspec

from harness.records.directory import LINES
from harness.records.manifest import read_run
from harness.records.records import read_requests


def records_of(folder: Path) -> dict[str, set[tuple[str, float]]]:
    """The records of each cell: id and time of each."""
    records: dict[str, set[tuple[str, float]]] = {}
    for record in read_requests(folder / "requests.jsonl"):
        records.setdefault(record.cell, set()).add((record.id, record.sent_s))
    return records


def assert_whole(run: Path) -> None:
    """Each cell of the plan is there once, and each line of each file is of one of them and can be read."""
    manifest = read_run(run)
    assert (manifest.status, manifest.reasons) == ("valid", [])
    assert sorted(cell.id for cell in manifest.cells) == sorted(manifest.order)
    for name, kind in LINES.items():
        text = (run / name).read_bytes()
        assert text.endswith(b"\n") or not text
        assert {msgspec.json.decode(line, type=kind).cell for line in text.splitlines()} <= set(manifest.order)
    assert records_of(run).keys() == set(manifest.order)
