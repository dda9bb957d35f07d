"""What a machine has, and how much fits: the device, its dtype, and memory for the KV cache.

    asked            found                       becomes
    device="auto"    a GPU that torch can use    "cuda", else "cpu"
    dtype="auto"     a GPU without bfloat16      float16, or float32 where that overflows

Memory on a GPU is measured: the largest possible step is run once, and the cache gets the rest.

    total  | others' | weights | largest step's activations | KV blocks ........ | kept free |
           └────── gpu_memory_utilization of the total: may be in use ───────────┘

CUDA graphs, recorded when the cache is there, take their own working memory out of what is kept
free: a few hundred MB for 256 rows of a large vocabulary.

Memory that others use (another process on the GPU, a display) is what the driver reports as neither
free nor ours.

On a CPU a fixed share of what is free is taken, because a laptop's owner has other programs open.
Linux says what is available without swapping, and a container may be allowed less. Memory that a
step has freed is kept for the next one (`keep_freed_memory`): the first use of a new page costs
more than the arithmetic on it. Weights and caches ask for large pages (`zeros`). A page of the KV
cache takes memory from its first use on.

Invariant: a slow path is never silent. A slower choice that the user left open is returned with a
sentence; a choice that the user made and the machine lacks is an error with the remedy. Which
kernels can run is found out in self_test.py.

The cache is not sized by trial until memory is exhausted: a laptop that swaps is worse than a small
cache.
"""

import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.model_config import ModelConfig
from nanoserve.sequence import CoreRequest, Sequence, Step

BFLOAT16 = (8, 0)  # the first compute capability with bfloat16
# What can take the place of a dtype, the best first, and what that costs.
COSTS = {"bfloat16": "", "float16": ", whose range is smaller", "float32": ", which is slower"}
# Text networks whose residual stream outgrows float16, as their makers or vLLM say. Gemma 3n's does
# not: only its tower for images does, which is not run.
OVERFLOW = ("gemma2", "gemma3_text", "glm4", "plamo2")

CPU_MEMORY_SHARE = 0.25  # a share of the free memory
MIN_CACHE_TOKENS = 2 ** 16
UNKNOWN_MEMORY = 2 * 2 ** 30  # assumed free where the system doesn't say (neither Linux nor POSIX)
GB = 2 ** 30
# glibc's names in malloc.h, and their values: keep so much free memory at the heap's end; allocate
# on the heap if smaller than this (the highest value allowed); extend the heap by this much.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_MEMORY = {M_TRIM_THRESHOLD: GB, M_MMAP_THRESHOLD: 2 ** 25, M_TOP_PAD: 2 ** 26}
# A row of the largest step asks for everything that takes memory in the sampler.
EVERYTHING = dict(temperature=1.0, top_k=100, top_p=0.9, logprobs=20, logit_bias={0: 1.0})


# ---------------------------------------------------------------- device and dtype


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. "cuda:1" stays as it is. Raises `ValueError` for a GPU
    that isn't there."""
    if device == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = [f"cuda:{number}" for number in range(count)]
    if device == "auto":
        return "cuda" if there else "cpu"
    if not there or ":" in device and device not in there:
        raise ValueError(f"device={device!r}, but torch sees {', '.join(there) or 'no GPU'}: use "
                         'device="cpu" or "auto"')
    return device


def fit_dtype(config: EngineConfig, asked: EngineConfig,
              model: ModelConfig) -> tuple[EngineConfig, list[str]]:
    """A config whose dtype this device has and this network's numbers fit into, and a sentence if
    it is another than the checkpoint's. config: resolved. Raises `ValueError` where the user asked
    for a dtype that can't be used."""
    if config.dtype == "float32":
        return config, []
    reasons = {}
    if model.text_type in OVERFLOW:
        reasons["float16"] = (f"the numbers of {model.architecture} overflow in float16, which "
                              "ends at 65,504")
    if config.on_gpu and torch.cuda.get_device_capability(config.device) < BFLOAT16:
        reasons["bfloat16"] = f"{torch.cuda.get_device_name(config.device)} has no bfloat16"
    instead = next(dtype for dtype in (config.dtype, *COSTS) if dtype not in reasons)
    if instead == config.dtype:
        return config, []
    why = " and ".join(reasons.values())
    if asked.dtype != "auto":
        raise ValueError(f'dtype="{config.dtype}", but {why}: use "{instead}"')
    return replace(config, dtype=instead), [f"{why}: {instead} takes its place{COSTS[instead]}"]


# ------------------------------------------------------------- the size of the KV cache


