"""Products on matrix tiles (AMX): the same oracles as those of `ops`, on any CPU.

On a CPU with AMX the instructions themselves must pass: `python -m pytest -n 0
tests/test_cpu_matrix_tiles.py`. Any other CPU runs the loop with the plain bodies of its
operations, and with the instructions, at which it traps (tile_traps.py).
"""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture
from test_build import (  # noqa: F401
    HERE,
    QUANTISED,
    WARNINGS,
    home,
    log,
    run,
    run_oracles,
    set_compiler,
)
from test_ops import CPU, load_backend, make_batch, numbers, scatter, write

from nanoserve import build

pytestmark = pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux",
                                reason="needs g++")
INFO = Path("/proc/cpuinfo")
HAS_AMX = INFO.exists() and "amx_bf16" in INFO.read_text().split()
TILES = "-O1 -DMATRIX_TILES"
INSTRUCTIONS = f"{TILES} -mamx-tile -mamx-bf16"
BFLOAT16 = ("(cpu or CpuWeight) and bfloat16 and not (argmax or norms or many or mixed or long) "
            "or same_bits")
SMALL = [*map(str, filter(Path.exists, [QUANTISED]))]  # none where the extras are deleted
full_elsewhere = (lambda test: test) if HAS_AMX else pytest.mark.full
full_with_amx = pytest.mark.full if HAS_AMX else (lambda test: test)
TRAPS = ["-p", "tile_traps", "-p", "no:faulthandler"]  # which would end at a trap


# ----------------------------------------------------------------- the same bits


