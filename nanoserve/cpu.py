"""The CPU's backend: `ops`, compiled. What each function means is written in ops.py.

cpu.cpp computes, and declares what its functions take. build.py compiles it, and calls functions
with checked arguments and memory for the results. This file adds what build.py can't know: packed
weights, the cache, and sizes that no argument has by itself.

    weight (outputs, inputs) ─ prepack ─► panels
    x (rows, inputs), panels ─ linear ─► (rows, outputs)

Importing this module compiles the library if need be, and raises `BuildError` where that can't be
done. float16 is computed in float32.
"""

import ctypes
from math import prod
from typing import NamedTuple

import torch

from nanoserve import ops
from nanoserve.batch import Batch
from nanoserve.build import functions_of, in_float32, load
from nanoserve.device import lasting_zeros, zeros

__all__ = ["act_and_mul", "add_rms_norm", "argmax", "sample_tokens", "experts", "thresholds",
           "linear", "embed", "new_cache", "norm_rope_store", "prepack", "paged_attention",
           "rms_norm"]

PANEL = 16  # outputs of a panel, tokens of a tile of the cache
IS_GELU = {"silu": False, "gelu_tanh": True}
COMPILED = load()
LIBRARY = functions_of(COMPILED)  # a keyword argument is a size, which the tensors must fit


class PackedWeight(NamedTuple):
    """A packed weight: the panels' 32-bit units, and the shape and dtype of the original."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


def multiplies(dtype: torch.dtype) -> str:
    """The instructions that multiply matrices of a dtype here, as the start-up line names them."""
    of_others, of_bfloat16 = (ctypes.c_char_p * 2).in_dll(COMPILED, "multiplies")
    return (of_bfloat16 if dtype == torch.bfloat16 else of_others).decode()


def prepack(weight: torch.Tensor) -> PackedWeight:
    weight = in_float32(weight).contiguous()
    *count, outputs, inputs = weight.shape
    # 32-bit units, rounded up to half a matrix tile of 8 (matrix_tiles.h): 33 floats take 40.
    units = -(-inputs * weight.itemsize // 4 // 8) * 8
    memory = lasting_zeros(prod(count), -(-outputs // PANEL), units, PANEL, dtype=torch.int32)
    LIBRARY.prepack(weight.view(prod(count), outputs, inputs), memory)
    return PackedWeight(memory, tuple(weight.shape), weight.dtype)


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None,
           out_dtype: torch.dtype | None = None) -> torch.Tensor:
    product = LIBRARY.product if out_dtype is None else LIBRARY.wide_product
    return product(x.contiguous(), None, packed, bias)


def embed(ids: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    rows = packed.memory[0, ids // PANEL, :, ids % PANEL]  # (n, units)
    return rows.view(packed.dtype)[:, :packed.shape[-1]].contiguous()  # units may be padded


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return LIBRARY.add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = LIBRARY.add_rms_norm(x, residual, weight, eps)
    return out, x if residual is None else total


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    size = gate_up.shape[1] // 2
    return LIBRARY.act_and_mul(gate_up, IS_GELU[activation], size=size, _both=2 * size)


def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_proj: PackedWeight, down_proj: PackedWeight, first_expert: int,
            activation: str) -> torch.Tensor:
    return LIBRARY.experts(hidden, weights, ids, gate_up_proj, down_proj, first_expert,
                           IS_GELU[activation], _both=2 * down_proj.shape[2])


def new_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
              dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of 16 slots, as cpu.cpp describes them: the shape says the sizes, not where a number
    lies. float16 is kept as float32."""
    while num_blocks * block_size % PANEL:  # until the last tile is whole
        num_blocks += 1
    shape = (num_blocks, block_size, num_kv_heads, stored(head_dim, dtype))
    dtype = torch.float32 if dtype == torch.float16 else dtype
    return zeros(*shape, dtype=dtype, device=device), zeros(*shape, dtype=dtype, device=device)


def stored(size: int, dtype: torch.dtype) -> int:
    """A cache's last size: heads are padded to whole panels, 72 to 80, and in int8 a scale of four
    bytes follows each token's head."""
    padded = size + -size % PANEL
    return padded + 4 if dtype == torch.int8 else padded


def norm_rope_store(qkv: torch.Tensor, q_weight: torch.Tensor | None,
                    k_weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                    sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> torch.Tensor:
    _, heads, size = qkv.shape  # heads: all of q, k and v
    # An odd size must be refused: the library is told an even one, which qkv does not fit.
    return LIBRARY.norm_rope_store(
        qkv, q_weight, k_weight, eps, cos, sin, k_cache, v_cache, slot_mapping,
        heads=heads - 2 * k_cache.shape[2], size=size - size % 2,
        stored=stored(size, k_cache.dtype))


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None, softcap: float | None = None,
                    sinks: torch.Tensor | None = None,
                    last: torch.Tensor | None = None) -> torch.Tensor:
    (tokens, heads, size), (rows, width) = q.shape, batch.block_tables.shape
    _, block_size, kv_heads, _ = k_cache.shape
    longest = max(batch.seq_lens_host, default=0)
    if tokens < sum(batch.query_lens) or longest > width * block_size:
        raise ValueError(f"{tokens} queries for rows of {batch.query_lens}, and {width} blocks of "
                         f"{block_size} tokens for a row of {longest}")
    # So are heads that are no multiple of the KV heads.
    return LIBRARY.paged_attention(
        q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, scale,
        window or 0, softcap or 0, sinks, last, heads=heads - heads % kv_heads, _ends=rows + 1,
        stored=stored(size, k_cache.dtype))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return LIBRARY.argmax(logits)


def thresholds(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> ops.Thresholds:
    return LIBRARY.thresholds(logits, temperature, top_k, top_p, min_p)


def sample_tokens(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
                  positions: torch.Tensor,
                  thresholds: ops.Thresholds | None = None) -> torch.Tensor:
    low, last = thresholds or (None, None)
    return LIBRARY.sample_tokens(logits, temperature, seeds, positions, low, last)
