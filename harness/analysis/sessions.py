"""The sessions of a run: parts between which time went by without measuring, or after which it was resumed."""

import itertools
import math

from harness.rundir.manifest import Run
from harness.summary import OPEN, Comparison, Reason, because

GAP_S = 3600.0  # an hour without a measurement: the machine may be warmer, or busy with something else


def sessions_of(run: Run) -> dict[str, int]:
    """Of each cell that came to its end the number of its session, from 0."""
    cells = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    resumed = [one.wall_s for one in run.resumed]
    found: dict[str, int] = {}
    session, ended_s = 0, math.inf
    for cell in cells:
        since = [at for at in resumed if ended_s < at <= cell.started_wall_s]
        session += bool(since) or cell.started_wall_s - ended_s >= GAP_S
        found[cell.id] = session
        ended_s = cell.ended_wall_s or cell.started_wall_s
    return found


def notes(run: Run) -> list[Reason]:
    """When a run was resumed, and pauses of hours between its cells."""
    found = []
    if run.resumed:
        found.append(
            because(
                "resumed",
                times=len(run.resumed),
                at=[one.wall_s for one in run.resumed],
                again=len({cell for one in run.resumed for cell in one.again}),
                attempts=[one.attempts for one in run.resumed if one.attempts],
            )
        )
    cells = sorted(run.ran.values(), key=lambda cell: cell.started_wall_s)
    pauses = [
        after.started_wall_s - (before.ended_wall_s or before.started_wall_s)
        for before, after in itertools.pairwise(cells)
    ]
    if longest := [pause for pause in pauses if pause >= GAP_S]:
        found.append(because("hours_apart", gaps=len(longest), hours=max(longest) / 3600))
    return found


def budget_notes(run: Run, comparison: Comparison | None) -> list[Reason]:
    """How far the budget of a run went: rows that were not measured, and verdicts that are open."""
    if run.budget is None:
        return []
    verdicts = [] if comparison is None else comparison.verdicts
    left = [one for one in verdicts if one.reason in OPEN]
    needed = [one.needed for one in left if one.needed is not None]
    found = [
        because(
            "budget",
            seconds=run.budget.seconds,
            decided=sum(one.reason is None for one in verdicts),
            verdicts=len(verdicts),
            looks=len(run.budget.looks),
        )
    ]
    if run.budget.unmeasured:
        found.append(because("budget_unmeasured", rows=run.budget.unmeasured))
    if left:
        names = list(dict.fromkeys(one.side for one in left))
        found.append(because("budget_open", rows=names, needed=max(needed) if len(needed) == len(left) else None))
    return found
