"""What a scenario must not expose: this machine to a container, and secrets to the files of a run.

What would give a container access to this machine is refused unless the scenario's server consents with
`allow: [CODE]`. A secret stays in the shell: a scenario may not contain one, and one from the environment is masked.
"""

import ipaddress
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from harness.base.errors import Problem, ServerError
from harness.base.reason import Reason, because
from harness.base.redact import MIN_SECRET_CHARS, find_secret_form, is_secret, masked
from harness.engines import find_template
from harness.scenario import Consent, Server
from harness.serve import compose_file
from harness.serve.compose_file import ComposeFile
from harness.serve.docker_engine import engine_address, engine_shares_files

T = TypeVar("T")
CONSENT_REASONS: dict[Consent, str] = {
    "docker-socket": "who reaches the container engine's socket can do anything on this machine",
    "host-files": "it holds the system's own files, devices or credentials",
    "host-devices": "it is no device of a GPU",
    "host-ipc": "the container sees the shared memory of this machine's processes",
    "open-port": "every machine that reaches this one can use the server",
    "privileges": "it takes away what separates the container from this machine",
}
_SOCKET = re.compile(r".*/(?:docker|containerd|podman|crio|buildkitd|cri-dockerd)\.sock(?:\.raw)?")
_HOST_FILES = re.compile(
    r"/(?:bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|sbin|sys|usr|run(?!/media/.)|var(?!/tmp/.))(?:/.*)?|/"
    # A whole home, and its hidden files: they have credentials, or run at a login. Other folders have models.
    r"|/home|(?:/home/[^/]+|/root)(?:/\.(?!(?:cache|local/share|[^/]+/models)(?:/|$)).*"
    r"|/\.cache/huggingface/(?:token|stored_tokens))?"
)
_GPU_DEVICE = re.compile(r"/dev/(?:kfd|dri|accel|nvidia[\w-]*|null|zero|full|u?random)(?:/.*)?")
_TEMPLATE_PRIVILEGES = ("seccomp=unconfined", "SYS_PTRACE", "SYS_NICE")  # of templates that ship, as their makers' have
_HARMLESS_OPTION = re.compile(r"no-new-privileges(?:[:=]true)?")


def find_exposures(compose: ComposeFile, environment: Mapping[str, str]) -> list[tuple[Consent, str, str]]:
    """Return the access to the host that the containers get and that needs consent: code, key and value as written.

    `${NAME}` is filled in where it is set. A path is checked as written and, if the engine has the same files, also
    after symbolic links are followed.
    """
    is_ours = find_template(compose.serving.template) is not None
    exposures: list[tuple[Consent, str, str]] = []

    def parse_all(texts: list[str], parse: Callable[[str], T]) -> Iterator[tuple[str, T]]:
        for written in texts:
            text = compose_file.interpolate(written, environment, [])
            with suppress(ValueError):  # it is refused elsewhere, or its variable is not set yet
                if "\0" not in text:
                    yield written, parse(text)

    for service in compose.services.values():
        for written, mount in parse_all(service.volumes, compose_file.parse_volume):
            code = None if mount.named else _classify_path(mount.source)
            if code is not None:
                exposures.append((code, "volumes", written))
        for written, (host, _, _) in parse_all(service.devices, compose_file.parse_device):
            if not all(_GPU_DEVICE.fullmatch(path) for path in _resolve_path(host)):
                exposures.append(("host-devices", "devices", written))
        for written, port in parse_all(service.ports, compose_file.parse_port):
            if not ipaddress.ip_address(port.address).is_loopback:
                exposures.append(("open-port", "ports", written.rsplit(":", 2)[0]))
        if compose_file.interpolate(service.ipc, environment, []) == "host":
            exposures.append(("host-ipc", "ipc", "host"))
        for key, options in (("security_opt", service.security_opt), ("cap_add", service.cap_add)):
            for option in options:
                if not (is_ours and option in _TEMPLATE_PRIVILEGES) and _HARMLESS_OPTION.fullmatch(option) is None:
                    exposures.append(("privileges", key, option))
    return list(dict.fromkeys(exposures))


