"""Products with weights that stay int8: half the bytes of bfloat16, and so half the time to read.

A decoding step of one sequence reads every weight once and computes next to nothing with it. So
the weights' bytes are its time (benchmarks/roofline.py), and int8 ones need half of it. Each row of
a matrix, the weights of one output, is rounded to whole numbers in [-127, 127] with one scale:

    row of the weight    0.52 -1.30 0.07 ...     scale = 1.30 / 127
    kept                   51  -127    7 ...     weight ~ scale * kept, within scale / 2

Activations are not rounded to int8 (W8A16). `quantization="int8"` does it *online*: any checkpoint
is rounded while it is loaded, each matrix as soon as its last tensor has come, so at no time are
there two copies of the model. A rank rounds its own share.

A rounded weight brings its product along, and there are three kinds of it: `Panels` for the
compiled twin (quantized_linear.cpp), a Triton kernel (quantized_triton.py), and `Rows`, the
specification. Invariant: they give the same up to the rounding of activations. A layer is told its
kind by `Placement` (quantization.py).

torch's own int8 operators were no faster on a CPU than bfloat16.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve.device.build import load
from nanoserve.device.library import functions_of
from nanoserve.device.memory import zeros
from nanoserve.layers import Embedding, Linear, Placement, Span

LARGEST = 127  # -128 is not used: a matrix and its negative are rounded alike
PORTION = 2 ** 20  # numbers that are there in float32 while a matrix is rounded or multiplied
PANEL = 16  # outputs that stand side by side in quantized_linear.cpp


class Int8Linear(Linear):
    """A `Linear` whose weight is rounded as soon as its last tensor has come. kind: to what."""

    def __init__(self, inputs: Span | int, matrices: dict[str, Span | int], bias: bool,
                 on: Placement, kind: type):
        super().__init__(inputs, matrices, bias, on)
        self.ops = products(kind)
        self.awaited = len(self.matrices)
        self.new_weight = partial(on.weight, *self.weight.shape)
        self.weight = on.weight(0, self.inputs.size)  # for now

    def make_room(self, dtype: torch.dtype | None = None) -> None:
        """Allocate the weight as it is before it is rounded: in a wider dtype if that is given, so
        that it is rounded once."""
        self.weight = self.new_weight(dtype=dtype)

    def fill(self, here: slice, rows: Span, tensor: torch.Tensor) -> None:
        self.take(here, rows, tensor)
        self.awaited -= 1
        if self.awaited == 0:
            self.finish_loading()

    def take(self, here: slice, rows: Span, tensor: torch.Tensor) -> None:
        if not len(self.weight):
            self.make_room(tensor.dtype if tensor.is_floating_point() else None)
        super().fill(here, rows, tensor)

    def finish_loading(self) -> None:
        """Also called when all tensors of the model have come."""
        if self.packed is None:
            self.pack()

    def pack(self) -> None:
        super().finish_loading()


class Int8Embedding(Embedding):
    """Where the embedding is the LM head, too, look-ups read the head's rounded rows, so that the
    matrix is kept once. Otherwise the embedding is not rounded."""

    def __init__(self, tokens: Span, hidden_size: int, on: Placement, tied: bool = False, *,
                 kind: type):
        super().__init__(tokens, hidden_size, on, tied)
        self.ops = products(kind)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.tied:
            self.dtype, self.weight = self.weight.dtype, None

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return super().look_up(rows)
        return self.packed.rows(rows).to(self.dtype)


def products(kind: type) -> SimpleNamespace:
    """`pack` and `linear` as in ops.py, for weights of two dimensions. kind: a class with `of`,
    which makes it of a weight, and with `linear`."""
    return SimpleNamespace(pack=kind.of, linear=lambda x, packed, bias=None: packed.linear(x, bias))


def round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (outputs, inputs) -> int8 of the same shape, and float32 scales (outputs,)."""
    wide = weight.float()
    scales = wide.abs().amax(1) / LARGEST if weight.shape[1] else wide.new_zeros(len(weight))
    wide = wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return wide.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def portions(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix, some whole panels at a time."""
    step = max(PORTION // max(columns, 1) // PANEL, 1) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def multiply_rows(x: torch.Tensor, shape: tuple[int, int], rows: Callable[[slice], torch.Tensor],
                  bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias, where `rows` gives some of the weight's rows in float32."""
    out = x.new_empty(len(x), shape[0])
    for some in portions(*shape):
        out[:, some] = F.linear(x, rows(some).to(x.dtype), None if bias is None else bias[some])
    return out


class Rows(NamedTuple):
    """A rounded weight, row by row: the specification of the product, on any device."""

    values: torch.Tensor  # (outputs, inputs)
    scales: torch.Tensor  # (outputs,)

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Rows":
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for some in portions(*weight.shape):
            values[some], scales[some] = round_rows(weight[some])
        return cls(values, scales)

    def rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        return self.values[ids] * self.scales[ids, None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply_rows(x, self.values.shape, self.rows, bias)


class Panels(NamedTuple):
    """The order of quantized_linear.cpp: (outputs / 16, inputs / 2, 16, 2) int8."""

    memory: torch.Tensor
    scales: torch.Tensor
    inputs: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Panels":
        outputs, inputs = weight.shape
        memory = zeros(-(-outputs // PANEL), -(-inputs // 2), PANEL, 2, dtype=torch.int8)
        scales = torch.empty(outputs)
        for some in portions(outputs, inputs):
            values, scales[some] = round_rows(weight[some])
            units = F.pad(values, (0, inputs % 2, 0, -len(values) % PANEL)).view(torch.int16)
            panels = units.unflatten(0, (-1, PANEL)).transpose(1, 2)  # (panels, inputs / 2, 16)
            memory.view(torch.int16)[some.start // PANEL:][:len(panels), ..., 0] = panels
        return cls(memory, scales, inputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        values = self.memory[ids // PANEL, :, ids % PANEL].flatten(1)[:, :self.inputs]
        return values * self.scales[ids, None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return library().product(x.contiguous(), self.memory, self.scales, 0, bias,
                                 inputs=self.inputs)


@cache
def library() -> SimpleNamespace:
    """The functions of quantized_linear.cpp, compiled on first use. Raises `BuildError`."""
    return functions_of(load(Path(__file__).with_suffix(".cpp")))
