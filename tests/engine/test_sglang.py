"""SGLang against the answers and logs of a real one, and its template against the flags that it knows."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.failures.diagnosis import scan_text
from harness.questions.explain import has_started
from harness.records.manifest import Startup
from harness.records.samples import parse_metrics
from harness.scenario import Server
from harness.serve.compose_file import parse_compose as compose_of
from harness.serve.facts import parse_log_lines
from harness.serve.lifecycle import attach_to_server
from harness.serve.template import render_server
from tests.support.doubles.sglang import serving, text
from tests.support.made_runs import scenario_of, server_problems_of
from tests.support.wording import Wording

LOG = Path(__file__).parents[1] / "data" / "startup" / "sglang-cpu.txt"


@pytest.mark.parametrize("deprecated", [False, True])
def test_one_that_runs_tells_its_version_and_settings(deprecated: bool) -> None:
    with serving(deprecated) as url:
        found = attach_to_server(url, None)
    assert (found.started.model, found.started.version) == ("tiny-sglang", "0.5.23")
    assert found.metrics_url == f"{url}/metrics"
    if deprecated:  # settings are read from the newer path only, the context from the list of models
        assert found.started.startup == Startup(max_model_len=2048)
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


def test_its_log_tells_of_its_start() -> None:
    found = parse_log_lines(LOG.read_text(encoding="utf-8").splitlines())
    assert found.facts == Startup(
        engine="sglang", architecture="Qwen3ForCausalLM", max_model_len=2048, kv_cache_tokens=20000, weights_s=0.23,
        weights_gib=0.02,
    )  # fmt: skip


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
    known = set(
        json.loads((LOG.parents[2] / "support" / "doubles" / "sglang" / "flags.json").read_text(encoding="utf-8"))
    )
    words = command_of(
        max_queued_requests=4, quantization="fp8", attention_backend="triton", enable_prefix_caching=False
    )
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--tensor-parallel-size") + 1] == "1"
    assert "--disable-radix-cache" in words and "--disable-radix-cache" not in command_of()


def test_flags_that_the_template_sets_are_refused(wording: Wording) -> None:
    for words in (["--tp", "2"], ["--model", "x"]):
        server = Server(template="sglang-rocm", variables={"extra_args": words})
        (problem,) = server_problems_of(scenario_of(server), {})
        wording(problem)
