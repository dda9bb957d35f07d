"""config.json files in memory, with nothing in them that could be left out. No torch."""

from nanoserve.model_config import ModelConfig, Rope

SIZES = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
LLAMA = dict(architectures=["LlamaForCausalLM"], **SIZES)
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], **SIZES)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)

EMPTY = dict(vocab_size=260, hidden_size=256, intermediate_size=96, num_hidden_layers=30,
             num_attention_heads=32)


def read(family: str, kind: type = ModelConfig, **entries) -> ModelConfig:
    """A config.json of that family with nothing in it but the sizes that have no default. kind:
    what reads it."""
    return kind.from_dict(dict(architectures=[f"{family}ForCausalLM"]) | EMPTY | entries)


def small_llama(**fields) -> ModelConfig:
    """What `LLAMA` becomes, without transformers, which would read it."""
    return ModelConfig(**dict(
        architecture="LlamaForCausalLM", **SIZES, head_dim=16, rms_norm_eps=1e-6, rope=Rope(),
        tie_word_embeddings=False, dtype="float32", eos_token_ids=(), generation_defaults={},
        windows=(None,) * 2, moe_layers=(False,) * 2, activation="silu",
        attention_scale=0.25) | fields)


class Vector:
    """As a tensor: compared element by element, and not true or false as a whole."""

    def __eq__(self, other):
        return self

    __ne__, __hash__ = __eq__, object.__hash__

    def __bool__(self):
        raise RuntimeError("ambiguous")
