"""Parts of transformers' networks are replaced by ours if they compute the same, and only then.

That texts stay the same token for token is tested with the networks (test_transformers_model.py).
"""

from collections import Counter
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import ARCHITECTURES, GQA, randomise
from hybrids import HYBRIDS
from recorded_graphs import RecordedGraph
from torch import nn
from transformers import AutoModelForCausalLM
from weight_kinds import needs_compiler

from nanoserve.layers import Placement
from nanoserve_extras.foreign.foreign_layers import Gated, Norm, our_norm, roles, take_over

ON = Placement(torch.float32, torch.device("cpu"))
TAKEN = {  # norms, gated MLPs
    "olmo2": (9, 2), "gemma4": (16, 2), "glm4": (9, 2), "phi3": (5, 2), "cohere": (0, 2),
    "starcoder2": (0, 0), "gpt2": (0, 0), "lfm2": (7, 2), "qwen3.5": (7, 2), "granite4-h": (5, 2)}


def network_of(name: str):
    with torch.random.fork_rng(devices=[]):
        network = AutoModelForCausalLM.from_config((ARCHITECTURES | HYBRIDS)[name]())
    randomise(network)
    return network.eval().requires_grad_(False)


@pytest.mark.parametrize("name", TAKEN)
def test_norms_and_gated_mlps_of_any_name_are_taken_over(name):
    network, state = network_of(name), torch.get_rng_state()
    take_over(network, ON, {})
    kinds = Counter(map(type, network.modules()))
    assert (kinds[Norm], kinds[Gated]) == TAKEN[name]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt-oss", "phimoe", "nemotron-h"])
@torch.inference_mode()
def test_a_mixture_of_any_dtype_is_multiplied_by_a_kernel_that_never_waits(recorded, name, dtype):
    """Transposed with biases, or not, or without a gate. torch's own grouped product reads on the
    host where each expert's rows end, and such a network had no CUDA graphs."""
    kernels = pytest.importorskip("nanoserve.triton_attention")
    network = network_of(name).to(dtype)
    path, theirs = next((path, one) for path, one in network.named_modules()
                        if hasattr(one, "is_transposed"))
    config, ours = theirs.config, deepcopy(network)
    take_over(ours, Placement(dtype, torch.device("cpu"), ops=kernels), {})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, config.hidden_size, generator=generator).to(dtype)
    scores = torch.randn(7, theirs.num_experts, generator=generator).softmax(-1)
    weights, ids = scores.masked_fill(torch.arange(theirs.num_experts) == 1, 0).topk(2)
    arguments, exact = (ids, weights), theirs.double()
    config._experts_implementation = "eager"
    right = exact(hidden.double(), *arguments)
    config._experts_implementation = "grouped_mm"
    graph = RecordedGraph()
    graph.capture(lambda: ours.get_submodule(path)(hidden, *arguments))
    assert (graph.replay() - right).norm() < 4 * torch.finfo(dtype).eps * right.norm()
    with pytest.raises(RuntimeError, match="_grouped_mm waits"):
        RecordedGraph.rehearse(lambda: theirs.to(dtype)(hidden, *arguments))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_taken_over_computes_the_same(dtype):
    """And rounds no worse: beside float64, ours is at most as far away as transformers'."""
    from nanoserve import cpu  # compiles

    network = network_of("gemma4")
    exact, theirs = deepcopy(network).double(), deepcopy(network).to(dtype)
    exact.load_state_dict({name: one.double() for name, one in theirs.state_dict().items()})
    ours = deepcopy(theirs)
    take_over(ours, Placement(dtype, torch.device("cpu"), ops=cpu), {})
    compared = 0
    for name, part in ours.named_modules():
        if isinstance(part, Norm | Gated):
            other = theirs.get_submodule(name)
            size = len(part.weight) if isinstance(part, Norm) else 32
            x = torch.randn(1, 3, 5, size, dtype=dtype)[:, :, ::2]
            wanted = exact.get_submodule(name)(x.double())
            far, reference = ((one(x).double() - wanted).norm() for one in (part, other))
            assert far <= max(1.1 * reference, 1e-6 * wanted.norm()), name
            compared += 1
    assert compared == sum(TAKEN["gemma4"])


