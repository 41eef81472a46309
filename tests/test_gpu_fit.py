"""What GPUs and a container's own keys rule out is said before the start."""

from typing import Any

import pytest

from harness.errors import HarnessError
from harness.machine.gpus import has_fp8
from harness.scenario import Load, Scenario, Server
from harness.serve.arguments import container_problems, refuse_unfit, value_of
from harness.serve.compose_file import Service, parse
from harness.serve.template import rendered
from tests.made_runs import server_problems_of


def service(**variables: Any) -> Service:
    return parse(rendered(Server(template="vllm-rocm", variables=variables), "m", port=1)).server


def gpus(*targets: str) -> list[dict[str, Any]]:
    return [{"target": target} for target in targets]


@pytest.mark.parametrize(
    ("target", "fp8"),
    [("gfx90a", True), ("gfx942", True), ("gfx950", True), ("gfx1030", False), ("gfx1100", False), ("gfx1150", False),
     ("gfx1151", False), ("gfx1200", True), ("gfx1201", True), ("gfx1250", True)],
)  # fmt: skip
def test_fp8_as_vllm_knows_it(target: str, fp8: bool) -> None:
    assert has_fp8(target) is fp8


def test_fp8_is_refused_where_the_gpu_has_none() -> None:
    for variables in ({"quantization": "fp8"}, {"extra_args": ["--quantization=fp8"]}, {"extra_args": ["-q", "fp8"]}):
        with pytest.raises(HarnessError, match="quantization is fp8, and gfx1151 has no FP8"):
            refuse_unfit(service(**variables), gpus("gfx1151"))
        refuse_unfit(service(**variables), gpus("gfx942"))
        refuse_unfit(service(**variables), [])
    with pytest.raises(HarnessError, match="kv_cache_dtype is fp8_e4m3, and gfx1100 has no FP8") as caught:
        refuse_unfit(service(kv_cache_dtype="fp8_e4m3"), gpus("gfx1100"))
    assert "kv_cache_dtype: auto" in caught.value.next_step
    refuse_unfit(service(quantization="awq"), gpus("gfx1151"))


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(HarnessError, match=r"tensor_parallel_size is 4, and this machine has 2 AMD GPUs \(gfx1201\)"):
        refuse_unfit(service(tensor_parallel_size=4), gpus("gfx1201", "gfx1201"))
    refuse_unfit(service(tensor_parallel_size=8), gpus(*["gfx942"] * 8))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, None),
        ({"shm_size": "16g"}, None),
        ({"shm_size": "64m"}, "shm_size: 64m is too small; set shm_size: 16g"),
        ({"ipc": "private"}, None),
        ({"gpus": [0]}, "tensor_parallel_size is 2, and HIP_VISIBLE_DEVICES shows 0"),
        ({"gpus": [0, 3]}, None),
        ({"devices": ["/dev/kfd", "/dev/dri/renderD128"]}, "`devices` gives 1 GPU to the container"),
        ({"devices": ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]}, None),
    ],
)
def test_several_gpus_need_shared_memory_and_devices(variables: dict[str, Any], problem: str | None) -> None:
    found = container_problems(service(tensor_parallel_size=2, **variables))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
    assert container_problems(service(**variables)) == []


def test_a_container_that_cannot_work_is_refused_with_the_scenario() -> None:
    server = Server(template="vllm-rocm", variables={"tensor_parallel_size": 2, "shm_size": "64m"})
    load = Load(user="chat", requests=1)
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": load})
    assert server_problems_of(scenario, {}) == [
        "$.servers.s.variables: 2 GPUs exchange data through /dev/shm, and shm_size: 64m is too small; "
        "set shm_size: 16g"
    ]


def test_what_depends_on_the_machine_is_pinned() -> None:
    words = service().command or []
    pinned = {"--dtype": "auto", "--seed": "0", "--tensor-parallel-size": "1", "--max-model-len": "8192",
              "--gpu-memory-utilization": "0.75", "--max-num-seqs": "64", "--max-num-batched-tokens": "8192",
              "--kv-cache-dtype": "auto"}  # fmt: skip
    assert {name: value_of(words, name) for name in pinned} == pinned
    assert {"--enable-prefix-caching", "--no-enforce-eager"} <= set(words)


def test_values_of_the_new_variables_reach_the_command_line() -> None:
    words = service(kv_cache_memory_bytes="4G", attention_backend="TRITON_ATTN", enforce_eager=True).command or []
    assert (value_of(words, "--kv-cache-memory-bytes"), value_of(words, "--attention-backend")) == ("4G", "TRITON_ATTN")
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
    words = parse(rendered(Server(template="llamacpp", variables=given), "m", port=1)).server.command or []
    assert {"--no-cont-batching", "--kv-unified", "--metrics"} <= set(words)
    assert (value_of(words, "--flash-attn"), value_of(words, "--cache-type-k")) == ("on", "q8_0")
    plain = (
        parse(rendered(Server(template="llamacpp", variables={"model_path": "/m"}), "m", port=1)).server.command or []
    )
    assert not {"--cont-batching", "--no-cont-batching", "--kv-unified", "--flash-attn"} & set(plain)
