"""Look at the compiled kernels without a GPU: every shipped launch, compiled ahead of time.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --arch sm_90 --only prefill --json report.json

The engine's own functions are called, on small tensors on the CPU, under a driver that says "I am
an H100" and compiles each launch but does not start it. So what is read here is what a GPU would
run, no launch is listed by hand, and a new kernel needs one more line in `cases`. Triton's wheel
carries the assembler. What a GPU would find out at its first launch, or only as a disappointing
speed:

    regs, stack   registers a thread; a stack means that they did not suffice (spills)
    shared        bytes of shared memory; too many are no compile error, the launch fails
    wgmma, mma    instructions for Hopper's warpgroups and for older tensor cores
    wide, narrow  loads of 128 bits from global memory, and of fewer (lengths, table entries)

The first two are the assembler's words about the machine code. Instructions are counted in PTX, its
input: the disassembler takes a quarter of a second for each program, and says the same, but where
the assembler unrolls a short loop.

Known limit: it counts instructions and not how often they run, nor how long they wait for memory.
It finds suspicious code; only a run on a GPU shows how fast a kernel is.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from nanoserve import triton_attention as kernels
from nanoserve import triton_fused as kernels_fused
from nanoserve_extras.few_rows.few_rows_triton import product
from nanoserve_extras.quantization.quantized_triton import TritonWeight
from nanoserve_extras.quantization.quantized_words import WordWeight
from nanoserve_extras.recurrent.recurrent_triton import delta_rule

# The most shared memory that a program may have. By default the table is of the first three: A100,
# RTX 4090, H100. The others are RTX 3090, B200, RTX 5090 and T4.
SHARED = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_86": 101_376,
          "sm_100": 232_448, "sm_120": 101_376, "sm_75": 65_536}
# What the table counts, as PTX spells it. A load of 16 bytes goes to registers or to shared memory.
WIDE = r"ld\.global\S*\.(v4\.b32|v2\.b64|v8\.b16)|cp\.async\..*, 0x10,"
INSTRUCTIONS = {"wgmma": r"\bwgmma\.mma_async\.", "mma": r"\bmma\.sync\.", "wide": WIDE,
                "narrow": rf"^(?!.*({WIDE})).*(ld\.global|cp\.async\..*, 0x[48],)", "total": ";$"}
COLUMNS = ("arch", "kernel", "case", "warps", "regs", "stack", "shared", *INSTRUCTIONS)


def cases() -> dict[str, Callable]:
    """What is compiled: calls by name, of which one may launch several kernels."""
    return {f"{str(dtype).removeprefix('torch.')} {name}": call
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
            for name, call in (attention_cases(dtype) | fused_cases(dtype)
                               | quantised_cases(dtype)).items()}


def attention_cases(dtype: torch.dtype) -> dict[str, Callable]:
    """Attention's four ways (many rows, few rows, a few queries of each, chunks), for the usual
    head sizes, and for blocks of which a tile of keys needs several, or one."""
    found = {}
    for head_dim, block_size in ((64, 16), (128, 16), (128, 64), (256, 16)):
        call = partial(attend, dtype, head_dim, block_size)
        about = f"head {head_dim} block {block_size}"
        # Splits are for few rows; 300 fill the GPU without.
        found[f"decode {about}"] = partial(call, num_decodes=300)
        found[f"split {about}"] = partial(call, num_decodes=8)
        found[f"few {about}"] = partial(call, num_few=8, group=4)
        found[f"prefill {about}"] = partial(call, num_chunks=1)
    found["decode beside a long row"] = partial(
        attend, dtype, 128, 16, num_decodes=300, width=600)
    # Gemma's, which have one loop more, and much more to compute.
    found["prefill window softcap"] = partial(attend, dtype, 128, 16, num_chunks=1, window=4096,
                                              softcap=50.0)
    # gpt-oss's: half of its layers have a window.
    for phase, options in (("split", dict(num_decodes=8)), ("prefill window", dict(
            num_chunks=1, window=128))):
        found[f"{phase} sinks"] = partial(attend, dtype, 64, 16, sinks=torch.zeros(4), **options)
    for head_dim in (64, 128):
        for phase, options in (("decode", dict(num_decodes=300)), ("split", dict(num_decodes=8)),
                               ("few", dict(num_few=8, group=4)),
                               ("prefill", dict(num_chunks=1))):
            found[f"{phase} head {head_dim} in 8 bits"] = partial(
                attend, dtype, head_dim, 16, stored=torch.int8, **options)
    return found


def fused_cases(dtype: torch.dtype) -> dict[str, Callable]:
    """All kernels but attention's. 80 is no power of two: a part of each program's lanes has
    nothing to do there. Experts' tiles are low for few tokens and, in 16 bits, high for many."""
    found = {f"rope head {d}": partial(turn, dtype, d) for d in (64, 80, 128, 256)}
    found["rope head 128 no norm"] = partial(turn, dtype, 128, norms=False)
    found["rope head 128 in 8 bits"] = partial(turn, dtype, 128, stored=torch.int8)
    for size in (1024, 4096, 8192):
        row = torch.zeros(1, size, dtype=dtype)
        found[f"norm {size}"] = partial(kernels.add_rms_norm, row, row, torch.zeros(size), 1e-6)
    found["norm 1024 first"] = partial(kernels.rms_norm, torch.zeros(1, 1024, dtype=dtype),
                                       torch.zeros(1024), 1e-6)
    for activation in ("silu", "gelu_tanh"):
        found[f"act {activation}"] = partial(
            kernels.act_and_mul, torch.zeros(1, 64, dtype=dtype), activation)
        for phase, num_tokens in (("few", 4), ("many", 2048)):
            found[f"experts {phase} {activation}"] = partial(mix, dtype, num_tokens, activation)
    for rows in (1, 4):
        x, gain = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(1024)
        weight = torch.zeros(128, 1024, dtype=dtype)
        found[f"{rows} rows, product"] = partial(product, x, weight)
        found[f"{rows} rows, norm and product"] = partial(product, x, weight, None, x, gain)
        found[f"{rows} rows, norm, product and gate"] = partial(
            product, x, weight, None, x, gain, 1e-6, "silu")
    found["delta rule"] = partial(fold, dtype)
    found["sample"] = partial(sample, dtype, filtered=False)
    found["sample filtered"] = partial(sample, dtype, filtered=True)
    return found


