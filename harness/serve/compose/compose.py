"""A rendered Compose file as typed values: the keys that the harness carries out, and no other."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from harness.errors import HarnessError, did_you_mean
from harness.scenario.strict import decode, load_yaml
from harness.serve.compose.values import (
    interpolate,
    is_volume_name,
    parse_bytes,
    parse_device,
    parse_port,
    parse_seconds,
    parse_volume,
)

SERVER, GATEWAY = "server", "gateway"  # names of services
_MOST_GROUP = 2**32 - 2


class Healthcheck(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    test: list[str]
    interval: str = "30s"
    timeout: str = "30s"
    retries: int = 3
    start_period: str = "0s"


class Ulimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    soft: int
    hard: int


class Dependency(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class ConfigMount(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: str
    target: str  # absolute path inside the container


class Service(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A container, in the words of the Compose specification."""

    image: str
    command: list[str] | None = None
    entrypoint: list[str] | None = None
    environment: dict[str, str] = {}
    volumes: list[str] = []
    devices: list[str] = []
    group_add: list[str] = []
    ipc: str | None = None
    shm_size: str | None = None
    security_opt: list[str] = []
    cap_add: list[str] = []
    ulimits: dict[str, Ulimit] = {}
    ports: list[str] = []
    healthcheck: Healthcheck | None = None
    init: bool = False
    user: str | None = None
    working_dir: str | None = None
    stop_grace_period: str = "10s"
    mem_limit: str | None = None
    memswap_limit: str | None = None
    cpus: float | None = None
    cpuset: str | None = None
    configs: list[ConfigMount] = []
    depends_on: dict[str, Dependency] = {}


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that a container finds at its start; `${NAME}` in it is filled in."""

    content: str


class Volume(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    external: bool = False  # must exist already, and is never removed
    labels: dict[str, str] = {}


class LoadCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request that makes a server load the model, for servers that start without one."""

    path: str
    body: dict[str, Any]


class Fetch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that the server gets through its own API before it is loaded."""

    protocol: str  # of harness.serve.fetch
    model: str
    source: str | None = None  # address of its configuration


class Managed(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Lemonade is to serve: it listens without a model, and is asked to install, download and load."""

    model: str  # with its prefix, as in user.NAME
    recipe: str | None = None  # None: the model's own
    checkpoint: str | None = None  # of a model that Lemonade does not know
    backend: str | None = None  # of the recipe; None: Lemonade's choice
    options: dict[str, Any] = {}  # of the load
    global_timeout_s: float = 600.0  # how long Lemonade waits for a backend, of each of two attempts


