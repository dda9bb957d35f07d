"""Weights in the order in which the CPU's matrix product reads them.

A matrix product works through small tiles, and oneDNN, the library behind torch on most CPUs, wants
a weight's tiles one behind the other. `F.linear` finds the rows as the checkpoint has them, and
reorders them in every call, which for few tokens takes as long as the product itself:

    as loaded     row 0: a0 a1 a2 a3 | row 1: b0 b1 b2 b3 | ...     F.linear: reorder, multiply
    packed        a0 a1 b0 b1 ... | a2 a3 b2 b3 ... | ...           product: multiply

So weights are reordered once, when they are loaded, one after the other. A packed weight is opaque:
it has a shape, but no rows that can be read; what it was made of is freed.

Where there is plenty of memory (memory.py) a second copy is kept, for products for which the packed
one is slower (`Product`). A single token's is reading the weight, and oneDNN reads slower than
memory gives. In bfloat16 torch without oneDNN is faster, with the plain weight; or, on Intel's
CPUs, a weighted sum of `Lines`. In float32 there MKL, which is behind torch's own products, is
faster with the plain weight: for few rows, and for many.

Invariant: `product` gives what `F.linear` gives, up to rounding, for whatever `pack` returns; and
that is the weight itself where packing is of no use, or these operators are not there. They are
torch's own, but private (its compiler inserts them), so that they are tried out before they are
trusted.

Not known here: who multiplies, ranks, checkpoints. Road not taken: int8 weights, which are half as
many bytes to read, and another text.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F

TYPICAL_ROWS = 64  # tokens for which the order is chosen; within a few percent it serves any number
MIN_ROWS = 4  # a product of fewer rows takes up to a quarter longer than one of four
DTYPES = (torch.bfloat16, torch.float32)  # in float16 few CPUs multiply
MANY_ROWS = 512  # from here on MKL is as fast in float32 as oneDNN, or faster
LINE_WIDTHS = (256, 128, 64)  # outputs side by side in `Lines`; the wider, the faster it is read


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of weight (outputs, inputs), or the weight as it is."""
    if _is_for_packing(weight):
        return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return weight


def second_copy(weight: torch.Tensor) -> "torch.Tensor | Lines | None":
    """What to keep beside the packed weight, made of weight (outputs, inputs); None for nothing."""
    return _in_another_order(weight) if _is_for_packing(weight) else None


def _in_another_order(weight: torch.Tensor) -> "torch.Tensor | Lines | None":
    if weight.dtype == torch.float32:
        return weight if is_intel() else None
    # Bags are shared out over the threads, and are no use if most have none.
    has_bags = len(weight) >= LINE_WIDTHS[-1] * torch.get_num_threads()
    return Lines(weight) if is_intel() and has_bags else weight


def _is_for_packing(weight: torch.Tensor) -> bool:
    return weight.is_cpu and weight.numel() > 0 and works(weight.dtype)


def product(weight: torch.Tensor, bias: torch.Tensor | None = None,
            second: "torch.Tensor | Lines | None" = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes x, (rows, inputs), and returns x @ weight.T + bias. weight: packed, or
    (outputs, inputs); second: what `second_copy` made of the same, or the plain weight, or None."""
    if not weight.is_mkldnn:
        return partial(F.linear, weight=weight, bias=bias)
    return Product(weight, bias, second)


class Product:
    """`product` of a packed weight. The packed one serves `rows`; fewer than `few` rows, and more
    than `rows`, go to the second copy; what is between is filled up to four. What depends on the
    weight alone is decided here, and not in each call: where a weight has just run through the
    cache, Python is slow.

    One row with all layers of Qwen3-0.6B in bfloat16 on an AMD EPYC: plain 27 ms, packed 31. With 8
    layers in float32 on an Intel Xeon: plain 30 ms, packed 44; on the EPYC packed is the faster.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None,
                 second: "torch.Tensor | Lines | None"):
        self.weight, self.bias, self.second = weight, bias, second
        self.rows = range(MIN_ROWS, sys.maxsize)
        self.few = 0  # the second copy is for fewer rows than this
        if second is not None and weight.dtype == torch.bfloat16:
            self.few = 2
        elif second is not None and is_intel():
            self.rows, self.few = range(MIN_ROWS, MANY_ROWS), MIN_ROWS
        self.by_second = second if isinstance(second, Lines) else partial(
            _without_onednn if weight.dtype == torch.bfloat16 else F.linear, weight=second)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        self.multiply = getattr(multiply, "_op", multiply)  # without the wrapper in Python

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows in self.rows:
            return self.multiply(x, self.weight, self.bias, "none", [], "")
        if 0 < num_rows < self.few or num_rows >= self.rows.stop:
            return self.by_second(x, bias=self.bias)
        return self(F.pad(x, (0, 0, 0, MIN_ROWS - num_rows)))[:num_rows]


