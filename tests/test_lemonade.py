"""Lemonade brought up, and watched: against the double of it, as a process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.errors import ServerError
from harness.rundir.samples import parse_metrics
from harness.serve.compose_file import LemonadeSettings, Serving
from harness.serve.containers import LogFile
from harness.serve.lemonade import Api, LemonadeMonitor, find_running_model, get_health
from harness.serve.lifecycle import attach_to_server
from harness.serve.probe import StartupWatch, make_token_counter
from harness.serve.ready import ReadyServer, wait_ready
from harness.summary import because
from tests.command import PATIENCE_S
from tests.doubles.lemonade.spawn import Spawned, spawned

MINE = {
    "Tiny": {"checkpoint": "/models/tiny", "recipe": "vllm"},
    "Gguf": {"checkpoint": "/m.gguf", "recipe": "llamacpp"},
}
BUILT_IN = "Qwen3.5-0.8B-FP16-vLLM"


@contextmanager
def lemonade(tmp_path: Path, **given: Any) -> Iterator[Spawned]:
    behaviour: dict[str, Any] = {"user_models": MINE, "installed": True, **given}
    with spawned(tmp_path, **behaviour) as server:
        yield server


def bring_up(server: Spawned, say: Callable[[str], None] = lambda line: None, **asked: Any) -> ReadyServer:
    def dead() -> ServerError | None:
        return ServerError("it died") if server.process.poll() is not None else None

    timeout_s = float(asked.pop("timeout_s", 30.0))
    key = asked.pop("api_key", None)
    managed = LemonadeSettings(**({"model": "user.Tiny", "options": {"ctx_size": 4096}} | asked))
    serving = Serving(template="lemonade", port=1, health="/live", lemonade=managed)
    waiting = StartupWatch(dead, LogFile(server.log), timeout_s, say)
    return wait_ready(server.url, serving, managed.model, waiting, api_key=key, key_name="K")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Spawned, ReadyServer]]:
    """A model of the user, loaded."""
    with lemonade(tmp_path_factory.mktemp("tiny")) as server:
        yield server, bring_up(server)


def monitor(server: Spawned, model: str = "user.Tiny") -> LemonadeMonitor:
    return LemonadeMonitor(Api(server.url), model, None)


def chat(server: Spawned, model: str, **more: Any) -> requests.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3, **more}
    return requests.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S)


def loaded(server: Spawned) -> Any:
    found = get_health(Api(server.url))
    assert found is not None
    return found.loaded[0]


def loaded_model(server: Spawned) -> Any:
    return requests.get(server.url + "/api/v1/health", timeout=PATIENCE_S).json()["all_models_loaded"][0]


def test_a_model_is_installed_downloaded_loaded_and_proven(tmp_path: Path) -> None:
    told: list[str] = []
    options = {"ctx_size": 4096, "vllm_args": "--max-num-seqs 8"}
    with lemonade(tmp_path, installed=False) as server:
        ready = bring_up(server, told.append, model=BUILT_IN, options=options)
        running = loaded_model(server)
    assert [phase.name for phase in ready.phases] == [
        "port open", "health", "install", "download", "load", "first answer"]  # fmt: skip
    assert ready.model == BUILT_IN
    assert ready.version == "Lemonade 11.7.0, vllm:rocm"
    assert ready.loaded is not None
    assert ready.loaded.max_parallel == 32
    words = running["launch_command"]
    assert words[words.index("--served-model-name") + 1] == BUILT_IN
    assert words[-2:] == ["--max-num-seqs", "8"] and "--enforce-eager" in words
    assert running["pinned"] is True and running["recipe_options"] == {**options, "pinned": True}
    assert any(line.startswith("install after ") for line in told)


def test_a_model_of_the_user_is_sent_by_its_canonical_name(tiny: tuple[Spawned, ReadyServer]) -> None:
    server, ready = tiny
    assert ready.model == "user.Tiny"
    assert [phase.name for phase in ready.phases] == ["port open", "health", "load", "first answer"]
    assert chat(server, "user.Tiny").status_code == 200
    assert chat(server, "Tiny").status_code == 404  # accepted by Lemonade, unknown to its vLLM
    assert "data: [DONE]" not in chat(server, "Tiny", stream=True).text


def test_before_v11_8_the_name_is_asked_for(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "lemonade"
    cache.mkdir(parents=True)
    (cache / "user_models.json").write_text('{"Tiny": {"checkpoint": "/models/tiny", "recipe": "vllm"}}')
    with lemonade(tmp_path, config_dir=False) as server:
        ready = bring_up(server, model="Tiny")
        assert ready.loaded is not None
        assert (ready.loaded.model, loaded(server).command) == ("user.Tiny", [])


@pytest.mark.parametrize(
    ("behaviour", "defaults", "message", "advice"),
    [
        ({"kernel_fix": False}, {}, "does not install vllm:rocm: ", "update to Linux 6.18.4"),  # in a 200
        ({"gpu": False}, {}, "Model 'user.Tiny' is not available on this system. Unsupported GPU", ""),
        ({}, {"no_fetch_executables": True}, "Automatic backend install is disabled.", ""),
    ],
)
def test_a_backend_that_cannot_be_had(
    tmp_path: Path, behaviour: dict[str, Any], defaults: dict[str, Any], message: str, advice: str
) -> None:
    given = behaviour | {"installed": False, "defaults": defaults}
    with lemonade(tmp_path, **given) as server, pytest.raises(ServerError) as caught:
        bring_up(server)
    assert message in str(caught.value) and advice in caught.value.next_step


@pytest.mark.parametrize(("model", "meant"), [("Tny", "Did you mean 'Tiny'?"), ("user.Qwen3.5-0.8B-GUF", "-GGUF'?")])
def test_a_model_that_lemonade_does_not_have_is_reported_with_the_one_that_may_be_meant(
    tiny: tuple[Spawned, ReadyServer], model: str, meant: str
) -> None:
    server, _ = tiny
    for act in (lambda: bring_up(server, model=model), lambda: attach_to_server(server.url, model)):
        with pytest.raises(ServerError, match=f"Model '{model}' was not found. Available models") as caught:
            act()
        assert caught.value.next_step.endswith(meant)
        assert caught.value.next_step.startswith(f"the server has no model named {model}; set `model` to ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hub": False}, f"could not download '{BUILT_IN}': CURL error: Couldn't resolve host name"),
        ({"defaults": {"offline": True}}, f"could not download '{BUILT_IN}': Lemond is in offline mode"),
    ],
)
def test_a_download_that_fails(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with lemonade(tmp_path, **given) as server, pytest.raises(ServerError) as caught:
        bring_up(server, model=BUILT_IN)
    assert said in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("arguments", "said", "advice"),
    [
        ("--enable-prefix-caching", "is managed by Lemonade", "Lemonade sets --enable-prefix-caching itself"),
        # The cause is in the log, behind Lemonade's words.
        ("--gpu-memory-utilization 0.92", "vllm-server failed to start",
         "asks for 88.32 GiB, but only 76.45 of 96.0 GiB were free"),
    ],
)  # fmt: skip
def test_arguments_that_the_load_refuses(tmp_path: Path, arguments: str, said: str, advice: str) -> None:
    with lemonade(tmp_path) as server, pytest.raises(ServerError, match=said) as caught:
        bring_up(server, options={"ctx_size": 4096, "vllm_args": arguments})
    assert advice in caught.value.next_step


def test_a_load_is_waited_for_longer_than_lemonades_two_attempts(tmp_path: Path) -> None:
    given: dict[str, Any] = {"never_ready": 2, "defaults": {"global_timeout": 1}}
    with lemonade(tmp_path, **given) as server, pytest.raises(ServerError) as caught:
        bring_up(server, timeout_s=1.5)
    assert "HTTP 500: Failed to load model 'user.Tiny': vllm-server failed to start within timeout" in str(caught.value)


def test_the_numbers_are_those_of_the_engine_behind_it(tiny: tuple[Spawned, ReadyServer]) -> None:
    server, _ = tiny
    watch = monitor(server)
    text = watch.metrics()
    before = parse_metrics(text)["generated_tokens"]
    assert before >= 1  # the first answer's
    assert "vllm:num_requests_running" in text and "lemonade_server_up 1" in text
    chat(server, "user.Tiny")
    assert parse_metrics(watch.metrics())["generated_tokens"] == before + 3
    assert watch.problems() == []


def test_a_backend_that_was_killed_and_loaded_again_without_a_trace_is_noticed(tmp_path: Path) -> None:
    with lemonade(tmp_path) as server:
        bring_up(server)
        watch = monitor(server)
        before = loaded(server)
        os.kill(before.pid, signal.SIGKILL)
        answer = chat(server, "user.Tiny")
        assert answer.status_code == 200  # the client sees one slow success
        after = loaded(server)
        (problem,) = watch.problems()
        assert problem.code == "backend_restarted"
        assert (problem.values["before"], problem.values["now"]) == (before.pid, after.pid)
        assert parse_metrics(watch.metrics())["generated_tokens"] == 3.0  # of the new one
        assert watch.problems() == []  # the next cell begins with it
        assert requests.post(server.url + "/api/v1/unload", json={}, timeout=PATIENCE_S).status_code == 200
        assert watch.problems() == [because("backend_lost", server="Lemonade")]


def test_a_backend_that_the_watchdog_took_down_is_noticed(tmp_path: Path) -> None:
    with lemonade(tmp_path, preset="strix-halo-qwen3.5-0.8b") as server:
        bring_up(server, options={"ctx_size": 2000})
        watch = monitor(server)
        body = {"model": "user.Tiny", "stream": True, "max_tokens": 400, "ignore_eos": True,
                "messages": [{"role": "user", "content": "Hello."}]}  # fmt: skip
        with requests.post(server.url + "/v1/chat/completions", json=body, stream=True, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(loaded(server).pid, signal.SIGKILL)
            rest = list(lines)
        assert answer.status_code == 200 and b"data: [DONE]" not in rest
        assert b"backend_watchdog_reset" in rest[-2]
        assert watch.problems() == [because("backend_lost", server="Lemonade")]  # until the next request


def test_a_lemonade_that_runs_already(tmp_path: Path) -> None:
    saved = {"user.Tiny": {"ctx_size": 2048, "vllm_args": "--max-num-seqs 4"}}
    with lemonade(tmp_path, recipe_options=saved) as server:
        found = find_running_model(server.url, "Tiny", None)
        assert found is not None and (found.model, found.max_parallel) == ("user.Tiny", 32)
        assert loaded_model(server)["recipe_options"] == saved["user.Tiny"]
        endpoint = attach_to_server(server.url, "Tiny")
        assert endpoint.started.model == "user.Tiny"
        assert endpoint.started.simulated  # no page takes the double's numbers for a machine's
        assert endpoint.started.effective["launch_command"][-2:] == ["--max-num-seqs", "4"]
        assert not isinstance(endpoint.metrics_source, str) and endpoint.metrics_source is not None
        assert parse_metrics(endpoint.metrics_source())["generated_tokens"] >= 1
        assert endpoint.problems() == []
        assert attach_to_server(server.url, None).started.model == "user.Tiny"  # the only one that is loaded


@pytest.mark.parametrize(
    ("model", "options", "engine", "version"),
    [
        # system-info says vllm0.20.1-rocm7.12.0-gfx1151
        ("user.Tiny", {}, "vllm:rocm", "0.32.0+simulated"),
        # Two are installed. /health has a backend that was chosen, and not the default.
        ("user.Gguf", {}, "llamacpp:vulkan", "b0-0.32.0+simulated"),
        ("user.Gguf", {"llamacpp_backend": "rocm"}, "llamacpp:rocm", "b0-0.32.0+simulated"),
    ],
)
def test_the_engine_itself_says_its_version_and_what_it_runs_with(
    tmp_path: Path, model: str, options: dict[str, Any], engine: str, version: str
) -> None:
    with lemonade(tmp_path, llamacpp_backend="rocm") as server:
        bring_up(server, model=model, options={"ctx_size": 4096, **options})
        started = attach_to_server(server.url, model).started
    assert started.version == f"Lemonade 11.7.0, {engine} {version}"
    assert started.simulated and started.startup is not None
    assert started.startup.version == version
    assert started.effective["recipe"] == engine.partition(":")[0]
    if model == "user.Tiny":
        assert (started.startup.engine, started.startup.kv_cache_tokens) == ("vllm", 51200)
        assert (started.startup.kv_cache_blocks, started.startup.max_concurrency) == (3200, 12.5)
        assert started.effective["enable_prefix_caching"] is True
    else:
        assert (started.startup.engine, started.startup.max_model_len) == ("llama.cpp", 4096)
        assert started.effective["recipe_options"] == {"ctx_size": 4096, **options, "pinned": True}
        assert (started.effective["parallel"], started.effective["model_path"]) == (4, "/m.gguf")


def test_an_unexpected_engine_on_the_same_port_is_not_believed(tiny: tuple[Spawned, ReadyServer]) -> None:
    server, _ = tiny
    assert monitor(server, "user.Other").fetch("/version") == ""  # nothing is loaded under that name
    assert monitor(server, "Tiny").fetch("/version") == ""  # what answers there serves user.Tiny


def test_tokens_are_counted_by_the_engine_behind_lemonade(tiny: tuple[Spawned, ReadyServer]) -> None:
    server, _ = tiny
    endpoint = attach_to_server(server.url, "Tiny")
    with pytest.raises(ServerError, match="tokens cannot be counted, the server does not do it"):
        make_token_counter(server.url, "user.Tiny")("one two")
    assert make_token_counter(server.url, "user.Tiny", None, endpoint.ask_engine)("one two three") == 3


def test_a_second_model_beside_a_pinned_one_is_refused_with_what_to_do(tiny: tuple[Spawned, ReadyServer]) -> None:
    server, _ = tiny
    with pytest.raises(ServerError, match="All loaded models of type llm are pinned") as caught:
        attach_to_server(server.url, "Gguf")
    assert "unload or unpin the other model" in caught.value.next_step


def test_a_backend_that_ends_at_once_is_not_called_slow_and_an_attached_lemonade_is_asked_for_its_log(
    tmp_path: Path,
) -> None:
    with lemonade(tmp_path, die_at_start=4) as server:
        for act, advice in (
            (lambda: bring_up(server), "the vllm-server that Lemonade had started ended with exit code -9; "),
            (lambda: attach_to_server(server.url, "Tiny"), "journalctl -u lemond | harness explain -"),
        ):
            with pytest.raises(ServerError, match="vllm-server failed to start within timeout") as caught:
                act()
            assert advice in caught.value.next_step


def test_a_backend_that_died_unused_is_loaded_again_with_the_saved_options(tmp_path: Path) -> None:
    with lemonade(tmp_path, recipe_options={"user.Tiny": {"ctx_size": 2048}}) as server:
        bring_up(server, options={"ctx_size": 4096, "vllm_args": "--max-num-seqs 8"})
        watch, before = monitor(server), loaded_model(server)
        os.kill(before["pid"], signal.SIGKILL)
        while get_health(Api(server.url)).loaded:  # type: ignore[union-attr]  # until Lemonade knows
            time.sleep(0.05)
        assert chat(server, "user.Tiny").status_code == 200
        after = loaded_model(server)
        (problem,) = watch.problems()
    assert (before["pinned"], after["pinned"]) == (True, False)
    assert after["recipe_options"] == {"ctx_size": 2048} and after["pid"] != before["pid"]
    assert problem.code == "backend_restarted"
