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
into a copy that fits the processor's cache, and is then two matrix products and a softmax. Only a
decode row's values, but for those of a beginning that all rows share, are read where they lie, as
kernels read everything: its result is a weighted sum of them, and that is what torch's
`embedding_bag` computes. Road not taken: `F.scaled_dot_product_attention`, half as fast on a CPU:
it does not fold heads, and computes what a mask hides.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.batch import Batch

MAX_GATHERED_KEYS = 2 ** 11  # of one piece: those of 8 heads of 128 in bfloat16 are 4 MB
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
    slots = slot_mapping.long()
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


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
    k, v = _by_head(k_cache), _by_head(v_cache)
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


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: "Decodes | Tile",
            scale: float, softcap: float | None) -> torch.Tensor:
    """q: the queries of the piece, (n, num_heads, head_dim). Returns the same shape."""
    attend = _attend_decodes if isinstance(piece, Decodes) else _attend_tile
    return attend(q, k, v, piece, scale, softcap)


def _by_head(cache: torch.Tensor) -> torch.Tensor:
    """A cache as (num_kv_heads * num_blocks, block_size * head_dim): a line is a head's block.

    A view of a head-major cache; of any other one it is a copy: right, but slow.
    """
    num_blocks, _, num_kv_heads, _ = cache.shape
    return cache.permute(2, 0, 1, 3).reshape(num_kv_heads * num_blocks, -1)


@dataclass
class Copy:
    """Blocks that lie in many places, and the place where they are copied to lie side by side.

    That place is scratch memory, the same for all pieces, layers and steps, and for values when the
    keys are done with: so it stays in the processor's cache. What every layer needs is worked out
    once: where a weight is read once a token, each call between counts.
    """

    lines: torch.Tensor  # (n * width,) in `_by_head`
    into: torch.Tensor  # (n * width, block_size * head_dim) the place ...
    found: torch.Tensor  # (n, keys, head_dim) ... and the same memory as it is wanted; ...
    turned: torch.Tensor  # (n, head_dim, keys) ... and for a product with queries
    nothing: torch.Tensor  # (1, 1, 1) what that product asks for to add, and ignores

    @classmethod
    def of(cls, lines: torch.Tensor, n: int, batch: Batch, cache: torch.Tensor) -> "Copy":
        _, block_size, _, head_dim = cache.shape
        size = len(lines) * block_size * head_dim
        if batch.scratch.memory.numel() < size:
            batch.scratch.memory = cache.new_empty(size)
        into = batch.scratch.memory[:size].view(len(lines), -1)
        found = into.view(n, -1, head_dim)
        return cls(lines, into, found, found.transpose(1, 2), cache.new_empty(1, 1, 1))

    def scores(self, q: torch.Tensor, k: torch.Tensor, scale: float,
               softcap: float | None) -> torch.Tensor:
        """q (n, queries, head_dim) and all keys, as in `_by_head` -> (n, queries, keys)"""
        torch.index_select(k, 0, self.lines, out=self.into)
        scores = torch.baddbmm(self.nothing, q, self.turned, beta=0, alpha=scale)
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """(n, keys, head_dim), until the next call of anybody's."""
        torch.index_select(v, 0, self.lines, out=self.into)
        return self.found


# ------------------------------------------------------------------ decode rows


@dataclass
class Decodes:
    """Rows with a single query each, and the blocks that they see, padded to the longest row.

    `shared` are blocks with which all of them begin, a system prompt say, and `own` the others.
    """

    tokens: slice | torch.Tensor  # the rows, which are also tokens
    own: Copy  # of rows * kv_heads, for their keys
    hidden: torch.Tensor  # (rows * kv_heads, 1, keys) what a row doesn't see: padding, old keys
    values: torch.Tensor  # (rows * query heads * keys,) where in the cache a head's own values
    bags: torch.Tensor  # (rows * query heads,) are, and where among these each head's begin
    shared: Copy | None  # of kv_heads


