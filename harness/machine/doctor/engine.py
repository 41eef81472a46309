"""The Docker Engine: what it says of itself, held against what servers on a GPU need."""

import re
from collections.abc import Iterator

from msgspec import Struct

from harness.machine.doctor.finding import Finding, Level, finding

GB = 10**9
IMAGE_BYTES = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second any of them does
_OLDEST = (20, 10)


class Engine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a Docker Engine says of itself. Unknown is None; `problem` is why it cannot be used at all."""

    host: str | None = None  # the other machine that it is on
    named_by: str = "DOCKER_HOST"  # what names it, such as a context of Docker
    problem: str | None = None
    remedy: str = ""
    version: str | None = None
    rootless: bool = False
    desktop: bool = False
    podman: bool = False
    cgroup: str | None = None
    memory_limits: bool = True
    image_folder: str | None = None  # where it keeps images
    free_bytes: int | None = None  # of that folder's disk, on this machine
    stale: list[str] = []  # what killed runs of ours left in it


def check(engine: Engine, *, gpus: int) -> Iterator[Finding]:
    """Findings about the engine, for a machine with so many GPUs."""
    if engine.host is not None:
        here = "what follows is said by its Docker Engine, and nothing is known of its GPU, kernel and memory"
        yield finding("docker.remote", "warning", f"{engine.named_by} names {engine.host}: {here}", host=engine.host)
    if engine.problem is not None:
        fact = f"{engine.problem}: servers in containers cannot run"
        yield finding("docker.reachable", "blocker", fact, "told" if engine.remedy else "unknown", remedy=engine.remedy)
        return
    yield finding("docker.reachable", "ok", "the Docker Engine answers")
    yield from _kind(engine, gpus)
    yield from _disk(engine)
    if engine.stale:
        more = f" and {len(engine.stale) - 3} more" if len(engine.stale) > 3 else ""
        yield finding("docker.stale", "warning", f"left behind by killed runs: {', '.join(engine.stale[:3])}{more}")
    else:
        yield finding("docker.stale", "ok", "nothing was left behind by killed runs")


def _kind(engine: Engine, gpus: int) -> Iterator[Finding]:
    if engine.version is not None:
        numbers = tuple(int(part) for part in re.findall(r"\d+", engine.version)[:2])
        old = not engine.podman and numbers < _OLDEST
        told = f"{'Podman' if engine.podman else 'Docker Engine'} {engine.version}"
        yield finding("docker.version", "warning" if old else "ok", told)
    if engine.podman:
        yield finding("docker.podman", "warning", "Podman answers in Docker's place")
    if engine.desktop and gpus:
        yield finding("docker.desktop", "blocker", "the engine of Docker Desktop has no access to this machine's GPU")
    if engine.rootless:
        yield finding(
            "docker.rootless", "warning", "the engine runs without root: containers lose the groups of devices"
        )
    else:
        yield finding("docker.rootless", "ok", "the engine runs as root")
    if engine.cgroup is not None:
        level: Level = "ok" if engine.memory_limits else "warning"
        enforced = "memory limits are enforced" if engine.memory_limits else "memory limits are not enforced"
        yield finding("docker.cgroup", level, f"control groups version {engine.cgroup}, {enforced}")


def _disk(engine: Engine) -> Iterator[Finding]:
    if engine.free_bytes is None:
        return
    path = engine.image_folder or "Docker's data-root"
    fact = f"{engine.free_bytes / GB:.0f} GB free for images in {path}"
    none, enough = IMAGE_BYTES
    if engine.free_bytes < none:
        yield finding("docker.disk", "blocker", f"only {fact}; ROCm images need 10 to 35 GB", path=path)
    elif engine.free_bytes < enough:
        yield finding("docker.disk", "warning", f"{fact}; ROCm images need 10 to 35 GB, models their own", path=path)
    else:
        yield finding("docker.disk", "ok", fact)
