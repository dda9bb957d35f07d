"""Ranks that live and do not answer: stopped, suspended, started by somebody else.

Nobody is declared dead who only waits or was suspended. Where a process ends:
tests/parallel/test_processes.py.
"""

import os
import signal
import socket
import sys
import threading
import time
from copy import copy
from pathlib import Path

import pytest
from heartbeats import SETTING, hasten
from process_tools import (
    PATIENCE,
    Script,
    assert_gone,
    hold_the_lock,
    looks_into_proc,
    pids_of,
    run,
    wait_for,
)

from nanoserve import parallel
from nanoserve_extras.base.ranks import WatchedRanks
from nanoserve_extras.base.watch import Heartbeats

pytestmark = [looks_into_proc, pytest.mark.usefixtures("leave_nobody")]


@pytest.mark.parametrize("when", [pytest.param("idle", marks=pytest.mark.full), "in a step"])
def test_a_child_that_hangs_is_dead(start, monkeypatch, text_of_prompt, when):
    """Before that, an engine whose user holds Python's lock for longer than heartbeats may be
    missed serves as ever. (json.loads of a large file ended it, and rank 1 was named.)"""
    hasten(monkeypatch)
    llm = start()
    if when == "idle":
        hold_the_lock(1.5 * Heartbeats.MAX_MISSED * Heartbeats.BEAT)
    assert run(llm)[0].outputs[0].token_ids == text_of_prompt()
    assert llm.runner.ranks.watch.is_alive() and not llm.runner.ranks.broken
    [pid] = pids_of(llm)
    os.kill(pid, signal.SIGSTOP)
    if when == "idle":
        wait_for(lambda: llm.runner.ranks.broken, "rank 0 notices")
    with pytest.raises(RuntimeError, match="rank 1 died: no heartbeat for 3 s"):
        run(llm)
    assert_gone([pid])


def watch_of(ranks: WatchedRanks, store) -> Heartbeats:
    ranks.store = store
    return ranks.make_watch([])


def test_a_rank_that_gives_up_tells_the_others(monkeypatch):
    """torchrun's: rank 0's process may live on, with its store, and nobody counts its beats."""
    ended, counts = [], {"heartbeat/0": 1, "heartbeat/1": 1}

    class Store:
        clone = copy

        def add(self, key: str, number: int) -> int:
            counts[key] += number
            return counts[key]

    monkeypatch.setattr(Heartbeats, "BEAT", 0.01)
    monkeypatch.setattr(parallel, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(parallel, "end_process", lambda *which: ended.append(which))
    first, second = (watch_of(WatchedRanks(rank, 2), Store()) for rank in range(2))
    first.start()
    second.start()
    first.ranks.fail("a step failed")
    first.end(0)
    wait_for(lambda: ended, "rank 1 notices")
    assert ended == [(1, "rank 0 died: it could not go on")]
    second.end(5)


def test_a_heartbeat_under_way_is_over_when_the_engine_has_ended(monkeypatch):
    """A process ended with exit code -6 once: its heartbeat came back from torch's store when
    Python's end had begun ("terminate called without an active exception")."""
    begun, before = threading.Event(), set(threading.enumerate())

    class Store:
        clone = copy

        def add(self, key: str, number: int) -> int:
            begun.set()
            time.sleep(0.3)
            return 1

    monkeypatch.setattr(Heartbeats, "BEAT", 0.001)
    watch = watch_of(WatchedRanks(0, 2), Store())
    watch.start()
    assert begun.wait(10)
    watch.end(5)
    assert set(threading.enumerate()) <= before


@pytest.mark.full
def test_a_suspended_terminal(qwen3, tmp_path, text_of_prompt):
    """Ctrl-Z for longer than it takes to declare somebody dead kills nobody: heartbeats are not
    compared with a clock. Nor does a rank end while rank 0 alone is stopped: it lives."""
    hasten = SETTING.format(0.1)
    script = Script(qwen3, tmp_path / "it", """\
sys.stdin.readline()
print(text() == tokens, [child.pid for child in llm.runner.ranks.watch.children] == pids)
""", setting=f"{hasten}; from nanoserve import parallel as p; "
                     f"p.CHILD = p.CHILD.replace('run_child()', {hasten!r} + '; run_child()')")
    script.out = script.line() + "\n"
    for stop in script.signal_all, script.process.send_signal:
        stop(signal.SIGSTOP)
        time.sleep(2)  # silence of 1.5 s is a death
        script.signal_all(signal.SIGCONT)
        time.sleep(0.5)
    out, script.err = script.process.communicate("\n", timeout=60)
    assert out == "True True\n", script.err
    script.check(text_of_prompt(), 0)
    assert "died" not in script.err and "ends" not in script.err


# -------------------------------------------------- ranks that somebody else started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.full
def test_torchrun_on_two_machines(qwen3, tmp_path, text_of_prompt):
    """Both of them this one. Only the first prints, and holds Python's lock for longer than beats
    may be missed."""
    setting = "import ctypes; " + SETTING.format(0.2)
    ending = "ctypes.PyDLL(None).usleep(4_500_000); assert text() == tokens"
    port = str(free_port())
    machines = [Script(qwen3, tmp_path / str(i), ending, setting=setting, command=(
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(i),
        "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port))
        for i in range(2)]
    for script in machines:
        script.end()
    machines[0].check(text_of_prompt(), 0)
    assert machines[1].process.returncode == 0 and machines[1].out == "", machines[1].err


def started_by_hand(folder: Path, where: Path, ending: str, heartbeat: str) -> list[Script]:
    """Two ranks on their own, with the variables that torchrun or a batch system sets: there is
    nobody who would end the others, and the store is rank 0's."""
    port = str(free_port())
    return [Script(folder, where / str(i), ending, RANK=str(i), WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                   setting="import nanoserve.parallel as p; p.GRACE_SECONDS = 1; "
                           + SETTING.format(heartbeat))
            for i in range(2)]


@pytest.mark.full
def test_ranks_of_another_starter_end(qwen3, tmp_path, text_of_prompt):
    """Rank 0 takes its store with it, which looked like its death to whoever counted up a heartbeat
    before it had heard the last word. (Of beats of 10 ms a busy machine skips any number.)"""
    beats = "0.01; w.Heartbeats.MAX_MISSED = 3000"
    ranks = [script.end() for script in started_by_hand(qwen3, tmp_path, "", beats)]
    ranks[0].check(text_of_prompt(), 0)
    assert ranks[1].process.returncode == 0 and ranks[1].out == "", ranks[1].err
    assert "died" not in ranks[0].err + ranks[1].err


@pytest.mark.parametrize("how", ["killed", pytest.param("hangs", marks=pytest.mark.full)])
def test_a_rank_of_another_starter_dies(qwen3, tmp_path, text_of_prompt, how):
    """They serve, and then one dies. A machine without power closes no connection, and neither does
    a process that hangs: the others waited for rank 0's store to answer. (Rank 0 counts the beats
    of the others, whoever has started them.)"""
    ranks = started_by_hand(qwen3, tmp_path, "print('idle', flush=True); time.sleep(1)\n"
                            "while True: text()", "0.2")
    assert ranks[0].line().startswith(str(text_of_prompt())) and ranks[0].line() == "idle"
    ranks[0].signal_all(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    ranks[1].end(PATIENCE)
    ranks[0].signal_all(signal.SIGKILL)
    ranks[0].end()
    assert ranks[1].process.returncode == 1 and "rank 0 died" in ranks[1].err
