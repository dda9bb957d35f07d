"""Compile cpu.cpp, or a file like it, for this machine on first use, load it, and call it safely.

A wheel can't know which instructions a CPU has. So it contains the source, and the system's
compiler makes a library of it once. The library's name contains a hash of all its inputs, and a
digest of the library itself:

    source and headers, flags, the compiler's version, the CPU's features, torch's OpenMP library
      └──► ~/.cache/nanoserve/cpu-2f6a…-91c0….so

Invariants: files in that folder are run, so folder and file must belong to this user, be closed to
all others, and be no links; otherwise a temporary folder is used. A file that was cut off or
damaged could end the process that loads it, so a file is built anew if its digest is not the one in
its name. A compiler is called without a shell and with a time limit. If several processes start at
once, one builds and the others wait.

Threads are OpenMP's. torch has loaded an OpenMP library already, and a second one would be a second
set of threads that fights the first for the cores, so this library is linked to torch's own file.

`CXX` names another compiler, `CXXFLAGS` adds flags. Where the CPU has matrix tiles
(matrix_tiles.h) products of bfloat16 take them; `NANOSERVE_TILES=0` leaves them alone.
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
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from tqdm import tqdm

SOURCE = Path(__file__).with_name("cpu.cpp")
# Arithmetic as it is written: no -ffast-math, which would also change it for the whole process.
# -Xpreprocessor hands -fopenmp to the compiler alone: otherwise g++ and clang++ would also link an
# OpenMP library of their own in addition to torch's.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-Xpreprocessor", "-fopenmp",
         "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]
MACROS = ("-dM", "-E", "-x", "c++", os.devnull)  # print them, compile nothing
SECONDS = 300  # the longest that a compiler may take


class BuildError(ImportError):
    """There is no compiled library; the message says why, and what to do about it."""


def load(source: Path | None = None) -> ctypes.CDLL:
    """The library made of `source`, or of `SOURCE`; compiled if need be. Raises `BuildError`."""
    source, openmp = source or SOURCE, find_openmp()
    command, machine = command_for_this_cpu()
    key = digest(repr((contents(source), command, *machine, openmp)).encode())
    try:
        import fcntl  # not on Windows
        kept = cache_folder()
        place = nullcontext(kept) if kept else tempfile.TemporaryDirectory(prefix="nanoserve-")
        with place as folder, open(Path(folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back however this process ends
            path = Path(folder, f"{source.stem}-{key}")
            whole = next(filter(is_whole, path.parent.glob(f"{path.name}-*.so")), None)
            return ctypes.CDLL(str(whole or build(source, command, openmp, path)))
    except OSError as error:
        raise BuildError(f"{source.name}'s library can't be kept or loaded ({error}): set "
                         "XDG_CACHE_HOME to a folder whose files may be run, or on Linux CXX to "
                         "g++, whose OpenMP library torch uses") from error


def command_for_this_cpu() -> tuple[list[str], list[str]]:
    """The compiler with its flags; and its version with the macros that name the CPU's features,
    because a home folder may be shared by machines with different CPUs."""
    command = [*find_compiler(), *FLAGS, *words("CXXFLAGS")]
    version, macros = run([*command, "--version"]), run([*command, *MACROS])
    if tiles_for("__AMX_BF16__" in macros):
        command.append("-DMATRIX_TILES")
    return command, [version, macros]


@cache
def tiles_for(cpu_has_them: bool) -> bool:
    """Whether products take matrix tiles: where the CPU has them and Linux gives them, unless
    NANOSERVE_TILES is 0. Says once why not. Raises `BuildError` for another value of it."""
    asked = os.environ.get("NANOSERVE_TILES", "")
    if asked not in ("", "0", "1"):
        raise BuildError(f"NANOSERVE_TILES={asked!r}: 0 leaves matrix tiles alone, 1 takes them "
                         "where the CPU has them, which is the default")
    if asked == "0":
        return False
    if cpu_has_them and may_use_tiles():
        return True
    if cpu_has_them or asked == "1":
        why = "Linux refuses them to this process" if cpu_has_them else "this CPU has none"
        tqdm.write(f"nanoserve: products go without matrix tiles: {why}", file=sys.stderr)
    return False


def may_use_tiles() -> bool:
    """Ask Linux for the room that matrix tiles take in each thread's state. Without this permission
    the first use of a tile ends the process. An old Linux or a sandbox refuses."""
    arch_prctl, request_permission, tile_data = map(ctypes.c_long, (158, 0x1023, 18))
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def contents(source: Path) -> bytes:
    """The source, followed by the headers of this folder that it includes, and that these include.
    All other headers are the compiler's."""
    text = source.read_bytes()
    included = re.findall(rb'^#include "(.+)"', text, re.M)
    return b"".join([text, *(contents(SOURCE.parent / name.decode()) for name in included)])


