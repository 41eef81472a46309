"""A real Lemonade in a container, started through the template, with Debian's llama.cpp behind it."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from harness.base.errors import ExitCode, ServerError
from harness.base.process import free_port
from harness.failures.diagnosis import explain, explain_message, scan_text
from harness.scenario import Load, Scenario, Server
from harness.serve.docker_engine import remove_leftovers
from harness.serve.document import server_document
from harness.serve.lemonade import list_orphans
from harness.serve.lifecycle import Endpoint, serve
from harness.serve.probe import make_token_counter
from tests.docker.conftest import checked_each_second, remains
from tests.lemonade.parts import container_variables, versions
from tests.real.conftest import Say
from tests.real.parts import left_behind, run, write_scenario
from tests.support.command import PATIENCE_S, until

Variables = Callable[..., dict[str, Any]]


@pytest.fixture
def variables(client: docker.DockerClient, tmp_path: Path) -> Iterator[Variables]:
    """Variables of the template, with a volume of their own that is removed afterwards."""
    name = f"{tmp_path.name}-lemonade"
    yield lambda **more: container_variables(lemonade_cache=name, **more)
    left = remains(client, tmp_path.name)
    remove_leftovers(client, tmp_path.name, everything=True)
    with contextlib.suppress(docker.errors.NotFound):
        client.volumes.get(name).remove()
    assert left == []


def scenario(variables: dict[str, Any], **more: Any) -> Scenario:
    server = Server(template="lemonade", variables=variables, startup_timeout_s=PATIENCE_S)
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model="Tiny", servers={"s": server}, loads={"l": load}, **more)


def served(given: Scenario, tmp_path: Path) -> Any:
    return serve(given, "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path)


def output(endpoint: Endpoint, command: str) -> str:
    assert endpoint.container is not None
    code, text = endpoint.container.exec_run(["sh", "-c", command])
    assert code == 0, text
    assert isinstance(text, bytes)
    return text.decode().strip()


def config_of(endpoint: Endpoint) -> Any:
    return requests.get(endpoint.url + "/internal/config", timeout=PATIENCE_S).json()


def test_what_runs_and_with_which_settings(variables: Variables, tmp_path: Path) -> None:
    with served(scenario(variables(global_timeout=120)), tmp_path) as endpoint:
        found, version = endpoint.started, versions()["lemonade-server"]
        assert (found.model, found.simulated, found.notes) == ("user.Tiny", False, [])
        assert found.version is not None and found.version.startswith(f"Lemonade {version}, llamacpp:system b")
        assert found.startup is not None
        assert (found.startup.engine, found.startup.max_model_len) == ("llama.cpp", 2048)
        assert (found.effective["parallel"], found.effective["ctx_per_slot"]) == (4, 2048)
        assert found.effective["recipe"] == "llamacpp"
        assert found.effective["launch_command"][-4:] == ["--parallel", "4", "--threads", "1"]
        assert [phase.name for phase in found.phases][-4:] == ["port open", "health", "load", "first answer"]
        assert output(endpoint, "id -u; stat -c %u /opt/lemonade/.cache/lemonade") == "10001\n10001"
        saved = json.loads(output(endpoint, "cat /opt/lemonade/.cache/lemonade/recipe_options.json"))
        assert saved["user.Tiny"]["llamacpp_args"] == "--parallel 4 --threads 1"
        config = config_of(endpoint)
        pinned = ("auto_check_model_updates", "auto_evict", "auto_update_models", "broadcast")
        assert [config[name] for name in pinned] == [False] * 4
        assert (config["global_timeout"], config["ctx_size"], config["max_loaded_models"]) == (120, 8192, 1)
        # Its engine listens inside the container only, and is read there.
        source = endpoint.metrics_source
        assert callable(source)
        assert "llamacpp:requests_processing" in source()
        until(lambda: "lemonade_server_up 1" in source())  # after a second it is left out of an answer
        assert make_token_counter(endpoint.url, "user.Tiny", None, endpoint.ask_engine)("one two three") > 1
        assert endpoint.problems(endpoint.state()) == []
    log = (tmp_path / "logs" / "c.server.log").read_text()
    scanned = scan_text(log)
    assert scanned.stopping is not None and scanned.cause() is None  # a normal stop


def test_settings_that_an_earlier_start_left_do_not_count(variables: Variables, tmp_path: Path) -> None:
    with served(scenario(variables(global_timeout=111)), tmp_path) as endpoint:
        changed = {"global_timeout": 99, "auto_evict": True}
        answer = requests.post(endpoint.url + "/internal/set", json=changed, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert (config_of(endpoint)["global_timeout"], config_of(endpoint)["auto_evict"]) == (99, True)
    with served(scenario(variables(global_timeout=222)), tmp_path) as endpoint:
        assert (config_of(endpoint)["global_timeout"], config_of(endpoint)["auto_evict"]) == (222, False)


def test_a_secret_key_reaches_lemonade_and_no_file(
    variables: Variables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEMONADE_API_KEY", "sesame-of-the-test")
    given = variables(environment={"LEMONADE_API_KEY": "${LEMONADE_API_KEY}"})
    with served(scenario(given, api_key_env="LEMONADE_API_KEY"), tmp_path) as endpoint:
        assert requests.get(endpoint.url + "/api/v1/health", timeout=PATIENCE_S).status_code == 401
        source = endpoint.metrics_source
        assert callable(source) and "lemonade_server_up" in source()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "sesame-of-the-test" not in path.read_text()


def test_an_orphaned_engine_is_named(variables: Variables, tmp_path: Path) -> None:
    with served(scenario(variables()), tmp_path) as endpoint:
        container = endpoint.container
        assert container is not None
        container.exec_run(["bash", "-c", "exec -a VLLM::EngineCore sleep 600"], detach=True)
        (orphan,) = until(lambda: list_orphans(container))
        assert orphan.startswith("an orphaned VLLM::EngineCore (process ")
        (problem,) = endpoint.problems(endpoint.state())
        # The memory changes while the process starts; its number does not.
        assert (problem.code, problem.values["name"].split(",")[0]) == ("orphan_memory", orphan.split(",")[0])


def test_a_backend_that_is_killed_during_an_answer(variables: Variables, tmp_path: Path) -> None:
    with served(scenario(variables()), tmp_path) as endpoint:
        before = endpoint.state()
        body = {"model": "user.Tiny", "stream": True, "max_tokens": 1900, "ignore_eos": True,
                "messages": [{"role": "user", "content": "Hello."}]}  # fmt: skip
        url = endpoint.url + "/v1/chat/completions"
        kill = "kill -9 $(sed -n 's/^Name:.llama-server//p;s/^Pid:.//p' /proc/[0-9]*/status | sed -n '/^$/{n;p}')"
        for sleep_s in range(20):  # the answer takes about a second, the start of a command in a container as long
            output(endpoint, f"(sleep {sleep_s / 2}; {kill}; touch /tmp/killed) >/dev/null 2>&1 &")
            with requests.post(url, json=body, stream=True, timeout=PATIENCE_S) as answer:
                rest = answer.raw.read()
            output(endpoint, "until rm /tmp/killed 2>/dev/null; do sleep 0.1; done")
            if answer.status_code == 200 and rest and b"data: [DONE]" not in rest:
                break
        assert answer.status_code == 200 and rest and b"data: [DONE]" not in rest
        assert requests.post(url, json=body | {"stream": False, "max_tokens": 2}, timeout=PATIENCE_S).status_code == 200
        assert endpoint.problems(before)[0].code in ("backend_restarted", "backend_reset")
        assert endpoint.problems(endpoint.state()) == []
    log = (tmp_path / "logs" / "c.server.log").read_text()
    assert "lemonade.watchdog" not in [finding.id for finding in scan_text(log).findings]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"llamacpp_args": "--no-such-flag 3"}, "cli.unknown_flag"),
        ({"checkpoint": "/etc/hostname"}, None),
    ],
)
def test_a_load_that_fails_names_the_cause(
    variables: Variables, tmp_path: Path, given: dict[str, Any], rule: str | None, say: Say
) -> None:
    with pytest.raises(ServerError) as caught, served(scenario(variables(**given)), tmp_path):
        pass
    say(f"{caught.value}\n{caught.value.next_step}")
    failure = explain(tmp_path / "logs" / "c.server.log")
    assert failure is not None
    assert rule is None or failure.id == rule
    assert caught.value.next_step


def test_requests_that_do_not_fit_one_slot_are_explained(tmp_path: Path, say: Say) -> None:
    """Slots share the context: 256 tokens each. Prompts that fit none of them are refused before the start."""
    given = container_variables(llamacpp_args="--parallel 4 --threads 1", ctx_size=1024)
    server = {"template": "lemonade", "variables": given, "startup_timeout_s": PATIENCE_S}
    loads = {"l": {"user": "batch", "batch_size": 4, "requests": 24, "output_tokens": 16}}
    prompts = {"tokens": {"uniform": [10, 600]}}
    ran = run(write_scenario(tmp_path, "narrow", model="Tiny", servers={"s": server}, prompts=prompts, loads=loads))
    say(ran.said + ran.error)
    assert ran.code == ExitCode.INVALID
    failed = [record for record in ran.records if record.error is not None]
    assert 0 < len(failed) < len(ran.records)
    found = [explain_message(f"{record.error}: {record.message}") for record in failed]
    assert {None if failure is None else failure.id for failure in found} == {"req.context"}
    assert left_behind(ran.folder) == []


def test_a_whole_run(tmp_path: Path, say: Say) -> None:
    """More at once than llama-server has slots: it is said before, and at the start."""
    server = {"template": "lemonade", "variables": container_variables(), "startup_timeout_s": PATIENCE_S}
    loads = {
        "one": {"user": "batch", "batch_size": 1, "requests": 6, "output_tokens": 16},
        "eight": {"user": "batch", "batch_size": 8, "requests": 24, "output_tokens": 16},
    }
    ran = run(write_scenario(tmp_path, "slots", model="Tiny", servers={"s": server}, loads=loads))
    say(ran.said + ran.error)
    assert (ran.code, ran.error) == (0, "")
    assert all(record.error is None for record in ran.records)
    notes = [line for line in ran.said.splitlines() if line.startswith("note: s: ")]
    assert any(" 8 " in note and " 4 " in note for note in notes)
    assert [cell.problems for cell in ran.manifest.cells] == [[], []]
    for cell in ran.summary.cells:
        own = sum(record.output_tokens or 0 for record in ran.records if record.cell == cell.id)
        assert cell.server_load.generated_tokens == own
    assert left_behind(ran.folder) == []


def test_compose_brings_the_same_up(variables: Variables, compose_environment: dict[str, str], tmp_path: Path) -> None:
    """`docker compose up` on the printed file: prepared, configured, and loaded by the first request."""
    given = variables(host_port=free_port(), ctx_size=4096)
    (tmp_path / "compose.yaml").write_text(checked_each_second(server_document(scenario(given), "s")))
    url = f"http://127.0.0.1:{given['host_port']}"
    command = ["docker", "compose", "--project-name", f"t{os.getpid()}", "--file", str(tmp_path / "compose.yaml")]
    try:
        wait = ["up", "--wait", "--wait-timeout", f"{PATIENCE_S:.0f}"]
        up = subprocess.run([*command, *wait], capture_output=True, text=True, env=compose_environment)
        logs = subprocess.run([*command, "logs"], capture_output=True, text=True, env=compose_environment).stdout
        # It waits for `prepare` as well, which ends well: older versions of Compose call that a failure.
        assert requests.get(url + "/live", timeout=PATIENCE_S).json() == {"status": "ok"}, up.stderr + logs
        body = {"model": "user.Tiny", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        assert requests.post(url + "/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200
        entry = requests.get(url + "/api/v1/health", timeout=PATIENCE_S).json()["all_models_loaded"][0]
        assert (entry["recipe_options"]["ctx_size"], entry["recipe_options"]["llamacpp_args"]) == (
            4096, "--parallel 4 --threads 1")  # fmt: skip
    finally:
        subprocess.run([*command, "down", "--volumes", "--timeout", "3"], capture_output=True, env=compose_environment)
