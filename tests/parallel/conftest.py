"""What tests of ranks share."""

from process_fixtures import expected, leave_nobody, spawned, start  # noqa: F401
from quick_interpreter import quick_interpreter  # noqa: F401
