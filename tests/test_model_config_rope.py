"""RoPE as config.json describes it: both spellings, overrides, and the numbers that come out.

The oracles are the papers' formulas in plain Python, and cos and sin of transformers' networks.
"""

import json

import pytest
import torch
from config_files import EMPTY, LLAMA, LLAMA3, QWEN3, read
from ropes_by_hand import frequencies, sharpness
from torch.testing import assert_close
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve.layers import RotaryEmbedding
from nanoserve.model_config import ModelConfig, Rope

FULL, SLIDING = "full_attention", "sliding_attention"
RECIPES = {
    "default": {},
    "llama3": dict(rope_type="llama3", **LLAMA3),
    "llama3, blended soon": dict(rope_type="llama3", factor=4.0, low_freq_factor=2.0,
                                 high_freq_factor=3.0, original_max_position_embeddings=64),
    "linear": dict(rope_type="linear", factor=8.0),
    "yarn": dict(rope_type="yarn", factor=4.0),
    "yarn from 32": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn from 131072": dict(rope_type="yarn", factor=2.0,  # every wave makes a turn
                             original_max_position_embeddings=131072),
    "yarn, not truncated": dict(rope_type="yarn", factor=4.0, truncate=False,
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


def assert_follows(rope: Rope, recipe: dict, head_dim: int = 16) -> None:
    assert rope.frequencies == pytest.approx(frequencies(head_dim, recipe), rel=2e-6)
    assert rope.scale == pytest.approx(sharpness(recipe), rel=1e-12)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [2, 16, 24, 128])
@pytest.mark.parametrize("name", RECIPES)
def test_frequencies_and_turns_are_the_papers_and_transformers(name, head_dim, theta):
    """And cos and sin, which yarn scales. Left out, yarn's length in training is the model's."""
    recipe = RECIPES[name] | dict(rope_theta=theta)
    rope = ModelConfig.from_dict(LLAMA | dict(head_dim=head_dim, rope_parameters=recipe)).rope
    assert_follows(rope, dict(original_max_position_embeddings=256) | recipe, head_dim)
    theirs = LlamaRotaryEmbedding(LlamaConfig(
        head_dim=head_dim, max_position_embeddings=256, rope_parameters=dict(recipe)))
    assert torch.equal(torch.tensor(rope.frequencies), theirs.inv_freq)
    positions = torch.tensor([0, 1, 31, 255])
    for mine, their in zip(RotaryEmbedding(rope, torch.device("cpu"))(positions),
                           theirs(torch.zeros(1), positions[None]), strict=True):
        assert_close(mine, their[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "yarn from 32", "yarn, not truncated"])
def test_gemma_3s_two_ropes_equal_transformers(name):
    """transformers looks for `truncate` beside the two objects, and so doesn't find one in them."""
    entries = dict(rope_parameters={FULL: RECIPES[name] | dict(rope_theta=1e6),
                                    SLIDING: dict(rope_type="default", rope_theta=1e4)})
    config = read("Gemma3", head_dim=32, **entries)
    assert_follows(config.rope, entries["rope_parameters"][FULL] | dict(truncate=True), 32)
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**EMPTY, head_dim=32, **entries))
    positions = torch.tensor([0, 1, 31, 255])
    for rope, kind in ((config.rope, FULL), (config.rope_local, SLIDING)):
        cos, sin = RotaryEmbedding(rope, torch.device("cpu"))(positions)
        their_cos, their_sin = theirs(torch.zeros(1), positions[None], kind)
        assert_close(cos, their_cos[0], rtol=1e-4, atol=1e-4)
        assert_close(sin, their_sin[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, theta", [(FULL, 1e6), (SLIDING, 1e4)])
def test_a_gemma_3_whose_layers_are_all_of_one_kind(kind, theta):
    """transformers completes the recipes of those kinds alone that some layer is of."""
    other = {FULL: SLIDING, SLIDING: FULL}[kind]
    config = read("Gemma3", layer_types=[kind] * 30, rope_parameters={
        kind: dict(rope_theta=theta), other: dict(rope_theta=5e4)})
    assert_follows(config.rope if kind == FULL else config.rope_local, dict(rope_theta=theta), 256)


def test_the_oldest_name_of_a_recipe_and_a_class_without_a_head_dim():
    """Gemma 3's class passes over `type`; Mixtral's says no head_dim, which yarn looks for."""
    config = read("Gemma3", rope_scaling=dict(type="linear", factor=8.0))
    assert_follows(config.rope, dict(rope_type="linear", rope_theta=1e6, factor=8.0), 256)
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    for family, theta in (("Mixtral", 1e6), ("Qwen3Moe", 1e4), ("Qwen2", 1e4)):
        assert_follows(read(family, rope_scaling=yarn).rope, yarn | dict(rope_theta=theta), 8)


def new(**recipe) -> dict:
    return dict(rope_parameters=recipe)


def old(theta: float, **scaling) -> dict:
    return dict(rope_theta=theta, rope_scaling=scaling or None)


LONG, LINEAR = dict(rope_type="llama3", **LLAMA3), dict(rope_type="linear", factor=8.0)
BY_KIND = {FULL: dict(rope_type="default", rope_theta=1e6),
           SLIDING: dict(rope_type="default", rope_theta=1e4)}


@pytest.mark.parametrize("file, overrides, recipe", [
    # transformers 5 writes `rope_parameters`; before it were `rope_theta` and `rope_scaling`.
    (dict(rope_theta=5e5), {}, dict(rope_theta=5e5)), (old(5e5), {}, dict(rope_theta=5e5)),
    (new(**LONG, rope_theta=5e5), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5, **LONG), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5, type="llama3", **LLAMA3), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5), dict(rope_scaling=LINEAR), LINEAR | dict(rope_theta=5e5)),
    (old(5e5, **LONG), dict(rope_theta=1e6), LONG | dict(rope_theta=1e6)),
    (new(**LONG, rope_theta=5e5), new(**LINEAR), LINEAR),
    # An override in the other spelling would change nothing.
    (new(rope_theta=1e4), dict(rope_theta=5e5), "rope_theta=500000.0.*says rope_parameters"),
    (new(rope_theta=1e4), dict(rope_scaling=LONG), "rope_scaling=.*says rope_parameters"),
    (new(**LONG), dict(rope_scaling=None), "rope_scaling=None.*says rope_parameters"),
    (old(5e5, **LONG), new(**LINEAR), "rope_parameters=.*says rope_scaling")], ids=str)
