"""One decoder, driven by `ModelConfig`: Llama and Qwen3 differ in flags, not in code.

Read it top-down like the figure in a paper: tokens are embedded, pass a stack of identical layers
(each adds what attention and an MLP have to say to the residual stream), are normalised, and become
logits:

    ids ─ embed ─► hidden ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─► ... ─ norm ─ logits
                           └────────────────────────┘└──────────────┘    × layers

Invariant: no hidden inputs. What a forward pass reads stands in its signature: `hidden`,
`positions`, the KV cache and the batch. Tokens are the only dimension that varies; there is no
batch dimension and no padding, because rows are told apart by attention alone.

A flag may switch a line on or off (qk-norm, biases, tied embeddings). Anything that needs another
algorithm would be another class. Road not taken: one file for each family, as transformers has it,
where a fix is made as many times as there are files.

Names follow the checkpoints' (`layers.0.self_attn.o_proj`): the loader hardly has to rename.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.attention import MAX_GATHERED_KEYS, paged_attention, store_kv
from nanoserve.batch import Batch
from nanoserve.config import ModelConfig
from nanoserve.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, apply_rope

MAX_SCORED_ROWS = 256  # prompt logprobs: positions whose logits are there at the same time
KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # a layer's K and V, see attention.py


class Decoder(nn.Module):
    """The whole network: `embed`, `forward` over a range of layers, `compute_logits`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope, device)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, device)
                                    for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = None if config.tie_word_embeddings else Linear(
            config.hidden_size, {"all": config.vocab_size}, False, dtype, device)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)"""
        return self.embed_tokens(ids)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, layers: range | None = None,
                taps: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Run `layers` (all of them by default); the last one's output is normalised.

        hidden: (num_tokens, hidden_size), positions: (num_tokens,). Where `taps` has a layer's
        number as a key, its value becomes that layer's output.
        """
        layers = range(len(self.layers)) if layers is None else layers
        cos, sin = self.rotary(positions, hidden.dtype)
        for i in layers:
            hidden = self.layers[i](hidden, cos, sin, kv_cache[i], batch)
            if taps is not None and i in taps:
                taps[i] = hidden
        return self.norm(hidden) if layers.stop == len(self.layers) else hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size); only rows that sample come here."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (pre-norm)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype, device)
        self.self_attn = Attention(config, dtype, device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                kv: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, kv, batch)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache, with RoPE and optional qk-norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.num_attention_heads * config.head_dim
        self.kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(
            config.hidden_size, {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}, bias,
            dtype, device)
        self.o_proj = Linear(self.q_size, {"all": config.hidden_size}, bias, dtype, device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                kv: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        num_tokens = len(hidden)
        q, k, v = self.qkv_proj(hidden).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = q.view(num_tokens, -1, self.head_dim)  # (num_tokens, num_heads, head_dim)
        k = k.view(num_tokens, -1, self.head_dim)  # (num_tokens, num_kv_heads, head_dim)
        v = v.view(num_tokens, -1, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        store_kv(k, v, *kv, batch.slot_mapping)
        out = paged_attention(q, *kv, batch, scale=self.head_dim ** -0.5)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the gated MLP (Shazeer 2020, "GLU Variants")."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, {"gate": size, "up": size}, config.mlp_bias,
                                   dtype, device)
        self.down_proj = Linear(size, {"all": config.hidden_size}, config.mlp_bias, dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def estimate_step_bytes(config: ModelConfig, num_tokens: int, num_seqs: int, max_model_len: int,
                        itemsize: int) -> int:
    """Memory that a step of `num_tokens` and `num_seqs` takes beside weights and KV cache.

    By its largest tensors: the activations of every token in one layer, one group of gathered keys
    and values in attention, and the sampler's copies of the logits.
    """
    per_token = 4 * config.intermediate_size + 8 * config.hidden_size + 4 * (
        config.num_attention_heads * config.head_dim + config.kv_width)
    keys = min(max(MAX_GATHERED_KEYS, max_model_len), num_seqs * max_model_len)
    gathered = 4 * keys * config.kv_width  # as they are, transposed, and as float32
    num_rows = max(num_seqs, MAX_SCORED_ROWS)
    logits = 16 * num_rows * config.vocab_size  # four copies in float32
    return (num_tokens * per_token + gathered) * itemsize + logits
