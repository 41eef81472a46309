"""The instrument's benchmark reads what others wrote, and holds it against what the server sent."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.instrument.client import Said, Usage
from benchmarks.instrument.modes import Place, compare
from benchmarks.instrument.neighbours import read_aiperf, read_genai_bench, read_guidellm, read_inference_perf
from benchmarks.instrument.ours import in_c
from benchmarks.instrument.reading import reading_of
from benchmarks.instrument.server import Schedule, Sent, Truth, read_log
from harness.base.files import ROOT
from tests.support.made_runs import request

DATA = ROOT / "tests" / "data"
SHORT = Schedule(ttft_ms=50, gap_ms=20, chunks=4)


def test_what_other_tools_wrote_is_held_against_what_the_server_sent() -> None:
    truth = Truth(read_log(DATA / "benchmarks" / "sent.txt"), late_p99_ms=0.2, cpu_s=0.1)
    said = Said(read_inference_perf(DATA / "benchmarks" / "inference-perf.json"))
    usage = Usage((26000, 1.0), (26696, 3.0), (26698, 3.4), (26699, 3.5))
    reading = reading_of("inference-perf", said, truth, 2, SHORT, usage)
    assert (reading.requests, reading.chunks, reading.note, reading.chunk_p99_ms) == (3, 12, "", None)
    # Medians of three; the first TTFT contains the opening of the connection.
    assert reading.ttft_p50_ms == pytest.approx(53.8944 - 50.1738, abs=0.001)
    assert reading.tpot_p99_ms == pytest.approx(0.078, abs=0.01)
    assert reading.itl_p99_ms == pytest.approx(0.241, abs=0.02)
    # From 26697.361 to 26698.436.
    assert reading.cpu_us == pytest.approx(1e6 * (3.4 + 0.0436 - 3.0 - 0.2722) / 12, rel=0.01)

    records = read_genai_bench(DATA / "benchmarks" / "genai-bench.json")
    assert len(records) == 140 and {record.output_tokens for record in records} == {8}
    assert min(record.chunks_s[0] for record in records) == 0.0038592740002059145
    assert max(record.chunks_s[1] for record in records) == 0.03393819499979145
    records = read_aiperf(DATA / "benchmarks" / "aiperf.jsonl")
    assert [(len(record.chunks_s), record.output_tokens) for record in records] == [(8, 8)] * 12
    assert records[0].sent_s == 0 and records[0].ended_s == pytest.approx(0.029618579, abs=1e-9)
    records = read_guidellm(DATA / "benchmarks" / "guidellm.json")
    assert [(len(record.chunks_s), record.output_tokens) for record in records] == [(2, 8)] * 12
    assert records[0].chunks_s == pytest.approx([0.0033929, 0.0173078], abs=1e-6)


def test_the_clients_times_are_held_against_the_servers_request_by_request() -> None:
    sent = {f"r{n}": Sent(10.0 + n, 10.0 + n + np.array([0.05, 0.07, 0.09, 0.11])) for n in range(3)}
    late = [[0.05, 0.07, 0.09, 0.11], [0.051, 0.071, 0.091, 0.111], [0.05, 0.07, 0.092, 0.11]]
    records = [request(id=f"r{n}", sent_s=10.0 + n, chunks_s=late[n], output_tokens=4) for n in range(3)]
    truth = Truth(sent, 0, 0)
    reading = reading_of("ours", Said(records, same_clock=True), truth, 1, SHORT, Usage((0, 0), (20, 1.2)))
    assert reading.ttft_p50_ms == pytest.approx(0, abs=1e-6)
    assert reading.chunk_p99_ms == pytest.approx(np.percentile([0] * 7 + [1] * 4 + [2], 99))
    assert reading.itl_p99_ms == pytest.approx(2, abs=0.01)


@pytest.mark.skipif(shutil.which("cc") is None and "CI" not in os.environ, reason="there is no C compiler")
def test_the_server_keeps_its_schedule_and_the_c_client_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reading,) = compare({"C": in_c}, [4], 3, 1, SHORT._replace(spread=True), Place(tmp_path, None, None, False))
    assert (reading.requests, reading.chunks) == (12, 1 + 2 + 3 + 4 + 8 * 4)
    assert reading.ttft_p50_ms is not None and abs(reading.ttft_p50_ms) < 25
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["C", "4"]
