"""A compiled library's functions, checked by their signatures before an address is handed over.

The last lines of device/cpu.cpp, or of a file like it, say what each function takes and gives:

    add_rms_norm: T x[rows size], T? residual[rows size], f32 weight[size], float eps ->
                  T out[rows size], T total[rows size]

T is the dtype of the first argument (float16 is computed in float32). What has a question mark may
be None. A size has one value wherever its name stands, as in the signatures of NumPy's generalised
ufuncs. From such a line comes a function of Python, which makes room for the results:

    x, residual, weight, eps ─ checked ─► addresses, numbers, sizes ─► C++ ─► out, total

C++ gets the sizes in the order in which they are named, but for those like `_ends`, which are only
checked. "panels" is a packed weight of T, whose sizes are the weight's own. "cache" is T or int8,
which its last size tells C++.

Invariant: no address is handed over unless dtype, shape, order and device fit. A wrong one would
not raise, it would read or write another object's memory. Numbers that are used as indices (slots,
tables, ids) are trusted: batch.py makes them.

For operators that torch knows (torch.library) C++ would have to include torch's headers, and then
compile much longer.
"""

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace

import torch

DTYPES = (torch.float32, torch.bfloat16)  # T, in the order of a library's table
KINDS = {"T": None, "panels": None, "cache": None, "f32": torch.float32, "i8": torch.int8,
         "i32": torch.int32, "i64": torch.int64, "float": ctypes.c_float, "long": ctypes.c_long}
# For results: a tensor is made in the least time by asking one of its dtype for it.
ROOM = {dtype: torch.empty(0, dtype=dtype, device="cpu")
        for dtype in (*DTYPES, torch.int32, torch.int64)}


def functions_of(library: ctypes.CDLL) -> SimpleNamespace:
    """By name. The library's table has a signature and two addresses for each; null at the end."""
    table, found = ctypes.cast(library.functions, ctypes.POINTER(ctypes.c_void_p)), {}
    while table[3 * len(found)]:
        text, *addresses = table[3 * len(found):3 * len(found) + 3]
        name, _, signature = ctypes.string_at(text).decode().partition(": ")
        found[name] = function_of(name, signature, addresses)
    return SimpleNamespace(**found)


def function_of(name: str, signature: str, addresses: list[int]) -> Callable:
    """Called with what it takes, and by name with sizes that no tensor has."""
    takes, gives = map(parts_of, f"{signature} -> ".split(" -> ")[:2])
    handed = dict.fromkeys(size for part in takes + gives for size in part[-1] if size[0] != "_")
    types = [ctypes.c_void_p if dims else kind for _, kind, _, dims in takes + gives]
    prototype = ctypes.CFUNCTYPE(None, *types, *[ctypes.c_long] * len(handed))
    compiled = dict(zip(DTYPES, map(prototype, addresses), strict=True))

    def function(*given, **sizes: int):
        asked = dtype = given[0].dtype
        if asked not in compiled:  # float16 is computed in float32; others will not fit
            given, dtype = [in_float32(x) for x in given], torch.float32
        arguments = []
        for (word, kind, optional, dims), x in zip(takes, given, strict=True):
            if not dims or x is None and optional:
                arguments.append(x)  # a number, which ctypes checks, or None
                continue
            shape, memory = x.shape, x.memory if word == "panels" else x
            fits = len(shape) == len(dims) and (
                x.dtype == (kind or dtype) or word == "cache" and x.dtype == torch.int8)
            for size, number in zip(dims, shape):  # noqa: B905 - `strict` costs time
                if sizes.setdefault(size, number) != number:
                    fits = False
            if not (fits and memory.is_contiguous() and memory.is_cpu):
                raise ValueError(
                    f"{name} takes {signature}, contiguous and on the CPU; argument "
                    f"{len(arguments) + 1} is {tuple(shape)} {x.dtype} on {memory.device}, strides "
                    f"{memory.stride()}, where T is {dtype} and sizes are {sizes}")
            arguments.append(memory.data_ptr())
        results = [ROOM[kind or dtype].new_empty(*[sizes[size] for size in dims])
                   for _, kind, _, dims in gives]
        compiled[dtype](*arguments, *[x.data_ptr() for x in results],
                        *[sizes[size] for size in handed])
        if asked != dtype:
            results = [x if kind else x.half()
                       for (_, kind, *_), x in zip(gives, results, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    return function


def parts_of(text: str) -> list[tuple]:
    """Of each part of "T? a[n m], float b": the word, its meaning, "?" or nothing, the sizes."""
    found = re.findall(r"(\w+)(\??) \w+(?:\[(.*?)\])?", text)
    return [(word, KINDS[word], optional, dims.split()) for word, optional, dims in found]


def in_float32(x):
    """If it is a tensor of float16."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x
