"""A wrapping's config.json, and the text network in it."""

import json
from itertools import product

import pytest
import torch
from published import SIZES
from ropes_by_hand import frequencies
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.wrappings import WRAPPINGS, stored_names

OUTER = {  # the model_type of each wrapping
    "Gemma3": "gemma3", "Idefics3": "idefics3", "InternVL": "internvl", "Llava": "llava",
    "LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision", "Mistral3": "mistral3",
    "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "SmolVLM": "smolvlm"}
ENDING = "ForConditionalGeneration"


def read(tmp_path, names=(), overrides=None, **entries) -> ModelConfig:
    """From a folder with this config.json, and tensors of these names."""
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    if names:
        save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    return ModelConfig.from_folder(tmp_path, overrides)


def test_there_is_a_case_for_every_wrapping():
    assert [f"{name}{ENDING}" for name in OUTER] == [*WRAPPINGS]


@pytest.mark.parametrize("kind, sizes, theta", [
    ("llama", (32000, 4096, 11008, 32, 32, 32, 2048, 1e-6), 1e4),
    ("mistral", (32000, 4096, 14336, 32, 32, 8, 131072, 1e-6), 1e4),
    ("qwen2", (151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), 1e4),
    ("qwen3", (151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), 1e4),
    ("qwen2_vl_text", (152064, 8192, 29568, 80, 64, 8, 32768, 1e-5), 1e6),
    ("qwen2_5_vl_text", (152064, 8192, 29568, 80, 64, 8, 32768, 1e-5), 1e6),
    ("qwen3_vl_text", (151936, 4096, 22016, 32, 32, 32, 128000, 1e-6), 5e5),
    ("gemma3_text", (262208, 2304, 9216, 26, 8, 4, 131072, 1e-6), 1e6)])
def test_what_a_text_config_leaves_out_is_its_classs_default(tmp_path, kind, sizes, theta):
    """Gemma 3 4B names no heads, LLaVA 1.5 no sizes at all; a null is like nothing."""
    for architecture in WRAPPINGS:
        for nulls in ({}, dict(rms_norm_eps=None, rope_theta=None, hidden_size=None)):
            ours = read(tmp_path, architectures=[architecture], tie_word_embeddings=False,
                        text_config=dict(model_type=kind, **nulls))
            assert tuple(getattr(ours, name) for name in SIZES) == sizes
            assert ours.rope.frequencies == pytest.approx(
                frequencies(ours.head_dim, dict(rope_theta=theta)), rel=2e-6)
            assert ours.has_towers and ours.has_lm_head and not ours.pools
            assert ours.architecture == architecture and not ours.tie_word_embeddings


@pytest.mark.parametrize("name", OUTER)
def test_a_text_config_without_a_model_type_is_of_the_wrappings_own(name):
    theirs = CONFIG_MAPPING[OUTER[name]].from_dict(dict(text_config=dict(hidden_size=64)))
    assert WRAPPINGS[name + ENDING] == theirs.get_text_config(decoder=True).model_type


def test_what_the_text_of_a_wrapping_does_not_know_means_nothing(tmp_path):
    """Qwen3-VL's text has no windows, and was read as if it were a Qwen 3."""
    config = read(tmp_path, architectures=["Qwen3VLForConditionalGeneration"], text_config=dict(
        use_sliding_window=True, sliding_window=8, max_window_layers=0))
    assert config.windows == (None,) * 32
    # transformers makes a Ministral of a Mistral with types of layers, but not within a wrapping.
    config = read(tmp_path, architectures=["LlavaForConditionalGeneration"], text_config=dict(
        model_type="mistral", num_hidden_layers=2, sliding_window=8, layer_types=[
            "full_attention", "sliding_attention"]))
    assert config.windows == (8, 8)


@pytest.mark.parametrize("rope", [
    dict(rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24])),
    dict(rope_scaling=dict(type="default", rope_type="default", mrope_section=[16, 24, 24])),
    dict(rope_parameters=dict(rope_type="mrope", rope_theta=1e6, mrope_section=[16, 24, 24])),
    dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768,
                           mrope_section=[16, 24, 24]))], ids=str)
