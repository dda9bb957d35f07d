"""What each family's files say, and what they leave out.

The oracles are typed by hand: published files, the defaults of the classes, what entries mean.
"""

import json

import pytest
from config_files import EMPTY, read
from published import PUBLISHED, assert_reads
from ropes_by_hand import frequencies

from nanoserve.model_config import FAMILIES, ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
NONE = (None,) * 30  # of all layers


@pytest.mark.parametrize("name", [
    name for name, (file, _) in PUBLISHED.items() if file["architectures"][0] in FAMILIES])
def test_published_files_are_read_as_their_authors_meant_them(name):
    file, wanted = PUBLISHED[name]
    assert_reads(ModelConfig.from_dict(file), file, wanted)


def test_there_is_a_published_file_for_every_family():
    assert {*FAMILIES} <= {file["architectures"][0] for file, _ in PUBLISHED.values()}


@pytest.mark.parametrize("family, fields", [
    ("Llama", dict(max_position_embeddings=2048, num_key_value_heads=32, head_dim=8)),
    ("Mistral", dict(max_position_embeddings=131072, num_key_value_heads=8, head_dim=8,
                     windows=(4096,) * 30)),
    ("Qwen2", dict(max_position_embeddings=32768, num_key_value_heads=32, head_dim=8,
                   windows=NONE)),
    ("Qwen3", dict(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128,
                   windows=NONE)),
    ("Mixtral", dict(max_position_embeddings=131072, num_key_value_heads=8, head_dim=8,
                     windows=NONE, rms_norm_eps=1e-5, num_experts=8,
                     num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)),
    ("Qwen3Moe", dict(max_position_embeddings=32768, num_key_value_heads=4, head_dim=8,
                      windows=NONE, num_experts=128, num_experts_per_tok=8,
                      moe_intermediate_size=768, norm_topk_prob=False)),
    ("Gemma2", dict(max_position_embeddings=8192, num_key_value_heads=4, head_dim=256,
                    windows=(4096, None) * 15, attention_softcap=50.0, logits_softcap=30.0,
                    attention_scale=1 / 16, tie_word_embeddings=True)),
    ("Gemma3", dict(max_position_embeddings=131072, num_key_value_heads=4, head_dim=256,
                    windows=((4096,) * 5 + (None,)) * 5, attention_softcap=None,
                    logits_softcap=None, attention_scale=1 / 16, tie_word_embeddings=True))])
def test_what_a_file_leaves_out_is_its_familys_default(family, fields):
    """If transformers changes one, this says so."""
    config = read(family)
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.dtype == "float32" and config.rms_norm_eps == fields.get("rms_norm_eps", 1e-6)
    theta = 1e6 if family in ("Gemma3", "Mixtral") else 1e4
    assert config.rope.frequencies == pytest.approx(
        frequencies(config.head_dim, dict(rope_theta=theta)), rel=2e-6)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_no_number_of_kv_heads_means_as_many_as_heads(family):
    """Of a null, that is: left out, it is the class's default."""
    heads = dict(num_attention_heads=16, num_key_value_heads=None)
    assert read(family, **heads).num_key_value_heads == 16


