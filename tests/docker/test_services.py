"""Several services of one Compose file on a real Docker Engine: preparations, config files, names."""

from pathlib import Path

import docker
import pytest

from harness.base.errors import ServerError
from harness.serve import containers
from harness.serve.compose_file import fill_variables, parse_compose
from harness.serve.docker_engine import make_labels
from tests.docker.conftest import remains

FILE = """
x-amd-llm-load: {{template: t, port: 1, health: /}}
services:
  chown:
    image: {image}
    user: "0"
    entrypoint: [sh, -c]
    command: ["{prepare}"]
    volumes: [{volume}:/data]
  server:
    image: {image}
    user: "10001"
    entrypoint: [sh, -c]
    command: ["cat /etc/app/told.json && stat -c %u /data && touch /data/mine && sleep 60"]
    volumes: [{volume}:/data]
    configs: [{{source: told, target: /etc/app/told.json}}]
    depends_on: {{chown: {{condition: service_completed_successfully}}}}
    init: true
volumes:
  {volume}: {{name: {volume}, labels: {{amd-llm-load: "1", amd-llm-load.run: {volume}}}}}
configs:
  told: {{content: '{{"key": "${{TOLD}}", "dollar": "$$"}}'}}
"""


def test_a_preparation_that_fails_is_reported_with_its_output(
    image: str, client: docker.DockerClient, tmp_path: Path
) -> None:
    run = tmp_path.name.replace("_", "-")
    owner = make_labels(run, "c")
    text = FILE.format(image=image, volume=run, prepare="echo no space here; exit 3")
    try:
        with pytest.raises(ServerError, match="preparation 'chown' .* exit code 3") as caught:
            containers.create_network_and_volumes(client, fill_variables(parse_compose(text), {"TOLD": "x"}), owner)
        assert caught.value.detail == "no space here"
    finally:
        containers.remove_containers(client, owner, 5)
        client.volumes.get(run).remove()
    assert remains(client, run) == []