def words(variable: str) -> list[str]:
    """An environment variable, split as a shell does. Raises `BuildError` for an open quote."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise BuildError(f"{variable}={os.environ[variable]!r}: {error}") from None


def build(source: Path, command: list[str], openmp: Path, path: Path) -> Path:
    """Compile to another name; rename it when its digest is known. Raises `BuildError`."""
    tqdm.write(f"nanoserve: compiling {source.parent.name}/{source.name} for this CPU, once ...",
               file=sys.stderr)
    made = Path(f"{path}.new")
    run([*command, "-shared", f"-I{SOURCE.parent}", str(source), str(openmp), "-o", str(made)])
    made.chmod(0o700)
    return made.replace(f"{path}-{digest(made.read_bytes())}.so")


def run(command: list[str]) -> str:
    """What the command prints. Raises `BuildError` with its output if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS,
                                stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler can't be run ({error}): set CXX to another") from error
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise BuildError(f"the C++ compiler {command[0]} failed (CXX sets another): {said[:2000]}")
    return result.stdout


def find_compiler() -> list[str]:
    """The command, as a list. Raises `BuildError` if there is none."""
    found = words("CXX") or [*filter(shutil.which, ("g++", "c++", "clang++"))][:1]
    if not found:
        raise BuildError("there is no C++ compiler: install one (on Debian and Ubuntu: apt install "
                         "g++; on macOS: xcode-select --install), or set CXX")
    return found


def find_openmp() -> Path:
    """The OpenMP library that torch has loaded. Raises `BuildError` if there is none.

    Other packages may have loaded one of their own. torch's lies in its folder, or in the one that
    wheels have for libraries. If none lies there, torch uses the system's, which is loaded, too.
    """
    folder, maps = Path(torch.__file__).resolve().parent, Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else "\n".join(map(str, folder.glob("lib/*")))
    found = re.findall(r"/.*/lib(?:g|i)?omp[-\d.][^/\s]*$", text, re.M)
    if not found:
        raise BuildError("torch has no OpenMP library whose threads could be shared: install "
                         "another build of torch, or use kernels='torch'")
    of_torch = [path for path in found if path.startswith((f"{folder}/", f"{folder}.libs/"))]
    return Path((of_torch or found)[0])


