"""What stands in the way of serving a model on this machine: findings, each with its fix and its source."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from harness.machine.doctor import gpu, memory, system
from harness.machine.doctor.finding import TOPICS as TOPICS
from harness.machine.doctor.finding import Finding as Finding
from harness.machine.doctor.finding import Level as Level
from harness.machine.doctor.finding import known as known
from harness.machine.doctor.finding import worst as worst
from harness.machine.doctor.gpu import DockerEngine as DockerEngine
from harness.machine.doctor.system import User as User
from harness.machine.gpus import gpus


def diagnose(
    root: Path = Path("/"),
    docker: DockerEngine | None = None,
    environ: Mapping[str, str] | None = None,
    user: User | None = None,
) -> list[Finding]:
    """Everything that can be found under `root`, by topic.

    `docker` is what the engine says of itself; None when it was not asked. With an engine on another machine there
    are only findings about that engine. `user` None is this one.
    """
    if docker is not None and docker.host is not None:
        return list(gpu.engine_findings(docker, gpus=0))
    rootless = docker is not None and docker.rootless
    found = [*gpu.gpu_findings(root, environ or {}), *memory.memory_findings(root), *system.kernel_findings(root)]
    found += system.access_findings(root, user, rootless=rootless)
    if docker is not None:
        found += gpu.engine_findings(docker, gpus=sum(1 for _ in gpus(root)))
    return [*found, *memory.process_findings(root)]


def device_blockers(root: Path, devices: Collection[str], *, rootless: bool = False) -> Iterator[Finding]:
    """What keeps a container from using these device nodes of the host. Quick: a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices say nothing.
    """
    if "/dev/kfd" in devices:
        for one in (*gpu.gpu_findings(root, {}), *system.cwsr(root), *system.access_findings(root, rootless=rootless)):
            if one.level == "blocker":
                yield one
    elif "/dev/dri" in devices:
        yield from system.no_render_node(root)
    yield from system.missing(root, [device for device in devices if device.startswith("/dev/dri/")])


def engine_blockers(root: Path, docker: DockerEngine) -> Iterator[Finding]:
    """What keeps an engine that answers from running a server on the GPU."""
    if docker.problem is None:
        yield from (one for one in gpu.engine_findings(docker, gpus=1) if one.level == "blocker")
