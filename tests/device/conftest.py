"""The tests of kernels: Triton's interpreter runs them."""

from quick_interpreter import quick_interpreter  # noqa: F401
