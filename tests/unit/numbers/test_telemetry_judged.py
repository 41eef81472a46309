"""What samples of a machine say of a cell and a row: energy, means, time held back."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.numbers.summarize import summarize
from harness.numbers.warnings import other_machine_note
from harness.records.manifest import Machine, RemoteMachine, write_run
from harness.records.samples import (
    GpuSample,
    MachineLoad,
    TelemetrySample,
    held_back_s,
    integral,
    machine_load,
    median_load,
)
from tests.support.made_runs import telemetry_of, write_made_run
from tests.support.wording import Wording


@pytest.mark.parametrize(
    ("url", "own_name", "host", "is_noted"),
    [
        ("http://127.0.0.1:18200", "pc", "gpu-box", True),
        ("http://localhost:18200", "pc", "gpu-box", True),
        ("http://gpu-box:8000", "pc", "gpu-box", False),
        ("http://127.0.0.1:18200", "mi-box", "me", False),  # this machine, by another name
        ("http://127.0.0.1:18200", "pc", "127.0.0.1", False),  # both through tunnels, or in a container here
        ("http://127.0.0.1:18200", "pc", "", False),  # a run from before the host was recorded
    ],
)
def test_telemetry_of_another_machine_than_the_address(
    url: str, own_name: str, host: str, is_noted: bool, wording: Wording
) -> None:
    remote = RemoteMachine(host=host, machine=Machine(name="mi-box"), harness="1", offset_s=0.0, error_s=0.0)
    note = other_machine_note(url, own_name, remote)
    assert (note is not None) == is_noted
    if note is not None:
        wording(note)


def test_rejected_lines_are_no_missing_telemetry(tmp_path: Path, wording: Wording) -> None:
    run = write_made_run(tmp_path / "run")
    remote = RemoteMachine(machine=Machine(name="mi-box"), harness="1", offset_s=0.0, error_s=0.0)
    for sent in (remote, replace(remote, rejected=8, first_rejected='{"kind":"sample","wall_s":NaN}')):
        write_run(tmp_path / "run", replace(run, remote=sent))
        notes = [note for note in summarize(tmp_path / "run").notes if note.code.startswith("telemetry_")]
        assert [note.code for note in notes] == [*(["telemetry_rejected"] if sent.rejected else []), "telemetry_lost"]
        for note in notes:
            wording(note)


def test_the_integral() -> None:
    line = [(float(t), 10.0 * t) for t in range(11)]
    assert integral(line, (0.0, 10.0)) == 500.0
    assert integral(line, (2.5, 8.5)) == pytest.approx(5 * (8.5**2 - 2.5**2))
    steps = [(0.0, 100.0), (1.0, 100.0), (2.0, 200.0), (3.0, 200.0), (4.0, 0.0), (5.0, 0.0), (6.0, 0.0)]
    assert integral(steps, (0.0, 6.0)) == 100 + 150 + 200 + 100 + 0 + 0


def test_the_edges_of_the_window() -> None:
    series = [(float(t), 50.0) for t in range(1, 7)]
    assert integral(series, (0.5, 6.75)) == 50 * 6.25  # the nearest value holds to the edge
    assert integral(series, (1.5, 5.5)) is None  # 4 samples inside are too few
    assert integral(series, (-4.0, 6.0)) is None  # nobody looked for 5 s
    assert integral([], (0.0, 1.0)) is None


def test_a_cells_machine() -> None:
    samples = [
        telemetry_of(
            100.0 + t,
            renderD128=GpuSample(
                busy_percent=90.0 + t, vram_used_bytes=1000 * t, gtt_used_bytes=10, power_w=200.0 + 10 * t,
                temperatures_c={"edge": 50.0 + t, "junction": 60.0 + t}, clock_mhz=2000.0 - t,
                energy_j=5000.0 + 200 * t, held_back={"heat": 0.5, "power": 1.0} if t == 4 else {},
            ),
        )
        for t in range(11)
    ]  # fmt: skip
    found = machine_load(samples, (102.0, 108.0), tokens=750)
    assert found is not None
    assert (found.samples, found.gap_max_s, found.took_max_s) == (7, 1.0, 0.001)
    assert (found.busy_mean_percent, found.busy_max_percent) == (95.0, 98.0)
    assert (found.power_mean_w, found.power_max_w) == (250.0, 280.0)
    assert (found.energy_j, found.energy_per_token_j, found.counted_energy_j) == (1500.0, 2.0, 1200.0)
    assert (found.memory_max_bytes, found.temperature_max_c) == (8010, 68.0)
    assert (found.heat_s, found.limited_s, found.package) == (0.5, 1.0, False)
    alone = found.gpus["renderD128"]
    assert (alone.used, alone.vram_max_bytes, alone.gtt_max_bytes) == (True, 8000, 10)
    assert (alone.clock_mean_mhz, alone.clock_min_mhz) == (1995.0, 1992.0)
    assert alone.temperatures_max_c == {"edge": 58.0, "junction": 68.0}


def test_idle_gpus_are_left_out_of_the_totals() -> None:
    def working(watts: float) -> GpuSample:
        return GpuSample(busy_percent=80.0, power_w=watts, vram_used_bytes=5)

    idle = GpuSample(busy_percent=2.0, power_w=30.0, vram_used_bytes=7, held_back={"heat": 1.0})
    samples = [
        telemetry_of(float(t), renderD128=working(300), renderD129=idle, renderD130=working(200)) for t in range(7)
    ]
    found = machine_load(samples, (0.0, 6.0), tokens=300)
    assert found is not None
    assert {name: gpu.used for name, gpu in found.gpus.items()} == {
        "renderD128": True, "renderD129": False, "renderD130": True,
    }  # fmt: skip
    assert (found.power_mean_w, found.energy_j, found.energy_per_token_j) == (500.0, 3000.0, 10.0)
    assert (found.memory_max_bytes, found.heat_s) == (10, None)


def test_whose_energy_is_that_of_the_server() -> None:
    def judged(**gpus: GpuSample) -> MachineLoad:
        samples = [TelemetrySample(wall_s=float(at), cell="c", gpus=gpus) for at in range(7)]
        found = machine_load(samples, (0.0, 6.0), tokens=300)
        assert found is not None
        return found

    # A GPU without power makes it unknown. Without a busy GPU there is no energy. All count if none reports its load.
    found = judged(a=GpuSample(busy_percent=90, power_w=100), b=GpuSample(busy_percent=90))
    assert (found.power_mean_w, found.power_max_w, found.energy_j, found.energy_per_token_j) == (None,) * 4
    found = judged(a=GpuSample(busy_percent=0, power_w=8))
    assert (found.energy_j, found.power_mean_w, found.gpus["a"].energy_j) == (None, None, 48.0)
    assert judged(a=GpuSample(power_w=8)).energy_j == 48.0


def test_time_held_back_is_clipped_to_the_window() -> None:
    samples = [telemetry_of(float(t), renderD128=GpuSample(held_back={"heat": 1.0})) for t in range(5)]
    assert held_back_s(samples, (0.5, 2.25), "renderD128", ("heat",)) == 1.75
    assert held_back_s(samples, (0.5, 2.25), "renderD128", ("power",)) == 0.0
    assert held_back_s([telemetry_of(0.0), telemetry_of(1.0)], (0.0, 1.0), "renderD128", ("heat",)) is None


def test_a_rows_machine_is_the_median_of_its_cells() -> None:
    loads = [
        MachineLoad(samples=7, gap_max_s=1.0, energy_per_token_j=energy, memory_max_bytes=memory)
        for energy, memory in ((2.0, 5), (4.0, 6), (None, 9))
    ]
    found = median_load([*loads, None])
    assert found == MachineLoad(samples=7, gap_max_s=1.0, energy_per_token_j=3.0, memory_max_bytes=6)
    assert median_load([None]) is None
    assert median_load([]) is None
