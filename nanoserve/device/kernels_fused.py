"""Triton kernels for what lies between the large matrix products: one pass where torch takes many.

A decode step at batch 256 moves so little per operation that launches and memory traffic are the
cost, not arithmetic. So each kernel reads its input once and writes its result once:

    qkv ──► q-norm, k-norm, RoPE ──► q, and K and V straight into their slots of the cache
    x, residual ──► sum ──► sum, norm(sum)          gate_up ──► act(gate) * up
    hidden ──► only the experts that are hit ──► weighted sum

Invariant: **the slow version is the specification.** Each function is the twin of its namesake in
`ops`, where arguments, shapes and meaning are described. Nothing here waits for the device or has a
shape that depends on data: all of it can stand in a CUDA graph. Sums have a fixed order (no
atomics): the same call gives the same bits.

Launch parameters are constants or stand in a table; nothing is tuned at run time. The last
dimension of every tensor is contiguous; rows may be further apart (views of one larger matrix).
`torch.compile` would cost guards on every call, and may recompile in the middle of a request.
"""

from functools import cache

import torch
import triton
import triton.language as tl

FMA = dict(enable_fp_fusion=True)  # a * b + c in one go; Triton 3.10 wants to be asked for it
NORM_PAIRS = 1024  # pairs a program turns: one 128-bit load of each half a lane for 4 warps
GATED_BLOCK = 1024  # columns a program multiplies: 8 a lane, one 128-bit load of each half
# Grouped matmul. A few rows an expert are bound by memory: the smallest tile there is, deep loads.
# Many are bound by arithmetic: 128 rows, as Hopper's wgmma starts at 64. float32, for checks, and
# Turing (see `line_of`) have no tensor cores here: sums take registers.
NO_TENSOR_CORES = dict(M=16, N=32, K=32, num_warps=4, num_stages=3)
EXPERT_LAUNCHES = {
    ("sm_75", "few"): NO_TENSOR_CORES,
    ("sm_75", "many"): NO_TENSOR_CORES,
    ("sm_80", "few"): dict(M=16, N=64, K=128, num_warps=4, num_stages=3),
    ("sm_80", "many"): dict(M=128, N=64, K=32, num_warps=8, num_stages=4),
    ("sm_90", "few"): dict(M=16, N=64, K=128, num_warps=4, num_stages=4),
    ("sm_90", "many"): dict(M=128, N=64, K=64, num_warps=8, num_stages=4),
}


@cache
def table_line(device: torch.device) -> str:
    """The line of a launch table, here and in `kernels`, that a device takes."""
    if device.type != "cuda":  # the interpreter
        return "sm_80"
    return line_of(*torch.cuda.get_device_capability(device))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; an A100's, where there is none."""
    return 108 if device.type != "cuda" else (
        torch.cuda.get_device_properties(device).multi_processor_count)


def line_of(major: int, minor: int) -> str:
    """The table line for a compute capability, from 7.5 on: older cards run `ops` instead.

    H100's asks for wgmma, which (9, x) alone has, and for its 227 KB of shared memory, which B200
    has as well. A100's is for all others: it stays below 99 KB, the least of them (8.6, 8.9, 12.0).
    Turing's (T4) is for 64 KB, and for Triton's products there: sums in float32, which take no
    tensor cores, but many registers.
    """
    assert (major, minor) >= (7, 5), f"compute capability {major}.{minor}: kernels run from 7.5 on"
    return "sm_90" if major in (9, 10) else "sm_80" if major >= 8 else "sm_75"


# ------------------------------------------------ norm, RoPE and the cache


