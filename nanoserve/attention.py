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

This is the plain torch version, the specification, and what a CPU runs. Work comes in pieces: some
decode rows of similar length, or a tile of one row's queries. A piece gathers the blocks it sees
into a copy that fits the processor's cache, and is then two matrix products and a softmax. Kernels,
which read blocks where they lie, save the copy. Road not taken: `F.scaled_dot_product_attention`,
half as fast on a CPU: it does not fold heads, and computes what a mask hides.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.batch import Batch

MAX_GATHERED_KEYS = 2 ** 11  # of one piece: K and V of 8 heads of 128 in bfloat16 are 4 MB each
TILE = 128  # queries of a prompt that are computed together
MIN_SHARED_BLOCKS = 4  # a common beginning that is worth a product of its own


def zeros_by_head(shape: tuple[int, int, int, int], dtype: torch.dtype,
                  device: torch.device) -> torch.Tensor:
    """A cache of `shape`, (num_blocks, block_size, num_kv_heads, head_dim), its memory by heads.

    So a head's block is one stretch of memory, and gathered blocks are that head's keys one behind
    the other: the form that a matrix product wants.
    """
    num_blocks, block_size, num_kv_heads, head_dim = shape
    memory = torch.zeros(num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype, device=device)
    return memory.permute(1, 2, 0, 3)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """Write the new tokens' keys and values to their slots.

    k, v: (num_tokens, num_kv_heads, head_dim). Caches: (num_blocks, block_size, num_kv_heads,
    head_dim). slot_mapping: (num_tokens,), block id * block_size + offset.
    """
    k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
    v_cache.view(-1, *v.shape[1:])[slot_mapping] = v


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None,
                    softcap: float | None = None) -> torch.Tensor:
    """Causal attention of each row's queries to its sequence.

    q: (num_tokens, num_heads, head_dim), scaled by `scale`. Returns the same shape. Query heads are
    shared out evenly over the KV heads (grouped-query attention; Ainslie et al. 2023).

    window: a query sees this many keys, its own included; blocks that lie wholly before them are
    not touched. softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
    """
    kind = (window, k_cache.shape)
    if kind not in batch.pieces:  # the first layer of its kind; the others find them here
        batch.pieces[kind] = [*_cut_decodes(batch, window, k_cache),
                              *_cut_chunks(batch, window, k_cache)]
    memory, pieces = Memory(k_cache, v_cache, batch), batch.pieces[kind]
    if len(pieces) == 1:
        return _attend(q, memory, pieces[0], scale, softcap)
    out = torch.empty_like(q)
    for piece in pieces:
        out[piece.tokens] = _attend(q[piece.tokens], memory, piece, scale, softcap)
    return out


class Memory:
    """Both caches as (num_kv_heads * num_blocks, block_size * head_dim): a line is a head's block.

    Copies are made in the batch's scratch memory, all of them at the same place, where they stay in
    the processor's cache: keys are done with when values are wanted. It is kept for the next layer.
    """

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch):
        self.num_kv_heads, self.head_dim = k_cache.shape[2:]
        self.batch = batch
        # Views of a head-major cache; of any other one these are copies: right, but slow.
        self.k, self.v = (cache.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)
                          for cache in (k_cache, v_cache))

    def gather(self, source: torch.Tensor, lines: torch.Tensor, size: int) -> torch.Tensor:
        """Some blocks of `k` or `v` as (size, keys, head_dim), until the next call."""
        wanted = len(lines) * source.shape[1]
        if self.batch.scratch.numel() < wanted:
            self.batch.scratch = source.new_empty(wanted)
        into = self.batch.scratch[:wanted].view(len(lines), -1)
        return torch.index_select(source, 0, lines, out=into).view(size, -1, self.head_dim)


def _attend(q: torch.Tensor, memory: Memory, piece: "Decodes | Tile", scale: float,
            softcap: float | None) -> torch.Tensor:
    """q: the queries of the piece, (n, num_heads, head_dim). Returns the same shape."""
    attend = _attend_decodes if isinstance(piece, Decodes) else _attend_tile
    return attend(q, memory, piece, scale, softcap)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """q (n, queries, head_dim), k (n, keys, head_dim) -> (n, queries, keys)"""
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


# ------------------------------------------------------------------ decode rows


