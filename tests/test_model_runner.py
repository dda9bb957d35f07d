"""Token for token what transformers gives, however the engine schedules the work.

The oracle is transformers itself: one prompt at a time, no cache shared, fp32, greedy. The engine
must give the same tokens alone and batched, in chunks of any size, from a prefix cache, preempted,
with a step in flight, for any block size. That is the engine's one invariant: the scheduler may
change *when* a token is computed, never *which* token comes out.
"""

from dataclasses import replace

import pytest
import torch
from checkpoints import CHECKPOINTS, Reference, assert_same_text, logprobs_beside
from helpers import poisoned, watch_steps
from transformers import AutoTokenizer

from nanoserve import LLM, SamplingParams
from nanoserve.llm import BUNDLED_MODEL

MAX_TOKENS = 24  # enough to decode across a block boundary from everywhere
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
GREEDY_OF_3 = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=MAX_TOKENS)


def start(folder, **options) -> LLM:
    return poisoned(LLM(folder, **dict(num_gpu_blocks_override=64) | options))


def num_preempted(steps) -> int:
    return sum(len(step.preempted) for step in steps)


def run(llm: LLM, prompts, params=GREEDY) -> list:
    return llm.generate(prompts, params, use_tqdm=False)


def assert_parity(outputs, prompts, reference, where: str) -> None:
    """reference: prompt, what its text may be -> (tokens, gaps)."""
    assert len(outputs) == len(prompts)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == list(prompt)  # results come in the prompts' order
        for sample in output.outputs:
            assert_same_text(sample.token_ids, *reference(prompt, sample.token_ids),
                             f"{where}, {len(prompt)} tokens")


@pytest.fixture
def reference_of(references):
    return lambda name: lambda prompt, guess: references(name, prompt, MAX_TOKENS, guess)


# ------------------------------------------------------------------ the modes

MODES = {
    "batched": {},
    "no prefix cache": dict(enable_prefix_caching=False),
    "budget 1": dict(max_num_batched_tokens=1),
    "budget 7": dict(max_num_batched_tokens=7),
    "whole prompts": dict(enable_chunked_prefill=False, max_num_batched_tokens=256),
    "two at a time": dict(max_num_seqs=2),
    "overlap": dict(async_scheduling=True),
    "overlap, budget 7": dict(async_scheduling=True, max_num_batched_tokens=7),
    "blocks of 1": dict(block_size=1, num_gpu_blocks_override=512),
    "blocks of 5": dict(block_size=5, max_num_batched_tokens=16),
    "blocks of 32": dict(block_size=32),
}


# Everything at once: chunks, hits, preemption, and a step in flight. 20 blocks hold one of the
# longest texts (93 computed tokens).
BUSY = dict(block_size=5, num_gpu_blocks_override=20, async_scheduling=True,
            max_num_batched_tokens=13)


@pytest.mark.parametrize("mode, kernels", [*[(mode, "auto") for mode in MODES], *[
    (mode, "torch") for mode in ("batched", "budget 7", "overlap, budget 7", "blocks of 5")]])
def test_greedy_tokens_equal_transformers_in_every_mode(qwen3, prompts, reference_of, mode,
                                                        kernels):
    """On this machine's twin; and in some on the specification, which has no say in a schedule."""
    outputs = run(start(qwen3, **dict(kernels=kernels) | MODES[mode]), prompts)
    assert_parity(outputs, prompts, reference_of("qwen3"), f"{mode}, {kernels}")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_checkpoint_alone_and_in_the_core_modes(checkpoints, prompts, reference_of, name):
    """One prompt at a time, all together, and then everything at once: chunks, hits and preemption
    in a cache of few small blocks while a step is in flight, on this machine's twin and on the
    specification. llama-bias has biases everywhere: they were added once a rank, or not loaded
    (nano-vllm #125, #203)."""
    reference = reference_of(name)
    # Around one and two blocks, the longest, and a common prefix.
    prompts = [prompts[3], *prompts[6:11]]
    plain = start(checkpoints[name], enable_prefix_caching=False)
    outputs = [run(plain, [prompt])[0] for prompt in prompts[:2]]
    assert_parity(outputs, prompts[:2], reference, f"{name}, alone")
    assert_parity(run(plain, prompts), prompts, reference, f"{name}, batched")
    # Where each layer has a window a row needs few blocks at a time: it takes more rows.
    params = GREEDY_OF_3 if name in ("mistral", "mixtral") else GREEDY
    for kernels in ("torch", "auto"):
        busy = start(checkpoints[name], **BUSY, kernels=kernels)
        steps = watch_steps(busy)
        outputs = run(busy, prompts, params)
        assert_parity(outputs, prompts, reference, f"{name}, {kernels}, all at once")
        assert num_preempted(steps) and any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("options", [
    dict(block_size=1, num_gpu_blocks_override=1024), dict(block_size=13),
    dict(async_scheduling=True, max_num_batched_tokens=7),
    dict(num_gpu_blocks_override=6, async_scheduling=True),
], ids=str)
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_in_blocks_of_any_size(checkpoints, prompts, reference_of, name, options):
    """A window of 13 that begins inside a block, at its first slot, or one beside it; with mistral
    the blocks before it belong to somebody else by then, with gemma3 other layers read them."""
    llm, prompts = start(checkpoints[name], **options), prompts[2:12]
    steps = watch_steps(llm)
    for where in ("first", "cached"):
        outputs = run(llm, prompts)
        assert_parity(outputs, prompts, reference_of(name), f"{name}, {where}, {options}")
    assert bool(num_preempted(steps)) == (llm.scheduler.blocks.num_blocks == 6)


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=7), dict(block_size=4),
                                     dict(async_scheduling=True)], ids=str)