def test_m_rope_is_rope_where_all_three_positions_are_equal(tmp_path, rope):
    """Qwen2-VL's first files have one level, and say "mrope"."""
    sizes = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, vocab_size=152064,
                 intermediate_size=18944, num_key_value_heads=4, max_position_embeddings=32768)
    for name in ("Qwen2VL", "Qwen2_5_VL"):
        for nested in (True, False):
            text = sizes | json.loads(json.dumps(rope))
            entries = dict(text_config=text) if nested else text
            theirs = CONFIG_MAPPING[OUTER[name]].from_dict(json.loads(json.dumps(entries)))
            ours = read(tmp_path, architectures=[name + ENDING], model_type=OUTER[name],
                        vision_config=dict(depth=32), tie_word_embeddings=False, **entries)
            theirs = theirs.get_text_config(decoder=True)
            recipe = theirs.rope_parameters
            assert recipe["rope_theta"] == 1e6
            assert ours.rope.frequencies == pytest.approx(frequencies(128, recipe), rel=2e-6)
            assert (ours.hidden_size, ours.num_hidden_layers) == (3584, 28)
            assert ours.qkv_bias and not ours.o_bias


def test_a_head_that_is_stored_counts_and_one_that_is_not_is_the_embedding(tmp_path):
    """Files say it outside, inside, or not at all; Mistral Small 3.1 has a head and doesn't say it,
    InternVL has none."""
    embedding = "language_model.model.embed_tokens.weight"
    for architecture, outer, inner in product(WRAPPINGS, (None, False, True), (None, False, True)):
        entries = dict(architectures=[architecture], tie_word_embeddings=outer,
                       text_config=dict(tie_word_embeddings=inner))
        for head in ("lm_head.weight", "language_model.lm_head.weight", "lm_head.qweight"):
            # Where all say that it is the embedding, the loader looks whether it is.
            assert read(tmp_path, [embedding, head], **entries).tie_word_embeddings == (
                True in (outer, inner) and False not in (outer, inner))
        # Both say no, or one and the other nothing: then a tensor is missing, as they say.
        said = [entry for entry in (outer, inner) if entry is not None]
        assert read(tmp_path, [embedding], **entries).tie_word_embeddings == (
            any(said) if said else True)


def test_what_stands_outside_alone_counts(tmp_path):
    config = read(tmp_path, architectures=["Gemma3ForConditionalGeneration"], dtype="bfloat16",
                  eos_token_id=[1, 106], quantization_config=dict(quant_method="gptq"),
                  text_config=dict(dtype="float32", eos_token_id=7))
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.quantization == dict(quant_method="gptq")


def test_a_text_of_another_kind_is_not_ours(tmp_path):
    entries = dict(architectures=["Mistral3ForConditionalGeneration"],
                   text_config=dict(model_type="ministral3"))
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert not ModelConfig.is_known(tmp_path)
    with pytest.raises(ValueError, match="Mistral3ForConditionalGeneration"):
        ModelConfig.from_folder(tmp_path)


def test_names_are_read_from_headers_and_indexes(tmp_path):
    assert stored_names(tmp_path) == []
    save_file({"b": torch.zeros(1), "a": torch.zeros(2)}, tmp_path / "model.safetensors",
              {"format": "pt"})
    assert sorted(stored_names(tmp_path)) == ["a", "b"]
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)  # the loader says what is wrong
    assert stored_names(tmp_path) == []
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"c": "x", "d": "x"}}')
    assert stored_names(tmp_path) == ["c", "d"]


def test_an_infinity_as_transformers_5_writes_it(tmp_path):
    """And as Python's own json does: {"__float__": "Infinity"}, Infinity."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlavaForConditionalGeneration"], "text_config": {"limits": '
        '[0.0, {"__float__": "Infinity"}], "more": Infinity, "hidden_size": 64}}')
    assert ModelConfig.from_folder(tmp_path).hidden_size == 64
    (tmp_path / "config.json").write_text('{"limit": {"__float__": "many"}}')
    with pytest.raises(ValueError, match="is not valid JSON: could not convert"):
        ModelConfig.from_folder(tmp_path)
