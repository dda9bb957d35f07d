"""A second place for KV blocks: host memory, and a folder that outlives the engine.

The prefix cache forgets a block when its memory is needed. Then its KV must be recomputed, which
costs a prefill. Here such blocks are kept: in `kv_offload_bytes` of host memory (block_host.py),
and in a folder of files, `kv_store` (block_folder.py), where other engines find them, too. This is
also known as KV offloading (vLLM), hierarchical caching (SGLang), or LMCache.

    KV cache ──save: forgotten, or new──► host memory ──a thread writes──► folder
        ▲                                 │  ▲                               │
        └──load: found by its digest──────┘  └──what a queued request needs──┘ block_prefetch.py

**Invariant: a block is used for exactly those tokens that it was computed from.** Its name here is
a *digest*: SHA-256 over the parent's digest, the block's tokens, and the content of images that
begin there. The chain begins with a fingerprint of the weights and of all options that KV depends
on, then an adapter's content.

All copies between cache and host memory happen inside a step, on its own stream, before anything is
written: first the saves, then the loads. A load counts when its step has finished. No step waits
for a file: a block that finds no free host block is saved later, or lost.

The road not taken: copies on a separate stream would hide their time, but in two public engines
they have silently corrupted KV.
"""

import hashlib
import os
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from nanoserve.batch import MAX_MOVES
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.progress import say
from nanoserve.request import Request
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CacheEntry, Sequence, Step
from nanoserve.turns import ctrl_c_held
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.metrics import Counter, Metric
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.block_store.block_folder import (
    CHECKSUM,
    Folder,
    fingerprint,
    make_folder,
)
from nanoserve_extras.block_store.block_host import HostBlocks, HostMemory
from nanoserve_extras.block_store.block_prefetch import Prefetcher
from nanoserve_extras.engine_args import BlockStoreOptions

# Tokens that the compiled backend keeps together: smaller blocks have no bytes of their own.
TILE = 16


def digest_of(parent: bytes, content: bytes | list[int], images: bytes = b"") -> bytes:
    """The digest of the item after `parent`: a block of tokens, or an adapter's key. images: see
    `CoreRequest.contents`."""
    content = content if isinstance(content, bytes) else array("i", content).tobytes()
    return hashlib.sha256(parent + content + images).digest()


@dataclass
class Moves:
    """The loads and saves of a step in flight. epoch: see `BlockStore.reset`."""

    epoch: int
    loads: list[int] = field(default_factory=list)  # host blocks
    saves: dict[bytes, tuple[int, CacheEntry]] = field(default_factory=dict)  # the same by digest


