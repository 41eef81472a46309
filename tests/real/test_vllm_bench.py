"""vLLM's own code reads the exported results, and computes the same numbers from their lists."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.report.export import export_as
from harness.scenario import Load
from harness.scenario.plan import Cell
from tests.support.engines.paths import VLLM_VENV
from tests.support.made_runs import request, scenario, write_made_run

# Reads a result; prints what vLLM computes of its lists, the records for PyTorch's database, and what a plot of a sweep
# would read.
SCRIPT = """
import argparse, json, os, pathlib, sys
os.environ["SAVE_TO_PYTORCH_BENCHMARK_FORMAT"] = "1"
from vllm.benchmarks import serve
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.sweep import plot
path = pathlib.Path(sys.argv[1])
result = json.loads(path.read_text())
outputs = [
    RequestFuncOutput(success=not error, latency=latency or 0.0, output_tokens=output_len or 0, ttft=ttft or 0.0,
                      itl=itl, prompt_len=input_len, error=error, start_time=start)
    for error, latency, output_len, ttft, itl, input_len, start in zip(
        *(result[key] for key in ("errors", "latencies", "output_lens", "ttfts", "itls", "input_lens", "start_times")),
        strict=True)
]
metrics, lens = serve.calculate_metrics(
    input_requests=[], outputs=outputs, dur_s=result["duration"], tokenizer=None,
    selected_percentiles=[90, 95, 99], goodput_config_dict={})
serve.save_to_pytorch_benchmark_format(argparse.Namespace(model=result["model_id"]), result, str(path))
records = json.loads(path.with_suffix(".pytorch.json").read_text())
swept = plot._convert_inf_nan_strings(plot._json_load_bytes(pathlib.Path(sys.argv[2])))
print("RESULT" + json.dumps([
    {key: value for key, value in vars(metrics).items()},
    {record["metric"]["name"]: record["metric"]["benchmark_values"] for record in records},
    [[run["server"], run["load"], run["run_number"], plot._get_metric(run, "output_throughput")] for run in swept],
], default=float))
"""


def requests(cell: Cell, process: int, start_s: float) -> list[Any]:
    """A warm-up request, sixty-eight answers of different speed, two at a time, and a request that failed."""
    common = {"cell": cell.id, "load": cell.load, "process": process}
    records = [request(id=f"{cell.id}-w", phase="warmup", sent_s=start_s, **common)]
    for index in range(68):
        pace = 0.05 + 0.001 * index
        chunks = [0.2 + pace * step for step in range(11)]
        sent_s = start_s + 2.0 + 0.61 * index
        records.append(
            request(id=f"{cell.id}-{index}", index=index, sent_s=sent_s, ended_s=chunks[-1] + 0.01, chunks_s=chunks,
                    first_visible_s=chunks[0], **common)
        )  # fmt: skip
    failed: dict[str, Any] = {
        "error": "timeout",
        "chunks_s": [],
        "output_tokens": None,
        "prompt_tokens": None,
        "message": "late",
    }
    records.append(request(id=f"{cell.id}-f", index=68, sent_s=start_s + 3.0, ended_s=4.0, **common, **failed))
    return records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    loads = {"x": Load(user="batch", batch_size=2, requests=69, output_tokens=11)}
    write_made_run(tmp_path / "made", made_of=scenario(loads=loads, repeats=2), requests=requests)
    return tmp_path / "made"


def test_vllm_reads_the_results_and_computes_the_same_of_them(run: Path, tmp_path: Path) -> None:
    written = export_as(run, tmp_path / "vllm-bench.json", "vllm-bench", detailed=True, row="a/x")
    assert [path.name for path in written] == ["vllm-bench.r1-a-x.json", "vllm-bench.r2-a-x.json"]
    (sweep,) = export_as(run, tmp_path / "summary.json", "vllm-bench-sweep")
    result = json.loads(written[0].read_text())
    failed = result["errors"].index("timeout: late")
    result["input_lens"][failed] = 0  # not known; vLLM knows the length of each of its own prompts
    read = tmp_path / "read.json"
    read.write_text(json.dumps(result))
    command: list[str | Path] = [VLLM_VENV / "bin" / "python", "-c", SCRIPT, read, sweep]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    metrics, records, swept = json.loads(done.stdout.partition("RESULT")[2])
    assert (metrics["completed"], metrics["failed"]) == (result["completed"], result["failed"]) == (68, 1)
    for theirs, ours in (
        ("total_input", "total_input_tokens"), ("total_output", "total_output_tokens"),
        *((name, name) for name in ("request_throughput", "output_throughput", "total_token_throughput",
                                    "max_output_tokens_per_s", "max_concurrent_requests")),
        *((f"{statistic}_{name}_ms",) * 2 for statistic in ("mean", "median", "std")
          for name in ("ttft", "tpot", "itl", "e2el")),
    ):  # fmt: skip
        assert result[ours] == pytest.approx(metrics[theirs], rel=1e-9), ours
    for name in ("ttft", "tpot", "itl", "e2el"):
        percentiles = {int(percentile): value for percentile, value in metrics[f"percentiles_{name}_ms"]}
        assert result[f"p90_{name}_ms"] == pytest.approx(percentiles[90], rel=1e-9)
        assert result[f"p95_{name}_ms"] is result[f"p99_{name}_ms"] is None, "68 requests do not carry them"
    assert records["median_ttft_ms"] == [result["median_ttft_ms"]] and records["p99_ttft_ms"] == [None]
    assert sorted(row[:3] for row in swept) == [[server, "x", repeat] for server in "ab" for repeat in (0, 1)]
    assert all(row[3] == pytest.approx(result["output_throughput"]) for row in swept)
