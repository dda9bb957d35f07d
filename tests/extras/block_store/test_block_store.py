"""A second place for blocks, beside the scheduler alone: random workloads on a fake device."""

from collections import Counter
from types import SimpleNamespace

import pytest
import xxhash
from helpers import sequence
from hypothesis import given, settings
from stores import store_of
from test_scheduler_random import Drive, FakeDevice, Launched, Workload, workloads

from nanoserve import SamplingParams
from nanoserve.block_manager import BlockManager
from nanoserve.sequence import CacheEntry, Step
from nanoserve_extras.block_store.block_host import HostBlocks
from nanoserve_extras.block_store.block_store import BlockStore


class DeviceWithHost(FakeDevice):
    """Moves blocks as a step says, before it reads anything: a host block keeps what one had."""

    def __init__(self, blocks: BlockManager, window: int | None):
        super().__init__(blocks, window)
        self.saved: dict[int, list] = {}

    def run(self, launched: Launched) -> None:
        size, step = self.blocks.block_size, launched.step
        for block, host_id in step.block_moves:
            if host_id >= 0:
                self.saved[host_id] = [self.slots.get(block * size + i) for i in range(size)]
            else:
                saved = self.saved[-1 - host_id]
                self.slots |= {block * size + i: kv for i, kv in enumerate(saved)}
        super().run(launched)


class StoredDrive(Drive):
    """A workload with room for 16 blocks on the host, audited after every step."""

    def __init__(self, workload: Workload, seen: Counter, num_host_blocks: int = 16):
        super().__init__(workload, seen)
        scheduler = self.scheduler
        host = SimpleNamespace(num_blocks=num_host_blocks)
        self.store = BlockStore()
        self.store.open(host, scheduler)
        drafts = scheduler.hooks.draft  # the drive's own
        scheduler.hooks.keep([self.store])
        scheduler.hooks.draft = drafts
        self.device = DeviceWithHost(scheduler.blocks, workload.window)
        schedule, update = scheduler.schedule, scheduler.update
        scheduler.schedule = lambda: self.tell(self.store.scheduled, schedule())
        scheduler.update = lambda step, sampled: self.tell(
            lambda accepted: self.store.updated(step, accepted), update(step, sampled))

    @staticmethod
    def tell(observer, news):
        """As the engine does."""
        observer(news)
        return news

    def reset(self) -> None:
        before = self.seen["reset"]
        super().reset()
        if self.seen["reset"] > before:
            self.store.reset()

    def check(self) -> None:
        super().check()
        self.store.audit()

    def run(self) -> None:
        super().run()
        self.seen["loaded"] += self.store.num_loaded * self.scheduler.blocks.block_size
        assert self.store.num_hits <= self.store.num_queries
        self.seen["saved"] += self.store.num_saved
        self.seen["lost"] += self.store.num_lost
        assert not any(self.store.host_blocks.num_users) and not self.store.in_flight


@pytest.mark.parametrize("num_host_blocks", [1, 3, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_with_a_store(depth, num_host_blocks):
    """Every finished sequence's tokens are those of a list without any engine. With drafts, wrong
    and right, with windows, aborts, failing steps and resets."""
    seen = Counter()

    @settings(derandomize=True, deadline=None, max_examples=130)
    @given(workloads(depth, [0, 0, 2]))
    def run_one(workload):
        drive = StoredDrive(workload, seen, num_host_blocks)
        drive.run()

    run_one()
    expected = ["preemption", "hit", "abort", "reset", "loaded", "saved", "released"]
    assert all(seen[what] >= 5 for what in expected), f"too harmless: {seen}"


def test_two_chains_whose_keys_collide_are_two_chains_here(monkeypatch):
    """A child block matched the other chain although its own tokens were equal. In memory the
    parent's identity tells them apart; here the digest does, whatever xxh3 says."""
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: b"the same for all")
    store = store_of(SimpleNamespace(num_blocks=4), BlockManager(4, 4))
    child = [9, 9, 9, 9]
    first, second = (CacheEntry(b"key", 0, tokens, None) for tokens in ([1] * 4, [2] * 4))
    for parent in (first, second):
        for entry in (parent, CacheEntry(b"key", 1, child, parent)):
            store.want_saved(entry)
    assert len(store.unsaved) == 4
    step = Step(0)
    store.plan(step)
    store.updated(step)
    seqs = [sequence("0", tokens + child + [5], SamplingParams())
            for tokens in (first.tokens, second.tokens, [3] * 4)]
    assert [store.find(Step(1), seq, 0) for seq in seqs] == [2, 2, 0]
    assert not set(store.found[seqs[0]]) & set(store.found[seqs[1]])


def test_of_host_blocks_the_one_that_was_not_wanted_for_longest_is_taken():
    """An empty one first; of a chain the last before the first, unless it is wanted since."""
    blocks = HostBlocks(4)
    chain = blocks.take(3)
    for digest, host_id in zip((b"1", b"2", b"3"), chain, strict=True):
        blocks.put(digest, host_id)
    blocks.release(chain)
    blocks.touch(blocks.find(b"3"))
    assert blocks.take(4) == [3, chain[1], chain[0], chain[2]]


def test_what_is_new_waits_for_a_slot_and_what_is_forgotten_does_not():
    blocks = BlockManager(4, 4)
    store = store_of(SimpleNamespace(num_blocks=1), blocks)
    new, gone, first = (CacheEntry(bytes([i]), i, [i] * 4, None) for i in range(3))
    blocks.entry_of[0] = new
    for entry in (first, new, gone):
        store.want_saved(entry)
    steps = Step(0), Step(1)
    store.plan(steps[0])
    assert [*store.unsaved.values()] == [new] and store.num_lost == 1
    store.updated(steps[0])
    store.plan(steps[1])
    assert steps[1].block_moves == [(0, 0)] and not store.unsaved
    store.updated(steps[1])
    store.audit()


def test_a_block_that_is_being_saved_while_all_is_forgotten_is_not_found_later():
    store = store_of(SimpleNamespace(num_blocks=2), BlockManager(4, 4))
    store.want_saved(CacheEntry(b"a", 0, [1] * 4, None))
    step = Step(0)
    store.plan(step)
    store.reset()
    store.updated(step)
    store.audit()
    assert store.find(Step(1), sequence("0", [1] * 5, SamplingParams()), 0) == 0


def test_what_is_found_is_not_taken_for_another_before_the_step_is_planned():
    """The prefetcher takes host blocks while the scheduler still admits sequences."""
    store = store_of(SimpleNamespace(num_blocks=1), BlockManager(4, 4))
    store.want_saved(CacheEntry(b"a", 0, [1] * 4, None))
    store.plan(step := Step(0))
    store.updated(step)
    seq, step = sequence("0", [1] * 5, SamplingParams()), Step(1)
    assert [store.find(step, seq, 0), store.find(step, seq, 0)] == [1, 1]
    assert store.host_blocks.take(1) == []
    store.scheduled(step)  # it was not admitted
    store.audit()
    assert store.host_blocks.take(1) == [0]
