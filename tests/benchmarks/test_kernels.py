"""The kernels as GPUs that are not here would get them: every shipped launch, compiled and read.

The interpreter says what a kernel computes; this says whether a GPU could start it and whether it
would be fast: registers, shared memory, the instructions. It runs in processes of their own,
because Triton decides at its import whether it compiles or interprets; warnings of Triton's that a
default is going to change are errors there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nanoserve import triton_attention as kernels
from nanoserve import triton_fused as kernels_fused
from nanoserve import triton_sampling as kernels_sampling
from nanoserve_extras.recurrent import recurrent_triton

ROOT = Path(__file__).parent.parent.parent
# The most shared memory a program may have. What runs on an RTX 4090, which takes A100's lines of
# the tables, is compiled for it where it is close to the limit.
SHARED = {"sm_75": 65_536, "sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448}
ALL = ("^bfloat16 (?!.*(head 256|head 80|64 in 8|norm 4096|first|gelu|of 128|"
       "(split|few|decode) .* block 64))")
# H100 gets these (the command has more), A100 where its lines of the tables differ from H100's or
# a program is large, and an RTX 4090 the two that are the largest. A T4 has no bfloat16.
TILED = (r"^bfloat16 ((?!rope)\w+ head 128 (block 16|in 8)|.* sinks|experts .* silu|"
         r"sample filtered|int8, \d+ rows$|.* of 32, )")
LARGEST = "^bfloat16 (prefill window|experts many silu)"
OLDEST = "^float16 ((decode|prefill) head 128 block 16|experts few silu)"
JOBS = {"sm_90": [("sm_90", ALL)], "others": [
    ("sm_80", TILED), ("sm_89", LARGEST), ("sm_75", OLDEST)]}


def run(*args: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", *args], cwd=ROOT, text=True,
        env=environment | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    out, error = process.communicate()
    print(out)
    assert process.returncode == 0, error[-2000:]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> list[dict]:
    """Rows by architecture, kernel and case; two processes compile side by side."""
    folder = tmp_path_factory.mktemp("report")
    code = """if 1:
        import json, sys
        from benchmarks.kernels import report, table
        rows = [row for job in json.loads(sys.argv[1]) for row in report(*job)]
        print(table(rows))
        open(sys.argv[2], "w").write(json.dumps(rows))
    """
    processes = [run("-c", code, json.dumps(job), str(folder / name)) for name, job in JOBS.items()]
    for process in processes:
        finish(process)
    return [row for name in JOBS for row in json.loads((folder / name).read_text())]


def attention(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["kernel"] == "_attention_kernel"]


def test_every_launch_is_there(report):
    """Each kernel, and attention in each of its phases."""
    tiled = {"_attention_kernel", "_combine_kernel", "_experts_kernel", "_weighted_sum_kernel",
             "_sample_kernel", "_find_thresholds_kernel", "_linear_kernel", "_restore_kernel",
             "_words_kernel"}
    written = {name for module in (
        kernels, kernels_fused, kernels_sampling, recurrent_triton) for name in vars(module)
               if name.endswith("_kernel")}
    for arch, launched in (("sm_80", tiled), ("sm_90", tiled | written | {"_product_kernel"})):
        assert {row["kernel"] for row in report if row["arch"] == arch} == launched
        phases = {row["case"].split()[1] for row in attention(report) if row["arch"] == arch}
        assert phases == {"decode", "split", "few", "prefill"}


def test_registers_and_shared_memory_suffice(report):
    for row in report:
        assert row["stack"] == 0, f"spills: {row}"
        assert row["shared"] <= SHARED[row["arch"]], f"can't be launched: {row}"
        assert row["arch"] != "sm_80" or row["shared"] <= SHARED["sm_89"], f"not on a 4090: {row}"
        # A multiprocessor has 65,536 registers, given out by 8 a thread.
        assert -(-row["regs"] // 8) * 8 * 32 * row["warps"] <= 65_536, f"can't be launched: {row}"
    for row in attention(report):
        if not row["case"].startswith("bfloat16 prefill"):  # two and more hide each other's waits
            limit = max(SHARED["sm_80"], SHARED[row["arch"]])
            assert row["regs"] <= 168 and 2 * row["shared"] <= limit, row


def test_tensor_cores_are_used(report):
    """wgmma needs 64 rows and comes with Hopper; a decode's 16 rows take the older instruction. On
    a T4 Triton uses none, which is why its tiles are small."""
    for row in report:
        if row["arch"] == "sm_75":
            assert row["wgmma"] == row["mma"] == 0, row
        elif row["kernel"] in ("_attention_kernel", "_experts_kernel", "_linear_kernel"):
            hopper = row["arch"] == "sm_90" and re.search("prefill|few head|many|(64|8192) rows",
                                                          row["case"])
            assert (row["wgmma"] > 0) == bool(hopper) == (row["mma"] == 0), row


def test_loads_are_wide(report):
    """128 bits a thread, which they are not when a stride is not known to be a multiple of 16.
    Narrow ones are lengths and tables: with small blocks, each thread's keys find their own."""
    for row in report:
        assert row["wide"] > 0, row
    for row in attention(report):
        narrow = "in 8 bits" in row["case"] or row["arch"] == "sm_75"
        assert row["wide"] >= (6 if narrow else 16), row
        scales = "few head 128 in 8 bits" in row["case"]  # of each of three loops
        assert row["narrow"] <= (12 if "block 64" in row["case"] else 72 if scales else 60), row
    for row in report:  # narrow: scales or words of groups, the bias, and a low tile of a weight
        if row["kernel"] == "_linear_kernel":
            assert row["wide"] >= (16 if "16 rows" in row["case"] else 8), row
            assert row["narrow"] <= 32, row


def test_steps_do_not_make_the_engine_compile():
    """Addresses of the batch's sections, widths of tables and numbers of rows differ from step
    to step. Triton specialises on their divisibility by 16 unless it is told not to: the engine
    would stop to compile in the middle of serving."""
    finish(run("-c", """if 1:
        import torch
        from benchmarks.kernels import attend, compiled, fold, multiply, sample, turn

        def steps():
            for rows, width, offset in ((1, 1, 0), (2, 4, 1), (3, 16, 4), (40, 5, 3)):
                attend(torch.bfloat16, 64, 16, rows, 0, 1, width, offset)
                attend(torch.bfloat16, 64, 16, 0, 2, 0, width, offset)
                turn(torch.bfloat16, 64, num_tokens=rows, offset=offset)
                sample(torch.bfloat16, True, rows, offset)
                multiply(torch.bfloat16, min(rows, 16), 32)
                fold(torch.bfloat16, rows, offset)
        programs = [program.asm["ptx"] for program in compiled("sm_90", steps)]
        # Split decode, combine, prefill; few, combine; norm, RoPE and the cache; thresholds,
        # samples; small weights; the delta rule.
        assert len(programs) == 4 * 10 and len(set(programs)) == 10, len(set(programs))
    """))
