"""Lemonade brought up: against the double of it, where no real one can be made to do the same (tests/lemonade)."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from msgspec.structs import replace

from harness.base.errors import ServerError, StartError
from harness.base.process import PID_START, owner_labels
from harness.questions.tune.record import TuneQuestion, TuneTrials, read_tune, write_tune
from harness.questions.tune.search import OUTCOMES, put_back
from harness.records.changed_server import ChangedServer, read_changed, write_changed
from harness.records.manifest import ServedBy
from harness.scenario import Server
from harness.serve.compose_file import LemonadeSettings, Serving
from harness.serve.containers import LogFile
from harness.serve.lemonade import (
    Api,
    LemonadeState,
    RunningModel,
    find_changes,
    get_health,
    load_with_options,
    running_options,
)
from harness.serve.lifecycle import wait_ready
from harness.serve.probe import StartupWatch
from tests.support.command import PATIENCE_S, called
from tests.support.doubles.lemonade.spawn import Spawned, spawned
from tests.support.made_runs import scenario, write_made_run
from tests.support.wording import Wording

MINE = {
    "Tiny": {"checkpoint": "/models/tiny", "recipe": "vllm"},
    "Gguf": {"checkpoint": "/m.gguf", "recipe": "llamacpp"},
}
BUILT_IN = "Qwen3.5-0.8B-FP16-vLLM"


NEW_CODES = {"version": "2026.45.3"}  # its HTTP server was rewritten: other status codes


@contextmanager
def lemonade(tmp_path: Path, **given: Any) -> Iterator[Spawned]:
    behaviour: dict[str, Any] = {"user_models": MINE, "installed": True, **given}
    with spawned(tmp_path, **behaviour) as server:
        yield server


def bring_up(server: Spawned, say: Callable[[str], None] = lambda line: None, **asked: Any) -> ServedBy:
    def dead() -> ServerError | None:
        return ServerError("it died") if server.process.poll() is not None else None

    timeout_s = float(asked.pop("timeout_s", 30.0))
    key = asked.pop("api_key", None)
    managed = LemonadeSettings(**({"model": "user.Tiny", "options": {"ctx_size": 4096}} | asked))
    serving = Serving(template="lemonade", port=1, health="/live", lemonade=managed)
    waiting = StartupWatch(dead, LogFile(server.log), timeout_s, say)
    return wait_ready(server.url, serving, managed.model, waiting, api_key=key, key_name="K")


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
    assert ready.max_parallel == 32
    words = running["launch_command"]
    assert words[words.index("--served-model-name") + 1] == BUILT_IN
    assert words[-2:] == ["--max-num-seqs", "8"] and "--enforce-eager" in words
    assert running["pinned"] is True and running["recipe_options"] == {**options, "pinned": True}
    assert any(line.startswith("install after ") for line in told)


@pytest.mark.parametrize("version", ["2026.39.1", "2026.45.3"])
def test_the_same_facts_with_old_and_with_new_status_codes(tmp_path: Path, version: str, wording: Wording) -> None:
    is_new = version == "2026.45.3"
    with lemonade(tmp_path, version=version) as server:
        api = server.url + "/api/v1"
        wrong = [
            requests.post(api + "/health", json={}, timeout=PATIENCE_S),
            requests.get(api + "/load", timeout=PATIENCE_S),
            requests.post(api + "/chat/completions", json={"messages": []}, timeout=PATIENCE_S),
            requests.post(api + "/load", json={"model_name": "user.Tiny", "ctx_size": "many"}, timeout=PATIENCE_S),
        ]
        assert [answer.status_code for answer in wrong] == ([405, 405, 400, 400] if is_new else [404, 405, 400, 500])
        ready = bring_up(server, options={"ctx_size": 4096, "vllm_args": "--max-num-seqs 8"})
        assert [phase.name for phase in ready.phases] == ["port open", "health", "load", "first answer"]
        assert (ready.model, loaded_model(server)["recipe_options"]["ctx_size"]) == ("user.Tiny", 4096)
        assert running_options(server.url, None, None) == loaded_model(server)["recipe_options"]
        load_with_options(server.url, "user.Tiny", {"ctx_size": 2048}, None)
        assert loaded_model(server)["recipe_options"]["ctx_size"] == 2048
        with pytest.raises(ServerError) as caught:
            bring_up(server, model="user.Absent")
    assert "'user.Absent'" in str(caught.value) and "NoSuch" not in str(caught.value)
    wording(caught.value)


def test_before_v11_8_the_name_is_asked_for(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "lemonade"
    cache.mkdir(parents=True)
    (cache / "user_models.json").write_text('{"Tiny": {"checkpoint": "/models/tiny", "recipe": "vllm"}}')
    with lemonade(tmp_path, config_dir=False) as server:
        ready = bring_up(server, model="Tiny")
        assert (ready.model, loaded(server).command) == ("user.Tiny", [])


@pytest.mark.parametrize(
    ("behaviour", "defaults", "message", "advice"),
    [
        ({"kernel_fix": False}, {}, "does not install vllm:rocm: ", "update to Linux 6.18.4"),  # in a 200
        ({"gpu": False}, {}, "Model 'user.Tiny' is not available on this system. Unsupported GPU", ""),
        ({"gpu": False, **NEW_CODES}, {}, "Model 'user.Tiny' is not available on this system. Unsupported GPU", ""),
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


def test_other_models_of_loads_are_downloaded_and_may_evict_the_first(tmp_path: Path) -> None:
    with lemonade(tmp_path) as server:
        ready = bring_up(server, others=[BUILT_IN])
        assert [phase.name for phase in ready.phases] == ["port open", "health", "download", "load", "first answer"]
        assert loaded_model(server)["pinned"] is False


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
    assert "500" in str(caught.value) and "'user.Tiny'" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "now", "ran"),
    [
        (None, None, []),  # v11 has no jobs
        ({}, {}, []),
        ({"a": "completed"}, {"a": "completed"}, []),
        ({"a": "running"}, {"a": "running"}, ["a"]),
        ({"a": "running"}, {"a": "completed"}, ["a"]),
        ({}, {"a": "completed", "b": "failed"}, ["a", "b"]),
        ({"a": "queued"}, {"a": "queued", "b": "paused"}, []),
        ({"a": "paused"}, {"a": "completed"}, ["a"]),
        (None, {"a": "completed", "b": "running"}, ["b"]),  # the first answer was missed
    ],
)
def test_a_job_delays_the_requests_of_others(
    before: dict[str, str] | None, now: dict[str, str] | None, ran: list[str]
) -> None:
    model = RunningModel(name="A", pid=1)
    found = find_changes(LemonadeState(model, jobs=before), LemonadeState(model, jobs=now))
    expected = [("exclusive_job", {"server": "Lemonade", "jobs": len(ran), "job": ran[0]})] if ran else []
    assert [(reason.code, reason.values) for reason in found] == expected


@pytest.mark.parametrize(
    ("before", "now", "codes"),
    [
        (LemonadeState(None, True), LemonadeState(None, True), []),  # nothing was ever loaded
        (LemonadeState(RunningModel(pid=1)), LemonadeState(RunningModel(pid=1), True), ["backend_lost"]),
        (LemonadeState(RunningModel(pid=1), True), LemonadeState(RunningModel(pid=2)), ["backend_restarted"]),
        (LemonadeState(None, True), LemonadeState(RunningModel(pid=2)), []),
        (LemonadeState(RunningModel(pid=1)), LemonadeState(RunningModel(pid=1, watchdog_reset=True)),
         ["backend_reset"]),
        (LemonadeState(RunningModel(pid=1, watchdog_reset=True)),
         LemonadeState(RunningModel(pid=1, watchdog_reset=True)), []),  # in an earlier cell
    ],
)  # fmt: skip
def test_what_changed_between_two_moments(before: LemonadeState, now: LemonadeState, codes: list[str]) -> None:
    assert [reason.code for reason in find_changes(before, now)] == codes


def test_a_running_model_is_loaded_again_with_other_options_and_its_files_stay(
    tmp_path: Path, wording: Wording
) -> None:
    saved = {"user.Tiny": {"ctx_size": 2048, "vllm_args": "--max-num-seqs 1"}}
    with lemonade(tmp_path, recipe_options=saved) as server:
        assert running_options(server.url, "user.Tiny", None) == saved["user.Tiny"]
        first = loaded_model(server)["pid"]
        changed = {"ctx_size": 2048, "vllm_args": "--max-num-seqs 4"}
        load_with_options(server.url, "user.Tiny", changed, None)
        assert running_options(server.url, "user.Tiny", None) == changed and loaded_model(server)["pid"] != first
        with pytest.raises(StartError) as refused:
            load_with_options(server.url, "user.Tiny", {"vllm_args": "--gpu-memory-utilization 0.92"}, None)
        load_with_options(server.url, "user.Tiny", saved["user.Tiny"], None)
        assert running_options(server.url, "user.Tiny", None) == saved["user.Tiny"]
    wording(refused.value)
    kept = tmp_path / ".config" / "lemonade" / "recipe_options.json"
    assert json.loads(kept.read_text()) == saved


OWN = {"ctx_size": 2048, "vllm_args": "--max-num-seqs 1"}
TRIED = {"ctx_size": 2048, "vllm_args": "--max-num-seqs 4"}


def killed_search(folder: Path, url: str, owner: dict[str, str]) -> None:
    """A run directory as a killed `harness tune --url` leaves it."""
    servers = {
        name: Server(template="running", variables=options) for name, options in (("default", OWN), ("try-2", TRIED))
    }
    write_made_run(folder, made_of=replace(scenario(), servers=servers), status="running", owner=owner)
    write_tune(folder, TuneQuestion(run=folder.name, budget_s=60), TuneTrials())
    write_changed(folder, ChangedServer(url=url, model="user.Tiny", options=OWN, owner=owner))


@pytest.mark.parametrize(
    ("now", "after", "code"),
    [(TRIED, OWN, "restored"), (OWN, OWN, "unchanged"), ({"ctx_size": 1024, "vllm_args": ""}, None, "other")],
)
def test_what_a_killed_search_left_is_put_back_with_one_command(
    tmp_path: Path, now: dict[str, Any], after: dict[str, Any] | None, code: str
) -> None:
    gone = owner_labels() | {PID_START: "1"}
    runs, nothing = tmp_path / "runs", {"DOCKER_HOST": f"unix://{tmp_path / 'none'}"}
    with lemonade(tmp_path) as server:
        load_with_options(server.url, "user.Tiny", now, None)
        killed_search(runs / "search", server.url, gone)
        killed_search(runs / "lives", server.url, owner_labels())
        report = called("report", "search", "--runs", str(runs), cwd=tmp_path)
        page = " ".join(report.out.split())
        assert server.url in page and "ctx_size 2048, vllm_args --max-num-seqs 1" in page
        assert f"harness clean --runs {runs}" in page
        done = called("clean", "--runs", str(runs), cwd=tmp_path, env=nothing)
        assert running_options(server.url, "user.Tiny", None) == (after or now)
        again = called("clean", "--runs", str(runs), cwd=tmp_path, env=nothing)
    assert done.code == 0 and f"{server.url}: user.Tiny: {OUTCOMES[code]} (search)" in done.out
    assert again.code == 2 and server.url not in again.out, "the second search lives"
    search = read_tune(runs / "search")
    assert search is not None and search.changed is None


def test_a_server_that_does_not_answer_keeps_its_entry(tmp_path: Path) -> None:
    gone = owner_labels() | {PID_START: "1"}
    killed_search(tmp_path / "search", "http://127.0.0.1:9", gone)
    (left,) = put_back(tmp_path)
    assert not left.is_done and "http://127.0.0.1:9" in left.text and str(tmp_path / "search") in left.text
    assert read_changed(tmp_path / "search") is not None
