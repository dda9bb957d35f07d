"""Triton kernels for what lies between the large matrix products: one pass where torch takes many.

A decode step at batch 256 moves so little per operation that launches and memory traffic are the
cost, not arithmetic. So each kernel reads its input once and writes its result once:

    qkv ──► q-norm, k-norm, RoPE ──► q, and K and V straight into their slots of the cache
    x, residual ──► sum ──► sum, norm(sum)          gate_up ──► act(gate) * up
    hidden ──► only the experts that are hit ──► weighted sum      logits ──► token ids

Invariant: **the slow version is the specification.** Each function is the twin of its namesake in
`ops`, where arguments, shapes and meaning are described. Nothing here waits for the device or has a
shape that depends on data: all of it can stand in a CUDA graph. Sums have a fixed order (no
atomics): the same call gives the same bits.

Launch parameters are constants or stand in a table; nothing is tuned at run time. The last
dimension of every tensor is contiguous; rows may be further apart (views of one larger matrix).
Roads not taken: `torch.compile`, which costs guards on every call and may recompile in the middle
of a request; Philox for random numbers: forty multiplications a logit where SplitMix64 takes three.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from nanoserve.ops import Floors

FMA = dict(enable_fp_fusion=True)  # a * b + c in one go; Triton 3.10 wants to be asked for it
NORM_PAIRS = 1024  # pairs a program turns: one 128-bit load of each half a lane for 4 warps
GATED_BLOCK = 1024  # columns a program multiplies: 8 a lane, one 128-bit load of each half
SAMPLE_CHUNK, SAMPLE_BLOCK = 8192, 2048  # logits a program looks at, and how many at a time
FILTER_BLOCK = 16384  # logits at a time, 32 a lane: a program alone must have many loads in flight
# Grouped matmul. A few rows an expert are bound by memory: the smallest tile there is, deep loads.
# Many are bound by arithmetic: 128 rows, as Hopper's wgmma starts at 64. float32 is for checks:
# without tensor cores, sums take registers.
EXPERT_LAUNCHES = {
    ("sm_80", "few"): dict(M=16, N=64, K=128, num_warps=4, num_stages=3),
    ("sm_80", "many"): dict(M=128, N=64, K=32, num_warps=8, num_stages=4),
    ("sm_90", "few"): dict(M=16, N=64, K=128, num_warps=4, num_stages=4),
    ("sm_90", "many"): dict(M=128, N=64, K=64, num_warps=8, num_stages=4),
}
FLOAT32_EXPERTS = dict(M=16, N=32, K=32, num_warps=4, num_stages=3)


@cache
def table_line(device: torch.device) -> str:
    """The line of a launch table, here and in `kernels`, that a device takes."""
    if device.type != "cuda":  # the interpreter
        return "sm_80"
    return line_of(*torch.cuda.get_device_capability(device))


def line_of(major: int, minor: int) -> str:
    """The table line for a compute capability, from 8.0 on: older cards run `ops` instead.

    H100's asks for wgmma, which (9, x) alone has, and for its 227 KB of shared memory, which B200
    has as well. A100's is for all others: it stays below 99 KB, the least of them (8.6, 8.9, 12.0).
    """
    assert major >= 8, f"compute capability {major}.{minor}: 8.0 is the least that kernels run on"
    return "sm_90" if major in (9, 10) else "sm_80"


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
    """Store a tile of heads, in halves; in 8 bits by the rule of `ops.small`, with a scale for each
    head that is `here`. scales: None for other dtypes."""
    if scales is not None:
        left, right = left.to(tl.float32), right.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        scale = tl.div_rn(top, 127.0)
        tl.store(scales + head_at, scale, here)
        scale = tl.maximum(scale, 1.1754943508222875e-38)[:, None]  # of a head of zeros
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
    i = tl.arange(0, HALF)  # of the pair (i, i + head_dim / 2)
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
            head_at = block * (block_stride // 4) + head * BLOCK_SIZE + slot  # of its scale
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
    rows: tl.constexpr = 1 if ACTIVATION is None else 2  # its matrix: (rows * size, inputs)
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
    launch = FLOAT32_EXPERTS if hidden.dtype == torch.float32 else (
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


# ----------------------------------------------------------------- sampling


GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64's increment, as in ops.py
NO_ID = tl.constexpr(2 ** 31 - 1)


@triton.jit
def _stir(x):
    """SplitMix64's output function for uint64, but for its last step, x ^ (x >> 31)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 27)) * 0x94D049BB133111EB


