"""Checkpoints that can't be run are refused for the true reason, which names the entry."""

import json

import pytest
from config_files import LLAMA, QWEN3, read
from published import PUBLISHED, assert_reads
from ropes_by_hand import frequencies

from nanoserve.model_config import FAMILIES
from nanoserve_extras.base.config_files import ModelConfig, read_config, read_json
from nanoserve_extras.base.wrappings import flatten


def test_mlx_checkpoints_are_refused_as_that():
    """MLX says `quantization`; such a checkpoint was refused for a tensor that was left over."""
    with pytest.raises(ValueError, match="quantization=.*bits.*MLX"):
        ModelConfig.from_dict(QWEN3 | dict(quantization=dict(group_size=64, bits=4)))
    assert ModelConfig.from_dict(QWEN3 | dict(quantization=None)).quantization is None


def test_how_weights_are_stored_is_kept_as_it_stands():
    """What it means is quantization/formats.py's business."""
    entry = dict(quant_method="of the future", bits=1)
    assert ModelConfig.from_dict(QWEN3 | dict(quantization_config=entry)).quantization == entry
    for plain in ({}, dict(bits=4), dict(quant_method=None, modules_to_not_convert=["lm_head"])):
        found = ModelConfig.from_dict(QWEN3 | dict(quantization_config=plain))
        assert found.quantization is None
    with pytest.raises(ValueError, match="quantization_config=\\['gptq'\\]"):
        ModelConfig.from_dict(QWEN3 | dict(quantization_config=["gptq"]))


@pytest.mark.parametrize("names", [None, [], [None], {}, 3])
def test_a_config_without_architectures_is_told_which_entry_is_missing(names):
    """It was refused by its model_type, as if that were the name of an architecture."""
    with pytest.raises(ValueError, match="architectures=.*'qwen3'.*overrides"):
        ModelConfig.from_dict(QWEN3 | dict(architectures=names, model_type="qwen3"))
    without = {name: value for name, value in QWEN3.items() if name != "architectures"}
    with pytest.raises(ValueError, match="architectures=None.*None"):
        ModelConfig.from_dict(without)


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size", "head_dim",
                                  "num_attention_heads", "num_key_value_heads", "num_experts",
                                  "intermediate_size", "moe_intermediate_size", "n_layer",
                                  "depth", "n_embd", "encoder_layers"])
@pytest.mark.parametrize("size", [10 ** 9, -1, 10 ** 30])
@pytest.mark.parametrize("place", [None, "text_config", "vision_config"])
def test_a_size_that_the_files_can_not_hold_is_named_before_anything_is_built(
        tmp_path, name, size, place):
    """A billion layers never ended; a billion of others were an allocator's error. Whoever's
    network it is: this is read before transformers makes a list with an entry for each layer."""
    entries = QWEN3 | {name: size} if place is None else {
        place: dict(hidden_size=64) | {name: size}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match=f"[= ]{size}[, ]"):
        read_config(tmp_path)


@pytest.mark.parametrize("layers, width, vocab, heads", [  # published, with the bytes of 4 bits
    (126, 16384, 128256, 128), (61, 7168, 163840, 64), (18, 2048, 257216, 8), 
    (94, 4096, 151936, 64)])
def test_published_sizes_are_not_too_large(tmp_path, layers, width, vocab, heads):
    entries = dict(num_hidden_layers=layers, hidden_size=width, vocab_size=vocab, num_experts=384,
                   num_attention_heads=heads, intermediate_size=53248, sliding_window=2 ** 31,
                   q_lora_dim=None, num_shared_heads=0, image_size=[448, 448], vision_layer=-2,
                   attn_config=dict(sliding_window_size=-1), vision_config=dict(image_size=-0))
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_config(tmp_path) == entries


@pytest.mark.parametrize("entry", [
    dict(quant_method="gptq", bits=4, group_size=-1, damp_percent=0.01, desc_act=True),
    dict(quant_method="awq", bits=4, group_size=0, q_group_size=-1, zero_point=True),
    dict(quant_method="compressed-tensors", group_size=None, block_size=[128, 128])], ids=str)
