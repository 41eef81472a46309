"""The Compose file of a scenario's server: rendered to be started, and printed to use by hand."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.errors import HarnessError
from harness.machine.gpus import device_groups
from harness.scenario.scenario import Gateway, Scenario, Server
from harness.serve.ask import free_port
from harness.serve.compose.compose import GATEWAY, SERVER, ComposeFile, parse
from harness.serve.compose.template import render, variables
from harness.serve.compose.values import parse_port, url_of
from harness.serve.docker.images import digests_here
from harness.serve.docker.location import engine_location
from harness.serve.lemonade import served_name

_NO_GROUPS = [
    "group_add is empty: there is no /dev/kfd and no /dev/dri here, or only root owns them. Put in what",
    "`stat -c %g /dev/kfd /dev/dri/render*` prints on the GPU's machine, or set the server's variable `groups`.",
]


def server_document(scenario: Scenario, server_name: str) -> str:
    """The Compose file of a server alone.

    The same at every call: the host's port is that of the container, unless the server has a host_port.
    """
    server = server_of(scenario, server_name)
    return rendered(server, scenario.model, port=port_inside(server))


class Upstream(NamedTuple):
    """What a load generator in the server's network needs to know."""

    service: str  # takes the load: the gateway where there is one
    url: str
    model: str  # to ask for
    simulated: bool
    prepared: bool  # other services end before the server starts


def upstream_of(scenario: Scenario, server_name: str) -> Upstream:
    """Where the load of a server goes, in the network of its Compose file. Raises HarnessError for an offline job."""
    server = server_of(scenario, server_name)
    compose = parse(server_document(scenario, server_name))
    serving = compose.serving
    if serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    service, port = (SERVER, port_inside(server)) if server.gateway is None else (GATEWAY, port_inside(server.gateway))
    model = scenario.model if serving.lemonade is None else served_name(serving.lemonade.model)
    return Upstream(service, f"http://{service}:{port}", model, serving.simulated, bool(compose.preparations))


def compose_document(scenario: Scenario, server_name: str, locust: dict[str, Any], head: list[str]) -> str:
    """The same for `docker compose up`, with a load generator in front of the server.

    `locust`: values for the variables of the template `locust`. `head`: lines for the top of the file; those with the
    addresses of the server and the digests of the images follow.
    """
    server = server_of(scenario, server_name)
    text = rendered(server, scenario.model, port=port_inside(server), locust=locust)
    compose = parse(server_document(scenario, server_name))
    ports = {name: parse_port(one.ports[0]) for name, one in compose.services.items() if one.ports}
    head = head + [f"{name}: {url_of(port.address, port.host)}" for name, port in sorted(ports.items())]
    images = [locust["image"], *(service.image for service in compose.services.values())]
    head += [f"image {name} is here: {digest}" for name, digest in digests_here(images).items()]
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS
    return "".join(f"# {line}\n" for line in head) + text


def port_inside(server: Server | Gateway) -> Any:
    """The port that the server or gateway opens in its container."""
    declared = variables(server.template).get("port")
    return server.variables.get("port", 0 if declared is None else declared.default)


def written(scenario: Scenario, server_name: str, run_folder: Path) -> tuple[Server, ComposeFile]:
    """A server that is about to be started, and its Compose file, which is kept as compose/SERVER.yaml of the run."""
    server = server_of(scenario, server_name)
    text = rendered(server, scenario.model)
    compose = parse(text)
    (run_folder / "compose").mkdir(parents=True, exist_ok=True)
    (run_folder / "compose" / f"{server_name}.yaml").write_text(text, encoding="utf-8")
    return server, compose


def rendered(server: Server, model: str, port: int | None = None, locust: dict[str, object] | None = None) -> str:
    """The Compose file, published at `port` of the host; None is to start it now, at a port that the engine chooses.

    A gateway has its own template: its services are added to those of the server.
    """
    given = dict(server.variables)
    if not server.container and port is None:
        # A process has no port of its own inside a container: the port that it opens is the host's.
        given["port"] = given.get("host_port") or free_port()
    gateway = server.gateway
    upstream = None if gateway is None else f"http://{GATEWAY}:{port_inside(gateway)}"
    text = render(
        server.template,
        given,
        model=model,
        host_port=port or 0,
        groups=device_groups() if engine_location().is_here else [],
        upstream=upstream,
        locust=locust,
    )
    if gateway is None:
        return text
    front = render(
        gateway.template,
        dict(gateway.variables),
        model=model,
        host_port=0 if port is None else port_inside(gateway),
        groups=[],
        upstream=f"http://{SERVER}:{port_inside(server)}",
    )
    return with_gateway(text, front)


def server_of(scenario: Scenario, name: str) -> Server:
    """A server by its name. Raises HarnessError that lists those that there are."""
    if name not in scenario.servers:
        raise HarnessError(f"the scenario has no server '{name}'; it has {', '.join(scenario.servers)}")
    return scenario.servers[name]


def with_gateway(server: str, gateway: str) -> str:
    """The Compose file of a server with that of its gateway added, both as text."""
    whole, front = yaml.safe_load(server), yaml.safe_load(gateway)
    whole["x-amd-llm-load"]["gateway"] = front.pop("x-amd-llm-load")
    for part, entries in front.items():
        both = whole.setdefault(part, {})
        for name in entries.keys() & both.keys():
            raise HarnessError(
                f"the templates of the server and of its gateway both have $.{part}.{name}",
                next_step="Rename it in one of the two templates in compose/.",
            )
        both.update(entries)
    return yaml.dump(whole, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not plainly a word: what YAML 1.1 reads as text, YAML 1.2 may read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_WORD = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w./-]*", re.IGNORECASE)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None if _WORD.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
