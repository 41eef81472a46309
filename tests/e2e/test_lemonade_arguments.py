"""Lemonade's settings from a scenario, what it would refuse, and the notes of `harness check` about servers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from harness.base.errors import StartError
from harness.engines.settings import protected_flags
from harness.records.manifest import Startup
from harness.scenario import Load, Prompts, Scenario, Server, Sweep, SweepRow
from harness.scenario.behaviour import Lengths, Rag
from harness.serve.compose_file import parse_compose
from harness.serve.document import server_document
from harness.serve.lemonade import count_server_threads
from harness.serve.lint import count_lemonade_slots, length_notes, list_notes, refuse_too_long
from harness.workload.job import decode_job
from tests.support.doubles.lemonade import arguments as double
from tests.support.load_runs import composed
from tests.support.made_runs import server_problems_of
from tests.support.wording import Wording

EVIL = "a\"b\\c: {'d'} # ${x} \u2028é"


def scenario(model: str = "Tiny", **variables: Any) -> Scenario:
    server = Server(template="lemonade", variables=variables)
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model=model, servers={"s": server}, loads={"l": load})


def problems(**variables: Any) -> list[str]:
    return [text.removeprefix("$.servers.s.variables.") for text in server_problems_of(scenario(**variables), {})]


def contents(model: str = "Tiny", **variables: Any) -> dict[str, Any]:
    compose = parse_compose(server_document(scenario(model, **variables), "s"))
    return {name: json.loads(config.content.replace("$$", "$")) for name, config in compose.configs.items()}


def test_the_protected_flags_are_those_of_lemonade() -> None:
    assert set(protected_flags("vllm_args")) == set(double.PROTECTED)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"vllm_args": '--speculative-config \'{"method": "ngram"}\''}, "JSON"),
        (
            {"vllm_args": "-tp 2 --max_model_len=4096"},
            "--max-model-len: ",
        ),
        ({"llamacpp_args": "-np 8 '-c' 4096"}, "-c: "),
        ({"checkpoint": "org/m"}, "recipe: "),
        ({"recipe": "vllm"}, "recipe: "),
        ({"checkpoint": "o/m", "recipe": "llamacpp", "vllm_args": "-tp 2"}, "llamacpp"),
        ({"checkpoint": "o/m", "recipe": "flm", "llamacpp_args": "-np 2"}, "flm"),
        ({"checkpoint": "o/m", "recipe": "vllm", "flm_args": "--pmode turbo"}, "vllm"),
    ],
)
def test_what_would_fail_after_the_download_is_refused_before(
    variables: dict[str, Any], problem: str, wording: Wording
) -> None:
    found = problems(**variables)
    assert problem in found[0]
    wording(found)


@pytest.mark.parametrize(
    "text",
    [
        "--kv-cache-memory-bytes 4G --no-enable-prefix-caching --no-enforce-eager",
        "-tp 2 --max-num-batched-tokens=8192 --lora-modules a=b c=d",
    ],
)
def test_what_lemonade_takes_is_let_through(text: str) -> None:
    assert problems(vllm_args=text) == []
    assert double.checked(text) == text.split()


def test_a_model_that_lemonade_knows() -> None:
    compose = parse_compose(server_document(scenario("Qwen-vLLM", vllm_args="--max-num-seqs 32"), "s"))
    asked = compose.serving.lemonade
    assert asked is not None
    assert (asked.model, asked.recipe, asked.checkpoint) == ("Qwen-vLLM", None, None)
    assert asked.options == {"ctx_size": 8192, "vllm_args": "--max-num-seqs 32"}
    found = contents("Qwen-vLLM", vllm_args="--max-num-seqs 32", global_timeout=1800, offline=True)
    assert found["user_models"] == {}
    assert found["recipe_options"] == {"builtin.Qwen-vLLM": asked.options}
    assert found["defaults"] == {
        "auto_check_model_updates": False,
        "auto_evict": False,
        "auto_update_models": False,
        "broadcast": False,
        "ctx_size": 8192,
        "global_timeout": 1800,
        "log_level": "info",
        "max_loaded_models": 1,
        "no_fetch_executables": False,
        "offline": True,
    }


@pytest.mark.parametrize("model", ["Mine", "user.Mine"])
def test_a_checkpoint_is_registered_under_its_canonical_name(model: str) -> None:
    given = {"checkpoint": "org/repo", "recipe": "vllm", "ctx_size": 4096, "vllm_backend": "rocm"}
    compose = parse_compose(server_document(scenario(model, **given), "s"))
    asked = compose.serving.lemonade
    assert asked is not None and (asked.model, asked.backend) == ("user.Mine", "rocm")
    found = contents(model, **given)
    assert found["user_models"] == {"Mine": {"checkpoint": "org/repo", "recipe": "vllm", "labels": ["chat"]}}
    assert found["recipe_options"] == {"user.Mine": {"ctx_size": 4096, "vllm_backend": "rocm"}}


@pytest.mark.parametrize("name", ["checkpoint", "llamacpp_args"])
def test_the_files_are_json_whatever_is_in_them(name: str) -> None:
    given = {"checkpoint": "org/m", "recipe": "llamacpp"} | {name: EVIL}
    found = contents("Mine", **given)
    assert EVIL in (found["user_models"]["Mine"]["checkpoint"], found["recipe_options"]["user.Mine"].get(name))


def prepared(tmp_path: Path, **variables: Any) -> Path:
    """The volumes of a server as its preparation leaves them, made of a folder; owners stay as they are."""
    prepare = parse_compose(server_document(scenario(**variables), "s")).services["prepare"]
    (command,) = prepare.command or []
    tools = tmp_path / "tools"
    for folder in (tools, tmp_path / "configs", tmp_path / "cache/lemonade", tmp_path / "cache/huggingface"):
        folder.mkdir(parents=True, exist_ok=True)
    (tools / "chown").write_text("#!/bin/sh\n")
    (tools / "chown").chmod(0o755)
    for name in ("user_models", "recipe_options"):
        (tmp_path / f"configs/{name}.json").write_text("{}")
    script = command.replace("$$", "$").replace("/opt/lemonade/.cache", str(tmp_path / "cache"))
    script = script.replace("/etc/amd-llm-load", str(tmp_path / "configs"))
    subprocess.run(
        ["sh", "-ec", script], check=True, env={**prepare.environment, "PATH": f"{tools}:{os.environ['PATH']}"}
    )
    return tmp_path / "cache"


def test_settings_that_an_earlier_start_left_are_put_away(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "lemonade"
    folder.mkdir(parents=True)
    for name in ("config", "aliases", "user_models"):
        (folder / f"{name}.json").write_text('"old"')
    prepared(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "aliases.json.before", "config.json.before", "recipe_options.json", "user_models.json",
        "user_models.json.before"]  # fmt: skip


@pytest.mark.parametrize("offline", [False, True])
def test_a_path_needs_no_network(tmp_path: Path, offline: bool) -> None:
    """Lemonade asks the hub for the quantization of a path, too, unless the hub's cache has a config.json for it."""
    cache = prepared(tmp_path, checkpoint="/models/tiny", recipe="vllm", offline=offline)
    found = cache / "huggingface/hub/models----models--tiny/snapshots/amd-llm-load/config.json"
    assert json.loads(found.read_text()) == {"quantization_config": {"quant_method": "none"}}
    prepared(tmp_path, checkpoint="/models/tiny", recipe="vllm", offline=offline)  # a second start
    assert not (prepared(tmp_path / "b", checkpoint="/m.gguf", recipe="llamacpp") / "huggingface/hub").exists()