class Serving(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client has to know of the server; the Compose file carries it as its `x-amd-llm-load`."""

    template: str
    port: int = 0  # inside the container
    health: str = "/"
    metrics: str | None = None
    simulated: bool = False
    offline: bool = False  # a job over a cell's requests, which answers nobody
    version: str = "/version"  # where it tells its version
    fetch: Fetch | None = None
    load: LoadCall | None = None
    lemonade: Managed | None = None
    vllm: bool = False  # its command line is that of `vllm serve`
    gateway: "Serving | None" = None  # what stands in front of the server and takes the load


class ComposeFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    serving: Serving = msgspec.field(name="x-amd-llm-load")
    services: dict[str, Service]
    volumes: dict[str, Volume] = {}
    configs: dict[str, Config] = {}

    @property
    def server(self) -> Service:
        return self.services[SERVER]

    @property
    def preparations(self) -> list[str]:
        """Services that have to end well before the server starts."""
        return [name for name in self.services if name not in (SERVER, GATEWAY)]


def parse(text: str) -> ComposeFile:
    """The Compose file of one server. Raises HarnessError that lists everything that is wrong with it."""
    return _checked(*read(text))


def read(text: str) -> tuple[ComposeFile | None, list[str]]:
    """The Compose file of one server, and everything that is wrong with it."""
    problems: list[str] = []
    raw, lines = load_yaml(text, problems)
    compose = None
    if not problems:
        problems = _unsupported(raw)
    if not problems:
        compose = decode(raw, ComposeFile, lines, problems)
    if compose is not None:
        problems += _value_problems(compose, may_interpolate=True)
    return compose, problems


def filled_in(compose: ComposeFile, environment: Mapping[str, str]) -> ComposeFile:
    """The Compose file with every `${NAME}` replaced. It now holds secrets: never write it anywhere."""
    problems: list[str] = []
    raw = interpolate(msgspec.to_builtins(compose), environment, problems)
    filled = decode(raw, ComposeFile, {}, problems)
    if filled is not None:
        problems += _value_problems(filled, may_interpolate=False)
    return _checked(filled, problems)


def _checked(compose: ComposeFile | None, problems: list[str]) -> ComposeFile:
    if compose is None or problems:
        raise HarnessError(
            "the server's Compose file cannot be used: " + "; ".join(problems),
            next_step="Correct the variables of the server in the scenario, or its template in compose/.",
        )
    return compose


def _unsupported(raw: Any) -> list[str]:
    """Keys that Compose may know and the harness does not carry out, by name."""
    if not isinstance(raw, dict) or not isinstance(raw.get("services"), dict):
        return ["$: a Compose file is a mapping with 'services'"]
    problems = _services(raw["services"], raw.get("x-amd-llm-load"))
    if problems:
        return problems
    problems = _unknown(raw, ComposeFile, "$")
    for part, kind in (("services", Service), ("volumes", Volume)):
        items = raw.get(part)
        for name, item in items.items() if isinstance(items, dict) else ():
            problems += _unknown(item, kind, f"$.{part}.{name}")
    return problems


def _services(services: dict[str, Any], serving: Any) -> list[str]:
    """Which services there may be: the server, a gateway in front of it, and what only prepares the server's start."""
    if SERVER not in services:
        return [f"$.services: a service named '{SERVER}' is expected, got {list(services)}"]
    has_gateway = isinstance(serving, dict) and serving.get("gateway") is not None
    if has_gateway != (GATEWAY in services):
        return [f"$.services: the service '{GATEWAY}' and $.x-amd-llm-load.gateway belong together"]
    server = services[SERVER] if isinstance(services[SERVER], dict) else {}
    waits = server.get("depends_on") or {}
    prepared = [
        name
        for name, how in (waits.items() if isinstance(waits, dict) else ())
        if isinstance(how, dict) and how.get("condition") == "service_completed_successfully"
    ]
    return [
        f"$.services.{name}: the harness starts '{SERVER}', '{GATEWAY}' and what '{SERVER}' waits for with "
        "service_completed_successfully; nothing else"
        for name in services
        if name not in (SERVER, GATEWAY, *prepared)
    ]


def _unknown(mapping: Any, type_: type[Struct], path: str) -> list[str]:
    if not isinstance(mapping, dict):
        return []
    known = [field.encode_name for field in msgspec.structs.fields(type_)]
    return [
        f"{path}.{key}: the harness does not carry out '{key}' ({_advice(key, known)})"
        for key in mapping
        if key not in known
    ]


def _advice(key: str, known: list[str]) -> str:
    hint = did_you_mean(key, known)
    return hint if hint.startswith("did") else f"supported: {', '.join(sorted(known))}"


def _known(text: str, may_interpolate: bool) -> str | None:
    """A text with its variables filled in; None: one of them is not set yet."""
    if not may_interpolate:
        return text
    problems: list[str] = []
    filled: str = interpolate(text, os.environ, problems)
    return None if problems else filled


def _value_problems(compose: ComposeFile, *, may_interpolate: bool) -> list[str]:
    """Values that Docker would misread or refuse later. (Its SDK takes much of it without a word.)"""
    problems = []
    for name, service in compose.services.items():
        problems += _service_problems(service, f"$.services.{name}", may_interpolate)
        problems += _mount_problems(compose, name, may_interpolate)
    return problems


def _service_problems(service: Service, path: str, may_interpolate: bool) -> list[str]:
    checks: list[tuple[str, list[str], Callable[[str], object]]] = [
        ("volumes", service.volumes, parse_volume),
        ("devices", service.devices, parse_device),
        ("ports", service.ports, parse_port),
        ("group_add", service.group_add, _parse_group),
        ("shm_size", _given(service.shm_size), parse_bytes),
        ("mem_limit", _given(service.mem_limit), parse_bytes),
        ("memswap_limit", _given(service.memswap_limit), parse_bytes),
        ("stop_grace_period", [service.stop_grace_period], parse_seconds),
        ("image", [service.image], _parse_image),
        ("ipc", _given(service.ipc), _parse_ipc),
    ]
    if service.healthcheck is not None:
        times = [service.healthcheck.interval, service.healthcheck.timeout, service.healthcheck.start_period]
        checks.append(("healthcheck", times, parse_seconds))
    problems = []
    for key, values, check in checks:
        for value in values:
            known = _known(value, may_interpolate)
            if known is None:
                continue
            try:
                check(known)
            except ValueError as error:
                # The text as written: what the environment holds may be a secret.
                problems.append(f"{path}.{key}: {str(error).replace(known, value) if known else error}")
    problems += [f"{path}.environment: {problem}" for problem in map(_bad_name, service.environment) if problem]
    problems += [
        f"{path}.{key}: a text has the character NUL in it, which no program can be given; remove it"
        for key, value in msgspec.to_builtins(service).items()
        if _has_nul(value)
    ]
    if service.ipc == "host" and service.shm_size is not None:
        problems.append(
            f"{path}: give ipc: host or shm_size, not both; with ipc: host the container uses the host's "
            f"/dev/shm and shm_size: {service.shm_size} would have no effect"
        )
    return problems


def _mount_problems(compose: ComposeFile, name: str, may_interpolate: bool) -> list[str]:
    service = compose.services[name]
    problems = []
    for text in service.volumes:
        known = _known(text, may_interpolate)
        if known is None:
            continue
        source = known.split(":")[0]
        # What is no name of a volume either was said already.
        if is_volume_name(source) and source not in compose.volumes:
            problems.append(
                f"$.services.{name}.volumes: there is no volume '{source}' in this file; ${{NAME}} can stand for a "
                "folder only, an absolute path"
            )
    for mount in service.configs:
        if mount.source not in compose.configs:
            problems.append(
                f"$.services.{name}.configs: '{mount.source}' stands nowhere under the file's own 'configs'"
            )
        if not mount.target.startswith("/"):
            problems.append(f"$.services.{name}.configs: '{mount.target}' is not an absolute path")
    return problems


def _bad_name(name: str) -> str | None:
    """Why a variable of the environment cannot have this name; None: it can."""
    if name and name.isprintable() and not set(name) & set("= "):
        return None
    return f"{name!r} cannot be the name of a variable; use letters, digits and '_'"


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def _given(value: str | None) -> list[str]:
    return [] if value is None else [value]


def _parse_group(text: str) -> None:
    # A name would be looked up in the image, where the group has another number or none.
    if not text.isdigit() or int(text) > _MOST_GROUP:
        raise ValueError(f"'{text}' is not the number of a group; `stat -c %g /dev/kfd /dev/dri/render*` prints them")


def _parse_image(text: str) -> None:
    if re.fullmatch(r"[a-z0-9][\w.:/@-]*", text) is None:
        raise ValueError(f"'{text}' is not the name of an image")


def _parse_ipc(text: str) -> None:
    if text not in ("host", "private", "shareable", "none"):
        raise ValueError(f"'{text}' is not an ipc mode; known: host, none, private, shareable")
