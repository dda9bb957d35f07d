"""Descriptions of an engine: one line at start-up, and the full `LLM.describe()`.

Invariant: the line at start-up always names a slow path and reduced precision.
"""

from pathlib import Path
from textwrap import shorten

import torch

from nanoserve.config import EngineConfig
from nanoserve.self_test import load_backend
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner

LONGEST = 109  # characters behind "nanoserve: ": fits into a terminal of 120 columns


def greet(plan: Plan, config: EngineConfig, runner: Runner, num_blocks: int) -> str:
    """The line at start-up. config: the engine's settled options. What does not fit is in
    `LLM.describe()`."""
    kernels = "" if config.kernels in ("cpu", "triton") else f"kernels={config.kernels!r}"
    graphs = "no graphs" if config.on_gpu and not runner.graphs else ""
    ranks = f"{runner.ranks.size} ranks" if runner.ranks.size > 1 else ""
    pools = str(runner.pooler) if runner.pooler else ""
    whose = "" if plan.network == "nanoserve" else f"{plan.network}' network"
    small = "" if config.kv_cache_dtype == "auto" else f"{config.kv_cache_dtype} keys and values"
    parts = [shorten(Path(config.model).name, 32, placeholder="..."), whose,
             device_of(config, runner), config.dtype, *plan.notes, small, kernels, graphs, ranks,
             pools, f"a KV cache of {num_blocks * config.block_size:,} tokens",
             f"max_model_len {config.max_model_len:,}"]
    line = ""
    for part in filter(None, parts):
        if len(longer := f"{line}, {part}" if line else part) <= LONGEST:
            line = longer
    return line


def device_of(config: EngineConfig, runner: Runner) -> str:
    if runner.device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(runner.device)})"
    if config.kernels == "cpu":
        return f"cpu ({load_backend('cpu').multiplies(getattr(torch, config.dtype))})"
    return "cpu (Triton's interpreter, very slow)" if config.kernels == "triton" else "cpu"


def describe(plan: Plan, config: EngineConfig, runner: Runner, num_blocks: int) -> str:
    """The full description."""
    c = config
    ranks = f" on {runner.ranks.size} ranks" if runner.ranks.size > 1 else ""
    graphs = f"graphs up to {c.max_num_seqs}" if runner.graphs else "no graphs"
    pools = f", {runner.pooler}" if runner.pooler else ""
    stored = "" if c.kv_cache_dtype == "auto" else f" in {c.kv_cache_dtype}"
    reserved = " reserved, used as it fills" if c.kernels == "cpu" else ""
    if runner.unrounded:
        reserved += (f" ({len(runner.unrounded)} of {len(runner.kv_shapes)} layers in {c.dtype}: "
                     "their biases are too large for 8 bits)")
    dtype = ", ".join([c.dtype, *plan.notes])
    architecture = runner.model_config.architecture
    return (f"{Path(c.model).name}: {architecture} by {plan.network}, {device_of(c, runner)}, "
            f"{dtype}{ranks}, {c.kernels} attention, {graphs}{pools} | "
            f"KV cache {num_blocks:,} blocks of {c.block_size} = "
            f"{num_blocks * c.block_size:,} tokens, "
            f"{num_blocks * runner.block_bytes / 2 ** 20:,.0f} MB{stored}{reserved} | "
            f"max_model_len {c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
            f"{c.max_num_seqs} sequences a step, overlap {int(c.async_scheduling)}")
