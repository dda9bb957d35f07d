"""Standard error, for the user: lines, and a progress bar drawn by tqdm.

Invariant: a line does not cut through a bar. So each line is written by tqdm, which clears its bar
and draws it again below. If standard error is no terminal there is no bar: a log has only lines.
"""

import sys
from collections.abc import Callable

from tqdm import tqdm


def say(*lines: str) -> None:
    """Print lines on standard error."""
    for line in lines:
        tqdm.write(f"nanoserve: {line}", file=sys.stderr)


def prompts_bar(num_requests: int, use_tqdm: bool | Callable) -> tqdm:
    """The progress bar of `generate` and `encode`. use_tqdm: whether to show a bar, or (as in vLLM)
    a function that makes one."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    wanted = bool(use_tqdm) and num_requests > 0
    disable = None if wanted else True  # tqdm's None: no bar if standard error is no terminal
    return make(total=num_requests, desc="Processed prompts", unit="prompt", dynamic_ncols=True,
                disable=disable)
