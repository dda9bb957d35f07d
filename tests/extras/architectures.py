"""Tiny random checkpoints of networks that are not ours, each with what is peculiar to it.

Written by transformers itself, as those in checkpoints.py, and with the same tokenizer. Windows are
shorter than most prompts.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from checkpoints import BOS, EOS, PAD, Reference, assert_same_text, byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Exaone4Config,
    Gemma4TextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    MiMoV2FlashConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)

from nanoserve import LLM, SamplingParams

TOKENS = dict(vocab_size=260, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
LAYERS = dict(TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              max_position_embeddings=128)
SIZES = dict(LAYERS, intermediate_size=48)
GQA = dict(SIZES, num_key_value_heads=2)

ARCHITECTURES: dict[str, Callable] = {
    # Scales q by itself and says scaling=1; learned positions with an offset of 2; relu.
    "opt": lambda: OPTConfig(**LAYERS, word_embed_proj_dim=32, ffn_dim=64),
    # Learned positions; matrices that are stored transposed; a tied head.
    "gpt2": lambda: GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt-neox": lambda: GPTNeoXConfig(**SIZES, rotary_pct=0.25),  # attention and MLP in parallel
    "phi": lambda: PhiConfig(**GQA, partial_rotary_factor=0.5),  # the same; a head with a bias
    "phi3": lambda: Phi3Config(**GQA, sliding_window=13),  # one matrix for q, k, v; a window
    "olmo2": lambda: Olmo2Config(**GQA),  # norms behind attention and MLP, qk-norm over all heads
    # Multiplies embeddings, scores and residuals, and divides its logits.
    "granite": lambda: GraniteConfig(**GQA, embedding_multiplier=3.0, logits_scaling=2.5,
                                     attention_multiplier=0.2, residual_multiplier=0.7),
    "starcoder2": lambda: Starcoder2Config(**GQA, sliding_window=13),  # LayerNorm, biases
    # In parallel; interleaved RoPE; multiplies its logits.
    "cohere": lambda: CohereConfig(**GQA, logit_scale=0.3, use_qk_norm=True),
    "smollm3": lambda: SmolLM3Config(**GQA, no_rope_layers=[1, 0]),  # a layer without positions
    "glm4": lambda: Glm4Config(**GQA, head_dim=8, partial_rotary_factor=0.5),  # 4 norms a layer
    "exaone4": lambda: Exaone4Config(**GQA, head_dim=8, sliding_window=13, layer_types=[
        "sliding_attention", "full_attention"]),
    # A window in the mask alone: its layers don't name it. Experts.
    "phimoe": lambda: PhimoeConfig(**GQA, sliding_window=13, num_local_experts=3),
    # KV heads and their size differ by layer; a soft-cap behind the head.
    "gemma4": lambda: Gemma4TextConfig(
        **GQA, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=13, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=260,
        final_logit_softcapping=5.0),
    # One latent for all heads (foreign/latent.py); experts, the first layer without.
    "deepseek3": lambda: DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=10, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
    "gpt-oss": lambda: GptOssConfig(  # sinks and windows; experts with biases
        **GQA, head_dim=8, sliding_window=13, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"]),
    # The same sinks, applied behind attention by the log of its sum; a layer without positions.
    "granite-swa": lambda: GraniteSWAConfig(
        **GQA, sliding_window=13, layer_types=["sliding_attention", "full_attention"],
        layer_rope_theta=[10000.0, 0.0]),
    # Sinks in one layer and none in the other; values are narrower than keys.
    "mimo2": lambda: MiMoV2FlashConfig(
        **GQA, head_dim=12, v_head_dim=8, sliding_window=13, n_routed_experts=4,
        layer_types=["sliding_attention", "full_attention"], num_experts_per_tok=2,
        moe_intermediate_size=24),
    "qwen3": lambda: Qwen3Config(**GQA, head_dim=16),  # ours both ways
}


def make(config, folder: Path, pickled: bool = False) -> Path:
    """A folder with a model of this config; pickled: its weights as a `.bin` file."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    if pickled:
        to_pickle(folder)
    return folder


@torch.no_grad()
def randomise(model) -> None:
    """Weights so large that texts vary. The embedding is small beside what layers add: where it is
    the head as well, every text would be the prompt's last token, for ever."""
    generator = torch.Generator().manual_seed(1)
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name or ".ln_" in name
        if parameter is embedding:
            parameter.normal_(0, 0.1, generator=generator)
        elif parameter.dim() > 1:
            parameter.normal_(0, 2.5 * parameter.shape[-1] ** -0.5, generator=generator)
        else:  # norms around 1, biases around 0
            parameter.normal_(float(is_norm and name.endswith("weight")), 0.3, generator=generator)


def to_pickle(folder: Path) -> None:
    """The weights as old checkpoints have them: every name, tied ones twice, in one pickle."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


class Made(dict):
    """Folders by name, each made when it is first asked for."""

    def __init__(self, root: Path, make: Callable = lambda name, folder: make(
            ARCHITECTURES[name](), folder)):
        super().__init__()
        self.root, self.make = root, make

    def __missing__(self, name: str) -> Path:
        folder = self[name] = self.make(name, self.root / name)
        return folder


MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def texts_by(folders: dict, prompts: list, reference=Reference, max_tokens=MAX_TOKENS) -> Callable:
    """transformers' texts by name, with the gaps of their choices; each is written once."""
    @cache
    def of(name: str) -> list[tuple[list[int], list[float]]]:
        oracle = reference(folders[name])
        return [oracle.generate(prompt, max_tokens) for prompt in prompts]

    return of


def assert_parity(llm: LLM, prompts, texts, where: str) -> None:
    """Twice: the second time the prompts are in the prefix cache."""
    for attempt in ("first", "cached"):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for output, (tokens, gaps) in zip(outputs, texts, strict=True):
            assert_same_text(output.outputs[0].token_ids, tokens, gaps, f"{where}, {attempt}")
