"""What the GPUs of a server rule out, and what its template pins."""

from typing import Any

import pytest

from harness.errors import HarnessError
from harness.machine.gpus import has_fp8
from harness.prepare.machine_fit import check_gpus
from harness.scenario import Server
from harness.serve.compose_file import Service, parse_compose
from harness.serve.lint import get_option
from harness.serve.template import render_server


def service(**variables: Any) -> Service:
    return parse_compose(render_server(Server(template="vllm-rocm", variables=variables), "m", port=1)).server


def gpus(*targets: str) -> list[dict[str, Any]]:
    return [{"target": target} for target in targets]


@pytest.mark.parametrize(
    ("target", "fp8"),
    [("gfx90a", True), ("gfx942", True), ("gfx950", True), ("gfx1030", False), ("gfx1100", False), ("gfx1150", False),
     ("gfx1151", False), ("gfx1200", True), ("gfx1201", True), ("gfx1250", True)],
)  # fmt: skip
def test_fp8_as_vllm_knows_it(target: str, fp8: bool) -> None:
    assert has_fp8(target) is fp8


def refuse(variables: dict[str, Any], *targets: str) -> None:
    given = gpus(*targets)
    check_gpus(given, len(given), service(**variables).command or [])


def test_fp8_is_refused_where_the_gpu_has_none() -> None:
    for variables in ({"quantization": "fp8"}, {"extra_args": ["--quantization=fp8"]}, {"extra_args": ["-q", "fp8"]}):
        with pytest.raises(HarnessError, match="quantization is fp8, and gfx1151 has no FP8"):
            refuse(variables, "gfx1151")
        refuse(variables, "gfx942")
        refuse(variables)
    with pytest.raises(HarnessError, match="kv_cache_dtype is fp8_e4m3, and gfx1100 has no FP8") as caught:
        refuse({"kv_cache_dtype": "fp8_e4m3"}, "gfx1100")
    assert "kv_cache_dtype: auto" in caught.value.next_step
    refuse({"quantization": "awq"}, "gfx1151")


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(HarnessError, match=r"tensor_parallel_size is 4, and this machine has 2 AMD GPUs \(gfx1201\)"):
        refuse({"tensor_parallel_size": 4}, "gfx1201", "gfx1201")
    refuse({"tensor_parallel_size": 8}, *["gfx942"] * 8)


def test_what_depends_on_the_machine_is_pinned() -> None:
    words = service().command or []
    pinned = {"--dtype": "auto", "--seed": "0", "--tensor-parallel-size": "1", "--max-model-len": "8192",
              "--gpu-memory-utilization": "0.75", "--max-num-seqs": "64", "--max-num-batched-tokens": "8192",
              "--kv-cache-dtype": "auto"}  # fmt: skip
    assert {name: get_option(words, name) for name in pinned} == pinned
    assert {"--enable-prefix-caching", "--no-enforce-eager"} <= set(words)


def test_values_of_the_new_variables_reach_the_command_line() -> None:
    words = service(kv_cache_memory_bytes="4G", attention_backend="TRITON_ATTN", enforce_eager=True).command or []
    assert (get_option(words, "--kv-cache-memory-bytes"), get_option(words, "--attention-backend")) == (
        "4G",
        "TRITON_ATTN",
    )
    assert "--enforce-eager" in words and "--no-enforce-eager" not in words
    assert service(gpus=[0, 2]).environment["HIP_VISIBLE_DEVICES"] == "0,2"


def test_llama_cpp_has_its_switches() -> None:
    given = {
        "model_path": "/m.gguf",
        "cont_batching": False,
        "kv_unified": True,
        "flash_attn": "on",
        "cache_type_k": "q8_0",
    }
    words = parse_compose(render_server(Server(template="llamacpp", variables=given), "m", port=1)).server.command or []
    assert {"--no-cont-batching", "--kv-unified", "--metrics"} <= set(words)
    assert (get_option(words, "--flash-attn"), get_option(words, "--cache-type-k")) == ("on", "q8_0")
    plain = (
        parse_compose(
            render_server(Server(template="llamacpp", variables={"model_path": "/m"}), "m", port=1)
        ).server.command
        or []
    )
    assert not {"--cont-batching", "--no-cont-batching", "--kv-unified", "--flash-attn"} & set(plain)
