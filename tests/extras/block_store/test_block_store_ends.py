"""A second place for blocks, in the engine: disks that are slow or fail, and how an engine with a
store ends. Disks that hang while they are read: test_block_prefetch.py."""

import gc
import os
import signal
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
from helpers import storage
from test_block_store_engine import GREEDY, LONG, OTHER, SMALL, ask, num_loaded

from nanoserve import LLM
from nanoserve.sequence import Step
from nanoserve_extras.block_store import block_folder
from nanoserve_extras.block_store.block_folder import Folder

BLOCK_BYTES = 3 * 2 * 16 * 64 * 4  # layers, K and V, tokens, numbers, bytes of each


def failing(error: Exception):
    def fail(*args, **kwargs):
        raise error
    return fail


@pytest.mark.parametrize("work, expected", [("checksum", 0), ("private", 192)],
                         ids=["reading", "writing"])
def test_an_error_that_no_folder_expects_is_said_once_and_costs_time_alone(
        qwen3, expect, tmp_path, monkeypatch, capsys, work, expected):
    """It vanished in silence."""
    options = SMALL | dict(kv_store=str(tmp_path))
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG, LONG[1:])
    monkeypatch.setattr(block_folder, work, failing(MemoryError("none left")))
    with LLM(qwen3, **options) as llm:
        expect([LONG, LONG[1:], OTHER], ask(llm, LONG, LONG[1:], OTHER))
        storage(llm).flush()
        storage(llm).plan(Step(0))  # takes what was written
        assert not any(storage(llm).host_blocks.num_users)
        assert num_loaded(llm) == expected
    assert capsys.readouterr().err.count("none left") == 1


def test_ctrl_c_ends_the_wait_for_a_disk_that_is_to_be_emptied(qwen3, expect, tmp_path,
                                                               monkeypatch):
    """It was held until all writes had ended. The engine goes on, and so does the work."""
    go, write = threading.Event(), Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: go.wait(60) and write(*args))
    with LLM(qwen3, **SMALL, kv_store=str(tmp_path)) as llm:
        ask(llm, LONG)
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.reset_prefix_cache()
        assert not go.is_set() and not storage(llm).host_blocks.by_digest
        expect([LONG, OTHER], ask(llm, LONG, OTHER))
        go.set()
        assert llm.reset_prefix_cache()
        assert not list(tmp_path.glob("*.kv"))
        expect([LONG], ask(llm, LONG))
        assert num_loaded(llm) == 0


# ------------------------------------------------------------------ how it ends


def test_the_last_output_does_not_wait_for_the_blocks_that_are_saved_behind_it(qwen3, tmp_path,
                                                                              monkeypatch):
    """101 + 12 tokens: the last step fills a block of 16, which a step of its own saves."""
    events = []
    with LLM(qwen3, **SMALL, kv_store=str(tmp_path)) as llm:
        [save] = llm.hooks.idle
        llm.hooks.idle[:] = [lambda: (events.append("saves"), save())]
        inbox = SimpleNamespace(append=lambda output: events.append("output"))
        llm.submit(llm.make_request("", LONG + [1], GREEDY), inbox)
        while llm.has_unfinished_requests():
            llm.step()
    assert events[-2:] == ["output", "saves"] and events.count("output") == 12


@pytest.mark.parametrize("how", ["flushed", "shut down", "failing"])
def test_what_a_small_pool_has_no_room_for_is_saved_when_its_slots_are_written(
        qwen3, tmp_path, monkeypatch, how):
    """Four of six blocks never reached the folder if the disk was slower than the last request, and
    `flush` was content. Where steps fail, what they should have saved is lost, and nothing hangs.
    """
    go, write = threading.Event(), Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: go.wait(60) and write(*args))
    llm = LLM(qwen3, **SMALL, kv_store=str(tmp_path), kv_offload_bytes=2 * BLOCK_BYTES)
    llm.generate([LONG], GREEDY, use_tqdm=False)
    assert llm.runner.copier.num_blocks == 2 and len(storage(llm).unsaved) == 4
    go.set()
    if how == "failing":
        monkeypatch.setattr(llm.runner, "launch", failing(RuntimeError()))
    if how != "shut down":
        storage(llm).flush()
        storage(llm).audit()
        assert not storage(llm).unsaved
    llm.shutdown()
    assert len(list(tmp_path.glob("*.kv"))) == (2 if how == "failing" else 6)


def memory_of(llm: LLM) -> list[weakref.ref]:
    host, caches = llm.runner.copier, llm.runner.kv_cache
    return [weakref.ref(one) for one in (host, host.memory, *caches[0])]


@pytest.mark.parametrize("ctrl_c", [False, True], ids=["", "Ctrl-C while the store closes"])
def test_an_engine_that_was_shut_down_gives_back_cache_and_pool_while_somebody_holds_it(
        qwen3, tmp_path, monkeypatch, ctrl_c):
    """It kept its observers, one of them the store, which kept both. A program that rebinds `llm`
    to a new engine holds the old one until the new one has been made."""
    llm = LLM(qwen3, **SMALL, kv_store=str(tmp_path))
    ask(llm, LONG)
    held = memory_of(llm)
    assert all(ref() is not None for ref in held)
    if ctrl_c:
        monkeypatch.setattr(storage(llm), "flush", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.shutdown()
    else:
        llm.shutdown()
    assert llm.runner is None and [ref() for ref in held] == [None] * 4
    llm.shutdown()


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_forgotten_engine_with_a_store_is_freed_at_once(qwen3, tmp_path, has_folder):
    """Not when Python's garbage collector comes by: store, scheduler and block manager held each
    other in a circle, and with them weights and cache, for which a next engine finds no room."""
    llm = LLM(qwen3, **SMALL, kv_offload_bytes=2 ** 20, kv_store=str(tmp_path) if has_folder
              else None)
    ask(llm, LONG)
    storage(llm).flush()
    held = memory_of(llm) + [weakref.ref(one) for one in (llm.runner, llm.scheduler, storage(llm))]
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [ref() for ref in held] == [None] * 7
    finally:
        gc.enable()


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_stream_that_the_end_of_the_program_closes_ends_quietly(qwen3, tmp_path, monkeypatch,
                                                                  num_outputs):
    """Threads take no more work by then, and a step that merely saves blocks made torch end the
    process with a core dump. After two outputs, the step in flight saves what can't be written any
    more, and its host blocks stayed in use."""
    llm = LLM(qwen3, **SMALL, kv_store=str(tmp_path), async_scheduling=True)
    stream = llm.stream([LONG], GREEDY)
    for _ in range(num_outputs):
        next(stream)
    assert len(storage(llm).in_flight) == num_outputs - 1
    storage(llm).prefetcher.close()
    storage(llm).writer.shutdown()
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(llm.runner, "launch", None)
    stream.close()
    monkeypatch.undo()
    assert not llm.requests and not llm.scheduler.in_flight
    llm.scheduler.check()
    storage(llm).plan(step := Step(0))  # takes what was written
    storage(llm).audit()
    storage(llm).dropped(step)
    assert not any(storage(llm).host_blocks.num_users)
    llm.shutdown()
