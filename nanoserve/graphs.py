"""CUDA graphs: a step of decodes is recorded once for each batch size, and then replayed.

A decode step of a small model is hundreds of short kernels, which take longer to start one by one
from Python than to run; a graph starts them all at once. The price is that nothing in a graph can
change but the contents of memory:

    recorded                    replayed, two steps later
    input_ids   at 0x7f00       the same address: the new ids must have been put there
    grid (8 rows)               8 rows again, so a batch of 5 is padded to 8
    seq_len 1024, an int        always 1024 (transformers #45323): kernels read such numbers from
                                memory, and the host never passes them

So batches come in sizes that are recorded beforehand, up to the largest there can be (nano-vllm's
stopped below it, and the first full batch crashed), and each tensor of a batch is at the same
address for the same size. Only steps that sample after each of their tokens are recorded. In a
step with prompt tokens the kernels run long enough to hide the launches.

    layers ──► hidden states ──► LM head, choice ──► tokens     two recordings, one after the other
                    └──► LM head ──► edits, logprobs, choice    where a row asks for them: no replay

A recording keeps the memory of what it returns. So no logits are returned: those of 20 sizes and a
vocabulary of 152,000 tokens would be 1.3 GB.

Invariants: a replay gives what the recorded function would have given, bit for bit. A recording
that fails never ends the engine, which then launches the kernels of each step one by one.

The model runner hands in the functions that are recorded, and tests on a machine without a GPU a
class that stands in for `CudaGraph`. Road not taken: piecewise graphs, with attention left out,
could record prompts as well, and would take many more launches for decodes.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from textwrap import shorten
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from nanoserve.batch import Batch, BatchBuilder
from nanoserve.sequence import Step

Layers = Callable[[Batch], torch.Tensor]  # gives the states of the tokens that sample
Choose = Callable[[torch.Tensor, Batch], torch.Tensor]  # turns them into tokens


class Size(NamedTuple):
    """What a recording is for."""

    rows: int
    tokens: int
    # Steps that extras bring, whose recordings are made in nanoserve_extras/base/graphs.py:
    drafts: bool = False  # False: one token a row; True: a row may have any number of the tokens
    network: int = 0
    extra: bool = False  # whether the batch has the sections that extras fill


class CudaGraph:
    """One recording. like: another one, whose stream and memory this one shares: only one of them
    runs at a time."""

    def __init__(self, like: "CudaGraph | None" = None):
        self.graph = torch.cuda.CUDAGraph()
        # torch's own stream for recordings is on the GPU that was the first to record.
        self.stream = torch.cuda.Stream() if like is None else like.stream
        self.pool = torch.cuda.graph_pool_handle() if like is None else like.pool
        self.output: torch.Tensor | None = None  # every replay writes to this memory

    @staticmethod
    def rehearse(function: Callable[[], object]) -> None:
        """Run what will be recorded. Raises `RuntimeError` with the name of an operator that waits
        for the device. Meanwhile other threads' operators must not wait, either: torch has one
        switch for all threads."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with NamesWhatWaits():
                function()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, function: Callable[[], torch.Tensor]) -> None:
        # If it fails, torch leaves its own stream the current one. The outer `with` restores ours.
        with torch.cuda.stream(torch.cuda.current_stream()):
            try:
                # "thread_local": else an allocation by another thread's engine fails, and this, too
                with torch.cuda.graph(self.graph, self.pool, self.stream, "thread_local"):
                    self.output = function()
            except Exception:
                self.give_back()
                raise

    def give_back(self) -> None:
        """After a failure: end the recording that torch believes to be running. Otherwise its
        memory is never freed, and torch does not empty its cache when memory runs short."""
        with suppress(RuntimeError):
            self.graph.pool()  # it raises if torch has not ended the recording
            return
        pool = self.stream.device_index, self.pool
        for end in torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool:
            with suppress(RuntimeError):
                end(*pool)

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


