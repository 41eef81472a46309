"""The levels, or the combinations, of a stored run of `harness quick`."""

from pathlib import Path

from harness.numbers.summary import Summary
from harness.questions.quick.decide import CombinationNumbers, QuickLevel, combination_numbers, quick_levels
from harness.records import run_data
from harness.records.manifest import QUICK
from harness.run.running_server import combination_words


def read_levels(folder: Path, summary: Summary) -> tuple[list[QuickLevel], list[CombinationNumbers]]:
    """Return the levels or the combinations of a run of `harness quick`; none for another run, or without its records.

    Raises HarnessError for damaged ones.
    """
    if summary.scenario != QUICK or not (folder / "requests.jsonl").exists():
        return [], []
    data = run_data.load(folder)
    if combination_words(data.run.scenario):
        return [], combination_numbers(data, summary)
    return quick_levels(data, summary), []
