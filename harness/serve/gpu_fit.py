"""What of a vLLM command line these GPUs, or this container, cannot do: known before the start, not after ten minutes.

FP8 as vLLM's ROCm platform has it (`supports_fp8`): CDNA and RDNA 4, not RDNA 3 and 3.5.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import HarnessError
from harness.serve.compose import Service
from harness.serve.values import parse_bytes

LEAST_SHM = 1 << 30  # RCCL and vLLM's own queues; with Docker's 64 MB it dies as the ranks meet
_RENDER_NODE = re.compile(r"/dev/dri/renderD\d+")


def container_problems(service: Service) -> list[str]:
    """What the service's own keys rule out, wherever it is started."""
    ranks = _ranks(service.command or [])
    if ranks == 1:
        return []
    problems = []
    if service.ipc != "host" and (service.shm_size is None or _smaller(service.shm_size)):
        has = f"shm_size: {service.shm_size}" if service.shm_size else "Docker's 64 MB of /dev/shm"
        problems.append(
            f"{ranks} GPUs exchange data through /dev/shm, and {has} is too small; set ipc: host or shm_size: 16g"
        )
    nodes = {node for device in service.devices for node in _RENDER_NODE.findall(device)}
    if nodes and not any(device.split(":")[0] == "/dev/dri" for device in service.devices) and len(nodes) < ranks:
        problems.append(f"tensor_parallel_size is {ranks}, and `devices` gives {len(nodes)} GPU to the container")
    visible = service.environment.get("HIP_VISIBLE_DEVICES")
    if visible is not None and "$" not in visible and len(visible.split(",")) < ranks:
        problems.append(f"tensor_parallel_size is {ranks}, and HIP_VISIBLE_DEVICES shows {visible or 'none'}")
    return problems


def refuse_unfit(service: Service, gpus: Sequence[Mapping[str, Any]]) -> None:
    """Raise HarnessError for what the GPUs of this machine cannot do; without known GPUs nothing is said."""
    words = service.command or []
    targets = sorted({str(gpu["target"]) for gpu in gpus})
    if not targets:
        return
    ranks = _ranks(words)
    if ranks > len(gpus):
        raise HarnessError(
            f"tensor_parallel_size is {ranks}, and this machine has {len(gpus)} AMD GPU{'s' if len(gpus) > 1 else ''} "
            f"({', '.join(targets)})",
            next_step="Lower tensor_parallel_size.",
        )
    for flag, names in (("quantization", ("--quantization", "-q")), ("kv_cache_dtype", ("--kv-cache-dtype",))):
        value = value_of(words, *names) or ""
        if "fp8" in value.lower() and not all(has_fp8(target) for target in targets):
            raise HarnessError(
                f"{flag} is {value}, and {', '.join(targets)} has no FP8",
                next_step="FP8 needs CDNA (Instinct) or RDNA 4 (gfx1200, gfx1201); take a model in FP16 or AWQ"
                + (" and kv_cache_dtype: auto." if flag == "kv_cache_dtype" else "."),
            )


def has_fp8(target: str) -> bool:
    """Whether vLLM computes FP8 on this gfx target; true for one that it does not know."""
    return re.match(r"gfx(10[0-3]|11)", target) is None


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of an option in a command line, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def _ranks(words: Sequence[str]) -> int:
    value = value_of(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def _smaller(size: str) -> bool:
    return "$" not in size and parse_bytes(size) < LEAST_SHM
