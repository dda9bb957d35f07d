"""The CPU's namespace: `ops`, compiled. What each function means is written there.

device/cpu.cpp computes. This file stands between it and tensors: it checks what could make an
address wrong (dtypes, order of memory, sizes), makes room for the result, and calls.

    x (rows, inputs) ─ checked ─► addresses, sizes ─► the library ─► out (rows, outputs)

Invariant: nothing is handed over unchecked. A wrong address would not raise, it would read or write
another object's memory. Importing this module compiles the library if need be, and raises
`BuildError` where that can't be done. Not known here: layers, ranks.
"""

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch

from nanoserve.batch import Batch
from nanoserve.device.build import load
from nanoserve.device.memory import zeros
from nanoserve.ops import ACTIVATIONS, Floors

__all__ = ["act_and_mul", "add_rms_norm", "argmax", "draw", "experts", "floors", "linear",
           "new_cache", "norm_rope_store", "pack", "paged_attention", "rms_norm"]

F32, I32, I64, HALF = torch.float32, torch.int32, torch.int64, torch.float16
DTYPES = {F32: "float32", torch.bfloat16: "bfloat16"}  # the library's tables of functions ...
NAMES = ("pack", "linear", "norm", "act_and_mul", "experts", "store", "attention", "argmax",
         "floors", "draw")  # ... and their order
PANEL = 16  # outputs of a panel, tokens of a tile of the cache
LIBRARY = load()
FUNCTIONS = {(name, dtype): ctypes.CFUNCTYPE(None)(address) for dtype, table in DTYPES.items()
             for name, address in zip(NAMES, (ctypes.c_void_p * len(NAMES)).in_dll(LIBRARY, table),
                                      strict=True)}


class Panels(NamedTuple):
    """A packed weight: the panels' 32-bit units, and the shape and dtype of what it was."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


def as_argument(x: torch.Tensor | float | None):
    """A tensor's address, a null pointer, a number: each as the library takes it."""
    if x is None or isinstance(x, torch.Tensor):
        return ctypes.c_void_p(x if x is None else x.data_ptr())
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_long(x)


def call(name: str, dtype: torch.dtype, *arguments: torch.Tensor | float | None) -> None:
    FUNCTIONS[name, dtype](*map(as_argument, arguments))


def check(is_right: bool, what: str) -> None:
    """Raises `ValueError`, in whatever mode Python runs."""
    if not is_right:
        raise ValueError(f"the compiled operators can't take this: {what}")


