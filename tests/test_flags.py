"""Flags of `vllm serve`: read as its parser reads them, and those that guides still show."""

import pytest

from harness.failures.table import removed_flags
from harness.scenario import Load, Scenario, Server
from harness.serve.lint import find_removed_flags, parse_flag_names, parse_vllm_version
from tests.made_runs import server_problems_of


def test_flags_are_named_as_the_parser_names_them() -> None:
    assert parse_flag_names(["m", "--a_b=c_d", "--x_y.k_l", "1", "-tp", "-2", "--", "--z"]) == ["--a-b", "--x-y", "-tp"]


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
    assert parse_vllm_version(image) == version


def test_a_removed_flag_is_refused_unstarted_where_the_tag_tells() -> None:
    words = ["--swap-space", "16", "--task", "generate"]
    assert find_removed_flags(words, "vllm/vllm-openai-rocm:v0.17.1") == []
    assert find_removed_flags(words, "vllm/vllm-openai-rocm:latest") == []
    assert find_removed_flags(words, "vllm/vllm-openai-rocm:v0.18.0") == [
        f"--swap-space: {removed_flags()['--swap-space'].advice}"
    ]
    server = Server(template="vllm-rocm", variables={"extra_args": ["--disable-log-requests"]})
    load = Load(user="chat", requests=1)
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": load})
    assert server_problems_of(scenario, {"$.servers.s.variables.extra_args": 7}) == [
        "$.servers.s.variables.extra_args (line 7): --disable-log-requests: vLLM does not know it any more since "
        "0.17.0: leave it out; requests are logged only with --enable-log-requests (vLLM PR 29402)"
    ]
