"""What nanoserve does on a GPU, measured: the kernels, the engine, and what each idea is worth.

    python tests/gpu/measure.py                         everything, in less than 25 minutes
    python tests/gpu/measure.py --part attention        or a part of it, in less than 10:
    python tests/gpu/measure.py --part engine           one of attention, engine, ablation
    python tests/gpu/measure.py --readme gpu-results/*.json     README's table of these results
    python tests/gpu/measure.py --rehearse              all of it at toy sizes, without a GPU

Shares are of what this machine really does: its own copy of 2 GB, its own product of two matrices
of random numbers, measured first. The floor of a workload is the sum over the steps that were
scheduled of the bytes and flops they can't do without, in `roofline`. What is timed reads memory
that no cache still has: tables take turns, so that no step finds the keys of the one before.

Kernels are timed inside a CUDA graph, as the engine runs them; otherwise the host's time to launch
them would be measured. Before it is timed, each launch is held against a softmax in float32.

Nothing is lost: after each part all results so far are written, a part that fails leaves its
traceback and the next one begins, and a part for which there is no time left says so.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest import mock

import torch

if not torch.cuda.is_available():  # before anything imports triton, which decides at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton

from nanoserve import LLM, SamplingParams
from nanoserve.device import kernels
from nanoserve.device.kernels_fused import table_line

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RESULTS = Path(__file__).with_name("results.json")
MINUTES = {"attention": 9, "engine": 9, "ablation": 7, "all": 24}
# L layers, h hidden, H and K heads, D head size, I intermediate, V vocabulary: Qwen3's.
MODELS = {
    "Qwen3-0.6B": dict(L=28, h=1024, H=16, K=8, D=128, I=3072, V=151936, tied=True),
    "Qwen3-8B": dict(L=36, h=4096, H=32, K=8, D=128, I=12288, V=151936, tied=False),
}
MODES = {  # the ablation: what a loop without ideas does, and one idea more at a time
    "eager, no overlap": dict(enforce_eager=True, async_scheduling=False),
    "+ graphs": dict(enforce_eager=False, async_scheduling=False),
    "+ overlap": dict(enforce_eager=False, async_scheduling=True),
}
REAL = SimpleNamespace(
    dtype=torch.bfloat16, copy_bytes=2 ** 31, matrix=8192, rotated_bytes=2 ** 29, repeats=7,
    heads={"0.6B": (16, 8, 128), "8B": (32, 8, 128)}, block_sizes=(16, 32, 64),
    batches=(1, 8, 64, 256), contexts=(512, 2048, 8192), splits=(1, 2, 4, 8, 16, 32),
    prefills=((16, 512, 0), (4, 2048, 0), (1, 8192, 0), (4, 512, 7680)),  # rows, queries, prefix
    decode_sweep=dict(BLOCK_M=(16,), BLOCK_N=(16, 32, 64, 128), num_warps=(4, 8),
                      num_stages=(2, 3, 4)),
    prefill_sweep=dict(BLOCK_M=(64, 128), BLOCK_N=(32, 64, 128), num_warps=(4, 8),
                       num_stages=(2, 3, 4)),
    sweep_shapes=((1, 8192), (8, 2048), (64, 2048), (256, 2048)), max_copies=128,
    models=MODELS, num_requests=256, lengths=(100, 1024), max_token_id=10000,
    stream=(1024, 256), profile=(256, 512, 10), warm_up=(64, 300, 8),
    options=dict(max_model_len=4096, dtype="bfloat16"))
TOY_SIZES = dict(L=1, h=32, H=2, K=1, D=16, I=32, V=64)
TOY = SimpleNamespace(
    dtype=torch.float32, copy_bytes=2 ** 16, matrix=64, rotated_bytes=2 ** 14, repeats=1,
    heads={"toy": (2, 1, 16)}, block_sizes=(16,), batches=(1, 2), contexts=(32,), splits=(1, 2),
    prefills=((2, 20, 0), (1, 9, 16)),
    decode_sweep=dict(BLOCK_M=(16,), BLOCK_N=(16, 32), num_warps=(4,), num_stages=(2,)),
    prefill_sweep=dict(BLOCK_M=(16,), BLOCK_N=(16,), num_warps=(4,), num_stages=(2, 3)),
    sweep_shapes=((1, 32), (2, 40)), max_copies=2,
    models={"Qwen3-0.6B": TOY_SIZES | dict(tied=True)},
    num_requests=3, lengths=(2, 5), max_token_id=60, stream=(6, 8), profile=(2, 5, 2),
    warm_up=(2, 5, 2),
    options=dict(max_model_len=64, dtype="float32", device=DEVICE.type, kernels="triton",
                 num_gpu_blocks_override=64))


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=MINUTES, default="all")
    parser.add_argument("--out", help="folder for the results; default: $OUT, or gpu-results")
    parser.add_argument("--minutes", type=float, help="stop in time; default: by part, "
                        + ", ".join(f"{part} {n}" for part, n in MINUTES.items()))
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on a CPU, too")
    parser.add_argument("--workers", type=int, default=12,
                        help="processes that compile ahead of the sweep; 0: none")
    parser.add_argument("--readme", nargs="+", metavar="FILE",
                        help=f"join these in {RESULTS.name}, which README's table, printed here, "
                             "is held against")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # "2/12": a worker's share
    args = parser.parse_args(arguments)
    if args.readme:
        results = joined([json.loads(Path(file).read_text()) for file in args.readme])
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(readme_table(results))
        return results
    if not ON_GPU and not args.rehearse:
        parser.error("torch sees no GPU: --rehearse runs everything at toy sizes")
    size = TOY if args.rehearse else REAL
    if args.compile:
        compile_share(size, *map(int, args.compile.split("/")))
        return {}
    out = Path(args.out or os.environ.get("OUT") or "gpu-results")
    report = Report(out, args.part, 60 * (args.minutes or MINUTES[args.part]))
    report.measure("machine", 0, machine)
    report.measure("ceilings", 0, ceilings, size)
    for part, measure_part in (("attention", measure_attention), ("engine", measure_engine),
                               ("ablation", measure_ablation)):
        if args.part in (part, "all"):
            share = MINUTES[part] / sum(MINUTES[p] for p in ("attention", "engine", "ablation"))
            if args.part == "all":  # no part may eat up the time of those that follow it
                report.until = min(report.end, time.monotonic() + share * report.seconds)
            measure_part(report, size, args.workers)
    report.write()
    print(summary(report.results), flush=True)
    return report.results


class Report:
    """Results by name, on the disk after each of them; and the time that is left."""

    def __init__(self, out: Path, part: str, seconds: float):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.part, self.seconds = out, part, seconds
        self.end = self.until = time.monotonic() + seconds
        self.results: dict = {}

    def left(self) -> float:
        return self.until - time.monotonic()

    def measure(self, name: str, needs: float, function: Callable, *args) -> object:
        """`function(*args)`, whatever becomes of it. needs: seconds it is worth starting with."""
        print(f"--- {name} ({self.left():.0f} s left)", flush=True)
        start, result = time.monotonic(), None
        if self.left() < needs and ON_GPU:
            self.results[name] = dict(skipped=f"{self.left():.0f} s were left, {needs} needed")
        else:
            try:
                result = self.results[name] = function(*args)
            except Exception:  # a part's: all others are still worth having
                self.results[name] = dict(error=traceback.format_exc())
        if result is None:
            print(self.results[name], flush=True)
        print(f"    {time.monotonic() - start:.1f} s", flush=True)
        self.write()
        return result

    def write(self) -> None:
        (self.out / f"{self.part}.json").write_text(json.dumps(self.results, indent=1))
        (self.out / f"{self.part}.md").write_text(markdown(self.results))


def joined(parts: list[dict]) -> dict:
    """Of several runs' results the first that is one: a skipped or failed part doesn't count. Of
    the sweeps the best launches, not every one."""
    results: dict = {}
    for part in parts:
        for name, result in part.items():
            if name not in results or failed(results[name]):
                results[name] = result
    return {name: {key: value for key, value in result.items() if key != "rows"} if isinstance(
        result, dict) else result for name, result in results.items()}


def failed(result) -> bool:
    return not result or isinstance(result, dict) and bool({"error", "skipped"} & set(result))


# -------------------------------------------------------- machine, ceilings


def machine() -> dict:
    found = dict(date=datetime.now(timezone.utc).strftime("%Y-%m-%d"), torch=torch.__version__,
                 triton=triton.__version__, cuda=torch.version.cuda,
                 python=platform.python_version(), cpu_cores=os.cpu_count(), device="cpu")
    if ON_GPU:
        about = torch.cuda.get_device_properties(DEVICE)
        found |= dict(device=about.name, memory_gb=round(about.total_memory / 2 ** 30, 1),
                      multiprocessors=about.multi_processor_count,
                      capability=f"{about.major}.{about.minor}", table=table_line(DEVICE))
        fields = "driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        try:
            found["driver"] = subprocess.run(
                ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True,
                text=True, timeout=20, check=True).stdout.strip().splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            found["driver"] = repr(error)
    print(json.dumps(found, indent=1), flush=True)
    return found


def ceilings(size: SimpleNamespace) -> dict:
    """bytes/s of a large copy, read and written bytes counted; flop/s of a large product."""
    source = torch.empty(size.copy_bytes, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = 2 * size.copy_bytes / timed(lambda: target.copy_(source), size)
    a, b = (torch.randn(size.matrix, size.matrix, device=DEVICE).to(size.dtype) for _ in "ab")
    product = 2 * size.matrix ** 3 / timed(lambda: a @ b, size)
    print(f"copy {copy / 1e12:.2f} TB/s, matrix product {product / 1e12:.0f} TFLOP/s", flush=True)
    return dict(copy=copy, product=product)


def timed(call: Callable, size: SimpleNamespace) -> float:
    """Seconds that `call` takes on the device, the median of some replays of a graph of it."""
    call()
    if not ON_GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(size.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1000


# ---------------------------------------------------------------- attention


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
            num_decodes=num_rows if query_len == 1 else 0, seq_lens=seq_lens, cu_seqlens_q=ends,
            block_tables=table) for table in tables]
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
                kernels, "_tiles", lambda arch, phase, dtype, group, head_dim: tiles | dict(
                    BLOCK_D=max(16, triton.next_power_of_2(head_dim)))))
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
    return [ours] * (ours in found) + [entry for entry in found if entry != ours]


def sweep_order(size: SimpleNamespace) -> tuple[int, ...]:
    """Block sizes 16, 64, and 32 if there is time."""
    return size.block_sizes[0], *size.block_sizes[:0:-1]


def committed(phase: str) -> dict:
    return dict(kernels.LAUNCHES[table_line(DEVICE), phase])


def compile_share(size: SimpleNamespace, index: int, count: int) -> None:
    """Every `count`th launch of the sweeps, for Triton's cache on the disk, from where the process
    that measures takes them: compiling takes longer than all of the timing."""
    jobs = [(heads, block_size, phase, tiles) for block_size in sweep_order(size)
            for phase in ("decode", "prefill") for tiles in sweep_of(size, phase)
            for heads in size.heads.values()]
    for heads, block_size, phase, tiles in jobs[index::count]:
        for splits in (1, 2) if phase == "decode" else (1,):
            with launches(tiles, splits):
                case = Case(size, heads, block_size, 1, 1 if phase == "decode" else 16, 15)
                try:
                    case.run(case.batches[0])
                except Exception as error:  # too much shared memory, say: the sweep will report it
                    print(phase, tiles, type(error).__name__, error, flush=True)
    if ON_GPU:
        torch.cuda.synchronize()


def compile_ahead(report: Report, size: SimpleNamespace, workers: int) -> dict:
    """Starts the workers, and waits for them, but for half of the time at most."""
    start, end = time.monotonic(), time.monotonic() + report.left() / 2
    flags = ["--rehearse"] if size is TOY else []
    running = [subprocess.Popen([sys.executable, __file__, "--compile", f"{i}/{workers}", *flags])
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
    if workers:
        report.measure("compile", 60, compile_ahead, report, size, workers)
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
                ours = kernels._num_splits(num_rows, heads[1], table_line(DEVICE))
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


# ------------------------------------------------------------------- engine


def config_json(sizes: dict, dtype: str) -> dict:
    return dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", dtype=dtype,
        num_hidden_layers=sizes["L"], hidden_size=sizes["h"], num_attention_heads=sizes["H"],
        num_key_value_heads=sizes["K"], head_dim=sizes["D"], intermediate_size=sizes["I"],
        vocab_size=sizes["V"], tie_word_embeddings=sizes["tied"], rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=40960, hidden_act="silu", eos_token_id=1)


@contextlib.contextmanager
def started(sizes: dict, size: SimpleNamespace, **options) -> Iterator[tuple[LLM, dict]]:
    """An engine with random weights, and what its start took."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_json(sizes, size.options["dtype"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        begin = time.perf_counter()
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True,
                 **size.options | options) as engine:
            took = dict(seconds=round(time.perf_counter() - begin, 1),
                        kv_blocks=engine.scheduler.blocks.num_blocks)
            if engine.runner.graphs is not None:
                took |= dict(graphs=len(engine.runner.graphs.sizes),
                             graph_seconds=round(engine.runner.graphs.seconds, 1),
                             graph_mb=round(engine.runner.graphs.memory / 2 ** 20))
            if ON_GPU:
                free, total = torch.cuda.mem_get_info()
                took |= dict(used_gb=round((total - free) / 2 ** 30, 1),
                             peak_gb=round(torch.cuda.max_memory_allocated() / 2 ** 30, 1))
            print(took, flush=True)
            yield engine, took


