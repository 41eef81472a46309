"""Which names in answers are known to be of the model that requests asked for: as real servers answer."""

from typing import Any

import pytest

from harness.numbers.model_names import may_name
from harness.serve.facts import _find_aliases
from tests.support.made_runs import served_by

HF = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca"
TWO_NAMES = [
    {"id": "large", "root": "Qwen/Qwen3-8B"},
    {"id": "chat", "root": "Qwen/Qwen3-8B"},
    {"id": "x", "root": "x"},
]
LORA = [{"id": "base", "root": "Qwen/Qwen3-8B"}, {"id": "sql", "root": "/adapters/sql", "parent": "base"}]


@pytest.mark.parametrize(
    ("asked", "answered", "effective", "listed"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", {}, []),
        ("Qwen/Qwen3-8B", "qwen3-8b", {}, []),
        ("chat", "large", {}, TWO_NAMES),  # vLLM answers with the first of its served names
        ("large", "Qwen/Qwen3-8B", {}, TWO_NAMES),
        ("tiny", "gpt-3.5-turbo", {}, [{"id": "tiny", "aliases": ["tiny", "gpt-3.5-turbo"]}]),  # llama.cpp --alias a,b
        ("tiny", "/models/anything.gguf", {}, []),
        ("anything", "gemma-3-4b-it-Q4_K_M.gguf", {}, []),  # llama.cpp without --alias
        ("anything", "gemma-3-4b", {"model_path": "/models/gemma-3-4b.gguf"}, []),
        ("Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q4_0.gguf", {}, []),  # a backend of Lemonade
        ("ggml-org/Qwen3-0.6B-GGUF:Q8_0", "Qwen3-0.6B-Q8_0", {}, []),
        ("user.Mine", "Qwen3-0.6B-Q4_K_M", {"checkpoint": "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"}, []),
        ("user.Tiny", "Tiny", {}, []),
        ("qwen3-0.6b-FLM", "qwen3:0.6b", {}, []),
        ("qwen3", "qwen3:latest", {}, []),  # Ollama
        ("Qwen/Qwen3-0.6B", HF, {}, []),
        ("gpt-4o", "gpt-4o-2024-08-06", {}, []),
        ("o3", "o3-2025-04-16", {}, []),
    ],
)
def test_a_healthy_server_names_its_model(
    asked: str, answered: str, effective: dict[str, Any], listed: list[dict[str, Any]]
) -> None:
    aliases = _find_aliases({"data": listed}, asked)
    assert may_name(served_by(template=None, effective=effective, model_aliases=aliases), asked, answered)


@pytest.mark.parametrize(
    ("asked", "answered", "listed"),
    [
        ("m", "other", []),
        ("m", "small", []),
        ("large", "x", TWO_NAMES),  # a router that falls back to a smaller one
        ("sql", "base", LORA),  # without the adapter
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-8B", [{"id": "Qwen/Qwen3-32B"}, {"id": "Qwen/Qwen3-8B"}]),
        ("gpt-5", "gpt-4o-mini", [{"id": "gpt-5", "root": None}, {"id": "gpt-4o-mini", "root": None}]),
    ],
)
def test_another_model_is_not_known_by_that_name(asked: str, answered: str, listed: list[dict[str, Any]]) -> None:
    aliases = _find_aliases({"data": listed}, asked)
    assert not may_name(served_by(template=None, model_aliases=aliases), asked, answered)


@pytest.mark.parametrize("listed", [None, [], {}, "m", [None, 5, {"id": 5}, {"id": "m", "root": 5, "aliases": "x"}]])
def test_a_list_of_another_form_has_no_aliases(listed: Any) -> None:
    assert _find_aliases({"data": listed}, "m") == _find_aliases({"data": listed}, None) == []
