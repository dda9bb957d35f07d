"""Latents in the cache: the text is that of transformers' expanded layers, in a smaller cache."""

from pathlib import Path

import pytest
import torch
from architectures import GREEDY, SIZES, Made, assert_parity, make, texts_by
from checkpoints import Reference
from test_transformers_model import MODES, few_prompts, start  # noqa: F401  (a fixture)
from transformers import DeepseekV2Config, Glm4MoeLiteConfig, MiniCPM3Config, YoutuConfig

from nanoserve_extras.foreign.latent import keep_latents

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


def test_absorbing_only_moves_products_to_the_other_side_of_sums(made):
    """In float64 the order of a sum is no excuse: transformers' expanded keys and values, looked up
    densely, give the same to twelve digits."""
    torch.manual_seed(0)
    network = Reference(made["minicpm3"]).model.double()
    layer = network.model.layers[0].self_attn
    q, latents, rotated = (torch.randn(1, *shape, dtype=torch.float64) for shape in (
        (4, 3, 20), (1, 5, 16), (1, 5, 8)))
    with torch.no_grad():
        keys, values = layer.expand_kv(latents, rotated)
        expected = (q @ keys.mT).softmax(-1) @ values
        keep_latents(network)
        key, value = layer.expand_kv(latents, rotated)
        assert key.shape[1] == value.shape[1] == 1
        out = (layer.latent.absorb(q) @ key.mT).softmax(-1) @ value
        got = layer.latent.expand(out.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_small_weights_leave_what_is_absorbed_as_it_is(made, capsys):
    with start(made["youtu"], quantization="int8") as llm:
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].finished
        layer = llm.runner.model.layers.model.layers[0].self_attn
        assert layer.latent.w_k.dtype == torch.float32


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