def workload(size: SimpleNamespace) -> tuple[list[list[int]], list[int]]:
    """nano-vllm's bench.py, number for number: prompts, and how many tokens each is to make."""
    rng = Random(0)
    prompts = [[rng.randint(0, size.max_token_id) for _ in range(rng.randint(*size.lengths))]
               for _ in range(size.num_requests)]
    return prompts, [rng.randint(*size.lengths) for _ in range(size.num_requests)]


@contextlib.contextmanager
def observed(engine: LLM, report: Report) -> Iterator[SimpleNamespace]:
    """The steps that are scheduled, and when. Ends what takes too long."""
    seen, schedule = SimpleNamespace(steps=[], times=[]), engine.scheduler.schedule

    def scheduled():
        if report.left() < 0 and ON_GPU:
            raise TimeoutError("no time is left")
        step = schedule()
        if step.num_new_tokens:
            seen.steps.append(step)
            seen.times.append(time.perf_counter())
        return step

    engine.scheduler.schedule = scheduled
    try:
        yield seen
    finally:
        engine.scheduler.schedule = schedule


def roofline(sizes: dict, steps: list, copy: float, product: float) -> float:
    """Seconds that these steps take at the least, of numbers of 2 bytes: weights, keys and values
    are read once a step, activations 16 times a layer, or the products take longer than that."""
    L, h, H, K, D, V = (sizes[name] for name in "LhHKDV")
    p_linear = L * (h * (H + 2 * K) * D + H * D * h + 3 * h * sizes["I"])
    total = 0.0
    for step in steps:
        n, b = step.num_tokens, len(step.sampling)
        rows = list(zip(step.starts, step.num_new_tokens.values()))
        context = sum(start + new for start, new in rows)
        pairs = sum(new * start + new * (new + 1) // 2 for start, new in rows)
        linear = max(2 * p_linear / copy, 2 * p_linear * n / product)
        head = max(2 * V * h / copy, 2 * V * h * b / product) + 4 * V * b / copy
        attention = max(context * 2 * L * K * D * 2 / copy, 4 * H * D * L * pairs / product)
        total += linear + head + attention + 16 * n * h * L / copy
    return total


def share_of_roofline(report: Report, sizes: dict, steps: list, seconds: float) -> float | None:
    limits = report.results.get("ceilings") or {}
    if "copy" not in limits:
        return None
    return round(roofline(sizes, steps, limits["copy"], limits["product"]) / seconds, 4)


def warm_up(engine: LLM, size: SimpleNamespace) -> None:
    """Prompts in chunks, decodes, and a batch that is full: whatever is compiled late is now."""
    count, length, new = size.warm_up
    rng = Random(1)
    engine.generate([[rng.randint(0, size.max_token_id) for _ in range(length)]
                     for _ in range(count)],
                    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new),
                    use_tqdm=False)
    engine.reset_prefix_cache()