def test_from_the_prefix_cache(qwen3, prompts, reference_of, options):
    """The second time all full blocks of a prompt are hit, but for its last token's. Hits whose KV
    was not read, or with RoPE restarted at 0, gave silently wrong text (MinivLLM #98)."""
    llm = start(qwen3, **dict(num_gpu_blocks_override=400) | options)
    first, second = run(llm, prompts), run(llm, prompts)
    assert_parity(first, prompts, reference_of("qwen3"), f"first, {options}")
    assert_parity(second, prompts, reference_of("qwen3"), f"cached, {options}")
    size = llm.config.block_size
    for prompt, output in zip(prompts, second, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // size * size
    # The first time already, prompts that begin alike shared what the first of them computed.
    assert sum(output.num_cached_tokens for output in first) >= 4 * 32
    llm.reset_prefix_cache()
    third = run(llm, prompts[:1] + prompts[-1:])
    assert [output.num_cached_tokens for output in third] == [0, 0]


# -------------------------------------------------------------------- numbers


LOGPROBS = replace(GREEDY, logprobs=-1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fp32_logits_equal_transformers(checkpoints, prompts, name):
    """Closer than tokens can tell: a wrong epsilon or frequency shows before it flips a token."""
    output, = run(start(checkpoints[name], max_num_batched_tokens=33), [prompts[8]], LOGPROBS)
    torch.testing.assert_close(*logprobs_beside(Reference(checkpoints[name]).model, output),
                               rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["llama3.1", "llama-bias", "qwen3", "mistral", "mixtral",
                                  "gemma2", "gemma3"])
def test_bf16_is_as_good_as_transformers_bf16(checkpoints, prompts, name):
    """Two correct bf16 engines round differently, so tokens can't be compared. But both must stay
    equally close to the fp32 logits of the same rounded weights, along the same texts."""
    rounded = Reference(checkpoints[name], torch.bfloat16).model
    exact = Reference(checkpoints[name], torch.bfloat16).model.float()
    llm = start(checkpoints[name], dtype="bfloat16", max_num_batched_tokens=33)
    errors = {"ours": 0.0, "theirs": 0.0}
    for prompt in prompts[6:10]:
        output, = run(llm, [prompt], LOGPROBS)
        ours, expected = logprobs_beside(exact, output)
        for who, logprobs in (("ours", ours), ("theirs", logprobs_beside(rounded, output)[1])):
            errors[who] += (logprobs - expected).square().sum().item()
    assert 0 < errors["ours"] < 1.5 * errors["theirs"], errors


# ---------------------------------------------------------- the bundled model

STORIES = ["Once upon a time", "The old king looked at his daughter and said, \"",
           "Alice was beginning to", "In the middle of the forest there was a little house, and",
           "Once upon a time there was a fox. He", "x"]


@pytest.fixture(scope="module")
def bundled():
    """The bundled model's prompts as transformers tokenises them, and its texts."""
    tokenizer, reference = AutoTokenizer.from_pretrained(BUNDLED_MODEL), Reference(BUNDLED_MODEL)
    prompts = [tokenizer(text).input_ids for text in STORIES]
    texts = {tuple(p): reference.generate(p, MAX_TOKENS) for p in prompts}
    return tokenizer, prompts, lambda prompt, guess: texts[tuple(prompt)]


@pytest.mark.parametrize("mode", ["batched", "overlap", "tiny cache"])
def test_the_bundled_model_equals_transformers(bundled, mode):
    tokenizer, prompts, reference = bundled
    options = MODES.get(mode, dict(num_gpu_blocks_override=4, async_scheduling=True))
    llm = start(BUNDLED_MODEL, dtype="float32", **options)
    steps = watch_steps(llm)
    for where in ("first", "cached"):
        outputs = run(llm, STORIES)
        assert_parity(outputs, prompts, reference, f"bundled, {mode}, {where}")
        for output in outputs:
            sample = output.outputs[0]
            text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert sample.text == text
    assert bool(num_preempted(steps)) == (mode == "tiny cache")


def test_the_bundled_model_is_what_llm_without_a_model_uses(bundled):
    _, prompts, reference = bundled
    with LLM(dtype="float32", kv_cache_memory_bytes=2 ** 24) as llm:
        outputs = [run(llm, text)[0] for text in STORIES]
    assert_parity(outputs, prompts, reference, "LLM()")
    assert [output.prompt for output in outputs] == STORIES
