"""Whether two servers give the same answers to questions whose right answers are known, by docs/method.md.

The sample is the question. Each side is asked twice or more: what its own answers differ by is its noise.
"""

import itertools
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from harness.base.reason import Reason, because, evidence
from harness.numbers.comparison import SameAnswers
from harness.numbers.known_answers import KnownAnswer, answers_by_question, compare_answers
from harness.numbers.summarize import Summarized
from harness.records.columns import Rows
from harness.scenario import asks_known
from harness.scenario.plan import baseline_of

Answers = dict[int, list[KnownAnswer]]
Side = tuple[Answers, list[Reason]]  # of the valid cells of a server; and the first problem of each other cell


def same_answers(analysis: Summarized) -> list[SameAnswers]:
    """The verdicts of a run: each server against that of the baseline, for each load whose right answers are known."""
    base = baseline_of(analysis.data.run.scenario).server
    results = []
    for load in _loads(analysis):
        sides = _by_server([analysis], load)
        others = [name for name in sides if name != base and base in sides]
        results += [_compare(sides[name], sides[base], (name, base), load) for name in others]
    return [result for result in results if result is not None]


def same_answers_of_runs(sides: Sequence[tuple[str, Sequence[Summarized]]]) -> Iterator[SameAnswers]:
    """The verdicts of groups of runs against the first, for each server and load that all have."""
    (base_name, base), *others = sides
    for name, runs in others:
        for load in dict.fromkeys(load for analysis in base for load in _loads(analysis)):
            own, other = _by_server(runs, load), _by_server(base, load)
            for server in (server for server in other if server in own):
                names = f"{server} ({name})", f"{server} ({base_name})"
                if (result := _compare(own[server], other[server], names, load)) is not None:
                    yield result


def _loads(analysis: Summarized) -> list[str]:
    return [name for name, load in analysis.data.run.scenario.loads.items() if asks_known(load)]


def _by_server(runs: Sequence[Summarized], load: str) -> dict[str, Side]:
    """The answers of each server in all of some runs, of all its valid cells in their order; servers as planned.

    Of a setting that failed there is no side: its row says why.
    """
    valid: dict[str, list[Rows]] = {}
    invalid: dict[str, list[Reason]] = {}
    order = dict.fromkeys(server for analysis in runs for server in analysis.data.run.scenario.servers)
    for summary, data in runs:
        for cell in (cell for cell in summary.cells if cell.load == load):
            if cell.failed is not None:
                continue
            if cell.problems:
                invalid.setdefault(cell.server, []).append(replace(cell.problems[0], cell=cell.id))
            else:
                counted = data.cells[cell.id].counted
                valid.setdefault(cell.server, []).append(counted.where(counted.good))
    return {
        server: (answers_by_question(valid.get(server, [])), invalid.get(server, []))
        for server in order
        if server in valid or server in invalid
    }


def _compare(side: Side, base: Side, names: tuple[str, str], load: str) -> SameAnswers | None:
    """The verdict on the valid cells; inconclusive where a side has none, and each says what is left out."""
    left_out = list(itertools.chain(side[1], base[1]))
    result = compare_answers(side[0], base[0], names, load)
    if result is not None:
        return replace(result, left_out=left_out)
    if not any(problems and not answers for answers, problems in (side, base)):
        return None
    reason = because("answers_not_valid", f"no valid cell to compare ({evidence(left_out)})", cells=left_out)
    return SameAnswers(
        side=names[0], baseline=names[1], load=load, questions=0, noise=(None, None), right=(None, None),
        word="inconclusive", reason=reason, left_out=left_out,
    )  # fmt: skip