def throughput(report: Report, size: SimpleNamespace, engine: LLM, sizes: dict) -> dict:
    prompts, lengths = workload(size)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    warm_up(engine, size)
    with observed(engine, report) as seen:
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made == sum(lengths), f"{made} tokens were made, {sum(lengths)} asked for"
    decodes = [step for step in seen.steps if len(step.sampling) == step.num_tokens]
    result = dict(
        output_tok_per_s=round(made / seconds, 1), seconds=round(seconds, 3),
        prompt_tokens=sum(map(len, prompts)), output_tokens=made, steps=len(seen.steps),
        decode_steps=len(decodes), preempted=sum(len(step.preempted) for step in seen.steps),
        mean_decode_batch=round(statistics.mean([step.num_tokens for step in decodes] or [0]), 1),
        of_roofline=share_of_roofline(report, sizes, seen.steps, seconds))
    print(result, flush=True)
    return result


def one_stream(report: Report, size: SimpleNamespace, engine: LLM, sizes: dict) -> dict:
    """Tokens a second of a single request, between its fifth and its last step."""
    length, new = size.stream
    prompt = [Random(2).randint(0, size.max_token_id) for _ in range(length)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new)
    engine.generate([prompt], params, use_tqdm=False)
    engine.reset_prefix_cache()
    with observed(engine, report) as seen:
        engine.generate([prompt], params, use_tqdm=False)
    seconds = seen.times[-1] - seen.times[4]
    steps = seen.steps[5:]
    result = dict(tok_per_s=round(len(steps) / seconds, 1), context=length,
                  of_roofline=share_of_roofline(report, sizes, steps, seconds))
    print(result, flush=True)
    return result


