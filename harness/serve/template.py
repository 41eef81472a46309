"""Compose templates: their declared variables, their rendering, and the servers of a scenario, each rendered once.

A template begins with a Jinja comment that holds a YAML mapping, name -> {type, doc, default, min, max, choices}, and
so do the parts `_NAME.yaml.j2` that it includes. These are the only declarations of its variables. A variable without
a default is required; a type that ends in "?" also takes null. The limits are those of the server: the harness refuses
what the server would refuse at its start.
"""

import datetime
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from jinja2 import FileSystemLoader, StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import SandboxedEnvironment
from msgspec import Struct

from harness.base.errors import HarnessError, Problem, ScenarioError, did_you_mean
from harness.base.files import COMPOSE, dump_yaml, inline_yaml, own_yaml, read_text
from harness.base.process import free_port
from harness.engines import engines, find_template
from harness.engines.flags import engine_words, without_options, words_of
from harness.machine.gpus import choose_cpu_dtype, find_device_groups
from harness.scenario import Gateway, Scenario, Server
from harness.serve import compose_file
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, Service
from harness.serve.security import find_open_secrets

AUTO = "auto"  # of a variable with `auto`
Kind = Literal["string", "integer", "number", "boolean", "list", "mapping"]
HARNESS_VARIABLES = ("model", "upstream")  # declared in the templates, filled in by the harness
GATEWAYS = tuple(name for engine in engines() if engine.gateway for name in engine.templates)
NOT_SERVERS = ("locust", "volumes", *GATEWAYS)  # and files that begin with `_`, which templates include
_INCLUDED = re.compile(r'{% include "(_\w+)\.yaml\.j2" %}')
_TYPE_LABELS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "list": "a list of texts or numbers",
    "mapping": "a mapping from names to texts or numbers",
}


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A declared variable of a template."""

    type: str  # a Kind, with "?" at the end when null is allowed
    doc: str
    default: Any = msgspec.UNSET
    min: int | float | None = None
    max: int | float | None = None
    choices: list[str] | None = None
    auto: bool = False  # it may also be AUTO: of gpu_memory_utilization the harness replaces it, else the server does
    pinned: bool = False  # its default is the image that compose/images.yaml pins for the template

    @property
    def required(self) -> bool:
        return self.default is msgspec.UNSET


class Quoted(str):
    """Text that went through the quoting filter. The expressions of a template may print nothing else."""


class Pin(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of compose/images.yaml."""

    image: str
    templates: list[str]  # of which it is the default
    version: str
    date: str  # YYYY-MM-DD or YYYY-MM
    source: str

    @property
    def day(self) -> datetime.date:
        """Return the date; of a month its first day."""
        return datetime.date.fromisoformat(self.date if len(self.date) > 7 else f"{self.date}-01")


@cache
def pins() -> tuple[Pin, ...]:
    """Return compose/images.yaml."""
    listed = yaml.load(read_text(COMPOSE / "images.yaml"), yaml.BaseLoader)  # every value is a text
    return tuple(msgspec.convert(listed, list[Pin]))


def find_pin(template: str) -> Pin:
    """Return the pinned image of a template."""
    return next(pin for pin in pins() if template in pin.templates)


def templates() -> list[str]:
    """Return the names of the server templates."""
    names = (path.name.removesuffix(".yaml.j2") for path in COMPOSE.glob("*.yaml.j2"))
    return sorted(name for name in names if name not in NOT_SERVERS and not name.startswith("_"))


def read_variables(template: str) -> dict[str, Variable]:
    """Return the declared variables of a template: its own, and those of the parts that it includes.

    Its own declaration counts if a part has the same one. Raises HarnessError for a template that does not exist.
    """
    path = COMPOSE / f"{template}.yaml.j2"
    if template not in (*templates(), *GATEWAYS, "locust") or not path.is_file():
        raise HarnessError(
            f"there is no server template '{template}'; {did_you_mean(template, templates())}",
            next_step=f"Templates are the files *.yaml.j2 in {COMPOSE}.",
        )
    text, declared = read_text(path), dict[str, Any]()
    for part in (text, *(read_text(COMPOSE / f"{name}.yaml.j2") for name in _INCLUDED.findall(text))):
        declared = declared | own_yaml(part.split("{#", 1)[-1].split("#}", 1)[0]) | declared
    variables = msgspec.convert(declared, dict[str, Variable])
    return {
        name: msgspec.structs.replace(variable, default=find_pin(template).image) if variable.pinned else variable
        for name, variable in variables.items()
    }


