"""One forward pass: where the weights and the KV bytes are, and how a `Step` becomes tokens.

    Step ──pack──► Batch ──model──► hidden ──rows that sample──► logits ──sample──► tokens
         integers        KV cache: read and written                        stay on the device

The runner owns device memory. It loads the weights, finds out what is left (device/memory.py), and
*returns* how many KV blocks fit; `LLM` decides on that number and hands it back to
`allocate_kv_cache`.

Invariants: only the runner touches KV bytes, and `launch` never waits for the device. It queues a
step and the copy of its tokens to the host; the engine waits for these tokens in `fetch`. With
overlap the next step is queued before that `fetch`. The host does not know its input tokens yet, so
the step reads them from `last_tokens`, on the device:

    host     prepare n+1 | launch | wait for n's tokens, update, prepare n+2 | launch | ...
    device   ...... step n .......►| tokens of n ►| ...... step n+1 .........►| tokens of n+1 ►|

**One forward on all ranks.** With tensor parallelism rank 0 packs a step and broadcasts it, and
then every rank runs `_run` on the batch that it received, each with its share of the weights. Only
rank 0 gets logits and chooses tokens; nothing else differs.

On a GPU a step of nothing but decodes is a replay of a CUDA graph (device/graphs.py), from the
embedding to the chosen tokens. A second network, which drafts for the first (extras/speculative),
is network 1 of an ordinary greedy step; its layers' caches stand behind the first one's.

Not known here: the queue, text, users.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from nanoserve.batch import MIN_BUFFER, Batch, BatchBuilder, packed_length
from nanoserve.checkpoint.hub import find_model
from nanoserve.checkpoint.loader import load_dummy_weights, load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.controls import Constraints
from nanoserve.device.choice import namespace
from nanoserve.device.graphs import CudaGraph, DecodeGraphs
from nanoserve.device.memory import count_kv_blocks, largest_step, memory_for, take_device
from nanoserve.layers import Placement
from nanoserve.model import MAX_PROMPT_LOGPROB_ROWS, Decoder, KVCache, Network
from nanoserve.parallel.ranks import SOLO, Ranks
from nanoserve.sampler import Logprobs, SamplerOutput, SamplingInputs, choose_plain, sample, score
from nanoserve.sequence import Step

STOP = -1  # as the first number of a buffer, else a length: no more steps will come
LAST_WORD = torch.full((MIN_BUFFER,), STOP, dtype=torch.int32)  # what ends the other ranks


class Pooler(Protocol):
    """Replaces the LM head and the sampler in an engine that pools: see extras/pooler.py."""

    unused: tuple[str, ...]  # tensors of the checkpoint that nobody reads

    def attach(self, model: Decoder, on: Placement) -> None: ...

    def pool(self, hidden: torch.Tensor, num_samples: int) -> SamplerOutput: ...


class Adapters(Protocol):
    """Changes the products of each row by its own small matrices: see extras/lora.py."""

    def send(self) -> None:
        """On rank 0, before a step: what the ranks need that was loaded since the last one."""

    def receive(self, head: torch.Tensor) -> bool:
        """On another rank, in a step's place: what was sent. True: steps will follow."""

    def choose(self, batch: Batch, wanted: torch.Tensor) -> None:
        """From here on the products are those of this batch."""


class BlockCopier(Protocol):
    """Blocks outside the KV cache: see extras/block_pool.py."""

    def move(self, host: dict[str, np.ndarray]) -> None:
        """Queue the copies that `block_moves` in the batch's sections asks for."""


@dataclass(frozen=True)
class RankParts:
    """What annexes give the runner of each rank; `engine.Extra.prepare` adds to it."""

    layers: dict[str, Callable] = field(default_factory=dict)  # entries of `Placement`
    make_network: Callable[[Placement], Network] | None = None  # in place of `Decoder`
    pooler: Pooler | None = None
    make_adapters: Callable[["ModelRunner"], Adapters] | None = None  # when weights are loaded
    make_copier: Callable[["ModelRunner"], BlockCopier] | None = None  # when the cache is there
    constraints: Constraints = field(default_factory=dict)  # of rows; rank 0's sampler reads them