def test_both_spellings_and_overrides_of_the_same(tmp_path, file, overrides, recipe):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | file))
    if isinstance(recipe, dict):
        assert_follows(ModelConfig.from_folder(tmp_path, overrides).rope, recipe)
    else:
        with pytest.raises(ValueError, match=recipe):
            ModelConfig.from_folder(tmp_path, overrides)


@pytest.mark.parametrize("entries", [
    dict(rope_parameters=BY_KIND), dict(rope_theta=1e6, rope_local_base_freq=1e4)],
    ids=["new", "old"])
def test_both_spellings_of_gemma_3s_two_ropes(entries):
    config = read("Gemma3", **entries)
    assert_follows(config.rope, dict(rope_theta=1e6), 256)
    assert_follows(config.rope_local, dict(rope_theta=1e4), 256)


@pytest.mark.parametrize("inner", [{}, dict(original_max_position_embeddings=32)], ids=str)
@pytest.mark.parametrize("scaling", [
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)], ids=str)
def test_the_length_in_training_beside_the_ropes_object_counts_more(tmp_path, scaling, inner):
    recipe = scaling | inner | dict(rope_theta=1e4)
    for beside in (16, 64):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(
            model_type="llama", original_max_position_embeddings=beside, rope_parameters=recipe)))
        rope = ModelConfig.from_folder(tmp_path).rope
        assert_follows(rope, recipe | dict(original_max_position_embeddings=beside))
        theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
        assert torch.equal(torch.tensor(rope.frequencies), theirs.inv_freq)
    full = recipe | dict(original_max_position_embeddings=32)  # one object for each kind: not read
    gemma = read("Gemma3", original_max_position_embeddings=16, rope_parameters={
        FULL: full, SLIDING: dict(rope_type="default", rope_theta=1e4)})
    assert_follows(gemma.rope, full, 256)


@pytest.mark.parametrize("entries, words", [
    (dict(rope_scaling=dict(rope_type=["yarn"])), "\\['yarn'\\]"),
    (dict(rope_parameters=dict(full_attention=3)), "can't read it"),
    (new(**BY_KIND), "rope_parameters="),
    (dict(rope_parameters={FULL: dict(rope_theta=1e4)}), "rope_parameters="),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (new(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor': 0.5"),
    (dict(rope_scaling=dict(type="linear")), "linear.*factor"),
    (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "'longrope'"),
    (dict(rope_theta=1), "rope_theta.*got 1"), (dict(rope_theta=0), "rope_theta.*got 0"),
    (new(rope_type="dynamic", factor=2.0), "'dynamic'.*llama3"),
    (new(rope_type="of the future", factor=2.0), "'of the future'.*llama3"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0)),
     "llama3.*high_freq_factor"),
    (dict(rope_scaling="llama3"), "llama3"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, mscale="1", mscale_all_dim=1)), "can't"),
], ids=str)
def test_a_recipe_that_is_not_followed_is_refused_by_name(entries, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(QWEN3 | entries)


@pytest.mark.parametrize("recipes, words", [
    ({FULL: dict(rope_type="dynamic", factor=2.0)}, "'dynamic'"),
    (dict(rope_type="linear", factor=2.0), "rope_parameters=.*full_attention"),
    (dict(rope_theta=2e4), "rope_parameters=.*full_attention"),
    ({SLIDING: dict(rope_type="longrope")}, "'longrope'"),
    ({SLIDING: 3}, "can't read it")], ids=str)
def test_gemma_3s_recipes_are_refused_by_kind(recipes, words):
    with pytest.raises(ValueError, match=words):
        read("Gemma3", rope_parameters=recipes)
