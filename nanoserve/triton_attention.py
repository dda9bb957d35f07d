"""The Triton kernels for GPUs, with the same functions as `ops`. This file: attention.

triton_fused.py and triton_sampling.py have the other functions. Attention reads K
and V where they lie, a tile of BLOCK_N keys at a time, and keeps a running softmax (FlashAttention;
Dao et al. 2022):

    one program: BLOCK_Q queries of a row, and the GROUP query heads that share a KV head, folded
    into the BLOCK_M rows of one matrix product, so that K and V are read once a group

    query 35, heads 0 1 2 |        keys 0..15   16..31   32..37        block_table [7, 2, 9]
    query 36, heads 0 1 2 |   x    block 7      block 2  block 9       k_cache (num_blocks,
    query 37, heads 0 1 2 |        └─ no mask needed ─┘  masked        block_size, kv_heads, D)
    padding to BLOCK_M

Decode is the same with one query: one source, two launches. Rows of a few queries, drafts that are
checked, take a lower tile. Few rows with long contexts don't fill a GPU: their keys are split over
programs whose results `_combine_kernel` joins (flash-decoding). Many rows fill it, but one much
longer than the others would end long after them. So every row gets as many programs as a long one
needs; those that have no keys to read, in all shorter rows, return at once.

Invariant: a launch depends on shapes and on `num_decodes` alone, never on a length; what varies is
read from the device. So a CUDA graph of a launch stays valid, and nothing is tuned at run time.
A list of prefill tiles made on the host would be one more copy a step; instead a tile finds its row
in `cu_seqlens_q`.
"""

import os
from functools import cache, partial

import torch
import triton
import triton.language as tl

from nanoserve.batch import Batch
from nanoserve.ops import argmax, embed, new_cache, prepack
from nanoserve.ops import linear as plain_linear
from nanoserve.triton_fused import (
    FMA,
    act_and_mul,
    add_rms_norm,
    experts,
    multiprocessors,
    norm_rope_store,
    numbers_and_scales,
    rms_norm,
    table_line,
)
from nanoserve.triton_sampling import sample_tokens, thresholds

# The backend. Matrix products are cuBLAS's, which `ops` calls through torch; the cache is `ops`'s
# own (in 8 bits in another order); all but attention comes from the other files of kernels.
__all__ = ["act_and_mul", "add_rms_norm", "argmax", "sample_tokens", "experts", "thresholds",
           "linear", "embed", "new_cache", "norm_rope_store", "prepack", "paged_attention",
           "rms_norm"]
WHOLE = tl.constexpr(-1.0)  # in the place of a split's total, which is never negative
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET, as it is at this import
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is an instruction

