"""Prefetching: what a queued request will need is read while it waits, whatever the disk does."""

import gc
import math
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from helpers import sequence, storage
from stores import store_of
from test_block_store_engine import GREEDY, LONG, OTHER, SMALL, ask, num_loaded

from nanoserve import LLM, SamplingParams
from nanoserve.block_manager import BlockManager
from nanoserve.sequence import CacheEntry, Step
from nanoserve_extras.block_store import block_prefetch
from nanoserve_extras.block_store.block_folder import Folder
from nanoserve_extras.block_store.block_prefetch import Prefetcher

# ------------------------------------------------------------ without an engine


@pytest.fixture
def by_hand():
    """A store with four host blocks and its prefetcher, without an engine and without files: the
    thread waits for `answers`, which are bytes, or None for a miss."""
    answers: SimpleQueue = SimpleQueue()

    def read(digest, into):
        data = answers.get()
        into[:] = into if data is None else list(data)
        return data is not None

    folder = SimpleNamespace(has=lambda digest: True, read=read)
    host = SimpleNamespace(num_blocks=4, memory=torch.zeros(4, 8, dtype=torch.uint8))
    store = store_of(host, BlockManager(4, 4))
    store.prefetcher = Prefetcher(folder, host, store.host_blocks)
    yield SimpleNamespace(store=store, answers=answers, host=host)
    answers.put(None)


def wait_for(prefetcher: Prefetcher) -> None:
    """Until the thread has ended all that it was given."""
    while not all(one.has_ended for one in prefetcher.pending):
        time.sleep(0.001)


@pytest.mark.parametrize("saved_first", [False, True])
def test_a_block_that_is_read_while_it_is_being_saved_takes_one_host_block(by_hand, saved_first):
    store, seq = by_hand.store, sequence("0", [1] * 5, SamplingParams())
    store.want_saved(CacheEntry(b"a", 0, [1] * 4, None))
    store.plan(first := Step(0))
    store.added(SimpleNamespace(sequences=[seq]))
    assert store.is_reading(seq)
    by_hand.answers.put(b"12345678")
    wait_for(store.prefetcher)
    if saved_first:
        store.updated(first)
    assert not store.is_reading(seq)
    if not saved_first:
        store.updated(first)
    assert len(store.host_blocks.by_digest) == 1
    assert store.find(step := Step(1), seq, 0) == 1
    held = bytes(by_hand.host.memory[store.found[seq][0]])
    assert held == (bytes(8) if saved_first else b"12345678")
    store.prefetcher.let_go(seq)
    store.scheduled(step)
    store.audit()
    assert len(store.host_blocks.free) == 4


def test_a_host_block_that_the_thread_still_writes_to_is_nobody_elses(by_hand):
    """The request has gone, in the middle of its first block. Its second one is not read."""
    store, seq = by_hand.store, sequence("0", [1] * 9, SamplingParams())
    assert store.prefetcher.begin(seq, [b"one", b"two"], None)
    while not store.prefetcher.queue.empty():
        time.sleep(0.001)
    store.prefetcher.let_go(seq)
    assert len(store.host_blocks.take(4)) == 2
    by_hand.answers.put(b"12345678")
    wait_for(store.prefetcher)
    assert store.prefetcher.begin(seq, [], None) and not store.host_blocks.by_digest
    assert len(store.host_blocks.free) == 2 and by_hand.answers.empty()


