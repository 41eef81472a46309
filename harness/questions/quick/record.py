"""The levels of a stored run of `harness quick`."""

from pathlib import Path

from harness.numbers.summary import Summary
from harness.questions.quick.decide import QuickLevel, quick_levels
from harness.records import run_data
from harness.records.manifest import QUICK


def read_levels(folder: Path, summary: Summary) -> list[QuickLevel]:
    """Return the levels of a run of `harness quick`; none for another run, or without its records. Raises HarnessError
    for damaged ones.
    """
    is_quick = summary.scenario == QUICK and (folder / "requests.jsonl").exists()
    return quick_levels(run_data.load(folder), summary) if is_quick else []