# By `table_line` and phase, for heads of 256 bytes (128 in bf16); for others see `_tiles`.
# Decode reads each key once for a few flops. BLOCK_M 16 is the least a tensor core takes. A program
# that loads two tiles of 64 keys ahead needs 64 KB: an A100's multiprocessor has room for two. On
# Hopper one tile ahead, so 32 KB and more programs, reads faster where no row is split. Split rows
# are few programs, which load two tiles ahead (docs/log, "A first run on a GPU").
# Prefill is bound by flops. BLOCK_M 128 is two of Hopper's warpgroups of 64 rows, wgmma's least;
# with 4 warps a thread would hold 128 numbers of the output alone. BLOCK_N 64 spills on sm_80.
# Few queries a row are bound by reading, as a decode is: BLOCK_M is what they need, within what
# leaves two programs the registers of a multiprocessor (64 spills on sm_80; it is wgmma's least).
# On Turing a product is sums in registers, of which these tiles spill none.
LAUNCHES = {
    ("sm_75", "decode"): dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1),
    ("sm_75", "split"): dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1),
    ("sm_75", "few"): dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1),
    ("sm_75", "prefill"): dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1),
    ("sm_80", "decode"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_80", "split"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_80", "few"): dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2),
    ("sm_80", "prefill"): dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3),
    ("sm_90", "decode"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2),
    ("sm_90", "split"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_90", "few"): dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3),
    ("sm_90", "prefill"): dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
}
FEW = 16  # queries a row, on average, that are checked drafts and no chunk of a prompt
SPLIT_PROGRAMS = 2  # worth starting on each multiprocessor; 4 were slower (docs/log)
MAX_SPLITS = 32
MAX_COUNTED = 2 ** 16  # tiles times KV heads that may be split
MIN_SPLIT_KEYS = 256  # reading fewer keys takes less time than joining one more split
# The last program of a split row joins it, without a second kernel, if NANOSERVE_JOIN=1 asks for
# that: off until a GPU has shown that it is right and faster.
JOIN = os.environ.get("NANOSERVE_JOIN") == "1"
# Of rows that fill the GPU, those with more keys than this are split. Most of these programs return
# at once, so there may be more of them on each multiprocessor (reckoned, not measured).
LONG_KEYS, LONG_PROGRAMS = 2048, 32


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None,
           out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`ops.linear`; cuBLAS can store the float32 sums that it makes in any case."""
    if out_dtype in (None, x.dtype) or not x.is_cuda:
        return plain_linear(x, packed, bias, out_dtype)
    out = torch.mm(x, packed.T, out_dtype=out_dtype)
    return out if bias is None else out + bias


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None, softcap: float | None = None,
                    sinks: torch.Tensor | None = None,
                    last: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.paged_attention`, with the same arguments and meaning.

    q: (num_tokens, num_heads, head_dim); caches: (num_blocks, block_size, num_kv_heads, head_dim),
    both with the same strides; the last dimension contiguous. fp16, bf16, fp32. Any head size (a
    power of two wastes nothing) and any block size (best a multiple of BLOCK_N; with other sizes
    each key looks up its block). In 8 bits K's scales multiply scores, and V's the weights of the
    softmax. In a graph `num_decodes` is the recorded number of rows, or 0 where rows have several
    tokens. Padding, of rows (seq_len 0) and after the last row's tokens, yields zeros.
    """
    assert k_cache.stride() == v_cache.stride(), "one set of strides serves K and V"
    (k_cache, k_scales), (v_cache, v_scales) = map(numbers_and_scales, (k_cache, v_cache))
    arch, out = table_line(q.device), torch.empty_like(q)
    num_heads, head_dim = q.shape[1:]
    num_decodes, num_rows = batch.num_decodes, len(batch.seq_lens)
    num_chunks, num_tokens = num_rows - num_decodes, len(q) - num_decodes  # after the decodes
    block_size, num_kv_heads = k_cache.shape[1:3]
    group, longest = num_heads // num_kv_heads, batch.block_tables.shape[1] * block_size
    tiles = partial(_tiles, arch, q.dtype, group, head_dim, k_scales is not None)

    def launch(phase: str, programs: int, out: torch.Tensor) -> None:
        """out: of the tokens that these programs compute, from first_token on."""
        first_token = 0 if phase == "decode" else num_decodes
        even, sums, stats, most = 1, None, None, multiprocessors(q.device)
        if phase != "prefill" or longest > MIN_SPLIT_KEYS:
            even = _num_splits(programs, num_kv_heads, SPLIT_PROGRAMS * most)
        splits = even  # a long row may have more
        if phase != "prefill" and longest > 4 * LONG_KEYS:  # else joining takes more than it saves
            splits = max(even, _num_splits(programs, num_kv_heads, LONG_PROGRAMS * most))
        phase = "split" if phase == "decode" and even > 1 else phase
        if splits > 1:  # each gives a weighted sum, its highest score and its sum of weights
            shape, on = (splits, *out.shape[:2]), dict(dtype=torch.float32, device=q.device)
            sums, stats = torch.empty(*shape, head_dim, **on), torch.empty(*shape, 2, **on)
        joins = splits > 1 and JOIN and programs * num_kv_heads <= MAX_COUNTED
        arrived = counters(q.device) if joins else None
        if batch.is_padded and (splits == 1 or joins):
            out.zero_()
        is_decode = first_token < num_decodes
        _attention_kernel[num_kv_heads, programs, splits](
            q, k_cache, v_cache, k_scales, v_scales, out, sums, stats, arrived, sinks, last,
            batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, num_decodes, num_rows,
            first_token, even, batch.block_tables.stride(0), scale * LOG2E.value, *q.stride()[:2],
            *k_cache.stride()[:3], *out.stride()[:2], len(out), GROUP=group,
            HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window or 0, SOFTCAP=softcap or 0.0,
            DECODE=is_decode, MIN_SPLIT_KEYS=MIN_SPLIT_KEYS, LONG_KEYS=LONG_KEYS, **tiles(phase),
            **FMA)
        if splits > 1 and not joins:
            _combine_kernel[num_heads, len(out)](
                sums, stats, out, None if is_decode else batch.cu_seqlens_q, num_rows,
                first_token, splits, *out.stride()[:2], HEAD_DIM=head_dim, MAX_SPLITS=MAX_SPLITS,
                BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4, **FMA)

    if num_decodes:
        launch("decode", num_decodes, out[:num_decodes])
    if num_chunks:
        phase = "few" if num_tokens <= FEW * num_chunks else "prefill"
        # At most one tile of a row is not full. This may count too many programs, which return.
        launch(phase, num_tokens // (tiles(phase)["BLOCK_M"] // group) + num_chunks,
               out[num_decodes:])
    return out


