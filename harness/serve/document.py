"""The Compose file of a scenario's server: rendered to be started, and printed to use by hand."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from msgspec import Struct

from harness.engines import template_of
from harness.errors import HarnessError, Problem
from harness.machine.gpus import device_groups
from harness.scenario import Gateway, Scenario, Server
from harness.serve.compose_file import (
    GATEWAY,
    SERVER,
    ComposeFile,
    Service,
    checked,
    parse,
    parse_device,
    parse_port,
    read,
    url_of,
)
from harness.serve.engine import digests_here
from harness.serve.grafana import MonitoringTarget, monitoring
from harness.serve.lemonade import served_name
from harness.serve.location import engine_location
from harness.serve.probe import free_port
from harness.serve.template import render, variable_of

_NO_GROUPS = [
    "group_add is empty: there is no /dev/kfd and no /dev/dri here, or only root owns them. Put in what",
    "`stat -c %g /dev/kfd /dev/dri/render*` prints on the GPU's machine, or set the server's variable `groups`.",
]


class PreparedServer(Struct, frozen=True, kw_only=True):
    """A server of a scenario, rendered and parsed once: what lint, memory checks and the start all work with."""

    name: str
    server: Server
    text: str  # the Compose file; the Docker Engine chooses the host's port unless the server has a host_port
    compose: ComposeFile | None  # None: there are problems
    problems: list[Problem]  # of the Compose file

    @property
    def file(self) -> ComposeFile:
        """The Compose file. Raises HarnessError that lists everything that is wrong with it."""
        return checked(self.compose, self.problems)

    @property
    def service(self) -> Service:
        return self.file.server

    @property
    def engine_arguments(self) -> list[str]:
        """The command line of the engine; behind Lemonade it is the text of a variable."""
        known = template_of(self.server.template)
        if known is not None and known.arguments is not None:
            return str(self.server.variables.get(known.arguments) or "").split()
        return list(self.service.command or [])

    @property
    def gives_gpus(self) -> bool:
        """Whether the container is given the devices of GPUs."""
        return any(parse_device(text).host.startswith(("/dev/kfd", "/dev/dri")) for text in self.service.devices)


def prepared(scenario: Scenario, server_name: str) -> PreparedServer:
    """A server of a scenario, rendered at the first call. Raises HarnessError for a template that cannot be used."""
    server = server_of(scenario, server_name)
    key = (server_name, repr(server), scenario.model, engine_location().is_here)
    if key not in _PREPARED:  # a variable that `auto` fills in makes another server
        text = rendered(server, scenario.model, port=None if server.container else port_inside(server))
        compose, problems = read(text)
        _PREPARED[key] = PreparedServer(name=server_name, server=server, text=text, compose=compose, problems=problems)
    return _PREPARED[key]


_PREPARED: dict[tuple[str, str, str, bool], PreparedServer] = {}


def server_document(scenario: Scenario, server_name: str) -> str:
    """The Compose file of a server alone, to be read by people: the host's port is that of the container."""
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
    server, compose = server_of(scenario, server_name), prepared(scenario, server_name).file
    serving = compose.serving
    if serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    service, port = (SERVER, port_inside(server)) if server.gateway is None else (GATEWAY, port_inside(server.gateway))
    model = scenario.model if serving.lemonade is None else served_name(serving.lemonade.model)
    return Upstream(service, f"http://{service}:{port}", model, serving.simulated, bool(compose.preparations))


def compose_document(
    scenario: Scenario, server_name: str, locust: dict[str, Any], head: list[str], *, grafana: bool = False
) -> str:
    """The Compose file for `docker compose up`, with a load generator in front of the server.

    `locust`: values for the variables of the template `locust`. `head`: lines for the top of the file; those with the
    addresses of the server and the digests of the images follow. `grafana`: with Prometheus and Grafana.
    """
    server = server_of(scenario, server_name)
    text = rendered(server, scenario.model, port=port_inside(server), locust=locust)
    compose = parse(server_document(scenario, server_name))
    if grafana:
        path = compose.serving.metrics
        target = None if path is None else MonitoringTarget(f"{SERVER}:{port_inside(server)}", path)
        text = with_services(text, monitoring(target))
    ports = {name: parse_port(one.ports[0]) for name, one in compose.services.items() if one.ports}
    head = head + [f"{name}: {url_of(port.address, port.host)}" for name, port in sorted(ports.items())]
    images = [locust["image"], *(service.image for service in compose.services.values())]
    head += [f"image {name} is here: {digest}" for name, digest in digests_here(images).items()]
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS
    return "".join(f"# {line}\n" for line in head) + text


def port_inside(server: Server | Gateway) -> Any:
    """The port that the server or gateway opens in its container."""
    return variable_of(server, "port") or 0


def written(scenario: Scenario, server_name: str, run_folder: Path) -> PreparedServer:
    """A server that is about to be started; its Compose file is kept as compose/SERVER.yaml of the run."""
    one = prepared(scenario, server_name)
    if not one.server.container:  # a process has no port of its own: each start takes a free one of this host
        text = rendered(one.server, scenario.model)
        one = msgspec.structs.replace(one, text=text, compose=parse(text))
    (run_folder / "compose").mkdir(parents=True, exist_ok=True)
    (run_folder / "compose" / f"{server_name}.yaml").write_text(one.text, encoding="utf-8")
    return one


def rendered(server: Server, model: str, port: int | None = None, locust: dict[str, object] | None = None) -> str:
    """The Compose file, published at `port` of the host; None is to start it now, at a port that the engine chooses.

    A gateway has its own template: its services are added to those of the server.
    """
    given = dict(server.variables)
    if not server.container and port is None:
        given["port"] = given.get("host_port") or free_port()
    gateway = server.gateway
    text = render(
        server.template,
        given,
        model=model,
        host_port=port or 0,
        groups=device_groups() if engine_location().is_here else [],
        upstream=None if gateway is None else f"http://{GATEWAY}:{port_inside(gateway)}",
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
    return _merged(whole, front)


def with_services(compose: str, more: dict[str, Any]) -> str:
    """The Compose file with these services and configs added."""
    return _merged(yaml.safe_load(compose), more)


def _merged(whole: dict[str, Any], front: dict[str, Any]) -> str:
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
