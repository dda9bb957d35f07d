"""int8 and 4 bits in an order in which a GPU's threads need not exchange them, for up to four rows.

A thread loads 16 bytes, four words. If neighbours in a word are neighbours in the row, as in
quantized_triton.py, they must be moved to other threads, which have loaded their inputs of x. In
the order here a thread loads both a number and its input:

    4 bits   32 inputs are 4 words; nibble i of word j is input 4 i + j       x: 4 inputs a load
    8 bits   16 inputs are 4 words; byte i of word j is input 4 i + j

Numbers are not converted either: q | 0x4B000000 is the float 2^23 + q. A nibble stays in its place,
where it means q * 16^place, and x is divided by 16^place. A weight takes about 5 instructions
instead of 12. More rows use the kernels of quantized_triton.py, with the columns of x reordered.

Invariant: numbers and heads are those of `TritonWeight`, in another order within a group; if a row
does not fit this order, it is not changed. **Off until a GPU has shown that it is faster**:
NANOSERVE_WORDS=1 turns it on. No GPU has run it yet.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from nanoserve.triton_fused import FMA
from nanoserve_extras.quantization.quantized_linear import meant, portions, unpaired
from nanoserve_extras.quantization.quantized_triton import TritonWeight, half

MOST_ROWS = 4
WORDS = 256  # of a row that a program loads at a time
NUMBERS = 2048  # sums of a program: 16 a thread, and as many of the present words
MAGIC = tl.constexpr(0x4B000000)
BIAS = tl.constexpr(8388608.0)  # 2^23


class WordWeight(TritonWeight):
    """A `TritonWeight` whose numbers are in the order above."""

    @classmethod
    def of(cls, whole, size: int = 0, device: torch.device | None = None) -> "WordWeight":
        weight = super().of(whole, size, device)
        if weight.fits:
            order = order_of(weight.bits, weight.inputs, weight.memory.device)
            for some in portions(len(weight.memory), weight.inputs):
                weight.memory[some] = reordered(weight.memory[some], order)
        return weight

    @property
    def fits(self) -> bool:
        if self.bits == 4:
            return self.size % 32 == 0 and self.inputs % 32 == 0
        return self.size == 0 and self.inputs % 16 == 0

    def rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        if not self.fits:
            return super().rows(ids)
        back = order_of(self.bits, self.inputs, self.memory.device).argsort()
        return meant(reordered(self.memory[ids], back), self.heads[ids], self.size, self.inputs)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.fits and 0 < len(x) <= MOST_ROWS:
            return self.few_rows(x.contiguous(), bias, out_dtype)
        return super().linear(self.in_order(x), bias, out_dtype)

    def grouped(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return super().grouped(self.in_order(x), starts)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of x in the order of the weight's numbers."""
        return x[:, order_of(self.bits, self.inputs, x.device)] if self.fits else x

    def few_rows(self, x: torch.Tensor, bias: torch.Tensor | None,
                 out_dtype: torch.dtype | None) -> torch.Tensor:
        (rows, inputs), outputs = x.shape, len(self.memory)
        out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
        words = self.memory.view(torch.int32)  # (outputs, words of a row)
        padded = triton.next_power_of_2(rows)
        at_a_time = min(WORDS, triton.next_power_of_2(words.shape[1]))
        per_program = max(NUMBERS // (padded * at_a_time), 1)
        _words_kernel[triton.cdiv(outputs, per_program),](
            x, words, self.words(), bias, out, rows, inputs, outputs, words.shape[1],
            SIZE=self.size, HEAD=self.words().shape[-1], ROWS=padded, N=per_program, W=at_a_time,
            num_warps=4, **FMA)
        return out


@cache
def order_of(bits: int, inputs: int, device: torch.device) -> torch.Tensor:
    """The input of each number, in the order of memory. In 8 bits: 0 4 8 12 1 5 9 13 ..."""
    per_word = 32 // bits
    in_group = torch.arange(4 * per_word).view(per_word, 4).T.flatten()
    starts = torch.arange(0, inputs, 4 * per_word)
    return (starts[:, None] + in_group).flatten().to(device)


def reordered(memory: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(n, inputs) int8, or pairs of 4 bits."""
    if memory.dtype == torch.int8:
        return memory[:, order]
    numbers = unpaired(memory)[:, order]
    return numbers[:, ::2] | numbers[:, 1::2] << 4


@triton.jit
def _words_kernel(x, words, heads, bias, out, rows, inputs, outputs, num_words, SIZE: tl.constexpr,
                  HEAD: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """All tensors are (rows, outputs, words), so that none changes its layout on the way. SIZE: of
    a group of 4 bits, or 0: int8 by row. HEAD: numbers of 32 bits in a group's head."""
    PLACES: tl.constexpr = 8 if SIZE else 4
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[None, :, None]
    total = tl.zeros((ROWS, N, W), tl.float32)
    for start in range(0, num_words, W):
        w = start + tl.arange(0, W)[None, None, :]
        inside, read = (m < rows) & (w < num_words), (n < outputs) & (w < num_words)
        bits = tl.load(words + n * num_words + w, read, 0)  # (1, N, W)
        at = x + m * inputs + w // 4 * (4 * PLACES) + w % 4
        part = tl.zeros((ROWS, N, W), tl.float32)
        sum_x = tl.zeros((ROWS, 1, W), tl.float32)
        for i in tl.static_range(PLACES):
            a = tl.load(at + 4 * i, inside, 0).to(tl.float32)  # (ROWS, 1, W)
            if SIZE:
                sum_x += a
                shifted = bits if i < 5 else bits >> 20  # 2^23 has room for five places
                q = ((shifted & (15 << 4 * (i % 5))) | MAGIC).to(tl.float32, bitcast=True) - BIAS
                part += q * (a * 16.0 ** -(i % 5))
            else:
                q = (((bits >> 8 * i) & 255) ^ (MAGIC | 128)).to(tl.float32, bitcast=True)
                part += (q - (BIAS + 128)) * a
        if SIZE:
            head = heads + (n * tl.cdiv(inputs, SIZE) + w * 8 // SIZE) * HEAD
            scale = tl.load(head, read, 0)
            if heads.dtype.element_ty == tl.int32:
                part = part * half(scale) + sum_x * half(scale >> 16)
            elif HEAD == 2:
                part = part * scale + sum_x * tl.load(head + 1, read, 0)
            else:
                part = part * scale
        total += part
    y = tl.sum(total, 2, keep_dims=True)  # (ROWS, N, 1)
    if SIZE == 0:
        y *= tl.load(heads + n, n < outputs, 0)
    if bias is not None:
        y += tl.load(bias + n, n < outputs, 0).to(tl.float32)
    tl.store(out + m * outputs + n, y.to(out.dtype.element_ty), (m < rows) & (n < outputs))