class NamesWhatWaits(TorchDispatchMode):
    """Adds the operator's name to torch's error, which says only that something waits."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        try:
            return operator(*args, **kwargs or {})
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            raise RuntimeError(f"{operator.name()} waits for the device") from error


class DecodeGraphs:
    """The recordings of a step of decodes, by its size.

    sizes: from the fewest tokens to the most. tables: memory for the block tables of any of them.
    """

    def __init__(self, sizes: list[Size], tables: torch.Tensor):
        self.sizes, self.tables = sizes, tables
        # One of the layers, one of the choice; with several ranks one for greedy rows, too.
        self.graphs: dict[Size, tuple[CudaGraph, ...]] = {}
        self.found: dict[tuple, Size | None] = {}  # see `size_for`
        self.seconds, self.memory = 0.0, 0  # the time and the bytes that recording took

    def fix(self, batch: Batch, size: Size) -> Batch:
        """The batch with numbers on the host that suit any batch of this size, and with block
        tables at the address and with the stride that every such batch has."""
        width, fixed = batch.block_tables.shape[1], self.tables[:size.rows]
        fixed[:, :width].copy_(batch.block_tables)
        return replace(batch, block_tables=fixed, is_padded=size.drafts, num_unknown=1,
                       num_decodes=0 if size.drafts else size.rows)

    def size_for(self, step: Step) -> Size | None:
        """What the step is padded to: the smallest recorded size that holds its rows, 16 for 9 of
        them, and its tokens. None if it computes tokens after which none is sampled, or if there
        is no such size."""
        rows, tokens = len(step.num_new_tokens), step.num_tokens
        if tokens == 0 or tokens > len(step.samples()):
            return None
        key = rows, tokens, step.network, bool(step.sections)
        if key not in self.found:
            self.found[key] = self.smallest(*key)
        return self.found[key]

    def smallest(self, rows: int, tokens: int, network: int, extra: bool) -> Size | None:
        kind = tokens > rows, network, extra
        return next((size for size in self.sizes if size[2:] == kind
                     and size.rows >= rows and size.tokens >= tokens), None)

    def replay(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states, and the tokens, None if a row has controls. batch: padded."""
        self.fix(batch, Size(*batch.graph))
        layers, *choices = self.graphs[batch.graph]
        states = layers.replay()
        if batch.has_controls:
            return states, None
        choice = choices[-1] if batch.is_greedy else choices[0]
        return states, choice.replay()


