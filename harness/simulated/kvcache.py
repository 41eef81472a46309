"""KV-cache blocks: capacity, sharing by prefix, least recently used eviction.

As in vLLM V1 (https://docs.vllm.ai/en/latest/design/prefix_caching.html): a full block is known by the hash of its
tokens and of the block before it; a block that no request uses stays cached until its place is needed; a request's
blocks are given back last block first, so the tail of a prompt is evicted before its head.
"""

from collections import OrderedDict
from collections.abc import Sequence


def block_hashes(tokens: Sequence[int], block_size: int, known: Sequence[int] = ()) -> list[int]:
    """Chained hashes of the full blocks of `tokens`; `known` are the first ones, already computed."""
    hashes = list(known)
    parent = hashes[-1] if hashes else 0
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size]))
        hashes.append(parent)
    return hashes


class BlockPool:
    """`blocks` blocks of `block_size` tokens. A block is free when no request refers to it, cached or not."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._references = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._cached: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use by requests, 0 to 1 (vLLM's kv_cache_usage_perc)."""
        return 1 - len(self._free) / self.blocks

    def match(self, hashes: Sequence[int]) -> list[int]:
        """The cached blocks that hold the longest known prefix."""
        found: list[int] = []
        for value in hashes:
            block = self._cached.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, held: list[int], tokens: int, shared: Sequence[int] = ()) -> bool:
        """Extend `held` to hold `tokens` tokens, first by the `shared` cached blocks; False if they do not fit."""
        needed = -(-tokens // self.block_size) - len(held) - len(shared)
        idle = sum(1 for block in shared if self._references[block] == 0)
        if needed > len(self._free) - idle:
            return False
        for block in shared:
            self._free.pop(block, None)
            self._references[block] += 1
            held.append(block)
        for _ in range(needed):
            block, _ = self._free.popitem(last=False)
            old = self._hash_of[block]
            if old is not None:
                del self._cached[old]
                self._hash_of[block] = None
            self._references[block] = 1
            held.append(block)
        return True

    def remember(self, held: Sequence[int], hashes: Sequence[int]) -> None:
        """Make the full blocks of a request findable by their hashes."""
        for block, value in zip(held, hashes, strict=False):
            if self._hash_of[block] is None and value not in self._cached:
                self._hash_of[block] = value
                self._cached[value] = block

    def release(self, held: list[int]) -> None:
        for block in reversed(held):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
        held.clear()