def same_bits_of_products(ops) -> None:
    x = numbers(70, 100, dtype=torch.bfloat16)
    weight = ops.prepack(numbers(88, 100, dtype=torch.bfloat16))
    gate_up, down = (ops.prepack(numbers(3, *shape, dtype=torch.bfloat16))
                     for shape in ((80, 100), (100, 40)))
    chosen = torch.rand(70, 2), torch.stack([torch.randperm(3)[:2] for _ in x])
    for product in (lambda rows: ops.linear(x[rows], weight), lambda rows: ops.experts(
            x[rows], *(part[rows] for part in chosen), gate_up, down, 0, "silu")):
        together = product(slice(None))
        for rows in (slice(0, 1), slice(40, 41), slice(3, 19), slice(20, 57), slice(69, 70)):
            assert torch.equal(product(rows), together[rows]), rows


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=["bfloat16", "int8"])
def test_a_row_has_the_same_bits_alone_and_wherever_it_was_cut(stored):
    """A prompt of 150 tokens at once, or its tokens one by one and in other chunks."""
    ops, length = load_backend("cpu"), 150
    same_bits_of_products(ops)
    tables, num_blocks = scatter([(length, length)], 16)
    cache = ops.new_cache(num_blocks, 16, 2, 48, stored, CPU)
    k, v = (numbers(length, 2, 48, dtype=torch.bfloat16) for _ in range(2))
    slots = [tables[0][i // 16] * 16 + i % 16 for i in range(length)]
    q = numbers(length, 6, 48, dtype=torch.bfloat16)
    write(ops, cache, k, v, slots)
    whole = ops.paged_attention(q, *cache, make_batch(tables, [length], [length], 16), 0.15)
    for cuts in ((0, 1, 2, 17, 18, 33, 34), (0, 16, 64, 149, 150), (0, 100, 131, 150)):
        cache = ops.new_cache(num_blocks, 16, 2, 48, stored, CPU)
        for first, end in zip(cuts, cuts[1:], strict=False):
            write(ops, cache, k[first:end], v[first:end], slots[first:end])
            table = tables[0][:-(-end // 16)]
            got = ops.paged_attention(q[first:end], *cache, make_batch(
                [table], [end - first], [end], 16), 0.15)
            assert torch.equal(got, whole[first:end]), (first, end)


# ------------------------------------------------------------------- the oracles


@full_with_amx
def test_plain_loops_in_place_of_the_instructions_compute_the_same(tmp_path):
    run_oracles(tmp_path, f"{TILES} -DPLAIN_TILES", __file__, "-k", BFLOAT16)


@pytest.mark.full
def test_the_plain_loops_overrun_no_buffer(tmp_path):
    run_oracles(tmp_path, f"{TILES} -DPLAIN_TILES -fsanitize=undefined -fno-sanitize-recover=all",
                __file__, *SMALL, "-p", "guard_pages", "-k", BFLOAT16)


@full_elsewhere
def test_the_instructions_compute_the_same(tmp_path):
    """With guard pages. Where the CPU traps, the manual's rules for shapes are checked, too, and
    that each thread has its own shape back."""
    told = run_oracles(tmp_path, INSTRUCTIONS, __file__, *SMALL, *([] if HAS_AMX else TRAPS),
                       "-p", "guard_pages", "-k", BFLOAT16)
    assert HAS_AMX or re.search(r"traps: \d{5,} products, 0 threads without", told), told


# --------------------------------------------------------------------- compiling


def test_a_compiler_makes_the_instructions_of_the_loop(tmp_path):
    """In an object file, on any x86: each kind, and no loop over floats."""
    if "-march=native" not in build.FLAGS:
        pytest.skip("no x86")
    source, made = tmp_path / "tiles.cpp", tmp_path / "tiles.o"
    source.write_text('#include "matrix_tiles.h"\nMultiplyOnTiles loop_of(int rows, long panels) '
                      "{ tiles::Borrowed<true> now; return loop_on_tiles(rows, panels); }\n")
    command = ["g++", "-std=c++17", "-fopenmp", *INSTRUCTIONS.split(), *WARNINGS, "-c", str(source),
               f"-I{build.SOURCE.parent}", "-o", str(made)]
    subprocess.run(command, check=True)
    text = subprocess.run(["objdump", "-d", made], capture_output=True, text=True,
                          check=True).stdout
    found = {name: len(re.findall(rf"\b{name}\b", text)) for name in (
        "ldtilecfg", "sttilecfg", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")}
    assert all(found.values()) and found["tdpbf16ps"] == 1 + 2 + 2 + 4, found
    assert not re.search(r"\bv?(mul|fmadd)\w+ps\b", text)


def test_linux_is_asked_once_before_a_library_with_tiles_is_loaded(home, log, monkeypatch):  # noqa: F811
    """On a CPU that has them by its compiler's words."""
    calls = []
    monkeypatch.setattr(build, "tiles_for", cache(build.tiles_for.__wrapped__))
    monkeypatch.setattr(build, "may_use_tiles", lambda: calls.append(1) or True)
    monkeypatch.delenv("NANOSERVE_TILES", raising=False)
    set_compiler(home, monkeypatch, 'echo "$@" >> "$log"\n'
                 'case "$*" in *-dM*) echo "#define __AMX_BF16__ 1";; esac\nexec g++ "$@"')
    for _ in range(2):
        assert build.load().answer() == 42
    assert len(calls) == 1 and log.read_text().count("-DMATRIX_TILES -shared") == 1


@pytest.mark.parametrize("has_them, asked, linux, takes, says", [
    (True, "", [True], True, ""), (True, "1", [True], True, ""), (True, "0", [], False, ""),
    (True, "", [False], False, "Linux refuses"), (False, "", [], False, ""),
    (False, "1", [], False, "this CPU has none"), (False, "0", [], False, "")])
def test_tiles_are_taken_where_the_cpu_has_them_and_linux_gives_them(monkeypatch, capsys, has_them,
                                                                     asked, linux, takes, says):
    """Without asking, the first tile would end the process: an old kernel or a sandbox refuses.
    linux: its answers, each to one question."""
    tiles_for = cache(build.tiles_for.__wrapped__)
    monkeypatch.setenv("NANOSERVE_TILES", asked)
    monkeypatch.setattr(build, "may_use_tiles", linux.pop)
    assert tiles_for(has_them) == tiles_for(has_them) == takes
    said = capsys.readouterr().err.splitlines()
    assert not linux and len(said) == bool(says) and all(says in line for line in said)
    monkeypatch.setenv("NANOSERVE_TILES", "yes")
    with pytest.raises(build.BuildError, match="NANOSERVE_TILES='yes'"):
        build.tiles_for.__wrapped__(has_them)


# ------------------------------------------------------------- beside torch's own


@full_elsewhere
def test_torch_and_we_take_turns_in_the_same_threads(tmp_path):
    """1,000 times: oneDNN's tiles have other shapes, and both results stay what they were."""
    script = """
import sys, torch
if sys.argv[1:]: import tile_traps
from nanoserve import cpu
torch.set_num_threads(2)
x, weight = torch.randn(40, 96).bfloat16(), torch.randn(200, 96).bfloat16()
packed, plain = cpu.prepack(weight), weight.T.contiguous()
first = None
for _ in range(1000):
    both = x @ plain, cpu.linear(x, packed)
    first = first or both
    assert all(map(torch.equal, both, first))
if sys.argv[1:]: assert not tile_traps.TRAPS.count_borrowed()
"""
    result = run(script, *([] if HAS_AMX else ["traps"]), NANOSERVE_TILES=str(int(HAS_AMX)),
                 XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path),
                 CXXFLAGS="" if HAS_AMX else INSTRUCTIONS)
    assert result.returncode == 0, result.stderr
