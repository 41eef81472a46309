"""Everything that is wrong with the servers of a scenario, as far as it can be known before anything starts."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

from harness.engines import engines, template_of
from harness.scenario.scenario import Load, Scenario, Server
from harness.scenario.strict import where
from harness.serve.compose.compose import GATEWAY, SERVER, ComposeFile, Service, read
from harness.serve.compose.consent import missing
from harness.serve.compose.document import port_inside, rendered, server_document
from harness.serve.compose.managed import managed_flags, managed_settings
from harness.serve.compose.template import server_problems, variables
from harness.serve.compose.values import interpolate, names_in
from harness.serve.docker.location import engine_location
from harness.serve.lemonade.arguments import server_problems as lemonade_problems
from harness.serve.vllm.flags import removed_in, vllm_refuses
from harness.serve.vllm.gpu_fit import container_problems

# What may be said of a load whose requests are all given at once; of the rest nothing but its default.
_OFFLINE = {"user", "users", "processes", "requests", "batch_size", "think_s", "output_tokens", "output", "stream",
            "ramp_s", "drain_s", "timeout_s"}  # fmt: skip
_PLAIN = Load(user="batch")


def server_problems_of(scenario: Scenario, lines: dict[str, int]) -> list[str]:
    """Everything that is wrong with the servers, as far as it can be known unstarted; `lines` by path."""
    problems = _model_problems(scenario)
    for name, server in scenario.servers.items():
        path = f"$.servers.{name}"
        found = server_problems(server, path)
        found += lemonade_problems(server, scenario.model, path)
        if not found:
            found = _managed(server, scenario.model, path)
            compose, wrong = read(server_document(scenario, name))
            found += [_in_scenario(problem, server, path) for problem in wrong]
            if compose is not None:
                found += [f"{path}.{problem}" for problem in _command_problems(server, compose)]
                found += [f"{path}.{problem}" for problem in _folder_problems(server, compose)]
                found += [
                    _in_scenario(f"$.services.server.{key}: {problem}", server, path)
                    for key, problem in missing(server, compose, os.environ)
                ]
                if compose.serving.offline:
                    found += [f"{path}{problem}" for problem in _offline_problems(server, scenario)]
        problems += found
    located = (problem.partition(":") for problem in problems)
    return [f"{where(path, lines)}:{rest}" for path, _, rest in located]


def _model_problems(scenario: Scenario) -> list[str]:
    if scenario.servers and not scenario.model.strip():
        return ["$.model: it is empty; write the name that the servers know, such as Qwen/Qwen3-0.6B"]
    if scenario.servers and names_in(scenario.model):
        # It stands in every record of the work, and a server that got it filled in would repeat it.
        return [f"$.model: {scenario.model!r} has a variable in it, which is not filled in here; write the name itself"]
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
        compose, _ = read(rendered(bare, model, port=port_inside(server)))
        own = [] if compose is None else compose.services[service].command or []
        again = managed_flags(template, given["extra_args"], own, declared)
        problems += [f"{at}.variables.extra_args: {problem}" for problem in again]
    return problems


def _command_problems(server: Server, compose: ComposeFile) -> list[str]:
    """What the server's program, or the image that has it, would refuse."""
    service, serving = compose.server, compose.serving
    problems = [f"variables.entrypoint: {problem}" for problem in _starts_a_shell(server.template, service)]
    problems += [f"variables: {problem}" for problem in container_problems(service)]
    if not serving.vllm and not serving.offline:
        return problems
    if serving.vllm:
        gone = removed_in(service.command or [], service.image)
        problems += [f"variables.extra_args: {problem}" for problem in gone]
    return problems + [f"variables: {problem}" for problem in vllm_refuses(service.command or [])]


def _starts_a_shell(template: str, service: Service) -> list[str]:
    """The entrypoint that an image needs and was not given."""
    known = template_of(template)
    shells = [name for engine in engines() for name in engine.command.shells]
    starts_one = re.match(rf"(?:docker\.io/)?(?:{'|'.join(shells)})(?:[:@]|$)", service.image) is not None
    if known is None or known.program is None or service.entrypoint is not None or not starts_one:
        return []
    return [f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {known.program}"]


def _folder_problems(server: Server, compose: ComposeFile) -> list[str]:
    """Folders of this machine that are to be mounted and are not there; of another machine's nothing is known."""
    if not engine_location().has_our_files:
        return []
    sources: dict[str, str] = {}
    for written in dict.fromkeys(text for service in compose.services.values() for text in service.volumes):
        unset: list[str] = []
        source = interpolate(written, os.environ, unset).split(":")[0]
        if not unset and source.startswith("/") and not _there(source):
            sources.setdefault(source, _variable_with(written, server))
    return [
        f"variables.{variable}: there is no {source} on this machine; correct the path, or make "
        f"the folder: mkdir -p {shlex.quote(source)}"
        for source, variable in sources.items()
    ]


def _there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a folder that this user may not look into: the engine may
        return True


def _variable_with(volume: str, server: Server) -> str:
    """The variable that a volume, as it is written, comes from."""
    for name, value in server.variables.items():
        texts = value if isinstance(value, list) else [value]
        if any(volume == str(text) or volume.startswith(f"{text}:") for text in texts):
            return name
    return "volumes"


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