def same(x: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
    """x, if it is contiguous, on the CPU, and of this dtype and shape; or `None`."""
    if x is not None and (x.dtype != dtype or x.shape != shape or not x.is_contiguous()
                          or not x.is_cpu):
        check(False, f"{tuple(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}, in place of "
                     f"a contiguous {shape} {dtype}")
    return x


def no_half(x):
    """float16 is computed in float32."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == HALF else x


def in_float32(function: Callable) -> Callable:
    """The same for a whole function, whose results become float16 again."""
    @wraps(function)
    def widened(x, *arguments):
        if x.dtype != HALF:
            return function(x, *arguments)
        result = function(*map(no_half, (x, *arguments)))
        return result.half() if isinstance(result, torch.Tensor) else tuple(
            one.half() for one in result)
    return widened


def pack(weight: torch.Tensor) -> Panels:
    weight, (count, outputs, inputs) = no_half(weight).contiguous(), (1, *weight.shape)[-3:]
    check(weight.dtype in DTYPES and weight.is_cpu, f"a weight of {weight.dtype}")
    units = -(-inputs * weight.itemsize // 4)
    memory = zeros(count * -(-outputs // PANEL) * units * PANEL, dtype=I32)
    call("pack", weight.dtype, weight, count, outputs, inputs, memory)
    return Panels(memory, tuple(weight.shape), weight.dtype)


@in_float32
def linear(x: torch.Tensor, packed: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows, (outputs, inputs), dtype = len(x), packed.shape, packed.dtype
    out = x.new_empty(rows, outputs)
    if rows:
        call("linear", dtype, same(x.contiguous(), dtype, rows, inputs), None, rows, packed.memory,
             inputs, outputs, same(bias, dtype, outputs), out)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return add_rms_norm(x, None, weight, eps)[0]


@in_float32
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    call("norm", x.dtype, same(x, x.dtype, rows, size), same(residual, x.dtype, rows, size),
         same(weight, F32, size), eps, rows, size, out, total)
    return out, total


@in_float32
def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    rows, size, dtype = len(gate_up), gate_up.shape[1] // 2, gate_up.dtype
    out = gate_up.new_empty(rows, size)
    check(activation in ACTIVATIONS, f"activation={activation!r}")
    call("act_and_mul", dtype, same(gate_up, dtype, rows, 2 * size), rows, size,
         activation == "gelu_tanh", out)
    return out


@in_float32
def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up_proj: Panels,
            down_proj: Panels, first_expert: int, activation: str) -> torch.Tensor:
    (tokens, size), per_token, dtype = hidden.shape, ids.shape[1], hidden.dtype
    count, _, inner = down_proj.shape
    check(gate_up_proj[1:] == ((count, 2 * inner, size), dtype) and activation in ACTIVATIONS
          and down_proj[1:] == ((count, size, inner), dtype), f"{size} numbers for experts of "
          f"{gate_up_proj.shape} and {down_proj.shape}, {activation!r}")
    out = torch.empty_like(hidden)
    call("experts", dtype, same(hidden, dtype, tokens, size), same(weights, F32, tokens, per_token),
         same(ids, I64, tokens, per_token), tokens, per_token, gate_up_proj.memory,
         down_proj.memory, first_expert, count, size, inner, activation == "gelu_tanh", out)
    return out


def new_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
              dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of 16 slots, as cpu.cpp describes them. The shape is only a label that tells the sizes:
    slots are filled up to whole tiles and heads to whole panels. float16 is kept as float32."""
    while num_blocks * block_size % PANEL:
        num_blocks += 1
    shape = num_blocks, block_size, num_kv_heads, -(-head_dim // PANEL) * PANEL
    dtype = F32 if dtype == HALF else dtype
    return zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype)


def sizes_of(k_cache: torch.Tensor, v_cache: torch.Tensor,
             x: torch.Tensor) -> tuple[int, int, int]:
    """KV heads, padded head size and block size. x: (tokens, heads, head size)"""
    same(k_cache, x.dtype, *k_cache.shape), same(v_cache, x.dtype, *k_cache.shape)
    _, block_size, num_kv_heads, padded = k_cache.shape
    check(0 <= padded - x.shape[2] < PANEL and x.shape[1] % num_kv_heads == 0,
          f"{x.shape[1]} heads of {x.shape[2]} for a cache of {tuple(k_cache.shape)}")
    return num_kv_heads, padded, block_size


@in_float32
def norm_rope_store(qkv: torch.Tensor, q_weight: torch.Tensor | None,
                    k_weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                    sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> torch.Tensor:
    (tokens, all_heads, size), sizes = qkv.shape, sizes_of(k_cache, v_cache, qkv)
    num_heads = all_heads - 2 * sizes[0]
    check(size % 2 == 0 and (q_weight is None) == (k_weight is None), f"heads of {size}, weights")
    out = qkv.new_empty(tokens, num_heads, size)
    call("store", qkv.dtype, same(qkv, qkv.dtype, tokens, all_heads, size),
         same(q_weight, F32, size), same(k_weight, F32, size), eps, same(cos, F32, tokens, size),
         same(sin, F32, tokens, size), same(slot_mapping, I32, tokens), tokens, num_heads, size,
         k_cache, v_cache, *sizes, out)
    return out


@in_float32
def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None,
                    softcap: float | None = None) -> torch.Tensor:
    (tokens, heads, size), (rows, width) = q.shape, batch.block_tables.shape
    sizes, longest = sizes_of(k_cache, v_cache, q), max(batch.seq_lens_host, default=0)
    check(tokens >= sum(batch.query_lens) and longest <= width * sizes[2],
          f"{tokens} tokens, {rows} rows of up to {longest} in {width} blocks")
    out = torch.zeros_like(q) if 0 in batch.seq_lens_host else torch.empty_like(q)
    call("attention", q.dtype, same(q, q.dtype, tokens, heads, size), k_cache, v_cache, *sizes,
         same(batch.block_tables, I32, rows, width), width, same(batch.seq_lens, I32, rows),
         same(batch.cu_seqlens_q, I32, rows + 1), rows, heads, size, float(scale), window or 0,
         softcap or 0.0, out)
    return out


def argmax(logits: torch.Tensor) -> torch.Tensor:
    logits, (s, size) = no_half(logits), logits.shape
    out = torch.empty(s, dtype=I64)
    call("argmax", logits.dtype, same(logits, logits.dtype, s, size), s, size, out)
    return out


def floors(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> Floors:
    logits, (s, size) = no_half(logits), logits.shape
    lowest, last = torch.empty(s), torch.empty(s, dtype=I32)
    call("floors", logits.dtype, same(logits, logits.dtype, s, size), same(temperature, F32, s),
         same(top_k, I32, s), same(top_p, F32, s), same(min_p, F32, s), s, size, lowest, last)
    return lowest, last


def draw(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
         positions: torch.Tensor, floors: Floors | None = None) -> torch.Tensor:
    logits, (s, size), (lowest, last) = no_half(logits), logits.shape, floors or (None, None)
    out = torch.empty(s, dtype=I64)
    call("draw", logits.dtype, same(logits, logits.dtype, s, size), same(temperature, F32, s),
         same(seeds, I64, s), same(positions, I64, s), same(lowest, F32, s), same(last, I32, s), s,
         size, out)
    return out
