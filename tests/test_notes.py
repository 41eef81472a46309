"""What `harness check` says of servers that would start, and not do what was meant."""

from pathlib import Path
from typing import Any

import pytest

from harness.scenario import Load, Prompts, Scenario, Server
from harness.scenario.behaviour import Agent, Lengths, Rag
from harness.serve.lint import list_notes
from tests.command import called


def of(template: str, load: Load | None = None, prompts: Prompts | None = None, **given: Any) -> list[str]:
    chosen = load or Load(user="batch", output_tokens=10)
    server = Server(template=template, variables=given)
    return list_notes(
        Scenario(
            version=1, question="q", model="m", servers={"s": server}, loads={"l": chosen},
            prompts=prompts or Prompts(tokens=10),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "given", "limit"),
    [
        ("vllm-rocm", {"max_model_len": 1024}, "max_model_len is 1,024: the server refuses such requests"),
        ("vllm-cpu", {}, "max_model_len is 4,096"),
        ("llamacpp", {"ctx_size": 8192, "parallel": 10}, "ctx_size / parallel (8,192 / 10) is 819"),
        ("llamacpp", {"ctx_size": 4096, "parallel": 10, "kv_unified": True}, "ctx_size is 4,096"),
        ("localai", {}, "context_size / parallel (32,768 / 8) is 4,096"),
        ("ollama", {}, "context_length is 4,096: Ollama cuts such prompts short"),
        ("lemonade", {"ctx_size": 5999, "vllm_args": "--max-num-seqs 10"}, "ctx_size is 5,999"),
        ("lemonade", {"llamacpp_args": "--parallel 10"}, "ctx_size / parallel (8,192 / 10) is 819"),
    ],
)
def test_a_load_longer_than_the_context(template: str, given: dict[str, Any], limit: str) -> None:
    load, prompts = Load(user="batch", output_tokens=2000), Prompts(tokens=4000)
    (note,) = of(template, load, prompts, **given)
    assert note.startswith(
        "server 's' under l: a request has up to 4,000 tokens of prompt and 2,000 of answer, and " + limit
    )


@pytest.mark.parametrize(
    ("load", "prompt"),
    [
        (Load(user="batch", output_tokens=10), 150),
        (Load(user="chat", turns=3, output_tokens=10), 50 + 3 * 100 + 2 * 10),
        (Load(user="agent", agent=Agent(steps=4, result_tokens=30), output_tokens=10), 150 + 3 * 40),
        (Load(user="rag", rag=Rag(document_tokens=700), output_tokens=10), 850),
    ],
)
def test_how_long_a_prompt_becomes(load: Load, prompt: int) -> None:
    prompts = Prompts(tokens=100, system_tokens=50)
    assert of("vllm-rocm", load, prompts, max_model_len=prompt + 10) == []
    (note,) = of("vllm-rocm", load, prompts, max_model_len=prompt + 9)
    assert f"up to {prompt:,} tokens of prompt and 10 of answer, and max_model_len is" in note


def test_of_unknown_lengths_nothing_is_said() -> None:
    long = Prompts(tokens=100_000)
    assert of("vllm-rocm", None, long, max_model_len=None) == []
    assert of("llamacpp", None, long, ctx_size=0) == []
    assert of("simulated", None, long) == []
    assert of("vllm-rocm", Load(user="own.py"), long) == []
    assert of("vllm-rocm", Load(user="batch", endpoint="embeddings"), long) == []
    assert of("vllm-rocm", Load(user="batch", output_tokens=Lengths(file="lengths.jsonl")), long) == []


def test_settings_without_effect() -> None:
    given = {"VLLM_USE_V1": 1, "HSA_OVERRIDE_GFX_VERSION": "11.0.0"}
    first, second = of("vllm-rocm", environment=given)
    assert first == (
        "server 's': VLLM_USE_V1 has no effect any more: nothing replaces it: the V1 engine is the only one"
    )
    assert second.startswith("server 's': HSA_OVERRIDE_GFX_VERSION overrides GPU detection")


def test_arguments_that_are_no_mistake() -> None:
    for template, given in (("vllm-rocm", {"extra_args": ["--disable-log-stats"]}),
                            ("lemonade", {"vllm_args": "--disable_log_stats"})):  # fmt: skip
        (note,) = of(template, **given)
        assert note.startswith("server 's': --disable-log-stats: vLLM then has no running and waiting requests")
    (note,) = of("vllm-rocm", image="vllm/vllm-openai-rocm:latest", extra_args=["--swap-space", "16"])
    assert "--swap-space: the tag of vllm/vllm-openai-rocm:latest does not tell its version; vLLM does not" in note
    assert "since 0.18.0: leave it out" in note
    assert of("vllm-rocm", extra_args=["--trust-remote-code"]) == []


def test_harness_check_says_how_long_a_first_start_takes(tmp_path: Path) -> None:
    for name, compiles in (("amd-flags", True), ("first-look", False)):
        done = called("check", name, cwd=tmp_path)
        assert done.code == 0
        assert ("a first start compiles for 5 to 12 minutes more" in " ".join(done.out.split())) == compiles
