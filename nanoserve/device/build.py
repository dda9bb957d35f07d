"""Compile device/cpu.cpp, or a file like it, for this machine on first use, and load it.

A wheel can't know which instructions a CPU has. So it contains the source, and the system's
compiler makes a library of it once. The library is kept under a hash of all that went into it:

    source, flags, the compiler's version, the CPU's features, torch's OpenMP library
      └──► ~/.cache/nanoserve/cpu-2f6a….so     compiled to another name, then renamed

Invariants: what lies in that folder will be run, so folder and file must be this user's, closed to
all others, and no links; otherwise a temporary folder takes its place. A compiler is called without
a shell and with a time limit. If several processes start at once, one builds and the others wait.

Threads are OpenMP's. torch has loaded an OpenMP library already, and a second one would be a second
pool of threads that fights the first for the cores, so this library is linked to torch's own file.

`CXX` names another compiler, `CXXFLAGS` adds flags. Not known here: what the functions do.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from tqdm import tqdm

SOURCE = Path(__file__).with_name("cpu.cpp")
# Arithmetic as it is written: no -ffast-math, which would also change it for the whole process.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fopenmp",
         "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]
SECONDS = 300  # the longest that a compiler may take


class BuildError(ImportError):
    """There is no compiled library; the message says why, and what to do about it."""


def load(source: Path | None = None) -> ctypes.CDLL:
    """The library made of `source`, or of `SOURCE`; compiled if need be. Raises `BuildError`."""
    source = source or SOURCE
    compiler, openmp = find_compiler(), find_openmp()
    flags = FLAGS + words("CXXFLAGS")
    info = Path("/proc/cpuinfo")  # a home may be shared by machines with different CPUs
    features = re.search(r"^(?:flags|Features).*", info.read_text() if info.exists() else "", re.M)
    key = hashlib.sha256(repr((
        source.read_bytes(), compiler, flags, run([*compiler, "--version"]), platform.processor(),
        features and features[0], openmp)).encode()).hexdigest()[:24]
    try:
        import fcntl  # not on Windows
        kept = cache_folder()
        place = nullcontext(kept) if kept else tempfile.TemporaryDirectory(prefix="nanoserve-")
        with place as folder, open(Path(folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back however this process ends
            path = Path(folder, f"{source.stem}-{key}.so")
            if is_private(path):
                with suppress(OSError):  # it is damaged, or was copied by half: it is built anew
                    return ctypes.CDLL(str(path))
            build(source, compiler, flags, openmp, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{source.name}'s library can't be kept or loaded ({error}); on Linux it "
                         "takes g++, whose OpenMP library is torch's") from error


def words(variable: str) -> list[str]:
    """An environment variable, split as a shell does. Raises `BuildError` for an open quote."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise BuildError(f"{variable}={os.environ[variable]!r}: {error}") from None


def build(source: Path, compiler: list[str], flags: list[str], openmp: Path, path: Path) -> None:
    """Compile to another name beside `path`, and rename it. Raises `BuildError`."""
    tqdm.write(f"nanoserve: compiling {source.parent.name}/{source.name} for this CPU, once ...",
               file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        compiled, linked = Path(name, "cpu.o"), Path(name, "cpu.so")
        run([*compiler, *flags, "-c", str(source), "-o", str(compiled)])
        # Without -fopenmp, which would link the compiler's own OpenMP library beside torch's.
        sanitizers = [flag for flag in flags if flag.startswith("-fsanitize")]
        run([*compiler, "-shared", *sanitizers, str(compiled), str(openmp), "-o", str(linked)])
        linked.chmod(0o700)
        with open(linked, "rb") as file:  # before its name: a power cut would leave half a library,
            os.fsync(file.fileno())  # which may end the process that loads it
        os.replace(linked, path)


def run(command: list[str]) -> str:
    """What the command prints. Raises `BuildError` with its output if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS,
                                stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler can't be run ({error}): set CXX to another") from error
    if result.returncode:
        words = (result.stderr or result.stdout).strip()
        raise BuildError(f"the C++ compiler {command[0]} failed (CXX sets another): {words[:2000]}")
    return result.stdout


def find_compiler() -> list[str]:
    """The command, as a list. Raises `BuildError` if there is none."""
    if named := words("CXX"):
        return named
    found = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if not found:
        raise BuildError("there is no C++ compiler: install one (on Debian and Ubuntu: apt install "
                         "g++; on macOS: xcode-select --install), or set CXX")
    return [found]


def find_openmp() -> Path:
    """The OpenMP library that torch has loaded. Raises `BuildError` if there is none."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else "\n".join(
        map(str, Path(torch.__file__).parent.glob("lib/*")))
    if found := re.search(r"/.*/lib(?:g|i)?omp[^/\s]*$", text, re.M):
        return Path(found[0])
    raise BuildError("torch has no OpenMP library whose threads could be shared")


def cache_folder() -> Path | None:
    """This user's own folder, made if need be; None if it can't be, or isn't private."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanoserve")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_private(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # the second: there is no home, as for a container's user
        return None


def is_private(path: Path) -> bool:
    """Whether `path` exists, is no link, and only this user can read, write and run it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (status.st_uid == os.getuid() and not status.st_mode & 0o077
            and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)))
