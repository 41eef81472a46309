"""Only like is compared with like: what two runs' manifests must have in common."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.judge import server_starts
from harness.rundir.manifest import CellRun, Run, ServedBy
from harness.rundir.origin import UnlikeError
from harness.summary import because

# What differs with one thing by nature: who compares images also gets their versions.
FOLLOWS = {
    "image": ("image_digest", "version", "container.Image", "contents", "startup", "effective"),
    "image_digest": ("image", "version", "container.Image", "contents", "startup", "effective"),
    "version": ("image", "image_digest", "container.Image", "contents", "startup", "effective"),
    "variables": ("arguments", "container", "startup", "effective"),
    "arguments": ("variables", "container.Cmd", "startup", "effective"),
    "model": ("startup", "effective"),
    # Ids of groups and names of device nodes are the machine's own; images and arguments must stay the same.
    # What an engine chooses by itself follows from the memory that it finds.
    "load generator": ("locustfile",),  # a part of it, which older manifests do not have apart
    "machine": ("versions", "HostConfig.GroupAdd", "HostConfig.Devices", "startup", "effective"),
}
# Not what is measured but how often, how long it was watched, what is asked of the numbers, and what chance chose.
_SCENARIO = (
    "compare", "question", "servers", "loads", "repeats", "baseline", "checks", "max_error_rate", "model",
    "api_key_env", "swept",
)  # fmt: skip
_SERVER = ("startup_timeout_s", "allow")
_CONTAINER = ("NetworkMode", "PortBindings")
_ALWAYS = ("workload_sha256", "simulated")  # equal in every comparison
# Shown where it differs, and no reason to refuse: a checkout also moves when results are committed (of the code that
# measures, `versions` has a sum), and the load is the same however many machines send it.
NOTED = ("git_commit", "load_machines")
ABSENT = "nothing"


def refuse_unlike(
    runs: Sequence[Run], rows: Sequence[tuple[str, str]], groups: Sequence[int], about: str | None
) -> None:
    """Raise UnlikeError, naming key and both values, unless the runs may be compared on these rows (server, load).

    `groups` says to which side each run belongs. `about` is the one key that the sides may differ in: a manifest
    key, the beginning of one (`machine`), or its end (`image_digest`). Runs of one side must agree in all.
    """
    facts = [facts_of(run, rows) for run in runs]
    excused: set[str] = set()
    apart: dict[int, list[str]] = {}  # by the first run of a side: in what it differs from the baseline
    for index in range(1, len(runs)):
        first = groups.index(groups[index])
        keys = _differing(facts[0 if index == first else first], facts[index])
        if index == first:
            apart[index] = keys
            excused |= _excused(about, keys)
        elif keys:
            _refuse(runs, facts, first, index, keys, "Runs of one side must be equal; leave out those that are not.")
    for index, keys in apart.items():
        if left := [key for key in keys if key not in _excused(about, keys)]:
            name = None if about is not None else _about([*filter(None, apart.values())])
            _refuse(runs, facts, 0, index, left, _advice(left, about, name), name)
    if about is not None and not excused:
        known = sorted({".".join(key.split(".")[:2]) for key in facts[0]} - set(_ALWAYS))
        raise UnlikeError(
            because("about_equal", about=about),
            next_step=f"Leave it out, or name one of: {', '.join(known)}.",
        )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two runs must be equal, and are not."""
    return [
        key
        for key in dict.fromkeys([*one, *other])
        if key not in NOTED
        and not server_starts.is_measured(key)
        and not server_starts.is_unreported(key, one, other)
        and one.get(key, ABSENT) != other.get(key, ABSENT)
    ]


def _refuse(
    runs: Sequence[Run],
    facts: Sequence[Mapping[str, Any]],
    first: int,
    second: int,
    keys: Sequence[str],
    advice: str,
    about: str | None = None,
) -> None:
    """Raise UnlikeError for keys in which two runs differ."""
    shown = []
    for key in keys:
        values = [facts[index].get(key, ABSENT) for index in (first, second)]
        shown.append([key, *map(_shortened, in_words(values))])
    run, other = runs[first].id, runs[second].id
    key, mine, theirs = shown[0]
    lines = [f"{key}: {mine} in {run}, {theirs} in {other}" for key, mine, theirs in shown]
    error = UnlikeError(
        because("runs_differ", key=key, run=run, value=mine, other=other, other_value=theirs, more=len(keys) - 1),
        next_step=advice,
        detail="\n".join(lines) if len(keys) > 1 else "",
    )
    error.about = about
    raise error


def _advice(differing: Sequence[str], about: str | None, name: str | None) -> str:
    if any(key in _ALWAYS for key in differing):
        return "The work must be the same, and a model of an engine is not compared with an engine."
    if about is not None:
        return f"A comparison is about one thing, here '{about}'; make the runs equal in everything else."
    if name is None:
        return "They differ in more than one thing; make them equal in all but the one that the comparison is about."
    return f"If the comparison is about just that, say so: --about {shlex.quote(name)}"


def _about(sides: Sequence[Sequence[str]]) -> str | None:
    """The one thing, as narrow as it can be, that excuses all in which each side differs."""
    split = [key.split(".") for key in sides[0]]
    ends = [".".join(steps[start:]) for steps in split for start in reversed(range(len(steps)))]
    starts = [".".join(steps[:end]) for steps in split for end in reversed(range(1, len(steps)))]
    names = (name for name in ends + starts if all(_excused(name, keys) == set(keys) for keys in sides))
    return next(names, None)


