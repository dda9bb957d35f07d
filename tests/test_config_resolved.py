"""What is left open becomes what suits a device and a model, and what can't be is refused."""

import dataclasses

import pytest
from config_files import small_llama

from nanoserve.config import EngineConfig

pytestmark = pytest.mark.floor


def resolved(device="cpu", **options) -> EngineConfig:
    return EngineConfig(model="none", **options).resolved(device, small_llama())


@pytest.mark.parametrize("device, options, num_tokens, num_seqs", [
    ("cpu", {}, 2048, 64),
    ("cuda", {}, 8192, 256),
    # An explicit budget pulls the number of sequences down with it ...
    ("cpu", dict(max_num_batched_tokens=1), 1, 1),
    ("cuda", dict(max_num_batched_tokens=100), 100, 100),
    ("cuda", dict(max_num_batched_tokens=300), 300, 256),
    # ... and an explicit number of sequences the budget up.
    ("cpu", dict(max_num_seqs=5000), 5000, 5000),
    ("cpu", dict(max_num_seqs=3), 2048, 3),
    ("cpu", dict(max_num_batched_tokens=7, max_num_seqs=7), 7, 7),
])
def test_budget_and_sequences_by_default(device, options, num_tokens, num_seqs):
    config = resolved(device, **options)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (num_tokens, num_seqs)
    assert config.device == device


def test_resolved_leaves_only_memory_and_files_open():
    config = resolved(dtype="auto")
    open_choices = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    assert open_choices == {"tokenizer", "hf_overrides", "kv_cache_memory_bytes",
                            "num_gpu_blocks_override", "revision"}
    assert (config.max_model_len, config.dtype) == (256, "float32")
    assert config.async_scheduling is False
    assert resolved(dtype="float16", async_scheduling=True).dtype == "float16"


def test_whole_prompts_need_a_step_that_holds_them():
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    long = small_llama(max_position_embeddings=3000)
    config = EngineConfig(model="none", enable_chunked_prefill=False).resolved("cpu", long)
    assert config.max_num_batched_tokens == 3000
    with pytest.raises(ValueError, match="enable_chunked_prefill=False.*max_num_batched_tokens=100"
                                         ".*max_model_len=256"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=100)


@pytest.mark.parametrize("device, kernels, expected", [
    ("cuda", "auto", "triton"), ("cpu", "auto", "cpu"), ("cuda", "torch", "torch"),
    ("cpu", "triton", "triton")])
def test_a_gpu_gets_kernels_and_overlap_unless_told_otherwise(device, kernels, expected):
    config = small_llama()
    resolved = EngineConfig(model="none", kernels=kernels).resolved(device, config)
    assert (resolved.kernels, resolved.async_scheduling) == (expected, device == "cuda")
    told = EngineConfig(model="none", async_scheduling=device == "cpu").resolved(device, config)
    assert told.async_scheduling == (device == "cpu")


def test_experts_that_are_not_there_can_not_be_shared_out():
    asked = EngineConfig(model="none", expert_parallel=True)
    with pytest.raises(ValueError, match="expert_parallel=True.*LlamaForCausalLM"):
        asked.resolved("cpu", small_llama())
    assert asked.resolved("cpu", small_llama(moe_layers=(True, True))).expert_parallel
