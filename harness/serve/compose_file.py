"""A rendered Compose file as typed values. A key that the harness does not support is a problem."""

import ipaddress
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from harness.base.errors import HarnessError, Problem
from harness.scenario.shape import decode, load_yaml

SERVER, GATEWAY = "server", "gateway"  # names of services


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
    """A container; the keys are those of the Compose specification."""

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
    """A file that a container gets at its start; `${NAME}` in it is filled in."""

    content: str


class Volume(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    external: bool = False  # must exist already, and is never removed
    labels: dict[str, str] = {}


class LoadCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request that makes a server load the model, for servers that start without one."""

    path: str
    body: dict[str, Any]
    fetch: "LoadCall | None" = None  # sent after the answer 404: the server downloads the model


class LemonadeSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that Lemonade will serve: it starts without one, and installs, downloads and loads on request."""

    model: str  # with its prefix, as in user.NAME
    recipe: str | None = None  # None: the model's own
    checkpoint: str | None = None  # of a model that Lemonade does not know
    backend: str | None = None  # of the recipe; None: Lemonade's choice
    options: dict[str, Any] = {}  # of the load
    others: list[str] = []  # models of loads: Lemonade loads them when they are asked for, and evicts
    global_timeout_s: float = 600.0  # how long Lemonade waits for a backend, in each of two attempts


class Serving(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client must know about the server: `x-amd-llm-load` of the Compose file."""

    template: str
    port: int = 0  # inside the container
    health: str = "/"
    metrics: str | None = None
    simulated: bool = False
    offline: bool = False  # a job over a cell's requests, no API
    version: str = "/version"  # path of its version
    load: LoadCall | None = None
    lemonade: LemonadeSettings | None = None
    gateway: "Serving | None" = None  # in front of the server; takes the load
    compiled: list[str] = []  # folders of the container in which the server keeps what it compiles


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
        """The services that must end well before the server starts."""
        return [name for name in self.services if name not in (SERVER, GATEWAY)]


def parse_compose(text: str) -> ComposeFile:
    """Return the Compose file of one server. Raises HarnessError with all of its problems."""
    return require_valid(*read_compose(text))


def read_compose(text: str) -> tuple[ComposeFile | None, list[Problem]]:
    """Return the Compose file of one server, and its problems: unknown keys, and values that Docker would refuse."""
    problems: list[Problem] = []
    raw, lines = load_yaml(text, problems)
    compose = None if problems else decode(raw, ComposeFile, lines, problems)
    if compose is not None:
        problems += _check_service_names(compose) or _check_values(compose, os.environ)
    return compose, problems


def fill_variables(compose: ComposeFile, environment: Mapping[str, str]) -> ComposeFile:
    """Return the Compose file with every `${NAME}` replaced. It then holds secrets: never write it anywhere."""
    problems: list[Problem] = []
    raw = interpolate(msgspec.to_builtins(compose), environment, problems)
    filled = decode(raw, ComposeFile, {}, problems)
    if filled is not None:
        problems += _check_values(filled, None)
    return require_valid(filled, problems)


def require_valid(compose: ComposeFile | None, problems: list[Problem]) -> ComposeFile:
    """Return the Compose file. Raises HarnessError with its problems, if there are any."""
    if compose is None or problems:
        raise HarnessError(
            "the server's Compose file cannot be used: " + "; ".join(map(str, problems)),
            next_step="Correct the variables of the server in the scenario, or its template in compose/.",
        )
    return compose


def _check_service_names(compose: ComposeFile) -> list[Problem]:
    """Return the problems of the services: only the server, its gateway, and its preparations may be there."""
    dependencies = compose.server.depends_on.items() if SERVER in compose.services else ()
    prepared = [name for name, how in dependencies if how.condition == "service_completed_successfully"]
    gateway = [GATEWAY] if compose.serving.gateway is not None else []
    if sorted(compose.services) == sorted([SERVER, *gateway, *prepared]):
        return []
    expected = f"'{SERVER}', what it waits for with service_completed_successfully, and '{GATEWAY}' if it has one"
    return [Problem("$.services", f"the harness starts {expected}; nothing else (got {', '.join(compose.services)})")]


def _check_values(compose: ComposeFile, environment: Mapping[str, str] | None) -> Iterator[Problem]:
    """Yield a problem for each value that Docker would misread or refuse. `environment`: None if already filled in."""
    for name, service in compose.services.items():
        for problem in (*_check_service(service, environment), *_check_mounts(compose, service, environment)):
            yield problem.below(f"$.services.{name}")


def _fill_text(text: str, environment: Mapping[str, str] | None) -> str | None:
    """Return a text with its variables filled in; None if one of them is not set yet."""
    if environment is None:
        return text
    problems: list[Problem] = []
    filled: str = interpolate(text, environment, problems)
    return None if problems else filled


def _check_service(service: Service, environment: Mapping[str, str] | None) -> Iterator[Problem]:
    checks: list[tuple[str, Sequence[str | None], Callable[[str], object]]] = [
        ("volumes", service.volumes, parse_volume),
        ("devices", service.devices, parse_device),
        ("ports", service.ports, parse_port),
        ("group_add", service.group_add, _require_group),
        ("shm_size", [service.shm_size], parse_bytes),
        ("mem_limit", [service.mem_limit], parse_bytes),
        ("stop_grace_period", [service.stop_grace_period], parse_seconds),
    ]
    for key, values, check in checks:
        for value in values:
            if value is None or (filled := _fill_text(value, environment)) is None:
                continue
            try:
                check(filled)
            except ValueError as error:
                # Show the text as written: the environment's value may be a secret.
                yield Problem(f".{key}", str(error).replace(filled, value) if filled else str(error))
    for name in service.environment:
        if not name or not name.isprintable() or set(name) & set("= "):
            yield Problem(".environment", f"{name!r} cannot be the name of a variable; use letters, digits and '_'")
    for key, item in msgspec.to_builtins(service).items():
        if _has_nul(item):
            yield Problem(f".{key}", "a text has the character NUL in it, which no program can be given; remove it")
    if service.ipc == "host" and service.shm_size is not None:
        yield Problem(
            "",
            "give ipc: host or shm_size, not both; with ipc: host the container uses the host's "
            f"/dev/shm and shm_size: {service.shm_size} would have no effect",
        )


def _check_mounts(compose: ComposeFile, service: Service, environment: Mapping[str, str] | None) -> Iterator[Problem]:
    for text in service.volumes:
        source = (_fill_text(text, environment) or "").split(":")[0]
        if is_volume_name(source) and source not in compose.volumes:
            problem = f"there is no volume '{source}' in this file; ${{NAME}} must expand to an absolute host path"
            yield Problem(".volumes", problem)
    for mount in service.configs:
        if mount.source not in compose.configs:
            yield Problem(".configs", f"'{mount.source}' is not defined under the file's own 'configs'")


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def _require_group(text: str) -> None:
    if not text.isdigit():  # a name would be looked up in the image, where the group has another number or none
        raise ValueError(f"'{text}' is not the number of a group; `stat -c %g /dev/kfd /dev/dri/render*` prints them")


_BYTES_PER_UNIT = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


class Port(NamedTuple):
    address: str
    host: int
    container: int


class Mount(NamedTuple):
    source: str  # absolute path of the host, or a volume's name
    target: str
    read_only: bool

    @property
    def named(self) -> bool:
        return not self.source.startswith("/")


def parse_bytes(text: str) -> int:
    """Return a size such as `16g` or `512m` in bytes."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTES_PER_UNIT:
        raise ValueError(f"'{text}' is not a size; write it like 16g or 512m")
    return int(match[1]) * _BYTES_PER_UNIT[match[2]]


def is_volume_name(text: str) -> bool:
    return _VOLUME_NAME.fullmatch(text) is not None


def parse_seconds(text: str) -> float:
    """Return a duration such as `1m30s` or `500ms` in seconds."""
    if re.fullmatch(r"(\d+(us|ms|s|m|h))+", text) is None:
        raise ValueError(f"'{text}' is not a duration; write it like 30s or 1m30s")
    return sum(int(number) * _SECONDS_PER_UNIT[unit] for number, unit in re.findall(r"(\d+)(us|ms|s|m|h)", text))


def parse_port(text: str) -> Port:
    """Parse `ADDRESS:HOST:CONTAINER`. The address is required, because it decides who can connect.

    The host's port 0 leaves the choice to the Docker Engine.
    """
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[0-9.]+):(\d{1,5}):(\d{1,5})(?:/tcp)?", text)
    if match is None:
        raise ValueError(f"'{text}' is not a published port; write it like 127.0.0.1:8000:8000")
    address = match[1].strip("[]")
    ipaddress.ip_address(address)
    port = Port(address, int(match[2]), int(match[3]))
    if not (port.host <= 65535 and 1 <= port.container <= 65535):
        raise ValueError(f"'{text}': a port is a number from 1 to 65535")
    return port


def make_url(address: str, port: int) -> str:
    """Return the URL of a port that is published on `address` of this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def parse_volume(text: str) -> Mount:
    """Parse `SOURCE:TARGET[:ro|rw]`; the source is an absolute path of the host or a volume's name."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError(f"'{text}' is not a volume; write it like /data/models:/models:ro")
    source, target = parts[0], parts[1]
    if not target.startswith("/") or posixpath.normpath("/" + target.lstrip("/")) == "/":
        raise ValueError(f"'{text}': the place in the container must be an absolute path below /")
    if source.startswith("/"):
        if posixpath.normpath("/" + source.lstrip("/")) == "/":
            raise ValueError(f"'{text}' would give the whole host to the container; name the folder that it needs")
    elif not is_volume_name(source):
        raise ValueError(f"'{text}': the source is neither an absolute path nor the name of a volume")
    return Mount(source, target, parts[2:] == ["ro"])


def parse_device(text: str) -> tuple[str, str, str]:
    """Return host path, container path and permissions of `HOST[:CONTAINER[:PERMISSIONS]]`, both below /dev."""
    parts = text.split(":")
    host = parts[0]
    container = parts[1] if len(parts) > 1 else host
    permissions = parts[2] if len(parts) > 2 else "rwm"
    in_dev = all(posixpath.normpath(path).startswith("/dev/") for path in (host, container))
    if len(parts) > 3 or not in_dev or not permissions or not set(permissions) <= set("rwm"):
        raise ValueError(f"'{text}' is not a device; write it like /dev/kfd or /dev/kfd:/dev/kfd:rw")
    return host, container, permissions


_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_][A-Za-z0-9_]*)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?-)(?P<word>[^${}]*))?\}|(?P<bad>))"
)


