"""A real Lemonade that already runs on this machine, with llama.cpp behind it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from harness.base.errors import ExitCode, ServerError
from harness.failures.diagnosis import scan_text
from harness.numbers.summarize import read_summary
from harness.questions.tune.search import OUTCOMES
from harness.records.manifest import read_run
from harness.records.records import read_requests
from harness.records.samples import parse_metrics
from harness.serve.compose_file import LemonadeSettings, Serving
from harness.serve.containers import LogFile
from harness.serve.lemonade import LemonadeMonitor, find_canonical_name, find_running_model, get_health, running_options
from harness.serve.lifecycle import attach_to_server, wait_ready
from harness.serve.probe import StartupWatch, make_token_counter
from tests.lemonade.parts import SCENARIO, Lemond, lemond, versions, write
from tests.real.conftest import Say
from tests.real.parts import run_folder
from tests.support.command import PATIENCE_S, going, harness, only_run, until
from tests.support.faults import fault

AGENT = {
    "user": "agent", "endpoint": "messages", "requests": 4, "output": "natural", "output_tokens": 8,
    "agent": {"steps": 2, "tools": 1, "result_tokens": 20, "tool_time": {"mean_s": 0}},
}  # fmt: skip


@pytest.fixture
def loaded(on_llamacpp: Lemond) -> Iterator[Lemond]:
    on_llamacpp.load("user.Gguf")
    yield on_llamacpp
    on_llamacpp.unload()


def monitor(server: Lemond, model: str = "user.Gguf") -> LemonadeMonitor:
    return LemonadeMonitor(server.api, model, None)


def test_one_slot_by_default_is_said_in_a_run(loaded: Lemond, tmp_path: Path, say: Say) -> None:
    done = harness("run", str(write(tmp_path)), "--url", loaded.url, "--runs", "runs", cwd=tmp_path)
    say(done.out + done.err)
    assert (done.code, done.err) == (0, "")
    folder = run_folder(tmp_path / "attached.yaml")
    assert folder is not None
    (cell,) = read_run(folder).cells
    assert (cell.served_by.effective["parallel"], cell.problems) == (1, [])
    version = f"Lemonade {versions()['lemonade-server']}, llamacpp:system b"
    assert (cell.served_by.version or "").startswith(version)
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: ")]
    assert " 4 " in note and " 1 " in note


def test_with_four_slots_there_is_no_note(on_llamacpp: Lemond, tmp_path: Path) -> None:
    on_llamacpp.load("user.Gguf", llamacpp_args="--parallel 4", ctx_size=8192)
    loads = SCENARIO["loads"] | {"agent": AGENT}
    done = harness("run", str(write(tmp_path, loads=loads)), "--url", on_llamacpp.url, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    folder = run_folder(tmp_path / "attached.yaml")
    assert folder is not None
    assert read_run(folder).cells[0].served_by.effective["ctx_per_slot"] == 2048
    turns = [(one.turn, one.requests) for row in read_summary(folder).rows for one in row.turns]
    assert turns == [(1, 2), (2, 2)]  # by Anthropic's API
    agent = [one for one in read_requests(folder / "requests.jsonl") if one.load == "agent"]
    ends = {(one.error, one.finish) for one in agent}  # random weights may end an answer
    assert ends <= {(None, "length"), (None, "stop")}
    # Lemonade's own stream has no token counts, so these requests went to llama-server.
    assert all(one.output_tokens and one.prompt_tokens for one in agent)
    summary = read_summary(folder)
    assert [note.values["server"] for note in summary.notes if note.code == "engine_direct"] == ["Lemonade"]
    assert "the engine has" not in done.out
    on_llamacpp.unload()


def test_a_job_during_the_load_makes_the_run_invalid(loaded: Lemond, tmp_path: Path) -> None:
    """A job holds an exclusive slot: chats that are sent meanwhile wait for it."""
    step = {"id": "a", "op": "chat", "params": {"model": "user.Gguf", "max_tokens": 400, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Hello."}]}}  # fmt: skip
    watch = monitor(loaded)
    state = watch.state()
    assert state.jobs == {}
    body = {"name": "tuning", "definition": {"steps": [step]}}
    created = requests.post(loaded.url + "/api/v1/jobs", json=body, timeout=PATIENCE_S).json()["id"]
    assert loaded.chat("user.Gguf").status_code == 200  # after the job
    (problem,) = watch.problems(state)
    assert (problem.code, problem.values["jobs"], problem.values["job"]) == ("exclusive_job", 1, created)
    assert watch.problems(watch.state()) == []  # the next cell has none


def test_a_model_is_loaded_with_its_saved_options_and_known_by_three_names(on_llamacpp: Lemond) -> None:
    on_llamacpp.unload()
    found = find_running_model(on_llamacpp.url, "Gguf", None)
    assert found is not None and found.model == "Gguf"
    assert found.max_parallel is not None and found.max_parallel >= 32
    assert find_canonical_name(on_llamacpp.api, "Gguf") == "user.Gguf"
    endpoint = attach_to_server(on_llamacpp.url, None)  # the only one that is loaded
    assert endpoint.started.model == "Gguf" and not endpoint.started.simulated
    assert endpoint.started.effective["checkpoint"].endswith("tiny.gguf")
    assert callable(endpoint.metrics_source)
    assert parse_metrics(endpoint.metrics_source())["generated_tokens"] >= 1
    assert endpoint.problems(endpoint.state()) == []
    assert make_token_counter(on_llamacpp.url, "Gguf", None, endpoint.ask_engine)("one two three") > 1
    assert monitor(on_llamacpp, "user.Absent").fetch("/version") == ""  # nothing is loaded under that name
    on_llamacpp.unload()


def test_what_a_change_of_model_costs(on_llamacpp: Lemond, tmp_path: Path, say: Say) -> None:
    """Lemonade keeps one model: each change ends an engine, which takes 2 s at least, and starts another."""
    served = LemonadeSettings(model="user.Gguf", options={"ctx_size": 2048}, others=["Other"])
    serving, log = Serving(template="lemonade", health="/live", lemonade=served), LogFile(tmp_path / "server.log")
    wait_ready(on_llamacpp.url, serving, "user.Gguf", StartupWatch(lambda: None, log, PATIENCE_S, say))
    load = {"user": "batch", "requests": 6, "output_tokens": 4, "model": ["Gguf", "Gguf", "Other", "Other"]}
    scenario = write(tmp_path, loads={"turns": load}, warmup={"requests": 2})
    done = harness("run", str(scenario), "--url", on_llamacpp.url, "--runs", "runs", cwd=tmp_path)
    say(done.out + done.err)
    assert (done.code, done.err) == (0, "")
    folder = run_folder(scenario)
    assert folder is not None
    summary = read_summary(folder)
    (answer,) = summary.answers
    assert (answer.values["changes"], answer.values["waited"]) == (3, 3) and answer.values["cost_s"] > 2
    assert summary.cells[0].server_load.generated_tokens == 4 * 8, "counted by Lemonade, whichever engine made them"
    on_llamacpp.unload()


def test_a_model_that_lemonade_does_not_have(on_llamacpp: Lemond) -> None:
    with pytest.raises(ServerError, match="Model 'Ggf' was not found") as caught:
        attach_to_server(on_llamacpp.url, "Ggf")
    assert "'Gguf'" in caught.value.next_step


def test_a_model_that_does_not_load_refers_to_the_log(on_llamacpp: Lemond) -> None:
    with pytest.raises(ServerError, match="could not load 'Broken': .*llama-server failed to start") as caught:
        attach_to_server(on_llamacpp.url, "Broken")
    assert "journalctl -u lemond | harness explain -" in caught.value.next_step


def test_a_second_model_next_to_a_pinned_one_is_refused(on_llamacpp: Lemond) -> None:
    on_llamacpp.load("user.Gguf", pinned=True)
    with pytest.raises(ServerError, match="pinned") as caught:
        attach_to_server(on_llamacpp.url, "Other")
    assert "unload or unpin the other model" in caught.value.next_step
    on_llamacpp.unload()


def test_a_backend_that_died_between_requests(on_llamacpp: Lemond) -> None:
    before = on_llamacpp.load("user.Gguf", llamacpp_args="--parallel 3", ctx_size=3072, pinned=True)
    watch = monitor(on_llamacpp)
    parts = [watch.state(), watch.state()]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: watch.state().lost)
    assert on_llamacpp.chat("user.Gguf").status_code == 200
    after = on_llamacpp.running("user.Gguf")
    assert [[problem.code for problem in watch.problems(part)] for part in parts] == [["backend_restarted"]] * 2
    assert after.pid != before.pid
    on_llamacpp.unload()


def test_a_backend_that_is_killed_during_a_stream(on_llamacpp: Lemond) -> None:
    running = on_llamacpp.load("user.Gguf", ctx_size=4096)
    watch = monitor(on_llamacpp)
    state = watch.state()
    assert running.pid is not None
    body = {"model": "user.Gguf", "stream": True, "max_tokens": 3000, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Hello."}]}  # fmt: skip
    with requests.post(on_llamacpp.url + "/v1/chat/completions", json=body, stream=True, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(running.pid, signal.SIGKILL)
        rest = b"\n".join(lines)
    assert answer.status_code == 200 and b"backend_watchdog_reset" in rest and b"data: [DONE]" not in rest
    # Which of them depends on how far Lemonade has come with the next backend.
    codes = [problem.code for problem in watch.problems(state)]
    assert codes in (["backend_lost"], ["backend_reset"], ["backend_restarted"])
    # The engine died by itself: the watchdog has only noticed it.
    found = [finding.id for finding in scan_text(on_llamacpp.log.read_text()).findings]
    assert "lemonade.backend_died" in found and "lemonade.watchdog" not in found
    on_llamacpp.unload()


def test_of_several_failed_loads_the_newest_counts(on_llamacpp: Lemond) -> None:
    start = on_llamacpp.log.stat().st_size
    for options, rule in (({"llamacpp_args": "--no-such-flag"}, "cli.unknown_flag"), ({"ctx_size": 1024}, None)):
        body = {"model_name": "user.Gguf", **options}
        answer = requests.post(on_llamacpp.url + "/api/v1/load", json=body, timeout=PATIENCE_S)
        assert (answer.status_code == 200) == (rule is None)
        scanned = scan_text(on_llamacpp.log.read_bytes()[start:].decode())
        cause = scanned.cause()
        assert (None if cause is None else cause.id) == rule
    on_llamacpp.unload()


def test_a_wrong_key_is_refused_and_named(tmp_path: Path) -> None:
    with lemond(tmp_path, api_key="sesame-of-the-test") as server:
        done = harness("run", str(write(tmp_path)), "--url", server.url, "--runs", "runs", cwd=tmp_path)
    assert done.code == ExitCode.SERVER
    assert "401" in done.err and "sesame-of-the-test" not in done.err + done.out


def test_how_far_the_context_of_an_agent_grows_and_which_ctx_size_it_needs(
    on_llamacpp: Lemond, tmp_path: Path, say: Say
) -> None:
    on_llamacpp.load("user.Gguf", ctx_size=4096)
    path = write(tmp_path, loads={"agent": AGENT})
    done = harness("run", str(path), "--url", on_llamacpp.url, "--runs", "runs", cwd=tmp_path)
    say(done.out)
    folder = run_folder(path)
    assert done.code == 0 and folder is not None
    (answer,) = [one for one in read_summary(folder).answers if one.code == "turns"]
    assert 20 < answer.values["first_tokens"] < answer.values["last_tokens"] < 4096
    deep = write(tmp_path, loads={"agent": AGENT}, prompts={"tokens": 20, "system_tokens": 6000})
    refused = harness("check", str(deep), "--url", on_llamacpp.url, cwd=tmp_path)
    assert refused.code == 2 and "set ctx_size to 6," in refused.err
    on_llamacpp.unload()


def test_check_loads_no_model(on_llamacpp: Lemond, tmp_path: Path) -> None:
    done = harness("check", str(write(tmp_path)), "--url", on_llamacpp.url, cwd=tmp_path)
    health = get_health(on_llamacpp.api)
    assert done.code == 0 and health is not None and health.loaded == []


@fault("harness", "kill -9 of `harness tune --url`", seen="harness clean --runs", code=0,
       kept="all records; `harness clean` puts the settings of the server back")  # fmt: skip
def test_the_settings_of_a_killed_search_are_put_back(loaded: Lemond, tmp_path: Path, say: Say) -> None:
    own = loaded.running("user.Gguf").recipe_options
    path = write(tmp_path, loads={"four": SCENARIO["loads"]["four"] | {"requests": 200}})
    with going("tune", str(path), "--url", loaded.url, "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: running_now(loaded) not in (None, own["llamacpp_args"]))
        command.process.kill()
    run = only_run(tmp_path / "runs")
    report = harness("report", run.name, "--runs", "runs", cwd=tmp_path)
    assert loaded.url in report.out and "harness clean --runs" in report.out
    done = harness("clean", "--runs", "runs", cwd=tmp_path, env={"DOCKER_HOST": f"unix://{tmp_path}/none"})
    say(done.out)
    assert done.code == 0 and OUTCOMES["restored"] in done.out
    assert loaded.running("user.Gguf").recipe_options == own


def running_now(server: Lemond) -> str | None:
    health = get_health(server.api)
    found = None if health is None else health.find("user.Gguf")
    return None if found is None else str(found.recipe_options.get("llamacpp_args"))


@pytest.mark.nightly  # minutes; on a busy machine the finding may be the load generator
def test_the_advice_of_a_run_is_tried_and_the_server_is_as_it_was(
    on_llamacpp: Lemond, tmp_path: Path, say: Say
) -> None:
    """One slot serves eight requests one after the other; what more slots bring depends on the cores of the machine."""
    on_llamacpp.load("user.Gguf", llamacpp_args="--parallel 1", ctx_size=2048)
    own = running_options(on_llamacpp.url, "Gguf", None)
    load = {"user": "batch", "batch_size": 8, "requests": 40, "output_tokens": 256}
    path = write(tmp_path, loads={"eight": load})
    done = harness("run", str(path), "--url", on_llamacpp.url, "--runs", "runs", cwd=tmp_path)
    say(done.out + done.err)
    run = only_run(tmp_path / "runs").name
    options = ["--finding", "queue_with_room", "--runs", "runs", "--json", "--budget", "2min"]
    tuned = harness("tune", "last", *options, cwd=tmp_path)
    say(tuned.out + tuned.err)
    answer = json.loads(tuned.out)
    assert (answer["of_run"], answer["finding"]) == (run, "queue_with_room")
    tried = [trial["settings"]["sequences"] for trial in answer["trials"] if trial.get("settings")]
    assert set(tried) == {answer["advised"]["sequences"]} and tried[0] > 1
    assert running_options(on_llamacpp.url, "Gguf", None) == own
    kept = json.loads(harness("tune", run, "--keep", *options, cwd=tmp_path).out)
    assert (running_options(on_llamacpp.url, "Gguf", None) != own) is (kept["verdict"] == "set")
    on_llamacpp.unload()
