"""A KV cache of 8 bits: the text is that of transformers with keys and values rounded by the rule.

The oracle is transformers' own cache, whose `update` rounds what it is given. It knows of no
blocks, steps or layouts.
"""

import pytest
import torch
from checkpoints import Reference, assert_same_text
from helpers import watch_steps
from quick_interpreter import quick_interpreter  # noqa: F401
from transformers import DynamicCache

from nanoserve import LLM, SamplingParams
from nanoserve.extras.block_store import BlockStore


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Of each token and head whole numbers up to 127, times a scale."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


class RoundedCache(DynamicCache):
    def update(self, keys, values, *args, **options):
        return super().update(rounded(keys), rounded(values), *args, **options)


@pytest.fixture(scope="module")
def texts(checkpoints):
    models, known = {}, {}

    @torch.no_grad()
    def text(name: str, prompt: list[int], max_tokens: int):
        if name not in models:
            models[name] = Reference(checkpoints[name]).model
        if (name, *prompt) not in known:
            out = models[name].generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
                cache=RoundedCache(), return_dict_in_generate=True, output_logits=True)
            best = [logits[0].float().topk(2).values for logits in out.logits]
            known[name, *prompt] = (out.sequences[0, len(prompt):].tolist(),
                                    [float(one - two) for one, two in best])
        return known[name, *prompt]

    return text


MODES = {
    "plain": ("qwen3", {}),
    "torch": ("qwen3", dict(kernels="torch")),
    "a tiny cache, chunks, overlap": ("qwen3", dict(
        num_gpu_blocks_override=9, max_num_batched_tokens=16, max_num_seqs=8,
        async_scheduling=True)),
    "odd heads, odd blocks": ("llama3.2", dict(block_size=5)),
    "soft-caps": ("gemma2", {}),
    "drafts": ("qwen3", dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))),
    "blocks on the host": ("qwen3", dict(kv_offload_bytes=2 ** 20, num_gpu_blocks_override=9)),
    "through transformers": ("qwen3", dict(model_impl="transformers")),
    "triton, blocks on the host": ("tiny", dict(
        kernels="triton", kv_offload_bytes=2 ** 20, num_gpu_blocks_override=5)),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_that_of_rounded_keys_and_values(checkpoints, prompts, texts, mode):
    name, options = MODES[mode]
    if "triton" in mode:  # in its interpreter, which is slow
        pytest.importorskip("triton")
        prompts = prompts[9:11]
    llm = LLM(checkpoints[name], dtype="float32", device="cpu", kv_cache_dtype="int8",
              **dict(num_gpu_blocks_override=64) | options)
    steps, params = watch_steps(llm), SamplingParams(temperature=0, max_tokens=12)
    for _ in range(2):  # the second time prefixes are found
        for out in llm.generate(prompts, params, use_tqdm=False):
            expected, gaps = texts(name, out.prompt_token_ids, 12)
            assert_same_text(out.outputs[0].token_ids, expected, gaps, mode)
    assert "host" not in mode or llm.extra(BlockStore).num_loaded
    assert llm.metrics.num_hits and ("tiny" not in mode or any(step.preempted for step in steps))
    llm.shutdown()


def test_two_ranks_write_what_one_writes(ranks_in_threads, checkpoints, prompts):
    told = []
    for ranks in (1, 2):
        llm = LLM(checkpoints["qwen3"], dtype="float32", device="cpu", kv_cache_dtype="int8",
                  num_gpu_blocks_override=64, tensor_parallel_size=ranks)
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        told.append([out.outputs[0].token_ids for out in outs])
        llm.shutdown()
    assert told[0] == told[1]


def test_blocks_take_half_of_bfloat16s_bytes_and_a_scale(checkpoints):
    """Of 32 numbers: 32 bytes and 4, against 64."""
    sizes = {}
    for dtype in ("auto", "int8"):
        llm = LLM(checkpoints["qwen3"], dtype="bfloat16", device="cpu", kv_cache_dtype=dtype,
                  num_gpu_blocks_override=16)
        sizes[dtype] = llm.runner.block_bytes
        llm.shutdown()
    assert sizes["int8"] * 64 == sizes["auto"] * 36


@pytest.mark.parametrize("options, message", [
    (dict(kv_cache_dtype="fp8"), "kv_cache_dtype must be auto or int8 .*got 'fp8'")])
def test_what_is_refused(checkpoints, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoints["qwen3"], device="cpu", dtype="float32", **options)
