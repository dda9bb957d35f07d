"""PagedAttention's compute half: queries of one ragged batch against keys and values in blocks.

A row's keys and values lie scattered in the blocks of its table; its new tokens' own are written
there first, so that attention reads *everything* from the cache and a prefix hit, an earlier chunk
and this step's tokens are no different from each other (Kwon et al. 2023).

    row r:  seq_len 38, query_len 3, block_size 16, block_table [7, 2, 9]

    cache block 7 |▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪|    keys at positions 0..15
    cache block 2 |▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪|    16..31
    cache block 9 |▪▪▪▪▪▪..........|    32..37; the rest is whatever its last owner left there
                      └┴┴ the 3 queries stand at positions 35, 36, 37 and see 36, 37, 38 keys

Invariant: only positions below a row's `seq_len` can influence it. What else lies in its blocks, or
in others of their runs (kv_cache.py), must not leak in, not even multiplied by zero: it may be
another request's numbers, or an infinity.

This is the plain torch version: the specification, and what a CPU runs. Once a step, for each kind
of layer, the rows are cut into pieces, by what they have in common:

    Group   rows of one query each, or short ones (up to TILE) with a common beginning: their own
            keys and values apart, the common ones in one product (cascade; Ye et al. 2024)
    Chunk   a prompt's part: tile by tile of its queries two matrix products and a softmax

How keys and values are read is said in kv_cache.py. Confessed: a query head of a single query reads
its KV head's lines anew. F.scaled_dot_product_attention is faster in few places only
(`_is_fused_faster`): it folds no heads, and computes what a mask hides.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.batch import Batch
from nanoserve.device.kv_cache import Copy, InPlace, as_lines, put_on
from nanoserve.device.packing import cpu_features, is_intel

MAX_PADDED_KEYS = 2 ** 12  # padding in a piece of decode rows: beyond it another piece is cheaper
MAX_KEYS = 2 ** 15  # of a piece, if it has more rows than one: their lists are made in every step
MAX_SCORES = 2 ** 23  # of chunks that are a group: 16 MB in bfloat16, which stay near the cores
MAX_OWN_KEYS = 2 ** 13  # of such a group, padded: they are all copied at once
TILE = 128  # queries of a prompt that are computed together
FUSED_TOKENS = 1024  # from which on torch's own attention pays in float32, if it does
MIN_SHARED_BLOCKS = 4  # a common beginning that is worth a product of its own


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None,
                    softcap: float | None = None) -> torch.Tensor:
    """Causal attention of each row's queries to its sequence.

    q: (num_tokens, num_heads, head_dim); a score is a query's dot product with a key, times
    `scale`. k_cache, v_cache: see `kv_cache.new_caches`; the step's own keys and values are there
    already. Returns q's shape. Query heads are shared out evenly over the KV heads (grouped-query
    attention; Ainslie et al. 2023).

    window: a query sees this many keys, its own included; runs that lie wholly before them are not
    touched. softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
    """
    kind = (window, k_cache.shape, q.shape[1])
    if kind not in batch.pieces:  # the first layer of its kind; the others find them here
        batch.pieces[kind] = [*_cut_decodes(batch, window, k_cache, q.shape[1]),
                              *_cut_chunks(batch, window, k_cache, q.shape[1])]
    pieces = batch.pieces[kind]
    k, v = as_lines(k_cache, v_cache)
    if len(pieces) == 1 and isinstance(pieces[0].tokens, slice):  # all of the queries, in order
        return pieces[0].attend(q, k, v, scale, softcap)
    out = torch.empty_like(q)
    for piece in pieces:
        if isinstance(piece.tokens, slice):
            out[piece.tokens] = piece.attend(q[piece.tokens], k, v, scale, softcap)
        else:
            some = q.index_select(0, piece.tokens)
            out.index_copy_(0, piece.tokens, piece.attend(some, k, v, scale, softcap))
    return out


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap)


# --------------------------------------- rows of few queries, and what they share


@dataclass
class Group:
    """Queries of several rows, and the blocks that they see, padded to the longest row. `shared`
    are blocks with which all of them begin, a system prompt say, if there are any; what is said of
    keys and values is about the others. All sums are in the order (KV head, query, query head that
    reads it), as one product wants it.
    """

    tokens: slice | torch.Tensor  # the queries; one that fills places up is there again, and alike
    own: InPlace | Copy
    masked: torch.Tensor  # (queries, 1, keys) True for padding, and old, later and others' keys
    shared: Copy | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               softcap: float | None) -> torch.Tensor:
        """q: (queries, num_heads, head_dim). Returns the same shape. k, v: see `as_lines`. One
        softmax goes over the scores of what is shared and what is not."""
        shared, shape = self.shared, q.shape
        num_shared = 0 if shared is None else shared.keys.shape[2]
        q = q * scale  # before the sum, which float16 could not hold, though bfloat16 rounds again
        scores = own = self.own.scores(q, k)  # (KV heads, queries, query heads of each, keys)
        if shared is not None:
            scores = own.new_empty(*own.shape[:3], num_shared + own.shape[3])
            shared.scores(q, k, out=scores[..., :num_shared])
            scores[..., num_shared:] = own
        if softcap is not None:
            scores = _capped(scores, softcap)
        of_own = scores if shared is None else scores[..., num_shared:]
        of_own.masked_fill_(self.masked, float("-inf"))
        weights = scores.softmax(-1)
        out = self.own.sums(weights, v)
        if shared is not None:
            common = weights[..., :num_shared].flatten(1, 2)
            out.flatten(1, 2).baddbmm_(common, shared.gather_values(v))
        return out.transpose(0, 1).reshape(shape)


def _cut_decodes(batch: Batch, window: int | None, k_cache: torch.Tensor,
                 num_heads: int) -> list[Group]:
    """Rows of similar length are a piece, the longest first, so that padding is short. Their keys
    are in the order of memory, and not of positions: run by run, with what is not theirs masked."""
    if not batch.num_decodes:
        return []
    block_size, slots_of_run = batch.block_size, k_cache.shape[1]
    put, in_run, shared = put_on(k_cache.device), slots_of_run // block_size, None
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)[:batch.num_decodes]
    seq_lens = np.array(batch.seq_lens_host[:batch.num_decodes], dtype=np.int64)
    last = seq_lens - 1  # the query's own
    num_shared = 0 if window is not None else _num_shared(tables, last // block_size)
    num_shared -= num_shared % in_run  # weights of own keys, behind these, are picked by runs
    first = np.full_like(seq_lens, num_shared)  # the block with a row's first own key
    if window is not None:
        first = np.maximum(seq_lens - window, 0) // block_size
    if num_shared:  # by the same rows in the next step, too, most probably
        shared = Copy.of(tables[:1, :num_shared], block_size, batch.scratch, k_cache, keep=True)
    runs, widths, blocks_at = _runs_of(tables, first, last // block_size + 1, in_run)
    last_slots = _slots(tables, last[:, None], block_size)
    pieces, longest_first = [], np.argsort(-widths, kind="stable")
    while len(longest_first):
        width = int(widths[longest_first[0]])
        padded = (width - widths[longest_first]).cumsum() * slots_of_run
        fit = min(int((padded <= MAX_PADDED_KEYS).sum()),
                  max(1, MAX_KEYS // (width * slots_of_run)))
        rows, longest_first = np.sort(longest_first[:fit]), longest_first[fit:]
        blocks = blocks_at[rows, :width].reshape(len(rows), -1, 1)
        keys = (blocks * block_size + np.arange(block_size)).reshape(len(rows), -1)
        masked = (keys < 0) | (keys > last[rows, None])
        if window is not None:
            masked |= keys <= last[rows, None] - window
        slots = runs[rows, :width, None] * slots_of_run + np.arange(slots_of_run)
        # 0 * inf is NaN: in place of what a row must not see it gets its own token's, times 0.
        slots = np.where(masked, last_slots[rows], slots.reshape(masked.shape))
        in_one = rows[-1] - rows[0] + 1 == len(rows)
        pieces.append(Group(slice(int(rows[0]), int(rows[-1]) + 1) if in_one else put(rows),
                            InPlace.of(runs[rows, :width], widths[rows], slots, num_heads, k_cache,
                                       num_shared // in_run),
                            put(masked[:, None]), shared))
    return pieces


def _runs_of(tables: np.ndarray, first: np.ndarray, end: np.ndarray,
             in_run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The runs in which each row's blocks first..end-1 lie, (rows, width), of which `widths`,
    (rows,), count; and which of the row's blocks lies where in them, (rows, width, in_run), -1 for
    none of these. first, end: (rows,).

    Example: runs of 4, blocks [9, 10, 2] of a row: runs [0, 2], [[-1, -1, 2, -1], [-1, 0, 1, -1]].
    """
    numbers = np.arange(tables.shape[1])
    rows, numbers = np.nonzero((numbers >= first[:, None]) & (numbers < end[:, None]))
    blocks = tables[rows, numbers].astype(np.int64)
    num_runs = int(blocks.max()) // in_run + 1
    found, at = np.unique(rows * num_runs + blocks // in_run, return_inverse=True)
    widths = np.bincount(found // num_runs, minlength=len(tables))
    at -= (widths.cumsum() - widths)[rows]  # each row's runs are counted from 0
    runs = np.zeros((len(tables), widths.max()), dtype=np.int64)
    runs[np.arange(runs.shape[1]) < widths[:, None]] = found % num_runs
    blocks_at = np.full((*runs.shape, in_run), -1)
    blocks_at[rows, at, blocks % in_run] = numbers
    return runs, widths, blocks_at


def _num_shared(tables: np.ndarray, full: np.ndarray) -> int:
    """How many blocks all rows begin with. full: (rows,) how many lie wholly before its query."""
    if len(tables) < 2:
        return 0
    same = (tables == tables[0]).all(0)
    same[full.min():] = False
    num_shared = int(same.argmin())  # the first that isn't; there is one, behind `full`
    return num_shared if num_shared >= MIN_SHARED_BLOCKS else 0


def _slots(tables: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Of each row's positions, (rows, n), the slots."""
    blocks = np.take_along_axis(tables, positions // block_size, axis=1)
    return blocks * block_size + positions % block_size


def _cut_sharing(batch: Batch, k_cache: torch.Tensor,
                 num_heads: int) -> tuple[list[Group], set[int]]:
    """Chunks of at most a tile that begin with the same blocks, as prompts behind one system prompt
    that is cached, in groups; and which rows these are.

    In a group all rows are padded to the most queries and the most keys of one. It grows, from the
    longest row on, while it copies no more than its rows would one by one, and computes at most
    half as many scores again. Example: 4 shared blocks, rows with 29, 25 and 14 of their own. Two
    copy 4 + 2 * 29 = 62 in place of 33 + 29 blocks; three 4 + 3 * 29 in place of 80, and stay two.
    """
    if batch.num_rows - batch.num_decodes < 2:
        return [], set()
    block_size = batch.block_size
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)
    query_lens, seq_lens = np.array(batch.query_lens), np.array(batch.seq_lens_host)
    full = (seq_lens - query_lens) // block_size  # blocks that lie wholly before a row's queries
    some = np.nonzero((query_lens > 1) & (query_lens <= TILE) & (full >= MIN_SHARED_BLOCKS))[0]
    groups, grouped = [], set()
    at = MIN_SHARED_BLOCKS - 1  # who has the same block here has the same ones before it
    for block in np.unique(tables[some, at:at + 1]):
        rows = some[tables[some, at] == block]
        num_shared = _num_shared(tables[rows], full[rows])
        widths = (seq_lens[rows] - 1) // block_size + 1 - num_shared
        rows = rows[np.argsort(-widths, kind="stable")]
        while num_shared and len(rows) > 1:
            widths = (seq_lens[rows] - 1) // block_size + 1 - num_shared
            queries, count = query_lens[rows], np.arange(1, len(rows) + 1)
            own = count * widths[0]  # blocks, and so it goes on: for each number of rows
            fits = num_shared + own <= (num_shared + widths).cumsum()
            scores = np.maximum.accumulate(queries) * (num_shared * count + own)
            fits &= scores <= 1.5 * (queries * (num_shared + widths)).cumsum()
            fits &= scores <= MAX_SCORES / (num_heads * block_size)
            fits &= own <= MAX_OWN_KEYS / block_size
            fit = len(rows) if fits.all() else max(1, int(fits.argmin()))
            if fit > 1:
                groups.append(_group_of_chunks(batch, np.sort(rows[:fit]), num_shared, k_cache))
                grouped.update(rows[:fit].tolist())
            rows = rows[fit:]
    return groups, grouped


def _group_of_chunks(batch: Batch, rows: np.ndarray, num_shared: int,
                     k_cache: torch.Tensor) -> Group:
    """Copies of what the rows share, and of what each has for itself."""
    block_size, put = batch.block_size, put_on(k_cache.device)
    tables = batch.host["block_tables"].reshape(batch.num_rows, -1)[rows]
    ends = np.cumsum(batch.query_lens)[rows, None]  # of the rows' tokens
    query_lens, seq_lens = (np.array(lens)[rows, None] for lens in (
        batch.query_lens, batch.seq_lens_host))
    # Queries from the last one back: in a shorter row the first stands in for those it hasn't.
    back = np.minimum(np.arange(query_lens.max())[::-1], query_lens - 1)  # (rows, queries)
    first, last = num_shared * block_size, seq_lens - 1
    num_blocks = int(last.max()) // block_size + 1 - num_shared
    keys = first + np.arange(num_blocks * block_size)
    masked = keys > (last - back)[..., None]  # (rows, queries, keys)
    seen = np.minimum(keys, last)  # behind the end of a row its last token takes the place
    slots = _slots(tables, seen, block_size)
    tokens = (ends - 1 - back).ravel()
    in_order = (np.diff(tokens) == 1).all()
    shared = Copy.of(tables[:1, :num_shared], block_size, batch.scratch, k_cache)
    own = Copy.of(slots[:, ::block_size] // block_size, block_size, batch.scratch, k_cache, slots)
    return Group(slice(int(tokens[0]), int(tokens[-1]) + 1) if in_order else put(tokens), own,
                 put(masked.reshape(len(tokens), 1, -1)), shared)


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

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               softcap: float | None) -> torch.Tensor:
        """q: (queries, num_heads, head_dim). Returns the same shape. k, v: see `as_lines`."""
        keys, values = self.copy.gather_keys(k), self.copy.gather_values(v)
        if self.fused and softcap is None:
            keys = keys[..., :len(q)].transpose(1, 2).contiguous()
            heads = q.transpose(0, 1)[None], keys[None], values[None, :, :len(q)]
            return F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale,
                                                  enable_gqa=True)[0].transpose(0, 1)
        parts = [_attend_tile(q[tile.queries], keys[..., tile.keys], values[:, tile.keys],
                              tile.mask, scale, softcap) for tile in self.tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cut_chunks(batch: Batch, window: int | None, k_cache: torch.Tensor,
                num_heads: int) -> list[Group | Chunk]:
    """Rows of several queries: some in groups, the others one by one."""
    pieces, grouped = ([], ()) if window is not None else _cut_sharing(batch, k_cache, num_heads)
    first_token = batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        if row not in grouped:
            pieces.append(_chunk_of_row(batch, row, first_token, window, k_cache))
        first_token += batch.query_lens[row]
    return pieces


def _chunk_of_row(batch: Batch, row: int, first_token: int, window: int | None,
                  k_cache: torch.Tensor) -> Chunk:
    """What any of a row's queries sees is copied once; a tile takes its part."""
    block_size, put = batch.block_size, put_on(k_cache.device)
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
        masked = keys > positions[:, None]
        if window is not None:
            masked |= keys <= positions[:, None] - window
        mask = k_cache.new_full(masked.shape, torch.inf).masked_fill_(put(masked), -torch.inf)
        tiles.append(Tile(slice(start - begin, start - begin + len(positions)),
                          slice(tile_first - first, int(positions[-1]) + 1 - first), mask))
    table = batch.host["block_tables"].reshape(batch.num_rows, -1)[row]
    blocks = table[None, first_block:(seq_len - 1) // block_size + 1]
    fused = window is None and not begin and _is_fused_faster(k_cache, query_len)
    return Chunk(slice(first_token, first_token + query_len),
                 Copy.of(blocks, block_size, batch.scratch, k_cache), tiles, fused)


def _is_fused_faster(cache: torch.Tensor, num_queries: int) -> bool:
    """Whether F.scaled_dot_product_attention is, for a whole prompt on a CPU. Of 2,040 tokens in a
    layer of Qwen3-0.6B: in bfloat16 with AMX 64 instead of 118 ms (on an EPYC without it, 121
    instead of 76), in float32 on a Xeon 169 instead of 216; of 512 tokens there 23 instead of 18.
    """
    if cache.device.type != "cpu":
        return False
    if cache.dtype == torch.bfloat16:
        return cpu_features().get("amx_bf16", False)
    return cache.dtype == torch.float32 and num_queries >= FUSED_TOKENS and is_intel()


def _attend_tile(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor,
                 scale: float, softcap: float | None) -> torch.Tensor:
    """q: (queries, num_heads, head_dim); keys: (num_kv_heads, head_dim, n) and values:
    (num_kv_heads, n, head_dim), the tile's part of the copy; mask: see `Tile`. Returns q's shape.
    The query heads that share a KV head become the rows of one product with its keys."""
    grouped = q.view(len(q), len(keys), -1, q.shape[-1]).permute(1, 2, 0, 3)
    nothing = q.new_empty(1, 1, 1)  # what a scaled product asks for to add, and ignores
    scores = torch.baddbmm(nothing, grouped.flatten(1, 2), keys, beta=0, alpha=scale)
    if softcap is not None:
        scores = _capped(scores, softcap)
    scores = scores.view(*grouped.shape[:3], -1)  # (.., group, queries, keys)
    masked = scores[..., -mask.shape[1]:]
    torch.minimum(masked, mask, out=masked)  # a third of masked_fill_'s time
    out = scores.softmax(-1).flatten(1, 2) @ values  # (kv_heads, group * queries, head_dim)
    return out.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)
