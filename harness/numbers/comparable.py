"""Finds differences between runs' manifests, and refuses to compare runs that differ in more than one thing.

Settings of an engine must be equal, or be what the comparison is about. Measurements of an engine at its start
(seconds, free memory) vary from start to start: a difference is only shown, and only if it is larger than noise.
"""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.base.command_line import command_line
from harness.base.reason import Reason, because
from harness.engines.flags import group_words, without_options
from harness.numbers.comparison import Difference
from harness.numbers.power_settings import POWER_KEYS
from harness.numbers.summary import Row
from harness.records.manifest import DEFINITIONS, CellRun, KeptSteps, Run, ServedBy, UnlikeError

# Keys that differ as a consequence of another one: two images also have two versions.
IMPLIED_DIFFERENCES = {
    "image": ("image_digest", "version", "container.Image", "contents", "startup", "effective"),
    "image_digest": ("image", "version", "container.Image", "contents", "startup", "effective"),
    "version": ("image", "image_digest", "container.Image", "contents", "startup", "effective"),
    "variables": ("arguments", "container", "startup", "effective"),
    "arguments": ("variables", "container.Cmd", "startup", "effective"),
    "model": ("startup", "effective"),
    "load generator": ("locustfile",),  # older manifests do not list it separately
    # Each machine has its own group ids and device nodes, and an engine chooses settings by the memory that it finds.
    "machine": ("versions", "HostConfig.GroupAdd", "HostConfig.Devices", "startup", "effective"),
}
# Keys that do not change what is measured, or that are compared elsewhere.
_IGNORED_SCENARIO_KEYS = (
    "compare", "question", "servers", "loads", "repeats", "baseline", "checks", "max_error_rate", "model",
    "api_key_env", "swept",
)  # fmt: skip
_IGNORED_SERVER_KEYS = ("startup_timeout_s", "allow")
_IGNORED_HOST_CONFIG_KEYS = ("NetworkMode", "PortBindings")
_NEVER_EXCUSED = ("workload_sha256", "kept_steps", "simulated")  # must be equal in every comparison
# A difference in these is no reason to refuse. The commit also changes when results are committed, and `versions` has a
# checksum of the code that measures. The load does not depend on the number of machines that send it.
SHOWN_ONLY = ("git_commit", "load_machines")
ABSENT, _THERE = "nothing", "there"
# Fields of `Startup` that are settings, not measurements. `version`: of the engine behind a gateway or Lemonade.
SETTINGS = (
    "engine", "version", "architecture", "max_model_len", "attention_backend", "offloaded_layers", "kv_block_size",
)  # fmt: skip
_MEASURED = re.compile(r"(?:^|\.)(?:startup\.(?!(?:" + "|".join(SETTINGS) + r")$)\w+|phases\.[^.]+)$")
_REPORTED = re.compile(r"(?:^|\.)(?:startup|effective|contents)\.")
_POWER = tuple(f"machine.kernel_parameters.{key}" for key in POWER_KEYS)
_NOISE_S, _NOISE_SHARE_OF_TIME = 1.0, 0.1  # any two starts differ by so many seconds, or by this share
_NOISE_SHARE_OF_SIZE = 0.01
Facts = Mapping[str, Any]


def refuse_unlike(
    runs: Sequence[Run], rows: Sequence[tuple[str, str]], groups: Sequence[int], about: str | None
) -> None:
    """Raise UnlikeError, naming key and both values, unless the runs may be compared on these rows (server, load).

    `groups` has the side of each run. `about` is the one key in which the sides may differ: a manifest key, the start
    of one (`machine`), or the end of one (`image_digest`). Runs of one side must be equal in all keys.
    """
    facts = [collect_facts(run, rows) for run in runs]
    _name_missing_loads(runs, facts)
    differing: dict[int, list[str]] = {}  # keys in which the first run of a side differs from the baseline
    for index in range(1, len(runs)):
        first = groups.index(groups[index])
        keys = differing_keys(facts[0 if index == first else first], facts[index])
        if index == first:
            differing[index] = keys
        elif keys:
            _refuse(runs, facts, first, index, keys, "Runs of one side must be equal; leave out those that are not.")
    excused = {index: _excused_keys(about, keys) for index, keys in differing.items()}
    for index, keys in differing.items():
        if refused := [key for key in keys if key not in excused[index]]:
            suggested = _narrowest_excuse([*filter(None, differing.values())])
            suggested = None if suggested == about else suggested
            advice = "Make the runs equal in all but the one thing that the comparison is about."
            if suggested is not None:
                advice = f"If the comparison is about just that, say so: {command_line('--about', suggested)}"
            _refuse(runs, facts, 0, index, refused, advice, suggested)
    if about is not None and not any(excused.values()):
        fact_names = sorted({".".join(key.split(".")[:2]) for key in facts[0]} - set(_NEVER_EXCUSED))
        raise UnlikeError(
            because(
                "about_equal",
                f"the runs do not differ in '{about}', which the comparison is about",
                about=about,
            ),
            next_step=f"Leave it out, or name one of: {', '.join(fact_names)}.",
        )


