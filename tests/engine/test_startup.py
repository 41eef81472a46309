"""What servers' logs, metrics and answers tell of their start, and that no secret gets into the manifest with it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from harness.base.redact import register_secrets
from harness.records.manifest import Phase, ServedBy, Startup
from harness.serve.facts import parse_log, parse_log_lines, parse_versions, record_facts, split_phases
from harness.serve.lemonade import Api, LemonadeMonitor
from tests.support.http_double import Handler, listening

DATA = Path(__file__).parents[1] / "data" / "startup"
KEY = "sk-0123456789abcdef0123"
METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
    'gpu_memory_utilization="0.92",kv_cache_max_concurrency="36.5",kv_cache_memory_bytes="1073741824",'
    'kv_cache_size_tokens="74880",mamba_block_size="None",num_gpu_blocks="585"} 1.0\n'
)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def waits(seconds: float, load: float | None = None) -> list[Phase]:
    """Phases as `harness run` sees them from outside."""
    seen = {"pull": 0.5, "create": 0.25, "port open": seconds, "health": 0.125, "load": load, "first answer": 0.75}
    return [Phase(name=name, seconds=value) for name, value in seen.items() if value is not None]


def rounded(phases: list[Phase]) -> dict[str, float]:
    return {phase.name: round(phase.seconds, 3) for phase in phases}


def test_vllm_without_compiling() -> None:
    found = parse_log(DATA / "vllm-eager-docker.txt")
    assert found.facts == Startup(
        engine="vllm", version="0.32.0", architecture="Qwen3ForCausalLM", max_model_len=2048, weights_s=1.48,
        kv_cache_gib=1.0, kv_cache_tokens=74880, max_concurrency=36.56, init_engine_s=3.3,
    )  # fmt: skip
    assert found.effective == {
        "dtype": "bfloat16", "max_model_len": 2048, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "load_format": "auto", "enforce_eager": True, "kv_cache_dtype": "auto", "seed": 0,
        "enable_prefix_caching": True, "enable_chunked_prefill": True, "model": "/models/qwen3-100m",
        "served_model_name": ["qwen3-100m"], "max_num_batched_tokens": 2048, "max_num_seqs": 10,
    }  # fmt: skip
    measured, began_s = waits(46.0), moment("2026-11-21T12:32:25.000000000Z")
    phases = split_phases(measured, found, began_s)
    assert rounded(phases) == {
        "pull": 0.5, "create": 0.25, "process": 36.096, "weights": 1.753, "warm-up": 5.105, "ready": 3.171,
        "first answer": 0.75,
    }  # fmt: skip
    assert sum(phase.seconds for phase in phases) == pytest.approx(sum(phase.seconds for phase in measured))
    # A log whose clock was set meanwhile is not believed.
    assert split_phases(waits(30.0), found, began_s) == waits(30.0)
    # The process ran before its start had returned: 42.625 s were waited for what took 42.954 s by the log.
    seconds = rounded(split_phases(waits(42.5), found, began_s))
    assert (seconds["process"], seconds["ready"]) == (35.767, 0)
    assert sum(seconds.values()) == pytest.approx(44.125)


def test_vllm_with_a_cold_compile_cache() -> None:
    found = parse_log(DATA / "vllm-cold.txt")
    assert (found.facts.compile_cache, found.facts.warmup_s, found.facts.init_engine_s) == ("cold", 0.25, 43.17)
    assert (found.facts.kv_cache_tokens, found.facts.max_concurrency) == (524288, 256.0)
    assert split_phases(waits(80.0), found) == waits(80.0)  # without the Docker Engine's stamps, as measured


def test_vllm_on_a_gpu_behind_lemonade_with_a_warm_cache() -> None:
    found = parse_log(DATA / "lemonade-vllm-warm.txt")
    assert found.facts == Startup(
        engine="vllm", attention_backend="ROCM_ATTN", download_s=2.125, weights_s=4.31, weights_gib=7.56,
        model_load_s=8.903412, compile_s=3.42, compile_cache="warm", warmup_s=1.8, kv_cache_gib=52.87,
        kv_cache_tokens=384976, max_concurrency=46.99, graphs_s=5.0, graphs_gib=0.61, init_engine_s=12.51,
    )  # fmt: skip
    assert found.effective == {
        "max_num_batched_tokens": 8192,
        "model": "Qwen/Qwen3-4B",
        "api_key": [KEY],  # vLLM of before it hid them; blacked out before it is kept
        "max_num_seqs": 16,
        "compilation_config": "CompilationConfig(level=3, mode=<CompilationMode.VLLM_COMPILE: 3>, sizes=[1, 2])",
        "enable_prefix_caching": False,
    }
    phases = split_phases(waits(1.0, load=42.0), found, moment("2026-09-20T10:00:00.000000000Z"))
    assert rounded(phases) == {
        "pull": 0.5, "create": 0.25, "process": 20.0, "weights": 9.0, "compile": 6.0, "graphs": 6.0, "warm-up": 0.5,
        "ready": 1.625, "first answer": 0.75,
    }  # fmt: skip


def test_llamacpp() -> None:
    found = parse_log(DATA / "llamacpp-docker.txt")
    assert found.facts == Startup(engine="llama.cpp", version="b0-unknown", max_model_len=2048)
    assert found.effective == {"parallel": 10, "ctx_per_slot": 2048}
    phases = split_phases(waits(0.25), found, moment("2026-11-21T15:14:10.200000000Z"))
    assert rounded(phases) == {
        "pull": 0.5, "create": 0.25, "process": 0.117, "weights": 0.045, "ready": 0.213, "first answer": 0.75,
    }  # fmt: skip


def test_llamacpp_that_warms_up_compiles_its_shaders_then() -> None:
    second = "2026-11-21T15:14:{:02}.000000000Z 0.00.000.000 I {}"
    lines = [
        (10, "srv init: initializing ..."),
        (11, "srv load_model: loading model '/models/x.gguf'"),
        (14, "cmn init: warming up the model with an empty run - please wait ..."),
        (54, "srv init: model loaded"),
    ]
    found = parse_log_lines([second.format(at_s, text) for at_s, text in lines])
    assert rounded(split_phases(waits(45.0), found)) == {
        "pull": 0.5, "create": 0.25, "process": 1.0, "weights": 3.0, "warm-up": 40.0, "ready": 1.125,
        "first answer": 0.75,
    }  # fmt: skip


def test_the_embedded_engine_says_with_what_it_runs() -> None:
    lines = (
        "simulated engine: no model is computed, all timing comes from preset x",
        "parameters: step_base_s=0.007, max_num_seqs=256, enable=False",
        "GPU KV cache size: 2,176 tokens, Maximum concurrency for 2,048 tokens per request: 1.06x",
    )
    found = parse_log_lines([f"INFO 11-21 13:32:43 [simulated] {line}" for line in lines])
    assert found.facts == Startup(engine="simulated", kv_cache_tokens=2176, max_concurrency=1.06)
    assert found.effective == {"step_base_s": 0.007, "max_num_seqs": 256, "enable": False}
    assert split_phases(waits(0.25), found) == waits(0.25)


def test_a_log_that_tells_nothing() -> None:
    found = parse_log_lines(["", "hello", "\x00\xff binary", "init engine (profile) took some s", "version x"])
    assert (found.facts, found.effective, found.ends, found.started_s) == (Startup(), {}, {}, None)


def test_a_part_compiled_anew_is_not_warm() -> None:
    lines = ["Compiling a graph for dynamic shape takes 7.47 s", "Directly load AOT compilation from path /x"]
    assert parse_log_lines(lines).facts.compile_cache == "cold"
    assert parse_log_lines(lines[::-1]).facts.compile_cache == "cold"


@contextlib.contextmanager
def server(answers: Mapping[str, str]) -> Iterator[str]:
    """A server with one answer for each path, else 404."""

    class Double(Handler):
        def do_GET(self) -> None:
            text = answers.get(self.path.partition("?")[0])
            self.answer(404 if text is None else 200, text or "no such page")

    with listening(Double) as url:
        yield url


def test_metrics_know_better_than_the_log() -> None:
    with server({"/metrics": METRICS}) as url:
        served = ServedBy(url=url, template="vllm-cpu", phases=waits(46.0), version="0.32.0")
        found = record_facts(served, DATA / "vllm-eager-docker.txt", metrics_url=f"{url}/metrics")
    assert found.startup is not None
    known = found.startup
    assert (known.kv_cache_blocks, known.kv_block_size, known.max_concurrency) == (585, 128, 36.5)
    assert found.effective["gpu_memory_utilization"] == 0.92
    assert (found.effective["max_num_seqs"], found.effective["block_size"]) == (10, 128)
    assert "weights" in rounded(found.phases)


def test_llamacpp_is_asked_for_its_settings_where_there_is_no_log() -> None:
    props = {"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4, "build_info": "b6000-abc", "x": 1}
    with server({"/props": json.dumps(props)}) as url:
        found = record_facts(ServedBy(url=url))
    assert found.startup == Startup(engine="llama.cpp", version="b6000-abc", max_model_len=2048)
    assert found.effective == {"parallel": 4, "ctx_per_slot": 2048}
    assert found.version == "b6000-abc"


def test_lemonades_command_line_is_the_proof_of_what_ran() -> None:
    command = ["/opt/vllm-server", "--model", "/models/tiny", "--max-num-seqs", "8", "--api-key", "short"]
    options = {"ctx_size": 1024, "vllm_args": f"--max-num-seqs 8 --hf-token={KEY} --api-key x1"}
    loaded = {"model_name": "TinyVLLM", "launch_command": command, "recipe": "vllm", "recipe_options": options}
    health = {"all_models_loaded": [{"model_name": "other"}, loaded], "version": "11.7.0"}
    with server({"/api/v1/health": json.dumps(health)}) as url:
        behind = LemonadeMonitor(Api(url), "user.TinyVLLM", None)
        found = record_facts(ServedBy(url=url, template="lemonade", version="Lemonade 11.7.0, vllm"), monitor=behind)
    assert found.version == "Lemonade 11.7.0, vllm"  # the engine cannot be asked here
    assert found.effective == {
        "launch_command": [*command[:-1], "***"],
        "recipe": "vllm",
        "recipe_options": {"ctx_size": 1024, "vllm_args": "--max-num-seqs 8 --hf-token=*** --api-key ***"},
    }


def test_no_secret_gets_into_the_manifest(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    token = "ours-and-looks-like-nothing"
    log.write_text(
        f"non-default args: {{'model': 'm', 'api_key': ['{KEY}'], 'hf_token': 12345678, 'url': 'http://me:pass12@h/', "
        f"'note': 'Bearer {KEY}', 'extra': ['--password', 'hunter22', '--x={token}'], 'max_num_seqs': 4}}\n"
    )
    health = {"all_models_loaded": [{"model_name": "m", "launch_command": ["s", f"--api-key={KEY}", "-np", "8"]}]}
    register_secrets({token: True})
    with server({"/api/v1/health": json.dumps(health)}) as url:
        behind = LemonadeMonitor(Api(url), "m", None)
        found = record_facts(ServedBy(url=url), log, api_key="the-key-of-clients", monitor=behind)
    text = msgspec.json.encode(found).decode()
    for secret in (KEY, token, "hunter22", "pass12", "12345678", "the-key-of-clients"):
        assert secret not in text
    assert found.effective == {
        "model": "m", "api_key": "***", "hf_token": "***", "url": "http://***@h/", "note": "Bearer ***",
        "extra": ["--password", "***", "--x=***"], "max_num_seqs": 4,
        "launch_command": ["s", "--api-key=***", "-np", "8"],
    }  # fmt: skip


def test_versions_of_an_image() -> None:
    text = "BASE_IMAGE: rocm/dev-ubuntu-22.04:7.0-complete\nTRITON_BRANCH: f9e5bf54\n\nodd line\n"
    base = "rocm/dev-ubuntu-22.04:7.0-complete"
    assert parse_versions(text) == {"BASE_IMAGE": base, "TRITON_BRANCH": "f9e5bf54"}


def test_numbers_of_a_log_that_no_manifest_can_hold_are_left_out() -> None:
    """A server writes its log; run.json has to be readable whatever is in it."""
    for digits in (400, 5000):
        number = "9" * digits
        lines = (f"{number}.00.000.000 I x", f"INFO GPU KV cache size: {number} tokens",
                 f"INFO Chunked prefill is enabled with max_num_batched_tokens={number}",
                 "INFO Maximum concurrency for 512 tokens per request: 3.5x")  # fmt: skip
        found = parse_log_lines(lines)
        assert (found.facts.kv_cache_tokens, found.facts.max_concurrency) == (None, 3.5)
        assert msgspec.json.decode(msgspec.json.encode(found.facts), type=Startup) == found.facts
        assert all(not isinstance(value, int) for value in found.effective.values())
