"""Ollama's and LocalAI's containers, with doubles of their programs in an image with Python."""

from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from harness.base.files import ROOT
from harness.scenario import Load, Scenario, Server
from harness.serve.lifecycle import serve
from tests.docker.conftest import BASE, remains
from tests.support.command import PATIENCE_S

DOUBLE = str(ROOT / "tests" / "support" / "doubles")
NONE: dict[str, dict[str, Any]] = {
    "ollama": {"ollama_cache": None},
    "localai": {"localai_models": None, "localai_backends": None},
}
MODEL = {"ollama": "qwen3:0.6b", "localai": "qwen3-0.6b"}


@pytest.mark.parametrize("kind", ["ollama", "localai"])
def test_a_container_gets_its_model_and_is_recorded(kind: str, client: docker.DockerClient, tmp_path: Path) -> None:
    given = {
        "image": BASE,
        "entrypoint": ["python3", "/doubles/pullers.py", kind],
        "volumes": [f"{DOUBLE}:/doubles:ro"],
        "devices": ["/dev/null:/dev/kfd"],
        "groups": [44, 992],
        **NONE[kind],
    }
    server = Server(template=kind, variables=given, startup_timeout_s=30)
    load = Load(user="chat", requests=1)
    scenario = Scenario(version=1, question="q", model=MODEL[kind], servers={"s": server}, loads={"l": load})
    run = tmp_path.name.replace("_", "-").lower()
    with serve(scenario, "s", run_id=run, cell_id="c", run_folder=tmp_path) as endpoint:
        found = endpoint.served_by
        assert ("model" in [phase.name for phase in found.phases]) == (kind == "ollama")
        assert found.version == {"ollama": "0.12.6", "localai": "v3.10.0 (0123abcd)"}[kind]
        assert (found.model, found.template) == (MODEL[kind], kind)
        assert found.effective.get("gpu_bytes") == (750 if kind == "ollama" else None)
        body = {"model": MODEL[kind], "messages": [], "max_tokens": 3}
        answer = requests.post(endpoint.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert endpoint.metrics_url is None
    said = (tmp_path / "logs" / "c.server.log").read_text()
    assert f"double of {kind}: " in said
    assert remains(client, run) == []
