"""The problems of a scenario's servers as lines of text."""

from harness.scenario import Scenario
from harness.serve import server_problems_of as _server_problems_of


def server_problems_of(scenario: Scenario, lines: dict[str, int]) -> list[str]:
    return list(map(str, _server_problems_of(scenario, lines)))
