"""How fast each pair of dimensions turns: RoPE's frequencies, and three recipes to stretch them.

A pair i of a head of d dimensions turns by theta^(-2i/d) radians a position (Su et al. 2021). The
first pairs turn fast and tell neighbours apart, the last ones hardly turn and tell distant
positions apart. Beyond the lengths of its training a model meets new angles of the slow pairs:

    pair       0 ............................ d/2 - 1
    turns      many in training               less than one
    stretched  not at all     a blend         by `factor`          "llama3", "yarn"

Invariant: the numbers are transformers', bit for bit where no recipe stretches them; they are
computed in float32 in the same order. Not known here: positions, cos and sin (layers.py), files.
"""

import math

import torch

from nanoserve.checkpoint.rope_config import RopeConfig


def rope_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Radians a position for each pair of dimensions, (head_dim / 2,), in float32. "linear"
    stretches all waves by `factor`; "llama3" blends by the number of turns, "yarn" (Peng et al.
    2023) by the index."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta ** exponents
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    keep = _llama3_keep(frequencies, rope) if rope.rope_type == "llama3" else (
        _yarn_keep(head_dim, rope))
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _llama3_keep(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """0 for waves of at most `low_freq_factor` turns in training, 1 from `high_freq_factor` on."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return keep.clamp(0, 1)


def _yarn_keep(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """1 up to the pair that makes `beta_fast` turns, 0 from the one that makes `beta_slow` on."""
    def pair_with(turns: float) -> float:  # frequency theta^(-2i/d), solved for the index i
        wave = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # the reference's way out of a division by zero
    return 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
