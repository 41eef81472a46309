"""A running server gets the given scenario, or one that is made for it, with its model."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError, ServerError
from harness.base.files import SCENARIOS
from harness.questions.quick.search import quick_scenario
from harness.run.experiment import Target, prepare
from harness.run.running_server import LIMITS, USER_LOADS, prepare_for, scenario_path, user_scenario
from harness.serve import probe
from tests.support.chat_double import KEY, double
from tests.support.command import write
from tests.support.http_double import listening
from tests.support.wording import Wording


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RETRY_EVERY_S", 0.01)


def test_the_scenarios_are_valid() -> None:
    with ExitStack() as stack:
        target = Target(stack.enter_context(listening(double())))
        made = {"quick": lambda target: quick_scenario(target)}
        made |= {user: lambda target, user=user: user_scenario(user, target) for user in USER_LOADS}  # type: ignore[misc]
        for name, make in made.items():
            path = stack.enter_context(scenario_path(None, target, name, make))
            scenario = prepare(path, target).scenario
            assert scenario.model == "Qwen3-8B"
            assert scenario.checks == ([] if name == "quick" else LIMITS)


def test_one_server_of_several_that_are_compared_is_not_their_answer(tmp_path: Path, wording: Wording) -> None:
    """The question of the report is about the server that is measured; who starts the run reads what is missing."""
    said: list[str] = []
    with listening(double(["Qwen3-8B-GGUF"])) as url:
        experiment = prepare_for(SCENARIOS / "lemonade-context.yaml", Target(url), None, said.append)
    assert experiment.one_of == ["ctx-8k", "ctx-32k"]
    wording(experiment.scenario.question)
    assert any("harness compare RUN RUN" in line for line in said)
    for name in ("model-switching", "soak", "batching-vllm"):  # each server has an answer of its own
        shipped = prepare(SCENARIOS / f"{name}.yaml")
        attached = prepare(SCENARIOS / f"{name}.yaml", Target("http://127.0.0.1:9"))
        assert (attached.one_of, attached.scenario.question) == ([], shipped.scenario.question), name


def test_without_a_scenario_an_option_names_the_key(wording: Wording) -> None:
    with listening(double(key=KEY)) as url:
        for make in (quick_scenario, lambda target: user_scenario("chat", target)):
            with pytest.raises(ServerError) as caught:
                make(Target(url))
            wording(caught.value)
            assert "--api-key-env" in caught.value.next_step and "api_key_env" not in caught.value.next_step


def test_a_shipped_scenario_is_measured_with_the_only_model_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    lines: list[str] = []
    soak, own = SCENARIOS / "soak.yaml", write(tmp_path)
    with listening(double(["bge-m3", "the-only"])) as url:
        made = prepare_for(soak, Target(url), None, lines.append, 2)
        assert (made.scenario.model, made.scenario.repeats) == ("the-only", 2)
        (line,) = lines
        assert "the-only" in line and "Qwen/Qwen3-4B" in line
        wording(line)
        # A model that was asked for stays, and loads that name models, and scenarios of the user.
        assert prepare_for(soak, Target(url), "mine", lines.append).scenario.model == "mine"
        switching = prepare_for(SCENARIOS / "model-switching.yaml", Target(url), None, lines.append)
        assert switching.scenario == prepare(SCENARIOS / "model-switching.yaml", Target(url)).scenario
        assert prepare_for(own, Target(url), None, lines.append).scenario == prepare(own, Target(url)).scenario
    with listening(double()) as url, pytest.raises(ServerError) as caught:
        prepare_for(soak, Target(url), None, lines.append)
    wording(caught.value)
    assert "`--model Qwen3-8B`" in caught.value.next_step
    with listening(double(["Qwen/Qwen3-4B", "b"])) as url:
        assert prepare_for(soak, Target(url), None, lines.append).scenario.model == "Qwen/Qwen3-4B"
    assert len(lines) == 1


@pytest.mark.parametrize("make", [quick_scenario, lambda *given: user_scenario("chat", *given)])
def test_a_given_model_that_the_server_lacks_is_refused_before_anything_is_sent(
    make: Any, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    asked: list[str] = []
    with listening(double(asked=asked)) as url, pytest.raises(ServerError) as caught:
        make(Target(url), "absent")
    assert "'absent'" in str(caught.value)
    wording(caught.value)
    assert caught.value.exit_code == 2 and asked == []


def test_a_scenario_or_a_server_is_needed() -> None:
    with pytest.raises(HarnessError, match="neither"), scenario_path(None, None, "x", lambda target: {}):
        pass