class Recorder:
    """Records steps, the largest first. All ranks record the same steps at the same time: a rank
    that fails alone would leave the others waiting in a collective.

    builder: makes the batches. layers, choose: what is recorded; nothing in it may depend on what
    the host knows of the batch, but for its size. graph_class: `CudaGraph`, or a stand-in. ranks:
    a `Ranks`.
    """

    def __init__(self, builder: BatchBuilder, layers: Layers, choose: Choose, graph_class: type,
                 ranks):
        self.builder, self.layers, self.choose = builder, layers, choose
        self.graph_class, self.ranks = graph_class, ranks
        self.first: CudaGraph | None = None  # all others share its memory

    def record(self) -> DecodeGraphs | None:
        """Record all sizes. If that fails, say so on standard error, free the recordings made so
        far, and return None. Raises what a broken device raises, and `RuntimeError` if the ranks
        can't go on."""
        try:
            return self.record_all()
        except Exception as error:  # a recording that ends early may have an error of its own
            self.ranks.raise_if_broken()
            remedy, why = "", f"{type(error).__name__}: {shorten(str(error), 200)}"
            if torch.OutOfMemoryError in (type(error), type(error.__context__)):
                remedy = ("; for more memory beside the KV cache lower gpu_memory_utilization (or "
                          "kv_cache_memory_bytes, num_gpu_blocks_override) or max_num_seqs")
                why = "memory ran out"
        if self.graph_class is CudaGraph:  # after the `except`: its error holds the recordings
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        tqdm.write(f"nanoserve: CUDA graphs can't be recorded ({why}): each kernel of a step is "
                   f"launched, which is slower{remedy}. enforce_eager=True asks for that",
                   file=sys.stderr)
        return None

    @torch.inference_mode()
    def record_all(self) -> DecodeGraphs:
        """Record all sizes; an error that ends a recording is raised."""
        tables = torch.zeros(self.builder.tables.shape, dtype=torch.int32,
                             device=self.builder.device_buffer.device)
        graphs = DecodeGraphs(self.sizes(), tables)
        start, free, is_first = time.perf_counter(), self.free_memory(), self.ranks.rank == 0
        # The largest first: the smaller ones fit into the memory that it took.
        for size in tqdm(graphs.sizes[::-1], desc="Recording CUDA graphs", unit="graph",
                         disable=None if is_first else True, leave=False):
            batch = graphs.fix(self.builder.build(self.padding(size), size), size)
            graphs.graphs[size] = self.record_size(batch, size)
        self.try_out(graphs)
        graphs.seconds = time.perf_counter() - start
        graphs.memory = free - self.free_memory()
        if is_first:
            tqdm.write(f"nanoserve: CUDA graphs for {len(graphs.sizes)} sizes of batches of 1 to "
                       f"{len(tables)} took {graphs.seconds:.1f} s and "
                       f"{graphs.memory / 2 ** 20:,.0f} MB", file=sys.stderr)
        return graphs

    def sizes(self) -> list[Size]:
        """From the fewest tokens to the most."""
        return [Size(rows, rows) for rows in graph_sizes(len(self.builder.tables))]

    def try_out(self, graphs: DecodeGraphs) -> None:
        """Raise `RuntimeError` if a replay is wrong. A `Decoder` needs no such check."""

    def free_memory(self) -> int:
        """Bytes that are free on the GPU. Without one there is nothing to count."""
        if self.graph_class is not CudaGraph:
            return 0
        torch.cuda.empty_cache()  # each recording does so, and its gain must not count
        return torch.cuda.mem_get_info()[0]

    def padding(self, size: Size) -> Step:
        """A step that has nothing to do, so that its batch is padding alone."""
        return Step(0)

    def record_size(self, batch: Batch, size: Size) -> tuple[CudaGraph, ...]:
        """A recording of the layers, and one for each way to choose."""
        ways = [batch]
        if self.ranks.size > 1 and not size.network:
            ways = [replace(batch, is_greedy=False), batch]
        self.run_once(batch, ways)
        try:
            graphs = self.capture(batch, ways)
        except Exception:
            self.ranks.least(0)
            raise
        if not self.ranks.least(1):  # alone, this rank would wait for the others in a collective
            raise RuntimeError("another rank can't record it")
        return graphs

    def run_once(self, batch: Batch, ways: list[Batch]) -> None:
        """Run once without recording: kernels are compiled, libraries take memory, and most
        operators that can't be recorded are found before a recording begins."""
        def step() -> None:
            states = self.layers(batch)
            for way in ways:
                self.choose(states, way)

        try:
            self.graph_class.rehearse(step)
        except Exception:
            end_alike(self.ranks, True)
            raise
        end_alike(self.ranks, False)

    def capture(self, batch: Batch, ways: list[Batch]) -> tuple[CudaGraph, ...]:
        first = self.first = self.graph_class(self.first)
        first.capture(lambda: self.states(batch))
        choices = [self.graph_class(first) for _ in ways]
        for choice, way in zip(choices, ways, strict=True):
            choice.capture(lambda way=way: self.choose(first.output, way))
        return first, *choices

    def states(self, batch: Batch) -> torch.Tensor:
        """What the first recording returns, whose memory it keeps."""
        return self.layers(batch)


def end_alike(ranks, failed: bool) -> None:
    """Raises `RuntimeError`, and ends the ranks, if a run has failed on some ranks and not on all:
    the other ranks may be blocked in a collective, and would mistake the next one for it."""
    first_failed = ranks.least(ranks.rank if failed else ranks.size)  # size: no rank
    first_fine = ranks.least(ranks.size if failed else ranks.rank)
    if first_failed < ranks.size and first_fine < ranks.size:
        with ranks.together():
            raise RuntimeError(f"rank {first_failed} failed in front of a recording")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16th, later every 64th, and always the largest itself.

    Padding costs little, because attention skips it and weights are read once anyway, while each
    recording takes time and memory. 20 recordings cover 256 sequences.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
