"""Golden timing: when the client says a chunk came, against when the embedded engine says it sent it.

Both clocks are CLOCK_MONOTONIC of one machine, so each difference is the client's error plus the few microseconds that
a packet takes over loopback. Chunks that shared a read with a later one are left out, as the record says of them that
their times are upper bounds; they are counted. On a busy machine the best attempt counts.
"""

import statistics
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from benchmarks.calibrate import chunk_errors_s
from harness.numbers import formulas
from harness.scenario import Load, Warmup
from harness.simulated.answer import Sent
from tests.support.load_runs import end, log_of, make_job, records_of, start_job
from tests.support.made_runs import value_of
from tests.support.nightly import NIGHTLY
from tests.support.simulated import spawned

STREAMS = 50
TOKENS = 100 if NIGHTLY else 40
P99_S = 0.002
ATTEMPTS = 10


def attempt(folder: Path) -> tuple[float, str]:
    """p99 of the error's size, and the distribution in words."""
    folder.mkdir()
    send_log = folder / "sent.jsonl"
    flags = ("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.02", "--send-log", str(send_log))
    load = Load(user="batch", users=STREAMS, requests=2 * STREAMS, output_tokens=TOKENS)
    with spawned(*flags) as server:
        assert end(start_job(folder, server.url, make_job(folder, load, Warmup(requests=STREAMS)))) == 0, log_of(folder)
    records = [record for record in records_of(folder) if record.phase == "measured"]
    assert len(records) == 2 * STREAMS
    assert {record.clock for record in records} == {"kernel"}
    assert all(record.error is None and len(record.chunks_s) == TOKENS for record in records)
    errors = chunk_errors_s(records, send_log)
    low, p50, p90, p99, high = np.percentile(errors, [0, 50, 90, 99, 100]) * 1000
    coalesced = sum(record.coalesced for record in records)
    words = f"min {low:.3f}  p50 {p50:.3f}  p90 {p90:.3f}  p99 {p99:.3f}  max {high:.3f} ms over {len(errors)} chunks"
    return float(np.percentile(np.abs(errors), 99)), f"{words}, {coalesced} shared a read"


@pytest.mark.parametrize(
    ("output", "flags", "textless"),
    [
        ("fixed", (), 0),
        pytest.param("natural", (), 1, marks=pytest.mark.nightly),
        ("natural", ("--fault", "reasoning:8"), 1),
        ("natural", ("--fault", "stop-string:3"), 3),
        pytest.param("natural", ("--fault", "tool-call"), 1, marks=pytest.mark.nightly),
    ],
)
def test_tpot_is_the_time_between_two_tokens_that_were_sent(
    tmp_path: Path, output: Literal["fixed", "natural"], flags: tuple[str, ...], textless: int
) -> None:
    send_log = tmp_path / "sent.jsonl"
    timing = ("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.04", "--send-log", str(send_log))
    load = Load(user="batch", users=8, requests=16, output_tokens=100, output=output)
    with spawned(*timing, "--natural-output-tokens", "60", *flags) as server:
        assert end(start_job(tmp_path, server.url, make_job(tmp_path, load))) == 0, log_of(tmp_path)
    lines = send_log.read_bytes().splitlines()[1:]
    sent = {one.request_id: one.chunks_s for one in (msgspec.json.decode(line, type=Sent) for line in lines)}
    ratios = []
    for record in records_of(tmp_path):
        times = sent[record.id]
        assert (record.output_tokens, record.textless) == (len(times) + textless, textless)
        ratios.append((value_of(formulas.tpot, record) or 0.0) / ((times[-1] - times[0]) / (len(times) - 1)))
    assert len(ratios) == 16
    assert abs(statistics.median(ratios) - 1) < 0.008  # a token more or less: 0.01 and more
    # What older harnesses recorded says nothing of single events. One end token is all that is assumed then.
    old = [msgspec.structs.replace(record, textless=None) for record in records_of(tmp_path)]
    assert textless > 1 or [value_of(formulas.tpot, one) for one in old] == [
        value_of(formulas.tpot, one) for one in records_of(tmp_path)
    ]


def test_chunk_times_agree_with_the_engines_own_log(tmp_path: Path) -> None:
    best_s = float("inf")
    for number in range(ATTEMPTS):
        p99_s, words = attempt(tmp_path / str(number))
        print(f"\n{STREAMS} streams, |chunk time - send time|, attempt {number + 1}: {words}")
        best_s = min(best_s, p99_s)
        if best_s < P99_S:
            break
    assert best_s < P99_S
