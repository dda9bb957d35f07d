"""Prefill and decode apart: the first engine can only save time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import assert_same_text

from nanoserve import SamplingParams
from nanoserve.extras.disaggregated import Disaggregated

PROMPTS = [[(i * 37 + j * 11) % 251 for j in range(20 + 15 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def engines(checkpoints):
    with Disaggregated(str(checkpoints["qwen3"]), dtype="float32", max_model_len=128,
                       num_gpu_blocks_override=64) as engines:
        yield engines
    assert not Path(engines.folder.name).exists()


def check(references, outputs) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text, gaps = references("qwen3", prompt, 8)
        assert_same_text(output.outputs[0].token_ids, text, gaps, f"{len(prompt)} tokens")


def test_the_second_engine_computes_only_the_rest_of_each_prompt(engines, references):
    outputs = engines.generate(PROMPTS, GREEDY)
    check(references, outputs)
    full_blocks = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in outputs] == full_blocks
    engines.decoder.store.check()


@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_a_prefill_engine_that_was_killed_is_missed_by_nobody(engines, references, when):
    if when != "before":
        check(references, engines.generate(PROMPTS, GREEDY))
        engines.decoder.reset_prefix_cache()
    os.kill(engines.prefiller.process.pid, signal.SIGKILL)
    check(references, engines.generate(PROMPTS, GREEDY))
    assert engines.prefiller is None
    check(references, engines.generate(PROMPTS, GREEDY))


def test_the_command_says_what_came_from_where():
    result = subprocess.run([sys.executable, "-m", "nanoserve.extras.disaggregated",
                             "--max-tokens", "3"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "32 of " in result.stdout and "came from the prefill engine" in result.stdout
