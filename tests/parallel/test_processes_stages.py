"""Stages as processes: they serve, one that dies is named, and Ctrl-C leaves them usable."""

import os
import signal
import threading
import time

import pytest
from process_tools import (
    GREEDY,
    PATIENCE,
    PROMPT,
    SMALL,
    Script,
    assert_gone,
    looks_into_proc,
    pids_of,
    run,
)
from test_processes_torchrun import torchrun

from nanoserve import LLM

pytestmark = [looks_into_proc, pytest.mark.usefixtures("leave_nobody")]
STAGES = dict(tensor_parallel_size=1, pipeline_parallel_size=3)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stage_is_killed_in_the_middle_of_a_step(start, expected, victim):
    """Rank 0 waits for the last one, and that for the one before it."""
    llm = start(**STAGES)
    assert run(llm)[0].outputs[0].token_ids == expected()
    pids = pids_of(llm)
    os.kill(pids[victim - 1], signal.SIGSTOP)
    threading.Timer(1, os.kill, (pids[victim - 1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {victim} \(process {pids[victim - 1]}\) died"):
        run(llm, [PROMPT] * 3)
    assert time.monotonic() - began < PATIENCE
    assert_gone(pids)
    with pytest.raises(RuntimeError, match=f"rank {victim}.*make a new LLM"):
        run(llm)


def test_ctrl_c_leaves_stages_usable(start, expected):
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


def test_torchrun_starts_two_stages_of_two_ranks(qwen3, tmp_path, expected):
    script = Script(qwen3, tmp_path / "it", setting="import functools; LLM = functools.partial("
                    "LLM, pipeline_parallel_size=2)",
                    command=torchrun("--standalone", "--nproc-per-node", "4")).end()
    script.check(expected(), 0)
    assert "died" not in script.err and "layers: 0 to 0, 1 to 2" in script.err


def test_stages_end_with_their_engine(qwen3):
    llm = LLM(qwen3, **SMALL, **STAGES)
    pids = pids_of(llm)
    assert len(run(llm, [PROMPT] * 2, GREEDY)) == 2
    llm.shutdown()
    assert_gone(pids)