@pytest.mark.parametrize(
    ("model", "variables", "sent"),
    [
        ("Mine", {"checkpoint": "org/m", "recipe": "vllm"}, "user.Mine"),
        ("Qwen-vLLM", {}, "Qwen-vLLM"),
        ("builtin.Qwen-vLLM", {}, "Qwen-vLLM"),
        ("extra.Found", {}, "extra.Found"),
    ],
)
def test_the_load_by_hand_asks_for_the_name_that_vllm_knows(model: str, variables: dict[str, Any], sent: str) -> None:
    compose = yaml.safe_load(composed(scenario(model, **variables)))
    command = compose["services"]["locust"]["command"]
    assert decode_job(command[command.index("--job") + 1]).model == sent


@pytest.mark.parametrize("model", ["extra.Mine", "builtin.Mine"])
def test_a_checkpoint_cannot_be_registered_under_lemonades_own_prefixes(model: str, wording: Wording) -> None:
    found = server_problems_of(scenario(model, checkpoint="org/m", recipe="vllm"), {})
    wording(found)
    assert server_problems_of(scenario(model), {}) == []


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("flm", {"flm_args": "--pmode performance"}), ("llamacpp-hrx", {"hrx_args": "--parallel 4"})],
)
def test_recipes_of_other_engines(recipe: str, options: dict[str, str]) -> None:
    assert problems(checkpoint="o/m", recipe=recipe, **options) == []
    found = contents(checkpoint="o/m", recipe=recipe, **options)
    assert found["user_models"]["Tiny"]["recipe"] == recipe
    assert found["recipe_options"] == {"user.Tiny": {"ctx_size": 8192, **options}}


