"""The facts and samples of another machine, as it sent them. What cannot be is missing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from harness.base.redact import masked, printable
from harness.records.manifest import Machine
from harness.records.samples import GpuSample, HostSample, TelemetrySample
from harness.records.value_limits import GPU_FACTS, MACHINE_FACTS, valid_facts

MAX_GPUS = 64
_MAX_DROPPED = 20  # paths that are kept
_MAX_SHARE = 1.01  # of a memory's size: the sizes are rounded
_Values = TypeVar("_Values", GpuSample, HostSample)
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
    return msgspec.convert(masked({**facts, "gpus": cards}), Machine), dropped[:_MAX_DROPPED]


class SampleCheck:
    """What the samples of a machine can have, by its facts. `dropped`: the paths of what was left out.

    A GPU that the facts do not list is left out, unless they list none or one without a render node. So is more used
    memory than there is, where the facts have its size.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self.dropped: dict[str, None] = {}
        gpus = [] if machine is None else machine.gpus
        by_node = {str(gpu.get("render_node") or "").rpartition("/")[2]: gpu for gpu in gpus}
        self._gpus = by_node
        self._is_open = not by_node or "" in by_node
        self._ram_bytes = None if machine is None else machine.ram_bytes

    def possible(self, sample: TelemetrySample) -> TelemetrySample:
        """Return a sample without what cannot be."""
        host, gpus = sample.host, {}
        for name, gpu in sample.gpus.items():
            if name in self._gpus or self._is_open:
                facts = self._gpus.get(name, {})
                sizes = {f"{pool}_used_bytes": facts.get(f"{pool}_bytes") for pool in ("vram", "gtt")}
                gpus[name] = self._bounded(gpu, sizes, f"{name}.")
            else:
                self._note(name)
        if host is not None:
            host = self._bounded(host, {"memory_available_bytes": self._ram_bytes}, "host.")
        return replace(sample, gpus=gpus, host=host)

    def _bounded(self, values: _Values, sizes: Mapping[str, int | None], path: str) -> _Values:
        above = {
            name: None
            for name, size in sizes.items()
            if size is not None and (getattr(values, name) or 0) > size * _MAX_SHARE
        }
        for name in above:
            self._note(path + name)
        return replace(values, **above) if above else values

    def _note(self, path: str) -> None:
        if len(self.dropped) < _MAX_DROPPED:
            self.dropped[path] = None


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
