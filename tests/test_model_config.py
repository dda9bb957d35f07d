"""What a config.json says, and what is refused by name.

A feature that is silently left out gives fluent wrong text. What each family's files say, and leave
out, is in test_model_config_families.
"""

import json

import pytest
from config_files import LLAMA, QWEN3, read, small_llama

from nanoserve.model_config import ModelConfig


@pytest.mark.parametrize("activations", [
    dict(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu")], ids=str)
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_gemmas_second_name_of_its_activation_is_the_true_one(family, activations):
    """The first files said "gelu", and meant its approximation by a tanh."""
    assert read(family, **activations).activation == "gelu_tanh"
    with pytest.raises(ValueError, match="hidden_activation='gelu'"):
        read(family, hidden_activation="gelu")


def test_the_window_of_a_model_is_its_widest_or_none():
    assert read("Mistral", sliding_window=7).window == 7
    assert read("Mistral", sliding_window=None).window is None
    assert read("Gemma2", sliding_window=7).window is None
    assert read("Gemma2", layer_types=["sliding_attention"] * 30, sliding_window=7).window == 7


def test_experts_by_either_name():
    for name in ("num_experts", "num_local_experts"):
        assert read("Qwen3Moe", **{name: 12}).num_experts == 12
        assert read("Mixtral", **{name: 12}).num_experts == 12


@pytest.mark.parametrize("family, entries, words", [
    ("Mixtral", dict(num_local_experts=2, num_experts_per_tok=3),
     "num_experts_per_tok=3 but num_experts=2"),
    ("Qwen3Moe", dict(num_experts=0), "num_experts must be .*0"),
    ("Qwen3Moe", dict(decoder_sparse_step=0), "Qwen3MoeConfig can't read it"),
    ("Gemma2", dict(attn_logit_softcapping="50"), "attn_logit_softcapping.*'50'"),
    ("Gemma2", dict(hidden_activation="relu"), "hidden_activation='relu'.*gelu_pytorch_tanh"),
    ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("Mistral", dict(sliding_window=0), "sliding_window .*got 0"),
], ids=str)
def test_what_a_family_can_not_have_is_refused_by_name(family, entries, words):
    with pytest.raises(ValueError, match=words):
        read(family, **entries)


@pytest.mark.parametrize("config, dtype", [
    ({}, "float32"), (dict(torch_dtype="float16"), "float16"), (dict(dtype="bfloat16"), "bfloat16"),
    (dict(dtype="torch.bfloat16", torch_dtype="float32"), "bfloat16"),
    (dict(torch_dtype=None), "float32"), (dict(dtype=None, torch_dtype="float16"), "float16")])
def test_both_spellings_of_the_dtype(tmp_path, config, dtype):
    """An override wins over the file, or is refused where the file has the other spelling."""
    assert ModelConfig.from_dict(LLAMA | config).dtype == dtype
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    assert ModelConfig.from_folder(tmp_path, dict(dtype="float64")).dtype == "float64"
    if config.get("dtype") is None:
        assert ModelConfig.from_folder(tmp_path, dict(torch_dtype="float64")).dtype == "float64"
    else:
        with pytest.raises(ValueError, match="torch_dtype='float64'.*says dtype"):
            ModelConfig.from_folder(tmp_path, dict(torch_dtype="float64"))


@pytest.mark.parametrize("config, generation, expected", [
    (dict(eos_token_id=7), None, (7,)),
    (dict(eos_token_id=7), dict(eos_token_id=[3, 5]), (3, 5, 7)),
    (dict(eos_token_id=[7, 8]), dict(temperature=0.5), (7, 8)),
    (dict(eos_token_id=7), dict(eos_token_id=0), (0, 7)),  # 0 is an id like any other
    (dict(eos_token_id=[7, 3]), dict(eos_token_id=3), (3, 7)), ({}, {}, ()),
    (dict(eos_token_id=None), dict(eos_token_id=None), ()),
])
def test_all_eos_ids_of_both_files_end_a_text(config, generation, expected):
    assert ModelConfig.from_dict(LLAMA | config, generation).eos_token_ids == expected


@pytest.mark.parametrize("config, words", [
    (dict(hidden_act="gelu"), "hidden_act='gelu'.*silu"),
    (dict(use_sliding_window=True, layer_types=["full_attention"]), "layer_types"),
    (dict(use_sliding_window=True, layer_types=["full_attention", "chunked_attention"]),
     "layer_types=.*full_attention or sliding_attention"),
    (dict(layer_types=3), "layer_types.* 3 "),
    (dict(is_causal=False), "is_causal=False"),
    (dict(hidden_act=["silu"]), "hidden_act.*silu"),
    (dict(max_window_layers="3"), "max_window_layers.*'3'"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings.*'yes'"),
    (dict(use_bidirectional_attention="false"), "use_bidirectional_attention='false'"),
    (dict(per_layer_config={"0": dict(num_key_value_heads=1)}), "per_layer_config="),
    (dict(rms_norm_eps=-1), "rms_norm_eps.*-1"),
    (dict(architectures="BertModel"), "BertModel"),
    (dict(num_key_value_heads=3), "num_attention_heads=4.*num_key_value_heads=3"),
    (dict(head_dim=15), "head_dim.*15"),
    (dict(quantization_config=dict(quant_method="gptq")), "quantization_config.*gptq"),
    (dict(quantization=dict(bits=4)), "quantization=.*bits"),
    (dict(hidden_size=None), "hidden_size is missing"),
    (dict(vocab_size="many"), "vocab_size.*many"),
], ids=str)
def test_what_is_not_implemented_is_refused_by_name(config, words):
    """A feature that is silently left out gives fluent wrong text."""
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(QWEN3 | config)


def test_the_floors_stand_in_is_what_a_file_becomes():
    config = ModelConfig.from_dict(LLAMA)
    assert config == small_llama(rope=config.rope, text_type="llama")
