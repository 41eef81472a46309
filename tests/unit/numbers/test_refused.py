"""What cannot work is refused by `harness check`, with what to write instead."""

from pathlib import Path
from typing import Any

import pytest

from harness.scenario import Gateway, Load, Scenario, Server
from tests.support.made_runs import server_problems_of
from tests.support.wording import Wording

LOAD = Load(user="batch", requests=10)


def problems(template: str, model: str = "org/model", gateway: Gateway | None = None, **given: Any) -> list[str]:
    server = Server(template=template, variables=given, gateway=gateway)
    asked = Scenario(version=1, question="q", model=model, servers={"s": server}, loads={"l": LOAD})
    return [problem.removeprefix("$.servers.s.") for problem in server_problems_of(asked, {})]


@pytest.mark.parametrize(
    ("template", "argument", "flag", "variable"),
    [
        ("vllm-rocm", "--port=9", "--port", "port"),
        ("vllm-rocm", "--host", "--host", None),
        ("vllm-rocm", "--max_num_seqs=5", "--max-num-seqs", "max_num_seqs"),
        ("vllm-rocm", "-tp", "-tp", "tensor_parallel_size"),
        ("vllm-rocm", "--no-enforce-eager", "--no-enforce-eager", "enforce_eager"),
        ("vllm-cpu", "--model", "--model", None),
        ("vllm-offline", "--seed", "--seed", "seed"),
        ("llamacpp", "-np", "-np", "parallel"),
        ("simulated", "--max-num-seqs", "--max-num-seqs", "max_num_seqs"),
    ],
)  # fmt: skip
def test_what_a_template_sets_is_not_set_again(
    template: str, argument: str, flag: str, variable: str | None, wording: Wording
) -> None:
    (problem,) = problems(template, extra_args=[argument, "9"])
    assert problem.startswith(f"variables.extra_args: {flag}: ") and (variable is None or f"'{variable}'" in problem)
    wording(problem)


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("vllm-rocm", ["--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "-O3"]),
        ("vllm-rocm", ["--compilation-config.mode", "3", "--max-num-partial-prefills", "2"]),
        ("llamacpp", ["--jinja", "--threads", "8", "--device", "ROCm0", "-dev", "x"]),
        ("simulated", ["--jitter", "0.1"]),
    ],
)
def test_other_arguments_pass(template: str, arguments: list[str]) -> None:
    assert problems(template, extra_args=arguments) == []


def test_a_gateway_s_arguments_are_looked_at_too(wording: Wording) -> None:
    gateway = Gateway(template="litellm", variables={"extra_args": ["--num_workers", "4", "--detailed_debug"]})
    wording(problems("vllm-rocm", gateway=gateway))


@pytest.mark.parametrize(
    ("template", "image", "program"),
    [
        ("vllm-rocm", "rocm/vllm:rocm7.14.0_rdna_ubuntu24.04_py3.14_pytorch_2.11.0_vllm_0.23.0", "[vllm, serve]"),
        ("vllm-rocm", "docker.io/kyuz0/vllm-therock-gfx1151:stable", "[vllm, serve]"),
    ],
)
def test_an_image_that_starts_a_shell_needs_an_entrypoint(
    template: str, image: str, program: str, wording: Wording
) -> None:
    wording(problems(template, image=image))
    assert problems(template, image=image, entrypoint=program.strip("[]").split(", ")) == []


def test_the_default_images_need_none() -> None:
    for image in ("vllm/vllm-openai-rocm:v0.25.0", "me/rocm/vllm:1", "rocm/vllm-openai"):
        assert problems("vllm-rocm", image=image) == []


@pytest.mark.parametrize("model", ["", " ", "-rm -rf /"])
def test_a_model_that_can_be_none(model: str) -> None:
    (problem,) = problems("vllm-rocm", model=model)
    assert problem.startswith("$.model: ")


def test_numbers_sizes_and_groups(wording: Wording) -> None:
    wording(problems("vllm-rocm", mem_limit="lots"))
    (problem,) = problems("vllm-rocm", groups=["render"])
    assert "'render'" in problem
    wording(problem)
    assert problems("vllm-rocm", groups=[44, "992"], mem_limit="${MEM}", kv_cache_memory_bytes="4G") == []


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    there, missing = tmp_path / "there", tmp_path / "not there"
    there.mkdir()
    engine_socket = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine_socket}")
    (problem,) = problems("vllm-rocm", volumes=[f"{there}:/a", f"{missing}:/b:ro", "${X}:/c"])
    assert problem.startswith("variables: ") and problem.endswith(f" mkdir -p '{missing}'")
    wording(problem, MISSING=missing)
    monkeypatch.setenv("DOCKER_HOST", "unix:///proc")  # the socket alone is mounted into this container
    assert problems("llamacpp", models=str(missing)) == []


@pytest.mark.parametrize(
    ("volume", "problem"),
    [
        ("${NOSUCH:-/}:/x", "'${NOSUCH:-/}:/x'"),
        ("${ROOT}:/x", "'${ROOT}:/x'"),
        ("${NOSUCH:-/no-such-folder}:/x", " /no-such-folder "),
        ("${NAMED}:/x", "'other'"),
    ],
)
def test_a_volume_is_checked_with_its_variables_filled_in(
    monkeypatch: pytest.MonkeyPatch, volume: str, problem: str, wording: Wording
) -> None:
    monkeypatch.setenv("ROOT", "/")
    monkeypatch.setenv("NAMED", "other")
    (text,) = problems("vllm-rocm", volumes=[volume])
    assert text.startswith("variables") and problem in text
    wording(text)
    assert problems("vllm-rocm", volumes=["${NOSUCH}:/x"]) == []  # not set yet


def test_a_gateway_before_lemonade_needs_the_name_that_its_engine_knows(wording: Wording) -> None:
    gateway = Gateway(template="litellm")
    given: dict[str, Any] = {"checkpoint": "a/b-GGUF:Q4_K_M", "recipe": "llamacpp"}
    assert problems("lemonade", "Qwen3-4B", gateway, **given) == []
    assert problems("lemonade", "user.Qwen3-4B", gateway, checkpoint="a/b", recipe="vllm") == []
    (problem,) = problems("lemonade", "Qwen3-4B", gateway, checkpoint="a/b", recipe="vllm")
    wording(problem)
