"""Is there an AMD GPU, what is it, and which servers have code for it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.engines import Standing
from harness.machine import pci
from harness.machine.doctor.finding import Finding, finding
from harness.machine.facts import gpus
from harness.machine.files import text
from harness.machine.gpu_choice import working
from harness.machine.targets import WORDS, Target, columns, table, target_of

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def check(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
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
    found = list(pci.cards(root))
    amd = [card for card in found if card.vendor == pci.AMD]
    if not amd:
        other = ""
        if any(card.vendor == pci.NVIDIA for card in found):
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


def _in_words(row: Target) -> str:
    """Servers by their standing, the best first."""
    groups = []
    for standing, words in WORDS.items():
        titles = [column.title for key, column in columns().items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{words}: {', '.join(titles)}")
    return "; ".join(groups)