def _cut_decodes(batch: Batch, window: int | None, k_cache: torch.Tensor,
                 num_heads: int) -> list[Decodes]:
    """As many rows a piece as fit into the copy, the longest first, so that padding is short."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)[:batch.num_decodes]
    seq_lens = np.array(batch.seq_lens_host[:batch.num_decodes], dtype=np.int64)
    num_shared = 0 if window is not None else _num_shared(tables, (seq_lens - 1) // block_size)
    first = np.full_like(seq_lens, num_shared)  # the block with a row's first own key
    if window is not None:
        first = np.maximum(seq_lens - window, 0) // block_size
    widths = (seq_lens - 1) // block_size + 1 - first
    heads, pieces, put = np.arange(num_kv_heads) * num_blocks, [], _to(k_cache.device)
    longest_first = np.argsort(-widths, kind="stable")
    while len(longest_first):
        width = int(widths[longest_first[0]])
        fit = max(1, MAX_GATHERED_KEYS // (width * block_size))
        rows, longest_first = np.sort(longest_first[:fit]), longest_first[fit:]
        keys = first[rows, None] * block_size + np.arange(width * block_size)  # (rows, keys)
        last = seq_lens[rows, None] - 1  # the query's own
        hidden = keys > last
        if window is not None:
            hidden |= keys <= last - window
        blocks = tables[rows[:, None], np.minimum(keys[:, ::block_size], last) // block_size]
        # 0 * inf is NaN: in place of what a row must not see it gets its own token's, times 0.
        seen = np.where(hidden, last, keys)
        values = tables[rows[:, None], seen // block_size] * block_size + seen % block_size
        values = values[:, None] + heads[:, None] * block_size  # (rows, kv_heads, keys)
        values = np.repeat(values.astype(np.int32), num_heads // num_kv_heads, axis=1)
        in_one = rows[-1] - rows[0] + 1 == len(rows)
        pieces.append(Decodes(
            tokens=slice(int(rows[0]), int(rows[-1]) + 1) if in_one else put(rows),
            own=Copy.of(put((blocks[:, None] + heads[:, None]).ravel()),
                        len(rows) * num_kv_heads, batch, k_cache),
            hidden=put(np.repeat(hidden[:, None], num_kv_heads, axis=0)),
            values=put(values.ravel()),
            bags=put(np.arange(0, values.size, keys.shape[1], dtype=np.int32)),
            shared=Copy.of(put((tables[0, :num_shared] + heads[:, None]).ravel()), num_kv_heads,
                           batch, k_cache) if num_shared else None))
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


def _attend_decodes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Decodes,
                    scale: float, softcap: float | None) -> torch.Tensor:
    """q: (rows, num_heads, head_dim). Returns the same shape. k, v: see `_by_head`.

    The query heads that share a KV head become the rows of one matrix product with its keys, which
    are read once a group. Of shared blocks the whole piece reads one copy, with the queries of all
    its rows (cascade attention; Ye et al. 2024), and one softmax goes over both parts.
    """
    num_rows, num_heads, head_dim = q.shape
    n = len(rows.own.found)
    scores = rows.own.scores(q.reshape(n, -1, head_dim), k, scale, softcap)
    scores.masked_fill_(rows.hidden, float("-inf"))
    if rows.shared is not None:  # (kv_heads, rows * group, head_dim)
        by_head = q.view(num_rows, n // num_rows, -1, head_dim).transpose(0, 1).flatten(1, 2)
        shared = rows.shared.scores(by_head, k, scale, softcap)
        num_shared = shared.shape[-1]
        shared = shared.view(n // num_rows, num_rows, -1, num_shared).transpose(0, 1).flatten(0, 1)
        scores = torch.cat((shared, scores), dim=-1)
    weights = scores.softmax(-1)  # (rows * kv_heads, group, keys)
    own = weights if rows.shared is None else weights[..., num_shared:]
    out, *_ = torch.embedding_bag(v.view(-1, head_dim), rows.values, rows.bags, False, 0, False,
                                  own.reshape(-1))
    out = out.view(q.shape)
    if rows.shared is not None:
        by_head = weights[..., :num_shared].unflatten(0, (num_rows, -1)).transpose(0, 1)
        shared = by_head.flatten(1, 2) @ rows.shared.values(v)  # as the queries above
        out += shared.unflatten(1, (num_rows, -1)).transpose(0, 1).reshape(q.shape)
    return out


# -------------------------------------------------------------- chunks of prompts


@dataclass
class Tile:
    """Some queries of one row, one behind the other, and the blocks that they see."""

    tokens: slice
    copy: Copy  # of kv_heads
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
                tokens=slice(at, at + len(positions)),
                copy=Copy.of(put((blocks + heads[:, None]).ravel()), num_kv_heads, batch, k_cache),
                num_keys=int(positions[-1] + 1 - keys[0]), hidden=put(hidden)))
            at += len(positions)
    return tiles


def _attend_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float,
                 softcap: float | None) -> torch.Tensor:
    """q: (queries, num_heads, head_dim). Returns the same shape. k, v: see `_by_head`."""
    kv_heads, _, head_dim = tile.copy.found.shape
    grouped = q.reshape(len(q), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = tile.copy.scores(grouped.reshape(kv_heads, -1, head_dim), k, scale, softcap)
    scores = scores.view(*grouped.shape[:3], -1)  # (kv_heads, group, queries, keys)
    scores[..., -tile.hidden.shape[1]:].masked_fill_(tile.hidden, float("-inf"))
    weights = scores.softmax(-1).flatten(1, 2)  # (kv_heads, group * queries, keys)
    values = tile.copy.values(v)
    values[:, tile.num_keys:] = 0  # the end of the last block: 0 * inf is NaN
    out = weights @ values  # (kv_heads, group * queries, head_dim)
    return out.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)


def _to(device: torch.device):
    """numpy's indices and masks as tensors over there."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
