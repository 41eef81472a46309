"""The largest gpu_memory_utilization with which vLLM starts, exact on bytes.

vLLM refuses to start when `free < ceil(total * utilization)` (v1/worker/utils.py, request_memory; the same on the CPU).
"""

import math
from decimal import ROUND_FLOOR, Decimal

from harness.units import GIB

VLLM_DEFAULT = Decimal("0.92")  # since vLLM 0.20; a larger value is only taken when somebody asks for it
STEP = Decimal("0.01")
SEVERAL_GPUS_BYTES = 2 * GIB  # RCCL's buffers, allocated before vLLM looks
CONTEXT_BYTES = GIB  # what the HIP runtime takes for itself before vLLM looks
ENGINE_BYTES = 3 * GIB  # vLLM on the CPU: what its other processes and the files that it reads take of the same memory
HOST_BYTES = 4 * GIB  # left to the system where the GPU's memory is the host's
_HALF_PRINTED = Decimal("0.005")  # GiB; vLLM prints them rounded to hundredths


def vllm_accepts(free: int, total: int, utilization: Decimal) -> bool:
    """vLLM's own check at start, in bytes, with the number as it reads it from the command line."""
    return 0 < utilization <= 1 and not free < math.ceil(total * float(utilization))


def default_reserve(free: int, gpus: int = 1) -> int:
    """Bytes to leave free: 1 GiB or 2 % for what others allocate until vLLM looks, more where GPUs work together."""
    return max(GIB if gpus == 1 else SEVERAL_GPUS_BYTES, free // 50)


def driver_reserve(free: int, gpus: int = 1) -> int:
    """The same where the driver tells what is free: the runtime has not yet taken its own share."""
    return default_reserve(free, gpus) + CONTEXT_BYTES


def safe_utilization(
    free: int,
    total: int,
    *,
    gpus: int = 1,
    reserve: int | None = None,
    host_available: int | None = None,
    cap: Decimal = VLLM_DEFAULT,
) -> Decimal | None:
    """The largest utilization in hundredths that leaves the reserve; None where not even 0.01 is left.

    All in bytes. `free` above `total`, which HIP reports on some APUs, counts as `total`. `host_available` is given for
    a pool whose pages are the host's memory: then the host keeps HOST_BYTES. Never more than `cap`.
    """
    if total <= 0:
        return None
    free = min(free, total)
    usable = free - (default_reserve(free, gpus) if reserve is None else reserve)
    if host_available is not None:
        usable = min(usable, host_available - HOST_BYTES)
    if usable <= 0:
        return None
    found = min((Decimal(usable) / total).quantize(STEP, ROUND_FLOOR), cap)
    while found > 0 and not vllm_accepts(usable, total, found):
        found -= STEP  # the nearest float may be above the decimal, and vLLM rounds the bytes up
    return found if found > 0 else None


def safe_from_printed(free_gib: str | float, total_gib: str | float) -> Decimal | None:
    """The same from the two numbers that vLLM prints, taken at the worse end of what was rounded to them.

    They were seen by vLLM itself, after its runtime had taken its share.
    """
    free, total = Decimal(str(free_gib)), Decimal(str(total_gib))
    min_free = int((free - _HALF_PRINTED) * GIB)
    max_total = math.ceil((total + _HALF_PRINTED) * GIB)
    return safe_utilization(min_free, max_total)
