"""A product of one to four rows on a GPU, fused with the operations around it: one kernel.

    x, residual ──► sum ──► norm ──► weight ──► bias ──► act(gate) * up ──► out
                     └──► the sum, which goes on as the stream

A step of one row reads each weight once and does little arithmetic, so its time is that of reading
memory, and of launching kernels that wait for each other. cuBLAS splits the sum of such a product
and joins it in a second kernel, and its norm, residual and gate are separate kernels. Here a
program has N whole rows of the weight: no split sums, no atomics, no tensor cores, and no exchange
between threads. The norm's factor is one number per row, so it is applied last:

    norm(x) W^T = (x * gain) W^T / sqrt(mean(x^2) + eps)

Each program sums the row's squares again, which takes little time beside reading its weights.

Invariant: sums are float32 in a fixed order, and nothing waits for the device. The normed row,
which single kernels round, is not rounded here. **No GPU has run this yet**: the sizes of tiles are
estimates, from the use of registers (benchmarks/kernels.py).
"""

import torch
import triton
import triton.language as tl

from nanoserve.triton_fused import FMA, gated

MOST_ROWS = 4  # from five on tensor cores read the same weights as fast
NUMBERS = 4096  # that a program's threads hold as sums at a time: 32 each
PIECE = 1024  # of a row of the weight, of which four warps load 16 bytes a lane


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
            residual: torch.Tensor | None = None, gain: torch.Tensor | None = None,
            eps: float = 0.0, activation: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: (rows, inputs). gain: the norm's weight, (inputs,); None: x is not normed.
    weight: (outputs, inputs), dense; with an activation those of gate, then of up. Returns
    (rows, outputs), of half as many with an activation, and the sum that was normed."""
    (rows, inputs), outputs = x.shape, len(weight) // (1 if activation is None else 2)
    assert weight.is_contiguous() and x.stride(1) == 1
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    padded, piece = triton.next_power_of_2(rows), min(PIECE, triton.next_power_of_2(inputs))
    matrices = 1 if activation is None else 2
    per_program = max(NUMBERS // (piece * padded * matrices), 1)
    _product_kernel[triton.cdiv(outputs, per_program),](
        x, residual, gain, weight, bias, out, total, rows, inputs, outputs, x.stride(0),
        0 if residual is None else residual.stride(0), eps, activation, padded, per_program, piece,
        num_warps=4, **FMA)
    return out, total


@triton.jit
def _product_kernel(x, residual, gain, weight, bias, out, total, rows, inputs, outputs, x_stride,
                    residual_stride, eps, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
                    N: tl.constexpr, K: tl.constexpr):
    """All tensors are (rows, outputs, inputs), so that none changes its layout on the way."""
    dtype: tl.constexpr = out.dtype.element_ty
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.program_id(0) * N + tl.arange(0, N)[None, :, None]
    k = tl.arange(0, K)[None, None, :]
    at = n.to(tl.int64) * inputs + k  # (1, N, K)
    sums = tl.zeros((ROWS, N, K), tl.float32)
    sums_up = tl.zeros((ROWS, N, K), tl.float32)
    squares = tl.zeros((ROWS, 1, K), tl.float32)
    for start in range(0, inputs, K):
        inside = (m < rows) & (start + k < inputs)  # (ROWS, 1, K)
        read = (n < outputs) & (start + k < inputs)  # (1, N, K)
        w = tl.load(weight + at + start, read, 0).to(tl.float32)
        a = tl.load(x + m * x_stride + start + k, inside, 0).to(tl.float32)
        if residual is not None:
            a += tl.load(residual + m * residual_stride + start + k, inside, 0).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + m * inputs + start + k, a.to(dtype), inside)
            a = a.to(dtype).to(tl.float32)
        if gain is not None:
            squares += a * a
            a *= tl.load(gain + start + k, start + k < inputs, 0).to(tl.float32)
        sums += w * a
        if ACTIVATION is not None:
            up = tl.load(weight + outputs.to(tl.int64) * inputs + at + start, read, 0)
            sums_up += up.to(tl.float32) * a
    y, y_up = tl.sum(sums, 2, keep_dims=True), tl.sum(sums_up, 2, keep_dims=True)  # (ROWS, N, 1)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / inputs + eps)
        y *= scale
        y_up *= scale
    if bias is not None:
        y += tl.load(bias + n, n < outputs, 0).to(tl.float32)
        if ACTIVATION is not None:
            y_up += tl.load(bias + outputs + n, n < outputs, 0).to(tl.float32)
    if ACTIVATION is not None:
        y = gated(y, y_up, ACTIVATION, dtype)
    tl.store(out + m * outputs + n, y.to(dtype), (m < rows) & (n < outputs))
