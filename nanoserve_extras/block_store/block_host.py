"""KV blocks in host memory, which a step copies to and from, on every rank.

A *host block* has room for one block's KV over all layers. A step lists which blocks are saved to
which host blocks, and which are loaded. Each rank has its share of each block. Only rank 0 knows
which block is in which host block (`HostBlocks`). With a folder, all ranks map one shared memory:

    host block 0                          host block 1
    [ rank 0's share | rank 1's share ]   [ rank 0's share | rank 1's share ]   ...
      each rank copies its own share from and to its cache: layer 0's keys, then its values, ...
      the threads of rank 0 read and write whole host blocks from and to files

**Invariant: a block is in the store for all ranks or for none.** One checksum covers all shares. A
rank loads a host block only when a step tells it to, and rank 0 sends the step after the last byte
was written. A saved block is written to its file when the step has finished on rank 0. This implies
that all ranks have finished: through the network's collectives or, in a step that only saves,
through `move`.

Known limit: memory that ranks share is not page-locked, so with GPUs the host waits for these
copies. The road not taken: with a file for each rank a block could be incomplete, and ranks would
have to report to rank 0 which ones they have read.
"""

import os
import secrets
from collections import Counter as Bag
from collections import OrderedDict
from contextlib import ExitStack, suppress
from typing import Any

import torch

from nanoserve.device import free_cpu_memory
from nanoserve.model import KVCache
from nanoserve.parallel import Ranks
from nanoserve_extras.base.runner import Runner

LEAST_BYTES = 2 ** 29  # for host memory that only serves a folder


