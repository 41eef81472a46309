"""The charts of a sweep: a heat map for two varied settings, lines for one, and the Pareto front."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.base.reason import because
from harness.numbers.summarize import summarize, write_summary
from harness.numbers.summary import Summary
from harness.records.manifest import Run
from harness.report.charts import figures
from harness.report.charts.sweeps import pareto_front, sweep_charts
from harness.scenario.file import load_scenario
from harness.scenario.plan import Cell
from tests.support.made_runs import write_made_run
from tests.support.report_runs import write_report
from tests.support.wording import Wording

TEXT = """
version: 1
question: Which?
model: m
repeats: 2
servers: {s: {template: vllm-cpu, vary: {max_num_seqs: SEQS}}}
loads: {l: {user: batch, requests: 12, output_tokens: 11, VARY}}
"""
BATCHES = "vary: {batch_size: [1, 2, 4]}"


def made_sweep(folder: Path, seqs: str, vary: str, slow: dict[str, float]) -> tuple[Run, Summary]:
    """A run whose cells take 10 s, or what `slow` says of a part of their id; the last server did not start."""
    path = folder.with_suffix(".yaml")
    path.write_text(TEXT.replace("SEQS", seqs).replace(", VARY", f", {vary}" if vary else ""))
    scenario = load_scenario(path)
    last = list(scenario.servers)[-1]

    def wall_s(cell: Cell) -> float:
        return next((wall for part, wall in slow.items() if part in cell.id), 10.0)

    run = write_made_run(folder, wall_s, made_of=scenario)
    summary = summarize(folder)
    assert summary.valid
    why = because(
        "setting_not_started",
        "did not start: it is full",
        failure="mem.hip_oom",
        cause="it is full",
        fix="take less",
        error="x",
    )
    rows = [replace(row, failed=why if row.server == last else None) for row in summary.rows]
    return run, replace(summary, rows=rows)


def drawn(run: Run, summary: Summary) -> dict[str, Any]:
    return {chart.id: chart for chart in sweep_charts(summary, run)}


def test_two_settings_are_a_heat_map(tmp_path: Path, wording: Wording) -> None:
    run, summary = made_sweep(tmp_path / "run", "[8, 2, 4]", BATCHES, {"seqs-8-l-batch-size-4": 5.0})
    charts = drawn(run, summary)
    assert list(charts) == ["heat-rate", "heat-ttft"]
    figure = charts["heat-rate"].figure
    assert figure["layout"]["yaxis"]["ticktext"] == ["2", "4", "8"], "numbers are in their order"
    assert figure["layout"]["xaxis"]["ticktext"] == ["1", "2", "4"]
    numbers, failed = figure["data"]
    assert len(numbers["text"]) == 6
    assert failed["text"] == ["✕"] * 3 and failed["customdata"][0].endswith(": memory")
    assert {*failed["y"]} == {1}, "max_num_seqs 4"
    best = next(shape for shape in figure["layout"]["shapes"] if shape["opacity"] == 0.6)
    assert (best["x0"], best["y0"]) == (1.52, 1.54), "the fastest of them"
    wording(charts["heat-rate"].findings)
    assert ["s-max-num-seqs-4 / l-batch-size-1", "4", "1", "failed: memory"] in charts["heat-rate"].body


def test_one_setting_is_a_line_for_each_load(tmp_path: Path) -> None:
    run, summary = made_sweep(tmp_path / "run", "{from: 1, to: 64, factor: 4}", "", {"seqs-16": 5.0})
    charts = drawn(run, summary)
    assert list(charts) == ["lines-rate", "lines-ttft"]
    (line,) = charts["lines-rate"].figure["data"]
    assert (line["x"], [round(y, 1) for y in line["y"]]) == ([0, 1, 2], [13.2, 13.2, 26.4]), "64 failed"
    assert charts["lines-rate"].figure["layout"]["xaxis"]["ticktext"] == ["1", "4", "16", "64"]
    run, summary = made_sweep(tmp_path / "users", "[4]", BATCHES, {})
    assert drawn(run, summary) == {}, "concurrency is drawn elsewhere"


def test_the_pareto_front() -> None:
    assert (pareto_front([]), pareto_front([(10.0, 5.0), (10.0, 5.0)])) == ([], [0])
    assert pareto_front([(10.0, 5.0), (20.0, 5.0), (20.0, 9.0), (5.0, 1.0), (4.0, 2.0)]) == [3, 1]


def test_the_front_is_in_the_chart_of_latency_over_throughput(tmp_path: Path, wording: Wording) -> None:
    run, summary = made_sweep(tmp_path / "run", "[2, 4]", BATCHES, {"l-batch-size-4": 5.0})
    chart = figures.tradeoff_chart(summary, run)
    line = next(trace for trace in chart.figure["data"] if trace["name"] == "Pareto front")
    assert len(line["x"]) == 1, "twice as fast, and half the wait"
    wording(chart.findings[0])
    folder = tmp_path / "run"
    write_summary(folder, summarize(folder))
    page = write_report(folder).read_text()
    assert page.index('id="chart-heat-rate"') < page.index('id="results"') < page.index('id="chart-heat-ttft"')
