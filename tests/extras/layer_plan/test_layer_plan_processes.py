"""Stages as processes: they serve, one that dies is named, and Ctrl-C leaves them usable. (That
torchrun starts ranks: tests/parallel/test_processes_torchrun.py.)"""

import os
import signal
import threading
import time

import pytest
from heartbeats import hasten
from process_tools import (
    PATIENCE,
    PROMPT,
    assert_gone,
    in_children,
    looks_into_proc,
    pids_of,
    run,
)

from nanoserve_extras.base.watch import Heartbeats

pytestmark = looks_into_proc
STAGES = dict(tensor_parallel_size=1, pipeline_parallel_size=3)


def test_a_stage_is_killed_in_the_middle_of_a_step(start, expected):
    """Rank 0 waits for the last one, and that for the one before it."""
    llm = start(**STAGES)
    assert run(llm)[0].outputs[0].token_ids == expected()
    pids = pids_of(llm)
    os.kill(pids[0], signal.SIGSTOP)
    threading.Timer(1, os.kill, (pids[0], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pids[0]}\) died"):
        run(llm, [PROMPT] * 3)
    assert time.monotonic() - began < PATIENCE
    assert_gone(pids)
    with pytest.raises(RuntimeError, match="rank 1.*make a new LLM"):
        run(llm)


LOSE_ONE = """
from nanoserve_extras.base.ranks import WatchedRanks
from nanoserve_extras.base.watch import Heartbeats
Heartbeats.MAX_LATE = 10
send, sent = WatchedRanks.send, []
def lose_one(ranks, x, to):
    sent.append(to)
    if len(sent) != 9:
        send(ranks, x, to)
WatchedRanks.send = lose_one
"""


@pytest.mark.full
def test_a_message_that_is_lost_ends_and_is_not_replaced_by_the_next(start, monkeypatch):
    """The others had gone on beating, so it was awaited for ever; or the next step's was taken for
    it, and texts were wrong. Computing, here for longer than that, has no limit."""
    hasten(monkeypatch)
    monkeypatch.setattr(Heartbeats, "MAX_LATE", 10)
    in_children(monkeypatch, f"exec({LOSE_ONE!r})")
    llm = start(tensor_parallel_size=1, pipeline_parallel_size=2)
    through, pauses = llm.runner.model.through, [2.5]

    def slow_once(*args):
        time.sleep(pauses.pop() if pauses else 0)
        return through(*args)

    llm.runner.model.through = slow_once
    with pytest.raises(RuntimeError, match="rank 1 to rank 0"):
        run(llm, [[i, *PROMPT] for i in range(9)])
    assert_gone(pids_of(llm))


def test_ctrl_c_leaves_stages_usable_and_they_end_with_their_engine(start, expected):
    """Wherever it comes: in a step, while results are awaited, and between."""
    llm = start(**STAGES)
    for wait in (0.01, 0.05, 0.11, 0.2):
        timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    run(llm, [[i + 1, *PROMPT] for i in range(5)])
        finally:
            timer.cancel()  # another error must not leave a Ctrl-C for the next test
        assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
        assert run(llm)[0].outputs[0].token_ids == expected()
    pids = pids_of(llm)
    llm.shutdown()
    assert_gone(pids)
