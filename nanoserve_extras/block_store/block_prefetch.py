"""Prefetching: the blocks that a queued request will need are read before its turn comes.

A step must not wait for files, but a queued request can. So while a request waits, a thread reads
its blocks from the folder (block_folder.py) into host blocks (block_host.py) reserved for them.
When the request's turn comes, the store (block_store.py) finds them there, and a step loads them.
If they are still being read, the request is deferred, and others go on.

    begin        a request is queued, or could be admitted:    d0 d1 │ d2 d3 d4 │ d5 d6
                 host blocks are kept for it                   found │ taken    │ no file
    is_reading   asked in every step; what the thread has read can be found once it has ended
    let_go       the request was admitted, or has ended: its host blocks may be taken again

**Invariant: no step waits for a disk.** Only `begin` asks it a few questions: up to which block is
there a file? If the thread then brings nothing for `PATIENCE` seconds, no request waits for it any
more: blocks that have arrived are loaded, and the rest is computed. The host block at which the
thread hangs stays taken until it returns.

The road not taken: reading during the step and waiting before each layer for its bytes (vLLM's
`wait_for_layer_load`) would let a slow disk stop the batch.
"""

import threading
import time
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from itertools import takewhile
from queue import SimpleQueue

from nanoserve.sequence import Sequence
from nanoserve_extras.block_store.block_folder import Folder
from nanoserve_extras.block_store.block_host import HostBlocks, HostMemory

PATIENCE = 1.0  # seconds without any block, after which no request waits for the folder


@dataclass(eq=False)
class Reading:
    """Blocks for which one sequence waits. The thread counts them, and marks its end."""

    found: list[int]  # host blocks that hold the first ones
    digests: list[bytes]  # the blocks to read
    host_ids: list[int]  # taken for these
    num_read: int = 0
    is_wanted: bool = True
    has_ended: bool = False
    has_arrived: bool = False  # then its blocks can be found


@dataclass
class Pulse:
    """State that the thread and its owner share."""

    last: float = 0.0  # when it last brought a block, or got work
    is_stopped: bool = False


class Prefetcher:
    """host: rank 0's. host_blocks: which block is where in it."""

    def __init__(self, folder: Folder, host: HostMemory, host_blocks: HostBlocks):
        self.folder, self.host, self.host_blocks = folder, host, host_blocks
        self.readings: dict[Sequence, Reading] = {}  # by the waiting sequence
        self.let_gone: list[Reading] = []  # those that the thread may still be at
        self.pending: list[Reading] = []  # the thread's work, in its order
        self.pulse, self.queue = Pulse(), SimpleQueue()
        # Python's end waits for an executor's threads, also for one whose disk hangs. It does not
        # wait for a daemon. And a store that was forgotten ends it: it must not hold this object.
        threading.Thread(target=_read, args=[self.queue, self.pulse, folder], daemon=True).start()
        self.close = weakref.finalize(self, _stop, self.queue, self.pulse)

    def begin(self, seq: Sequence, digests: list[bytes], spare: int | None) -> bool:
        """Have the thread read what the folder has of these blocks. spare: how many host blocks
        must stay free then; None: take what there is. Returns False if the sequence must wait
        until there is room, or until another one has what it needs."""
        self._release()
        blocks, hangs = self.host_blocks, self._hangs()
        found = list(takewhile(lambda host_id: host_id is not None, map(blocks.find, digests)))
        missing = [] if hangs else digests[len(found):]
        if missing and any(missing[0] in one.digests for one in self.pending):
            return False
        # A chain loses its tail first, so halving finds its end. If a file in between is missing,
        # the thread stops there.
        count = bisect_left(missing, True, key=lambda digest: not self.folder.has(digest))
        blocks.use(found)
        if spare is not None and count > len(blocks.free) - spare:
            blocks.release(found)
            return False
        host_ids = blocks.take(count)
        reading = Reading(found, missing[:len(host_ids)], host_ids, has_ended=not host_ids)
        self.readings[seq] = reading
        if host_ids:
            if not self.pending:
                self.pulse.last = time.monotonic()
            self.pending.append(reading)
            self.queue.put((reading, self.host.memory.numpy()))
        return True

    def is_reading(self, seq: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way."""
        reading = self.readings[seq]
        if not reading.has_arrived and (reading.has_ended or self._hangs()):
            reading.has_arrived = True
            for digest, host_id in zip(reading.digests, reading.host_ids[:reading.num_read],
                                       strict=False):
                if self.host_blocks.find(digest) is None:  # it may have been saved meanwhile
                    self.host_blocks.put(digest, host_id)
        return not reading.has_arrived

    def _hangs(self) -> bool:
        """Whether the thread, which has work, has brought nothing for long."""
        self.pending = [one for one in self.pending if not one.has_ended]
        return bool(self.pending) and time.monotonic() - self.pulse.last > PATIENCE

    def let_go(self, seq: Sequence) -> None:
        """The sequence was admitted, or has ended. Blocks for which no request waits are not read.
        """
        reading = self.readings.pop(seq, None)
        if reading is not None:
            reading.is_wanted = False
            self.let_gone.append(reading)
            self._release()

    def _release(self) -> None:
        """Release the host blocks to which the thread can't write any more."""
        for one in [one for one in self.let_gone if one.has_ended]:
            self.let_gone.remove(one)
            self.host_blocks.release(one.found + one.host_ids)

    def kept(self) -> list[int]:
        """The host blocks in use here, for an audit."""
        return [host_id for one in (*self.readings.values(), *self.let_gone)
                for host_id in one.found + one.host_ids]


def _read(queue: SimpleQueue, pulse: Pulse, folder: Folder) -> None:
    """The thread. While it waits, it keeps no other object's memory alive."""
    while (work := queue.get()) is not None:
        reading, memory = work
        pulse.last = time.monotonic()
        for digest, host_id in zip(reading.digests, reading.host_ids, strict=True):
            if not reading.is_wanted or pulse.is_stopped or not folder.read(
                    digest, memory[host_id]):
                break
            reading.num_read += 1
            pulse.last = time.monotonic()
        reading.has_ended = True
        del work, reading, memory


def _stop(queue: SimpleQueue, pulse: Pulse) -> None:
    """Stop the thread: without waiting for the block that it reads, and without reading more."""
    pulse.is_stopped = True
    queue.put(None)
