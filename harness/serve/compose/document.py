"""The Compose file of a scenario's server: rendered, checked before anything starts, and printed to use by hand."""

import shlex
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.machine.facts import device_groups
from harness.paths import COMPOSE
from harness.scenario.check_syntax import slo_sets
from harness.scenario.scenario import USERS, Gateway, Load, Scenario, Server
from harness.scenario.strict import where
from harness.serve.compose.compose import GATEWAY, SERVER, ComposeFile, parse, read
from harness.serve.compose.managed import managed_flags, managed_settings
from harness.serve.compose.merge import with_gateway
from harness.serve.compose.template import render, server_problems, variables
from harness.serve.compose.values import parse_port
from harness.serve.docker.daemon import engine_host, engine_sees_these_files
from harness.serve.lemonade.arguments import server_problems as lemonade_problems
from harness.serve.ports import free_port
from harness.serve.vllm.flags import removed_in
from harness.serve.vllm.gpu_fit import container_problems
from harness.serve.vllm.rules import starts_a_shell, vllm_refuses


def server_problems_of(scenario: Scenario, lines: dict[str, int]) -> list[str]:
    """Everything that is wrong with the servers, as far as it can be known unstarted; `lines` by path."""
    problems = _model_problems(scenario)
    for name, server in scenario.servers.items():
        path = f"$.servers.{name}"
        found = server_problems(server, path)
        if server.template == "lemonade":
            found += lemonade_problems(server, scenario.model, path)
        if not found:
            found = _managed(server, scenario.model, path)
            compose, wrong = read(rendered(server, scenario.model, port=_port_inside(server)))
            found += [_in_scenario(problem, server, path) for problem in wrong]
            if compose is not None:
                found += [f"{path}.{problem}" for problem in _command_problems(server, compose)]
                found += [f"{path}.{problem}" for problem in _folder_problems(server, compose)]
                if compose.serving.offline:
                    found += [f"{path}{problem}" for problem in _offline_problems(server, scenario)]
        problems += found
    located = (problem.partition(":") for problem in problems)
    return [f"{where(path, lines)}:{rest}" for path, _, rest in located]


def _model_problems(scenario: Scenario) -> list[str]:
    if scenario.servers and not scenario.model.strip():
        return ["$.model: it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B"]
    if scenario.model.startswith("-"):
        return [f"$.model: {scenario.model!r} begins with '-', which servers take for an option of theirs"]
    return []


def _managed(server: Server, model: str, path: str) -> list[str]:
    """Arguments and settings that are the template's own, of the server and of its gateway."""
    problems = []
    parts: list[tuple[str, str, dict[str, Any], str]] = [(SERVER, server.template, server.variables, path)]
    if (gateway := server.gateway) is not None:
        parts.append((GATEWAY, gateway.template, gateway.variables, f"{path}.gateway"))
    for service, template, given, at in parts:
        declared = [name for name in variables(template) if name != "model"]
        settings = managed_settings(given.get("environment"), declared)
        problems += [f"{at}.variables.environment.{problem}" for problem in settings]
        if not given.get("extra_args"):
            continue
        bare = msgspec.structs.replace(server, variables={**server.variables, "extra_args": []})
        if gateway is not None:
            front = msgspec.structs.replace(gateway, variables={**gateway.variables, "extra_args": []})
            bare = msgspec.structs.replace(bare, gateway=front)
        compose, _ = read(rendered(bare, model, port=_port_inside(server)))
        own = [] if compose is None else compose.services[service].command or []
        again = managed_flags(template, given["extra_args"], own, declared)
        problems += [f"{at}.variables.extra_args: {problem}" for problem in again]
    return problems


def _command_problems(server: Server, compose: ComposeFile) -> list[str]:
    """What the server's program, or the image that has it, would refuse."""
    service, serving = compose.server, compose.serving
    problems = [f"variables.entrypoint: {problem}" for problem in starts_a_shell(server.template, service)]
    if serving.help is None and not serving.offline:
        return problems
    if serving.help is not None:
        gone = removed_in(service.command or [], service.image)
        problems += [f"variables.extra_args: {problem}" for problem in gone]
    wrong = [*container_problems(service), *vllm_refuses(service.command or [])]
    return problems + [f"variables: {problem}" for problem in wrong]


def _folder_problems(server: Server, compose: ComposeFile) -> list[str]:
    """Folders of this machine that are to be mounted and are not there; of another machine's nothing is known."""
    if not engine_sees_these_files():
        return []
    sources = dict.fromkeys(text.split(":")[0] for service in compose.services.values() for text in service.volumes)
    missing = [source for source in sources if source.startswith("/") and "$" not in source and not _there(source)]
    return [
        f"variables.{_variable_with(source, server)}: there is no {source} on this machine; correct the path, or make "
        f"the folder: mkdir -p {shlex.quote(source)}"
        for source in missing
    ]


def _there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a folder that this user may not look into: the engine may
        return True


def _variable_with(source: str, server: Server) -> str:
    """The variable that names a folder."""
    for name, value in server.variables.items():
        texts = value if isinstance(value, list) else [value]
        if any(str(text).split(":")[0] == source for text in texts):
            return name
    return "volumes"


# What may be said of a load whose requests are all given at once; of the rest nothing but its default.
_OFFLINE = {"user", "users", "processes", "requests", "batch_size", "think_s", "output_tokens", "output", "stream",
            "ramp_s", "drain_s", "timeout_s"}  # fmt: skip
