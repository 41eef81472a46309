"""What a scenario must not give away: this machine to a container, and secrets to what a run keeps.

What would give a container this machine is refused unless the scenario's server consents with `allow: [CODE]`. A secret
stays in the shell: refused where a scenario writes one out, blacked out where it names one of the environment.
"""

import ipaddress
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from harness.engines import find_template
from harness.errors import Problem, ServerError
from harness.redact import MIN_SECRET_CHARS, find_secret_form, is_secret, masked
from harness.scenario import Consent, Server
from harness.serve.compose_file import (
    ComposeFile,
    Service,
    drop_variables,
    find_variable_names,
    interpolate,
    parse_device,
    parse_port,
    parse_volume,
)
from harness.serve.location import engine_location
from harness.summary import Reason, because

CONSENT_REASONS: dict[Consent, str] = {
    "docker-socket": "who reaches the container engine's socket can do anything on this machine",
    "host-files": "it holds the system's own files, devices or credentials",
    "host-devices": "it is no device of a GPU",
    "host-ipc": "the container sees the shared memory of this machine's processes",
    "open-port": "every machine that reaches this one can use the server",
    "privileges": "it takes away what separates the container from this machine",
}
_SOCKETS = (
    "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/crio/crio.sock",
    "/run/docker/containerd/containerd.sock",
)  # fmt: skip
_SOCKET = re.compile(r".*/(?:docker|containerd|podman|crio|buildkitd|cri-dockerd)\.sock(?:\.raw)?")
# Not even to be read: themselves, what is in them, and what they are in.
_UNREADABLE = (
    "/proc", "/sys", "/dev", "/boot", "/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh",
    "/etc/ssl/private", "/etc/kubernetes", "/etc/docker", "/var/lib/docker", "/var/lib/containerd",
    "/var/lib/containers", "/var/lib/kubelet", "/run/secrets", "/run/systemd", "/run/dbus", "/run/user",
)  # fmt: skip
# Not to be written: likewise.
_UNWRITABLE = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/var/log", "/var/spool")
# Whole, not to be written; of the folders in them, those that programs of this machine keep their state in.
_UNWRITABLE_WHOLE = re.compile(
    r"/(?:opt|srv|tmp|mnt|media|var/tmp|var/mnt|run/media)|/(?:var|run)/(?!(?:tmp|mnt|home|media)(?:/|$)).*"
)
# A whole home; in one, the hidden files, which hold credentials and what a login runs. Other folders hold models.
_A_HOME = r"(?:(?:/var)?/home/[^/]+|/root|/var/roothome)"
_HOME = re.compile(
    rf"(?:/var)?/home|{_A_HOME}(?:/\.(?!(?:cache|local/share|[^/]+/models)(?:/|$)).*)?"
    rf"|{_A_HOME}/\.cache/huggingface/(?:token|stored_tokens)"
)
_GPU_DEVICE = re.compile(r"/dev/(?:kfd|dri|accel|nvidia[\w-]*|null|zero|full|u?random)(?:/.*)?")
_TEMPLATE_PRIVILEGES = (
    "seccomp=unconfined",
    "SYS_PTRACE",
    "SYS_NICE",
)  # what templates that ship need, as their makers' commands
_HARMLESS_OPTION = re.compile(r"no-new-privileges(?:[:=]true)?")


class Exposure(NamedTuple):
    """One thing that a container gets of its host."""

    code: Consent
    key: str  # of the service
    value: str  # as it is written

    def __str__(self) -> str:
        return f"{self.code} ({self.key}: {self.value})"


def find_exposures(compose: ComposeFile, environment: Mapping[str, str]) -> list[Exposure]:
    """All that the containers of a Compose file get of their host and that needs consent, once each.

    The value of `${NAME}` is checked where it is set. A path is looked at as it is written and, where the engine
    sees the same files, as it leads through symbolic links.
    """
    found = {}
    for service in compose.services.values():
        for exposure in _find_service_exposures(service, compose.serving.template, environment):
            found[exposure] = True
    return list(found)


