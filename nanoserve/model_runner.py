"""One forward pass: where the weights and the KV bytes are, and how a `Step` becomes tokens.

    Step ──build──► Batch ──embed, layers──► hidden ──rows that sample──► logits ──sample──► tokens
          integers         KV cache: read and written                              stay on device

The runner owns device memory. It loads the weights, finds out what is left (memory.py), and
*returns* how many KV blocks fit; whoever made it decides on that number and hands it back to
`allocate_kv_cache`.

Invariant: only the runner touches KV bytes, and a step never waits for the device. `launch` queues
a step and the way of its tokens to the host, and returns; whoever needs them waits (`fetch`). With
overlap the next step is queued before that. Its inputs, which the host has not seen, it finds in
`last_tokens`, on the device:

    host     prepare n+1 | launch | wait for n's tokens, update, prepare n+2 | launch | ...
    device   ...... step n .......►| tokens of n ►| ...... step n+1 .........►| tokens of n+1 ►|

On a GPU the layers get `kernels` instead of `ops`, and a step of nothing but decodes is a replay of
a CUDA graph (graphs.py), from the embedding to the chosen tokens.

With tensor parallelism rank 0 launches, and on the other ranks `serve` repeats what it does: the
packed step is broadcast, every rank runs the forward on its share, and rank 0 gathers the logits
and samples. Only what the others can't know travels: the step, and with overlap the tokens.

Not known here: the queue, text, users.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from nanoserve import ops
from nanoserve.batch import MIN_BUFFER, Batch, BatchBuilder, packed_length
from nanoserve.config import EngineConfig, find_model
from nanoserve.device.graphs import CudaGraph, DecodeGraphs
from nanoserve.layers import Embedding, Linear, Placement
from nanoserve.checkpoint.loader import load_dummy_weights, load_weights
from nanoserve.device.memory import (
    cpu_budget,
    gpu_budget,
    keep_freed_memory,
    largest_step,
    plenty_for_weights,
)
from nanoserve.model import MAX_PROMPT_LOGPROB_ROWS, Decoder, KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.parallel.ranks import SOLO, Ranks, share_heads
from nanoserve.sampler import (
    Logprobs,
    SamplerOutput,
    SamplingInputs,
    choose_by_kernels,
    put,
    sample,
    score,
)
from nanoserve.sequence import Step

MIN_CACHE_TOKENS = 2 ** 16
STOP = -1  # in the place of a step's first length: no more steps will come
LAST_WORD = torch.full((MIN_BUFFER,), STOP, dtype=torch.int32)


class ModelRunner:
    """Weights, KV cache and buffers on one device, which is one rank's.

    config: resolved, `device` and `dtype` included. folder: the checkpoint's. graph_class: what
    records decode steps; a stand-in records them on a CPU, too. pooler: takes the LM head's place,
    and is asked in the sampler's (`attach`, `unused` and `pool`, see extras/pooling.py).
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path,
                 ranks: Ranks = SOLO, graph_class: type = CudaGraph, pooler=None):
        self.config, self.pooler = config, pooler
        self.model_config = model_config
        self.ranks = ranks
        self.device = torch.device(config.device)
        if config.device == "cuda":
            if ranks.size > 1:
                torch.cuda.set_device(ranks.local_rank)  # kernels are launched on the current one
            # With its number: one rank takes the user's current GPU, and stays there. What an
            # engine before this one has left in torch's pool goes back: weights that were put into
            # pieces of its KV cache would keep the rest of them from being of use.
            self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.empty_cache()
        else:
            keep_freed_memory()
        self.dtype = getattr(torch, config.dtype)
        self.kernels = import_kernels() if config.kernels == "triton" else None
        self.model = self._load(model_config, folder, pooler)
        self.draft_model: Decoder | None = None  # a small one that guesses (extras/speculative.py)
        if config.draft_model is not None:
            folder = find_model(config.draft_model)
            self.draft_model = self._load(ModelConfig.from_folder(folder), folder)
        self.kv_cache: KVCache = []
        self.builder: BatchBuilder | None = None  # made with the cache, see allocate_kv_cache
        self.last_tokens: torch.Tensor | None = None  # of each row, the newest sample
        self.graph_class = graph_class
        self.graphs: DecodeGraphs | None = None  # see record_graphs

    def _load(self, model_config: ModelConfig, folder: Path, pooler=None) -> Decoder:
        """This rank's share of a network."""
        config, ranks = self.config, self.ranks
        placement = Placement(self.dtype, self.device, ranks, self.kernels or ops,
                              packed=config.device == "cpu" and self.kernels is None)
        has_experts = any(model_config.moe_layers)
        model = Decoder(model_config, placement, config.expert_parallel and has_experts)
        if pooler is not None:
            pooler.attach(model, placement)
        plenty = placement.packed and plenty_for_weights(
            sum(weight.nbytes for weight in model.parameters()), ranks.local_size)
        with ranks.together():  # one kind of product everywhere: the router's must agree to the bit
            plenty = ranks.minimum(int(plenty))
        if plenty:
            for part in model.modules():
                if isinstance(part, (Linear, Embedding)):
                    part.keeps_second = True
        if config.load_format == "dummy":
            load_dummy_weights(model, config.seed)
        else:
            load_weights(model, model_config, folder, ranks.rank == 0,
                         pooler.unused if pooler is not None else ())
        return model

    # ---------------------------------------------------------------- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, for the KV heads of this rank."""
        return sum(2 * heads * size for heads, size in self._kv_layers()) * (
            self.config.block_size * self.dtype.itemsize)

    def _kv_layers(self) -> list[tuple[int, int]]:
        """This rank's KV heads and their size, of each layer. A draft model's layers come last:
        they have their part of every block, so that one block table serves both networks."""
        layers = []
        for model in filter(None, (self.model, self.draft_model)):
            config = model.config
            heads = share_heads(config.num_attention_heads, config.num_key_value_heads, self.ranks)
            layers += [(heads[1].size, config.head_dim)] * config.num_hidden_layers
        return layers

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for on every rank; none is allocated yet.

        Raises `ValueError` with the numbers when there is room for none.
        """
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        budget, reason = self._kv_budget()
        with self.ranks.together():
            num_blocks = self.ranks.minimum(budget // self.block_bytes)
        if num_blocks < 1:
            raise ValueError(
                f"no room for one KV block: {self.block_bytes:,} bytes are needed, {budget:,} are "
                f"to be had ({reason}): raise kv_cache_memory_bytes or gpu_memory_utilization, "
                "lower block_size, or end other programs that use the memory")
        return num_blocks

    def _kv_budget(self) -> tuple[int, str]:
        """Bytes for KV on this rank, negative when others have taken more than there was; and how
        that comes about."""
        config = self.config
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if self.device.type == "cuda":
            budget, reason = gpu_budget(config, self.device, self.run_largest_step)
        else:
            budget, reason = cpu_budget(self.ranks.local_size)
        # Every sequence at its full length; a small engine keeps room to remember prefixes.
        most = max(config.max_num_seqs * config.max_model_len, MIN_CACHE_TOKENS)
        return min(budget, -(-most // config.block_size) * self.block_bytes), reason

    def run_largest_step(self) -> None:
        """Take, for a moment, all the memory that a step can take beside the KV cache."""
        self.allocate_kv_cache(1, self.config.max_model_len)
        steps = [largest_step(self.config)]
        if self.draft_model is not None:  # one of these comes first, and its network may be wider
            steps.append(replace(steps[0], by_draft_model=True))
        for step in steps:
            with self.ranks.waiting():
                if self.ranks.rank == 0:
                    self.launch(step).tolist()
                else:
                    self.serve_one()
        self.kv_cache, self.builder, self.last_tokens = [], None, None

    def agree_on_cache(self, num_blocks: int = 0, max_model_len: int = 0) -> tuple[int, int]:
        """What rank 0 has made of the count goes to all, who return it."""
        agreed = torch.tensor([num_blocks, max_model_len])
        with self.ranks.together():
            self.ranks.broadcast_host(agreed)
        return tuple(agreed.tolist())

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, zeroed, and the buffers for steps with sequences of `max_model_len`."""
        config = self.config
        in_run, module = config.blocks_in_run, self.kernels or ops
        if num_blocks < 64 * in_run:  # a small cache has shorter runs, and not a block too many
            in_run = math.gcd(num_blocks, in_run)
        shape = -(-num_blocks // in_run), in_run * config.block_size  # a large one is filled up
        try:
            self.kv_cache = [module.new_caches((*shape, *layer), self.dtype, self.device)
                             for layer in self._kv_layers()]
        except RuntimeError as error:
            raise ValueError(
                f"no memory for a KV cache of {num_blocks:,} blocks of {self.block_bytes:,} bytes: "
                "lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"
            ) from error
        try:
            self.builder = BatchBuilder(config.max_num_seqs, config.max_num_batched_tokens,
                                        max_model_len, config.block_size, self.device,
                                        staged=self.wants_graphs, num_drafts=config.num_drafts)
        except (RuntimeError, MemoryError) as error:  # torch's and numpy's
            raise ValueError(
                f"no memory for what steps are packed into: lower max_num_batched_tokens="
                f"{config.max_num_batched_tokens:,} or max_num_seqs={config.max_num_seqs:,}"
            ) from error
        # One more than there are rows: padding writes there.
        self.last_tokens = torch.zeros(
            config.max_num_seqs + 1, dtype=torch.int32, device=self.device)

    @property
    def device_name(self) -> str:
        """For the line that tells what this engine runs on."""
        if self.device.type == "cuda":
            return f"cuda ({torch.cuda.get_device_name(self.device)})"
        return "cpu" if self.kernels is None else "cpu (Triton's interpreter, very slow)"

    @property
    def wants_graphs(self) -> bool:
        """Plain torch operators ask the host for lengths, and collectives of several ranks have not
        been tried in a graph: neither is recorded."""
        return (not self.config.enforce_eager and self.pooler is None
                and self.kernels is not None and self.ranks.size == 1
                and (self.device.type == "cuda" or self.graph_class is not CudaGraph))

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record decode steps of all sizes, if this engine wants to. They live in the memory that
        the KV cache has left; raises `ValueError` when it is too little."""
        if not self.wants_graphs:
            return
        try:
            self.graphs = DecodeGraphs(
                self.config.max_num_seqs, lambda size: self.builder.fix_tables(
                    self.builder.build(Step(0), num_rows=size)), self._decode, self.graph_class)
        except RuntimeError as error:  # a recording that ends early may have an error of its own
            if torch.OutOfMemoryError not in (type(error), type(error.__context__)):
                raise
            raise ValueError(
                "no memory for CUDA graphs beside the KV cache: lower gpu_memory_utilization (or "
                "kv_cache_memory_bytes, num_gpu_blocks_override) or max_num_seqs, or do without "
                "them with enforce_eager=True") from error

    # ------------------------------------------------------------------ step

    @torch.inference_mode()
    def launch(self, step: Step) -> SamplerOutput:
        """Queue one step. Returns the token of each of `step.samples()`, and whatever logprobs are
        wanted, on their way to the host; of a pooler, hidden states in their place."""
        size = None
        if (self.graphs is not None and len(step.sampling) == step.num_tokens  # decodes alone
                and not step.by_draft_model):
            size = self.graphs.size_for(len(step.sampling))
        buffer = self.builder.take_buffer()
        self.builder.pack(step, buffer, size)
        with self.ranks.together():
            if self.ranks.size > 1:
                self._broadcast(buffer)
            batch = self.builder.unpack(buffer)
            if step.by_draft_model:
                return SamplerOutput(self._guess(batch)).to_host()
            if self.pooler is not None:
                return self.pooler.pool(self._forward(batch), len(batch.logits_indices))
            samples = step.samples()
            inputs = SamplingInputs.of(samples, batch, self.model_config.vocab_size, step.drafts)
            if size is not None:
                output = self._replay(batch, inputs, size)
            else:
                hidden = self._forward(batch)
                output = sample(self.model.compute_logits(hidden[:len(samples)]), inputs,
                                self.kernels)
                output.prompt_logprobs = self._score_prompts(hidden[len(samples):], step)
            if self.config.async_scheduling and (size is None or inputs.edits is not None):
                self._remember(batch, output.token_ids)
            output.token_ids = output.token_ids[:len(samples)]
        return output.to_host()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        """Rank 0's packed step to all. Its length stands in its header, so that a long one takes a
        second broadcast; most fit into the first, with some 8,000 tokens and table entries."""
        self.ranks.broadcast_host(buffer[:MIN_BUFFER])
        if buffer[0] != STOP and packed_length(buffer) > MIN_BUFFER:
            self.ranks.broadcast_host(buffer[MIN_BUFFER:packed_length(buffer)])

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Everything that a step does to the KV cache, and the hidden states that somebody reads:
        (samples + prompt logprobs, hidden_size), in this order."""
        self._copy_blocks(batch)
        ids = self._known(batch.input_ids) if batch.num_unknown else batch.input_ids
        model, kv_cache = self.model, self.kv_cache
        if batch.by_draft_model:
            model, kv_cache = self.draft_model, kv_cache[len(self.model.layers):]
        wanted = torch.cat((batch.logits_indices, batch.prompt_logprob_indices)).long()
        return model(model.embed(ids), batch.positions, kv_cache, batch, wanted=wanted)

    def _guess(self, batch: Batch) -> torch.Tensor:
        """A step of the draft model, on all ranks: the likeliest tokens, which its next step finds
        on the device."""
        hidden = self._forward(batch)[:len(batch.logits_indices)]
        logits = self.draft_model.compute_logits(hidden)
        token_ids = torch.empty_like(batch.sample_rows, dtype=torch.int64)
        if self.ranks.rank == 0:
            token_ids = logits.argmax(-1)
        self._remember(batch, token_ids)
        return token_ids

    def _copy_blocks(self, batch: Batch) -> None:
        if batch.block_copies.numel():
            size, of_run = self.config.block_size, self.kv_cache[0][0].shape[1]
            slots = batch.block_copies[..., None] * size + torch.arange(size, device=self.device)
            source, target = zip(slots // of_run, slots % of_run)
            for k, v in self.kv_cache:
                k[target], v[target] = k[source], v[source]

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Put the last token of row r in the place of -1 - r."""
        return torch.where(ids < 0, self.last_tokens[(-1 - ids).clamp(min=0)], ids)

    def _remember(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """For the next step, whose inputs these are before the host knows them."""
        self.ranks.broadcast(token_ids)
        self.last_tokens[batch.sample_rows] = token_ids.to(torch.int32)

    def _decode(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What is recorded: a step in which each row computes one token and samples the next. Here
        nothing may depend on what the host knows of the batch, but for its size.

        The hidden states are returned and not the logits: a recording keeps the memory of what it
        returns, and logits of 20 sizes and 152,000 tokens would be 0.7 GB. Who has to see logits
        multiplies with the LM head once more, which is 2 to 8% of a step.
        """
        hidden = self.model.embed(self._known(batch.input_ids))
        hidden = self.model(hidden, batch.positions, self.kv_cache, batch)
        logits = self.model.compute_logits(hidden)
        token_ids = choose_by_kernels(logits, batch, self.kernels)
        self._remember(batch, token_ids)
        return hidden, token_ids

    def _replay(self, batch: Batch, inputs: SamplingInputs, size: int) -> SamplerOutput:
        """A recorded step. With edits in the batch, of which the recording knows nothing, all rows
        choose once more."""
        self._copy_blocks(batch)
        self.builder.fix_tables(batch)
        hidden, token_ids = self.graphs.replay(size)
        if inputs.edits is None and not inputs.logprob_rows:
            return SamplerOutput(token_ids)
        return sample(self.model.compute_logits(hidden), inputs, self.kernels, token_ids)

    def _score_prompts(self, hidden: torch.Tensor, step: Step) -> list[Logprobs]:
        """Each position's logits are about the token that follows it."""
        following = [token_id for seq, positions in step.prompt_logprob_positions.items()
                     for token_id in seq.token_ids[positions.start + 1:positions.stop + 1]]
        token_ids = put(following, torch.int64, device=self.device)
        num_top = max((seq.params.prompt_logprobs for seq in step.prompt_logprob_positions),
                      default=0)
        return [score(self.model.compute_logits(hidden[some]), token_ids[some], num_top)
                for some in _slices(len(following))]

    def serve(self) -> None:
        """A rank above 0: repeat rank 0's launches until it says STOP."""
        while self.serve_one():
            pass

    @torch.inference_mode()
    def serve_one(self) -> bool:
        """Repeat one launch, collective by collective; False: it was STOP.

        The step, the layers' sums, the logits that are sampled, those of prompts slice by slice,
        and with overlap the tokens.
        """
        buffer = self.builder.take_buffer()
        with self.ranks.together():
            self._broadcast(buffer)
            if buffer[0] == STOP:
                return False
            batch = self.builder.unpack(buffer)
            if batch.by_draft_model:
                self._guess(batch)
                return True
            hidden = self._forward(batch)
            if self.pooler is not None:
                return True  # rank 0 has the hidden states, and needs nobody else
            num_samples = len(batch.logits_indices)
            self.model.compute_logits(hidden[:num_samples])
            for some in _slices(len(hidden) - num_samples):
                self.model.compute_logits(hidden[num_samples:][some])
            if self.config.async_scheduling:
                self._remember(batch, torch.empty(
                    num_samples, dtype=torch.int64, device=self.device))
        return True

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
        self.model = self.draft_model = self.builder = self.last_tokens = self.graphs = None
        self.kv_cache = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _slices(count: int) -> list[slice]:
    """Prompt positions in portions: the logits of a whole prompt would be larger than the model."""
    size = MAX_PROMPT_LOGPROB_ROWS
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def serve_rank(ranks: Ranks, payload: tuple[EngineConfig, Path, object]) -> None:
    """A rank above 0, from its start to its end: load, agree on the cache's size, and serve."""
    config, folder, pooler = payload
    model_config = ModelConfig.from_folder(folder, config.hf_overrides)
    runner = ModelRunner(config, model_config, folder, ranks, pooler=pooler)
    runner.count_kv_blocks()
    runner.allocate_kv_cache(*runner.agree_on_cache())
    runner.serve()


# ------------------------------------------------------------ what there is


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. Raises `ValueError` for a GPU that isn't there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", but torch sees no GPU: use device="cpu" or "auto"')
    return device


def fit_to_device(config: EngineConfig, asked: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """What this machine's GPU and software make of a resolved config, with what to say about it.

    Raises `ValueError` where the user asked for what isn't there.
    """
    said = []
    on_gpu = config.device == "cuda"
    if on_gpu and config.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(
            including_emulation=False):
        name = torch.cuda.get_device_name()
        if asked.dtype != "auto":
            raise ValueError(f'dtype="bfloat16", but {name} has no bfloat16: use "float16"')
        said.append(f"{name} has no bfloat16: float16 takes its place, whose range is smaller")
        config = replace(config, dtype="float16")
    if config.kernels == "triton":
        try:
            kernels = import_kernels()
        except ImportError as error:
            if asked.kernels != "auto":
                raise ValueError(f'kernels="triton", but triton can\'t be imported ({error}): '
                                 'install it, or use kernels="torch"') from error
            said.append(f"triton can't be imported ({error}): plain torch takes its place, which "
                        "is many times slower")
            return replace(config, kernels="torch"), said
        if on_gpu and kernels.INTERPRETED:
            raise ValueError('TRITON_INTERPRET is set, with which kernels run in Python and not on '
                             'the GPU, and no graph can be recorded: unset it, or use '
                             'kernels="torch" or device="cpu"')
        if not on_gpu and not kernels.INTERPRETED:
            raise ValueError('kernels="triton" needs a GPU, or the environment variable '
                             'TRITON_INTERPRET=1 from the start, which runs kernels slowly in '
                             'Python: use kernels="torch"')
        if on_gpu and torch.cuda.get_device_capability() < (8, 0):
            old = f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
            if asked.kernels != "auto":
                raise ValueError(f'kernels="triton", but {old}: use kernels="torch"')
            said.append(f"{old}: plain torch takes the kernels' place, which is many times slower")
            return replace(config, kernels="torch"), said
    return config, said


def import_kernels() -> ModuleType:
    """Late, because only who uses them needs triton, which there is for Linux alone."""
    from nanoserve.device import kernels
    return kernels
