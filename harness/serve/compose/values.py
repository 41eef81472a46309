"""The short texts inside a Compose file: sizes, durations, ports, volumes, devices, and `${NAME}` of the environment.

Errors of the parsers are ValueError.
"""

import ipaddress
import posixpath
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
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


class Device(NamedTuple):
    host: str
    container: str
    permissions: str


def parse_bytes(text: str) -> int:
    """`16g` or `512m` in bytes."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"'{text}' is not a size; write it like 16g or 512m")
    return int(match[1]) * _UNITS[match[2]]


def parse_vllm_bytes(text: str) -> int:
    """`4G` or `4096M` as vLLM reads sizes: capital letters count in powers of two, small ones in powers of ten."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None or (match[2] in "KMGT" and "." in match[1]) or (not match[2] and "." in match[1]):
        raise ValueError(f"'{text}' is not a size; write it like 4G or 4096M")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1000 if match[2].islower() else 1024) ** power)


def tag_of(image: str) -> str:
    """The tag of an image's name; empty where it has none."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2]


def is_volume_name(text: str) -> bool:
    return _VOLUME_NAME.fullmatch(text) is not None


def parse_seconds(text: str) -> float:
    """`1m30s` or `500ms` in seconds."""
    if re.fullmatch(r"(\d+(us|ms|s|m|h))+", text) is None:
        raise ValueError(f"'{text}' is not a duration; write it like 30s or 1m30s")
    return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)(us|ms|s|m|h)", text))


def parse_port(text: str) -> Port:
    """`ADDRESS:HOST:CONTAINER`; a published port must say where, so the address is not optional.

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


def url_of(address: str, port: int) -> str:
    """Where to connect to what is published on `address`; every address is this host's own."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def parse_volume(text: str) -> Mount:
    """`SOURCE:TARGET[:ro|rw]`; the source is an absolute path of the host or a volume's name."""
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


def parse_device(text: str) -> Device:
    """`HOST[:CONTAINER[:PERMISSIONS]]`, both below /dev."""
    parts = text.split(":")
    host = parts[0]
    container = parts[1] if len(parts) > 1 else host
    permissions = parts[2] if len(parts) > 2 else "rwm"
    in_dev = all(posixpath.normpath(path).startswith("/dev/") for path in (host, container))
    if len(parts) > 3 or not in_dev or not permissions or not set(permissions) <= set("rwm"):
        raise ValueError(f"'{text}' is not a device; write it like /dev/kfd or /dev/kfd:/dev/kfd:rw")
    return Device(host, container, permissions)


_PART = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_][A-Za-z0-9_]*)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?[-?+])(?P<word>[^${}]*))?\}|(?P<bad>))"
)


def interpolate(value: Any, environment: Mapping[str, str], problems: list[str], path: str = "$") -> Any:
    """`value` with every text in it filled in; what cannot be filled in goes to `problems`.

    The forms are those of Compose: $NAME, ${NAME}, ${NAME-default}, ${NAME:-default}, ${NAME?error},
    ${NAME:?error}, ${NAME+other}, ${NAME:+other}, and $$ for a dollar sign. Stricter than Compose in one point:
    a plain ${NAME} that is not set is an error, where Compose warns and uses nothing.
    """
    if isinstance(value, str):
        return _PART.sub(lambda match: _filled(match, environment, problems, path), value)
    if isinstance(value, list):
        return [interpolate(item, environment, problems, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: interpolate(item, environment, problems, f"{path}.{key}") for key, item in value.items()}
    return value


def names_in(text: str) -> set[str]:
    """The environment variables that a text asks for."""
    return {name for match in _PART.finditer(text) if (name := match["plain"] or match["name"])}


def literal_of(text: str) -> str:
    """What stands in a text itself, defaults included; what comes from the environment becomes a NUL."""
    return _PART.sub(_literal, text)


def _literal(match: re.Match[str]) -> str:
    if match["plain"] or match["name"]:
        return (match["word"] if (match["operator"] or "")[-1:] in ("-", "+") else "") or "\0"
    return "$"


def _filled(match: re.Match[str], environment: Mapping[str, str], problems: list[str], path: str) -> str:
    if match["escaped"]:
        return "$"
    if match["bad"] is not None:
        problems.append(f"{path}: a dollar sign that starts no ${{NAME}}; write $$ for a plain one")
        return ""
    name = match["plain"] or match["name"]
    operator, word = match["operator"] or "", match["word"] or ""
    found = environment.get(name)
    given = bool(found) if operator.startswith(":") else found is not None
    match operator[-1:]:
        case "-":
            return found if given and found is not None else word
        case "+":
            return word if given else ""
    if not given or found is None:
        advice = word or f"export it, or write ${{{name}-}} where it may be missing"
        problems.append(f"{path}: the environment variable {name} is not set; {advice}")
        return ""
    return found
