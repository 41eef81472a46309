"""The KV cache that fits into given memory, counted in blocks as vLLM 0.32 counts it.

Source: vllm/v1/core/kv_cache_utils.py. A block holds `block` tokens of a group of layers. Layers that keep all tokens
and layers with a sliding window are put into groups of equal size, which share one pool of blocks.
"""

from msgspec import Struct

from harness.errors import HarnessError, did_you_mean
from harness.memory.model import Geometry

GPU_BLOCK = 16  # vLLM's default on a GPU
CPU_BLOCK = 128
DTYPE_BYTES = {"auto": None, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def known_dtype(name: str) -> None:
    """Raise HarnessError for a data type whose size is not known here."""
    if name not in DTYPE_BYTES:
        raise HarnessError(
            f"--kv-cache-dtype: '{name}' is not known here; {did_you_mean(name, DTYPE_BYTES)}",
            next_step="Leave it out for the model's own.",
        )


class Layout(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one GPU stores the cache."""

    block: int  # tokens
    block_bytes: int
    full_groups: int
    sliding_groups: int = 0
    window: int | None = None
    in_flight: int = 0  # tokens of a sliding window that are computed, but not yet let go

    def blocks_per_request(self, length: int) -> int:
        """Blocks that a request of `length` tokens holds at most."""
        blocks = self.full_groups * _up(length, self.block)
        if self.sliding_groups and self.window is not None:
            kept = min(self.window - 1 + self.in_flight, length)
            blocks += self.sliding_groups * (_up(kept, self.block) + 1)  # a window may begin within a block
        return blocks

    def request_bytes(self, length: int) -> int:
        return self.blocks_per_request(length) * self.block_bytes

    @property
    def token_bytes(self) -> int | None:
        """Bytes of one more token of a request; None where it depends on how long the request is already."""
        return None if self.sliding_groups else self.full_groups * self.block_bytes // self.block


class Capacity(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a KV cache holds, as vLLM prints it at start."""

    tokens: int
    concurrency: float  # requests of the greatest length at once
    longest: int  # the greatest max_model_len that vLLM would start with, at most the one asked for

    @property
    def fits(self) -> bool:
        """Whether a request of the greatest length fits, without which vLLM does not start."""
        return self.longest > 0 and self.concurrency >= 1


def layout_of(
    geometry: Geometry, number_bytes: int, *, tensor_parallel: int = 1, block: int = GPU_BLOCK, in_flight: int = 0
) -> Layout:
    """The cache on each of `tensor_parallel` GPUs: key heads are divided, but at least one is on each."""
    heads = max(1, geometry.kv_heads // tensor_parallel)
    page = block * heads * geometry.head_size * number_bytes * (1 if geometry.latent else 2)
    full, sliding = geometry.full_layers, geometry.sliding_layers
    if not full or not sliding:
        size = full or sliding
    else:
        # Groups of the smaller kind's size; unless they are about equal, then of the greater one's, with padding.
        size = max(full, sliding) if max(full, sliding) < min(full, sliding) * 1.5 else min(full, sliding)
    return Layout(
        block=block,
        block_bytes=size * page,
        full_groups=_up(full, size),
        sliding_groups=_up(sliding, size),
        window=geometry.window,
        in_flight=in_flight,
    )


def capacity(layout: Layout, available: int, length: int) -> Capacity:
    """What `available` bytes hold at a max_model_len of `length` tokens."""
    blocks = max(0, available) // layout.block_bytes
    concurrency = blocks / layout.blocks_per_request(length)
    usable = available - layout.block_bytes  # vLLM keeps one block for itself, and looks at the rest
    return Capacity(tokens=int(concurrency * length), concurrency=concurrency, longest=_longest(layout, usable, length))


def _longest(layout: Layout, available: int, length: int) -> int:
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if layout.request_bytes(middle) <= available:
            low = middle
        else:
            high = middle - 1
    return low


def _up(number: int, by: int) -> int:
    return -(-number // by)
