"""Another `visible`, as CONTRIBUTING's recipes change it: exact in a crowd with preemptions, with
the audit behind each step, and with other texts' KV replaced by NaN.

The oracle is transformers' network, which gets the whole text and a dense mask for each token.
"""

import sys
from random import Random

import pytest
import torch
from helpers import poisoned, watch_steps
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams, ops

SIZE = 4  # tokens in a block
RULES = {
    "the first four behind a window": lambda query, key, window, last: (
        (key <= last) & ((key > query - window) | (key < 4)))}


def texts_with_a_mask(folder, prompts, count: int, rule) -> list[list[int]]:
    """Greedy; where two logits are almost equal the text ends, as either may come."""
    model, texts = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            at = torch.arange(len(ids))
            with torch.no_grad():
                mask = rule(at[:, None], at, model.config.sliding_window, at[:, None])
                logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            if first - second < 1e-3:
                break
            ids.append(int(logits.argmax()))
        texts.append(ids[len(prompt):])
    return texts


@pytest.mark.parametrize("name", RULES)
def test_another_rule_is_exact_in_a_crowd_and_no_twin_has_the_old_one(checkpoints, monkeypatch,
                                                                      name):
    folder, rng = checkpoints["mistral"], Random(3)  # a window of 13 in every layer
    shared = [rng.randrange(256) for _ in range(24)]
    prompts = [shared[:rng.randrange(8, 24)] + [rng.randrange(256) for _ in range(
        rng.randrange(1, 24))] for _ in range(10)]
    for module in ("sequence", "batch", "block_manager", "self_test"):
        if f"nanoserve.{module}" in sys.modules:  # as if the function's own line had been changed
            monkeypatch.setattr(f"nanoserve.{module}.visible", RULES[name])
    with poisoned(LLM(folder, dtype="float32", device="cpu", block_size=SIZE, max_num_seqs=6,
                      max_num_batched_tokens=32, num_gpu_blocks_override=24)) as llm:
        assert llm.check_every_step and llm.runner.ops.paged_attention is ops.paged_attention
        steps = watch_steps(llm)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20,
                                                       ignore_eos=True), use_tqdm=False)
    assert sum(len(step.preempted) for step in steps) >= 3
    expected = texts_with_a_mask(folder, prompts, 20, RULES[name])
    assert sum(map(len, expected)) > 150
    for output, text in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids[:len(text)] == text
