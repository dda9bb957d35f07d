"""PagedAttention's compute half: queries of one ragged batch against keys and values in blocks.

A row's keys and values lie scattered in the blocks of its table; its new tokens' own are written
there first, so that attention reads *everything* from the cache and a prefix hit, an earlier chunk
and this step's tokens are no different from each other (Kwon et al. 2023).

    row r:  seq_len 38, query_len 3, block_size 16, block_table [7, 2, 9]

    cache block 7 |▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪|    keys at positions 0..15
    cache block 2 |▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪|    16..31
    cache block 9 |▪▪▪▪▪▪..........|    32..37; the rest is whatever its last owner left there
                      └┴┴ the 3 queries stand at positions 35, 36, 37 and see 36, 37, 38 keys

Invariant: only positions below a row's `seq_len` can influence it. What lies behind them in a
block, another request's numbers or an infinity, must not leak in, not even multiplied by zero.

This is the plain torch version: the specification, and what a CPU runs. A chunk of a prompt copies
the blocks it sees side by side; each tile of its queries is then two matrix products and a softmax.
For a decode row copying would cost more than multiplying. It reads the cache where it lies: with
keys stored transposed both of its products are weighted sums of lines, torch's `embedding_bag`:

    K of a block and head (head_dim, block_size)    scores = sum over d of q[d] * K[d]
    V of a block and head (block_size, head_dim)    result = sum over t of weight[t] * V[t]

Confessed: each query head reads its KV head's lines anew. Blocks with which all decode rows begin
are therefore copied, once a piece, for one product. F.scaled_dot_product_attention is faster in one
place only (`_is_fused_faster`): it folds no heads, and computes what a mask hides.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.batch import Batch

MAX_PADDED_KEYS = 2 ** 12  # padding in a piece of decode rows: beyond it another piece is cheaper
MAX_KEYS = 2 ** 15  # of a piece, if it has more rows than one: their lists are made in every step
TILE = 128  # queries of a prompt that are computed together
MIN_SHARED_BLOCKS = 4  # a common beginning that is worth a product of its own


def new_caches(shape: tuple[int, int, int, int], dtype: torch.dtype,
               device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's K and V caches of `shape`, (num_blocks, block_size, num_kv_heads, head_dim), zeros.
    Their memory is in the order in which it is read here:

        K   block, head, dimension, slot    a dimension of a block's keys is one line
        V   block, head, slot, dimension    a value is one line

    The price: a new key goes to head_dim places. Any other order gives the same answers, but each
    call copies the whole cache.
    """
    num_blocks, block_size, num_kv_heads, head_dim = shape
    k = torch.zeros(num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype, device=device)
    v = torch.zeros(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    return k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """Write the new tokens' keys and values to their slots.

    k, v: (num_tokens, num_kv_heads, head_dim). Caches: (num_blocks, block_size, num_kv_heads,
    head_dim). slot_mapping: (num_tokens,), block id * block_size + offset.
    """
    slots, block_size = slot_mapping.long(), k_cache.shape[1]
    at = slots // block_size, slots % block_size
    k_cache[at] = k
    v_cache[at] = v


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None,
                    softcap: float | None = None) -> torch.Tensor:
    """Causal attention of each row's queries to its sequence.

    q: (num_tokens, num_heads, head_dim), scaled by `scale`. Returns the same shape. Query heads are
    shared out evenly over the KV heads (grouped-query attention; Ainslie et al. 2023).

    window: a query sees this many keys, its own included; blocks that lie wholly before them are
    not touched. softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
    """
    kind = (window, k_cache.shape, q.shape[1])
    if kind not in batch.pieces:  # the first layer of its kind; the others find them here
        batch.pieces[kind] = [*_cut_decodes(batch, window, k_cache, q.shape[1]),
                              *_cut_chunks(batch, window, k_cache)]
    pieces = batch.pieces[kind]
    k = k_cache.permute(0, 2, 3, 1).reshape(-1, k_cache.shape[1])
    v = v_cache.permute(0, 2, 1, 3).reshape(-1, k_cache.shape[3])
    if len(pieces) == 1:  # which is then all of the queries, in order
        return _attend(q, k, v, pieces[0], scale, softcap)
    out = torch.empty_like(q)
    for piece in pieces:
        if isinstance(piece.tokens, slice):
            out[piece.tokens] = _attend(q[piece.tokens], k, v, piece, scale, softcap)
        else:
            some = q.index_select(0, piece.tokens)
            out.index_copy_(0, piece.tokens, _attend(some, k, v, piece, scale, softcap))
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: "Decodes | Chunk",
            scale: float, softcap: float | None) -> torch.Tensor:
    """q: the queries of the piece, (n, num_heads, head_dim). Returns the same shape.
    The caches come as lines: k (num_blocks * num_kv_heads * head_dim, block_size), v (num_blocks *
    num_kv_heads * block_size, head_dim). Block b, head h, dimension d of K is line
    (b * num_kv_heads + h) * head_dim + d, and so is slot d of V's, with block_size for head_dim.
    """
    attend = _attend_decodes if isinstance(piece, Decodes) else _attend_chunk
    return attend(q, k, v, piece, scale, softcap)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


