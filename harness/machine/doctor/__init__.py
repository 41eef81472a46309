"""What stands in the way of serving a model on this machine: findings, each with its fix and its source."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from harness.machine.doctor import access, engine, gpu, kernel, memory, processes
from harness.machine.doctor.access import User as User
from harness.machine.doctor.engine import Engine as Engine
from harness.machine.doctor.finding import TOPICS as TOPICS
from harness.machine.doctor.finding import Finding as Finding
from harness.machine.doctor.finding import Level as Level
from harness.machine.doctor.finding import known as known
from harness.machine.doctor.finding import worst as worst
from harness.machine.facts import gpus


def diagnose(
    root: Path = Path("/"),
    docker: Engine | None = None,
    environ: Mapping[str, str] | None = None,
    user: User | None = None,
) -> list[Finding]:
    """Everything that can be found under `root`, by topic.

    `docker` is what the engine says of itself; None when it was not asked. With an engine on another machine there
    are only findings about that engine. `user` None is this one.
    """
    if docker is not None and docker.host is not None:
        return list(engine.check(docker, gpus=0))
    rootless = docker is not None and docker.rootless
    found = [*gpu.check(root, environ or {}), *memory.check(root), *kernel.check(root)]
    found += access.check(root, user, rootless=rootless)
    if docker is not None:
        found += engine.check(docker, gpus=sum(1 for _ in gpus(root)))
    return [*found, *processes.check(root)]


def device_blockers(root: Path, devices: Collection[str], *, rootless: bool = False) -> Iterator[Finding]:
    """What keeps a container from using these device nodes of the host. Quick: a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices say nothing.
    """
    if "/dev/kfd" in devices:
        for one in (*gpu.check(root, {}), *kernel.cwsr(root), *access.check(root, rootless=rootless)):
            if one.level == "blocker":
                yield one
    elif "/dev/dri" in devices:
        yield from access.no_render_node(root)
    yield from access.missing(root, [device for device in devices if device.startswith("/dev/dri/")])


def engine_blockers(root: Path, docker: Engine) -> Iterator[Finding]:
    """What keeps an engine that answers from running a server on the GPU."""
    if docker.problem is None:
        yield from (one for one in engine.check(docker, gpus=1) if one.level == "blocker")
