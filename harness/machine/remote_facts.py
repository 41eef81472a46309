"""The facts of another machine, as it sent them: each is checked, and one that is no valid value is missing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from harness.base.redact import masked, printable
from harness.records.manifest import Machine
from harness.records.value_limits import GPU_FACTS, MACHINE_FACTS, valid_facts

MAX_GPUS = 64
_MAX_DROPPED = 20  # paths that are kept
UNNAMED = "unknown"


def check_machine(sent: Mapping[str, Any]) -> tuple[Machine, list[str]]:
    """Return a machine by what it sent of itself, and the paths of facts that are no valid values."""
    dropped: list[str] = []
    facts = _checked(sent, MACHINE_FACTS, "", dropped)
    gpus = sent.get("gpus")
    if not isinstance(gpus, list):
        dropped += [] if gpus is None else ["gpus"]
        gpus = []
    if len(gpus) > MAX_GPUS:
        dropped.append(f"gpus[{MAX_GPUS}]")
    cards = []
    for number, gpu in enumerate(gpus[:MAX_GPUS]):
        if isinstance(gpu, dict):
            cards.append(_checked(gpu, GPU_FACTS, f"gpus[{number}].", dropped))
        else:
            dropped.append(f"gpus[{number}]")
    facts["name"] = facts["name"] or UNNAMED
    facts["kernel_parameters"] = facts["kernel_parameters"] or {}
    return masked(msgspec.convert({**facts, "gpus": cards}, Machine), "known"), dropped[:_MAX_DROPPED]


def _checked(
    sent: Mapping[str, Any], rules: Mapping[str, Callable[[object], bool]], path: str, dropped: list[str]
) -> dict[str, Any]:
    """Return the facts that have a rule, with None for those that break it or are not there."""
    facts = {name: sent.get(name) for name in rules}
    valid = valid_facts(facts, rules)
    dropped += [path + name for name in _lost(facts, valid)]
    return {name: _plain(value) for name, value in valid.items()}


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name, value in before.items() if value is not None and after[name] is None)


def _plain(value: Any) -> Any:
    """Return a value with texts of one line that can be printed."""
    if isinstance(value, str):
        return printable(value).replace("\n", " ")
    return {_plain(key): _plain(text) for key, text in value.items()} if isinstance(value, dict) else value
