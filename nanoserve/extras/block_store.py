"""A second place for KV blocks: a pool in host memory, and a folder that outlives the engine.

The prefix cache forgets a block when its memory is needed. Then its KV must be computed again, at
the price of a prefill. Here such blocks are kept: in a pool beside the KV cache, of
`kv_offload_bytes` (block_pool.py), and in a folder of files, `kv_store` (block_folder.py), where a
new engine, or one beside this one, finds them again. Others call it KV offloading and connectors
(vLLM), hierarchical caching (SGLang), or LMCache.

    KV cache ──save: forgotten, or new──► pool ──a thread writes──► folder
        ▲                                 │  ▲                        │
        └──load: found by its digest──────┘  └──a thread reads what a queued request may need

**Invariant: a block is used for exactly those tokens that it was computed from.** In memory a hit
compares the identity of the parent's entry. Between processes there is no identity. So a block's
name here is a *digest*: SHA-256 over the parent's digest and the block's tokens. The chain begins
with a fingerprint of the weights and of all options that KV depends on, then an adapter's content.

All copies between cache and pool happen inside a step, on the step's own stream, before anything
is written: first the saves, then the loads. Nothing runs beside a step that touches KV. A load
counts when its step has finished, so the loads of a failed step don't count. Two threads read and
write files, and no step waits for them: a request whose blocks are being read sits out, and is
computed if the disk hangs. Only when a request arrives is the disk asked one question: is there a
file for the first block that memory lacks?

Not known here: the layout of the bytes. Known limit: a block goes to the folder via the pool, one
copy more than needed. Road not taken: copies on a stream of their own, which hide their time and
have corrupted KV in silence in two public engines.
"""

import hashlib
import os
import sys
import time
import weakref
from array import array
from collections import Counter as Bag
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoserve.batch import MAX_MOVES
from nanoserve.config import EngineConfig
from nanoserve.extras.block_folder import Folder, Reader, fingerprint, make_folder
from nanoserve.extras.block_pool import HostPool
from nanoserve.frontend.metrics import Counter
from nanoserve.parallel.interrupts import ctrl_c_held
from nanoserve.sequence import CacheEntry, Sequence, Step

MAX_ARRIVALS = 32  # blocks that the reading thread was asked for and has not read
PATIENCE = 1.0  # seconds without any block, after which nobody waits for the folder
TILE = 16  # tokens that the compiled twin keeps together: smaller blocks have no bytes of their own


# ------------------------------------------------------------------ at the start


def prepare(config: EngineConfig) -> tuple[Callable, Callable]:
    """What makes each rank's pool, and what then hangs a store on the engine.

    Raises `ValueError` for options that don't go together, and for a folder that can't be used.
    """
    if not config.enable_prefix_caching:
        raise ValueError("kv_offload_bytes and kv_store keep the prefix cache's blocks: leave "
                         "enable_prefix_caching=True")
    if config.kernels == "cpu" and config.block_size % TILE:
        raise ValueError(f"block_size={config.block_size} with kernels='cpu': blocks can be saved "
                         f"if it is a multiple of {TILE}; choose one, or kernels='torch'")
    has_folder = config.kv_store is not None
    if has_folder and config.tensor_parallel_size > 1 and not hasattr(os, "memfd_create"):
        raise ValueError(f"kv_store={str(config.kv_store)!r} with tensor_parallel_size="
                         f"{config.tensor_parallel_size}: the ranks must share memory, which works "
                         "on Linux; use kv_offload_bytes without a folder")
    if has_folder:
        make_folder(config.kv_store)  # here: loading the weights takes long
    return partial(HostPool, num_bytes=config.kv_offload_bytes, has_folder=has_folder), attach


def attach(llm: Any, model_folder: Path, say: Callable[[str], None]) -> None:
    """Give an engine its store; its runner has the pool already."""
    config, folder, base = llm.config, None, b""
    if config.kv_store is not None:
        base = fingerprint(config, model_folder, llm.runner.pool.shapes)
        num_bytes = llm.runner.pool.memory.shape[1]
        if config.kv_store_bytes < 2 * num_bytes:  # a file has a header, too
            raise ValueError(f"kv_store_bytes={config.kv_store_bytes:,} has no room for a block of "
                             f"{num_bytes:,} bytes and its header: raise it")
        folder = Folder(Path(config.kv_store), config.kv_store_bytes, base, say)
    store = BlockStore(llm.runner.pool, llm.scheduler, base, folder,
                       {"model_name": str(config.model)}, llm.runner)
    llm.store = llm.scheduler.store = store
    llm.observers.append(store)


