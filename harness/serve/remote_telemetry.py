"""Telemetry from within a server's container, for an engine on another machine: its /sys is the same there.

One shell in the container prints the files each second, until it is stopped; nothing is installed.
"""

import shlex
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from docker.models.containers import Container
from docker.utils.socket import frames_iter

from harness.machine.telemetry import AMD, CGROUP_FILES, GPU_FILES, INTERVAL_S, SENSORS, HostReading, Source, root
from harness.serve.engine import DOCKER_ERRORS

# Of files with many lines, the lines that count; `grep` needs one more file to say the names of all.
_LINES = "^(cpu |MemAvailable:|usage_usec |inactive_file |total_inactive_file )"
_SCRIPT = """
echo "pid $$"
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
trap 'enough=1; kill $! 2>/dev/null' TERM
enough=
while :; do
  last=$enough
  grep -s '' /dev/null "$r/proc/uptime" $one
  grep -sE {lines} /dev/null $many
  for t in $tables; do echo "table $t"; od -An -v -tx1 "$t" 2>/dev/null; done
  echo end
  [ -n "$last" ] && exit 0
  [ -n "$enough" ] || {{ sleep {interval} & wait $!; }}
done
"""


def inside(container: Container, interval_s: float = INTERVAL_S) -> Source:
    """Readings of the machine that the container is on, by the container's own clock of time passed."""

    def readings(enough: threading.Event) -> Iterator[HostReading]:
        api = container.client.api  # type: ignore[union-attr]
        script = _script(str(root()).rstrip("/"), interval_s)
        run = api.exec_create(container.id, ["sh", "-c", script], stdout=True, stderr=False)["Id"]
        lines = _lines(_output(api.exec_start(run, socket=True)))
        pid = next(lines, b"").removeprefix(b"pid ").decode()
        if not pid.isdigit():
            return  # there is no shell in it
        threading.Thread(target=_end, args=(api, str(container.id), pid, enough), daemon=True).start()
        yield from readings_of(lines)

    return readings


def has_shell(container: Container) -> bool:
    """Whether the container has what the shell needs to print its files."""
    try:
        return bool(container.exec_run(["sh", "-c", "command -v grep && command -v od"]).exit_code == 0)
    except DOCKER_ERRORS:
        return False


def readings_of(lines: Iterable[bytes]) -> Iterator[HostReading]:
    """Readings out of what the script prints. What it does not end with `end` is no reading."""
    prefix = f"{str(root()).rstrip('/')}/".encode()
    files: dict[str, bytes] = {}
    table: str | None = None
    for line in lines:
        if line == b"end":
            uptime = files.pop("proc/uptime", b"").split()
            clock_s = float(uptime[0]) if uptime else time.monotonic()
            yield HostReading(time.time(), clock_s, None, files)
            files, table = {}, None
        elif line.startswith(b"table "):
            table = line.removeprefix(b"table ").removeprefix(prefix).decode()
            files[table] = b""
        elif table is not None and line.startswith(b" "):
            files[table] += bytes.fromhex(line.decode())
        else:
            path, colon, content = line.removeprefix(prefix).partition(b":")
            if colon:
                name = path.decode(errors="replace")
                files[name] = files.get(name, b"") + content + b"\n"


def _script(where: str, interval_s: float) -> str:
    return _SCRIPT.format(
        root=shlex.quote(where),
        amd=AMD,
        gpu=" ".join(name for name in GPU_FILES if name != "gpu_metrics"),
        sensors=" ".join(SENSORS),
        cgroup=" ".join(CGROUP_FILES),
        lines=shlex.quote(_LINES),
        interval=f"{interval_s:g}",
    )


def _output(connection: Any) -> Iterator[bytes]:
    """What comes until the shell ends; then the connection is closed, which the SDK leaves to the garbage collector."""
    try:
        for _, data in frames_iter(connection, tty=False):  # type: ignore[no-untyped-call]
            yield data
    finally:
        with suppress(AttributeError):  # which not every kind of connection has
            connection._response.close()
        connection.close()


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _end(api: Any, container: str, pid: str, enough: threading.Event) -> None:
    """Tell the shell to end, once there is enough: a connection that closes would not."""
    enough.wait()
    with suppress(*DOCKER_ERRORS):
        api.exec_start(api.exec_create(container, ["kill", "-TERM", pid])["Id"])
