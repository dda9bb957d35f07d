"""The kernels' machine code for GPUs that are not here: every shipped launch, compiled and read.

The interpreter says what a kernel computes; this says whether a GPU could start it and whether it
would be fast: registers, shared memory, the instructions. It runs in processes of their own,
because Triton decides at its import whether it compiles or interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
ARCHS = {"sm_80": 166_912, "sm_90": 232_448}  # the most shared memory a program may have
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
    "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> list[dict]:
    """Rows by architecture, kernel and case; the two architectures are compiled side by side."""
    folder, processes = tmp_path_factory.mktemp("report"), []
    for arch in ARCHS:
        command = ["-m", "nanoserve.extras.kernel_report", "--arch", arch]
        processes.append(subprocess.Popen(
            [sys.executable, *command, "--json", folder / arch], env=ENVIRONMENT, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in processes:
        out, error = process.communicate()
        assert process.returncode == 0, error
        print(out)
    return [row for arch in ARCHS for row in json.loads((folder / arch).read_text())]


def attention(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["kernel"] == "_attention_kernel"]


def test_every_launch_is_there(report):
    shipped = {(row["arch"], row["kernel"], row["case"].rsplit(" block")[0]) for row in report}
    for arch in ARCHS:
        for shape in ("bfloat16 head 64", "bfloat16 head 128", "float16 head 64",
                      "float16 head 128"):
            for phase in ("decode", "split", "prefill"):
                assert (arch, "_attention_kernel", f"{phase} {shape}") in shipped
            assert (arch, "_combine_kernel", f"split {shape}") in shipped


def test_registers_and_shared_memory_suffice(report):
    for row in report:
        assert row["stack"] == 0, f"spills: {row}"
        assert row["shared"] <= ARCHS[row["arch"]], f"can't be launched: {row}"
        # The smaller cards take sm_80's line of the table as well (sm_86, sm_89).
        assert row["arch"] != "sm_80" or row["shared"] <= 101_376, f"not on an RTX card: {row}"
    for row in attention(report):
        if not row["case"].startswith("prefill"):  # two and more keep each other's waits busy
            assert row["regs"] <= 168 and 2 * row["shared"] <= ARCHS[row["arch"]], row


def test_tensor_cores_are_used(report):
    """wgmma needs 64 rows and comes with Hopper; a decode's 16 rows take the older instruction."""
    for row in attention(report):
        hopper = row["arch"] == "sm_90" and row["case"].startswith("prefill")
        assert (row["wgmma"] > 0) == hopper and (row["mma"] > 0) != hopper, row


def test_loads_are_wide(report):
    """128 bits a thread, which they are not when a stride is not known to be a multiple of 16.
    Narrow ones are lengths and tables: with small blocks, each thread's keys find their own."""
    for row in attention(report):
        assert row["wide"] >= 16, row
        assert row["narrow"] <= (12 if "block 64" in row["case"] else 60), row


def test_steps_do_not_make_the_engine_compile():
    """Addresses of the packed batch's parts, widths of tables and numbers of rows differ from step
    to step. Triton specialises on their divisibility by 16 unless it is told not to: the engine
    would stop to compile in the middle of serving."""
    code = """if 1:
        import torch
        from nanoserve.extras.kernel_report import attend, compiled

        def steps():
            for rows, width, offset in ((1, 1, 0), (2, 4, 1), (3, 16, 4), (8, 5, 3)):
                attend(torch.bfloat16, 64, 16, rows, 1, width, offset)
        programs = [program.asm["ptx"] for program in compiled("sm_90", steps)]
        # Split decode, combine (for 32 splits each) and prefill.
        assert len(programs) == 12 and len(set(programs)) == 3, len(set(programs))
    """
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
