"""A tree of the kernel's files with AMD GPUs, and the binary tables of their driver."""

import struct
from pathlib import Path

from tests.support.machines import write


def device(number: int = 128) -> str:
    return f"sys/class/drm/renderD{number}/device"


def gpu(root: Path, number: int = 128, *, busy: int = 90, watts: float = 100, **more: str | bytes) -> None:
    """A card of its own; `more`: other files of the device by name, with `__` for a slash."""
    base = device(number)
    write(
        root,
        {
            f"{base}/vendor": "0x1002\n",
            f"{base}/board_info": "type : oam\n",
            f"{base}/gpu_busy_percent": f"{busy}\n",
            f"{base}/mem_busy_percent": "40\n",
            f"{base}/mem_info_vram_used": f"{8 * 2**30}\n",
            f"{base}/mem_info_gtt_used": f"{2**20}\n",
            f"{base}/hwmon/hwmon3/name": "amdgpu\n",
            f"{base}/hwmon/hwmon3/power1_average": f"{round(watts * 1e6)}\n",
            f"{base}/hwmon/hwmon3/temp1_input": "61000\n",
            f"{base}/hwmon/hwmon3/temp1_label": "edge\n",
            f"{base}/hwmon/hwmon3/temp2_input": "74500\n",
            f"{base}/hwmon/hwmon3/temp2_label": "junction\n",
            f"{base}/hwmon/hwmon3/temp3_input": "80000\n",
            f"{base}/hwmon/hwmon3/temp3_label": "mem\n",
            f"{base}/hwmon/hwmon3/freq1_input": "2100000000\n",
            f"{base}/hwmon/hwmon3/freq2_input": "1249000000\n",
            **{f"{base}/{name.replace('__', '/')}": content for name, content in more.items()},
        },
    )


def host(root: Path, *, busy: int = 100, idle: int = 300, available_kb: int = 4096) -> None:
    write(
        root,
        {
            "proc/stat": f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 0 0 3 0 0 0 0 0 0\nintr 5 1 2\n",
            "proc/meminfo": f"MemTotal:  8192 kB\nMemFree:   1024 kB\nMemAvailable:   {available_kb} kB\n",
            "proc/uptime": "1000.00 500.00\n",
        },
    )


def table(form: int, content: int, size: int, fields: dict[int, tuple[str, int]]) -> bytes:
    """A gpu_metrics table, all ones but for `fields`: offset -> struct format and value."""
    raw = bytearray(b"\xff" * size)
    struct.pack_into("<HBB", raw, 0, size, form, content)
    for offset, (how, value) in fields.items():
        struct.pack_into(f"<{how}", raw, offset, value)
    return bytes(raw)


def apu_table(prochot: int = 0, power: int = 0, heat: int = 0) -> bytes:
    """Revision 3.0, as a Strix Halo has it."""
    counters = (prochot, power, power, 0, heat, heat, 0)
    return table(3, 0, 264, {228 + 4 * place: ("I", value) for place, value in enumerate(counters)})


def instinct_table(cycles: int, heat: int = 0, power: int = 0, energy_j: float = 0.0) -> bytes:
    """Revision 1.7, as an MI300X has it."""
    counters = (cycles, 0, power, heat, 0, 0)
    fields: dict[int, tuple[str, int]] = {40 + 4 * place: ("I", value) for place, value in enumerate(counters)}
    return table(1, 7, 2208, fields | {24: ("Q", round(energy_j * 2**16))})


def attribute(number: int, unit: int, kind: int, values: int, value: int | None = None) -> bytes:
    """An attribute of revision 1.9 by the rules of AMDGPU_METRICS_ENC_ATTR; without a value it is all ones."""
    width = (1, 1, 2, 2, 4, 4, 8, 8)[kind]
    content = b"\xff" * width * values if value is None else value.to_bytes(width, "little") * values
    return struct.pack("<Q", unit << 24 | kind << 20 | number << 10 | values) + content


def attribute_table(*attributes: bytes, count: int | None = None) -> bytes:
    """Revision 1.9, encoded by the kernel's header, not recorded."""
    raw = b"".join(attributes)
    return struct.pack("<HBBi", 8 + len(raw), 1, 9, len(attributes) if count is None else count) + raw


def attribute_counters(values: dict[int, int]) -> bytes:
    """Revision 1.9 with these counters by id, between attributes that are not read."""
    counters = [attribute(number, 0, 6 if number == 7 else 4, 1, value) for number, value in values.items()]
    return attribute_table(attribute(40, 10, 4, 8), *counters, attribute(500, 0, 7, 3, 1))


def radeon_table(status: int) -> bytes:
    """Revision 1.3, as an RDNA 3 card has it."""
    return table(1, 3, 120, {112: ("Q", status)})
