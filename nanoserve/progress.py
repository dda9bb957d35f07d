"""What a user sees on standard error while work is done: lines, and tqdm's bar.

Invariant: a line does not cut through a bar, so each line is written by tqdm, which clears its bar
and draws it again below. Where standard error is no terminal there is no bar: a log has lines only.
"""

import sys
from collections.abc import Callable

from tqdm import tqdm


def say(*lines: str) -> None:
    """Print lines on standard error. If a progress bar is drawn there, tqdm clears it and draws it
    again below the lines."""
    for line in lines:
        tqdm.write(f"nanoserve: {line}", file=sys.stderr)


def prompts_bar(num_requests: int, use_tqdm: bool | Callable) -> tqdm:
    """The progress bar of `generate` and `encode`. use_tqdm: whether to show a bar, or (as in vLLM)
    a function that makes one. Where standard error is no terminal, none is shown."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    wanted = bool(use_tqdm) and num_requests > 0
    return make(total=num_requests, desc="Processed prompts", unit="prompt", dynamic_ncols=True,
                disable=None if wanted else True)
