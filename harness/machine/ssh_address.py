"""The address of `--telemetry`, the command line of ssh for it, and what to do when ssh fails."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from harness.base.command_line import command_line
from harness.base.errors import HarnessError
from harness.base.redact import printable

_CONNECT_S = 10
_HOST = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_USER = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,64}")
_OPTIONS = ("command", "config")
# No question, no port, no agent, no command of its own on this machine, and a host key that is known.
_SSH = (
    "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={_CONNECT_S}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes",
    "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "PermitLocalCommand=no",
)  # fmt: skip


class SshAddress(NamedTuple):
    """`ssh://[USER@]HOST[:PORT][?command=WORDS&config=FILE]`."""

    host: str  # in the given case: ssh matches `Host` of its configuration with case
    user: str | None
    port: int | None
    command: tuple[str, ...]  # the harness there
    config: str | None  # of ssh, on this machine

    def words(self, *more: str) -> list[str]:
        """The command line of ssh. The remote shell gets each word in quotes. `more`: options of the command there."""
        return ["ssh", *self._own_options(), *_SSH, "--", *self._remote_words(*more)]

    def trial(self) -> str:
        """The command with which a user tries it."""
        return command_line("ssh", *self._own_options(), *self._remote_words())

    def login(self) -> str:
        """The command with which a user logs in there."""
        return command_line("ssh", *self._own_options(), self._remote_words()[0])

    def with_command(self, command: str) -> str:
        """The option with the same address and another command there."""
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        config = f"&config={quote(self.config)}" if self.config else ""
        return command_line("--telemetry", f"ssh://{user}{host}{port}?command={quote(command)}{config}")

    def _own_options(self) -> list[str]:
        return [*(["-F", self.config] if self.config else []), *(["-p", str(self.port)] if self.port else [])]

    def _remote_words(self, *more: str) -> list[str]:
        target = self.host if self.user is None else f"{self.user}@{self.host}"
        return [target, shlex.join([*self.command, "telemetry", "--jsonl", *more])]


def parse_address(text: str) -> SshAddress:
    """Return the parts of the value of --telemetry. Raises HarnessError."""
    example = "Write it like ssh://me@gpu-box:22, or ssh://gpu-box?command=/opt/venv/bin/harness."
    wrong = HarnessError(f"--telemetry: '{printable(text[:200])}' is not the address of a machine", next_step=example)
    try:
        parts = urlsplit(text)
        port = parts.port
        pairs = list(_option_pairs(parts.query))
        options = dict(pairs)
        words = tuple(shlex.split(options.get("command", "harness")))
    except ValueError:
        raise wrong from None
    host, user = _host_of(parts.netloc), None if parts.username is None else unquote(parts.username)
    if parts.scheme != "ssh" or not _HOST.fullmatch(host) or (user is not None and not _USER.fullmatch(user)):
        raise wrong
    if parts.password is not None:
        what = "--telemetry: a password is not taken, because it would be recorded"
        raise HarnessError(what, next_step="Use a key of ssh-agent, or one that ~/.ssh/config names.")
    if len(options) < len(pairs) or not options.keys() <= set(_OPTIONS) or options.get("config") == "":
        raise wrong
    if parts.path not in ("", "/") or parts.fragment or port == 0 or not words or not text.isprintable():
        raise wrong
    if not "".join(options.values()).isprintable():  # an escaped NUL or line end
        raise wrong
    return SshAddress(host, user, port, words, options.get("config"))


def _host_of(netloc: str) -> str:
    """Return the host in the case in which it is written, without its brackets; `urlsplit` lowers it."""
    host = netloc.rpartition("@")[2]
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _option_pairs(query: str) -> Iterator[tuple[str, str]]:
    """Yield the options by name. A `+` is a plus: a path may have one. Raises ValueError."""
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(part)
        yield unquote(name), unquote(value, errors="strict")


# What to do, by what ssh prints. It has one exit code, 255, for all of them.
_ADVICE = (
    (
        re.compile("open user config file|bad configuration option", re.IGNORECASE),
        "Give the path of ssh's configuration file as ?config=FILE, and correct the file if ssh names a line of it.",
    ),
    (
        re.compile("host key verification failed|host identification has changed|no matching host key", re.IGNORECASE),
        "Connect once in a terminal, so that its host key is known: {login}",
    ),
    (
        re.compile("permission denied|too many authentication", re.IGNORECASE),
        "Use a key that the machine accepts and that asks no question (ssh-copy-id, ssh-add). Try it: {login}",
    ),
    (
        re.compile("could not resolve", re.IGNORECASE),
        "Check the spelling of the host's name, or give its address: ssh://192.0.2.7.",
    ),
    (
        re.compile("connection refused", re.IGNORECASE),
        "Check that sshd runs there, and its port: ssh://HOST:PORT.",
    ),
    (
        re.compile("timed out|no route|unreachable", re.IGNORECASE),
        "Check that the machine is up, and that no firewall blocks ssh.",
    ),
)  # fmt: skip


def connection_advice(address: SshAddress, printed: str) -> str:
    """Return what to do about a connection that ssh could not open, by what it printed."""
    advice = next((text for pattern, text in _ADVICE if pattern.search(printed)), "Try it: {login}")
    return advice.replace("{login}", address.login())
