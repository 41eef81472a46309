"""The settings of the engines' files: read and changed in the variables of templates and in options of servers."""

from typing import Any

import pytest

from harness.engines import Engine, engines
from harness.engines.settings import (
    ENVIRONMENT,
    EXTRA_ARGUMENTS,
    as_count,
    change_settings,
    changed_variables,
    count_gpus,
    find_engines,
    find_spelling,
    known_options,
    long_flag,
    named_settings,
    protected_flags,
    read_setting,
    read_slots,
    running_setting,
    setting_words,
    spelled_names,
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
        # of two the last counts, also under another name
        (LEMONADE, VLLM, {"vllm_args": "--max-num-seqs 4 --max_num_seqs=8"}, "sequences", 8),
        (LEMONADE, VLLM, {"vllm_args": "--enforce-eager --no-enforce-eager"}, "compiled", False),
        (LEMONADE, LLAMACPP, {"llamacpp_args": "--parallel 4 -np 8"}, "sequences", 8),
        (LEMONADE, LLAMACPP, {"llamacpp_args": "--alias '-np 2' -np \"6\""}, "sequences", 6),
        (LEMONADE, LLAMACPP, {"llamacpp_args": "-np -1"}, "sequences", -1),
        (LEMONADE, LEMONADE, {"vllm_args": "--max-num-seqs 4"}, "kv_bytes", "4G"),  # its engine is not known
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
        # it switches the cache on itself, and refuses the flag
        (LEMONADE, VLLM, {"vllm_args": "--no-enable-prefix-caching"}, {"prefix_cache": True}, {"vllm_args": None}),
        (LEMONADE, VLLM, {"vllm_args": None}, {"prefix_cache": False}, {"vllm_args": "--no-enable-prefix-caching"}),
        (
            LEMONADE, LLAMACPP, {"llamacpp_args": """--kwargs '{"a": 1}' -b 8"""}, {"batch": 512},
            {"llamacpp_args": """--kwargs '{"a": 1}' --batch-size 512"""},
        ),
        # an option that the server does not report is one all the same
        (LEMONADE, LLAMACPP, {"llamacpp_args": None}, {"backend": "vulkan"}, {"llamacpp_backend": "vulkan"}),
        (
            VLLM, VLLM, ROCM | {EXTRA_ARGUMENTS: ["--speculative-config.method", "ngram", "--x"]},
            {"speculation": "{}"}, {"speculative_config": "{}", EXTRA_ARGUMENTS: ["--x"]},
        ),
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
    assert [setting_words(compiled, value) for value in (False, True)] == [["--no-enforce-eager"], ["--enforce-eager"]]
    assert setting_words(cached, False) == ["--no-enable-prefix-caching"]


@pytest.mark.parametrize(
    ("engine", "effective", "arguments", "name", "value"),
    [
        (VLLM, {"max_num_seqs": 8}, ["--max-num-seqs", "4"], "sequences", 8),  # what it reports is what runs
        (VLLM, {}, ["--max-num-seqs", "4", "--max-num-seqs=8"], "sequences", 8),
        (VLLM, {}, ["--max_num_seqs", "8"], "sequences", 8),
        (VLLM, {}, ["--no-enforce-eager", "--max-num-seqs", "8"], "compiled", False),
        (VLLM, {}, ["--enforce-eager"], "compiled", True),
        (VLLM, {}, ["--no-enable-prefix-caching"], "prefix_cache", False),
        (VLLM, {}, ["--kv-cache-memory-bytes"], "kv_bytes", None),
        (LLAMACPP, {}, ["-np", "4", "-ctk", "q8_0"], "kv_type", "q8_0"),
        (LLAMACPP, {"ctx_per_slot": 512}, ["-c", "4096"], "context", 512),
        (ENGINES["ollama"], {"context_length": 4096}, [], "context", 4096),  # it has no flags
        (VLLM, {"unknown": 1}, [], "unknown", None),
    ],
)
def test_what_a_server_runs_with(
    engine: Engine, effective: dict[str, Any], arguments: list[str], name: str, value: Any
) -> None:
    assert running_setting(engine, name, effective, arguments) == value


def test_what_must_be_written_comes_with_the_environment_and_the_arguments_last() -> None:
    changes = {"api_processes": 2, "aiter": "1", "sequences": 5}
    given = ROCM | {EXTRA_ARGUMENTS: ["--max-num-seqs", "4"], ENVIRONMENT: {"A": "1"}}
    written = changed_variables(VLLM, VLLM, given, changes)
    assert list(written.items()) == [
        ("max_num_seqs", 5),
        (ENVIRONMENT, {"A": "1", "VLLM_ROCM_USE_AITER": "1"}),
        (EXTRA_ARGUMENTS, ["--api-server-count", "2"]),
    ]
    without = {name: value for name, value in ROCM.items() if name != "max_num_seqs"}
    assert changed_variables(VLLM, VLLM, without, {"sequences": 5}) == {EXTRA_ARGUMENTS: ["--max-num-seqs", "5"]}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("unrecognized arguments: --max-num-seqs", ["sequences"]),
        ("max_num_seqs must be positive", ["sequences"]),
        ("unrecognized arguments: --no-enforce-eager", ["compiled"]),
        ("unrecognized arguments: --enforce-eager=1", ["compiled"]),
        ("--max-num-seqs-per-gpu, x-max-num-seqs, --batch-size-limit", []),
        ("--ubatch-size 128", []),
    ],
)
def test_a_text_names_settings(text: str, named: list[str]) -> None:
    names = {"sequences": "max_num_seqs", "compiled": "enforce_eager", "batch": "batch_size"}
    assert named_settings(text, names) == named


