"""Which model of a running server is measured: the one that is loaded, because another one would put it out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.files import SCENARIOS
from harness.base.https import open_session
from harness.load.client import ApiAddress
from harness.load.load_process import first_model
from harness.questions.quick.search import model_of, quick_scenario
from harness.run.experiment import Target
from harness.run.running_server import prepare_for, user_scenario
from harness.scenario import Load
from harness.serve import probe
from tests.support.command import called
from tests.support.faults import fault
from tests.support.http_double import Handler, listening
from tests.support.load_runs import make_job
from tests.support.wording import Wording

FIRST, SECOND, THIRD, EMBEDDER = "alpha-7b", "beta-32b", "gamma-3b", "nomic-embed-text"
LISTED = [EMBEDDER, FIRST, SECOND, THIRD]


def router(loaded: list[str]) -> dict[str, Any]:
    def status(name: str) -> dict[str, Any]:
        return {"value": "loaded"} if name in loaded else {"value": "unloaded", "failed": True, "exit_code": 1}

    return {"/v1/models": {"data": [{"id": name, "status": status(name)} for name in LISTED]}}


def swapper(loaded: list[str]) -> dict[str, Any]:
    leaving = [{"model": name, "state": "stopping"} for name in LISTED if name not in loaded][:1]
    return {"/running": {"running": [*leaving, *({"model": name, "state": "ready"} for name in loaded)]}}


def studio(loaded: list[str]) -> dict[str, Any]:
    states = {name: "loaded" if name in loaded else "not-loaded" for name in LISTED}
    kinds = {name: "embeddings" if name == EMBEDDER else "llm" for name in LISTED}
    return {"/api/v0/models": {"data": [{"id": n, "type": kinds[n], "state": states[n]} for n in LISTED]}}


def processes(loaded: list[str]) -> dict[str, Any]:
    return {"/api/ps": {"models": [{"name": name, "model": name, "size": 1} for name in loaded]}}


def health(loaded: list[str]) -> dict[str, Any]:
    kinds = {name: "embedding" if name == EMBEDDER else "llm" for name in LISTED}
    entries = [{"model_name": name, "type": kinds[name], "recipe": "r"} for name in loaded]
    known = {f"/api/v1/models/{name}": {"recipe": "r", "downloaded": True} for name in LISTED}
    return {"/api/v1/health": {"status": "ok", "all_models_loaded": entries}, **known}


SERVERS = [router, swapper, studio, processes, health]


def double(answers: dict[str, Any], posts: list[str]) -> type[Handler]:
    """A server of several models, of which the first is not the one that is loaded."""
    known = {"/v1/models": {"data": [{"id": name} for name in LISTED]}} | answers

    class Double(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps(known[self.path])) if self.path in known else self.answer(404, "{}")

        def do_POST(self) -> None:
            posts.append(json.loads(self.body())["model"])
            chunk = {"choices": [{"delta": {"content": "a"}}]}
            self.answer(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")

    return Double


def choices(url: str, folder: Path) -> dict[str, Callable[[list[str]], str]]:
    """By command: the model that it measures without `--model`; a list gets what it says."""
    soak = SCENARIOS / "soak.yaml"  # of a model that this server lacks
    return {
        "quick": lambda said: str(quick_scenario(Target(url), say=said.append)["model"]),
        "capacity": lambda said: str(user_scenario("chat", Target(url), say=said.append)["model"]),
        "run": lambda said: prepare_for(soak, Target(url), None, said.append).scenario.model,
        "init": lambda said: model_of(url),
        "locust": lambda said: first_model(make_job(folder, Load(user="batch")), ApiAddress.parse(url)),
    }


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)


@fault("server", "another model is loaded than the first of those that the server lists",
       seen="the loaded one is measured, and gets every request; `run` of a scenario with an example's model says so",
       kept="the loaded model")  # fmt: skip
@pytest.mark.parametrize("server", SERVERS)
def test_the_loaded_model_is_measured(server: Callable[[list[str]], dict[str, Any]], tmp_path: Path) -> None:
    posts: list[str] = []
    with listening(double(server([SECOND, EMBEDDER]), posts)) as url:
        said: dict[str, list[str]] = {name: [] for name in choices(url, tmp_path)}
        for name, choose in choices(url, tmp_path).items():
            assert choose(said[name]) == SECOND, name
        assert set(posts) == {SECOND}
        assert said["quick"] == said["capacity"] == [] and len(said["run"]) == 1


@pytest.mark.parametrize("server", SERVERS)
def test_with_none_loaded_it_is_said_which_one_will_be(
    server: Callable[[list[str]], dict[str, Any]], tmp_path: Path, wording: Wording
) -> None:
    posts: list[str] = []
    with listening(double(server([]), posts)) as url:
        for name in ("quick", "capacity"):
            said: list[str] = []
            assert choices(url, tmp_path)[name](said) == FIRST
            (line,) = said
            assert f"'{FIRST}'" in line and "--model NAME" in line
            wording(line)
        with pytest.raises(HarnessError) as caught:  # the scenario has an example's model, and three may take its place
            choices(url, tmp_path)["run"]([])
    assert caught.value.exit_code == 2


@fault("server", "several models are loaded", seen="they are listed, with `--model NAME` (exit code 1)",
       kept="the loaded models; no request was sent")  # fmt: skip
@pytest.mark.parametrize("server", SERVERS)
def test_of_several_loaded_models_none_is_chosen(server: Callable[[list[str]], dict[str, Any]], tmp_path: Path) -> None:
    posts: list[str] = []
    with listening(double(server([SECOND, THIRD]), posts)) as url:
        for name, choose in choices(url, tmp_path).items():
            if name != "run":
                with pytest.raises(HarnessError) as caught:
                    choose([])
                assert caught.value.exit_code == 1 and f"'{SECOND}', '{THIRD}'" in caught.value.what, name
                assert "--model NAME" in caught.value.next_step
        for command in (["quick", url], ["capacity", "--url", url], ["live", "--url", url], ["run", "--url", url]):
            assert called(*command, cwd=tmp_path).code == 1, command
        assert quick_scenario(Target(url), THIRD)["model"] == THIRD
    assert set(posts) == {THIRD}


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/running": {"running": [{"model": 5, "state": "ready"}]}},
        {"/running": [], "/api/ps": {"models": {}}, "/api/v0/models": {"data": [{"id": SECOND}]}},
        {"/api/v1/health": {"status": "ok"}, "/api/ps": "text"},
    ],
)
def test_a_server_that_does_not_report_it_is_measured_with_its_first_model(
    answers: dict[str, Any], wording: Wording
) -> None:
    posts: list[str] = []
    said: list[str] = []
    with listening(double(answers, posts)) as url:
        assert user_scenario("chat", Target(url), say=said.append)["model"] == FIRST
    (line,) = said
    assert f"'{FIRST}'" in line
    wording(line)
    only = {"/v1/models": {"data": [{"id": THIRD, "max_model_len": 9}]}}
    with listening(double(only, posts)) as url:
        assert user_scenario("chat", Target(url), say=said.append)["model"] == THIRD
    assert len(said) == 1, "there is no other"


def test_no_name_with_a_nul_is_advised() -> None:
    """No argument of a command can have one."""
    for names, advice in ((["a\0b"], "the character NUL"), (["abd\0", "abde"], "--model abde"), ([], "--model NAME")):
        listed = {"/v1/models": {"data": [{"id": name} for name in names]}}
        with listening(double(listed, [])) as url, open_session(None) as session:
            with pytest.raises(HarnessError) as caught:
                probe.find_model(url, "abd", session)
            assert advice in str(caught.value.next_step) and "$'" not in str(caught.value.next_step)


def test_a_shipped_scenario_says_which_loaded_model_it_may_put_out(tmp_path: Path) -> None:
    posts: list[str] = []
    answers = {"/v1/models": {"data": [{"id": "Qwen/Qwen3-4B"}, {"id": SECOND}]}, **swapper([SECOND])}
    lines: list[str] = []
    with listening(double(answers, posts)) as url:
        made = prepare_for(SCENARIOS / "soak.yaml", Target(url), None, lines.append)
        assert made.scenario.model == "Qwen/Qwen3-4B" and len(lines) == 1 and f"--model {SECOND}" in lines[0]
        prepare_for(SCENARIOS / "soak.yaml", Target(url), "Qwen/Qwen3-4B", lines.append)
    assert len(lines) == 1 and posts == []
