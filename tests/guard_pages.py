"""A plugin for pytest: a compiled library's every buffer ends where memory may not be touched.

Each tensor that is handed over is copied to the end of a page, behind which lies one without any
rights; afterwards it is copied back. Results are made there. Reading or writing one number too far
ends the process.
"""

import ctypes
import mmap
from collections.abc import Callable
from math import prod

import torch

from nanoserve import build as library

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)


class Room:
    """Makes tensors of a dtype that end at a guard page, in place of `library.ROOM`'s."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def new_empty(self, *shape: int) -> torch.Tensor:
        nbytes = prod(shape) * self.dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=self.dtype)
        room = -(-nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, room + PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(address + room), PAGE, 0) == 0, ctypes.get_errno()
        made = torch.frombuffer(memory, dtype=self.dtype, count=prod(shape), offset=room - nbytes)
        assert made.data_ptr() + made.nbytes == address + room
        return made.view(shape)


def with_guards(name: str, plain: Callable) -> Callable:
    """A library's function that is given copies. A wrong tensor stays wrong."""
    def function(*given, **sizes: int):
        copies = []

        def guarded(x):
            if hasattr(x, "memory"):  # a packed weight
                return x._replace(memory=guarded(x.memory))
            if not isinstance(x, torch.Tensor) or not x.is_contiguous():
                return x
            copy = Room(x.dtype).new_empty(*x.shape).copy_(x)
            copies.append((x, copy))
            return copy

        results = plain(*map(guarded, given), **sizes)
        for x, copy in copies:
            x.copy_(copy)
        CALLS.append(name)
        return results
    return function


CALLS: list[str] = []
library.ROOM = {dtype: Room(dtype) for dtype in library.ROOM}
Function = library.Function
library.Function = lambda name, *rest: with_guards(name, Function(name, *rest))


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"guarded: {' '.join(sorted(set(CALLS)))}")
