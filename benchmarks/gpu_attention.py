"""Attention's kernels, timed inside a CUDA graph, and the sweep over their launches."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton

from benchmarks.gpu_report import DEVICE, ON_GPU, Report, timed
from benchmarks.kernels import compiled
from nanoserve import triton_attention as kernels
from nanoserve.device import free_cpu_memory
from nanoserve.triton_fused import multiprocessors, table_line

CLONE = Path(__file__).parent.parent


class Case:
    """Rows of equal length over a cache of random numbers, several times at different places."""

    def __init__(self, size: SimpleNamespace, heads: tuple[int, int, int], block_size: int,
                 num_rows: int, query_len: int, prefix: int, memory: torch.Tensor | None = None):
        self.heads, self.num_rows, self.query_len = heads, num_rows, query_len
        self.size = size
        num_heads, num_kv_heads, head_dim = heads
        self.seq_len = prefix + query_len
        width = -(-self.seq_len // block_size)
        block = block_size * num_kv_heads * head_dim
        self.kv_bytes = (2 * num_rows * self.seq_len * num_kv_heads * head_dim
                         * size.dtype.itemsize)
        most = size.max_copies if query_len == 1 else 4  # a prefill is not about reading keys
        copies = min(max(1, -(-size.rotated_bytes // self.kv_bytes)), most)
        num_blocks = copies * num_rows * width
        if memory is None or memory.shape[1] < num_blocks * block:
            memory = random_memory(size, num_blocks * block)
        self.memory = memory
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = (part[:num_blocks * block].view(shape) for part in memory)
        generator = torch.Generator().manual_seed(0)
        tables = torch.randperm(num_blocks, generator=generator).view(copies, num_rows, width)
        tables = tables.to(DEVICE, torch.int32)
        self.q = torch.randn(num_rows * query_len, num_heads, head_dim, device=DEVICE).to(
            size.dtype)
        ends = torch.arange(num_rows + 1, device=DEVICE, dtype=torch.int32) * query_len
        seq_lens = torch.full((num_rows,), self.seq_len, device=DEVICE, dtype=torch.int32)
        self.batches = [SimpleNamespace(
            num_decodes=num_rows if query_len == 1 else 0, is_padded=False, seq_lens=seq_lens,
            cu_seqlens_q=ends, block_tables=table) for table in tables]
        self.scale = head_dim ** -0.5

    def run(self, batch: SimpleNamespace) -> torch.Tensor:
        return kernels.paged_attention(self.q, self.k_cache, self.v_cache, batch, self.scale)

    def seconds(self) -> float:
        """Of one launch, once it has been found to be right."""
        self.check()
        return timed(lambda: [self.run(batch) for batch in self.batches], self.size) / len(
            self.batches)

    def check(self) -> None:
        """The last queries of the first and the last row, against a softmax in float32."""
        batch = self.batches[-1]
        got = self.run(batch).view(self.num_rows, self.query_len, *self.q.shape[1:])
        q = self.q.view_as(got)
        few = min(self.query_len, 100)
        positions = torch.arange(self.seq_len - few, self.seq_len, device=DEVICE)
        hidden = torch.arange(self.seq_len, device=DEVICE)[None] > positions[:, None]
        for row in {0, self.num_rows - 1}:
            blocks = batch.block_tables[row].long()
            k, v = (cache[blocks].flatten(0, 1)[:self.seq_len].float().transpose(0, 1)
                    .repeat_interleave(self.heads[0] // self.heads[1], dim=0)
                    for cache in (self.k_cache, self.v_cache))  # (heads, keys, head_dim)
            scores = q[row, -few:].float().transpose(0, 1) @ k.transpose(1, 2) * self.scale
            expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            error = (got[row, -few:].transpose(0, 1).float() - expected).norm() / expected.norm()
            assert error < 1e-2, f"row {row} is wrong: relative error {float(error):.3f}"

    @property
    def flops(self) -> float:
        first = self.seq_len - self.query_len
        pairs = self.query_len * first + self.query_len * (self.query_len + 1) // 2
        return 4 * self.heads[0] * self.heads[2] * pairs * self.num_rows

    @property
    def bytes(self) -> float:
        return self.kv_bytes + 2 * self.q.numel() * self.q.element_size()


def random_memory(size: SimpleNamespace, numbers: int) -> torch.Tensor:
    """K and V of the largest case: made once, and cut as each case needs it."""
    memory = torch.empty(2, numbers, dtype=size.dtype, device=DEVICE)
    for part in memory.view(-1).split(2 ** 28):
        part.normal_()
    return memory


@contextlib.contextmanager
def launches(tiles: dict | None = None, splits: int | None = None) -> Iterator[None]:
    """Launch with these instead of the table's."""
    with contextlib.ExitStack() as stack:
        if tiles is not None:
            stack.enter_context(mock.patch.object(
                kernels, "_tiles", lambda arch, dtype, group, head_dim, is_int8, phase: (
                    tiles | dict(BLOCK_D=max(16, triton.next_power_of_2(head_dim))))))
        if splits is not None:
            stack.enter_context(mock.patch.object(
                kernels, "_num_splits", lambda *shapes: splits))
        yield


