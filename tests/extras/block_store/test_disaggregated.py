"""Prefill and decode apart: the first engine can only save time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import assert_same_text
from helpers import storage

from nanoserve import SamplingParams
from nanoserve_extras.block_store import disaggregated
from nanoserve_extras.block_store.disaggregated import Disaggregated

PROMPTS = [[(i * 37 + j * 11) % 251 for j in range(20 + 15 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def engines(checkpoints):
    with Disaggregated(str(checkpoints["qwen3"]), dtype="float32", max_model_len=128,
                       num_gpu_blocks_override=64) as engines:
        yield engines
    assert not Path(engines.decoder.config.kv_store).exists()


def check(references, outputs) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text, gaps = references("qwen3", prompt, 8)
        assert_same_text(output.outputs[0].token_ids, text, gaps, f"{len(prompt)} tokens")


def test_the_second_engine_computes_only_the_rest_and_misses_no_killed_one(engines, references):
    outputs = engines.generate(PROMPTS, GREEDY)
    check(references, outputs)
    full_blocks = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in outputs] == full_blocks
    storage(engines.decoder).audit()
    engines.decoder.reset_prefix_cache()
    os.kill(engines.prefiller.process.pid, signal.SIGKILL)
    check(references, engines.generate(PROMPTS, GREEDY))
    assert engines.prefiller is None
    check(references, engines.generate(PROMPTS, GREEDY))


def test_a_salt_goes_along(engines):
    """Else the folder would have the prompt's blocks for everybody."""
    prompt = PROMPTS[-1]
    [mine] = engines.generate([dict(prompt_token_ids=prompt, cache_salt="mine")], GREEDY)
    assert mine.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    [others] = engines.decoder.generate([prompt], GREEDY, use_tqdm=False)
    assert others.num_cached_tokens == 0


@pytest.fixture
def stand_in(checkpoints, tmp_path, monkeypatch):
    """Two engines, the first of which is a few lines of Python: it takes options, then prompts."""
    def make(code: str) -> Disaggregated:
        (tmp_path / "stand_in.py").write_text(f"import json, sys, time\n{code}")
        monkeypatch.setattr(disaggregated, "MODULE", "stand_in")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Disaggregated(checkpoints["qwen3"], dtype="float32", max_model_len=128,
                             num_gpu_blocks_override=64)
    return make


def test_a_prefill_engine_that_dies_before_the_first_call_is_missed_by_nobody(stand_in, references):
    with stand_in("") as engines:
        engines.prefiller.process.wait()
        check(references, engines.generate(PROMPTS, GREEDY))
        assert engines.prefiller is None


def test_a_prefill_engine_where_something_else_is_printed_is_understood(stand_in, references):
    """The thread that listens died at a line that was no JSON, and `generate` waited for ever.
    (And the model's folder, a `Path`, could not be sent.)"""
    with stand_in("for line in sys.stdin:\n"
                  "    message = json.loads(line)\n"
                  "    print('hello from a library' if 'model' in message else message[0])\n"
                  "    sys.stdout.flush()") as engines:
        check(references, engines.generate(PROMPTS, GREEDY))
        assert engines.prefiller is not None
        pid = engines.prefiller.process.pid
        assert os.getpgid(pid) == pid, "a terminal sends Ctrl-C to a group, and this is another"


def test_the_first_prompt_is_decoded_while_the_others_are_not_even_sent(stand_in):
    """400 KB of prompts are more than a pipe holds. All of them were written before the first was
    decoded, and by then the other engine had computed nearly all. This one computes two."""
    with stand_in("sys.stdin.readline()\n"
                  "for _ in range(2):\n"
                  "    print(json.loads(sys.stdin.readline())[0], flush=True)\n"
                  "time.sleep(60)") as engines:
        steps, step = [], engines.decoder.step

        def stop_after_four():
            steps.append(len(engines.decoder.requests))
            if len(steps) == 5:
                raise InterruptedError
            return step()

        engines.decoder.step = stop_after_four
        with pytest.raises(InterruptedError):
            engines.generate([[i % 251] * 100 for i in range(1000)], GREEDY)
        assert max(steps) <= 2, "the other 998 wait"
        process = engines.prefiller.process
    assert process.returncode == -signal.SIGKILL, "it still slept, and nobody waited for that"


def test_what_a_call_that_was_interrupted_asked_for_is_no_answer_for_the_next(stand_in, references):
    """And a number that a library prints is none. This one answers each prompt late."""
    with stand_in("for line in sys.stdin:\n"
                  "    if 'model' not in line:\n"
                  "        number, ids = json.loads(line)\n"
                  "        time.sleep(0.2)\n"
                  "        print(99, len(ids), number, sep='\\n', flush=True)") as engines:
        submit, submitted = engines.decoder.submit, []

        def interrupted(request, inbox):
            raise InterruptedError

        engines.decoder.submit = interrupted
        with pytest.raises(InterruptedError):
            engines.generate(PROMPTS, GREEDY)
        engines.decoder.submit = lambda request, inbox: (
            submitted.append((len(request.prompt_token_ids), engines.prefiller.process.poll())),
            submit(request, inbox))
        check(references, engines.generate(PROMPTS, GREEDY))
        assert submitted == [(len(prompt), None) for prompt in PROMPTS], "one by one, in order"


def test_the_command_says_what_came_from_where():
    result = subprocess.run([sys.executable, "-m", "nanoserve_extras.block_store.disaggregated",
                             "--max-tokens", "3"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "32 of " in result.stdout and "came from the prefill engine" in result.stdout
