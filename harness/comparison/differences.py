"""In what the manifests of some sides differ: what is equal is not shown, what is the same difference is shown once."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from harness.judge import server_starts
from harness.judge.comparable import ABSENT, facts_of, flatten, in_words
from harness.rundir.manifest import Run
from harness.summary import Difference

Facts = Mapping[str, Any]
_ASKED = ("template", "variables")


def differences_of(runs: Sequence[Run]) -> list[Difference]:
    """In what whole runs differ, servers and loads that only some of them have included."""
    return differences(
        [facts_of(run, list(itertools.product(run.scenario.servers, run.scenario.loads))) for run in runs]
    )


def server_differences(run: Run) -> list[Difference]:
    """What is not equal between the servers, a value for each in the order of the scenario. Nothing for one server."""
    servers = list(run.scenario.servers)
    if len(servers) < 2:
        return []
    facts = [_server_facts(run, server) for server in servers]
    ran = {cell.server for cell in run.cells}
    if not ran.issuperset(servers):
        # How a server ran that never did is not known; what was asked for is.
        facts = [{key: one[key] for key in one if key.split(".")[0] in _ASKED} for one in facts]
    return differences(facts)


def _server_facts(run: Run, server: str) -> dict[str, object]:
    prefix = f"servers.{server}."
    known = facts_of(run, [(server, load) for load in run.scenario.loads])
    return {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}


def differences(sides: Sequence[Facts]) -> list[Difference]:
    """The keys in which the sides differ, and their values in words; of lists what not all of them have."""
    whole = [_expanded(side) for side in sides]
    found: dict[str, list[str]] = {}
    missing: set[str] = set()
    for key in _in_order(whole):
        values = [side.get(key, ABSENT) for side in whole]
        if any(value != values[0] for value in values[1:]) and not server_starts.is_noise(key, values):
            part = _missing_part(key, whole)
            if part is None:
                found[key] = in_words(values)
            elif part not in missing:
                missing.add(part)
                found[part] = [ABSENT if not _has(side, part) else "there" for side in whole]
    servers = list(dict.fromkeys(key.split(".")[1] for side in whole for key in side if key.startswith("servers.")))
    return [Difference(key=key, values=values) for key, values in _folded(found, servers).items()]


def _in_order(sides: Sequence[Facts]) -> list[str]:
    """All keys, those of one part of the manifest together also where only a later side has them."""
    keys = list(dict.fromkeys(key for side in sides for key in side))
    parts = list(dict.fromkeys(key.split(".")[0] for key in keys))
    return sorted(keys, key=lambda key: parts.index(key.split(".")[0]))


def _expanded(facts: Facts) -> dict[str, Any]:
    """Lists of mappings, such as GPUs, key by key."""
    result: dict[str, Any] = {}
    for key, value in facts.items():
        flatten(key, value, result, lists=True)
    return result


def _missing_part(key: str, sides: Sequence[Facts]) -> str | None:
    """The server or load of a key where some side does not have it at all."""
    part = ".".join(key.split(".")[:2])
    whole = key.startswith(("servers.", "loads.")) and not all(_has(side, part) for side in sides)
    return part if whole else None


def _has(side: Facts, part: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for key in side)


def _folded(found: Mapping[str, list[str]], servers: Sequence[str]) -> dict[str, list[str]]:
    """A difference that all servers have alike, as one of `servers.*`."""
    result: dict[str, list[str]] = {}
    for key, values in found.items():
        kind, _, rest = key.partition(".")
        server, _, name = rest.partition(".")
        alike = [found.get(f"servers.{one}.{name}") == values for one in servers]
        if kind == "servers" and name and server in servers and len(servers) > 1 and all(alike):
            result[f"servers.*.{name}"] = values
        else:
            result[key] = values
    return result
