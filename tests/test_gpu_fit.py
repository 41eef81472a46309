"""What GPUs and a container's own keys rule out is said before the start."""

from typing import Any

import pytest

from harness.errors import HarnessError
from harness.failures.table import removed_flags
from harness.machine.gpus import has_fp8
from harness.scenario import Load, Scenario, Server
from harness.serve.arguments import container_problems, flags_in, refuse_unfit, removed_in, value_of, version_of
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
    """A container that cannot work is refused with the scenario."""
    found = container_problems(service(tensor_parallel_size=2, **variables))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
    assert container_problems(service(**variables)) == []
    server = Server(template="vllm-rocm", variables=variables | {"tensor_parallel_size": 2})
    loads = {"l": Load(user="chat", requests=1)}
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads=loads)
    assert server_problems_of(scenario, {}) == [f"$.servers.s.variables: {one}" for one in found]


def test_values_of_the_new_variables_reach_the_command_line() -> None:
    words = service(kv_cache_memory_bytes="4G", attention_backend="TRITON_ATTN", enforce_eager=True).command or []
    assert (value_of(words, "--kv-cache-memory-bytes"), value_of(words, "--attention-backend")) == ("4G", "TRITON_ATTN")
    assert "--enforce-eager" in words and "--no-enforce-eager" not in words
    assert service(gpus=[0, 2]).environment["HIP_VISIBLE_DEVICES"] == "0,2"


def test_llama_cpp_has_its_switches() -> None:
    def words(**given: Any) -> list[str]:
        server = Server(template="llamacpp", variables={"model_path": "/m.gguf"} | given)
        return parse(rendered(server, "m", port=1)).server.command or []

    found = words(cont_batching=False, kv_unified=True, flash_attn="on", cache_type_k="q8_0")
    assert {"--no-cont-batching", "--kv-unified", "--metrics"} <= set(found)
    assert (value_of(found, "--flash-attn"), value_of(found, "--cache-type-k")) == ("on", "q8_0")
    assert not {"--cont-batching", "--no-cont-batching", "--kv-unified", "--flash-attn"} & set(words())


# Flags of `vllm serve`: read as its parser reads them, and those that guides still show.


def test_flags_are_named_as_the_parser_names_them() -> None:
    assert flags_in(["m", "--a_b=c_d", "--x_y.k_l", "1", "-tp", "-2", "--", "--z"]) == ["--a-b", "--x-y", "-tp"]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai-rocm:v0.25.0", (0, 25, 0)),
        ("rocm/vllm:rocm7.14.0_rdna_ubuntu24.04_py3.14_pytorch_2.11.0_vllm_0.23.0", (0, 23, 0)),
        ("docker.io/kyuz0/vllm-therock-gfx1151:0.28.0-strix", (0, 28, 0)),
        ("docker.io/kyuz0/vllm-therock-gfx1151:stable", None),
        ("rocm/vllm:rocm7.12.0_something", None),
        ("rocm/vllm-dev:nightly_0610_rc1_6.4", None),
        ("vllm/vllm-openai-rocm@sha256:0123", None),
        ("localhost:5000/vllm", None),
        ("ghcr.io/lemonade-sdk/lemonade-server:v11.9.0", None),
    ],
)
def test_the_tag_tells_the_version_or_nothing(image: str, version: tuple[int, int, int] | None) -> None:
    assert version_of(image) == version


def test_a_removed_flag_is_refused_unstarted_where_the_tag_tells() -> None:
    words = ["--swap-space", "16", "--task", "generate"]
    assert removed_in(words, "vllm/vllm-openai-rocm:v0.17.1") == []
    assert removed_in(words, "vllm/vllm-openai-rocm:latest") == []
    assert removed_in(words, "vllm/vllm-openai-rocm:v0.18.0") == [
        f"--swap-space: {removed_flags()['--swap-space'].advice}"
    ]
    server = Server(template="vllm-rocm", variables={"extra_args": ["--disable-log-requests"]})
    load = Load(user="chat", requests=1)
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": load})
    assert server_problems_of(scenario, {"$.servers.s.variables.extra_args": 7}) == [
        "$.servers.s.variables.extra_args (line 7): --disable-log-requests: vLLM does not know it any more since "
        "0.17.0: leave it out; requests are logged only with --enable-log-requests (vLLM PR 29402)"
    ]
