"""What is read inside of a server's container: metrics behind Lemonade, the machine's telemetry, the GPUs' memory.

Nothing is installed there. The telemetry is for an engine on another machine, whose /sys is the same in a container.
"""

import json
import os
import secrets
import shlex
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Any, cast

import msgspec
from docker.models.containers import Container
from docker.utils.socket import frames_iter

from harness.errors import ServerError
from harness.machine.gpus import gpus
from harness.machine.memory import Pool, pools
from harness.machine.telemetry import AMD, CGROUP_FILES, GPU_FILES, INTERVAL_S, SENSORS, HostReading, Source, root
from harness.scenario import Server
from harness.serve import containers
from harness.serve.compose_file import filled_in, parse
from harness.serve.engine import DOCKER_ERRORS, connect, ensure_image, owned
from harness.serve.location import engine_location
from harness.serve.template import rendered
from harness.trust import MAX_ANSWER_BYTES
from harness.units import gib

FETCH_S = 3.0
_BEYOND_S = 2.0  # for the way to an engine elsewhere
_FETCHES = (  # a line is an address, and after a space the JSON to post
    'while read -r url body; do if [ -n "$body" ]; then printf %s "$body" | curl --silent --fail --max-time {limit:g} '
    '--header "Content-Type: application/json" --data-binary @- "$url"; '
    'else curl --silent --fail --max-time {limit:g} "$url"; fi; printf "\\000"; done'
)
_HEADER = struct.Struct(">BxxxL")  # of the engine's frames: which stream, how many bytes


class Shell:
    """Fetches URLs inside a container's network, again and again, with one shell.

    To start a process in a container costs the Docker Engine some 100 ms of CPU; an engine on the same machine would
    notice one each second. So one shell waits there, and fetches an address for each line that it is given. It is open
    from the first `fetch` to `close`, or to the first that fails; then the next one opens it again.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._stream: Any = None  # what the Docker SDK gives, which keeps the connection open
        self._socket: Any = None
        self._lock = threading.Lock()  # metrics are read while others ask

    def fetch(self, url: str, body: str | None = None) -> str:
        """The answer's text to a GET, or to a POST of JSON without line ends; empty when none comes in time."""
        with self._lock:
            try:
                if self._socket is None:
                    self._open()
                self._socket.sendall(f"{url} {body or ''}\n".encode())
                text = b""
                while not text.endswith(b"\0"):
                    text += self._frame()
                    if len(text) > MAX_ANSWER_BYTES:
                        raise ConnectionError("an answer without an end")
            except (OSError, *DOCKER_ERRORS):
                self.close()
                return ""
        return text[:-1].decode("utf-8", "replace")

    def close(self) -> None:
        """Its input ends, and so does the shell."""
        stream, self._stream, self._socket = self._stream, None, None
        if stream is None:
            return
        response = getattr(stream, "_response", None)  # the SDK hangs it there, so that it lives as long
        for part in (response, stream, getattr(stream, "_sock", None)):
            with suppress(OSError, ValueError, AttributeError):  # one may have closed the other
                part.close()  # type: ignore[union-attr]

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        api = self._container.client.api  # type: ignore[union-attr]
        command = ["sh", "-c", _FETCHES.format(limit=FETCH_S)]
        run = api.exec_create(self._container.id, command, stdin=True, stdout=True, stderr=False)["Id"]
        self._stream = api.exec_start(run, socket=True)
        self._socket = getattr(self._stream, "_sock", self._stream)
        self._socket.settimeout(FETCH_S + _BEYOND_S)

    def _frame(self) -> bytes:
        _kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionError("the shell ended")
            found += part
        return found


def command_inside(container: Container, pid: int) -> list[str]:
    """The command line of a process, by its number inside the container; empty when it cannot be had."""
    try:
        command = ["cat", f"/proc/{pid}/cmdline"]
        code, text = cast(tuple[int, bytes], container.exec_run(command, stderr=False))
    except DOCKER_ERRORS:
        return []
    return (text or b"").decode("utf-8", "replace").rstrip("\0").split("\0") if code == 0 else []


