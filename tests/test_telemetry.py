"""Telemetry on trees of files that change while they are sampled, and what the samples say."""

import csv
import io
import math
import os
import socket
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness import validity
from harness.machine import gpu_metrics
from harness.machine.sampler import Sampler, local_source
from harness.machine.telemetry import Meter, Reading, cgroup_files, find_files, read_now
from harness.manifest import ServedBy, read_run
from harness.paths import ROOT
from harness.report import doing, openmetrics, rows_csv
from harness.report.events import Event, events_of
from harness.report.observed import observe
from harness.report.timeline import figure_of
from harness.report.watched import of_cell
from harness.serve import Endpoint, inside
from harness.serve.containers import Look
from harness.serve.telemetry import source_of
from harness.summarize import read_summary
from harness.summary import MachineLoad
from harness.telemetry import (
    ContainerSample,
    GpuSample,
    HostSample,
    TelemetrySample,
    held_back_s,
    integral,
    machine_load,
    median_load,
    read_telemetry,
)
from tests import command
from tests.fake_gpus import apu_table, device, gpu, host, instinct_table, radeon_table, table, write
from tests.report_runs import write_run_directory
from tests.watched_runs import watch


def sampled(meter: Meter, root: Path, clock_s: float, paths: list[str] | None = None) -> TelemetrySample:
    found = read_now(root, paths or find_files(root))
    reading = Reading(found.wall_s, clock_s, 0.0, found.files)
    gpus, machine, container = meter.sample(reading)
    return TelemetrySample(wall_s=1000 + clock_s, cell="c", gpus=gpus, host=machine, container=container)


def test_a_card_of_its_own(tmp_path: Path) -> None:
    gpu(tmp_path)
    assert sampled(Meter(), tmp_path, 0).gpus == {
        "renderD128": GpuSample(
            busy_percent=90.0,
            memory_busy_percent=40.0,
            vram_used_bytes=8 * 2**30,
            gtt_used_bytes=2**20,
            power_w=100.0,
            temperatures_c={"edge": 61.0, "junction": 74.5, "mem": 80.0},
            clock_mhz=2100.0,
            memory_clock_mhz=1249.0,
        )
    }


def test_an_apu_has_less_and_its_power_is_that_of_the_package(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"{device()}/vendor": "0x1002\n",
            f"{device()}/gpu_busy_percent": "97\n",
            f"{device()}/mem_info_vram_used": "536870912\n",
            f"{device()}/mem_info_gtt_used": f"{60 * 2**30}\n",
            f"{device()}/pp_dpm_sclk": "0: 600Mhz\n1: 1100Mhz *\n2: 2900Mhz\n",
            f"{device()}/hwmon/hwmon7/power1_input": "118032000\n",
            f"{device()}/hwmon/hwmon7/temp1_input": "71000\n",
            f"{device()}/hwmon/hwmon7/temp1_label": "edge\n",
        },
    )
    assert sampled(Meter(), tmp_path, 0).gpus == {
        "renderD128": GpuSample(
            busy_percent=97.0,
            vram_used_bytes=2**29,
            gtt_used_bytes=60 * 2**30,
            power_w=118.032,
            package=True,
            temperatures_c={"edge": 71.0},
            clock_mhz=1100.0,
        )
    }


def test_only_amd_gpus_are_read(tmp_path: Path) -> None:
    gpu(tmp_path, 128)
    gpu(tmp_path, 129)
    write(tmp_path, {f"{device(129)}/vendor": "0x10de\n", f"{device(130)}/uevent": "DRIVER=amdgpu_xcp\n"})
    assert list(sampled(Meter(), tmp_path, 0).gpus) == ["renderD128"]


def test_the_average_power_comes_before_the_momentary(tmp_path: Path) -> None:
    gpu(tmp_path, watts=300, hwmon__hwmon3__power1_input="555000000\n")
    assert sampled(Meter(), tmp_path, 0).gpus["renderD128"].power_w == 300.0


def test_a_list_of_levels_is_read_only_without_a_frequency(tmp_path: Path) -> None:
    gpu(tmp_path, pp_dpm_sclk="0: 500Mhz *\n", pp_dpm_mclk="0: 900Mhz *\n")
    (tmp_path / device() / "hwmon/hwmon3/freq2_input").unlink()
    names = [path.rpartition("/")[2] for path in find_files(tmp_path)]
    assert "pp_dpm_sclk" not in names and "pp_dpm_mclk" in names
    assert sampled(Meter(), tmp_path, 0).gpus["renderD128"].memory_clock_mhz == 900.0