_PLAIN = Load(user="batch")


def _offline_problems(server: Server, scenario: Scenario) -> list[str]:
    """What there cannot be with a job that gets all its requests at once and answers nobody."""
    problems = [] if server.gateway is None else [".gateway: an offline server has nobody in front of it; remove it"]
    for name, load in scenario.loads.items():
        fields = [field for field in msgspec.structs.fields(load) if field.name not in _OFFLINE]
        other = [one.encode_name for one in fields if getattr(load, one.name) != getattr(_PLAIN, one.name)]
        if load.user != "batch" or load.requests is None:
            problems.append(
                f".template: it takes requests that are known beforehand, so the load '{name}' would have to be "
                "`user: batch` with a number of `requests`"
            )
        elif other:
            problems.append(f".template: it cannot do what the load '{name}' asks for with {', '.join(other)}")
    return problems


def _in_scenario(problem: str, server: Server, path: str) -> str:
    """A problem of a Compose file, said of the variable that it comes from."""
    key, _, what = problem.removeprefix("$.services.server.").partition(": ")
    variable = {"ports": "publish", "group_add": "groups"}.get(key, key)
    if variable in server.variables:
        return f"{path}.variables.{variable}: {what}"
    return f"{path}: {problem.removeprefix('$.').removeprefix('services.server: ')}"


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


def compose_document(
    scenario: Scenario, server_name: str, with_locust: bool = True, ui_port: int | None = None, workers: int = 0
) -> str:
    """The Compose file of a server for `docker compose up`, with Locust's web UI in front of it unless told not to.

    `ui_port`: the host's port for the UI; None: the one that the template `locust` declares. `workers`: containers that
    send the load; 0: the one with the UI does.
    The same at every call: the host's port is that of the container, unless the server has a host_port.
    """
    server = server_of(scenario, server_name)
    port = _port_inside(server)
    text = rendered(server, scenario.model, port=port)
    if not with_locust:
        return text
    compose = parse(text)
    if compose.serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    taking = [GATEWAY, SERVER] if GATEWAY in compose.services else [SERVER]
    addresses = [f"{name}: {_address(compose.services[name].ports[0])}" for name in taking]
    load = next((load for load in scenario.loads.values() if load.user in USERS), Load(user="chat"))
    keys = {scenario.api_key_env: f"${{{scenario.api_key_env}}}"} if scenario.api_key_env else {}
    of_locust = variables("locust")
    head = COMPOSE_HEAD.format(
        server=server_name,
        addresses="   ".join(addresses),
        ui_port=ui_port or of_locust["ui_port"].default,
        image=of_locust["image"].default,
    )
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS
    return head + rendered(
        server,
        scenario.model,
        port=port,
        locust={
            "locustfile": load.user,
            "arguments": _by_hand(scenario, load),
            "environment": keys,
            **({"ui_port": ui_port} if ui_port else {}),
            "workers": workers,
            "waits_for": taking[0],
        },
    )


def _address(published: str) -> str:
    port = parse_port(published)
    host = "127.0.0.1" if port.address == "0.0.0.0" else port.address
    return f"http://{f'[{host}]' if ':' in host else host}:{port.host}"


def _by_hand(scenario: Scenario, load: Load) -> list[str]:
    """A load in the options of a locustfile that is started by hand; the web form shows them and can change them."""
    prompts = scenario.prompts
    given = {
        "--users": load.users,
        "--spawn-rate": f"{load.users / max(load.ramp_s, 1):g}",
        "--model": scenario.model,
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


def _port_inside(server: Server | Gateway) -> Any:
    """The port that the server or gateway opens in its container."""
    declared = variables(server.template).get("port")
    return server.variables.get("port", 0 if declared is None else declared.default)


def rendered(server: Server, model: str, port: int | None = None, locust: dict[str, object] | None = None) -> str:
    """The Compose file, published at `port` of the host; None is to start it now, at a free one.

    A gateway has its own template: its services are added to those of the server.
    """
    host_port = port or free_port()
    given = dict(server.variables)
    if not server.container and port is None:
        # A process has no port of its own inside a container: the port that it opens is the host's.
        given["port"] = given.get("host_port") or host_port
    gateway = server.gateway
    upstream = None if gateway is None else f"http://{GATEWAY}:{_port_inside(gateway)}"
    text = render(
        server.template,
        given,
        model=model,
        host_port=host_port,
        groups=_groups(),
        upstream=upstream,
        locust=locust,
        folder=COMPOSE,
    )
    if gateway is None:
        return text
    front = render(
        gateway.template,
        dict(gateway.variables),
        model=model,
        host_port=free_port() if port is None else _port_inside(gateway),
        groups=[],
        upstream=f"http://{SERVER}:{_port_inside(server)}",
        folder=COMPOSE,
    )
    return with_gateway(text, front)


def _groups() -> list[int]:
    return [] if engine_host() is not None else device_groups()


def server_of(scenario: Scenario, name: str) -> Server:
    """A server by its name. Raises HarnessError that lists those that there are."""
    if name not in scenario.servers:
        raise HarnessError(f"the scenario has no server '{name}'; it has {', '.join(scenario.servers)}")
    return scenario.servers[name]
