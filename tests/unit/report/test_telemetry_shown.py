"""What reports show of a machine that was looked at while it was measured."""

import csv
import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.base.files import read_lines
from harness.numbers.summarize import read_summary, summarize
from harness.records.manifest import read_run
from harness.records.samples import GpuSample, KernelLine, TelemetrySample
from harness.report import export
from harness.report.charts.data import machine_samples, read_chart_data
from harness.report.charts.timeline import timeline_events, timeline_figure
from harness.report.elements import TimelineEvent
from harness.report.results_table import machine_table
from tests.support.made_runs import telemetry_of, watch, write_lines
from tests.support.report_runs import write_run_directory
from tests.support.wording import Wording


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    write_run_directory(folder, repeats=1, requests=100)
    watch(folder)
    return folder


def test_every_gpu_has_a_line_in_each_panel_and_one_entry_in_the_legend(watched: Path, tmp_path: Path) -> None:
    line = read_chart_data(watched).timelines[0]
    figure = timeline_figure(line, [TimelineEvent(0.0, "x")])
    titles = [axis["title"]["text"] for key, axis in figure["layout"].items() if key.startswith("yaxis")]
    assert titles == ["", "requests", "tok/s", "KV cache, %", "busy, %", "memory, GiB", "power, W", "°C", "clock, MHz"]
    drawn = {trace["name"]: trace for trace in figure["data"]}
    assert drawn["memory"]["y"][0] == 39.0 and not drawn["memory"]["showlegend"], "VRAM and GTT"
    write_run_directory(tmp_path, repeats=1, requests=20)
    watch(tmp_path, gpus=3)
    figure = timeline_figure(read_chart_data(tmp_path).timelines[0], [TimelineEvent(0.0, "x")])
    traces = [trace for trace in figure["data"] if trace["name"].startswith("renderD")]
    assert len(traces) == 15
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["renderD128", "renderD129", "renderD130"]


def test_idle_gpus_are_not_drawn() -> None:
    busy, idle = GpuSample(busy_percent=90.0), GpuSample(busy_percent=0.0)
    samples = machine_samples([telemetry_of(float(t), renderD128=busy, renderD129=idle) for t in range(6)], 0.0)
    assert {panel: list(lines) for panel, lines in samples.panels.items()} == {"busy": ["renderD128"]}


def test_heat_makes_a_run_invalid_and_is_an_event(tmp_path: Path, wording: Wording) -> None:
    write_run_directory(tmp_path, repeats=1, requests=100, servers=("only",))
    watch(tmp_path, hot=True)
    summary = read_summary(tmp_path)
    found = {cell.load: (cell.problems, cell.notes) for cell in summary.cells}
    assert not summary.valid
    (problem,) = found["batch-5"][0]
    assert (problem.code, problem.cell, problem.values["gpu"]) == ("gpu_throttled", "r1-only-batch-5", "renderD128")
    assert problem.values["heat_s"] == pytest.approx(2.0) and problem.values["invalid"]
    assert found["sequential"][0] == []
    assert any(note.code == "gpu_throttled" and not note.values["invalid"] for note in found["sequential"][1])
    line = read_chart_data(tmp_path).timelines[0]
    (event,) = [event for event in timeline_events(line, None, None) if event.label == "heat"]
    assert event.bad and "2.0" in event.text
    wording(event.text)


def test_the_table_says_whose_power_it_is_and_how_well_it_was_looked_at(watched: Path, wording: Wording) -> None:
    summary = read_summary(watched)
    did = summary.cells[0].machine_load
    assert summary.valid and did is not None  # a power limit is no reason
    assert did.heat_s == 0.0 and did.limited_s == pytest.approx(summary.cells[0].numbers.window_s)
    (table,) = machine_table(summary)
    texts = dict(zip([column.key for column in table.columns], table.rows[0], strict=True))
    assert texts["power"].endswith(" W (package)") and texts["memory"] == "39.0 GiB"
    assert texts["container"] == "1.25 cores, 3.0 GiB"
    samples = sum(cell.machine_load.samples for cell in summary.cells if cell.machine_load is not None)
    assert str(samples) in table.note and "0.5" in table.note
    wording(table.note)


def test_exports_for_programs(watched: Path) -> None:
    summary, run = read_summary(watched), read_run(watched)
    did = summary.rows[0].machine_load
    assert did is not None
    row = next(csv.DictReader(io.StringIO(export.csv_table(summary, run))))
    assert float(row["energy_per_token_j"]) == did.energy_per_token_j
    assert float(row["gpu_memory_max_bytes"]) == did.memory_max_bytes == 39 * 2**30


def test_a_failure_in_the_kernel_log_is_shown(tmp_path: Path, wording: Wording) -> None:
    """Also where no request failed; not throttling, the crash of a process, or a line that no failure has."""
    lines = {
        "amdgpu 0000:c5:00.0: amdgpu: ring comp_1.1.0 timeout, signaled seq=2, emitted seq=4": 1,
        "browser[41]: segfault at 10 ip 00007f sp 00007f error 4": 0,
        "amdgpu 0000:c5:00.0: amdgpu: SMU is resumed successfully!": 0,
    }
    for place, (text, number) in enumerate(lines.items()):
        folder = tmp_path / str(place)
        write_run_directory(folder, repeats=1, requests=100, servers=("only",))
        watch(folder)
        samples = list(read_lines(folder / "telemetry.jsonl", TelemetrySample))
        samples[3] = replace(samples[3], kernel=[KernelLine(wall_s=samples[3].wall_s, text=text)])
        write_lines(folder / "telemetry.jsonl", samples)
        notes = [note for note in summarize(folder).notes if note.code == "kernel_event"]
        assert len(notes) == number, text
        for note in notes:
            assert note.values["cell"] == samples[3].cell and note.values["id"] == "kernel.ring_timeout"
            wording(note.text)
