"""The specification: what a model computes, products and attention included, in plain torch.

A model is matrix products (in brackets) with something between them. All of it stands here, each
function written to be read beside the formula of its paper:

    hidden ─ add_rms_norm ─ [qkv] ─ norm_rope_store ─ paged_attention ─ [o] ─ add_rms_norm ─
    [gate_up] ─ act_and_mul ─ [down] ─►                (or `experts` for the last three)
    logits ─ argmax, or floors and draw ─► token ids

This module is a *namespace*, and `device/` has twins of it, with the same names, signatures and
meaning: Triton kernels for GPUs, compiled C++ for CPUs. Layers and the sampler are handed one of
them and can't tell which. **The slow version is the specification**: it may be slow, it must be
obvious. A twin may differ in rounding only; all of them pass the same tests, which use float64.

Invariants: arguments are left as they are, but for the KV cache. Norms, activations, RoPE and
attention compute in float32 and round once, to the dtype of their input; so does each product.

A token's keys and values lie in a *slot* of the cache, which is `block id * block_size + offset`.
`LLM(kernels="torch")` runs this file, on any device. Not known here: weights' names, requests, what
extras compute.
"""

from functools import partial

import torch
import torch.nn.functional as F

from nanoserve.batch import Batch

__all__ = ["act_and_mul", "add_rms_norm", "argmax", "draw", "experts", "floors", "linear",
           "look_up", "new_cache", "norm_rope_store", "pack", "paged_attention", "rms_norm"]

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
Floors = tuple[torch.Tensor, torch.Tensor]  # see `floors`

# ------------------------------------------------------------ matrix products


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the memory layout that this namespace's `linear` reads; opaque to all others.

    weight: (outputs, inputs), or (experts, outputs, inputs). The result may share its memory.
    """
    return weight


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x: (rows, inputs); packed: see `pack`. Returns (rows, outputs)."""
    return F.linear(x, packed, bias)


def look_up(ids: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Rows of a packed weight: ids (n,) -> (n, inputs), in its dtype or one that holds it."""
    return F.embedding(ids, packed)


# ------------------------------------------------------- norms and gated MLPs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row (Zhang and Sennrich 2019).

    x: (rows, size); weight: (size,) in float32, whatever x is.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual): the next layer's input, and the residual stream. The norm
    reads the sum after rounding. Both (num_tokens, size). residual None: x begins the stream."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, gate first, of a gated MLP. (num_tokens, 2 * size) -> (num_tokens, size)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_proj: torch.Tensor, down_proj: torch.Tensor, first_expert: int,
            activation: str) -> torch.Tensor:
    """For each token, the weighted sum of its experts' outputs; only this rank's experts count.

    hidden: (num_tokens, hidden_size); weights, ids: (num_tokens, experts per token); gate_up_proj
    and down_proj: packed, of experts first_expert, first_expert + 1, ..., each with matrices of
    (2 * inner, hidden_size) and (hidden_size, inner).
    """
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for i, (gate_up, down) in enumerate(zip(gate_up_proj, down_proj, strict=True)):
        tokens, column = (ids == first_expert + i).nonzero(as_tuple=True)  # who chose this expert
        if len(tokens):
            answer = linear(act_and_mul(linear(hidden[tokens], gate_up), activation), down)
            out.index_add_(0, tokens, answer.float() * weights[tokens, column, None])
    return out.to(hidden.dtype)


# -------------------------------------------------- the KV cache and attention


def new_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
              dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's empty K and V caches. Each namespace chooses its own memory layout; this one's is
    (num_blocks, block_size, num_kv_heads, head_dim), with dtype int8 head_dim + 4 (`quantised`)."""
    width = head_dim + 4 if dtype == torch.int8 else head_dim
    shape = num_blocks, block_size, num_kv_heads, width
    return (torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device))


