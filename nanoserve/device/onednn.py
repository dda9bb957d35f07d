"""`ops` with packed matrix products: what a CPU runs where there is no C++ compiler.

oneDNN, the library behind torch on most CPUs, multiplies by small tiles. `F.linear` finds the rows
of a weight as the checkpoint has them and reorders them into tiles in every call, which for few
tokens takes as long as the product itself. Here a weight is reordered once, when it is loaded:

    as loaded     row 0: a0 a1 a2 a3 | row 1: b0 b1 b2 b3 | ...     F.linear: reorder, multiply
    packed        a0 a1 b0 b1 ... | a2 a3 b2 b3 ... | ...           linear: multiply

Everything else is `ops`, so this namespace is its specification with two functions replaced.

Invariant: `linear` gives what `F.linear` gives, up to rounding. torch's operators for it are
private (its compiler inserts them), so they are tried out before they are trusted, and a weight
that they can't take is kept as it is.

Not known here: layers. Known limit: experts are not packed.
"""

from functools import cache

import torch
import torch.nn.functional as F

from nanoserve.ops import (
    act_and_mul,
    add_rms_norm,
    argmax,
    draw,
    experts,
    floors,
    new_cache,
    norm_rope_store,
    paged_attention,
    rms_norm,
)

__all__ = ["act_and_mul", "add_rms_norm", "argmax", "draw", "experts", "floors", "linear",
           "new_cache", "norm_rope_store", "pack", "paged_attention", "rms_norm"]

TYPICAL_ROWS = 64  # rows of x that the order is chosen for; it serves any other number, too
DTYPES = (torch.bfloat16, torch.float32)  # few CPUs multiply in float16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A reordered copy of weight (outputs, inputs), or the weight as it is."""
    if weight.dim() == 2 and weight.is_cpu and weight.numel() and works(weight.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return weight


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias: see `ops.linear`."""
    if packed.is_mkldnn and len(x):
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    if packed.is_mkldnn:  # no rows: a step in which no row samples
        return x.new_empty(0, packed.shape[0])
    return F.linear(x, packed, bias)


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU has the operators, and they can be trusted."""
    if dtype not in DTYPES or not torch.backends.mkldnn.enabled:
        return False
    generator = torch.Generator().manual_seed(0)
    # Sums of about 1: where they are large, two roundings of one number are far apart, too.
    weight, x = (torch.randn(n, 40, generator=generator).mul(40 ** -0.25).to(dtype)
                 for n in (72, 5))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False  # there, but emulated
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):  # no such operator; or other arguments
        return False
    return packed.is_mkldnn and bool((product - F.linear(x, weight)).abs().max() < 0.05)
