"""RoPE in files and overrides of different spellings, and numbers that no recipe can have.

The oracle is the formulas of ropes_by_hand.
"""

import json
import math

import pytest
from config_files import EMPTY, LLAMA, LLAMA3, QWEN3, read
from ropes_by_hand import frequencies, sharpness

from nanoserve.model_config import Rope
from nanoserve_extras.base.config_files import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def assert_follows(rope: Rope, recipe: dict, head_dim: int = 16) -> None:
    assert rope.frequencies == pytest.approx(frequencies(head_dim, recipe), rel=2e-6)
    assert rope.scale == pytest.approx(sharpness(recipe), rel=1e-12)


def new(**recipe) -> dict:
    return dict(rope_parameters=recipe)


def old(theta: float, **scaling) -> dict:
    return dict(rope_theta=theta, rope_scaling=scaling or None)


LONG, LINEAR = dict(rope_type="llama3", **LLAMA3), dict(rope_type="linear", factor=8.0)
YARN = dict(rope_type="yarn", factor=4.0)


@pytest.mark.parametrize("file, overrides, recipe", [
    (new(rope_type="default", rope_theta=1e4), dict(rope_theta=5e5), dict(rope_theta=5e5)),
    (new(rope_type="default", rope_theta=1e4), dict(rope_scaling=LONG), LONG),
    (new(rope_type="default", rope_theta=1e4), new(rope_theta=9.0), dict(rope_theta=9.0)),
    (new(**LONG, rope_theta=1e4), dict(rope_scaling=None), {}),
    # transformers 5 writes `rope_parameters`; before it were `rope_theta` and `rope_scaling`.
    (dict(rope_theta=5e5), {}, dict(rope_theta=5e5)), (old(5e5), {}, dict(rope_theta=5e5)),
    (new(**LONG, rope_theta=5e5), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5, **LONG), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5, type="llama3", **LLAMA3), {}, LONG | dict(rope_theta=5e5)),
    (old(5e5, **LONG), new(**LINEAR), LINEAR | dict(rope_theta=5e5)),
    (old(5e5, **LONG), dict(rope_scaling=LINEAR), LINEAR | dict(rope_theta=5e5)),
    # Another kind of scaling: theta stays, and nothing else of the file's leaks into the new one.
    # Left out, the length in training is max_position_embeddings (256), and not the file's 64.
    (new(**LONG, rope_theta=5e5), dict(rope_scaling=YARN),
     YARN | dict(rope_theta=5e5, original_max_position_embeddings=256)),
    (new(**LONG, rope_theta=5e5), dict(rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=32)),
     YARN | dict(rope_theta=5e5, original_max_position_embeddings=32)),
    (new(**LONG, rope_theta=5e5), dict(rope_scaling=dict(rope_type="linear")), "linear.*factor"),
    (new(rope_theta=5e5, partial_rotary_factor=0.5), dict(rope_scaling=YARN),
     "partial_rotary_factor.*0.5")], ids=str)
def test_an_override_wins_over_the_file_in_either_spelling(tmp_path, file, overrides, recipe):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | file))
    if isinstance(recipe, dict):
        assert_follows(ModelConfig.from_folder(tmp_path, overrides).rope, recipe)
    else:
        with pytest.raises(ValueError, match=recipe):
            ModelConfig.from_folder(tmp_path, overrides)


@pytest.mark.parametrize("entries", [
    new(**{FULL: dict(rope_type="default", rope_theta=1e6),
           SLIDING: dict(rope_type="default", rope_theta=1e4)}),
    dict(rope_theta=1e6, rope_local_base_freq=1e4)], ids=["new", "old"])
@pytest.mark.parametrize("overrides, full, sliding", [
    ({}, {}, {}), (dict(rope_theta=7e5), dict(rope_theta=7e5), {}),
    (dict(rope_local_base_freq=3e4), {}, dict(rope_theta=3e4)),
    (dict(rope_scaling=LINEAR), LINEAR, {})], ids=str)
def test_old_overrides_of_gemma_3s_two_ropes(tmp_path, entries, overrides, full, sliding):
    (tmp_path / "config.json").write_text(json.dumps(
        dict(architectures=["Gemma3ForCausalLM"]) | EMPTY | entries))
    config = ModelConfig.from_folder(tmp_path, overrides)
    assert_follows(config.rope, dict(rope_theta=1e6) | full, 256)
    assert_follows(config.rope_local, dict(rope_theta=1e4) | sliding, 256)


def test_yarn_as_model_cards_give_it_stretches_the_longest_sequence():
    """Qwen 2.5's card adds a factor and leaves max_position_embeddings alone; vLLM reads it so."""
    qwen = QWEN3 | dict(max_position_embeddings=32768)
    yarn = dict(type="yarn", factor=4.0)
    named = yarn | dict(original_max_position_embeddings=32768)
    beside = dict(original_max_position_embeddings=16384)
    for entries, longest in ((dict(rope_scaling=named), 131072), (dict(rope_scaling=yarn), 32768),
                             (dict(rope_scaling=yarn) | beside, 65536),
                             (dict(rope_scaling=named, max_position_embeddings=262144), 262144)):
        assert ModelConfig.from_dict(qwen | entries).max_position_embeddings == longest


@pytest.mark.parametrize("entries, words", [
    (dict(rope_scaling=dict(rope_type=["yarn"])), "\\['yarn'\\]"),
    (dict(rope_parameters=dict(full_attention=3)), "rope_parameters="),
    (dict(rope_parameters={FULL: dict(rope_theta=1e4)}), "rope_parameters="),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor.*0.5"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
     "partial_rotary_factor.*0.5"),
    (dict(rope_scaling=dict(type="linear")), "linear.*factor"),
    (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "'longrope'"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "'dynamic'.*llama3"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0)),
     "llama3.*high_freq_factor"),
    (dict(rope_scaling="llama3"), "rope_scaling='llama3'"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta="x")), "rope_theta .*got 'x'"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=0)), "factor.*got 0"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, beta_fast=math.inf)), "beta_fast.*got inf"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, truncate="false")), "truncate"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, mscale="1", mscale_all_dim=1)), "can't"),
    (dict(rope_scaling=dict(rope_type="llama3", **LLAMA3 | dict(low_freq_factor=4.0))),
     "low_freq_factor=4.0.*high_freq_factor=4.0"),
    (dict(rope_theta=1), "rope_theta.*got 1"),
    (dict(rope_theta=True), "rope_theta.*got True"),
], ids=str)
def test_a_recipe_that_is_not_followed_is_refused_by_name(entries, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(QWEN3 | entries)


@pytest.mark.parametrize("recipes, words", [
    ({FULL: dict(rope_type="dynamic", factor=2.0)}, "'dynamic'"),
    (dict(rope_type="linear", factor=2.0), "rope_parameters=.*full_attention"),
    ({SLIDING: dict(rope_type="longrope")}, "'longrope'"),
    ({SLIDING: 3}, "rope_parameters=.*3")], ids=str)
def test_gemma_3s_recipes_are_refused_by_kind(recipes, words):
    with pytest.raises(ValueError, match=words):
        read("Gemma3", ModelConfig, rope_parameters=recipes)
