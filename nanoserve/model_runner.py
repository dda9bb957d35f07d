"""One forward pass on one rank: from a `Step` to its tokens.

    Step ──write─► Batch ──model──► hidden ──rows that sample──► logits ──sample──► tokens
         integers        KV cache: read and written                        stay on the device

The runner owns device memory: the weights, the KV cache in the memory that they leave, and the
buffers of steps.

Invariants: only the runner touches KV bytes, and `launch` never waits for the device. It queues a
step and the copy of its tokens to the host; the engine waits for these in `fetch`. With overlap the
next step n+1 is queued before. The host does not know its input tokens yet, so step n+1 reads them
from `last_tokens`, on the device:

    host     prepare n+1 | launch | wait for n's tokens, update, prepare n+2 | launch | ...
    device   ...... step n .......►| tokens of n ►| ...... step n+1 .........►| tokens of n+1 ►|

**One forward on all ranks.** With tensor parallelism every rank runs the same `run`, each with its
share of the weights; only rank 0 gets logits and chooses tokens (parallel.py).

On a GPU a step of nothing but decodes is a replay of a CUDA graph (graphs.py). Not known here: the
queue, text, users; a second network, which drafts (nanoserve_extras/base/runner.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanoserve import device
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.config import EngineConfig
from nanoserve.controls import Constraints
from nanoserve.graphs import CudaGraph, Recorder
from nanoserve.layers import Placement
from nanoserve.loader import load
from nanoserve.model import Decoder, KVCache
from nanoserve.model_config import ModelConfig
from nanoserve.parallel import Ranks
from nanoserve.sampler import SamplerOutput, SamplingInputs, choose_plain, sample
from nanoserve.self_test import load_backend
from nanoserve.sequence import Step


@dataclass(frozen=True)
class RankParts:
    """What every rank gets in addition to config and checkpoint. `Extra.prepare` adds to it."""

    replaced: tuple[str, ...] = ()  # functions taken from `ops`: self_test.py
    num_drafts: int = 0  # the most that a step may guess for a row
    # Sections of the batch that an extra fills: in every step (True), or in some.
    sections: dict[str, bool] = field(default_factory=dict)
    layers: dict[str, Callable] = field(default_factory=dict)  # entries of `Placement`
    constraints: Constraints = field(default_factory=Constraints)  # rank 0's sampler reads them


class ModelRunner:
    """Weights, KV cache and buffers of one rank, on its device.

    config: resolved, device and dtype included. folder: the checkpoint's. graph_class: records
    decode steps; on a CPU, tests pass a stand-in.
    """

    recorder = Recorder  # makes the recordings of decode steps

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path,
                 ranks: Ranks | None = None, parts: RankParts | None = None,
                 graph_class: type = CudaGraph):
        self.config = config
        self.model_config = model_config
        self.folder = folder
        self.ranks = ranks or Ranks()
        self.parts = parts or RankParts()
        self.graph_class = graph_class
        local_rank = self.ranks.local_rank if self.ranks.size > 1 else None
        self.device = device.take_device(config.device, local_rank)
        self.dtype = getattr(torch, config.dtype)
        self.ops = load_backend(config.kernels, self.parts.replaced)
        empty = device.zeros if self.device.type == "cpu" else torch.empty
        self.placement = Placement(self.dtype, self.device, self.ranks, self.ops, empty,
                                   config.expert_parallel, **self.parts.layers)
        self.model: torch.nn.Module | None = None
        self.kv_cache: KVCache = []
        # The buffers of steps, each row's newest sample, and recordings of decodes: see `start`.
        self.builder = self.last_tokens = self.graphs = None
        with self.on_device():
            self.make_networks()

    def on_device(self):
        """Encloses what runs on a GPU. Each thread has a current GPU of its own, which is GPU 0 in
        any thread but the one that made the engine (a server's, for example)."""
        return device.current(self.device)

    def make_networks(self) -> None:
        if self.config.kv_cache_dtype == "int8" and self.model_config.qkv_bias:
            raise ValueError("kv_cache_dtype='int8': biases like those of this model may make keys "
                             "too wide for 8 bits, and nanoserve_extras, which finds out in which "
                             "layers they do, is not there: leave it out")
        self.model = Decoder(self.model_config, self.placement)
        load(self.model, self.folder, self.config.load_format, self.config.seed)

    # ---------------------------------------------------------------- memory

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head_dim) of each layer's cache."""
        return self.model.kv_shapes

    def cache_dtype(self, layer: int) -> torch.dtype:
        """layer: index in `kv_shapes`."""
        return torch.int8 if self.config.kv_cache_dtype == "int8" else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, for the KV heads of this rank."""
        num_blocks = 16  # a backend may pad several small blocks to one larger unit
        caches = self._new_caches(num_blocks, torch.device("meta"))
        return sum(k.nbytes + v.nbytes for k, v in caches) // num_blocks

    def _new_caches(self, num_blocks: int, where: torch.device) -> KVCache:
        """The caches of all layers: one block table serves all of them."""
        return [self.ops.new_cache(num_blocks, self.config.block_size, heads, head_dim,
                                   self.cache_dtype(i), where)
                for i, (heads, head_dim) in enumerate(self.kv_shapes)]

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for on every rank; none is allocated yet. Raises
        `ValueError` with the numbers when there is room for none."""
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        block_bytes = self.block_bytes
        with self.on_device():
            budget, reason = self.memory_budget(block_bytes)
        # A rank whose layers keep states and no KV has room for any number of blocks.
        num_blocks = self.ranks.least(budget // block_bytes if block_bytes else 2 ** 31 - 1)
        if num_blocks < 1:
            raise ValueError(
                f"no room for one KV block: {block_bytes:,} bytes are needed, {budget:,} are to be "
                f"had ({reason}): raise kv_cache_memory_bytes or gpu_memory_utilization, lower "
                "block_size, or end other programs that use the memory")
        return num_blocks

    def memory_budget(self, block_bytes: int) -> tuple[int, str]:
        """Bytes for the KV cache on this rank, and how they were computed."""
        config = self.config
        if config.kv_cache_memory_bytes is not None:
            if self.device.type == "cpu":
                device.check_cpu_has(config.kv_cache_memory_bytes, self.ranks.local_size)
            return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if self.device.type == "cuda":
            budget, reason = device.gpu_budget(config, self.device, self.run_largest_step)
        else:
            budget, reason = device.cpu_budget(self.ranks.local_size)
        # Every sequence at its full length; a small engine keeps room to remember prefixes.
        num_tokens = max(config.max_num_seqs * config.max_model_len, device.MIN_CACHE_TOKENS)
        return min(budget, -(-num_tokens // config.block_size) * block_bytes), reason

    def run_largest_step(self) -> None:
        """Take, for a moment, all the memory that a step can take in addition to the KV cache."""
        self.allocate_kv_cache(1, self.config.max_model_len)
        for step in self.largest_steps():
            self.fetch(self.launch(step))
        self.kv_cache, self.builder, self.last_tokens = [], None, None

    def largest_steps(self) -> list[Step]:
        return [device.largest_step(self.config, self.parts.num_drafts)]

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache and the buffers for steps, and record graphs in the memory that is left
        over. After this, steps may come."""
        with self.on_device():
            self.allocate_kv_cache(num_blocks, max_model_len)
            if self.wants_graphs:
                self.record()

    def record(self) -> None:
        """Record graphs. If that fails, `graphs` stays None and a line on standard error says so.
        All ranks record together."""
        recorder = self.recorder(self.builder, self._states, self._choose, self.graph_class,
                                 self.ranks)
        self.graphs = recorder.record()

    @property
    def wants_graphs(self) -> bool:
        """Whether decode steps are recorded. Not with plain torch operators, which read lengths on
        the host. Extras that run kernels of their own set `enforce_eager`: a graph replays the same
        kernels in every step."""
        can_be_recorded = self.config.kernels == "triton" and "graph" not in self.parts.replaced
        has_recorder = self.config.on_gpu or self.graph_class is not CudaGraph
        return can_be_recorded and has_recorder and not self.config.enforce_eager

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, zeroed, and the buffers for steps with sequences of `max_model_len`."""
        config = self.config
        with device.memory_for(
                f"a KV cache of {num_blocks:,} blocks of {self.block_bytes:,} bytes: lower "
                "kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"):
            self.kv_cache = self._new_caches(num_blocks, self.device)
        num_rows = config.max_num_seqs
        num_tokens = config.max_num_batched_tokens
        with device.memory_for("what steps are written into: lower max_num_batched_tokens="
                               f"{num_tokens:,} or max_num_seqs={num_rows:,}"):
            self.builder = BatchBuilder(num_rows, num_tokens, max_model_len, config.block_size,
                                        self.device, num_drafts=self.parts.num_drafts,
                                        extra=self.parts.sections,
                                        staged=self.wants_graphs, num_buffers=config.steps_at_once)
        # One entry more than there are rows: samples of padding rows are written to it.
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)

    @property
    def window(self) -> int | None:
        """How many keys a query sees at most, None if a layer has no such limit."""
        return self.model.config.window

    # ------------------------------------------------------------------ step

    @torch.inference_mode()
    def launch(self, step: Step) -> SamplerOutput:
        """Queue one step. Returns a token for each of `step.samples()`, and the logprobs that are
        wanted, on their way to the host; with a pooler, its results."""
        size = None if self.graphs is None else self.graphs.size_for(step)
        message = self.builder.take_buffer()
        self.builder.write(step, message, size)
        with self.on_device():
            with self.ranks.together():
                self.ranks.broadcast_message(message)
                output = self.run(message, step)
            return output.to_host()

    def run(self, message: torch.Tensor, step: Step | None = None) -> SamplerOutput:
        """Compute a written step, on every rank. step: the `Step` that was written, on rank 0; None
        on the other ranks, which return placeholders for rank 0's tokens."""
        return self.compute(self.builder.read(message), step)

    def compute(self, batch: Batch, step: Step | None) -> SamplerOutput:
        if batch.graph:
            hidden, chosen = self.graphs.replay(batch)
        else:
            wanted = torch.cat((batch.logits_indices, batch.prompt_logprob_indices)).long()
            hidden = self.forward(batch, wanted)
            chosen = None
        return self.finish(hidden, batch, step, chosen)

    def finish(self, hidden: torch.Tensor, batch: Batch, step: Step | None,
               chosen: torch.Tensor | None) -> SamplerOutput:
        """From hidden states to tokens. chosen: the tokens, if a graph has chosen them."""
        output = sample(hidden, SamplingInputs.of(step, batch, self.parts.constraints), batch,
                        self.network_of(batch).compute_logits, self.ops, chosen)
        if not output.is_kept and (self.config.async_scheduling or batch.network):
            self._keep(batch, output.token_ids)
        if batch.graph and step is not None:
            output.token_ids = output.token_ids[:len(step.samples())]  # without those of padding
        return output

    def forward(self, batch: Batch, wanted: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of the wanted tokens; None: of all."""
        ids = batch.input_ids
        if batch.num_unknown:  # the newest sample of row r takes the place of -1 - r
            ids = torch.where(ids < 0, self.last_tokens[(-1 - ids).clamp(min=0)], ids)
        network = self.network_of(batch)
        return network(ids, batch.positions, self.cache_of(batch), batch, wanted)

    def network_of(self, batch: Batch) -> torch.nn.Module:
        return self.model

    def cache_of(self, batch: Batch) -> KVCache:
        return self.kv_cache

    def _states(self, batch: Batch) -> torch.Tensor:
        """What graphs record first: the hidden states of all tokens, since each token has a sample.
        If a row may have several tokens, samples are in another order than tokens."""
        return self.forward(batch, batch.logits_indices.long() if batch.is_padded else None)

    def _choose(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What graphs record second: the choice of tokens, without edits. hidden: of `_states`."""
        token_ids = self.choose(hidden, batch)
        if token_ids is None:  # on a rank above 0: a placeholder, until `_keep` brings rank 0's
            token_ids = batch.logits_indices.long()
        self._keep(batch, token_ids)
        return token_ids

    def choose(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """A token for each row, on rank 0; None on the others."""
        logits = self.network_of(batch).compute_logits(hidden)
        return None if logits is None else choose_plain(logits, batch, self.ops)

    def _keep(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Keep sampled tokens on the device: the next step's input, not yet known to the host. A
        row without a token goes on with token 0 until the host has ended it."""
        self.ranks.broadcast(token_ids)
        self.last_tokens[batch.sample_rows] = token_ids.clamp(min=0)

    def fetch(self, output: SamplerOutput) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for a launched step; see `SamplerOutput.tolist`."""
        with self.on_device():
            found = output.tolist()
        self.ranks.raise_if_broken()  # another rank's death spoils what this one's device gives
        return found

    def synchronize(self) -> None:
        """Wait until the device is idle, before buffers that a lost step may read are reused."""
        if self.device.type == "cuda" and self.ranks.broken is None:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Free all memory of this rank; on rank 0, end the other ranks, too."""
        self.synchronize()
        self.model, self.kv_cache = None, []
        self.graphs = self.builder = self.last_tokens = None
        self.ranks.close()