def find_missing_consent(server: Server, compose: ComposeFile, environment: Mapping[str, str]) -> list[Problem]:
    """What the server has no consent for; the path is a key of the service."""
    return [
        Problem(
            one.key,
            f"{one.value} needs consent: {CONSENT_REASONS[one.code]}. "
            f"Remove it, or write allow: [{one.code}] in the server",
        )
        for one in find_exposures(compose, environment)
        if server.container and one.code not in server.allow
    ]


def require_consent(server: Server, compose: ComposeFile) -> None:
    """Raise ServerError, before anything starts, for what the server has no consent for now."""
    if problems := find_missing_consent(server, compose, os.environ):
        found = "; ".join(map(str, problems))
        raise ServerError(f"the server is not started: {found}", next_step="Correct the scenario.")


def make_access_notes(compose: ComposeFile) -> list[Reason]:
    """The note of the report on what the containers get of their host."""
    given = ", ".join(map(str, find_exposures(compose, os.environ)))
    return [because("host_access", exposures=given)] if given else []


def _find_service_exposures(service: Service, template: str, environment: Mapping[str, str]) -> Iterator[Exposure]:
    def texts(values: list[str]) -> Iterator[tuple[str, str]]:
        for written in values:
            yield written, interpolate(written, environment, [])

    for written, text in texts(service.volumes):
        mount = _try_parse(parse_volume, text)
        code = None if mount is None or mount.named else _classify_path(mount.source, read_only=mount.read_only)
        if code is not None:
            yield Exposure(code, "volumes", written)
    for written, text in texts(service.devices):
        device = _try_parse(parse_device, text)
        if device is not None and not all(_GPU_DEVICE.fullmatch(path) for path in _resolve_path(device.host)):
            yield Exposure("host-devices", "devices", written)
    for written, text in texts(service.ports):
        port = _try_parse(parse_port, text)
        if port is not None and not ipaddress.ip_address(port.address).is_loopback:
            yield Exposure("open-port", "ports", written.rsplit(":", 2)[0])
    if interpolate(service.ipc, environment, []) == "host":
        yield Exposure("host-ipc", "ipc", "host")
    for key, values in (("security_opt", service.security_opt), ("cap_add", service.cap_add)):
        for written in values:
            theirs = find_template(template) is not None and written in _TEMPLATE_PRIVILEGES
            if not theirs and _HARMLESS_OPTION.fullmatch(written) is None:
                yield Exposure("privileges", key, written)


def _try_parse(parse: Any, text: str) -> Any:
    """None: it is refused elsewhere, or its variable is not set yet."""
    try:
        return None if "\0" in text else parse(text)
    except ValueError:
        return None


def _classify_path(source: str, *, read_only: bool) -> Consent | None:
    for path in _resolve_path(source):
        used = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
        if _SOCKET.fullmatch(path) or any(_contains(path, socket) for socket in (*_SOCKETS, used) if socket):
            return "docker-socket"
    for path in _resolve_path(source):
        closed = _UNREADABLE if read_only else (*_UNREADABLE, *_UNWRITABLE)
        if _HOME.fullmatch(path) or (not read_only and _UNWRITABLE_WHOLE.fullmatch(path)):
            return "host-files"
        if any(_contains(path, one) or _contains(one, path) for one in closed):
            return "host-files"
    return None


def _resolve_path(path: str) -> list[str]:
    """A path without `..`, and where it leads to. /var/run is another name of /run."""
    plain = real = posixpath.normpath("/" + path.lstrip("/"))
    if engine_location().has_our_files:
        with suppress(OSError):  # such as of another process's root: it is judged as it is written
            real = os.path.realpath(plain)
            if os.path.exists(real) and os.path.samefile(real, "/"):  # mounted there once more
                real = "/"
    return [re.sub(r"^/var/run(?=/|$)", "/run", one) for one in dict.fromkeys((plain, real))]


