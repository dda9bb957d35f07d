"""Products with quantised weights on a GPU, in Triton: int8 by row, and 4 or 8 bits in groups.

    by row       y[m, n] = (sum over k of x[m, k] * q[n, k]) * s[n] + b[n]
    in groups    y[m, n] =  sum over k of x[m, k] * (q[n, k] * s[n, g] + m[n, g]) + b[n]
                            where g = k // size is the group of input k

The layout is that of `TorchWeight`; for 4 bits (groups of 32, scales and minima of 16 bits):

    memory    byte 0   byte 1        byte 15 | byte 16           heads   word 0 | word 1
              q1 q0    q3 q2   ...   q31 q30 | q33 q32 ...               m  s   | m  s

Few rows are bound by memory. One program computes a tile of M rows and N outputs. It loops over
the inputs, K at a time, and converts a tile of the weight to x's dtype only between its
load and the tensor cores. With many rows each tile of rows would convert it again. So the whole
matrix is converted once, into memory that the next layer reuses, and multiplied by torch. The
experts of a mixture are stacked, and each tile of rows belongs to one expert: converting all
experts would need the memory of the layer in 16 bits.

Invariant: a launch depends on shapes only, so a CUDA graph of it stays valid; sums are float32 and
have a fixed order. Known limit: 1,024 outputs are 32 programs, fewer than a GPU's multiprocessors;
docs/devices.md has the times of steps on an H200.
"""

from math import gcd

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoserve import triton_attention as kernels
from nanoserve import triton_fused as kernels_fused
from nanoserve.triton_fused import tile_of_expert
from nanoserve_extras.quantization.quantized_linear import TorchWeight

# Launches by `table_line` and the most rows of a tile, chosen by the compiled code alone
# (benchmarks/kernels.py, docs/log). Up to 16 rows are bound by memory: long pieces of few outputs,
# loads of 128 bits. More rows need more arithmetic: Hopper's wgmma starts at 64. A100's lines stay
# below the 99 KB of smaller cards. float32 is for checks: without tensor cores, sums take
# registers. This is also so on Turing, which converts the matrix from 17 rows on, except for
# experts. Sizes that 32 (inputs) or 16 (outputs) does not divide have narrow loads and may spill.
LAUNCHES = {
    ("sm_75", 16): dict(M=16, N=32, K=64, num_warps=4, num_stages=1),
    ("sm_80", 16): dict(M=16, N=32, K=256, num_warps=4, num_stages=4),
    ("sm_80", 64): dict(M=64, N=64, K=64, num_warps=4, num_stages=4),
    ("sm_90", 16): dict(M=16, N=32, K=256, num_warps=4, num_stages=4),
    ("sm_90", 64): dict(M=64, N=64, K=64, num_warps=4, num_stages=4),
}
FLOAT32 = dict(M=16, N=32, K=32, num_warps=4, num_stages=3)
FEW = 64  # up to so many rows the packed numbers are multiplied directly
RESTORED = dict(N=4, K=1024, num_warps=4)  # a program's part of a matrix that is restored


