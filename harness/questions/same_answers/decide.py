"""Whether two servers give the same answers to questions whose right answers are known, by docs/method.md.

The sample is the question. Each side is asked twice or more: what its own answers differ by is its noise.
"""

from collections.abc import Iterator, Sequence

from harness.numbers.comparison import SameAnswers
from harness.numbers.known_answers import KnownAnswer, answers_by_question, compare_answers
from harness.records.columns import Rows
from harness.records.run_data import RunData
from harness.scenario import asks_known
from harness.scenario.plan import baseline_of


def same_answers(data: RunData) -> list[SameAnswers]:
    """The verdicts of a run: each server against that of the baseline, for each load whose right answers are known."""
    base = baseline_of(data.run.scenario).server
    results = []
    for load in _loads(data):
        sides = _by_server([data], load)
        others = {name: answers for name, answers in sides.items() if name != base} if base in sides else {}
        results += [compare_answers(answers, sides[base], (name, base), load) for name, answers in others.items()]
    return [result for result in results if result is not None]


def same_answers_of_runs(sides: Sequence[tuple[str, Sequence[RunData]]]) -> Iterator[SameAnswers]:
    """The verdicts of groups of runs against the first, for each server and load that all have."""
    (base_name, base), *others = sides
    for name, runs in others:
        for load in dict.fromkeys(load for data in base for load in _loads(data)):
            own, other = _by_server(runs, load), _by_server(base, load)
            for server in own.keys() & other.keys():
                names = f"{server} ({name})", f"{server} ({base_name})"
                if (result := compare_answers(own[server], other[server], names, load)) is not None:
                    yield result


def _loads(data: RunData) -> list[str]:
    return [name for name, load in data.run.scenario.loads.items() if asks_known(load)]


def _by_server(runs: Sequence[RunData], load: str) -> dict[str, dict[int, list[KnownAnswer]]]:
    """The answers of each server in all of some runs, of all its valid cells in their order."""
    cells: dict[str, list[Rows]] = {}
    for data in runs:
        for name, cell in data.planned.items():
            if cell.load == load and name in data.cells:
                counted = data.cells[name].counted
                cells.setdefault(cell.server, []).append(counted.where(counted.good))
    return {server: answers_by_question(rows) for server, rows in cells.items()}