def fit_to_cache(config: EngineConfig, num_blocks: int, asked: int | None,
                 generates: bool = True) -> tuple[EngineConfig, list[str]]:
    """Lower `max_model_len` to what the KV cache holds; also returns a message. config: resolved.
    asked: the user's own length. Raises `ValueError` if `asked` does not fit, or if a cache of one
    token should hold a prompt and an answer."""
    capacity = num_blocks * config.block_size
    if config.max_model_len <= capacity:
        return config, []
    remedy = "raise kv_cache_memory_bytes (or gpu_memory_utilization, num_gpu_blocks_override)"
    if generates and capacity < 2:
        raise ValueError("a KV cache of one token has no room for an answer behind a prompt: "
                         f"{remedy}")
    if asked is not None:
        raise ValueError(
            f"max_model_len={asked} does not fit in the KV cache of {capacity} tokens "
            f"({num_blocks} blocks of {config.block_size}): lower it, or {remedy}")
    said = (f"max_model_len is lowered from {config.max_model_len:,} to {capacity:,}, what the "
            f"KV cache holds; {remedy} for more")
    return replace(config, max_model_len=capacity), [said]


def largest_step(config: EngineConfig, num_drafts: int = 0) -> Step:
    """A step that takes as much memory as any can: the most rows and tokens, a first row as long as
    possible, logprobs of every position, and drafts for every row. All rows use block 0.
    config: resolved. num_drafts: of a row, if nothing else limits them.

    Kernels read keys where they lie, so it doesn't matter that nothing was computed before. Plain
    torch gathers a row's keys: on a GPU, long sequences can take more with it than is measured.
    """
    num_drafts = min(num_drafts, config.max_model_len - 1,
                     config.max_num_batched_tokens // config.max_num_seqs - 1)
    least = 1 + num_drafts
    left = config.max_num_batched_tokens - config.max_num_seqs * least
    step = Step(0)
    for row in range(config.max_num_seqs):
        num_tokens = 1 + min(left, config.max_model_len - least)  # without drafts
        left -= num_tokens - 1
        params = SamplingParams(**EVERYTHING, prompt_logprobs=20 if num_tokens > 1 else None)
        seq = Sequence(
            CoreRequest("largest step", params), [0] * num_tokens, row=row, num_unknown_tokens=1,
            block_table=[0] * -(-(num_tokens + num_drafts) // config.block_size))
        step.num_new_tokens[seq] = num_tokens + num_drafts
        if num_drafts:
            step.drafts[seq] = [0] * num_drafts
        step.starts.append(0)
        step.sampling.append(seq)
        if num_tokens > 1:
            step.prompt_logprob_positions[seq] = range(num_tokens - 1)
    return step


def gpu_budget(config: EngineConfig, device: torch.device,
               run_largest_step: Callable[[], None]) -> tuple[int, str]:
    """Bytes that are left for KV, negative if there are none, and how they were computed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)  # weights, and the largest step
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Not torch's: other processes, but also CUDA itself, compiled kernels, libraries' workspaces.
    others = total - free - torch.cuda.memory_reserved(device)
    budget = int(total * config.gpu_memory_utilization) - others - peak
    return budget, (
        f"gpu_memory_utilization={config.gpu_memory_utilization} of {total / GB:.1f} GB, less "
        f"{others / GB:.1f} GB that others use, less {peak / GB:.1f} GB for weights and the "
        "largest step")


def cpu_budget(local_size: int) -> tuple[int, str]:
    """As `gpu_budget`, on a CPU that `local_size` ranks share."""
    free = free_cpu_memory()
    return int(CPU_MEMORY_SHARE * free / local_size), (
        f"{CPU_MEMORY_SHARE:.0%} of the {free / GB:.1f} GB that are free, for {local_size} ranks")


def check_cpu_has(num_bytes: int, local_size: int) -> None:
    """Raises `ValueError` if `local_size` ranks can't have so many bytes each."""
    has = cpu_memory()
    if has is not None and num_bytes * local_size > has:
        raise ValueError(f"kv_cache_memory_bytes={num_bytes:,}, for each rank here, is more than "
                         f"the {has:,} bytes of this machine's memory: lower it")


def free_cpu_memory() -> int:
    """Bytes that this process may still take: the machine's free memory, or its container's. Where
    the system isn't Linux, half of the physical memory is taken to be free."""
    has = cpu_memory()
    available = UNKNOWN_MEMORY if has is None else has // 2
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


def cpu_memory() -> int | None:
    """The machine's bytes, free or not; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _page_cache(stat: Path) -> int:
    """Bytes of files, the checkpoint's say, that count as used but are dropped when needed."""
    if not stat.exists():
        return 0
    entries = dict(line.split() for line in stat.read_text().splitlines())
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


# ------------------------------------------------------------- memory as it is taken


def take_device(name: str, local_rank: int | None) -> torch.device:
    """The device of an engine, prepared. name: "cpu", "cuda:1", or "cuda", the user's current GPU.
    local_rank: this rank's GPU; None for an only rank.

    Memory that an earlier engine left in torch's own cache goes back to the GPU: otherwise torch
    would put small weights into that engine's large KV caches, and the rest of each would stay
    unused.
    """
    device = torch.device(name)
    if device.type != "cuda":
        keep_freed_memory()
        return device
    if local_rank is not None:
        torch.cuda.set_device(local_rank)
    with current(device):
        torch.cuda.empty_cache()
        return torch.device("cuda", torch.cuda.current_device())  # the number won't change


def current(device: torch.device) -> AbstractContextManager:
    """Within it `device` is the current one, on which kernels are launched and graphs recorded."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises `ValueError` if memory runs out inside. what: its purpose and the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:  # torch's, numpy's, mmap's
        raise ValueError(f"no memory for {what}") from error


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory, and not to return it to the system each time.

    A prefill's activations are tens of megabytes each. By default glibc maps such a tensor and
    unmaps it again, and the system zeroes every page anew, which takes a large share of a prefill's
    time. The setting is for the whole process, in which at most 1 GB stays unused. False where the
    C library is another one (musl, macOS).
    """
    try:
        return all([ctypes.CDLL(None).mallopt(*wish) for wish in KEPT_MEMORY.items()])
    except (AttributeError, OSError, TypeError):  # no such function; Windows: no such library
        return False


@contextmanager
def collector_off() -> Iterator[None]:
    """Without Python's garbage collector, for an engine's start. There nothing becomes garbage, but
    the collector would walk over all objects of the imported modules again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def full_float32() -> Iterator[None]:
    """Within, products and convolutions of float32 keep all their digits, for comparisons. On a GPU
    convolutions keep ten bits (TF32) by default. So do products where the user allows it, or eight
    on a CPU (`torch.set_float32_matmul_precision`). torch has two settings for this, and complains
    if they differ: afterwards both are restored."""
    backends = torch.backends
    kinds = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    older: list[Callable[[], None]] = []
    with suppress(RuntimeError):  # the user has used the newer setting
        older.append(partial(torch.set_float32_matmul_precision,
                             torch.get_float32_matmul_precision()))
    with suppress(RuntimeError):
        older.append(partial(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32))
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for restore in older:
            restore()
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


LARGE_PAGE, SLAB = 2 ** 21, 2 ** 25  # bytes: of a large page, and that small weights share


def zeros(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeroed memory of a CPU, in large pages where the system has them: for what is read in every
    step. The system finds and zeroes a page when it is first touched, so a KV cache costs what its
    used blocks take. device: "meta" for a tensor that has a size and no memory."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if torch.device(device).type == "meta" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    memory, first = mapped(size)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=first).view(shape)


class Slabs:
    """`zeros` for weights, which stay: small ones lie side by side, as far as a slab reaches. A
    matrix of 1 MB alone fills no large page, and with small pages reading it took 1.3 times as long
    (docs/log, 2026-11-29). A slab's memory is freed with the last weight in it."""

    def __init__(self):
        self.slab, self.end = lambda: None, 0  # a weak reference, and where the free part begins
        self.lock = threading.Lock()

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        if not 0 < size <= SLAB // 4:
            return zeros(*shape, dtype=dtype)
        with self.lock:
            memory = self.slab()
            if memory is None or self.end + size > len(memory):
                memory, self.end = mapped(SLAB)
                self.slab = weakref.ref(memory)
            first, self.end = self.end, self.end + size + -size % 64  # a line of the CPU's cache
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=first).view(shape)


lasting_zeros = Slabs().zeros


def mapped(size: int) -> tuple[mmap.mmap, int]:
    """Fresh memory, and where in it a large page begins from which on there is room for `size`. A
    tensor made of it keeps it."""
    private = dict(flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if os.name == "posix" else {}
    memory = mmap.mmap(-1, size + LARGE_PAGE, **private)
    if size >= LARGE_PAGE:  # else a small tensor would take a whole one
        with suppress(AttributeError, OSError):  # no such advice, or no such pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.int8).data_ptr() % LARGE_PAGE