@pytest.mark.parametrize("family, entries, fields", [
    ("Mistral", dict(sliding_window=None), dict(windows=NONE)),  # null: no window
    ("Mistral", dict(sliding_window=7, head_dim=24), dict(windows=(7,) * 30, head_dim=24)),
    ("Mixtral", dict(sliding_window=9), dict(windows=(9,) * 30)),
    ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=5),
     dict(windows=(None,) * 5 + (6,) * 25)),
    ("Qwen2", dict(use_sliding_window=True), dict(windows=(None,) * 28 + (4096,) * 2)),
    ("Qwen3", dict(use_sliding_window=True, sliding_window=6, max_window_layers=0),
     dict(windows=(6,) * 30)),
    # Qwen3-30B-A3B's file has max_window_layers, which its class does not read.
    ("Qwen3Moe", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1,
                      layer_types=[FULL] * 30), dict(windows=(6,) * 30)),
    ("Qwen3Moe", dict(num_experts=9, decoder_sparse_step=3, mlp_only_layers=[2, 11]),
     dict(moe_layers=tuple(i in (5, 8, 14, 17, 20, 23, 26, 29) for i in range(30)))),
    ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None),
     dict(attention_softcap=None, logits_softcap=None)),
    ("Gemma2", dict(attn_logit_softcapping=7.5, query_pre_attn_scalar=144, sliding_window=11),
     dict(attention_softcap=7.5, attention_scale=1 / 12, windows=(11, None) * 15)),
    ("Gemma3", dict(final_logit_softcapping=20.0, query_pre_attn_scalar=64, head_dim=128),
     dict(logits_softcap=20.0, attention_scale=1 / 8, head_dim=128)),
    ("Gemma3", dict(layer_types=[FULL, SLIDING] * 15), dict(windows=(None, 4096) * 15)),
    ("Gemma3", dict(sliding_window_pattern=4),
     dict(windows=((4096,) * 3 + (None,)) * 7 + (4096,) * 2)),
], ids=str)
def test_what_a_file_says_counts(family, entries, fields):
    config = read(family, **entries)
    assert {name: getattr(config, name) for name in fields} == fields


# Entries that mean something in another family than the one whose file has them.
STRAY = dict(hidden_activation="relu", max_window_layers=2, sliding_window_pattern=3,
             use_sliding_window=False, moe_intermediate_size=9, norm_topk_prob=False,
             decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True, mlp_bias=True,
             attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=7,
             rope_local_base_freq=500.0)
READS = dict(Llama="attention_bias mlp_bias", Mistral="", Mixtral="",
             Qwen2="max_window_layers use_sliding_window",
             Qwen3="attention_bias max_window_layers use_sliding_window",
             Qwen3Moe="attention_bias use_sliding_window moe_intermediate_size norm_topk_prob "
                      "decoder_sparse_step mlp_only_layers",
             Gemma2="hidden_activation attention_bias attn_logit_softcapping "
                    "final_logit_softcapping query_pre_attn_scalar",
             Gemma3="hidden_activation attention_bias sliding_window_pattern "
                    "final_logit_softcapping query_pre_attn_scalar rope_local_base_freq")


@pytest.mark.parametrize("family", READS)
def test_an_entry_of_another_family_means_nothing(family):
    """A Llama with `hidden_activation`, a Gemma 2 with `max_window_layers`, a Mistral with
    `use_sliding_window` and a Mixtral with `norm_topk_prob` were computed otherwise than by
    transformers, in silence. READS is what their modeling files look at; of Gemma 3 they look at
    attn_logit_softcapping and do nothing with it."""
    window = {} if family == "Llama" else dict(sliding_window=6)
    stray = {name: STRAY[name] for name in STRAY if name not in READS[family].split()}
    assert read(family, **window, **stray) == read(family, **window)
    for name in READS[family].split():
        windows = dict(use_sliding_window=name != "use_sliding_window")
        value = {"hidden_activation": "silu", "norm_topk_prob": True,
                 "use_sliding_window": True}.get(name, STRAY[name])
        plain = read(family, **window | windows)
        assert read(family, **window | windows | {name: value}) != plain, name


@pytest.mark.parametrize("types", [[SLIDING, FULL, FULL], [FULL] * 3, [SLIDING] * 3, None], ids=str)
@pytest.mark.parametrize("window", [5, None])
def test_a_mistral_whose_file_names_layer_types_is_a_ministral(tmp_path, types, window):
    """transformers makes it one when it reads the file, and so the types count."""
    (tmp_path / "config.json").write_text(json.dumps(dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window,
        layer_types=types, **EMPTY | dict(num_hidden_layers=3, head_dim=64))))
    assert ModelConfig.from_folder(tmp_path).windows == tuple(
        window if kind == SLIDING else None for kind in types or [SLIDING] * 3)
