"""RoPE's frequencies and turns are transformers': its `modeling_rope_utils` is the oracle."""

import pytest
import torch
from config_files import EMPTY, LLAMA, read
from torch.testing import assert_close
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve.checkpoint.model_config import ModelConfig, RopeConfig
from nanoserve.checkpoint.rope_frequencies import rope_frequencies
from nanoserve.layers import RotaryEmbedding


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("theta, factor, low, high, original", [
    (500_000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
    (500_000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2
    (10_000.0, 4.0, 2.0, 3.0, 64),
])
def test_llama3_frequencies_equal_transformers(head_dim, theta, factor, low, high, original):
    scaling = dict(rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=low,
                   high_freq_factor=high, original_max_position_embeddings=original)
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=2 ** 17,
                         rope_parameters=scaling)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    assert attention_factor == 1.0
    rope = ModelConfig.from_dict(LLAMA | dict(rope_parameters=scaling)).rope
    frequencies = rope_frequencies(head_dim, rope)
    assert frequencies.dtype == torch.float32
    assert_close(frequencies, expected, rtol=2e-6, atol=0)
    plain = rope_frequencies(head_dim, RopeConfig(theta=theta))
    assert not torch.equal(frequencies, plain) and frequencies[0] == plain[0]


SCALINGS = {
    "linear": dict(rope_type="linear", factor=8.0),
    "linear, factor 1": dict(rope_type="linear", factor=1.0),
    "yarn": dict(rope_type="yarn", factor=4.0),
    "yarn from 32": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn from 4096": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096),
    "yarn from 131072": dict(rope_type="yarn", factor=2.0,  # every wave makes a turn
                             original_max_position_embeddings=131072),
    "yarn, not truncated": dict(rope_type="yarn", factor=4.0, truncate=False,
                                original_max_position_embeddings=64),
    "yarn, truncated": dict(rope_type="yarn", factor=4.0, truncate=True,
                            original_max_position_embeddings=64),
    "yarn, other turns": dict(rope_type="yarn", factor=4.0, beta_fast=20.0, beta_slow=2.5,
                              original_max_position_embeddings=64),
    "yarn, factor given": dict(rope_type="yarn", factor=4.0, attention_factor=0.75),
    "yarn, factor null": dict(rope_type="yarn", factor=4.0, attention_factor=None),
    "yarn, mscale": dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.6),
    "yarn, half of mscale": dict(rope_type="yarn", factor=40.0, mscale=0.7),
    "yarn, mscale 0": dict(rope_type="yarn", factor=40.0, mscale=0.7, mscale_all_dim=0),
    "yarn, factor 1": dict(rope_type="yarn", factor=1.0),
    "yarn, no width": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4),
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 24, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_and_turns_equal_transformers(scaling, head_dim, theta):
    """The frequencies, and what becomes of them: cos and sin, which yarn scales as well."""
    entries = SCALINGS[scaling] | dict(rope_theta=theta)
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=256,
                         rope_parameters=dict(entries))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[entries["rope_type"]](theirs)
    rope = ModelConfig.from_dict(LLAMA | dict(rope_parameters=entries)).rope
    assert_close(rope_frequencies(head_dim, rope), expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    positions = torch.tensor([0, 1, 31, 255])
    cos, sin = RotaryEmbedding(head_dim, rope, torch.device("cpu"))(positions)
    their_cos, their_sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    assert_close(cos, their_cos[0], rtol=1e-4, atol=1e-4)
    assert_close(sin, their_sin[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "yarn from 32", "yarn, not truncated"])
def test_gemma_3s_two_ropes_equal_transformers(name):
    """transformers looks for `truncate` beside the two objects, and so doesn't find one in them."""
    entries = dict(rope_parameters=dict(
        full_attention=SCALINGS[name] | dict(rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=1e4)))
    config = read("Gemma3", head_dim=32, **entries)
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**EMPTY, head_dim=32, **entries))
    positions = torch.tensor([0, 1, 31, 255])
    for rope, kind in ((config.rope, "full_attention"), (config.rope_local, "sliding_attention")):
        cos, sin = RotaryEmbedding(32, rope, torch.device("cpu"))(positions)
        their_cos, their_sin = theirs(torch.zeros(1), positions[None], kind)
        assert_close(cos, their_cos[0], rtol=1e-4, atol=1e-4)
        assert_close(sin, their_sin[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [2, 24, 128])
def test_default_frequencies_equal_transformers(head_dim):
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=dict(
        rope_type="default", rope_theta=1e6))
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    assert torch.equal(rope_frequencies(head_dim, RopeConfig(theta=1e6)), expected)