@dataclass
class Copy:
    """Blocks copied side by side, for matrix products: to scratch memory, which pieces, layers and
    steps share, so that one copy at a time is there. The places are worked out once a step."""

    key_lines: torch.Tensor  # (num_kv_heads * head_dim * num_blocks,) lines of K, see `_attend`
    value_blocks: torch.Tensor  # (num_kv_heads * num_blocks,) of V: block * num_kv_heads + head
    keys: torch.Tensor  # (num_kv_heads, head_dim, num_keys), a view of the scratch memory
    values: torch.Tensor  # (num_kv_heads, num_keys, head_dim), another one, behind it

    @classmethod
    def of(cls, blocks: np.ndarray, batch: Batch, cache: torch.Tensor) -> "Copy":
        """blocks: (num_blocks,) ids"""
        _, block_size, num_kv_heads, head_dim = cache.shape
        blocks = blocks * num_kv_heads + np.arange(num_kv_heads)[:, None]  # (kv_heads, blocks)
        size = blocks.size * block_size * head_dim
        if batch.scratch.memory.numel() < 2 * size:
            batch.scratch.memory = cache.new_empty(2 * size)
        keys, values = batch.scratch.memory[:2 * size].view(2, num_kv_heads, -1)
        lines = blocks[:, None] * head_dim + np.arange(head_dim)[:, None]  # (kv_heads, dim, blocks)
        put = _to(cache.device)
        return cls(put(lines.ravel().astype(_index_dtype(cache))), put(blocks.ravel()),
                   keys.view(num_kv_heads, head_dim, -1), values.view(num_kv_heads, -1, head_dim))

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v: see `_attend`. Returns `keys` and `values`, valid until the next call."""
        into = self.values.view(len(self.value_blocks), -1)
        torch.index_select(k, 0, self.key_lines, out=self.keys.view(-1, k.shape[1]))
        torch.index_select(v.view(-1, into.shape[1]), 0, self.value_blocks, out=into)
        return self.keys, self.values


# ------------------------------------------------------------------ decode rows


@dataclass
class Bags:
    """Weighted sums of lines, as `embedding_bag` takes them: the lines of all sums in one list, and
    where in it each sum's, its bag, begins."""

    lines: torch.Tensor  # (num_lines,)
    starts: torch.Tensor  # (num_bags,) a bag without a line gives zeros

    def __call__(self, memory: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """memory: (all lines, width); weights: (num_lines,). Returns (num_bags, width)."""
        # Not scaled by frequency, mode 0 (a sum), not sparse. F's checks take longer than a sum.
        return torch.embedding_bag(memory, self.lines, self.starts, False, 0, False, weights)[0]


@dataclass
class Decodes:
    """Rows with a single query each, and the blocks that they see, padded to the longest row.
    `shared` are blocks with which all of them begin, a system prompt say, and what is said of keys
    and values is about the others. With them all sums are in the order (KV head, row, query head
    that reads it), as one product wants it; without, it is (row, query head): an `outer` of 1.
    """

    tokens: slice | torch.Tensor  # the rows, which are also tokens
    keys: Bags  # for each (outer, row, query head, block) head_dim lines of K; none in padding
    queries: torch.Tensor  # for each of these that has lines, where its query is: its weights
    hidden: torch.Tensor  # (rows, 1, keys) True for what a row doesn't see: padding, old keys
    values: Bags  # for each (outer, row, query head) a line of V for each key
    shared: Copy | None


def _cut_decodes(batch: Batch, window: int | None, k_cache: torch.Tensor,
                 num_heads: int) -> list[Decodes]:
    """Rows of similar length are a piece, the longest first, so that padding is short."""
    block_size, put = k_cache.shape[1], _to(k_cache.device)
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)[:batch.num_decodes]
    seq_lens = np.array(batch.seq_lens_host[:batch.num_decodes], dtype=np.int64)
    num_shared = 0 if window is not None else _num_shared(tables, (seq_lens - 1) // block_size)
    first = np.full_like(seq_lens, num_shared)  # the block with a row's first own key
    if window is not None:
        first = np.maximum(seq_lens - window, 0) // block_size
    widths = (seq_lens - 1) // block_size + 1 - first
    shared = Copy.of(tables[0, :num_shared], batch, k_cache) if num_shared else None
    heads = np.arange(num_heads) // (num_heads // k_cache.shape[2])  # the KV head that each reads
    heads = heads.reshape(k_cache.shape[2] if num_shared else 1, 1, -1, 1)
    pieces, longest_first = [], np.argsort(-widths, kind="stable")
    while len(longest_first):
        width = int(widths[longest_first[0]])
        padded = (width - widths[longest_first]).cumsum() * block_size
        fit = min(int((padded <= MAX_PADDED_KEYS).sum()), max(1, MAX_KEYS // (width * block_size)))
        rows, longest_first = np.sort(longest_first[:fit]), longest_first[fit:]
        keys = first[rows, None] * block_size + np.arange(width * block_size)  # (rows, keys)
        last = seq_lens[rows, None] - 1  # the query's own
        hidden = keys > last
        if window is not None:
            hidden |= keys <= last - window
        blocks = tables[rows[:, None], np.minimum(keys[:, ::block_size], last) // block_size]
        # 0 * inf is NaN: in place of what a row must not see it gets its own token's, times 0.
        seen = np.where(hidden, last, keys)
        slots = tables[rows[:, None], seen // block_size], seen % block_size
        in_one = rows[-1] - rows[0] + 1 == len(rows)
        pieces.append(Decodes(
            slice(int(rows[0]), int(rows[-1]) + 1) if in_one else put(rows),
            *_bags_of_keys(blocks, widths[rows], heads, k_cache), put(hidden[:, None]),
            _bags_of_values(*slots, heads, k_cache), shared))
    return pieces


def _bags_of_keys(blocks: np.ndarray, widths: np.ndarray, heads: np.ndarray,
                  k_cache: torch.Tensor) -> tuple[Bags, torch.Tensor]:
    """blocks: (rows, width), of which the first `widths` (rows,) of each row count. heads: (outer,
    1, num_heads / outer, 1), KV heads. Returns `keys` and `queries` of `Decodes`."""
    _, _, num_kv_heads, head_dim = k_cache.shape
    put, dtype = _to(k_cache.device), _index_dtype(k_cache, blocks.size * heads.size * head_dim)
    first = (blocks * num_kv_heads)[:, None].astype(dtype) + heads.astype(dtype)
    real = np.arange(blocks.shape[1]) < widths[:, None]
    real = np.broadcast_to(real[:, None], first.shape)  # (outer, rows, inner, width)
    lines = first[real][:, None] * head_dim + np.arange(head_dim, dtype=dtype)  # (real, head_dim)
    starts = (real.cumsum() - real.ravel()) * head_dim  # as many as there are before
    queries = np.nonzero(real.reshape(-1, real.shape[-1]))[0]
    return Bags(put(lines.ravel()), put(starts.astype(dtype))), put(queries)


def _bags_of_values(blocks: np.ndarray, offsets: np.ndarray, heads: np.ndarray,
                    cache: torch.Tensor) -> Bags:
    """blocks and offsets: (rows, keys), the slots of all keys. heads: see `_bags_of_keys`."""
    _, block_size, num_kv_heads, _ = cache.shape
    put, dtype = _to(cache.device), _index_dtype(cache, blocks.size * heads.size)
    first = (blocks * num_kv_heads * block_size + offsets)[:, None]
    lines = first.astype(dtype) + (heads * block_size).astype(dtype)  # (outer, rows, inner, keys)
    return Bags(put(lines.ravel()), put(np.arange(0, lines.size, lines.shape[3], dtype=dtype)))


def _index_dtype(cache: torch.Tensor, num_lines: int = 0) -> type:
    return np.int32 if max(cache.numel(), num_lines) < 2 ** 31 else np.int64


def _num_shared(tables: np.ndarray, full: np.ndarray) -> int:
    """How many blocks all rows begin with. full: (rows,) how many lie wholly before its query."""
    if len(tables) < 2:
        return 0
    same = (tables == tables[0]).all(0)
    same[full.min():] = False
    num_shared = int(same.argmin())  # the first that isn't; there is one, behind `full`
    return num_shared if num_shared >= MIN_SHARED_BLOCKS else 0


def _attend_decodes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Decodes,
                    scale: float, softcap: float | None) -> torch.Tensor:
    """q: (rows, num_heads, head_dim). Returns the same shape. k, v: see `_attend`. Of shared blocks
    the whole piece reads one copy: the queries of all rows and of all heads that read a KV head are
    the rows of one product (cascade attention; Ye et al. 2024). One softmax goes over both parts.
    """
    shared = piece.shared
    outer, num_shared = (1, 0) if shared is None else (len(shared.keys), shared.keys.shape[2])
    # Scaled before the sum, which float16 could not hold, and not behind it.
    q_of = (q * scale).reshape(len(q), outer, -1, q.shape[2]).transpose(0, 1).contiguous()
    factors = q_of.view(-1, q.shape[2]).index_select(0, piece.queries).view(-1)
    scores = piece.keys(k, factors).view(*q_of.shape[:3], -1)  # (outer, rows, heads / outer, keys)
    if shared is not None:
        keys, values = shared.gather(k, v)
        common = torch.bmm(q_of.flatten(1, 2), keys).view(*scores.shape[:3], num_shared)
        scores = torch.cat((common, scores), dim=-1)
    scores = _capped(scores, softcap)
    scores[..., num_shared:].masked_fill_(piece.hidden, float("-inf"))
    weights = scores.softmax(-1)
    out = piece.values(v, weights[..., num_shared:].reshape(-1))
    if shared is not None:
        common = weights[..., :num_shared].flatten(1, 2)
        out = torch.baddbmm(out.view(outer, -1, q.shape[2]), common, values)
        out = out.view(q_of.shape).transpose(0, 1)
    return out.reshape(q.shape)


# -------------------------------------------------------------- chunks of prompts


@dataclass
class Tile:
    """Some queries of a chunk, one behind the other, and the keys that they see."""

    queries: slice  # of the chunk's
    keys: slice  # of the gathered ones, up to the last query's own
    mask: torch.Tensor  # (queries, m): the most a score of the last m keys may be, +-infinity


@dataclass
class Chunk:
    """A row's queries, cut into tiles, so that none computes much of the future."""

    tokens: slice
    copy: Copy
    tiles: list[Tile]
    fused: bool  # all queries are here, from position 0 on, and torch's own attention is for them


def _cut_chunks(batch: Batch, window: int | None, k_cache: torch.Tensor) -> list[Chunk]:
    """Each row of several queries. What any of them sees is copied once; a tile takes its part."""
    block_size, put = k_cache.shape[1], _to(k_cache.device)
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)
    chunks, at = [], batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        query_len, seq_len = batch.query_lens[row], batch.seq_lens_host[row]
        begin, tiles = seq_len - query_len, []
        # Window 20, block size 16: position 55 sees 36 and what follows, from block 2 on.
        first_block = 0 if window is None else max(0, begin - window + 1) // block_size
        first = first_block * block_size  # the first key that is copied
        # Of 300 queries at positions 10..309: 10..137, 138..265 and 266..309.
        for start in range(begin, seq_len, TILE):
            positions = np.arange(start, min(start + TILE, seq_len))
            tile_first = first if window is None else max(first, start - window + 1)
            mask_first = start if window is None else tile_first  # all queries see the keys before
            keys = np.arange(mask_first, positions[-1] + 1)
            hidden = keys > positions[:, None]
            if window is not None:
                hidden |= keys <= positions[:, None] - window
            mask = k_cache.new_full(hidden.shape, torch.inf).masked_fill_(put(hidden), -torch.inf)
            tiles.append(Tile(slice(start - begin, start - begin + len(positions)),
                              slice(tile_first - first, int(positions[-1]) + 1 - first), mask))
        blocks = tables[row, first_block:(seq_len - 1) // block_size + 1]
        fused = window is None and not begin and _is_fused_faster(k_cache.dtype, k_cache.device)
        tokens, copy = slice(at, at + query_len), Copy.of(blocks, batch, k_cache)
        chunks.append(Chunk(tokens, copy, tiles, fused))
        at += query_len
    return chunks


def _attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, scale: float,
                  softcap: float | None) -> torch.Tensor:
    """q: (queries, num_heads, head_dim). Returns the same shape. k, v: see `_attend`."""
    keys, values = chunk.copy.gather(k, v)
    if chunk.fused and softcap is None:
        keys = keys[..., :len(q)].transpose(1, 2).contiguous()
        heads = q.transpose(0, 1)[None], keys[None], values[None, :, :len(q)]
        return F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale,
                                              enable_gqa=True)[0].transpose(0, 1)
    parts = [_attend_tile(q[tile.queries], keys[..., tile.keys], values[:, tile.keys], tile.mask,
                          scale, softcap) for tile in chunk.tiles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def _is_fused_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether F.scaled_dot_product_attention is: in bfloat16 on a CPU with AMX (2,040 tokens in a
    layer of Qwen3-0.6B take 64 instead of 118 ms; on an EPYC without it, 121 instead of 76)."""
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return dtype == torch.bfloat16 and device.type == "cpu" and has.get("amx_bf16", False)


def _attend_tile(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor,
                 scale: float, softcap: float | None) -> torch.Tensor:
    """q: (queries, num_heads, head_dim); keys: (num_kv_heads, head_dim, n) and values:
    (num_kv_heads, n, head_dim), the tile's part of the copy; mask: see `Tile`. Returns q's shape.
    The query heads that share a KV head become the rows of one product with its keys."""
    grouped = q.view(len(q), len(keys), -1, q.shape[-1]).permute(1, 2, 0, 3)
    nothing = q.new_empty(1, 1, 1)  # what a scaled product asks for to add, and ignores
    scores = torch.baddbmm(nothing, grouped.flatten(1, 2), keys, beta=0, alpha=scale)
    scores = _capped(scores, softcap).view(*grouped.shape[:3], -1)  # (.., group, queries, keys)
    masked = scores[..., -mask.shape[1]:]
    torch.minimum(masked, mask, out=masked)  # a third of masked_fill_'s time
    out = scores.softmax(-1).flatten(1, 2) @ values  # (kv_heads, group * queries, head_dim)
    return out.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)


def _to(device: torch.device):
    """numpy's indices and masks as tensors over there."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
