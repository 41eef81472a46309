"""Loads whose number of users changes while they run. Each stage is a load, a cell and a row of its own: LOAD@USERS.

Kept apart from the scenario's own rules; it knows of a scenario what is handed to it.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from harness.scenario.scenario import Load, Scenario, Stage


def staged(load: str) -> str | None:
    """The load that a load's name says it is a stage of: `people` of `people@5`."""
    whole, at, _ = load.partition("@")
    return whole if at else None


def users_path(name: str, loads: Iterable[str]) -> str:
    """Where below `loads` the file says how many users a load has: of `people@5`, people.stages[0].users."""
    whole = staged(name)
    if whole is None:
        return f"{name}.users"
    return f"{whole}.stages[{[one for one in loads if staged(one) == whole].index(name)}].users"


def names(name: str, stages: "Sequence[Stage]") -> list[str]:
    """Of a load's stages. A number of users that comes again is numbered: people@5, people@20, people@5-2."""
    met: Counter[int] = Counter()
    found = []
    for stage in stages:
        met[stage.users] += 1
        again = f"-{met[stage.users]}" if met[stage.users] > 1 else ""
        found.append(f"{name}@{stage.users}{again}")
    return found


def expanded(scenario: "Scenario") -> "Scenario":
    """With each load that has stages replaced by them, in their order."""
    loads: dict[str, Load] = {}
    for name, load in scenario.loads.items():
        if not load.stages:
            loads[name] = load
            continue
        for each, stage in zip(names(name, load.stages), load.stages, strict=True):
            loads[each] = msgspec.structs.replace(load, users=stage.users, duration_s=stage.for_s)
    return msgspec.structs.replace(scenario, loads=loads)


def problems_of(scenario: "Scenario", written: Container[str]) -> list[str]:
    """What is wrong with stages, before they are expanded. `written`: the paths of all that the file says."""
    problems = [f"$.loads.{name}: an '@' is in the names of stages only" for name in scenario.loads if "@" in name]
    for name, load in scenario.loads.items():
        if load.stages:
            problems += [f"$.loads.{name}.{problem}" for problem in of_load(load)]
        elif f"$.loads.{name}.stages" in written:
            problems.append(f"$.loads.{name}.stages: it is empty; list two or more, or remove it")
    problems += [
        f"$.mixes.{mix}: '{part}' has stages, which no part can have: they begin when their users are there, "
        "not with the other loads"
        for mix, parts in scenario.mixes.items()
        for part in parts
        if part in scenario.loads and scenario.loads[part].stages
    ]
    return problems


def of_load(load: "Load") -> list[str]:
    """What does not go with a load's stages; each begins with its key."""
    problems = [] if len(load.stages) > 1 else ["stages: two or more are expected; else give 'users' and 'duration_s'"]
    for key, advice in (
        ("requests", "each stage lasts for its 'for_s'"),
        ("duration_s", "each stage lasts for its 'for_s'"),
        ("arrivals", "they say when requests are sent, whoever is there"),
        ("trace", "it says when requests are sent, whoever is there"),
    ):
        if getattr(load, key) is not None:
            problems.append(f"{key}: does not go with 'stages': {advice}; remove it")
    if load.users != 1:
        problems.append("users: each of the stages has its own; remove it")
    return problems
