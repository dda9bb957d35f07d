"""What a config.json says about RoPE, in the spellings of transformers 4 and 5; without torch."""

import json
import math

import pytest
from config_files import EMPTY, LLAMA, LLAMA3, QWEN3

from nanoserve.checkpoint.model_config import ModelConfig, RopeConfig

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("old, new", [
    (dict(rope_theta=5e5), dict(rope_type="default", rope_theta=5e5)),
    (dict(rope_theta=5e5, rope_scaling=None), dict(rope_theta=5e5)),
    (dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
     dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
    (dict(rope_theta=5e5, rope_scaling=dict(type="llama3", **LLAMA3)),
     dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
], ids=["theta", "null", "llama3", "llama3 by type"])
def test_both_spellings_of_rope_mean_the_same(old, new):
    """transformers 5 writes `rope_parameters`; before it were `rope_theta` and `rope_scaling`."""
    first = ModelConfig.from_dict(LLAMA | old)
    assert first == ModelConfig.from_dict(LLAMA | dict(rope_parameters=new))
    assert first.rope.theta == 5e5
    if "llama3" in str(old):
        assert first.rope == RopeConfig(5e5, "llama3", **LLAMA3)


def test_an_override_in_the_old_spelling_wins_over_a_file_in_the_new_one(tmp_path):
    new = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | new))
    read = ModelConfig.from_folder
    assert read(tmp_path, dict(rope_theta=5e5)).rope == RopeConfig(5e5)
    scaled = read(tmp_path, dict(rope_scaling=dict(rope_type="llama3", **LLAMA3)))
    assert scaled.rope == RopeConfig(1e4, "llama3", **LLAMA3)
    assert read(tmp_path, dict(rope_parameters=dict(rope_theta=9.0))).rope == RopeConfig(9.0)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(
        dtype="float32", rope_parameters=dict(rope_type="llama3", rope_theta=1e4, **LLAMA3))))
    assert read(tmp_path, dict(rope_scaling=None)).rope.rope_type == "default"
    assert read(tmp_path, dict(torch_dtype="bfloat16")).dtype == "bfloat16"


def test_a_scaling_by_override_replaces_the_files_and_keeps_its_theta(tmp_path):
    """What the file says about another kind of scaling must not leak into the new one."""
    llama3 = dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(rope_parameters=llama3)))

    def scaled(**scaling) -> RopeConfig:
        return ModelConfig.from_folder(tmp_path, dict(rope_scaling=scaling)).rope

    yarn = scaled(type="yarn", factor=4.0, original_max_position_embeddings=32)
    assert (yarn.theta, yarn.rope_type, yarn.factor) == (5e5, "yarn", 4.0)
    assert yarn.original_max_position_embeddings == 32
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    # Left out, it is max_position_embeddings (256), and not the 64 of the file's other scaling.
    assert scaled(rope_type="yarn", factor=4.0).original_max_position_embeddings == 256
    with pytest.raises(ValueError, match="linear RoPE scaling lacks factor"):
        scaled(rope_type="linear")
    (tmp_path / "config.json").write_text(json.dumps(
        LLAMA | dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=0.5))))
    with pytest.raises(ValueError, match="partial_rotary_factor=0.5"):  # still refused
        scaled(type="yarn", factor=4.0)


@pytest.mark.parametrize("entries", [
    dict(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                              sliding_attention=dict(rope_type="default", rope_theta=1e4))),
    dict(rope_theta=1e6, rope_local_base_freq=1e4)], ids=["new", "old"])
def test_old_overrides_of_gemma_3s_two_ropes(tmp_path, entries):
    (tmp_path / "config.json").write_text(json.dumps(
        dict(architectures=["Gemma3ForCausalLM"]) | EMPTY | entries))

    def ropes(**overrides) -> tuple[RopeConfig, RopeConfig]:
        config = ModelConfig.from_folder(tmp_path, overrides)
        return config.rope, config.rope_local

    assert ropes() == (RopeConfig(1e6), RopeConfig(1e4))
    assert ropes(rope_theta=7e5) == (RopeConfig(7e5), RopeConfig(1e4))
    assert ropes(rope_local_base_freq=3e4) == (RopeConfig(1e6), RopeConfig(3e4))
    linear = dict(rope_type="linear", factor=8.0)
    assert ropes(rope_scaling=linear) == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))


def test_yarn_as_model_cards_give_it_stretches_the_longest_sequence():
    """Qwen 2.5's card adds a factor and leaves max_position_embeddings alone; vLLM reads it so."""
    qwen = QWEN3 | dict(max_position_embeddings=32768)
    yarn = dict(type="yarn", factor=4.0)
    named = yarn | dict(original_max_position_embeddings=32768)
    assert ModelConfig.from_dict(qwen | dict(rope_scaling=named)).max_position_embeddings == 131072
    assert ModelConfig.from_dict(qwen | dict(rope_scaling=yarn)).max_position_embeddings == 32768
    longer = qwen | dict(rope_scaling=named, max_position_embeddings=262144)
    assert ModelConfig.from_dict(longer).max_position_embeddings == 262144
