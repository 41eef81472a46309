"""The binary table `gpu_metrics` of the amdgpu driver: what throttles a GPU, and its energy counter.

Layouts are those of the structs gpu_metrics_v* in the kernel's drivers/gpu/drm/amd/include/kgd_pp_interface.h. Two
kernels have used one revision for two layouts, so the table's size must be right as well; revision 1.9 describes its
own layout. Nothing else is decoded: what is also a file of its own is read there.
"""

import struct

from msgspec import Struct

# What of a GPU can be limited, by bit of the ASIC independent status (SMU_THROTTLER_* in the kernel's amdgpu_smu.h).
_BITS = {"power": range(0, 16), "current": range(16, 32), "heat": range(32, 46), "prochot": range(46, 48)}
_ENERGY_UNIT_J = 2.0**-16

# (format, content, size of the table) -> offset of the 64-bit status.
_STATUS = {(1, 3, 120): 112, (2, 2, 128): 120, (2, 3, 152): 120, (2, 4, 168): 120}
# -> offset of the 64-bit energy counter. In earlier revisions its unit is unknown.
_ENERGY = {(1, 4, 288): 24, (1, 5, 360): 88, (1, 6, 384): 88, (1, 6, 1664): 16, (1, 7, 2208): 24} | {
    (1, 8, size): 24 for size in (3360, 3872)
}
# -> offset of a counter of cycles and, right after it, of those in which the GPU was throttled (_INSTINCT).
_RESIDENCIES = {(1, 6, 384): 104, (1, 6, 1664): 32, (1, 7, 2208): 40} | {(1, 8, size): 40 for size in (3360, 3872)}
_INSTINCT = ("prochot", "power", "heat", "heat", "heat")  # socket, voltage regulator, memory
# APUs count the throttled time, in an unknown unit and without a counter of all time.
_APU = {(3, 0, 264): 228}
_APU_KINDS = ("prochot", "power", "power", "power", "heat", "heat", "heat")  # SPL, fast and slow PPT; core, gfx, soc
# Revision 1.9 (struct gpu_metrics_v1_9): a count of attributes; of each an encoding and its values, without padding.
_ATTRIBUTES = (1, 9)
_WIDTHS = (1, 1, 2, 2, 4, 4, 8, 8)  # bytes, by enum amdgpu_metrics_attr_type: U8, S8, U16, ... S64
_UNSIGNED = (4, 6)  # U32, U64: a counter is one or the other
_ENERGY_ID = 7  # in enum amdgpu_metrics_attr_id, as the next
_RESIDENCY_IDS = range(9, 15)  # cycles, then the order of _INSTINCT


class GpuMetrics(Struct, frozen=True, kw_only=True):
    """The content of a table. `now` is a state; `counters` only grow."""

    now: frozenset[str] | None = None  # kinds of limits that throttle the GPU
    counters: tuple[int, ...] | None = None  # one per limit, see `kinds`
    kinds: tuple[str, ...] = ()
    cycles: int | None = None  # of which `counters` are parts; None: their unit is not known
    energy_j: float | None = None  # since an unknown moment


def parse(raw: bytes) -> GpuMetrics | None:
    """Read the table; None for an unknown revision or size. An empty field is None."""
    if len(raw) < 4:
        return None
    size, form, content = struct.unpack_from("<HBB", raw)
    if (form, content) == _ATTRIBUTES and len(raw) >= size:
        return _from_attributes(raw[:size])
    key = (form, content, size)
    if len(raw) < size or not (key in _STATUS or key in _ENERGY or key in _APU):
        return None
    now = counters = cycles = energy = None
    kinds: tuple[str, ...] = ()
    if key in _STATUS:
        now = _limits(struct.unpack_from("<Q", raw, _STATUS[key])[0])
    if key in _RESIDENCIES:
        kinds = _INSTINCT
        cycles, *found = struct.unpack_from("<6I", raw, _RESIDENCIES[key])
        counters = tuple(found)
    if key in _APU:
        kinds = _APU_KINDS
        counters = struct.unpack_from("<7I", raw, _APU[key])
    if key in _ENERGY:
        energy = struct.unpack_from("<Q", raw, _ENERGY[key])[0]
    empty = counters is None or 0xFFFFFFFF in (*counters, cycles)  # the driver first fills a table with ones
    return GpuMetrics(
        now=now,
        counters=None if empty else counters,
        kinds=() if empty else kinds,
        cycles=None if empty else cycles,
        energy_j=None if energy in (None, 2**64 - 1) else energy * _ENERGY_UNIT_J,
    )


def _from_attributes(raw: bytes) -> GpuMetrics | None:
    """The table of a revision that describes its own layout, or None when the description does not fit the size."""
    if len(raw) < 8:
        return None
    (count,) = struct.unpack_from("<i", raw, 4)
    offset = 8
    counters: dict[int, int] = {}  # those filled in, by attribute
    for _ in range(count):
        if offset + 8 > len(raw):
            return None
        (encoding,) = struct.unpack_from("<Q", raw, offset)
        unit, kind, number, values = encoding >> 24, encoding >> 20 & 0xF, encoding >> 10 & 0x3FF, encoding & 0x3FF
        if kind >= len(_WIDTHS) or not values:
            return None
        content = raw[offset + 8 : offset + 8 + _WIDTHS[kind] * values]
        offset += 8 + _WIDTHS[kind] * values
        if not unit and kind in _UNSIGNED and values == 1 and content.strip(b"\xff"):
            counters[number] = int.from_bytes(content, "little")
    if count < 0 or offset != len(raw):
        return None
    cycles, *residencies = (counters.get(number) for number in _RESIDENCY_IDS)
    found = tuple(value for value in residencies if value is not None)
    full = cycles is not None and len(found) == len(_INSTINCT)
    energy = counters.get(_ENERGY_ID)
    return GpuMetrics(
        counters=found if full else None,
        kinds=_INSTINCT if full else (),
        cycles=cycles if full else None,
        energy_j=None if energy is None else energy * _ENERGY_UNIT_J,
    )


def held_back(before: GpuMetrics | None, table: GpuMetrics) -> dict[str, float] | None:
    """The share of the time between two tables in which each kind of limit throttled the GPU; {}: none.

    A status counts for the whole time. So does a counter of unknown unit that has moved: then it is an upper bound.
    """
    if table.now is not None:
        return dict.fromkeys(sorted(table.now), 1.0)
    if table.counters is None or before is None or before.counters is None or before.kinds != table.kinds:
        return None
    moved = [(after - was) % 2**32 for was, after in zip(before.counters, table.counters, strict=True)]
    share: dict[str, float] = {}
    if table.cycles is None or before.cycles is None:
        return {kind: 1.0 for kind, by in zip(table.kinds, moved, strict=True) if by}
    cycles = (table.cycles - before.cycles) % 2**32
    if not cycles:
        return None
    for kind, by in zip(table.kinds, moved, strict=True):
        if by:
            share[kind] = max(share.get(kind, 0.0), min(1.0, by / cycles))
    return share


def _limits(status: int) -> frozenset[str] | None:
    if status == 2**64 - 1:
        return None
    return frozenset(kind for kind, bits in _BITS.items() if any(status >> bit & 1 for bit in bits))
