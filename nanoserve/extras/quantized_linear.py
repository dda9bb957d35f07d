"""Products with weights that stay int8: half the bytes of bfloat16, and so half the time to read.

A decoding step of one sequence reads every weight once and computes next to nothing with it. So
the weights' bytes are its time (see tools/roofline.py), and int8 ones need half of it. Each row of
a matrix, the weights of one output, is rounded to whole numbers in [-127, 127] with one scale:

    row of the weight    0.52 -1.30 0.07 ...     scale = 1.30 / 127
    kept                   51  -127    7 ...     weight ~ scale * kept, within scale / 2

Activations are not rounded to int8 (W8A16). `quantization="int8"` does it *online*: any checkpoint
is rounded while it is loaded. A `Int8Linear` has room for its weight from its first tensor to its
last one and rounds it at once, so at no time are there two copies of the model. The seam is
`Placement.linear` and `.embedding`; the router of a mixture of experts, norms, and an embedding
that is no LM head stay as they are. A rank rounds its own share.

Three ways to multiply: where the engine's operators are the compiled twin, so is this product
(quantized_linear.cpp, with panels as in device/cpu.cpp); where they are Triton's, it is a kernel
(quantized_triton.py). Everywhere else a portion of the rows at a time becomes a matrix of the
activations' dtype: that saves memory and no time, and says what is meant.

Not known here: files, formats (quantization.py), 4 bits (int4_linear.py). Road not taken: torch's
own int8 operators, which on a CPU were no faster than bfloat16.
"""

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve.device.build import load
from nanoserve.layers import Embedding, Linear, Placement, Span

LARGEST = 127  # -128 is not used: a matrix and its negative are rounded alike
PORTION = 2 ** 20  # numbers that are there in float32 while a matrix is rounded or multiplied
PANEL = 16  # outputs that stand side by side in quantized_linear.cpp
DTYPES = {torch.float32: "linear_float32", torch.bfloat16: "linear_bfloat16"}


class Int8Linear(Linear):
    """A `Linear` whose weight is rounded as soon as its last tensor has come."""

    def __init__(self, inputs: Span | int, matrices: dict[str, Span | int], bias: bool,
                 on: Placement):
        super().__init__(inputs, matrices, bias, on)
        self.ops, self.awaited = Int8Products(on), len(self.matrices)
        self.new_weight = partial(on.weight, *self.weight.shape)
        self.weight = on.weight(0, self.inputs.size)  # for now

    def make_room(self) -> None:
        """For the weight as it is before it is rounded."""
        self.weight = self.new_weight()

    def fill(self, here: slice, rows: Span, tensor: torch.Tensor) -> None:
        self.take(here, rows, tensor)
        self.awaited -= 1
        if self.awaited == 0:
            self.finish_loading()

    def take(self, here: slice, rows: Span, tensor: torch.Tensor) -> None:
        if not len(self.weight):
            self.make_room()
        super().fill(here, rows, tensor)

    def finish_loading(self) -> None:
        """Also called when all tensors of the model have come."""
        if self.packed is None:
            self.pack()

    def pack(self) -> None:
        super().finish_loading()


class Int8Embedding(Embedding):
    """One that is the LM head, too: the vectors that are looked up are the head's rounded rows, so
    that the matrix is there once. One that is no head stays as it is."""

    def __init__(self, tokens: Span, hidden_size: int, on: Placement, tied: bool = False):
        super().__init__(tokens, hidden_size, on, tied)
        self.ops = Int8Products(on)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.tied:
            self.dtype, self.weight = self.weight.dtype, None

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return super().look_up(rows)
        return self.packed.rows(rows).to(self.dtype)