class BlockStore(Extra):
    """The extra behind `LLM(kv_offload_bytes=..., kv_store=...)`. The scheduler asks it for blocks;
    it gives steps their loads and saves."""

    Options = BlockStoreOptions
    needs = frozenset([Fact.PREFIX_CACHE, Fact.KV_ALONE, Fact.ONE_STAGE])

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.unsaved: dict[bytes, CacheEntry] = {}  # the next step saves these
        self.found: dict[Sequence, list[int]] = {}  # host blocks, by sequence to be admitted
        self.in_flight: dict[Step, Moves] = {}
        self.epoch = 0
        self.digests: dict[Sequence, list[bytes]] = {}  # full blocks, while they live
        self.digest_of_entry: WeakKeyDictionary[CacheEntry, bytes] = WeakKeyDictionary()
        self.writing: deque[tuple[int, Future]] = deque()  # in the thread's order
        self.num_queries = self.num_hits = 0  # tokens; see `metrics`
        self.num_saved = self.num_loaded = self.num_lost = 0  # blocks

    @property
    def name(self) -> str:
        folder = self.options.kv_store
        return (f"kv_offload_bytes={self.options.kv_offload_bytes}" if folder is None
                else f"kv_store={str(folder)!r}")

    def prepare(self, plan: Plan) -> Plan:
        """Raises `ValueError` for a block size or a folder that can't be used."""
        config, asked = plan.config, self.options
        self.folders = [plan.folder, *filter(None, [plan.draft_folder])]
        self.about = [plan.network, *plan.notes]
        if config.kernels == "cpu" and config.block_size % TILE:
            raise ValueError(f"block_size={config.block_size} with kernels='cpu': blocks can be "
                             f"saved if it is a multiple of {TILE}; choose one, or kernels='torch'")
        has_folder, num_ranks = asked.kv_store is not None, config.tensor_parallel_size
        if has_folder and num_ranks > 1 and not hasattr(os, "memfd_create"):
            raise ValueError(f"kv_store={str(asked.kv_store)!r} with tensor_parallel_size="
                             f"{num_ranks}: the ranks must share memory, which works on Linux; use "
                             "kv_offload_bytes without a folder")
        if has_folder:
            make_folder(asked.kv_store)  # here: loading the weights takes long
        return replace(plan, parts=replace(plan.parts, make_copier=partial(
            HostMemory, num_bytes=asked.kv_offload_bytes, has_folder=has_folder)))

    def attach(self, engine: LLMEngine) -> None:
        config, host = engine.config, engine.runner.copier
        self.runner = engine.runner  # for steps that only save
        folder, base, num_bytes = None, b"", host.memory.shape[1]
        if self.options.kv_store is not None:
            if (most := self.options.kv_store_bytes) < num_bytes + CHECKSUM:
                raise ValueError(f"kv_store_bytes={most:,} has no room for a "
                                 f"block of {num_bytes:,} bytes and its checksum: raise it")
            base = fingerprint(config, self.about, self.folders, host.shapes)
            folder = Folder(Path(self.options.kv_store), self.options.kv_store_bytes, say)
        self.open(host, engine.scheduler, base, folder)

    def open(self, host: HostMemory, scheduler: Scheduler, base: bytes = b"",
             folder: Folder | None = None) -> None:
        """host: rank 0's. base: the digest that all others begin with. folder: None for no files;
        then only blocks that the cache evicts are saved."""
        self.host, self.base, self.folder = host, base, folder
        # Weak: these two hold the store. In a reference cycle, a deleted engine would keep its
        # memory until Python's garbage collector runs.
        self.scheduler, self.blocks = weakref.proxy(scheduler), weakref.proxy(scheduler.blocks)
        self.host_blocks = HostBlocks(host.num_blocks)
        self.prefetcher: Prefetcher | None = None
        if folder is not None:
            self.prefetcher = Prefetcher(folder, host, self.host_blocks)
            self.writer = ThreadPoolExecutor(1)

    def committed(self, entry: CacheEntry) -> None:
        if self.folder is not None:
            self.want_saved(entry)

    def evicted(self, entry: CacheEntry) -> None:
        self.want_saved(entry)

    def idle(self) -> None:
        self.save_rest()

    def want_saved(self, entry: CacheEntry) -> None:
        """Make the next step save this block, before anything is written to it."""
        digest = self._digest_entry(entry)
        host_id = self.host_blocks.find(digest)
        if host_id is None:
            self.unsaved[digest] = entry
        else:
            self.host_blocks.touch(host_id)

    def _digest_entry(self, entry: CacheEntry | None) -> bytes:
        """Computed once for each entry, from the last ancestor that has one. None comes before
        every first block that has no root."""
        chain, known = [], self.digest_of_entry
        while entry is not None and entry not in known:
            chain.append(entry)
            entry = entry.parent
        digest = known[entry] if entry is not None else self.base
        for one in reversed(chain):  # a root has no tokens, but a key that is a hash of content
            digest = known[one] = digest_of(digest, one.tokens or one.key, one.content)
        return digest

    def _digest_blocks(self, seq: Sequence) -> list[bytes]:
        """The digests of all full blocks of known tokens, extended as the sequence grows."""
        digests, size = self.digests.setdefault(seq, []), self.blocks.block_size
        for start in range(len(digests) * size, len(seq.token_ids) - size + 1, size):
            parent = digests[-1] if digests else self._digest_entry(seq.request.root)
            digests.append(digest_of(parent, seq.token_ids[start:start + size],
                                     seq.request.contents.get(start // size, b"")))
        return digests

    # ------------------------------------------------- the scheduler's questions

    def is_reading(self, seq: Sequence) -> bool:
        """Whether a waiting sequence must wait for blocks from the folder, or for host blocks. The
        first in the queue waits only for host blocks from which steps load, which are soon free:
        others may be kept for sequences behind it."""
        if self.prefetcher is None:
            return False
        if seq not in self.prefetcher.readings:
            loads = any(self.found.values()) or any(one.loads for one in self.in_flight.values())
            is_first = self.scheduler.waiting[0] is seq
            if not self._prefetch(seq, None if is_first and not loads else 0):
                return True
        return self.prefetcher.is_reading(seq)

    def _prefetch(self, seq: Sequence, spare: int | None) -> bool:
        """Begin to read the blocks that follow a sequence's hits in the KV cache: see `begin`."""
        num_hits, most = len(self.blocks.find_prefix(seq)), self.blocks.max_hits(seq)
        return self.prefetcher.begin(seq, self._digest_blocks(seq)[num_hits:most], spare)

    def find(self, step: Step, seq: Sequence, num_hits: int) -> int:
        """How many blocks after the hits in the KV cache are in this store. If the sequence is
        admitted, the step loads them: see `plan`. Until then they are in use."""
        self.host_blocks.release(self.found.pop(seq, []))
        room = MAX_MOVES - sum(step.num_loaded.values()) // self.blocks.block_size
        most = min(self.blocks.max_hits(seq), num_hits + room)
        host_ids = self.found[seq] = list(takewhile(
            lambda host_id: host_id is not None,
            map(self.host_blocks.find, self._digest_blocks(seq)[num_hits:most])))
        self.host_blocks.use(host_ids)
        return len(host_ids)

    def scheduled(self, step: Step) -> None:
        """The step is planned: give it its copies of blocks."""
        if step.num_new_tokens:
            self.plan(step)
        elif step.deferred and not self.scheduler.in_flight:
            time.sleep(0.0005)  # there is nothing to do but to read
        for host_ids in self.found.values():
            self.host_blocks.release(host_ids)
        self.found.clear()

    # ------------------------------------------------------ the life of a step

    def plan(self, step: Step) -> None:
        """Give the step its saves and loads. Called when the rest of it is planned. Until the step
        has finished, the host blocks from which it loads keep their bytes."""
        moves, loads = Moves(self.epoch), []
        for seq in step.num_loaded:  # behind its hits, which are computed
            first, host_ids = seq.num_computed_tokens // self.blocks.block_size, self.found[seq]
            loads += [(block_id, -1 - host_id) for block_id, host_id in zip(
                seq.block_table[first:], host_ids, strict=False)]
            moves.loads += host_ids
        self.host_blocks.use(moves.loads)
        for seq in step.admitted:
            if seq.num_preemptions == 0 and not seq.needs_all_positions:  # as EngineMetrics counts
                self.num_queries += len(seq.token_ids) - seq.num_computed_tokens
                self.num_hits += step.num_loaded.get(seq, 0)
        self._take_written()
        if self.prefetcher is not None:
            for seq in step.admitted:
                self.prefetcher.let_go(seq)
        step.block_moves = self._plan_saves(moves) + loads  # in this order: see `HostMemory.move`
        if moves.loads or moves.saves:
            self.in_flight[step] = moves

    def _plan_saves(self, moves: Moves) -> list[tuple[int, int]]:
        """Returns (block, host block) of each save."""
        later: dict[bytes, CacheEntry] = {}
        in_flight = {digest for one in self.in_flight.values() for digest in one.saves}
        for digest, entry in self.unsaved.items():
            if digest in in_flight or self.host_blocks.find(digest) is not None:
                continue
            if len(moves.saves) < MAX_MOVES and (taken := self.host_blocks.take(1)):
                moves.saves[digest] = taken[0], entry
            elif self.blocks.entry_of[entry.block_id] is entry:
                later[digest] = entry  # it is new, and the cache still has it
            else:
                self.num_lost += 1
        self.unsaved = later
        return [(entry.block_id, host_id) for host_id, entry in moves.saves.values()]

    def updated(self, step: Step, accepted: dict[Sequence, list[int]] | None = None) -> None:
        """A step has finished: its saves can be found from now on."""
        moves = self.in_flight.pop(step, None)
        if moves is None:
            return
        self.host_blocks.release(moves.loads)
        self.num_loaded += len(moves.loads)
        for digest, (host_id, _) in reversed(moves.saves.items()):
            is_new = moves.epoch == self.epoch and self.host_blocks.find(digest) is None
            if is_new:  # not all was forgotten, and it was not read meanwhile
                self.host_blocks.put(digest, host_id)
                self.num_saved += 1
            if is_new and self.folder is not None and self.folder.writes:
                self.writing.append((host_id, self._give(  # in use until it is in a file
                    self.folder.write, digest, self.host.memory[host_id].numpy())))
            else:
                self.host_blocks.release([host_id])

    def dropped(self, step: Step) -> None:
        """A step was dropped: its saves are lost, which only costs time."""
        moves = self.in_flight.pop(step, None)
        if moves is not None:
            self.host_blocks.release([*moves.loads, *(one for one, _ in moves.saves.values())])

    def save_rest(self) -> None:
        """No request is left: save new blocks in steps that do nothing else. If such a step fails,
        its blocks are lost, which only costs time; a rank that died shows in the next step. When
        the program ends, Python closes streams that were left open. Torch can run no step by then.
        """
        while self.unsaved and not sys.is_finalizing():
            self.plan(step := Step(-1))
            if not step.block_moves:
                return  # no host block is free
            try:
                with ctrl_c_held():  # a rank that is stopped within a step leaves the others there
                    self.runner.fetch(self.runner.launch(step))
            except RuntimeError:
                return self.dropped(step)
            self.updated(step)

    def reset(self) -> None:
        """Forget everything, and delete the folder's blocks. Saves that are under way have an older
        `epoch`: their results are thrown away. If Ctrl-C ends the wait for a slow disk, files that
        are still there may be found: they are deleted as soon as the disk allows."""
        self.epoch += 1
        self.unsaved.clear()
        self.host_blocks.forget()
        if self.folder is not None:
            emptied = self._give(self.folder.clear)  # behind all writes before it
            with ctrl_c_held() as noted:  # by the engine, too, which then raises it
                while not (noted or emptied.done()):
                    wait([emptied], timeout=0.1)
                if not noted:
                    emptied.result()

    def leave_cache(self) -> None:
        """The KV cache is about to be freed: save its blocks that are in no other place."""
        self.save_rest()
        self.unsaved.clear()  # if a step has failed, or no host block was free

    def rename(self) -> None:
        """Other weights were loaded, after a `reset`: from here on blocks have names that differ
        from those of all other engines, whatever their weights are."""
        self.base = os.urandom(32)
        self.digest_of_entry.clear()

    # ------------------------------------------------------ the writing thread

    def _take_written(self) -> None:
        while self.writing and self.writing[0][1].done():
            self.host_blocks.release([self.writing.popleft()[0]])

    def _give(self, work: Callable, *args: Any) -> Future:
        """Give the thread work. When the program ends, it accepts none: the result is None."""
        try:
            return self.writer.submit(work, *args)
        except RuntimeError:
            nothing: Future = Future()
            nothing.set_result(None)
            return nothing

    def flush(self) -> None:
        """Wait until all new blocks are in the folder. Where host memory is small, some can't be
        saved before others have been written."""
        num_unsaved = 0
        while self.folder is not None:
            self._give(int).result()  # behind all writes before it
            if len(self.unsaved) == num_unsaved or not self.folder.writes:
                return  # none is left, or nothing helps
            num_unsaved = len(self.unsaved)
            self.save_rest()

    def close(self) -> None:
        """Write the remaining blocks, and end the threads. A reference to the closed engine, and so
        to this store, must not keep memory alive."""
        try:
            if self.prefetcher is not None:
                self.flush()
                self.prefetcher.close()
                self.writer.shutdown()
        finally:
            self.host = self.runner = self.prefetcher = None

    # ------------------------------------------------- requests and metrics

    def added(self, request: Request) -> None:
        """Begin to read the blocks of a queued request, as long as half of host memory stays free.
        All its sequences have the same prompt, so one is enough."""
        if self.prefetcher is not None:
            self._prefetch(request.sequences[0], len(self.host_blocks.held) // 2)

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if self.prefetcher is not None:
                self._give(self.folder.touch, self._digest_blocks(seq))
                self.prefetcher.let_go(seq)
            self.digests.pop(seq, None)

    def metrics(self) -> list[Metric]:
        """Tokens looked up beyond the KV cache, and tokens found, in vLLM's names. Blocks that were
        saved, that were loaded (also after a preemption, whose look-ups are not counted), and for
        which there was no room."""
        counts = {"external_prefix_cache_queries": self.num_queries,
                  "external_prefix_cache_hits": self.num_hits,
                  "kv_store_saved_blocks": self.num_saved,
                  "kv_store_loaded_blocks": self.num_loaded,
                  "kv_store_lost_blocks": self.num_lost}
        return [Counter(f"vllm:{name}", {}, value) for name, value in counts.items()]

    # ------------------------------------------------------------- the audit

    def audit(self) -> None:
        """Audit the users of all host blocks."""
        used = [host_id for host_id, _ in self.writing]
        used += [] if self.prefetcher is None else self.prefetcher.kept()
        for moves in self.in_flight.values():
            used += [*moves.loads, *(host_id for host_id, _ in moves.saves.values())]
        self.host_blocks.check(used)