def find_missing_consent(server: Server, compose: ComposeFile, environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each exposure without consent; its path is a key of the service."""
    return [
        Problem(
            key, f"{value} needs consent: {CONSENT_REASONS[code]}. Remove it, or write allow: [{code}] in the server"
        )
        for code, key, value in find_exposures(compose, environment)
        if server.container and code not in server.allow
    ]


def require_consent(server: Server, compose: ComposeFile) -> None:
    """Raise ServerError, before anything starts, for an exposure without consent."""
    if problems := find_missing_consent(server, compose, os.environ):
        what = f"the server is not started: {'; '.join(map(str, problems))}"
        raise ServerError(what, next_step="Correct the scenario.")


def make_access_notes(compose: ComposeFile) -> list[Reason]:
    """Return the note of the report on the containers' access to their host."""
    exposures = ", ".join(f"{code} ({key}: {value})" for code, key, value in find_exposures(compose, os.environ))
    text = f"the scenario lets its container reach this machine: {exposures}"
    return [because("host_access", text, exposures=exposures)] if exposures else []


def _classify_path(source: str) -> Consent | None:
    """Return the consent that a mount of this path needs; None for a harmless one."""
    paths = _resolve_path(source)
    with suppress(ServerError):
        sockets = _resolve_path(engine_address().removeprefix("unix://"))
        if any(f"{socket}/".startswith(f"{path}/") for path in paths for socket in sockets):
            return "docker-socket"
    if any(_SOCKET.fullmatch(path) for path in paths):
        return "docker-socket"
    return "host-files" if any(_HOST_FILES.fullmatch(path) for path in paths) else None


def _resolve_path(path: str) -> set[str]:
    """Return a path without `..`, and the path to which it leads, by the usual names of its folders."""
    paths = {posixpath.normpath("/" + path.lstrip("/"))}
    if engine_shares_files():
        with suppress(OSError):  # such as of another process's root: then only the written path counts
            paths |= {os.path.realpath(path) for path in paths}
    names = {"/var/run": "/run", "/var/home": "/home", "/var/roothome": "/root", "/var/mnt": "/mnt"}
    return {re.sub(r"^/var/\w+(?=/|$)", lambda match: names.get(match[0], match[0]), path) for path in paths}


_NON_SECRETS = ("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null")  # REQUIRE_AUTH: "true"
_WORD = re.compile(r"(?:\$\{[^}]*\}|\S)+")  # an interpolation's own words belong together
_PLAIN_WORD = re.compile(r"\w[\w.-]*")


def find_open_secrets(value: Any, path: str) -> list[Problem]:
    """Return a problem for each secret that is written out in `value`, which is at `path`; it does not show it."""
    problems: dict[str, Problem] = {}
    for place, name, text in _find_secret_places(value, path):
        literal = compose_file.drop_variables(text)
        if "\0" not in literal and literal.strip("'\" ").lower() not in _NON_SECRETS:
            problems.setdefault(place, _open_secret_problem(place, f" as {name}", name))
    for place, text in _list_texts(value, path):
        if (secret := find_secret_form(compose_file.drop_variables(text))) is not None:
            name = "HF_TOKEN" if secret.startswith("hf_") else "API_KEY"
            problems.setdefault(place, _open_secret_problem(place, ", and this looks like one", name))
    return list(problems.values())


def find_open_secrets_in_text(text: str) -> list[Problem]:
    """Return a problem for each line of a file that has a secret, also in a comment; it does not show it."""
    return [
        Problem(
            "$",
            "a secret must not be in the scenario, and this line has what looks like one: the whole file is copied "
            "into each run",
            number,
        )
        for number, line in enumerate(text.splitlines(), start=1)
        if find_secret_form(compose_file.drop_variables(line)) is not None or masked(line, "sure") != line
    ]


def collect_secrets(value: Any, environment: Mapping[str, str]) -> dict[str, bool]:
    """Return the texts that `value` gets from the environment, and whether each is surely a secret.

    All of them are masked, whatever their variable is called. Short texts are left out, and words or numbers that
    `value` itself contains: to mask them would hide nothing and make the log unreadable. A sure secret, by its
    variable's name or its place, is left out only if it is too short.
    """
    texts = [text for _, text in _list_texts(value, "$")]
    names = {name for text in texts for name in compose_file.find_variable_names(text)}
    secret_names = {
        name for _, _, text in _find_secret_places(value, "$") for name in compose_file.find_variable_names(text)
    }
    words = {word for text in texts for word in _PLAIN_WORD.findall(compose_file.drop_variables(text))}
    words |= {*_NON_SECRETS, "auto"}
    secrets: dict[str, bool] = {}
    for name in names & environment.keys():
        text = environment[name]
        sure = is_secret(name) or name in secret_names or find_secret_form(text) is not None
        if len(text) >= MIN_SECRET_CHARS and (sure or text not in words):
            secrets[text] = secrets.get(text, False) or sure
    return secrets


def _open_secret_problem(path: str, which: str, name: str) -> Problem:
    variable = re.sub(r"\W", "_", name.strip("-")).upper()
    return Problem(
        path,
        f'a secret must not be in the scenario{which}; write "${{{variable}}}" and export it in your shell: '
        "it is filled in at the start, and only the name is recorded",
    )


def _find_secret_places(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, name and text of each value under the name of a secret.

    The name is a key, or in a text: `--flag TEXT`, `--flag=TEXT` or `NAME=TEXT`.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if is_secret(str(key)) and not isinstance(item, dict | list):
                yield f"{path}.{key}", str(key), "" if item is None else str(item)
            else:
                yield from _find_secret_places(item, f"{path}.{key}")
        return
    words = [(place, word) for place, text in _list_texts(value, path) for word in _WORD.findall(text)]
    for (place, word), (next_place, next_word) in zip(words, [*words[1:], ("", "")], strict=False):
        name, equals, text = word.partition("=")
        if not is_secret(name) or "$" in name:
            continue
        if equals:
            yield place, name, text
        elif name.startswith("-") and not next_word.startswith("-"):
            yield next_place, name, next_word


def _list_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _list_texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _list_texts(item, f"{path}[{number}]")
    elif value is not None:
        yield path, str(value)