def _name_missing_loads(runs: Sequence[Run], facts: Sequence[dict[str, Any]]) -> None:
    """Put loads that only some runs have before the checksum of the workload, which differs because of them."""
    if len({run.workload_sha256 for run in runs}) < 2:
        return
    loads = dict.fromkeys(load for run in runs for load in run.scenario.loads)
    partial = [load for load in loads if any(load not in run.scenario.loads for run in runs)]
    for run, run_facts in zip(runs, facts, strict=True):
        missing = {f"loads.{load}": _THERE if load in run.scenario.loads else ABSENT for load in partial}
        own = dict(run_facts)
        run_facts.clear()
        run_facts.update(missing | own)


def differing_keys(first: Facts, second: Facts) -> list[str]:
    """The keys in which two runs differ although they must be equal."""
    return [
        key
        for key in dict.fromkeys([*first, *second])
        if key not in SHOWN_ONLY
        and not is_address(key)
        and not is_measured(key)
        # A server that does not report a setting may still have the same one, and so may an older manifest.
        and not (_REPORTED.search(key) and (key in first) != (key in second))
        and not (key in _POWER and (key in first) != (key in second))
        and first.get(key, ABSENT) != second.get(key, ABSENT)
    ]


def _refuse(
    runs: Sequence[Run],
    facts: Sequence[Facts],
    first: int,
    second: int,
    keys: Sequence[str],
    advice: str,
    suggested: str | None = None,
) -> None:
    """Raise UnlikeError for keys in which two runs differ. `suggested`: an `about` that would allow the comparison."""
    shown = []
    for key in keys:
        values = [facts[index].get(key, ABSENT) for index in (first, second)]
        shown.append([key, *map(_shorten, format_values(values))])
    run, other = runs[first].id, runs[second].id
    key, value, other_value = shown[0]
    lines = [f"{key}: {value} in {run}, {other_value} in {other}" for key, value, other_value in shown]
    more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
    if (value, other_value) in ((ABSENT, _THERE), (_THERE, ABSENT)):
        only = run if value == _THERE else other
        text = f"runs that differ in their loads are not compared: {key} is only in {only}{more}"
    else:
        text = f"runs that differ in '{key}' are not compared: {value} in {run}, {other_value} in {other}{more}"
    error = UnlikeError(
        because(
            "runs_differ", text, key=key, run=run, value=value, other=other, other_value=other_value, more=len(keys) - 1
        ),
        next_step=advice,
        detail="\n".join(lines) if len(keys) > 1 else "",
    )
    error.about = suggested
    raise error


def _narrowest_excuse(sides: Sequence[Sequence[str]]) -> str | None:
    """The narrowest `about` that excuses all differing keys of each side; None where no single key does."""
    split = [key.split(".") for key in sides[0]]
    ends = [".".join(steps[start:]) for steps in split for start in reversed(range(len(steps)))]
    starts = [".".join(steps[:end]) for steps in split for end in reversed(range(1, len(steps)))]
    names = (name for name in ends + starts if all(_excused_keys(name, keys) == set(keys) for keys in sides))
    return next(names, None)


def _excused_keys(about: str | None, differing: Sequence[str]) -> set[str]:
    """The keys that a comparison about `about` allows to differ, including implied ones."""
    if about is None:
        return set()
    direct = {key for key in differing if _contains_steps(key, about) and key.rpartition(".")[2] not in _NEVER_EXCUSED}
    causes = {step for key in direct for step in key.split(".")} & IMPLIED_DIFFERENCES.keys()
    implied = [name for cause in causes for name in IMPLIED_DIFFERENCES[cause]]
    return direct | {key for key in differing if any(_contains_steps(key, name) for name in implied)}


