"""harness plan: what it predicts of made runs whose truth is known, of a real run, and what it refuses."""

import heapq
import json
import math
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from harness import plan
from harness.base.errors import RunError
from harness.base.files import ROOT
from harness.base.reason import because
from harness.numbers.stats import mean_log
from harness.numbers.summarize import summarize
from harness.questions.plan.decide import (
    CellWork,
    Forecast,
    Prediction,
    RowForecast,
    cell_work,
    forecast,
    rate_trend,
)
from harness.questions.plan.page import deadline_sentence, forecast_headline, forecast_page
from harness.records import run_data
from harness.records.manifest import Run
from harness.records.records import Request
from harness.records.run_data import cell_data
from harness.records.samples import GpuSample, TelemetrySample
from harness.report.terminal import print_page
from harness.scenario import Load, Server
from harness.scenario.plan import Cell
from tests.support.batching_server import BatchingServer, fixed, served, uniform
from tests.support.command import called
from tests.support.made_runs import request, scenario, write_lines, write_made_run
from tests.support.nightly import draws, room
from tests.support.stored_runs import SOURCES, run_directory
from tests.support.wording import Wording

IN_FLIGHT = 8
LOAD = Load(user="batch", in_flight=IN_FLIGHT, requests=600, output_tokens=11)


class MadeServer:
    """A server whose time per item is known: tokens cost time, and the speed wanders (autocorrelated) and trends."""

    def __init__(
        self,
        dice: random.Random,
        *,
        runs_sd: float = 0.01,
        wander: float = 0.03,
        trend: float = 0.0,
        slower: float = 1.0,
    ) -> None:
        self.dice, self.runs_sd, self.wander, self.trend, self.slower = dice, runs_sd, wander, trend, slower

    def lengths(self) -> tuple[int, int]:
        return self.dice.randint(100, 1000), min(400, 1 + int(self.dice.expovariate(1 / 60)))

    def run(
        self, requests: int, lengths: Callable[[], tuple[int, int]] | None = None
    ) -> list[tuple[float, float, int, int]]:
        """A closed loop of IN_FLIGHT: sent, ended, prompt and output tokens of each request."""
        speed, state = math.exp(self.dice.gauss(0, self.runs_sd)), self.dice.gauss(0, self.wander)
        free, found = [0.0] * IN_FLIGHT, []
        for number in range(requests):
            at = heapq.heappop(free)
            state = 0.95 * state + self.dice.gauss(0, self.wander * math.sqrt(1 - 0.95**2))
            drift = 1 + self.trend * (number / requests - 0.5)
            prompt, output = (lengths or self.lengths)()
            took = self.slower * IN_FLIGHT * (0.02 + 2e-5 * prompt + 5e-4 * output) / (speed * math.exp(state) * drift)
            heapq.heappush(free, at + took)
            found.append((at, at + took, prompt, output))
        return found


def write_run_of(
    folder: Path,
    machine: MadeServer,
    *,
    repeats: int = 3,
    load: Load = LOAD,
    power_w: float | None = None,
    lengths: Callable[[], tuple[int, int]] | None = None,
    servers: dict[str, MadeServer] | None = None,
    **manifest: Any,
) -> Run:
    """A run directory of one server and load, as `machine` serves it, or of several servers."""
    machines = servers or {"a": machine}

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        made = []
        for index, (sent, ended, prompt, output) in enumerate(machines[cell.server].run(load.requests or 600, lengths)):
            took, chunks = ended - sent, [(ended - sent) * share for share in (0.3, 0.6, 1.0)]
            made.append(
                request(
                    id=f"{cell.id}-{index}", cell=cell.id, load=cell.load, process=process, index=index,
                    sent_s=start_s + sent, ended_s=took, chunks_s=chunks, first_visible_s=chunks[0],
                    headers_s=took / 10, asked_tokens=None, fixed_length=False, prompt_tokens=int(prompt),
                    output_tokens=int(output), finish="stop",
                )
            )  # fmt: skip
        return made

    chosen = scenario(
        servers={name: Server(template="vllm-cpu") for name in machines}, loads={"x": load}, repeats=repeats
    )
    run = write_made_run(folder, made_of=chosen, requests=requests, **manifest)
    if power_w:
        gpus = {"renderD128": GpuSample(busy_percent=99.0, power_w=power_w)}
        write_lines(
            folder / "telemetry.jsonl",
            [
                TelemetrySample(wall_s=cell.started_wall_s + second, cell=cell.id, gpus=gpus)
                for cell in run.cells
                for second in range(int((cell.ended_wall_s or 0.0) - cell.started_wall_s) + 1)
            ],
        )
    return run


