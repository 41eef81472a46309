"""SGLang's container, with a double of its program in an image with Python."""

from pathlib import Path

import docker

from harness.files import ROOT
from harness.scenario import Load, Scenario, Server
from harness.serve.lifecycle import serve
from tests.docker.conftest import BASE, remains


def test_a_container_is_brought_up_and_recorded(client: docker.DockerClient, tmp_path: Path) -> None:
    tests = ROOT / "tests"
    given = {
        "image": BASE,
        "entrypoint": ["python3", "/doubles/sglang/__init__.py"],
        "volumes": [f"{tests / 'doubles'}:/doubles:ro", f"{tests / 'data' / 'startup'}:/startup:ro"],
        "devices": ["/dev/null:/dev/kfd"],
        "groups": [44, 992],
        "huggingface_cache": None,
        "triton_cache": None,
    }
    server = Server(template="sglang-rocm", variables=given, startup_timeout_s=30)
    load = Load(user="chat", requests=1)
    scenario = Scenario(version=1, question="q", model="tiny-sglang", servers={"s": server}, loads={"l": load})
    run = tmp_path.name.replace("_", "-").lower()
    with serve(scenario, "s", run_id=run, cell_id="c", run_folder=tmp_path) as endpoint:
        found = endpoint.served_by
        assert (found.model, found.template, found.version) == ("tiny-sglang", "sglang-rocm", "0.5.23")
        assert found.startup is not None
        assert (found.startup.engine, found.startup.architecture) == ("sglang", "Qwen3ForCausalLM")
        assert (found.startup.kv_cache_tokens, found.startup.max_model_len) == (20000, 2048)
        assert found.effective["mem_fraction_static"] == 0.2
        assert found.container is not None and found.container["HostConfig"]["ShmSize"] == 16 << 30
        assert endpoint.metrics_url == f"{endpoint.url}/metrics"
    assert remains(client, run) == []