def profile(report: Report, size: SimpleNamespace, engine: LLM, show: int = 15) -> dict:
    """Decode steps of a full batch: the device's time by kernel, and how much of it is idle."""
    count, length, num_steps = size.profile
    rng, names = Random(3), [f"profile {i}" for i in range(count)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=40 + 4 * num_steps)
    with observed(engine, report) as seen:
        for name in names:
            engine.add_request(name, [rng.randint(0, size.max_token_id) for _ in range(length)],
                               params)
        for _ in range(40):  # until all of them decode
            engine.step()
            if seen.steps[-1].num_tokens == count == len(seen.steps[-1].sampling):
                break
        else:
            raise RuntimeError(f"{count} requests never decode side by side")
        for _ in range(4):
            engine.step()
        engine.runner.synchronize()
        kinds = torch.profiler.ProfilerActivity
        try:
            with torch.profiler.profile(
                    activities=[kinds.CUDA if ON_GPU else kinds.CPU]) as profiler:
                start = time.perf_counter()
                for _ in range(num_steps):
                    engine.step()
                engine.runner.synchronize()
                wall = (time.perf_counter() - start) / num_steps
        finally:
            engine.abort_request(names)
            while engine.in_flight:
                engine.step()
            engine.reset_prefix_cache()
    events = [event for event in profiler.key_averages()
              if not ON_GPU or event.device_type == torch.autograd.DeviceType.CUDA]
    spent = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    events.sort(key=lambda event: -getattr(event, spent))
    busy = sum(getattr(event, spent) for event in events) / num_steps
    top = [dict(kernel=event.key[:90], calls=round(event.count / num_steps, 2),
                microseconds=round(getattr(event, spent) / num_steps, 1),
                share=round(getattr(event, spent) / num_steps / max(busy, 1e-9), 4))
           for event in events[:show]]
    return dict(batch=count, context=length, step_microseconds=round(wall * 1e6, 1),
                busy_microseconds=round(busy, 1), kernels=round(
                    sum(event.count for event in events) / num_steps, 1), top=top)


