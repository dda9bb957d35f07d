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

On a GPU a step of nothing but decodes is a replay of a CUDA graph (graphs.py). A second
network, which drafts for the first, is network 1 of an ordinary greedy step; its layers' caches
come after the first one's. Not known here: the queue, text, users.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from nanoserve import device
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.config import EngineConfig
from nanoserve.controls import Constraints
from nanoserve.graphs import CudaGraph, Recorder
from nanoserve.layers import Placement
from nanoserve.loader import load_dummy_weights, load_weights, stored_tensors
from nanoserve.model import Decoder, KVCache
from nanoserve.model_config import ModelConfig
from nanoserve.parallel import SOLO, Ranks
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
    # What a rank above 0 does with a message that is no step, by the message's first number.
    calls: dict[int, Callable[["ModelRunner", torch.Tensor], None]] = field(default_factory=dict)


class ModelRunner:
    """Weights, KV cache and buffers of one rank, on its device.

    config: resolved, device and dtype included. folder: the checkpoint's. graph_class: records
    decode steps; on a CPU, tests pass a stand-in.
    """

    unrounded: list[int] | None = None  # caches that stay in `dtype`, if others are int8
    recorder = Recorder  # makes the recordings of decode steps

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path,
                 ranks: Ranks = SOLO, parts: RankParts | None = None,
                 graph_class: type = CudaGraph):
        self.config, self.model_config, self.folder = config, model_config, folder
        self.ranks, self.parts, self.graph_class = ranks, parts or RankParts(), graph_class
        local_rank = ranks.local_rank if ranks.size > 1 else None
        self.device = device.take_device(config.device, local_rank)
        self.dtype = getattr(torch, config.dtype)
        self.ops = load_backend(config.kernels, self.parts.replaced)
        empty = device.zeros if self.device.type == "cpu" else torch.empty
        self.placement = Placement(self.dtype, self.device, ranks, self.ops, empty,
                                   config.expert_parallel, **self.parts.layers)
        self.networks: list[nn.Module] = []  # the one that is served, and perhaps one that drafts
        self.model: nn.Module | None = None  # the first of them
        self.kv_cache: KVCache = []
        # The buffers of steps, each row's newest sample, and recordings of decodes: see `start`.
        self.builder = self.last_tokens = self.graphs = None
        with self.on_device():
            self.make_networks()

    def on_device(self) -> AbstractContextManager:
        """Encloses what runs on a GPU. Each thread has a current GPU of its own, which is GPU 0 in
        any thread but the one that made the engine (a server's, for example)."""
        return device.current(self.device)

    def make_networks(self) -> None:
        self.model = self.read(self.model_config, self.folder)
        self.networks = [self.model]
        self.note_caches()

    def read(self, model_config: ModelConfig, folder: Path) -> Decoder:
        """This rank's share of a network, with its weights."""
        model = Decoder(model_config, self.placement)
        if self.config.load_format == "dummy":
            load_dummy_weights(model, self.config.seed)
        else:
            load_weights(model, stored_tensors(folder, self.config.load_format), folder)
        return model

    def note_caches(self) -> None:
        """What the caches of the networks' layers look like."""
        self.kv_shapes = [shape for network in self.networks for shape in network.kv_shapes]
        if self.config.kv_cache_dtype == "int8" and self.unrounded is None:
            self.unrounded = self.model.too_wide()  # once: a cache keeps its layout

    # ---------------------------------------------------------------- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, for the KV heads of this rank."""
        num_blocks = 16  # a backend may pad several small blocks to one larger unit
        caches = self._new_caches(num_blocks, torch.device("meta"))
        return sum(k.nbytes + v.nbytes for k, v in caches) // num_blocks

    def _new_caches(self, num_blocks: int, where: torch.device) -> KVCache:
        """The caches of all networks' layers: one block table serves all of them."""
        kept = range(len(self.kv_shapes)) if self.unrounded is None else self.unrounded
        return [self.ops.new_cache(num_blocks, self.config.block_size, heads, head_dim,
                                   self.dtype if i in kept else torch.int8, where)
                for i, (heads, head_dim) in enumerate(self.kv_shapes)]

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for on every rank; none is allocated yet. Raises
        `ValueError` with the numbers when there is room for none."""
        with self.on_device():
            return device.count_kv_blocks(
                self.config, self.device, self.block_bytes, self.ranks.local_size,
                self.ranks.least, self.run_largest_step)

    def run_largest_step(self) -> None:
        """Take, for a moment, all the memory that a step can take in addition to the KV cache."""
        self.allocate_kv_cache(1, self.config.max_model_len)
        step = device.largest_step(self.config, self.parts.num_drafts)
        for network in range(len(self.networks)):  # a draft network may be the wider one
            self.fetch(self.launch(replace(step, network=network)))
        self.kv_cache, self.builder, self.last_tokens = [], None, None

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
        num_rows, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
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
        """How many keys a query of any network sees at most, None if a layer has no such limit. A
        draft network looks back from one token earlier."""
        windows = [network.config.window for network in self.networks]
        return None if None in windows else max(windows) + len(windows) - 1

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
            hidden, chosen = self.forward(batch, wanted), None
        return self.finish(hidden, batch, step, chosen)

    def finish(self, hidden: torch.Tensor, batch: Batch, step: Step | None,
               chosen: torch.Tensor | None) -> SamplerOutput:
        """From hidden states to tokens. chosen: the tokens, if a graph has chosen them."""
        output = sample(hidden, SamplingInputs.of(step, batch, self.parts.constraints), batch,
                        self.networks[batch.network].compute_logits, self.ops, chosen)
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
        kv_cache = self.kv_cache[len(self.model.kv_shapes):] if batch.network else self.kv_cache
        return self.networks[batch.network](ids, batch.positions, kv_cache, batch, wanted)

    def _states(self, batch: Batch) -> torch.Tensor:
        """What graphs record first: the hidden states of all tokens, since each token has a sample.
        If a row may have several tokens, samples are in another order than tokens."""
        return self.forward(batch, batch.logits_indices.long() if batch.is_padded else None)

    def _choose(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What graphs record second: the choice of tokens, without edits. hidden: of `_states`."""
        network, token_ids = self.networks[batch.network], None
        if self.ranks.size > 1 and batch.is_greedy and isinstance(network, Decoder):
            token_ids = network.likeliest(hidden)
        else:
            logits = network.compute_logits(hidden)
            if logits is not None and batch.network:  # drafts are greedy
                token_ids = self.ops.argmax(logits)
            elif logits is not None:
                token_ids = choose_plain(logits, batch, self.ops)
        if token_ids is None:  # on a rank above 0: a placeholder, until `_keep` brings rank 0's
            token_ids = batch.logits_indices.long()
        self._keep(batch, token_ids)
        return token_ids

    def _keep(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Keep sampled tokens on the device: the next step's input, not yet known to the host. A
        row without a token goes on with token 0 until the host has ended it."""
        self.ranks.broadcast(token_ids)
        self.last_tokens[batch.sample_rows] = token_ids.clamp(min=0)

    def fetch(self, output: SamplerOutput) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for a launched step; see `SamplerOutput.tolist`."""
        with self.on_device(), self.ranks.waiting():
            return output.tolist()

    def synchronize(self) -> None:
        """Wait until the device is idle, before buffers that a lost step may read are reused."""
        if self.device.type == "cuda" and self.ranks.broken is None:
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Return freed memory to the system. By itself it goes back to torch alone."""
        device.return_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free all memory of this rank; on rank 0, end the other ranks, too."""
        self.synchronize()
        self.networks, self.model, self.kv_cache = [], None, []
        self.graphs = self.builder = self.last_tokens = None
        self.give_back()
        self.ranks.close()
