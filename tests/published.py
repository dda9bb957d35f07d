"""config.json files as they are published, typed from memory, and what must be read in them.

Entries that mean nothing to a decoder are left out. The second object has what differs from `USUAL`
and from the sizes, which must be the file's own; `recipe` is RoPE's, in transformers 5's spelling.
"""

from ropes_by_hand import frequencies, sharpness

from nanoserve.model_config import ModelConfig

USUAL = dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, activation="silu",
             norm_offset=False, scale_embedding=False, post_norms=False, tie_word_embeddings=False,
             attention_softcap=None, logits_softcap=None, num_experts=0, num_experts_per_tok=0,
             moe_intermediate_size=0, norm_topk_prob=False, head_dim=128, rope_local=None,
             dtype="bfloat16")
GEMMA = dict(activation="gelu_tanh", norm_offset=True, scale_embedding=True, post_norms=True,
             tie_word_embeddings=True, head_dim=256)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")


def sizes(*values) -> dict:
    return dict(zip(SIZES, values, strict=True))


PUBLISHED = {
    "Llama-3.1-8B-Instruct": (dict(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False,
        mlp_bias=False, hidden_act="silu", pretraining_tp=1, rope_theta=500000.0,
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009], rope_scaling=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192, rope_type="llama3"),
        **sizes(128256, 4096, 14336, 32, 32, 8, 131072, 1e-5)), dict(
            eos_token_ids=(128001, 128008, 128009), recipe=dict(
                rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=8192))),
    "Mistral-7B-v0.1": (dict(
        architectures=["MistralForCausalLM"], model_type="mistral", hidden_act="silu",
        rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
        torch_dtype="bfloat16", eos_token_id=2,
        **sizes(32000, 4096, 14336, 32, 32, 8, 32768, 1e-5)), dict(
            eos_token_ids=(2,), windows=(4096,) * 32)),
    "Qwen2.5-7B-Instruct": (dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu",
        max_window_layers=28, rope_theta=1000000.0, sliding_window=131072,
        use_sliding_window=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        eos_token_id=151645, **sizes(152064, 3584, 18944, 28, 28, 4, 32768, 1e-6)), dict(
            eos_token_ids=(151645,), qkv_bias=True, recipe=dict(rope_theta=1e6))),
    "MiMo-7B-RL": (dict(
        architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True, head_dim=128,
        hidden_act="silu", num_nextn_predict_layers=1, rope_theta=640000, sliding_window=None,
        max_window_layers=36, use_sliding_window=False, tie_word_embeddings=False,
        torch_dtype="bfloat16", eos_token_id=151643,
        **sizes(151680, 4096, 11008, 36, 32, 8, 32768, 1e-5)), dict(
            eos_token_ids=(151643,), qkv_bias=True, recipe=dict(rope_theta=640000))),
    "Qwen3-8B": (dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False,
        head_dim=128, hidden_act="silu", max_window_layers=36, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=False, torch_dtype="bfloat16", eos_token_id=151645,
        **sizes(151936, 4096, 12288, 36, 32, 8, 40960, 1e-6)), dict(
            eos_token_ids=(151645,), qk_norm=True, recipe=dict(rope_theta=1e6))),
    "Mixtral-8x7B-Instruct-v0.1": (dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_act="silu",
        num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
        rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
        torch_dtype="bfloat16", eos_token_id=2,
        **sizes(32000, 4096, 14336, 32, 32, 8, 32768, 1e-5)), dict(
            eos_token_ids=(2,), moe_layers=(True,) * 32, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=14336, norm_topk_prob=True, recipe=dict(rope_theta=1e6))),
    "Qwen3-30B-A3B": (dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False,
        decoder_sparse_step=1, head_dim=128, hidden_act="silu", max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
        num_experts_per_tok=8, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
        use_sliding_window=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        eos_token_id=151645, **sizes(151936, 2048, 6144, 48, 32, 4, 40960, 1e-6)), dict(
            eos_token_ids=(151645,), qk_norm=True, moe_layers=(True,) * 48, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
            recipe=dict(rope_theta=1e6))),
    "gemma-2-9b-it": (dict(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", attention_bias=False,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256, rope_theta=10000.0, sliding_window=4096,
        cache_implementation="hybrid", torch_dtype="bfloat16", eos_token_id=1,
        **sizes(256000, 3584, 14336, 42, 16, 8, 8192, 1e-6)), GEMMA | dict(
            eos_token_ids=(1,), windows=(4096, None) * 21, attention_softcap=50.0,
            logits_softcap=30.0)),
    "gemma-3-1b-it": (dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", attention_bias=False,
        attn_logit_softcapping=None, final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, cache_implementation="hybrid", torch_dtype="bfloat16",
        eos_token_id=[1, 106], **sizes(262144, 1152, 6912, 26, 4, 1, 32768, 1e-6)), GEMMA | dict(
            eos_token_ids=(1, 106), qk_norm=True, recipe=dict(rope_theta=1e6),
            windows=(*((512,) * 5 + (None,)) * 4, 512, 512), rope_local=dict(rope_theta=1e4))),
    "gemma-3-4b-it": (dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3",
        eos_token_id=[1, 106], torch_dtype="bfloat16", text_config=dict(
            hidden_size=2560, intermediate_size=10240, model_type="gemma3_text",
            num_hidden_layers=34, rope_scaling=dict(factor=8.0, rope_type="linear"),
            sliding_window=1024), vision_config=dict(hidden_size=1152)), GEMMA | dict(
                eos_token_ids=(1, 106), qk_norm=True, rope_local=dict(rope_theta=1e4),
                recipe=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                windows=(*((1024,) * 5 + (None,)) * 5, *(1024,) * 4),
                **sizes(262208, 2560, 10240, 34, 8, 4, 131072, 1e-6))),
    "Qwen2.5-VL-7B-Instruct": (dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl",
        hidden_act="silu", max_window_layers=28, rope_theta=1000000.0, sliding_window=32768,
        use_sliding_window=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        eos_token_id=151645, rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        vision_config=dict(depth=32), **sizes(152064, 3584, 18944, 28, 28, 4, 128000, 1e-6)), dict(
            eos_token_ids=(151645,), qkv_bias=True, recipe=dict(rope_theta=1e6))),
    "llava-1.5-7b-hf": (dict(
        architectures=["LlavaForConditionalGeneration"], model_type="llava",
        torch_dtype="float16", vision_config=dict(hidden_size=1024), tie_word_embeddings=False,
        text_config=dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5,
                         vocab_size=32064, torch_dtype="float16")), dict(
            eos_token_ids=(), dtype="float16",
            **sizes(32064, 4096, 11008, 32, 32, 32, 4096, 1e-5))),
}


def assert_reads(config: ModelConfig, file: dict, wanted: dict) -> None:
    """That `config` has what is wanted of a file."""
    wanted = USUAL | {name: file[name] for name in SIZES if name in file} | wanted
    layers, head_dim = wanted["num_hidden_layers"], wanted["head_dim"]
    wanted = dict(windows=(None,) * layers, moe_layers=(False,) * layers,
                  attention_scale=head_dim ** -0.5, recipe=dict(rope_theta=1e4)) | wanted
    for rope, recipe in ((config.rope, wanted.pop("recipe")),
                         (config.rope_local, wanted.pop("rope_local"))):
        if recipe is None:
            assert rope is None
            continue
        for mine, theirs in zip(rope.frequencies, frequencies(head_dim, recipe), strict=True):
            assert abs(mine / theirs - 1) < 2e-6
        assert abs(rope.scale - sharpness(recipe)) < 1e-12
    assert {name: getattr(config, name) for name in wanted} == wanted
