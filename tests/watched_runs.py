"""Telemetry for run directories made by hand: an APU, or several cards."""

import math
from pathlib import Path

import msgspec

from harness.analysis.summarize import summarize, write_summary
from harness.rundir.manifest import read_run
from harness.rundir.samples import ContainerSample, GpuSample, HostSample, TelemetrySample


def watch(folder: Path, *, gpus: int = 1, hot: bool = False, every_s: float = 0.5) -> None:
    """Write telemetry.jsonl for every cell of a finished run, and its summary anew. `hot`: heat throttles a GPU."""
    lines = []
    for cell in read_run(folder).cells:
        for number in range(math.ceil(((cell.ended_wall_s or 0.0) - cell.started_wall_s) / every_s) + 1):
            at = number * every_s
            busy = 0.0 if at < 1.2 else 96.0 + 3 * math.sin(at)
            sample = TelemetrySample(
                wall_s=cell.started_wall_s + at,
                cell=cell.id,
                took_s=0.0021,
                gpus={f"renderD{128 + gpu}": _gpu(gpu, at, busy, gpus > 1, hot) for gpu in range(gpus)},
                host=HostSample(cpu_busy=0.11, memory_available_bytes=60 * 2**30),
                container=ContainerSample(cpu_cores=1.25, memory_bytes=3 * 2**30),
            )
            lines.append(msgspec.json.encode(sample) + b"\n")
    (folder / "telemetry.jsonl").write_bytes(b"".join(lines))
    write_summary(folder, summarize(folder))


def _gpu(gpu: int, at: float, busy: float, card: bool, hot: bool) -> GpuSample:
    works = busy > 0
    warm = 48 + (30 + 2 * gpu) * (1 - math.exp(-at / 4)) * works
    labels = ("edge", "junction", "mem") if card else ("edge",)
    throttled = hot and gpu == 0 and 3 <= at < 5
    return GpuSample(
        busy_percent=busy,
        memory_busy_percent=busy / 2 if card else None,
        vram_used_bytes=(11 if card else 1) * 2**30,
        gtt_used_bytes=2**25 if card else 38 * 2**30,
        power_w=(24.0 + 5 * gpu) + works * (92 + 8 * math.sin(2 * at + gpu)),
        package=not card,
        temperatures_c={label: round(warm + 9 * place, 1) for place, label in enumerate(labels)},
        clock_mhz=600.0 + works * (2200 - 700 * throttled + 40 * math.sin(3 * at + gpu)),
        held_back=({"heat": 1.0} if throttled else {}) | ({"power": 1.0} if works else {}),
    )


def one(wall_s: float, took_s: float | None = 0.001, **gpus: GpuSample) -> TelemetrySample:
    """A sample with these GPUs and nothing else."""
    return TelemetrySample(wall_s=wall_s, cell="c", took_s=took_s, gpus=gpus)
