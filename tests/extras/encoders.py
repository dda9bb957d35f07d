"""Tiny random encoders, and what transformers makes of a prompt alone."""

from pathlib import Path

import torch
from architectures import GQA, SIZES, byte_tokenizer, randomise
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

PAD = 2  # of those whose positions begin behind it: at 3
POSITIONS = SIZES | dict(pad_token_id=PAD)
ENCODERS = {
    "bert": lambda: BertConfig(**SIZES),
    "roberta": lambda: RobertaConfig(**POSITIONS, type_vocab_size=1),
    "xlm-roberta": lambda: XLMRobertaConfig(**POSITIONS, type_vocab_size=1),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=260, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=128),
    # Every other layer sees 6 tokens on either side.
    "modernbert": lambda: ModernBertConfig(
        **SIZES | dict(num_hidden_layers=3), local_attention=12, global_attn_every_n_layers=2),
    # A Llama that looks ahead; tells its layers whether a cache is wanted, which is not to be one.
    # EmbeddingGemma: a Gemma 3 that looks ahead, in every other layer for 6 tokens on either side.
    "embeddinggemma": lambda: Gemma3TextConfig(
        **GQA, head_dim=8, sliding_window=12, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"]),
    "eurobert": lambda: EuroBertConfig(**SIZES, num_key_value_heads=2, is_causal=False),
}


def make(name: str, folder: Path, kind=AutoModel, **options) -> Path:
    """kind: AutoModel or AutoModelForSequenceClassification; options: of the config."""
    config = ENCODERS[name]()
    for key, value in options.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        model = kind.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None  # sentence-transformers would render texts with it
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def hidden_of(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


@torch.no_grad()
def classes_of(folder: Path, prompts: list[list[int]], types=None) -> list[torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    return [model(torch.tensor([prompt]), **({} if types is None else dict(
        token_type_ids=torch.tensor([types[i]])))).logits[0] for i, prompt in enumerate(prompts)]