# Of files with many lines, the lines that count; `grep` needs one more file to say the names of all.
_LINES = "^(cpu |MemAvailable:|usage_usec |inactive_file |total_inactive_file )"
_READINGS = """
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
    return _READINGS.format(
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


PROBED = "vllm-rocm"  # the template whose container asks: it has the devices and groups
PROBE_S = 180.0  # torch imports for ten seconds, from a cold disk for a minute
PROGRAM = """
import json, torch
found = []
for number in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(number)
    about = torch.cuda.get_device_properties(number)
    arch = getattr(about, "gcnArchName", "") or about.name
    found.append({"free": free, "total": total, "target": arch.split(":")[0]})
print("MEMORY " + json.dumps(found))
"""


class RuntimeGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as the runtime reports."""

    free: int
    total: int
    target: str


def ask_image(image: str, on_progress: Callable[[str], None], variables: dict[str, Any] | None = None) -> list[Pool]:
    """The GPUs that the runtime in an image sees, in its order; `variables` are those of the template PROBED.

    Raises ServerError: no Docker, no image, no device, no torch in it.
    """
    given = {"image": image, **(variables or {})}
    service = parse(rendered(Server(template=PROBED, variables=given), "probe", port=8000))
    asked = msgspec.structs.replace(
        filled_in(service, os.environ).server,
        entrypoint=["python3"],
        command=["-c", PROGRAM],
        volumes=[volume for volume in service.server.volumes if volume.startswith("/")],  # no caches
        ports=[],
        healthcheck=None,
        ulimits={},  # a rootless engine may refuse them, and nothing here needs them
        configs=[],
    )
    owner = owned(f"memory-{secrets.token_hex(4)}", "probe")
    with closing(connect()) as client:
        ensure_image(client, image, on_progress)
        on_progress(f"asking the runtime in {image}")
        code, text = containers.run_once(client, asked, "ask", owner, PROBE_S)
    of_driver = pools(cards=list(gpus())) if engine_location().is_here else []  # a runtime sees all
    seen = _answer(image, code, text)
    same = [pool.target for pool in of_driver] == [gpu.target for gpu in seen]
    return [_pool(gpu, number, of_driver[number] if same else None) for number, gpu in enumerate(seen)]


def _answer(image: str, code: int, text: str) -> list[RuntimeGpu]:
    lines = [line.removeprefix("MEMORY ") for line in text.splitlines() if line.startswith("MEMORY ")]
    try:
        found = msgspec.convert(json.loads(lines[-1]), list[RuntimeGpu])
    except (IndexError, ValueError, msgspec.ValidationError):
        raise ServerError(
            f"the runtime in {image} does not tell its memory (exit code {code})",
            next_step="The image needs python3 with torch for ROCm, as vLLM's images have it.",
            detail=text[-2000:],
        ) from None
    if not found:
        raise ServerError(
            f"the runtime in {image} sees no GPU",
            next_step="Is the image built for this GPU, and may its user open /dev/kfd and /dev/dri?",
        )
    return found


def _pool(gpu: RuntimeGpu, number: int, of_driver: Pool | None) -> Pool:
    """The GPU with what the driver knows of it: whether the memory is the host's."""
    doubts, total = [], None if of_driver is None else of_driver.total_bytes
    if total is not None and abs(gpu.total - total) > total // 20:
        doubts.append(f"the runtime reports {gib(gpu.total, 2)} in total, the driver {gib(total, 2)}")
    found = Pool(
        render_node=f"GPU {number}",
        target=gpu.target,
        kind="vram",
        total_bytes=gpu.total,
        used_bytes=max(0, gpu.total - gpu.free),
        free_bytes=gpu.free,
        unified=False,
        doubts=doubts,
    )
    if of_driver is None:
        return found
    known = ("render_node", "kind", "unified", "host_available_bytes")
    return msgspec.structs.replace(found, **{name: getattr(of_driver, name) for name in known})
