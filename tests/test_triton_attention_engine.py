"""The whole engine on its kernels: the text of transformers, with every feature and in every mode.

Kernels are tested one by one elsewhere. Here they run together, in Triton's interpreter, behind the
real scheduler: what one writes the next one reads, across steps, blocks and prefix hits. The cache
is full of NaN until it is written. Models are tiny, since a launch takes milliseconds a program.
"""

import pytest
from checkpoints import TINY_CHECKPOINTS, assert_same_text
from clean_process import needs_extras
from helpers import poisoned, watch_steps
from kernel_modes import MODES, few
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import LLM, SamplingParams, ops

kernels = pytest.importorskip("nanoserve.triton_attention")

MAX_TOKENS = 5


def start(folder, **options) -> LLM:
    return poisoned(LLM(folder, **dict(dtype="float32", device="cpu", kernels="triton",
                                       num_gpu_blocks_override=64) | options))


# "batched" is left to GPUs: without a prefix cache, but otherwise "blocks of 32".
@pytest.mark.parametrize("mode", ["chunked, cached", "preempted, overlap"])
def test_the_parity_matrix_through_kernels(checkpoints, references, prompts, mode):
    asked = few(prompts)
    engine = start(checkpoints["tiny"], **MODES[mode])
    steps = watch_steps(engine)
    outputs = engine.generate(asked, SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
                              use_tqdm=False)
    for output in outputs:
        expected, gaps = references("tiny", output.prompt_token_ids, MAX_TOKENS)
        assert_same_text(output.outputs[0].token_ids, expected, gaps, mode)
    assert any(step.preempted for step in steps) == ("preempted" in mode)
    assert any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("name", [name for name in TINY_CHECKPOINTS if name != "tiny"])
def test_families_through_kernels(checkpoints, references, prompts, name):
    """Experts, windows, capped scores, norms with an offset, four heads on one: side by side. All
    prompts are longer than any window; they come in chunks and behind a prefix hit."""
    engine = start(checkpoints[name], max_num_batched_tokens=40, max_num_seqs=4)
    outputs = engine.generate(few(prompts)[2:5], SamplingParams(temperature=0, max_tokens=5),
                              use_tqdm=False)
    for output in outputs:
        expected, gaps = references(name, output.prompt_token_ids, 5)
        assert_same_text(output.outputs[0].token_ids, expected, gaps, name)


@needs_extras
def test_no_layer_goes_around_the_kernels(checkpoints, monkeypatch, capsys):
    """Speed lost silently: 132 tok/s instead of 9,500 (nano-vllm #245). With kernels, nothing of
    their plain twins runs, and the line at the start says which of the two it is."""
    for name in ops.__all__:
        monkeypatch.setattr(ops, name, None)
    for name in ("tiny", "tiny-moe", "tiny-gemma"):
        engine = start(checkpoints[name], max_num_seqs=2)
        assert "Triton's interpreter, very slow" in capsys.readouterr().err
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
