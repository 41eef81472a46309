"""What the charts of a report show: curves, events, panels and SLO lines."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from harness.base.measured import ScheduleKept
from harness.numbers.comparison import CheckResult
from harness.numbers.summarize import read_summary
from harness.questions.report.page import render_html as render
from harness.records.clock import Clock
from harness.records.manifest import CellRun, Run, ServedBy, ServerDeath, read_run
from harness.records.records import ProcessMark, Request
from harness.records.run_data import cell_data
from harness.report.charts import Chart, shown_rows
from harness.report.charts.data import (
    MAX_DOTS,
    SLOWEST,
    ChartFailures,
    MachineSamples,
    ServerSamples,
    Timeline,
    cell_dots,
    drawn_rows,
    read_chart_data,
    thin_dots,
)
from harness.report.charts.figures import (
    describe_knee,
    first_token_chart,
    request_chart,
    rows_chart,
    slo_bounds,
    throughput_chart,
    tradeoff_chart,
    with_slo_lines,
)
from harness.report.charts.timeline import timeline_events, timeline_figure
from harness.report.elements import TimelineEvent
from harness.scenario.behaviour import Agent
from tests.support import made_runs
from tests.support.made_runs import one_cell
from tests.support.made_summaries import MANY, numbers, row
from tests.support.made_summaries import summary as text_summary
from tests.support.report_runs import write_run_directory
from tests.support.wording import Wording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_run_directory(path, repeats=2, requests=30, faults=3)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def request(number: int, took_s: float, failed: bool) -> Request:
    return Request(
        id=f"q{number}", cell="r1-a-x", load="x", user_class="BatchAgent", index=number, user=0, process=1,
        clock="kernel", phase="measured", sent_s=float(number), ended_s=took_s,
        chunks_s=[] if failed else [0.1, took_s], error="timeout" if failed else None,
    )  # fmt: skip


def test_a_long_row_is_thinned_and_keeps_its_slowest() -> None:
    requests = [request(i, 1.0 + (i % 1000 == 0) * (30_000 - i), failed=i % 50 == 7) for i in range(20_000)]
    start = ProcessMark(event="start", process=1, cell="r1-a-x", wall_s=0.0, monotonic_s=0.0)
    drawn = drawn_rows(cell_data(requests, Clock([start])))
    assert (int(drawn.good.sum()), int((~drawn.good).sum())) == (19_600, 400)
    chosen = thin_dots(cell_dots("r1-a-x", drawn), MAX_DOTS)
    assert chosen == thin_dots(cell_dots("r1-a-x", drawn), MAX_DOTS), "always the same"
    assert len(chosen) == len(set(chosen)) == MAX_DOTS
    assert sum(dot.error is not None for dot in chosen) == MAX_DOTS // 4
    assert {dot.sent_s for dot in chosen} >= {1000.0 * i for i in range(SLOWEST)}


def timeline(**more: object) -> Timeline:
    values = {
        "cell": "r1-a-x", "step_s": 0.1, "at_s": [0.0, 1.0], "tok_s": [5.0, 6.0], "in_flight": [1, 0],
        "server": ServerSamples(), "failures": {}, "warmup_until_s": None, "ends_s": 10.0,
    }  # fmt: skip
    return msgspec.convert(values | more, Timeline)


def cell(**more: object) -> CellRun:
    served_by = replace(ServedBy(url="http://127.0.0.1:1"), **more)
    return CellRun(id="r1-a-x", server="a", load="x", repeat=1, started_wall_s=0, ended_wall_s=1, served_by=served_by)


def marked(events: list[TimelineEvent]) -> list[tuple[float, bool, str]]:
    """Where the marks are, whether each is bad, and its label."""
    return [(event.at_s, event.bad, event.label) for event in events]


def test_a_death_is_marked_where_connections_broke(wording: Wording) -> None:
    failures = {
        "rejected": ChartFailures(3, 1.0), "disconnect": ChartFailures(7, 4.5), "connect": ChartFailures(1, 4.6),
    }  # fmt: skip
    events = timeline_events(timeline(failures=failures), None, cell(exit_code=137, oom_killed=True))
    start = (0.0, False, "start")
    assert marked(events) == [start, (1.0, True, ""), (4.5, True, ""), (4.5, True, "died"), (4.6, True, "")]
    for event, kind in zip((events[1], events[2], events[4]), failures, strict=True):
        assert event.text.endswith(f": {kind}")
    wording([event.text for event in events])
    removed, unreachable = ServerDeath(how="removed"), ServerDeath(how="unreachable", detail="the tunnel ended")
    for of, last in (
        (cell(exit_code=1), (10.0, True, "died")),
        (cell(death=removed), (10.0, True, "died")),
        (cell(), start),
        (cell(death=unreachable), start),
    ):
        *_, event = timeline_events(timeline(), None, of)
        assert marked([event]) == [last]
        wording(event.text)


def test_what_a_run_recorded_has_a_panel_and_nothing_else_has() -> None:
    gauges: dict[str, list[float | None]] = {"running": [1.0, 2.0], "kv_usage": [0.5, None]}
    machine = MachineSamples(at_s=[0.0, 1.0], panels={"power": {"renderD128": [80.0, 95.5]}})
    line = timeline(server=ServerSamples(at_s=[0.0, 1.0], values=gauges), machine=machine)
    figure = timeline_figure(line, [TimelineEvent(0.0, "x")])
    axes = [axis for key, axis in figure["layout"].items() if key.startswith("yaxis")]
    assert [axis["title"]["text"] for axis in axes] == ["", "requests", "tok/s", "KV cache, %", "power, W"]
    drawn = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert (drawn["KV cache"], drawn["power"]) == ([50.0, None], [80.0, 95.5])
    assert "waiting (server)" not in drawn
    domains = [axis["domain"] for axis in axes]
    assert all(lower[1] <= upper[0] for upper, lower in zip(domains, domains[1:], strict=False))
    assert domains[0][1] == 1.0 and domains[-1][0] == pytest.approx(0, abs=0.01)


def test_the_knee_is_described(folder: Path, run: Run, wording: Wording) -> None:
    assert "98" in describe_knee([(1, 100.0), (2, 102.0), (4, 101.0)])
    wording(describe_knee([(1, 100.0), (2, 102.0), (4, 101.0)]))
    wording(describe_knee([(1, 50.0), (2, 100.0), (4, 60.0)]))
    assert describe_knee([(1, 50.0)]) == describe_knee([(1, 0.0), (2, 0.0)]) == ""
    two = describe_knee([(1, 50.0), (16, 80.0)]), describe_knee([(1, 80.0), (16, 80.0)])
    wording(two)
    summary = read_summary(folder)
    assert "10" in throughput_chart(summary, run).findings[0]
    wording(throughput_chart(summary, run).findings[0])


def test_a_line_joins_loads_that_differ_in_concurrency_alone(folder: Path, run: Run, wording: Wording) -> None:
    """A chat, a job and agents with helpers are points, and no line from one to the other says what lies between."""
    loads = dict(run.scenario.loads)
    loads["batch-10"] = replace(loads["batch-10"], user="agent", agent=Agent(sub_agents=4))
    mixed = replace(run, scenario=replace(run.scenario, loads=loads))
    summary = read_summary(folder)
    wording(throughput_chart(summary, mixed).findings[0])
    for chart in (throughput_chart, first_token_chart, tradeoff_chart):
        alike, apart = ([len(trace["x"]) for trace in chart(summary, of).figure["data"]] for of in (run, mixed))
        assert set(apart) == {1, 2} and sum(apart) == sum(alike)


def drawn(page: str) -> list[str]:
    """The charts of a page of rows, in their order; those of single requests left out."""
    return [name for name in re.findall(r'id="chart-([\w-]+)"', page) if name[:4] not in ("cdf-", "dots", "time")]


def test_a_chart_is_drawn_only_where_something_varies(folder: Path, run: Run) -> None:
    """The first one is next to the answer. Bars take the place of a curve; one row has neither."""
    summary, data = read_summary(folder), read_chart_data(folder)
    assert drawn(render(summary, run, data)) == ["throughput", "first-token", "trade-e2e", "startup"]
    level = replace(summary, rows=[row for row in summary.rows if row.load == "batch-5"])
    assert drawn(render(level, run, data)) == ["rows", "trade-e2e", "startup"]
    (bars,) = rows_chart(level).figure["data"]
    assert bars["y"] == ["open / batch-5", "limited / batch-5"]
    alone = replace(run, cells=[cell for cell in run.cells if cell.server == "open"])
    assert drawn(render(replace(summary, rows=summary.rows[:1]), alone, data)) == []


def test_of_many_rows_the_first_the_fastest_and_the_slowest_are_drawn_at_first() -> None:
    rows = [row(f"l{wall}", numbers(wall, MANY)) for wall in (5, 3, 4, 9, 8, 7, 2, 6)]
    assert shown_rows(replace(text_summary(), rows=rows)) == {each.name for each in rows}
    many = [*rows, row("l10", numbers(10, MANY))]
    assert shown_rows(replace(text_summary(), rows=many)) == {"vllm / l5", "vllm / l2", "vllm / l10"}


def test_a_page_of_open_loops_has_no_curve(folder: Path, run: Run) -> None:
    summary = read_summary(folder)
    rows = [replace(row, pooled=replace(row.pooled, schedule=ScheduleKept(sent=30))) for row in summary.rows]
    page = render(replace(summary, rows=rows), run, read_chart_data(folder))
    assert drawn(page) == ["rows", "startup"] and 'class="empty"' not in page


def test_single_requests_show_failures(folder: Path, run: Run) -> None:
    chart = request_chart(read_summary(folder), read_chart_data(folder))
    failed = [trace for trace in chart.figure["data"] if trace["marker"].get("symbol") == "x"]
    assert [len(trace["x"]) for trace in failed] == [6] * 6
    assert set(failed[0]["text"]) == {"timeout", "stream_error", "rejected"}
    assert chart.body[0][:5] == ["open", "sequential", "60", "60", "6"]


def test_a_cut_request_is_no_failure_and_vectors_have_no_tokens_to_miss(tmp_path: Path) -> None:
    records = [
        made_runs.request(id="q0", index=0),
        made_runs.request(id="q1", index=1, error="abandoned", output_tokens=None, message="the user left after 3 s"),
        made_runs.request(id="q2", index=2, error="timeout", output_tokens=None),
        made_runs.request(id="q4", index=4, error="unfinished", output_tokens=None, finish=None),
        made_runs.request(id="q3", index=3, chunks_s=[], first_visible_s=None, output_tokens=None, vectors=1),
    ]
    one_cell(tmp_path / "run", records, max_error_rate=1.0)
    data = read_chart_data(tmp_path / "run")
    assert [(row.count, row.failures) for row in data.rows.values()] == [(2, 1)]


def test_bounds_of_slos_are_lines_in_the_charts_of_their_latency() -> None:
    checks = ("ttft_p95 <= 150ms", "goodput(ttft<=1s, e2e<=2s) >= 0.9", "ttft_p50 <= 2 * baseline", "x y")
    bounds = slo_bounds(replace(text_summary(), checks=[CheckResult(check=check) for check in checks]))
    assert bounds == {"ttft": {"ttft_p95 <= 150ms": 0.15, "ttft<=1s": 1.0}, "e2e": {"e2e<=2s": 2.0}}
    chart = Chart(
        id="first-token", title="", caption="", head=[], body=[],
        figure={"data": [{"x": [1, 5], "y": [100.0, None]}], "layout": {}},
    )  # fmt: skip
    (line,) = with_slo_lines(chart, bounds).figure["layout"]["shapes"]  # 1 s is far beyond what is shown
    assert (line["y0"], line["y1"], line["xref"]) == (150.0, 150.0, "paper")
    across = with_slo_lines(replace(chart, id="cdf-e2e"), {"e2e": {"e2e<=2s": 0.002}})
    assert across.figure["layout"]["shapes"][0]["x0"] == 2.0
    assert with_slo_lines(replace(chart, id="throughput"), bounds).figure["layout"] == {}
