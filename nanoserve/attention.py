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

This is the plain torch version, the specification: chunks of prompts are computed row by row,
decode rows in groups, each padded to its longest row and gathered into a copy. The price is that
copy and the padding; a kernel that reads the blocks where they lie pays neither. Road not taken:
padding whole batches, prompts included, which computes mostly nothing.
"""

import torch
import torch.nn.functional as F

from nanoserve.batch import Batch

MAX_GATHERED_KEYS = 2 ** 15  # decode keys copied at a time: 64 MB for 8 heads of 128, and V again


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
    out = torch.empty_like(q)
    block_size, start = k_cache.shape[1], 0
    while start < batch.num_decodes:
        # As many rows as fit when each is as long as the longest: 4 of up to 8,192 keys, say.
        longest = max(batch.seq_lens_host[start:batch.num_decodes])
        if window is not None:
            longest = min(longest, window + block_size)
        end = min(start + max(1, MAX_GATHERED_KEYS // longest), batch.num_decodes)
        out[start:end] = _attend_decodes(q, k_cache, v_cache, batch, slice(start, end), scale,
                                         window, softcap)
        start = end
    at = batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        end = at + batch.query_lens[row]
        out[at:end] = _attend_row(q[at:end], k_cache, v_cache, batch.block_tables[row],
                                  batch.seq_lens_host[row], scale, window, softcap)
        at = end
    return out


def _attend_row(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                block_table: torch.Tensor, seq_len: int, scale: float, window: int | None,
                softcap: float | None) -> torch.Tensor:
    """One row: q (query_len, num_heads, head_dim) at the last query_len positions of seq_len."""
    query_len, block_size = len(q), k_cache.shape[1]
    # With window 20, blocks of 16 and queries from position 55 on, keys from 36 are seen: block 2.
    first = 0 if window is None else max(0, seq_len - query_len - window + 1) // block_size
    blocks = block_table[first:-(-seq_len // block_size)]
    num_keys = seq_len - first * block_size
    # (blocks, block_size, kv_heads, head_dim) -> (kv_heads, num_keys, head_dim)
    k = k_cache[blocks].flatten(0, 1)[:num_keys].transpose(0, 1)
    v = v_cache[blocks].flatten(0, 1)[:num_keys].transpose(0, 1)
    # Query i sees keys 0 .. num_keys - query_len + i: a triangle pushed to the right by the prefix,
    # less the triangle of what its window has left behind.
    mask = None
    if query_len < num_keys or window is not None or softcap is not None:
        mask = torch.ones(query_len, num_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril_(num_keys - query_len)
        if window is not None:
            mask = mask.triu_(num_keys - query_len - window + 1)
    q, grouped = q.transpose(0, 1), q.shape[1] != k.shape[0]
    if softcap is not None:
        return _attend_capped(q, k, v, mask, scale, softcap).transpose(0, 1)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask,
                                         is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)  # (query_len, num_heads, head_dim)


def _attend_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor,
                   scale: float, softcap: float) -> torch.Tensor:
    """Attention spelt out, for the scores that torch's own doesn't let us at.

    q (num_heads, query_len, head_dim), k and v (kv_heads, num_keys, head_dim), mask (query_len,
    num_keys). Returns q's shape.
    """
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
    scores = scores.float().masked_fill_(~mask, float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ v


def _attend_decodes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    rows: slice, scale: float, window: int | None,
                    softcap: float | None) -> torch.Tensor:
    """A group of rows with a single query each, at once. q: (num_tokens, num_heads, head_dim).

    The query heads that share a KV head become the rows of one matrix product with it: K and V are
    read once a group instead of once a head. Shorter rows are padded to the longest one.
    """
    q = q[rows]
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    blocks, positions = _visible_blocks(batch, rows, block_size, window)
    # (rows, width, block_size, kv_heads, head_dim) -> k (rows, kv_heads, keys, head_dim), v as read
    k = k_cache[blocks].flatten(1, 2).transpose(1, 2)
    v = v_cache[blocks].flatten(1, 2)
    seq_lens = batch.seq_lens[rows, None]
    masked = positions >= seq_lens  # (rows, keys)
    if window is not None:
        masked = masked | (positions < seq_lens - window)
    v.masked_fill_(masked[:, :, None, None], 0)  # 0 * inf is NaN: a zero weight is not enough
    scores = (q.view(num_rows, num_kv_heads, -1, head_dim) * scale) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(masked[:, None, None], float("-inf"))
    out = scores.softmax(-1).to(q.dtype) @ v.transpose(1, 2)  # (rows, kv_heads, group, head_dim)
    return out.reshape(num_rows, num_heads, head_dim)


def _visible_blocks(batch: Batch, rows: slice, block_size: int,
                    window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks a group of decodes reads, (rows, width), and the positions of the keys in them,
    (rows or 1, width * block_size)."""
    width = -(-max(batch.seq_lens_host[rows]) // block_size)
    positions = torch.arange(width * block_size, device=batch.seq_lens.device)[None]
    if window is None or width * block_size <= window:
        return batch.block_tables[rows, :width], positions
    # From the block with the first visible key on. A window of 20 touches 3 blocks of 16 at most.
    first = (batch.seq_lens[rows, None] - window).clamp(min=0) // block_size  # (rows, 1)
    width = min(width, -(-window // block_size) + 1)
    columns = first + torch.arange(width, device=first.device)
    columns = columns.clamp(max=batch.block_tables.shape[1] - 1)  # what is beyond is masked anyway
    blocks = batch.block_tables[rows].gather(1, columns.long())
    return blocks, positions[:, :width * block_size] + first * block_size
