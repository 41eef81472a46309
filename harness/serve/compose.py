"""A rendered Compose file as typed values: the keys that the harness carries out, and no other."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from harness.errors import HarnessError, did_you_mean
from harness.serve.interpolate import interpolate
from harness.serve.values import parse_bytes, parse_device, parse_port, parse_seconds, parse_volume
from harness.strict import decode, load_yaml


class Healthcheck(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    test: list[str]
    interval: str = "30s"
    timeout: str = "30s"
    retries: int = 3
    start_period: str = "0s"


class Ulimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    soft: int
    hard: int


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


class Volume(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    external: bool = False  # must exist already, and is never removed
    labels: dict[str, str] = {}


class LoadCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request that makes a server load the model, for servers that start without one."""

    path: str
    body: dict[str, Any]


class Serving(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client has to know of the server; the Compose file carries it as its `x-amd-llm-load`."""

    template: str
    port: int  # inside the container
    health: str
    metrics: str | None = None
    simulated: bool = False
    load: LoadCall | None = None


class ComposeFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    serving: Serving = msgspec.field(name="x-amd-llm-load")
    services: dict[str, Service]
    volumes: dict[str, Volume] = {}

    @property
    def server(self) -> Service:
        return self.services["server"]


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
    if list(raw["services"]) != ["server"]:
        return [f"$.services: exactly one service named 'server' is expected, got {list(raw['services'])}"]
    problems = _unknown(raw, ComposeFile, "$")
    problems += _unknown(raw["services"]["server"], Service, "$.services.server")
    for name, volume in (raw.get("volumes") or {}).items():
        problems += _unknown(volume, Volume, f"$.volumes.{name}")
    return problems


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


def _value_problems(compose: ComposeFile, *, may_interpolate: bool) -> list[str]:
    """Values that Docker would misread or refuse later. (Its SDK takes much of it without a word.)"""
    service = compose.server
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
            if may_interpolate and "$" in value:
                continue
            try:
                check(value)
            except ValueError as error:
                problems.append(f"$.services.server.{key}: {error}")
    if service.ipc == "host" and service.shm_size is not None:
        problems.append(
            "$.services.server: give ipc: host or shm_size, not both; with ipc: host the container uses the host's "
            f"/dev/shm and shm_size: {service.shm_size} would have no effect"
        )
    return problems + _volume_problems(compose, may_interpolate)


def _volume_problems(compose: ComposeFile, may_interpolate: bool) -> list[str]:
    problems = []
    for text in compose.server.volumes:
        source = text.split(":")[0]
        if may_interpolate and "$" in text:
            continue
        if not source.startswith("/") and source not in compose.volumes:
            problems.append(f"$.services.server.volumes: '{source}' is not declared in $.volumes")
    return problems


def _given(value: str | None) -> list[str]:
    return [] if value is None else [value]


def _parse_group(text: str) -> None:
    if not text.isdigit() and re.fullmatch(r"[a-z_][a-z0-9_-]*", text) is None:
        raise ValueError(f"'{text}' is not a group; give its number")


def _parse_image(text: str) -> None:
    if re.fullmatch(r"[a-z0-9][\w.:/@-]*", text) is None:
        raise ValueError(f"'{text}' is not the name of an image")


def _parse_ipc(text: str) -> None:
    if text not in ("host", "private", "shareable", "none"):
        raise ValueError(f"'{text}' is not an ipc mode; known: host, none, private, shareable")
