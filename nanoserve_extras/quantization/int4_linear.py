"""Products with weights of 4 bits in groups: half the bytes of int8.

A row of a matrix is cut into groups of neighbouring inputs, and a group shares a scale s and a zero
point z. With numbers q in [0, 15], which with s and z take about 5 bits a weight in groups of 32:

    group of a row    0.31 -0.14 0.02 ...     s = (0.31 + 0.14) / 15 = 0.03     z = 0.14 / s = 5
    kept                15     0    6 ...     weight ~ (q - z) * s, within s / 2

A checkpoint that has 4 bits in groups (GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023) keeps its
numbers: nothing is rounded a second time. Any other is rounded *online*, as in quantized_linear.py.
Some matrices become int8 by row instead: an LM head that is rounded here, what a 4-bit checkpoint
left plain on purpose, and 4 bits that don't fit: groups of "act-order", whose inputs are no
neighbours, groups whose size is no multiple of 8, q beside k and v of another format.

Invariant: a product is that of `Grouped`'s weights, up to the rounding of activations, on every
device. There are three kinds, as of int8: `GroupedPanels` for the compiled twin, a Triton kernel
(quantized_triton.py), and `GroupedRows`, the specification.

torch's own operators for 4 bits take bfloat16 and zero points of their own. Searching for better
scales gained little.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve.device.memory import zeros
from nanoserve.layers import Placement, Span
from nanoserve_extras.quantization.quantized_linear import (
    PANEL,
    Int8Linear,
    library,
    multiply_rows,
    portions,
)

LARGEST = 15
GROUP = 32  # inputs that share a scale, of what is rounded here
LINE = 8  # inputs of a line of a panel: a group is some of them
BLOCK = 512  # inputs of a block of activations (quantized_linear.cpp), which groups must divide


@dataclass(frozen=True)
class Grouped:
    """A matrix of 4-bit numbers. Indexing gives its rows as floats, like a dense matrix's: so it
    can fill a layer that knows nothing of 4 bits (an embedding)."""

    values: torch.Tensor  # (outputs, inputs) uint8, in [0, 15]
    zeros: torch.Tensor  # (outputs, groups) uint8, in [0, 15]
    scales: torch.Tensor  # (outputs, groups) float32
    size: int  # inputs of a group; the last one may be cut off

    dtype = torch.float32  # of rows

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """(n, inputs), in float32"""
        return self.some(rows).widened()

    def some(self, rows: slice) -> "Grouped":
        return replace(self, values=self.values[rows], zeros=self.zeros[rows],
                       scales=self.scales[rows])

    def widened(self) -> torch.Tensor:
        """(outputs, inputs), in float32"""
        zeros, scales = self.zeros, self.scales
        if scales.shape[1] > 1:
            zeros, scales = (each.repeat_interleave(self.size, 1)[:, :self.shape[1]]
                             for each in (zeros, scales))
        return (self.values.float() - zeros) * scales

    def regrouped(self, size: int) -> "Grouped":
        """The same in smaller groups, each with the scale of its old group. size: a divisor."""
        count = -(-self.shape[1] // size)
        times = self.size // size if self.scales.shape[1] > 1 else count  # one is for all inputs
        zeros, scales = (numbers.repeat_interleave(times, 1)[:, :count]
                         for numbers in (self.zeros, self.scales))
        return replace(self, zeros=zeros, scales=scales, size=size)

    def share(self, rows: Span, columns: Span) -> "Grouped":
        """A rank's share. Raises `ValueError` for another shape."""
        if self.shape != (rows.total, columns.total):
            raise ValueError(f"shape {self.shape} in the file, {(rows.total, columns.total)} "
                             "expected")
        here = self
        if columns.start and self.scales.shape[1] > 1:  # 48 in groups of 32: now they are of 16
            here = self.regrouped(gcd(self.size, columns.start))
        groups = slice(None)
        if here.scales.shape[1] > 1:
            groups = slice(columns.start // here.size, -(-columns.stop // here.size))
        mine = slice(rows.start, rows.stop)
        return Grouped(here.values[mine, columns.start:columns.stop].clone(),
                       here.zeros[mine, groups], here.scales[mine, groups], here.size)


def join(pieces: list[Grouped]) -> Grouped | None:
    """Matrices one below the other, in groups that suit all of them: 64 and 48 become 16. None
    where no such size is a multiple of `LINE` and divides `BLOCK`."""
    inputs = pieces[0].shape[1]
    size = gcd(BLOCK, *(one.size for one in pieces if one.scales.shape[1] > 1))
    if size % LINE:
        return None
    size = min(size, -(-inputs // LINE) * LINE)  # a single group is no longer than it need be
    alike = [one.regrouped(size) for one in pieces]
    return Grouped(*(torch.cat([getattr(one, name) for one in alike])
                     for name in ("values", "zeros", "scales")), size)


def round_groups(weight: torch.Tensor, size: int = GROUP) -> Grouped:
    """weight (outputs, inputs) to the nearest of 16 numbers; 0 is always one of them."""
    missing = -weight.shape[1] % size
    wide = F.pad(weight.float(), (0, missing)).unflatten(1, (-1, size))
    low, high = wide.amin(2).clamp(max=0), wide.amax(2).clamp(min=0)
    scales = storable((high - low) / LARGEST)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)  # of a group of zeros
    zeros = (-low / steps).round_().clamp_(0, LARGEST)
    values = (wide / steps[..., None]).round_().add_(zeros[..., None]).clamp_(0, LARGEST)
    values = values.flatten(1)[:, :weight.shape[1]]
    return Grouped(values.to(torch.uint8), zeros.to(torch.uint8), scales, size)


def storable(scales: torch.Tensor) -> torch.Tensor:
    """As a panel keeps them: the last four bits of a float32 give way to a zero point. A scale of
    float16 or bfloat16 has none there."""
    return (scales.float().contiguous().view(torch.int32) & ~LARGEST).view(torch.float32)


# ------------------------------------------------------------------------ layers


class Int4Linear(Int8Linear):
    """Keeps the 4 bits of a checkpoint. A matrix of q, k and v is one product here, so it is 4 bits
    where all three are. What comes dense, or does not fit, becomes int8 by row.

    kind: of int8, and groups: of 4 bits. rounds: whether what comes dense is rounded to 4 bits, but
    for an LM head: each of its rows is a token's.
    """

    def __init__(self, inputs: Span | int, matrices: dict[str, Span | int], bias: bool,
                 on: Placement, kind: type, groups: type, rounds: bool):
        super().__init__(inputs, matrices, bias, on, kind)
        self.pieces: dict[int, Grouped] = {}  # by their first row, until all have come
        self.groups, self.device = groups, on.device
        self.rounds = rounds and "lm_head" not in self.matrices

    def take(self, here: slice, rows: Span, tensor: torch.Tensor | Grouped) -> None:
        if isinstance(tensor, Grouped):
            self.pieces[here.start] = tensor.share(rows, self.inputs)
        else:
            super().take(here, rows, tensor)

    def pack(self) -> None:
        """All tensors have come, or were made up."""
        pieces, self.pieces, weight = dict(sorted(self.pieces.items())), {}, self.weight.data
        # Where not all pieces are there, some of them came dense.
        if len(pieces) == len(self.matrices) and (whole := join([*pieces.values()])) is not None:
            self.packed, self.weight = self.groups.of(
                whole.shape, whole.size, whole.some, self.device), None
        elif self.rounds and not pieces:
            self.packed, self.weight = self.groups.of(
                tuple(weight.shape), GROUP, lambda rows: round_groups(weight[rows]),
                self.device), None
        else:
            if pieces and not len(weight):
                self.make_room()
            for start, piece in pieces.items():
                self.weight[start:start + piece.shape[0]] = piece[:].to(self.weight)
            super().pack()


# What `of` of all kinds asks for, one portion after the other: of a kept matrix, or of one that is
# rounded then, so that its 4 bits are never there twice.
Portion = Callable[[slice], Grouped]  # some rows of a matrix


class GroupedRows(NamedTuple):
    """Two numbers a byte, and their groups: what the product means, on any device."""

    memory: torch.Tensor  # (outputs, inputs / 2) uint8: the even input in the low four bits
    zeros: torch.Tensor
    scales: torch.Tensor
    size: int
    inputs: int

    @classmethod
    def of(cls, shape: tuple[int, int], size: int, portion: Portion,
           device: torch.device) -> "GroupedRows":
        (outputs, inputs), groups = shape, -(-shape[1] // size)
        memory = torch.empty(outputs, -(-inputs // 2), dtype=torch.uint8, device=device)
        zeros = torch.empty(outputs, groups, dtype=torch.uint8, device=device)
        scales = torch.empty(outputs, groups, device=device)
        for some in portions(outputs, inputs):
            one = portion(some)
            pairs = F.pad(one.values, (0, inputs % 2)).unflatten(1, (-1, 2))
            memory[some] = pairs[..., 0] | pairs[..., 1] << 4
            zeros[some], scales[some] = one.zeros, one.scales
        return cls(memory, zeros, scales, size, inputs)

    def rows(self, some: slice) -> torch.Tensor:
        """(n, inputs), in float32"""
        pairs = self.memory[some]
        values = torch.stack((pairs & LARGEST, pairs >> 4), 2).flatten(1)[:, :self.inputs]
        return Grouped(values, self.zeros[some], self.scales[some], self.size).widened()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply_rows(x, (len(self.memory), self.inputs), self.rows, bias)


class GroupedPanels(NamedTuple):
    """The order of quantized_linear.cpp: (outputs / 16, groups, 1 + size / 8, 16) int32, kept as
    bytes."""

    memory: torch.Tensor
    size: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, shape: tuple[int, int], size: int, portion: Portion,
           device: torch.device) -> "GroupedPanels":
        (outputs, inputs), groups = shape, -(-shape[1] // size)
        memory = zeros(-(-outputs // PANEL), groups, 1 + size // LINE, PANEL, dtype=torch.int32)
        for some in portions(outputs, inputs):
            one, first = portion(some), some.start // PANEL
            missing = -len(one.values) % PANEL
            # (n, groups), then (n, groups * size / 8), then (n, groups, 1 + size / 8)
            heads = storable(one.scales).view(torch.int32) | one.zeros
            words = words_of(F.pad(one.values, (0, groups * size - inputs)))
            lines = torch.cat([heads[..., None], words.unflatten(1, (groups, -1))], 2)
            lines = F.pad(lines, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, PANEL))
            memory[first:first + len(lines)] = lines.permute(0, 2, 3, 1)
        return cls(memory.view(torch.int8), size, inputs, outputs)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return library().product(x.contiguous(), self.memory, None, self.size, bias,
                                 inputs=self.inputs, outputs=self.outputs)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) uint8 -> (outputs, inputs / 8) int32. Input i of eight is in the low half
    where it is even, and the (i // 2)th of its half."""
    words = values.new_zeros(len(values), values.shape[1] // LINE, dtype=torch.int32)
    for i in range(LINE):
        words |= values[:, i::LINE].int() << 16 * (i % 2) + 4 * (i // 2)
    return words