def _contains_steps(key: str, name: str) -> bool:
    """Whether the dotted key contains the steps of `name` next to each other."""
    return f".{name}." in f".{key}."


def collect_facts(run: Run, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The manifest as flat keys, most telling first, for these rows (server, load). Random values are left out."""
    scenario = msgspec.to_builtins(run.scenario)
    loads = dict.fromkeys(load for _, load in rows)
    facts: dict[str, Any] = {
        **{f"loads.{load}.kept_steps": _kept_text(run.kept_steps[load]) for load in loads if load in run.kept_steps},
        "workload_sha256": run.workload_sha256,
        "simulated": run.simulated,
        "model": run.scenario.model,
    }
    for load in loads:
        flatten(f"loads.{load}", scenario["loads"][load], facts)
        if (digest := run.locustfiles.get(run.scenario.loads[load].user)) is not None:
            facts[f"loads.{load}.locustfile"] = digest
    for server in dict.fromkeys(server for server, _ in rows):
        settings = {key: value for key, value in scenario["servers"][server].items() if key not in _IGNORED_SERVER_KEYS}
        flatten(f"servers.{server}", settings, facts)
        cells = [cell for cell in run.served if cell.server == server]
        for cell in cells:
            _add_served_facts(f"servers.{server}", run, cell, facts)
        for key, value in median_measurements([cell.served_by for cell in cells]).items():
            facts[f"servers.{server}.{key}"] = value
    flatten("scenario", {key: value for key, value in scenario.items() if key not in _IGNORED_SCENARIO_KEYS}, facts)
    flatten("machine", msgspec.to_builtins(run.server_machine), facts)
    if run.remote is not None:  # else it is the server's: a comparison of machines changes both
        flatten("load_generator", msgspec.to_builtins(run.machine), facts)
    flatten("versions", dict(run.versions), facts)
    facts["git_commit"] = run.git_commit
    if run.origin is None:
        facts["load_machines"] = 1 if run.workers is None else run.workers.machines
    return facts


def _kept_text(steps: KeptSteps) -> str:
    return f"{steps.kept:,} of {steps.total:,} ({steps.sha256[:8]})"


def _served_facts(served: ServedBy, run: Run, cell: CellRun) -> dict[str, Any]:
    container = dict(served.container or {})
    if isinstance(host := container.get("HostConfig"), dict):
        container["HostConfig"] = {key: value for key, value in host.items() if key not in _IGNORED_HOST_CONFIG_KEYS}
    return {
        "image": served.image,
        "image_digest": served.image_digest,
        "version": served.version,
        "model": served.model,
        "arguments": _without_run_names(list(served.arguments), run.id, cell.id),
        "container": _without_run_names(container, run.id, cell.id),
        **_without_run_names(effective_settings(served), run.id, cell.id),
    }


def _add_served_facts(name: str, run: Run, cell: CellRun, facts: dict[str, Any]) -> None:
    """Add the facts of the server that served a cell. Where they differ from an earlier cell's, keep both values."""
    added: dict[str, Any] = {}
    flatten(name, _served_facts(cell.served_by, run, cell), added)
    if cell.served_by.template is None and run.origin is None:  # it already ran; a started one has a random port
        added[f"{name}.url"] = cell.served_by.url
    if cell.served_by.gateway is not None:
        flatten(f"{name}.gateway", _served_facts(cell.served_by.gateway, run, cell), added)
    for key, value in added.items():
        if key not in facts:
            facts[key] = value
        elif facts[key] != value:
            facts[key] = f"{_shorten(_format_value(facts[key]))}, then {_shorten(_format_value(value))}"


def _without_run_names(value: Any, run: str, cell: str) -> Any:
    """A value without the names of run and cell, and a command line without its random port."""
    if isinstance(value, str):
        return value.replace(run, "RUN").replace(cell, "CELL")
    if isinstance(value, dict):
        return {key: _without_run_names(item, run, cell) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    is_command = all(isinstance(item, str) for item in value)
    return [_without_run_names(item, run, cell) for item in (without_options(value, "--port") if is_command else value)]


def flatten(name: str, value: Any, into: dict[str, Any], *, lists: bool = False) -> None:
    """Store a nested mapping under dotted keys. `lists`: also lists of mappings, such as GPUs, and drop empty lists."""
    if lists and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            flatten(f"{name}.{key}", item, into, lists=lists)
    else:
        into[name] = value


def format_values(values: Sequence[Any]) -> list[str]:
    """The values of one key as text, one for each side. Of lists, such as command lines, only the items that differ."""
    if all(isinstance(value, list) for value in values):
        sides = [[" ".join(group) for group in group_words(list(map(_format_value, value)))] for value in values]
        differing = [" ".join(item for item in side if not all(item in other for other in sides)) for side in sides]
        if any(differing):
            return [text or ABSENT for text in differing]
    return [_format_value(value) for value in values]


def _format_value(value: Any) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def effective_settings(served: ServedBy) -> dict[str, Any]:
    """The settings that a server really ran with, as nested keys; those that it did not report are left out."""
    settings: dict[str, Any] = {}
    if served.startup is not None:
        startup = msgspec.structs.asdict(served.startup)
        settings["startup"] = {key: startup[key] for key in SETTINGS if startup[key] is not None}
    if served.effective:
        settings["effective"] = served.effective
    if served.contents is not None:
        settings["contents"] = msgspec.to_builtins(served.contents)
    return settings


def median_measurements(starts: Sequence[ServedBy]) -> dict[str, Any]:
    """The measurements of a server's starts: the median of numbers, and all different texts."""
    values: dict[str, list[Any]] = {}
    for served in starts:
        startup = msgspec.structs.asdict(served.startup) if served.startup is not None else {}
        measured = {f"startup.{key}": value for key, value in startup.items() if key not in SETTINGS}
        measured |= {f"phases.{phase.name}": phase.seconds for phase in served.phases}
        for key, value in measured.items():
            if value is not None:
                values.setdefault(key, []).append(value)
    joined: dict[str, Any] = {}
    for key, readings in values.items():
        if all(isinstance(value, str) for value in readings):
            joined[key] = ", then ".join(dict.fromkeys(readings))
        else:
            median = statistics.median(readings)
            joined[key] = int(median) if median == int(median) else round(median, 3)
    return joined


def is_measured(key: str) -> bool:
    """Whether a difference in this manifest key is only shown, and never a reason to refuse a comparison."""
    return _MEASURED.search(key) is not None


def is_address(key: str) -> bool:
    """Whether a manifest key is the address of a server: a difference is only shown, since one server may move."""
    return key.startswith("servers.") and key.endswith(".url") and key.count(".") == 2


def is_noise(key: str, values: Sequence[Any]) -> bool:
    """Whether values of a measured key are as close to each other as those of any two starts."""
    if not is_measured(key):
        return False
    numbers = [value for value in values if isinstance(value, int | float)]
    is_phase = ".phases." in f".{key}"
    if len(numbers) != len(values):
        return is_phase  # a log that does not separate this phase has its time in another phase
    difference, largest = max(numbers) - min(numbers), max(map(abs, numbers))
    if is_phase or key.endswith("_s"):
        return difference <= max(_NOISE_S, _NOISE_SHARE_OF_TIME * largest)
    return difference <= _NOISE_SHARE_OF_SIZE * largest


def start_notes(run: Run) -> list[Reason]:
    """Notes on the starts of a run's servers."""
    starts = {name: [cell.served_by for cell in run.served if cell.server == name] for name in run.scenario.servers}
    tokens = {name: median_measurements(served).get("startup.kv_cache_tokens") for name, served in starts.items()}
    return [note] if (note := kv_cache_note(tokens)) is not None else []


def engine_versions(run: Run) -> dict[str, dict[str, str]]:
    """Return the version of each server, by engine, for engines that the servers run in several versions."""
    by_engine: dict[str, dict[str, str]] = {}
    for server in dict.fromkeys(cell.server for cell in run.served):
        for engine, version in server_versions(run, server).items():
            by_engine.setdefault(engine, {})[server] = version
    return {engine: by_server for engine, by_server in by_engine.items() if len(set(by_server.values())) > 1}


def server_versions(run: Run, server: str) -> dict[str, str]:
    """Return the version of a server's engine, by engine; of several starts the last."""
    starts = [cell.served_by.startup for cell in run.served if cell.server == server]
    return {start.engine: start.version for start in starts if start is not None and start.engine and start.version}


def kv_cache_note(tokens: Mapping[str, int | None], **values: str) -> Reason | None:
    """A note that the KV caches of the sides have different sizes; None where they are equal or unknown."""
    cache_sizes = {side: size for side, size in tokens.items() if size is not None}
    if len(cache_sizes) < 2 or is_noise("startup.kv_cache_tokens", list(cache_sizes.values())):
        return None
    sizes = ", ".join(f"{name} {size:,}" for name, size in cache_sizes.items())
    prefix = f"{values['server']}: " if values.get("server") else ""
    text = f"{prefix}KV caches of different sizes (tokens): {sizes}. The larger one holds more requests at once, "
    text += "whatever else differs; set kv_cache_gib or gpu_memory_utilization so that they are equal, or compare "
    text += "just that"
    return because("kv_cache_sizes", text, sizes=cache_sizes, **values)


def run_differences(runs: Sequence[Run]) -> list[Difference]:
    """The differences of whole runs, including servers and loads that only some of them have."""
    return find_differences(
        [collect_facts(run, list(itertools.product(run.scenario.servers, run.scenario.loads))) for run in runs]
    )


def server_differences(run: Run, names: Sequence[str] = ()) -> list[Difference]:
    """The differences of a run's servers, with a value for each server in the order of the scenario, or of `names`.

    None are known where a server did not run.
    """
    servers = list(names or run.scenario.servers)
    if len(servers) < 2 or not {cell.server for cell in run.cells}.issuperset(servers):
        return []
    facts: list[Facts] = []
    for server in servers:
        prefix = f"servers.{server}."
        own_facts = collect_facts(run, [(server, load) for load in run.scenario.loads])
        facts.append({key.removeprefix(prefix): value for key, value in own_facts.items() if key.startswith(prefix)})
    return find_differences(facts)


def find_differences(sides: Sequence[Facts]) -> list[Difference]:
    """The keys in which the sides differ, and their values as text; of lists only the items that differ."""
    expanded: list[dict[str, Any]] = [{} for _ in sides]
    for facts, expanded_facts in zip(sides, expanded, strict=True):
        for key, value in facts.items():
            flatten(key, value, expanded_facts, lists=True)
    differing: dict[str, list[str]] = {}
    # Keys of one part of the manifest are together, even if only a later side has them.
    keys = list(dict.fromkeys(key for side in expanded for key in side))
    parts = list(dict.fromkeys(key.split(".")[0] for key in keys))
    for key in sorted(keys, key=lambda key: parts.index(key.split(".")[0])):
        values = [side.get(key, ABSENT) for side in expanded]
        if any(value != values[0] for value in values[1:]) and not is_noise(key, values):
            part = ".".join(key.split(".")[:2])
            has_part = [any(f"{other}.".startswith(f"{part}.") for other in side) for side in expanded]
            if key.startswith(("servers.", "loads.")) and not all(has_part):  # some sides lack this server or load
                differing[part] = [_THERE if has else ABSENT for has in has_part]
            else:
                differing[key] = format_values(values)
    servers = list(dict.fromkeys(key.split(".")[1] for side in expanded for key in side if key.startswith("servers.")))
    return [Difference(key=key, values=values) for key, values in _fold_servers(differing, servers).items()]


def _fold_servers(differing: Mapping[str, list[str]], servers: Sequence[str]) -> dict[str, list[str]]:
    """Replace differences that are the same for all servers by one of `servers.*`."""
    folded: dict[str, list[str]] = {}
    for key, values in differing.items():
        kind, _, rest = key.partition(".")
        server, _, name = rest.partition(".")
        is_same = all(differing.get(f"servers.{other}.{name}") == values for other in servers)
        if kind == "servers" and name and server in servers and len(servers) > 1 and is_same:
            folded[f"servers.*.{name}"] = values
        else:
            folded[key] = values
    return folded


def definition_conflict(row: Row, other: Row, fields: Sequence[str]) -> Reason | None:
    """Why two rows have no ratio by these fields: one is defined differently. None: all definitions are equal."""
    for field in fields:
        meaning, other_meaning = (side.definitions.get(field, DEFINITIONS[field]) for side in (row, other))
        if meaning != other_meaning:
            text = f"the definitions of '{field}' differ, so no ratio is given. {row.name}: {meaning}. "
            text += f"{other.name}: {other_meaning}"
            values = {"row": row.name, "meaning": meaning, "other": other.name, "other_meaning": other_meaning}
            return because("definitions_differ", text, field=field, **values)
    return None
