"""The parts a decoder is made of: RMSNorm, RoPE, Linear, Embedding.

Each part owns its weights *and* how they get there. A checkpoint stores q, k and v (or gate and up)
as separate matrices, while the engine multiplies with one, because one large product is faster than
three small ones. So a `Linear` knows its parts by name and `weight_loader` puts each into its rows:

    checkpoint           q_proj (64, 32)   k_proj (16, 32)   v_proj (16, 32)
                              │                 │                 │
    qkv_proj.weight      rows 0..63        rows 64..79       rows 80..95         (96, 32)

Invariant: a weight is written through `weight_loader` or not at all, and the loader proves that
every part of every parameter was written exactly once. `finish_loading()` is called after the last
one: the place to repack or quantise a weight without anybody else knowing.

The interface is nn.Module's, the memory is not initialised: the loader fills every byte. Road not
taken: `nn.Linear` and `nn.Embedding`, which spend seconds on random numbers that are overwritten.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.config import RopeConfig


def _weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    if into.shape != tensor.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} in the file, {tuple(into.shape)} expected")
    into.copy_(tensor)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = _weight(size, dtype=dtype, device=device)

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        _copy(getattr(self, name), tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """x @ weight.T + bias, its output rows made of named parts.

    parts: output sizes by name, in order, e.g. {"q": 64, "k": 16, "v": 16}.
    """

    def __init__(self, in_size: int, parts: dict[str, int], bias: bool, dtype: torch.dtype,
                 device: torch.device):
        super().__init__()
        self.parts = parts
        self.weight = _weight(sum(parts.values()), in_size, dtype=dtype, device=device)
        self.bias = _weight(sum(parts.values()), dtype=dtype, device=device) if bias else None

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Copy one part (the only one, if `part` is None) of "weight" or "bias" into its rows."""
        part = part or next(iter(self.parts))
        start = 0
        for other, size in self.parts.items():
            if other == part:
                _copy(getattr(self, name)[start:start + size], tensor)
            start += size

    def finish_loading(self) -> None:
        """All parts are in place: nothing to repack for a plain product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token ids to vectors; with tied weights its matrix is the LM head, too."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = _weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        _copy(getattr(self, name), tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al. 2021): positions become angles, pairs of dimensions are turned by them.

    Angles are computed once a step and shared by all layers, not read from a table: a table for
    131,072 positions takes 64 MB and saves microseconds.
    """

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device):
        super().__init__()
        frequencies = rope_frequencies(head_dim, rope).to(device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor,
                dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (num_tokens,) -> cos and sin, each (num_tokens, 1, head_dim).

        The angles are float32 whatever the dtype: bfloat16 can't tell position 4095 from 4096.
        """
        angles = positions[:, None].float() * self.frequencies  # (num_tokens, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Radians a position for each pair of dimensions, (head_dim / 2,), in float32.

    "llama3" stretches long waves by `factor`, keeps short ones, and blends in between, so that a
    model trained on 8,192 positions can be tuned for more (Llama 3.1, rope_type "llama3").
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta ** exponents
    if rope.rope_type == "default":
        return frequencies
    waves = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # turns in training
    blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: at most low_freq_factor turns, stretched; 1: short, kept
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x (num_tokens, num_heads, head_dim). Pairs are (i, i + head_dim / 2), as in Llama's
    Hugging Face checkpoints, not (2i, 2i + 1) as in the paper."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
