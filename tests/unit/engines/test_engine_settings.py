"""The settings of the engines' files: read and changed in the variables of templates and in options of servers."""

from typing import Any

import pytest

from harness.engines import Engine, engines
from harness.engines.settings import (
    ENVIRONMENT,
    EXTRA_ARGUMENTS,
    change_settings,
    find_spelling,
    flag_words,
    read_setting,
)
from harness.serve.template import read_variables

ENGINES = {engine.name: engine for engine in engines()}
VLLM, LLAMACPP, LEMONADE, SIMULATED = (ENGINES[name] for name in ("vllm", "llama.cpp", "lemonade", "simulated"))
ROCM: dict[str, Any] = {
    name: None if one.required else one.default for name, one in read_variables("vllm-rocm").items()
}
SLOTS: dict[str, Any] = {
    name: None if one.required else one.default for name, one in read_variables("llamacpp").items()
}
ARGUMENTS = {"ctx_size": 8192, "vllm_args": "--max-num-seqs 4 --enforce-eager", "llamacpp_args": None, ENVIRONMENT: {}}


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.name)
def test_what_the_files_declare_is_whole(engine: Engine) -> None:
    variables = {name for template in engine.templates for name in read_variables(template)}
    for name, spelled in engine.settings.items():
        if spelled.variable is not None:
            assert spelled.variable in variables, name
        if (tune := spelled.tune) is not None:
            assert len(tune.values) > 1 and len({str(value) for value in tune.values}) == len(tune.values), name
            assert {tune.at_least, *tune.also} - {None} <= set(engine.settings), name
            assert set(tune.targets) <= {str(value) for value in tune.values}, name
            assert spelled.variable or spelled.flag or spelled.environment, name
            assert tune.default in (None, *tune.values) and tune.gain > 0, name


def test_the_files_declare_what_is_tuned() -> None:
    tuned = {name: {key for key, one in engine.settings.items() if one.tune} for name, engine in ENGINES.items()}
    assert {name: found for name, found in tuned.items() if found} == {
        "vllm": {
            "sequences", "batched_tokens", "memory", "kv_gib", "kv_type", "compiled", "prefix_cache",
            "chunked_prefill", "attention", "aiter", "speculation",
        },
        "lemonade": {"backend", "kv_bytes"},
        "llama.cpp": {
            "sequences", "context", "batched_tokens", "batch", "kv_type", "flash_attention", "prefix_cache", "backend",
        },
        "simulated": {"sequences", "batched_tokens", "prefill_chunk", "memory", "kv_type"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("front", "engine", "variables", "name", "value"),
    [
        (VLLM, VLLM, ROCM, "sequences", 64),
        (VLLM, VLLM, ROCM | {"max_num_seqs": None}, "sequences", 256),  # as the server reports
        (VLLM, VLLM, ROCM | {"max_num_seqs": None, EXTRA_ARGUMENTS: ["--max-num-seqs=32"]}, "sequences", 32),
        (VLLM, VLLM, ROCM, "compiled", False),
        (VLLM, VLLM, ROCM | {ENVIRONMENT: {"VLLM_ROCM_USE_AITER": "1"}}, "aiter", "1"),
        (VLLM, VLLM, ROCM, "aiter", "0"),
        (VLLM, VLLM, ROCM, "kv_gib", None),
        (VLLM, VLLM, ROCM | {"gpu_memory_utilization": None}, "memory", None),  # its report does not rule
        (LLAMACPP, LLAMACPP, SLOTS | {"image": "x/llama.cpp:server-rocm-b1"}, "backend", "rocm"),
        (LLAMACPP, LLAMACPP, SLOTS | {"image": "mine"}, "backend", None),
        (LLAMACPP, LLAMACPP, SLOTS, "batched_tokens", 512),
        (LEMONADE, VLLM, ARGUMENTS, "sequences", 4),
        (LEMONADE, VLLM, ARGUMENTS, "compiled", True),
        (LEMONADE, VLLM, ARGUMENTS, "kv_bytes", "4G"),
        (LEMONADE, VLLM, ARGUMENTS, "speculation", None),
        (LEMONADE, LLAMACPP, ARGUMENTS, "backend", None),
        (VLLM, VLLM, ROCM, "unknown", None),
    ],
)
def test_a_setting_is_read(front: Engine, engine: Engine, variables: dict[str, Any], name: str, value: Any) -> None:
    reported = {"max_num_seqs": 256, "gpu_memory_utilization": 0.92}
    assert read_setting(front, engine, variables, name, reported) == value


@pytest.mark.parametrize(
    ("front", "engine", "variables", "changes", "changed"),
    [
        (VLLM, VLLM, ROCM, {"sequences": 8, "compiled": True}, {"max_num_seqs": 8, "enforce_eager": True}),
        (VLLM, VLLM, ROCM, {"aiter": "1"}, {ENVIRONMENT: {"VLLM_ROCM_USE_AITER": "1"}}),
        (
            LLAMACPP, LLAMACPP, SLOTS, {"kv_type": "q8_0"},
            {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"},
        ),
        # each slot keeps its 4096 tokens, unless they change as well
        (LLAMACPP, LLAMACPP, SLOTS, {"sequences": 2}, {"parallel": 2, "ctx_size": 8192}),
        (LLAMACPP, LLAMACPP, SLOTS, {"sequences": 2, "context": 1024}, {"parallel": 2, "ctx_size": 2048}),
        (LLAMACPP, LLAMACPP, SLOTS | {"image": "server-rocm-1"}, {"backend": "vulkan"}, {"image": "server-vulkan-1"}),
        (LEMONADE, VLLM, ARGUMENTS, {"sequences": 32}, {"vllm_args": "--enforce-eager --max-num-seqs 32"}),
        (LEMONADE, VLLM, ARGUMENTS, {"compiled": False}, {"vllm_args": "--max-num-seqs 4 --no-enforce-eager"}),
        (
            LEMONADE, LLAMACPP, ARGUMENTS, {"sequences": 4, "kv_type": "q8_0"},
            {
                "llamacpp_args": "--parallel 4 --cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on",
                "ctx_size": 32768,
            },
        ),
    ],
)  # fmt: skip
def test_settings_are_changed(
    front: Engine, engine: Engine, variables: dict[str, Any], changes: dict[str, Any], changed: dict[str, Any]
) -> None:
    template = "lemonade" if front is LEMONADE else "llamacpp" if front is LLAMACPP else "vllm-rocm"
    context = front.templates[template].context if engine is LLAMACPP else None
    new = change_settings(front, engine, variables, changes, context, {"parallel": 1} if front is LEMONADE else None)
    assert {name: value for name, value in new.items() if value != variables.get(name)} == changed
    for name, value in changes.items():
        if name != "context":
            assert read_setting(front, engine, new, name) == value, "what is written is read again"


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(KeyError):
        change_settings(SIMULATED, SIMULATED, {}, {"unknown": 1})


def test_switches_have_an_opposite() -> None:
    compiled, cached = find_spelling(VLLM, VLLM, "compiled"), find_spelling(VLLM, VLLM, "prefix_cache")
    assert compiled is not None and cached is not None
    assert [flag_words(compiled, value) for value in (False, True)] == [["--no-enforce-eager"], ["--enforce-eager"]]
    assert flag_words(cached, False) == ["--no-enable-prefix-caching"]
