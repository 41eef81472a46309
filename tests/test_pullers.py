"""Models that servers get through their own APIs: Ollama's pull, LocalAI's gallery; against doubles of both."""

import time
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ServerError
from harness.rundir.manifest import ServedBy
from harness.scenario import Server
from harness.serve import attach, ready
from harness.serve.compose_file import Fetch, LoadCall, Serving, parse
from harness.serve.containers import LogFile
from harness.serve.facts import recorded
from harness.serve.probe import Waiting
from harness.serve.ready import wait_ready
from harness.serve.template import rendered
from harness.trust import open_session
from tests.doubles.pullers import serving

MODEL = {"ollama": "qwen3:0.6b", "localai": "qwen3-0.6b"}


def fetched(kind: str, url: str, model: str, source: str | None = None, left_s: float = 20.0) -> list[str]:
    said: list[str] = []
    with open_session(None) as session:
        ready.FETCH[kind](url, model, source, session, time.monotonic() + left_s, said.append)
    return said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "JOB_POLL_S", 0.01)
    monkeypatch.setattr(ready, "SAY_EVERY_S", -1.0)


@pytest.mark.parametrize("kind", ["ollama", "localai"])
def test_a_model_is_fetched_once_with_progress(kind: str) -> None:
    with serving(kind) as (url, double):
        said = fetched(kind, url, MODEL[kind])
        assert double.models == [MODEL[kind]]
        before = [line for line in double.asked if line.startswith("POST")]
        assert fetched(kind, url, MODEL[kind]) == []
        assert [line for line in double.asked if line.startswith("POST")] == before
    if kind == "ollama":
        assert "pulling qwen3:0.6b into Ollama: 0.00 of 2.00 GB" in said
        assert "pulling qwen3:0.6b into Ollama: 2.00 of 2.00 GB" in said
    else:
        assert "installing qwen3-0.6b in LocalAI: qwen.gguf 50 %" in said


def test_a_name_of_ollama_without_a_tag_is_the_latest() -> None:
    assert ready.full_name("qwen3") == "qwen3:latest"
    assert ready.full_name("hf.co/a/b:Q4_0") == "hf.co/a/b:Q4_0"
    with serving("ollama") as (url, double):
        fetched("ollama", url, "qwen3")
        assert double.models == ["qwen3:latest"]
        assert fetched("ollama", url, "qwen3") == []
        assert attach(url, "qwen3").started.version == "0.12.6"  # found under that name, too


def test_a_configuration_elsewhere_is_installed_under_the_scenarios_name() -> None:
    with serving("localai") as (url, double):
        fetched("localai", url, "mine", source="https://example.org/mine.yaml")
        assert double.models == ["mine"]
        assert 'POST /models/apply {"name": "mine", "url": "https://example.org/mine.yaml"}' in double.asked


@pytest.mark.parametrize(
    ("kind", "broken", "model", "words", "step"),
    [
        ("ollama", "", "qwen9", "pull model manifest: file does not exist", "hf.co/REPOSITORY:QUANT"),
        ("ollama", "half", "qwen3:0.6b", "the answer ended with 'pulling sha256:bb'", "server's log"),
        ("localai", "", "qwen9", "no model found with name 'qwen9'", "model_config"),
        ("localai", "old", "qwen9", "no model found with name 'qwen9'", "model_config"),
    ],
)
def test_what_is_in_the_way_is_said_in_words(kind: str, broken: str, model: str, words: str, step: str) -> None:
    with serving(kind, broken) as (url, double):
        with pytest.raises(ServerError, match=words) as caught:
            fetched(kind, url, model)
        assert step in caught.value.next_step
        assert double.models == []


def test_a_time_limit_ends_an_installation() -> None:
    with serving("localai") as (url, _), pytest.raises(ServerError, match="time limit") as caught:
        fetched("localai", url, "qwen3-0.6b", left_s=0.0)
    assert "startup_timeout_s" in caught.value.next_step


@pytest.mark.parametrize("kind", ["ollama", "localai"])
def test_ready_is_who_has_the_model_loaded_and_answers(kind: str, tmp_path: Path) -> None:
    compose = parse(rendered(Server(template=kind), MODEL[kind], port=1))
    said: list[str] = []
    with serving(kind) as (url, double):
        waiting = Waiting(lambda: None, LogFile(tmp_path / "log"), 20.0, said.append)
        ready = wait_ready(url, compose.serving, MODEL[kind], waiting)
        loading = ["load"] if kind == "ollama" else []
        assert [phase.name for phase in ready.phases] == ["port open", "health", "model", *loading, "first answer"]
        assert (ready.model, ready.version) == (
            MODEL[kind],
            {"ollama": "0.12.6", "localai": "v3.10.0 (0123abcd)"}[kind],
        )
        assert double.loaded == (["qwen3:0.6b"] if kind == "ollama" else [])
        served = recorded(ServedBy(url=url, template=kind, model=MODEL[kind]))
        assert served.effective.get("gpu_share") == (0.75 if kind == "ollama" else None)
        if kind == "ollama":
            assert (served.effective["model_digest"], served.effective["quantization"]) == ("2ae6", "Q4_K_M")


def test_nothing_is_fetched_when_it_is_said_to_be_there(tmp_path: Path) -> None:
    compose = parse(rendered(Server(template="ollama", variables={"pull": False}), "qwen3", port=1))
    assert compose.serving.fetch is None
    assert compose.serving.load == LoadCall(path="/api/generate", body={"model": "qwen3"})
    with serving("ollama") as (url, _), pytest.raises(ServerError, match="model 'qwen3:latest' not found"):
        waiting = Waiting(lambda: None, LogFile(tmp_path / "log"), 5.0, lambda text: None)
        wait_ready(url, compose.serving, "qwen3", waiting)


def test_what_the_templates_say() -> None:
    given: dict[str, Any] = {
        "num_parallel": 10,
        "context_length": 8192,
        "flash_attention": True,
        "kv_cache_type": "q8_0",
    }
    compose = parse(rendered(Server(template="ollama", variables=given), "qwen3:0.6b", port=1))
    said = compose.server.environment
    assert compose.serving == Serving(
        template="ollama", port=11434, health="/", version="/api/version",
        fetch=Fetch(protocol="ollama", model="qwen3:0.6b"),
        load=LoadCall(path="/api/generate", body={"model": "qwen3:0.6b"}),
    )  # fmt: skip
    assert said["OLLAMA_HOST"] == "0.0.0.0:11434"
    assert {said[f"OLLAMA_{name}"] for name in ("NUM_PARALLEL", "CONTEXT_LENGTH", "KEEP_ALIVE")} == {"10", "8192", "-1"}
    assert (said["OLLAMA_FLASH_ATTENTION"], said["OLLAMA_KV_CACHE_TYPE"]) == ("1", "q8_0")
    assert compose.server.devices == ["/dev/kfd", "/dev/dri"]
    of_localai = parse(rendered(Server(template="localai", variables={"parallel": 10}), "qwen3-0.6b", port=1))
    assert of_localai.server.environment["LLAMACPP_PARALLEL"] == "10"
    assert of_localai.serving.fetch == Fetch(protocol="localai", model="qwen3-0.6b")
    assert of_localai.serving.health == "/readyz"
