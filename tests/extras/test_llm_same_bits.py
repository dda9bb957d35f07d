"""On a CPU, log probabilities are bit-identical, whatever else is in the batch.

The oracle is the same engine with one request at a time, and without a prefix cache. The compiled
backend makes every sum in a fixed order, which other rows, chunks and drafts don't change. This
does not hold behind a window, or with a block size that 16 doesn't divide: see cpu.cpp.
"""

import random

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.self_test import load_backend

NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
# In each mode: the checkpoint, its options, and those that only the crowd has.
MODES = {
    "float32": ("qwen3", dict(dtype="float32"), dict(async_scheduling=True)),
    "drafts": ("qwen3", {}, dict(speculative_config=NGRAM)),
    "two ranks": ("qwen3", dict(tensor_parallel_size=2), {}),
    "experts": ("mixtral", {}, dict(async_scheduling=True)),
    "int8, a cache of 8 bits": ("qwen3", dict(quantization="int8", kv_cache_dtype="int8"), {}),
    "int4": ("qwen3", dict(quantization="int4"), {}),
}
WORDS = [3, 97, 150]  # of a text of three words much is guessed right
PARAMS = SamplingParams(seed=1, max_tokens=6, logprobs=0, allowed_token_ids=WORDS,
                        ignore_eos=True, detokenize=False)


def make_prompts() -> list[list[int]]:
    """16, some with a common beginning; the longest have more keys than attention takes at once."""
    rng = random.Random(0)
    shared, *own = ([rng.choice(WORDS) for _ in range(n)] for n in (
        40, 1, 11, 13, 14, 15, 16, 29, 31, 47, 140, 4, 7, 24, 38, 90, 101))
    return own[:10] + [shared + one for one in own[10:]]


def told(llm: LLM, prompts: list) -> list[tuple[list[int], list[float]]]:
    samples = [out.outputs[0] for out in llm.generate(prompts, PARAMS, use_tqdm=False)]
    return [(one.token_ids, [entry[token].logprob for entry, token in zip(
        one.logprobs, one.token_ids, strict=True)]) for one in samples]


@pytest.mark.parametrize("mode", MODES)
def test_a_log_probability_has_the_same_bits_alone_and_in_a_crowd(ranks_in_threads, checkpoints,
                                                                  mode):
    """Among 16, in chunks, preempted, guessed, and from the cache."""
    try:
        load_backend("cpu")
    except ImportError:
        pytest.skip("needs a compiler")
    (name, options, crowds), prompts = MODES[mode], make_prompts()
    options = dict(dtype="bfloat16", device="cpu", max_model_len=160) | options
    with LLM(checkpoints[name], enable_prefix_caching=False, **options) as llm:
        alone = [told(llm, [prompt])[0] for prompt in prompts]
    with LLM(checkpoints[name], max_num_batched_tokens=50, max_num_seqs=16,
             num_gpu_blocks_override=12, **options | crowds) as llm:
        for _ in range(2):
            assert told(llm, prompts) == alone
        numbers = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
        assert numbers["vllm:num_preemptions"] and llm.metrics.num_hits
        assert mode != "drafts" or numbers["vllm:spec_decode_num_accepted_tokens"] > 10
