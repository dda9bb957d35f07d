"""A config.json means what transformers reads in it: its config classes are the oracle."""

import json

import pytest
from config_files import EMPTY, LLAMA, read
from same_config import assert_equals_transformers
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoserve.checkpoint.model_config import FAMILIES, ModelConfig
from nanoserve.checkpoint.rope_frequencies import rope_frequencies

CONFIGS = dict(Llama=LlamaConfig, Mistral=MistralConfig, Qwen2=Qwen2Config, Qwen3=Qwen3Config,
               Mixtral=MixtralConfig, Qwen3Moe=Qwen3MoeConfig, Gemma2=Gemma2Config,
               Gemma3=Gemma3TextConfig)


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_of_left_out_entries_are_transformers(family):
    """A config.json need not write what equals its class's default."""
    assert_equals_transformers(read(family), CONFIGS[family](**EMPTY))
    nulls = dict(head_dim=None, rope_theta=None, rms_norm_eps=None, tie_word_embeddings=None)
    assert_equals_transformers(read(family, **nulls), CONFIGS[family](**EMPTY))
    assert read("Llama", num_key_value_heads=None).num_key_value_heads == 32


def test_every_family_has_what_its_network_has():
    """What no file says, because it is always so."""
    has = {family: {flag for flag in ("qkv_bias", "qk_norm", "norm_offset", "scale_embedding",
                                      "post_norms") if getattr(read(family), flag)}
           for family in CONFIGS}
    gemma = {"norm_offset", "scale_embedding", "post_norms"}
    assert has == dict(Llama=set(), Mistral=set(), Qwen2={"qkv_bias"}, Qwen3={"qk_norm"},
                       Mixtral=set(), Qwen3Moe={"qk_norm"}, Gemma2=gemma,
                       Gemma3=gemma | {"qk_norm"})
    # transformers has no class for MiMo, which is Qwen2 with a head beside the layers
    assert {*FAMILIES} == {f"{family}ForCausalLM" for family in (*CONFIGS, "MiMo")}


@pytest.mark.parametrize("family, entries", [
    ("Mistral", dict(sliding_window=None)),  # null: no window
    ("Mistral", {}),  # absent: the class's own, 4,096
    ("Mistral", dict(sliding_window=7, head_dim=24)),
    ("Mixtral", dict(sliding_window=None)), ("Mixtral", dict(sliding_window=9)),
    ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1)),
    ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=5)),
    ("Qwen2", dict(use_sliding_window=True)),
    ("Qwen2", dict(use_sliding_window=False, sliding_window=6, max_window_layers=5)),
    ("Qwen3", dict(use_sliding_window=True, sliding_window=6, max_window_layers=0)),
    ("Qwen3Moe", dict(use_sliding_window=True, sliding_window=6)),
    ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=17,
                      norm_topk_prob=True)),
    ("Qwen3Moe", dict(num_experts=9, decoder_sparse_step=3, mlp_only_layers=[2, 11])),
    ("Qwen3Moe", dict(mlp_only_layers=None, head_dim=24)),
    ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("Gemma2", dict(attn_logit_softcapping=7.5, query_pre_attn_scalar=144, sliding_window=11)),
    ("Gemma3", dict(final_logit_softcapping=20.0, query_pre_attn_scalar=168, head_dim=128)),
    ("Gemma3", dict(layer_types=["full_attention", "sliding_attention"] * 15)),
    ("Gemma3", dict(sliding_window_pattern=4)),
    ("Gemma3", dict(rope_theta=5e5, rope_local_base_freq=2e4,
                    rope_scaling=dict(rope_type="linear", factor=8.0))),
], ids=str)
def test_what_a_file_says_is_what_transformers_reads(family, entries):
    ours, theirs = read(family, **entries), CONFIGS[family](**EMPTY, **entries)
    assert_equals_transformers(ours, theirs)


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


@pytest.mark.parametrize("family", CONFIGS)
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


FULL, SLIDING = "full_attention", "sliding_attention"


def assert_read_as_by_auto_config(folder, **entries) -> ModelConfig:
    """The oracle is the class that transformers picks for a folder, which may be another one than
    the architecture's name says."""
    (folder / "config.json").write_text(json.dumps(entries))
    ours = ModelConfig.from_folder(folder)
    assert_equals_transformers(ours, AutoConfig.from_pretrained(folder))
    return ours


@pytest.mark.parametrize("types", [[SLIDING, FULL, FULL], [FULL] * 3, [SLIDING] * 3, None], ids=str)
@pytest.mark.parametrize("window", [5, None])
def test_a_mistral_whose_file_names_layer_types_is_a_ministral(tmp_path, types, window):
    """transformers makes it one when it reads the file, and so the types count."""
    ours = assert_read_as_by_auto_config(
        tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window,
        layer_types=types, **EMPTY | dict(num_hidden_layers=3, head_dim=64))
    types = types or [SLIDING] * 3
    assert ours.windows == tuple(window if kind == SLIDING else None for kind in types)


@pytest.mark.parametrize("inner", [{}, dict(original_max_position_embeddings=32)], ids=str)
@pytest.mark.parametrize("scaling", [
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)], ids=str)
def test_the_length_in_training_beside_the_ropes_object_counts_more(tmp_path, scaling, inner):
    folder_entries = LLAMA | dict(rope_parameters=scaling | inner | dict(rope_theta=1e4))
    for beside in (16, 64):
        (tmp_path / "config.json").write_text(json.dumps(
            folder_entries | dict(model_type="llama", original_max_position_embeddings=beside)))
        theirs = AutoConfig.from_pretrained(tmp_path)
        expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
        rope = ModelConfig.from_folder(tmp_path).rope
        assert rope.original_max_position_embeddings == beside
        assert_close(rope_frequencies(theirs.head_dim, rope), expected, rtol=2e-6, atol=0)
    local = dict(rope_type="default", rope_theta=1e4)  # one object for each kind: it is not read
    gemma = read("Gemma3", original_max_position_embeddings=16, rope_parameters=dict(
        sliding_attention=local, full_attention=scaling | dict(
            original_max_position_embeddings=32)))
    assert gemma.rope.original_max_position_embeddings == 32