def _contains(folder: str, path: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


_NON_SECRETS = ("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null")  # REQUIRE_AUTH: "true"
_WORD = re.compile(r"(?:\$\{[^}]*\}|\S)+")  # an interpolation's own words belong together
_PLAIN_WORD = re.compile(r"\w[\w.-]*")


def find_open_secrets(value: Any, path: str) -> list[Problem]:
    """Problems for what `value`, found at `path`, holds of secrets that are written out. They never show one."""
    found: dict[str, Problem] = {}
    for at, name, text in _find_secret_places(value, path):
        shown = drop_variables(text).strip("\0'\" ")
        if shown.lower() not in _NON_SECRETS and "\0" not in drop_variables(text):
            found.setdefault(at, _open_secret_problem(at, f" as {name}", name))
    for at, text in _list_texts(value, path):
        if (secret := find_secret_form(drop_variables(text))) is not None:
            name = "HF_TOKEN" if secret.startswith("hf_") else "API_KEY"
            found.setdefault(at, _open_secret_problem(at, ", and this looks like one", name))
    return list(found.values())


def find_open_secrets_in_text(text: str) -> list[Problem]:
    """Problems for the lines of a file that hold a known secret or what looks like one, comments included. They never
    show one.
    """
    return [
        Problem(
            "$",
            "a secret must not be in the scenario, and this line has what looks like one: the whole file is copied "
            "into each run",
            number,
        )
        for number, line in enumerate(text.splitlines(), start=1)
        if find_secret_form(drop_variables(line)) is not None or masked(line, "sure") != line
    ]


def collect_secrets(value: Any, environment: Mapping[str, str]) -> dict[str, bool]:
    """What `value` got from the environment, and whether it is surely a secret: all of it is blacked out, whatever it
    is called.

    Left out are what is too short, and a plain word or number that `value` itself contains: blacking it out
    would hide nothing and make the log unreadable. What is a secret by its name or place is never left out for that.
    """
    texts = [text for _, text in _list_texts(value, "$")]
    asked = {name: environment[name] for text in texts for name in find_variable_names(text) if name in environment}
    placed = {name for _, _, text in _find_secret_places(value, "$") for name in find_variable_names(text)}
    known = (
        {word for text in texts for word in _PLAIN_WORD.findall(drop_variables(text))} | set(_NON_SECRETS) | {"auto"}
    )
    found: dict[str, bool] = {}
    for name, text in asked.items():
        sure = is_secret(name) or name in placed or find_secret_form(text) is not None
        if len(text) >= MIN_SECRET_CHARS and (sure or text not in known):
            found[text] = found.get(text, False) or sure
    return found


def _open_secret_problem(at: str, which: str, name: str) -> Problem:
    variable = re.sub(r"\W", "_", name.strip("-")).upper()
    return Problem(
        at,
        f'a secret must not be in the scenario{which}; write "${{{variable}}}" and export it in your shell: '
        "it is filled in at the start, and only the name is recorded",
    )


def _find_secret_places(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, name and text of what is given under a secret's name: a key, `--flag TEXT`, `--flag=TEXT`, `NAME=TEXT`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if is_secret(str(key)) and not isinstance(item, dict | list):
                yield f"{path}.{key}", str(key), "" if item is None else str(item)
            else:
                yield from _find_secret_places(item, f"{path}.{key}")
        return
    words = [(at, word) for at, text in _list_texts(value, path) for word in _WORD.findall(text)]
    for (at, word), (after, following) in zip(words, [*words[1:], ("", "")], strict=False):
        name, equals, text = word.partition("=")
        if not is_secret(name) or "$" in name:
            continue
        if equals:
            yield at, name, text
        elif name.startswith("-") and not following.startswith("-"):
            yield after, name, following


def _list_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _list_texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _list_texts(item, f"{path}[{number}]")
    elif value is not None:
        yield path, str(value)
