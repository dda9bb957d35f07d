"""A plugin for pytest: guard_pages.py for products with small weights, too."""

from guard_pages import pytest_terminal_summary, with_guards

from nanoserve.extras import quantized_linear

__all__ = ["pytest_terminal_summary"]  # says what was called
quantized_linear.call = with_guards(quantized_linear.call)
