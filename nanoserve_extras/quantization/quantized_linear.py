"""Products with weights that stay whole numbers: 8 bits by row, or 4 bits in groups.

A decoding step of one sequence reads every weight once and computes next to nothing with it. So
the weights' bytes are its time (benchmarks/roofline.py): int8 has half of bfloat16's, and 4 bits
half of int8's. Some neighbours in a row of a matrix share a scale s, and perhaps a zero point z:

    8 bits by row       0.52 -1.30 0.07 ...     s = 1.30 / 127                no z
    kept                  51  -127    7 ...     weight ~ q * s                 within s / 2
    4 bits in groups    0.31 -0.14 0.02 ...     s = (0.31 + 0.14) / 15        z = 0.14 / s = 5
    kept                  15     0    6 ...     weight ~ (q - z) * s          within s / 2

With s and z, 4 bits take about 5 in groups of 32. Activations are not rounded to int8 (W8A16).
Weights are rounded *online*: each matrix as soon as its last tensor has come, so at no time are
there two copies of the model. A rank rounds its own share. A checkpoint that has 4 bits in groups
(GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023) keeps its numbers: see `QuantisedLinear`.

A packed weight brings its product along, and there are three kinds: `TorchWeight`, the
specification; `CpuWeight`, the compiled twin's (quantized_linear.cpp); `TritonWeight`
(quantized_triton.py). Invariant: they give the same up to the rounding of activations.

On a CPU torch's own int8 operators were no faster than bfloat16; its operators for 4 bits take
bfloat16 and zero points of their own. Searching for better scales gained little.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve import ops
from nanoserve.device.build import load
from nanoserve.device.library import functions_of
from nanoserve.device.memory import return_freed_memory
from nanoserve.device.memory import zeros as mapped_zeros
from nanoserve.layers import Embedding, Linear, Placement, Span

LARGEST = 127  # -128 is not used: a matrix and its negative are rounded alike
LARGEST_4 = 15
GROUP = 32  # inputs that share a scale, of 4 bits that are rounded here
PORTION = 2 ** 20  # numbers that are there in float32 while a matrix is rounded or multiplied
PANEL = 16  # outputs that stand side by side in quantized_linear.cpp
LINE = 8  # inputs of a line of a panel: a group is some of them
BLOCK = 512  # inputs of a block of activations (quantized_linear.cpp), which groups must divide


@dataclass(frozen=True)
class Quantised:
    """A matrix of whole numbers, weight = (values - zeros) * scales. Indexing gives its rows as
    floats, like a dense matrix's: so it can fill a layer that knows nothing of it (an embedding).
    """

    values: torch.Tensor  # (outputs, inputs): int8, or uint8 in [0, 15]
    zeros: torch.Tensor | None  # (outputs, groups) uint8, in [0, 15]; int8 has none
    scales: torch.Tensor  # (outputs, groups) float32
    size: int  # inputs of a group; the last one may be cut off

    dtype = torch.float32  # the rows' type

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """(n, inputs), in float32"""
        return self.some(rows).restored()

    def some(self, rows: slice) -> "Quantised":
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, values=self.values[rows], zeros=zeros, scales=self.scales[rows])

    def restored(self) -> torch.Tensor:
        """(outputs, inputs), in float32"""
        def of_inputs(numbers: torch.Tensor) -> torch.Tensor:
            return numbers if numbers.shape[1] == 1 else numbers.repeat_interleave(
                self.size, 1)[:, :self.shape[1]]

        values = self.values.float()
        return (values if self.zeros is None else values - of_inputs(self.zeros)) * of_inputs(
            self.scales)

    def regrouped(self, size: int) -> "Quantised":
        """4 bits in smaller groups, each with the scale of its old group. size: a divisor."""
        count = -(-self.shape[1] // size)
        times = self.size // size if self.scales.shape[1] > 1 else count  # one is for all inputs
        zeros, scales = (numbers.repeat_interleave(times, 1)[:, :count]
                         for numbers in (self.zeros, self.scales))
        return replace(self, zeros=zeros, scales=scales, size=size)

    def share(self, rows: Span, columns: Span) -> "Quantised":
        """A rank's share of 4 bits. Raises `ValueError` for another shape."""
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
        return Quantised(here.values[mine, columns.start:columns.stop].clone(),
                         here.zeros[mine, groups], here.scales[mine, groups], here.size)

    def heads(self) -> torch.Tensor:
        """What is kept of each group, (outputs, groups): of 8 bits the scale; of 4 bits an int32,
        whose last four bits are the zero point."""
        if self.zeros is None:
            return self.scales
        return storable(self.scales).view(torch.int32) | self.zeros

    def pairs(self) -> torch.Tensor:
        """Two numbers of 4 bits a byte, the even input in the low half. (outputs, inputs / 2)"""
        pairs = F.pad(self.values, (0, self.shape[1] % 2)).unflatten(1, (-1, 2))
        return pairs[..., 0] | pairs[..., 1] << 4


