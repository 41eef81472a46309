"""Lemonade's template on a real Docker Engine, with the double of Lemonade in the container."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
import yaml

from harness.analysis.summarize import read_summary
from harness.files import ROOT
from harness.process import free_port
from harness.reasons import sentence
from harness.rundir.manifest import read_run
from harness.rundir.samples import parse_metrics, read_metrics
from harness.scenario import Load, Scenario, Server
from harness.serve.document import server_document
from harness.serve.engine import remove_leftovers
from harness.serve.lemonade import list_orphans
from harness.serve.lifecycle import Endpoint, serve
from harness.serve.probe import make_token_counter
from harness.summary import Reason, because
from tests.command import PATIENCE_S, harness
from tests.docker.conftest import checked_each_second, remains

DOUBLE = "amd-llm-load-test/lemonade:local"
SLOW = {"preset": "strix-halo-qwen3.5-0.8b"}


@pytest.fixture(scope="session")
def double(image: str) -> str:
    folder = ROOT / "tests" / "doubles" / "lemonade"
    command = ["docker", "build", "--quiet", "--build-arg", f"BASE={image}", "--tag", DOUBLE, str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DOCKER_BUILDKIT": "0"})
    assert built.returncode == 0, built.stderr[-3000:]
    return DOUBLE


Variables = Callable[..., dict[str, Any]]


@pytest.fixture
def variables(double: str, client: docker.DockerClient, tmp_path: Path) -> Iterator[Variables]:
    """Variables of the template for the double, with volumes of its own that are removed afterwards."""
    names = [f"{tmp_path.name}-{part}" for part in ("models", "lemonade")]

    def make_variables(behaviour: dict[str, Any], **more: Any) -> dict[str, Any]:
        environment = {"LEMONADE_DOUBLE": json.dumps({"installed": True, **behaviour}), **more.pop("environment", {})}
        volumes = {"huggingface_cache": names[0], "lemonade_cache": names[1]}
        return {"image": double, "devices": [], "groups": [], "environment": environment, **volumes, **more}

    yield make_variables
    left = remains(client, tmp_path.name)
    remove_leftovers(client, tmp_path.name, everything=True)
    for name in names:
        try:
            client.volumes.get(name).remove()
        except docker.errors.NotFound:
            continue
    assert left == []


def scenario(variables: dict[str, Any], model: str = "Tiny", **more: Any) -> Scenario:
    server = Server(template="lemonade", variables=variables, startup_timeout_s=60)
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model=model, servers={"s": server}, loads={"l": load}, **more)


def served(given: Scenario, tmp_path: Path) -> Any:
    return serve(given, "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path)


def output(endpoint: Endpoint, command: str) -> str:
    assert endpoint.container is not None
    code, text = endpoint.container.exec_run(["sh", "-c", command])
    assert code == 0, text
    assert isinstance(text, bytes)
    return text.decode().strip()


def test_a_checkpoint_through_the_template(variables: Variables, client: docker.DockerClient, tmp_path: Path) -> None:
    given = variables(
        {"downloaded": True}, checkpoint="org/tiny", recipe="vllm", vllm_args="--max-num-seqs 8", global_timeout=120
    )
    with served(scenario(given), tmp_path) as endpoint:
        found = endpoint.served_by
        assert (found.model, found.simulated, found.max_parallel) == ("user.Tiny", True, 32)
        assert found.version == "Lemonade 11.7.0, vllm:rocm 0.32.0+simulated"
        assert found.startup is not None and found.startup.kv_cache_tokens == 51200
        count = make_token_counter(endpoint.url, "user.Tiny", None, endpoint.ask_engine)
        assert (count("one two three"), count('it\'s "5 %" \\n; $HOME')) == (3, 5)
        assert found.effective["launch_command"][-4:] == ["--kv-cache-memory-bytes", "4G", "--max-num-seqs", "8"]
        assert [phase.name for phase in found.phases][-4:] == ["port open", "health", "load", "first answer"]
        assert output(endpoint, "id -u") == "10001"
        assert (
            output(endpoint, "stat -c %u /opt/lemonade/.cache/lemonade /opt/lemonade/.cache/huggingface")
            == "10001\n10001"
        )
        assert json.loads(output(endpoint, "cat /opt/lemonade/.cache/lemonade/recipe_options.json")) == {
            "user.Tiny": {"ctx_size": 8192, "vllm_args": "--max-num-seqs 8"}
        }
        config = requests.get(endpoint.url + "/internal/config", timeout=PATIENCE_S).json()
        assert (config["global_timeout"], config["auto_check_model_updates"], config["ctx_size"]) == (120, False, 8192)
        # Its engine listens inside only, and is read there.
        source = endpoint.metrics_source
        assert source is not None and not isinstance(source, str)
        text = source()
        assert 'vllm:num_requests_running{engine="0",model_name="user.Tiny"}' in text and "lemonade_server_up 1" in text
        assert endpoint.problems() == []
        assert found.container is not None and "/etc/amd-llm-load/defaults.json" in found.container["Configs"]
    assert remains(client, tmp_path.name) == []


def test_settings_that_an_earlier_start_left_do_not_count(variables: Variables, tmp_path: Path) -> None:
    given = {"checkpoint": "org/tiny", "recipe": "vllm"}
    old = {"downloaded": True, "config_dir": False}  # writes config.json in full, which wins over the defaults
    for timeout in (111, 222):
        with served(scenario(variables(old, global_timeout=timeout, **given)), tmp_path) as endpoint:
            assert (
                requests.get(endpoint.url + "/internal/config", timeout=PATIENCE_S).json()["global_timeout"] == timeout
            )


def test_an_orphaned_engine_is_named(variables: Variables, tmp_path: Path) -> None:
    behaviour = {"downloaded": True, "never_ready": 1, "orphan": True}
    given = variables(behaviour, checkpoint="org/tiny", recipe="vllm", global_timeout=8)
    with served(scenario(given), tmp_path) as endpoint:
        assert endpoint.container is not None
        (orphan,) = list_orphans(endpoint.container)
        assert orphan.startswith("an orphaned VLLM::EngineCore (process ")
        assert endpoint.problems() == [because("orphan_memory", name=orphan)]


def test_a_secret_key_reaches_lemonade_and_no_file(
    variables: Variables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEMONADE_API_KEY", "sesame-of-the-test")
    given = variables(
        {"downloaded": True},
        checkpoint="org/tiny",
        recipe="vllm",
        environment={"LEMONADE_API_KEY": "${LEMONADE_API_KEY}"},
    )
    with served(scenario(given, api_key_env="LEMONADE_API_KEY"), tmp_path) as endpoint:
        assert requests.get(endpoint.url + "/api/v1/health", timeout=PATIENCE_S).status_code == 401
        source = endpoint.metrics_source
        assert source is not None and not isinstance(source, str) and "lemonade_server_up" in source()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "sesame-of-the-test" not in path.read_text()


def test_a_whole_run(variables: Variables, tmp_path: Path) -> None:
    """The butler against the short-order cook, above the size of Lemonade's pool."""
    args = {"vllm_args": "--max-num-seqs 8", "ctx_size": 2000}
    cook = variables({"downloaded": True, "threads": 3, **SLOW}, checkpoint="org/tiny", recipe="vllm", **args)
    path = tmp_path / "pool.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "question": "Whose queue is it?",
                "model": "Tiny",
                "servers": {"cook": {"template": "lemonade", "variables": cook}},
                "loads": {"six": {"user": "batch", "batch_size": 6, "requests": 24, "output_tokens": 30}},
                "prompts": {"tokens": 20},
                "repeats": 1,
            }
        )
    )
    done = harness("run", str(path), "--runs", "runs", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert (done.code, done.err) == (0, ""), done.out
    run, summary = read_run(folder), read_summary(folder)
    (cell,) = run.cells
    assert (cell.served_by.model, cell.problems, run.simulated) == ("user.Tiny", [], True)
    (samples,) = read_metrics(folder / "metrics.jsonl").values()
    assert max(sample.values["running"] + sample.values["waiting"] for sample in samples) <= 3
    assert summary.cells[0].server_load.generated_tokens == sum((24 + 6) * [30])


def test_a_reset_in_mid_load_makes_the_run_invalid(variables: Variables, tmp_path: Path) -> None:
    given = variables(
        {"downloaded": True, **SLOW}, checkpoint="org/tiny", recipe="vllm", ctx_size=2000, vllm_args="--max-num-seqs 8"
    )
    with served(scenario(given), tmp_path) as endpoint:
        entry = requests.get(endpoint.url + "/api/v1/health", timeout=PATIENCE_S).json()["all_models_loaded"][0]
        body: dict[str, Any] = {
            "model": "user.Tiny",
            "messages": [{"role": "user", "content": "Hi."}],
            "max_tokens": 300,
        }
        body["ignore_eos"] = True
        answers: list[int] = []

        def ask() -> None:
            answers.append(
                requests.post(endpoint.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code
            )

        user = threading.Thread(target=ask)
        user.start()
        time.sleep(0.5)
        output(endpoint, f"kill -9 {entry['pid']}")
        user.join()
        assert answers == [200]  # sent again without a trace
        deadline = time.monotonic() + 5  # the log comes a moment later
        problems: list[Reason] = []
        while not problems and time.monotonic() < deadline:
            problems = endpoint.problems()
        assert [problem.code for problem in problems] == ["backend_restarted"]
        assert "may have been sent twice without a trace" in sentence(problems[0])
        source = endpoint.metrics_source
        assert source is not None and not isinstance(source, str)
        assert parse_metrics(source())["generated_tokens"] >= 300  # of the new engine, on another port


def test_compose_brings_the_same_up(variables: Variables, compose_environment: dict[str, str], tmp_path: Path) -> None:
    """`docker compose up` on the printed file: prepared, configured, and loaded by the first request."""
    given = variables({"downloaded": True}, checkpoint="org/tiny", recipe="vllm", host_port=free_port(), ctx_size=4000)
    text = server_document(scenario(given), "s")
    (tmp_path / "compose.yaml").write_text(checked_each_second(text))
    url = f"http://127.0.0.1:{given['host_port']}"
    command = ["docker", "compose", "--project-name", f"t{os.getpid()}", "--file", str(tmp_path / "compose.yaml")]
    try:
        up = subprocess.run([*command, "up", "--wait", "--wait-timeout", "90"], capture_output=True, text=True,
                            env=compose_environment)  # fmt: skip
        logs = subprocess.run([*command, "logs"], capture_output=True, text=True, env=compose_environment).stdout
        # It waits for `prepare` as well, which ends well: older versions of Compose call that a failure.
        assert requests.get(url + "/live", timeout=PATIENCE_S).json() == {"status": "ok"}, up.stderr + logs
        assert requests.get(url + "/internal/config", timeout=PATIENCE_S).json()["ctx_size"] == 4000
        body = {"model": "user.Tiny", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        assert requests.post(url + "/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 200
        entry = requests.get(url + "/api/v1/health", timeout=PATIENCE_S).json()["all_models_loaded"][0]
        assert entry["recipe_options"] == {"ctx_size": 4000}
    finally:
        subprocess.run([*command, "down", "--timeout", "3"], capture_output=True, env=compose_environment)