@pytest.mark.parametrize("name", ["quantization_config", "quantization", "compression_config"])
def test_numbers_of_a_quantisation_are_no_sizes_of_a_network(tmp_path, entry, name):
    """GPTQ's -1, one group a column, was refused as a size below 0."""
    (tmp_path / "config.json").write_text(json.dumps(entries := QWEN3 | {name: entry}))
    assert read_config(tmp_path) == entries


@pytest.mark.parametrize("window", [-1, -4096])
def test_a_window_below_zero_is_refused_whoever_computes_it(tmp_path, window):
    entries = dict(text_config=dict(sliding_window=window))
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=f"sliding_window={window}"):
        read_config(tmp_path)


@pytest.mark.parametrize("depth, is_read", [
    (60, True), (70, False), (900, False), (10 ** 6, False)])
def test_brackets_in_brackets_have_a_bound(tmp_path, depth, is_read):
    """Python's reader gave up with a RecursionError, and below that whoever copied the entry."""
    (tmp_path / "config.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
    if is_read:
        assert read_json(tmp_path / "config.json")
    else:
        with pytest.raises(ValueError, match="is nested more than 64|not valid JSON"):
            read_json(tmp_path / "config.json")


@pytest.mark.parametrize("eos", [-1, [2, -5], 1.0, True, "2", [[2]]])
def test_an_eos_that_is_no_token_is_refused(eos):
    """A server failed at its start: no tokenizer has a text for -1."""
    for entries in ((QWEN3 | dict(eos_token_id=eos), {}), (QWEN3, dict(eos_token_id=eos))):
        with pytest.raises(ValueError, match="eos_token_id="):
            ModelConfig.from_dict(*entries)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_as_their_authors_meant_them(name):
    file, wanted = PUBLISHED[name]
    flat = flatten(file["architectures"][0], file, {}, ["lm_head.weight"] * (
        not wanted.get("tie_word_embeddings")))
    config = ModelConfig.from_dict(flat)
    assert_reads(config, file, wanted)
    assert config.quantization is None and config.architecture == file["architectures"][0]


@pytest.mark.parametrize("family", [name.removesuffix("ForCausalLM") for name in FAMILIES])
def test_a_null_is_like_nothing_but_where_it_means_off(family):
    nulls = dict.fromkeys(("head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
                           "mlp_only_layers", "rope_scaling", "hidden_activation"))
    config = read(family, ModelConfig, **nulls)
    assert config == read(family, ModelConfig)
    theta = 1e6 if family in ("Gemma3", "Mixtral") else 1e4
    assert config.rope.frequencies == pytest.approx(
        frequencies(config.head_dim, dict(rope_theta=theta)), rel=2e-6)
    assert read(family, ModelConfig, sliding_window=None).windows == (None,) * 30


@pytest.mark.parametrize("family, entries, words", [
    ("Qwen3Moe", dict(num_experts=0), "num_experts .*got 0"),
    ("Qwen3Moe", dict(decoder_sparse_step=0), "decoder_sparse_step .*got 0"),
    ("Gemma2", dict(attn_logit_softcapping="50"), "attn_logit_softcapping.*'50'"),
    ("Gemma2", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar .*got 0"),
    ("Gemma2", dict(attn_logit_softcapping=-1.0), "attn_logit_softcapping .*got -1.0"),
    ("Mistral", dict(sliding_window=0), "sliding_window .*got 0"),
    ("Qwen3", dict(max_window_layers="3"), "max_window_layers.*got '3'"),
    ("Qwen3", dict(rms_norm_eps=-1), "rms_norm_eps.*got -1"),
    ("Qwen3", dict(hidden_size=None), "hidden_size.*got None"),
    ("Qwen3", dict(vocab_size="many"), "vocab_size.*got 'many'")], ids=str)
def test_a_number_that_no_network_has_is_refused_by_name(family, entries, words):
    with pytest.raises(ValueError, match=words):
        read(family, ModelConfig, **entries)


@pytest.mark.parametrize("config", [dict(torch_dtype="float16"), dict(dtype="bfloat16"), {},
                                    dict(dtype="torch.bfloat16", torch_dtype="float32")], ids=str)
def test_an_override_of_the_dtype_wins_in_both_spellings(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    for name in ("dtype", "torch_dtype"):
        assert ModelConfig.from_folder(tmp_path, {name: "float64"}).dtype == "float64"
