"""Weights in the order in which the CPU's matrix product reads them.

A matrix product works through small tiles, and oneDNN, the library behind torch on most CPUs, wants
a weight's tiles one behind the other. `F.linear` finds the rows as the checkpoint has them, and
reorders them in every call, which for few tokens takes as long as the product itself:

    as loaded     row 0: a0 a1 a2 a3 | row 1: b0 b1 b2 b3 | ...     F.linear: reorder, multiply
    packed        a0 a1 b0 b1 ... | a2 a3 b2 b3 ... | ...           linear: multiply

So weights are reordered once, when they are loaded, one after the other. A packed weight is opaque:
it has a shape, but no rows that can be read; what it was made of is freed.

Where there is plenty of memory (memory.py) a second copy is kept, for products for which the packed
one is slower (`reads_second`). A single token's is reading the weight, and oneDNN reads slower than
memory gives. In bfloat16 torch without oneDNN is faster, with the plain weight; or, on Intel's
CPUs, a weighted sum of `Lines`. In float32 there MKL, which is behind torch's own products, is
faster with the plain weight: for few rows, and for many.

Invariant: `linear` gives what `F.linear` gives, up to rounding, for whatever `pack` returns; and
that is the weight itself where packing is of no use, or these operators are not there. They are
torch's own, but private (its compiler inserts them), so that they are tried out before they are
trusted.

Not known here: who multiplies, ranks, checkpoints. Road not taken: int8 weights, which are half as
many bytes to read, and another text.
"""

from dataclasses import dataclass
from functools import cache

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


def _is_for_packing(weight: torch.Tensor) -> bool:
    return weight.is_cpu and weight.numel() > 0 and works(weight.dtype)


def second_copy(weight: torch.Tensor) -> "torch.Tensor | Lines | None":
    """What to keep beside the packed weight, made of weight (outputs, inputs); None for nothing."""
    if not (_is_for_packing(weight) and reads_second(weight.dtype)):
        return None
    return Lines.of(weight) if weight.dtype == torch.bfloat16 and is_intel() else weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
           second: "torch.Tensor | Lines | None" = None) -> torch.Tensor:
    """x @ weight.T + bias. x: (rows, inputs); weight: packed, or (outputs, inputs); second: what
    `second_copy` made of the same, or the plain weight, if there is one."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if second is not None and reads_second(x.dtype, len(x)):
        return second(x, bias) if isinstance(second, Lines) else _without_onednn(x, second, bias)
    if len(x) < MIN_ROWS:
        return linear(F.pad(x, (0, 0, 0, MIN_ROWS - len(x))), weight, bias)[:len(x)]
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def reads_second(dtype: torch.dtype, num_rows: int = 1) -> bool:
    """Whether a product of so many rows is faster with the second copy. For one row: in bfloat16
    on an AMD EPYC all layers of Qwen3-0.6B take 27 ms, packed 31; in float32 on an Intel Xeon 8 of
    them take 30 ms, packed 44, while on the EPYC it is the slower one."""
    if dtype == torch.bfloat16:
        return num_rows == 1
    return dtype == torch.float32 and is_intel() and not MIN_ROWS <= num_rows < MANY_ROWS


def _without_onednn(x: torch.Tensor, weight: torch.Tensor,
                    bias: torch.Tensor | None) -> torch.Tensor:
    torch._C._set_mkldnn_enabled(False)  # for the process: others' products go on, but slower
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


@dataclass
class Bags:
    """Weighted sums of lines, as `embedding_bag` takes them: the lines of all sums in one list, and
    where in it each sum's, its bag, begins. It asks memory for a line before it is needed."""

    lines: torch.Tensor  # (num_lines,)
    starts: torch.Tensor  # (num_bags,) a bag without a line gives zeros

    def __call__(self, memory: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """memory: (all lines, width); weights: (num_lines,). Returns (num_bags, width)."""
        # Not scaled by frequency, mode 0 (a sum), not sparse. F's checks take longer than a sum.
        return torch.embedding_bag(memory, self.lines, self.starts, False, 0, False, weights)[0]


@dataclass
class Lines:
    """A weight for a single row's product. The outputs are cut into bags of as many as a line is
    wide, and a line has what one input gives to those of its bag: their sum, weighted by the row,
    is the product. A Xeon reads a 0.6B model's bfloat16 weights so with 14 GB/s, packed or plain
    with 10.

        weight  out 0: a0 a1 ..    out 1: b0 b1 ..    ..      lines  a0 b0 .. | a1 b1 .. | ..
    """

    memory: torch.Tensor  # (bags * inputs, width)
    bags: Bags
    num_outputs: int  # the last bag may be filled up

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Lines":
        num_outputs, num_inputs = weight.shape
        at_least = 2 * torch.get_num_threads()  # bags, for all threads to be busy
        width = next((width for width in LINE_WIDTHS if num_outputs >= at_least * width),
                     LINE_WIDTHS[-1])
        padded = F.pad(weight, (0, 0, 0, -num_outputs % width))
        memory = padded.view(-1, width, num_inputs).transpose(1, 2).reshape(-1, width).contiguous()
        return cls(memory, _bags(len(memory), num_inputs), num_outputs)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: (1, inputs). Returns (1, outputs)."""
        factors = x.expand(len(self.bags.starts), -1).reshape(-1)
        product = self.bags(self.memory, factors).view(1, -1)[:, :self.num_outputs]
        return product if bias is None else product + bias


@cache
def _bags(num_lines: int, size: int) -> Bags:
    """All lines in order, `size` of them in a bag: the same lists for all layers."""
    lines = torch.arange(num_lines, dtype=torch.int32)
    return Bags(lines, lines[::size].contiguous())


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
        products = linear(x, packed), *(
            linear(x[:1], packed, None, second) for second in (None, weight, Lines.of(weight)))
    except (AttributeError, RuntimeError):  # no such operator; or not with these arguments
        return False
    plain = F.linear(x, weight)
    return packed.is_mkldnn and all(
        bool((product - plain[:len(product)]).abs().max() < 0.1) for product in products)