@triton.jit
def _exponential(key, ids):
    """-log(1 - u) for each token id, u in (0, 1) from 32 bits of (key, id) alone.

    The winner of 150,000 tokens has a u of about 1e-5. float32 keeps all bits of u, but only seven
    in 1 - u. So a series replaces the log for small u: u + u^2/2 + u^3/3 + u^4/4.
    """
    bits = (_stir(key + ids.to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)
    bits ^= bits >> 31  # the last step, for the upper half
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0 ** -32, 1 - 2.0 ** -24)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return tl.where(u < 1 / 64, series, -tl.log(1 - u))


@triton.jit
def _scaled(logits, ids, vocab_size, heat):
    """logits times 1 / temperature; -0 becomes 0, which equals it."""
    x = tl.load(logits + ids, ids < vocab_size, float("-inf")).to(tl.float32)
    return x * tl.div_rn(1.0, tl.where(heat == 0, 1.0, heat)) + 0.0


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "positions", "floors",
                                            "last_ids"])
def _sample_kernel(logits, temperature, seeds, positions, floors, last_ids, scores, tokens, stride,
                   vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The best score in a chunk of a row, and the lowest id that has it.

    A score is x - log(e), x the scaled logit and -log(e) Gumbel noise. x - log(e) > y - log(d) is
    exp(x - y) * d > e: so each lane compares its tokens without a log, and takes one at the end.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    key = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    key = _stir(key + tl.load(positions + row).to(tl.uint64) * GOLDEN)
    key ^= key >> 31
    best, best_e = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 1, tl.float32)
    best_id = chunk * CHUNK + tl.arange(0, BLOCK)
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, vocab_size), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _scaled(logits + row * stride, ids, vocab_size, heat)
        x = tl.where(x != x, float("inf"), x)  # NaN wins, as in torch.argmax
        if heat == 0:
            better = x > best
        else:
            if floors is not None:
                floor, last_id = tl.load(floors + row), tl.load(last_ids + row)
                x = tl.where((x < floor) | ((x == floor) & (ids > last_id)), float("-inf"), x)
            e = _exponential(key, ids)
            better = tl.exp(x - best) * best_e > e
            best_e = tl.where(better, e, best_e)
        best, best_id = tl.where(better, x, best), tl.where(better, ids, best_id)
    best -= tl.log(best_e)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(scores + at, top)
    tl.store(tokens + at, tl.min(tl.where(best == top, best_id, NO_ID), 0).to(tl.int64))


def draw(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
         positions: torch.Tensor, floors: Floors | None = None) -> torch.Tensor:
    """`ops.draw`, by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): argmax(logits /
    temperature + Gumbel noise) is distributed like their softmax.

    Ties go to the lowest id. Greedy rows are `ops.draw`'s token for token. Drawn ones are only
    distributed alike: an inverse CDF takes one random number a row where this takes one a logit, so
    a seed gives another token on a CPU. (The tests compute the same bits in plain torch.)
    """
    s, vocab_size = logits.shape
    lowest, last = floors or (None, None)
    chunks = triton.cdiv(vocab_size, SAMPLE_CHUNK)
    scores = torch.empty(s, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(s, chunks, dtype=torch.int64, device=logits.device)
    _sample_kernel[s, chunks](logits, temperature, seeds, positions, lowest, last, scores,
                              tokens, logits.stride(0), vocab_size, SAMPLE_CHUNK, SAMPLE_BLOCK,
                              num_warps=8, **FMA)
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]  # the first of equal chunks