def numbers_and_scales(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache of 8 bits has `ops`'s bytes in another order: behind all numbers of a block stand
    their scales, so that both can be read in wide loads. Views of the two, (num_blocks, block_size,
    num_kv_heads, head_dim) int8 and (num_blocks, num_kv_heads, block_size) float32; of any other
    cache itself, and None."""
    if cache.dtype != torch.int8:
        return cache, None
    num_blocks, size, heads, stored = cache.shape
    numbers, scales = cache.flatten(1).split((size * heads * (stored - 4), size * heads * 4), 1)
    return (numbers.view(num_blocks, size, heads, stored - 4),
            scales.view(torch.float32).view(num_blocks, heads, size))


@triton.jit
def _put(out, at, left, right, mask, scales, head_at, here, HEAD_DIM: tl.constexpr):
    """Store a tile of heads, in halves; in 8 bits by the rule of `ops.quantised`, with a scale for
    each head that is `here`. scales: None for other dtypes."""
    if scales is not None:
        left, right = left.to(tl.float32), right.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        scale = tl.div_rn(top, 127.0)
        tl.store(scales + head_at, scale, here)
        scale = tl.maximum(scale, 1.1754943508222875e-38)[:, None]  # a head of zeros has 0
        # 1.5 * 2^23 has no digits behind the point: adding it rounds, ties to even.
        left = tl.div_rn(left, scale) + 12582912.0 - 12582912.0
        right = tl.div_rn(right, scale) + 12582912.0 - 12582912.0
    tl.store(out + at, left.to(out.dtype.element_ty), mask)
    tl.store(out + at + HEAD_DIM // 2, right.to(out.dtype.element_ty), mask)


@triton.jit
def _norm_rotate(x, out, at, mask, scales, head_at, here, weight, eps, cos, sin,
                 HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Normalise and rotate a tile of heads of one token: x and out point at the token's first."""
    dtype: tl.constexpr = x.dtype.element_ty
    i = tl.arange(0, HALF)  # a pair is (i, i + head_dim / 2)
    inside = i < HEAD_DIM // 2
    left = tl.load(x + at, mask, 0).to(tl.float32)
    right = tl.load(x + at + HEAD_DIM // 2, mask, 0).to(tl.float32)
    if weight is not None:
        mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        w_left = tl.load(weight + i, inside, 0).to(tl.float32)
        w_right = tl.load(weight + i + HEAD_DIM // 2, inside, 0).to(tl.float32)
        left = left * scale * w_left[None, :]
        right = right * scale * w_right[None, :]
    c = tl.load(cos + i, inside, 0)[None, :]  # the second half repeats the first
    s = tl.load(sin + i, inside, 0)[None, :]
    _put(out, at, (left * c - right * s).to(dtype), (right * c + left * s).to(dtype), mask, scales,
         head_at, here, HEAD_DIM)


# Slots are a slice of the batch's buffer, which begins anywhere: kernels.py, on not specialising.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _norm_rope_store_kernel(q, k, v, out, q_weight, k_weight, eps, cos, sin, k_cache, v_cache,
                            k_scales, v_scales, slot_mapping, qkv_stride, out_stride, block_stride,
                            slot_stride, num_heads, num_kv_heads, BLOCK_SIZE: tl.constexpr,
                            HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * HEAD_DIM
    sin += token * HEAD_DIM
    q_tiles = tl.cdiv(num_heads, HEADS)
    is_q = tile < q_tiles
    head = tl.where(is_q, tile, tile - q_tiles) * HEADS + tl.arange(0, HEADS)
    here = head < tl.where(is_q, num_heads, num_kv_heads)
    i = tl.arange(0, HALF)
    at = head[:, None] * HEAD_DIM + i[None, :]  # (HEADS, HALF), the left half
    mask = here[:, None] & (i < HEAD_DIM // 2)[None, :]
    if is_q:
        _norm_rotate(q + token * qkv_stride, out + token * out_stride, at, mask, None, head, here,
                     q_weight, eps, cos, sin, HEAD_DIM, HALF)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            block, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            head_at = block * (block_stride // 4) + head * BLOCK_SIZE + slot  # where its scale is
            first = block * block_stride + slot * slot_stride
            _norm_rotate(k + token * qkv_stride, k_cache + first, at, mask, k_scales, head_at, here,
                         k_weight, eps, cos, sin, HEAD_DIM, HALF)
            from_v = token * qkv_stride + at
            _put(v_cache + first, at, tl.load(v + from_v, mask, 0),
                 tl.load(v + from_v + HEAD_DIM // 2, mask, 0), mask, v_scales, head_at, here,
                 HEAD_DIM)


def norm_rope_store(qkv: torch.Tensor, q_weight: torch.Tensor | None,
                    k_weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                    sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> torch.Tensor:
    """`ops.norm_rope_store`.

    A row of qkv and the caches is dense, rows may be further apart. Returns a new, dense q: that
    writes as many bytes as rotating in place, and a second call does not rotate q twice.
    """
    (k_cache, k_scales), (v_cache, v_scales) = map(numbers_and_scales, (k_cache, v_cache))
    head_dim, (block_size, num_kv_heads) = qkv.shape[2], k_cache.shape[1:3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert all(x.stride()[-2:] == (head_dim, 1) for x in (qkv, k_cache, v_cache))
    assert k_cache.stride() == v_cache.stride() and cos.is_contiguous() and sin.is_contiguous()
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(NORM_PAIRS // half, 1)  # that a program takes
    tiles = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    _norm_rope_store_kernel[len(qkv), tiles](
        q, k, v, out, q_weight, k_weight, eps, cos, sin, k_cache, v_cache, k_scales, v_scales,
        slot_mapping, qkv.stride(0), out.stride(0), *k_cache.stride()[:2], num_heads, num_kv_heads,
        block_size, head_dim, half, heads, num_warps=4, **FMA)
    return out


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, eps, out, total, x_stride, residual_stride, size,
                         BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < size
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * x_stride + i, inside, 0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + i, inside, 0).to(tl.float32)
        tl.store(total + row * size + i, value.to(dtype), inside)
        value = value.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    value = value * scale * tl.load(weight + i, inside, 0).to(tl.float32)
    tl.store(out + row * size + i, value.to(dtype), inside)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.add_rms_norm`, of rows: (num_tokens, size). Without a residual the sum is x itself."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(x.shape[1])  # a whole row: 8 elements a lane, at most 16 warps
    _add_rms_norm_kernel[len(x),](x, residual, weight, eps, out, total, x.stride(0),
                                  0 if residual is None else residual.stride(0), x.shape[1], block,
                                  num_warps=min(max(block // 256, 1), 16), **FMA)
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.rms_norm`, of rows. x: (num_tokens, size)."""
    return add_rms_norm(x, None, weight, eps)[0]


# --------------------------------------------------------------- gated MLPs


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """act(gate) * up. tanh(y) = 2 sigmoid(2y) - 1, so that both activations are x * sigmoid(z)."""
    gate = gate.to(dtype).to(tl.float32)
    z = gate
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return (gate / (1 + tl.exp(-z)) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _act_and_mul_kernel(gate_up, out, stride, size, ACTIVATION: tl.constexpr,
                         BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + i, i < size)
    up = tl.load(gate_up + row * stride + size + i, i < size)
    tl.store(out + row * size + i, _gated(gate, up, ACTIVATION, out.dtype.element_ty), i < size)


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`ops.act_and_mul`. gate_up: (num_tokens, 2 * size) -> (num_tokens, size)"""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    _act_and_mul_kernel[num_tokens, triton.cdiv(size, GATED_BLOCK)](
        gate_up, out, gate_up.stride(0), size, activation, GATED_BLOCK, **FMA)
    return out


# -------------------------------------------------------- mixture of experts


@triton.jit
def _experts_kernel(x, weight, out, order, starts, size, inputs, num_experts,
                    PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out[pair] = x[pair's row] @ weight[pair's expert].T, for up to M pairs of one expert.

    Which expert a tile belongs to is counted here, from the places where the experts' pairs start:

        starts  0 20 20 23   M = 16        expert   0    0    -    2
        tiles   2  0  1                    pairs   0..15 16..19  20..22
    """
    tile, e = tl.program_id(1), tl.arange(0, EXPERTS)
    begin = tl.load(starts + e, e < num_experts, 0).to(tl.int32)
    tiles = (tl.load(starts + e + 1, e < num_experts, 0).to(tl.int32) - begin + M - 1) // M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= num_experts:  # the grid is an upper bound
        return
    tile -= tl.sum(tl.where(e < expert, tiles, 0), 0)
    at = tl.load(starts + expert) + tile * M + tl.arange(0, M)
    own = at < tl.load(starts + expert + 1)
    pair = tl.load(order + at, own, 0).to(tl.int64)  # (M,)
    n, k = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    rows: tl.constexpr = 1 if ACTIVATION is None else 2  # an expert's matrix: (rows * size, inputs)
    x += (pair // PAIRS_PER_ROW)[:, None] * inputs + k[None, :]
    weight += expert.to(tl.int64) * rows * size * inputs + n[:, None] * inputs + k[None, :]
    total = tl.zeros((M, N), tl.float32)
    total_up = tl.zeros((M, N), tl.float32)
    for start in range(0, inputs, K):
        inside = (start + k < inputs)[None, :]
        a = tl.load(x + start, own[:, None] & inside, 0)
        b = tl.load(weight + start, (n < size)[:, None] & inside, 0)
        total = tl.dot(a, b.T, total, input_precision="ieee")
        if ACTIVATION is not None:
            b = tl.load(weight + size * inputs + start, (n < size)[:, None] & inside, 0)
            total_up = tl.dot(a, b.T, total_up, input_precision="ieee")
    if ACTIVATION is not None:
        total = _gated(total, total_up, ACTIVATION, out.dtype.element_ty)
    tl.store(out + pair[:, None] * size + n[None, :], total, own[:, None] & (n < size)[None, :])


@triton.jit
def _weighted_sum_kernel(pairs, weights, ids, out, size, first_expert, last_expert,
                         PAIRS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in range(token * PAIRS_PER_ROW, (token + 1) * PAIRS_PER_ROW):
        expert = tl.load(ids + pair)
        here = (expert >= first_expert) & (expert <= last_expert)
        written = tl.where(here, size, 0)  # another rank's pair is a row that nobody wrote
        value = tl.load(pairs + pair * size + i, i < written, 0).to(tl.float32)
        total += tl.load(weights + pair).to(tl.float32) * value
    tl.store(out + token * size + i, total, i < size)


def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_proj: torch.Tensor, down_proj: torch.Tensor, first_expert: int,
            activation: str) -> torch.Tensor:
    """`ops.experts`, of contiguous tensors.

    Pairs of token and expert are sorted by expert, and cut into tiles of one expert each. Only the
    device knows the number of tiles; the grid is the most there can be, surplus programs return.
    """
    assert all(x.is_contiguous() for x in (hidden, weights, ids, gate_up_proj, down_proj))
    (num_tokens, size), per_token = hidden.shape, ids.shape[1]
    num_experts, _, inner = down_proj.shape
    sorted_ids, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(
        first_expert, first_expert + num_experts + 1, dtype=ids.dtype, device=ids.device))
    phase = "few" if len(order) < 32 * num_experts else "many"
    launch = NO_TENSOR_CORES if hidden.dtype == torch.float32 else (
        EXPERT_LAUNCHES[table_line(hidden.device), phase])
    # 100 pairs, 16 experts, tiles of 16: at most 6 full tiles, and a partial one for each expert.
    tiles = len(order) // launch["M"] + min(num_experts, len(order))
    padded = max(triton.next_power_of_2(num_experts), 16)
    gated = hidden.new_empty(len(order), inner)
    _experts_kernel[triton.cdiv(inner, launch["N"]), tiles](
        hidden, gate_up_proj, gated, order, starts, inner, size, num_experts, per_token,
        activation, padded, **launch, **FMA)
    pairs = hidden.new_empty(len(order), size)
    _experts_kernel[triton.cdiv(size, launch["N"]), tiles](
        gated, down_proj, pairs, order, starts, size, inner, num_experts, 1, None, padded,
        **launch, **FMA)
    out = torch.empty_like(hidden)
    _weighted_sum_kernel[num_tokens, triton.cdiv(size, GATED_BLOCK)](
        pairs, weights, ids, out, size, first_expert, first_expert + num_experts - 1, per_token,
        GATED_BLOCK, **FMA)
    return out
