"""CUDA graphs: a decode step is recorded once for each batch size, and then replayed.

A decode step of a small model is hundreds of short kernels, which take longer to start one by one
from Python than to run; a graph starts them all at once. The price is that nothing in a graph can
change but the contents of memory:

    recorded                    replayed, two steps later
    input_ids   at 0x7f00       the same address: the new ids must have been put there
    grid (8 rows)               8 rows again, so a batch of 5 is padded to 8
    seq_len 1024, an int        1024 for ever (transformers #45323): such numbers are read from
                                memory by the kernels, and never handed over by the host

So batches come in sizes that are recorded beforehand, up to the largest there can be (nano-vllm's
stopped below it, and the first full batch crashed), and each tensor of a batch is at the same
address for the same size. Only steps of decodes are recorded, with the LM head and the choice of
the tokens. In a step with prompt tokens the kernels run long enough to hide the launches.

A recording keeps the memory of what it returns. So it returns hidden states and tokens, and no
logits: those of 20 sizes and 152,000 tokens would be 0.7 GB. A step whose rows ask for edits or
logprobs multiplies with the LM head once more.

Invariants: a replay gives what the recorded function would have given, bit for bit. A recording
that fails never ends an engine, whose steps then run one by one.

The model runner hands in the function that is recorded, and, for a machine without a GPU, a class
that can stand in for `CudaGraph`. Piecewise graphs with attention left out could record prompts as
well, and would take many more launches for decodes.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from textwrap import shorten

import torch
from tqdm import tqdm

from nanoserve.batch import Batch, BatchBuilder
from nanoserve.sequence import Step

Recorded = tuple[torch.Tensor, ...]  # the function's results: the same memory at every replay


class CudaGraph:
    """One recording. Several may share `memory`: only one of them runs at a time."""

    def __init__(self, memory=None):
        self.graph, self.shared = torch.cuda.CUDAGraph(), memory
        self.outputs: Recorded = ()

    def capture(self, function: Callable[[], Recorded]) -> None:
        # "thread_local": another thread's engine may allocate meanwhile, which else ends both.
        # Where recording fails, torch leaves its stream the current one: the outer `with` does not.
        with (torch.cuda.stream(torch.cuda.current_stream()),
              torch.cuda.graph(self.graph, pool=self.shared, capture_error_mode="thread_local")):
            self.outputs = function()

    def replay(self) -> Recorded:
        self.graph.replay()
        return self.outputs

    def memory(self):
        return self.graph.pool()


def recorded(builder: BatchBuilder, run: Callable[[Batch], Recorded],
             graph_class: type) -> "DecodeGraphs | None":
    """`DecodeGraphs` of the same arguments; None, and a sentence on standard error, where recording
    fails. What was recorded by then gives its memory back. Raises what a broken device raises."""
    try:
        return DecodeGraphs(builder, run, graph_class)
    except Exception as error:  # a recording that ends early may have an error of its own
        remedy, why = "", f"{type(error).__name__}: {shorten(str(error), 200)}"
        if torch.OutOfMemoryError in (type(error), type(error.__context__)):
            remedy = ("; for more memory beside the KV cache lower gpu_memory_utilization (or "
                      "kv_cache_memory_bytes, num_gpu_blocks_override) or max_num_seqs")
            why = "memory ran out"
    if graph_class is CudaGraph:  # behind the `except`, whose error holds the recordings
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    tqdm.write(f"nanoserve: CUDA graphs can't be recorded ({why}): each kernel of a step is "
               f"launched, which is slower{remedy}. enforce_eager=True asks for that",
               file=sys.stderr)
    return None


class DecodeGraphs:
    """The recordings of a step of decodes, by its number of rows.

    builder: makes the batches. run: what is recorded; nothing in it may depend on what the host
    knows of the batch, but for its size. graph_class: `CudaGraph`, or a stand-in. Raises whatever
    ends a recording: see `recorded`.
    """

    @torch.inference_mode()
    def __init__(self, builder: BatchBuilder, run: Callable[[Batch], Recorded], graph_class: type):
        max_num_seqs, device = len(builder.tables), builder.device_buffer.device
        self.tables = torch.zeros(builder.tables.shape, dtype=torch.int32, device=device)
        self.sizes = graph_sizes(max_num_seqs)
        self.graphs: dict[int, CudaGraph] = {}
        start, memory = time.perf_counter(), None
        on_gpu = graph_class is CudaGraph
        if on_gpu:
            torch.cuda.empty_cache()  # as each recording does: its gain must not count below
        free = torch.cuda.mem_get_info()[0] if on_gpu else 0
        # The largest first: the smaller ones fit into the memory that it took.
        for size in tqdm(self.sizes[::-1], desc="Recording CUDA graphs", unit="graph",
                         disable=None, leave=False):  # on a terminal; then the line below
            batch = self._fix_tables(builder.build(Step(0), size))
            run(batch)  # once for real: kernels are compiled, and libraries take what they need
            graph = self.graphs[size] = graph_class(memory)
            graph.capture(lambda batch=batch: run(batch))
            memory = memory or graph.memory()
        self.seconds = time.perf_counter() - start
        self.memory = free - torch.cuda.mem_get_info()[0] if on_gpu else 0
        tqdm.write(f"nanoserve: {len(self.sizes)} CUDA graphs for batches of 1 to {max_num_seqs} "
                   f"took {self.seconds:.1f} s and {self.memory / 2 ** 20:,.0f} MB",
                   file=sys.stderr)

    def _fix_tables(self, batch: Batch) -> Batch:
        """The same batch with block tables whose address and stride are always the same, too."""
        num_rows, width = batch.block_tables.shape
        fixed = self.tables[:num_rows]
        fixed[:, :width].copy_(batch.block_tables)
        return replace(batch, block_tables=fixed)

    def size_for(self, step: Step) -> int | None:
        """What the step is padded to: the smallest recorded size that holds its rows, 16 for 9 of
        them. None where more is computed than one token for each of the rows that sample."""
        num_rows = len(step.sampling)
        if num_rows == 0 or num_rows < step.num_tokens or step.network:
            return None
        return next(size for size in self.sizes if size >= num_rows)

    def replay(self, batch: Batch) -> Recorded:
        """batch: padded to a recorded size."""
        self._fix_tables(batch)
        return self.graphs[len(batch.seq_lens)].replay()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16th, later every 64th, and the largest itself, whatever it is.

    Padding costs little, because attention skips it and weights are read once anyway, while each
    recording takes time and memory. 20 recordings cover 256 sequences.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