class SumForSequenceClassification(transformers.BertPreTrainedModel):
    """Its scores are sums: no matrix makes them."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config)


def test_a_classifier_without_a_matrix_for_its_scores_is_refused():
    """It was a bare IndexError."""
    network = SumForSequenceClassification(transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2))
    with pytest.raises(ValueError, match="SumForSequenceClassification is not .* no matrix"):
        take_over(network, ON, {})


class AlmostNorm(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.rand(16)), 1e-6, how

    def forward(self, x):
        return self.how(x, self.weight, self.eps)


def rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def clamped(x, limit, start=0):
    """From a channel on."""
    return torch.cat((x[..., :start], x[..., start:].clamp(-limit, limit)), -1)


@pytest.mark.parametrize("offset, how", [
    (0, lambda x, w, eps: rms(x, eps) * w), (1, lambda x, w, eps: rms(x, eps) * (1 + w)),
    (None, lambda x, w, eps: rms(x, 0) * w), (None, lambda x, w, eps: rms(x, 10 * eps) * w),
    (None, lambda x, w, eps: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * w),
    (None, lambda x, w, eps: F.layer_norm(x, w.shape, w, None, eps)),
    (None, lambda x, w, eps: rms(x, eps) * w ** 2), (None, lambda x, w, eps: rms(x, eps) + w),
    (None, lambda x, w, eps: rms(x, eps).unflatten(-1, (2, 8)) * w),
    (None, lambda x, w, eps: rms(x, 1.01 * eps) * w),
    (None, lambda x, w, eps: rms(x, eps) * w.abs()),
    (None, lambda x, w, eps: rms(x, eps) * w + 1e-4),
    (None, lambda x, w, eps: rms(x, eps) * w * 1.0001),
    (None, lambda x, w, eps: rms(clamped(x, 1000), eps) * w),
    (None, lambda x, w, eps: rms(clamped(x, 100, 15), eps) * w),
    (None, lambda x, w, eps: (rms(x, eps) * w).clamp(max=16)),
    (None, lambda x, w, eps: rms(x, eps).clamp(max=3) * w),
    (None, lambda x, w, eps: rms(x if x.shape[1] > 1 else clamped(x, 7), eps) * w)])
def test_a_norm_is_known_by_its_numbers(offset, how):
    found = our_norm(AlmostNorm(how), ON)
    if offset is None:
        assert found is None
    else:
        x = torch.randn(3, 16)
        torch.testing.assert_close(found(x), how(x, found.weight, 1e-6), rtol=1e-5, atol=1e-6)


class AlmostGated(nn.Module):
    def __init__(self, how, inner=48):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, inner), nn.Linear(32, inner), nn.Linear(inner, 32)
        self.how = how

    def forward(self, x):
        return self.how(x, self.a, self.b, self.c)


def gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("expected, how", [
    ((["a", "b"], "c", "silu"), lambda x, a, b, c: c(F.silu(a(x)) * b(x))),
    ((["b", "a"], "c", "gelu_tanh"), lambda x, a, b, c: c(a(x) * gelu(b(x)))),
    (None, lambda x, a, b, c: c(F.gelu(a(x)) * b(x))),  # with erf: 3 digits are the same
    (None, lambda x, a, b, c: c(F.silu(a(x)) * b(x)) * 0.5),
    (None, lambda x, a, b, c: c(F.silu(a(x)) * (b(x) + 1))),
    (None, lambda x, a, b, c: c(F.silu(a(x)) * b(x)) + x),
    (None, lambda x, a, b, c: c(F.silu(a(x)).clamp(max=0.1) * b(x))),
    (None, lambda x, a, b, c: c(F.silu(a(x)) * b(x)) * 1.0001),
    (None, lambda x, a, b, c: c(F.silu(a(x) + 1e-4) * b(x))),
    (None, lambda x, a, b, c: c(F.silu(a(x)) * b(x)) + 1e-5),
    (None, lambda x, a, b, c: c(a(x) * torch.sigmoid(1.0001 * a(x)) * b(x))),
    (None, lambda x, a, b, c: c(F.silu(a(x).clamp(min=-10)) * b(x))),  # by 0.0005
    (None, lambda x, a, b, c: c(b(x).clamp(-7, 7) + 1) * a(x).clamp(max=7) * torch.sigmoid(
        1.702 * a(x))),
    (None, lambda x, a, b, c: F.silu(a(x)) * b(x)),
    (None, lambda x, a, b, c: c(c(F.silu(a(x)) * b(x)))),
    (None, lambda x, a, b, c: F.silu(c(a(x))) * c(b(x)))])
def test_a_gated_mlp_is_known_by_its_numbers(expected, how):
    """Of 32 inner numbers, any of its matrices may stand in any place."""
    for inner in (48, 32):
        assert roles(AlmostGated(how, inner), ON) == expected


@pytest.mark.parametrize("limit", [7, 10, 16, 1000])
@pytest.mark.parametrize("how", [
    lambda x, a, b, c, most: c(F.silu(a(x)).clamp(max=most) * clamped(b(x), most)),  # Step 3.7
    lambda x, a, b, c, most: c(F.silu(a(x).clamp(max=most)) * b(x)),
    lambda x, a, b, c, most: c(F.silu(a(x)) * b(x).clamp(min=-most)),
    lambda x, a, b, c, most: c(clamped(F.silu(a(x)) * b(x), most)),
    lambda x, a, b, c, most: c(F.silu(a(x)) * b(x)).clamp(max=most),
    lambda x, a, b, c, most: c(F.silu(a(clamped(x, most))) * b(x)),
    lambda x, a, b, c, most: c(F.silu(a(x)) * clamped(b(x), most, 47)),  # one of 48 channels
    lambda x, a, b, c, most: c(most * torch.tanh(F.silu(a(x)) * b(x) / most)),
    lambda x, a, b, c, most: c(torch.where(a(x) > most, a(x).sqrt(), F.silu(a(x))) * b(x)),
    lambda x, a, b, c, most: c(F.silu(a(x)) * clamped(b(x), most if x.shape[1] == 1 else 1e9)),
    lambda x, a, b, c, most: c(F.silu(a(x)) * clamped(b(x), most if x.shape[1] > 4 else 1e9))])
def test_a_clamp_far_from_zero_keeps_an_mlp_as_it_is(limit, how):
    assert roles(AlmostGated(lambda *given: how(*given, limit)), ON) is None


def test_an_mlp_with_a_parameter_beside_its_matrices_is_kept():
    part = AlmostGated(lambda x, a, b, c: c(F.silu(a(x)) * b(x)) * part.scale)
    part.scale = nn.Parameter(torch.ones(()))  # until new weights come
    assert roles(part, ON) is None


def test_only_layers_without_a_limit_are_taken_over():
    """As Step-3.7-Flash has them: a limit for each layer."""
    step = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = transformers.Step3p7TextConfig(**GQA, swiglu_limits_shared=[None, 7, 16.0])
    assert [roles(step.Step3p7MLP(config, layer), ON) is None for layer in range(3)] == [
        False, True, True]
