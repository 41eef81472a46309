"""Loads that run at once against one server. Each part of a mix is a load, a cell and a row of its own: MIX.LOAD.

Kept apart from the scenario's own rules; it knows of a scenario what is handed to it.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from harness.scenario.scenario import Load, Scenario


def mix_of(load: str) -> str | None:
    """The mix that a load's name says it is a part of: `both` of `both.chat`."""
    mix, dot, _ = load.partition(".")
    return mix if dot else None


def alone(load: str) -> str | None:
    """The name of the same load without the others: `chat` of `both.chat`."""
    return load.partition(".")[2] or None


def others(load: str, mixes: Mapping[str, list[str]]) -> list[str]:
    """The other parts of its mix, which ran at the same time."""
    mix = mix_of(load)
    parts = [f"{mix}.{part}" for part in mixes.get(mix or "", [])]
    return [part for part in parts if part != load]


def expanded(scenario: "Scenario") -> "Scenario":
    """With each part of each mix among the loads, behind those that run alone; without parts that do not decode."""
    parts = {
        f"{mix}.{load}": scenario.loads[load]
        for mix, loads in scenario.mixes.items()
        for load in loads
        if load in scenario.loads
    }
    return msgspec.structs.replace(scenario, loads={**scenario.loads, **parts}) if parts else scenario


def names(scenario: "Scenario") -> list[str]:
    """Of all parts."""
    return [f"{mix}.{load}" for mix, loads in scenario.mixes.items() for load in loads]


def problems_of(scenario: "Scenario", known: Collection[str]) -> list[str]:
    """What is wrong with the mixes, before they are expanded. `known`: names of all loads, faulty ones included."""
    problems = [
        f"$.loads.{name}: a '.' is in the names of a mix's parts only" for name in scenario.loads if "." in name
    ]
    for mix, loads in scenario.mixes.items():
        problems += [f"$.mixes.{mix}: {problem}" for problem in _problems(mix, loads, scenario.loads, known)]
    warmup = scenario.warmup
    if scenario.mixes and warmup is not None and 0 in (warmup.requests, warmup.duration_s):
        problems.append("$.warmup: the parts of a mix begin to be measured together, when all have had their warm-up; "
                        "give it a number above 0, or remove it")  # fmt: skip
    return problems


def _problems(mix: str, loads: list[str], right: "Mapping[str, Load]", known: Collection[str]) -> list[str]:
    if mix in known:
        return ["there is a load of that name"]
    if len(loads) < 2 or len(set(loads)) != len(loads):
        return [f"two or more different loads are expected, got {loads}"]
    missing = [load for load in loads if load not in known]
    if missing:
        return [f"{missing[0]!r} is not a load; parts are loads that are in the scenario by themselves, too"]
    parts = [right[load] for load in loads if load in right]
    if any(part.stages for part in parts):
        return []  # harness.scenario.stages says why not
    if any(part.duration_s is None for part in parts):
        return ["a part has no 'duration_s'; who is finished sooner would leave the others alone"]
    if len({(part.duration_s, part.ramp_s) for part in parts}) > 1:
        return ["'duration_s' and 'ramp_s' must be the same for all parts, so that all are measured at the same time"]
    return []
