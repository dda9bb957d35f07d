"""What a config.json says, and what is refused by name: `ModelConfig`, without torch.

A feature that is silently left out gives fluent wrong text. What transformers reads in the same
files is compared in test_model_config_transformers.
"""


import pytest
from config_files import LLAMA, LLAMA3, QWEN3, read

from nanoserve.checkpoint.model_config import ModelConfig, RopeConfig

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("activations", [
    dict(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu", hidden_activation=None), dict(hidden_act="gelu")], ids=str)
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_gemmas_second_name_of_its_activation_is_the_true_one(family, activations):
    """The first files said "gelu", and meant its approximation by a tanh."""
    assert read(family, **activations).activation == "gelu_tanh"
    with pytest.raises(ValueError, match="hidden_activation='gelu'"):
        read(family, hidden_activation="gelu")


def test_gemma_3_before_transformers_5_means_the_same():
    """As the files on the hub are: a pattern, two thetas and a scaling, or lists and objects."""
    old = read("Gemma3", sliding_window=512, sliding_window_pattern=6, rope_theta=1_000_000.0,
               rope_local_base_freq=10_000.0, rope_scaling=dict(factor=8.0, rope_type="linear"))
    new = read("Gemma3", sliding_window=512, layer_types=[
        "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(30)],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1_000_000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10_000.0)))
    assert old == new
    assert old.rope == RopeConfig(1e6, "linear", factor=8.0) and old.rope_local == RopeConfig(1e4)
    assert old.windows[:7] == (512,) * 5 + (None, 512) and old.window is None


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
     "num_experts_per_tok=3 but num_local_experts=2"),
    ("Qwen3Moe", dict(num_experts=7), "num_experts_per_tok=8 but num_experts=7"),
    ("Qwen3Moe", dict(num_experts=0), "num_experts must be .* got 0"),
    ("Mixtral", dict(num_local_experts="8"), "num_local_experts .*got '8'"),
    ("Qwen3Moe", dict(decoder_sparse_step=0), "decoder_sparse_step .*got 0"),
    ("Gemma2", dict(query_pre_attn_scalar="24"), "query_pre_attn_scalar must be a number"),
    ("Gemma2", dict(attn_logit_softcapping="50"), "attn_logit_softcapping must be a number"),
    ("Gemma2", dict(hidden_activation="relu"), "hidden_activation='relu'.*gelu_pytorch_tanh"),
    ("Gemma3", dict(rope_parameters=dict(full_attention=dict(rope_type="dynamic", factor=2.0))),
     "'dynamic'.*longest sequence"),
    ("Gemma3", dict(rope_parameters=dict(rope_type="linear", factor=2.0)),
     "rope_parameters=.*full_attention and one for sliding_attention"),
    ("Gemma3", dict(rope_parameters=dict(sliding_attention=dict(rope_type="longrope"))),
     "'longrope'"),
    ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("Mistral", dict(sliding_window=0), "sliding_window .*got 0"),
], ids=str)
def test_what_a_family_can_not_have_is_refused_by_name(family, entries, words):
    with pytest.raises(ValueError, match=words):
        read(family, **entries)


@pytest.mark.parametrize("config, dtype", [
    ({}, "float32"), (dict(torch_dtype="float16"), "float16"), (dict(dtype="bfloat16"), "bfloat16"),
    (dict(dtype="torch.bfloat16", torch_dtype="float32"), "bfloat16")])
def test_both_spellings_of_the_dtype(config, dtype):
    assert ModelConfig.from_dict(LLAMA | config).dtype == dtype


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
    (dict(use_sliding_window=True, sliding_window=0), "sliding_window.*at least 1, got 0"),
    (dict(use_sliding_window=True, layer_types=["full_attention"]), "layer_types=.*each of 2"),
    (dict(use_sliding_window=True, layer_types=["full_attention", "chunked_attention"]),
     "layer_types=.*full_attention or sliding_attention"),
    (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (dict(layer_types=3), "layer_types=3 must name"),
    (dict(layer_types=[["full_attention"], 1]), "layer_types=.* must name"),
    (dict(rope_scaling=dict(rope_type=["yarn"])), "RoPE scaling \\['yarn'\\] is not supported"),
    (dict(rope_parameters=dict(full_attention=3)), "RoPE of a kind of layers, 3, must be an obj"),
    (dict(is_causal=False), "is_causal=False.*computed causally"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
     "partial_rotary_factor=0.5"),
    (dict(rope_scaling=dict(type="linear")), "linear RoPE scaling lacks factor"),
    (dict(rope_scaling=dict(rope_type="yarn", factor="4")),
     "factor must be a number above 0, got '4'"),
    (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "'longrope'.*llama3"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
     "'dynamic'.*longest sequence of the batch.*llama3"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0)),
     "llama3.*lacks high_freq_factor, original_max_position_embeddings"),
    (dict(rope_scaling="llama3"), "rope_scaling='llama3' must be an object"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta="x")), "rope_theta must be a number"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=0)), "factor must be a number above 0, got 0"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, truncate="false")),
     "truncate must be true"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2), rope_theta=1),
     "rope_theta=1 must be above"),
    (dict(rope_scaling=dict(rope_type="llama3", **LLAMA3 | dict(low_freq_factor=4.0))),
     "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    (dict(rope_theta=0), "rope_theta must be a number above 0, got 0"),
    (dict(rope_parameters=[1]), "rope_parameters=.*must be an object"),
    (dict(hidden_act=["silu"]), "hidden_act=.*silu"),
    (dict(max_window_layers="3"),
     "max_window_layers must be a whole number of at least 0, got '3'"),
    (dict(layer_types=["chunked_attention"] * 2, sliding_window=None), "layer_types=.*must name"),
    (dict(architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=1), "mlp_only_layers=1 must be"),
    (dict(architectures=["Gemma2ForCausalLM"], query_pre_attn_scalar=0), "query_pre_attn_scalar"),
    (dict(architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=-1.0), "softcapping"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, got 'yes'"),
    (dict(attention_bias="false"), "attention_bias must be true or false, got 'false'"),
    (dict(architectures=["LlamaForCausalLM"], mlp_bias="no"), "mlp_bias must be true or false"),
    (dict(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=2), "norm_topk_prob must be true"),
    (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window="no"), "use_sliding_window must"),
    (dict(use_bidirectional_attention="false"),
     "use_bidirectional_attention must be true or false"),
    (dict(rms_norm_eps=-1), "rms_norm_eps must be a number above 0, got -1"),
    (dict(rms_norm_eps="x"), "rms_norm_eps must be a number above 0, got 'x'"),
    (dict(eos_token_id="</s>"), "eos_token_id='</s>' must be a token id"),
    (dict(architectures="BertModel"), "architecture BertModel is not supported"),
    (dict(num_key_value_heads=3), "num_attention_heads=4.*num_key_value_heads=3"),
    (dict(head_dim=15), "head_dim=15.*odd"),
    (dict(hidden_size=None), "hidden_size.*got None"),
    (dict(num_hidden_layers=0), "num_hidden_layers.*got 0"),
    (dict(vocab_size="many"), "vocab_size.*got 'many'"),
], ids=str)
def test_what_is_not_implemented_is_refused_by_name(config, words):
    """A feature that is silently left out gives fluent wrong text."""
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(QWEN3 | config)


@pytest.mark.parametrize("architecture, entries", [
    ("Qwen3MoeForCausalLM", dict(layer_types=["full_attention"] * 2)), ("MistralForCausalLM", {})])
def test_families_with_one_window_ignore_rules_for_single_layers(architecture, entries):
    """Qwen3-30B-A3B's file has max_window_layers, which transformers' class does not read."""
    config = ModelConfig.from_dict(QWEN3 | dict(
        architectures=[architecture], sliding_window=9, use_sliding_window=True, num_experts=8,
        num_experts_per_tok=2, max_window_layers=1, **entries))
    assert config.windows == (9, 9)