def test_settings_as_their_users_write_them() -> None:
    context = LLAMACPP.templates["llamacpp"].context
    vllm, llama = spelled_names(VLLM, VLLM), spelled_names(LLAMACPP, LLAMACPP, context)
    assert (vllm["sequences"], vllm["aiter"], vllm["api_processes"]) == (
        "max_num_seqs", "VLLM_ROCM_USE_AITER", "api_server_count",
    )  # fmt: skip
    assert (llama["sequences"], llama["context"]) == ("parallel", "context_per_slot")


@pytest.mark.parametrize(
    ("template", "variables", "model", "expected"),
    [
        ("vllm-rocm", {}, "m", (VLLM, VLLM)),
        ("lemonade", {"recipe": "vllm"}, "m", (LEMONADE, VLLM)),
        ("lemonade", {"recipe": "llamacpp", "vllm_args": ""}, "m-vLLM", (LEMONADE, LLAMACPP)),
        ("running", {"vllm_args": ""}, "m", (LEMONADE, VLLM)),
        ("lemonade", {}, "Qwen-vLLM", (LEMONADE, VLLM)),
        ("lemonade", {}, "m", (LEMONADE, LLAMACPP)),
    ],
)
def test_the_engine_that_computes(
    template: str, variables: dict[str, Any], model: str, expected: tuple[Engine, Engine]
) -> None:
    assert find_engines(template, variables, model) == expected


def test_flags_with_other_names() -> None:
    assert long_flag(VLLM, "-tp") == "--tensor-parallel-size" and long_flag(None, "-tp") == "-tp"
    assert long_flag(LLAMACPP, "-nocb") == long_flag(LLAMACPP, "--no-cont-batching") == "--cont-batching"
    assert protected_flags("llamacpp_args")["-c"] == "set ctx_size" and protected_flags("none") == {}


def test_numbers_of_a_command_line() -> None:
    assert [count_gpus(words) for words in ([], ["-tp", "2"], ["-tp=2", "--tensor_parallel_size", "4"])] == [1, 2, 4]
    assert [as_count(text) for text in ("4", "-1", "auto", "²", "", None)] == [4, None, None, None, None, None]
    assert read_slots("-np 4 --kv-unified") == ("4", True)
    assert read_slots("-np 4 -kvu --parallel=6 --no-kv-unified") == ("6", False)
    assert read_slots(None) == (None, False)


def test_the_options_of_a_load_are_those_that_are_given() -> None:
    given = {"ctx_size": 4096, "llamacpp_args": "-np 2", "vllm_args": "", "llamacpp_backend": None, "recipe": "x"}
    assert known_options(LEMONADE, given) == {"ctx_size": 4096, "llamacpp_args": "-np 2"}
