"""Servers that get their model themselves: Ollama by a request, LocalAI by its command line; against doubles."""

from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import ServerError
from harness.records.manifest import ServedBy
from harness.scenario import Server
from harness.serve.compose_file import LoadCall, Serving, parse_compose
from harness.serve.containers import LogFile
from harness.serve.facts import record_facts
from harness.serve.lifecycle import attach_to_server, wait_ready
from harness.serve.probe import StartupWatch
from harness.serve.template import render_server
from tests.support.doubles.pullers import serving
from tests.support.wording import Wording


def ready(folder: Path, url: str, model: str, **given: Any) -> ServedBy:
    compose = parse_compose(render_server(Server(template="ollama", variables=given), model, port=1))
    waiting = StartupWatch(lambda: None, LogFile(folder / "log"), 20.0, lambda text: None)
    return wait_ready(url, compose.serving, model, waiting)


def test_a_model_is_pulled_once_and_loaded_before_the_first_request(tmp_path: Path) -> None:
    with serving("ollama") as (url, double):
        found = ready(tmp_path, url, "qwen3:0.6b")
        assert [phase.name for phase in found.phases] == ["port open", "health", "model", "load", "first answer"]
        assert (found.model, found.version) == ("qwen3:0.6b", "0.12.6")
        assert double.models == double.loaded == ["qwen3:0.6b"]
        again = ready(tmp_path, url, "qwen3:0.6b")
        assert [phase.name for phase in again.phases] == ["port open", "health", "load", "first answer"]
        assert sum("/api/pull" in line for line in double.asked) == 1
        served = record_facts(ServedBy(url=url, template="ollama", model="qwen3:0.6b")).effective
        assert (served["model_digest"], served["quantization"]) == ("2ae6", "Q4_K_M")
        assert (served["model_bytes"], served["gpu_bytes"]) == (1000, 750)


def test_a_name_of_ollama_without_a_tag_is_the_latest(tmp_path: Path) -> None:
    with serving("ollama") as (url, double):
        ready(tmp_path, url, "qwen3")
        assert double.models == ["qwen3:latest"]
        assert attach_to_server(url, "qwen3").started.version == "0.12.6"  # found under that name, too


def test_a_model_that_cannot_be_pulled_is_explained(tmp_path: Path, wording: Wording) -> None:
    with serving("ollama") as (url, double):
        with pytest.raises(ServerError) as caught:
            ready(tmp_path, url, "qwen9")
        assert "'qwen9'" in str(caught.value) and "500" in str(caught.value)
        wording(caught.value)
        assert double.models == []


def test_what_the_templates_say() -> None:
    given: dict[str, Any] = {
        "num_parallel": 10,
        "context_length": 8192,
        "flash_attention": True,
        "kv_cache_type": "q8_0",
    }
    compose = parse_compose(render_server(Server(template="ollama", variables=given), "qwen3:0.6b", port=1))
    said = compose.server.environment
    assert compose.serving == Serving(
        template="ollama", port=11434, health="/", version="/api/version",
        load=LoadCall(path="/api/generate", body={"model": "qwen3:0.6b"},
                      fetch=LoadCall(path="/api/pull", body={"model": "qwen3:0.6b", "stream": False})),
    )  # fmt: skip
    assert said["OLLAMA_HOST"] == "0.0.0.0:11434"
    assert {said[f"OLLAMA_{name}"] for name in ("NUM_PARALLEL", "CONTEXT_LENGTH", "KEEP_ALIVE")} == {"10", "8192", "-1"}
    assert (said["OLLAMA_FLASH_ATTENTION"], said["OLLAMA_KV_CACHE_TYPE"]) == ("1", "q8_0")
    assert compose.server.devices == ["/dev/kfd", "/dev/dri"]
    of_localai = parse_compose(
        render_server(Server(template="localai", variables={"parallel": 10}), "qwen3-0.6b", port=1)
    )
    assert of_localai.server.environment["LLAMACPP_PARALLEL"] == "10"
    assert of_localai.server.command == ["qwen3-0.6b"]
    elsewhere = {"model_config": "https://example.org/mine.yaml", "extra_args": ["--debug"]}
    command = parse_compose(
        render_server(Server(template="localai", variables=elsewhere), "mine", port=1)
    ).server.command
    assert command == ["https://example.org/mine.yaml", "--debug"]
    assert of_localai.serving.health == "/readyz"
