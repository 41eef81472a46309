"""SGLang against the answers and logs of a real one, and its template against the flags that it knows."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.failures.explain import scan_text
from harness.report.terminal import has_started
from harness.rundir.manifest import Startup
from harness.rundir.samples import Scraper, parse_metrics, read_metrics, server_load
from harness.scenario import Server
from harness.serve.compose_file import parse_compose as compose_of
from harness.serve.facts import parse_log_lines
from harness.serve.lifecycle import attach_to_server
from harness.serve.probe import make_token_counter
from harness.serve.template import render_server
from tests.doubles.sglang import serving, text
from tests.made_runs import server_problems_of
from tests.test_compose import scenario

LOG = Path(__file__).parent / "data" / "startup" / "sglang-cpu.txt"


@pytest.mark.parametrize("deprecated", [False, True])
def test_one_that_runs_tells_its_version_and_settings(deprecated: bool) -> None:
    with serving(deprecated) as url:
        found = attach_to_server(url, None)
    assert (found.started.model, found.started.version) == ("tiny-sglang", "0.5.23")
    assert found.metrics_url == f"{url}/metrics"
    if deprecated:  # settings are read from the newer path only
        assert found.started.startup is None
        return
    assert found.started.startup == Startup(
        engine="sglang", version="0.5.23", max_model_len=2048, kv_cache_tokens=20000, kv_block_size=1
    )
    assert found.started.effective == {
        "mem_fraction_static": 0.2, "max_running_requests": 8, "chunked_prefill_size": 4096,
        "max_prefill_tokens": 16384, "schedule_policy": "fcfs", "attention_backend": "torch_native",
        "kv_cache_dtype": "auto", "dtype": "auto", "disable_radix_cache": False, "disable_cuda_graph": False,
        "tp_size": 1,
    }  # fmt: skip


def test_its_metrics_have_our_names() -> None:
    values = parse_metrics(text("metrics.txt"))
    assert values["running"] == values["waiting"] == 0.0
    assert values.keys() == {
        "running", "waiting", "kv_usage", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits",
    }  # fmt: skip
    assert values["prefix_hits"] < values["prefix_queries"] == values["prompt_tokens"]
    retracted = 'sglang:num_retracted_requests_total{tp_rank="0"} 3.0\n'
    assert parse_metrics(f"# TYPE sglang:num_retracted_requests counter\n{retracted}") == {"preemptions": 3.0}


def test_a_cells_counters_come_from_the_server(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with serving() as url:
        with Scraper(f"{url}/metrics", "c", path) as scraper:
            attach_to_server(url, None)  # asks for one answer
        assert scraper.last_failure is None
    load = server_load(read_metrics(path)["c"])
    assert (load.generated_tokens, load.running_max, load.preemptions) == (5.0, 0.0, None)


def test_its_tokenizer_counts() -> None:
    with serving() as url:
        assert make_token_counter(url, "tiny-sglang")("one two three") == 3


def test_its_log_tells_of_its_start() -> None:
    found = parse_log_lines(LOG.read_text(encoding="utf-8").splitlines())
    assert found.facts == Startup(
        engine="sglang", architecture="Qwen3ForCausalLM", max_model_len=2048, kv_cache_tokens=20000, weights_s=0.23,
        weights_gib=0.02,
    )  # fmt: skip
    phases = [found.ends[name] - (found.started_s or 0) for name in ("process", "weights", "graphs", "warm-up")]
    assert phases == [60, 60, 62, 65]


def test_captured_graphs() -> None:
    for line, seconds, gib in (  # of 0.5.12 and of 0.5.23
        ("Capture cuda graph end. Time elapsed: 12.50 s. mem usage=1.25 GB. avail mem=9.00 GB.", 12.5, 1.25),
        (
            "Capture target decode CUDA graph end. bs=[1, 2], elapsed=2.00 s, mem usage=0.50 GB, avail mem=9.00 GB.",
            2,
            0.5,
        ),
    ):
        facts = parse_log_lines([f"[2026-09-01 06:12:00 TP0] {line}"]).facts
        assert (facts.graphs_s, facts.graphs_gib) == (seconds, gib)


def test_which_logs_tell_of_a_failure() -> None:
    scanned = scan_text(LOG.read_text(encoding="utf-8"))
    assert (scanned.server, scanned.findings, has_started(scanned)) == ("SGLang", [], True)
    stopped = scan_text((LOG.parents[1] / "stopped" / "sglang.txt").read_text(encoding="utf-8"))
    assert stopped.stopping is not None and stopped.cause() is None, "its processes say that they crashed"
    cause = scan_text((LOG.parents[1] / "startup" / "sglang-memory.txt").read_text(encoding="utf-8")).cause()
    assert cause is not None and (cause.id, "mem_fraction_static" in cause.fix) == ("sglang.pool", True)


def test_advice_for_the_gpus_memory_names_its_own_variables() -> None:
    head = LOG.read_text(encoding="utf-8")
    log = f"{head}[2026-09-01 06:13:00] torch.OutOfMemoryError: HIP out of memory. Tried to allocate 12.95 GiB.\n"
    cause = scan_text(log).cause()
    assert cause is not None and cause.id == "mem.hip_oom"
    assert "mem_fraction_static" in cause.fix and "max_running_requests" in cause.fix
    assert "gpu_memory_utilization" not in cause.fix and "max_num_seqs" not in cause.fix


def command_of(**variables: Any) -> list[str]:
    text = render_server(Server(template="sglang-rocm", variables=variables), "org/model", port=30000)
    return compose_of(text).server.command or []


def test_the_template_gives_flags_that_it_knows() -> None:
    """Those of `python3 -m sglang.launch_server --help` of 0.5.23."""
    known = set(json.loads((LOG.parents[2] / "doubles" / "sglang" / "flags.json").read_text(encoding="utf-8")))
    words = command_of(
        max_queued_requests=4, quantization="fp8", attention_backend="triton", enable_prefix_caching=False
    )
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--tensor-parallel-size") + 1] == "1"
    assert "--disable-radix-cache" in words and "--disable-radix-cache" not in command_of()


def problems(**variables: Any) -> str:
    return "\n".join(server_problems_of(scenario(Server(template="sglang-rocm", variables=variables)), {}))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"extra_args": ["--tp", "2"]},
            "--tp (--tensor-parallel-size): the template sets it already; set the variable",
        ),
        ({"extra_args": ["--model", "x"]}, "--model (--model-path): the template sets it already"),
    ],
)
def test_what_a_scenario_says_twice(given: dict[str, Any], problem: str) -> None:
    assert problem in problems(**given)
    assert problems() == ""