@cache
def counters(device: torch.device) -> torch.Tensor:
    """How many splits of each tile and KV head have arrived: zeros, between two launches. Launches
    of one GPU share them, as they follow each other on one stream."""
    return torch.zeros(MAX_COUNTED, dtype=torch.int32, device=device)


def _num_splits(num_tiles: int, num_kv_heads: int, programs: int) -> int:
    """Over how many programs the keys of a tile, or of a row that decodes, are spread: a power of
    two, from shapes alone. programs: as many as are worth starting.

    On an H100 with 8 KV heads: 32 for one tile, 4 for 8, 2 for 16, and 1 from 32 on; of a long row
    16 among 31 others, 2 among 255.
    """
    if INTERPRETED:  # one program after the other: nothing to gain
        return 1
    wanted = min(programs // (num_tiles * num_kv_heads), MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


@cache
def _tiles(arch: str, dtype: torch.dtype, group: int, head_dim: int, is_int8: bool,
           phase: str) -> dict:
    """The table's entry, for this head size: a tile of keys keeps its size in bytes, within 16 to
    64 keys. fp32, for comparisons and without tensor cores, gets half of that, to avoid spills. So
    do 8 bits, which are widened in registers; a prefill loads one more tile of them ahead."""
    entry = LAUNCHES[arch, phase]
    block_d = max(16, triton.next_power_of_2(head_dim))
    size = block_d * dtype.itemsize ** 2  # 512 for the table's 128 numbers of 2 bytes
    most = entry["BLOCK_M"] if phase != "few" else min(
        entry["BLOCK_M"], triton.next_power_of_2(FEW * group))
    block_m = max(16, most * 512 // max(size, 512), triton.next_power_of_2(group))
    block_n = max(16, min(64, entry["BLOCK_N"] * 512 // size) >> is_int8)
    return entry | dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
                        num_stages=entry["num_stages"] + (is_int8 and phase == "prefill"))


# Not specialised on: what changes from step to step. Each new divisibility by 16, of a width or of
# an address in the batch's buffer, would otherwise compile another program.
@triton.jit(do_not_specialize=["num_decodes", "num_rows", "first_token", "even", "table_stride",
                               "num_tokens"],
            do_not_specialize_on_alignment=["last_ptr", "tables_ptr", "seq_lens_ptr",
                                            "cu_seqlens_q_ptr"])
def _attention_kernel(q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, sums_ptr,
                      stats_ptr, arrived_ptr, sinks_ptr, last_ptr, tables_ptr, seq_lens_ptr,
                      cu_seqlens_q_ptr,
                      num_decodes, num_rows, first_token, even, table_stride, scale,
                      q_stride_token, q_stride_head,
                      kv_stride_block, kv_stride_slot, kv_stride_head, out_stride_token,
                      out_stride_head, num_tokens,
                      GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DECODE: tl.constexpr,
                      MIN_SPLIT_KEYS: tl.constexpr, LONG_KEYS: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid: (KV heads, decode rows or tiles of others, splits); KV heads are neighbours in memory
    and so run side by side. `out` begins with first_token, one of num_tokens. With `stats_ptr` keys
    are split; a split's sum, not divided yet, goes to `sums`, unless the first one has all keys."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, program, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        row, first_query, query_len, token = program, 0, 1, program
    else:  # a row's last tile has the most keys: the longest first
        row, first_query = _find_tile(cu_seqlens_q_ptr, tl.num_programs(1) - 1 - program,
                                      num_decodes, num_rows, BLOCK_Q)
        token = tl.load(cu_seqlens_q_ptr + row)
        query_len = tl.load(cu_seqlens_q_ptr + row + 1) - token
        if first_query >= query_len:
            return
    prefix = tl.load(seq_lens_ptr + row) - query_len  # the position of the row's first query
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    # Row m of the product is query m // GROUP of the tile with head m % GROUP of the group.
    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries, heads = first_query + m // GROUP, kv_head * GROUP + m % GROUP
    in_tile = (queries <= last_query)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = token.to(tl.int64) + queries  # 64 bits: a token times a stride may pass 2^31
    q = tl.load(q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head
                + dims[None, :], mask=in_tile, other=0.0)  # (BLOCK_M, BLOCK_D)

    # Some query sees the keys at [first, end), every query those at [free, free_end). All but `end`
    # are multiples of BLOCK_N. Queries 3 to 5 after a prefix of 32 see up to 36 to 38 keys.
    start, end = prefix + first_query, prefix + last_query + 1
    last = prefix + queries
    if last_ptr is not None:  # an image's end
        last = tl.load(last_ptr + tokens, mask=queries <= last_query, other=0)
        end = tl.maximum(end, tl.max(last, 0) + 1)
    first, seen_from, free, free_end = 0, 0, 0, 0
    if WINDOW > 0:
        seen_from = tl.maximum(start - WINDOW + 1, 0)
        first = seen_from // BLOCK_N * BLOCK_N
    if not DECODE:  # a decode waits for memory, its masks are free: one loop, loads never pause
        free_end = (start + 1) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            free = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
    tokens -= first_token
    if stats_ptr is not None:  # splits have equally many tiles; the last ones fewer, or none
        share = tl.maximum(tl.cdiv(end - first, even), MIN_SPLIT_KEYS)
        share = tl.minimum(share, tl.maximum(tl.cdiv(end - first, tl.num_programs(2)), LONG_KEYS))
        share = tl.cdiv(share, BLOCK_N) * BLOCK_N
        is_whole = DECODE & (end - first <= share)  # others need too many registers for two ways
        used = tl.cdiv(end - first, share)  # splits that have keys
        first += split * share
        end = tl.minimum(end, first + share)
        at = split * num_tokens + tokens.to(tl.int32)
        at = at * (tl.num_programs(0) * GROUP) + heads  # of float32: far fewer than 2^31
        if (split > 0) & (first >= end):
            tl.store(stats_ptr + 2 * at + 1, tl.zeros((BLOCK_M,), tl.float32),
                     mask=queries <= last_query)
            return

    highest = tl.full((BLOCK_M,), -1e30, tl.float32)  # not -inf: inf - inf is NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:  # the sink counts as a key before all others, in split 0 only
        sinks = tl.maximum(tl.load(sinks_ptr + heads) * LOG2E, highest)
        highest = tl.where(split == 0, sinks, highest)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    k_ptr += kv_head * kv_stride_head
    v_ptr += kv_head * kv_stride_head
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head * BLOCK_SIZE
        v_scales_ptr += kv_head * BLOCK_SIZE
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    low = first
    for part in tl.static_range(3):  # the window's edge, the middle without masks, the causal edge
        high = tl.minimum(free if part == 0 else free_end, end) if part < 2 else end
        if part == 2 or (not DECODE and (part == 1 or WINDOW > 0)):
            acc, highest, total = _attend(
                acc, highest, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, low,
                high, seen_from, end, prefix + queries, last, scale, kv_stride_block,
                kv_stride_slot, part != 1, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D)
        low = tl.maximum(low, high)

    if stats_ptr is not None:
        if not is_whole:
            tl.store(stats_ptr + 2 * at, highest, mask=queries <= last_query)
            tl.store(stats_ptr + 2 * at + 1, total, mask=queries <= last_query)
            tl.store(sums_ptr + at[:, None].to(tl.int64) * HEAD_DIM + dims[None, :], acc,
                     mask=in_tile)
            if arrived_ptr is None:
                return
            else:
                tl.debug_barrier()  # all threads' sums are written before this program counts
                arrived_ptr += program * tl.num_programs(0) + kv_head
                if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") < used - 1:
                    return
                tl.store(arrived_ptr, 0)  # for the next launch
                apart = num_tokens * tl.num_programs(0) * GROUP
                acc, highest, total = _join(sums_ptr, stats_ptr, at, split, used, apart, in_tile,
                                            queries <= last_query, dims, HEAD_DIM, BLOCK_M, BLOCK_D)
        elif arrived_ptr is None:
            tl.store(stats_ptr + 2 * at + 1, tl.full((BLOCK_M,), WHOLE, tl.float32),
                     mask=queries <= last_query)
    acc = acc / tl.where(total == 0, 1, total)[:, None]  # no keys at all: a row of padding
    tl.store(out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head
             + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def _join(sums_ptr, stats_ptr, at, split, used, apart, in_tile, is_query, dims,
          HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What all splits of a tile have written, first to last, whichever program came last."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    highest, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    at -= split * apart
    for _ in range(0, used):
        other = tl.load(stats_ptr + 2 * at, mask=is_query, other=-1e30)
        weight = tl.load(stats_ptr + 2 * at + 1, mask=is_query, other=0.0)
        summed = tl.load(sums_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=in_tile, other=0.0)
        new_highest = tl.maximum(highest, other)
        shrink, grow = tl.exp2(highest - new_highest), tl.exp2(other - new_highest)
        acc = acc * shrink[:, None] + summed * grow[:, None]
        total = total * shrink + weight * grow
        highest = new_highest
        at += apart
    return acc, highest, total


@triton.jit
def _find_tile(cu_seqlens_q_ptr, tile, num_decodes, num_rows, BLOCK_Q: tl.constexpr):
    """Which row a tile belongs to, and its first query there: (row, first_query).

    A row's tiles are numbered from (queries before it) // BLOCK_Q + (rows before it) on, decodes
    not counted, which leaves enough numbers for the tiles of each. With BLOCK_Q 4, rows of 3 and 6
    queries begin at 0 and 3 // 4 + 1 = 1, the next one at 9 // 4 + 2 = 4: tile 3 has no queries.
    Numbers grow, so as many rows begin up to this tile as there are rows up to its own. Loads of
    32 rows wait for nothing; those of a binary search each wait for the one before.
    """
    found, begin = 0, 0
    for start in range(num_decodes, num_rows, 32):
        row = start + tl.arange(0, 32)
        queries = tl.load(cu_seqlens_q_ptr + row, row < num_rows, 0) - num_decodes  # before it
        first = queries // BLOCK_Q + row - num_decodes
        here = (row < num_rows) & (first <= tile)
        found += tl.sum(here.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(here, first, 0), 0))
    return num_decodes + found - 1, (tile - begin) * BLOCK_Q


@triton.jit
def _attend(acc, highest, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, low, high,
            seen_from, end, positions, last, scale, stride_block, stride_slot, MASKED: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Take the keys at [low, high) into the running softmax; `low` is a multiple of BLOCK_N.

    Nothing of K and V outside [seen_from, end) is read. Bad K would only spoil scores that are
    replaced, but V is multiplied by a weight of 0, and 0 * inf is NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    block = _block_ids(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
    for tile in range(low, high, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        slots = block.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * stride_slot
        scales = block.to(tl.int64) * (stride_block // 4) + keys % BLOCK_SIZE
        # The table is read a tile ahead: loads that wait for a load can't be started early.
        block = _block_ids(table_ptr, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        mask, readable = (dims < HEAD_DIM)[None, :], (keys >= seen_from) & (keys < end)
        if MASKED:
            mask = mask & readable[:, None]
        at = slots[:, None] + dims[None, :]  # (BLOCK_N, BLOCK_D)
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        # Scores in units of log2, but for a factor that joins the subtraction in one instruction.
        scores, factor = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee"), scale
        if k_scales_ptr is not None:
            scores *= tl.load(k_scales_ptr + scales, mask=readable, other=0.0)[None, :]
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities
            scores = SOFTCAP * LOG2E * (1 - 2 / (1 + tl.exp2(scores * (2 * scale / SOFTCAP))))
            factor = 1.0
        if MASKED:
            visible = readable[None, :] & (keys[None, :] <= last[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_highest[:, None])  # (BLOCK_M, BLOCK_N)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        if v_scales_ptr is not None:
            weights *= tl.load(v_scales_ptr + scales, mask=readable, other=0.0)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None],
                     input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit
def _block_ids(table_ptr, tile, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a tile's keys: one number where the tile lies in one block. The table is not
    read past the row's own entries."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        keys = tile + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit(do_not_specialize=["num_rows", "first_token", "num_splits"],
            do_not_specialize_on_alignment=["cu_seqlens_q_ptr"])
def _combine_kernel(sums_ptr, stats_ptr, out_ptr, cu_seqlens_q_ptr, num_rows, first_token,
                    num_splits, out_stride_token, out_stride_head, HEAD_DIM: tl.constexpr,
                    MAX_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join the splits of one head of a token. Grid: (heads, tokens from first_token on).

    sums: (splits, tokens, heads, head_dim); stats: (splits, tokens, heads, 2). A split without keys
    has a total of 0, and may have written nothing else; splits from num_splits on are treated as
    such, and all of a token after the last row's. (A decode is no such token.) Where the first
    split's total is WHOLE it had all keys, and has written the result.
    """
    head, token = tl.program_id(0), tl.program_id(1)
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_D)
    if cu_seqlens_q_ptr is not None:
        end = tl.load(cu_seqlens_q_ptr + num_rows)
        num_splits = tl.where(first_token + token < end, num_splits, 0)
    mine = token * tl.num_programs(0) + head
    if tl.load(stats_ptr + 2 * mine + 1, mask=num_splits > 0, other=0.0) == WHOLE:
        return
    there = splits < num_splits
    at = splits * tl.num_programs(1) * tl.num_programs(0) + mine
    total = tl.load(stats_ptr + 2 * at + 1, mask=there, other=0.0)
    there = there & (total != 0)
    highest = tl.load(stats_ptr + 2 * at, mask=there, other=-1e30)
    weights = tl.exp2(highest - tl.max(highest, 0))  # (MAX_SPLITS,)
    sums = tl.load(sums_ptr + at[:, None] * HEAD_DIM + dims[None, :],
                   mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(total * weights, 0)
    out = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0, 1, total)
    tl.store(out_ptr + token.to(tl.int64) * out_stride_token + head * out_stride_head + dims,
             out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
