"""Sizes and ceilings of what is measured on a GPU, the time that is left, results and tables."""

import json
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import torch
import triton

from nanoserve.triton_fused import table_line

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
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


def failed(result) -> bool:
    return not result or isinstance(result, dict) and bool({"error", "skipped"} & set(result))


def troubles(results: dict) -> list[str]:
    """All that went wrong: a part, a line of a table, a sweep that has found no launch."""
    found = [f"{name}: {json.dumps(result)[-300:]}" for name, result in results.items()
             if failed(result)]
    for name, result in results.items():
        rows = result if isinstance(result, list) else (result or {}).get("rows", ())
        found += [f"{name}: {row}" for row in rows if "error" in row]
        if isinstance(result, dict) and result.get("best") == []:
            found.append(f"{name}: no launch ran at every shape")
    return found


def that_fit(size: SimpleNamespace) -> SimpleNamespace:
    """The same without the models whose weights, of 2 bytes each, take over 70% of the GPU."""
    total, models = torch.cuda.mem_get_info()[1], {}
    for name, model in size.models.items():
        L, h, H, K, D, V = (model[key] for key in "LhHKDV")
        numbers = L * h * (2 * (H + K) * D + 3 * model["I"]) + V * h * (1 if model["tied"] else 2)
        if 2 * numbers < 0.7 * total:
            models[name] = model
        else:
            print(f"{name} is left out: {2 * numbers / 2 ** 30:.1f} GB of weights, and the GPU has "
                  f"{total / 2 ** 30:.1f} GB", flush=True)
    return SimpleNamespace(**vars(size) | dict(models=models))


# -------------------------------------------------------- machine, ceilings


def machine() -> dict:
    found = dict(date=datetime.now(UTC).strftime("%Y-%m-%d"), torch=torch.__version__,
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
    source = torch.empty(size.copy_bytes // 8, dtype=torch.int64, device=DEVICE).random_()
    target = torch.empty_like(source)
    # By a kernel: `copy_` in a graph goes to a copy engine, which reached two thirds of it.
    copy = 2 * size.copy_bytes / timed(lambda: torch.bitwise_not(source, out=target), size)
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
    return "\n".join(parts + ["## docs/devices.md\n", page_table(results)])


# The rows of its table: what is said, the part of the results and its entry, how it is written.
PAGE_ROWS = [("output tok/s, 256 requests", "throughput", "output_tok_per_s", "{:,.0f}"),
             ("share of the roofline", "throughput", "of_roofline", "{:.0%}"),
             ("one stream at 1k context, tok/s", "one stream", "tok_per_s", "{:,.0f}"),
             ("start-up, s", "engine", "seconds", "{:.0f}"),
             ("CUDA graphs, s", "engine", "graph_seconds", "{:.0f}"),
             ("CUDA graphs, MB", "engine", "graph_mb", "{:,.0f}")]
PAGE_ROWS += [(f"output tok/s, {mode}", f"ablation {mode}", "output_tok_per_s", "{:,.0f}")
              for mode in MODES]
TARGETS = {("0.6B", "output_tok_per_s"): "25,000", ("8B", "output_tok_per_s"): "8,700",
           ("0.6B", "of_roofline"): "70%", ("8B", "of_roofline"): "70%",
           ("0.6B", "tok_per_s"): "1,100", ("8B", "tok_per_s"): "190"}
NOT_MEASURED = "not measured"


def page_table(results: dict) -> str:
    """The table of docs/devices.md, of `results`; of none, "not measured" throughout."""
    lines = ["| what | target | Qwen3-0.6B | target | Qwen3-8B |", "|---|---|---|---|---|"]
    for what, heads in (("decode", "of_copy"), ("prefill", "of_product")):
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
    for what, part, entry, how in PAGE_ROWS:
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


# What others publish for the same models: requests, tokens in and out of each, output tok/s, and
# where. `gpu_engine.wave` runs the same.
PUBLISHED = [
    ("Qwen3-8B", 1, 128, 1024, 145.7, "vLLM 0.30, H100, bfloat16 (silybench-data, 2026-09-24)"),
    ("Qwen3-8B", 64, 128, 1024, 6597, "the same"),
    ("Qwen3-8B", 128, 128, 1024, 10301, "the same"),
    ("Qwen3-8B", 256, 128, 1024, 13567, "the same"),
    ("Qwen3-0.6B", 500, 512, 128, 12150, "vLLM 0.19, H100 (kvcached, issue 331)")]


def wave_name(model: str, count: int, into: int, out: int) -> str:
    return f"{model} {count} x {into} in, {out:,} out"


def published_table(results: dict) -> str:
    """The second table of docs/devices.md: what others publish, and ours where it was measured."""
    lines = ["| model, requests x tokens in, out | published, output tok/s | by | nanoserve |",
             "|---|---|---|---|"]
    for *workload, figure, source in PUBLISHED:
        name = wave_name(*workload)
        result = results.get(name)
        ours = NOT_MEASURED if failed(result) else f"{result['output_tok_per_s']:,.0f}"
        lines.append(f"| {name} | {figure:,} | {source} | {ours} |")
    return "\n".join(lines) + "\n"


def summary(results: dict) -> str:
    """What went wrong, the best launches, and the table of docs/devices.md."""
    lines = ["", "=== summary"]
    lines += troubles(results)
    for phase in ("decode", "prefill"):
        found = results.get(f"{phase} sweep") or {}
        lines += [f"{phase}, blocks of {row['block_size']}: {cell(row['launch'])} takes "
                  f"{row['time_of_ours']:.2f} of the committed launch's time"
                  + (" (it is that)" if row["ours"] else "") for row in found.get("best", ())]
    return "\n".join([*lines, "", page_table(results), published_table(results)])
