"""One forward pass: where the weights and the KV bytes are, and how a `Step` becomes tokens.

    Step ──build──► Batch ──embed, layers──► hidden ──rows that sample──► logits ──sample──► tokens
          integers         KV cache: read and written                              stay on device

The runner owns device memory. It loads the weights, finds out what is left, and *returns* how many
KV blocks fit; whoever made it decides on that number and hands it back to `allocate_kv_cache`.

    memory    | weights | largest step's activations | KV blocks .......... | others' |
              └────────── what this process may use ────────────────────────┘

Invariant: only the runner touches KV bytes, and a step never waits for the device. `launch` returns
the sampled tokens as a tensor; whoever needs their values asks it (`tolist()`), which waits. With
overlap the next step is launched first: its unknown inputs are filled on the device, from that
tensor, before the host has seen them.

With tensor parallelism rank 0 launches, and on the other ranks `serve` repeats what it does: the
packed step is broadcast, every rank runs the forward on its share, and rank 0 gathers the logits
and samples. Only what the others can't know travels: the step, and with overlap the tokens.

Not known here: the queue, text, users. Road not taken: sizing the KV cache by trial until memory is
exhausted; a laptop that swaps is worse than a small cache.
"""

import os
from pathlib import Path

import torch

from nanoserve.batch import MIN_BUFFER, Batch, BatchBuilder, packed_length
from nanoserve.config import EngineConfig
from nanoserve.layers import Placement
from nanoserve.loader import load_dummy_weights, load_weights
from nanoserve.model import MAX_PROMPT_LOGPROB_ROWS, Decoder, KVCache, estimate_step_bytes
from nanoserve.model_config import ModelConfig
from nanoserve.parallel import SOLO, Ranks, share_heads
from nanoserve.sampler import Logprobs, SamplerOutput, SamplingInputs, sample, score
from nanoserve.sequence import Step

CPU_MEMORY_SHARE = 0.25  # of what is free: a laptop's owner has other programs open
MIN_CACHE_TOKENS = 2 ** 16
STOP = -1  # in the place of a step's first length: no more steps will come
LAST_WORD = torch.full((MIN_BUFFER,), STOP, dtype=torch.int32)
UNKNOWN_MEMORY = 4 * 2 ** 30  # assumed free where the system doesn't say (neither Linux nor POSIX)


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. Raises `ValueError` for a GPU that isn't there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", but torch sees no GPU: use device="cpu" or "auto"')
    return device