def measure_engine(report: Report, size: SimpleNamespace, workers: int) -> None:
    for name, sizes in size.models.items():
        report.measure(f"{name} engine", 60, engine_of, report, size, name, sizes)


def engine_of(report: Report, size: SimpleNamespace, name: str, sizes: dict) -> dict:
    with started(sizes, size) as (engine, took):
        report.measure(f"{name} throughput", 30, throughput, report, size, engine, sizes)
        report.measure(f"{name} one stream", 5, one_stream, report, size, engine, sizes)
        report.measure(f"{name} profile", 10, profile, report, size, engine)
    return took


def measure_ablation(report: Report, size: SimpleNamespace, workers: int) -> None:
    for name, sizes in size.models.items():
        for mode, options in MODES.items():
            report.measure(f"{name} ablation {mode}", 60, ablated, report, size, sizes, options)


def ablated(report: Report, size: SimpleNamespace, sizes: dict, options: dict) -> dict:
    with started(sizes, size, **options) as (engine, took):
        return throughput(report, size, engine, sizes) | dict(start=took)


# ------------------------------------------------------------------- tables


def table_of(rows: list[dict]) -> str:
    """Markdown, with a column for whatever the rows have."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cell(value) -> str:
    if isinstance(value, dict):
        value = " ".join(f"{name}={of}" for name, of in value.items())
    return str("" if value is None else value).replace("|", "/").replace("\n", " ")


def markdown(results: dict) -> str:
    parts = []
    for name, result in results.items():
        parts.append(f"## {name}\n")
        if isinstance(result, list):
            parts.append(table_of(result))
        elif failed(result):
            parts.append("```\n" + json.dumps(result, indent=1).replace("\\n", "\n") + "\n```\n")
        else:
            flat = {key: value for key, value in result.items() if not isinstance(value, list)}
            parts.append(table_of([flat]) if flat else "")
            parts += [table_of(value) for value in result.values()
                      if isinstance(value, list) and value and isinstance(value[0], dict)]
    return "\n".join(parts + ["## README\n", readme_table(results)])


# README's rows: what is said, the part of the results and its entry, and how it is written.
README_ROWS = [("output tok/s, 256 requests", "throughput", "output_tok_per_s", "{:,.0f}"),
               ("share of the roofline", "throughput", "of_roofline", "{:.0%}"),
               ("one stream at 1k context, tok/s", "one stream", "tok_per_s", "{:,.0f}"),
               ("start-up, s", "engine", "seconds", "{:.0f}"),
               ("CUDA graphs, s", "engine", "graph_seconds", "{:.0f}"),
               ("CUDA graphs, MB", "engine", "graph_mb", "{:,.0f}")]
README_ROWS += [(f"output tok/s, {mode}", f"ablation {mode}", "output_tok_per_s", "{:,.0f}")
                for mode in MODES]
TARGETS = {("0.6B", "output_tok_per_s"): "25,000", ("8B", "output_tok_per_s"): "8,700",
           ("0.6B", "of_roofline"): "70%", ("8B", "of_roofline"): "70%",
           ("0.6B", "tok_per_s"): "1,100", ("8B", "tok_per_s"): "190"}
NOT_MEASURED = "not measured"


def readme_table(results: dict) -> str:
    """README's table of `results`; of none, "not measured" throughout."""
    lines = ["| what | target | Qwen3-0.6B | target | Qwen3-8B |", "|---|---|---|---|---|"]
    for what, entry, heads in (("decode", "tb_per_s", "of_copy"),
                               ("prefill", "tflop_per_s", "of_product")):
        for block_size in REAL.block_sizes:
            cells = []
            for model in ("0.6B", "8B"):
                rows = results.get(f"{what} table")
                wanted = dict(heads=model, block_size=block_size) | (
                    dict(batch=256, context=2048) if what == "decode" else
                    dict(batch=4, queries=2048))
                found = [row for row in rows if wanted.items() <= row.items()] if (
                    isinstance(rows, list)) else []
                cells.append("85%" if what == "decode" and block_size == 16 else "")
                cells.append(f"{found[0][heads]:.0%}" if found and found[0].get(heads) is not None
                             else NOT_MEASURED)
            shape = "256 rows of 2,048 keys, share of the copy's bytes/s" if what == "decode" else (
                "4 prompts of 2,048, share of the matrix product's flop/s")
            lines.append(f"| {what} attention, blocks of {block_size}: {shape} | "
                         + " | ".join(cells) + " |")
    for what, part, entry, how in README_ROWS:
        cells = []
        for model in ("0.6B", "8B"):
            result = results.get(f"Qwen3-{model} {part}")
            known = not failed(result) and result.get(entry) is not None
            target = "" if part.startswith("ablation") else TARGETS.get((model, entry), "")
            cells += [target, how.format(result[entry]) if known else NOT_MEASURED]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    about = results.get("machine") or {}
    if not failed(about):
        lines += ["", f"{about['device']}, torch {about['torch']}, triton {about['triton']}, "
                      f"{about['date']}"]
    return "\n".join(lines) + "\n"


def summary(results: dict) -> str:
    """What went wrong, the best launches, and README's table."""
    lines = ["", "=== summary"]
    lines += [f"{name}: {json.dumps(result)[-300:]}" for name, result in results.items()
              if failed(result)]
    for phase in ("decode", "prefill"):
        found = results.get(f"{phase} sweep") or {}
        lines += [f"{phase}, blocks of {row['block_size']}: {cell(row['launch'])} takes "
                  f"{row['time_of_ours']:.2f} of the committed launch's time"
                  + (" (it is that)" if row["ours"] else "") for row in found.get("best", ())]
    return "\n".join([*lines, "", readme_table(results)])


if __name__ == "__main__":
    main()
