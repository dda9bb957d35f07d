"""Engines whose ranks are processes."""

from process_fixtures import expected, leave_nobody, spawned, start  # noqa: F401
