"""A KV cache of 8 bits: the text is that of transformers with keys and values rounded by the rule.

The oracle is transformers' own cache, whose `update` rounds what it is given. It knows of no
blocks, steps or layouts.
"""

import functools

import pytest
import torch
from checkpoints import GQA, SIZES, Reference, assert_same_text, byte_tokenizer
from helpers import watch_steps
from quick_interpreter import quick_interpreter  # noqa: F401
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve_extras.block_store.block_store import BlockStore


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Of each token and head whole numbers up to 127, times a scale."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


class RoundedCache(DynamicCache):
    kept = ()  # layers

    def update(self, keys, values, layer_idx, *args, **options):
        if layer_idx not in self.kept:
            keys, values = rounded(keys), rounded(values)
        return super().update(keys, values, layer_idx, *args, **options)


@pytest.fixture(scope="module")
def biased(checkpoints, tmp_path_factory):
    """One channel of its keys has a bias as Qwen 2.5's have, in layer 1 of 3."""
    reference, folder = Reference(checkpoints["qwen2"]), tmp_path_factory.mktemp("biased")
    bias = reference.model.model.layers[1].self_attn.k_proj.bias
    bias.data.view(2, -1)[1, -1] = 300.0
    reference.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    checkpoints["biased"] = folder
    return folder


@pytest.fixture(scope="module")
def texts(checkpoints, biased):
    model = functools.cache(lambda name: Reference(checkpoints[name]).model)

    @functools.cache
    @torch.no_grad()
    def text(name: str, prompt: tuple[int, ...], max_tokens: int):
        cache = RoundedCache()
        cache.kept = (1,) if name == "biased" else ()
        out = model(name).generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
            cache=cache, return_dict_in_generate=True, output_logits=True)
        best = [logits[0].float().topk(2).values for logits in out.logits]
        return out.sequences[0, len(prompt):].tolist(), [float(one - two) for one, two in best]

    return lambda name, prompt, max_tokens: text(name, tuple(prompt), max_tokens)


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
    "biased": ("biased", {}),
    "biased, through transformers": ("biased", dict(model_impl="transformers")),
    "biased, blocks on the host": ("biased", dict(kv_offload_bytes=2 ** 20,
                                                  num_gpu_blocks_override=9)),
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


@pytest.mark.parametrize("options, plan", [
    (dict(layer_plan=[1, 2]), [2, 1]), (dict(layer_plan={"disk": 1}), {"disk": 3}),
    (dict(tensor_parallel_size=2), None)], ids=str)
def test_stages_and_ranks_keep_the_same_layers_unrounded(ranks_in_threads, biased, prompts, texts,
                                                         options, plan):
    """Of two ranks one has the head with the large bias, and both keep the layer."""
    with LLM(biased, dtype="float32", device="cpu", kv_cache_dtype="int8", max_model_len=128,
             num_gpu_blocks_override=64, **options) as llm:
        for _ in range(1 + (plan is not None)):
            for out in llm.generate(prompts[1:4], SamplingParams(temperature=0, max_tokens=12),
                                    use_tqdm=False):
                assert_same_text(out.outputs[0].token_ids,
                                 *texts("biased", out.prompt_token_ids, 12), str(options))
            if plan is not None:
                llm.deploy(plan)


@pytest.mark.parametrize("which, channels, bias, most", [
    ("k", [], 0, 0.02), ("k", [15], 10, 0.05), ("k", [0], 50, 1e-3), ("k", [2, 5, 15], 100, 1e-3),
    ("k", range(16), 60, 1e-3), ("v", [3], 150, 1e-3)])
@pytest.mark.parametrize("impl", ["nanoserve", "transformers"])
def test_a_bias_that_8_bits_cannot_hold_moves_no_logprob(tmp_path, capfd, impl, which, channels,
                                                         bias, most):
    """most: nats a token, from transformers with its own cache; with int8 it would be 0.1 to 0.5.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES | dict(num_hidden_layers=1), **GQA,
                                             initializer_range=0.125)).eval()
    part = getattr(model.model.layers[0].self_attn, f"{which}_proj").bias.data.view(2, -1)
    part[:, list(channels)] = bias
    model.save_pretrained(tmp_path)
    ids = [(i * 37 + i * i) % 250 for i in range(60)]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)[range(59), ids[1:]]
    with LLM(tmp_path, dtype="float32", device="cpu", kv_cache_dtype="int8", model_impl=impl,
             num_gpu_blocks_override=16, skip_tokenizer_init=True) as llm:
        out, = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        told = llm.describe()
    got = torch.tensor([one[token].logprob for one, token in zip(
        out.prompt_logprobs[1:], ids[1:], strict=True)])
    assert (got - wanted).abs().mean() < most
    assert "int8 keys and values" in capfd.readouterr().err
    assert ("1 of 1 layers in float32: their biases" in told) == (bias > 10)


def test_blocks_take_half_of_bfloat16s_bytes_and_a_scale(checkpoints):
    """Of 32 numbers: 32 bytes and 4, against 64."""
    sizes = {}
    for dtype in ("auto", "int8"):
        llm = LLM(checkpoints["qwen3"], dtype="bfloat16", device="cpu", kv_cache_dtype=dtype,
                  num_gpu_blocks_override=16)
        sizes[dtype] = llm.runner.block_bytes
        llm.shutdown()
    assert sizes["int8"] * 64 == sizes["auto"] * 36
