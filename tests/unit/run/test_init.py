"""harness init: a scenario from three answers; and what other programs use: --json, COLUMNS, completion."""

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.run import draft
from harness.run.experiment import Target, prepare
from harness.scenario.file import load_scenario
from harness.serve import probe
from tests.support.chat_double import KEY, double
from tests.support.command import HARNESS, PATIENCE_S, called, harness
from tests.support.http_double import listening
from tests.support.wording import Wording


@pytest.mark.parametrize("question", draft.QUESTIONS)
def test_each_draft_is_a_valid_scenario(tmp_path: Path, question: str) -> None:
    names = list(draft.draftable_servers())
    several = draft.server_count(question)
    for number in range(len(names)):
        servers = (names[number:] + names)[:several]
        if sum(draft.draftable_servers()[name].named_by_model for name in servers) > 1:
            continue
        path = tmp_path / f"{number}.yaml"
        path.write_text(draft.draft(question, servers, [], "radeon"), encoding="utf-8")
        scenario = prepare(path).scenario
        assert list(scenario.servers) == servers
        assert scenario.compare == [], "servers are compared under each load anyway"


def test_an_engine_is_compared_with_itself_by_its_images(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(draft.draft("compare", ["llamacpp", "llamacpp"], ["a/b-GGUF:Q8_0"], "radeon"), encoding="utf-8")
    scenario = prepare(path).scenario
    variables = {name: server.variables for name, server in scenario.servers.items()}
    assert {name: one["image"].split(":server-")[1].split("-")[0] for name, one in variables.items()} == {
        "rocm": "rocm", "vulkan": "vulkan",
    }  # fmt: skip
    assert [one["hf_repo"] for one in variables.values()] == ["a/b-GGUF:Q8_0"] * 2
    assert scenario.model == "b-GGUF"
    path.write_text(draft.draft("compare", ["vllm-rocm", "vllm-rocm"], [], "radeon"), encoding="utf-8")
    old, new = prepare(path).scenario.servers.items()
    assert (old[0], new[0], old[1]) == ("old", "new", new[1]) and "image" in old[1].variables


@pytest.mark.parametrize("name", list(draft.draftable_servers()))
def test_every_server_may_be_given_twice(tmp_path: Path, name: str, wording: Wording) -> None:
    """Without an image to choose, the second one is equal until someone changes it."""
    path = tmp_path / "two.yaml"
    path.write_text(draft.draft("compare", [name, name], [], "radeon"), encoding="utf-8")
    first, second = prepare(path).scenario.servers.values()
    assert first.template == second.template == name
    if not draft.images_to_compare(name):
        assert first == second
    with pytest.raises(HarnessError) as caught:
        draft.draft("compare", [name], [], "radeon")
    assert "2" in caught.value.what
    wording(caught.value)


@pytest.mark.parametrize("question", ["batching", "agents", "classifications"])
def test_a_draft_for_a_server_that_runs(tmp_path: Path, question: str) -> None:
    path = tmp_path / "mine.yaml"
    done = called(
        "init", path.name, "--question", question, "--url", "http://127.0.0.1:9", "--model", "m", cwd=tmp_path
    )
    assert (done.code, done.err) == (0, "")
    assert f"harness check {path.name} --url http://127.0.0.1:9\n" in done.out
    assert prepare(path, Target("http://127.0.0.1:9")).scenario.model == "m"


def test_a_model_that_the_server_lacks_is_refused_with_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    with listening(double(["a-model", "b-model"])) as url:
        done = called("init", "mine.yaml", "--url", url, "--model", "c-model", cwd=tmp_path)
        assert (done.code, list(tmp_path.iterdir())) == (2, [])
        assert "'c-model'" in done.err and "'a-model', 'b-model'" in done.err
        two = called("init", "mine.yaml", "--url", url, "--model", "a-model", "--model", "b-model", cwd=tmp_path)
        assert (two.code, list(tmp_path.iterdir())) == (1, []) and two.err.startswith("error: --model: ")
        assert called("init", "mine.yaml", "--url", url, "--model", "b-model", cwd=tmp_path).code == 0
    assert prepare(tmp_path / "mine.yaml", Target(url)).scenario.model == "b-model"


def test_a_server_is_asked_with_its_key_and_one_that_does_not_tell_its_models_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    with listening(double(["a-model"], key=KEY)) as url:
        early = called("init", "early.yaml", "--url", url, "--model", "c-model", cwd=tmp_path)
        assert early.code == 0, "as when it is down"
        given = ("--url", url, "--api-key-env", "KEY_OF_TEST")
        monkeypatch.setenv("KEY_OF_TEST", KEY)
        assert called("init", "mine.yaml", *given, "--model", "c-model", cwd=tmp_path).code == 2
        assert called("init", "mine.yaml", *given, cwd=tmp_path).code == 0
    assert "model: a-model" in (tmp_path / "mine.yaml").read_text()


@pytest.mark.parametrize(
    ("target", "kind"), [(None, "none"), ("gfx1151", "strix-halo"), ("gfx1201", "radeon"), ("gfx942", "instinct")]
)
def test_the_machine_is_known_by_its_gpu(target: str | None, kind: str) -> None:
    gpus: list[dict[str, Any]] = [] if target is None else [{"target": None}, {"target": target}]
    assert draft.machine_kind(gpus) == kind


def test_without_a_terminal_all_answers_are_options(tmp_path: Path) -> None:
    given = ("init", "mine.yaml", "--question", "compare", "--server", "vllm-rocm", "--server", "llamacpp")
    done = harness(*given, "--model", "Qwen/Qwen3-4B", "--machine", "strix-halo", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "  harness check mine.yaml\n  harness run mine.yaml\n" in done.out
    assert harness("check", "mine.yaml", cwd=tmp_path).code == 0
    written = (tmp_path / "mine.yaml").read_text()
    assert "model_path: Qwen/Qwen3-4B" in written
    again = harness(*given, cwd=tmp_path)
    assert again.code == 1 and again.err.startswith("error: mine.yaml: ")
    assert (tmp_path / "mine.yaml").read_text() == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--question is missing"),
        (("--question", "batchin"), "--question: 'batchin' is not known; did you mean 'batching'?"),
        (("--question", "compare", "--server", "vllm-rocm"), "takes 2 servers, got vllm-rocm"),
        (("--question", "compare", "--server", "ollama", "--server", "simulated"), "by a name of their own"),
        (("--question", "compare", "--url", "http://127.0.0.1:9", "--model", "m"), "takes two servers"),
        (("--question", "agents", "--server", "vlm-rocm"), "did you mean 'vllm-rocm'?"),
        (("--question", "agents", "--server", "vllm-rocm", "--model", "a", "--model", "b"), "2 models for 1 server"),
    ],
)
def test_wrong_answers_write_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = harness("init", *arguments, cwd=tmp_path)
    assert done.code == 1
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


