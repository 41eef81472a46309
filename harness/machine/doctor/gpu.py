"""Check the GPUs, their driver and the Docker Engine."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from harness.engines import Standing
from harness.machine.doctor.finding import Finding, Level, finding
from harness.machine.gfx_support import WORDS, GfxTarget, columns, table, target_of
from harness.machine.gpus import gpus, working
from harness.machine.sysfs import AMD, NVIDIA, pci_cards, text

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def gpu_findings(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What there is, and what is in its way. Without a GPU that is one finding."""
    counts = Counter(str(gpu["target"]) for gpu in gpus(root))
    if not counts:
        yield _none(root)
        return
    yield finding("gpu.present", "ok", _present(root, counts))
    for target in dict.fromkeys(str(card["target"]) for card in working(list(gpus(root)))):
        yield _standing(target)
    if len(counts) > 1:
        many = " and ".join(f"{count} x {target}" for target, count in counts.items())
        node = next(str(gpu["render_node"]) for gpu in sorted(gpus(root), key=lambda gpu: -(gpu["compute_units"] or 0)))
        yield finding(
            "gpu.mixed", "warning", f"{many} are in one machine, and servers may take the wrong one", node=node
        )
    if override := environ.get("HSA_OVERRIDE_GFX_VERSION"):
        yield finding("gpu.override", "warning", f"HSA_OVERRIDE_GFX_VERSION={override} is set")


def _present(root: Path, counts: Counter[str]) -> str:
    parts = []
    for target, count in counts.items():
        row = target_of(target)
        units = {gpu["compute_units"] for gpu in gpus(root) if gpu["target"] == target} - {None}
        each = f", {units.pop()} compute units" + (" each" if count > 1 else "") if len(units) == 1 else ""
        parts.append(f"{f'{count} x ' if count > 1 else ''}{target}: {row.family if row else 'family unknown'}{each}")
    return "; ".join(parts)


def _none(root: Path) -> Finding:
    found = list(pci_cards(root))
    amd = [card for card in found if card.vendor == AMD]
    if not amd:
        other = ""
        if any(card.vendor == NVIDIA for card in found):
            other = ", only one of NVIDIA, for which this project has no servers"
        elif (root / "dev/dxg").exists():
            other = ": WSL offers /dev/dxg in its place, which the templates do not use"
        return finding("gpu.present", "blocker", f"there is no AMD GPU{other}")
    card = amd[0]
    what = f"the AMD GPU at {card.slot} (1002:{card.device:04x}) is not known to the compute driver"
    if not (root / "sys/module/amdgpu").is_dir():
        case = "nomodeset" if "nomodeset" in (text(root / "proc/cmdline") or "").split() else "not-loaded"
        return finding("gpu.driver", "blocker", f"{what}: amdgpu is not loaded", case)
    return finding("gpu.driver", "blocker", f"{what}, though amdgpu is loaded", "not-known")


def _standing(target: str) -> Finding:
    row, checked = target_of(target), table().checked
    if row is None:
        fact = f"{target} is not in the table of {checked}: no server is known to have code for it"
        return finding("gpu.target", "warning", fact, "nothing")
    fact = f"{target} ({row.architecture}) on {checked}; {_in_words(row)}"
    ready = [column for key, column in columns().items() if row.standing(key) in _READY]
    if any(column.batches for column in ready):
        return finding("gpu.target", "ok", fact)
    named = any(target in column.targets for column in columns().values())
    return finding("gpu.target", "warning", fact, "single" if ready else "untried" if named else "nothing")


def _in_words(row: GfxTarget) -> str:
    """Servers by their standing, the best first."""
    groups = []
    for standing, words in WORDS.items():
        titles = [column.title for key, column in columns().items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{words}: {', '.join(titles)}")
    return "; ".join(groups)


GB = 10**9
IMAGE_BYTES = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second any of them does
_OLDEST = (20, 10)


class DockerEngine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


def engine_findings(engine: DockerEngine, *, gpus: int) -> Iterator[Finding]:
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


def _kind(engine: DockerEngine, gpus: int) -> Iterator[Finding]:
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


def _disk(engine: DockerEngine) -> Iterator[Finding]:
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