def get_variable(server: Server | Gateway, name: str) -> Any:
    """Return the value of a server's variable: as given, else its template's default, else None."""
    declared = read_variables(server.template).get(name)
    return server.variables.get(name, None if declared is None else declared.default)


def all_variables(server: Server) -> dict[str, Any]:
    """Return the variables of a server with the defaults of its template; of an unknown template, those given."""
    declared = {} if find_template(server.template) is None else read_variables(server.template)
    return {name: variable.default for name, variable in declared.items() if not variable.required} | server.variables


def find_variable_problems(server: Server) -> Iterator[Problem]:
    """Yield the problems of a server's template and variables; paths are relative to the server."""
    owners: list[tuple[str, str, Server | Gateway, Sequence[str]]] = [("server template", "", server, templates())]
    if server.gateway is not None:
        owners.append(("gateway", ".gateway", server.gateway, GATEWAYS))
    for kind, path, owner, names in owners:
        if owner.template not in names:
            advice = did_you_mean(owner.template, names)
            if owner.template == "running":  # as `harness init --url` writes it
                advice = "'running' is the server of --url: give --url URL"
            yield Problem(f"{path}.template", f"there is no {kind} '{owner.template}'; {advice}")
            return
        yield from _check_variables(read_variables(owner.template), owner.variables, f"{path}.variables")


def _check_variables(declared: dict[str, Variable], given: dict[str, Any], path: str) -> Iterator[Problem]:
    settable = {name: variable for name, variable in declared.items() if name not in HARNESS_VARIABLES}
    for name, value in given.items():
        place = f"{path}.{name}"
        if name in HARNESS_VARIABLES:
            yield Problem(place, f"comes from the scenario's own '{name}'; remove it here")
        elif name not in settable:
            yield Problem(place, f"unknown variable; {did_you_mean(str(name), settable)}")
        elif secrets := find_open_secrets(value, place):  # first: any other problem shows the value
            yield from secrets
        elif (problem := _check_value(settable[name], value)) is not None:
            yield Problem(place, problem)
    for name, variable in settable.items():
        if variable.required and name not in given:
            yield Problem(path, f"'{name}' is missing ({variable.doc})")


def _check_value(variable: Variable, value: Any) -> str | None:
    """Return what is wrong with a value; None for a good one."""
    if value is None and variable.type.endswith("?") or variable.auto and value == AUTO:
        return None
    if not _has_kind(value, variable.type.rstrip("?")):
        expected = _TYPE_LABELS[variable.type.rstrip("?")] + (f" or {AUTO}" if variable.auto else "")
        return f"{expected} is expected, got {value!r}"
    if variable.choices is not None and value not in variable.choices:
        return f"there is no '{value}'; {did_you_mean(str(value), variable.choices)}"
    minimum, maximum = variable.min, variable.max
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        return f"a number {format_limits(variable)} is expected, got {value!r}"
    return None


def format_limits(variable: Variable) -> str:
    """Return the range of a number as text; empty without one."""
    if variable.min is not None and variable.max is not None:
        return f"from {variable.min} to {variable.max}"
    return f"of at least {variable.min}" if variable.min is not None else ""


