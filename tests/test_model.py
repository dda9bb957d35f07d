"""The decoder's seams, which later ideas build on: layer by layer it is transformers' network.

The oracle is transformers' `output_hidden_states`: the embedding, then each layer's output.
"""

import copy

import pytest
import torch
from conftest import Reference
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from nanoserve import LLM, SamplingParams, ops
from nanoserve.device.kv_cache import places_of
from nanoserve.layers import Part, Placement
from nanoserve.checkpoint.loader import load_dummy_weights
from nanoserve.model import Decoder
from nanoserve.checkpoint.model_config import ModelConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def forward(llm: LLM, layers: list[range], taps: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """One prompt through ranges of layers, one after the other: embedding and final output."""
    llm.add_request("a", PROMPT, SamplingParams(temperature=0))
    batch = llm.runner.builder.build(llm.scheduler.schedule())
    model = llm.runner.model
    with torch.inference_mode():
        embedded = hidden = model.embed(batch.input_ids)
        for some in layers:
            hidden = model(hidden, batch.positions, llm.runner.kv_cache, batch, some, taps)
    return embedded, hidden


@pytest.mark.parametrize("layers", [[range(3)], [range(1), range(1, 3)],
                                    [range(1), range(1, 2), range(2, 3)]])
def test_layers_run_in_ranges_and_can_be_tapped(qwen3, layers):
    """A range of layers is what a pipeline rank runs; taps are what a draft head reads."""
    with torch.no_grad():
        reference = Reference(qwen3).model.model(torch.tensor([PROMPT]), output_hidden_states=True)
    taps = dict.fromkeys(range(3))
    embedded, hidden = forward(LLM(qwen3), layers, taps)
    theirs = [states[0] for states in reference.hidden_states]
    torch.testing.assert_close(embedded, theirs[0])
    for i in (0, 1):  # transformers reports the last layer's output behind the norm
        torch.testing.assert_close(taps[i], theirs[i + 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, reference.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(taps[2], hidden)  # a tap is what the layer says, not the norm


@pytest.mark.parametrize("layers", [range(4), range(0, 3, 2)])
def test_layers_that_are_no_range_of_them_are_refused(qwen3, layers):
    """And not run as far as there are some, without the final norm."""
    with pytest.raises(ValueError, match="shorter|longer"):
        forward(LLM(qwen3), [layers], {})


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral"])
@pytest.mark.parametrize("wanted", [[19], [4, 0, 4, 19], []])
def test_the_last_layer_leaves_out_what_nobody_reads(checkpoints, name, wanted, monkeypatch):
    """Tokens whose output is wanted get what they get when all are, in the order asked for, and the
    others no output projection and no MLP there. Their keys and values are in the cache."""
    llm = LLM(checkpoints[name])
    llm.add_request("a", PROMPT, SamplingParams(temperature=0))
    batch = llm.runner.builder.build(llm.scheduler.schedule())
    model, cache, rows = llm.runner.model, llm.runner.kv_cache, []
    with torch.inference_mode():
        expected = model(model.embed(batch.input_ids), batch.positions, cache, batch)
        written = [tensor.clone() for tensor in cache[-1]]
        for tensor in cache[-1]:
            tensor.zero_()
        for layer in model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp):
                monkeypatch.setattr(type(part), "__call__", type(part).__call__)  # as it was before
                part.register_forward_hook(lambda part, args, out: rows.append(len(args[0])))
        hidden = model(model.embed(batch.input_ids), batch.positions, cache, batch,
                       wanted=torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(hidden, expected[wanted], rtol=1e-4, atol=1e-5)
    assert rows == [len(PROMPT)] * 2 * (len(model.layers) - 1) + [len(wanted)] * 2
    for tensor, before in zip(cache[-1], written, strict=True):
        assert before.any()
        torch.testing.assert_close(tensor, before)


@pytest.fixture
def part():
    """A small one, of a class of its own."""
    class Scale(Part):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

        def forward(self, x):
            return self.weight * x

    return Scale()


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral"])
def test_a_decoder_is_made_of_parts(checkpoints, name):
    model = LLM(checkpoints[name]).runner.model
    assert all(isinstance(module, (Part, nn.ModuleList)) for module in model.modules())


def test_a_part_runs_nothing_but_its_forward(part, monkeypatch):
    """Neither to be called nor to find what is its own; but whichever forward it has by now."""
    slow = []
    part.inner = type(part)()
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: slow.append(name))
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args: slow.append(args))
    assert part(torch.tensor(3.0)) == part.inner(torch.tensor(3.0)) == 6 and not slow
    monkeypatch.setattr(type(part), "forward", lambda self, x: x)  # somebody tries an idea
    assert part(torch.tensor(3.0)) == 3
    part.forward = lambda x: -x
    assert part(torch.tensor(3.0)) == -3 and part.inner(torch.tensor(3.0)) == 3 and not slow


def test_a_hook_before_a_part_is_called(part):
    seen = []
    handle = part.register_forward_pre_hook(lambda part, args: seen.append(args[0].item()))
    assert part(torch.tensor(3.0)) == 6 and seen == [3]
    handle.remove()
    assert part(torch.tensor(4.0)) == 8 and seen == [3]


def test_a_hook_behind_a_part_is_called_and_no_other_parts(part):
    other = type(part)()
    handle = part.register_forward_hook(lambda part, args, out: out + 1)
    assert part(torch.tensor(3.0)) == 7 and other(torch.tensor(3.0)) == 6
    handle.remove()
    assert part(torch.tensor(3.0)) == 6


def test_a_hook_leaves_a_class_its_own_call(part, monkeypatch):
    monkeypatch.setattr(type(part), "__call__", lambda self, x: nn.Module.__call__(self, x) * 10)
    part.register_forward_hook(lambda part, args, out: out + 1)
    assert part(torch.tensor(3.0)) == 70


def test_a_part_finds_its_newest_weight(part):
    """Which stands in two places: as nn.Module has it, and as the quick look-up has it."""
    one = torch.tensor(1.0)
    part.weight = nn.Parameter(torch.tensor(5.0), requires_grad=False)
    assert part(one) == 5 and [p.item() for p in part.parameters()] == [5]
    part.load_state_dict({"weight": torch.tensor(7.0)})
    assert part(one) == 7
    part.load_state_dict({"weight": torch.tensor(8.0)}, assign=True)
    assert part(one) == 8
    assert part.double()(one).dtype == torch.float64
    copied = copy.deepcopy(part)
    copied.weight.fill_(9)
    assert (copied(one), part(one)) == (9, 8)
    del part.weight
    with pytest.raises(AttributeError, match="weight"):
        part(one)


def test_new_tokens_places_are_found_once_a_step(qwen3, monkeypatch):
    """And not in each layer, which asks for code that weights have pushed out of the cache."""
    calls = []
    monkeypatch.setattr(ops, "places_of", lambda *args: calls.append(args) or places_of(*args))
    llm = LLM(qwen3, block_size=4)
    del calls[:]  # of the step that measures memory
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [args[0].tolist() for args in calls] == [[0, 1, 2, 3, 4], [5], [6]]
    assert {args[1] for args in calls} == {64}  # slots of a run


def test_a_step_copies_blocks_before_it_runs(qwen3):
    """`Step.block_copies` is (from, to), for K and V of every layer, and nothing else moves. All are
    read before any is written: blocks 3 and 4 change places, which once was done twice."""
    llm = LLM(qwen3, num_gpu_blocks_override=6)
    llm.add_request("a", PROMPT, SamplingParams(temperature=0))
    step = llm.scheduler.schedule()
    [seq] = step.sampling
    assert seq.block_table == [0, 1]  # the step itself writes here
    for i, kv in enumerate(llm.runner.kv_cache):
        for cache in kv:  # runs of two blocks of 16
            cache.copy_(torch.arange(6).repeat_interleave(16).view(3, 32, 1, 1) + 10 * i)
    step.block_copies = [(2, 5), (3, 4), (4, 3)]
    llm.runner.launch(step)
    for i, kv in enumerate(llm.runner.kv_cache):
        for cache in kv:
            blocks = cache[..., 0, 0].reshape(6, 16)[2:]
            assert blocks.eq(blocks[:, :1]).all()  # each as a whole
            assert blocks[:, 0].tolist() == [10 * i + n for n in (2, 4, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gemmas_embedding_is_scaled_in_its_own_precision(dtype):
    """sqrt(48) is 6.928, but 6.9375 in bfloat16: Gemma was trained with the second."""
    config = ModelConfig.from_dict(dict(
        architectures=["Gemma3ForCausalLM"], vocab_size=260, hidden_size=48, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=4, head_dim=8))
    model = Decoder(config, Placement(dtype, torch.device("cpu")))
    load_dummy_weights(model, seed=0)
    theirs = Gemma3TextScaledWordEmbedding(260, 48, None, embed_scale=48 ** 0.5)
    theirs.weight.data = model.embed_tokens.weight.data
    ids = torch.arange(260)
    assert torch.equal(model.embed(ids), theirs(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_leaves_its_arguments_as_they_are(dtype, residual):
    """In float32 what it computes with is no copy of what it was given. The stream that it hands
    on goes to the next norm, too."""
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(3, 8, generator=generator).to(dtype) for _ in range(2))
    weight, before = torch.full((8,), 0.5, dtype=dtype), (x.clone(), other.clone())
    normed, total = ops.add_rms_norm(x, other if residual else None, weight, 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(other, before[1]) and (weight == 0.5).all()
    expected = before[0] + before[1] if residual else before[0]
    assert torch.equal(total, expected)
    wide = expected.double()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * 0.5
    within = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(normed.double(), wide, rtol=within, atol=within)
