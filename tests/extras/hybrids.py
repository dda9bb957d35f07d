"""Tiny random networks whose layers keep a state, each with what is peculiar to it."""

from collections.abc import Callable
from pathlib import Path

import torch
from architectures import GQA, SIZES, randomise
from checkpoints import byte_tokenizer
from transformers import (
    AutoModelForImageTextToText,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm2VlConfig,
    Lfm3Config,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

BOTH = ["linear_attention", "full_attention"]
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
             linear_value_head_dim=6, linear_conv_kernel_dim=4)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_d_conv=4,
             mamba_expand=2, mamba_chunk_size=8)

HYBRIDS: dict[str, Callable] = {
    # Gated delta nets; fewer heads for keys than for values.
    "qwen3.5": lambda: Qwen3_5TextConfig(**GQA, **DELTA, head_dim=8, layer_types=BOTH),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
        **GQA, **DELTA, **EXPERTS, head_dim=8, layer_types=BOTH,
        shared_expert_intermediate_size=16),
    "qwen3-next": lambda: Qwen3NextConfig(
        **GQA, **DELTA, **EXPERTS, head_dim=8, layer_types=BOTH,
        shared_expert_intermediate_size=16),
    # Short convolutions, and no recurrent state.
    "lfm2": lambda: Lfm2Config(**GQA, layer_types=["conv", "full_attention"], conv_L_cache=3),
    "lfm2-moe": lambda: Lfm2MoeConfig(
        **GQA, **EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "lfm3": lambda: Lfm3Config(**GQA, layer_types=["conv", "full_attention"]),
    # Mamba 2.
    "granite4-h": lambda: GraniteMoeHybridConfig(
        **GQA, **MAMBA, layer_types=["mamba", "attention"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=24),
    # A layer of nothing but an MLP, which neither attends nor keeps a state.
    "nemotron-h": lambda: NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 3}, num_key_value_heads=2, head_dim=8,
        layers_block_type=["mamba", "attention", "moe"], mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=8, n_groups=2, chunk_size=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=24),
    # Attention and a mixer under one index, in each layer.
    "falcon-h1": lambda: FalconH1Config(**GQA, **{**MAMBA, "mamba_d_ssm": 64}, head_dim=8),
    "bamba": lambda: BambaConfig(**GQA, **MAMBA, attn_layer_indices=[1]),
    # A delta net with three convolutions, for queries, keys and values.
    "olmo-hybrid": lambda: OlmoHybridConfig(**GQA, **DELTA, layer_types=BOTH),
}

# Wrappings whose text is one of these.
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
WRAPPED: dict[str, Callable] = {
    "qwen3.5-vl": lambda: Qwen3_5Config(
        text_config=HYBRIDS["qwen3.5"]().to_dict() | dict(rope_parameters=dict(
            rope_type="default", rope_theta=1e4, mrope_section=[1, 0, 0],
            partial_rotary_factor=0.25)),
        vision_config=dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, out_hidden_size=32,
                           intermediate_size=16, num_position_embeddings=16)),
    "lfm2-vl": lambda: Lfm2VlConfig(
        text_config=HYBRIDS["lfm2"]().to_dict(), vision_config=VISION, image_token_id=259,
        projector_hidden_size=16),
}


def make_wrapped(name: str, folder: Path) -> Path:
    """With towers, which nobody reads."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(WRAPPED[name]())
    randomise(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
