"""Ranks as processes with a folder of blocks behind them: started again, killed, and on machines
that share no memory. What each rank has in host memory: test_block_store_ranks.py."""

import os
import random
import signal
import time

import pytest
from checkpoints import assert_same_text
from helpers import storage
from process_tools import PATIENCE, Script, in_children, looks_into_proc, run

pytestmark = looks_into_proc
PROMPTS = [[(37 * i + 11 * j) % 251 for j in range(100)] for i in range(6)]


def test_ranks_on_another_machine_are_refused_in_words(start, tmp_path, monkeypatch):
    """A process of that number may be there, but it is another one."""
    in_children(monkeypatch, "import os; os.readlink = lambda path: '/dev/null'")
    with pytest.raises(ValueError, match="2 ranks"):
        start(kv_store=str(tmp_path))


WRITE = """
print("ready", flush=True)
for i in range(1000):
    llm.generate([[(i * 37 + j * 11) % 251 for j in range(100)]], params, use_tqdm=False)
"""


@pytest.mark.full
@pytest.mark.usefixtures("leave_nobody")
def test_ranks_that_are_killed_while_blocks_are_written(qwen3, start, references, tmp_path):
    """Who comes after them finds whole files, and the right ones. (Two that write the same blocks:
    tests/extras/block_store/test_block_folder.py.)"""
    folder = tmp_path / "blocks"
    script = Script(qwen3, tmp_path / "it", WRITE, setting="from functools import partial\n"
                    f"LLM = partial(LLM, kv_store={str(folder)!r}, dtype='float32')")
    other = int(script.line().rpartition("[")[2].partition("]")[0])
    assert script.line() == "ready"
    time.sleep(0.5 + 0.5 * random.random())
    os.kill(other, signal.SIGKILL)
    script.end(PATIENCE)
    assert f"rank 1 (process {other}) died" in script.err
    with start(kv_store=str(folder)) as llm:
        outputs = run(llm, PROMPTS)
        storage(llm).audit()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_same_text(output.outputs[0].token_ids, *references("qwen3", prompt, 12), "store")
        assert storage(llm).num_loaded >= 6 and not storage(llm).folder.is_damaged
