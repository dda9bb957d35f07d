"""Engines whose ranks are processes."""

from process_fixtures import expected as text_of_prompt  # noqa: F401
from process_fixtures import leave_nobody, spawned, start  # noqa: F401