def quantised(x: torch.Tensor) -> torch.Tensor:
    """A token's head in 8 bits: whole numbers in [-127, 127], and after them the four bytes of its
    own scale in float32. (n, num_kv_heads, head_dim) -> (n, num_kv_heads, head_dim + 4) int8"""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return torch.cat((rounded.to(torch.int8), scale.view(torch.int8)), -1)


def restored(stored: torch.Tensor) -> torch.Tensor:
    """What was stored, in float32; `quantised` numbers are multiplied by their scale."""
    if stored.dtype != torch.int8:
        return stored.float()
    return stored[..., :-4] * stored[..., -4:].contiguous().view(torch.float32)


def norm_rope_store(qkv: torch.Tensor, q_weight: torch.Tensor | None,
                    k_weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                    sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> torch.Tensor:
    """Normalise queries and keys, rotate them by position (RoPE), and write K and V to their slots.

    qkv: (num_tokens, num_heads + 2 * num_kv_heads, head_dim), first the heads of the queries, then
    of the keys, then of the values; q_weight, k_weight: (head_dim,) in float32, of a norm over each
    head, None for no norm; cos, sin: (num_tokens, head_dim) in float32; slot_mapping: (num_tokens,)
    with -1 for padding, which is not written. Returns q, (num_tokens, num_heads, head_dim).
    """
    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RoPE (Su et al. 2021): the pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are
        (i, i + head_dim / 2), as in Hugging Face's checkpoints, not (2i, 2i + 1) as in the paper.
        """
        wide = x.float() if weight is None else rms_norm(x.float(), weight, eps)
        a, b = wide.chunk(2, dim=-1)
        return (wide * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]).to(x.dtype)

    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for cache, new in ((k_cache, turned(k, k_weight)), (v_cache, v)):
        new = quantised(new) if cache.dtype == torch.int8 else new
        cache.view(-1, *new.shape[1:])[slots] = new[written]
    return turned(q, q_weight)


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None, softcap: float | None = None,
                    sinks: torch.Tensor | None = None,
                    last: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T * scale) v of each row's queries over its own sequence (Kwon et al. 2023).

    q: (num_tokens, num_heads, head_dim). The step's own keys and values are in the cache already,
    so a prefix hit, an earlier chunk and the step's own tokens are no different from each other.
    window: a query sees this many keys at most, its own included. softcap: a score becomes
    softcap * tanh(score / softcap) (Gemma 2). sinks: (num_heads,) in float32, each the score of one
    more key whose value is 0, so that a head's weights may sum up to less than 1 (gpt-oss). last:
    (num_tokens,) in int32, the last position that each query sees, where tokens of an image see
    each other (Gemma 3); it is computed by this step at the latest. Returns q's shape; padding
    (seq_len 0) gives zeros.

        row: seq_len 38, query_len 3, blocks of 16, block table [7, 2, 9]
        keys 0..15 lie in block 7, 16..31 in block 2, 32..37 in block 9; the rest of block 9
        is what its last owner left. The 3 queries stand at 35, 36, 37 and see 36, 37, 38 keys.
    """
    out, end = torch.zeros_like(q), 0
    block_size, num_kv_heads, _ = k_cache.shape[1:]
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens_host,
                                                   strict=True)):
        start, end = end, end + query_len
        if seq_len == 0:
            continue
        seen_to = None if last is None else last[start:end]
        visible = batch.mask(row, window, seen_to)  # (query_len, seq_len)
        # The blocks of keys that no query sees may belong to another sequence by now.
        positions = visible.any(0).nonzero()[:, 0]
        blocks = batch.block_tables[row, positions // block_size]
        keys = restored(k_cache[blocks, positions % block_size])  # (num_keys, kv_heads, head_dim)
        values = restored(v_cache[blocks, positions % block_size])
        # Grouped-query attention (Ainslie et al. 2023): `g` query heads share a KV head `h`.
        grouped = q[start:end].float().view(query_len, num_kv_heads, -1, q.shape[2])
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, positions], float("-inf"))
        if sinks is not None:  # a last column, which is dropped after the softmax
            column = sinks.view(num_kv_heads, -1, 1, 1).expand(-1, -1, query_len, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :len(positions)]
        out[start:end] = torch.einsum("hgqk,khd->qhgd", weights, values).reshape(q[start:end].shape)
    return out


