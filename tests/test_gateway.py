"""A gateway in front of a server: one Compose file, started in order."""

import pytest
import yaml

from harness.errors import HarnessError
from harness.scenario import Gateway, Load, Scenario, Server
from harness.serve.compose_file import parse
from harness.serve.document import server_document
from harness.serve.template import with_gateway
from tests.load_runs import composed
from tests.made_runs import server_problems_of


def scenario(**gateway: object) -> Scenario:
    server = Server(template="simulated", gateway=Gateway(template="litellm", variables=dict(gateway)))
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model="my/model", servers={"s": server}, loads={"l": load})


def test_the_gateway_passes_on_to_the_server_and_takes_the_load() -> None:
    compose = parse(server_document(scenario(port=4100), "s"))
    assert list(compose.services) == ["server", "gateway"]
    front = compose.serving.gateway
    assert front is not None
    assert (front.template, front.port, compose.serving.metrics) == ("litellm", 4100, "/metrics")
    told = yaml.safe_load(compose.configs["litellm"].content)
    assert told["model_list"][0]["model_name"] == "my/model"
    assert told["model_list"][0]["litellm_params"]["api_base"] == "http://server:8000/v1"
    with_locust = yaml.safe_load(composed(scenario()))
    assert "http://gateway:4000" in with_locust["services"]["locust"]["command"]


def test_problems_of_a_gateway_say_where() -> None:
    assert server_problems_of(scenario(prot=1, port="x"), {}) == [
        "$.servers.s.gateway.variables.prot: unknown variable; did you mean 'port'?",
        "$.servers.s.gateway.variables.port: a whole number is expected, got 'x'",
    ]
    wrong = Server(template="simulated", gateway=Gateway(template="litelm"))
    load = Load(user="chat", requests=1)
    other = Scenario(version=1, question="q", model="m", servers={"s": wrong}, loads={"l": load})
    assert server_problems_of(other, {}) == [
        "$.servers.s.gateway.template: there is no gateway 'litelm'; did you mean 'litellm'?"
    ]


def test_a_name_that_both_have_is_refused() -> None:
    front = "x-amd-llm-load: {template: t, port: 1, health: /}\nservices: {server: {image: a}}\n"
    with pytest.raises(HarnessError, match=r"\$\.services\.server"):
        with_gateway("x-amd-llm-load: {}\nservices: {server: {image: a}}\n", front)


@pytest.mark.parametrize("text", ["yes", "012", "0o14", "1e3", "on", "~", "a: b", "#", "two\nlines", " x ", "1:30"])
def test_a_text_stays_a_text(text: str) -> None:
    front = "x-amd-llm-load: {}\nservices: {gateway: {image: a}}\n"
    whole = with_gateway(yaml.dump({"x-amd-llm-load": {"a": text}, "services": {}}), front)
    assert yaml.safe_load(whole)["x-amd-llm-load"]["a"] == text
    assert "\n" in text or f'"{text}"' in whole
