"""Files that other users of the machine can't read: recordings and blocks contain prompts."""

import os


def private(path: str, flags: int) -> int:
    """An opener: `open(..., opener=private)` makes such a file."""
    return os.open(path, flags, 0o600)