def test_what_a_driver_refuses_is_missing_and_never_0(tmp_path: Path) -> None:
    gpu(tmp_path)
    paths = find_files(tmp_path)
    for name in ("gpu_busy_percent", "hwmon/hwmon3/power1_average", "mem_info_vram_used", "hwmon/hwmon3/temp2_input"):
        path = tmp_path / device() / name
        path.unlink()
        path.mkdir()  # reading it fails, whoever reads
    (tmp_path / device() / "mem_busy_percent").write_text("unsupported\n")
    found = sampled(Meter(), tmp_path, 0, paths).gpus["renderD128"]
    assert (found.busy_percent, found.power_w, found.vram_used_bytes, found.memory_busy_percent) == (None,) * 4
    assert found.temperatures_c == {"edge": 61.0, "mem": 80.0}
    assert found.clock_mhz == 2100.0


def test_what_cannot_be_is_not_known(tmp_path: Path) -> None:
    gpu(tmp_path, gpu_busy_percent="65535\n", mem_info_vram_used="-4096\n", mem_info_gtt_used="-1\n")
    (tmp_path / device() / "hwmon/hwmon3/power1_average").write_text(f"{10**20}\n")
    found = sampled(Meter(), tmp_path, 0).gpus["renderD128"]
    assert (found.busy_percent, found.vram_used_bytes, found.gtt_used_bytes, found.power_w) == (None,) * 4
    (tmp_path / device() / "hwmon/hwmon3/power1_average").write_text("-5000000\n")
    assert sampled(Meter(), tmp_path, 0).gpus["renderD128"].power_w is None


def test_eight_gpus(tmp_path: Path) -> None:
    for number in range(8):
        gpu(tmp_path, 128 + 8 * number, watts=100 + number)
    found = sampled(Meter(), tmp_path, 0).gpus
    assert {name: one.power_w for name, one in found.items()} == {
        f"renderD{128 + 8 * number}": 100.0 + number for number in range(8)
    }


def test_the_host(tmp_path: Path) -> None:
    meter = Meter()
    host(tmp_path, busy=100, idle=300)
    assert sampled(meter, tmp_path, 0).host == HostSample(memory_available_bytes=4096 * 1024)
    host(tmp_path, busy=175, idle=325)
    assert sampled(meter, tmp_path, 1).host == HostSample(cpu_busy=0.75, memory_available_bytes=4096 * 1024)


def test_no_rate_over_an_instant(tmp_path: Path) -> None:
    meter = Meter()
    found = []
    for clock_s, busy, idle in ((0, 100, 300), (1, 150, 350), (1.05, 151, 350), (2, 175, 425)):
        host(tmp_path, busy=busy, idle=idle)
        machine = sampled(meter, tmp_path, clock_s).host
        found.append(machine.cpu_busy if machine is not None else None)
    assert found == [None, 0.5, None, 0.25]


@pytest.mark.parametrize("version", [1, 2])
def test_a_container(tmp_path: Path, version: int) -> None:
    name, meter = "f00d" * 16, Meter()
    one = f"system.slice/docker-{name}.scope"
    if version == 2:
        write(tmp_path, {"proc/77/cgroup": f"0::/{one}\n"})
        folder = f"sys/fs/cgroup/{one}"
        files = {f"{folder}/memory.current": "5000\n", f"{folder}/memory.stat": "anon 10\ninactive_file 1000\n"}
        cpu = f"{folder}/cpu.stat", "usage_usec {}000000\nuser_usec 5\n"
    else:
        write(tmp_path, {"proc/77/cgroup": f"5:cpu,cpuacct:/{one}\n4:memory:/{one}\n0::/elsewhere\n"})
        folder = f"sys/fs/cgroup/memory/{one}"
        files = {
            f"{folder}/memory.usage_in_bytes": "5000\n",
            f"{folder}/memory.stat": "inactive_file 3\ntotal_inactive_file 1000\n",
        }
        cpu = f"sys/fs/cgroup/cpuacct/{one}/cpuacct.usage", "{}000000000\n"
    write(tmp_path, {**files, cpu[0]: cpu[1].format(20)})
    paths = find_files(tmp_path, cgroup_files(tmp_path, 77, name))
    assert sampled(meter, tmp_path, 10, paths).container == ContainerSample(memory_bytes=4000)
    write(tmp_path, {cpu[0]: cpu[1].format(23)})
    assert sampled(meter, tmp_path, 12, paths).container == ContainerSample(cpu_cores=1.5, memory_bytes=4000)


