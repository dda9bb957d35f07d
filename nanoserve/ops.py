"""What a layer computes between its matrix products, in plain torch.

Each function here has a namesake in `kernels`, with the same arguments and the same meaning, which
does in one pass over memory what takes several below. **The slow version is the specification**:
the kernels are tested against it, and a layer is given one module or the other and can't tell:

                       nanoserve.ops        one torch operator after the other; any device
    layers, model ──►  or
                       nanoserve.kernels    one Triton kernel each; GPUs

    hidden ─ add_rms_norm ─ qkv_proj ─ norm_rope_store ─ paged_attention ─ o_proj ─ add_rms_norm ─
    gate_up_proj ─ act_and_mul ─ down_proj ─►                  (or `experts` for the last three)

Invariant: results are rounded to the tensors' dtype after each step that is a step below, in both
modules. A function's memory is its own: arguments are left as they are, but for the KV cache.

Not known here: weights' names, ranks, phases. Road not taken: `torch.compile`, which fuses as well,
but costs guards on every call, and may compile again in the middle of a request.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F

from nanoserve.attention import paged_attention, store_kv

__all__ = ["act_and_mul", "add_rms_norm", "apply_rope", "experts", "norm_rope_store",
           "paged_attention", "rms_norm"]

SLICE = 256  # tokens whose float32 numbers a CPU keeps in its cache from one operator to the next
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), rounded once.

    x: (..., size); weight: (size,), possibly float32 where x is not. `F.rms_norm` is the same in
    more steps, and on a CPU takes up to three times as long.
    """
    return _norm(x.float(), weight, eps).to(x.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of float32, not rounded."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1])
    return (x * mean.rsqrt_()).mul_(weight)


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Made once: one operator with a tensor takes half the time of two with numbers."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual): what comes to the residual stream, and what the next part
    of the model reads of it. x, residual: (num_tokens, size); no residual is a stream's beginning.
    """
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def norm_rope_store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
                    cos: torch.Tensor, sin: torch.Tensor, k_cache: torch.Tensor,
                    v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Normalise queries and keys, turn them to their positions, and put K and V into the cache.

    q: (num_tokens, num_heads, head_dim); k, v: (num_tokens, num_kv_heads, head_dim); weights:
    (head_dim,), None for no norm; cos, sin: (num_tokens, 1, head_dim) in float32, see
    `RotaryEmbedding`; caches and slots: see `store_kv`. Returns the new q. Rounded once.
    """
    if len(q) > SLICE:
        parts = zip(*(x.split(SLICE) for x in (q, k, v, cos, sin, slot_mapping)), strict=True)
        return torch.cat([norm_rope_store(q, k, v, q_weight, k_weight, eps, cos, sin, k_cache,
                                          v_cache, slots) for q, k, v, cos, sin, slots in parts])

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = x.float() if weight is None else _norm(x.float(), weight, eps)
        return apply_rope(wide, cos, sin).to(x.dtype)

    store_kv(turned(k, k_weight), v, k_cache, v_cache, slot_mapping)
    return turned(q, q_weight)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x (num_tokens, num_heads, head_dim), all in float32. Pairs are (i, i + head_dim / 2), as
    in Llama's Hugging Face checkpoints, not (2i, 2i + 1) as in the paper."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


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