@triton.jit
def _weigh(logits, vocab_size, heat, middle, top, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """One pass over a row. Of the numbers from `middle` on: their weight, which is their count or
    the sum of exp(x - top), and the smallest; and the largest one below `middle`."""
    weight, above, below = 0.0, float("inf"), float("-inf")
    for start in range(0, vocab_size, BLOCK):
        x = _scaled(logits, start + tl.arange(0, BLOCK), vocab_size, heat)
        if COUNT:
            weight += tl.sum(tl.where(x >= middle, 1.0, 0.0), 0)
        else:
            weight += tl.sum(tl.where(x >= middle, tl.exp(x - top), 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(x >= middle, x, float("inf")), 0))
        below = tl.maximum(below, tl.max(tl.where(x < middle, x, float("-inf")), 0))
    return weight, above, below


@triton.jit
def _between(low, high):
    """The middle of the floats in (low, high]; the float after `low` if both are equal.

    Taken as integers, floats' bits are in order if all but the sign of negative ones is flipped.
    """
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    low, high = low ^ ((low >> 31) & 0x7FFFFFFF), high ^ ((high >> 31) & 0x7FFFFFFF)
    middle = (low & high) + ((low ^ high) >> 1) + 1  # the mean rounded down, plus 1: no overflow
    return (middle ^ ((middle >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(logits, vocab_size, heat, low, top, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number of the row from which on the weight reaches `target`; `low` if none does.

    Bisection, one pass over the row a step. Its ends move to numbers of the row, so it takes about
    log2(vocab_size) steps, and never more than 32.
    """
    high = top
    while low < high:
        middle = _between(low, high)
        weight, above, below = _weigh(logits, vocab_size, heat, middle, top, COUNT, BLOCK)
        low = tl.where(weight >= target, above, low)
        below = tl.maximum(below, low)
        high = tl.where(weight > target, high, tl.where(weight == target, above, below))
    return low


@triton.jit(do_not_specialize_on_alignment=["temperature", "log_min_p", "top_k", "top_p"])
def _find_floors_kernel(logits, temperature, log_min_p, top_k, top_p, floors, last_ids, stride,
                        vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat, floor = tl.load(temperature + row), tl.load(log_min_p + row)
    k, p = tl.load(top_k + row).to(tl.float32), tl.load(top_p + row)  # exact up to 2^24
    has_k, last_id = (k > 0) & (k < vocab_size), vocab_size
    if (heat != 0) & (has_k | (p < 1) | (floor > float("-inf"))):
        logits += row * stride
        _, _, top = _weigh(logits, vocab_size, heat, float("inf"), 0.0, True, BLOCK)
        floor += top
        if has_k:
            floor = _search(logits, vocab_size, heat, floor, top, k, True, BLOCK)
        if p < 1:
            mass, _, _ = _weigh(logits, vocab_size, heat, floor, top, False, BLOCK)
            floor = _search(logits, vocab_size, heat, floor, top, p * mass, False, BLOCK)
            # Of equals at the floor only as many stay as it takes to reach p, the lowest ids.
            above, _, _ = _weigh(logits, vocab_size, heat, _between(floor, floor), top, False,
                                 BLOCK)
            needed = tl.maximum(tl.ceil((p * mass - above) / tl.exp(floor - top)), 1.0)
            count = 0
            for start in range(0, vocab_size, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                equal = (_scaled(logits, ids, vocab_size, heat) == floor).to(tl.int32)
                rank = count + tl.cumsum(equal, 0)
                reached = (equal == 1) & (rank >= needed)
                last_id = tl.minimum(last_id, tl.min(tl.where(reached, ids, NO_ID), 0))
                count += tl.sum(equal, 0)
    tl.store(floors + row, floor)
    tl.store(last_ids + row, last_id)


def floors(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> Floors:
    """`ops.floors`. The programs of greedy rows and of rows without a filter return at once.

    Known limit: a row is searched by one program, in about 20 passes for top-k and as many for
    top-p. The row stays in the L2 cache.
    """
    s, vocab_size = logits.shape
    lowest = torch.empty(s, dtype=torch.float32, device=logits.device)
    last = torch.empty(s, dtype=torch.int32, device=logits.device)
    _find_floors_kernel[s,](logits, temperature, min_p.log(), top_k, top_p, lowest, last,
                            logits.stride(0), vocab_size, FILTER_BLOCK, num_warps=16,
                            **FMA)
    return lowest, last
