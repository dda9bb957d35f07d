"""How much memory there is for the KV cache, and what is said where there is too little."""

import dataclasses
import gc
import mmap
import platform
import re
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from dummy_engines import assert_serves, start
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture
from test_build import exit_code
from test_build import start as start_process

from nanoserve import SamplingParams, ops
from nanoserve import device as memory
from nanoserve.config import EngineConfig
from nanoserve.device import free_cpu_memory
from nanoserve.model_config import ModelConfig
from nanoserve.model_runner import ModelRunner

# A block of 16 tokens: 2 layers, K and V, 2 KV heads of 16 numbers, 4 bytes each.
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4


def test_kv_cache_memory_bytes_is_met_to_the_block(dummy):
    llm = start(dummy, kv_cache_memory_bytes=5 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert llm.scheduler.blocks.num_blocks == 5
    held = sum(t.numel() * t.element_size() for kv in llm.runner.kv_cache for t in kv)
    assert held == 5 * BLOCK_BYTES
    half = start(dummy, kv_cache_memory_bytes=5 * BLOCK_BYTES, dtype="bfloat16", block_size=8)
    assert half.scheduler.blocks.num_blocks == 20  # half the bytes a number, half the tokens
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes=1,000,.* bytes of this machine"):
        start(dummy, kv_cache_memory_bytes=10 ** 15)  # reserved, it would fail when it is used


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_a_cache_has_no_block_too_many(dummy, kernels):
    """A namespace may fill a cache up to whole pieces of its own: the compiled one's are of 16
    slots, which five blocks of 3 almost fill. Blocks are counted by what they take in the end."""
    for block_size, num_blocks, kept in ((16, 257, 257), (16, 1, 1), (3, 5, 16), (3, 16, 16)):
        llm = start(dummy, kernels=kernels, block_size=block_size, max_num_seqs=1,
                    num_gpu_blocks_override=num_blocks)
        held = sum(tensor.nbytes for kv in llm.runner.kv_cache for tensor in kv)
        assert held == (kept if kernels == "cpu" else num_blocks) * llm.runner.block_bytes
        assert llm.runner.block_bytes == BLOCK_BYTES * block_size // 16
        assert_serves(llm)


@pytest.mark.parametrize("options, there", [
    (dict(kv_cache_memory_bytes=BLOCK_BYTES - 1), f"{BLOCK_BYTES - 1:,} .*kv_cache"), ({}, "0 ")])
def test_no_room_for_one_block_is_refused_with_the_numbers(dummy, monkeypatch, options, there):
    """Memory used by *other* processes made the block count negative (voxcpm #27). Saying the size
    outright still works."""
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 0)
    with pytest.raises(ValueError, match=f"{BLOCK_BYTES:,} bytes.* {there}"):
        start(dummy, **options)
    assert_serves(start(dummy, kv_cache_memory_bytes=BLOCK_BYTES))


@pytest.mark.parametrize("free, num_blocks", [
    (40 * BLOCK_BYTES, 10),  # a quarter of what is free
    (2 ** 50, 2 ** 16 // 16),  # but no more than a small engine can use: 65,536 tokens
])
def test_a_cpus_cache_takes_a_share_of_the_free_memory(dummy, monkeypatch, free, num_blocks):
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: free)
    assert start(dummy, max_num_seqs=8).scheduler.blocks.num_blocks == num_blocks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_for_the_next_step():
    """Resident memory with four tensors of 24 MB, and when they are freed, in a process of its own.
    Where nothing is asked of glibc it goes back to the system."""
    def keeps() -> int:
        assert memory.keep_freed_memory()
        tensors = [torch.ones(6 * 2 ** 20) for _ in range(4)]
        most = resident()
        del tensors
        return most - resident() < 2 ** 24

    assert exit_code(start_process(keeps)) == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


GIB = 2 ** 30


def gpu_blocks(dummy, monkeypatch, others: float, weights: float, step: float,
               **options) -> int:
    """The number of blocks on a card of 80 GiB that is made up. others, weights, step: GiB that
    are in use, the last one while the largest step runs, which must be between two looks."""
    config = ModelConfig.from_folder(dummy)
    asked = EngineConfig(model="none", load_format="dummy", kernels="torch", max_num_seqs=8,
                         max_model_len=256, **options)
    runner = ModelRunner(dataclasses.replace(asked.resolved("cuda", config), device="cpu"), config,
                         dummy)
    runner.device = torch.device("cuda")
    log, unused = [], [0.5]  # GiB that torch holds without using them, until empty_cache
    answers = dict(
        reset_peak_memory_stats=lambda: None, synchronize=lambda: None,
        empty_cache=lambda: unused.__setitem__(0, 0),
        max_memory_allocated=lambda: int((weights + step) * GIB),
        memory_reserved=lambda: int((weights + unused[0]) * GIB),
        mem_get_info=lambda: (int((80 - others - weights - unused[0]) * GIB), 80 * GIB))
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, answer=answer: (
            log.append(name) or answer()))
    monkeypatch.setattr(runner, "run_largest_step", lambda: (
        log.append("step"), unused.__setitem__(0, 0.5)))
    monkeypatch.setattr(memory, "MIN_CACHE_TOKENS", 2 ** 40)  # nobody asks for less
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    num_blocks = runner.count_kv_blocks()
    order = [name for name in log if name not in ("empty_cache", "memory_reserved", "mem_get_info")]
    assert not order or order == [
        "reset_peak_memory_stats", "step", "synchronize", "max_memory_allocated"]
    return num_blocks


