"""The Compose file of a scenario's server: rendered to be started, and printed to use by hand."""

from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.machine.facts import device_groups
from harness.scenario.check_syntax import slo_sets
from harness.scenario.scenario import USERS, Gateway, Load, Scenario, Server
from harness.serve.compose.compose import GATEWAY, SERVER, ComposeFile, parse
from harness.serve.compose.merge import with_gateway
from harness.serve.compose.template import render, variables
from harness.serve.compose.values import parse_port, url_of
from harness.serve.docker.daemon import engine_host
from harness.serve.lemonade import served_name
from harness.serve.ports import free_port

COMPOSE_HEAD = """\
# The server '{server}' of a scenario with Locust's web UI in front of it, printed by `harness compose`.
# Save it as compose.yaml, then: docker compose up
# Locust: http://127.0.0.1:{ui_port}   {addresses}
# The image {image} is made by `make image`. ${{NAME}} is taken from your shell.
"""
_NO_GROUPS = """\
# group_add is empty: there is no /dev/kfd and no /dev/dri here, or only root owns them. Put in what
# `stat -c %g /dev/kfd /dev/dri/render*` prints on the GPU's machine, or set the server's variable `groups`.
"""


def server_document(scenario: Scenario, server_name: str) -> str:
    """The Compose file of a server alone.

    The same at every call: the host's port is that of the container, unless the server has a host_port.
    """
    server = server_of(scenario, server_name)
    return rendered(server, scenario.model, port=port_inside(server))


def compose_document(scenario: Scenario, server_name: str, *, ui_port: int | None = None, workers: int = 0) -> str:
    """The same for `docker compose up`, with Locust's web UI in front of the server.

    `ui_port`: the host's port for the UI; None: the one that the template `locust` declares. `workers`: containers that
    send the load; 0: the one with the UI does.
    """
    server = server_of(scenario, server_name)
    compose = parse(server_document(scenario, server_name))
    if compose.serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    managed = compose.serving.lemonade
    taking = [GATEWAY, SERVER] if GATEWAY in compose.services else [SERVER]
    ports = {name: parse_port(compose.services[name].ports[0]) for name in taking}
    addresses = [f"{name}: {url_of(port.address, port.host)}" for name, port in ports.items()]
    load = next((load for load in scenario.loads.values() if load.user in USERS), Load(user="chat"))
    keys = {scenario.api_key_env: f"${{{scenario.api_key_env}}}"} if scenario.api_key_env else {}
    of_locust = variables("locust")
    ui_port = ui_port or of_locust["ui_port"].default
    head = COMPOSE_HEAD.format(
        server=server_name,
        addresses="   ".join(addresses),
        ui_port=ui_port,
        image=of_locust["image"].default,
    )
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS
    return head + rendered(
        server,
        scenario.model,
        port=port_inside(server),
        locust={
            "locustfile": load.user,
            "arguments": _by_hand(scenario, load, scenario.model if managed is None else served_name(managed.model)),
            "environment": keys,
            "ui_port": ui_port,
            "workers": workers,
            "waits_for": taking[0],
        },
    )


def _by_hand(scenario: Scenario, load: Load, model: str) -> list[str]:
    """A load in the options of a locustfile that is started by hand; the web form shows them and can change them."""
    prompts = scenario.prompts
    given = {
        "--users": load.users,
        "--spawn-rate": f"{load.users / max(load.ramp_s, 1):g}",
        "--model": model,
        "--prompts": prompts.kind if prompts.kind != "file" else "synthetic",  # a file of the host is not in the image
        # A length by distribution is a mapping, which no option of a locustfile is.
        "--prompt-tokens": prompts.tokens if isinstance(prompts.tokens, int) else None,
        "--output-tokens": load.output_tokens if isinstance(load.output_tokens, int) else None,
        "--output": load.output,
        "--stream": "yes" if load.stream else "no",
        "--system-tokens": prompts.system_tokens or None,
        "--arrivals": None if load.arrivals is None or load.arrivals.rate is None else f"{load.arrivals.rate:g}",
        "--timeout": f"{load.timeout_s:g}",
        "--slos": next(iter(slo_sets(scenario.checks)), None),
        "--batch-size": load.batch_size,
        "--turns": load.turns,
        "--think": " ".join(f"{number:g}" for number in load.think_s) if load.think_s else None,
        "--api-key-env": scenario.api_key_env,
    }
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


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
        groups=[] if engine_host() is not None else device_groups(),
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
