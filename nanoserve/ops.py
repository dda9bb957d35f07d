"""What a layer computes between its matrix products, in plain torch.

Each function here has a namesake in `kernels`, with the same arguments and the same meaning, which
does in one pass over memory what takes several below. **The slow version is the specification**:
the kernels are tested against it, and a layer is given one module or the other and can't tell:

                       nanoserve.ops        one torch operator after the other; any device
    layers, model ──►  or
                       nanoserve.device.kernels    one Triton kernel each; GPUs

    hidden ─ add_rms_norm ─ qkv_proj ─ norm_rope_store ─ paged_attention ─ o_proj ─ add_rms_norm ─
    gate_up_proj ─ act_and_mul ─ down_proj ─►                  (or `experts` for the last three)

`new_caches` and `places_of` are here because the order of memory belongs to whoever reads it.

Invariant: results are rounded to the tensors' dtype after each step that is a step below, in both
modules. A function's memory is its own: arguments are left as they are, but for the KV cache.

Where weights have just run through a core's cache, Python is slow: hence `shape[0]` and
`split_with_sizes`, where `len(x)` and `split` are functions in Python.

Not known here: weights' names, ranks, phases. Road not taken: `torch.compile`, which fuses as well,
but costs guards on every call, and may compile again in the middle of a request.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F

from nanoserve.device.attention import paged_attention
from nanoserve.device.kv_cache import Places, new_caches, places_of, store_kv

__all__ = ["act_and_mul", "add_rms_norm", "experts", "new_caches", "norm_rope_store",
           "paged_attention", "rms_norm", "places_of"]

SLICE = 256  # tokens whose float32 numbers a CPU keeps in its cache from one operator to the next
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), rounded once.

    x: (..., size); weight: (size,), possibly float32 where x is not.
    """
    return add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual): what the next part of the model reads of the residual
    stream, and the stream. x, residual: (..., size); no residual is a stream's beginning. weight:
    see `rms_norm`. (`F.rms_norm` takes up to three times as long on a CPU.)
    """
    total = x if residual is None else x + residual
    wide = total.float()
    factors = _inverse_rms(wide, eps)
    scaled = wide * factors if wide is total else wide.mul_(factors)  # `total` stays as it is
    return scaled.mul_(weight).to(total.dtype), total


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x: (..., size) in float32 -> (..., 1)"""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Made once: one operator with a tensor takes half the time of two with numbers."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def norm_rope_store(qkv: torch.Tensor, weight: torch.Tensor | None, eps: float,
                    cos: torch.Tensor, sin: torch.Tensor, k_cache: torch.Tensor,
                    v_cache: torch.Tensor, places: Places) -> torch.Tensor:
    """Normalise queries and keys, turn them to their positions, and put K and V into the cache.

    qkv: (num_tokens, num_heads + 2 * num_kv_heads, head_dim), the heads of queries, keys and values
    in this order, num_heads a multiple of num_kv_heads; weight: (num_heads / num_kv_heads + 1, 1,
    head_dim), the queries' repeated and then the keys' (`HeadNorm` says why), None for no norm;
    cos, sin: (num_tokens, 1, 1, head_dim) in float32; caches and places: see `store_kv`. Returns
    the new q, (num_tokens, num_heads, head_dim). Queries and keys are computed in float32 and
    rounded once; values are copied.
    """
    if qkv.shape[0] > SLICE:
        parts = zip(*(x.split(SLICE) for x in (qkv, cos, sin, *places)), strict=True)
        return torch.cat([norm_rope_store(qkv, weight, eps, cos, sin, k_cache, v_cache, (b, o))
                          for qkv, cos, sin, b, o in parts])
    (num_tokens, all_heads, head_dim), num_kv_heads = qkv.shape, k_cache.shape[2]
    num_heads = all_heads - 2 * num_kv_heads
    qk, v = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
    x = qk.float().view(num_tokens, num_heads // num_kv_heads + 1, num_kv_heads, head_dim)
    qk = _norm_rotate(x, weight, eps, cos, sin).view(qk.shape).to(qkv.dtype)
    q, k = qk.split_with_sizes((num_heads, num_kv_heads), dim=1)
    store_kv(k, v, k_cache, v_cache, places)
    return q


def _norm_rotate(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                 sin: torch.Tensor) -> torch.Tensor:
    """RoPE of the norm of x, or of x itself where `weight` is None. x: (num_tokens, sets,
    num_kv_heads, head_dim) in float32, see `HeadNorm`. A pair (a, b) becomes (a cos - b sin, b cos
    + a sin); pairs are (i, i + head_dim / 2), as in Llama's Hugging Face checkpoints, not (2i, 2i +
    1) as in the paper.

    RoPE is linear, so the norm's factors may come in it or behind it: 1 / rms goes into the result,
    in place, and the weights into cos and sin, which have num_kv_heads times fewer numbers: two for
    each pair, because a's weight is not b's.
    """
    if weight is not None:
        cos, sin = cos * weight, sin * weight
    rotated = x * cos
    (a, b), (sin_a, sin_b) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    to_a, to_b = rotated.chunk(2, dim=-1)
    to_a.addcmul_(b, sin_b, value=-1)
    to_b.addcmul_(a, sin_a)
    return rotated if weight is None else rotated.mul_(_inverse_rms(x, eps))


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, the middle of a gated MLP. (num_tokens, 2 * size) -> (num_tokens, size)"""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_proj: torch.Tensor, down_proj: torch.Tensor, first_expert: int,
            activation: str) -> torch.Tensor:
    """The weighted answers of each token's experts, of those that are here; the others' count 0.

    hidden: (num_tokens, hidden_size); weights, ids: (num_tokens, experts per token); gate_up_proj:
    (num_experts, 2 * inner, hidden_size); down_proj: (num_experts, hidden_size, inner), of the
    experts first_expert, first_expert + 1, ... Tokens are sorted by expert, and each expert that is
    hit computes its own in one go. Counting them waits for the device: free on a CPU alone.
    """
    out = torch.zeros_like(hidden)
    last_expert = first_expert + len(down_proj)
    order = ids.flatten().argsort(stable=True)
    tokens = order // ids.shape[1]
    weights = weights.flatten()[order][:, None]
    counts = ids.flatten().bincount(minlength=last_expert).tolist()
    at = sum(counts[:first_expert])
    for expert, count in enumerate(counts[first_expert:last_expert]):
        if count:
            own = tokens[at:at + count]
            inner = act_and_mul(F.linear(hidden[own], gate_up_proj[expert]), activation)
            result = F.linear(inner, down_proj[expert])
            out.index_add_(0, own, (result * weights[at:at + count]).to(out.dtype))
        at += count
    return out
