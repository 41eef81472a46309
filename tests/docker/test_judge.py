"""Docker Compose itself judges every rendered file."""

import json
import os
import subprocess
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.base.process import free_port
from harness.records.records import read_requests
from harness.scenario import Server
from harness.serve.compose_file import parse_compose
from harness.serve.document import server_document
from harness.serve.template import read_variables, templates
from tests.docker.conftest import checked_each_second, scenario
from tests.support.command import PATIENCE_S, harness, until, write
from tests.support.load_runs import composed

ODD = "a \"b\" 'c' # d: {e} [f] & * ! | > % @ ` \\ \n \t é 漢"
GIVEN: dict[str, dict[str, Any]] = {
    "vllm-rocm": {"shm_size": "16g", "entrypoint": ["vllm", "serve"], "volumes": ["/a:/b:ro", "weights:/w"]},
    "vllm-cpu": {"cpus": 1.5, "mem_limit": "4g", "enforce_eager": True, "omp_threads": "0-1"},
    "llamacpp": {"models": "/models", "model_path": "/models/x.gguf", "gpu_layers": None},
    "lemonade": {"vllm_args": "--max-num-seqs 32", "llamacpp_backend": "rocm"},
    "ollama": {"mem_limit": "8g"},
    "localai": {"mem_limit": "8g"},
    "vllm-offline": {"shm_size": "16g", "volumes": ["/a:/b:ro"]},
    "openai": {"image": "engine:1", "command": ["serve", "{model}"], "metrics": "/metrics", "volumes": ["/a:/b:ro"]},
    "sglang-rocm": {"shm_size": "16g", "gpus": [0, 1], "tensor_parallel_size": 2, "volumes": ["/a:/b:ro"]},
    "simulated": {"ipc": "shareable", "devices": ["/dev/null:/dev/kfd"], "groups": [44]},
}