def test_a_process_of_another_container_is_not_taken_for_ours(tmp_path: Path) -> None:
    write(tmp_path, {"proc/77/cgroup": "0::/system.slice/docker-beef.scope\n"})
    write(tmp_path, {"sys/fs/cgroup/system.slice/docker-beef.scope/memory.current": "1\n"})
    assert cgroup_files(tmp_path, 77, "f00d") == []
    assert cgroup_files(tmp_path, 78, "f00d") == []


def test_nothing_at_all(tmp_path: Path) -> None:
    assert find_files(tmp_path) == []
    assert sampled(Meter(), tmp_path, 0) == TelemetrySample(wall_s=1000.0, cell="c")


# The driver's tables


def held(*tables: bytes) -> list[dict[str, float] | None]:
    before: gpu_metrics.Table | None = None
    found = []
    for raw in tables:
        parsed = gpu_metrics.parse(raw)
        assert parsed is not None
        found.append(gpu_metrics.held_back(before, parsed))
        before = parsed
    return found


@pytest.mark.parametrize(
    ("bit", "kind"),
    [
        (0, "power"),
        (7, "power"),
        (16, "current"),
        (23, "current"),
        (32, "heat"),
        (36, "heat"),
        (45, "heat"),
        (47, "prochot"),
    ],
)
def test_a_status_says_what_limits_now(bit: int, kind: str) -> None:
    assert held(radeon_table(1 << bit), radeon_table(0)) == [{kind: 1.0}, {}]
    assert held(radeon_table(1 << bit | 1)) == [{kind: 1.0, "power": 1.0}]


def test_an_instinct_counts_cycles() -> None:
    tables = [instinct_table(1000, heat=10, power=0), instinct_table(2000, heat=260, power=1000)]
    assert held(*tables, instinct_table(3000, heat=260, power=1000)) == [None, {"heat": 0.25, "power": 1.0}, {}]


def test_a_counter_may_wrap() -> None:
    assert held(instinct_table(2**32 - 500, heat=2**32 - 100), instinct_table(500, heat=400)) == [None, {"heat": 0.5}]


def test_an_apu_counts_in_a_unit_of_its_own() -> None:
    assert held(apu_table(), apu_table(power=3), apu_table(power=3, heat=1), apu_table(1, 3, 1)) == [
        None, {"power": 1.0}, {"heat": 1.0}, {"prochot": 1.0},
    ]  # fmt: skip


def test_the_energy_counter() -> None:
    found = gpu_metrics.parse(instinct_table(1, energy_j=1234.5))
    assert found is not None and found.energy_j == 1234.5


def test_what_the_driver_did_not_fill_in_is_unknown() -> None:
    for raw in (table(1, 3, 120, {}), table(3, 0, 264, {}), table(1, 7, 2208, {})):
        assert gpu_metrics.parse(raw) == gpu_metrics.Table()
    assert held(table(1, 7, 2208, {}), table(1, 7, 2208, {})) == [None, None]


@pytest.mark.parametrize(
    "raw", [b"", b"\x01", table(1, 3, 128, {}), table(1, 9, 400, {}), table(3, 0, 256, {}), radeon_table(1)[:119]]
)
def test_unknown_tables_are_not_guessed_at(raw: bytes) -> None:
    assert gpu_metrics.parse(raw) is None


@given(st.binary(max_size=3000))
def test_no_table_is_a_mistake_of_ours(raw: bytes) -> None:
    gpu_metrics.parse(raw)