def _has_kind(value: Any, kind: str) -> bool:
    if kind == "list":
        return isinstance(value, list) and all(map(_is_scalar, value))
    if kind == "mapping":
        return isinstance(value, dict) and all(isinstance(key, str) and _is_scalar(value[key]) for key in value)
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "number":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, str if kind == "string" else int)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def render(
    template: str,
    given: dict[str, Any],
    *,
    model: str,
    host_port: int,
    groups: list[int],
    cpu_dtype: str = "float32",
    upstream: str | None = None,
    locust: dict[str, Any] | None = None,
) -> str:
    """Return the Compose file of a server as text, in which secrets are still `${NAME}`.

    `host_port`, `groups` (numeric ids of the device nodes) and `cpu_dtype` (for `dtype`) replace null variables.
    `upstream` is the address to which a gateway forwards requests, or that Locust loads; None: this server.
    `locust` adds the load generator's service, with values for the variables of the template `locust`.
    Raises ScenarioError with all bad variables.
    """
    declared = read_variables(template)
    problems = list(_check_variables(declared, given, "$.variables"))
    values = _fill_defaults(declared, given) | {"model": model, "locust": None}
    values["upstream"] = upstream or f"http://server:{values.get('port')}"
    if locust is not None:
        declared_locust = read_variables("locust")
        problems += _check_variables(declared_locust, locust, "$.locust")
        values["locust"] = _fill_defaults(declared_locust, locust)
    if problems:
        raise ScenarioError(f"server template '{template}'", problems)
    for name, computed in (("host_port", host_port), ("groups", groups), ("dtype", cpu_dtype)):
        if name in declared and values[name] is None:
            values[name] = computed
    try:
        return _environment(COMPOSE).get_template(f"{template}.yaml.j2").render(values)
    except TemplateError as error:
        raise HarnessError(f"{COMPOSE / template}.yaml.j2: {error}", next_step="Correct the template.") from None


def _fill_defaults(declared: dict[str, Variable], given: dict[str, Any]) -> dict[str, Any]:
    return {name: given.get(name, variable.default) for name, variable in declared.items()}


@cache
def _environment(folder: Path) -> SandboxedEnvironment:
    """The environment of a folder's templates. It keeps those that it has compiled."""
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_require_quoted,
        autoescape=False,
    )
    environment.filters["tojson"] = quote_yaml
    environment.filters["volume_source"] = lambda volume: str(volume).split(":")[0]
    environment.tests["host_path"] = lambda source: source.startswith(("/", "$", ".", "~"))
    return environment


def _require_quoted(value: Any) -> Any:
    if not isinstance(value, Quoted):
        raise TemplateError(f"the value {value!r} is printed without the filter tojson")
    return value


def quote_yaml(value: Any) -> Quoted:
    """Return a value as YAML on one line that cannot end early: JSON, with every unprintable character escaped.

    The items of lists and mappings become texts, which Compose expects of arguments and variables.
    """
    if isinstance(value, list | tuple):
        return Quoted("[" + ", ".join(quote_yaml(str(item)) for item in value) + "]")
    if isinstance(value, dict):
        return Quoted("{" + ", ".join(f"{quote_yaml(str(k))}: {quote_yaml(str(v))}" for k, v in value.items()) + "}")
    if isinstance(value, Undefined):
        str(value)  # raises an error that names the variable
    return Quoted(inline_yaml(value))


COMPILE_CACHE = "--compile-cache"  # of the embedded engine


def process_words(service: Service) -> list[str]:
    """Return the command line of a server that runs as a process; where it keeps what it compiles is the run's."""
    return without_options(service.command or [], COMPILE_CACHE)


class PreparedServer(Struct, frozen=True, kw_only=True):
    """A server of a scenario, rendered and parsed once for all checks and for the start."""

    name: str
    server: Server
    text: str  # the Compose file; the Docker Engine chooses the host's port unless the server has a host_port
    compose: ComposeFile | None  # None: there are problems
    problems: list[Problem]  # of the Compose file

    @property
    def file(self) -> ComposeFile:
        """The Compose file. Raises HarnessError with all of its problems."""
        return compose_file.require_valid(self.compose, self.problems)

    @property
    def service(self) -> Service:
        return self.file.server

    @property
    def engine_arguments(self) -> list[str]:
        """The command line of the engine; for Lemonade, the words of a variable."""
        template = find_template(self.server.template)
        if template is not None and template.arguments is not None:
            return words_of(self.server.variables.get(template.arguments))
        return engine_words(self.service.command or [])

    @property
    def start_key(self) -> bytes:
        """What a start is made of: equal for two servers that start the same.

        A process has only the command line and the environment of its service, and takes a free port at each start.
        """
        if self.server.container:
            return msgspec.json.encode(self.file, order="deterministic")
        words = without_options(process_words(self.service), "--host", "--port")
        return msgspec.json.encode([words, self.service.environment], order="deterministic")

    @property
    def front(self) -> str:
        """The service that takes the load: the gateway if there is one, else the server."""
        return SERVER if self.server.gateway is None else GATEWAY

    @property
    def network_url(self) -> str:
        """The address for the load in the server's Compose network."""
        return f"http://{self.front}:{get_container_port(self.server.gateway or self.server)}"

    @property
    def gives_gpus(self) -> bool:
        """Whether the container gets the devices of GPUs."""
        hosts = (compose_file.parse_device(text)[0] for text in self.service.devices)
        return any(host.startswith(("/dev/kfd", "/dev/dri")) for host in hosts)


