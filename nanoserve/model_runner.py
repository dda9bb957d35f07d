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

Not known here: the queue, text, users. Road not taken: sizing the KV cache by trial until memory is
exhausted; a laptop that swaps is worse than a small cache.
"""

import os
from pathlib import Path

import torch

from nanoserve.batch import BatchBuilder
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.loader import load_dummy_weights, load_weights
from nanoserve.model import MAX_SCORED_ROWS, Decoder, KVCache, estimate_step_bytes
from nanoserve.sampler import Logprobs, SamplerOutput, SamplingInputs, sample, score
from nanoserve.scheduler import Step

CPU_MEMORY_SHARE = 0.25  # of what is free: a laptop's owner has other programs open
MIN_CACHE_TOKENS = 2 ** 16
UNKNOWN_MEMORY = 4 * 2 ** 30  # assumed free where the system doesn't say (neither Linux nor POSIX)


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. Raises `ValueError` for a GPU that isn't there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", but torch sees no GPU: use device="cpu" or "auto"')
    return device


class ModelRunner:
    """Weights, KV cache and buffers on one device.

    config: resolved, `device` and `dtype` included. folder: the checkpoint's.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path):
        self.config = config
        self.model_config = model_config
        self.device = torch.device(config.device)
        self.dtype = getattr(torch, config.dtype)
        self.model = Decoder(model_config, self.dtype, self.device)
        if config.load_format == "dummy":
            load_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, model_config, folder)
        self.kv_cache: KVCache = []
        self.builder: BatchBuilder | None = None  # made with the cache, see allocate_kv_cache
        self.last_sampled: torch.Tensor | None = None

    # ---------------------------------------------------------------- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        return (self.config.block_size * self.model_config.num_hidden_layers
                * self.model_config.kv_width * self.dtype.itemsize)

    def count_kv_blocks(self) -> int:
        """How many KV blocks there is room for; allocates nothing.

        Raises `ValueError` with the numbers when there is room for none.
        """
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = self._gpu_budget() if self.device.type == "cuda" else int(
                CPU_MEMORY_SHARE * free_cpu_memory())
            # Every sequence at its full length; a small engine keeps room to remember prefixes.
            most = max(config.max_num_seqs * config.max_model_len, MIN_CACHE_TOKENS)
            budget = min(budget, -(-most // config.block_size) * self.block_bytes)
        if budget < self.block_bytes:
            raise ValueError(
                f"no room for one KV block: {self.block_bytes:,} bytes are needed, {budget:,} are "
                "to be had: raise kv_cache_memory_bytes or gpu_memory_utilization, lower "
                "block_size, or end other programs that use the memory")
        return budget // self.block_bytes

    def _gpu_budget(self) -> int:
        """Bytes for KV on the GPU: our share, less what anybody uses already, less what a step
        needs beside the cache, which is estimated and not measured yet."""
        free, total = torch.cuda.mem_get_info(self.device)
        used = total - free  # ours and other processes'
        config = self.config
        step = estimate_step_bytes(self.model_config, config.max_num_batched_tokens,
                                   config.max_num_seqs, config.max_model_len, self.dtype.itemsize)
        return int(total * config.gpu_memory_utilization) - used - step

    def allocate_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, zeroed, and the buffers for steps with sequences of `max_model_len`."""
        config, model = self.config, self.model_config
        shape = (num_blocks, config.block_size, model.num_key_value_heads, model.head_dim)
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
        for source, target in step.block_copies:
            for k, v in self.kv_cache:
                k[target], v[target] = k[source], v[source]
        batch = self.builder.build(step)
        if len(batch.unknown_indices):
            batch.input_ids[batch.unknown_indices] = self.last_sampled[
                batch.unknown_sources].to(torch.int32)
        hidden = self.model.embed(batch.input_ids)
        hidden = self.model(hidden, batch.positions, self.kv_cache, batch)
        logits = self.model.compute_logits(hidden[batch.logits_indices])
        inputs = SamplingInputs.of(step.sampling, self.model_config.vocab_size, self.device)
        output = sample(logits, inputs)
        output.prompt_logprobs = self._score_prompts(hidden, batch.scored_indices, step)
        self.last_sampled = output.token_ids
        return output

    def _score_prompts(self, hidden: torch.Tensor, indices: torch.Tensor,
                       step: Step) -> list[Logprobs]:
        """Prompt logprobs of `step.scoring`'s positions; each is about the token that follows.

        Slice by slice: the logits of a whole prompt would be larger than the model. hidden:
        (num_tokens, hidden_size), indices: (p,) its rows.
        """
        following = [token_id for seq, positions in step.scoring.items()
                     for token_id in seq.token_ids[positions.start + 1:positions.stop + 1]]
        token_ids = torch.tensor(following, dtype=torch.int64).to(self.device, non_blocking=True)
        num_top = max((seq.params.prompt_logprobs for seq in step.scoring), default=0)
        parts = []
        for start in range(0, len(indices), MAX_SCORED_ROWS):
            piece = slice(start, start + MAX_SCORED_ROWS)
            logits = self.model.compute_logits(hidden[indices[piece]])
            parts.append(score(logits, token_ids[piece], num_top))
        return parts

    def synchronize(self) -> None:
        """Wait until the device is idle, before buffers that a lost step may read are reused."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give all memory back, to the system and not only to torch's pool."""
        self.synchronize()
        self.model = self.builder = self.last_sampled = None
        self.kv_cache = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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
