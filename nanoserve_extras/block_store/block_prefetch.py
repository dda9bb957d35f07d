"""Prefetching: the blocks that a queued request will need are read before its turn comes.

A step has no time for files, a queued request has. So while a request waits, a thread reads its
blocks from the folder (block_folder.py) into host memory (block_host.py). When the request's turn
comes, the store (block_store.py) finds them there, and a step loads them. If they are still on
their way, the request sits out that step, and others go on.

    begin      a request is queued. Its *chain* is what     d0 d1 d2 │ d3 d4 │ d5 d6 d7
               it will look for, in order                   pinned   ◄ asked ◄ blocks
    advance    in every step: what has arrived gets
               host blocks, and more is asked for
    let_go     the request was admitted, or has ended: its host blocks may be taken again

**Invariant: no step waits for a disk.** Only `begin` asks it one question: is there a file for the
first block that host memory lacks? If the thread then brings nothing for `PATIENCE` seconds, nobody
waits for it any more: what has arrived is loaded, and the rest is computed.

Not known here: what the KV cache has. Road not taken: to read while the step runs, and to wait
before each layer for its bytes (vLLM's `wait_for_layer_load`): a slow disk then stops the batch.
"""

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from nanoserve.sequence import Sequence
from nanoserve_extras.block_store.block_folder import Folder, Reader
from nanoserve_extras.block_store.block_host import HostBlocks, HostMemory

MAX_ARRIVALS = 32  # blocks that the thread was asked for and has not read
PATIENCE = 1.0  # seconds without any block, after which nobody waits for the folder

Block = tuple[bytes, bytes, list[int]]  # its digest, its parent's, and its tokens


@dataclass(eq=False)
class Chain:
    """What a queued request will look for and the folder may have. Each block is asked for once,
    and keeps its host block until the request is admitted."""

    blocks: deque[Block]  # not asked for yet
    asked: deque[tuple[bytes, Future]] = field(default_factory=deque)  # in the same order
    pinned: list[int] = field(default_factory=list)  # host blocks, for it

    def give_up(self) -> None:
        """Wait for no more blocks. Nobody could find what is behind one that is missing."""
        self.blocks.clear()
        self.asked.clear()


class Prefetcher:
    """Reads what queued requests will look for: `begin`, `advance` in every step, `let_go`.

    host: rank 0's. host_blocks: which block is where in it.
    """

    def __init__(self, folder: Folder, host: HostMemory, host_blocks: HostBlocks):
        self.folder, self.host, self.host_blocks = folder, host, host_blocks
        self.reader = Reader()
        self.chains: dict[Sequence, Chain] = {}  # samples of one request share a chain
        self.asked: dict[bytes, Future] = {}  # of all chains, what the thread has to do
        self.last_arrival = 0.0  # when the thread last brought a block, or had no work

    def begin(self, sequences: list[Sequence], blocks: list[Block]) -> None:
        """A request is queued. blocks: what it will look for behind what the KV cache has."""
        blocks = blocks[:self.host.num_blocks]
        missing = next((one for one, *_ in blocks if self.host_blocks.find(one) is None), None)
        if missing is not None and not self._hangs() and self.folder.has(missing):
            self.chains.update(dict.fromkeys(sequences, Chain(deque(blocks))))
            self.advance([])

    def is_reading(self, seq: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way."""
        chain = self.chains.get(seq)
        return chain is not None and bool(chain.blocks or chain.asked)

    def advance(self, sitting_out: list[Sequence]) -> None:
        """Give host blocks to what the thread has brought, and ask it for what comes next: for as
        much as half of host memory can keep, or later requests would drive out what earlier ones
        wait for. The first that is `sitting_out` need not wait for room, so that the queue moves
        on."""
        now, num_asked = time.monotonic(), len(self.asked)
        self.asked = {one: future for one, future in self.asked.items() if not future.done()}
        if not self.asked or len(self.asked) < num_asked:
            self.last_arrival = now
        chains = list(dict.fromkeys(self.chains.values()))
        for chain in chains:
            while chain.asked and chain.asked[0][1].done():
                self._arrive(chain, *chain.asked.popleft())
        if self._hangs():  # what has arrived must do
            for chain in chains:
                chain.give_up()
        if any(chain.blocks for chain in chains):
            for seq in filter(self.is_reading, sitting_out[:1]):
                self._ask(self.chains[seq], self.host.num_blocks)
            room = self.host.num_blocks // 2 - len(self.host_blocks.pins) - len(self.asked)
            for chain in chains:
                room -= self._ask(chain, room)

    def _hangs(self) -> bool:
        """Whether the thread, which has work, has brought nothing for long."""
        return time.monotonic() - self.last_arrival > PATIENCE and not all(
            future.done() for future in self.asked.values())

    def _arrive(self, chain: Chain, digest: bytes, future: Future) -> None:
        data, host_id = self.folder.outcome(future), self.host_blocks.find(digest)
        if host_id is None and data is not None:
            host_id = self.host_blocks.take()
            if host_id is not None:
                self.host.memory[host_id].copy_(torch.frombuffer(data, dtype=torch.uint8))
                self.host_blocks.put(digest, host_id)
        if host_id is None:
            chain.give_up()
        else:
            self._keep(chain, host_id)

    def _ask(self, chain: Chain, room: int) -> int:
        """Have up to `room` blocks of a chain read, as long as the thread has little to do. Each
        block that was read and not yet put into a host block takes memory. Returns how many."""
        count = max(0, min(room, len(chain.blocks), MAX_ARRIVALS - len(self.asked)))
        for _ in range(count):
            digest, parent, tokens = chain.blocks.popleft()
            if (host_id := self.host_blocks.find(digest)) is not None:
                self._keep(chain, host_id)
                continue
            if digest not in self.asked:
                self.asked[digest] = self.reader.submit(
                    self.folder.read, digest, parent, tokens, self.host.memory.shape[1])
            chain.asked.append((digest, self.asked[digest]))
        return count

    def _keep(self, chain: Chain, host_id: int) -> None:
        chain.pinned.append(host_id)
        self.host_blocks.pin([host_id])

    def let_go(self, seq: Sequence) -> None:
        """It was admitted, or has ended. Its chain's host blocks may be taken again, also where
        other samples of its request still wait."""
        chain = self.chains.pop(seq, None)
        if chain is not None:
            self.host_blocks.unpin(chain.pinned)
            chain.pinned = []

    def forget(self) -> None:
        """Nobody waits any more for what is being read."""
        self.asked.clear()
        for seq in list(self.chains):
            self.let_go(seq)

    def close(self) -> None:
        """End the thread. A read that hangs isn't waited for."""
        self.reader.shutdown()
