"""The runtime's own numbers of GPU memory, asked in a container, with a stand-in for torch and harmless devices."""

from pathlib import Path
from typing import Any

import docker
import pytest

from harness.errors import ServerError
from harness.serve.container_commands import ask_image
from tests.docker.conftest import BASE, remains

TORCH = """
import os

class cuda:
    class About:
        gcnArchName = "gfx1151:sramecc+:xnack-"

    @staticmethod
    def device_count():
        for node in ("/dev/kfd", "/dev/dri/renderD128"):
            os.stat(node)
        return int(os.environ["GPUS"])

    @staticmethod
    def mem_get_info(number):
        return int(76.45 * 2**30) - number, 96 * 2**30

    @staticmethod
    def get_device_properties(number):
        return cuda.About
"""


def given(folder: Path, gpus: int, **more: Any) -> dict[str, Any]:
    """Variables that put the stand-in where python3 finds it."""
    (folder / "torch.py").write_text(TORCH)
    devices = ["/dev/null:/dev/kfd:r", "/dev/null:/dev/dri/renderD128:r"]
    return {
        "devices": devices,
        "groups": [],
        "volumes": [f"{folder}:/stand-in:ro"],
        "environment": {"PYTHONPATH": "/stand-in", "GPUS": str(gpus)},
        **more,
    }


@pytest.fixture(autouse=True)
def nothing_is_left(client: docker.DockerClient) -> Any:
    mine: dict[str, Any] = {"label": ["amd-llm-load=1", "amd-llm-load.cell=probe"]}
    yield
    assert [container.name for container in client.containers.list(all=True, filters=mine)] == []


def test_the_runtime_tells_of_each_gpu(tmp_path: Path, client: docker.DockerClient) -> None:
    said: list[str] = []
    found = ask_image(BASE, said.append, given(tmp_path, 2))
    assert [(pool.target, pool.free_bytes, pool.total_bytes, pool.kind) for pool in found] == [
        ("gfx1151", int(76.45 * 2**30), 96 * 2**30, "vram"),
        ("gfx1151", int(76.45 * 2**30) - 1, 96 * 2**30, "vram"),
    ]
    assert said == [f"asking the runtime in {BASE}"]
    assert remains(client, "memory") == []


def test_an_image_without_torch_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        ask_image(BASE, lambda _line: None, given(tmp_path, 1, environment={}))
    assert caught.value.what == f"the runtime in {BASE} does not tell its memory (exit code 1)"
    assert "No module named 'torch'" in caught.value.detail


def test_a_runtime_that_sees_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        ask_image(BASE, lambda _line: None, given(tmp_path, 0))
    assert caught.value.what == f"the runtime in {BASE} sees no GPU"


def test_a_missing_device_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        ask_image(BASE, lambda _line: None, given(tmp_path, 1, devices=["/dev/kfd-is-not-here"]))
    assert "/dev/kfd-is-not-here" in caught.value.what + caught.value.detail + caught.value.next_step