def test_throttling_and_energy_of_a_sampled_gpu(tmp_path: Path) -> None:
    meter = Meter()
    gpu(tmp_path, gpu_metrics=instinct_table(1000, heat=0, energy_j=50))
    first = sampled(meter, tmp_path, 0).gpus["renderD128"]
    assert (first.held_back, first.energy_j) == (None, 50.0)
    gpu(tmp_path, gpu_metrics=instinct_table(2000, heat=500, energy_j=150))
    second = sampled(meter, tmp_path, 1).gpus["renderD128"]
    assert (second.held_back, second.energy_j) == ({"heat": 0.5}, 150.0)
    gpu(tmp_path, gpu_metrics=b"", hwmon__hwmon3__energy1_input="7500000\n")
    third = sampled(meter, tmp_path, 2).gpus["renderD128"]
    assert (third.held_back, third.energy_j) == (None, 7.5)


# The thread


def test_files_that_change_while_they_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path / "root"))
    gpu(tmp_path / "root", watts=1)
    path = tmp_path / "telemetry.jsonl"
    power = tmp_path / "root" / device() / "hwmon/hwmon3/power1_average"
    with Sampler(local_source(interval_s=0.02), "c", path) as sampler:
        for watts in range(1, 8):
            (tmp_path / "new").write_text(f"{watts}000000\n")
            os.replace(tmp_path / "new", power)
            seen, until_s = sampler.samples, time.monotonic() + 5
            while sampler.samples < seen + 2 and time.monotonic() < until_s:
                time.sleep(0.005)
    values = [one.gpus["renderD128"].power_w for one in read_telemetry(path)["c"]]
    assert list(dict.fromkeys(values)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert sampler.last_failure is None


def test_samples_are_taken_at_the_start_each_interval_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    with Sampler(local_source(), "c", path):
        entered = time.time()
        time.sleep(0.1)
        left = time.time()
    times = [one.wall_s for one in read_telemetry(path)["c"]]
    assert len(times) == 2
    assert times[0] < entered + 0.05 and times[1] >= left


def test_a_driver_that_hangs_does_not_hold_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path))
    monkeypatch.setattr("harness.machine.sampler.LONGEST_END_S", 0.1)
    gpu(tmp_path)
    hangs = tmp_path / device() / "gpu_busy_percent"
    hangs.unlink()
    os.mkfifo(hangs)  # reading it waits for a writer
    begin = time.monotonic()
    with Sampler(local_source(), "c", tmp_path / "telemetry.jsonl") as sampler:
        pass
    assert time.monotonic() - begin < 1
    assert sampler.samples == 0
    with hangs.open("w") as writer:
        writer.write("50\n")
    for thread in threading.enumerate():
        if thread.name == "telemetry of c":
            thread.join(5)


def test_an_unwritable_file_is_a_gap_and_no_more(tmp_path: Path) -> None:
    with Sampler(local_source(), "c", tmp_path / "missing" / "telemetry.jsonl") as sampler:
        pass
    assert sampler.last_failure is not None and "FileNotFoundError" in sampler.last_failure


def test_without_a_source_nothing_is_sampled(tmp_path: Path) -> None:
    with Sampler(None, "c", tmp_path / "telemetry.jsonl") as sampler:
        pass
    assert (sampler.samples, list(tmp_path.iterdir())) == (0, [])


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(b'{"wall_s":1.0,"cell":"c"}\n{"wall_s":2.0,"ce')
    assert read_telemetry(path) == {"c": [TelemetrySample(wall_s=1.0, cell="c")]}
    assert read_telemetry(tmp_path / "none") == {}


# What the samples say


def test_the_integral_of_a_straight_line_is_exact() -> None:
    series = [(float(t), 10.0 * t) for t in range(11)]
    assert integral(series, (0.0, 10.0)) == 500.0
    assert integral(series, (2.5, 8.5)) == pytest.approx(5 * (8.5**2 - 2.5**2))


def test_the_integral_of_steps() -> None:
    series = [(0.0, 100.0), (1.0, 100.0), (2.0, 200.0), (3.0, 200.0), (4.0, 0.0), (5.0, 0.0), (6.0, 0.0)]
    assert integral(series, (0.0, 6.0)) == 100 + 150 + 200 + 100 + 0 + 0


def test_the_edges_of_the_window() -> None:
    series = [(float(t), 50.0) for t in range(1, 7)]
    assert integral(series, (0.5, 6.75)) == 50 * 6.25  # the nearest value holds to the edge
    assert integral(series, (1.5, 5.5)) is None  # 4 samples inside are too few
    assert integral(series, (-4.0, 6.0)) is None  # nobody looked for 5 s
    assert integral([], (0.0, 1.0)) is None


