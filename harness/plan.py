"""From a scenario to the cells of its experiment, in the order in which they run."""

import msgspec

from harness.scenario import Baseline, Scenario


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
        cells += once if repeat % 2 else once[::-1]
    return cells


def baseline_of(scenario: Scenario) -> Baseline:
    """The stated baseline, else the first server with the first load."""
    if scenario.baseline is not None:
        return scenario.baseline
    return Baseline(server=next(iter(scenario.servers)), load=next(iter(scenario.loads)))