class ModelRunner:
    """Weights, KV cache and buffers on one device, which is one rank's.

    config: resolved, `device` and `dtype` included. folder: the checkpoint's.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path,
                 ranks: Ranks = SOLO):
        self.config = config
        self.model_config = model_config
        self.ranks = ranks
        self.device = torch.device(config.device)  # one rank takes the user's current GPU
        if config.device == "cuda" and ranks.size > 1:
            self.device = torch.device("cuda", ranks.local_rank)
        self.dtype = getattr(torch, config.dtype)
        placement = Placement(self.dtype, self.device, ranks)
        self.model = Decoder(model_config, placement, config.expert_parallel)
        if config.load_format == "dummy":
            load_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, model_config, folder, show_progress=ranks.rank == 0)
        self.kv_cache: KVCache = []
        self.builder: BatchBuilder | None = None  # made with the cache, see allocate_kv_cache
        self.last_sampled: torch.Tensor | None = None

    # ---------------------------------------------------------------- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, for the KV heads of this rank."""
        return (self.config.block_size * self.model_config.num_hidden_layers
                * 2 * self._num_kv_heads * self.model_config.head_dim * self.dtype.itemsize)

    @property
    def _num_kv_heads(self) -> int:
        config = self.model_config
        return share_heads(config.num_attention_heads, config.num_key_value_heads,
                           self.ranks)[1].size

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for on every rank; allocates nothing.

        Raises `ValueError` with the numbers when there is room for none.
        """
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        budget = self._kv_budget()
        with self.ranks.together():
            num_blocks = self.ranks.minimum(budget // self.block_bytes)
        if num_blocks < 1:
            raise ValueError(
                f"no room for one KV block: {self.block_bytes:,} bytes are needed, {budget:,} are "
                "to be had: raise kv_cache_memory_bytes or gpu_memory_utilization, lower "
                "block_size, or end other programs that use the memory")
        return num_blocks

    def _kv_budget(self) -> int:
        """Bytes for KV on this rank; negative when others have taken more than there was."""
        config = self.config
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = self._gpu_budget() if self.device.type == "cuda" else int(
                CPU_MEMORY_SHARE * free_cpu_memory() / self.ranks.local_size)
            # Every sequence at its full length; a small engine keeps room to remember prefixes.
            most = max(config.max_num_seqs * config.max_model_len, MIN_CACHE_TOKENS)
            budget = min(budget, -(-most // config.block_size) * self.block_bytes)
        return budget

    def _gpu_budget(self) -> int:
        """Bytes for KV on the GPU: our share, less what anybody uses already, less what a step
        needs beside the cache, which is estimated and not measured yet."""
        free, total = torch.cuda.mem_get_info(self.device)
        used = total - free  # ours and other processes'
        config = self.config
        step = estimate_step_bytes(self.model_config, config.max_num_batched_tokens,
                                   config.max_num_seqs, config.max_model_len, self.dtype.itemsize)
        return int(total * config.gpu_memory_utilization) - used - step

    def agree_on_cache(self, num_blocks: int = 0, max_model_len: int = 0) -> tuple[int, int]:
        """What rank 0 has made of the count goes to all, who return it."""
        agreed = torch.tensor([num_blocks, max_model_len])
        with self.ranks.together():
            self.ranks.broadcast_host(agreed)
        return tuple(agreed.tolist())

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, zeroed, and the buffers for steps with sequences of `max_model_len`."""
        config, model = self.config, self.model_config
        shape = (num_blocks, config.block_size, self._num_kv_heads, model.head_dim)
        try:
            self.kv_cache = [
                (torch.zeros(shape, dtype=self.dtype, device=self.device),
                 torch.zeros(shape, dtype=self.dtype, device=self.device))
                for _ in range(model.num_hidden_layers)]
        except RuntimeError as error:
            raise ValueError(
                f"no memory for a KV cache of {num_blocks:,} blocks of {self.block_bytes:,} bytes: "
                "lower kv_cache_memory_bytes or num_gpu_blocks_override") from error
        self.builder = BatchBuilder(config.max_num_seqs, config.max_num_batched_tokens,
                                    max_model_len, config.block_size, self.device)

    # ------------------------------------------------------------------ step

    @torch.inference_mode()
    def launch(self, step: Step) -> SamplerOutput:
        """Run one step. Returns the token of each of `step.sampling`, and whatever logprobs are
        wanted, on the device."""
        buffer = self.builder.take_buffer()
        self.builder.pack(step, buffer)
        inputs = SamplingInputs.of(step.sampling, self.model_config.vocab_size, self.device)
        with self.ranks.together():
            if self.ranks.size > 1:
                self._broadcast(buffer)
            batch = self.builder.unpack(buffer)
            hidden = self._forward(batch)
            output = sample(self.model.compute_logits(hidden[batch.logits_indices]), inputs)
            output.prompt_logprobs = self._score_prompts(hidden, batch, step)
            self.last_sampled = output.token_ids
            if self.config.async_scheduling:  # the next step's inputs, before the host knows them
                self.ranks.broadcast(self.last_sampled)
        return output

    def _broadcast(self, buffer: torch.Tensor) -> None:
        """Rank 0's packed step to all. Its length stands in its header, so that a long one takes a
        second broadcast; most fit into the first, with some 8,000 tokens and table entries."""
        self.ranks.broadcast_host(buffer[:MIN_BUFFER])
        if buffer[0] != STOP and packed_length(buffer) > MIN_BUFFER:
            self.ranks.broadcast_host(buffer[MIN_BUFFER:packed_length(buffer)])

    def _forward(self, batch: Batch) -> torch.Tensor:
        """(num_tokens, hidden_size), after everything that a step does to the KV cache."""
        if batch.block_copies.numel():
            source, target = batch.block_copies
            for k, v in self.kv_cache:
                k[target], v[target] = k[source], v[source]
        if len(batch.unknown_indices):
            batch.input_ids[batch.unknown_indices] = self.last_sampled[
                batch.unknown_sources].to(torch.int32)
        hidden = self.model.embed(batch.input_ids)
        return self.model(hidden, batch.positions, self.kv_cache, batch)

    def _score_prompts(self, hidden: torch.Tensor, batch: Batch, step: Step) -> list[Logprobs]:
        """Each position's logits are about the token that follows it."""
        following = [token_id for seq, positions in step.prompt_logprob_positions.items()
                     for token_id in seq.token_ids[positions.start + 1:positions.stop + 1]]
        token_ids = torch.tensor(following, dtype=torch.int64).to(self.device, non_blocking=True)
        num_top = max((seq.params.prompt_logprobs for seq in step.prompt_logprob_positions),
                      default=0)
        return [score(self.model.compute_logits(hidden[batch.prompt_logprob_indices[some]]),
                      token_ids[some], num_top) for some in _slices(len(following))]

    @torch.inference_mode()
    def serve(self) -> None:
        """A rank above 0: repeat rank 0's launches, collective by collective, until it says STOP.

        The step, the layers' sums, the logits that are sampled, those of prompts slice by slice,
        and with overlap the tokens.
        """
        while True:
            buffer = self.builder.take_buffer()
            with self.ranks.together():
                self._broadcast(buffer)
                if buffer[0] == STOP:
                    return
                batch = self.builder.unpack(buffer)
                hidden = self._forward(batch)
                self.model.compute_logits(hidden[batch.logits_indices])
                for some in _slices(len(batch.prompt_logprob_indices)):
                    self.model.compute_logits(hidden[batch.prompt_logprob_indices[some]])
                if self.config.async_scheduling:
                    self.last_sampled = torch.empty(
                        len(batch.logits_indices), dtype=torch.int64, device=self.device)
                    self.ranks.broadcast(self.last_sampled)

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
        self.model = self.builder = self.last_sampled = None
        self.kv_cache = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _slices(count: int) -> list[slice]:
    """Prompt positions in portions: the logits of a whole prompt would be larger than the model."""
    size = MAX_PROMPT_LOGPROB_ROWS
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def serve_rank(ranks: Ranks, payload: tuple[EngineConfig, Path]) -> None:
    """A rank above 0, from its start to its end: load, agree on the cache's size, and serve."""
    config, folder = payload
    model_config = ModelConfig.from_folder(folder, config.hf_overrides)
    runner = ModelRunner(config, model_config, folder, ranks)
    runner.count_kv_blocks()
    runner.allocate_kv_cache(*runner.agree_on_cache())
    runner.serve()


def free_cpu_memory() -> int:
    """Bytes that this process may still take: the machine's free memory, or its container's.

    Linux says what is available without swapping, and a container may be allowed less. Elsewhere
    half of the physical memory is taken to be free.
    """
    available = _physical_memory() // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for group, limit, usage in (("", "memory.max", "memory.current"),  # cgroup v2, then v1
                                ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = Path("/sys/fs/cgroup", group)
        try:
            allowed = int((folder / limit).read_text())
            used = int((folder / usage).read_text()) - _page_cache(folder / "memory.stat")
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
        available = min(available, allowed - used)
    return max(available, 0)


def _page_cache(stat: Path) -> int:
    """Bytes of files, the checkpoint's say, that count as used but are dropped when needed."""
    if not stat.exists():
        return 0
    entries = dict(line.split() for line in stat.read_text().splitlines())
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY
