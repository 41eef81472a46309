"""Only like is compared with like: what two runs' manifests must have in common, and in what they differ.

Settings that an engine runs with must be equal, or be what the comparison is about. What an engine measured of itself
moves from start to start (seconds, free memory): a difference is shown where it is larger than noise.
"""

import itertools
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.rundir.manifest import CellRun, Run, ServedBy, UnlikeError
from harness.summary import Difference, Reason, because

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
# Of `Startup`: settings, as against measurements. `version` is that of the engine behind a gateway or Lemonade.
SETTINGS = (
    "engine", "version", "architecture", "max_model_len", "attention_backend", "offloaded_layers", "kv_block_size",
)  # fmt: skip
_MEASURED = re.compile(r"(?:^|\.)(?:startup\.(?!(?:" + "|".join(SETTINGS) + r")$)\w+|phases\.[^.]+)$")
_REPORTED = re.compile(r"(?:^|\.)(?:startup|effective|contents)\.")
_MIN_S, _MIN_SHARE = 1.0, 0.1  # of seconds: a smaller difference is that of any two starts
_SAME_SHARE = 0.01  # of sizes
# A template's variables that vLLM fills in by the memory of the device when they are null.
_BY_MEMORY = ("max_num_seqs", "max_num_batched_tokens")
Facts = Mapping[str, Any]
_ASKED = ("template", "variables")


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
        and not is_measured(key)
        and not is_unreported(key, one, other)
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
        for key, value in measured_of([cell.served_by for cell in cells]).items():
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
        "arguments": _neutral(list(served.arguments), run.id, cell.id),
        "container": _neutral(container, run.id, cell.id),
        **_neutral(settings_of(served), run.id, cell.id),
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


def _neutral(value: Any, run: str, cell: str) -> Any:
    """A value without names of the run and cell, and a command line without its port, which is any that was free."""
    if isinstance(value, str):
        return value.replace(run, "RUN").replace(cell, "CELL")
    if isinstance(value, dict):
        return {key: _neutral(item, run, cell) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    ports = {at for at, item in enumerate(value, 1) if item == "--port"}
    return [
        _neutral(item, run, cell)
        for at, item in enumerate(value)
        if at not in ports and item != "--port" and not str(item).startswith("--port=")
    ]


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


def settings_of(served: ServedBy) -> dict[str, Any]:
    """What a server really ran with, as nested keys; what it did not say is not in it."""
    found: dict[str, Any] = {}
    if served.startup is not None:
        known = msgspec.structs.asdict(served.startup)
        found["startup"] = {key: known[key] for key in SETTINGS if known[key] is not None}
    if served.effective:
        found["effective"] = served.effective
    if served.contents is not None:
        found["contents"] = msgspec.to_builtins(served.contents)
    return found


def measured_of(starts: Sequence[ServedBy]) -> dict[str, Any]:
    """What a server's starts measured of themselves: medians, of texts all that occurred."""
    values: dict[str, list[Any]] = {}
    for served in starts:
        known = msgspec.structs.asdict(served.startup) if served.startup is not None else {}
        known_facts = {f"startup.{key}": value for key, value in known.items() if key not in SETTINGS}
        known_facts |= {f"phases.{phase.name}": phase.seconds for phase in served.phases}
        for key, value in known_facts.items():
            if value is not None:
                values.setdefault(key, []).append(value)
    return {key: _middle(all_of_it) for key, all_of_it in values.items()}


def _middle(values: Sequence[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return ", then ".join(dict.fromkeys(values))
    middle = statistics.median(values)
    return int(middle) if middle == int(middle) else round(middle, 3)


def is_measured(key: str) -> bool:
    """Whether a difference in this manifest key is only shown, and never a reason to refuse a comparison."""
    return _MEASURED.search(key) is not None


def is_unreported(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a setting is known of one side only: a server that does not say it may well have the same."""
    return _REPORTED.search(key) is not None and (key in one) != (key in other)


def is_noise(key: str, values: Sequence[Any]) -> bool:
    """Whether values of a measured key are as close to each other as those of any two starts."""
    numbers = [value for value in values if isinstance(value, int | float)]
    phase = ".phases." in f".{key}"
    if not is_measured(key) or len(numbers) != len(values):
        return phase and is_measured(key)  # phases that one side's log does not tell apart are in another one's
    apart, largest = max(numbers) - min(numbers), max(map(abs, numbers))
    if phase or key.endswith("_s"):
        return apart <= max(_MIN_S, _MIN_SHARE * largest)
    return apart <= _SAME_SHARE * largest


def notes(run: Run) -> list[Reason]:
    """What a reader of a run must know of its servers' starts before its numbers."""
    starts = {name: [cell.served_by for cell in run.served if cell.server == name] for name in run.scenario.servers}
    facts = {name: measured_of(served) for name, served in starts.items()}
    cache = cache_note({name: found.get("startup.kv_cache_tokens") for name, found in facts.items()})
    found = [cache] if cache is not None else []
    for name, server in run.scenario.servers.items():
        if any((served.gateway or served).over_ssh for served in starts[name]):
            found.append(because("over_ssh", server=name))
        said = starts[name][0].effective if starts[name] else None
        given = server.variables
        for key in _BY_MEMORY:
            if said is not None and key in given and given[key] is None and key not in said:
                found.append(because("left_to_engine", server=name, key=key))
    return found


def cache_note(tokens: Mapping[str, int | None], **of: str) -> Reason | None:
    """A note where the sides' KV caches are of different sizes; None where they are equal, or not known."""
    known = {side: size for side, size in tokens.items() if size is not None}
    if len(known) < 2 or is_noise("startup.kv_cache_tokens", list(known.values())):
        return None
    return because("kv_cache_sizes", sizes=known, **of)


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
        if any(value != values[0] for value in values[1:]) and not is_noise(key, values):
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