def notes(template: str, load: Load, prompts: Prompts = Prompts(tokens=10), **variables: Any) -> list[str]:  # noqa: B008
    server = Server(template=template, variables=variables)
    return list_notes(
        Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": load}, prompts=prompts), 8
    )


@pytest.mark.parametrize(
    ("template", "variables", "limit"),
    [
        ("vllm-rocm", {"max_model_len": 5999}, "max_model_len leaves it 5,999: the server refuses such requests"),
        ("llamacpp", {"ctx_size": 40960, "parallel": 10}, "ctx_size leaves it 4,096"),
        ("llamacpp", {"ctx_size": 4096, "parallel": 10, "kv_unified": True}, "ctx_size leaves it 4,096"),
        ("ollama", {}, "context_length leaves it 4,096: Ollama cuts such prompts short"),
        ("lemonade", {"recipe": "llamacpp", "ctx_size": 5000}, "ctx_size leaves it 5,000"),
        ("lemonade", {"ctx_size": 20000, "llamacpp_args": "--threads 1 --parallel 4"}, "ctx_size leaves it 5,000"),
        ("lemonade", {"ctx_size": 20000, "llamacpp_args": "-np 4"}, "ctx_size leaves it 5,000"),
        ("lemonade", {"ctx_size": 5000, "llamacpp_args": "-np 4 -kvu"}, "ctx_size leaves it 5,000"),
        ("lemonade", {"ctx_size": 20000, "llamacpp_args": "-np 4 -kvu --no-kv-unified"}, "ctx_size leaves it 5,000"),
        ("lemonade", {"ctx_size": 5000, "llamacpp_args": "--parallel ²"}, "ctx_size leaves it 5,000"),
    ],
)
def test_a_note_on_a_load_longer_than_the_context(
    template: str, variables: dict[str, Any], limit: str, wording: Wording
) -> None:
    lengths = Lengths(uniform=[100, 4000])
    load, prompts = Load(user="batch", output_tokens=Lengths(uniform=[10, 2000])), Prompts(tokens=lengths)
    (note,) = notes(template, load, prompts, **variables)
    assert "6,000" in note and str(limit) in note
    wording(note)
    assert notes("vllm-rocm", load, prompts, max_model_len=6000) == []
    assert notes("vllm-rocm", load, prompts, max_model_len=None) == notes("simulated", load, prompts) == []


def is_refused(scenario: Scenario, startup: Startup | None = None) -> bool:
    try:
        refuse_too_long(scenario, scenario.servers, scenario.loads, startup)
    except StartError:
        return True
    return False


@pytest.mark.parametrize(
    ("template", "variables", "fits"),
    [
        ("vllm-rocm", {"max_model_len": 5999}, False),  # refuses the prompt and the asked answer together
        ("vllm-rocm", {"max_model_len": 6000}, True),
        ("llamacpp", {"ctx_size": 16000, "parallel": 4}, True),  # ends such an answer early
        ("llamacpp", {"ctx_size": 16000, "parallel": 5}, False),
        ("lemonade", {"ctx_size": 8192, "llamacpp_args": "--parallel=4"}, False),
        ("lemonade", {"ctx_size": 8192, "llamacpp_args": None}, True),
    ],
)
def test_a_load_of_which_no_request_fits(template: str, variables: dict[str, Any], fits: bool) -> None:
    load, prompts = Load(user="batch", output_tokens=2000), Prompts(tokens=4000)
    made = Scenario(
        version=1, question="q", model="m", servers={"s": Server(template=template, variables=variables)},
        loads={"l": load}, prompts=prompts,
    )  # fmt: skip
    assert is_refused(made) != fits
    running = replace(made, servers={"s": Server(template="running")})
    assert not is_refused(running), "the variables are not those of a running server"
    assert any("no request fits" in note for note in list_notes(made, 8)) != fits