_prepared_servers: dict[tuple[str, str, str], PreparedServer] = {}


def prepare_server(scenario: Scenario, server_name: str) -> PreparedServer:
    """Render a server of a scenario at the first call. Raises HarnessError for an unusable template."""
    server = find_server(scenario, server_name)
    # The whole server is in the key: filling in `auto` changes its variables.
    key = (server_name, repr(server), scenario.model)
    if key not in _prepared_servers:
        text = render_server(server, scenario.model, port=None if server.container else get_container_port(server))
        compose, problems = compose_file.read_compose(text)
        _prepared_servers[key] = PreparedServer(
            name=server_name, server=server, text=text, compose=compose, problems=problems
        )
    return _prepared_servers[key]


def get_container_port(server: Server | Gateway) -> Any:
    """Return the port that the server or gateway opens in its container."""
    return get_variable(server, "port") or 0


def write_compose_file(scenario: Scenario, server_name: str, run_folder: Path) -> PreparedServer:
    """Prepare a server that is about to start, and write its Compose file as compose/SERVER.yaml of the run."""
    prepared = prepare_server(scenario, server_name)
    if not prepared.server.container:  # each start of a process takes a free port of this host
        text = render_server(prepared.server, scenario.model)
        prepared = msgspec.structs.replace(prepared, text=text, compose=compose_file.parse_compose(text))
    (run_folder / "compose").mkdir(parents=True, exist_ok=True)
    (run_folder / "compose" / f"{server_name}.yaml").write_text(prepared.text, encoding="utf-8")
    return prepared


def render_server(server: Server, model: str, port: int | None = None, locust: dict[str, object] | None = None) -> str:
    """Return the Compose file of a server and its gateway, published at `port` of the host.

    Without `port` it is to be started now, at a port that the engine chooses.
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
        groups=find_device_groups(),
        cpu_dtype=choose_cpu_dtype(),
        upstream=None if gateway is None else f"http://{GATEWAY}:{get_container_port(gateway)}",
        locust=locust,
    )
    if gateway is None:
        return text
    front = render(
        gateway.template,
        dict(gateway.variables),
        model=model,
        host_port=0 if port is None else get_container_port(gateway),
        groups=[],
        upstream=f"http://{SERVER}:{get_container_port(server)}",
    )
    return add_gateway(text, front)


def find_server(scenario: Scenario, name: str) -> Server:
    """Return a server by its name. Raises HarnessError with the known names."""
    if name not in scenario.servers:
        raise HarnessError(f"the scenario has no server '{name}'; it has {', '.join(scenario.servers)}")
    return scenario.servers[name]


def add_gateway(server: str, gateway: str) -> str:
    """Return the Compose file of a server with that of its gateway added, both as text."""
    compose, added = own_yaml(server), own_yaml(gateway)
    compose["x-amd-llm-load"]["gateway"] = added.pop("x-amd-llm-load")
    return _merge_yaml(compose, added)


def add_services(compose: str, added: dict[str, Any]) -> str:
    """Return the Compose file with these services and configs added."""
    return _merge_yaml(own_yaml(compose), added)


def _merge_yaml(compose: dict[str, Any], added: dict[str, Any]) -> str:
    for part, entries in added.items():
        compose.setdefault(part, {}).update(entries)
    return dump_yaml(compose, _Dumper, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not a plain word: YAML 1.2 may read as a number what YAML 1.1 reads as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_WORD = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w./-]*", re.IGNORECASE)


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None if _WORD.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