class HostMemory:
    """One rank's host blocks; made behind the cache, by all ranks at the same time.

    memory: (num_blocks, bytes) uint8, the whole of them; page-locked where there is a GPU, unless
    ranks share it. own: (num_blocks, block_bytes), this rank's share of them. num_bytes: the size
    of all its shares; 0 for what a folder needs, which is room for all that one step computes.
    has_folder: see above. Raises `ValueError` if there is no room for a block, or not so much
    memory, or none that ranks share.
    """

    def __init__(self, runner: Runner, num_bytes: int, has_folder: bool):
        self.ranks, self.device = runner.ranks, runner.device
        self.shapes = [[*cache.shape[1:], str(cache.dtype)]
                       for pair in runner.kv_cache for cache in pair]
        self.sizes = [cache.shape[1] for cache in rows_of(runner.kv_cache)]
        block_bytes = sum(self.sizes)
        free = self.ranks.least(free_cpu_memory()) // self.ranks.local_size
        if num_bytes > free:  # the system would promise it, and kill the engine once it is used
            raise ValueError(f"kv_offload_bytes={num_bytes:,}: {free:,} bytes of memory are free "
                             "for it: choose less")
        full_step = runner.config.max_num_batched_tokens // runner.config.block_size * block_bytes
        num_bytes = num_bytes or max(LEAST_BYTES, full_step)
        self.num_blocks = self.ranks.least(num_bytes // block_bytes)
        if not self.num_blocks:
            raise ValueError(f"kv_offload_bytes={num_bytes:,} has no room for a block of "
                             f"{block_bytes:,} bytes: raise it")
        self.is_shared = has_folder and self.ranks.size > 1
        try:  # also if ranks share it: this refuses what is too large, and a mapping does not
            self.own = self.memory = torch.empty(
                self.num_blocks, block_bytes, dtype=torch.uint8,
                pin_memory=runner.device.type == "cuda" and not self.is_shared)
        except RuntimeError as error:
            raise ValueError(f"no memory for {num_bytes:,} bytes of blocks: choose "
                             "kv_offload_bytes below that") from error
        if self.is_shared:
            widest = -self.ranks.least(-block_bytes)  # ranks may have a KV head more or less
            memory = share_memory(self.ranks, self.num_blocks * self.ranks.size * widest)
            self.memory = memory.view(self.num_blocks, -1)
            first = self.ranks.rank * widest
            self.own = self.memory[:, first:first + block_bytes]

    def move(self, host: dict[str, Any], kv_cache: KVCache) -> None:
        """Queue a step's copies. host: the batch's sections. In `block_moves`, (block, host block)
        saves a block, and (block, -1 - host block) loads one. Saves come first: a load may
        overwrite a block that is saved."""
        moves = host["block_moves"].reshape(-1, 2).tolist()
        caches = rows_of(kv_cache) if moves else []  # not kept: they go while an engine sleeps
        for block_id, host_id in moves:
            there = self.own[host_id if host_id >= 0 else -1 - host_id].split(self.sizes)
            for here, part in zip([cache[block_id] for cache in caches], there, strict=True):
                to, source = (part, here) if host_id >= 0 else (here, part)
                to.copy_(source, non_blocking=True)
        if self.is_shared and not len(host["input_ids"]):  # no network runs
            self.ranks.all_reduce(torch.zeros(1, device=self.device))


def rows_of(kv_cache: KVCache) -> list[torch.Tensor]:
    """Each of the caches as bytes, (blocks, bytes of a block)."""
    return [cache.flatten(1).view(torch.uint8) for pair in kv_cache for cache in pair]


class HostBlocks:
    """Which block is in which host block, and which ones are free: a small `BlockManager`.

    A host block that a step or a thread reads or writes is *in use*, as often as it was taken or
    used and not yet released, and keeps its bytes. All others are free. A free one that holds a
    block can still be found, until it is taken for another.
    """

    def __init__(self, num_blocks: int):
        self.by_digest: dict[bytes, int] = {}
        self.held: list[bytes | None] = [None] * num_blocks  # the reverse: digests by number
        self.num_users = [0] * num_blocks
        # An ordered set: first those that hold nothing, then the least recently used.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def find(self, digest: bytes) -> int | None:
        return self.by_digest.get(digest)

    def touch(self, host_id: int) -> None:
        """Mark a host block as recently used: others are taken before it."""
        if host_id in self.free:
            self.free.move_to_end(host_id)

    def take(self, count: int) -> list[int]:
        """Take up to `count` free host blocks, for other bytes. They are in use from now on."""
        host_ids = [self.free.popitem(last=False)[0] for _ in range(min(count, len(self.free)))]
        for host_id in host_ids:
            self.num_users[host_id] = 1
            self.by_digest.pop(self.held[host_id], None)
            self.held[host_id] = None
        return host_ids

    def put(self, digest: bytes, host_id: int) -> None:
        """From now on this block is found in a host block that was taken for it."""
        self.by_digest[digest], self.held[host_id] = host_id, digest

    def use(self, host_ids: list[int]) -> None:
        for host_id in host_ids:
            self.num_users[host_id] += 1
            self.free.pop(host_id, None)

    def release(self, host_ids: list[int]) -> None:
        """Each has one user less. Of a chain's blocks, the last will be taken before the first."""
        for host_id in reversed(host_ids):
            self.num_users[host_id] -= 1
            if not self.num_users[host_id]:
                self.free[host_id] = None
                self.free.move_to_end(host_id, last=self.held[host_id] is not None)

    def forget(self) -> None:
        """Forget all blocks, so that none is found. Host blocks in use keep their bytes."""
        self.by_digest.clear()
        self.held = [None] * len(self.held)

    def check(self, used: list[int]) -> None:
        """Audit. used: a host block for each of its users."""
        counts = Bag(used)
        for host_id, num_users in enumerate(self.num_users):
            assert num_users == counts[host_id], f"{host_id}: {num_users} users, not {counts}"
            assert (host_id in self.free) == (not num_users), f"{host_id} is free, or not in use"
        found = {host_id: digest for digest, host_id in self.by_digest.items()}
        held = {i: digest for i, digest in enumerate(self.held) if digest is not None}
        assert found == held, f"found {found}, held {held}"


def share_memory(ranks: Ranks, num_bytes: int) -> torch.Tensor:
    """Zeros that all ranks map, (num_bytes,) uint8. All ranks call it at the same time.

    Raises `ValueError` on all ranks if one does not find the memory. The random name tells: another
    machine may have a process with rank 0's number, but no such file in it.
    """
    file, name, memory = -1, secrets.randbits(62), None
    with ExitStack() as stack:
        if ranks.rank == 0:
            with suppress(OSError):  # then there is no such file, and no rank finds it
                opened = stack.enter_context(open(os.memfd_create(f"nanoserve-{name}"), "wb"))
                opened.truncate(num_bytes)
                file = opened.fileno()
        process, file, name = ranks.agree(os.getpid(), file, name)
        path = f"/proc/{process}/fd/{file}"
        with suppress(OSError, RuntimeError):
            if f"nanoserve-{name} " in os.readlink(path):
                memory = torch.from_file(path, True, num_bytes, dtype=torch.uint8)
        everywhere = ranks.least(memory is not None)  # by now each has opened the file, or failed
    if not everywhere:
        raise ValueError(f"kv_store on {ranks.size} ranks, which share {num_bytes:,} bytes "
                         "of memory: run all of them on one machine that has so much, or use "
                         "kv_offload_bytes without a folder")
    return memory
