"""Layers on disk: their packed weights are a mapped file, read while other layers compute.

Every step reads every weight once, in the same order. So memory for a few layers is enough, if the
next ones are read in time (Sheng et al. 2023, "FlexGen"):

    layers       0   1   2   3   4   5   6   7          1, 3, 5, 7 on disk: `layer_plan={"disk": 4}`
    computing    ████████████
    read ahead           ░░░3░░░                        by a thread, while 1 and 2 compute
    given back       ◄1 ►                               by `madvise`, when it has computed

Layers on disk are spread evenly, so that the disk is never idle. A step takes at least the time of
reading them, and this time is shared by the step's rows. Results are bit-identical.

Invariant: no weight of these layers is in anonymous memory, except one layer at a time while the
model loads. The operating system decides whether its page cache keeps a copy.

The file has no name and vanishes with the engine. Its cost: each start packs the weights again. The
checkpoint itself can't be mapped, because a CPU multiplies with another layout.
"""

import mmap
import os
import time
from bisect import insort
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir

import torch
from torch import nn

from nanoserve.build import cache_folder

PAGE = mmap.ALLOCATIONGRANULARITY
SMALL = 2 ** 16  # bytes; less stays in memory: norms, biases, scales


def unnamed_file():
    """In the cache folder. It vanishes when nothing maps it any more."""
    return TemporaryFile(dir=cache_folder() or gettempdir())


class NoRoom(OSError, ValueError):
    """The disk is full: an `OSError` of the system, and a `ValueError` for the option."""


@contextmanager
def room_for(num_bytes: int):
    """Raises `NoRoom` if the disk of such files is full."""
    folder = cache_folder() or gettempdir()
    free = disk_usage(folder).free
    try:
        yield
    except OSError as error:
        raise NoRoom(f"no room for {num_bytes:,} bytes in {folder}, where {free:,} are free "
                     f"({error.strerror or error}), for layers on disk: give layer_plan fewer of "
                     "them, or make room there, or set XDG_CACHE_HOME to a folder of a larger disk"
                     ) from error


def in_file(file, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    """Append a tensor to the file; returns it and its mapping, which must live as long. Disk space
    is reserved first: if a mapped page finds none, the system kills the process."""
    start = -(-file.seek(0, os.SEEK_END) // PAGE) * PAGE
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    os.ftruncate(file.fileno(), start + size)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file.fileno(), start, size)
    memory = mmap.mmap(file.fileno(), size, offset=start)
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory


class Shelf(nn.Module):
    """Added as the last submodule of a layer: it moves the weights that the other parts have packed
    to the file, and large ones that are never packed. index: the layer's."""

    def __init__(self, layer: nn.Module, file, index: int):
        super().__init__()
        self.file, self.maps, self.index = file, list[tuple[mmap.mmap, torch.Tensor]](), index
        self.parts = [part for part in layer.modules() if part is not layer]

    def process_weights_after_loading(self) -> None:
        for part in self.parts:
            if hasattr(part, "packed"):
                part.packed = self.moved(part.packed)
            for weight in part.parameters(recurse=False):  # it stays the object that others know
                if (moved := self.moved(weight)) is not weight:
                    weight.data, weight.is_on_disk = moved, True
        self.give_back()

    def moved(self, value):
        """The same value with its large tensors in the file: a tensor, or a container of some."""
        if isinstance(value, torch.Tensor):
            if value.nbytes < SMALL or hasattr(value, "is_on_disk"):
                return value
            with room_for(value.nbytes):
                tensor, memory = in_file(self.file, tuple(value.shape), value.dtype)
            self.maps.append((memory, tensor))
            tensor.is_on_disk = True  # a sleep leaves it, since a thread may be reading ahead
            return tensor.copy_(value)
        if isinstance(value, tuple):
            moved = map(self.moved, value)
            return value._make(moved) if hasattr(value, "_make") else tuple(moved)
        if is_dataclass(value):
            return replace(value, **{one.name: self.moved(getattr(value, one.name))
                                     for one in fields(value)})
        return value

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.maps)

    def read(self) -> None:
        """Make the system read the whole file, and map each page: torch touches one number of each,
        and does not block Python's other threads meanwhile."""
        for memory, tensor in self.maps:
            memory.madvise(mmap.MADV_WILLNEED)
            tensor.view(torch.uint8).view(-1)[::PAGE].sum()

    def give_back(self) -> None:
        for memory, _ in self.maps:
            memory.madvise(mmap.MADV_DONTNEED)


class Disk:
    """The layers of one rank that are on disk, in their order."""

    def __init__(self) -> None:
        self.file = unnamed_file()
        self.shelves: list[Shelf] = []
        self.reader = ThreadPoolExecutor(1, "nanoserve-layers")  # it ends with the network
        self.reading: dict[Shelf, Future] = {}
        self.num_bytes, self.seconds_waited = 0, 0.0

    def take(self, layer: nn.Module, index: int) -> None:
        """Add a layer, in any order. Nothing here refers to the layer itself: a reference cycle
        would keep it alive after its engine was deleted."""
        shelf = Shelf(layer, self.file, index)
        insort(self.shelves, shelf, key=lambda one: one.index)
        layer.register_forward_pre_hook(lambda *_: self.begin(shelf))
        layer.register_forward_hook(lambda *_: self.end(shelf))
        layer.shelf = shelf  # the last part, so that loaders finish it behind the others

    def begin(self, shelf: Shelf) -> None:
        """A layer is about to compute: wait until it has been read, and start to read the next one,
        which after the last is the first."""
        began = time.perf_counter()
        self.read(shelf).result()
        self.seconds_waited += time.perf_counter() - began
        del self.reading[shelf]
        self.read(self.shelves[(self.shelves.index(shelf) + 1) % len(self.shelves)])

    def read(self, shelf: Shelf) -> Future:
        if shelf not in self.reading:
            self.reading[shelf] = self.reader.submit(shelf.read)
            self.num_bytes += shelf.num_bytes
        return self.reading[shelf]

    def end(self, shelf: Shelf) -> None:
        if shelf not in self.reading:  # the only one stays
            shelf.give_back()
