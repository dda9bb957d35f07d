"""What a GPU does and a CPU does not: the one list that all stand-ins for GPUs share.

Tests on a CPU replace a part of a GPU by something that runs here. Each of these returns what a CPU
would return, unless it is told otherwise; so an engine once passed every test and started on no
two GPUs. What is known to differ is below, each with its source (paths are pytorch's unless they
say otherwise), and every stand-in asks here:

    operators wait for the device, some though their names   `waits_for`   recorded_graphs.py,
      do not say so                                                        no_waits.py
    NCCL's collectives return None                           `LikeNCCL`    parallel/rank_threads.py
    a stream belongs to one GPU, which `torch.cuda.stream`   `Gpus`        test_graphs_capture.py
      makes the current one
    a recording that fails stays under way for the memory    `Gpus`        test_graphs_capture.py
      allocator
    waiting can be made an error, for all threads at once    `Gpus`        test_graphs_capture.py
    float32 products are TF32's where that is allowed,       `tf32`        extras/recurrent/
      convolutions' by default

`torch.cuda.graph` makes its stream once in a process, on the GPU that is current then
(torch/cuda/graphs.py, `default_capture_stream`); `torch.cuda.stream` switches GPUs
(torch/cuda/__init__.py, `StreamContext`).
"""

import contextlib
from collections import Counter
from functools import wraps
from unittest import mock

import torch

# ------------------------------------------------------------- operators that wait

# On a GPU each of these reads a number back. The names are those that a dispatcher sees.
WAITS = {
    "aten::_local_scalar_dense": "aten/src/ATen/native/cuda/CUDAScalar.cu",  # `item`, `tolist`
    "aten::item": "aten/src/ATen/native/Scalar.cpp: _local_scalar_dense",
    "aten::is_nonzero": "aten/src/ATen/native/TensorCompare.cpp: item",
    "aten::equal": "aten/src/ATen/native/cuda/Equal.cpp: is_nonzero",
    "aten::nonzero": "aten/src/ATen/native/cuda/Nonzero.cu: how many there are",
    "aten::masked_select": "aten/src/ATen/native/cuda/IndexKernel.cpp: nonzero",
    "aten::_unique2": "aten/src/ATen/native/cuda/Unique.cu: how many there are",
    "aten::unique_dim": "aten/src/ATen/native/cuda/Unique.cu: how many there are",
    "aten::unique_consecutive": "aten/src/ATen/native/cuda/Unique.cu: how many there are",
    "aten::bincount": "aten/src/ATen/native/cuda/SummaryOps.cu: the largest number",
    # Its names don't say so: without a kernel for dtype and card (there is one for bfloat16 on 9.0
    # and 10.0) each expert is a product of its own, between numbers of `offs.cpu()`.
    "aten::_grouped_mm": "aten/src/ATen/native/GroupedMMUtils.h: _grouped_mm_fallback",
    "transformers::grouped_mm_fallback": "transformers/integrations/moe.py: offs.tolist()",
}


def waits_for(operator, args: tuple, kwargs: dict) -> str | None:
    """The name of an operator that waits for a GPU when it is called like this, or None."""
    name = operator.name().split(".")[0]
    if name in WAITS:
        return name
    # Indexing by a mask is `nonzero` (aten/src/ATen/TensorIndexing.h, expandTensors).
    if name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return name
    # aten/src/ATen/native/Repeat.cpp: the sum of counts on the device, unless the caller says it.
    counts = operator.name() in ("aten::repeat_interleave.Tensor",
                                 "aten::repeat_interleave.self_Tensor")
    if counts and kwargs.get("output_size") is None:
        return name
    return None


# ------------------------------------------------------------- collectives


class LikeNCCL:
    """A group whose collectives return None where they are on the current stream, as NCCL's do
    since torch 2.8 (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: `return asyncOp ? work :
    nullptr`). Gloo's return a `Work` in any case."""

    def __init__(self, group):
        self.group = group

    def __getattr__(self, name: str):
        collective = getattr(self.group, name)

        @wraps(collective)
        def like_nccls(*args):
            work = collective(*args)
            work.wait()
            return work if args[-1].asyncOp else None
        return like_nccls

    def shutdown(self) -> None:
        """Gloo's group, which the hosts share, ends by itself."""

    abort = shutdown


# ------------------------------------------------------------- streams, recordings, waiting