def test_a_gpus_cache_is_what_the_largest_step_leaves(dummy, monkeypatch):
    """0.9 * 80 GiB, less 3 of others, 8 of weights and 2.5 that the largest step takes for a while:
    58.5 GiB."""
    assert gpu_blocks(dummy, monkeypatch, 3, 8, 2.5) == int(58.5 * GIB) // BLOCK_BYTES
    half = gpu_blocks(dummy, monkeypatch, 3, 8, 2.5, gpu_memory_utilization=0.5)
    assert half == int(26.5 * GIB) // BLOCK_BYTES
    assert gpu_blocks(dummy, monkeypatch, 3, 8, 2.5, kv_cache_memory_bytes=BLOCK_BYTES * 5) == 5
    with pytest.raises(ValueError, match="memory_utilization=0.9 .*80.0 GB.*70.0 GB.*2.5 GB"):
        gpu_blocks(dummy, monkeypatch, others=70, weights=2, step=0.5)


@pytest.mark.parametrize("options, num_tokens", [
    (dict(max_num_batched_tokens=300, max_num_seqs=5, max_model_len=100), [100, 100, 98, 1, 1]),
    (dict(max_num_batched_tokens=7, max_num_seqs=7), [1] * 7),
    (dict(max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=40), [40, 40, 40]),
])
def test_the_largest_step_is_one_that_runs(dummy, monkeypatch, options, num_tokens):
    """All rows, all tokens, a prompt's logprobs, every sampling control; and it leaves nothing."""
    llm = start(dummy, **options)
    launched = []
    launch = llm.runner.launch
    monkeypatch.setattr(llm.runner, "launch", lambda step: launched.append(step) or launch(step))
    llm.runner.run_largest_step()
    step, = launched
    assert list(step.num_new_tokens.values()) == num_tokens
    assert step.sampling == list(step.num_new_tokens)
    assert all(seq.request.has_controls for seq in step.sampling)
    assert list(map(len, step.prompt_logprob_positions.values())) == [
        n - 1 for n in num_tokens if n > 1]
    assert (llm.runner.kv_cache, llm.runner.builder, llm.runner.last_tokens) == ([], None, None)


def meminfo(folder: Path, monkeypatch, **files: str) -> int:
    """`free_cpu_memory` on a machine whose /proc and /sys are `folder`."""
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    group = folder / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    for name, content in files.items():
        (group / name.replace("__", "/").replace("_dot_", ".")).write_text(content)
    monkeypatch.setattr(memory, "Path",
                        lambda *parts: folder.joinpath(*[part.lstrip("/") for part in parts]))
    return free_cpu_memory()


@pytest.mark.parametrize("files, expected", [
    ({}, 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="1000000\n"), 2_000_000),
    (dict(memory_dot_max="max\n", memory_dot_current="1000000\n"), 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="4000000\n"), 0),  # never negative
    ({"memory__memory_dot_limit_in_bytes": "3000000\n",
      "memory__memory_dot_usage_in_bytes": "500000\n"}, 2_500_000),
    ({"memory__memory_dot_limit_in_bytes": "9223372036854771712\n",
      "memory__memory_dot_usage_in_bytes": "500000\n"}, 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="2800000\n",
          memory_dot_stat="anon 700000\nfile 2100000\ninactive_file 1500000\n"), 1_700_000),
], ids=["no container", "limit", "no limit", "over the limit", "cgroup v1", "v1 no limit",
        "page cache"])
def test_a_container_counts_its_own_limit(tmp_path, monkeypatch, files, expected):
    """What a container uses includes files that were only read, such as the checkpoint: the kernel
    drops those when memory is asked for, so they are free (as `docker stats` counts it)."""
    assert meminfo(tmp_path, monkeypatch, **files) == expected


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(),
                    reason="the system has no large pages")
