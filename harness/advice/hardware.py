"""Memory bandwidth and compute of AMD GPUs, from hardware.yaml."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from harness.base.errors import HarnessError, did_you_mean


class GpuSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU by its data sheet."""

    names: list[str]  # the first one is shown
    target: str
    default: bool = False  # whether the target alone means this card
    compute_units: int | None = None
    memory_gib: int | None = None  # None: an APU
    bus_bits: int | None = None  # of an APU, as of `memory`
    memory: str | None = None
    bandwidth_gb_s: float  # 1e9 bytes a second
    fp16_tflops: float  # dense; also of bfloat16
    fp8_tflops: float | None = None  # None: no faster than FP16
    source: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]


class _HardwareTable(Struct, frozen=True, forbid_unknown_fields=True):
    checked: str  # the day on which the sources were read
    gpus: list[GpuSpec]


@cache
def _read_table() -> _HardwareTable:
    text = Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), _HardwareTable)


def gpu_specs() -> list[GpuSpec]:
    return _read_table().gpus


_FILLERS = re.compile(r"^(?:amd|radeon|instinct|ryzen|rx|pro|ai)+|(?:graphics|gpu)$")


def _shorten(name: str) -> str:
    """Return the part of a product name that tells it from others: "7900xtx"."""
    return _FILLERS.sub("", re.sub(r"\((?:tm|r)\)|[^a-z0-9+]", "", name.lower()))


def find_gpu(name: str) -> GpuSpec:
    """Return a GPU by its product name in any usual spelling, or by its target, which means its default card.

    Raises HarnessError for an unknown one.
    """
    wanted = _shorten(name[:100])
    for spec in gpu_specs():
        if (spec.default and spec.target == wanted) or wanted in map(_shorten, spec.names):
            return spec
    known = {each for spec in gpu_specs() for each in (spec.name, spec.target)}
    raise HarnessError(
        f"--gpu: '{name[:100]}' is not in the table; {did_you_mean(name[:100], known)}",
        next_step="Give the memory bandwidth of its data sheet instead, as in `--bandwidth 256` (GB/s).",
    )


def identify_gpu(card: Mapping[str, Any]) -> GpuSpec | None:
    """Return the GPU of a machine, as `list_gpus` yields it: of its target, the one with the nearest size.

    None for a target that is not in the table.
    """
    of_target = [spec for spec in gpu_specs() if spec.target == card.get("target")]
    units, vram = card.get("compute_units"), card.get("vram_bytes")

    def distance(spec: GpuSpec) -> tuple[float, float, bool]:
        by_units = abs(spec.compute_units - units) if spec.compute_units and units else 0
        by_memory = abs(spec.memory_gib - vram / (1 << 30)) if spec.memory_gib and vram else 0
        return by_units, by_memory, not spec.default

    return min(of_target, key=distance, default=None)
