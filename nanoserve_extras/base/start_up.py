"""The line at the start in full: on what an engine runs, how, and with how much memory."""

from pathlib import Path

import torch

from nanoserve.config import EngineConfig
from nanoserve.self_test import load_backend
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner


def describe(plan: Plan, config: EngineConfig, runner: Runner, num_blocks: int) -> str:
    """config: the engine's own, behind the plan's. A slow path is never silent."""
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
    dtype = ", ".join([c.dtype, *plan.notes])
    architecture = runner.model_config.architecture
    return (f"{Path(c.model).name}: {architecture} by {plan.network}, {device}, {dtype}{ranks}, "
            f"{c.kernels} attention, {graphs}{pools} | "
            f"KV cache {num_blocks:,} blocks of {c.block_size} = "
            f"{num_blocks * c.block_size:,} tokens, "
            f"{num_blocks * runner.block_bytes / 2 ** 20:,.0f} MB{stored}{reserved} | "
            f"max_model_len {c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
            f"{c.max_num_seqs} sequences a step, overlap {int(c.async_scheduling)}")
