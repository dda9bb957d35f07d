"""Compiling on first use: what lies in a cache folder will be run, so the care goes there.

Most tests compile a file of one line with a compiler that keeps a log; the machine's own does the
work behind it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dummy_engines import assert_serves
from dummy_engines import start as start_engine
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

import nanoserve
from nanoserve import build, ops

pytestmark = pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux",
                                reason="needs g++")
SOURCE = Path(build.__file__).with_name("cpu.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of one's own, and a source whose only function gives 42."""
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    return tmp_path


def set_compiler(home: Path, monkeypatch, script: str) -> Path:
    """CXX becomes a script; it gets `$log`, a file to write to. Returns that file."""
    log, compiler = home / "log", home / "compiler"
    compiler.write_text(f"#!/bin/sh\nlog={shlex.quote(str(log))}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


@pytest.fixture
def log(home, monkeypatch):
    """What the compiler was asked, a line each."""
    return set_compiler(home, monkeypatch, 'echo "$@" >> "$log"; exec g++ "$@"')


def compilations(log: Path) -> int:
    return sum(" -shared " in line for line in log.read_text().splitlines())


def libraries(home: Path) -> list[Path]:
    return list((home / "cache" / "nanoserve").glob("*.so"))


def start(call: Callable[[], int]) -> int:
    """A process, by its id, that ends with what the call returns."""
    if (child := os.fork()) == 0:
        try:
            os._exit(call())
        finally:
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ------------------------------------------------------------------- building once


def test_it_is_built_once_says_so_and_lies_in_private(home, log, capfd):
    assert build.load().answer() == 42
    assert "compiling" in capfd.readouterr().err
    path, = libraries(home)
    assert path.stat().st_mode & 0o777 == 0o700 and path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(x.name for x in path.parent.iterdir()) == sorted([path.name, "lock"])
    assert build.load().answer() == 42
    assert compilations(log) == 1 and capfd.readouterr().err == ""


@pytest.mark.parametrize("change", ["source", "header", "flags", "compiler", "the CPU's features",
                                    "openmp"])
def test_whatever_goes_into_it_is_part_of_its_name(home, log, change, monkeypatch):
    (home / "outer.h").write_text('#include "inner.h"\n')
    (home / "inner.h").write_text("#define ANSWER 42\n")
    build.SOURCE.write_text('#include "outer.h"\nextern "C" int answer() { return ANSWER; }\n')
    build.load()
    if change == "source":
        build.SOURCE.write_text('extern "C" int answer() { return 43; }\n')
    elif change == "header":
        (home / "inner.h").write_text("#define ANSWER 43\n")
    elif change == "flags":
        monkeypatch.setenv("CXXFLAGS", "-DOTHER=1")
    elif change == "compiler":
        set_compiler(home, monkeypatch, 'echo "$@" >> "$log"\n'
                     'case "$*" in *--version) echo another one; exit;; esac\nexec g++ "$@"')
    elif change == "the CPU's features":
        set_compiler(home, monkeypatch, 'echo "$@" >> "$log"\n'
                     'case "$*" in *-dM*) echo "#define __AVX1024__ 1";; esac\nexec g++ "$@"')
    else:
        copy = shutil.copy(build.find_openmp(), home / "libgomp.so.1")
        monkeypatch.setattr(build, "find_openmp", lambda: Path(copy))
    assert build.load().answer() == (43 if change in ("source", "header") else 42)
    assert len(libraries(home)) == 2


def test_several_processes_build_it_once(home, log):
    children = [start(lambda: build.load().answer()) for _ in range(3)]
    assert [exit_code(child) for child in children] == [42] * 3
    assert compilations(log) == 1


DAMAGES = {"empty": lambda library: b"", "another": lambda library: b"\x7fELF and no more",
           "cut": lambda library: library[:len(library) // 2],
           "overwritten": lambda library: library[:-1000] + bytes(1000)}


def test_a_damaged_library_is_built_anew(home, log):
    """One that was cut ended the process that loaded it. With others every start was slow from then
    on, and the line for it named no remedy."""
    def answer() -> int:  # of a process of its own: a file that is loaded must not be cut
        return exit_code(start(lambda: build.load().answer()))

    assert answer() == 42
    for compiled, (name, damage) in enumerate(DAMAGES.items(), 2):
        path, = libraries(home)
        path.write_bytes(damage(path.read_bytes()))
        assert answer() == 42 and compilations(log) == compiled, name


@pytest.mark.parametrize("flaw", ["open to others", "a link", "no folder", "no home"])
def test_a_folder_that_others_could_change_is_not_used(home, log, flaw, monkeypatch):
    """A temporary folder takes its place, and nothing of it stays."""
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    own, folder = home / "tmp", home / "cache" / "nanoserve"
    own.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(own))
    if flaw == "no home":  # a container's user may have none
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    elif flaw == "no folder":  # as on a home that can't be written to
        (home / "cache").write_text("a file")
    else:
        real = home / "real" if flaw == "a link" else folder
        real.mkdir(parents=True)
        real.chmod(0o777 if flaw == "open to others" else 0o700)
        if flaw == "a link":
            folder.parent.mkdir()
            folder.symlink_to(real)
    assert build.load().answer() == 42
    assert not list(home.glob("*/**/*.so")) and not list(own.iterdir())


@pytest.mark.parametrize("flaw", ["open to others", "a link", "somebody else's"])
def test_a_library_that_others_could_have_changed_is_built_anew(home, log, flaw, monkeypatch):
    build.load()
    path, = libraries(home)
    if flaw == "open to others":
        path.chmod(0o777)
    elif flaw == "a link":
        path.rename(home / "elsewhere.so")
        path.symlink_to(home / "elsewhere.so")
    elif os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")
    assert build.load().answer() == 42
    assert compilations(log) == 2 and build.is_private(path)


def test_flags_are_no_shell_commands(home, log, monkeypatch):
    evil = home / "evil"
    monkeypatch.setenv("CXXFLAGS", f"'-DX=$(touch {evil});touch {evil}'")
    assert build.load().answer() == 42 and not evil.exists()


# ------------------------------------------------------------- what can go wrong


NO_LIBRARY = '''while [ $# -gt 1 ]; do [ "$1" = -o ] && echo no > "$2"
shift; done'''
INTERRUPTED = '''for last; do :; done
case "$*" in *-shared*) echo half > "$last"; exit 1;; esac
exec g++ "$@"'''


@pytest.mark.parametrize("environment, script, says", [
    (dict(CXX="g++ '-DX"), None, "CXX=.*No closing quotation"),
    (dict(CXXFLAGS="g++ '-DX"), None, "CXXFLAGS=.*No closing quotation"),
    (dict(PATH="nowhere"), None, r"no C\+\+ compiler.*CXX"),
    (dict(CXX="nowhere/to/be/found"), None, "CXX"),
    (dict(CXXFLAGS="-Danswer=+"), None, r"(?s)g\+\+.*answer.cpp:1:"),
    ({}, "exec sleep 60", "CXX"), ({}, NO_LIBRARY, "can't be kept or loaded"),
    ({}, INTERRUPTED, "failed")], ids=str)
def test_what_fails_is_named_and_leaves_nothing_that_could_be_loaded(home, monkeypatch,
                                                                     environment, script, says):
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as patch:
        if script:
            set_compiler(home, patch, script)
            patch.setattr(build, "SECONDS", 0.2 if "sleep" in script else 300)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(build.BuildError, match=says):
            build.load()
    assert script == NO_LIBRARY or not libraries(home)
    assert build.load().answer() == 42


def run(script: str, *arguments: str, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, text=True, capture_output=True, env=os.environ | environment,
                          check=False)


def test_where_it_can_not_be_built_the_engine_says_so_and_runs(dummy, monkeypatch, capsys):
    """And it is an error where it was asked for."""
    monkeypatch.delitem(sys.modules, "nanoserve.cpu", raising=False)
    monkeypatch.delattr(nanoserve, "cpu", raising=False)
    monkeypatch.setenv("CXX", "false")
    engine = start_engine(dummy, dtype="float32", num_gpu_blocks_override=8)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "compiler" in line]
    assert "kernels='torch'" in line and engine.runner.ops is ops
    assert_serves(engine)
    with pytest.raises(ValueError, match="kernels='cpu'.*'torch'"):
        start_engine(dummy, kernels="cpu")


