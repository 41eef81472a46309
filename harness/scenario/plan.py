"""From a scenario to the cells of its experiment, in the order in which they run."""

from itertools import groupby

import msgspec

from harness.scenario.mixes import mix_of
from harness.scenario.scenario import Baseline, Scenario
from harness.scenario.stages import staged


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement: a server under a load, once."""

    id: str  # "r1-SERVER-LOAD"
    server: str
    load: str
    repeat: int  # from 1


def plan(scenario: Scenario) -> list[Cell]:
    """All cells, interleaved: every repeat visits every server and load, so drift falls on all alike.

    Odd repeats go forward and even ones backward (A B C, C B A, ...), which cancels a linear drift.
    """
    cells = []
    for repeat in range(1, scenario.repeats + 1):
        once = [
            Cell(f"r{repeat}-{server}-{load}", server, load, repeat)
            for server in scenario.servers
            for load in scenario.loads
        ]
        # The stages of a load stay in their order.
        groups = [list(group) for _, group in groupby(once, key=lambda cell: (cell.server, staged(cell.load) or cell))]
        cells += once if repeat % 2 else [cell for group in reversed(groups) for cell in group]
    return cells


def at_once(cell: Cell) -> tuple[int, str, str]:
    """Cells that follow each other with the same run under one load generator or at once: stages, parts of a mix."""
    return cell.repeat, cell.server, mix_of(cell.load) or staged(cell.load) or cell.id


def baseline_of(scenario: Scenario) -> Baseline:
    """The stated baseline, else the first server with the first load."""
    if scenario.baseline is not None:
        return scenario.baseline
    return Baseline(server=next(iter(scenario.servers)), load=next(iter(scenario.loads)))