def sweep_of(size: SimpleNamespace, phase: str) -> list[dict]:
    """All combinations, the committed one first."""
    axes = size.decode_sweep if phase == "decode" else size.prefill_sweep
    found = [{}]
    for name, values in axes.items():
        found = [entry | {name: value} for entry in found for value in values]
    ours = committed(phase)
    return [ours, *(entry for entry in found if entry != ours)]


def sweep_order(size: SimpleNamespace) -> tuple[int, ...]:
    """Block sizes 16, 64, and 32 if there is time."""
    return size.block_sizes[0], *size.block_sizes[:0:-1]


def committed(phase: str) -> dict:
    return dict(kernels.LAUNCHES[table_line(DEVICE), phase])


def compile_share(size: SimpleNamespace, index: int, count: int, arch: str) -> list:
    """Every `count`th launch of the sweeps, for Triton's cache on the disk, from where the process
    that measures takes them: compiling takes longer than all of the timing. Nothing is launched, so
    that a worker needs no memory of the GPU. Returns the programs."""
    jobs = [(heads, block_size, phase, tiles) for block_size in sweep_order(size)
            for phase in ("decode", "prefill") for tiles in sweep_of(size, phase)
            for heads in size.heads.values()]
    programs = []
    for heads, block_size, phase, tiles in jobs[index::count]:
        for splits in (1, 2) if phase == "decode" else (1,):
            with launches(tiles, splits):
                case = Case(size, heads, block_size, 1, 1 if phase == "decode" else 16, 15)
                try:
                    programs += compiled(arch, partial(case.run, case.batches[0]))
                except Exception as error:  # the sweep will report it
                    print(phase, tiles, type(error).__name__, error, flush=True)
    return programs


