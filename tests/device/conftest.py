"""The tests of kernels: Triton's interpreter runs them."""

from quick_interpreter import quick_interpreter  # noqa: F401
from recorded_graphs import recorded  # noqa: F401
