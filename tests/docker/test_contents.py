"""What an image brings along, read from real containers through the Docker API."""

import uuid
from collections.abc import Iterator

import docker
import pytest
from docker.models.containers import Container

from harness.serve.facts import read_image_contents
from tests.docker.conftest import BASE

MADE = (
    "mkdir -p /opt/rocm-7.2.0/.info /app /etc/alternatives && echo 7.2.0-70200 > /opt/rocm-7.2.0/.info/version && "
    "ln -s /opt/rocm-7.2.0 /etc/alternatives/rocm && ln -s /etc/alternatives/rocm /opt/rocm && "
    "printf 'BASE_IMAGE: rocm/dev\\nTRITON_BRANCH: f9e5bf54\\nHF_TOKEN: hf_abcdefgh12345678\\n' > /app/versions.txt && "
    "head -c 100000 /dev/zero > /app/big && ln -s versions.txt /app/link"
)
ENV = ["HSA_NO_SCRATCH_RECLAIM=1", "VLLM_API_KEY=sk-0123456789abcdef01", "LD_PRELOAD=/x.so", "EDITOR=vi"]


@pytest.fixture
def container(client: docker.DockerClient) -> Iterator[Container]:
    """A container, not started, of an image that is laid out as those with ROCm are."""
    name = f"amd-llm-load-test/contents:{uuid.uuid4().hex[:8]}"
    maker = client.containers.run(BASE, ["sh", "-c", MADE], detach=True)
    try:
        assert maker.wait()["StatusCode"] == 0, maker.logs()
        maker.commit(name, changes="\n".join(f"ENV {entry}" for entry in ENV))
    finally:
        maker.remove(force=True)
    made = client.containers.create(name, ["true"])
    try:
        yield made
    finally:
        made.remove(force=True)
        client.images.remove(name)


def test_versions_and_environment_without_secrets(container: Container) -> None:
    found = read_image_contents(container)
    assert found.rocm == "7.2.0-70200"  # /opt/rocm is a link over another link
    assert found.versions == {"BASE_IMAGE": "rocm/dev", "TRITON_BRANCH": "f9e5bf54", "HF_TOKEN": "***"}
    assert found.environment == {"HSA_NO_SCRATCH_RECLAIM": "1", "LD_PRELOAD": "/x.so", "VLLM_API_KEY": "***"}
