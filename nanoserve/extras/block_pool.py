"""KV blocks in host memory: slots that a step copies to and from, on every rank.

A *slot* has room for one block's KV over all layers: layer 0's keys, its values, layer 1's keys and
so on. The packed step says which blocks are saved to which slots, and which are loaded from where.

    blocks of the cache   [ 0 | 1 | 2 | 3 | ... ]
                            │save       ▲ load
                            ▼           │
    slots                 [ 0     |     1     |     2     | ... ]

With tensor parallelism each rank has a share of each block, the KV of its own heads, and slots of
its own for it. All ranks move the same blocks to the same slots.

Invariant: copies are queued on the step's own stream before anything of the step reads or writes a
block, first the saves, then the loads: a block that is saved may be loaded over in the same step.

Not known here: which block a slot has (block_store.py), and what the bytes mean.
"""

from collections.abc import Iterable
from typing import Any

import torch

POOL_BYTES = 2 ** 29  # the least size of a pool that only serves a folder


class HostPool:
    """One rank's slots, each with room for a block's KV over all layers; made behind the cache.

    memory: (num_slots, block_bytes) uint8, pinned where there is a GPU. num_bytes: its size; 0 for
    what a folder needs, which is room for all that one step computes. Raises `ValueError` if it has
    no room for a block.
    """

    def __init__(self, runner: Any, num_bytes: int):
        caches = [cache for pair in runner.kv_cache for cache in pair]
        self.shapes = [[*cache.shape[1:], str(cache.dtype)] for cache in caches]
        self.caches = [cache.flatten(1).view(torch.uint8) for cache in caches]  # (blocks, bytes)
        block_bytes = sum(cache.shape[1] for cache in self.caches)
        full_step = runner.config.max_num_batched_tokens // runner.config.block_size * block_bytes
        num_bytes = num_bytes or max(POOL_BYTES, full_step)
        self.num_slots = runner.ranks.least(num_bytes // block_bytes)
        if not self.num_slots:
            raise ValueError(f"kv_offload_bytes={num_bytes:,} has no room for a block of "
                             f"{block_bytes:,} bytes: raise it")
        try:
            self.memory = torch.empty(self.num_slots, block_bytes, dtype=torch.uint8,
                                      pin_memory=runner.device.type == "cuda")
        except RuntimeError as error:
            raise ValueError(f"no memory for a pool of {self.num_slots:,} blocks of {block_bytes:,}"
                             " bytes: lower kv_offload_bytes") from error

    def move(self, host: dict[str, Any]) -> None:
        """Queue a step's copies. host: the batch's sections. Saves come first, because a load may
        overwrite a block that is saved."""
        for block_id, slot in host["block_saves"].reshape(-1, 2).tolist():
            for cache, there in self._parts(slot):
                there.copy_(cache[block_id], non_blocking=True)
        for block_id, slot in host["block_loads"].reshape(-1, 2).tolist():
            for cache, there in self._parts(slot):
                cache[block_id].copy_(there, non_blocking=True)

    def _parts(self, slot: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each cache, and its part of the slot."""
        return zip(self.caches, self.memory[slot].split([one.shape[1] for one in self.caches]),
                   strict=True)