def test_at_a_terminal_it_asks(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [HARNESS, "init", "mine.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=subprocess.PIPE, text=True) as child:
        os.write(ours, b"nonsense\nclassifications\nsimulated\n")
        out, _ = child.communicate(timeout=PATIENCE_S)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == 0
    assert "'nonsense'" in out
    assert "harness plan RUN --items 500000" in out
    assert list(prepare(tmp_path / "mine.yaml").scenario.servers) == ["simulated"]


def test_lists_and_plans_as_json(tmp_path: Path) -> None:
    scenarios = json.loads(harness("list", "scenarios", "--json", cwd=tmp_path).out)
    assert "first-look" in [scenario["name"] for scenario in scenarios]
    plan = json.loads(harness("check", "first-look", "--json", cwd=tmp_path).out)
    assert (plan["repeats"], len(plan["order"]), plan["server_starts"]) == (3, 18, 6)
    assert [row["baseline"] for row in plan["rows"]] == [True, *[False] * 5]
    assert json.loads(harness("list", "runs", "--json", cwd=tmp_path).out) == []
    assert json.loads(harness("list", "--json", cwd=tmp_path).out) == {"scenarios": scenarios, "runs": []}
    (tmp_path / "runs" / "torn").mkdir(parents=True)
    (tmp_path / "runs" / "torn" / "run.json").write_text("{")
    (torn,) = json.loads(harness("list", "runs", "--json", cwd=tmp_path).out)
    assert (torn["run"], torn["status"]) == ("torn", None)
    assert torn["error"].startswith("run.json")


def test_a_pipe_is_as_wide_as_columns_says(tmp_path: Path) -> None:
    for columns, width in (("60", 60), ("x", 160)):
        out = harness("check", "first-look", cwd=tmp_path, env={"COLUMNS": columns}).out
        assert max(map(len, out.splitlines()[1:])) <= width
        assert (max(map(len, out.splitlines()[1:])) > 60) == (width > 60)


def test_the_shell_completes_commands_scenarios_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "20261124-here").mkdir(parents=True)
    (tmp_path / "runs" / "20261124-here" / "run.json").touch()

    def completed(words: str, place: int) -> list[str]:
        shell = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        return harness(cwd=tmp_path, env=shell).out.split()

    assert sorted(completed("harness re", 1)) == ["report", "results"]  # a shell sorts them
    assert completed("harness run first-l", 2) == ["first-look"]
    assert completed("harness report 2026", 2) == ["20261124-here"]
    assert harness("run", "-h", cwd=tmp_path) == harness("run", "--help", cwd=tmp_path)


def test_a_scenario_from_options_alone(tmp_path: Path) -> None:
    """Prompts, checks and the key are in it, with the paths as the scenario needs them."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 2 + 2?"}\n{"prompt": "Name a colour."}\n')
    options = ["--url", "http://127.0.0.1:9", "--model", "m", "--prompts", "prompts.jsonl", "--api-key-env", "MY_KEY"]
    checks = ["--check", "ttft_p95 <= 2s", "--check", "error_rate == 0"]
    done = harness("init", "mine/s.yaml", *options, *checks, cwd=tmp_path, env={"MY_KEY": "abcdefgh"})
    assert (done.code, done.err) == (0, "")
    scenario = load_scenario(tmp_path / "mine" / "s.yaml")
    assert (scenario.prompts.kind, scenario.prompts.file) == ("file", "../prompts.jsonl")
    assert (scenario.checks, scenario.api_key_env) == (["ttft_p95 <= 2s", "error_rate == 0"], "MY_KEY")
    assert {load.output for load in scenario.loads.values()} == {"natural"}
    assert "abcdefgh" not in done.out
