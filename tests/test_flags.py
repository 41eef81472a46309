"""Flags of `vllm serve`: read from its help, judged as its parser would, and those that guides still show."""

from pathlib import Path

import pytest

from harness.scenario.scenario import Load, Scenario, Server
from harness.serve.compose.compose import Service
from harness.serve.compose.problems import server_problems_of
from harness.serve.vllm.flag_check import cache_path
from harness.serve.vllm.flags import flags_in, options_of, removed_flags, removed_in, unknown_flags, version_of

HELP = """\
usage: vllm serve [model_tag] [options]

options:
  --aggregate-engine-logging
                        Log aggregate rather than per-engine statistics when
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many. See --not-an-option, --max-nothing.
  -h, --help            show this help message and exit

CacheConfig:
  --enable-prefix-caching, --no-enable-prefix-caching
                        Caching.
  --kv-cache-dtype {auto,fp8,fp8_e4m3}
                        Data type
  --max-num-batched-tokens MAX_NUM_BATCHED_TOKENS
  --max-num-seqs MAX_NUM_SEQS
  --compilation-config COMPILATION_CONFIG, -cc COMPILATION_CONFIG
  --tensor-parallel-size TENSOR_PARALLEL_SIZE, -tp TENSOR_PARALLEL_SIZE
"""
OPTIONS = options_of(HELP)


def test_options_are_read_from_the_heads_of_the_help_alone() -> None:
    assert OPTIONS == [
        "--aggregate-engine-logging", "--api-server-count", "--compilation-config", "--enable-prefix-caching",
        "--help", "--kv-cache-dtype", "--max-num-batched-tokens", "--max-num-seqs", "--no-enable-prefix-caching",
        "--tensor-parallel-size", "-asc", "-cc", "-h", "-tp",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["model", "--max-num-seqs", "4"],
        ["model", "--max_num_seqs=4"],
        ["--max-num-s", "4"],  # cut short, and one option is left
        ["--no-enable-prefix-caching", "-tp", "2", "-O3", "-cc.mode=3"],
        ["--compilation-config.cudagraph_mode", "NONE"],
        ['--compilation-config={"a": "--b"}', "-1", "-0.5"],
    ],
)
def test_what_the_parser_takes_is_taken(words: list[str]) -> None:
    assert unknown_flags(words, OPTIONS) == []


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--max-num-sqs", "--max-num-sqs: this vLLM has no such option; did you mean '--max-num-seqs'?"),
        ("--max-num=3", "--max-num: could be any of --max-num-batched-tokens, --max-num-seqs; write it in full"),
        ("--no-kv-cache-dtype", "--no-kv-cache-dtype: this vLLM has no such option; did you mean '--kv-cache-dtype'?"),
        ("-x", "-x: vLLM has no such option"),
        ("--task", "--task: vLLM does not know it any more: leave it out for text generation; --runner pooling (with "
         "--convert) is for embeddings and rewards (the hint of vLLM's own argument parser)"),
        ("--swap_space=16", "--swap-space: vLLM does not know it any more since 0.18.0: leave it out; vLLM's present "
         "engine has never swapped the KV cache to the host (vLLM PR 36216)"),
    ],
)  # fmt: skip
def test_what_the_parser_would_refuse_is_refused_with_advice(flag: str, problem: str) -> None:
    assert unknown_flags(["model", "--max-num-seqs", "4", flag], OPTIONS) == [problem]


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


def test_the_cache_is_the_users_and_knows_image_program_and_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    services = [
        Service(image="a"),
        Service(image="a", entrypoint=["vllm", "serve"]),
        Service(image="a", volumes=["/opt/vllm:/opt/vllm:ro"]),
        Service(image="a", volumes=["named:/data"]),  # a cache volume holds no program
    ]
    paths = [cache_path("sha256:1", service) for service in services]
    assert paths[0].parent == tmp_path / "amd-llm-load" / "flags"
    assert paths[0] == paths[3]
    assert len({*paths, cache_path("sha256:2", services[0])}) == 4
