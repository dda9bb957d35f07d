"""A plugin for pytest: the compiled twin's every buffer ends where memory may not be touched.

Each tensor that is handed over is copied to the end of a page, behind which lies one without any
rights; afterwards it is copied back. Reading or writing one number too far ends the process.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanoserve.device import cpu

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def guarded(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A copy that ends at a guard page; what is written to it is written to the tensor."""
    room = -(-tensor.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, room + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + room), PAGE, 0) == 0, ctypes.get_errno()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(),
                            offset=room - tensor.nbytes).view(tensor.shape)
    assert copy.data_ptr() + copy.nbytes == address + room
    copy.copy_(tensor)
    yield copy
    tensor.copy_(copy)


def with_guards(plain: Callable) -> Callable:
    """`call` of a library, its name first, with guards. One tensor given twice (x, which may be the
    result) stays one."""
    def call(name: str, *arguments) -> None:
        tensors = {x.data_ptr(): x for x in arguments if isinstance(x, torch.Tensor) and x.numel()}
        guards = {address: guarded(x) for address, x in tensors.items()}
        copies = {address: guard.__enter__() for address, guard in guards.items()}
        plain(name, *(copies[x.data_ptr()].view(x.shape) if isinstance(x, torch.Tensor)
                      and x.numel() else x for x in arguments))
        for guard in guards.values():
            guard.__exit__(None, None, None)
        CALLS.append(name)
    return call


CALLS: list[str] = []
cpu.call = with_guards(cpu.call)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"guarded: {' '.join(sorted(set(CALLS)))}")