# ------------------------------------------------------------------- sampling


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, the first of equals. (s, vocab_size) -> (s,) int64"""
    return logits.argmax(-1)


def floors(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> Floors:
    """What min-p, top-k and top-p leave of each row, in this order, as two numbers: a token stays
    if its logit / temperature is above floors[row], or equals it and its id is at most last[row].

    logits: (s, vocab_size); the others: (s,). A row that asks for nothing (top_k 0, top_p 1, min_p
    0) keeps everything. Equal logits at the k-th place all stay; of equal logits at top-p's edge
    only as many as it takes, the lowest ids. Returns floors (s,) float32 and last (s,) int32.
    """
    ranked, ids = _heated(logits, temperature).sort(dim=-1, descending=True, stable=True)
    p = ranked.softmax(-1)
    keep = p >= min_p[:, None] * p[:, :1]
    everything = torch.full_like(top_k, logits.shape[1])
    k = torch.where(top_k > 0, top_k, everything).clamp(max=logits.shape[1]).long()
    keep &= ranked >= ranked.gather(-1, k[:, None] - 1)
    p = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
    # The mass *before* a token decides, so that the token which crosses top_p stays. Example:
    # p = .4 .3 .2 .1 and top_p = .6: before them lie 0 .4 .7 .9, the first two stay.
    keep &= (p.cumsum(-1) - p < top_p[:, None]) | (top_p[:, None] >= 1)
    keep[:, 0] = True  # also where float32 rounds top_p to 0
    edge = keep.sum(-1, keepdim=True) - 1  # the kept tokens stand in front
    return ranked.gather(-1, edge)[:, 0], ids.gather(-1, edge)[:, 0].int()


def draw(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
         positions: torch.Tensor, floors: Floors | None = None) -> torch.Tensor:
    """One token a row, drawn from softmax(logits / temperature); temperature 0 is greedy.

    logits: (s, vocab_size); temperature: (s,) float32; seeds (64 bits) and positions: (s,) int64,
    which alone decide the row's random number; floors: see `floors`, None for no filter. Returns
    (s,) int64. By inverse CDF: the first token whose cumulated probability exceeds that number.
    """
    heated, vocab_size = _heated(logits, temperature), logits.shape[1]
    if floors is not None:
        floor, last = floors[0][:, None], floors[1][:, None]
        beyond = torch.arange(vocab_size, device=logits.device) > last
        heated = heated.masked_fill((heated < floor) | ((heated == floor) & beyond), float("-inf"))
    cumulated = heated.softmax(-1).double().cumsum(-1)
    target = uniforms(seeds, positions)[:, None] * cumulated[:, -1:]
    # The clamp is for rows of NaN: an overflow in one request must not end the whole batch.
    drawn = torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=vocab_size - 1)
    return torch.where(temperature == 0, argmax(logits), drawn)


def _heated(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature in float32. A greedy row, whose temperature is 0, stays as it is."""
    return logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(s,) float64 in [0, 1), a function of each row's seed and position alone: a counter-based
    generator (Salmon et al. 2011), here SplitMix64 (Steele et al. 2014). torch's int64 wraps.

    40 bits are used, so that the largest number times a float64 sum stays below that sum.
    """
    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:  # logical: zeros come in
        return (x >> bits) & (2 ** (64 - bits) - 1)

    x = seeds + positions * (0x9E3779B97F4A7C15 - 2 ** 64)  # 2^64 / golden ratio, as an int64
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2 ** 64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2 ** 64)
    return shifted(x ^ shifted(x, 31), 24).double() * 2.0 ** -40