def join(pieces: list[Quantised]) -> Quantised | None:
    """4 bits one below the other, in groups that suit all of them: 64 and 48 become 16. None where
    no such size is a multiple of `LINE` and divides `BLOCK`."""
    inputs = pieces[0].shape[1]
    size = gcd(BLOCK, *(one.size for one in pieces if one.scales.shape[1] > 1))
    if size % LINE:
        return None
    size = min(size, -(-inputs // LINE) * LINE)  # a single group is no longer than it need be
    alike = [one.regrouped(size) for one in pieces]
    return Quantised(*(torch.cat([getattr(one, name) for one in alike])
                       for name in ("values", "zeros", "scales")), size)


# ---------------------------------------------------------------------- rounding


def round_rows(weight: torch.Tensor) -> Quantised:
    """weight (outputs, inputs) to 8 bits."""
    wide, inputs = weight.float(), weight.shape[1]
    scales = wide.abs().amax(1, keepdim=True) / LARGEST if inputs else wide.new_zeros(len(wide), 1)
    values = (wide / at_least_tiny(scales)).round_().clamp_(-LARGEST, LARGEST)
    return Quantised(values.to(torch.int8), None, scales, inputs)


def round_groups(weight: torch.Tensor, size: int = GROUP) -> Quantised:
    """weight (outputs, inputs) to the nearest of 16 numbers; 0 is always one of them."""
    missing = -weight.shape[1] % size
    wide = F.pad(weight.float(), (0, missing)).unflatten(1, (-1, size))
    low, high = wide.amin(2).clamp(max=0), wide.amax(2).clamp(min=0)
    scales = storable((high - low) / LARGEST_4)
    steps = at_least_tiny(scales)
    zeros = (-low / steps).round_().clamp_(0, LARGEST_4)
    values = (wide / steps[..., None]).round_().add_(zeros[..., None]).clamp_(0, LARGEST_4)
    values = values.flatten(1)[:, :weight.shape[1]]
    return Quantised(values.to(torch.uint8), zeros.to(torch.uint8), scales, size)


def at_least_tiny(scales: torch.Tensor) -> torch.Tensor:
    """To divide by, also where all numbers are zeros."""
    return scales.clamp(min=torch.finfo(torch.float32).tiny)


def storable(scales: torch.Tensor) -> torch.Tensor:
    """With 0 in the last four bits of a float32, which give way to a zero point. A scale of float16
    or bfloat16 has none there."""
    return (scales.float().contiguous().view(torch.int32) & ~LARGEST_4).view(torch.float32)


def portions(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix, some whole panels at a time."""
    step = max(PORTION // max(columns, 1) // PANEL, 1) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def in_portions(whole: torch.Tensor | Quantised, size: int) -> Iterator[tuple[slice, Quantised]]:
    """Rows, and what they become, so that neither their floats nor whole numbers of a byte each are
    there for all of a matrix that is rounded. size: see `TorchWeight.of`."""
    for rows in portions(*whole.shape):
        if isinstance(whole, Quantised):
            yield rows, whole.some(rows)
        else:
            yield rows, round_groups(whole[rows], size) if size else round_rows(whole[rows])
    return_freed_memory()  # glibc does not find an aligned piece of its heap again


# ---------------------------------------------------------------- packed weights


class TorchWeight(NamedTuple):
    """Row by row: the specification of the product, on any device."""

    memory: torch.Tensor  # (outputs, inputs) int8, or `pairs` (outputs, inputs / 2)
    heads: torch.Tensor  # (outputs, 1) float32, or (outputs, groups) int32
    size: int
    inputs: int

    @classmethod
    def of(cls, whole: torch.Tensor | Quantised, size: int = 0,
           device: torch.device | None = None) -> "TorchWeight":
        """whole: (outputs, inputs), floats that are rounded or 4 bits that are kept. size: inputs
        of a group of 4 bits, or 0 for 8 bits by row. device: by default that of floats."""
        (outputs, inputs), device = whole.shape, device or whole.device
        width, groups = (-(-inputs // 2), -(-inputs // size)) if size else (inputs, 1)
        memory = torch.empty(outputs, width, dtype=torch.uint8 if size else torch.int8,
                             device=device)
        heads = torch.empty(outputs, groups, dtype=torch.int32 if size else torch.float32,
                            device=device)
        for rows, one in in_portions(whole, size):
            memory[rows], heads[rows] = one.pairs() if size else one.values, one.heads()
        return cls(memory, heads, size, inputs)

    def rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        values, heads = self.memory[ids], self.heads[ids]
        if not self.size:
            return values * heads
        values = torch.stack((values & 15, values >> 4), 2).flatten(1)[:, :self.inputs]
        return Quantised(values, heads & 15, storable(heads.view(torch.float32)),
                         self.size).restored()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x (n, inputs) @ weight.T + bias. out_dtype: as in `ops.linear`."""
        out = x.new_empty(len(x), len(self.memory), dtype=out_dtype)
        for some in portions(len(self.memory), self.inputs):
            out[:, some] = ops.linear(x, self.rows(some).to(x.dtype),
                                      None if bias is None else bias[some], out_dtype)
        return out


class CpuWeight(NamedTuple):
    """The order of quantized_linear.cpp, in panels of 16 outputs. 8 bits: units of (16, 2) numbers,
    4 for 8 inputs. 4 bits: lines of 16 words, a head and size / 8 more for each group."""

    memory: torch.Tensor  # (panels, bytes) int8
    scales: torch.Tensor | None  # (outputs,), of 8 bits; those of 4 bits are in the heads
    size: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, whole: torch.Tensor | Quantised, size: int = 0,
           device: torch.device | None = None) -> "CpuWeight":
        (outputs, inputs), groups = whole.shape, -(-whole.shape[1] // (size or 1))
        width = groups * (1 + size // LINE) if size else -(-inputs // LINE) * LINE // 2
        memory = mapped_zeros(-(-outputs // PANEL), width, PANEL,
                              dtype=torch.int32 if size else torch.int16)
        scales = None if size else torch.empty(outputs)
        for rows, one in in_portions(whole, size):
            if size:
                words = words_of(F.pad(one.values, (0, groups * size - inputs)))
                words = words.unflatten(1, (groups, -1))  # (n, groups, size / 8)
                lines = torch.cat([one.heads()[..., None], words], 2).flatten(1)
            else:
                lines = F.pad(one.values, (0, -inputs % LINE)).contiguous().view(torch.int16)
                scales[rows] = one.scales[:, 0]
            panels = F.pad(lines, (0, 0, 0, -len(lines) % PANEL)).unflatten(0, (-1, PANEL))
            memory[rows.start // PANEL:][:len(panels)] = panels.transpose(1, 2)
        return cls(memory.view(torch.int8).flatten(1), scales, size, inputs, outputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32; of 8 bits."""
        units = self.memory.view(torch.int16).unflatten(1, (-1, PANEL))
        values = units[ids // PANEL, :, ids % PANEL].view(torch.int8)[:, :self.inputs]
        return values * self.scales[ids, None]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        product = library().product if out_dtype is None else library().wide_product
        return product(x.contiguous(), self.memory, self.scales, self.size, bias,
                       inputs=self.inputs, outputs=self.outputs)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) uint8 -> (outputs, inputs / 8) int32. Input i of eight is in the low half
    where it is even, and the (i // 2)th of its half."""
    words = values.new_zeros(len(values), values.shape[1] // LINE, dtype=torch.int32)
    for i in range(LINE):
        words |= values[:, i::LINE].int() << 16 * (i % 2) + 4 * (i // 2)
    return words


@cache
def library() -> SimpleNamespace:
    """The functions of quantized_linear.cpp, compiled on first use. Raises `BuildError`."""
    return functions_of(load(Path(__file__).with_suffix(".cpp")))


# ------------------------------------------------------------------------ layers

OPS = SimpleNamespace(
    linear=lambda x, packed, bias=None, out_dtype=None: packed.linear(x, bias, out_dtype),
    look_up=lambda ids, packed: packed.rows(ids))


class QuantisedLinear(Linear):
    """A `Linear` whose weight is packed as soon as its last tensor has come.

    4 bits of a checkpoint are kept. They become 8 bits by row where they don't fit: where a group's
    inputs are no neighbours ("act-order"), where 8 does not divide the size of groups, and where q
    has them beside a k or v that came dense, since all three are one product here.

    kind: of packed weights. size: inputs of a group of 4 bits to which floats are rounded, or 0 for
    8 bits by row. An LM head's are always 8 bits: each row is a token's.
    """

    def __init__(self, inputs: Span | int, matrices: dict[str, Span | int], bias: bool,
                 on: Placement, kind: type, size: int):
        super().__init__(inputs, matrices, bias, on)
        self.ops, self.kind, self.device = OPS, kind, on.device
        self.size = 0 if "lm_head" in self.matrices else size
        self.awaited = len(self.matrices)
        self.pieces: dict[int, Quantised] = {}  # by their first row, until all have come

    def fill(self, here: slice, rows: Span, tensor: torch.Tensor | Quantised) -> None:
        if isinstance(tensor, Quantised):
            self.pieces[here.start] = tensor.share(rows, self.inputs)
        else:
            if self.weight.is_meta:
                self.make_room(tensor.dtype if tensor.is_floating_point() else None)
            elif tensor.itemsize > self.weight.itemsize:  # a narrower matrix has come before
                self.weight.data = self.weight.to(tensor.dtype)
            super().fill(here, rows, tensor)
        self.awaited -= 1
        if self.awaited == 0:
            self.finish_loading()

    def finish_loading(self) -> None:
        """Also called when all tensors of the model have come, or were made up."""
        if self.packed is not None:
            return
        pieces, self.pieces, whole = dict(sorted(self.pieces.items())), {}, None
        if len(pieces) == len(self.matrices):  # otherwise some of them came dense
            whole = join([*pieces.values()])
        if whole is not None:
            size = whole.size
        else:
            if pieces and self.weight.is_meta:
                self.make_room()
            for start, piece in pieces.items():
                self.weight[start:start + piece.shape[0]] = piece[:].to(self.weight)
            whole, size = self.weight.data, 0 if pieces else self.size
        self.packed, self.weight = self.kind.of(whole, size, self.device), None


class QuantisedEmbedding(Embedding):
    """Where it is the LM head, too, its rows are rounded by `kind`. Otherwise it is not rounded."""

    def __init__(self, tokens: Span, hidden_size: int, on: Placement, tied: bool = False, *,
                 kind: type):
        super().__init__(tokens, hidden_size, on, tied)
        self.ops = SimpleNamespace(**vars(OPS), pack=kind.of)
