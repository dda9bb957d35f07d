"""Latents in the cache: the text is that of transformers' expanded layers, in a smaller cache."""

from pathlib import Path

import pytest
from architectures import SIZES, Made, assert_parity, make, texts_by
from test_transformers_model import MODES, few_prompts, start  # noqa: F401  (a fixture)
from transformers import DeepseekV2Config, Glm4MoeLiteConfig, MiniCPM3Config, YoutuConfig

LATENT = dict(SIZES, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8,
              qk_nope_head_dim=12, v_head_dim=10)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1,
               topk_group=1)
MODELS = {
    "deepseek2": lambda: DeepseekV2Config(**LATENT, **EXPERTS, q_lora_rank=None,
                                          first_k_dense_replace=1),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(**LATENT, **EXPERTS, q_lora_rank=16),
    "minicpm3": lambda: MiniCPM3Config(**LATENT, q_lora_rank=16),
    "youtu": lambda: YoutuConfig(**LATENT, q_lora_rank=16)}


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("latents"),
                lambda name, folder: make(MODELS[name](), folder))


@pytest.mark.parametrize("name", MODELS)
def test_text_equals_transformers_with_one_head_of_latents(made, few_prompts, name):  # noqa: F811
    texts = texts_by(made, few_prompts)(name)
    assert len({tuple(tokens) for tokens, _ in texts}) == len(few_prompts)  # lively
    for mode, options in MODES.items():
        with start(made[name], **options) as llm:
            assert llm.runner.model.kv_shapes == [(1, 24)] * 2  # 48 numbers for 4 x 2 x 20
            assert_parity(llm, few_prompts, texts, f"{name}, {mode}")


def test_the_page_says_how_much_smaller_the_cache_is():
    """From the classes' own defaults, which are those of the checkpoints; MiniCPM3's are given."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    for name, config in {"DeepSeek V2-Lite": DeepseekV2Config(num_attention_heads=16),
                         "GLM-4.7-Flash": Glm4MoeLiteConfig(),
                         "MiniCPM3-4B": MiniCPM3Config(num_attention_heads=40)}.items():
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        expanded = 2 * config.num_attention_heads * max(key, config.v_head_dim)
        kept = 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
        assert f"| {name} | {expanded:,} | {kept:,} | {expanded / kept:.1f}" in page
