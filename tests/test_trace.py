"""The step table of extras/trace.py, against a trace worked out by hand."""

import subprocess
import sys

import pytest

from nanoserve.extras.trace import trace


def test_a_small_trace_by_hand():
    """Two prompts of 5 and 7 tokens, budget 8, blocks of 4: chunking, decoding, block counts.

    Step 0: A's 5 tokens (2 blocks), 3 of B's (1 block), 7 of 10 blocks left. Step 1: A decodes at
    position 5; B's last 4 (positions 3 to 6: a second block). Step 2: A has its 2 tokens and is
    gone; B decodes at position 7. Free blocks are counted when the step has been scheduled.
    """
    table = [line.split() for line in trace(["5:2", "7:2"], 8, 10, 4, 4).splitlines()]
    assert table == [
        ["step", "tokens", "A", "B", "free", "blocks"],
        ["0", "8/8", "0..5", "→", "0..3", "7"],
        ["1", "5/8", "5", "→", "3..7", "→", "6"],
        ["2", "1/8", "7", "→", "8"],
    ]


def test_a_shared_prefix_waits_one_step_and_hits():
    table = trace(["10:1:8", "10:1:8"], 32, 10, 4, 4).splitlines()
    assert table[1].split() == ["0", "10/32", "0..10", "→", "·", "7"]
    assert "hit 8, 8..10 →" in table[2]


def test_preemption_is_shown():
    assert "preempted" in trace(["7:6", "7:6"], 14, 5, 4, 4)


@pytest.mark.parametrize("request_", ["", "5", "0:3", "5:0", "5:5:6", "a:b", "1:2:3:4"])
def test_a_wrong_request_is_explained(request_):
    with pytest.raises(ValueError, match="PROMPT:OUTPUT"):
        trace([request_], 8, 8, 4, 4)


def test_the_command_runs_without_torch():
    code = ("import runpy, sys; sys.argv = ['trace']; "
            "runpy.run_module('nanoserve.extras.trace', run_name='__main__'); "
            "assert 'torch' not in sys.modules")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.startswith("step  tokens")