def quantised_cases(dtype: torch.dtype) -> dict[str, Callable]:
    """Products with int8 and with 4 bits in groups, for each tile (in float32 they have one), and
    what restores a matrix for more rows; of 128 experts, and for each tile, too."""
    return {f"{'4 bits, groups of ' + str(size) if size else 'int8'}, {rows} rows{whose}":
            partial(multiply, dtype, rows, size, num_experts=num_experts)
            for size in (0, 32, 128) for whose, num_experts, rows in (
                *(("", 0, rows) for rows in (16, 64, 65)),
                *((" of experts", 128, rows) for rows in (16, 128 * 64)))} | {
        f"{'4 bits, groups of 32' if size else 'int8'}, {rows} rows in words":
            partial(multiply, dtype, rows, size, kind=WordWeight)
        for size in (0, 32) for rows in (1, 4)}


def attend(dtype: torch.dtype, head_dim: int, block_size: int, num_decodes: int = 0,
           num_few: int = 0, num_chunks: int = 0, width: int = 1, offset: int = 0, group: int = 2,
           stored: torch.dtype | None = None, **options) -> None:
    """2 KV heads, each of `group` query heads. The batch's integers lie at `offset` in memory.
    stored: the cache's dtype, if it is another one."""
    num_rows = num_decodes + num_few + num_chunks
    caches = kernels.new_cache(1, block_size, 2, head_dim, stored or dtype, torch.device("cpu"))
    batch = SimpleNamespace(
        num_decodes=num_decodes, is_padded=False, seq_lens=ints(num_rows, offset),
        cu_seqlens_q=ints(num_rows + 1, offset),
        block_tables=ints(num_rows * width, offset).view(num_rows, width))
    num_tokens = num_decodes + 5 * num_few + 99 * num_chunks
    q = torch.zeros(num_tokens, 2 * group, head_dim, dtype=dtype)
    kernels.paged_attention(q, *caches, batch, scale=0.1, **options)


def ints(n: int, offset: int = 0) -> torch.Tensor:
    """n zeros that begin `offset` numbers behind the start of their memory: a batch's sections
    begin anywhere, and unless it is told not to, Triton compiles another program for an address
    that is no multiple of 16 bytes."""
    return torch.zeros(offset + n, dtype=torch.int32)[offset:]


def turn(dtype: torch.dtype, head_dim: int, norms: bool = True, num_tokens: int = 2,
         offset: int = 0, stored: torch.dtype | None = None) -> None:
    """As a model does, out of one product for q, k and v."""
    qkv = torch.zeros(num_tokens, 8, head_dim, dtype=dtype)
    weight = torch.zeros(head_dim) if norms else None
    angles = torch.zeros(num_tokens, head_dim)
    caches = kernels.new_cache(1, 16, 2, head_dim, stored or dtype, torch.device("cpu"))
    kernels.norm_rope_store(qkv, weight, weight, 1e-6, angles, angles, *caches,
                            ints(num_tokens, offset))