def test_a_gap_is_not_bridged() -> None:
    series = [(float(t), 50.0) for t in (0, 1, 2, 3, 7.9, 8, 9)]
    assert integral(series, (0.0, 9.0)) == 450.0
    assert integral([*series[:4], *series[5:]], (0.0, 9.0)) is None


@given(st.lists(st.floats(0, 1000), min_size=10, max_size=30), st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_integral_lies_between_least_and_most(values: list[float], begin: float, shorter: float) -> None:
    series = [(float(at), value) for at, value in enumerate(values)]
    window = begin, len(values) - 1 - shorter
    if sum(window[0] <= at <= window[1] for at, _ in series) < 5:
        return
    found = integral(series, window)
    assert found is not None
    length = window[1] - window[0]
    assert min(values) * length - 1e-6 <= found <= max(values) * length + 1e-6


def one(wall_s: float, took_s: float | None = 0.001, **gpus: GpuSample) -> TelemetrySample:
    return TelemetrySample(wall_s=wall_s, cell="c", took_s=took_s, gpus=gpus)


def test_a_cells_machine() -> None:
    samples = [
        one(
            100.0 + t,
            renderD128=GpuSample(
                busy_percent=90.0 + t,
                vram_used_bytes=1000 * t,
                gtt_used_bytes=10,
                power_w=200.0 + 10 * t,
                temperatures_c={"edge": 50.0 + t, "junction": 60.0 + t},
                clock_mhz=2000.0 - t,
                energy_j=5000.0 + 200 * t,
                held_back={"heat": 0.5, "power": 1.0} if t == 4 else {},
            ),
        )
        for t in range(11)
    ]
    found = machine_load(samples, (102.0, 108.0), tokens=750)
    assert found is not None
    assert (found.samples, found.gap_most_s, found.took_most_s) == (7, 1.0, 0.001)
    assert (found.busy_mean_percent, found.busy_most_percent) == (95.0, 98.0)
    assert (found.power_mean_w, found.power_most_w) == (250.0, 280.0)
    assert (found.energy_j, found.energy_per_token_j, found.counted_energy_j) == (1500.0, 2.0, 1200.0)
    assert (found.memory_most_bytes, found.temperature_most_c) == (8010, 68.0)
    assert (found.heat_s, found.limited_s, found.package) == (0.5, 1.0, False)
    alone = found.gpus["renderD128"]
    assert (alone.used, alone.vram_most_bytes, alone.gtt_most_bytes) == (True, 8000, 10)
    assert (alone.clock_mean_mhz, alone.clock_least_mhz) == (1995.0, 1992.0)
    assert alone.temperatures_most_c == {"edge": 58.0, "junction": 68.0}


def test_idle_gpus_are_left_out_of_the_totals() -> None:
    def working(watts: float) -> GpuSample:
        return GpuSample(busy_percent=80.0, power_w=watts, vram_used_bytes=5)

    idle = GpuSample(busy_percent=2.0, power_w=30.0, vram_used_bytes=7, held_back={"heat": 1.0})
    samples = [one(float(t), renderD128=working(300), renderD129=idle, renderD130=working(200)) for t in range(7)]
    found = machine_load(samples, (0.0, 6.0), tokens=300)
    assert found is not None
    assert {name: gpu.used for name, gpu in found.gpus.items()} == {
        "renderD128": True, "renderD129": False, "renderD130": True,
    }  # fmt: skip
    assert (found.power_mean_w, found.energy_j, found.energy_per_token_j) == (500.0, 3000.0, 10.0)
    assert (found.memory_most_bytes, found.heat_s) == (10, None)


def test_a_gpu_without_power_makes_the_energy_unknown() -> None:
    samples = [
        one(float(t), renderD128=GpuSample(busy_percent=90, power_w=100), renderD129=GpuSample(busy_percent=90))
        for t in range(7)
    ]
    found = machine_load(samples, (0.0, 6.0), tokens=300)
    assert found is not None
    assert (found.power_mean_w, found.power_most_w, found.energy_j, found.energy_per_token_j) == (None,) * 4


def test_without_a_busy_gpu_there_is_no_energy_of_the_server() -> None:
    samples = [one(float(t), renderD128=GpuSample(busy_percent=0, power_w=8)) for t in range(7)]
    found = machine_load(samples, (0.0, 6.0), tokens=300)
    assert found is not None
    assert (found.energy_j, found.power_mean_w, found.gpus["renderD128"].energy_j) == (None, None, 48.0)


def test_where_no_gpu_says_how_busy_it_is_all_count() -> None:
    samples = [one(float(t), renderD128=GpuSample(power_w=8)) for t in range(7)]
    found = machine_load(samples, (0.0, 6.0), tokens=None)
    assert found is not None
    assert (found.energy_j, found.energy_per_token_j) == (48.0, None)


def test_no_window_and_no_samples() -> None:
    assert machine_load([], (0.0, 1.0), 1) is None
    assert machine_load([one(5.0)], (0.0, 1.0), 1) is None
    assert machine_load([one(5.0)], None, 1) is None


def test_a_counter_that_began_anew_is_not_used() -> None:
    samples = [one(float(t), renderD128=GpuSample(energy_j=100.0 if t < 3 else 50.0)) for t in range(7)]
    found = machine_load(samples, (1.0, 5.0), None)
    assert found is not None and found.counted_energy_j is None


def test_time_held_back_is_clipped_to_the_window() -> None:
    samples = [one(float(t), renderD128=GpuSample(held_back={"heat": 1.0})) for t in range(5)]
    assert held_back_s(samples, (0.5, 2.25), "renderD128", ("heat",)) == 1.75
    assert held_back_s(samples, (0.5, 2.25), "renderD128", ("power",)) == 0.0
    assert held_back_s([one(0.0), one(1.0)], (0.0, 1.0), "renderD128", ("heat",)) is None


def test_a_rows_machine_is_the_median_of_its_cells() -> None:
    loads = [
        MachineLoad(samples=7, gap_most_s=1.0, energy_per_token_j=energy, memory_most_bytes=memory)
        for energy, memory in ((2.0, 5), (4.0, 6), (None, 9))
    ]
    found = median_load([*loads, None])
    assert found == MachineLoad(samples=7, gap_most_s=1.0, energy_per_token_j=3.0, memory_most_bytes=6)
    assert median_load([None]) is None
    assert median_load([]) is None


def test_values_are_finite(tmp_path: Path) -> None:
    gpu(tmp_path, hwmon__hwmon3__temp1_input="-40000\n")
    found = sampled(Meter(), tmp_path, 0).gpus["renderD128"]
    assert found.temperatures_c["edge"] == -40.0 and all(map(math.isfinite, found.temperatures_c.values()))


# The whole way, with the embedded engine


def test_a_run_on_a_machine_with_a_busy_gpu(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gpu(root, busy=95, watts=120)
    host(root)
    path = command.write(tmp_path, loads={"burst": {"user": "chat", "users": 2, "duration_s": 6, "output_tokens": 20}})
    env = {"AMD_LLM_LOAD_TELEMETRY_ROOT": str(root)}
    with command.going("run", path.name, "--runs", "runs", "--explain", cwd=tmp_path, env=env) as going:
        done = going.end()
        going.nothing_left()
    assert (done.code, done.err) == (0, "")
    run = command.only_run(tmp_path / "runs")
    summary = read_summary(run)
    (cell,) = summary.cells
    did = cell.machine_load
    assert did is not None and cell.numbers.output_tok_s is not None
    assert 5 <= did.samples <= 7 and did.gap_most_s < 1.5
    assert did.energy_j == pytest.approx(6 * 120)
    assert did.energy_per_token_j == pytest.approx(120 / cell.numbers.output_tok_s)
    assert (did.busy_mean_percent, did.temperature_most_c, did.memory_most_bytes) == (95.0, 80.0, 8 * 2**30 + 2**20)
    (samples,) = read_telemetry(run / "telemetry.jsonl").values()
    assert samples[0].wall_s < read_run(run).cells[0].started_wall_s + 0.5
    page = (run / "report.html").read_text()
    assert "What the machine did" in page and "Energy per output token" in page
    assert "The machine under one / burst" in done.out and "Power, mean and most: 120 W, 120 W\n" in done.out


# What reports show of it


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    write_run_directory(folder, repeats=1, requests=100)
    watch(folder)
    return folder


def test_the_panels_of_an_apu(watched: Path) -> None:
    line = observe(watched, read_run(watched)).timelines[0]
    assert {panel: list(lines) for panel, lines in line.machine.panels.items()} == {
        "busy": ["busy"], "memory": ["VRAM", "GTT"], "power": ["power"], "temperature": ["edge"], "clock": ["GPU"],
    }  # fmt: skip
    figure = figure_of(line, [Event(0.0, "x")])
    titles = [axis["title"]["text"] for key, axis in figure["layout"].items() if key.startswith("yaxis")]
    assert titles == ["", "requests", "tok/s", "KV cache, %", "busy, %", "memory, GiB", "power, W", "°C", "clock, MHz"]
    drawn = {trace["name"]: trace for trace in figure["data"]}
    assert drawn["memory, GTT"]["y"][0] == 38.0 and drawn["memory, GTT"]["showlegend"]
    assert not drawn["power"]["showlegend"]


def test_of_several_gpus_each_has_a_line_and_one_entry_in_the_legend(tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=20)
    watch(tmp_path, gpus=3)
    line = observe(tmp_path, read_run(tmp_path)).timelines[0]
    assert list(line.machine.panels["temperature"]) == ["renderD128", "renderD129", "renderD130"]
    traces = [trace for trace in figure_of(line, [Event(0.0, "x")])["data"] if trace["name"].startswith("renderD")]
    assert len(traces) == 15
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["renderD128", "renderD129", "renderD130"]


def test_idle_gpus_are_not_drawn() -> None:
    samples = [
        one(float(t), renderD128=GpuSample(busy_percent=90.0), renderD129=GpuSample(busy_percent=0.0)) for t in range(6)
    ]
    found = of_cell(samples)
    assert (found.drawn, found.left_out, list(found.panels)) == (1, 1, ["busy"])


def test_heat_makes_a_run_invalid_and_is_an_event(tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=100, servers=("only",))
    watch(tmp_path, hot=True)
    summary = read_summary(tmp_path)
    found = {cell.load: (cell.problems, cell.notes) for cell in summary.cells}
    assert not summary.valid
    (problem,) = found["batch-5"][0]
    assert problem.startswith("r1-only-batch-5: the GPU renderD128 was throttled by heat (or PROCHOT) during 2.0 of ")
    assert problem.endswith(" s; at most 5% is allowed")
    assert found["sequential"][0] == []
    assert any(note.endswith("up to 5% is allowed") for note in found["sequential"][1])
    line = observe(tmp_path, read_run(tmp_path)).timelines[0]
    (event,) = [event for event in events_of(line, None, None) if event.label == "heat"]
    assert event.bad and event.text.startswith("heat throttles the GPU renderD128, last seen at ")


def test_a_power_limit_is_no_reason(watched: Path) -> None:
    summary = read_summary(watched)
    assert summary.valid
    did = summary.cells[0].machine_load
    assert did is not None and did.heat_s == 0.0 and did.limited_s == pytest.approx(summary.cells[0].numbers.window_s)


def test_energy_that_the_counter_does_not_bear_out_is_noted() -> None:
    load = MachineLoad(samples=9, gap_most_s=1.0, energy_j=1000.0, counted_energy_j=800.0)
    assert validity._energy(load) == [
        "the energy is 1,000 J by the power readings and 800 J by the GPUs' own counters: they differ by more than 10%"
    ]
    assert validity._energy(msgspec.structs.replace(load, counted_energy_j=930.0)) == []


def test_a_machine_that_nobody_looked_at_for_long_is_noted() -> None:
    load = MachineLoad(samples=9, gap_most_s=7.25, took_most_s=6.2)
    assert validity._unseen(load) == [
        "the machine was not looked at for 7.2 s of the measured time (reading its files took up to 6.2 s): "
        "the energy is not known"
    ]
    assert validity._unseen(msgspec.structs.replace(load, gap_most_s=1.4)) == []
    assert validity._unseen(None) == []


def test_the_table_says_whose_power_it_is_and_how_well_it_was_looked_at(watched: Path) -> None:
    summary = read_summary(watched)
    table = doing.doing(summary)
    texts = dict(zip([column.key for column in table.columns], table.rows[0][2], strict=True))
    assert texts["power"].endswith(" W (package)") and texts["memory"] == "39.0 GiB"
    assert texts["container"] == "1.25 cores, 3.0 GiB"
    samples = sum(cell.machine_load.samples for cell in summary.cells if cell.machine_load is not None)
    assert table.sampling == f"{samples} samples in 6 runs, at most 0.5 s apart; reading one took 2.1 ms at most"


def test_exports_for_programs(watched: Path) -> None:
    summary, run = read_summary(watched), read_run(watched)
    did = summary.rows[0].machine_load
    assert did is not None
    row = next(csv.DictReader(io.StringIO(rows_csv.render(summary, run))))
    assert float(row["energy_per_token_j"]) == did.energy_per_token_j
    assert float(row["gpu_memory_most_bytes"]) == did.memory_most_bytes == 39 * 2**30
    text = openmetrics.render(summary, run)
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    first = families["amd_llm_load_output_token_energy_joules"].samples[0]
    assert (first.labels["server"], first.labels["load"], first.value) == ("open", "sequential", did.energy_per_token_j)
    assert families["amd_llm_load_gpu_busy_mean_ratio"].samples[0].value == pytest.approx(0.96, abs=0.02)


def test_a_run_without_telemetry_says_nothing_of_it(tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=12)
    summary = read_summary(tmp_path)
    assert [row.machine_load for row in summary.rows] == [None] * 6
    assert doing.doing(summary) == doing.Doing([], [])
    assert "amd_llm_load_energy" not in openmetrics.render(summary, read_run(tmp_path))


# Through a container


def test_what_the_shell_in_a_container_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script by this machine's shell: the same samples as from the files themselves."""
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", str(tmp_path))
    gpu(tmp_path, gpu_metrics=instinct_table(1000, energy_j=7.25), pp_dpm_sclk="0: 500Mhz\n1: 900Mhz *\n")
    gpu(tmp_path, 129, watts=33)
    (tmp_path / device(129) / "hwmon/hwmon3/freq1_input").unlink()
    write(tmp_path, {f"{device(130)}/vendor": "0x10de\n", f"{device(129)}/pp_dpm_sclk": "0: 500Mhz\n1: 900Mhz *\n"})
    host(tmp_path)
    write(
        tmp_path,
        {"sys/fs/cgroup/memory.current": "5000\n", "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 1000\n"},
    )
    write(tmp_path, {"sys/fs/cgroup/cpu.stat": "usage_usec 9000000\nuser_usec 1\n"})
    shell = subprocess.Popen(["sh", "-c", inside._script(str(tmp_path), 0.05)], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    lines = inside._lines(iter(partial(os.read, shell.stdout.fileno(), 65536), b""))
    assert int(next(lines).removeprefix(b"pid ")) == shell.pid
    readings = inside.readings_of(lines)
    first = next(readings)
    shell.terminate()
    rest = list(readings)
    shell.stdout.close()
    assert (shell.wait(), len(rest)) == (0, 1)  # told to end, it prints once more
    assert (first.clock_s, first.took_s) == (1000.0, None)
    gpus, machine, container = Meter().sample(first)
    there = sampled(Meter(), tmp_path, 0)
    assert (gpus, machine) == (there.gpus, there.host)
    assert gpus["renderD128"].energy_j == 7.25 and gpus["renderD129"].clock_mhz == 900.0
    assert container == ContainerSample(memory_bytes=4000)


def test_half_a_reading_is_none() -> None:
    assert list(inside.readings_of([b"/proc/uptime:5.00 1.00", b"/proc/stat:cpu  1 2 3 4 5 6"])) == []


def test_whose_telemetry_can_be_had() -> None:
    def at(url: str) -> Endpoint:
        return Endpoint(url=url, started=ServedBy(url=url), look=lambda now: Look(None))

    for url in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8", f"http://{socket.gethostname()}:80"):
        assert source_of(at(url)) is not None
    for url in ("http://gpu-box:8000", "https://10.0.0.7"):
        assert source_of(at(url)) is None


def test_every_field_of_a_sample_is_documented() -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    part = page[page.index("## A sample of telemetry") : page.index("## Versions")]
    structs = (TelemetrySample, GpuSample, HostSample, ContainerSample)
    fields = {name for struct in structs for name in struct.__struct_fields__}
    assert {name for name in fields if f"`{name}`" not in part} == set()
