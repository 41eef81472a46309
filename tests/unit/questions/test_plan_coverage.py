"""How often the intervals of harness plan cover the time of a job of another day, on servers in virtual time."""

import math
import random
import statistics
from typing import Any, NamedTuple

from harness.base.measured import Numbers
from harness.numbers.summary import CellSummary, Row
from harness.questions.plan.decide import RowForecast, forecast_row
from harness.records.run_data import CellData
from harness.records.samples import ServerLoad
from harness.scenario import Load, max_concurrency
from tests.support.batching_server import (
    BatchingServer,
    exponential,
    fixed,
    served,
    short_or_long,
    uniform,
)
from tests.support.nightly import draws, scatter

REPEATS = (1, 2, 3, 5)
JOB_WAVES = 60
RUNS_SD = 0.005  # of the logarithm of the speed, between repeats


class Case(NamedTuple):
    server: BatchingServer
    load: dict[str, Any]
    drift: float = 0.0  # of the speed, from one repeat to the next
    warm: bool = True  # a wave of warm-up, from which measured requests follow


CASES = {
    "queue longer than the server runs, equal lengths": Case(BatchingServer(18, fixed(48)), {"in_flight": 32}),
    "all run, equal lengths": Case(BatchingServer(32, fixed(48)), {"in_flight": 32}),
    "one too many, equal lengths": Case(BatchingServer(31, fixed(48)), {"in_flight": 32}, warm=False),
    "long queue, equal lengths": Case(BatchingServer(4, fixed(48)), {"in_flight": 32}),
    "long queue, uniform": Case(BatchingServer(8, uniform(10, 200)), {"in_flight": 32}),
    "queue, nearly equal lengths": Case(BatchingServer(18, uniform(44, 52)), {"in_flight": 32}, warm=False),
    "all run, exponential": Case(BatchingServer(16, exponential(60)), {"in_flight": 16}),
    "queue, one in ten is 30 times as long": Case(BatchingServer(8, short_or_long(10, 300, 0.1)), {"in_flight": 16}),
    "all run, one in ten is 30 times as long": Case(BatchingServer(16, short_or_long(10, 300, 0.1)), {"in_flight": 16}),
    "one at a time": Case(BatchingServer(18, exponential(60)), {"batch_size": 1}),
    "bursts, equal lengths": Case(BatchingServer(8, fixed(48)), {"batch_size": 16}),
    "bursts, exponential": Case(BatchingServer(64, exponential(60)), {"batch_size": 16}, warm=False),
    "bursts of four users": Case(BatchingServer(18, exponential(60)), {"batch_size": 8, "users": 4}),
    "bursts of four users, equal lengths": Case(BatchingServer(18, fixed(48)), {"batch_size": 8, "users": 4}),
    "users who think": Case(
        BatchingServer(8, uniform(10, 100)), {"user": "chat", "users": 16, "think_s": [0.0, 2.0]}, warm=False
    ),
    "its speed wanders": Case(BatchingServer(8, uniform(10, 100), wander=0.05), {"in_flight": 12}),
    "each repeat 1 % slower": Case(BatchingServer(18, uniform(44, 52)), {"in_flight": 32}, drift=-0.01),
    "3 % fail": Case(BatchingServer(8, uniform(10, 100), failed=0.03), {"in_flight": 12}),
}


def load_of(settings: dict[str, Any]) -> Load:
    values: dict[str, Any] = {"user": "batch", "requests": 1}
    return Load(**(values | settings))


def predicted(cells: list[CellData], load: Load, items: int) -> RowForecast:
    """What the product predicts from these repeats, after a start of 0 s."""
    names = [f"r{number}" for number in range(len(cells))]
    rows = [cell.rows.where(cell.rows.measured) for cell in cells]
    sent, good = sum(map(len, rows)), sum(int(of_cell.good.sum()) for of_cell in rows)
    spans_s = [float((of_cell.sent_s + of_cell.ended_s).max() - of_cell.sent_s.min()) for of_cell in rows]
    rate = statistics.median(good / len(cells) / span_s for span_s in spans_s)
    numbers = Numbers(sent=sent, succeeded=good, failed=sent - good, unfinished=0, requests_per_s=rate)
    row = Row(server="a", load="x", cells=names, wall=spans_s, output_tok_s=[], pooled=numbers)
    summaries = [
        CellSummary(id=name, server="a", load="x", repeat=1, numbers=numbers, server_load=ServerLoad(), ready_s=0.0)
        for name in names
    ]
    found = forecast_row(row, load, summaries, cells, items)
    assert isinstance(found, RowForecast), found
    return found


def drawn(case: Case, seed: int) -> tuple[list[CellData], Load, int, float]:
    """Five repeats, their load, and the items and the true time of a job after them."""
    dice, load = random.Random(seed), load_of(case.load)
    slots = max_concurrency(load)
    speeds = [math.exp(dice.gauss(0, RUNS_SD) + case.drift * number) for number in range(max(REPEATS) + 1)]
    warmup, requests = slots if case.warm else 0, dice.choice((10, 12, 20, 40)) * slots
    cells = [
        served(case.server, load, dice, requests=warmup + requests, warmup=warmup, speed=speed) for speed in speeds[:-1]
    ]
    job = served(case.server, load, dice, requests=JOB_WAVES * slots, speed=speeds[-1]).rows
    return cells, load, int(job.good.sum()), float((job.sent_s + job.ended_s).max() - job.sent_s.min())


def test_90_percent_intervals_cover_the_time_of_a_job() -> None:
    seeds = draws(100)
    covered: dict[tuple[str, int], list[bool]] = {(name, repeats): [] for name in CASES for repeats in REPEATS}
    widths: dict[tuple[str, int], list[float]] = {key: [] for key in covered}
    for name, case in CASES.items():
        for seed in range(seeds):
            cells, load, items, took_s = drawn(case, seed)
            for repeats in REPEATS:
                row = predicted(cells[-repeats:], load, items)
                low_s, high_s = row.time_s.low, row.time_s.high
                if low_s is None or high_s is None:
                    assert row.no_interval is not None and row.no_interval.code in ("plan_wide", "plan_trend")
                    continue
                covered[name, repeats].append(low_s <= took_s <= high_s)
                widths[name, repeats].append(math.log(high_s / low_s) / 2)
    for name in CASES:
        of_case = [
            f"{statistics.fmean(covered[name, repeats] or [0.0]):4.0%} of {len(covered[name, repeats]):3}"
            f" ±{100 * statistics.median(widths[name, repeats] or [0.0]):4.1f} %"
            for repeats in REPEATS
        ]
        print(f"{name:50s}", " | ".join(of_case))
    for repeats in REPEATS:
        known = [one for name in CASES for one in covered[name, repeats]]
        print(f"{repeats} repeats: {statistics.fmean(known):.1%} of {len(known)} intervals")
        assert statistics.fmean(known) >= 0.90
    for key, of_case_covered in covered.items():
        trials = len(of_case_covered)
        assert sum(of_case_covered) / max(1, trials) >= 0.90 - scatter(0.90, max(1, trials)), key
