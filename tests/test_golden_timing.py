"""Golden timing: when the client says a chunk came, against when the embedded engine says it sent it.

Both clocks are CLOCK_MONOTONIC of one machine, so each difference is the client's error plus the few microseconds that
a packet takes over loopback. Chunks that shared a read with a later one are left out, as the record says of them that
their times are upper bounds; they are counted. On a busy machine the best of three attempts counts.
"""

from pathlib import Path

import numpy as np
import pytest

from harness.run.calibrate import chunk_errors_s
from harness.scenario.scenario import Load, Warmup
from harness.simulated.spawn import spawned
from tests.load_runs import end, log_of, make_job, records_of, start_job

STREAMS = 50
TOKENS = 100
P99_S = 0.002
ATTEMPTS = 3


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


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_chunk_times_agree_with_the_engines_own_log(tmp_path: Path) -> None:
    best_s = float("inf")
    for number in range(ATTEMPTS):
        p99_s, words = attempt(tmp_path / str(number))
        print(f"\n{STREAMS} streams, |chunk time - send time|, attempt {number + 1}: {words}")
        best_s = min(best_s, p99_s)
        if best_s < P99_S:
            break
    assert best_s < P99_S