@dataclass
class Decodes:
    """Rows with a single query each, and the blocks that they see, padded to the longest row.

    `shared` are blocks with which all of them begin, a system prompt say, and `lines` the others.
    """

    tokens: slice | torch.Tensor  # the rows, which are also tokens
    lines: torch.Tensor  # (rows * kv_heads * width,) in `Memory`
    hidden: torch.Tensor  # (rows, 1, 1, keys) what a row doesn't see of them: padding, old keys
    unseen: torch.Tensor  # as places in (rows * kv_heads * keys), but for padding that does no harm
    shared: torch.Tensor | None  # (kv_heads * shared width,)


def _cut_decodes(batch: Batch, window: int | None, k_cache: torch.Tensor) -> list[Decodes]:
    """As many rows a piece as fit into the copy, the longest first, so that padding is short."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)[:batch.num_decodes]
    seq_lens = np.array(batch.seq_lens_host[:batch.num_decodes], dtype=np.int64)
    num_shared = 0 if window is not None else _num_shared(tables, (seq_lens - 1) // block_size)
    first = np.full_like(seq_lens, num_shared)  # the block with a row's first own key
    if window is not None:
        first = np.maximum(seq_lens - window, 0) // block_size
    widths = (seq_lens - 1) // block_size + 1 - first
    heads, pieces = np.arange(num_kv_heads) * num_blocks, []
    longest_first = np.argsort(-widths, kind="stable")
    while len(longest_first):
        width = int(widths[longest_first[0]])
        fit = max(1, MAX_GATHERED_KEYS // (width * block_size))
        rows, longest_first = np.sort(longest_first[:fit]), longest_first[fit:]
        columns = first[rows, None] + np.arange(width)  # (rows, width)
        # What a shorter row has too many is hidden. Where it has a block all of whose keys it sees,
        # that one is read in their place, so that nothing there has to be overwritten.
        last, clean = (seq_lens[rows, None] - 1) // block_size, first[rows, None]
        clean = clean + (window is not None)
        padding = (columns > last) & ((clean + 1) * block_size <= seq_lens[rows, None])
        blocks = tables[rows[:, None], np.where(padding, clean, np.minimum(columns, last))]
        positions = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(
            len(rows), -1)  # (rows, keys)
        hidden = positions >= seq_lens[rows, None]
        if window is not None:
            hidden |= positions < seq_lens[rows, None] - window
        row, key = (hidden & ~padding.repeat(block_size, axis=1)).nonzero()
        unseen = (row[:, None] * num_kv_heads + np.arange(num_kv_heads)) * hidden.shape[1]
        in_one = rows[-1] - rows[0] + 1 == len(rows)
        put = _to(k_cache.device)
        pieces.append(Decodes(
            tokens=slice(int(rows[0]), int(rows[-1]) + 1) if in_one else put(rows),
            lines=put((blocks[:, None] + heads[:, None]).ravel()),
            hidden=put(hidden[:, None, None]), unseen=put((unseen + key[:, None]).ravel()),
            shared=put((tables[0, :num_shared] + heads[:, None]).ravel()) if num_shared else None))
    return pieces


def _num_shared(tables: np.ndarray, full: np.ndarray) -> int:
    """How many blocks all the rows have in common at their beginning, each with a key left over.

    full: (rows,) the number of blocks that lie wholly before each row's query.
    """
    if len(tables) < 2:
        return 0
    same = (tables == tables[0]).all(0)
    same[full.min():] = False
    num_shared = int(same.argmin())  # the first that isn't; there is one, behind `full`
    return num_shared if num_shared >= MIN_SHARED_BLOCKS else 0


def _attend_decodes(q: torch.Tensor, memory: Memory, rows: Decodes, scale: float,
                    softcap: float | None) -> torch.Tensor:
    """q: (rows, num_heads, head_dim). Returns the same shape.

    The query heads that share a KV head become the rows of one matrix product with it, so that K
    and V are read once a group. Of shared blocks the whole piece reads one copy, with the queries
    of all its rows (cascade attention; Ye et al. 2024), and one softmax goes over both parts.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads = memory.num_kv_heads
    by_row = q.view(num_rows, kv_heads, -1, head_dim)
    k = memory.gather(memory.k, rows.lines, num_rows * kv_heads)
    scores = _scores(by_row.flatten(0, 1), k, scale, softcap)
    scores = scores.view(*by_row.shape[:3], -1).masked_fill_(rows.hidden, float("-inf"))
    if rows.shared is not None:
        by_head = by_row.transpose(0, 1).flatten(1, 2)  # (kv_heads, rows * group, head_dim)
        k = memory.gather(memory.k, rows.shared, kv_heads)
        shared = _scores(by_head, k, scale, softcap).view(kv_heads, num_rows, -1, k.shape[1])
        scores = torch.cat((shared.transpose(0, 1), scores), dim=-1)
    weights = scores.softmax(-1)
    num_own = weights.shape[-1] - (0 if rows.shared is None else k.shape[1])
    v = memory.gather(memory.v, rows.lines, num_rows * kv_heads)
    v.view(-1, head_dim).index_fill_(0, rows.unseen, 0)  # 0 * inf is NaN: no weight is not enough
    out = (weights[..., -num_own:].flatten(0, 1) @ v).view(by_row.shape)
    if rows.shared is not None:
        v = memory.gather(memory.v, rows.shared, kv_heads)
        shared = weights[..., :-num_own].transpose(0, 1).flatten(1, 2) @ v
        out += shared.view(kv_heads, num_rows, -1, head_dim).transpose(0, 1)
    return out.view(q.shape)