def test_who_lacks_room_or_needs_the_same_blocks_waits_and_the_first_in_the_queue_does_not(by_hand):
    prefetcher, free = by_hand.store.prefetcher, by_hand.store.host_blocks.free
    first, second, third = (sequence(str(i), [i] * 20, SamplingParams()) for i in range(3))
    assert not prefetcher.begin(first, [b"a", b"b", b"c"], 2), "two must stay free"
    assert prefetcher.begin(first, [b"a", b"b", b"c"], 1) and len(free) == 1
    assert not prefetcher.begin(second, [b"a", b"b"], None), "they are being read"
    assert not prefetcher.begin(second, [b"x", b"y"], 0) and len(free) == 1
    assert prefetcher.begin(third, [b"x", b"y"], None) and not free, "one of two"
    for data in (b"aaaaaaaa", None, b"xxxxxxxx"):
        by_hand.answers.put(data)
    wait_for(prefetcher)
    assert [prefetcher.is_reading(seq) for seq in (first, third)] == [False, False]
    assert sorted(by_hand.store.host_blocks.by_digest) == [b"a", b"x"], "b was missing"
    by_hand.store.audit()


def test_a_read_that_hangs_does_not_keep_a_program_from_ending():
    """Python waits for the threads of an executor: a program whose disk hung never ended."""
    script = """if 1:
        import threading, time, torch
        from types import SimpleNamespace
        from nanoserve_extras.block_store.block_host import HostBlocks
        from nanoserve_extras.block_store.block_prefetch import Prefetcher
        begun = threading.Event()
        folder = SimpleNamespace(has=lambda digest: True,
                                 read=lambda *args: begun.set() or time.sleep(60))
        host = SimpleNamespace(memory=torch.zeros(2, 8, dtype=torch.uint8))
        prefetcher = Prefetcher(folder, host, HostBlocks(2))
        assert prefetcher.begin("me", [b"one"], None)
        begun.wait()
        prefetcher.close(), prefetcher.close()
        print("ended")
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            timeout=50)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr


# --------------------------------------------------------------- in the engine


@pytest.fixture
def slow_disk(monkeypatch):
    """The first `num_quick` files are read at once; the next one, and all behind it, when `go` is
    set. `hangs` is set when the thread begins to wait; `digests` are those that it was to read."""
    disk = SimpleNamespace(num_quick=0, go=threading.Event(), hangs=threading.Event(), digests=[])
    read = Folder.read

    def slowly(folder, digest, *args):
        disk.digests.append(digest)
        if len(disk.digests) > disk.num_quick:
            disk.hangs.set()
            disk.go.wait(60)
        return read(folder, digest, *args)

    monkeypatch.setattr(Folder, "read", slowly)
    yield disk
    disk.go.set()


def finish(llm: LLM) -> list[list[int]]:
    """The texts of all requests, in the order in which they end."""
    texts = []
    while llm.has_unfinished_requests():
        texts += [output.outputs[0].token_ids for output in llm.step() if output.finished]
    return texts


@pytest.mark.parametrize("num_quick", [0, 3])
def test_a_disk_that_hangs_is_waited_for_once_and_not_for_ever(qwen3, expect, tmp_path, monkeypatch,
                                                              slow_disk, num_quick):
    """The first request is admitted with what had arrived. The second one doesn't wait at all, and
    the third finds a disk that is back."""
    prompts = [LONG, OTHER, LONG[1:]]
    options = SMALL | dict(kv_store=str(tmp_path))
    with LLM(qwen3, **options) as llm:
        ask(llm, *prompts)
    slow_disk.num_quick = num_quick
    monkeypatch.setattr(block_prefetch, "PATIENCE", math.inf)
    with LLM(qwen3, **options) as llm:
        llm.add_request("0", prompts[0], GREEDY)
        assert slow_disk.hangs.wait(60)
        block_prefetch.PATIENCE = 0
        texts = finish(llm)
        assert num_loaded(llm) == 16 * num_quick
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", None)
            texts += ask(llm, prompts[1])
        assert num_loaded(llm) == 16 * num_quick and not slow_disk.go.is_set()
        slow_disk.go.set()
        wait_for(storage(llm).prefetcher)
        block_prefetch.PATIENCE = math.inf
        expect(prompts, texts + ask(llm, prompts[2]))
        assert num_loaded(llm) == 16 * num_quick + 96


def test_a_request_whose_blocks_are_being_read_sits_out_and_others_go_on(qwen3, expect, tmp_path,
                                                                         slow_disk):
    options = SMALL | dict(kv_store=str(tmp_path), num_gpu_blocks_override=32)
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG)
    with LLM(qwen3, **options) as llm:
        llm.add_request("slow", LONG, GREEDY)
        llm.add_request("quick", OTHER[:20], GREEDY)
        texts = {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                texts[output.request_id] = output.outputs[0].token_ids
                if output.finished:
                    assert "slow" in texts or not slow_disk.go.is_set()
                    slow_disk.go.set()
        assert list(texts) == ["quick", "slow"] and num_loaded(llm) == 96
        expect([OTHER[:20], LONG], texts.values())


@pytest.mark.parametrize("num_blocks, max_num_seqs", [(8, 1), (20, 1), (8, 4), (20, 4), (50, 4)])
def test_a_queue_that_is_longer_than_host_memory_finds_all_of_its_blocks(
        qwen3, tmp_path, num_blocks, max_num_seqs):
    """12 requests of 6 blocks each. All were read when they were queued, and drove out each other's
    blocks before anybody could load them: of 72 blocks as few as none came back."""
    prompts = [[(41 * i + 7 * k) % 251 for i in range(100)] for k in range(12)]
    options = SMALL | dict(kv_store=str(tmp_path), kernels="torch")
    with LLM(qwen3, **options | dict(num_gpu_blocks_override=100)) as llm:
        texts = ask(llm, *prompts)
        block_bytes = llm.runner.block_bytes
    with LLM(qwen3, **options | dict(num_gpu_blocks_override=8 * max_num_seqs),
             max_num_seqs=max_num_seqs, kv_offload_bytes=num_blocks * block_bytes) as llm:
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == texts
        assert num_loaded(llm) == 12 * 96
        storage(llm).audit()
        storage(llm).flush()
        storage(llm).plan(Step(0))  # takes what was written
        assert not any(storage(llm).host_blocks.num_users)


@pytest.fixture
def many_files(qwen3, tmp_path) -> dict:
    """Options of an engine that finds 64 blocks of each of 3 prompts in its folder."""
    options = SMALL | dict(kernels="torch", block_size=1, num_gpu_blocks_override=256,
                           kv_offload_bytes=2 ** 20, kv_store=str(tmp_path))
    with LLM(qwen3, **options) as llm:
        llm.generate([LONG[i:i + 64] for i in range(3)], GREEDY, use_tqdm=False)
    return options


def test_what_nobody_waits_for_any_more_is_not_read(qwen3, expect, many_files, slow_disk):
    """Requests that had been aborted kept the reading thread busy with all of their blocks, and the
    next request waited for these."""
    with LLM(qwen3, **many_files) as llm:
        for i in range(2):
            llm.add_request(str(i), LONG[i:i + 64], GREEDY)
        llm.abort_request(["0", "1"])
        slow_disk.go.set()
        expect([LONG[2:66]], ask(llm, LONG[2:66]))
        assert num_loaded(llm) == 63 and len(slow_disk.digests) <= 1 + 63


@pytest.mark.parametrize("how", ["shut down", "forgotten"])
def test_an_engine_ends_without_reading_what_is_queued(qwen3, many_files, slow_disk, how):
    """The thread waited for ever for somebody to take its blocks, or read all that was queued."""
    before = set(threading.enumerate())
    llm = LLM(qwen3, **many_files)
    llm.add_request("0", LONG[:64], GREEDY)
    threads = set(threading.enumerate()) - before
    if how == "shut down":
        llm.shutdown()  # which doesn't wait for the file, either
    del llm
    slow_disk.go.set()
    deadline = time.monotonic() + 10
    while alive := [thread for thread in threads if thread.is_alive()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)
        gc.collect()
    assert len(slow_disk.digests) <= 1