def num_workers() -> int:
    """Half of the cores, or as many as there is memory for: a compiler beside torch takes 2 GB."""
    return max(1, min((os.cpu_count() or 1) // 2, free_cpu_memory() // 2 ** 31))


def compile_ahead(report: Report, workers: int) -> dict:
    """Starts the workers, and waits for them, but for half of the time at most."""
    start, end = time.monotonic(), time.monotonic() + report.left() / 2
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    running = [subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", "--compile",
                                 f"{i}/{workers}/{arch}"], cwd=CLONE, env=hidden)
               for i in range(workers)]
    try:
        for worker in running:
            worker.wait(timeout=max(1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # what is not compiled by now is compiled when it is its turn
    finally:
        for worker in running:
            worker.kill()
            worker.wait()
    return dict(seconds=round(time.monotonic() - start, 1),
                codes=[worker.returncode for worker in running])


def measure_attention(report: Report, size: SimpleNamespace, workers: int) -> None:
    if workers and ON_GPU:
        report.measure("compile", 60, compile_ahead, report, workers)
    largest = max(size.batches) * max(size.contexts) * max(k * d for _, k, d in
                                                           size.heads.values())
    try:
        memory = random_memory(size, largest)
    except RuntimeError:  # a smaller card: each case takes its own, or is a line with an error
        memory = None
    report.measure("decode table", 20, decode_table, report, size, memory)
    report.measure("prefill table", 20, prefill_table, report, size, memory)
    report.measure("decode splits", 20, decode_splits, report, size, memory)
    report.measure("decode sweep", 30, sweep, report, size, memory, "decode")
    report.measure("prefill sweep", 30, sweep, report, size, memory, "prefill")


def quick_tables(report: Report, size: SimpleNamespace) -> None:
    """One head size and one block size, for few and many rows."""
    small = SimpleNamespace(**vars(size) | dict(
        heads=dict(list(size.heads.items())[:1]), block_sizes=size.block_sizes[:1],
        batches=(size.batches[0], size.batches[-1]), contexts=size.contexts[:2][-1:],
        prefills=size.prefills[:2]))
    report.measure("decode table", 20, decode_table, report, small, None)
    report.measure("prefill table", 20, prefill_table, report, small, None)


def row_of(report: Report, case: Case, **about) -> dict:
    """One line of a table: time, and shares of the ceilings (0 if these could not be measured)."""
    limits = report.results.get("ceilings") or {}
    try:
        seconds = case.seconds()
    except Exception as error:  # this launch's: one line of the table
        return about | dict(error=f"{type(error).__name__}: {str(error)[:200]}")
    speed, rate = case.bytes / seconds, case.flops / seconds
    return about | dict(
        microseconds=round(seconds * 1e6, 2), tb_per_s=round(speed / 1e12, 4),
        tflop_per_s=round(rate / 1e12, 3),
        of_copy=round(speed / limits["copy"], 4) if "copy" in limits else None,
        of_product=round(rate / limits["product"], 4) if "product" in limits else None)


def decode_table(report: Report, size: SimpleNamespace, memory: torch.Tensor) -> list[dict]:
    """The committed launch at every shape and block size."""
    rows = []
    for name, heads in size.heads.items():
        for block_size in size.block_sizes:
            for num_rows in size.batches:
                for context in size.contexts:
                    if report.left() < 5 and ON_GPU:
                        return rows
                    case = Case(size, heads, block_size, num_rows, 1, context - 1, memory)
                    rows.append(row_of(report, case, heads=name, block_size=block_size,
                                       batch=num_rows, context=context))
    return rows


def prefill_table(report: Report, size: SimpleNamespace, memory: torch.Tensor) -> list[dict]:
    rows = []
    for name, heads in size.heads.items():
        for block_size in size.block_sizes:
            for num_rows, query_len, prefix in size.prefills:
                if report.left() < 5 and ON_GPU:
                    return rows
                case = Case(size, heads, block_size, num_rows, query_len, prefix, memory)
                rows.append(row_of(report, case, heads=name, block_size=block_size,
                                   batch=num_rows, queries=query_len, prefix=prefix))
    return rows


def decode_splits(report: Report, size: SimpleNamespace, memory: torch.Tensor) -> list[dict]:
    """Numbers of splits, and which of them the engine takes."""
    rows = []
    for name, heads in size.heads.items():
        for num_rows in size.batches:
            for context in size.contexts:
                ours = kernels._num_splits(num_rows, heads[1], (
                    kernels.SPLIT_PROGRAMS * multiprocessors(DEVICE)))
                for splits in size.splits:
                    if report.left() < 5 and ON_GPU:
                        return rows
                    with launches(splits=splits):
                        case = Case(size, heads, size.block_sizes[0], num_rows, 1, context - 1,
                                    memory)
                        rows.append(row_of(report, case, heads=name, batch=num_rows,
                                           context=context, splits=splits, ours=splits == ours))
    return rows


def sweep(report: Report, size: SimpleNamespace, memory: torch.Tensor, phase: str) -> dict:
    """Every launch at some shapes, launch by launch, so that what there is time for is complete.
    Best is what takes the least time relative to the committed launch: the geometric mean over the
    shapes, for each block size and all heads."""
    shapes = [(rows, 1, context - 1) for rows, context in size.sweep_shapes] if (
        phase == "decode") else size.prefills
    rows, end = [], time.monotonic() + max(report.left() - 10, 1) * (
        0.5 if phase == "decode" else 1.0)
    for block_size in sweep_order(size):
        for tiles in sweep_of(size, phase):
            for name, heads in size.heads.items():
                for num_rows, query_len, prefix in shapes:
                    if time.monotonic() > end and ON_GPU:
                        return dict(best=best(rows, phase), rows=rows, complete=False)
                    with launches(tiles):
                        case = Case(size, heads, block_size, num_rows, query_len, prefix, memory)
                        rows.append(row_of(report, case, heads=name, block_size=block_size,
                                           launch=tiles, shape=[num_rows, query_len, prefix]))
    return dict(best=best(rows, phase), rows=rows, complete=True)


def best(rows: list[dict], phase: str, show: int = 5) -> list[dict]:
    """Per block size the fastest launches: their time over the committed launch's, below 1 is
    faster. A launch that failed at a shape, or had no time for all of them, is left out."""
    times: dict = {}
    for row in rows:
        launch = json.dumps(row["launch"])
        times.setdefault((row["block_size"], launch), {})[
            (row["heads"], *row["shape"])] = row.get("microseconds")
    found = []
    for block_size in dict.fromkeys(row["block_size"] for row in rows):
        ours = times.get((block_size, json.dumps(committed(phase))))
        if not ours or None in ours.values():
            continue
        ratios = []
        for (size, launch), theirs in times.items():
            if size == block_size and set(theirs) == set(ours) and None not in theirs.values():
                logs = [math.log(max(theirs[at], 1e-3) / max(ours[at], 1e-3)) for at in ours]
                ratios.append((math.exp(statistics.mean(logs)), launch))
        for ratio, launch in sorted(ratios)[:show]:
            found.append(dict(block_size=block_size, launch=json.loads(launch),
                              time_of_ours=round(ratio, 4),
                              ours=launch == json.dumps(committed(phase))))
    return found