class TritonWeight(TorchWeight):
    """A weight in the layout of `TorchWeight`, multiplied by a Triton kernel."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x (rows, inputs) -> (rows, outputs)"""
        launch = launch_for(x, len(x))
        if launch is None:
            return kernels.linear(x, self.restored(x.dtype), bias, out_dtype)
        return self.product(x, bias, launch, out_dtype=out_dtype)

    @classmethod
    def stacked(cls, weights: list["TritonWeight"]) -> "TritonWeight":
        """Stack the weights of experts for `grouped`: memory and heads are (experts, outputs, ...).
        If a file has other groups for some experts, all become 8 bits by row."""
        if len({(one.size, one.memory.dtype) for one in weights}) > 1:
            weights = [cls.of(one.rows(slice(None))) if one.size else one for one in weights]
        heads = [one.heads for one in weights]
        if len({(one.dtype, one.shape) for one in heads}) > 1:  # some of float16, or without minima
            heads = [F.pad(one.float(), (0, 2 - one.shape[-1])) for one in heads]
        return weights[0]._replace(memory=torch.stack([one.memory for one in weights]),
                                   heads=torch.stack(heads))

    def grouped(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs) -> (rows, outputs). The rows of expert e are those from starts[e] to
        starts[e + 1]."""
        each = triton.cdiv(len(x), len(self.memory))  # if they have equally many
        launch = launch_for(x, min(each, FEW)) or launch_for(x, 1)
        return self.product(x, None, launch, starts, len(self.memory))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, launch: dict,
                starts: torch.Tensor | None = None, num_experts: int = 1,
                out_dtype: torch.dtype | None = None) -> torch.Tensor:
        (rows, inputs), outputs = x.shape, self.memory.shape[-2]
        out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
        # 100 rows, 16 experts, tiles of 16: at most 15 with a single row, and 6 for the other 85.
        tiles = (rows + min(num_experts, rows) * (launch["M"] - 1)) // launch["M"]
        # Neighbouring programs have other rows and the same weights, which are so read once.
        _linear_kernel[tiles, triton.cdiv(outputs, launch["N"])](
            x.contiguous(), self.memory, self.words(), bias, out, starts, num_experts, rows,
            outputs, inputs, self.memory.stride(-2), **self.layout(launch["K"]),
            EXPERTS=max(triton.next_power_of_2(num_experts), 16), **launch, **kernels_fused.FMA)
        return out

    def words(self) -> torch.Tensor:
        """Heads as numbers of 32 bits: a scale and a minimum of float16 are one int32."""
        return self.heads.view(torch.int32) if self.heads.dtype == torch.float16 else self.heads

    def layout(self, K: int) -> dict[str, int]:
        """The kernel's compile-time constants for this weight. K: inputs of a tile."""
        return dict(SIZE=self.size, PART=gcd(self.size, K), WORDS=self.words().shape[-1],
                    IS_4=self.memory.dtype == torch.uint8)

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as numbers of `dtype`, (outputs, inputs)."""
        outputs, N, K = len(self.memory), RESTORED["N"], RESTORED["K"]
        out = torch.empty(outputs, self.inputs, dtype=dtype, device=self.memory.device)
        _restore_kernel[triton.cdiv(outputs, N), triton.cdiv(self.inputs, K)](
            self.memory, self.words(), out, outputs, self.inputs, self.memory.stride(0),
            **self.layout(K), **RESTORED, **kernels_fused.FMA)
        return out


def launch_for(x: torch.Tensor, rows: int) -> dict | None:
    """The launch with the lowest tile that holds all of a few rows; None for more rows. In a graph
    `rows` is its bucket."""
    if rows > FEW:
        return None
    if x.dtype == torch.float32:
        return FLOAT32
    return LAUNCHES.get((kernels_fused.table_line(x.device), 16 if rows <= 16 else FEW))


@triton.jit
def _numbers(memory, heads, start, is_output, inputs, stride, SIZE: tl.constexpr,
             PART: tl.constexpr, WORDS: tl.constexpr, IS_4: tl.constexpr, N: tl.constexpr,
             K: tl.constexpr):
    """A tile (N, K) of the weight: in groups in float32; by row the int8 without its scale.

    memory, heads: (N, 1), where the rows begin. PART: neighbours in a tile of K inputs that share
    a group; it divides the group's size. WORDS: the words of a group's head. A masked input may
    have its group's minimum as weight, so x must be 0 there.
    """
    k = start + tl.arange(0, K)[None, :]
    if IS_4:
        at = start // 2 + tl.arange(0, K // 2)[None, :]
        pairs = tl.load(memory + at, is_output & (at < stride), 0)
        q = tl.join(pairs & 15, pairs >> 4).reshape(N, K)
    else:
        q = tl.load(memory + k, is_output & (k < inputs), 0)
    if SIZE:
        part = start + tl.arange(0, K // PART)[None, :] * PART
        at, is_part = part // SIZE * WORDS, is_output & (part < inputs)
        word = tl.load(heads + at, is_part, 0)  # (N, parts)
        if heads.dtype.element_ty == tl.int32:
            scale, minimum = half(word), half(word >> 16)
        elif WORDS == 2:
            scale, minimum = word, tl.load(heads + at + 1, is_part, 0)
        else:
            scale, minimum = word, tl.zeros_like(word)
        q = q.to(tl.float32).reshape(N, K // PART, PART)
        q = (q * scale[:, :, None] + minimum[:, :, None]).reshape(N, K)
    return q


@triton.jit
def half(word):
    """The number of float16 in the low half of a word."""
    return (word & 0xffff).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _restore_kernel(memory, heads, out, outputs, inputs, stride, SIZE: tl.constexpr,
                    PART: tl.constexpr, WORDS: tl.constexpr, IS_4: tl.constexpr, N: tl.constexpr,
                    K: tl.constexpr):
    n = (tl.program_id(0).to(tl.int64) * N + tl.arange(0, N))[:, None]
    start, is_output = tl.program_id(1) * K, n < outputs
    heads += n * _head_words(inputs, SIZE, WORDS)
    w = _numbers(memory + n * stride, heads, start, is_output, inputs, stride, SIZE, PART, WORDS,
                 IS_4, N, K)
    if SIZE == 0:
        w = w.to(tl.float32) * tl.load(heads, is_output, 0)
    k = start + tl.arange(0, K)[None, :]
    tl.store(out + n * inputs + k, w.to(out.dtype.element_ty), is_output & (k < inputs))


@triton.jit
def _head_words(inputs, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """The words of a row's heads."""
    return tl.cdiv(inputs, SIZE) * WORDS if SIZE else 1


@triton.jit(do_not_specialize=["rows"])  # it changes from step to step: see kernels.py
def _linear_kernel(x, memory, heads, bias, out, starts, num_experts, rows, outputs, inputs, stride,
                   SIZE: tl.constexpr, PART: tl.constexpr, WORDS: tl.constexpr, IS_4: tl.constexpr,
                   EXPERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """starts: None for a single matrix, or where the rows of each expert start."""
    heads_stride = _head_words(inputs, SIZE, WORDS)
    if starts is None:
        m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)  # times a width may pass 2^31
        is_row = (m < rows)[:, None]
    else:
        expert, m, own = tile_of_expert(starts, tl.program_id(0), num_experts, EXPERTS, M)
        if expert >= num_experts:
            return
        first = expert.to(tl.int64) * outputs
        memory += first * stride
        heads += first * heads_stride
        m, is_row = m.to(tl.int64), own[:, None]
    n = (tl.program_id(1).to(tl.int64) * N + tl.arange(0, N))[:, None]
    k, is_output = tl.arange(0, K), n < outputs
    x += m[:, None] * inputs + k[None, :]
    memory += n * stride
    groups = heads + n * heads_stride
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, inputs, K):
        a = tl.load(x + start, is_row & (start + k < inputs)[None, :], 0)  # (M, K)
        w = _numbers(memory, groups, start, is_output, inputs, stride, SIZE, PART, WORDS, IS_4, N,
                     K)
        total = tl.dot(a, w.to(a.dtype).T, total, input_precision="ieee")
    n, is_output = n.T, is_output.T
    if SIZE == 0:
        total *= tl.load(heads + n, is_output, 0)
    if bias is not None:
        total += tl.load(bias + n, is_output, 0).to(tl.float32)
    tl.store(out + m[:, None] * outputs + n, total.to(out.dtype.element_ty), is_row & is_output)
