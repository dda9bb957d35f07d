"""Products of 8-bit floats: weights and activations are both rounded, as FP8 tensor cores want it.

A float8 of the kind e4m3 has a sign, 4 bits of exponent and 3 of mantissa, and reaches to 448
(FP8, Micikevicius et al. 2022). Each row of a weight has one scale, and so has each token's row of
activations, found in the step itself (W8A8, "dynamic per token"):

    row               0.52 -1.30 0.07 ...     scale = 1.30 / 448
    kept               176  -448   24 ...     row ~ scale * kept, each number within 1/16 of itself

    y[m, n] = (sum over k of x[m, k] * w[n, k]) * x_scale[m] * w_scale[n]       x and w as kept

Weights are rounded while they are loaded (quantized_linear.py). An LM head becomes int8 by row.

Invariant: a token's row is rounded by itself, so its result does not depend on the batch. Exactly
so in the specification, whose sums lose no bit: a product of two e4m3 is a multiple of 2^-18 below
2^18, and float64 adds up 2^17 of them without rounding. On a GPU sums depend on the number of rows.

Not known here: files, formats (quantization.py), the KV cache. Confessed: rounding activations is
some small operators before each product. Nothing of this ran on a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve.extras.quantized_linear import portions, scaled_rows

E4M3 = torch.float8_e4m3fn
LARGEST = 448
MULTIPLE = 16  # `_scaled_mm` on a GPU takes such numbers of inputs and outputs only
CAPABILITY = (8, 9)  # the first GPUs whose tensor cores multiply 8-bit floats


def check_device(device: str) -> None:
    """Raises `ValueError` for a GPU without 8-bit floats."""
    if device == "cuda" and (found := torch.cuda.get_device_capability()) < CAPABILITY:
        raise ValueError(f"quantization='fp8', but {torch.cuda.get_device_name()} has compute "
                         f"capability {found[0]}.{found[1]}, and 8-bit floats are multiplied from "
                         f"{CAPABILITY[0]}.{CAPABILITY[1]} on: use 'int8'")


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, inputs) -> e4m3 of the same shape, and float32 scales (rows,)."""
    wide, scales = scaled_rows(x, LARGEST)
    return wide.to(E4M3), scales


class Fp8Rows(NamedTuple):
    """A rounded weight, row by row: the specification, on any device. Weights are widened to
    float64, a portion at a time, which saves memory and costs time."""

    values: torch.Tensor  # (outputs, inputs), each filled up with zeros to a `MULTIPLE`
    scales: torch.Tensor  # as many as rows of values
    outputs: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Fp8Rows":
        outputs, inputs = weight.shape
        rows, columns = (-(-size // MULTIPLE) * MULTIPLE for size in weight.shape)
        values = torch.zeros(rows, columns, dtype=E4M3, device=weight.device)
        scales = torch.zeros(rows, device=weight.device)
        for some in portions(outputs, inputs):
            values[some, :inputs], scales[some] = round_rows(weight[some])
        return cls(values, scales, outputs)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        missing = self.values.shape[1] - x.shape[1]
        values, scales = round_rows(F.pad(x, (0, missing)) if missing else x)
        out = self.multiply(values, scales, x.dtype)[:, :self.outputs].contiguous()
        return out if bias is None else out + bias

    def multiply(self, values: torch.Tensor, scales: torch.Tensor,
                 dtype: torch.dtype) -> torch.Tensor:
        """(rows, inputs) and (rows,) -> (rows, outputs), these filled up"""
        x = values.double()
        out = torch.empty(len(x), len(self.values), dtype=dtype, device=x.device)
        for some in portions(*self.values.shape):
            sums = x @ self.values[some].double().T
            out[:, some] = sums * scales[:, None] * self.scales[some]
        return out


class ScaledRows(Fp8Rows):
    """The same by torch, for a GPU with Triton's operators. `_scaled_mm` is private by its name,
    but the only product that all supported versions have. Sums leave it as bfloat16: torch 2.9 has
    no others on most GPUs."""

    def multiply(self, values: torch.Tensor, scales: torch.Tensor,
                 dtype: torch.dtype) -> torch.Tensor:
        return torch._scaled_mm(values, self.values.T, scale_a=scales[:, None],
                                scale_b=self.scales[None], out_dtype=torch.bfloat16).to(dtype)
