"""Commands inside a server's container: metrics of the engine behind Lemonade, and the machine's telemetry.

Nothing is installed there. The telemetry is for an engine on another machine, whose /sys is the same in a container.
"""

import shlex
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from docker.models.containers import Container

from harness.machine import telemetry
from harness.machine.telemetry import HostReading, Source
from harness.serve.engine import DOCKER_ERRORS
from harness.trust import MAX_ANSWER_BYTES

FETCH_S = 3.0
_MAX_TRANSFER_S = 2.0  # to an engine on another machine
_LINE_BY_LINE = 'while read -r line; do eval "$line"; printf "\\000"; done'
_FRAME_HEADER = struct.Struct(">BxxxL")  # of the engine's frames: stream number, byte count


class Shell:
    """A shell inside a container that runs one line of commands at a time.

    Starting a process in a container costs the Docker Engine some 100 ms of CPU, which an engine on the same machine
    would notice each second. So one shell waits there. `run` opens it; `close` or a failed line closes it, and the
    next `run` opens it again. `prelude`: commands that it runs first.
    """

    def __init__(self, container: Container, prelude: str = "") -> None:
        self._container = container
        self._script = f"{prelude}\n{_LINE_BY_LINE}"
        self._stream: Any = None  # the Docker SDK's object, which keeps the connection open
        self._socket: Any = None
        self._lock = threading.Lock()  # several threads use the shell

    def fetch(self, url: str, body: str | None = None) -> str:
        """Return the answer to a GET, or to a POST of JSON without line ends; empty without an answer in time."""
        curl = f"curl --silent --fail --max-time {FETCH_S:g} {shlex.quote(url)}"
        if body is not None:
            post = "--header 'Content-Type: application/json' --data-binary @-"
            curl = f"printf %s {shlex.quote(body)} | {curl} {post}"
        return self.run(curl).decode("utf-8", "replace")

    def run(self, line: str) -> bytes:
        """Return what a line of commands prints, which must not contain NUL; empty if it does not end in time."""
        with self._lock:
            try:
                if self._socket is None:
                    self._open()
                self._socket.sendall(f"{line}\n".encode())
                output = b""
                while not output.endswith(b"\0"):
                    _stream, size = _FRAME_HEADER.unpack(self._receive(_FRAME_HEADER.size))
                    output += self._receive(size)
                    if len(output) > MAX_ANSWER_BYTES:
                        raise ConnectionError("an answer without an end")
            except (OSError, *DOCKER_ERRORS):
                self._close()
                return b""
        return output[:-1]

    def close(self) -> None:
        """Close the shell's input, which ends it. Waits for a line that runs."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        stream, self._stream, self._socket = self._stream, None, None
        # The SDK attaches the response and the socket to the stream, so that they live as long.
        parts = [getattr(stream, "_response", None), stream, getattr(stream, "_sock", None)]
        for part in filter(None, parts):
            with suppress(OSError, ValueError):  # one may have closed the other
                part.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        api = self._container.client.api  # type: ignore[union-attr]
        command = ["sh", "-c", self._script]
        run = api.exec_create(self._container.id, command, stdin=True, stdout=True, stderr=False)["Id"]
        self._stream = api.exec_start(run, socket=True)
        self._socket = getattr(self._stream, "_sock", self._stream)
        self._socket.settimeout(FETCH_S + _MAX_TRANSFER_S)

    def _receive(self, size: int) -> bytes:
        """Return exactly `size` bytes."""
        received = b""
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise ConnectionError("the shell ended")
            received += part
        return received


_FIND_SCRIPT = """
r={root}
one=
tables=
for d in "$r"/sys/class/drm/renderD*/device; do
  v=
  {{ read -r v < "$d/vendor"; }} 2>/dev/null
  [ "$v" = {amd} ] || continue
  for f in {gpu}; do [ -e "$d/$f" ] && one="$one $d/$f"; done
  for h in "$d"/hwmon/hwmon*; do for f in {sensors}; do [ -e "$h/$f" ] && one="$one $h/$f"; done; done
  [ -e "$d/gpu_metrics" ] && tables="$tables $d/gpu_metrics"
done
many="$r/proc/stat $r/proc/meminfo"
for d in "$r/sys/fs/cgroup" "$r/sys/fs/cgroup/memory" "$r/sys/fs/cgroup/cpuacct" "$r/sys/fs/cgroup/cpu,cpuacct"; do
  for f in {cgroup}; do
    [ -e "$d/$f" ] || continue
    case $f in *.stat) many="$many $d/$f" ;; *) one="$one $d/$f" ;; esac
  done
done
"""
# Of files with many lines, only those that are used. `grep` prints the names of files if there are several.
READ_SCRIPT = (
    'grep -s "" /dev/null "$r/proc/uptime" $one; '
    'grep -sE "^(cpu |MemAvailable:|usage_usec |inactive_file |total_inactive_file )" /dev/null $many; '
    'for t in $tables; do echo "table $t"; od -An -v -tx1 "$t" 2>/dev/null; done'
)


def make_find_script(where: str) -> str:
    """Return the commands that find the machine's files for READ_SCRIPT, below the folder `where` of /sys and /proc."""
    return _FIND_SCRIPT.format(
        root=shlex.quote(where.rstrip("/")),
        amd=telemetry.AMD,
        gpu=" ".join(name for name in telemetry.GPU_FILES if name != "gpu_metrics"),
        sensors=" ".join(telemetry.SENSORS),
        cgroup=" ".join(telemetry.CGROUP_FILES),
    )


def container_source(container: Container, interval_s: float = telemetry.INTERVAL_S) -> Source:
    """Return a source of readings of the container's machine, timed by that machine's clock."""

    def readings(stop: threading.Event) -> Iterator[HostReading]:
        with closing(Shell(container, make_find_script(str(telemetry.telemetry_root())))) as shell:
            yield from telemetry.read_periodically(lambda: parse_reading(shell.run(READ_SCRIPT)), interval_s, stop)

    return readings


def has_shell(container: Container) -> bool:
    """Check that the container has the programs that print its files."""
    try:
        return bool(container.exec_run(["sh", "-c", "command -v grep && command -v od"]).exit_code == 0)
    except DOCKER_ERRORS:
        return False


def parse_reading(printed: bytes) -> HostReading | None:
    """Return the reading that READ_SCRIPT printed; None if it printed nothing."""
    prefix = f"{str(telemetry.telemetry_root()).rstrip('/')}/".encode()
    files: dict[str, bytes] = {}
    table: str | None = None
    for line in printed.splitlines():
        if line.startswith(b"table "):
            table = line.removeprefix(b"table ").removeprefix(prefix).decode()
            files[table] = b""
        elif table is not None and line.startswith(b" "):
            files[table] += bytes.fromhex(line.decode())
        else:
            path, colon, content = line.removeprefix(prefix).partition(b":")
            if colon:
                name = path.decode(errors="replace")
                files[name] = files.get(name, b"") + content + b"\n"
    uptime = files.pop("proc/uptime", b"").split()
    if not uptime:
        return None
    return HostReading(time.time(), float(uptime[0]), None, files)
