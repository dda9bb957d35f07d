"""Products with weights that are stored as integers: 8 bits by row, or 4 or 8 bits in groups.

A decoding step of one sequence reads every weight once and does little arithmetic with it. So its
time is proportional to the weights' bytes (benchmarks/roofline.py): int8 has half of bfloat16's,
and 4 bits half of int8's. Neighbours in a row, a *group*, share a scale s, and perhaps a minimum m:

    8 bits by row       0.52 -1.30 0.07 ...     s = 1.30 / 127                no m
    kept                  51  -127    7 ...     weight ~ q * s                 within s / 2
    4 bits in groups    0.31 -0.14 0.02 ...     s = (0.31 + 0.14) / 15        m = -0.14
    kept                  15     0    5 ...     weight ~ q * s + m             within s / 2

With s and m in float16 and groups of 32, a weight of 4 bits takes 5. llama.cpp's files have this
form (Q4_0, Q4_1), and are kept bit by bit; finer scales are float32. A zero point z, as GPTQ
(Frantar et al. 2022) and AWQ (Lin et al. 2023) store it, is the minimum -z * s. Activations are not
rounded to int8 (W8A16). Weights are rounded *online*: each matrix as soon as its last tensor has
come, so there are never two copies of the model. A rank rounds its own share.

The class of a packed weight has its matrix product, and there are three classes: `TorchWeight`, the
specification; `CpuWeight`, the compiled backend (quantized_linear.cpp); `TritonWeight`
(quantized_triton.py). Invariant: their results are equal up to the rounding of activations.

The road not taken: on a CPU torch's own int8 operators were no faster than bfloat16, and its 4-bit
operators need bfloat16 and zero points in their own form.
"""

import ctypes
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve import ops
from nanoserve.build import Matrix, functions_of, load
from nanoserve.device import lasting_zeros
from nanoserve.layers import Embedding, Linear, Placement, Slice, Tensors
from nanoserve.parallel import copy_share
from nanoserve_extras.base.device import return_freed_memory

LARGEST = 127  # -128 is not used: a matrix and its negative are rounded alike
LARGEST_4 = 15
GROUP = 32  # inputs that share a scale, if weights are rounded to 4 bits here
PORTION = 2 ** 20  # numbers in float32 at a time, while a matrix is rounded or multiplied
PANEL = 16  # outputs side by side in quantized_linear.cpp
LINE = 8  # inputs of a line of a panel: a group is some of them
BLOCK = 512  # inputs of a block of activations (quantized_linear.cpp), which groups must divide
# These have 8 bits if other matrices are rounded to 4. A head's rows are tokens. Queries, keys and
# values are a seventh to a quarter of a layer, and rounding them harms as much as all the others.
IN_8_BITS = frozenset(("lm_head", "q_proj", "k_proj", "v_proj", "qkv_proj"))