def judged(text: str, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """What Docker Compose understands the file to mean; it must have nothing to say against it."""
    (folder / "compose.yaml").write_text(text, encoding="utf-8")
    command = ["docker", "compose", "--project-name", "judge", "--file", str(folder / "compose.yaml")]
    answer = subprocess.run([*command, "config", "--format", "json"], capture_output=True, text=True, env=environment)
    assert (answer.returncode, answer.stderr) == (0, "")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("odd", [False, True], ids=["defaults", "odd"])
@pytest.mark.parametrize("template", templates())
def test_compose_accepts_and_reads_it_as_we_do(
    template: str, odd: bool, compose_environment: dict[str, str], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"image": "engine:1"} if template == "openai" else {}
    if odd:
        given = {**GIVEN[template], "environment": {"ODD": ODD, "N": 1}}
        given |= {"extra_args": [ODD, 1, 0.5]} if "extra_args" in read_variables(template) else {}
    server = Server(template=template, variables=given)
    text = server_document(scenario(server), "s")
    mine = parse_compose(text)
    found = judged(text, {**compose_environment, "HF_TOKEN": "hf_x"}, tmp_path)
    theirs = found["services"]["server"]
    assert found["x-amd-llm-load"]["template"] == template
    assert theirs["image"] == mine.server.image
    assert theirs["command"] == mine.server.command
    assert theirs.get("environment", {}) == mine.server.environment | (
        {"HF_TOKEN": "hf_x"} if "HF_TOKEN" in mine.server.environment else {}
    )
    assert [f"{p['host_ip']}:{p['published']}:{p['target']}" for p in theirs.get("ports", [])] == mine.server.ports
    assert theirs.get("group_add", []) == mine.server.group_add
    assert theirs.get("ipc") == mine.server.ipc
    assert len(theirs.get("devices", [])) == len(mine.server.devices)
    assert [v["target"] for v in theirs.get("volumes", [])] == [text.split(":")[1] for text in mine.server.volumes]
    assert {n: v.get("external", False) for n, v in found.get("volumes", {}).items()} == {
        name: volume.external for name, volume in mine.volumes.items()
    }


@pytest.mark.parametrize("template", ["vllm-rocm", "lemonade"])
def test_compose_accepts_the_load_generator_beside_it(
    template: str, compose_environment: dict[str, str], tmp_path: Path
) -> None:
    text = composed(scenario(Server(template=template)))
    found = judged(text, compose_environment, tmp_path)
    alone = parse_compose(server_document(scenario(Server(template=template)), "s"))
    assert set(found["services"]) == {"server", "locust", *alone.preparations}
    assert found["services"]["locust"]["ports"][0]["published"] == "8089"
    assert found["services"]["locust"]["depends_on"]["server"]["condition"] == "service_healthy"


def test_compose_brings_the_same_server_up(image: str, compose_environment: dict[str, str], tmp_path: Path) -> None:
    """`docker compose up` on the printed file: healthy by its own health check, and the web UI answers."""
    ui_port = free_port()
    given = scenario(Server(template="simulated", variables={"image": image, "host_port": free_port()}))
    text = checked_each_second(composed(given, ui_port=ui_port))
    (tmp_path / "compose.yaml").write_text(text.replace("amd-llm-load:local", image))
    command = ["docker", "compose", "--project-name", f"t{os.getpid()}", "--file", str(tmp_path / "compose.yaml")]
    try:
        up = subprocess.run([*command, "up", "--wait", "--wait-timeout", "90"], capture_output=True, text=True,
                            env=compose_environment)  # fmt: skip
        logs = subprocess.run([*command, "logs"], capture_output=True, text=True, env=compose_environment).stdout
        assert up.returncode == 0, up.stderr + logs
        listing = subprocess.run(
            [*command, "exec", "-T", "locust", "python3", "-c",
             "import urllib.request as u; print(u.urlopen('http://server:8000/v1/models').status)"],
            capture_output=True, text=True, env=compose_environment,
        )  # fmt: skip
        assert listing.stdout.strip() == "200", listing.stderr + logs
        until(lambda: _answers(ui_port))
        _run_load(ui_port)
    finally:
        subprocess.run([*command, "down", "--volumes", "--timeout", "3"], capture_output=True, env=compose_environment)


OWN = """
from locust import task
from harness.load.user import LLMUser
import beside

class Own(LLMUser):
    @task
    def one(self) -> None:
        self.ask(self.take()[0].with_messages([{"role": "user", "content": beside.QUESTION}]))
"""
MISTAKE = "        raise RuntimeError('a mistake of the user class')"
LOADS: dict[str, Any] = {
    "own": {"user": "own.py", "users": 2, "requests": 10, "output_tokens": 5},
    "steps": {"user": "chat", "think_s": [0, 0.1], "output_tokens": 5,
              "stages": [{"users": 1, "for_s": 1}, {"users": 3, "for_s": 1}]},
    "broken": {"user": "broken.py", "requests": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("load", "code", "sent"),
    [("own", 0, {"own": 10}), ("steps", 0, {"steps@1": None, "steps@3": None}), ("broken", 1, {"broken": 4})],
)
def test_compose_sends_a_load_and_ends_with_its_exit_code(
    load: str, code: int, sent: dict[str, int | None], image: str, compose_environment: dict[str, str], tmp_path: Path
) -> None:
    """`docker compose up` on a file printed with --headless: no web UI, the records on the host."""
    (tmp_path / "records").mkdir()
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text(OWN + MISTAKE)
    (tmp_path / "beside.py").write_text("QUESTION = 'Costs it $HOME or ${HOME}?'")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Costs it $HOME?"}\n')
    servers = {
        "s": {"template": "simulated", "variables": {"image": image, "preset": "instant", "host_port": free_port()}}
    }
    path = write(tmp_path, servers=servers, loads=LOADS, prompts={"kind": "file", "file": "prompts.jsonl"})
    options = ["--load", load, "--headless", "--records", "records"]
    printed = harness("compose", path.name, *options, cwd=tmp_path, env={"HARNESS_IMAGE": image})
    assert (printed.code, printed.err) == (0, "")
    assert f"# image {image} is here: sha256:" in printed.out
    (tmp_path / "compose.yaml").write_text(checked_each_second(printed.out))
    command = ["docker", "compose", "--project-name", f"t{uuid.uuid4().hex[:8]}"]
    try:
        up = subprocess.run(
            [*command, "up", "--exit-code-from", "locust"],
            cwd=tmp_path, capture_output=True, text=True, env=compose_environment, timeout=PATIENCE_S,
        )  # fmt: skip
        assert up.returncode == code, up.stdout + up.stderr
    finally:
        subprocess.run([*command, "down", "--timeout", "3"], cwd=tmp_path, capture_output=True, env=compose_environment)
    records = [one for one in read_requests(tmp_path / "records/requests.jsonl") if one.phase == "measured"]
    counts = Counter(one.load for one in records)
    assert set(counts) == set(sent)
    assert all(number in (None, counts[name]) for name, number in sent.items())
    assert all(one.error is None for one in records)
    assert {path.stat().st_uid for path in (tmp_path / "records").iterdir()} == {os.getuid()}


def _answers(ui_port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{ui_port}/", timeout=PATIENCE_S).status_code == 200
    except requests.ConnectionError:
        return False


def _run_load(ui_port: int) -> None:
    """Press start in the web UI, as a person would, and see requests succeed."""
    url = f"http://127.0.0.1:{ui_port}"
    assert requests.post(f"{url}/swarm", {"user_count": "1", "spawn_rate": "1"}, timeout=PATIENCE_S).json()["success"]

    def has_answers() -> bool:
        seen = requests.get(f"{url}/stats/requests", timeout=PATIENCE_S).json()
        return any(entry["num_requests"] >= 10 and entry["num_failures"] == 0 for entry in seen["stats"])

    until(has_answers)
