"""What of a vLLM command line these GPUs, or this container, cannot do, known before the start."""

import re
from collections.abc import Sequence

from harness.errors import HarnessError
from harness.machine.gfx_support import has_fp8
from harness.machine.gpus import VISIBLE, Card, shown
from harness.serve.compose.compose import Service
from harness.serve.compose.values import parse_bytes
from harness.serve.vllm.flags import ranks_of, value_of

LEAST_SHM = 1 << 30  # RCCL and vLLM's own queues; with Docker's 64 MB it dies as the ranks meet
_RENDER_NODE = re.compile(r"/dev/dri/renderD\d+")


def container_problems(service: Service) -> list[str]:
    """What the service's own keys rule out, wherever it is started."""
    ranks = ranks_of(service.command or [])
    if ranks == 1:
        return []
    problems = []
    size = service.shm_size
    if service.ipc != "host" and (size is None or ("$" not in size and parse_bytes(size) < LEAST_SHM)):
        has = f"shm_size: {size}" if size else "Docker's 64 MB of /dev/shm"
        problems.append(f"{ranks} GPUs exchange data through /dev/shm, and {has} is too small; set shm_size: 16g")
    nodes = {node for device in service.devices for node in _RENDER_NODE.findall(device)}
    if nodes and not any(device.split(":")[0] == "/dev/dri" for device in service.devices) and len(nodes) < ranks:
        problems.append(f"tensor_parallel_size is {ranks}, and `devices` gives {len(nodes)} GPU to the container")
    for name in VISIBLE:
        visible = service.environment.get(name)
        if visible is not None and "$" not in visible and len(visible.split(",")) < ranks:
            problems.append(f"tensor_parallel_size is {ranks}, and {name} shows {visible or 'none'}")
    return problems


def refuse_unfit(service: Service, cards: Sequence[Card], words: Sequence[str] | None = None) -> None:
    """Raise HarnessError for what the GPUs that the service is given cannot do.

    `cards`: all of this machine; without any, nothing is said, and nothing of a service that is given none. `words`:
    vLLM's arguments, where they are not the service's command.
    """
    words = (service.command or []) if words is None else words
    given = shown_to(service, cards)
    if not given:
        return
    ranks = ranks_of(words)
    if ranks > len(given):
        targets = ", ".join(sorted({str(card["target"]) for card in given}))
        left_out = len(cards) - len(given)
        has = "this machine has" if not left_out else "it is given"
        more = f"; {left_out} more {'is' if left_out == 1 else 'are'} left out" if left_out else ""
        raise HarnessError(
            f"tensor_parallel_size is {ranks}, and {has} {len(given)} AMD GPU{'s' if len(given) > 1 else ''} "
            f"({targets}){more}",
            next_step="Lower tensor_parallel_size.",
        )
    lacking = ", ".join(sorted({str(card["target"]) for card in given[:ranks] if not has_fp8(str(card["target"]))}))
    for flag, names in (("quantization", ("--quantization", "-q")), ("kv_cache_dtype", ("--kv-cache-dtype",))):
        value = value_of(words, *names) or ""
        if "fp8" in value.lower() and lacking:
            raise HarnessError(
                f"{flag} is {value}, and {lacking} has no FP8",
                next_step="FP8 needs CDNA (Instinct) or RDNA 4 (gfx1200, gfx1201); take a model in FP16 or AWQ"
                + (" and kv_cache_dtype: auto." if flag == "kv_cache_dtype" else "."),
            )


def shown_to(service: Service, cards: Sequence[Card]) -> list[Card]:
    """The GPUs that the service is given; none where it has no device of them, or where a variable decides."""
    if not any(device.startswith(("/dev/kfd", "/dev/dri")) for device in service.devices):
        return []
    numbers = [number for name in VISIBLE for number in service.environment.get(name, "0").split(",")]
    if not cards or not all(number.strip().isdigit() for number in numbers):
        return []  # ids of GPUs, or a variable of the shell
    return shown(cards, service.devices, service.environment)