def _excused(about: str | None, differing: Sequence[str]) -> set[str]:
    """The keys that a comparison about `about` allows to differ, with those that follow from them."""
    if about is None:
        return set()
    direct = {key for key in differing if _is_in(about, key) and key not in _ALWAYS}
    stems = {step for key in direct for step in key.split(".")} & FOLLOWS.keys()
    followers = [name for stem in stems for name in FOLLOWS[stem]]
    return direct | {key for key in differing if any(_is_in(name, key) for name in followers)}


def _is_in(name: str, key: str) -> bool:
    """Whether the steps of `name` are neighbouring steps of `key`."""
    return f".{name}." in f".{key}."


def facts_of(run: Run, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The manifest as flat keys, most telling first, for these rows (server, load). What chance chose is no fact."""
    scenario = msgspec.to_builtins(run.scenario)
    facts: dict[str, Any] = {
        "workload_sha256": run.workload_sha256,
        "simulated": run.simulated,
        "model": run.scenario.model,
    }
    for load in dict.fromkeys(load for _, load in rows):
        flatten(f"loads.{load}", scenario["loads"][load], facts)
        if (digest := run.locustfiles.get(run.scenario.loads[load].user)) is not None:
            facts[f"loads.{load}.locustfile"] = digest
    for server in dict.fromkeys(server for server, _ in rows):
        given = {key: value for key, value in scenario["servers"][server].items() if key not in _SERVER}
        flatten(f"servers.{server}", given, facts)
        cells = [cell for cell in run.served if cell.server == server]
        for cell in cells:
            _add_served(f"servers.{server}", run, cell, facts)
        for key, value in server_starts.measured([cell.served_by for cell in cells]).items():
            facts[f"servers.{server}.{key}"] = value
    flatten("scenario", {key: value for key, value in scenario.items() if key not in _SCENARIO}, facts)
    flatten("machine", msgspec.to_builtins(run.machine), facts)
    flatten("versions", dict(run.versions), facts)
    facts["git_commit"] = run.git_commit
    if run.origin is None:
        facts["load_machines"] = 1 if run.workers is None else run.workers.machines
    return facts


def _served(served: ServedBy, run: Run, cell: CellRun) -> dict[str, Any]:
    container = dict(served.container or {})
    if isinstance(host := container.get("HostConfig"), dict):
        container["HostConfig"] = {key: value for key, value in host.items() if key not in _CONTAINER}
    return {
        "image": served.image,
        "image_digest": served.image_digest,
        "version": served.version,
        "model": served.model,
        "over_ssh": served.over_ssh,
        "arguments": _without_names(_without_port(served.arguments), run.id, cell.id),
        "container": _without_names(container, run.id, cell.id),
        **_without_names(_without_ports(server_starts.settings(served)), run.id, cell.id),
    }


def _add_served(name: str, run: Run, cell: CellRun, facts: dict[str, Any]) -> None:
    """What really served a cell; a second cell that was served otherwise makes the value a list of both."""
    found: dict[str, Any] = {}
    flatten(name, _served(cell.served_by, run, cell), found)
    if cell.served_by.gateway is not None:
        flatten(f"{name}.gateway", _served(cell.served_by.gateway, run, cell), found)
    for key, value in found.items():
        if key not in facts:
            facts[key] = value
        elif facts[key] != value:
            facts[key] = f"{_shortened(_text(facts[key]))}, then {_shortened(_text(value))}"


def _without_port(arguments: Sequence[str]) -> list[str]:
    """Arguments without the port, which is any that was free."""
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--port":
            next(rest, None)
        elif not argument.startswith("--port="):
            kept.append(argument)
    return kept


def _without_ports(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ports(item) for key, item in value.items()}
    words = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return _without_port(value) if words else value


def _without_names(value: Any, run: str, cell: str) -> Any:
    if isinstance(value, str):
        return value.replace(run, "RUN").replace(cell, "CELL")
    if isinstance(value, list):
        return [_without_names(item, run, cell) for item in value]
    if isinstance(value, dict):
        return {key: _without_names(item, run, cell) for key, item in value.items()}
    return value


def flatten(name: str, value: Any, into: dict[str, Any], *, lists: bool = False) -> None:
    """Mappings become dotted keys; lists stay values, with `lists` but for those of mappings, such as GPUs."""
    if lists and isinstance(value, list) and all(isinstance(item, dict) for item in value):  # none of them is nothing
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            flatten(f"{name}.{key}", item, into, lists=lists)
    else:
        into[name] = value


def in_words(values: Sequence[Any]) -> list[str]:
    """Values of one key, a side each; of lists, such as command lines, only what not all of them have."""
    if all(isinstance(value, list) for value in values):
        grouped = [_grouped(value) for value in values]
        own = [" ".join(item for item in group if not all(item in g for g in grouped)) for group in grouped]
        if any(own):
            return [text or ABSENT for text in own]
    return [_text(value) for value in values]


def _grouped(items: Sequence[Any]) -> list[str]:
    """A command line's options, each with its value."""
    result: list[str] = []
    open_option = False
    for item in map(_text, items):
        if open_option and not item.startswith("-"):
            result[-1] += f" {item}"
            open_option = False
        else:
            result.append(item)
            open_option = item.startswith("--") and "=" not in item
    return result


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