# -------------------------------------------------------------- chunks of prompts


@dataclass
class Tile:
    """Some queries of one row, one behind the other, and the blocks that they see."""

    tokens: slice
    lines: torch.Tensor  # (kv_heads * width,) in `Memory`
    num_keys: int  # of the gathered ones, up to the last query's own
    hidden: torch.Tensor  # (queries, m) what a query doesn't see of the last m


def _cut_chunks(batch: Batch, window: int | None, k_cache: torch.Tensor) -> list[Tile]:
    """Tiles of at most TILE queries, so that none computes much of the future."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)
    heads, put = np.arange(num_kv_heads) * num_blocks, _to(k_cache.device)
    tiles, at = [], batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        query_len, seq_len = batch.query_lens[row], batch.seq_lens_host[row]
        # Of 300 queries at positions 10..309: 10..137, 138..265 and 266..309.
        for start in range(seq_len - query_len, seq_len, TILE):
            positions = np.arange(start, min(start + TILE, seq_len))
            # Window 20, block size 16: position 55 sees 36 and what follows, from block 2 on.
            first = 0 if window is None else max(0, start - window + 1) // block_size
            blocks = tables[row, first:positions[-1] // block_size + 1]
            keys = np.arange(first * block_size, (first + len(blocks)) * block_size)
            seen_by_all = 0 if window is not None else start
            hidden = keys[seen_by_all:] > positions[:, None]
            if window is not None:
                hidden |= keys <= positions[:, None] - window
            tiles.append(Tile(
                tokens=slice(at, at + len(positions)), lines=put((blocks + heads[:, None]).ravel()),
                num_keys=int(positions[-1] + 1 - keys[0]), hidden=put(hidden)))
            at += len(positions)
    return tiles


def _attend_tile(q: torch.Tensor, memory: Memory, tile: Tile, scale: float,
                 softcap: float | None) -> torch.Tensor:
    """q: (queries, num_heads, head_dim). Returns the same shape."""
    kv_heads, head_dim = memory.num_kv_heads, memory.head_dim
    by_head = q.view(len(q), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k = memory.gather(memory.k, tile.lines, kv_heads)  # (kv_heads, keys, head_dim)
    scores = _scores(by_head.reshape(kv_heads, -1, head_dim), k, scale, softcap)
    scores = scores.view(*by_head.shape[:3], -1)  # (kv_heads, group, queries, keys)
    scores[..., -tile.hidden.shape[1]:].masked_fill_(tile.hidden, float("-inf"))
    weights = scores.softmax(-1).flatten(1, 2)  # (kv_heads, group * queries, keys)
    v = memory.gather(memory.v, tile.lines, kv_heads)
    v[:, tile.num_keys:] = 0  # the end of the last block: see `_attend_decodes`
    out = weights @ v  # (kv_heads, group * queries, head_dim)
    return out.view(by_head.shape).permute(2, 0, 1, 3).flatten(1, 2)


def _to(device: torch.device):
    """numpy's indices and masks as tensors over there."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