CONTEXTS = pytest.mark.parametrize(
    ("engine", "limit", "fits"),
    [
        ("vllm", 5999, False), ("vllm", 6000, True), ("llama.cpp", 4000, True), ("llama.cpp", 3999, False),
        (None, 3999, False), (None, 5000, True), ("vllm", None, True),
    ],
)  # fmt: skip
LONG = Load(user="batch", output_tokens=2000)
SHORT = Load(user="batch", prompts=Prompts(tokens=10), output_tokens=10)


def on_running(swept: bool = False, **loads: Load) -> Scenario:
    """Loads whose prompts have 4,000 tokens, unless they say otherwise."""
    return Scenario(
        version=1, question="q", model="m", servers={"s": Server(template="vllm-rocm")}, loads=loads,
        prompts=Prompts(tokens=4000), swept=Sweep(loads={"l": SweepRow(of="l", settings={})}) if swept else None,
    )  # fmt: skip


@CONTEXTS
def test_a_running_server_reports_its_context(engine: str | None, limit: int | None, fits: bool) -> None:
    assert is_refused(on_running(l=LONG), Startup(engine=engine, max_model_len=limit)) != fits


@CONTEXTS
def test_a_sweep_runs_while_a_row_fits_and_the_others_are_named(
    engine: str | None, limit: int | None, fits: bool, wording: Wording
) -> None:
    startup = Startup(engine=engine, max_model_len=limit)
    swept = on_running(swept=True, l=LONG, short=SHORT)
    assert not is_refused(swept, startup)
    assert list(refuse_too_long(swept, swept.servers, swept.loads, startup)) == ([] if fits else ["l"])
    assert not any("under short" in note for note in length_notes(swept, startup))
    if limit is not None:
        wording(length_notes(swept, startup) or None)
    assert is_refused(on_running(swept=True, l=LONG, more=LONG), startup) != fits


@CONTEXTS
def test_the_document_of_a_rag_load_is_in_each_prompt(engine: str | None, limit: int | None, fits: bool) -> None:
    rag = Load(user="rag", output_tokens=2000, rag=Rag(document_tokens=3900), prompts=Prompts(tokens=100))
    assert is_refused(on_running(l=rag), Startup(engine=engine, max_model_len=limit)) != fits


def test_notes_on_lemonades_queue_and_on_an_override_of_the_gpu(wording: Wording) -> None:
    (note,) = notes("lemonade", Load(user="batch", users=2, batch_size=20, requests=80, output_tokens=10))
    assert "40" in note and "32" in note
    wording(note)
    (note,) = notes("vllm-rocm", Load(user="batch"), environment={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert "'s'" in note
    wording(note)


@pytest.mark.parametrize(
    ("model", "variables", "slots"),
    [
        ("m", {"checkpoint": "o/m", "recipe": "llamacpp"}, 1),
        ("Qwen3-0.6B-GGUF", {}, 1),
        ("m", {"llamacpp_args": "--threads 8"}, 1),
        ("m", {"llamacpp_args": "-np 4 --threads 8"}, 4),
        ("m", {"llamacpp_args": "--parallel=6"}, 6),
        ("m", {"llamacpp_args": "--alias 'a -np 4' --parallel \"6\""}, 6),
        ("m", {"llamacpp_args": "--parallel -1"}, None),  # llama-server chooses
        ("m", {}, None),  # the engine is not known
        ("Qwen3.5-0.8B-FP16-vLLM", {"vllm_args": "--max-num-seqs 8"}, None),
        ("Some-GGUF", {"checkpoint": "o/m", "recipe": "vllm"}, None),
    ],
)
def test_how_many_slots_llama_server_has_behind_lemonade(model: str, variables: dict[str, Any], slots: int) -> None:
    server, load = Server(template="lemonade", variables=variables), Load(user="batch", batch_size=6, output_tokens=10)
    assert count_lemonade_slots(server, model) == slots
    given = Scenario(
        version=1, question="q", model=model, servers={"s": server}, loads={"l": load}, prompts=Prompts(tokens=10)
    )
    assert [f'"--parallel {6}"' in note for note in list_notes(given, 8)] == ([True] if slots in (1, 4) else [])


@pytest.mark.parametrize(("threads", "size"), [(2, 32), (8, 32), (32, 128), (64, 256), (192, 256)])
def test_how_many_requests_lemonade_serves_at_once(threads: int, size: int) -> None:
    assert count_server_threads(threads) == size
