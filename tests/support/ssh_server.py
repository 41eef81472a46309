"""An ssh server of a test: its own process, port, host key and authorized key, in a temporary folder."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psutil

from harness.base.process import free_port
from harness.serve.probe import accepts_connections
from tests.support.command import until


class SshServer(NamedTuple):
    port: int
    folder: Path
    process: "subprocess.Popen[bytes]"

    def address(self, *command: str, known: bool = True) -> str:
        """The value of --telemetry. `known`: whether its host key is known."""
        config = self.folder / ("client" if known else "client-unknown")
        return f"ssh://127.0.0.1:{self.port}?config={quote(str(config))}&command={quote(' '.join(command))}"

    def sessions(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Start OpenSSH's sshd for the user of the test, who may log in with one key."""
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    port = free_port()
    for name in ("key", "host"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    (folder / "server").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "AllowTcpForwarding no\nX11Forwarding no\n"
    )
    kind, key, *_ = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (folder / "none").touch()
    for name, known in (("client", "known"), ("client-unknown", "none")):
        (folder / name).write_text(
            f"Host *\nIdentityFile {folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/{known}\n"
            "GlobalKnownHostsFile none\n"
        )
    Path("/run/sshd").mkdir(exist_ok=True)  # where it gives up its rights; Debian's service makes it
    with (folder / "log").open("wb") as log:
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "server")]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: accepts_connections("127.0.0.1", port))
        yield SshServer(port, folder, process)
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
