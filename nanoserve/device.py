"""Which device and which operators run the model: what the user asked for, and what is available.

    asked            found                            becomes
    device="auto"    a GPU that torch can use         "cuda", else "cpu"
    dtype="auto"     a GPU without bfloat16           float16, or float32 where that overflows
    kernels="auto"   a GPU from 7.5 on, and triton    "triton"
                     another GPU, or a kernel fails   "torch", the specification itself
                     a CPU and a compiler             "cpu", the compiled backend
                     a CPU without a compiler         "torch", which is slower

Invariant: a slow path is never silent. A slower choice that the user left open is reported on
standard error; a choice that the user made and the machine lacks is an error with the remedy.
"""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch

from nanoserve import ops
from nanoserve.config import EngineConfig
from nanoserve.model_config import ModelConfig

BFLOAT16 = (8, 0)  # the first compute capability with bfloat16
# What can take the place of a dtype, the best first, and what that costs.
COSTS = {"bfloat16": "", "float16": ", whose range is smaller", "float32": ", which is slower"}
# Text networks whose residual stream outgrows float16, as their makers or vLLM say. Gemma 3n's does
# not: only its tower for images does, which is not run.
OVERFLOW = ("gemma2", "gemma3_text", "glm4", "plamo2")


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. "cuda:1" stays as it is. Raises `ValueError` for a GPU
    that isn't there, or that torch can't use."""
    if device == "cpu":
        return "cpu"
    reason = why_unusable(device)
    if device == "auto":
        return "cpu" if reason is not None else "cuda"
    if reason is not None:
        raise ValueError(f"device={device!r}, but {reason or 'torch sees no GPU'}: use "
                         'device="cpu" or "auto"')
    return device


# What a GPU's driver leaves on a machine: Linux, and Linux within Windows.
TRACES = ("/dev/nvidiactl", "/dev/dxg")


def why_unusable(device: str) -> str | None:
    """Why torch can't use a GPU, with the remedy; "" where the machine seems to have none, None
    where torch can. device: "cuda", "cuda:1" or "auto"."""
    with warnings.catch_warnings():  # torch's, which says the same at greater length
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


def load_backend(kernels: str) -> ModuleType:
    """`ops`, or the backend that `kernels` names. A backend is imported late, because it needs a
    compiler, or triton, which exists for Linux only. Raises `ImportError` where this is missing."""
    if kernels == "triton":
        from nanoserve import triton_attention as triton_kernels
        return triton_kernels
    if kernels == "cpu":
        from nanoserve import cpu
        return cpu
    return ops


def fit_to_device(config: EngineConfig, asked: EngineConfig,
                  model: ModelConfig) -> tuple[EngineConfig, list[str]]:
    """Adapt a resolved config to this machine and to the range of its dtype; also returns a message
    for each change. Raises `ValueError` where the user asked for what isn't there."""
    said: list[str] = []
    if asked.device == "auto" and config.device == "cpu" and (reason := why_unusable("auto")):
        said.append(f"{reason}. The CPU takes its place, which is slower")
    instead, why = _dtype_that_works(config, model)
    if instead != config.dtype:
        if asked.dtype != "auto":
            raise ValueError(f'dtype="{config.dtype}", but {why}: use "{instead}"')
        said.append(f"{why}: {instead} takes its place{COSTS[instead]}")
        config = replace(config, dtype=instead)
    reason, instead = _what_is_missing(config)
    if reason and asked.kernels != "auto":
        raise ValueError(f"kernels={asked.kernels!r}, but {reason}: install what is missing, or "
                         f"use kernels={instead!r}")
    if reason:
        said.append(f"{shorten(reason, 500)}. kernels={instead!r} takes its place, which is slower")
        config = replace(config, kernels=instead)
    return config, said


def _dtype_that_works(config: EngineConfig, model: ModelConfig) -> tuple[str, str]:
    """The dtype itself, or the best one that this network and this device can use, and why."""
    if config.dtype == "float32":
        return "float32", ""
    reasons = {}
    if model.text_type in OVERFLOW:
        reasons["float16"] = (f"the numbers of {model.architecture} overflow in float16, which "
                              "ends at 65,504")
    if config.on_gpu and torch.cuda.get_device_capability(config.device) < BFLOAT16:
        reasons["bfloat16"] = f"{torch.cuda.get_device_name(config.device)} has no bfloat16"
    dtypes = [config.dtype, *COSTS]
    return next(dtype for dtype in dtypes if dtype not in reasons), " and ".join(reasons.values())


