"""The tests and reports for GPUs: without one, Triton's interpreter runs them."""

from quick_interpreter import quick_interpreter  # noqa: F401