class ModelRunner:
    """Weights, KV cache and buffers of one rank, on its device.

    config: resolved, device and dtype included. folder: the checkpoint's. graph_class: records
    decode steps; on a CPU, tests pass a stand-in.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path,
                 ranks: Ranks = SOLO, parts: RankParts | None = None,
                 graph_class: type = CudaGraph):
        self.config, self.model_config, self.ranks = config, model_config, ranks
        self.parts = parts or RankParts()
        self.pooler = self.parts.pooler
        self.device = take_device(config.device, ranks.local_rank if ranks.size > 1 else None)
        self.dtype = getattr(torch, config.dtype)
        self.ops = namespace(config.kernels)
        make, on = self.parts.make_network, Placement(self.dtype, self.device, ranks, self.ops)
        self.networks: list[Network] = [
            make(on) if make is not None else self._load(model_config, folder, self.pooler)]
        if config.draft_model is not None:
            folder = find_model(config.draft_model)
            self.networks.append(self._load(ModelConfig.from_folder(folder), folder))
        self.model: Network | None = self.networks[0]  # that is served
        self.kv_cache: KVCache = []
        self.builder: BatchBuilder | None = None  # made with the cache, see allocate_kv_cache
        self.last_tokens: torch.Tensor | None = None  # of each row, the newest sample
        self.graph_class = graph_class
        self.graphs: DecodeGraphs | None = None  # see record_graphs
        make = self.parts.make_adapters
        self.adapters = None if make is None else make(self)
        self.copier: BlockCopier | None = None  # see `start`

    def _load(self, model_config: ModelConfig, folder: Path,
              pooler: Pooler | None = None) -> Decoder:
        """This rank's share of a network."""
        placement = Placement(self.dtype, self.device, self.ranks, self.ops, **self.parts.layers)
        has_experts = any(model_config.moe_layers)
        model = Decoder(model_config, placement, self.config.expert_parallel and has_experts)
        if pooler is not None:
            pooler.attach(model, placement)
        if self.config.load_format == "dummy":
            load_dummy_weights(model, self.config.seed)
        else:
            load_weights(model, model_config, folder, self.ranks.rank == 0,
                         pooler.unused if pooler is not None else (), self.config.load_format,
                         placement.unpack)
        return model

    # ---------------------------------------------------------------- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, for the KV heads of this rank."""
        num_blocks = 16  # a namespace may pad several small blocks to one larger unit
        caches = self._new_caches(num_blocks, torch.device("meta"))
        return sum(k.nbytes + v.nbytes for k, v in caches) // num_blocks

    def _new_caches(self, num_blocks: int, device: torch.device) -> KVCache:
        """The caches of all networks' layers: one block table serves all of them."""
        caches = []
        for network in self.networks:  # (heads, head_dim) of each layer's keys
            caches += [self.ops.new_cache(num_blocks, self.config.block_size, *shape, self.dtype,
                                          device) for shape in network.kv_shapes]
        return caches

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for on every rank; none is allocated yet.

        Raises `ValueError` with the numbers when there is room for none.
        """
        return count_kv_blocks(self.config, self.device, self.block_bytes, self.ranks.local_size,
                               self.ranks.least, self.run_largest_step)

    def run_largest_step(self) -> None:
        """Take, for a moment, all the memory that a step can take beside the KV cache."""
        self.allocate_kv_cache(1, self.config.max_model_len)
        step = largest_step(self.config)
        for network in range(len(self.networks)):  # a draft network may be the wider one
            with self.ranks.waiting():
                if self.ranks.rank == 0:
                    self.launch(replace(step, network=network)).tolist()
                else:
                    self.serve_one()
        self.kv_cache, self.builder, self.last_tokens = [], None, None

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """The cache has its size: make what needs it. Then steps may come."""
        self.allocate_kv_cache(num_blocks, max_model_len)
        self.record_graphs()
        if self.parts.make_copier is not None:
            self.copier = self.parts.make_copier(self)

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, zeroed, and the buffers for steps with sequences of `max_model_len`."""
        config = self.config
        with memory_for(f"a KV cache of {num_blocks:,} blocks of {self.block_bytes:,} bytes: lower "
                        "kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"):
            self.kv_cache = self._new_caches(num_blocks, self.device)
        with memory_for("what steps are packed into: lower max_num_batched_tokens="
                        f"{config.max_num_batched_tokens:,} or max_num_seqs="
                        f"{config.max_num_seqs:,}"):
            self.builder = BatchBuilder(config.max_num_seqs, config.max_num_batched_tokens,
                                        max_model_len, config.block_size, self.device,
                                        staged=self.wants_graphs, num_drafts=config.num_drafts)
        # One entry more than there are rows: samples of padding rows are written to it.
        self.last_tokens = torch.zeros(
            config.max_num_seqs + 1, dtype=torch.int32, device=self.device)

    @property
    def window(self) -> int | None:
        """How many keys a query of any network sees at most, None if a layer has no such limit. A
        draft network looks back from one token earlier."""
        windows = [network.config.window for network in self.networks]
        return None if None in windows else max(windows) + len(windows) - 1

    @property
    def wants_graphs(self) -> bool:
        """Whether decode steps are recorded. Not with plain torch operators, which read lengths on
        the host, and not with several ranks: collectives in a graph have not been tried."""
        return (not self.config.enforce_eager and self.pooler is None
                and self.config.kernels == "triton" and self.ranks.size == 1
                and self.config.model_impl != "transformers" and not self.config.enable_lora
                and (self.device.type == "cuda" or self.graph_class is not CudaGraph))

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record decode steps of all sizes, if `wants_graphs`. Graphs use the memory that the KV
        cache has left over; raises `ValueError` when that is too little."""
        if self.wants_graphs:
            self.graphs = DecodeGraphs(
                self.config.max_num_seqs, lambda size: self.builder.fix_tables(
                    self.builder.build(Step(0), num_rows=size)), self._decode, self.graph_class)

    # ------------------------------------------------------------------ step

    @torch.inference_mode()
    def launch(self, step: Step) -> SamplerOutput:
        """Queue one step. Returns a token for each of `step.samples()`, and the logprobs that are
        wanted, on their way to the host; with a pooler, what it makes of the hidden states."""
        size = None
        only_decodes = len(step.sampling) == step.num_tokens
        if self.graphs is not None and only_decodes and step.sampling and not step.network:
            size = self.graphs.size_for(len(step.sampling))
        buffer = self.builder.take_buffer()
        self.builder.pack(step, buffer, size)
        with self.ranks.together():
            if self.adapters is not None:
                self.adapters.send()
            batch = self._receive(buffer)
            inputs = None if self.pooler is not None else (
                SamplingInputs.of(step, batch, self.model_config.vocab_size,
                                  self.parts.constraints))
            output = (self._run(batch, inputs) if size is None
                      else self._replay(batch, inputs, size))
        return output.to_host()

    @torch.inference_mode()
    def serve_one(self) -> bool:
        """A rank above 0: take part in one launch of rank 0. False: there will be no more."""
        buffer = self.builder.take_buffer()
        with self.ranks.together():
            batch = self._receive(buffer)
            if batch is None:
                return buffer[0] != STOP and self.adapters.receive(buffer)
            self._run(batch, None)
        return True

    def _receive(self, buffer: torch.Tensor) -> Batch | None:
        """Broadcast rank 0's packed step, unpack it, and save and load its blocks before it reads
        or writes any; None if rank 0 sent something else. A long step takes a second broadcast,
        since its length is in its header; most fit into the first one's `MIN_BUFFER` numbers."""
        if self.ranks.size > 1:
            self.ranks.broadcast_host(buffer[:MIN_BUFFER])
            if buffer[0] < 0:
                return None
            if packed_length(buffer) > MIN_BUFFER:
                self.ranks.broadcast_host(buffer[MIN_BUFFER:packed_length(buffer)])
        batch = self.builder.unpack(buffer)
        if self.copier is not None:
            self.copier.move(batch.host)
        return batch

    def _run(self, batch: Batch, inputs: SamplingInputs | None) -> SamplerOutput:
        """What a step computes, on every rank. inputs: what the rows ask of the sampler, which only
        rank 0 knows; the others' output is a stand-in for rank 0's tokens."""
        if not batch.num_tokens:  # it only saved blocks
            return SamplerOutput(batch.logits_indices.long())
        model, kv_cache = self.networks[batch.network], self.kv_cache
        if batch.network:
            kv_cache = kv_cache[len(self.model.kv_shapes):]
        wanted = torch.cat((batch.logits_indices, batch.prompt_logprob_indices)).long()
        ids = self._known(batch.input_ids) if batch.num_unknown else batch.input_ids
        if self.adapters is not None:
            self.adapters.choose(batch, wanted)
        hidden = model(ids, batch.positions, kv_cache, batch, wanted)
        num_samples = len(batch.logits_indices)
        if self.pooler is not None:
            return self.pooler.pool(hidden, num_samples)
        logits = model.compute_logits(hidden[:num_samples])
        output = SamplerOutput(batch.logits_indices.long()) if inputs is None else (
            sample(logits, inputs, self.ops))
        output.prompt_logprobs = self._score_prompts(hidden[num_samples:], inputs)
        if self.config.async_scheduling or batch.network:
            self._remember(batch, output.token_ids)
        return output

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Put the last token of row r in the place of -1 - r."""
        return torch.where(ids < 0, self.last_tokens[(-1 - ids).clamp(min=0)], ids)

    def _remember(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Keep sampled tokens on the device: the next step's input, not yet known to the host."""
        self.ranks.broadcast(token_ids)
        self.last_tokens[batch.sample_rows] = token_ids.to(torch.int32)

    def _score_prompts(self, hidden: torch.Tensor,
                       inputs: SamplingInputs | None) -> list[Logprobs]:
        """Each position's logits are about the token that follows it. In portions: the logits of a
        whole prompt would be larger than the model. Ranks above 0 compute their share of them."""
        scored = []
        for some in range(0, len(hidden), MAX_PROMPT_LOGPROB_ROWS):
            logits = self.model.compute_logits(hidden[some:some + MAX_PROMPT_LOGPROB_ROWS])
            if inputs is not None:
                following = inputs.prompt_targets[some:some + MAX_PROMPT_LOGPROB_ROWS]
                scored.append(score(logits, following, inputs.num_prompt_logprobs))
        return scored

    def _decode(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What is recorded: a step in which each row computes one token and samples the next. Here
        nothing may depend on what the host knows of the batch, but for its size.

        It returns hidden states, not logits: a recording keeps the memory of what it returns, and
        logits of 20 sizes and 152,000 tokens would be 0.7 GB. A batch with edits or logprobs
        multiplies with the LM head once more.
        """
        ids = self._known(batch.input_ids)
        hidden = self.model(ids, batch.positions, self.kv_cache, batch)
        token_ids = choose_plain(self.model.compute_logits(hidden), batch, self.ops)
        self._remember(batch, token_ids)
        return hidden, token_ids

    def _replay(self, batch: Batch, inputs: SamplingInputs, size: int) -> SamplerOutput:
        """Replay a recorded step. A recording has no edits: where a row of the batch has some, all
        rows choose their tokens once more."""
        self.builder.fix_tables(batch)
        hidden, token_ids = self.graphs.replay(size)
        output = SamplerOutput(token_ids)
        if inputs.edits is not None or inputs.logprob_rows:
            output = sample(self.model.compute_logits(hidden), inputs, self.ops, token_ids)
            if self.config.async_scheduling and inputs.edits is not None:
                self._remember(batch, output.token_ids)
        output.token_ids = output.token_ids[:inputs.num_samples]
        return output

    def fetch(self, output: SamplerOutput) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for a launched step; see `SamplerOutput.tolist`."""
        with self.ranks.waiting():
            return output.tolist()

    def synchronize(self) -> None:
        """Wait until the device is idle, before buffers that a lost step may read are reused."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """End the other ranks; give all memory back, to the system and not only to torch's pool."""
        if self.ranks.broken is None:
            self.synchronize()
        self.ranks.close(LAST_WORD)
        self.networks, self.kv_cache = [], []
        self.model = self.builder = self.last_tokens = self.graphs = self.copier = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def serve_rank(ranks: Ranks, payload: tuple) -> None:
    """A rank above 0, from its start to its end: load, agree on the cache's size, and serve."""
    config, folder, parts = payload
    model_config = ModelConfig.from_folder(folder, config.hf_overrides)
    runner = ModelRunner(config, model_config, folder, ranks, parts)
    runner.count_kv_blocks()
    runner.start(*ranks.agree(0, 0))
    while runner.serve_one():
        pass
