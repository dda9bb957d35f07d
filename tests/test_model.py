"""The decoder: what its last layer leaves out, and Gemma's embedding. Whole networks are compared
with transformers' in test_model_runner.
"""

from itertools import chain

import pytest
import torch
from clean_process import needs_extras
from safetensors.torch import load_file
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from nanoserve import LLM, SamplingParams, cpu
from nanoserve.batch import Batch
from nanoserve.layers import Placement
from nanoserve.loader import load_dummy_weights
from nanoserve.model import MLP, Decoder, DecoderLayer
from nanoserve.model_config import ModelConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def prefill(llm: LLM) -> Batch:
    """The batch of a step that computes all of the prompt."""
    llm.add_request("a", PROMPT, SamplingParams(temperature=0))
    return llm.runner.builder.build(llm.scheduler.schedule())


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral"])
@pytest.mark.parametrize("wanted", [[19], [4, 0, 4, 19], []])
def test_the_last_layer_leaves_out_what_nobody_reads(checkpoints, name, wanted):
    """Tokens whose output is wanted get what they get when all are, in the order asked for, and the
    others no output projection and no MLP there. Their keys and values are in the cache."""
    llm = LLM(checkpoints[name])
    batch = prefill(llm)
    model, cache, rows = llm.runner.model, llm.runner.kv_cache, []
    with torch.inference_mode():
        expected = model(batch.input_ids, batch.positions, cache, batch)
        written = [tensor.clone() for tensor in cache[-1]]
        for tensor in cache[-1]:
            tensor.zero_()
        for layer in model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp):
                part.register_forward_hook(lambda part, args, out: rows.append(len(args[0])))
        hidden = model(batch.input_ids, batch.positions, cache, batch,
                       wanted=torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(hidden, expected[wanted], rtol=1e-4, atol=1e-5)
    assert rows == [len(PROMPT)] * 2 * (len(model.layers) - 1) + [len(wanted)] * 2
    for tensor, before in zip(cache[-1], written, strict=True):
        assert before.any()
        torch.testing.assert_close(tensor, before)


@pytest.mark.parametrize("name, options", [
    ("qwen3-tied", {}), ("qwen3-tied", dict(kv_cache_dtype="int8", block_size=3)),
    ("qwen2", dict(dtype="float32")), ("gemma3", {}), ("mixtral", {}),
    *(pytest.param(name, dict(quantization=bits), marks=needs_extras) for name, bits in (
        ("qwen3", "int8"), ("gemma2", "int4"), ("mixtral", "int4")))])
def test_a_layer_in_one_call_has_the_bits_of_its_steps(checkpoints, monkeypatch, name, options):
    """A step of few tokens: two that decode, a chunk, and tokens that nobody wants any further."""
    llm = LLM(checkpoints[name], **dict(dtype="bfloat16") | options)
    for i, prompt in enumerate((PROMPT, PROMPT[3:9], PROMPT[:2:-1])):
        llm.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=9))
        if i < 2:
            llm.step()
    model, cache, batch = llm.runner.model, llm.runner.kv_cache, llm.runner.builder.build(
        llm.scheduler.schedule())
    assert batch.query_lens == [1, 1, 17]
    before = [tensor.clone() for pair in cache for tensor in pair]

    def run(wanted: list[int] | None) -> list[torch.Tensor]:
        for tensor, old in zip(chain(*cache), before, strict=True):
            tensor.copy_(old)
        wanted = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        hidden = model(batch.input_ids, batch.positions, cache, batch, wanted)
        return [hidden.clone(), *(tensor.clone() for tensor in chain(*cache))]

    calls = []
    monkeypatch.setattr(cpu, "call_layers", lambda records, *rest, call=cpu.call_layers: (
        calls.append(len(records)) or call(records, *rest)))
    for wanted in (None, [18, 0, 1, 0], []):
        whole, calls[:] = run(wanted), []
        assert all(map(torch.equal, whole, run(wanted))) and sum(calls) == len(model.layers)
        assert len(calls) == (len(model.layers) if name == "mixtral" else 1)
        with monkeypatch.context() as patch:
            patch.setattr(model, "run_layers", None)
            calls.clear()
            by_layers = run(wanted)
        assert all(map(torch.equal, whole, by_layers)) and len(calls) == len(model.layers)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "MOST_TOKENS", len(batch.input_ids) - 1)
            calls.clear()
            by_steps = run(wanted)
        assert all(map(torch.equal, whole, by_steps)) and not calls


