"""Which device and which operators run the model: what the user asked for, and what is available.

    asked            found                            becomes
    device="auto"    a GPU that torch sees            "cuda", else "cpu"
    dtype="auto"     a GPU without bfloat16           float16
    kernels="auto"   a GPU from 8.0 on, and triton    "triton"
                     another GPU, or no triton        "torch", the specification itself
                     a CPU and a compiler             "cpu", the compiled twin
                     a CPU without a compiler         "torch", which is slower

Invariant: a slow path is never silent. A slower choice that the user left open is reported on
standard error; a choice that the user made and the machine lacks is an error with the remedy.

Not known here: models, memory (`describe` asks the runner).
"""

from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch

from nanoserve import ops
from nanoserve.config import EngineConfig


def pick_device(device: str) -> str:
    """ "auto" is the GPU if there is one. Raises `ValueError` for a GPU that isn't there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", but torch sees no GPU: use device="cpu" or "auto"')
    return device


def namespace(kernels: str) -> ModuleType:
    """`ops`, or the twin of it that `kernels` names. A twin is imported late, because it needs a
    compiler, or triton, which exists for Linux only. Raises `ImportError` where this is missing."""
    if kernels == "triton":
        from nanoserve.device import kernels as triton_kernels
        return triton_kernels
    if kernels == "cpu":
        from nanoserve.device import cpu
        return cpu
    return ops


def fit_to_device(config: EngineConfig, asked: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """Adapt a resolved config to this machine; also returns a message for each change. Raises
    `ValueError` where the user asked for what isn't there."""
    said: list[str] = []
    if config.device == "cuda" and config.dtype == "bfloat16" and (
            not torch.cuda.is_bf16_supported(including_emulation=False)):
        name = torch.cuda.get_device_name()
        if asked.dtype != "auto":
            raise ValueError(f'dtype="bfloat16", but {name} has no bfloat16: use "float16"')
        said.append(f"{name} has no bfloat16: float16 takes its place, whose range is smaller")
        config = replace(config, dtype="float16")
    reason, instead = _what_is_missing(config)
    if reason and asked.kernels != "auto":
        raise ValueError(f"kernels={asked.kernels!r}, but {reason}: install what is missing, or "
                         f"use kernels={instead!r}")
    if reason:
        said.append(f"{shorten(reason, 300)}. kernels={instead!r} takes its place, which is slower")
        config = replace(config, kernels=instead)
    return config, said


def _what_is_missing(config: EngineConfig) -> tuple[str, str]:
    """Why `config.kernels` can't run here, and what can; "" if they can."""
    on_gpu = config.device == "cuda"
    if config.kernels == "cpu":
        if on_gpu:
            return "these kernels are for CPUs and the device is a GPU", "triton"
        try:
            namespace("cpu")
        except ImportError as error:
            return str(error), "torch"
    if config.kernels != "triton":
        return "", ""
    try:
        interpreted = namespace("triton").INTERPRETED
    except ImportError as error:
        return f"triton can't be imported ({error})", "torch"
    if on_gpu and interpreted:
        return ("TRITON_INTERPRET is set, with which kernels run in Python and not on the GPU, and "
                "no graph can be recorded (unset it)"), "torch"
    if not on_gpu and not interpreted:
        return ("there is no GPU (the environment variable TRITON_INTERPRET=1, set from the start, "
                "runs them slowly in Python)"), "cpu"
    if on_gpu and torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0", "torch"
    return "", ""


def describe(config: EngineConfig, architecture: str, runner: Any, num_blocks: int) -> str:
    """The start-up line: on what, how, and with how much memory. A slow path is never silent.
    runner: the engine's `ModelRunner`."""
    c, device = config, "cpu (Triton's interpreter, very slow)"
    if runner.device.type == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(runner.device)})"
    elif c.kernels != "triton":
        device = "cpu"
    ranks = f" on {runner.ranks.size} ranks" if runner.ranks.size > 1 else ""
    graphs = f"graphs up to {c.max_num_seqs}" if runner.graphs else "no graphs"
    pools = f", {runner.pooler}" if runner.pooler else ""
    text = ", text only" if runner.model_config.has_towers else ""
    if text and runner.model.left_out:
        text += f", {runner.model.left_out / 1e9:.2g} GB of towers left out"
    reserved = " reserved, used as it fills" if c.kernels == "cpu" else ""
    stored = "" if c.kv_cache_dtype == "auto" else f" in {c.kv_cache_dtype}"
    dtype = c.dtype if c.quantization is None else f"{c.dtype}, quantization={c.quantization!r}"
    return (f"{Path(c.model).name}: {architecture} by {c.model_impl}, {device}, {dtype}{ranks}, "
            f"{c.kernels} attention, {graphs}{pools}{text} | "
            f"KV cache {num_blocks:,} blocks of {c.block_size} = "
            f"{num_blocks * c.block_size:,} tokens, "
            f"{num_blocks * runner.block_bytes / 2 ** 20:,.0f} MB{stored}{reserved} | "
            f"max_model_len {c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
            f"{c.max_num_seqs} sequences a step, overlap {int(c.async_scheduling)}")