class Int8Products:
    """`pack` and `linear` of a namespace (see ops.py), for weights of two dimensions."""

    def __init__(self, on: Placement):
        self.kind = Panels if uses(on, "cpu") else Rows
        if uses(on, "kernels"):
            from nanoserve.extras.quantized_triton import TritonRows  # here: it imports triton

            self.kind = TritonRows

    def pack(self, weight: torch.Tensor) -> "Rows | Panels":
        return self.kind.of(weight)

    def linear(self, x: torch.Tensor, packed: "Rows | Panels",
               bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed.linear(x, bias)


def uses(on: Placement, twin: str) -> bool:
    """Whether the engine's operators are this file of device/: "cpu", or "kernels" (Triton)."""
    return on.ops.__name__ == f"nanoserve.device.{twin}"


def round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (outputs, inputs) -> int8 of the same shape, and float32 scales (outputs,)."""
    wide = weight.float()
    largest = wide.abs().amax(1) if weight.shape[1] else wide.new_zeros(len(weight))
    scales = largest / LARGEST
    wide = wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]  # a row of zeros
    return wide.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def portions(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix, some whole panels at a time."""
    step = max(PORTION // max(columns, 1) // PANEL, 1) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Rows(NamedTuple):
    """A rounded weight as it is: what the product means, on any device."""

    values: torch.Tensor  # (outputs, inputs)
    scales: torch.Tensor  # (outputs,)

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Rows":
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for some in portions(*weight.shape):
            values[some], scales[some] = round_rows(weight[some])
        return cls(values, scales)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        return self.values[ids] * self.scales[ids, None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), len(self.values))
        for some in portions(*self.values.shape):
            weight = (self.values[some] * self.scales[some, None]).to(x.dtype)
            out[:, some] = F.linear(x, weight, None if bias is None else bias[some])
        return out


class Panels(NamedTuple):
    """The order of quantized_linear.cpp: (outputs / 16, inputs / 2, 16, 2) int8."""

    memory: torch.Tensor
    scales: torch.Tensor
    inputs: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Panels":
        outputs, inputs = weight.shape
        shape = -(-outputs // PANEL), -(-inputs // 2), PANEL, 2
        memory = new_panels(*shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(outputs)
        for some in portions(outputs, inputs):
            values, scales[some] = round_rows(weight[some])
            call("pack", values, len(values), inputs, memory[some.start // PANEL:])
        return cls(memory, scales, inputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        values = self.memory[ids // PANEL, :, ids % PANEL].flatten(1)[:, :self.inputs]
        return values * self.scales[ids, None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, self.memory, self.scales, 0, self.inputs, len(self.scales), bias)


def new_panels(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of zeros. Raises `ValueError` on a GPU, whose addresses mean nothing to a CPU."""
    from nanoserve.device.cpu import check, zeros  # here: it compiles what not all can

    check(device.type == "cpu", f"a weight on {device}")
    return zeros(*shape, dtype=dtype)


def multiply(x: torch.Tensor, memory: torch.Tensor, scales: torch.Tensor | None, group: int,
             inputs: int, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x (rows, inputs) -> (rows, outputs). scales: of int8; group: inputs that share a scale of 4
    bits, or 0. float16 is computed in float32, as in device/cpu.py."""
    from nanoserve.device.cpu import same

    if x.dtype == torch.float16:
        bias = None if bias is None else bias.float()
        return multiply(x.float(), memory, scales, group, inputs, outputs, bias).half()
    rows, out = len(x), x.new_empty(len(x), outputs)
    if rows and outputs:
        call(DTYPES[x.dtype], same(x.contiguous(), x.dtype, rows, inputs), rows, memory, scales,
             group, inputs, outputs, same(bias, x.dtype, outputs), out)
    return out


@cache
def library() -> ctypes.CDLL:
    """quantized_linear.cpp, compiled on first use. Raises `BuildError`."""
    return load(Path(__file__).with_suffix(".cpp"))


def call(name: str, *arguments: torch.Tensor | int | None) -> None:
    from nanoserve.device.cpu import as_argument

    getattr(library(), name)(*map(as_argument, arguments))