def interpolate(value: Any, environment: Mapping[str, str], problems: list[Problem], path: str = "$") -> Any:
    """Fill in the variables of all texts in `value`; add a problem for each one that cannot be filled in.

    The forms are those of Compose: $NAME, ${NAME}, ${NAME-default}, ${NAME:-default}, and $$ for a dollar sign. A plain
    ${NAME} that is not set is an error, where Compose warns and uses nothing.
    """
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _fill_match(match, environment, problems, path), value)
    if isinstance(value, list):
        return [interpolate(item, environment, problems, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: interpolate(item, environment, problems, f"{path}.{key}") for key, item in value.items()}
    return value


def find_variable_names(text: str) -> set[str]:
    """Return the environment variables that a text names."""
    return {name for match in _VARIABLE.finditer(text) if (name := match["plain"] or match["name"])}


def drop_variables(text: str) -> str:
    """Return what a text itself contains, defaults included; the value of a variable becomes a NUL."""

    def keep_default(match: re.Match[str]) -> str:
        return match["word"] or "\0" if match["plain"] or match["name"] else "$"

    return _VARIABLE.sub(keep_default, text)


def _fill_match(match: re.Match[str], environment: Mapping[str, str], problems: list[Problem], path: str) -> str:
    if match["escaped"]:
        return "$"
    if match["bad"] is not None:
        problems.append(Problem(path, "a dollar sign that starts no ${NAME} or ${NAME:-default}; write $$ for it"))
        return ""
    name, operator = match["plain"] or match["name"], match["operator"]
    value = environment.get(name)
    if operator is not None and (value is None or (operator == ":-" and not value)):
        return match["word"] or ""
    if value is None:
        advice = f"export it, or write ${{{name}-}} where it may be missing"
        problems.append(Problem(path, f"the environment variable {name} is not set; {advice}"))
        return ""
    return value
