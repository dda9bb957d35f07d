"""What the engine decides where the user left it open, for a device and a model.

    asked                            a CPU          a GPU
    max_num_batched_tokens=None      2048           8192          tokens a step
    max_num_seqs=None                64             256           at the same time
    async_scheduling=None            False          True          on a CPU: True with stages
    kernels="auto"                   "cpu"          "triton"      if there are any: device.py
    dtype, max_model_len             the checkpoint's own

A GPU wants large steps to stay busy; a CPU is busy with few tokens, and small steps keep the time
between two tokens short.

Invariant: the config that was asked for stays as it is; the one that is returned has no open
choice but what is measured later (the KV cache's size) or is switched off by `None`. A choice that
this model can't follow raises a `ValueError` that names the remedy.

What the machine has is looked up in device.py and self_test.py.
"""

from dataclasses import replace

from nanoserve.config import EngineConfig
from nanoserve.model_config import ModelConfig
from nanoserve.rules import DTYPES


def resolve(asked: EngineConfig, device: str, model_config: ModelConfig,
            generates: bool = True) -> EngineConfig:
    """A copy in which open options have values, for `device` "cpu", "cuda" or "cuda:1". generates:
    whether requests write text.

    An explicit budget pulls the number of sequences down with it rather than being an error:
    `max_num_batched_tokens=1` alone runs one sequence.
    """
    max_model_len = asked.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} is above the model's own maximum of "
            f"{model_config.max_position_embeddings} (max_position_embeddings): lower it, or "
            "override max_position_embeddings with hf_overrides if the model was trained so")
    on_gpu = device != "cpu"
    default_tokens, default_seqs = (8192, 256) if on_gpu else (2048, 64)
    num_tokens = asked.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = max(default_tokens, asked.max_num_seqs or 0)
        if not asked.enable_chunked_prefill:
            num_tokens = max(num_tokens, max_model_len)
    if not asked.enable_chunked_prefill and num_tokens < max_model_len:
        raise ValueError(
            f"enable_chunked_prefill=False needs a step that holds the longest prompt: raise "
            f"max_num_batched_tokens={num_tokens} to at least max_model_len={max_model_len}, "
            "or lower max_model_len")
    num_seqs = asked.max_num_seqs or min(default_seqs, num_tokens)
    dtype = model_config.dtype if asked.dtype == "auto" else asked.dtype
    if dtype not in DTYPES[1:]:
        raise ValueError(f"config.json: dtype={dtype!r} is not supported: choose one of "
                         f"{', '.join(DTYPES[1:])} with the option dtype")
    if asked.expert_parallel and not any(model_config.moe_layers):
        raise ValueError(f"expert_parallel=True, but {model_config.architecture} has no "
                         "experts: leave it out")
    if generates and not model_config.has_lm_head:
        raise ValueError(f"runner='generate', but {model_config.architecture} has no LM head: use "
                         "runner='pooling', or a ...ForCausalLM checkpoint")
    if generates and max_model_len < 2:
        raise ValueError("max_model_len=1 leaves no room for an answer behind a prompt: raise "
                         "it, and the model's max_position_embeddings if that is 1, too")
    kernels = asked.kernels if asked.kernels != "auto" else "triton" if on_gpu else "cpu"
    overlap = asked.async_scheduling
    if overlap is None:  # stages that share out matrices, too, take one step at a time
        overlap = on_gpu or asked.tensor_parallel_size == 1 < asked.pipeline_parallel_size
    return replace(
        asked, device=device, max_model_len=max_model_len, max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs, dtype=dtype, kernels=kernels, async_scheduling=overlap)
