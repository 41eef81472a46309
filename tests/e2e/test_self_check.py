"""The self-check: exact on made records, and with real load processes that are starved or well."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.reason import sentence
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.load_generator import Limited, client_limits, limited_fields
from harness.numbers.summary import ClientLimit
from harness.records.clock import Clock
from harness.records.records import ProcessMark, Request, read_marks
from harness.records.run_data import cell_data
from harness.scenario import Load, Warmup
from tests.support.load_runs import end, log_of, make_job, records_of, start_job, wait_for_records
from tests.support.made_runs import both_marks, request
from tests.support.simulated import spawned
from tests.support.wording import Wording

LOAD = Load(user="batch", users=2, requests=4, output_tokens=11)
MORE = "use more 'processes' (1) or machines (--workers), or fewer streams at once"
SHARED = [0.5, 0.6, 0.8, 0.8, *[0.9 + 0.1 * i for i in range(7)]]  # the third with the fourth
FIRST_SHARED = [0.6, 0.6, 0.7, 0.8, *[0.9 + 0.1 * i for i in range(7)]]


def limits_with_lags(records: Sequence[Request], load: Load = LOAD, **lags: float) -> list[Limited]:
    started, ended = both_marks("c", 7, 0.0, 10.0, sent=4)
    return limits_of([started, msgspec.structs.replace(ended, **lags)], records, load)


def limits_of(marks: Sequence[ProcessMark], records: Sequence[Request], load: Load) -> list[Limited]:
    cell = cell_data(records, Clock(marks))
    return client_limits(load, cell, compute_numbers([cell]), marks)


def four(**changes: Any) -> list[Request]:
    return [request(index=i, **changes) for i in range(4)]


TIMES = ["ttft", "ttfo", "tpot", "e2e", "gap"]
RATES = ["wall", "output_tok_s", "input_tok_s", "requests_per_s"]
SHARED_READ = {"chunks_s": SHARED, "coalesced": 1, "coalesced_late": 1}


@pytest.mark.parametrize(
    ("changes", "lags", "what", "value", "allowed", "numbers"),
    [
        ({}, {}, None, 0, 0, []),
        ({}, {"loop_lag_mean_s": 0.005, "loop_lag_p50_s": 0.005, "loop_lag_p99_s": 0.2, "core_wait": 0.5},
         None, 0, 0, []),
        # Chunks that were read late together with others; of an old run it is not known who put them together.
        (SHARED_READ, {}, "shared_reads", 1 / 11, 0.01, ["gap"]),
        (SHARED_READ | {"chunks_s": FIRST_SHARED}, {}, "shared_reads", 1.0, 0.01,
         ["ttft", "ttfo", "gap"]),
        (SHARED_READ | {"coalesced_late": 0}, {}, None, 0, 0, []),
        (SHARED_READ | {"coalesced_late": None}, {}, None, 0, 0, []),
        # Where the loop was late most of the time, all shared reads count.
        (SHARED_READ | {"coalesced_late": 0}, {"loop_lag_p50_s": 0.006}, "shared_reads", 1 / 11, 0.01, ["gap"]),
        # A late loop spoils times that are those of the read.
        ({"clock": "read"}, {"loop_lag_p99_s": 0.005}, None, 0, 0, []),
        ({"clock": "read"}, {"loop_lag_p50_s": 0.005}, None, 0, 0, []),
        ({"clock": "read"}, {"loop_lag_p50_s": 0.006}, "read_clock", 0.006, 0.005, TIMES),
        ({"clock": "read"}, {"loop_lag_p99_s": 0.0123, "loop_lag_p50_s": 0.006}, "read_clock", 0.0123, 0.005, TIMES),
        # And it slows requests that follow answers: 2 % of 1.5 s are allowed.
        ({}, {"loop_lag_mean_s": 0.03}, None, 0, 0, []),
        ({}, {"loop_lag_mean_s": 0.045}, "loop_lag", 0.045, 0.03, RATES),
    ],
)  # fmt: skip
def test_a_limit(
    changes: dict[str, Any], lags: dict[str, float], what: str | None, value: float, allowed: float, numbers: list[str]
) -> None:
    found = limits_with_lags(four(**changes), LOAD, **lags)
    if what is None:
        assert found == []
        return
    [(limit, why)] = found
    assert (limit.what, limit.value, limit.allowed, limit.numbers) == (what, value, allowed, numbers)
    assert (why.code, why.values["numbers"], limit.invalid) == (f"client_{what}", numbers, False)


def test_a_limit_in_words(wording: Wording) -> None:
    [(_, why)] = limits_with_lags(four(**SHARED_READ | {"chunks_s": FIRST_SHARED}), LOAD, core_wait=0.25)
    assert all(f" {share} %" in sentence(why) for share in ("9.1", "100.0", "1", "25"))
    wording(why)
    [(_, why)] = limits_with_lags(four(clock="read"), LOAD, loop_lag_p99_s=0.0123)
    assert " 12.3 ms" in sentence(why) and " 5 ms" in sentence(why)
    wording(why)


def test_a_limit_is_of_the_numbers_that_it_names() -> None:
    one = ClientLimit(what="cpu", value=1.0, allowed=0.9, unit="ratio", numbers=["tpot", "wall"])
    assert limited_fields(["wall", "ttft", "tpot"], [one]) == ["wall", "tpot"]


def test_the_remedy_of_a_late_process() -> None:
    one = msgspec.structs.replace(LOAD, users=1)
    for load, changes, remedy in (
        (LOAD, {}, ("remedy_processes", {"processes": 1})),
        (one, {}, ("remedy_fewer_streams", {"processes": 1})),
        (LOAD, {"core_wait": 0.3}, ("remedy_free_core", {"share": 0.3})),
    ):
        [(_, why)] = limits_with_lags(four(), load, **{"loop_lag_mean_s": 0.452} | changes)
        assert (why.values["remedy"]["code"], why.values["remedy"]["values"]) == remedy
    started, ended = both_marks("c", 7, 0.0, 10.0, sent=4)
    dead = msgspec.structs.replace(started, process=8)
    [(_, why)] = limits_of([dead, started, msgspec.structs.replace(ended, loop_lag_mean_s=0.452)], four(), LOAD)
    assert why.values["remedy"]["code"] == "remedy_run_again"


def test_a_load_process_that_shares_its_core_with_a_busy_one_is_limited(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    load = Load(user="batch", batch_size=10, requests=20, output_tokens=50)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, {core})
        with spawned("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.02") as server:
            process = start_job(tmp_path, server.url, make_job(tmp_path, load, Warmup(requests=10)))
            wait_for_records(tmp_path, 1)
            os.sched_setaffinity(process.pid, {core})
            os.setpriority(os.PRIO_PROCESS, process.pid, 15)
            group = Path(f"/proc/{process.pid}/autogroup")  # such a kernel shares cores among sessions first
            if group.exists() and os.getsid(process.pid) == process.pid:
                group.write_text("15")
            assert end(process) == 0, log_of(tmp_path)
    finally:
        busy.kill()
        busy.wait()
    marks = read_marks(tmp_path / "processes.jsonl")
    found = limits_of(marks, records_of(tmp_path), load)
    assert found, marks
    assert all(reason.values["remedy"]["code"] == "remedy_free_core" for _, reason in found)