def write_batched_run(
    folder: Path, server: BatchingServer, load: Load, dice: random.Random, *, warmup: int = 0, **settings: Any
) -> None:
    """A run directory of three repeats of a server that batches."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        rows = served(server, load, dice, requests=(load.requests or 0) + warmup, warmup=warmup).rows
        return [
            request(
                id=f"{cell.id}-{number}", cell=cell.id, load=cell.load, process=process,
                index=number - warmup if measured else -1 - number, phase="measured" if measured else "warmup",
                sent_s=start_s + sent, ended_s=took, chunks_s=[took / 2, 0.75 * took, took] if good else [],
                first_visible_s=took / 2 if good else None, headers_s=took / 10, asked_tokens=None, fixed_length=False,
                prompt_tokens=int(prompt) if good else None, output_tokens=int(output) if good else None,
                finish="stop" if good else None, status=200 if good else 500, error=None if good else "http",
            )
            for number, (sent, took, prompt, output, measured, good) in enumerate(
                zip(
                    rows.sent_s.tolist(), rows.ended_s.tolist(), rows.prompt_tokens.tolist(),
                    rows.output_tokens.tolist(), rows.measured.tolist(), rows.good.tolist(), strict=True,
                )
            )
        ]  # fmt: skip

    chosen = scenario(servers={"a": Server(template="vllm-cpu")}, loads={"x": load}, repeats=3, **settings)
    write_made_run(folder, made_of=chosen, requests=requests)


def server_of(run: int = 1, **changes: Any) -> MadeServer:
    return MadeServer(random.Random(run), **changes)


def only_row(forecast_of_run: Forecast) -> Any:
    (row,) = forecast_of_run.rows
    return row


def test_the_interval_covers_the_time_of_a_job_of_another_day(tmp_path: Path) -> None:
    seeds, covered, errors = draws(200), 0, []
    for seed in range(seeds):
        machine = MadeServer(random.Random(seed))
        repeats = (3, 5)[seed % 2]
        write_run_of(tmp_path / str(seed), machine, repeats=repeats)
        row = only_row(forecast(run_data.load(tmp_path / str(seed)), 20_000))
        if row.no_interval is not None:  # a chance trend above the bound: not covered
            continue
        truth = 3.5 + max(ended for _, ended, *_ in machine.run(20_000))
        covered += row.time_s.low <= truth <= row.time_s.high
        errors.append(abs(row.time_s.value / truth - 1))
    errors.sort()
    print(f"\ncovers {covered} of {seeds}; median error {errors[len(errors) // 2]:.2%}, largest {errors[-1]:.2%}")
    assert covered / seeds >= 0.88 - room(0.88, seeds)
    assert errors[len(errors) // 2] <= 0.05


@pytest.mark.parametrize(("trend", "least", "most"), [(0.0, 0.0, 0.06), (0.05, 0.8, 1.0), (-0.3, 1.0, 1.0)])
def test_a_trend_is_noticed(tmp_path: Path, trend: float, least: float, most: float) -> None:
    noticed, seeds = 0, draws(100)
    for seed in range(seeds):
        write_run_of(tmp_path / str(seed), server_of(seed, trend=trend))
        row = only_row(forecast(run_data.load(tmp_path / str(seed)), 20_000))
        codes = [note.code for note in [*row.notes, *([row.no_interval] if row.no_interval else [])]]
        noticed += "plan_widened" in codes or "plan_trend" in codes
    print(f"\ntrend {trend:+.0%}: noticed in {noticed} of {seeds}")
    assert least - (room(least, seeds) if least < 1 else 0) <= noticed / seeds <= most + room(0.05, seeds)


@pytest.mark.parametrize(("slope", "change"), [(0.05, -0.049), (-3.0, 19.1)])
def test_a_trend_is_a_change_of_the_rate(slope: float, change: float) -> None:
    """Whatever the slope of the time per item: a rate falls by less than 100 %."""
    places = (np.arange(20) + 0.5) / 20 - 0.5
    times = 2.0 + 2 * slope * places * (1 if slope > 0 else 0.6) + np.tile([0.001, -0.001], 10)
    blocks = np.stack([times, np.full(20, 100.0), np.full(20, 10.0)])
    work = CellWork(rate=1.0, done=20, wall_s=40.0, waves=40.0, counted_waves=38.0, blocks=blocks)
    expected = change if slope > 0 else math.expm1(1.8)
    assert rate_trend([work]) == pytest.approx(expected, abs=0.1 * abs(expected))


def test_items_that_become_longer_are_not_taken_for_a_trend(tmp_path: Path) -> None:
    """The items of a file are sent in its order: short ones first here, and all of them are the job."""
    numbers = count()
    machine = server_of(runs_sd=0.0, wander=0.01)
    write_run_of(
        tmp_path / "run", machine, repeats=2, lengths=lambda: (200, 20 + next(numbers) % 600 // 30)
    )  # 600 requests a repeat
    row = only_row(forecast(run_data.load(tmp_path / "run"), 6000))
    again = count()
    truth_s = max(ended for _, ended, *_ in machine.run(6000, lambda: (200, 20 + next(again) // 300)))
    assert row.time_s.value == pytest.approx(3.5 + truth_s, rel=0.03)


def test_one_repeat_assumes_the_variation_between_runs(tmp_path: Path) -> None:
    write_run_of(tmp_path / "run", server_of(), repeats=1)
    row = only_row(forecast(run_data.load(tmp_path / "run"), 20_000))
    assert "plan_runs_unknown" in [note.code for note in row.notes]
    assert row.time_s.high / row.time_s.value > 1.1


def test_energy_cost_and_machines_follow_from_power_price_and_deadline(tmp_path: Path, wording: Wording) -> None:
    write_run_of(tmp_path / "run", server_of(), power_w=100.0)
    found = plan(tmp_path / "run", 100_000, deadline_s=3600.0, price_per_kwh=0.30)
    row = only_row(found)
    assert row.energy_kwh.value == pytest.approx(row.time_s.value * 100 / 3.6e6, rel=0.02)
    assert row.cost.value == pytest.approx(0.30 * row.energy_kwh.value)
    assert row.energy_kwh.low < row.energy_kwh.value < row.energy_kwh.high
    assert row.start_s == 3.5
    fixed = row.start_s + row.tail_s
    assert row.machines == math.ceil((row.time_s.high - fixed) / (3600 - fixed))
    assert row.deadline == "missed"
    wording(deadline_sentence(row, 3600))
    assert only_row(plan(tmp_path / "run", 100_000, deadline_s=2.0)).machines is None
    inside = only_row(plan(tmp_path / "run", 100_000, deadline_s=row.time_s.value))
    assert (inside.deadline, inside.machines) == ("inconclusive", 2)
    assert only_row(plan(tmp_path / "run", 100_000, deadline_s=row.time_s.high + 1)).deadline == "met"


def test_a_note_of_all_rows_is_printed_once_and_no_number_has_an_exponent(wording: Wording) -> None:
    few, trend = because("plan_repeats_only", "run-to-run variation"), because("plan_trend", "its rate rose")
    time_s = Prediction(value=90.0, low=80.0, high=99.0)
    small, large = (Prediction(value=kwh, low=kwh, high=kwh) for kwh in (0.00028, 1234.0))
    start: dict[str, Any] = {"server": "a", "repeats": 3, "start_s": 1.0, "tail_s": 1.0, "time_s": time_s}
    rows = [
        RowForecast(load="x", items_per_s=1500.0, energy_kwh=small, notes=[few], **start),
        RowForecast(load="y", items_per_s=7.0, energy_kwh=large, notes=[few, trend], **start),
    ]
    made = Forecast(
        run="r", machine="m", simulated=False, items=9, deadline_s=None, price_per_kwh=None, rows=rows, refused={},
        assumptions=[],
    )  # fmt: skip
    console = Console(width=200)
    with console.capture() as capture:
        print_page(forecast_page(made), console)
    energy, _, _, first, second, _, all_rows, one_row, *_ = capture.get().splitlines()[1:]
    assert "0.00028" in energy
    wording(energy)
    assert (first.split()[3], first.split()[-1]) == ("1,500", "0.00028")
    assert (second.split()[3], second.split()[-1]) == ("7.00", "1,234")
    assert one_row.startswith("note: a / y: ")
    wording(all_rows)


def test_the_command_answers_first_and_ends_by_the_deadline(tmp_path: Path, wording: Wording) -> None:
    write_run_of(tmp_path / "runs" / "one", server_of(), power_w=100.0)
    done = called("plan", "one", "--items", "500000", "--deadline", "7h", "--price", "0.30/kWh", cwd=tmp_path)
    first, second, third = done.out.splitlines()[:3]
    expected = forecast(run_data.load(tmp_path / "runs" / "one"), 500_000)
    assert first == forecast_headline(expected)
    assert first.startswith("500,000 ") and "a / x" in first
    wording(first)
    assert done.code == 4 and "7.00" in second.partition(";")[0]
    wording(second.partition(";")[0])
    assert third.startswith("Energy ") and "; cost " in third
    wording([line for line in done.out.splitlines() if line.startswith("- ")])
    for deadline, code in (("1h", 4), (f"{expected.rows[0].time_s.value:.3f}s", 5), ("90d", 0)):
        done = called("plan", "one", "--items", "500000", "--deadline", deadline, "--json", cwd=tmp_path)
        found = json.loads(done.out)["rows"][0]["deadline"]
        assert (done.code, found) == (code, {4: "missed", 5: "inconclusive", 0: "met"}[code])


def test_runs_that_show_no_rate_are_refused(tmp_path: Path, wording: Wording) -> None:
    write_run_of(tmp_path / "run", server_of(), status="interrupted")
    with pytest.raises(RunError) as caught:
        forecast(run_data.load(tmp_path / "run"), 100)
    wording(caught.value)
    done = called("plan", str(ROOT / "docs" / "example"), "--items", "5", cwd=tmp_path)
    assert (done.code, done.out) == (1, "") and "requests.jsonl" in done.err
    wording(done.err, ROOT=ROOT)
    with pytest.raises(RunError) as error:
        write_run_of(tmp_path / "few", server_of())
        forecast(run_data.load(tmp_path / "few"), IN_FLIGHT - 1)
    wording(error.value.detail)


@pytest.mark.parametrize(("requests", "is_known"), [(200, False), (319, False), (320, True)])
def test_a_queue_at_the_server_is_no_progress(tmp_path: Path, requests: int, is_known: bool) -> None:
    """The server runs 18 of 32 requests at once, so 18 end together: what a request waited is not half of its work."""
    load = Load(user="batch", in_flight=32, requests=requests, output_tokens=48)
    dice, server = random.Random(1), BatchingServer(18, fixed(48))
    job = served(server, load, dice, requests=20_000).rows
    took_s = float((job.sent_s + job.ended_s).max())
    write_batched_run(tmp_path / "run", server, load, dice, warmup=32)
    row = only_row(forecast(run_data.load(tmp_path / "run"), 20_000, deadline_s=took_s - 30))
    assert row.time_s.value == pytest.approx(row.start_s + took_s, rel=0.02)
    assert row.deadline == "inconclusive"
    assert (row.requests_needed, row.no_interval is None) == (None if is_known else 320, is_known)
    if is_known:
        assert row.time_s.low < row.start_s + took_s < row.time_s.high
    else:
        assert row.time_s.low is row.time_s.high is row.machines is None
        assert row.no_interval.code == "plan_few_waves"
        assert row.no_interval.values == {"requests": requests, "in_flight": 32, "needed": 320}


def test_without_an_interval_there_is_still_a_number(tmp_path: Path, wording: Wording) -> None:
    few = replace(LOAD, requests=72)
    write_run_of(tmp_path / "runs" / "one", server_of(slower=10.0), load=few, power_w=100.0)
    row = only_row(plan(tmp_path / "runs" / "one", 500_000, price_per_kwh=0.30))
    assert row.time_s.value == pytest.approx(500_000 / row.items_per_s, rel=0.01)
    assert (row.energy_kwh.low, row.cost.high, row.requests_needed) == (None, None, 80)
    assert row.energy_kwh.value == pytest.approx(row.time_s.value * 100 / 3.6e6, rel=0.02)
    for options, code in (([], 0), (["--deadline", "1h"], 5), (["--deadline", "90d"], 5)):
        done = called("plan", "one", "--items", "500000", *options, cwd=tmp_path)
        assert (done.code, done.err) == (code, "")
        assert "80 or more" in done.out
        wording(done.out.splitlines()[:2])


def test_the_rate_agrees_with_the_report_but_for_start_and_end(tmp_path: Path) -> None:
    """So many items as were measured take the measured wall time, and fewer take less."""
    write_run_of(tmp_path / "run", server_of())
    measured = summarize(tmp_path / "run").rows[0]
    row = only_row(forecast(run_data.load(tmp_path / "run"), 600))
    assert row.requests_per_s == measured.pooled.requests_per_s
    assert row.items_per_s != row.requests_per_s
    (note,) = [note for note in row.notes if note.code == "plan_full_load"]
    assert note.values == {"items_per_s": row.items_per_s, "requests_per_s": row.requests_per_s}
    assert row.time_s.value == pytest.approx(row.start_s + math.exp(mean_log(measured.wall)), rel=1e-3)
    half = only_row(forecast(run_data.load(tmp_path / "run"), 300))
    assert half.time_s.value == pytest.approx(row.time_s.value - 300 / row.items_per_s, rel=0.01)


def test_items_that_failed_are_sent_again(tmp_path: Path) -> None:
    load = Load(user="batch", in_flight=12, requests=240, output_tokens=48)
    dice, server = random.Random(2), BatchingServer(8, uniform(10, 100), failed=0.1)
    job = served(server, load, dice, requests=12_000).rows
    write_batched_run(tmp_path / "run", server, load, dice, max_error_rate=0.2)
    row = only_row(forecast(run_data.load(tmp_path / "run"), int(job.good.sum())))
    took_s = float((job.sent_s + job.ended_s).max())
    assert row.time_s.low < row.start_s + took_s < row.time_s.high
    (note,) = [note for note in row.notes if note.code == "plan_failed"]
    assert (note.values["sent"], 20 < note.values["failed"] < 120) == (720, True)


@pytest.mark.parametrize("kind", ["open-loop", "trace"])
def test_a_schedule_says_nothing_of_the_machine(tmp_path: Path, kind: str) -> None:
    folder = run_directory(SOURCES[kind], tmp_path)
    found = plan(folder, 1000, deadline_s=1e6)
    assert found.rows
    for row in found.rows:
        assert row.no_interval is not None
        assert (row.no_interval.code, row.deadline) == ("plan_open_loop", "inconclusive")
        assert row.items_per_s == row.requests_per_s
    assert [why.code for why in found.refused.values()] == (["plan_invalid"] if kind == "open-loop" else [])


def test_an_imported_rate_is_a_number_without_an_interval(tmp_path: Path, wording: Wording) -> None:
    folder = run_directory(SOURCES["import-vllm-rate"], tmp_path)
    row = only_row(plan(folder, 1000, deadline_s=1e6))
    assert (row.no_interval.code, row.deadline, row.repeats) == ("plan_no_records", "inconclusive", 1)
    assert row.time_s == Prediction(value=1000 / row.requests_per_s)
    with pytest.raises(RunError) as error:
        plan(run_directory(SOURCES["import-lemonade-from-source"], tmp_path), 1000)
    wording(error.value)
    wording(error.value.detail)


def test_parts_of_a_mix_and_stages_are_refused(tmp_path: Path, wording: Wording) -> None:
    refused = plan(run_directory(SOURCES["mix"], tmp_path), 1000).refused
    assert {name: why.code for name, why in refused.items()} == dict.fromkeys(
        ("one / both.chat", "one / both.job"), "plan_mixed"
    )
    with pytest.raises(RunError) as error:
        plan(run_directory(SOURCES["stages"], tmp_path), 1000)
    wording(error.value.detail)


def test_a_slower_row_that_surely_meets_the_deadline_comes_first(tmp_path: Path) -> None:
    """The repeats of the faster server differ much."""
    servers = {"fast": server_of(5, runs_sd=0.15), "sure": server_of(20, runs_sd=0.0, wander=0.0, slower=1.3)}
    write_run_of(tmp_path / "run", servers["fast"], servers=servers)
    fast, sure = forecast(run_data.load(tmp_path / "run"), 20_000).rows
    assert (fast.server, sure.server) == ("fast", "sure")
    assert sure.time_s.high is not None
    between = forecast(run_data.load(tmp_path / "run"), 20_000, deadline_s=sure.time_s.high + 1)
    assert [(row.server, row.deadline) for row in between.rows] == [("sure", "met"), ("fast", "inconclusive")]
    assert "fastest" not in forecast_headline(between)


def test_repeats_that_differ_too_much_have_no_interval(tmp_path: Path) -> None:
    write_run_of(tmp_path / "run", server_of(runs_sd=0.7), repeats=2, power_w=100.0)
    row = only_row(plan(tmp_path / "run", 20_000))
    assert (row.no_interval.code, row.requests_needed) == ("plan_wide", None)
    assert row.time_s.low is row.time_s.high is row.energy_kwh.low is None


def test_energy_that_the_report_does_not_know_is_not_predicted(tmp_path: Path) -> None:
    write_run_of(tmp_path / "run", server_of(), power_w=100.0)
    samples = (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "telemetry.jsonl").write_text("".join(samples[:5] + samples[-5:]))
    row = only_row(plan(tmp_path / "run", 100_000, price_per_kwh=0.30))
    assert (row.energy_kwh, row.cost) == (None, None)


def test_the_time_of_requests_that_the_end_of_a_load_cut_counts() -> None:
    """Four users: of eight requests two were answered, after one second, when the load ended after ten."""
    good = [request(index=i, sent_s=100.0, ended_s=1.0, chunks_s=[0.5, 1.0]) for i in range(2)]
    cut = [request(index=2 + i, sent_s=100.0, ended_s=10.0, error="unfinished", chunks_s=[]) for i in range(2)]
    late = [request(index=4 + i, sent_s=101.0, ended_s=9.0, error="unfinished", chunks_s=[]) for i in range(2)]
    work = cell_work(cell_data([*good, *cut, *late]), 4)
    assert work is not None
    assert (work.done, work.wall_s, work.is_enough) == (2, 10.0, False) and work.rate == pytest.approx(0.2)


def test_wrong_input_is_named(tmp_path: Path, wording: Wording) -> None:
    write_run_of(tmp_path / "runs" / "one", server_of(), repeats=1)
    for options, said in (
        (["0"], "--items: "),
        (["9", "--deadline", "soon"], "--deadline: "),
        (["9", "--price", "-1/kWh"], "--price: "),
    ):
        done = called("plan", "one", "--items", *options, cwd=tmp_path)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"error: {said}") and f"'{options[-1]}'" in done.err and "next: " in done.err
        wording(done.err)
