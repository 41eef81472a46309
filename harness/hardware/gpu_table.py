"""Memory bandwidth and compute of AMD GPUs, from hardware.yaml."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import HarnessError, did_you_mean
from harness.base.files import read_bytes, read_table
from harness.base.units import GIB


class GpuSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU by its data sheet."""

    names: list[str]  # the first one is shown
    target: str
    default: bool = False  # whether the target alone means this card
    compute_units: int | None = None
    memory_gib: int | None = None  # None: an APU
    bus_bits: int | None = None  # of an APU, as of `memory`
    memory: str | None = None
    max_memory_gib: int | None = None  # of an APU: the most that its maker names
    bandwidth_gb_s: float  # 1e9 bytes a second
    fp16_tflops: float | None  # dense; also of bfloat16; None: not known
    fp8_tflops: float | None = None  # also of INT8; None: no faster than FP16
    fp4_tflops: float | None = None
    source: str | None = None  # of the table: the page that was read; None: given by the user

    @property
    def name(self) -> str:
        return self.names[0]


class _HardwareTable(Struct, frozen=True, forbid_unknown_fields=True):
    checked: str  # the day on which the sources were read
    gpus: list[GpuSpec]


@cache
def _read_table() -> _HardwareTable:
    return read_table(Path(__file__).with_name("hardware.yaml"), _HardwareTable)


def gpu_specs() -> list[GpuSpec]:
    return _read_table().gpus


_FILLERS = re.compile(r"^(?:amd|radeon|instinct|ryzen|rx|pro|ai)+|(?:graphics|gpu)$")


def _shorten(name: str) -> str:
    """Return the part of a product name that differs from other products: "7900xtx"."""
    return _FILLERS.sub("", re.sub(r"\((?:tm|r)\)|[^a-z0-9+]", "", name.lower()))


def find_gpu(name: str) -> GpuSpec:
    """Return a GPU by its product name in any usual spelling, or by its target, which means its default card.

    Raises HarnessError for an unknown one.
    """
    wanted = _shorten(name[:100])
    for spec in gpu_specs():
        if (spec.default and spec.target == wanted) or wanted in map(_shorten, spec.names):
            return spec
    given, is_target = name[:50], wanted.startswith("gfx")
    numbers = re.findall(r"\d+", given)
    names = {alias for spec in gpu_specs() for alias in ([spec.target] if is_target else spec.names)}
    alike = [alias for alias in names if re.findall(r"\d+", alias) == numbers]  # no other number is meant
    shown = did_you_mean(given, alike) if alike else ""
    if not shown.startswith("did") and not (alike and numbers):
        shown = f"known: {', '.join(sorted({spec.target if is_target else spec.name for spec in gpu_specs()}))}"
    raise HarnessError(
        f"--gpu: '{given}' is not in the table; {shown}",
        next_step="Give the memory bandwidth of its data sheet instead, as in `--bandwidth 256` (GB/s).",
    )


def identify_gpu(card: Mapping[str, Any]) -> GpuSpec | None:
    """Return the GPU of a machine, as `list_gpus` yields it: of its target, the one with the nearest sizes.

    None for a target that is not in the table.
    """
    specs = [spec for spec in gpu_specs() if spec.target == card.get("target")]
    units, vram = card.get("compute_units"), card.get("vram_bytes")

    def distance(spec: GpuSpec) -> tuple[int, float, bool]:
        by_units = abs(spec.compute_units / units - 1) if spec.compute_units and units else 0
        by_memory = abs(spec.memory_gib * GIB / vram - 1) if spec.memory_gib and vram else 0
        return (by_units > 0) + (by_memory > 0.05), by_units + by_memory, not spec.default

    return min(specs, key=distance, default=None)


def gpu_title(card: Mapping[str, Any]) -> str | None:
    """Name and target of a machine's GPU: "Radeon 8060S gfx1151"; None: neither is known.

    The kernel's name, such as "ip discovery", is used where the table has none.
    """
    spec = identify_gpu(card)
    names = [card.get("name") if spec is None else spec.name, card.get("target")]
    return " ".join(str(name) for name in names if name) or None


_MEMORY_DEVICE = 17  # of the SMBIOS specification (DSP0134), section 7.18


def fitted_memory(spec: GpuSpec, root: Path = Path("/")) -> tuple[GpuSpec, str] | None:
    """Return an APU with the bandwidth of the memory that is fitted, and its description.

    None for a card with memory of its own, and where the kernel does not show the memory, which needs root.
    """
    if spec.bus_bits is None:
        return None
    bits, speed_mt_s = 0, 0
    for path in sorted((root / "sys/firmware/dmi/entries").glob(f"{_MEMORY_DEVICE}-*/raw"))[:64]:
        try:
            raw = read_bytes(path)
        except OSError:
            return None
        if len(raw) < 0x22:
            continue
        width, size, speed = (int.from_bytes(raw[at : at + 2], "little") for at in (0x0A, 0x0C, 0x20))
        if size and 0 < width < 0xFFFF and 0 < speed < 0xFFFF:
            bits += width
            speed_mt_s = max(speed_mt_s, speed)
    if not speed_mt_s:
        return None
    bits = min(bits, spec.bus_bits)
    fitted = replace(spec, bandwidth_gb_s=speed_mt_s * bits / 8 / 1000)
    return fitted, f"the fitted memory, {bits} bit at {speed_mt_s:,} MT/s"
