"""Limits of values that describe a machine. A value outside of them cannot be: it counts as missing.

Both what another machine sends and what a file has goes through them, so no reader meets a wrong type.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

Limits = tuple[float, float]

MAX_W = 10_000.0  # of one GPU or package; the largest Instinct takes 1,400
MAX_BYTES = 2**50  # of one memory
MAX_CORES = 2**20
_MAX_TEXT = 200  # characters
_SIZE: Limits = (0, MAX_BYTES)
_PERCENT: Limits = (0, 100)
_CLOCK_MHZ: Limits = (0, 1e5)

# Of samples, by field. Fields of several values have the limits of each.
SAMPLE_LIMITS: dict[str, Limits] = {
    "busy_percent": _PERCENT, "memory_busy_percent": _PERCENT, "vram_used_bytes": _SIZE, "gtt_used_bytes": _SIZE,
    "power_w": (0, MAX_W), "temperatures_c": (-50, 200), "clock_mhz": _CLOCK_MHZ, "memory_clock_mhz": _CLOCK_MHZ,
    "held_back": (0, 1), "energy_j": (0, 1e15), "cpu_busy": (0, 1), "memory_available_bytes": _SIZE,
    "cpu_cores": (0, MAX_CORES), "memory_bytes": _SIZE, "listen_overflows": (0, 2**53), "took_s": (0, 1e5),
}  # fmt: skip


def drop_impossible(sample: Struct) -> None:
    """Set the values of a new sample that cannot be to None.

    Of several temperatures the impossible ones are left out. Shares of time by the kind of limit are dropped together:
    without one of them, that kind would count as no limit.
    """
    for name in sample.__struct_fields__:
        value, limits = getattr(sample, name), SAMPLE_LIMITS.get(name)
        if value is None or limits is None:
            continue
        low, high = limits
        if not isinstance(value, dict):
            if not low <= value <= high:
                force_setattr(sample, name, None)
        elif not all(low <= number <= high for number in value.values()):
            possible = {key: number for key, number in value.items() if low <= number <= high}
            force_setattr(sample, name, None if name == "held_back" else possible)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_like(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_whole(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= 64 and all(_is_text(text) for text in [*value, *value.values()])


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


# The facts of a GPU, as `harness.machine.gpus.list_gpus` yields them.
GPU_FACTS: dict[str, Callable[[object], bool]] = {
    "target": _is_like("gfx[0-9a-f]{1,10}"), "name": _is_text, "device_id": _is_text,
    "render_node": _is_like(r"/dev/dri/renderD\d{1,5}"), "compute_units": _is_whole(0, 65_536),
    "integrated": _is_flag, "vram_bytes": _is_whole(0, MAX_BYTES), "gtt_bytes": _is_whole(0, MAX_BYTES),
    "vbios": _is_text, "firmware": _is_table, "performance_level": _is_text, "cwsr_sizes_known": _is_flag,
}  # fmt: skip
MACHINE_FACTS: dict[str, Callable[[object], bool]] = {
    "name": lambda value: _is_text(value) and value != "", "kernel": _is_text, "cpu": _is_text,
    "cores": _is_whole(1, MAX_CORES), "ram_bytes": _is_whole(0, MAX_BYTES), "kernel_parameters": _is_table,
    "docker": _is_text, "rocm": _is_text,
}  # fmt: skip


def valid_facts(facts: Mapping[str, Any], rules: Mapping[str, Callable[[object], bool]]) -> dict[str, Any]:
    """Return facts of which those that break their rule are None. Facts without a rule are kept."""
    return {
        name: None if value is not None and name in rules and not rules[name](value) else value
        for name, value in facts.items()
    }
