"""Decode steps with adapters are recorded, too."""

from recorded_graphs import recorded  # noqa: F401
