"""Why torch can't use a GPU that a machine seems to have, with the remedy.

The plain engine asks torch, and takes the CPU if torch sees no GPU. This module finds the reason: a
build of torch without CUDA, an old driver, a GPU for which this build has no code. If the engine
falls back to the CPU, the reason is printed; if the user asked for a GPU, it is the error.
"""

import ctypes
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import torch

from nanoserve import device as plain
from nanoserve.progress import say

# Device files of a GPU's driver: on Linux, and on Linux within Windows.
TRACES = ("/dev/nvidiactl", "/dev/dxg")


def pick_device(device: str) -> str:
    """ "auto" is the GPU if torch can use it. "cuda:1" stays as it is. Raises `ValueError` for a
    GPU that isn't there, or that torch can't use."""
    if device == "cpu":
        return "cpu"
    reason = why_unusable(device)
    if device == "auto":
        return "cpu" if reason is not None else "cuda"
    if reason:
        raise ValueError(f"device={device!r}, but {reason}: use device=\"cpu\" or \"auto\"")
    return plain.pick_device(device)


def say_why_unused(asked: str) -> None:
    """Print why the CPU is used, if there seems to be a GPU."""
    if asked == "auto" and (reason := why_unusable("auto")):
        say(f"{reason}. The CPU takes its place, which is slower")


def why_unusable(device: str) -> str | None:
    """Why torch can't use a GPU, with the remedy. Returns "" if the machine seems to have no GPU,
    and None if torch can use it. device: "cuda", "cuda:1" or "auto"."""
    with warnings.catch_warnings():  # torch's own warning repeats the reason
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return _why_unseen()
    if torch.version.hip:
        return None
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if ":" in device and device not in there:
        return f"torch sees {', '.join(there)}"
    at = None if device == "auto" else device
    name, (major, minor) = torch.cuda.get_device_name(at), torch.cuda.get_device_capability(at)
    made_for = torch.cuda.get_arch_list()  # "sm_86": code for 8.6 and 8.9; "compute_90": 9.0 and up
    kinds = [(kind, divmod(int(arch.rstrip("af")), 10)) for kind, _, arch in (
        text.partition("_") for text in made_for)]
    if kinds and not any((major, minor) >= arch and (kind == "compute" or major == arch[0])
                         for kind, arch in kinds):
        return (f"torch {torch.__version__} has no code for {name}, whose compute capability is "
                f"{major}.{minor} (it has {' '.join(made_for)}; install another build of torch)")
    return None


def _why_unseen() -> str:
    traces = [path for path in TRACES if Path(path).exists()]
    if not traces and shutil.which("nvidia-smi") is None:
        return ""
    where = f"there may be a GPU ({', '.join(traces) or 'nvidia-smi'}), but "
    if torch.version.cuda is None:
        return (f"{where}torch {torch.__version__} is built without CUDA (install the build that "
                "pytorch.org shows for CUDA)")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the driver is too old, for example
        return (f"{where}torch {torch.__version__}, built for CUDA {torch.version.cuda}, can't use "
                f"it ({shorten(str(error), 200)}; update the driver, or install a build of torch "
                "for an older CUDA)")
    return f"{where}CUDA finds none (nvidia-smi and CUDA_VISIBLE_DEVICES may tell why)"


def return_freed_memory() -> None:
    """Return freed memory to the system once, after a model's weights were freed: no later step
    needs that much."""
    with suppress(AttributeError, OSError, TypeError):  # as in `keep_freed_memory`
        ctypes.CDLL(None).malloc_trim(0)