def mix(dtype: torch.dtype, num_tokens: int, activation: str) -> None:
    """8 of 128 experts a token, as Qwen3-30B-A3B has them: a matrix is small, its pairs count."""
    hidden, weights = torch.zeros(num_tokens, 64, dtype=dtype), torch.zeros(num_tokens, 8)
    gate_up, down = torch.zeros(128, 128, 64, dtype=dtype), torch.zeros(128, 64, 64, dtype=dtype)
    kernels.experts(hidden, weights, weights.long(), gate_up, down, 0, activation)


def fold(dtype: torch.dtype, num_rows: int = 2, offset: int = 0) -> None:
    """Qwen3.5-4B's shapes: two heads of values share one of keys."""
    gates, states = torch.zeros(num_rows, 32), torch.zeros(1, 32, 128, 128)
    slots = torch.zeros(offset + num_rows, dtype=torch.int64)[offset:]
    delta_rule(torch.zeros(num_rows, 64 * 128, dtype=dtype), gates, gates, states, slots, slots,
               ints(num_rows + 1, offset))


def sample(dtype: torch.dtype, filtered: bool, num_rows: int = 2, offset: int = 0) -> None:
    logits, heat = torch.zeros(num_rows, 64, dtype=dtype), torch.zeros(offset + num_rows)[offset:]
    numbers = torch.zeros(offset + num_rows, dtype=torch.int64)[offset:]
    top_k = ints(num_rows, offset)
    thresholds = kernels.thresholds(logits, heat, top_k, heat, heat) if filtered else None
    kernels.sample_tokens(logits, heat, numbers, numbers, thresholds)


def multiply(dtype: torch.dtype, num_rows: int, size: int, inputs: int = 2048,
             num_experts: int = 0, kind: type = TritonWeight) -> None:
    """size: inputs of a group of 4 bits, or 0 for int8. num_experts: 0 for one matrix."""
    x, bias = torch.zeros(num_rows, inputs, dtype=dtype), torch.zeros(64, dtype=dtype)
    if size:
        weight = kind(torch.zeros(64, inputs // 2, dtype=torch.uint8),
                      ints(64 * inputs // size).view(64, -1), size, inputs)
    else:
        weight = kind(torch.zeros(64, inputs, dtype=torch.int8), torch.zeros(64, 1), 0, inputs)
    if num_experts:
        starts = torch.zeros(num_experts + 1, dtype=torch.int64)
        TritonWeight.stacked([weight] * num_experts).grouped(x, starts)
    else:
        weight.linear(x, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=SHARED)
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    rows = [row for arch in args.arch or list(SHARED)[:3] for row in report(arch, args.only)]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows))


def report(arch: str, only: str = "") -> list[dict]:
    """One row for each program, with the numbers of COLUMNS and the first case that launches it."""
    rows = {}
    for name, call in cases().items():
        for program in compiled(arch, call) if re.search(only, name) else ():
            if (code := program.asm["cubin"]) not in rows:
                rows[code] = dict(arch=arch, case=name) | measure(program)
    return list(rows.values())


def compiled(arch: str, call: Callable) -> list:
    """The programs that `call` would launch on `arch`, in order."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    triton, programs, number = kernels.triton, [], int(arch.removeprefix("sm_"))
    target = triton.backends.compiler.GPUTarget("cuda", number, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: arch, get_current_stream=lambda device: 0,
        get_current_target=lambda: target))
    run, line = triton.JITFunction.run, kernels_fused.line_of(*divmod(number, 10))

    def compile_only(self, *args, grid, warmup, **constants):
        programs.append(run(self, *args, grid=grid, warmup=True, **constants))

    with mock.patch.object(triton.JITFunction, "run", compile_only), \
            mock.patch.object(kernels, "table_line", lambda device: line), \
            mock.patch.object(kernels_fused, "table_line", lambda device: line):
        call()
    return programs


def measure(program) -> dict:
    """Count what is in a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(program.asm["cubin"])
        cuobjdump = kernels.triton.knobs.nvidia.cuobjdump.path
        code = subprocess.run([cuobjdump, "-res-usage", file.name], check=True,
                              capture_output=True, text=True).stdout
    lines = program.asm["ptx"].splitlines()
    counts = {name: sum(bool(re.search(pattern, line)) for line in lines)
              for name, pattern in INSTRUCTIONS.items()}
    return dict(kernel=program.metadata.name, warps=program.metadata.num_warps,
                regs=int(re.search(r"REG:(\d+)", code)[1]),
                stack=int(re.search(r"STACK:(\d+)", code)[1]),
                shared=program.metadata.shared) | counts


def table(rows: list[dict]) -> str:
    cells = [COLUMNS, *([str(row[column]) for column in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells)


if __name__ == "__main__":
    main()