def _what_is_missing(config: EngineConfig) -> tuple[str, str]:
    """Why `config.kernels` can't run here, and what can; "" if they can."""
    if config.kernels == "cpu":
        if config.on_gpu:
            return "these kernels are for CPUs and the device is a GPU", "triton"
        try:
            load_backend("cpu")
        except ImportError as error:
            return str(error), "torch"
    if config.kernels != "triton":
        return "", ""
    try:
        interpreted = load_backend("triton").INTERPRETED
    except ImportError as error:
        return f"triton can't be imported ({error})", "torch"
    if config.on_gpu and interpreted:
        return ("TRITON_INTERPRET is set, with which kernels run in Python and not on the GPU, and "
                "no graph can be recorded (unset it)"), "torch"
    if not config.on_gpu and not interpreted:
        return ("there is no GPU (the environment variable TRITON_INTERPRET=1, set from the start, "
                "runs them slowly in Python)"), "cpu"
    if config.on_gpu and torch.cuda.get_device_capability(config.device) < (7, 5):
        name = torch.cuda.get_device_name(config.device)
        return f"{name} is older than compute capability 7.5", "torch"
    return (first_kernel(config.device) if config.on_gpu else ""), "torch"


def first_kernel(device: str) -> str:
    """Launch and compare one tiny kernel: Triton builds its launcher at the first launch, which
    takes more than an import. Returns why that fails, with the remedy, or ""."""
    x, weight = torch.linspace(-1, 1, 64).view(2, 32), torch.linspace(0, 2, 32)
    try:
        with torch.cuda.device(device):
            got = load_backend("triton").rms_norm(x.to(device), weight.to(device), 1e-6).cpu()
    except Exception as error:  # a compiler's, Triton's or the driver's
        why = f"{type(error).__name__}: {shorten(str(error), 200)}"
        return (f"Triton can't launch a kernel ({why}; it needs a C compiler, Python's headers and "
                "the driver's libcuda.so.1: on Debian and Ubuntu apt install build-essential "
                "python3-dev)")
    if not torch.allclose(got, ops.rms_norm(x, weight, 1e-6), atol=1e-5):
        return "Triton's first kernel gives wrong numbers here (another version may not)"
    return ""


def describe(config: EngineConfig, runner: Any, num_blocks: int, network: str = "nanoserve",
             notes: tuple[str, ...] = ()) -> str:
    """The start-up line: on what, how, and with how much memory. A slow path is never silent.
    runner: the engine's `ModelRunner`. network: whose it is. notes: what extras say of the weights.
    """
    c, device = config, "cpu (Triton's interpreter, very slow)"
    if runner.device.type == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(runner.device)})"
    elif c.kernels == "cpu":
        device = f"cpu ({load_backend('cpu').multiplies(getattr(torch, c.dtype))})"
    elif c.kernels != "triton":
        device = "cpu"
    ranks = f" on {runner.ranks.size} ranks" if runner.ranks.size > 1 else ""
    graphs = f"graphs up to {c.max_num_seqs}" if runner.graphs else "no graphs"
    pools = f", {runner.pooler}" if runner.pooler else ""
    reserved = " reserved, used as it fills" if c.kernels == "cpu" else ""
    stored = "" if c.kv_cache_dtype == "auto" else f" in {c.kv_cache_dtype}"
    if runner.unrounded:
        reserved += (f" ({len(runner.unrounded)} of {len(runner.kv_shapes)} layers in {c.dtype}: "
                     "their biases are too large for 8 bits)")
    dtype = ", ".join([c.dtype, *notes])
    architecture = runner.model_config.architecture
    return (f"{Path(c.model).name}: {architecture} by {network}, {device}, {dtype}{ranks}, "
            f"{c.kernels} attention, {graphs}{pools} | "
            f"KV cache {num_blocks:,} blocks of {c.block_size} = "
            f"{num_blocks * c.block_size:,} tokens, "
            f"{num_blocks * runner.block_bytes / 2 ** 20:,.0f} MB{stored}{reserved} | "
            f"max_model_len {c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
            f"{c.max_num_seqs} sequences a step, overlap {int(c.async_scheduling)}")
