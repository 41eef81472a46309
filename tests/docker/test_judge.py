"""Docker Compose itself judges every rendered file."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.scenario.scenario import Load, Server
from harness.serve import compose_document, server_document, templates, variables
from harness.serve.compose.compose import parse
from tests.command import until
from tests.docker.conftest import scenario

ODD = "a \"b\" 'c' # d: {e} [f] & * ! | > % @ ` \\ \n \t é 漢"
GIVEN: dict[str, dict[str, Any]] = {
    "vllm-rocm": {"shm_size": "16g", "entrypoint": ["vllm", "serve"], "volumes": ["/a:/b:ro", "weights:/w"]},
    "vllm-cpu": {"cpus": 1.5, "mem_limit": "4g", "enforce_eager": True, "omp_threads": "0-1"},
    "llamacpp": {"models": "/models", "model_path": "/models/x.gguf", "gpu_layers": None},
    "lemonade": {"vllm_args": "--max-num-seqs 32", "llamacpp_backend": "rocm"},
    "ollama": {"mem_limit": "8g"},
    "localai": {"mem_limit": "8g"},
    "vllm-offline": {"shm_size": "16g", "volumes": ["/a:/b:ro"]},
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
    given: dict[str, Any] = {}
    if odd:
        given = {**GIVEN[template], "environment": {"ODD": ODD, "N": 1}}
        given |= {"extra_args": [ODD, 1, 0.5]} if "extra_args" in variables(template) else {}
    server = Server(template=template, variables=given)
    text = server_document(scenario(server), "s")
    mine = parse(text)
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


@pytest.mark.parametrize("template", sorted(set(templates()) - {"vllm-offline"}))  # a job takes no load
def test_compose_accepts_the_load_generator_beside_it(
    template: str, compose_environment: dict[str, str], tmp_path: Path
) -> None:
    text = compose_document(scenario(Server(template=template)), "s")
    found = judged(text, compose_environment, tmp_path)
    alone = parse(server_document(scenario(Server(template=template)), "s"))
    assert set(found["services"]) == {"server", "locust", *alone.preparations}
    assert found["services"]["locust"]["ports"][0]["published"] == "8089"
    assert found["services"]["locust"]["depends_on"]["server"]["condition"] == "service_healthy"


def test_compose_brings_the_same_server_up(image: str, compose_environment: dict[str, str], tmp_path: Path) -> None:
    """`docker compose up` on the printed file: healthy by its own health check, and the web UI answers."""
    from harness.serve.compose.template import render
    from harness.serve.ports import free_port

    ui_port = free_port()
    text = render(
        "simulated",
        {"image": image},
        model="sim",
        host_port=free_port(),
        groups=[],
        locust={"image": image, "ui_port": ui_port, "locustfile": "batch", "arguments": ["--batch-size", "2"]},
    )
    (tmp_path / "compose.yaml").write_text(text)
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
        until(lambda: _answers(ui_port), within_s=30)
        assert _load_runs(ui_port)
    finally:
        subprocess.run([*command, "down", "--volumes", "--timeout", "3"], capture_output=True, env=compose_environment)


def _answers(ui_port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{ui_port}/", timeout=10).status_code == 200
    except requests.ConnectionError:
        return False


def _load_runs(ui_port: int) -> bool:
    """Press start in the web UI, as a person would, and see requests succeed."""
    url = f"http://127.0.0.1:{ui_port}"
    assert requests.post(f"{url}/swarm", {"user_count": "1", "spawn_rate": "1"}, timeout=10).json()["success"]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = requests.get(f"{url}/stats/requests", timeout=10).json()
        if any(entry["num_requests"] >= 10 and entry["num_failures"] == 0 for entry in seen["stats"]):
            return True
        time.sleep(0.3)
    return False


def test_every_template_has_odd_values() -> None:
    assert set(GIVEN) == set(templates())
    for template, given in GIVEN.items():
        assert set(given) <= set(variables(template))
        assert Load(user="chat").users == 1