def test_a_layer_goes_step_by_step_where_somebody_watches_its_parts(checkpoints):
    llm, seen = LLM(checkpoints["qwen3-tied"]), []
    layer = llm.runner.model.layers[1]
    hook = layer.mlp.gate_up_proj.register_forward_hook(lambda *_: seen.append("gate_up"))
    text = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
    assert seen == ["gate_up"] * 4
    hook.remove()
    old = layer.self_attn.o_proj.packed  # packed anew: the old address would be another's memory
    layer.self_attn.o_proj.packed = old._replace(memory=-old.memory)
    other = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
    assert other.token_ids != text.token_ids or other.logprobs != text.logprobs


class Doubled(DecoderLayer):
    def forward(self, *args):
        hidden, residual = super().forward(*args)
        return 2 * hidden, residual


def test_a_layer_goes_step_by_step_where_somebody_has_replaced_a_part(checkpoints, monkeypatch):
    """Oracle: steps that are too large for one call, in which model.py calls each module."""
    llm = LLM(checkpoints["qwen3-tied"])
    layers, greedy = llm.runner.model.layers, SamplingParams(temperature=0, max_tokens=4,
                                                             logprobs=1)

    def same_by_steps() -> list:
        outs = []
        for most in (64, 0):
            monkeypatch.setattr(cpu, "MOST_TOKENS", most)
            llm.reset_prefix_cache()
            outs.append(llm.generate([PROMPT], greedy)[0].outputs[0].logprobs)
        assert outs[0] == outs[1]
        return outs[0]

    def other(function):
        module = nn.Module()
        module.forward = module.add = function
        return module

    before, layer = same_by_steps(), layers[1]
    mlp, norm, weight = layer.mlp, layer.input_layernorm, layer.input_layernorm.weight
    changes = (
        (layer, "mlp", other(lambda x: -mlp(x))),
        (mlp, "forward", lambda x: -MLP.forward(mlp, x)),
        (layer, "input_layernorm", other(lambda *args: norm.add(*args)[::-1])),
        (norm, "weight", nn.Parameter(-weight, requires_grad=False)),
        (layer, "forward", lambda hidden, residual, *_: (hidden, residual)),
        (layers, "1", other(lambda hidden, residual, *_: (hidden, residual))))
    for module, name, new in changes:
        old = getattr(module, name)
        setattr(module, name, new)
        assert same_by_steps() != before, name
        if name == "forward":
            delattr(module, name)
        else:
            setattr(module, name, old)
    assert same_by_steps() == before
    made = Doubled(llm.runner.model_config, 0, llm.runner.placement)
    assert made.one_call is None  # `forward` would not be called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gemmas_embedding_is_scaled_in_its_own_precision(dtype):
    """sqrt(48) is 6.928, but 6.9375 in bfloat16: Gemma was trained with the second."""
    config = ModelConfig.from_dict(dict(
        architectures=["Gemma3ForCausalLM"], vocab_size=260, hidden_size=48, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=4, head_dim=8))
    model = Decoder(config, Placement(dtype, torch.device("cpu")))
    load_dummy_weights(model, seed=0)
    theirs = Gemma3TextScaledWordEmbedding(260, 48, None, embed_scale=48 ** 0.5)
    theirs.weight.data = model.embed_tokens.packed
    ids = torch.arange(260)
    assert torch.equal(model.embed(ids), theirs(ids))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "gemma2"])
def test_logits_are_not_rounded(checkpoints, name, kernels):
    """Those of a network in bfloat16 are float32, as exact as sums in it, softcap included: by
    bfloat16's steps of 1/256 the likeliest of many tokens would often tie."""
    folder, hidden = checkpoints[name], torch.randn(5, 64).bfloat16()
    model = LLM(folder, dtype="bfloat16", kernels=kernels).runner.model
    weights = load_file(folder / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).bfloat16()
    expected = hidden.double() @ head.double().T
    if name == "gemma2":
        expected = 3 * torch.tanh(expected / 3)
    got = model.compute_logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
