"""Which facts of a server's start two comparable runs share, which are only shown, and which are shown first.

Settings that an engine runs with must be equal, or be what the comparison is about. What an engine measured of itself
moves from start to start (seconds, free memory): a difference is shown where it is larger than noise.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.rundir.manifest import Run, ServedBy
from harness.summary import Reason, because

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


def settings(served: ServedBy) -> dict[str, Any]:
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


def measured(starts: Sequence[ServedBy]) -> dict[str, Any]:
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
    facts = {name: measured(served) for name, served in starts.items()}
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
