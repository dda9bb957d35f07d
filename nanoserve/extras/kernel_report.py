"""Look at the kernels' machine code without a GPU: every shipped launch, compiled ahead of time.

    python -m nanoserve.extras.kernel_report
    python -m nanoserve.extras.kernel_report --arch sm_90 --only prefill --json report.json

The engine's own functions are called, on small tensors on the CPU, under a driver that says "I am
an H100" and compiles each launch but does not start it. So what is read here is what a GPU would
run, and a new kernel needs one more line in `cases`. Triton's wheel carries the assembler and the
disassembler. What a GPU would find out at its first launch, or only as a disappointing speed:

    regs, stack   registers a thread; a stack means that they did not suffice (spills)
    shared        bytes of shared memory; too many are no compile error, the launch fails
    wgmma, mma    instructions for Hopper's warpgroups and for older tensor cores
    wide, narrow  loads of 128 bits from global memory, and of fewer (lengths, table entries)
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from nanoserve import kernels

ARCHS = ("sm_80", "sm_90")
# What the table counts, as the disassembler spells it.
INSTRUCTIONS = {
    "wgmma": r"\bHGMMA\.", "mma": r"\bHMMA\.",
    "wide": r"\b(LDGSTS|LDG)\.\S*\b128\b", "narrow": r"\b(LDGSTS|LDG)\.(?!\S*\b128\b)",
    "total": r"^\s+/\*[0-9a-f]{4,}\*/",
}
COLUMNS = ("arch", "kernel", "case", "warps", "regs", "stack", "shared", *INSTRUCTIONS)


def cases() -> dict[str, Callable]:
    """What is compiled: calls by name. One of them may launch several kernels."""
    found = {}
    for dtype, head_dim, block_size in ((torch.bfloat16, 64, 16), (torch.bfloat16, 128, 16),
                                        (torch.bfloat16, 128, 64), (torch.float16, 64, 16),
                                        (torch.float16, 128, 16)):
        about = f"{str(dtype).removeprefix('torch.')} head {head_dim} block {block_size}"
        shape = (dtype, head_dim, block_size)
        # Splits are for few rows; 300 fill the GPU without.
        found[f"decode {about}"] = lambda shape=shape: attend(*shape, num_decodes=300)
        found[f"split {about}"] = lambda shape=shape: attend(*shape, num_decodes=8)
        found[f"prefill {about}"] = lambda shape=shape: attend(*shape, num_chunks=1)
    # Gemma's, which have one loop more, and much more to compute.
    found["prefill window softcap"] = lambda: attend(torch.bfloat16, 128, 16, num_chunks=1,
                                                     window=4096, softcap=50.0)
    return found


def attend(dtype: torch.dtype, head_dim: int, block_size: int, num_decodes: int = 0,
           num_chunks: int = 0, width: int = 1, offset: int = 0, **options) -> None:
    """4 query heads on 2 KV heads. The batch's integers lie at `offset` in memory."""
    def ints(n: int) -> torch.Tensor:
        return torch.zeros(offset + n, dtype=torch.int32)[offset:]

    num_rows, cache = num_decodes + num_chunks, torch.zeros(1, block_size, 2, head_dim, dtype=dtype)
    batch = SimpleNamespace(
        num_decodes=num_decodes, seq_lens=ints(num_rows), cu_seqlens_q=ints(num_rows + 1),
        block_tables=ints(num_rows * width).view(num_rows, width))
    q = torch.zeros(num_decodes + 9 * num_chunks, 4, head_dim, dtype=dtype)
    kernels.paged_attention(q, cache, cache, batch, scale=0.1, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    rows = [row for arch in args.arch or ARCHS for row in report(arch, args.only)]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows))


def report(arch: str, only: str = "") -> list[dict]:
    """One row for each launch of each case, with the numbers of COLUMNS."""
    return [dict(arch=arch, case=name) | measure(program)
            for name, call in cases().items() if only in name for program in compiled(arch, call)]


def compiled(arch: str, call: Callable) -> list:
    """The programs that `call` would launch on `arch`, in order."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    triton, programs = kernels.triton, []
    target = triton.backends.compiler.GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: arch, get_current_stream=lambda device: 0,
        get_current_target=lambda: target))
    run, line = triton.JITFunction.run, kernels.table_line

    def compile_only(self, *args, grid, warmup, **constants):
        programs.append(run(self, *args, grid=grid, warmup=True, **constants))

    triton.JITFunction.run, kernels.table_line = compile_only, lambda device: arch
    try:
        call()
    finally:
        triton.JITFunction.run, kernels.table_line = run, line
    return programs


def measure(program) -> dict:
    """Count what is in a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(program.asm["cubin"])
        usage, code = cuobjdump("-res-usage", file.name), cuobjdump("-sass", file.name)
    lines = code.splitlines()
    counts = {name: sum(bool(re.search(pattern, line)) for line in lines)
              for name, pattern in INSTRUCTIONS.items()}
    return dict(kernel=program.metadata.name, warps=program.metadata.num_warps,
                regs=int(re.search(r"REG:(\d+)", usage)[1]),
                stack=int(re.search(r"STACK:(\d+)", usage)[1]),
                shared=program.metadata.shared) | counts


def cuobjdump(*args: str) -> str:
    path = kernels.triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([path, *args], check=True, capture_output=True, text=True).stdout


def table(rows: list[dict]) -> str:
    cells = [COLUMNS, *([str(row[column]) for column in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in cells)


if __name__ == "__main__":
    main()
