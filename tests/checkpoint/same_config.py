"""What our `ModelConfig` and a config class of transformers must agree on."""

from nanoserve.checkpoint.model_config import ModelConfig


def assert_equals_transformers(ours: ModelConfig, theirs) -> None:
    """Every entry that both sides have; theirs as the modeling files read it."""
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                  "intermediate_size", "max_position_embeddings", "rms_norm_eps",
                  "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", head_dim) ** -0.5
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logits_softcap == getattr(theirs, "final_logit_softcapping", None)
    activation = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert ours.activation == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[activation]
    assert ours.o_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    num_layers, window = theirs.num_hidden_layers, getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * num_layers
    assert ours.windows == tuple(window if t == "sliding_attention" else None for t in types)
    rope = theirs.rope_parameters
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    for mine, other in ((ours.rope, rope), (ours.rope_local, local)):
        assert (mine and mine.theta) == (other and other["rope_theta"])
        assert (mine and mine.rope_type) == (other and other["rope_type"])
    assert_equal_experts(ours, theirs)


def assert_equal_experts(ours: ModelConfig, theirs) -> None:
    """Qwen3-MoE names its dense layers; all of Mixtral's have experts, as wide as its MLP."""
    num_layers = theirs.num_hidden_layers
    if not hasattr(theirs, "num_local_experts"):
        assert (ours.num_experts, ours.moe_layers) == (0, (False,) * num_layers)
        return
    dense, step = getattr(theirs, "mlp_only_layers", []), getattr(theirs, "decoder_sparse_step", 1)
    assert ours.moe_layers == tuple(i not in dense and (i + 1) % step == 0
                                    for i in range(num_layers))
    assert ours.num_experts == theirs.num_local_experts
    assert ours.num_experts_per_tok == theirs.num_experts_per_tok
    assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.moe_intermediate_size == width
