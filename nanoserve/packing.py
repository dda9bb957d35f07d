"""Weights in the order in which the CPU's matrix product reads them.

A matrix product works through small tiles, and oneDNN, the library behind torch on most CPUs, wants
a weight's tiles one behind the other. `F.linear` finds the rows as the checkpoint has them, and
reorders them in every call, which for few tokens takes as long as the product itself:

    as loaded     row 0: a0 a1 a2 a3 | row 1: b0 b1 b2 b3 | ...     F.linear: reorder, multiply
    packed        a0 a1 b0 b1 ... | a2 a3 b2 b3 ... | ...           linear: multiply

So weights are reordered once, when they are loaded, one after the other. A packed weight is opaque:
it has a shape, but no rows that can be read; what it was made of is freed.

Sometimes the plain weight is the better one (`prefers_plain`). A single token's product is reading
the weight, and torch without oneDNN reads the plain one as fast as memory gives it; and on Intel's
CPUs MKL is behind torch's own products, which in float32 is ahead for few rows and for many. So
where there is plenty of memory (memory.py) the plain weight is kept beside the packed one.

Invariant: `linear` gives what `F.linear` gives, up to rounding, for whatever `pack` returns; and
that is the weight itself where packing is of no use, or these operators are not there. They are
torch's own, but private (its compiler inserts them), so that they are tried out before they are
trusted.

Not known here: who multiplies, ranks, checkpoints. Road not taken: int8 weights, which are half as
many bytes to read, and another text.
"""

from functools import cache

import torch
import torch.nn.functional as F

TYPICAL_ROWS = 64  # tokens for which the order is chosen; within a few percent it serves any number
MIN_ROWS = 4  # a product of fewer rows takes up to a quarter longer than one of four
DTYPES = (torch.bfloat16, torch.float32)  # in float16 few CPUs multiply
MANY_ROWS = 512  # from here on MKL is as fast in float32 as oneDNN, or faster


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of weight (outputs, inputs), or the weight as it is."""
    if weight.is_cpu and weight.numel() and works(weight.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
           plain: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x: (rows, inputs); weight: packed, or (outputs, inputs); plain: what was
    packed, if it was kept."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if plain is not None and prefers_plain(plain.dtype, len(x)):
        torch._C._set_mkldnn_enabled(False)  # for the process: others' products go on, but slower
        try:
            return F.linear(x, plain, bias)
        finally:
            torch._C._set_mkldnn_enabled(True)
    if len(x) < MIN_ROWS:
        return linear(F.pad(x, (0, 0, 0, MIN_ROWS - len(x))), weight, bias)[:len(x)]
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def prefers_plain(dtype: torch.dtype, num_rows: int = 1) -> bool:
    """Whether a product of so many rows is faster with the plain weight. For one row: in bfloat16
    on an AMD EPYC all layers of Qwen3-0.6B take 27 ms, packed 31; in float32 on an Intel Xeon 8 of
    them take 30 ms, packed 44, while on the EPYC it is the slower one."""
    if dtype == torch.bfloat16:
        return num_rows == 1
    return dtype == torch.float32 and is_intel() and not MIN_ROWS <= num_rows < MANY_ROWS


def is_intel() -> bool:
    """Whether MKL multiplies, and on a CPU of its own maker's: elsewhere it is a slow one."""
    return cpu_features().get("cpu_name", "").startswith("Intel") and (
        torch.backends.mkl.is_available())


@cache
def cpu_features() -> dict:
    """What torch knows of this machine's CPU; older ones say nothing."""
    return getattr(torch.cpu, "get_capabilities", dict)()


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU has the operators, and they can be trusted."""
    if dtype not in DTYPES or not torch.backends.mkldnn.enabled:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 40, generator=generator).to(dtype) for rows in (56, 5))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False  # there, but emulated
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        products = linear(x, packed), linear(x[:1], packed), linear(x[:1], packed, None, weight)
    except (AttributeError, RuntimeError):  # no such operator; or not with these arguments
        return False
    plain = F.linear(x, weight)
    return packed.is_mkldnn and all(
        bool((product - plain[:len(product)]).abs().max() < 0.1) for product in products)
