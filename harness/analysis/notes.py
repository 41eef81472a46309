"""What a reader of a run must know besides its numbers: sessions, the budget, the quality of answers, a busy host."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from harness.rundir.manifest import Run
from harness.rundir.records import MAX_CPU, ProcessMark
from harness.summary import OPEN, Answers, CellSummary, Comparison, Reason, Row, because

GAP_S = 3600.0  # an hour without a measurement: the machine may be warmer, or busy with something else
HOST_CPU_FULL = 0.95  # of all cores, on average


def sessions_of(run: Run) -> dict[str, int]:
    """The session of each cell that came to its end, from 0: a new one begins after a resume or a pause of GAP_S."""
    resumed = [one.wall_s for one in run.resumed]
    found: dict[str, int] = {}
    session, ended_s = 0, math.inf
    for cell in sorted(run.ran.values(), key=lambda cell: cell.started_wall_s):
        since = [at for at in resumed if ended_s < at <= cell.started_wall_s]
        session += bool(since) or cell.started_wall_s - ended_s >= GAP_S
        found[cell.id] = session
        ended_s = cell.ended_wall_s or cell.started_wall_s
    return found


def of_sessions(run: Run) -> Iterator[Reason]:
    """When a run was resumed, and pauses of hours between its cells."""
    if run.resumed:
        yield because(
            "resumed",
            times=len(run.resumed),
            at=[one.wall_s for one in run.resumed],
            again=len({cell for one in run.resumed for cell in one.again}),
            attempts=[one.attempts for one in run.resumed if one.attempts],
        )
    cells = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    pauses = [
        after.started_wall_s - (before.ended_wall_s or before.started_wall_s)
        for before, after in itertools.pairwise(cells)
    ]
    if longest := [pause for pause in pauses if pause >= GAP_S]:
        yield because("hours_apart", gaps=len(longest), hours=max(longest) / 3600)


def of_budget(run: Run, comparison: Comparison | None) -> Iterator[Reason]:
    """How far the budget of a run went: rows that were not measured, and verdicts that are open."""
    if run.budget is None:
        return
    verdicts = [] if comparison is None else comparison.verdicts
    decided, looks = sum(one.reason is None for one in verdicts), len(run.budget.looks)
    yield because("budget", seconds=run.budget.seconds, decided=decided, verdicts=len(verdicts), looks=looks)
    if run.budget.unmeasured:
        yield because("budget_unmeasured", rows=run.budget.unmeasured)
    if left := [one for one in verdicts if one.reason in OPEN]:
        names = list(dict.fromkeys(one.side for one in left))
        needed = [one.needed for one in left if one.needed is not None]
        yield because("budget_open", rows=names, needed=max(needed) if len(needed) == len(left) else None)


def of_answers(rows: Sequence[Row], comparison: Comparison | None) -> list[Reason]:
    """Where of two compared rows one has more valid or more right answers."""
    named = {row.name: row.pooled.answers for row in rows}
    found = comparison.verdicts if comparison is not None else []
    notes = [
        answer_difference(side, [named.get(side)], base, [named.get(base)])
        for side, base in dict.fromkeys((verdict.side, verdict.baseline) for verdict in found)
    ]
    return [note for note in notes if note is not None]


def answer_difference(
    side: str, answers: Sequence[Answers | None], baseline: str, others: Sequence[Answers | None]
) -> Reason | None:
    """A note that the answers of two sides, each of one or more runs, differ in quality; None where they do not."""
    pairs = {
        "valid": [_sum(answers, "valid", "checked"), _sum(others, "valid", "checked")],
        "right": [_sum(answers, "right", "labelled"), _sum(others, "right", "labelled")],
    }
    unequal = {
        word: [mine, other]
        for word, (mine, other) in pairs.items()
        if mine[1] and other[1] and mine[0] * other[1] != other[0] * mine[1]
    }
    return because("answers_differ", side=side, baseline=baseline, **unequal) if unequal else None


def _sum(answers: Sequence[Answers | None], number: str, of: str) -> list[int]:
    known = [one for one in answers if one is not None]
    return [sum(getattr(one, number) or 0 for one in known), sum(getattr(one, of) for one in known)]


def of_failed_settings(rows: Iterable[Row]) -> list[Reason]:
    """A note on each setting of a sweep that failed: one for all rows of a server that did not start."""
    found: dict[tuple[str, str], Reason] = {}
    for row in rows:
        if row.failed is not None:
            which = row.server if row.failed.code == "setting_not_started" else row.name
            found.setdefault((which, row.failed.code), because("setting_failed", row=which, why=row.failed))
    return list(found.values())


def of_token_counters(cells: Sequence[CellSummary]) -> Iterator[Reason]:
    """Where the client's count of tokens was not checked against the server's, whose counter knows no stages."""
    alone = [cell for cell in cells if cell.stage is None]
    if unchecked := sum(cell.server_load.generated_tokens is None for cell in alone):
        yield because("no_token_counter", cells=unchecked, of=len(cells))
    if len(alone) < len(cells):
        yield because("stages_unchecked")


def of_host_cpu(cells: Sequence[CellSummary], marks: Iterable[ProcessMark]) -> Iterator[Reason]:
    """A busy host next to a load generator that had enough: no fault of the run, but readers ask about it."""
    loads = [cell.machine_load for cell in cells if cell.machine_load is not None]
    full = [share for load in loads if (share := load.host_cpu_mean) is not None and share >= HOST_CPU_FULL]
    if full:
        client = max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None)
        yield because("host_cpu_full", cells=len(full), share=max(full), client=client, max_share=MAX_CPU)
