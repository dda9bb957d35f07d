"""The tests and reports for GPUs: without one, Triton's interpreter runs them."""

import pytest
from gpu_checks import DRY
from quick_interpreter import quick_interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def stand_in_for_graphs(monkeypatch):
    """In a dry run (gpu_checks.py)."""
    if DRY:
        from recorded_graphs import record_steps

        record_steps(monkeypatch)
