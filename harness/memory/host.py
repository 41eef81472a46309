"""The host's memory as vLLM's CPU backend looks at it: there, the same flag rules a share of the host's memory."""

from pathlib import Path

from harness.errors import HarnessError
from harness.machine.files import meminfo
from harness.memory.answer import Share, least, share

_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")  # what vLLM adds up


def host_share(root: Path = Path("/"), *, limit: int | None = None) -> Share:
    """The share of a memory node that is safe for vLLM on the CPU; `limit` is the container's mem_limit in bytes.

    Source: vllm/utils/cpu_resource_utils.py, get_memory_node_info. With several nodes, the one that has least.
    Raises HarnessError where the kernel does not tell.
    """
    whole = meminfo(root / "proc/meminfo")
    nodes = [meminfo(path) for path in sorted(root.glob("sys/devices/system/node/node*/meminfo"))]
    nodes = [node for node in nodes if node.get("MemTotal") and all(name in node for name in _FREE)]
    pairs = [(sum(node[name] for name in _FREE), node["MemTotal"]) for node in nodes]
    if not pairs and {"MemAvailable", "MemTotal"} <= whole.keys():
        pairs = [(whole["MemAvailable"], whole["MemTotal"])]
    if not pairs:
        raise HarnessError(
            f"how much memory of this host is free is not known ({root / 'proc/meminfo'})",
            next_step="Set gpu_memory_utilization to a number.",
        )
    if limit is not None:
        pairs = [(min(free, limit), min(total, limit)) for free, total in pairs]
    available = whole.get("MemAvailable")
    return least([share(free, total, source="host", host_available=available) for free, total in pairs])