def _without_onednn(x: torch.Tensor, weight: torch.Tensor,
                    bias: torch.Tensor | None) -> torch.Tensor:
    try:  # within: Ctrl-C may come right behind the call that switches it off
        torch._C._set_mkldnn_enabled(False)  # for the process: others' products go on, but slower
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


@dataclass
class Bags:
    """Weighted sums of lines of memory, as torch's `embedding_bag` takes them: the lines of all
    sums in one list, and where in it each sum's, its bag, begins. Attention reads keys and values
    with it, too (kv_cache.py)."""

    lines: torch.Tensor  # (num_lines,) their numbers
    starts: torch.Tensor  # (num_bags,)

    @classmethod
    def of(cls, lines: np.ndarray, sizes: np.ndarray, put: Callable = torch.from_numpy) -> "Bags":
        """sizes: (num_bags,) how many lines of `lines` come into each. put: makes tensors."""
        return cls(put(lines.ravel()), put((sizes.cumsum() - sizes).astype(lines.dtype)))

    def __call__(self, memory: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """memory: (all lines, width); weights: (num_lines,). Returns (num_bags, width)."""
        # Not scaled by frequency, mode 0 (a sum), not sparse. F's checks take longer than a sum.
        return torch.embedding_bag(memory, self.lines, self.starts, False, 0, False, weights)[0]


class Lines:
    """A weight for a single row's product. The outputs are cut into bags of as many as a line is
    wide, and a line has what one input gives to those of its bag: their sum, weighted by the row,
    is the product.

        weight  out 0: a0 a1 ..    out 1: b0 b1 ..    ..      lines  a0 b0 .. | a1 b1 .. | ..

    torch's `embedding_bag` asks memory for a line before it is needed: a Xeon reads bfloat16
    weights so with 14 GB/s, packed or plain with 10.
    """

    def __init__(self, weight: torch.Tensor):
        self.num_outputs, num_inputs = weight.shape
        at_least = 2 * torch.get_num_threads()  # bags, for all threads to be busy
        width = next((width for width in LINE_WIDTHS if self.num_outputs >= at_least * width),
                     LINE_WIDTHS[-1])
        if self.num_outputs % width:
            weight = F.pad(weight, (0, 0, 0, -self.num_outputs % width))
        bags = weight.view(-1, width, num_inputs)
        self.num_bags = len(bags)
        self.memory = bags.transpose(1, 2).reshape(-1, width).contiguous()
        self.bags = _bags(self.num_bags, num_inputs)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: (1, inputs). Returns (1, outputs)."""
        weights = x.view(-1).repeat(self.num_bags)
        out = self.bags(self.memory, weights).view(1, -1)
        if out.shape[1] != self.num_outputs:  # the last bag was filled up
            out = out[:, :self.num_outputs]
        return out if bias is None else out + bias


@cache
def _bags(num_bags: int, size: int) -> Bags:
    """All lines in order, `size` a bag: the same lists for all layers."""
    return Bags.of(np.arange(num_bags * size, dtype=np.int32), np.full(num_bags, size))


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
    num_outputs = LINE_WIDTHS[-1] * torch.get_num_threads() + 8
    # Sums of about 1: where they are large, two roundings of one number are far apart, too.
    weight, x = (torch.randn(n, 40, generator=generator).mul(40 ** -0.25).to(dtype)
                 for n in (num_outputs, 5))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False  # there, but emulated
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        products = product(packed)(x), *(product(packed, None, second)(x[:1])
                                         for second in (None, weight, _in_another_order(weight)))
    except (AttributeError, RuntimeError, TypeError):  # no such operator; or other arguments
        return False
    plain = F.linear(x, weight)
    return packed.is_mkldnn and all(
        bool((got - plain[:len(got)]).abs().max() < 0.05) for got in products)