# ------------------------------------------------------------------ what is where


def digest_of(parent: bytes, content: bytes | list[int]) -> bytes:
    """The digest of what follows `parent`: a block of tokens, or an adapter's key."""
    content = content if isinstance(content, bytes) else array("i", content).tobytes()
    return hashlib.sha256(parent + content).digest()


@dataclass
class Moves:
    """The loads and saves of a step in flight. epoch: see `BlockStore.clear`."""

    epoch: int
    loads: list[int]  # slots
    saves: dict[bytes, tuple[int, CacheEntry]] = field(default_factory=dict)  # slots by digest


@dataclass(eq=False)
class Chain:
    """What a queued request will look for and the folder may have. Each block is asked for once,
    and keeps its slot until the request is admitted."""

    blocks: deque[tuple[bytes, bytes, list[int]]]  # digest, parent, tokens
    asked: deque[tuple[bytes, Future]] = field(default_factory=deque)  # in the same order
    slots: list[int] = field(default_factory=list)  # pinned for it

    def give_up(self) -> None:
        """Wait for no more blocks. Nobody could find what is behind one that is missing."""
        self.blocks.clear()
        self.asked.clear()


class BlockStore:
    """Knows which slot holds which block. An observer; the scheduler asks it for blocks, too.

    pool: rank 0's. base: the digest that all others begin with. folder: None for no files; then
    only blocks that the cache evicts are saved. runner: for steps that only save.
    """

    def __init__(self, pool: HostPool, scheduler: Any, base: bytes, folder: Folder | None,
                 labels: dict[str, str], runner: Any = None):
        self.pool, self.base, self.folder = pool, base, folder
        self.labels, self.runner = labels, runner
        # Weak: these two hold the store. In a circle, a forgotten engine would keep its memory
        # until Python's garbage collector comes by.
        self.scheduler, self.blocks = weakref.proxy(scheduler), weakref.proxy(scheduler.blocks)
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, least recently used first
        self.held: list[bytes | None] = [None] * pool.num_slots  # the reverse: digests by slot
        self.free = list(range(pool.num_slots))[::-1]
        # How often a step or the writing thread still reads a slot, or a queued request needs it.
        self.pins: Bag[int] = Bag()
        self.unsaved: dict[bytes, CacheEntry] = {}  # what the next step is to save
        self.in_flight: dict[Step, Moves] = {}
        self.epoch = 0
        self.digests: dict[Sequence, list[bytes]] = {}  # of full blocks, by what has not ended
        self.chains: dict[Sequence, Chain] = {}  # samples of one request share a chain
        self.asked: dict[bytes, Future] = {}  # of all chains, what the reading thread has to do
        self.last_arrival = 0.0  # when the reading thread last brought a block, or had no work
        self.writing: deque[tuple[int, Future]] = deque()  # slots, in the writing thread's order
        self.has_failed = False  # a thread, for another reason than its files
        self.num_queries = self.num_hits = 0  # tokens; see read_metrics
        self.num_saved = self.num_loaded = self.num_lost = 0  # blocks
        self.blocks.on_evict = self.want_saved
        if folder is not None:
            self.blocks.on_commit = self.want_saved
            self.reader, self.writer = Reader(), ThreadPoolExecutor(1)

    def want_saved(self, entry: CacheEntry) -> None:
        """Have the next step save this block, before anything is written to it."""
        digest = self._digest_entry(entry)
        if digest in self.slots:
            self.slots.move_to_end(digest)
        else:
            self.unsaved[digest] = entry

    def _digest_entry(self, entry: CacheEntry | None) -> bytes:
        """Computed once for each entry, from the last ancestor that has one. None comes before
        every first block that has no root."""
        chain = []
        while entry is not None and not entry.digest:
            chain.append(entry)
            entry = entry.parent
        digest = entry.digest if entry is not None else self.base
        for one in reversed(chain):  # a root has no tokens, but a key that is a hash of content
            digest = one.digest = digest_of(digest, one.tokens or one.key)
        return digest

    def _digest_blocks(self, seq: Sequence) -> list[bytes]:
        """The digests of all full blocks of known tokens, extended as the sequence grows."""
        digests, size = self.digests.setdefault(seq, []), self.blocks.block_size
        for start in range(len(digests) * size, len(seq.token_ids) - size + 1, size):
            parent = digests[-1] if digests else self._digest_entry(seq.root)
            digests.append(digest_of(parent, seq.token_ids[start:start + size]))
        return digests

    # ------------------------------------------------- what the scheduler asks

    def is_reading(self, seq: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way from the folder."""
        chain = self.chains.get(seq)
        return chain is not None and bool(chain.blocks or chain.asked)

    def find(self, step: Step, seq: Sequence, num_hits: int) -> list[int]:
        """The slots of the blocks that follow those found in memory. Changes nothing."""
        slots: list[int] = []
        most = min(self.blocks.max_hits(seq), num_hits + MAX_MOVES - len(step.block_loads))
        for digest in self._digest_blocks(seq)[num_hits:most]:
            slot = self.slots.get(digest)
            if slot is None:
                break
            slots.append(slot)
        return slots

    # ------------------------------------------------------ the life of a step

    def plan(self, step: Step) -> None:
        """Give the step its saves. Called when the rest of it is planned: from here on until it has
        finished, the slots that it loads from keep their bytes."""
        moves = Moves(self.epoch, [slot for _, slot in step.block_loads])
        for slot in reversed(moves.loads):  # a chain's tail is given up before its head
            self.slots.move_to_end(self.held[slot])
        self.pins.update(moves.loads)
        for seq in step.admitted:
            self._let_go(seq)
            if seq.num_preemptions == 0 and not seq.needs_all_positions:  # as EngineMetrics counts
                self.num_queries += len(seq.token_ids) - seq.num_computed_tokens
                self.num_hits += step.num_loaded.get(seq, 0)
        self._take_written()
        self._take_arrivals(step.sitting_out)
        later: dict[bytes, CacheEntry] = {}
        in_flight = {digest for one in self.in_flight.values() for digest in one.saves}
        is_full = False  # behind a slow disk thousands of blocks may ask for a slot in every step
        for digest, entry in self.unsaved.items():
            if digest in self.slots or digest in in_flight:
                continue
            slot = None if is_full or len(moves.saves) == MAX_MOVES else self._take_slot()
            if slot is not None:
                moves.saves[digest] = slot, entry
                step.block_saves.append((entry.block_id, slot))
                continue
            is_full = True
            if self.blocks.entry_of[entry.block_id] is entry:
                later[digest] = entry  # it is new, and the cache still has it
            else:
                self.num_lost += 1
        self.unsaved = later
        if moves.loads or moves.saves:
            self.in_flight[step] = moves

    def finished(self, step: Step) -> None:
        """A step's saves can be found from now on."""
        moves = self.in_flight.pop(step, None)
        if moves is None:
            return
        self._unpin(moves.loads)
        self.num_loaded += len(moves.loads)
        for digest, (slot, entry) in reversed(moves.saves.items()):
            if moves.epoch != self.epoch or digest in self.slots:  # read from the folder meanwhile
                self.free.append(slot)
                continue
            self._put(digest, slot)
            self.num_saved += 1
            if self.folder is not None and self.folder.writes:
                self._have_written(slot, digest, entry)

    def dropped(self, step: Step) -> None:
        """A step was dropped: what it should have saved is lost, which only costs time."""
        moves = self.in_flight.pop(step, None)
        if moves is not None:
            self._unpin(moves.loads)
            self.free += [slot for slot, _ in moves.saves.values()]

    def save_rest(self) -> None:
        """No request is left: save new blocks in steps that do nothing else. If such a step fails,
        its blocks are lost, which only costs time; a rank that died shows in the next step. When
        the program ends, Python closes streams that were left open. Torch can run no step by then.
        """
        while self.unsaved and not sys.is_finalizing():
            self.plan(step := Step(-1))
            if not step.block_saves:
                return  # no slot is free
            try:
                with ctrl_c_held():  # a rank that is stopped within a step leaves the others there
                    self.runner.fetch(self.runner.launch(step))
            except RuntimeError:
                return self.dropped(step)
            self.finished(step)

    def clear(self) -> None:
        """Forget everything, and delete the folder's blocks. Saves that are under way have an older
        `epoch`: their results are thrown away. Nobody waits any more for what is being read."""
        self.epoch += 1
        self.unsaved.clear()
        self.asked.clear()
        for seq in list(self.chains):
            self._let_go(seq)
        for slot in self.slots.values():
            self.held[slot] = None
            if not self.pins[slot]:
                self.free.append(slot)
        self.slots.clear()
        if self.folder is not None:
            self._give(self.writer, self.folder.clear).result()  # behind all writes before it

    # ------------------------------------------------------------------- slots

    def _put(self, digest: bytes, slot: int) -> None:
        self.slots[digest], self.held[slot] = slot, digest

    def _take_slot(self) -> int | None:
        """A free one, or the least recently used; none while all of them are being read."""
        if self.free:
            return self.free.pop()
        for digest, slot in self.slots.items():
            if not self.pins[slot]:
                del self.slots[digest]
                self.held[slot] = None
                return slot
        return None

    def _unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.pins[slot] -= 1
            if not self.pins[slot]:
                del self.pins[slot]
                if self.held[slot] is None:
                    self.free.append(slot)  # it was cleared meanwhile

    # ----------------------------------------------------------------- threads

    def _take_arrivals(self, sitting_out: list[Sequence]) -> None:
        """Give slots to what the reading thread has brought, and ask it for what comes next: for
        as much as half of the pool can keep, or later requests would drive out what earlier ones
        wait for. The first in the queue need not wait for room, so that the queue moves on."""
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
                self._ask(self.chains[seq], self.pool.num_slots)
            room = self.pool.num_slots // 2 - len(self.pins) - len(self.asked)
            for chain in chains:
                room -= self._ask(chain, room)

    def _hangs(self) -> bool:
        """Whether the reading thread, which has work, has brought nothing for long."""
        return time.monotonic() - self.last_arrival > PATIENCE and not all(
            future.done() for future in self.asked.values())

    def _arrive(self, chain: Chain, digest: bytes, future: Future) -> None:
        data, slot = self._result(future), self.slots.get(digest)
        if slot is None and data is not None and (slot := self._take_slot()) is not None:
            self.pool.memory[slot].copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._put(digest, slot)
        if slot is None:
            chain.give_up()
        else:
            self._keep(chain, slot)

    def _ask(self, chain: Chain, room: int) -> int:
        """Have up to `room` blocks of a chain read, as long as the reading thread has little to do.
        Each block that was read and not yet put into a slot takes memory. Returns how many."""
        count = max(0, min(room, len(chain.blocks), MAX_ARRIVALS - len(self.asked)))
        for _ in range(count):
            digest, *rest = chain.blocks.popleft()
            if digest in self.slots:
                self._keep(chain, self.slots[digest])
                continue
            if digest not in self.asked:
                self.asked[digest] = self._give(self.reader, self.folder.read, digest, *rest,
                                                self.pool.memory.shape[1])
            chain.asked.append((digest, self.asked[digest]))
        return count

    def _keep(self, chain: Chain, slot: int) -> None:
        chain.slots.append(slot)
        self.pins[slot] += 1

    def _let_go(self, seq: Sequence) -> None:
        """It has been admitted, or has ended. Its chain's slots may be taken again, also where
        other samples of its request still wait."""
        chain = self.chains.pop(seq, None)
        if chain is not None:
            self._unpin(chain.slots)
            chain.slots = []

    def _have_written(self, slot: int, digest: bytes, entry: CacheEntry) -> None:
        """The slot keeps its bytes until they are in a file."""
        self.pins[slot] += 1
        self.writing.append((slot, self._give(
            self.writer, self.folder.write, digest, self._digest_entry(entry.parent), entry.tokens,
            self.pool.memory[slot].numpy())))

    def _take_written(self) -> None:
        while self.writing and self.writing[0][1].done():
            slot, future = self.writing.popleft()
            self._unpin([slot])
            self._result(future)

    def _give(self, thread: ThreadPoolExecutor | Reader, work: Callable, *args: Any) -> Future:
        """Give a thread work. When the program ends, threads accept no work: the result is None,
        as of a file that is not there."""
        try:
            return thread.submit(work, *args)
        except RuntimeError:
            nothing: Future = Future()
            nothing.set_result(None)
            return nothing

    def _result(self, future: Future) -> Any:
        """What a thread has brought. The folder expects errors of files. Any other is said once,
        and then is a miss: a request doesn't fail because of its store."""
        error = future.exception()
        if error is None:
            return future.result()
        if not self.has_failed:
            self.has_failed = True
            self.folder.say(f"kv_store={str(self.folder.path)!r}: a block is computed anew, or is "
                            f"not written, because of {error!r}")
        return None

    def flush(self) -> None:
        """Wait until all new blocks are in the folder. In a small pool some blocks can't be saved
        before others have been written."""
        num_unsaved = 0
        while self.folder is not None:
            self._give(self.writer, int).result()  # behind all writes before it
            if len(self.unsaved) == num_unsaved or not self.folder.writes:
                return  # none is left, or nothing helps
            num_unsaved = len(self.unsaved)
            self.save_rest()

    def close(self) -> None:
        """Write what is to be written, and end the threads. Whoever holds the engine, and with it
        this observer, shall hold no memory. A read that hangs isn't waited for."""
        try:
            if self.folder is not None:
                self.flush()
                self.reader.shutdown()
                self.writer.shutdown()
        finally:
            self.pool = self.runner = None

    # ------------------------------------------------------------- an observer

    def added(self, sequences: list[Sequence], stats: Any, prompt: str | None) -> None:
        """Begin to read what a queued request will look for."""
        if self.folder is None:
            return
        seq = sequences[0]  # the others have the same prompt
        digests, size = self._digest_blocks(seq), self.blocks.block_size
        first = missing = len(self.blocks.find_prefix(seq))
        while missing < len(digests) and digests[missing] in self.slots:
            missing += 1
        most = min(self.blocks.max_hits(seq), first + self.pool.num_slots)
        if missing < most and not self._hangs() and self.folder.has(digests[missing]):
            root = self._digest_entry(seq.root)
            chain = Chain(deque((digests[i], digests[i - 1] if i else root,
                                 seq.token_ids[i * size:(i + 1) * size])
                                for i in range(first, most)))
            self.chains.update(dict.fromkeys(sequences, chain))
            self._take_arrivals([])

    def scheduled(self, step: Step) -> None:
        for lost in self.in_flight.keys() - self.scheduler.in_flight:
            self.dropped(lost)
        if step.num_new_tokens:
            self.plan(step)
            return
        self._take_arrivals(step.sitting_out)
        if step.sitting_out and not self.scheduler.in_flight:
            time.sleep(0.0005)  # there is nothing to do but to read

    def updated(self, step: Step, grown: dict[Sequence, list[int]]) -> None:
        self.finished(step)

    def ended(self, sequences: list[Sequence]) -> None:
        """Called after each step, mostly with none."""
        for seq in sequences:
            if self.folder is not None:
                self._give(self.writer, self.folder.touch, self._digest_blocks(seq))
            self.digests.pop(seq, None)
            self._let_go(seq)
        if self.unsaved and not self.scheduler.has_unfinished():
            self.save_rest()

    def read_metrics(self) -> list[Counter]:
        """Tokens looked up beyond the KV cache, and tokens found, in vLLM's names. Blocks that were
        saved, that were loaded (also after a preemption, whose look-ups are not counted), and for
        which there was no slot."""
        counts = {"external_prefix_cache_queries": self.num_queries,
                  "external_prefix_cache_hits": self.num_hits,
                  "kv_store_saved_blocks": self.num_saved,
                  "kv_store_loaded_blocks": self.num_loaded,
                  "kv_store_lost_blocks": self.num_lost}
        return [Counter(f"vllm:{name}", self.labels, value) for name, value in counts.items()]

    # ------------------------------------------------------------- the audit

    def check(self) -> None:
        """Audit the slots: each is free, held, being saved to, or pinned after a `clear`."""
        saving = [slot for one in self.in_flight.values() for slot, _ in one.saves.values()]
        assert min(self.pins.values(), default=1) > 0, f"a slot is let go too often: {self.pins}"
        known = [*self.free, *self.slots.values(), *saving]
        known += [slot for slot in self.pins if self.held[slot] is None]
        assert sorted(known) == list(range(len(self.held))), f"a slot is lost or doubled: {known}"
        for digest, slot in self.slots.items():
            assert self.held[slot] == digest, f"slot {slot} has another block than it is found by"
