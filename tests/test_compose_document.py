"""What `harness compose` prints for Docker Compose: the server, Locust beside it, and how to use them."""

import pytest
import yaml

from harness.errors import HarnessError
from harness.scenario.scenario import Gateway, Load, Scenario, Server
from harness.serve import compose_document
from harness.serve.compose import document


def scenario(server: Server, **loads: Load) -> Scenario:
    return Scenario(
        version=1, question="q", model="org/model", servers={"s": server}, loads=loads or {"l": Load(user="chat")}
    )


def test_the_document_for_docker_compose_has_the_load_generator_with_the_first_load() -> None:
    loads = {"a": Load(user="batch", users=3, batch_size=5, output_tokens=9), "b": Load(user="chat", users=7)}
    raw = yaml.safe_load(compose_document(scenario(Server(template="simulated"), **loads), "s"))
    assert list(raw["services"]) == ["server", "locust"]
    locust = raw["services"]["locust"]
    assert locust["ports"] == ["127.0.0.1:8089:8089"]
    assert locust["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert locust["command"][:3] == ["locust", "-f", "/opt/amd-llm-load/locustfiles/batch.py"]
    options = dict(zip(locust["command"][5::2], locust["command"][6::2], strict=True))
    assert options["--users"] == "3"
    assert options["--batch-size"] == "5"
    assert options["--output-tokens"] == "9"
    assert "--turns" not in options
    assert "version" not in raw


@pytest.mark.parametrize("container", [True, False])
def test_the_document_is_the_same_at_every_call(container: bool) -> None:
    given = scenario(Server(template="simulated", container=container))
    text = compose_document(given, "s")
    assert text == compose_document(given, "s")
    raw = yaml.safe_load(text)
    assert raw["services"]["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://server:8000"]
    assert raw["x-amd-llm-load"]["port"] == 8000
    assert text.splitlines()[:5] == [
        "# The server 's' of a scenario with Locust's web UI in front of it, printed by `harness compose`.",
        "# Save it as compose.yaml, then: docker compose up",
        "# Locust: http://127.0.0.1:8089   server: http://127.0.0.1:8000",
        "# The image amd-llm-load:local is made by `make image`. ${NAME} is taken from your shell.",
        "x-amd-llm-load:",
    ]


def test_the_document_has_the_web_ui_at_the_port_asked_for() -> None:
    text = compose_document(scenario(Server(template="simulated", container=False)), "s", ui_port=9099)
    assert yaml.safe_load(text)["services"]["locust"]["ports"] == ["127.0.0.1:9099:8089"]
    assert "# Locust: http://127.0.0.1:9099 " in text


def test_the_document_has_workers_beside_the_web_ui() -> None:
    given = scenario(Server(template="simulated"))
    raw = yaml.safe_load(compose_document(given, "s", workers=2))
    assert list(raw["services"]) == ["server", "locust", "worker"]
    master, worker = raw["services"]["locust"], raw["services"]["worker"]
    assert master["command"][5] == "--master"
    assert worker["command"][:2] == master["command"][:2]
    assert worker["command"][3:] == ["--worker", "--master-host", "locust"]
    assert worker["deploy"] == {"replicas": 2}
    assert "ports" not in worker
    assert "--master" not in yaml.safe_load(compose_document(given, "s"))["services"]["locust"]["command"]


def test_the_ports_of_the_document_are_those_asked_for() -> None:
    given = scenario(Server(template="simulated", variables={"port": 9000, "host_port": 9001}, container=False))
    text = compose_document(given, "s")
    assert yaml.safe_load(text)["services"]["server"]["ports"] == ["127.0.0.1:9001:9000"]
    assert "server: http://127.0.0.1:9001\n" in text


def test_an_unknown_server_is_named() -> None:
    with pytest.raises(HarnessError, match="the scenario has no server 'x'; it has s"):
        compose_document(scenario(Server(template="simulated")), "x")


def test_with_a_gateway_the_load_generator_waits_for_it_and_the_head_names_both() -> None:
    server = Server(template="vllm-cpu", gateway=Gateway(template="litellm"))
    text = compose_document(scenario(server), "s")
    raw = yaml.safe_load(text)
    assert raw["services"]["locust"]["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert raw["services"]["locust"]["command"][3:5] == ["--host", "http://gateway:4000"]
    head = "# Locust: http://127.0.0.1:8089   gateway: http://127.0.0.1:4000   server: http://127.0.0.1:8000"
    assert text.splitlines()[2] == head


def test_the_document_says_that_no_group_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "device_groups", lambda: [])
    told = "# group_add is empty: there is no /dev/kfd"
    assert told in compose_document(scenario(Server(template="vllm-rocm")), "s")
    assert told not in compose_document(scenario(Server(template="vllm-rocm", variables={"groups": [44]})), "s")
    assert told not in compose_document(scenario(Server(template="simulated")), "s")  # it is given no GPU
    monkeypatch.setattr(document, "device_groups", lambda: [44, 992])
    assert told not in compose_document(scenario(Server(template="vllm-rocm")), "s")
