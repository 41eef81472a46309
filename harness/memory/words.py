"""The answer as a person reads it."""

from collections.abc import Iterable

from harness.machine.pool import Pool
from harness.memory.answer import NO_GPU, OTHER_BYTES, Answer, Room, Share
from harness.units import GIB, gib

SOURCES = {
    "driver": "as the kernel's driver tells; 1 GiB of the reserve is for the runtime, which has not started yet",
    "container": "as the runtime in a container of the image tells",
    "given": "as given",
    "host": "as the kernel tells of the host's memory; 3 GiB of the reserve are for vLLM's processes, which have not "
    "started yet",
}


def of_answer(answer: Answer) -> list[str]:
    """All of it, in lines."""
    lines = [of_pool(pool) for pool in answer.pools]
    lines += [NO_GPU] if answer.share is None else of_share(answer.share)
    return lines + (of_room(answer.room) if answer.room is not None else [])


def of_pool(pool: Pool) -> str:
    """One line on a GPU's memory."""
    kind = "memory" if pool.kind is None else "pages of the host (GTT)" if pool.unified else "VRAM"
    text = f"{pool.render_node or 'GPU'} {pool.target}: {_gib(pool.free_bytes)} of {_gib(pool.total_bytes)} {kind} free"
    return text + (f"; {_gib(pool.host_available_bytes)} available on the host" if pool.unified else "")


def of_share(share: Share) -> list[str]:
    """The value and how it was computed, in lines."""
    by = f": {share.node}" if share.node is not None else ""
    several = f" of each of {share.gpus} GPUs, by the one that has least{by}" if share.gpus > 1 else ""
    if share.utilization is None:
        head = "nothing is left for vLLM: stop what holds the memory (`harness doctor` names it)"
    else:
        head = f"--gpu-memory-utilization {share.utilization} ({_gib(share.budget_bytes)}{several})"
    return [head, f"  {share.formula}", f"  {SOURCES[share.source]}", *(f"  doubt: {text}" for text in share.doubts)]


def of_room(room: Room) -> list[str]:
    """What is left for the model, in lines."""
    lines = [
        f"{room.model}{', on each GPU' if room.gpus > 1 else ''}:",
        f"  weights: {_gib(room.weights_bytes)} ({room.weights_from})",
    ]
    if room.request_bytes is not None:
        each = f"{room.token_bytes:,} bytes a token, " if room.token_bytes is not None else ""
        lines.append(f"  KV cache: {each}{_gib(room.request_bytes)} for a request of {room.max_model_len:,} tokens")
    if room.kv_bytes is not None:
        lines.append(
            f"  left for the KV cache: {_from_to(_gib(max(0, size)) for size in room.kv_bytes)} "
            f"(an estimate: activations and graphs take {OTHER_BYTES[0] / GIB:.1f} to {OTHER_BYTES[1] / GIB:.1f} GiB, "
            "which vLLM finds out at start)"
        )
    if room.capacity is not None:
        tokens = _from_to(f"{held.tokens:,}" for held in room.capacity)
        at_once = _from_to(f"{held.concurrency:.2f}x" for held in room.capacity)
        lines.append(f"  KV cache size: {tokens} tokens")
        lines.append(f"  concurrency for {room.max_model_len:,} tokens per request: {at_once}")
    if room.fits is not None:
        lines.append(f"  {'it fits' if room.fits else 'it does NOT fit'}")
    elif room.capacity is not None:
        lines.append("  whether it fits is decided by what vLLM needs besides")
    lines += [f"  unknown: {text}" for text in room.unknown]
    return lines + [f"  to do: {text}" for text in room.advice]


def brief(room: Room) -> list[str]:
    """What is left for the model, in a line; and what to do where that is not enough."""
    if room.capacity is None:
        return [f"unknown: {text}" for text in room.unknown]
    tokens = _from_to(f"{held.tokens:,}" for held in room.capacity)
    at_once = _from_to(f"{held.concurrency:.1f}" for held in room.capacity)
    line = f"left for the KV cache: about {tokens} tokens, {at_once} requests of {room.max_model_len:,}"
    return [line, *(f"to do: {text}" for text in room.advice)]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else gib(size, 2)


def _from_to(values: Iterable[str]) -> str:
    first, last = values
    return first if first == last else f"{first} to {last}"
