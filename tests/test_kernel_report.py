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
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """Rows by architecture and name; the two architectures are compiled side by side."""
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
    return {(row["arch"], row["name"]): row for arch in ARCHS
            for row in json.loads((folder / arch).read_text())}


def test_every_launch_is_there(report):
    names = {name for _, name in report}
    assert set(report) == {(arch, name) for arch in ARCHS for name in names}
    for dtype in ("bf16", "fp16"):
        for head in (64, 128):
            for phase in ("decode", "decode split", "prefill", "combine"):
                assert any(name.startswith(f"{phase} {dtype} head {head}") for name in names)


def test_registers_and_shared_memory_suffice(report):
    for (arch, name), row in report.items():
        assert row["stack"] == 0, f"{name} spills on {arch}: {row}"
        assert row["shared"] <= ARCHS[arch], f"{name} can't be launched on {arch}: {row}"
        # As few as the smaller cards have that take sm_80's line of the table (sm_86, sm_89).
        assert arch != "sm_80" or row["shared"] <= 101_376, f"{name} on an RTX card: {row}"
    for (arch, name), row in report.items():
        if name.startswith("decode"):  # enough programs side by side to keep the memory busy
            assert row["regs"] <= 168 and 2 * row["shared"] <= ARCHS[arch]


def test_tensor_cores_are_used(report):
    """wgmma needs 64 rows and comes with Hopper; a decode's 16 rows take the older instruction."""
    for (arch, name), row in report.items():
        hopper = arch == "sm_90" and name.startswith("prefill")
        attends = name.startswith(("prefill", "decode"))
        assert (row["wgmma"] > 0) == hopper, f"{name} on {arch}: {row}"
        assert (row["mma"] > 0) == (attends and not hopper), f"{name} on {arch}: {row}"


def test_loads_are_wide(report):
    """128 bits a thread, which they are not when a stride is not known to be a multiple of 16.
    Narrow ones are lengths and tables: with small blocks, each thread's keys find their own."""
    for (arch, name), row in report.items():
        if name.startswith(("prefill", "decode")):
            assert row["wide"] >= 16, f"{name} on {arch}: {row}"
            assert row["narrow"] <= (40 if "block 16" in name else 12), f"{name} on {arch}: {row}"


def test_a_launch_compiles_what_the_report_did_and_nothing_else():
    """Through Triton's own launcher, with a driver that only says which GPU it has. Addresses of
    the packed batch's parts, widths of tables and numbers of rows differ from step to step; if one
    were specialised on, the engine would stop to compile in the middle of serving.
    """
    code = """if 1:
        import torch
        from test_attention import make_batch
        from nanoserve import kernels
        from nanoserve.extras.kernel_report import compile_ahead

        class Driver:
            get_current_device = get_current_stream = lambda self, *_: 0
            def get_current_target(self):
                return kernels.triton.backends.compiler.GPUTarget("cuda", 90, 32)

        class Launcher:
            def __init__(self, kernel):
                self.kernel = kernel
            def __getitem__(self, grid):
                return lambda *args, **constants: programs.add(
                    self.kernel.warmup(*args, grid=grid, **constants).asm["ptx"])

        kernels.triton.runtime.driver.set_active(Driver())
        kernels._arch = lambda device: "sm_90"
        expected = {compile_ahead(v, "sm_90").asm["ptx"] for v in kernels.variants("sm_90")
                    if "bf16 head 64" in v.name and "block 64" not in v.name}
        programs = set()
        kernels._attention_kernel = Launcher(kernels._attention_kernel)
        kernels._combine_kernel = Launcher(kernels._combine_kernel)
        cache, numbers = torch.zeros(20, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(
            2000, dtype=torch.int32)
        for rows, width, offset, splits in ((1, 1, 0, 1), (2, 4, 1, 1), (16, 16, 3, 8), (3, 1, 4, 8)):
            kernels._num_splits = lambda *shapes: splits
            batch = make_batch([[1] * width] * (rows + 1), [1] * rows + [9], [9] * (rows + 1))
            batch.seq_lens = numbers[offset:][:rows + 1]
            batch.cu_seqlens_q = numbers[2 * offset:][:rows + 2]
            batch.block_tables = numbers[offset:][:(rows + 1) * width].view(-1, width)
            q = torch.zeros(rows + 9, 4, 64, dtype=torch.bfloat16)
            kernels.paged_attention(q, cache, cache, batch, 0.1)
        assert len(expected) == 4 and programs == expected, (len(expected), len(programs))
    """
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
