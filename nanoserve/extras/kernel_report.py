"""Look at the kernels' machine code without a GPU: every shipped launch, compiled ahead of time.

    python -m nanoserve.extras.kernel_report
    python -m nanoserve.extras.kernel_report --arch sm_90 --only prefill --json report.json

Triton's wheel carries the assembler and the disassembler, so nothing here needs a driver. What a
GPU would find out at its first launch, or only as a disappointing speed, is read from the program:

    regs, stack   registers a thread; a stack means that they did not suffice (spills)
    shared        bytes of shared memory; too many are no compile error, the launch fails
    wgmma, mma    instructions on Hopper's warpgroups and on older tensor cores
    wide, narrow  loads of 128 bits from global memory, and of fewer (lengths, table entries)

The list is `kernels.variants(arch)`; a module of more kernels is one more entry of MODULES.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from nanoserve import kernels

MODULES = [kernels]
# The most shared memory one program can have, and the warps' width, by architecture.
SHARED_LIMITS = {"sm_80": 166_912, "sm_90": 232_448}
# What the table counts, as the disassembler spells it.
INSTRUCTIONS = {
    "wgmma": r"\bHGMMA\.", "mma": r"\bHMMA\.",
    "wide": r"\b(LDGSTS|LDG)\.\S*\b128\b", "narrow": r"\b(LDGSTS|LDG)\.(?!\S*\b128\b)",
    "total": r"^\s+/\*[0-9a-f]{4,}\*/",
}
COLUMNS = ("arch", "name", "warps", "stages", "regs", "stack", "shared", *INSTRUCTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=sorted(SHARED_LIMITS))
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    rows = report(args.arch or sorted(SHARED_LIMITS), args.only)
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows))


def report(archs: list[str], only: str = "") -> list[dict]:
    """One row for each architecture and variant, with the numbers of COLUMNS."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    return [{"arch": arch, "name": variant.name} | measure(variant, arch)
            for arch in archs for module in MODULES for variant in module.variants(arch)
            if only in variant.name]


def measure(variant, arch: str) -> dict:
    """Compile one variant and count what is in it."""
    compiled = compile_ahead(variant, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage, code = cuobjdump("-res-usage", file.name), cuobjdump("-sass", file.name)
    lines = code.splitlines()
    counts = {name: sum(bool(re.search(pattern, line)) for line in lines)
              for name, pattern in INSTRUCTIONS.items()}
    return dict(warps=compiled.metadata.num_warps, stages=compiled.metadata.num_stages,
                regs=int(re.search(r"REG:(\d+)", usage)[1]),
                stack=int(re.search(r"STACK:(\d+)", usage)[1]),
                shared=compiled.metadata.shared) | counts


def compile_ahead(variant, arch: str):
    """The program that a launch would compile, if all addresses and strides that Triton specialises
    on are multiples of 16, as they are in the engine: without that, it is another program."""
    triton = kernels.triton
    signature, attributes = {}, {}
    for i, param in enumerate(variant.kernel.params):
        constant = param.is_constexpr or param.name in variant.constants
        kind = signature[param.name] = "constexpr" if constant else (
            variant.types.get(param.name, "i32"))
        aligned = not param.do_not_specialize and not param.do_not_specialize_on_alignment
        if aligned and (kind == "i32" or kind.startswith("*")):
            attributes[i,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(variant.kernel, signature, variant.constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=variant.options)


def cuobjdump(*args: str) -> str:
    path = kernels.triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([path, *args], check=True, capture_output=True, text=True).stdout


def table(rows: list[dict]) -> str:
    cells = [COLUMNS, *([str(row[column]) for column in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (
        cell, width) in enumerate(zip(line, widths))).rstrip() for line in cells)


if __name__ == "__main__":
    main()