def test_what_is_read_again_and_again_lies_in_large_pages():
    """Linux marks such an area as "hg"."""
    zeros = memory.zeros(3, 2 ** 21, dtype=torch.int32)
    assert zeros.shape == (3, 2 ** 21) and zeros.dtype == torch.int32 and not zeros.any()
    zeros[1, 5] = 7
    assert zeros.sum() == 7 and zeros.view(-1)[2 ** 21 + 5] == 7
    middle = zeros.data_ptr() + zeros.nbytes // 2
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$",
                       Path("/proc/self/smaps").read_text(), re.M | re.S)
    flags, = (flags.split() for start, end, flags in areas
              if int(start, 16) <= middle < int(end, 16))
    assert "hg" in flags
    assert memory.zeros(0, 5, dtype=torch.bfloat16).shape == (0, 5)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells")
def test_memory_that_nothing_has_used_yet_costs_nothing():
    before = resident()
    cache = memory.zeros(256, 2 ** 20, dtype=torch.int8)
    assert resident() - before < 2 ** 24
    cache[:128] = 1
    assert 2 ** 27 <= resident() - before < 2 ** 27 + 2 ** 24
    del cache
    assert resident() - before < 2 ** 24


def test_a_cache_that_memory_can_not_hold_is_explained(dummy):
    with pytest.raises(ValueError, match="KV cache.*num_gpu_blocks"):
        start(dummy, num_gpu_blocks_override=10 ** 13)
    with pytest.raises(ValueError, match="max_num_batched_tokens=1,000,000"):
        start(dummy, num_gpu_blocks_override=8, max_num_batched_tokens=10 ** 15)


# --------------------------------------------------------------- the current GPU


def test_an_engine_keeps_to_its_gpu_in_every_thread(dummy, monkeypatch):
    """The current GPU is a thread's: a server's engine on cuda:1 stepped in a thread of its own,
    whose GPU is 0. All operators, and what extras do before a launch, run within `on_device`."""
    here, used = threading.local(), set()

    @contextmanager
    def on_device(runner):
        before, here.is_current = getattr(here, "is_current", False), True
        yield
        here.is_current = before

    def seen(name: str, function):
        def call(*args, **options):
            assert here.is_current, f"{name} outside of on_device"
            used.add((name, threading.current_thread().name))
            return function(*args, **options)
        return call

    monkeypatch.setattr(ModelRunner, "on_device", on_device)
    names = [name for name in ops.__all__ if name not in (
        "experts", "thresholds", "embed", "new_cache")]
    for name in names:
        monkeypatch.setattr(ops, name, seen(name, getattr(ops, name)))
    engine = start(dummy, kernels="torch")
    engine.hooks.launching.append(seen("an extra", lambda step: None))

    def work():
        params = [SamplingParams(temperature=heat, max_tokens=3) for heat in (0, 1)]
        engine.generate([[1, 2, 3], [4]], params, use_tqdm=False)
        engine.sleep(level=1)
        engine.wake_up()
        engine.generate([[1, 2, 3]], params[0], use_tqdm=False)

    thread = threading.Thread(target=work, name="another")
    thread.start()
    thread.join()
    assert {name for name, where in used if where == "another"} >= {
        "an extra", *names} - {"prepack"}


def test_a_gpu_by_its_number_is_the_current_one_within(monkeypatch):
    """torch's own context manager gets it; a CPU needs none."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device",
                        lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1].index)
    device = memory.take_device("cuda:1", None)
    assert device == torch.device("cuda", 1) == entered.pop()
    with memory.current(device), memory.current(torch.device("cpu")):
        assert entered == [device]


def test_the_garbage_collector_is_off_while_an_engine_starts_and_then_as_it_was():
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with pytest.raises(ValueError), memory.collector_off():
                assert not gc.isenabled()
                raise ValueError
            assert gc.isenabled() is was_on
        finally:
            gc.enable()


def test_small_weights_lie_side_by_side_and_are_freed_together():
    slabs = memory.Slabs()
    one, two = (slabs.zeros(3, 5, dtype=torch.int32) for _ in range(2))
    assert one.data_ptr() % memory.LARGE_PAGE == 0 and two.data_ptr() == one.data_ptr() + 64
    rest = [slabs.zeros(memory.SLAB // 4, dtype=torch.int8) for _ in range(5)]
    large = slabs.zeros(memory.SLAB, dtype=torch.int8)  # has memory of its own
    begins = [made.data_ptr() % memory.LARGE_PAGE == 0 for made in (*rest, large)]
    assert begins == [False] * 4 + [True] * 2  # four begin behind `two`, the fifth a new slab
    assert not any(int(made.count_nonzero()) for made in (one, two, *rest, large))
    one.fill_(1)
    assert not two.any()
    del rest, large
    assert slabs.slab() is None  # nothing is left in the newest
    two.fill_(1)
