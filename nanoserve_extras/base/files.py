"""Files that no other user can read: recordings and blocks have prompts in them."""

import os


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)` makes such a file."""
    return os.open(path, flags, 0o600)
