"""CUDA graphs without CUDA: steps are recorded by a stand-in and replayed, kernels and all.

The stand-in keeps what a graph keeps: which operators and kernels ran, on which memory, with which
Python numbers; and it refuses to record what would wait for the device. A replay runs them again
into the same memory. So a number that was frozen, an address that moved, a row of padding that
leaks and a buffer that is stale all show as wrong text. Kernels run in Triton's interpreter.
"""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from stand_ins import waits_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nanoserve import LLM
from nanoserve.graphs import DecodeGraphs, Size
from nanoserve.parallel import Ranks
from nanoserve.sampler import SamplerOutput


class Recorder(TorchDispatchMode):
    """Writes down operators with the very tensors they got, and launches of kernels."""

    def __init__(self):
        super().__init__()
        self.calls, self.quiet = [], False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if not self.quiet:
            if name := waits_for(op, args, kwargs):
                raise RuntimeError(f"{name} waits for the device")
            self.calls.append((op, args, kwargs, out))
        return out

    def launch(self, run, *args, **kwargs):
        """A kernel, or a collective: it is recorded as a whole, not what it is made of here."""
        self.quiet = True
        try:
            run(*args, **kwargs)
        finally:
            self.quiet = False
        self.calls.append((run, args, kwargs, None))


class RecordedGraph:
    """Stands in for `CudaGraph`."""

    here = threading.local()  # recorder: while one records: what is no operator goes there

    def __init__(self, like=None):
        self.calls, self.output = [], None

    @classmethod
    def rehearse(cls, function) -> None:
        cls.watch(function)

    def capture(self, function) -> None:
        self.calls, self.output = self.watch(function)

    @classmethod
    def watch(cls, function) -> tuple[list, torch.Tensor]:
        with Recorder() as recorder:
            cls.here.recorder = recorder
            try:
                output = function()
            finally:
                cls.here.recorder = None
        return recorder.calls, output

    def replay(self):
        """Views already lie where they lay; everything else is computed into the same memory."""
        for function, args, kwargs, out in self.calls:
            new = function(*args, **kwargs)
            if out is not None:
                tree_map(_overwrite, out, new)
        return self.output


def _overwrite(old, new):
    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
        old.copy_(new)


def record_steps(monkeypatch) -> list[Size]:
    """Engines record decode steps with the stand-in. Two splits for up to two rows."""
    kernels = pytest.importorskip("nanoserve.triton_attention")
    interpreted, lock = type(kernels._attention_kernel), threading.Lock()

    def recording(run):
        def record(*args, **kwargs):
            recorder = getattr(RecordedGraph.here, "recorder", None)
            call = run if recorder is None else partial(recorder.launch, run)
            return call(*args, **kwargs)
        return record

    def one_by_one(*args, run=interpreted.run, **kwargs):  # ranks may be threads
        with lock:
            return run(*args, **kwargs)

    monkeypatch.setattr(interpreted, "run", recording(one_by_one))
    monkeypatch.setattr(Ranks, "_run", recording(Ranks._run))
    monkeypatch.setattr(kernels, "_num_splits", lambda num_rows, *shapes: 1 if num_rows > 2 else 2)
    monkeypatch.setattr(kernels, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(LLM, "make_runner", staticmethod(partial(
        LLM.make_runner, graph_class=RecordedGraph)))
    # The copy to the host that is queued right behind a step, before the next replay overwrites it.
    monkeypatch.setattr(SamplerOutput, "to_host", lambda self: replace(
        self, token_ids=self.token_ids.clone()))
    replayed = []
    replay = DecodeGraphs.replay
    monkeypatch.setattr(DecodeGraphs, "replay", lambda self, batch: replayed.append(
        Size(*batch.graph)) or replay(self, batch))
    return replayed