class Gpus:
    """Several GPUs, as far as recordings need them: `with Gpus() as gpus:`.

    current: the GPU that kernels go to. under_way, uses: what the memory allocator believes of
    pools (c10/cuda/CUDACachingAllocator.cpp). fails_at: "begin", "end" (the driver's word on what
    was recorded), "nothing" (there is no graph) or "instantiate": where the next recording ends.
    """

    def __init__(self):
        self.current, self.mode, self.fails_at = 0, 0, None
        self.streams = [FakeStream(self, device, "default") for device in range(2)]
        self.under_way, self.uses, self.pools = [], Counter(), 0
        self.spoiled = False  # something in the recording has waited

    def __enter__(self) -> "Gpus":
        fake, cuda = self, mock.patch.multiple(
            torch.cuda, create=True, Stream=lambda: FakeStream(self), stream=self.use,
            current_stream=lambda: self.streams[self.current], CUDAGraph=lambda: FakeGraph(fake),
            graph_pool_handle=self.new_pool, synchronize=self.wait, empty_cache=lambda: None,
            get_sync_debug_mode=lambda: self.mode, set_sync_debug_mode=self.set_mode)
        private = mock.patch.multiple(
            torch._C, create=True, _host_emptyCache=lambda: None,
            _cuda_endAllocateToPool=self.end_allocation, _cuda_releasePool=self.release)
        self.patches = contextlib.ExitStack()
        for patch in (cuda, private, mock.patch.object(
                torch.cuda.graph, "default_capture_stream", None)):
            self.patches.enter_context(patch)
        return self

    def __exit__(self, *error) -> None:
        self.patches.close()

    @contextlib.contextmanager
    def on(self, device: int):
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def use(self, stream: "FakeStream"):
        with self.on(stream.device_index):
            before, self.streams[self.current] = self.streams[self.current], stream
            try:
                yield
            finally:
                self.streams[stream.device_index] = before

    def new_pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools

    def set_mode(self, mode: str | int) -> None:
        self.mode = dict(default=0, warn=1, error=2).get(mode, mode)

    def wait(self, *device) -> None:
        """c10/cuda/CUDAFunctions.h: the mode is one for the process. A recording is invalid once
        something in it has waited."""
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.under_way:
            self.spoiled = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def end_allocation(self, device: int, pool: tuple) -> None:
        if (device, pool) not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove((device, pool))

    def release(self, device: int, pool: tuple) -> None:
        if not self.uses[device, pool]:
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED")
        self.uses[device, pool] -= 1


class FakeStream:
    def __init__(self, gpus: Gpus, device: int | None = None, name: str = "another"):
        self.device_index, self.name = gpus.current if device is None else device, name


class FakeGraph:
    """aten/src/ATen/cuda/CUDAGraph.cpp: `capture_end` first asks the driver, and if that says no,
    nothing tells the allocator. Only a graph whose recording has ended gives its pool back."""

    def __init__(self, gpus: Gpus):
        self.gpus, self.ended, self.place = gpus, False, None

    def fail(self, where: str, condition: bool = False) -> None:
        if condition or self.gpus.fails_at == where:
            self.gpus.fails_at = None
            raise RuntimeError(f"the recording fails: {where}")

    def capture_begin(self, pool: tuple, **options) -> None:
        self.place = self.gpus.current, pool
        self.gpus.under_way.append(self.place)
        self.gpus.uses[self.place] += 1
        self.fail("begin")

    def capture_end(self) -> None:
        spoiled, self.gpus.spoiled = self.gpus.spoiled, False
        self.fail("end", spoiled)
        self.gpus.end_allocation(*self.place)
        self.fail("nothing")
        self.ended = True
        self.fail("instantiate")

    def pool(self) -> tuple:
        if not self.ended:
            raise RuntimeError("CUDAGraph::pool() without a preceding successful capture")
        return self.place[1]

    def replay(self) -> None:
        assert self.ended

    def __del__(self):
        if self.ended:
            self.gpus.release(*self.place)


# ------------------------------------------------------------- float32 that is not


@contextlib.contextmanager
def tf32():
    """Convolutions of float32 keep ten bits of each number, if `torch.backends.cudnn.allow_tf32`
    says so, which is the default (aten/src/ATen/Context.h, `allow_tf32_cudnn`; NVIDIA's cuDNN on
    cards from 8.0 on), and products if `torch.backends.cuda.matmul.allow_tf32` does."""
    def rounded(function, is_allowed):
        def call(*args, **kwargs):
            if is_allowed():
                args = [ten_bits(x) for x in args]
            return function(*args, **kwargs)
        return call

    functional, backends = torch.nn.functional, torch.backends
    with contextlib.ExitStack() as stack:
        for name, is_allowed in (("conv1d", lambda: backends.cudnn.allow_tf32),
                                 ("conv2d", lambda: backends.cudnn.allow_tf32),
                                 ("linear", lambda: backends.cuda.matmul.allow_tf32)):
            stack.enter_context(mock.patch.object(
                functional, name, rounded(getattr(functional, name), is_allowed)))
        yield


def ten_bits(x):
    """float32 with ten bits behind the point, as TF32 has them."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        return x
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1fff).view(torch.float32)
