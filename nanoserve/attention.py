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

MAX_GATHERED_KEYS = 2 ** 15  # decode keys copied at a time: 64 MB for 8 heads of 128 in bf16, V too


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """Write the new tokens' keys and values to their slots.

    k, v: (num_tokens, num_kv_heads, head_dim). Caches: (num_blocks, block_size, num_kv_heads,
    head_dim). slot_mapping: (num_tokens,), block id * block_size + offset.
    """
    k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
    v_cache.view(-1, *v.shape[1:])[slot_mapping] = v


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float) -> torch.Tensor:
    """Causal attention of each row's queries to its sequence.

    q: (num_tokens, num_heads, head_dim), scaled by `scale`. Returns the same shape. Query heads are
    shared out evenly over the KV heads (grouped-query attention; Ainslie et al. 2023).
    """
    out = torch.empty_like(q)
    start = 0
    while start < batch.num_decodes:
        # As many rows as fit when each is as long as the longest: 4 of up to 8,192 keys, say.
        longest = max(batch.seq_lens_host[start:batch.num_decodes])
        end = min(start + max(1, MAX_GATHERED_KEYS // longest), batch.num_decodes)
        out[start:end] = _attend_decodes(q, k_cache, v_cache, batch, slice(start, end), scale)
        start = end
    at = batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        end = at + batch.query_lens[row]
        out[at:end] = _attend_row(q[at:end], k_cache, v_cache, batch.block_tables[row],
                                  batch.seq_lens_host[row], scale)
        at = end
    return out


def _attend_row(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                block_table: torch.Tensor, seq_len: int, scale: float) -> torch.Tensor:
    """One row: q (query_len, num_heads, head_dim) at the last query_len positions of seq_len."""
    query_len = len(q)
    blocks = block_table[:-(-seq_len // k_cache.shape[1])]
    # (blocks, block_size, kv_heads, head_dim) -> (kv_heads, seq_len, head_dim)
    k = k_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)
    v = v_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)
    # Query i sees keys 0 .. seq_len - query_len + i: a triangle pushed to the right by the prefix.
    mask = None
    if query_len < seq_len:
        mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device)
        mask = mask.tril_(seq_len - query_len)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None,
        scale=scale, enable_gqa=q.shape[1] != k.shape[0])
    return out[0].transpose(0, 1)  # (query_len, num_heads, head_dim)


def _attend_decodes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    rows: slice, scale: float) -> torch.Tensor:
    """A group of rows with a single query each, at once. q: (num_tokens, num_heads, head_dim).

    The query heads that share a KV head become the rows of one matrix product with it: K and V are
    read once a group instead of once a head. Shorter rows are padded to the longest one.
    """
    q = q[rows]
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    width = -(-max(batch.seq_lens_host[rows]) // block_size)
    blocks = batch.block_tables[rows, :width]
    # (rows, width, block_size, kv_heads, head_dim) -> k (rows, kv_heads, keys, head_dim), v as read
    k = k_cache[blocks].flatten(1, 2).transpose(1, 2)
    v = v_cache[blocks].flatten(1, 2)
    padding = (torch.arange(width * block_size, device=q.device)
               >= batch.seq_lens[rows, None])  # (rows, keys)
    v.masked_fill_(padding[:, :, None, None], 0)  # 0 * inf is NaN: a zero weight is not enough
    scores = (q.view(num_rows, num_kv_heads, -1, head_dim) * scale) @ k.transpose(-1, -2)
    scores = scores.float().masked_fill_(padding[:, None, None], float("-inf"))
    out = scores.softmax(-1).to(q.dtype) @ v.transpose(1, 2)  # (rows, kv_heads, group, head_dim)
    return out.reshape(num_rows, num_heads, head_dim)
