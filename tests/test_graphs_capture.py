"""`CudaGraph` against what torch and a driver do with recordings, streams and memory.

The GPUs are stand-ins (stand_ins.py), which behave as torch's source says.
"""

import gc

import pytest
import torch
from stand_ins import Gpus

from nanoserve.graphs import CudaGraph


@pytest.fixture
def gpus():
    with Gpus() as gpus:
        yield gpus


@torch.library.custom_op("stand_ins::reads_back", mutates_args=())
def reads_back(x: torch.Tensor) -> torch.Tensor:
    """Its name doesn't say that it waits."""
    torch.cuda.synchronize()
    return x.clone()


def test_each_gpu_records_on_a_stream_of_its_own(gpus):
    """Two engines of one process: torch's only stream for recordings is on the GPU that recorded
    first, so the second engine's kernels were launched on the first one's GPU."""
    for device in (0, 1):
        with gpus.on(device):
            launched, first = [], CudaGraph()
            for graph in first, CudaGraph(first):
                graph.capture(lambda launched=launched: launched.append(gpus.current))
                assert graph.stream is first.stream, "memory is only shared within a stream"
            assert launched == [device] * 2
            graph.replay()
    assert not gpus.under_way
    del first, graph
    gc.collect()
    assert not +gpus.uses


@pytest.mark.parametrize("where", ["begin", "end", "nothing", "instantiate", "wait", "Python"])
def test_a_recording_that_fails_gives_its_memory_back(gpus, where):
    """torch tells its allocator of no end where the driver says no: the memory stayed taken for
    ever, and the cache was never emptied again. What was recorded before stays whole."""
    before, graph = CudaGraph(), None
    before.capture(lambda: torch.ones(1))

    def fail() -> torch.Tensor:
        if where == "wait":
            reads_back(torch.ones(1))
        elif where == "Python":
            raise ValueError("a bug")
        return torch.ones(1)

    own, graph = torch.cuda.current_stream(), CudaGraph(before)
    gpus.fails_at = where
    with pytest.raises((RuntimeError, ValueError)):
        graph.capture(fail)
    assert torch.cuda.current_stream() is own and gpus.current == 0
    del graph
    gc.collect()
    assert not gpus.under_way and [*(+gpus.uses).values()] == [1], "only the first one's"
    gpus.fails_at = None
    again = CudaGraph(before)
    again.capture(lambda: torch.ones(1))
    assert again.replay() == 1 == before.replay()


def test_what_waits_is_named_before_a_recording_begins(gpus):
    """And the switch, which is the whole process's, is as it was, also where somebody else has
    set it."""
    for mode in (0, 1):
        gpus.mode = mode
        CudaGraph.rehearse(lambda: torch.ones(1) + 1)
        with pytest.raises(RuntimeError, match="^stand_ins::reads_back waits for the device$"):
            CudaGraph.rehearse(lambda: reads_back(torch.ones(1)))
        with pytest.raises(RuntimeError, match="shape"):  # an error of another kind is kept
            CudaGraph.rehearse(lambda: torch.ones(2).view(3))
        assert gpus.mode == mode and not gpus.under_way
