"""The kinds of packed weights that tests hold to one oracle, and engines that are made of them.

Triton's kinds run in its interpreter, whose bfloat16 is wrong and whose programs take milliseconds
each. Where there is a GPU, the kernel has tests of its own (tests/gpu).
"""

import shutil
import sys

import pytest
import torch

try:
    from nanoserve.triton_attention import INTERPRETED
    from nanoserve_extras.quantization.quantized_triton import TritonWeight
except ImportError:
    INTERPRETED, TritonWeight = False, None

from nanoserve_extras.quantization.quantized_linear import CpuWeight, TorchWeight

needs_compiler = pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux",
                                    reason="needs g++")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
# Relative to the largest result. Compiled, 16 bits of an activation are left, in blocks.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.float16: 2e-3}
KINDS = [pytest.param(TorchWeight, id="TorchWeight"),
         pytest.param(CpuWeight, id="CpuWeight", marks=needs_compiler),
         pytest.param(TritonWeight, id="TritonWeight", marks=needs_interpreter)]
# Kernels, and the checkpoint that an engine runs with them.
ENGINES = [(kernels, name) for kernels in ("torch", "cpu")
           if kernels != "cpu" or shutil.which("g++")
           for name in ("qwen3", "qwen3-tied", "llama-bias", "qwen3-moe-odd")]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[got.dtype], f"{error:.1e}"


def row_counts(kind: type, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of rows around those of a tile; of the kernel's three tiles in 16 bits, and of its
    one in float32."""
    if kind is not TritonWeight:
        return 0, 1, 6, 7, 16, 17, 40
    if dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    return (0, 3) if dtype is torch.float32 else (0, 1, 17, 70)