def cache_folder() -> Path | None:
    """This user's own folder, made if need be; None if it can't be, or isn't private."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanoserve")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_private(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # the second: there is no home, as for a container's user
        return None


def is_private(path: Path) -> bool:
    """Whether `path` is no link, and only this user can read, write and run it."""
    status = path.lstat()
    return (status.st_uid == os.getuid() and not status.st_mode & 0o077
            and not stat.S_ISLNK(status.st_mode))


def is_whole(path: Path) -> bool:
    """Whether this user built it, and it is as it was built."""
    return is_private(path) and path.stem.endswith(digest(path.read_bytes()))


# ------------------------------------------------- the functions of a library
# A compiled library's functions, checked by their signatures before an address is handed over.
#
# The last lines of cpu.cpp, or of a file like it, declare what each function takes and gives:
#
#     add_rms_norm: T x[rows size], T? residual[rows size], f32 weight[size], float eps ->
#                   T out[rows size], T total[rows size]
#
# T is the dtype of the first argument (float16 is computed in float32). An argument with a question
# mark may be None. A size has one value wherever its name stands, as in the signatures of NumPy's
# generalised ufuncs. Such a line becomes a `Function`, which makes room for the results:
#
#     x, residual, weight, eps ─ checked ─► addresses, numbers, sizes ─► C++ ─► out, total
#
# C++ gets the sizes in the order in which they are named, except those like `_ends`, which are only
# checked. "panels" is a packed weight of T, with the sizes of the weight. "cache" is T or int8: C++
# sees from the cache's last size which of the two it is.
#
# Invariant: no address is handed over unless dtype, shape, order and device fit. A wrong address
# would not raise an error: C++ would read or write another object's memory. Numbers that are used
# as indices (slots, tables, ids) are trusted: batch.py makes them.
#
# Road not taken: operators that torch knows (torch.library). C++ would have to include torch's
# headers, and would take much longer to compile.

DTYPES = (torch.float32, torch.bfloat16)  # T, in the order of a library's table
KINDS = {"T": None, "panels": None, "cache": None, "f32": torch.float32, "i8": torch.int8,
         "i32": torch.int32, "i64": torch.int64, "float": ctypes.c_float, "long": ctypes.c_long}
# A result is made by `new_empty` of one of these: there is no faster way to make a tensor.
ROOM = {dtype: torch.empty(0, dtype=dtype, device="cpu")
        for dtype in (*DTYPES, torch.int32, torch.int64)}


def functions_of(library: ctypes.CDLL) -> SimpleNamespace:
    """A library's functions, by name. Its table has three entries for each: the signature, and the
    addresses for float32 and bfloat16; it ends with null."""
    table, found = ctypes.cast(library.functions, ctypes.POINTER(ctypes.c_void_p)), {}
    while table[3 * len(found)]:
        text, *addresses = table[3 * len(found):3 * len(found) + 3]
        name, _, signature = ctypes.string_at(text).decode().partition(": ")
        found[name] = Function(name, signature, addresses)
    return SimpleNamespace(**found)


class Function:
    """One compiled function. Arguments are as its signature says; keyword arguments give the sizes
    that no tensor has."""

    def __init__(self, name: str, signature: str, addresses: list[int]):
        self.name, self.signature = name, signature
        takes, _, gives = signature.partition(" -> ")
        self.takes, self.gives = parts_of(takes), parts_of(gives)
        parts = self.takes + self.gives
        # The sizes that C++ gets, each once, in the order in which they are named.
        self.handed = dict.fromkeys(size for part in parts for size in part.dims if size[0] != "_")
        types = [ctypes.c_void_p if part.dims else part.kind for part in parts]
        prototype = ctypes.CFUNCTYPE(None, *types, *[ctypes.c_long] * len(self.handed))
        self.compiled = dict(zip(DTYPES, map(prototype, addresses), strict=True))

    def __call__(self, *given, **sizes: int):
        asked = dtype = given[0].dtype
        if asked not in self.compiled:  # float16 becomes float32; any other dtype will not fit
            given, dtype = [in_float32(x) for x in given], torch.float32
        arguments = []
        for part, x in zip(self.takes, given, strict=True):
            if part.dims and not (x is None and part.optional):
                address = part.address(x, dtype, sizes)
                if address is None:
                    raise ValueError(self.misfit(len(arguments) + 1, x, dtype, sizes))
                x = address
            arguments.append(x)  # a number, which ctypes checks, an address, or None
        results = [ROOM[part.kind or dtype].new_empty(*[sizes[size] for size in part.dims])
                   for part in self.gives]
        self.compiled[dtype](*arguments, *[x.data_ptr() for x in results],
                             *[sizes[size] for size in self.handed])
        if asked != dtype:
            results = [x if part.kind else x.half()
                       for part, x in zip(self.gives, results, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def misfit(self, number: int, x, dtype: torch.dtype, sizes: dict[str, int]) -> str:
        """What is wrong with an argument, as an error says it. number: counted from 1."""
        memory = x.memory if hasattr(x, "memory") else x
        return (f"{self.name} takes {self.signature}, contiguous and on the CPU; argument {number} "
                f"is {tuple(x.shape)} {x.dtype} on {memory.device}, strides {memory.stride()}, "
                f"where T is {dtype} and sizes are {sizes}")


class Matrix(ctypes.Structure):
    """`Matrix` of library.h: a packed weight, and the function that multiplies by it."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("multiply", "weight", "bias")),
                *((name, ctypes.c_long) for name in (
                    "inputs", "outputs", "bits", "group", "floats", "panels", "panel_size"))]

    @classmethod
    def of(cls, library: ctypes.CDLL, dtype: torch.dtype, weight: torch.Tensor,
           bias: torch.Tensor | None, **sizes: int) -> "Matrix":
        """dtype: of the rows that are multiplied. The tensors must live as long as the record."""
        addresses = (ctypes.c_void_p * len(DTYPES)).in_dll(library, "products")
        return cls(addresses[DTYPES.index(dtype)], weight.data_ptr(),
                   None if bias is None else bias.data_ptr(), **sizes)


class Part(NamedTuple):
    """What a signature says of one argument or result."""

    word: str
    kind: object  # the word's meaning; None: the dtype of the first argument
    optional: str  # "?" where it may be None
    dims: list[str]  # sizes; a number has none

    def address(self, x, dtype: torch.dtype, sizes: dict[str, int]) -> int | None:
        """Where a tensor's memory is; None if it does not fit. Its sizes are noted in `sizes`."""
        shape, memory = x.shape, x.memory if self.word == "panels" else x
        fits = len(shape) == len(self.dims) and (
            x.dtype == (self.kind or dtype) or self.word == "cache" and x.dtype == torch.int8)
        for size, number in zip(self.dims, shape):  # noqa: B905 - `strict` costs time
            if sizes.setdefault(size, number) != number:
                fits = False
        return memory.data_ptr() if fits and memory.is_contiguous() and memory.is_cpu else None


def parts_of(text: str) -> list[Part]:
    """What stands in "T? a[n m], float b"."""
    found = re.findall(r"(\w+)(\??) \w+(?:\[(.*?)\])?", text)
    return [Part(word, KINDS[word], optional, dims.split()) for word, optional, dims in found]


def in_float32(x):
    """A tensor of float16 as float32; anything else as it is."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x