# --------------------------------------------------------------------- the real source


def flavours() -> dict[str, list[str]]:
    """Compilers and instruction sets: this machine's, and those of others."""
    mine = ["g++", *[flag for flag in build.FLAGS if flag != "-O3"]]
    if "-march=native" not in build.FLAGS:
        return {"native": mine}
    found = {"native": mine} | {level: [*mine, f"-march={level}"] for level in (
        "x86-64", "x86-64-v3", "skylake-avx512", "cooperlake")}
    found["matrix tiles"] = [*mine, "-mamx-tile", "-mamx-bf16", "-DMATRIX_TILES"]
    if shutil.which(arm := "aarch64-linux-gnu-g++"):
        found["neon"] = [arm, "-std=c++17", "-fopenmp"]
    if shutil.which("clang++"):
        found["clang"] = ["clang++", *mine[1:]]
    return found


@pytest.mark.parametrize("flavour", flavours())
def test_no_compiler_warns(flavour):
    """For users a warning is none of their business, so only here it is an error."""
    command = [*flavours()[flavour], *WARNINGS, "-fsyntax-only", str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if flavour == "clang" and "omp" in result.stderr and "not found" in result.stderr:
        pytest.skip("clang without OpenMP")
    assert result.returncode == 0, result.stderr


def test_the_start_up_line_names_what_multiplies():
    """By the features that Linux sees."""
    from nanoserve.cpu import multiplies

    features = Path("/proc/cpuinfo").read_text().split()
    names = dict(avx512_bf16="AVX512-BF16", avx512f="AVX512", avx2="AVX2")
    expected = [name for feature, name in names.items() if feature in features]
    if not expected or "amx_bf16" in features:
        pytest.skip("another kind of CPU, or matrix tiles")
    assert multiplies(torch.bfloat16) == expected[0]
    assert multiplies(torch.float32) == expected[expected[0] == "AVX512-BF16"]


HERE = Path(__file__).parent
ORACLES = [str(path) for path in (
    HERE / "test_ops.py", HERE / "test_ops_sampling.py",
    HERE / "test_ops_int8.py",
    HERE / "extras" / "recurrent" / "test_recurrent_delta.py") if path.exists()]


# Their library is another one, which has no tests where the extras are deleted.
QUANTISED = HERE / "extras" / "quantization" / "test_quantized_linear.py"


def run_oracles(cache: Path, flags: str, *options: str) -> str:
    """ORACLES for the compiled twin, in a process whose library has other flags. Without float16,
    which comes to the library as float32."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k",
         "cpu and not (attention and (many or mixed or long)) and not torch.float16 "
         "or CpuWeight and (product or portions)", *ORACLES, *options],
        text=True, capture_output=True, check=False, env=os.environ | {
            "CXXFLAGS": flags, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(HERE)})
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert re.search(r"\d\d\d passed", result.stdout), result.stdout
    return result.stdout


def test_avx2_computes_the_same(tmp_path):
    if not re.search(r"\bavx512f\b", Path("/proc/cpuinfo").read_text()):
        pytest.skip("no AVX-512: what this CPU runs is AVX2 already, or no x86 at all")
    run_oracles(tmp_path, "-O1 -march=x86-64-v3")


@pytest.mark.full
def test_nothing_undefined_happens_and_no_buffer_is_overrun(tmp_path):
    """A sanitiser ends the process at a shift too far, an overflow, a misaligned address; a page
    without rights behind each buffer at a number too far (guard_pages.py)."""
    from nanoserve.cpu import LIBRARY

    printed = run_oracles(tmp_path, "-O1 -fsanitize=undefined -fno-sanitize-recover=all",
                          "-p", "guard_pages", "-rp", *map(str, filter(Path.exists, [QUANTISED])))
    [guarded] = re.findall("^guarded: (.*)$", printed, re.M)
    assert set(guarded.split()) >= set(vars(LIBRARY))
    assert f"PASSED {QUANTISED.relative_to(HERE.parent)}" in printed or (
        not QUANTISED.exists())


def test_threads_are_torchs_and_as_many_as_torch_was_told(tmp_path):
    """One OpenMP library, and with one thread as with two none more than torch had. And torch's
    library is taken where another package has brought its own, which may come first in the
    process's memory, and whose folder's name may begin with "torch"."""
    script = """
import ctypes, nanoserve, pathlib, re, shutil, sys, torch, threading
def tasks():
    return int(re.search(r"Threads:\\s+(\\d+)", open("/proc/self/status").read())[1])
for threads in (1, 2):
    torch.set_num_threads(threads)
    x = torch.randn(512, 512)
    x @ x, torch.relu(x.repeat(64, 8))
    before = tasks()
    from nanoserve import build
    from nanoserve import cpu
    packed = cpu.prepack(x)
    cpu.linear(x, packed)
    assert tasks() == before, (tasks(), before)
    assert threads > 1 or before == 1, before
maps = set(re.findall(r"/\\S*lib(?:g|i)?omp[^/\\s]*", open("/proc/self/maps").read()))
assert len(maps) == 1, maps

torchs, home = build.find_openmp(), pathlib.Path(sys.argv[1])
for i in range(4):  # wherever they are mapped
    ctypes.CDLL(shutil.copy(torchs, home / f"libgomp-{i}.so.1"))
assert build.find_openmp() == torchs, build.find_openmp()
(home / "torch").mkdir(), (home / "torchvision.libs").mkdir()
own, other = home / "torch" / "libgomp-9.so.1", home / "torchvision.libs" / "libgomp-8.so.1"
for path in (other, own):
    ctypes.CDLL(shutil.copy(torchs, path))
torch.__file__ = str(home / "torch" / "__init__.py")
assert build.find_openmp() == own, build.find_openmp()
"""
    result = run(script, str(tmp_path))
    assert result.returncode == 0, result.stderr
