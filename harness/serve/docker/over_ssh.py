"""A Docker Engine behind ssh, as a socket of this machine: each connection is an `ssh HOST docker system dial-stdio`.

So does Docker's own command line. The SDK knows ssh:// only with a second implementation of SSH (paramiko), which
reads little of ~/.ssh/config; this takes the user's own `ssh` with all of its settings, keys and agent.
"""

import atexit
import contextlib
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

from harness.errors import ServerError

LONGEST_S = 30  # until ssh gives up on a host that does not answer
_END_S = 5.0
_tunnels: dict[str, "Tunnel"] = {}
_guard = threading.Lock()


def tunnel_to(where: str) -> "Tunnel":
    """The tunnel to an engine such as ssh://ada@gpubox:22, one for each in a process. Raises ServerError."""
    with _guard:
        if where not in _tunnels:
            _tunnels[where] = Tunnel(command_to(where))
        return _tunnels[where]


def command_to(where: str) -> list[str]:
    """What speaks with the engine on its standard input and output. Raises ServerError."""
    if shutil.which("ssh") is None:
        raise ServerError(
            f"DOCKER_HOST is {where}, and there is no program `ssh` on this machine",
            next_step="Install it (on Debian: sudo apt-get install openssh-client), or use another DOCKER_HOST.",
        )
    try:
        parts = urlsplit(where)
        port, user = parts.port, parts.username
    except ValueError as error:
        raise ServerError(
            f"DOCKER_HOST is {where}: {error}", next_step="It has the form ssh://USER@HOST:PORT."
        ) from None
    address = parts.netloc.rpartition("@")[2]
    # As it is written: a name of ~/.ssh/config may have capitals, which urlsplit makes small.
    host = (parts.hostname or "") if address.startswith("[") else address.partition(":")[0]
    if not host:
        raise ServerError(f"DOCKER_HOST is {where}, without a host", next_step="It has the form ssh://USER@HOST:PORT.")
    remote = ["docker", "system", "dial-stdio"]
    if parts.path not in ("", "/"):
        remote[1:1] = ["--host", f"unix://{parts.path}"]
    options = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    return ["ssh", *options, "-o", f"ConnectTimeout={LONGEST_S}", "-T", "--", host, shlex.join(remote)]


class Tunnel:
    """A socket in a folder of its own, until the process ends."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="amd-llm-load-ssh-"))  # of this user alone
        self._log = self._folder / "ssh.log"
        self._running: list[subprocess.Popen[bytes]] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._folder / "docker.sock"))
        self._listening.listen()
        atexit.register(self.close)
        self._accepting = threading.Thread(target=self._keep_accepting, name="engine over ssh", daemon=True)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/docker.sock"

    def said(self) -> str:
        """The last that ssh said on its standard error; empty when nothing."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End what still runs."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which ends the accepting; closing alone does not
        self._accepting.join(_END_S)
        self._listening.close()
        for process in self._running:
            process.terminate()
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_accepting(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            with connection, self._log.open("ab") as log:
                # Of a session of its own: Ctrl-C is for the harness, which still has to take its containers down.
                process = subprocess.Popen(
                    self._command,
                    stdin=connection.fileno(),
                    stdout=connection.fileno(),
                    stderr=log,
                    start_new_session=True,
                )
            self._running = [*(one for one in self._running if one.poll() is None), process]