@dataclass(frozen=True)
class Quantised:
    """A matrix of integers, weight = values * scales + minima. Indexing gives rows as floats, like
    those of a dense matrix, so it can also fill a layer that is not quantised.
    """

    values: torch.Tensor  # (outputs, inputs): int8, or uint8 in [0, 15], which 4 bits hold
    scales: torch.Tensor  # (outputs, groups), float32; float16 where there are minima in float16
    minima: torch.Tensor | None  # (outputs, groups), of the same dtype; None: they are 0
    size: int  # inputs of a group; the last one may be cut off

    dtype = torch.float32  # the rows' type

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale and no minimum, as `round_rows` makes it."""
        return self.bits == 8 and self.minima is None and self.scales.shape[1] == 1

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """(n, inputs), in float32"""
        return self.some(rows).restored()

    def some(self, rows: slice) -> "Quantised":
        minima = None if self.minima is None else self.minima[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], minima=minima)

    def restored(self) -> torch.Tensor:
        """(outputs, inputs), in float32"""
        def of_inputs(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.float() if numbers.shape[1] == 1 else numbers.float().repeat_interleave(
                self.size, 1)[:, :self.shape[1]]

        wide = self.values * of_inputs(self.scales)
        return wide if self.minima is None else wide.add_(of_inputs(self.minima))

    def regrouped(self, size: int) -> "Quantised":
        """The matrix in smaller groups, each with its old group's scale. size: a divisor."""
        count = -(-self.shape[1] // size)
        times = self.size // size if self.scales.shape[1] > 1 else count  # one is for all inputs
        return replace(self, size=size, **{
            name: None if numbers is None else numbers.repeat_interleave(times, 1)[:, :count]
            for name, numbers in (("scales", self.scales), ("minima", self.minima))})

    def share(self, rows: Slice, columns: Slice) -> "Quantised":
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
        return Quantised(here.values[mine, columns.start:columns.stop].clone(),
                         here.scales[mine, groups],
                         None if here.minima is None else here.minima[mine, groups], here.size)

    def heads(self) -> torch.Tensor:
        """Each group's head: its scale, float32 (outputs, groups, 1), or its scale and its minimum,
        (outputs, groups, 2)."""
        return torch.stack([self.scales] if self.minima is None else [self.scales, self.minima], 2)

    def pairs(self) -> torch.Tensor:
        """Two numbers of 4 bits a byte, the even input in the low half. (outputs, inputs / 2)"""
        pairs = F.pad(self.values, (0, self.shape[1] % 2)).unflatten(1, (-1, 2))
        return pairs[..., 0] | pairs[..., 1] << 4


def with_minima(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor,
                size: int) -> Quantised:
    """Make a `Quantised`. Scales and minima in float32 become float16 if no bit is lost."""
    narrow = scales.half(), minima.half()
    if torch.equal(narrow[0].float(), scales) and torch.equal(narrow[1].float(), minima):
        scales, minima = narrow
    return Quantised(values, scales, minima, size)


def join(pieces: list[Quantised]) -> Quantised | None:
    """Stack matrices by rows, in groups that suit all of them: 64 and 48 become 16; 4 bits beside 8
    become 8. None if no such size is a multiple of `LINE` and divides `BLOCK`."""
    inputs = size = pieces[0].shape[1]
    if not all(one.by_row for one in pieces):
        size = gcd(BLOCK, *(one.size for one in pieces if one.scales.shape[1] > 1))
        if size % LINE:
            return None
        size = min(size, -(-inputs // LINE) * LINE)  # a single group is no longer than it need be
    alike = [one.regrouped(size) for one in pieces]
    narrow = all(one.bits == 4 for one in pieces)
    minima = None
    if any(one.minima is not None for one in pieces):
        minima = torch.cat([torch.zeros_like(one.scales) if one.minima is None else one.minima
                            for one in alike])
    scales = torch.cat([one.scales for one in alike])
    values = torch.cat([one.values if narrow else one.values.to(torch.int8) for one in alike])
    dtype = torch.float32 if minima is None else torch.promote_types(scales.dtype, minima.dtype)
    return Quantised(values, scales.to(dtype), None if minima is None else minima.to(dtype), size)


# ---------------------------------------------------------------------- rounding


def round_rows(weight: torch.Tensor) -> Quantised:
    """weight (outputs, inputs) to 8 bits."""
    wide, inputs = weight.float(), weight.shape[1]
    scales = wide.abs().amax(1, keepdim=True) / LARGEST if inputs else wide.new_zeros(len(wide), 1)
    values = (wide / at_least_tiny(scales)).round_().clamp_(-LARGEST, LARGEST)
    return Quantised(values.to(torch.int8), scales, None, inputs)


def round_groups(weight: torch.Tensor, size: int = GROUP,
                 heads: torch.dtype = torch.float16) -> Quantised:
    """Round weight (outputs, inputs) to 16 levels per group. heads: the dtype of scales and minima.
    """
    inputs = weight.shape[1]
    last = weight[:, -1:].expand(-1, -inputs % size)  # again, to fill the last group
    wide = torch.cat([weight, last], 1).float().unflatten(1, (-1, size))
    minima, high = wide.aminmax(dim=2)
    scales = ((high - minima) / LARGEST_4).to(heads)
    minima = minima.to(heads)
    steps = at_least_tiny(scales.float())[..., None]
    values = (wide - minima[..., None].float()).div_(steps).round_().clamp_(0, LARGEST_4)
    return Quantised(values.flatten(1)[:, :inputs].to(torch.uint8), scales, minima, size)


def heads_for(weight: torch.Tensor) -> torch.dtype:
    """The dtype of heads: float16, unless weights are too large for it, or so small that their
    scales would be subnormal."""
    largest = float(torch.stack(weight.aminmax()).abs().max()) if weight.numel() else 1
    return torch.float16 if 2 ** -7 <= largest <= 2 ** 15 else torch.float32


def at_least_tiny(scales: torch.Tensor) -> torch.Tensor:
    """Scales that are safe to divide by, also if all numbers are zeros."""
    return scales.clamp(min=torch.finfo(torch.float32).tiny)


def portions(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix, some whole panels at a time."""
    step = max(PORTION // max(columns, 1) // PANEL, 1) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def in_portions(whole: torch.Tensor | Quantised, size: int) -> Iterator[tuple[slice, Quantised]]:
    """Slices of rows with their quantised form, so that a matrix is never in memory as a whole as
    floats, or as one byte a number, while it is rounded. size: see `TorchWeight.of`."""
    heads = heads_for(whole) if size and not isinstance(whole, Quantised) else None
    for rows in portions(*whole.shape):
        if isinstance(whole, Quantised):
            yield rows, whole.some(rows)
        else:
            yield rows, round_groups(whole[rows], size, heads) if size else round_rows(whole[rows])
    return_freed_memory()  # glibc does not find an aligned piece of its heap again


# ---------------------------------------------------------------- packed weights


class TorchWeight(NamedTuple):
    """A weight stored row by row: the specification of the product, on any device."""

    memory: torch.Tensor  # (outputs, inputs) int8, or `pairs` (outputs, inputs / 2) uint8
    heads: torch.Tensor  # (outputs, groups, 1 or 2)
    size: int  # inputs of a group; 0: a row is one
    inputs: int

    @classmethod
    def of(cls, whole: torch.Tensor | Quantised, size: int = 0,
           device: torch.device | None = None) -> "TorchWeight":
        """whole: (outputs, inputs), floats that are rounded or numbers that are kept. size: inputs
        of a group of 4 bits to which floats are rounded, or 0 for 8 bits by row. device: by default
        that of floats."""
        device, memory = device or whole.device, None
        for rows, one in in_portions(whole, size):
            numbers, heads = one.pairs() if one.bits == 4 else one.values, one.heads()
            if memory is None:
                memory, all_heads = (torch.empty(whole.shape[0], *part.shape[1:], dtype=part.dtype,
                                                 device=device) for part in (numbers, heads))
                size = 0 if one.by_row else one.size
            memory[rows], all_heads[rows] = numbers, heads
        return cls(memory, all_heads, size, whole.shape[1])

    @property
    def bits(self) -> int:
        return 4 if self.memory.dtype == torch.uint8 else 8

    def rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        return meant(self.memory[ids], self.heads[ids], self.size, self.inputs)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x (n, inputs) @ weight.T + bias. out_dtype: as in `ops.linear`."""
        out = x.new_empty(len(x), len(self.memory), dtype=out_dtype)
        for some in portions(len(self.memory), self.inputs):
            out[:, some] = ops.linear(x, self.rows(some).to(x.dtype),
                                      None if bias is None else bias[some], out_dtype)
        return out


def meant(numbers: torch.Tensor, heads: torch.Tensor, size: int, inputs: int) -> torch.Tensor:
    """The weights, (n, inputs) in float32, of n rows as `TorchWeight` stores them."""
    if numbers.dtype == torch.uint8:
        numbers = unpaired(numbers)[:, :inputs]
    scales, *minima = heads.unbind(2)
    return Quantised(numbers, scales, *minima or [None], size or inputs).restored()


def unpaired(pairs: torch.Tensor) -> torch.Tensor:
    """`Quantised.pairs` back to numbers."""
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


class CpuWeight(NamedTuple):
    """A weight in the layout of quantized_linear.cpp, in panels of 16 outputs. A panel is a row of
    groups: each group is its head, then its numbers. 4 bits: words of 8 inputs, (size / 8, 16). 8
    bits: pairs of inputs, (size / 2, 16, 2)."""

    memory: torch.Tensor  # (panels, bytes) int8
    bits: int
    head: torch.dtype
    count: int  # of numbers in a head: a scale, and perhaps a minimum
    size: int  # inputs of a group; 0: a row is one
    inputs: int
    outputs: int

    @classmethod
    def of(cls, whole: torch.Tensor | Quantised, size: int = 0,
           device: torch.device | None = None) -> "CpuWeight":
        """As `TorchWeight.of`."""
        (outputs, inputs), memory = whole.shape, None
        for rows, one in in_portions(whole, size):
            head, numbers = cls.panels_of(one)
            behind = head.shape[2] * head.itemsize  # bytes of a group's head, for an output
            if memory is None:
                length = head.shape[1] * (behind + numbers.shape[2] * numbers.itemsize) * PANEL
                memory = lasting_zeros(-(-outputs // PANEL), length, dtype=torch.int8)
                size = 0 if one.by_row else one.size
            place = memory[rows.start // PANEL:][:len(head) // PANEL]
            groups = place.unflatten(1, (head.shape[1], -1)).split_with_sizes(
                [behind * PANEL, length // head.shape[1] - behind * PANEL], 2)
            for there, part in zip(groups, (head, numbers), strict=True):  # outputs side by side
                there.view(part.dtype).unflatten(2, (-1, PANEL)).copy_(
                    part.unflatten(0, (-1, PANEL)).movedim(1, 3))
        return cls(memory, one.bits, head.dtype, head.shape[2], size, inputs, outputs)

    @staticmethod
    def panels_of(one: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads and numbers, (outputs, groups, n), of whole panels. Numbers are pairs or words."""
        (outputs, inputs), groups = one.shape, one.scales.shape[1]
        size = -(-one.size // LINE) * LINE
        more = groups * size - inputs, -outputs % PANEL
        values, heads = one.values, one.heads()
        if any(more):
            values, heads = F.pad(values, (0, more[0], 0, more[1])), F.pad(
                heads, (0, 0, 0, 0, 0, more[1]))
        values = values.contiguous().unflatten(1, (groups, size))
        return heads, words_of(values) if one.bits == 4 else values.view(torch.int16)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) -> (n, inputs), in float32"""
        groups = -(-self.inputs // self.size) if self.size else 1
        memory, head = self.memory.unflatten(1, (groups, -1)), self.count * PANEL

        def taken(numbers: torch.Tensor, *shape: int) -> torch.Tensor:
            """(panels, groups, n) -> (ids, groups, ...): n numbers are (count, PANEL, ...)."""
            return numbers.unflatten(2, (-1, PANEL, *shape))[ids // PANEL, :, :, ids % PANEL]

        heads, behind = memory.view(self.head)[..., :head], head * self.head.itemsize
        if self.bits == 8:
            numbers = taken(memory[..., behind:], 2).flatten(1)
        else:
            words = taken(memory.view(torch.int32)[..., behind // 4:])
            numbers = torch.stack([words >> 16 * (i % 2) + 4 * (i // 2) & 15
                                   for i in range(LINE)], 3).flatten(1)
        return meant(numbers[:, :self.inputs], taken(heads), self.size, self.inputs)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        product = library().product if out_dtype is None else library().wide_product
        return product(x.contiguous(), self.memory, self.bits, self.size, self.floats, bias,
                       inputs=self.inputs, outputs=self.outputs)

    @property
    def floats(self) -> int:
        """How many float32 numbers a head has, see `Groups` in quantized_linear.cpp."""
        return self.count if self.head == torch.float32 else 0

    def matrix(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Matrix:
        """As `PackedWeight.matrix` of cpu.py."""
        panels, panel_size = self.memory.shape
        return Matrix.of(compiled(), dtype, self.memory, bias, inputs=self.inputs,
                         outputs=self.outputs, bits=self.bits, group=self.size,
                         floats=self.floats, panels=panels, panel_size=panel_size)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """(..., inputs) uint8 -> (..., inputs / 8) int32. Input i of eight is nibble i // 2 of the low
    half if it is even, of the high half if it is odd."""
    words = values.new_zeros(*values.shape[:-1], values.shape[-1] // LINE, dtype=torch.int32)
    for i in range(LINE):
        words |= values[..., i::LINE].int() << 16 * (i % 2) + 4 * (i // 2)
    return words


@cache
def library() -> SimpleNamespace:
    """The functions of quantized_linear.cpp, compiled on first use. Raises `BuildError`."""
    return functions_of(compiled())


@cache
def compiled() -> ctypes.CDLL:
    return load(Path(__file__).with_suffix(".cpp"))


# ------------------------------------------------------------------------ layers

OPS = SimpleNamespace(
    linear=lambda x, packed, bias=None, out_dtype=None: packed.linear(x, bias, out_dtype),
    embed=lambda ids, packed: packed.rows(ids))


class QuantisedLinear(Linear):
    """A `Linear` whose weight is packed as soon as its last tensor has come.

    A checkpoint's own numbers are kept. They become 8 bits by row in three cases: a group's inputs
    are not adjacent ("act-order"); 8 does not divide the size of groups; q is quantised but k or v
    is dense, since all three are one product here.

    kind: the class of packed weights. size: the inputs of a group, if floats are rounded to 4 bits;
    0: 8 bits by row, as always for matrices in `in_8_bits`.
    """

    def __init__(self, inputs: Slice | int, matrices: dict[str, Slice | int], bias: bool,
                 on: Placement, kind: type, size: int, in_8_bits: Set[str] = IN_8_BITS):
        super().__init__(inputs, matrices, bias, on)
        self.ops, self.kind, self.device = OPS, kind, on.device
        self.size = 0 if in_8_bits & self.matrices.keys() else size
        self.awaited = len(self.matrices)
        self.pieces: dict[int, Quantised] = {}  # by their first row, until all have come

    def fill(self, here: slice, rows: Slice, tensor: torch.Tensor | Quantised) -> None:
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
            self.process_weights_after_loading()

    def process_weights_after_loading(self) -> None:
        """Also called when all tensors of the model have come, or were made up."""
        if self.packed is not None:
            return
        pieces, self.pieces, whole = dict(sorted(self.pieces.items())), {}, None
        if len(pieces) == len(self.matrices):  # otherwise some of them came dense
            whole = join([*pieces.values()])
        size = self.size
        if whole is None:
            if pieces and self.weight.is_meta:
                self.make_room()
            for start, piece in pieces.items():
                self.weight[start:start + piece.shape[0]] = piece[:].to(self.weight)
            whole, size = self.weight.data, 0 if pieces else size
        self.packed, self.weight = self.kind.of(whole, size, self.device), None


class QuantisedEmbedding(Embedding):
    """An embedding. If it is the LM head, too, it is packed by `kind`: a checkpoint's own numbers,
    or rounded rows. Otherwise it is not rounded."""

    def __init__(self, tokens: Slice, hidden_size: int, on: Placement, tied: bool = False, *,
                 kind: type):
        super().__init__(tokens, hidden_size, on, tied)
        self.ops, self.device = SimpleNamespace(**vars(OPS), prepack=kind.of), on.device
        self.kept: Quantised | None = None

    def tensors(self, path: str) -> Tensors:
        yield f"{path}.weight", self.fill

    def fill(self, tensor: torch.Tensor | Quantised) -> None:
        columns = Slice.whole(self.weight.shape[1])
        if not isinstance(tensor, Quantised):
            copy_share(self.weight, self.tokens, columns, tensor)
            return
        mine = tensor.share(self.tokens, columns)
        self.kept = join([mine]) if self.tied else None
        for rows in portions(*mine.shape) if self.kept is None else []:
            copy_share(self.weight[rows], Slice(rows.start, rows.stop, len(self.weight)), columns,
                       mine)

    def process_weights_after_loading(self) -> None:
        if self.kept is None:
            super().process_weights_after_loading()
        else:
            self.packed, self.weight = self.ops.prepack(self.kept, device=self.device), None
            self.kept = None
