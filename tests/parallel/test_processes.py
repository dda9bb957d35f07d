"""Ranks as processes: how they come up, serve, idle, end and die.

The rules: a user's script needs no `__main__` guard and ends as it would without ranks; if a rank
dies, the others end within half a minute and name it; and no process or port outlives its engine.
The oracle for text is transformers. Nothing here measures speed, and deadlines are generous,
because machines that run tests are busy. (Ranks that live and hang: tests/extras/base.)
"""

import gc
import os
import shutil
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from process_tools import (
    GREEDY,
    PATIENCE,
    PROMPT,
    SMALL,
    assert_closed,
    assert_gone,
    in_children,
    looks_into_proc,
    pids_of,
    run,
    state_of,
    wait_for,
)
from safetensors.torch import load_file, save_file

from nanoserve import LLM, model_runner, parallel
from nanoserve.batch import LENGTHS, SECTIONS

pytestmark = looks_into_proc


# ------------------------------------------------------------------ side by side


def test_two_engines_in_a_process_and_a_group_of_the_users_own(start, qwen3, expected):
    """The second one initialised torch's process group twice, or found its port taken
    (nano-vllm). One is shut down, then the other one deleted; who is left doesn't notice."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first = start()
        second = LLM(qwen3, **SMALL, tensor_parallel_size=2, async_scheduling=True)
        assert dist.get_world_size() == 1 and len({*pids_of(first), *pids_of(second)}) == 2
        for llm in (first, second):
            llm.add_request("it", PROMPT, GREEDY)
        texts = []
        while first.has_unfinished_requests() or second.has_unfinished_requests():
            texts += [out.outputs[0].token_ids for out in first.step() + second.step()
                      if out.finished]
        assert texts == [expected()] * 2
        gone, port = pids_of(first), first.runner.ranks.store.port
        first.shutdown()
        assert [state_of(pid) for pid in gone] == [""]  # when it returns
        assert_closed(port)
        assert run(second)[0].outputs[0].token_ids == expected()
        gone = pids_of(second)
        del second, llm
        gc.collect()
        assert [state_of(pid) for pid in gone] == [""]
        ours = torch.ones(3)
        dist.all_reduce(ours)
        assert ours.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
    for call in (lambda: run(first), first.step, lambda: first.add_request("r", PROMPT)):
        with pytest.raises(RuntimeError, match="this engine was shut down: make a new LLM"):
            call()
    first.shutdown()


# --------------------------------------------------------------------- the dead


def test_a_child_is_killed_while_all_are_idle(start, capfd):
    """Known within a beat, named in the next call and in all that follow."""
    llm = start()
    run(llm)
    [pid] = pids_of(llm)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: llm.runner.ranks.broken, "rank 0 notices")
    for call in (lambda: run(llm), llm.step, lambda: llm.add_request("r", PROMPT),
                 llm.reset_prefix_cache, lambda: llm.stream(PROMPT)):
        with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\).*code -9.*new LLM"):
            call()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.step()
    assert f"rank 1 (process {pid}) died" in capfd.readouterr().err


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_child_is_killed_in_the_middle_of_a_step(start, overlap):
    """Rank 0 waits in a collective for one that is stopped, and then killed. (Where others wait
    beside it: test_processes_stages.py.)"""
    llm = start(async_scheduling=overlap)
    run(llm)
    [pid] = pids_of(llm)
    llm.add_request("mine", PROMPT, GREEDY)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\).*code -9"):
        run(llm, [PROMPT] * 3)
    assert time.monotonic() - began < PATIENCE
    assert_gone([pid])
    with pytest.raises(RuntimeError, match="rank 1.*make a new LLM"):
        llm.step()
    llm.abort_request("mine")  # whatever cleans up may go on
    assert not llm.requests
    began = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - began < 5


def test_ranks_share_the_threads_and_one_that_hangs_does_not_hold_up_the_end(start, monkeypatch,
                                                                             capfd):
    """Rank 0 kept all of them: more threads than cores, which wait for each other, made steps five
    times slower. What the user had is restored at the end. Then a child is asked to end, and waited
    for: half a second each here."""
    monkeypatch.setattr(parallel, "GRACE_SECONDS", 0.5)
    in_children(monkeypatch, "import torch; torch.set_num_threads = lambda n: print('child', n)")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        llm = start()
        assert torch.get_num_threads() == 2
        [pid] = pids_of(llm)
        os.kill(pid, signal.SIGSTOP)
        llm.shutdown()
        assert torch.get_num_threads() == 5 and state_of(pid) == ""
    finally:
        torch.set_num_threads(before)
    assert "child 2" in capfd.readouterr().err


def test_an_error_in_a_childs_step(start, monkeypatch, capfd):
    in_children(monkeypatch, "import nanoserve.model_runner as m; "
                             "m.ModelRunner.run = lambda self, *args: 1 / 0")
    llm = start()
    [pid] = pids_of(llm)
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\) died: exit code 1"):
        run(llm)
    assert "nanoserve: rank 1 ends: ZeroDivisionError: division by zero" in capfd.readouterr().err
    assert_gone([pid])


def test_an_error_in_rank_0s_step(start, monkeypatch):
    """It is raised as it is; the ranks are out of step, and the engine says so from then on."""
    llm = start()
    pids = pids_of(llm)
    monkeypatch.setattr(model_runner, "sample", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(llm)
    assert [state_of(pid) for pid in pids] == [""]
    with pytest.raises(RuntimeError, match="rank 0 .*division by zero.*make a new LLM"):
        run(llm)


def test_a_step_that_can_not_be_read(start, monkeypatch, capfd):
    """A message that is nonsense to the others only: an error with a name, and no hang."""
    llm = start()
    broadcast = llm.runner.ranks.broadcast_host

    def corrupt(buffer):
        honest = buffer.clone()
        # Not as many rows as there are sequence lengths.
        buffer[LENGTHS + list(SECTIONS).index("cu_seqlens_q")] = 1
        broadcast(buffer)
        buffer.copy_(honest)

    monkeypatch.setattr(llm.runner.ranks, "broadcast_host", corrupt)
    with pytest.raises(RuntimeError, match="rank 1"):
        run(llm)
    assert "nanoserve: rank 1 ends: " in capfd.readouterr().err


# -------------------------------------------------------- engines that can't start


def test_what_keeps_an_engine_from_starting(qwen3, tmp_path, spawned):
    """The same errors as with one rank, and nobody is left."""
    damaged = shutil.copytree(qwen3, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    cases = {"tensors are missing.*layers.1.mlp.down_proj": (damaged, {}),
             "no room for one KV block": (qwen3, dict(num_gpu_blocks_override=None,
                                                      kv_cache_memory_bytes=1000))}
    for size in (1, 2):
        for message, (folder, options) in cases.items():
            with pytest.raises(ValueError, match=message) as kept:
                LLM(folder, **SMALL | options, tensor_parallel_size=size)
            assert [state_of(pid) for pid in spawned] == [""] * len(spawned), kept
    assert len(spawned) == 2


def test_a_child_that_can_not_start(qwen3, tmp_path, monkeypatch, spawned, capfd):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(broken))
        with pytest.raises(RuntimeError, match=r"rank \d \(process \d+\).*exit code 7"):
            LLM(qwen3, **SMALL, tensor_parallel_size=4)
    assert [state_of(pid) for pid in spawned] == [""] * 3
    assert "BrokenPipe" not in capfd.readouterr().err


def test_what_is_refused_before_anything_is_started(qwen3, monkeypatch, spawned):
    with pytest.raises(ValueError, match="tensor_parallel_size=8 .* 4 .* 2 .* 1, 2, 4"):
        LLM(qwen3, **SMALL, tensor_parallel_size=8)
    for name, value in dict(WORLD_SIZE="4", RANK="0").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="2.*torchrun.*4 ranks"):
        LLM(qwen3, **SMALL, tensor_parallel_size=2)
    assert not spawned
