"""Every Triton kernel, each a faster way to say what a plain torch twin says elsewhere.

Paged attention (twin: `attention.paged_attention`, the specification) reads K and V where they lie,
a tile of BLOCK_N keys at a time, and keeps a running softmax (FlashAttention; Dao et al. 2022):

    one program: a row, one KV head, BLOCK_Q queries of the row's, times the GROUP heads that share
    the KV head, folded into the BLOCK_M rows of one matrix product: K and V are read once a group

    query 35, heads 0 1 2 |        keys 0..15   16..31   32..47        block_table [7, 2, 9]
    query 36, heads 0 1 2 |   x    block 7      block 2  block 9       K cache (num_blocks,
    query 37, heads 0 1 2 |        free         free     masked          block_size, kv_heads, D)
    padding to BLOCK_M    |        └────── tiles ──────┴─ causal edge, seq_len or window ─┘

Decode is the same with one query, so the source is one and the launches are two. Decoding reads
each key once for a few flops: BLOCK_M is the group padded to 16, the least a tensor core takes.
Prefill wants many flops a key: BLOCK_M 128 is two of Hopper's warpgroups of 64 rows (wgmma).

Few rows with long contexts don't fill a GPU: their keys are split over programs whose results
`_combine_kernel` joins (flash-decoding; Dao et al. 2023).

Invariant: a launch depends on shapes and on `num_decodes` alone, never on a length; what varies is
read from the device. So a CUDA graph of it stays true, and nothing is tuned or chosen at run time.
Road not taken: a work list of prefill tiles made on the host. It would be copied every step; finding
the row in `cu_seqlens_q` takes a program log2(rows) reads, microseconds, and needs nothing.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from nanoserve.batch import Batch

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is an instruction

# How the attention is launched, for a KV head of at most 256 bytes (128 in fp16 and bf16); wider
# ones get smaller tiles, see `_tiles`. BLOCK_N 64: two tiles of K and V on their way are enough bytes
# to hide memory behind (64 KB), and three such programs fit on a multiprocessor. Decode has 4 warps
# because there is little to compute. Prefill has 8: with 4, each thread would keep 128 numbers of
# the output alone and spill. sm_80 stands for every older or smaller card too.
LAUNCHES = {
    ("sm_80", "decode"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_80", "prefill"): dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3),
    ("sm_90", "decode"): dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    ("sm_90", "prefill"): dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
}
# Decode programs that are worth having: four for each multiprocessor of an A100 and an H100.
PROGRAMS = {"sm_80": 4 * 108, "sm_90": 4 * 132}
MAX_SPLITS = 32
MIN_SPLIT_KEYS = 256  # fewer keys than these cost less to read than a split costs to join


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None,
                    softcap: float | None = None) -> torch.Tensor:
    """`attention.paged_attention`, with the same arguments and meaning.

    q: (num_tokens, num_heads, head_dim); caches: (num_blocks, block_size, num_kv_heads, head_dim),
    with equal strides. The last dimension is contiguous. fp16, bf16 or fp32; any head size (padded
    to a power of two) and any block size (fastest when a multiple of BLOCK_N, and for other sizes
    every key looks up its own block).

    In a graph, batch.num_decodes is the bucket and rows of padding have seq_len 0: they yield 0.
    """
    assert k_cache.stride() == v_cache.stride(), "K and V are read with the same strides"
    arch, out = _arch(q.device), torch.empty_like(q)
    num_decodes, num_rows = batch.num_decodes, len(batch.seq_lens)
    num_kv_heads, group = k_cache.shape[2], q.shape[1] // k_cache.shape[2]

    def launch(phase: str, programs: int, splits: int, out: torch.Tensor, stats) -> None:
        constants, options = _attention_launch(phase, arch, q.dtype, group, q.shape[2],
                                               k_cache.shape[1], window, softcap)
        _attention_kernel[num_kv_heads, programs, splits](
            q, k_cache, v_cache, out, stats, batch.block_tables, batch.seq_lens,
            batch.cu_seqlens_q, num_decodes, num_rows, batch.block_tables.stride(0),
            scale * LOG2E.value, *q.stride()[:2], *k_cache.stride()[:3], *out.stride()[-3:-1],
            out.stride(0), **constants, **options)

    if num_decodes > 0:
        splits = _num_splits(num_decodes, num_kv_heads, arch)
        if splits == 1:
            launch("decode", num_decodes, 1, out, None)
        else:  # each split's sum of weighted values, and its largest score and sum of weights
            shape = (splits, num_decodes, q.shape[1])
            sums = torch.empty(*shape, q.shape[2], dtype=torch.float32, device=q.device)
            stats = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
            launch("decode", num_decodes, splits, sums, stats)
            constants, options = _combine_launch(q.shape[2], splits)
            _combine_kernel[q.shape[1], num_decodes](sums, stats, out, *out.stride()[:2],
                                                     **constants, **options)
    if num_decodes < num_rows:
        block_q = _tiles("prefill", arch, q.dtype, group, q.shape[2])["BLOCK_M"] // group
        # At most one tile of a row is not full; the programs that this counts too many return.
        tiles = (len(q) - num_decodes) // block_q + num_rows - num_decodes
        launch("prefill", tiles, 1, out, None)
    return out


@cache
def _arch(device: torch.device) -> str:
    """The line of the table. A CPU (the interpreter) takes the first."""
    newer = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return "sm_90" if newer else "sm_80"


def _num_splits(num_rows: int, num_kv_heads: int, arch: str) -> int:
    """Over how many programs a decode row's keys are spread: a power of two, from shapes alone.

    Examples on sm_90 with 8 KV heads: 32 for one row, 8 for 8 rows, 2 for 32, none from 64 rows on.
    Short rows use fewer of them.
    """
    wanted = min(PROGRAMS[arch] // (num_rows * num_kv_heads), MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def _tiles(phase: str, arch: str, dtype: torch.dtype, group: int, head_dim: int) -> dict:
    """The table's entry for this head: a wide one (256, or fp32) halves what a tile holds."""
    tiles = dict(LAUNCHES[arch, phase])
    block_d = max(16, triton.next_power_of_2(head_dim))
    shrink = max(1, block_d * dtype.itemsize // 256)
    tiles["BLOCK_N"] = max(16, tiles["BLOCK_N"] // shrink)
    tiles["BLOCK_M"] = max(tiles["BLOCK_M"] // shrink, 16, triton.next_power_of_2(group))
    return tiles | dict(BLOCK_D=block_d)


@cache
def _attention_launch(phase: str, arch: str, dtype: torch.dtype, group: int, head_dim: int,
                      block_size: int, window: int | None,
                      softcap: float | None) -> tuple[dict, dict]:
    """The kernel's compile-time constants, and the compiler's options."""
    constants = _tiles(phase, arch, dtype, group, head_dim)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    options["enable_fp_fusion"] = True  # a multiplication and an addition may be one instruction
    constants |= dict(GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window or 0,
                      SOFTCAP=softcap or 0.0, DECODE=phase == "decode",
                      MIN_SPLIT=triton.cdiv(MIN_SPLIT_KEYS, constants["BLOCK_N"]))
    return constants, options


def _combine_launch(head_dim: int, splits: int) -> tuple[dict, dict]:
    block_d = triton.next_power_of_2(head_dim)
    return dict(HEAD_DIM=head_dim, NUM_SPLITS=splits, BLOCK_D=block_d), dict(num_warps=4)


# Numbers and pointers that change from step to step are not specialised on: each new divisibility
# by 16 (of an address inside the packed batch, of a table's width) would compile another program.
@triton.jit(do_not_specialize=["num_decodes", "num_rows", "table_stride"],
            do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"])
def _attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, tables_ptr, seq_lens_ptr,
                      cu_seqlens_q_ptr, num_decodes, num_rows, table_stride, scale,
                      q_stride_token, q_stride_head, kv_stride_block, kv_stride_slot,
                      kv_stride_head, out_stride_token, out_stride_head, out_stride_split,
                      GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DECODE: tl.constexpr,
                      MIN_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      BLOCK_D: tl.constexpr):
    """Grid: (KV heads, decode rows or prefill tiles, splits). KV heads are neighbours in memory and
    run side by side. With `stats_ptr` the result is one split's, and is not divided yet."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, program, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        row, first_query, query_len = program, 0, 1
        token = row
    else:  # a row's last tile has the most keys: the longest first
        row, first_query = _find_tile(cu_seqlens_q_ptr, tl.num_programs(1) - 1 - program,
                                      num_decodes, num_rows, BLOCK_Q)
        token = tl.load(cu_seqlens_q_ptr + row)
        query_len = tl.load(cu_seqlens_q_ptr + row + 1) - token
        if first_query >= query_len:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    # Row m of the product is query m // GROUP of the tile with head m % GROUP of the group.
    m = tl.arange(0, BLOCK_M)
    queries, heads = first_query + m // GROUP, kv_head * GROUP + m % GROUP
    dims = tl.arange(0, BLOCK_D)
    in_tile = (queries <= last_query)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = token.to(tl.int64) + queries  # 64 bits: a token times a stride may pass 2^31
    q = tl.load(q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head
                + dims[None, :], mask=in_tile, other=0.0)  # (BLOCK_M, BLOCK_D)

    # Keys by position: [first, end) is seen by some query, [free, free_end) by every one, and all
    # but `end` are tile boundaries. With a prefix of 32, query i stands at position 32 + i.
    start, end = seq_len - query_len + first_query, seq_len - query_len + last_query + 1
    first, seen_from, free, free_end = 0, 0, 0, 0
    if WINDOW > 0:
        seen_from = tl.maximum(start - WINDOW + 1, 0)
        first = seen_from // BLOCK_N * BLOCK_N
    if not DECODE:  # a decode waits for memory, its masks are free: one loop, loads never pause
        free_end = (start + 1) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            free = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
    if stats_ptr is not None:  # every split takes as many tiles, the last ones perhaps none
        share = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.num_programs(2))
        share = tl.maximum(share, MIN_SPLIT) * BLOCK_N
        first += split * share
        end = tl.minimum(end, first + share)

    highest = tl.full((BLOCK_M,), -1e30, tl.float32)  # not -inf: inf - inf is NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    positions = seq_len - query_len + queries
    k_ptr += kv_head * kv_stride_head
    v_ptr += kv_head * kv_stride_head
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    low = first
    for part in tl.static_range(3):  # the window's edge, the middle without masks, the causal edge
        high = tl.minimum(free if part == 0 else free_end, end) if part < 2 else end
        if part == 2 or (not DECODE and (part == 1 or WINDOW > 0)):
            acc, highest, total = _attend(
                acc, highest, total, q, k_ptr, v_ptr, table_ptr, low, high, seen_from, end,
                positions, scale, kv_stride_block, kv_stride_slot, part != 1, HEAD_DIM, BLOCK_SIZE,
                WINDOW, SOFTCAP, BLOCK_N, BLOCK_D)
        low = tl.maximum(low, high)

    if stats_ptr is None:
        acc = acc / tl.where(total == 0, 1, total)[:, None]  # no keys at all: padding, which is 0
    else:
        at = ((split * tl.num_programs(1) + row) * tl.num_programs(0) * GROUP + heads) * 2
        tl.store(stats_ptr + at, highest, mask=queries <= last_query)
        tl.store(stats_ptr + at + 1, total, mask=queries <= last_query)
        in_tile = in_tile & (total > 0)[:, None]
    tl.store(out_ptr + split * out_stride_split + tokens[:, None] * out_stride_token
             + heads[:, None] * out_stride_head + dims[None, :],
             acc.to(out_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def _find_tile(cu_seqlens_q_ptr, tile, num_decodes, num_rows, BLOCK_Q: tl.constexpr):
    """Which row a tile belongs to, and its first query there: (row, first_query).

    Row r's tiles are numbered from cu_seqlens_q[r] // BLOCK_Q + r on, counted without the decodes.
    That leaves at least as many numbers as it has tiles: with BLOCK_Q 4, rows of 3 and 6 queries
    begin at tiles 0 and 3 // 4 + 1 = 1, and the next row at 9 // 4 + 2 = 4: tile 3 has no queries.
    """
    low, high = num_decodes, num_rows  # the row is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(cu_seqlens_q_ptr + middle) - num_decodes) // BLOCK_Q + middle - num_decodes
        if begin <= tile:
            low = middle
        else:
            high = middle
    begin = (tl.load(cu_seqlens_q_ptr + low) - num_decodes) // BLOCK_Q + low - num_decodes
    return low, (tile - begin) * BLOCK_Q


@triton.jit
def _attend(acc, highest, total, q, k_ptr, v_ptr, table_ptr, low, high, seen_from, end, positions,
            scale, stride_block, stride_slot, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Take the keys [low, high), which begin with a tile, into the running softmax.

    Nothing outside [seen_from, end) is read, neither keys nor table entries: K would only spoil
    scores that are replaced, but V is multiplied by a weight of 0, and 0 * inf is NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    block = _block_ids(table_ptr, low, seen_from, end, BLOCK_SIZE, BLOCK_N)
    for tile in range(low, high, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        readable = (keys >= seen_from) & (keys < end)
        slots = block.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * stride_slot
        # The table is read a tile ahead, for a load that waits for a load can't be started early.
        block = _block_ids(table_ptr, tile + BLOCK_N, seen_from, end, BLOCK_SIZE, BLOCK_N)
        at = slots[:, None] + dims[None, :]  # (BLOCK_N, BLOCK_D)
        if MASKED:
            mask = readable[:, None] & (dims < HEAD_DIM)[None, :]
            k, v = tl.load(k_ptr + at, mask=mask, other=0.0), tl.load(v_ptr + at, mask=mask,
                                                                      other=0.0)
        elif HEAD_DIM < BLOCK_D:
            mask = (dims < HEAD_DIM)[None, :]
            k, v = tl.load(k_ptr + at, mask=mask, other=0.0), tl.load(v_ptr + at, mask=mask,
                                                                      other=0.0)
        else:
            k, v = tl.load(k_ptr + at), tl.load(v_ptr + at)
        # Scores in units of log2, but for the factor, which joins the subtraction in one instruction.
        scores, factor = tl.dot(q, tl.trans(k), input_precision="ieee"), scale
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities
            scores = SOFTCAP * LOG2E * (1 - 2 / (1 + tl.exp2(scores * (2 * scale / SOFTCAP))))
            factor = 1.0
        if MASKED:
            visible = readable[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_highest[:, None])  # (BLOCK_M, BLOCK_N)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit
def _block_ids(table_ptr, tile, seen_from, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of a tile's keys, one number where the tile lies in one block."""
    keys = tile + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=(keys >= seen_from) & (keys < end),
                       other=0)


@triton.jit
def _combine_kernel(sums_ptr, stats_ptr, out_ptr, out_stride_token, out_stride_head,
                    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join the splits of one head of one row. Grid: (heads, rows). Splits without keys wrote no sum.

    sums: (splits, rows, heads, head_dim); stats: (splits, rows, heads, 2).
    """
    head, row = tl.program_id(0), tl.program_id(1)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_D)
    at = (splits * tl.num_programs(1) + row) * tl.num_programs(0) + head
    highest, total = tl.load(stats_ptr + 2 * at), tl.load(stats_ptr + 2 * at + 1)
    weights = tl.exp2(highest - tl.max(highest, 0))  # (NUM_SPLITS,)
    mask = (total > 0)[:, None] & (dims < HEAD_DIM)[None, :]
    sums = tl.load(sums_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(total * weights, 0)
    out = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0, 1, total)
    tl.store(out_ptr + row.to(tl.int64) * out_stride_token + head * out_stride_head + dims,
             out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch compiles it, so that it can be compiled where there is no GPU."""

    name: str
    kernel: triton.JITFunction
    types: dict[str, str]  # of pointers and floats; every other argument is an i32
    constants: dict[str, object]
    options: dict[str, int]


def variants(arch: str) -> list[Variant]:
    """What `extras.kernel_report` compiles: every phase for the usual dtypes and head sizes, with
    blocks smaller than a tile and, once, with blocks that hold one."""
    found = []
    tables = dict.fromkeys(("tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"), "*i32")
    for (dtype, data), head_dim in itertools.product(
            ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16")), (64, 128)):
        whole = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), data) | tables | {
            "scale": "fp32"}
        split = whole | {"out_ptr": "*fp32", "stats_ptr": "*fp32"}
        about = f"{data[1:]} head {head_dim}"
        for phase, block_size in (("decode", 16), ("decode split", 16), ("prefill", 16),
                                  ("decode", 64), ("prefill", 64)):
            if block_size == 16 or about == "bf16 head 128":
                constants, options = _attention_launch(
                    phase.split()[0], arch, dtype, 2, head_dim, block_size, None, None)
                types, constants = (split, constants) if "split" in phase else (
                    whole, constants | {"stats_ptr": None})
                found.append(Variant(f"{phase} {about} block {block_size}", _attention_kernel,
                                     types, constants, options))
        found.append(Variant(f"combine {about}", _combine_kernel, split | {"sums_ptr": "*fp32",
                             "out_ptr": data}, *_combine_launch(head_dim, 8)))
    return found
