"""A seeded request draws the same numbers whatever surrounds it, in every mode of the engine."""

import random

import numpy as np
import pytest
import torch
from checkpoints import Reference
from helpers import watch_steps
from plain_sampling import assert_distributed, reference_probs

from nanoserve import LLM
from nanoserve.config import SamplingParams

MAX_TOKENS = 40
SEEDED = [SamplingParams(seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, **kinds)
          for seed, kinds in [(1, {}), (2, dict(temperature=.8, top_k=20)), (2, dict(top_p=.9)),
                              (0, dict(min_p=.05)), (-3, dict(temperature=1.3))]]


def prompt(i: int) -> list[int]:
    return random.Random(i).choices(range(256), k=18 + i)


@pytest.fixture(scope="module")
def alone(qwen3) -> list[list[int]]:
    """Each seeded request in an engine of its own."""
    texts = []
    for i, params in enumerate(SEEDED):
        with LLM(qwen3, num_gpu_blocks_override=16) as llm:
            [out] = llm.generate(prompt(i), params, use_tqdm=False)
        texts.append(out.outputs[0].token_ids)
    return texts


SURROUNDINGS = {
    "a batch": dict(),
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=7),
    "a token a step": dict(max_num_batched_tokens=1),
    "overlap": dict(async_scheduling=True),
    "a tiny cache": dict(num_gpu_blocks_override=9),
    "a tiny cache, chunks, overlap": dict(num_gpu_blocks_override=9, max_num_batched_tokens=16,
                                         max_num_seqs=16, async_scheduling=True),
    "no prefix cache": dict(enable_prefix_caching=False, seed=99),
}


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_a_seeded_request_draws_the_same_whatever_surrounds_it(qwen3, alone, where):
    """Only seed and position decide: not the batch, chunks, preemption, overlap or engine seed."""
    llm = LLM(qwen3, **dict(num_gpu_blocks_override=64) | SURROUNDINGS[where])
    steps = watch_steps(llm)
    unseeded = SamplingParams(max_tokens=25, temperature=1.5)
    outs = llm.generate(
        [prompt(50), *[prompt(i) for i in range(5)], prompt(51)], [unseeded, *SEEDED, unseeded],
        use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs[1:-1]] == alone
    assert any(step.preempted for step in steps) == ("tiny cache" in where)


def test_different_seeds_and_samples_differ(qwen3):
    """Samples of one request, requests without a seed, and other seeds: all draw on their own."""
    llm = LLM(qwen3, num_gpu_blocks_override=64)
    params = [SamplingParams(n=4, seed=5), SamplingParams(seed=6), SamplingParams(),
              SamplingParams(n=3), SamplingParams()]
    outs = llm.generate([prompt(0)] * 5, params, use_tqdm=False)
    texts = [tuple(sample.token_ids) for out in outs for sample in out.outputs]
    assert len(texts) == len(set(texts)) == 10


def test_the_engine_seed_fixes_everything(qwen3):
    """Requests without a seed: the same engine seed gives the same texts, another gives others."""
    def texts(seed: int) -> list[list[int]]:
        llm = LLM(qwen3, num_gpu_blocks_override=64, seed=seed)
        outs = llm.generate([prompt(0), prompt(1)], SamplingParams(n=2), use_tqdm=False)
        return [sample.token_ids for out in outs for sample in out.outputs]

    assert texts(1) == texts(1)
    assert all(one != other for one, other in zip(texts(1), texts(2), strict=True))


def test_samples_of_a_model_follow_its_probabilities(qwen3):
    """End to end: 1,000 samples of one next token against transformers' logits, filtered by the
    plain reference. Samples that shared a random number would be far off."""
    kinds = dict(temperature=1.5, top_k=9, top_p=.95)
    llm = LLM(qwen3, num_gpu_blocks_override=256, max_num_seqs=128)
    params = SamplingParams(n=1000, max_tokens=1, seed=0, ignore_eos=True, **kinds)
    [out] = llm.generate(prompt(3), params, use_tqdm=False)
    with torch.no_grad():
        logits = Reference(qwen3).model(torch.tensor([prompt(3)])).logits[0, -1]
    tokens = np.array([sample.token_ids[0] for sample in out.outputs])
    assert_distributed(tokens, reference_probs(logits.tolist(), **kinds))
